"""The calls that a node serves over a connection: one table from which server and client derive
requests, replies and errors.
"""

import inspect
from collections.abc import Callable, Iterator
from enum import Enum, unique
from functools import partial
from itertools import chain
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from scanner.deliver_policy import PlainPlace, StartingPoint
from streamingnode.backend import Backend
from streamingnode.collections import READ_COLLECTIONS_MAX
from streamingnode.ddl import CatalogChanges
from streamingnode.remote.topics import ClientTopics
from streamingnode.remote.writes import WireWrites
from streamingnode.streams.channels import ChannelService
from wal.append import AppendResult
from wal.headers import MessageType
from wal.rocksmq.contract import MessageQueue
from wal.wire_types import WireError

# --- what is sent ---------------------------------------------------------------------------------


class TransactionCall(msgspec.Struct, frozen=True, array_like=True):
    """A begin, commit or rollback, or bodies, of a transaction whose rows are sent before its
    commit.
    """

    messages: Annotated[
        tuple[tuple[MessageType, str, bytes, bytes], ...], msgspec.Meta(min_length=1)
    ]
    """The type, vchannel, header and payload of each message, encoded as in the log."""
    txn_id: int = 0
    sequence: int = 0
    producer_id: int = 0
    epoch: int = 0
    """`sequence`, `producer_id` and `epoch` are the stamp of a commit."""
    settled: int = 0
    """See `WireGroup`."""


class ReadCall(msgspec.Struct, frozen=True, array_like=True):
    """Opens a reader of one or several collections; a reader that was open before continues at
    `resume`.
    """

    collections: (
        int
        | Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=READ_COLLECTIONS_MAX)]
    )
    """The id or ids of the collections."""
    start: str
    start_at: PlainPlace
    until: int | None
    reader: str | None
    types: Annotated[tuple[MessageType, ...], msgspec.Meta(max_length=len(MessageType))]
    resume: StartingPoint | None
    credit_bytes: int


class AckCall(msgspec.Struct, frozen=True, array_like=True):
    """Acknowledges everything up to a position for the named reader of `stream`."""

    stream: int
    position: int
    tick: int


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """The reply that a stream is open: where it begins, and where its named reader would resume
    after its last acknowledgement.
    """

    position: int
    tick: int
    acknowledged_position: int = 0
    acknowledged_tick: int = 0


WireResults = tuple[list[tuple[int, int, AppendResult]], list[tuple[int, int, WireError]]]
"""Results and errors of writes; each follows the number of its frame and the index of its group."""


# --- the table ------------------------------------------------------------------------------------


@unique
class Access(Enum):
    """The kinds of access that a client may have; each is a separate right."""

    CONSUME = "consume"
    PRODUCE = "produce"
    ADMIN = "admin"


class Call(NamedTuple):
    """One call: the method of this name with its arguments and its return type. A prefix names the
    object that has the method.

    A call that `changes` something is made once for each number, which the client assigns, and has
    one reply. Other calls may be repeated freely.
    """

    name: str
    access: Access
    request: type[msgspec.Struct]
    reply: Any
    changes: bool = False
    of_collection: str = ""
    """The argument with the collection whose access is checked; empty to check access to the whole
    node.
    """


def _calls(
    of: type,
    access: Access,
    names: str,
    *,
    prefix: str = "",
    changes: bool | None = None,
    collection: str = "collection",
) -> Iterator[Call]:
    """Yield the calls of the named methods of a class. By default, all calls except those of
    `CONSUME` change something.
    """
    if changes is None:
        changes = access is not Access.CONSUME
    for name in names.split():
        method: Callable[..., object] = getattr(of, name)
        hints = get_type_hints(method)
        arguments: list[Any] = [
            (
                argument,
                hints[argument],
                *([] if given.default is inspect.Parameter.empty else [given.default]),
            )
            for argument, given in inspect.signature(method).parameters.items()
            if argument != "self"
        ]
        request = msgspec.defstruct(f"{name}_request", arguments, array_like=True, frozen=True)
        of_collection = collection if collection in request.__struct_fields__ else ""
        yield Call(prefix + name, access, request, hints["return"], changes, of_collection)


TOPICS = "mq."
CHANNELS = "channels."
"""Prefixes of the calls of topics and of the channel service."""
_topic_calls = partial(_calls, prefix=TOPICS, collection="topic")
_channel_calls = partial(_calls, ChannelService, prefix=CHANNELS)

READ = Call("read", Access.CONSUME, ReadCall, Opened)
ACK = Call("ack", Access.CONSUME, AckCall, None)
TRANSACTION = Call("transaction", Access.PRODUCE, TransactionCall, AppendResult, changes=True)
WRITE = Call("a write", Access.PRODUCE, WireWrites, AppendResult, changes=True)
CALLS = {
    call.name: call
    for call in chain(
        (READ, ACK, TRANSACTION),
        _calls(
            Backend,
            Access.CONSUME,
            "consistent_tick named_readers open_transactions snapshot statistics",
        ),
        _calls(Backend, Access.PRODUCE, "open_producer put_note"),
        _calls(CatalogChanges, Access.ADMIN, "create_collection", collection="definition"),
        _calls(CatalogChanges, Access.ADMIN, "drop_collection", collection="name"),
        _calls(CatalogChanges, Access.ADMIN, "create_partition drop_partition"),
        _calls(Backend, Access.ADMIN, "flush verify hand_over", changes=False),
        _calls(
            Backend,
            Access.ADMIN,
            "seek_reader delete_producer delete_reader abort_transaction back_up",
        ),
        _topic_calls(
            MessageQueue, Access.CONSUME, "exist_consumer_group ack seek force_seek seek_to_latest"
        ),
        _topic_calls(
            MessageQueue, Access.CONSUME, "get_latest_msg get_message check_topic_valid notify info"
        ),
        _topic_calls(ClientTopics, Access.CONSUME, "register deliver held give_back"),
        _topic_calls(MessageQueue, Access.PRODUCE, "produce"),
        _topic_calls(MessageQueue, Access.ADMIN, "create_topic destroy_topic"),
        _topic_calls(MessageQueue, Access.ADMIN, "create_consumer_group destroy_consumer_group"),
        _channel_calls(Access.CONSUME, "describe_channels"),
        _channel_calls(Access.ADMIN, "create_channels destroy_channels"),
    )
}
"""Calls by name. Writes are not among them: they have their own frames."""
