"""Frames: what a connection between a node and its clients carries, both ways. No I/O; `docs/protocol.md` has the picture.

A frame's length is checked before anything is kept for it, and its checksum before anything in it is looked at: what a
connection carried wrongly is never acted on, and ends it.
"""

import struct
from collections.abc import Iterator
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


def encode_frame(
    kind: int, number: int, meta: object = None, payload: bytes | memoryview = b""
) -> list[bytes | memoryview]:
    """Return the bytes of a frame in parts, for `writelines`; the payload is not copied. `ProtocolError` if too long."""
    encoded = b"" if meta is None else msgspec.msgpack.encode(meta)
    length = len(encoded) + len(payload)
    if FRAME_HEADER_BYTES + length > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {length} bytes does not fit {FRAME_BYTES_MAX} — send less at a time")
    checked = _CHECKED.pack(number, kind, 0, len(encoded)) + encoded
    head = _FRAMED.pack(length, crc32c(payload, crc32c(checked))) + checked
    return [head, payload] if payload else [head]


class FrameReader:
    """Makes frames of what a connection received, in whatever pieces it comes. Holds at most one frame that is not whole."""

    def __init__(self, frame_bytes_max: int = GREETING_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        """To be raised when both sides have agreed."""
        self._received = bytearray()
        self._has_preface = False

    @property
    def held_bytes(self) -> int:
        """What of a frame is there that is not whole yet."""
        return len(self._received)

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Yield the frames that are whole now, to be taken all before the next call.

        Raises `ProtocolError` for a preface, a length or a checksum that is wrong; the connection is of no use then.
        """
        received = self._received
        received += data
        at = 0
        try:
            if not self._has_preface:
                found = received[: len(PREFACE)]
                if not PREFACE.startswith(found):
                    raise ProtocolError(f"what came first is no part of this protocol: {bytes(found)!r}")
                if len(found) < len(PREFACE):
                    return
                self._has_preface, at = True, len(PREFACE)
            while len(received) - at >= FRAME_HEADER_BYTES:
                length, checksum = _FRAMED.unpack_from(received, at)
                if FRAME_HEADER_BYTES + length > self.frame_bytes_max:
                    raise ProtocolError(f"a frame of {length} bytes, over {self.frame_bytes_max} with its header")
                end = at + FRAME_HEADER_BYTES + length
                if end > len(received):
                    return
                # Copied once, so that nothing refers to what the next bytes are received into.
                whole = bytes(memoryview(received)[at + _FRAMED.size : end])
                at = end
                if crc32c(whole) != checksum:
                    raise ProtocolError("a frame fails its checksum")
                number, kind, _, meta_length = _CHECKED.unpack_from(whole)
                if meta_length > length:
                    raise ProtocolError(f"a frame of {length} bytes has a meta of {meta_length}")
                payload_at = _CHECKED.size + meta_length
                yield Frame(kind, number, whole[_CHECKED.size : payload_at], memoryview(whole)[payload_at:])
        finally:
            del received[:at]
