"""The values that cross a connection: hello and welcome, errors, and the values of calls as
MessagePack.

The node and all clients share it, including clients without an event loop. No I/O; docs/protocol.md
describes it.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Self, get_origin

import msgspec
import pyarrow as pa

from wal.errors import ProtocolError, StreamingNodeError, TooLarge
from wal.position import MessageId, message_id_kind

VERSIONS = (1,)
"""Versions of the protocol that this release supports; the highest version that both sides support
is used.
"""
TABLE_BYTES_MAX = 2 << 30
"""The largest snapshot that crosses a connection in one piece."""
DETAIL_MAX = 4_096
"""The number of characters of an error's text that cross."""


class Hello(msgspec.Struct, frozen=True):
    """The first frame of a client. `client_id` is its producer id and stays the same over its
    connections.

    `connection` numbers its connections from 1 on, so that a late hello cannot replace a newer
    connection; 0 for a client that does not number them.
    """

    versions: tuple[int, ...]
    client_id: int
    name: str = ""
    token: str = ""
    connection: int = 0


class Welcome(msgspec.Struct, frozen=True):
    """The node's answer to a hello: its identity, settings and limits."""

    version: int
    node_id: str
    path: str | None
    wal_name: str
    write_bytes_max: int
    """The number of bytes of frames of writes that may be unanswered."""
    settings: dict[str, Any]
    memory: int = 0
    """Identifies the node's memory of the client's changes: another number means a new, empty
    memory.
    """


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
        case Callable():  # a progress callback is not sent
            return None
        case _:
            raise NotImplementedError(f"{type(value).__name__} does not cross a connection")


def _decode_other(kind: Any, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    if get_origin(kind) is Callable:
        return _no_progress
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


def _no_progress(*_step: object) -> None:
    """Do nothing, in place of a callback of the other side."""


encode = msgspec.msgpack.Encoder(enc_hook=_encode_other).encode
"""Encode a value as bytes."""


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_other)


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """Decode a value of a type. Raises `ProtocolError` for other bytes."""
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a value does not decode: {error}") from error


# --- errors ---------------------------------------------------------------------------------------


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """An error that crosses a connection: the code of its class, its text, whether to retry, and
    its typed fields.
    """

    code: str
    text: str
    retryable: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return an error in its form for the other side. For an error outside this system, send
        only its type, not its content.
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
        """Return the error as an object of its class; an unknown class becomes a
        `StreamingNodeError` with its code and text.
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
        # sets only the instance, so a field of any name cannot change the class
        vars(error).update(self.fields | unknown)
        return error


def _classes(kind: type[StreamingNodeError]) -> Iterator[type[StreamingNodeError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _classes(each)
