"""A durable, ordered log of rows inside your Python process that becomes consistent tables in
Spark.

    async with sn.open_node("data") as node:
        await node.insert("orders", [{"id": 1, "item": "tea", "amount": 3.5}])

Names are imported at their first use: importing this package takes a few milliseconds, and Arrow is
loaded with the first node.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scanner.deliver_policy import DeliverPolicy as DeliverPolicy
    from streamingnode import config as config
    from streamingnode import errors as errors
    from streamingnode import sync as sync
    from streamingnode.bridging import bridge as bridge
    from streamingnode.channel import FlushResult as FlushResult
    from streamingnode.collections import Collection as Collection
    from streamingnode.config import NodeConfig as NodeConfig
    from streamingnode.config import load_config as load_config
    from streamingnode.node import Node as Node
    from streamingnode.opening import connect as connect
    from streamingnode.opening import open_node as open_node
    from streamingnode.read_message import ReadMessage as ReadMessage
    from streamingnode.reader import CollectionReader as CollectionReader
    from streamingnode.writing.producer import Producer as Producer
    from streamingnode.writing.transaction import Transaction as Transaction
    from streamingnode.writing.write import WriteResult as WriteResult
    from wal.errors import StreamingNodeError as StreamingNodeError
    from wal.headers import MessageType as MessageType
    from wal.position import MessageId as MessageId
    from wal.timetick import tick_to_time as tick_to_time
    from wal.timetick import time_to_tick as time_to_tick

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
    "config": "streamingnode.config",
    "connect": "streamingnode.opening",
    "errors": "streamingnode.errors",
    "load_config": "streamingnode.config",
    "open_node": "streamingnode.opening",
    "sync": "streamingnode.sync",
    "tick_to_time": "wal.timetick",
    "time_to_tick": "wal.timetick",
}
"""The module of each name; a module is listed under its own name."""
__all__ = list(_PLACES)


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = import_module(_PLACES[name])
    found: object = getattr(place, name, place)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
