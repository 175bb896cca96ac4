"""Frames: the unit that a node and its clients exchange in both directions. No I/O;
`docs/protocol.md` has the layout.

The length of a frame is checked before memory is allocated for it, and its checksum before its
content is used. Damaged data has no effect and ends the connection.
"""

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum, unique
from typing import Any, NamedTuple

import msgspec

from wal.codec import crc32c
from wal.errors import ProtocolError

PREFACE = b"SNWP\r\n\x1a\n"
"""The first bytes that each side sends."""
FRAME_BYTES_MAX = 8 << 20
"""The limit of one frame with its header: an append group and its overhead fit."""
GREETING_BYTES_MAX = 64 << 10
"""The limit of a frame before the handshake is done."""
PARTS_MAX = 64
"""The number of incomplete long frames that a side may have sent."""
RECEIVED_BYTES = 64 << 10
"""The size of the receive buffer; a longer frame is received into its own buffer."""

_FRAMED = struct.Struct("<II")
_CHECKED = struct.Struct("<QHHI")
FRAME_HEADER_BYTES = _FRAMED.size + _CHECKED.size


@unique
class FrameKind(IntEnum):
    """The kind of a frame. Numbers never change and are never reused, including 18 of an earlier
    release. A side skips unknown kinds.
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
    """One checked frame. `number` is that of its call or stream, 0 for the connection itself;
    `meta` is still encoded.
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
    """Return the bytes of a frame in parts, for `writelines`; the parts of the payload are not
    copied.

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
    """Decodes frames from received bytes in pieces of any size. Holds at most one incomplete frame.

    `room` returns the buffer for the next bytes, and `received` takes the number of bytes received
    into it. So a long frame is received in place without a copy. `allocate` makes the buffer of a
    long frame; it need not be zeroed.
    """

    def __init__(
        self,
        frame_bytes_max: int = GREETING_BYTES_MAX,
        *,
        allocate: Callable[[int], Any] = bytearray,
    ) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._allocate = allocate
        """Raise `frame_bytes_max` after the handshake."""
        self.held_bytes = 0
        """The received bytes of an incomplete frame."""
        self.long_bytes = 0
        """The size of an incomplete frame that has its own buffer, or gets one with `room`; 0 for
        none.
        """
        self._buffer = memoryview(b"")
        self._has_preface = False

    def room(self) -> memoryview:
        """Return the buffer for the next bytes, which is never empty: the rest of a long frame, or
        space for several short ones.
        """
        if not self.held_bytes:
            self._buffer = memoryview(bytearray(RECEIVED_BYTES))
        elif self.long_bytes > len(self._buffer):
            whole = memoryview(self._allocate(self.long_bytes)).cast("B")
            whole[: self.held_bytes] = self._buffer[: self.held_bytes]
            self._buffer = whole
        return self._buffer[self.held_bytes :]

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Yield the frames that these bytes complete, like `received`."""
        view = memoryview(data)
        while view:
            room = self.room()
            taken = view[: len(room)]
            view = view[len(room) :]
            room[: len(taken)] = taken
            yield from self.received(len(taken))

    def received(self, size_bytes: int) -> Iterator[Frame]:
        """Yield the frames that are complete now; consume them all before the next call.

        Raises `ProtocolError` for a wrong preface, length or checksum; the connection must then be
        closed.
        """
        received = self._buffer[: self.held_bytes + size_bytes]
        at = 0
        wanted = FRAME_HEADER_BYTES
        try:
            if not self._has_preface:
                found = bytes(received[: len(PREFACE)])
                if not PREFACE.startswith(found):
                    raise ProtocolError(f"the first bytes are no part of this protocol: {found!r}")
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
                # A frame in its own buffer stays there. Copy short frames out of the shared buffer:
                # otherwise each would keep all of it alive.
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
                self._buffer = memoryview(b"")  # an idle connection uses no buffer
            elif at:
                self._buffer[: len(rest)] = rest

    def drop(self) -> None:
        """Release all buffers: the connection is lost."""
        self._buffer = memoryview(b"")
        self.held_bytes = 0
        self.long_bytes = 0


class LongFrames:
    """Reassembles long frames from their parts. All incomplete frames together have at most
    `bytes_max` bytes.

    With a bound of 0, as before the handshake, each part is refused.
    """

    def __init__(self, bytes_max: int = 0) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        """Bytes of the incomplete frames."""
        self._parts: dict[int, bytearray] = {}

    def whole(self, frame: Frame) -> Frame | None:
        """Return a frame joined with its earlier parts; None for a part.

        Raises `ProtocolError` for an empty part, and for more frames or bytes than the limits.
        """
        if frame.kind != FrameKind.PART:
            parts = self._parts.pop(frame.number, None) if self._parts else None
            if parts is None:
                return frame
            self.held_bytes -= len(parts)
            parts += frame.payload
            return frame._replace(payload=memoryview(parts))
        if not frame.payload or len(self._parts) >= PARTS_MAX:
            raise ProtocolError(f"an empty part, or parts of over {PARTS_MAX} frames at a time")
        self.held_bytes += len(frame.payload)
        if self.held_bytes > self.bytes_max:
            raise ProtocolError(f"over {self.bytes_max} bytes of incomplete long frames")
        self._parts.setdefault(frame.number, bytearray()).extend(frame.payload)
        return None

    def drop(self) -> None:
        """Release all buffers: the connection is lost."""
        self._parts.clear()
        self.held_bytes = 0


def _checked(whole: memoryview, length: int, checksum: int) -> Frame:
    """Return the frame with these bytes after its length and checksum. Raises `ProtocolError`."""
    if crc32c(whole) != checksum:
        raise ProtocolError("a frame fails its checksum")
    number, kind, _, meta_length = _CHECKED.unpack_from(whole)
    if meta_length > length:
        raise ProtocolError(f"a frame of {length} bytes has a meta of {meta_length}")
    payload_at = _CHECKED.size + meta_length
    return Frame(kind, number, bytes(whole[_CHECKED.size : payload_at]), whole[payload_at:])
