"""Records of a spool: frames that a client keeps for a node that is away, and which bytes of its file are whole. No I/O.

`docs/protocol.md` has the picture. A record ends in a byte that is not 0, so what a crash left unfinished is told from
damage: it is cut short, or a file that was made longer ends in zeros that were never written over.
"""

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from wal.codec import crc32c
from wal.errors import Corrupt, UnsupportedFormat
from wal.frames import FRAME_BYTES_MAX

SPOOL_MAGIC, SPOOL_FORMAT = b"SNSP", 1
END = b"\n"

_START, _HEAD, _CHECKSUM = struct.Struct("<4sHHQ"), struct.Struct("<IIIQQ"), struct.Struct("<I")
START_BYTES, HEAD_BYTES = _START.size + _CHECKSUM.size, _HEAD.size + _CHECKSUM.size
RECORD_BYTES_MAX = HEAD_BYTES + FRAME_BYTES_MAX + len(END)


class Record(NamedTuple):
    """A frame of writes, which have sequences from `sequence` on; `at_ms` is when it was kept, in Unix milliseconds."""

    sequence: int
    writes: int
    at_ms: int
    frame: bytes

    @property
    def last(self) -> int:
        """The sequence of its last write."""
        return self.sequence + self.writes - 1

    @property
    def size(self) -> int:
        """What it takes on disk, in bytes."""
        return HEAD_BYTES + len(self.frame) + len(END)


def encode_start(next_sequence: int) -> tuple[bytes, int]:
    """Return how a file begins, and its checksum; all sequences from `next_sequence` on are free."""
    start = _START.pack(SPOOL_MAGIC, SPOOL_FORMAT, 0, next_sequence)
    checksum = crc32c(start)
    return start + _CHECKSUM.pack(checksum), checksum


def decode_start(data: bytes) -> tuple[int, int]:
    """Return what `encode_start` was given, and the checksum. Raises `Corrupt`, `UnsupportedFormat`."""
    if len(data) != START_BYTES or not data.startswith(SPOOL_MAGIC):
        raise _damaged(0)
    _, version, _, next_sequence = _START.unpack_from(data)
    start, checksum = encode_start(next_sequence)
    if version != SPOOL_FORMAT and crc32c(data[: _START.size]) == int.from_bytes(data[_START.size :], "little"):
        raise UnsupportedFormat(f"the spool has format {version}, this release reads {SPOOL_FORMAT}")
    if start != data:
        raise _damaged(0)
    return next_sequence, checksum


def encode_record(record: Record, before: int) -> tuple[bytes, int]:
    """Return a record's bytes and its checksum, which continues the one `before` it: their order is checked, too."""
    head = _HEAD.pack(len(record.frame), crc32c(record.frame), record.writes, record.sequence, record.at_ms)
    checksum = crc32c(head, before)
    return b"".join((head, _CHECKSUM.pack(checksum), record.frame, END)), checksum


def scan(read: Callable[[int, int], bytes], at: int, end: int, before: int) -> Iterator[tuple[Record, int]]:
    """Yield the records from byte `at` to `end`, with their checksums; `read` returns so many bytes from a place.

    Ends before a last record that is not whole, which nobody was told of. Raises `Corrupt` for any other.
    """
    while end - at >= HEAD_BYTES:
        data = read(at, HEAD_BYTES)
        checksum = crc32c(data[: _HEAD.size], before)
        if _CHECKSUM.pack(checksum) != data[_HEAD.size :]:
            if end - at <= RECORD_BYTES_MAX and not read(at + HEAD_BYTES, RECORD_BYTES_MAX).strip(b"\0"):
                return  # a crash in the middle of the head
            raise _damaged(at)
        length, frame_crc32c, writes, sequence, at_ms = _HEAD.unpack_from(data)
        record_end = at + HEAD_BYTES + length + len(END)
        if record_end > end:
            return  # cut short
        data = read(at + HEAD_BYTES, length + len(END))
        frame = data[:length]
        if data[length:] != END or crc32c(frame) != frame_crc32c:
            if record_end == end and data.endswith(b"\0"):
                return  # made longer, and not written over
            raise _damaged(at)
        yield Record(sequence, writes, at_ms, frame), checksum
        at, before = record_end, checksum


def _damaged(at: int) -> Corrupt:
    return Corrupt(
        f"the spool is damaged at byte {at} — move its directory elsewhere and connect with a new one; "
        "what lies before that byte is whole"
    )
