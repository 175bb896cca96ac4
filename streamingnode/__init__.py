"""A durable, ordered log of rows inside your Python process that becomes consistent tables in Spark.

    async with sn.open_node("data") as node:
        await node.insert("orders", [{"id": 1, "item": "tea", "amount": 3.5}])

Names are imported when they are first used: importing this package costs a few milliseconds, Arrow comes with the first
node.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scanner.deliver_policy import DeliverPolicy
    from streamingnode import config, errors, sync
    from streamingnode.bridging import bridge
    from streamingnode.channel import FlushResult
    from streamingnode.collections import Collection
    from streamingnode.config import NodeConfig, load_config
    from streamingnode.node import Node
    from streamingnode.opening import connect, open_node
    from streamingnode.read_message import ReadMessage
    from streamingnode.reader import CollectionReader
    from streamingnode.writing.producer import Producer
    from streamingnode.writing.transaction import Transaction
    from streamingnode.writing.write import WriteResult
    from wal.errors import StreamingNodeError
    from wal.headers import MessageType
    from wal.position import MessageId
    from wal.timetick import tick_to_time, time_to_tick

__all__ = [
    "Collection",
    "CollectionReader",
    "DeliverPolicy",
    "FlushResult",
    "MessageId",
    "MessageType",
    "Node",
    "NodeConfig",
    "Producer",
    "ReadMessage",
    "StreamingNodeError",
    "Transaction",
    "WriteResult",
    "bridge",
    "config",
    "connect",
    "errors",
    "load_config",
    "open_node",
    "sync",
    "tick_to_time",
    "time_to_tick",
]

_PLACES = {
    "Collection": "streamingnode.collections",
    "CollectionReader": "streamingnode.reader",
    "DeliverPolicy": "scanner.deliver_policy",
    "FlushResult": "streamingnode.channel",
    "MessageId": "wal.position",
    "MessageType": "wal.headers",
    "Node": "streamingnode.node",
    "NodeConfig": "streamingnode.config",
    "Producer": "streamingnode.writing.producer",
    "ReadMessage": "streamingnode.read_message",
    "StreamingNodeError": "wal.errors",
    "Transaction": "streamingnode.writing.transaction",
    "WriteResult": "streamingnode.writing.write",
    "bridge": "streamingnode.bridging",
    "connect": "streamingnode.opening",
    "load_config": "streamingnode.config",
    "open_node": "streamingnode.opening",
    "tick_to_time": "wal.timetick",
    "time_to_tick": "wal.timetick",
}
"""Where the names are; those of `__all__` beside them are modules."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _PLACES:
        return import_module(f"{__name__}.{name}")
    found: object = getattr(import_module(_PLACES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
