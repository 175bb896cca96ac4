"""Frames: what a connection between a node and its clients carries, both ways. No I/O;
`docs/protocol.md` has the picture.

A frame's length is checked before anything is kept for it, and its checksum before anything in it
is looked at: what a connection carried wrongly is never acted on, and ends it.
"""

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum, unique
from typing import Any, NamedTuple

import msgspec

from wal.codec import crc32c
from wal.errors import ProtocolError

PREFACE = b"SNWP\r\n\x1a\n"
"""What each side sends first."""
FRAME_BYTES_MAX = 8 << 20
"""Of one frame, header and all: an append group, and what is around it."""
GREETING_BYTES_MAX = 64 << 10
"""Of a frame before the two sides have agreed."""
PARTS_MAX = 64
"""Long frames of which a side may have sent a part and not the end."""
RECEIVED_BYTES = 64 << 10
"""What is received at a time; a longer frame is received into a buffer of its own."""

_FRAMED = struct.Struct("<II")
_CHECKED = struct.Struct("<QHHI")
FRAME_HEADER_BYTES = _FRAMED.size + _CHECKED.size


@unique
class FrameKind(IntEnum):
    """What a frame says. Numbers are for ever, also 18, which an earlier release used; kinds that a
    side does not know are skipped.
    """

    HELLO = 1
    WELCOME = 2
    CALL = 3
    REPLY = 4
    ERROR = 5
    CANCEL = 6
    WRITES = 7
    RESULTS = 8
    OPENED = 9
    MESSAGES = 10
    CREDIT = 11
    PING = 12
    PONG = 13
    END = 14
    LEAVING = 15
    PART = 16
    CATALOG = 17
    SETTLED = 19


class Frame(NamedTuple):
    """One frame, checked: `number` is that of its call or stream, 0 for the connection's own;
    `meta` is not decoded.
    """

    kind: int
    number: int
    meta: bytes
    payload: bytes | memoryview

    def value(self, kind: type[Any] = object) -> Any:
        """Return the meta decoded as a type. Raises `ProtocolError` for another value."""
        try:
            return msgspec.msgpack.decode(self.meta, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a frame of kind {self.kind} does not decode: {error}") from error


def encode_frame(
    kind: int, number: int, meta: object = None, *payload: bytes | memoryview
) -> list[bytes | memoryview]:
    """Return the bytes of a frame in parts, for `writelines`; the payload, of any parts itself, is
    not copied.

    Raises `ProtocolError` if it is too long.
    """
    encoded = b"" if meta is None else msgspec.msgpack.encode(meta)
    length = len(encoded) + sum(map(len, payload))
    if FRAME_HEADER_BYTES + length > FRAME_BYTES_MAX:
        raise ProtocolError(
            f"a frame of {length} bytes does not fit {FRAME_BYTES_MAX} — send less at a time"
        )
    checked = _CHECKED.pack(number, kind, 0, len(encoded)) + encoded
    checksum = crc32c(checked)
    for part in payload:
        checksum = crc32c(part, checksum)
    return [_FRAMED.pack(length, checksum) + checked, *filter(len, payload)]


class FrameReader:
    """Makes frames of what a connection received, in whatever pieces it comes. Holds at most one
    frame that is not whole.

    `room` is where the next bytes go, and `received` says how many came: so those of a long frame
    are received where they stay, and nobody copies them; `allocate` makes a buffer for one, of
    bytes that need not be zeros.
    """

    def __init__(
        self,
        frame_bytes_max: int = GREETING_BYTES_MAX,
        *,
        allocate: Callable[[int], Any] = bytearray,
    ) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._allocate = allocate
        """The bound is to be raised when both sides have agreed."""
        self.held_bytes = 0
        """What of a frame is there that is not whole yet."""
        self.long_bytes = 0
        """What a frame needs that is not whole and has, or gets with `room`, a buffer of its
        own.
        """
        self._buffer = memoryview(b"")
        self._has_preface = False

    def room(self) -> memoryview:
        """Return where the next bytes go, never nothing: the rest of a long frame, or room for
        several that are not.
        """
        if not self.held_bytes:
            self._buffer = memoryview(bytearray(RECEIVED_BYTES))
        elif self.long_bytes > len(self._buffer):
            whole = memoryview(self._allocate(self.long_bytes)).cast("B")
            whole[: self.held_bytes] = self._buffer[: self.held_bytes]
            self._buffer = whole
        return self._buffer[self.held_bytes :]

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Yield the frames that bytes make whole, as `received` does."""
        view = memoryview(data)
        while view:
            room = self.room()
            taken = view[: len(room)]
            view = view[len(room) :]
            room[: len(taken)] = taken
            yield from self.received(len(taken))

    def received(self, size_bytes: int) -> Iterator[Frame]:
        """Yield the frames that are whole now, to be taken all before the next call.

        Raises `ProtocolError` for a preface, a length or a checksum that is wrong; the connection
        is of no use then.
        """
        received = self._buffer[: self.held_bytes + size_bytes]
        at = 0
        wanted = FRAME_HEADER_BYTES
        try:
            if not self._has_preface:
                found = bytes(received[: len(PREFACE)])
                if not PREFACE.startswith(found):
                    raise ProtocolError(f"what came first is no part of this protocol: {found!r}")
                if len(found) < len(PREFACE):
                    return
                self._has_preface = True
                at = len(PREFACE)
            while len(received) - at >= FRAME_HEADER_BYTES:
                length, checksum = _FRAMED.unpack_from(received, at)
                if FRAME_HEADER_BYTES + length > self.frame_bytes_max:
                    raise ProtocolError(
                        f"a frame of {length} bytes, over {self.frame_bytes_max} with its header"
                    )
                end = at + FRAME_HEADER_BYTES + length
                if end > len(received):
                    wanted = end - at
                    return
                # What has a buffer of its own stays there. Others are copied out of theirs, or each
                # would keep all of it.
                whole = received[at + _FRAMED.size : end]
                whole = (
                    whole.toreadonly()
                    if len(self._buffer) > RECEIVED_BYTES
                    else memoryview(bytes(whole))
                )
                at = end
                yield _checked(whole, length, checksum)
        finally:
            rest = received[at:]
            self.held_bytes = len(rest)
            self.long_bytes = wanted if rest and wanted > RECEIVED_BYTES else 0
            if not rest:
                self._buffer = memoryview(b"")  # who is quiet holds nothing
            elif at:
                self._buffer[: len(rest)] = rest

    def drop(self) -> None:
        """Hold nothing any more: the connection is lost."""
        self._buffer = memoryview(b"")
        self.held_bytes = 0
        self.long_bytes = 0


class LongFrames:
    """Joins long frames, which come as parts. Those that are not whole have `bytes_max` together.

    With a bound of 0, which is that of a side before the hello, each part is refused.
    """

    def __init__(self, bytes_max: int = 0) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        """Bytes of the frames that are not whole."""
        self._parts: dict[int, bytearray] = {}

    def whole(self, frame: Frame) -> Frame | None:
        """Return a frame with the parts that came before it; None for a part.

        Raises `ProtocolError` for a part of nothing, of one frame or one byte too many.
        """
        if frame.kind != FrameKind.PART:
            parts = self._parts.pop(frame.number, None) if self._parts else None
            if parts is None:
                return frame
            self.held_bytes -= len(parts)
            parts += frame.payload
            return frame._replace(payload=memoryview(parts))
        if not frame.payload or len(self._parts) >= PARTS_MAX:
            raise ProtocolError(f"a part of nothing, or of over {PARTS_MAX} frames at a time")
        self.held_bytes += len(frame.payload)
        if self.held_bytes > self.bytes_max:
            raise ProtocolError(f"over {self.bytes_max} bytes of long frames that are not whole")
        self._parts.setdefault(frame.number, bytearray()).extend(frame.payload)
        return None

    def drop(self) -> None:
        """Hold nothing any more: the connection is lost."""
        self._parts.clear()
        self.held_bytes = 0


def _checked(whole: memoryview, length: int, checksum: int) -> Frame:
    """Return the frame that has these bytes behind its length and checksum. Raises
    `ProtocolError`.
    """
    if crc32c(whole) != checksum:
        raise ProtocolError("a frame fails its checksum")
    number, kind, _, meta_length = _CHECKED.unpack_from(whole)
    if meta_length > length:
        raise ProtocolError(f"a frame of {length} bytes has a meta of {meta_length}")
    payload_at = _CHECKED.size + meta_length
    return Frame(kind, number, bytes(whole[_CHECKED.size : payload_at]), whole[payload_at:])
