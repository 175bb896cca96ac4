"""What can be asked of a node over a connection: one table, of which server and client make
requests, replies and errors.
"""

import inspect
from collections.abc import Callable, Iterator
from enum import Enum, unique
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, get_type_hints

import msgspec
import pyarrow as pa

from scanner.deliver_policy import PlainPlace, StartingPoint
from streamingnode.backend import Backend
from streamingnode.care.findings import OnStep, no_progress
from streamingnode.collections import READ_COLLECTIONS_MAX
from streamingnode.ddl import CatalogChanges
from streamingnode.remote.topics import ClientTopics
from streamingnode.remote.writes import WireWrites
from streamingnode.streams.channels import ChannelService
from wal.append import AppendResult
from wal.errors import ProtocolError, StreamingNodeError, TooLarge
from wal.headers import MessageType
from wal.position import MessageId, message_id_kind
from wal.rocksmq.contract import MessageQueue

VERSIONS = (1,)
"""Of the protocol, that this release speaks; the highest that both sides do is taken."""
TABLE_BYTES_MAX = 2 << 30
"""Largest snapshot that goes over a connection in one piece."""
DETAIL_MAX = 4_096
"""Characters of an error's text that cross."""


# --- what is sent ---------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True):
    """What a client says first. `client_id` is its producer id, which it keeps over connections.

    `connection` counts its connections from 1 on, so that a hello that comes late replaces no newer
    one; it is 0 for a client that does not count.
    """

    versions: tuple[int, ...]
    client_id: int
    name: str = ""
    token: str = ""
    connection: int = 0


class Welcome(msgspec.Struct, frozen=True):
    """What the server answers: which node this is, with which settings and bounds, and what is in
    it.
    """

    version: int
    node_id: str
    path: str | None
    wal_name: str
    write_bytes_max: int
    """How many bytes of frames of writes may be unanswered."""
    settings: dict[str, Any]
    resumed: bool = False
    """Whether the node knows the changes that the client asked for over earlier connections."""


class TransactionCall(msgspec.Struct, frozen=True, array_like=True):
    """The begin, commit or rollback of a transaction that is sent before its commit, or bodies of
    it.
    """

    messages: Annotated[
        tuple[tuple[MessageType, str, bytes, bytes], ...], msgspec.Meta(min_length=1)
    ]
    """Of each its type, vchannel, header and payload, as the log has them."""
    txn_id: int = 0
    sequence: int = 0
    producer_id: int = 0
    epoch: int = 0
    """The stamp of a commit."""
    settled: int = 0
    """As of `WireGroup`."""


class ReadCall(msgspec.Struct, frozen=True, array_like=True):
    """A reader of a collection, or of several; `resume` is where one goes on that was open
    before.
    """

    collections: (
        int
        | Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=READ_COLLECTIONS_MAX)]
    )
    """The id, or ids."""
    start: str
    start_at: PlainPlace
    until: int | None
    reader: str | None
    types: Annotated[tuple[MessageType, ...], msgspec.Meta(max_length=len(MessageType))]
    resume: StartingPoint | None
    credit_bytes: int


class AckCall(msgspec.Struct, frozen=True, array_like=True):
    """A named reader of stream `stream` has done everything up to here."""

    stream: int
    position: int
    tick: int


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """A stream is open: where it begins, and where its named reader would resume after its last
    acknowledgement.
    """

    position: int
    tick: int
    acknowledged_position: int = 0
    acknowledged_tick: int = 0


# --- the table ------------------------------------------------------------------------------------


@unique
class Access(Enum):
    """What a client may be allowed to do; each is a right of its own."""

    CONSUME = "consume"
    PRODUCE = "produce"
    ADMIN = "admin"


class Call(NamedTuple):
    """One call: the arguments of the method of this name, and what that returns. A prefix tells
    whose method it is.

    One that `changes` something is made once, and has one reply, for each number that its client
    gives it. Others repeat freely.
    """

    name: str
    access: Access
    request: type[msgspec.Struct]
    reply: Any
    changes: bool = False
    of_collection: str = ""
    """The argument that names the collection which access is checked for; empty for the whole
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
    """Yield the calls of some methods; all but those of `CONSUME` change something, where not
    told otherwise.
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
"""Names of calls of topics and of the channel service begin so."""
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
"""By name. Writes have frames of their own."""


# --- values that are no plain data ----------------------------------------------------------------


def _encode_other(value: object) -> object:
    match value:
        case pa.Schema():
            return value.serialize().to_pybytes()
        case pa.Table():
            if value.nbytes > TABLE_BYTES_MAX:
                raise TooLarge(
                    f"a snapshot of {value.nbytes} bytes — name columns or keys, or read it with "
                    "read()"
                )
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, value.schema) as writer:
                writer.write_table(value)
            return sink.getvalue().to_pybytes()
        case Path():
            return str(value)
        case type() if issubclass(value, MessageId):
            return value.wal_name
        case range():
            return value.start, value.stop
        case Callable():  # whom a verification tells of its steps
            return None
        case _:
            raise NotImplementedError(f"{type(value).__name__} does not cross a connection")


def _decode_other(kind: Any, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    if kind == OnStep:
        return no_progress
    if kind == type[MessageId]:
        return message_id_kind(value)
    try:
        if kind is range:
            return range(*value)
        if kind is pa.Schema:
            return pa.ipc.read_schema(pa.py_buffer(value))
        if kind is pa.Table:
            return pa.ipc.open_stream(pa.py_buffer(value)).read_all()
    except (pa.ArrowInvalid, OSError, TypeError) as error:
        raise ProtocolError(f"Arrow data does not decode: {error}") from error
    raise NotImplementedError(f"{kind.__name__} does not cross a connection")


encode = msgspec.msgpack.Encoder(enc_hook=_encode_other).encode
"""Return the bytes of a value."""


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_other)


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """Return a value of a kind. Raises `ProtocolError` for what is none."""
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a value does not decode: {error}") from error


# --- errors ---------------------------------------------------------------------------------------


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """An error as it crosses: the code of its class, its text, whether to try again, and its typed
    fields.
    """

    code: str
    text: str
    retryable: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return an error for the other side; of one that is none of ours only that it happened,
        not what is in it.
        """
        if not isinstance(error, StreamingNodeError):
            return cls(
                "STREAMING_NODE_ERROR",
                f"the node failed at this call: {type(error).__name__}",
                "no",
                {},
            )
        fields = {name: value for name, value in error.fields().items() if not name.startswith("_")}
        try:
            encode(fields)
        except (TypeError, NotImplementedError, OverflowError):
            fields = {}
        return cls(error.code, str(error)[:DETAIL_MAX], error.retryable, fields)

    def error(self) -> StreamingNodeError:
        """Return the error of the same class here; of a class that is not known here, one that has
        its code and text.
        """
        kind = next(
            (each for each in _classes(StreamingNodeError) if each.code == self.code),
            StreamingNodeError,
        )
        error = kind.__new__(kind)
        Exception.__init__(error, self.text)
        unknown = (
            {"code": self.code, "retryable": self.retryable} if kind is StreamingNodeError else {}
        )
        # whatever their names are: no attribute of the class is set
        vars(error).update(self.fields | unknown)
        return error


WireResults = tuple[list[tuple[int, int, AppendResult]], list[tuple[int, int, WireError]]]
"""What became of writes, and why some are refused, behind the number of the frame and the index of
the group.
"""


def _classes(kind: type[StreamingNodeError]) -> Iterator[type[StreamingNodeError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _classes(each)
