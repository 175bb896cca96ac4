"""Frames: what a connection between a node and its clients carries, both ways. No I/O; `docs/protocol.md` has the picture.

A frame's length is checked before anything is kept for it, and its checksum before anything in it is looked at: what a
connection carried wrongly is never acted on, and ends it.
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
RECEIVED_BYTES = 64 << 10
"""What is received at a time; a longer frame is received into a buffer of its own."""

_FRAMED = struct.Struct("<II")
_CHECKED = struct.Struct("<QHHI")
FRAME_HEADER_BYTES = _FRAMED.size + _CHECKED.size


@unique
class FrameKind(IntEnum):
    """What a frame says. Numbers are for ever; kinds that a side does not know are skipped."""

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
    HOLD = 18


class Frame(NamedTuple):
    """One frame, checked: `number` is that of its call or stream, 0 for the connection's own; `meta` is not decoded."""

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


def encode_frame(kind: int, number: int, meta: object = None, *payload: bytes | memoryview) -> list[bytes | memoryview]:
    """Return the bytes of a frame in parts, for `writelines`; the payload, of any parts itself, is not copied.

    Raises `ProtocolError` if it is too long.
    """
    encoded = b"" if meta is None else msgspec.msgpack.encode(meta)
    length = len(encoded) + sum(map(len, payload))
    if FRAME_HEADER_BYTES + length > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {length} bytes does not fit {FRAME_BYTES_MAX} — send less at a time")
    checked = _CHECKED.pack(number, kind, 0, len(encoded)) + encoded
    checksum = crc32c(checked)
    for part in payload:
        checksum = crc32c(part, checksum)
    return [_FRAMED.pack(length, checksum) + checked, *filter(len, payload)]


class FrameReader:
    """Makes frames of what a connection received, in whatever pieces it comes. Holds at most one frame that is not whole.

    `room` is where the next bytes go, and `received` says how many came: so those of a long frame are received where they
    stay, and nobody copies them; `allocate` makes a buffer for one, of bytes that need not be zeros.
    """

    def __init__(
        self, frame_bytes_max: int = GREETING_BYTES_MAX, *, allocate: Callable[[int], Any] = bytearray
    ) -> None:
        self.frame_bytes_max, self._allocate = frame_bytes_max, allocate
        """The bound is to be raised when both sides have agreed."""
        self.held_bytes = 0
        """What of a frame is there that is not whole yet."""
        self._buffer = memoryview(b"")
        self._has_preface = False

    def room(self) -> memoryview:
        """Return where the next bytes go, never nothing: the rest of a long frame, or room for several that are not."""
        if not self.held_bytes:
            self._buffer = memoryview(bytearray(RECEIVED_BYTES))
        return self._buffer[self.held_bytes :]

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Yield the frames that bytes make whole, as `received` does."""
        while data:
            room = self.room()
            taken, data = data[: len(room)], data[len(room) :]
            room[: len(taken)] = taken
            yield from self.received(len(taken))

    def received(self, size_bytes: int) -> Iterator[Frame]:
        """Yield the frames that are whole now, to be taken all before the next call.

        Raises `ProtocolError` for a preface, a length or a checksum that is wrong; the connection is of no use then.
        """
        received, at, wanted = self._buffer[: self.held_bytes + size_bytes], 0, 0
        try:
            if not self._has_preface:
                found = bytes(received[: len(PREFACE)])
                if not PREFACE.startswith(found):
                    raise ProtocolError(f"what came first is no part of this protocol: {found!r}")
                if len(found) < len(PREFACE):
                    return
                self._has_preface, at = True, len(PREFACE)
            while len(received) - at >= FRAME_HEADER_BYTES:
                length, checksum = _FRAMED.unpack_from(received, at)
                if FRAME_HEADER_BYTES + length > self.frame_bytes_max:
                    raise ProtocolError(f"a frame of {length} bytes, over {self.frame_bytes_max} with its header")
                if (end := at + FRAME_HEADER_BYTES + length) > len(received):
                    wanted = end - at
                    return
                whole, at = received[at + _FRAMED.size : end], end
                # What has a buffer of its own stays there. Others are copied out of theirs, or each would keep all of it.
                is_alone = len(self._buffer) > RECEIVED_BYTES
                yield _decode(whole.toreadonly() if is_alone else memoryview(bytes(whole)), checksum)
        finally:
            self._hold(received, at, wanted)

    def _hold(self, received: memoryview, at: int, wanted: int) -> None:
        """Keep the beginning of a frame, where there is room for all of it; of a quiet connection nothing is kept."""
        self.held_bytes = len(rest := received[at:])
        if not rest:
            self._buffer, at = memoryview(b""), 0
        elif wanted > len(self._buffer):
            self._buffer, at = memoryview(self._allocate(wanted)).cast("B"), wanted
        if at:
            self._buffer[: len(rest)] = rest


def _decode(whole: memoryview, checksum: int) -> Frame:
    if crc32c(whole) != checksum:
        raise ProtocolError("a frame fails its checksum")
    number, kind, _, meta_length = _CHECKED.unpack_from(whole)
    payload_at = _CHECKED.size + meta_length
    if payload_at > len(whole):
        raise ProtocolError(f"a frame of {len(whole) - _CHECKED.size} bytes has a meta of {meta_length}")
    return Frame(kind, number, bytes(whole[_CHECKED.size : payload_at]), whole[payload_at:])
