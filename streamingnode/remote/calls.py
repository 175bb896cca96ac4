"""What can be asked of a node over a connection: one table, of which server and client make requests, replies and errors."""

import inspect
from collections.abc import Callable
from enum import Enum, unique
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, get_type_hints

import msgspec
import pyarrow as pa

from scanner.deliver_policy import PlainPlace, StartingPoint
from streamingnode.backend import Backend
from streamingnode.care.findings import Finding, Report
from streamingnode.collections import READ_COLLECTIONS_MAX
from streamingnode.ddl import CatalogChanges
from streamingnode.remote.topics import ClientTopics
from streamingnode.streams.channels import ChannelService
from wal.errors import ProtocolError, StreamingNodeError, TooLarge
from wal.headers import MessageType
from wal.rocksmq.contract import MessageQueue

VERSIONS = (1,)
"""Of the protocol, that this release speaks; the highest that both sides do is taken."""
TABLE_BYTES_MAX = 2 << 30
"""Largest snapshot that goes over a connection in one piece."""
DETAIL_MAX = 4_096
"""Characters of an error's text that cross."""


@unique
class Access(Enum):
    """What a client may be allowed to do; each is a right of its own."""

    CONSUME = "consume"
    PRODUCE = "produce"
    ADMIN = "admin"


TOPICS, CHANNELS = "mq.", "channels."
"""Names of calls of topics and of the channel service begin so."""
WireReport = tuple[list[Finding], dict[str, int], int]
"""A verification's report, without whom it told of its steps."""


class Call(NamedTuple):
    """One call: the arguments of the method of this name, and what that returns; of whose method a prefix tells.

    One that `repeats` may be sent again when the connection was lost before its answer came.
    """

    name: str
    access: Access
    repeats: bool
    request: type[msgspec.Struct]
    reply: Any
    has_timeout: bool
    of_collection: str
    """The argument that names the collection which access is checked for; empty for the whole node."""

    @property
    def changes(self) -> bool:
        """Whether it may have had an effect when nobody knows of its answer."""
        return self.access is not Access.CONSUME


def _call(name: str, access: Access, *, repeats: bool, of_collection: str = "", of: type = Backend) -> Call:
    method: Callable[..., object] = getattr(of, name.rpartition(".")[2])
    hints = get_type_hints(method)
    reply, has_timeout = hints.pop("return"), "timeout" in hints
    hints.pop("timeout", None)
    parameters = inspect.signature(method).parameters
    arguments: list[Any] = [
        (argument, hints[argument], *([] if given.default is inspect.Parameter.empty else [given.default]))
        for argument, given in parameters.items()
        if argument in hints
    ]
    request = msgspec.defstruct(f"{name.replace('.', '_')}_request", arguments, array_like=True, frozen=True)
    return Call(name, access, repeats, request, WireReport if reply is Report else reply, has_timeout, of_collection)


def _topic_call(name: str, access: Access, *, repeats: bool, of: type = MessageQueue) -> Call:
    of_collection = "topic" if "topic" in inspect.signature(getattr(of, name)).parameters else ""
    return _call(TOPICS + name, access, repeats=repeats, of_collection=of_collection, of=of)


CALLS = {
    call.name: call
    for call in (
        _call("consistent_tick", Access.CONSUME, repeats=True),
        _call("create_collection", Access.ADMIN, repeats=True, of_collection="definition", of=CatalogChanges),
        _call("drop_collection", Access.ADMIN, repeats=True, of_collection="name", of=CatalogChanges),
        _call("create_partition", Access.ADMIN, repeats=True, of_collection="collection", of=CatalogChanges),
        _call("drop_partition", Access.ADMIN, repeats=True, of_collection="collection", of=CatalogChanges),
        _call("open_producer", Access.PRODUCE, repeats=True),
        _call("put_note", Access.PRODUCE, repeats=True),
        _call("delete_producer", Access.ADMIN, repeats=False),
        _call("delete_reader", Access.ADMIN, repeats=False, of_collection="collection"),
        _call("named_readers", Access.CONSUME, repeats=True),
        _call("seek_reader", Access.ADMIN, repeats=True, of_collection="collection"),
        _call("open_transactions", Access.CONSUME, repeats=True),
        _call("abort_transaction", Access.ADMIN, repeats=False),
        _call("snapshot", Access.CONSUME, repeats=True, of_collection="collection"),
        _call("flush", Access.ADMIN, repeats=True),
        _call("back_up", Access.ADMIN, repeats=False),
        _call("verify", Access.ADMIN, repeats=True),
        _call("statistics", Access.CONSUME, repeats=True),
        _call("hand_over", Access.ADMIN, repeats=True),
        _topic_call("create_topic", Access.ADMIN, repeats=True),
        _topic_call("destroy_topic", Access.ADMIN, repeats=False),
        _topic_call("create_consumer_group", Access.ADMIN, repeats=False),
        _topic_call("destroy_consumer_group", Access.ADMIN, repeats=False),
        _topic_call("exist_consumer_group", Access.CONSUME, repeats=True),
        _topic_call("produce", Access.PRODUCE, repeats=False),
        _topic_call("ack", Access.CONSUME, repeats=True),
        _topic_call("seek", Access.CONSUME, repeats=True),
        _topic_call("force_seek", Access.CONSUME, repeats=True),
        _topic_call("seek_to_latest", Access.CONSUME, repeats=True),
        _topic_call("get_latest_msg", Access.CONSUME, repeats=True),
        _topic_call("check_topic_valid", Access.CONSUME, repeats=True),
        _topic_call("notify", Access.CONSUME, repeats=True),
        _topic_call("info", Access.CONSUME, repeats=True),
        _topic_call("register", Access.CONSUME, repeats=True, of=ClientTopics),
        _topic_call("deliver", Access.CONSUME, repeats=True, of=ClientTopics),
        _topic_call("give_back", Access.CONSUME, repeats=True, of=ClientTopics),
        _call(f"{CHANNELS}create_channels", Access.ADMIN, repeats=False, of=ChannelService),
        _call(f"{CHANNELS}destroy_channels", Access.ADMIN, repeats=False, of=ChannelService),
        _call(f"{CHANNELS}describe_channels", Access.CONSUME, repeats=True, of=ChannelService),
    )
}
"""By name. What is not here has frames of its own: writes and streams."""


# --- the frames of a connection, of writes and of streams ---------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True):
    """What a client says first. `client_id` is its producer id, which it keeps over connections."""

    versions: tuple[int, ...]
    client_id: int
    name: str = ""
    token: str = ""
    features: tuple[str, ...] = ()


class Welcome(msgspec.Struct, frozen=True):
    """What the server answers: which node this is, with which settings and bounds, and what is in it."""

    version: int
    node_id: str
    path: str | None
    wal_name: str
    write_bytes_max: int
    """How many bytes of frames of writes may be unanswered."""
    settings: dict[str, Any]
    features: tuple[str, ...] = ()


class TransactionCall(msgspec.Struct, frozen=True, array_like=True):
    """`begin`, `commit` or `rollback` of a transaction that is sent before its commit, or `bodies` of it."""

    name: ClassVar[str] = "transaction"

    step: str
    txn_id: int = 0
    keepalive_ms: int = 0
    reason: str = ""
    sequence: int = 0
    producer_id: int = 0
    epoch: int = 0
    bodies: tuple[tuple[int, str, bytes, bytes], ...] = ()
    """Of each its type, vchannel, header and payload, as the log has them."""


class ReadCall(msgspec.Struct, frozen=True, array_like=True):
    """A reader of a collection, or of several; `resume` is where one goes on that was open before."""

    name: ClassVar[str] = "read"

    collections: int | Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=READ_COLLECTIONS_MAX)]
    """The id, or ids."""
    start: str
    start_at: PlainPlace
    until: int | None
    reader: str | None
    types: Annotated[tuple[int, ...], msgspec.Meta(max_length=len(MessageType))]
    resume: StartingPoint | None
    credit_bytes: int


class AckCall(msgspec.Struct, frozen=True, array_like=True):
    """A named reader of stream `stream` has done everything up to here."""

    name: ClassVar[str] = "ack"

    stream: int
    position: int
    tick: int


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """A stream is open: where it begins, and where its named reader would resume after its last acknowledgement."""

    position: int
    tick: int
    acknowledged_position: int = 0
    acknowledged_tick: int = 0


# --- values that are no plain data ------------------------------------------------------------------------------------


def _encode_other(value: object) -> object:
    match value:
        case pa.Schema():
            return value.serialize().to_pybytes()
        case pa.Table():
            if value.nbytes > TABLE_BYTES_MAX:
                raise TooLarge(f"a snapshot of {value.nbytes} bytes — name columns or keys, or read it with read()")
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, value.schema) as writer:
                writer.write_table(value)
            return sink.getvalue().to_pybytes()
        case Path():
            return str(value)
        case range():
            return value.start, value.stop
        case _:
            pass
    raise NotImplementedError(f"{type(value).__name__} does not cross a connection")


def _decode_other(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
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


_encode = msgspec.msgpack.Encoder(enc_hook=_encode_other).encode


def encode(value: object) -> bytes:
    """Return the bytes of a value."""
    return _encode((value.findings, value.counts, value.bytes) if isinstance(value, Report) else value)


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """Return a value of a kind. Raises `ProtocolError` for what is none."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_other)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a value does not decode: {error}") from error


# --- errors -----------------------------------------------------------------------------------------------------------


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """An error as it crosses: the code of its class, its text, whether to try again, and its typed fields."""

    code: str
    text: str
    retryable: str
    fields: dict[str, Any]


def error_to_wire(error: Exception) -> WireError:
    """Return an error for the other side; of one that is none of ours only that it happened, not what is in it."""
    if not isinstance(error, StreamingNodeError):
        return WireError("STREAMING_NODE_ERROR", f"the node failed at this call: {type(error).__name__}", "no", {})
    fields = {name: value for name, value in error.fields().items() if not name.startswith("_")}
    try:
        encode(fields)
    except (TypeError, NotImplementedError, OverflowError):
        fields = {}
    return WireError(error.code, str(error)[:DETAIL_MAX], error.retryable, fields)


def error_from_wire(wire: WireError) -> StreamingNodeError:
    """Return the error of the same class here; of a class that is not known here, one that has its code and text."""
    kind = _classes().get(wire.code, StreamingNodeError)
    error = kind.__new__(kind)
    Exception.__init__(error, wire.text)
    vars(error).update(wire.fields)
    return error


def _classes() -> dict[str, type[StreamingNodeError]]:
    found, waiting = dict[str, type[StreamingNodeError]](), [StreamingNodeError]
    while waiting:
        kind = waiting.pop()
        found.setdefault(kind.code, kind)
        waiting += kind.__subclasses__()
    return found
