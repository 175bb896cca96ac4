"""A look at RocksDB's own log files before RocksDB reads them: some flipped bits would keep it reading for ever.

Log and manifest share one framing: blocks of 32 KiB, each beginning with a record, and records of checksum, length and type.
A flipped bit can turn a type into one of those that only recycled files have. No file of ours is recycled; RocksDB 10 takes
such a record for one of an older file, begins again, and never ends. Everything else that can be wrong with a record it
finds by itself. Layout: RocksDB's wiki, "Write Ahead Log File Format".
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from wal.errors import Corrupt

BLOCK_BYTES = 32 << 10
RECYCLED_TYPES = frozenset({5, 6, 7, 8, 11})
"""Full, first, middle and last fragment, and the timestamp size, of a recycled file."""

_HEADER = struct.Struct("<IHB")
"""checksum, length, type."""
_PADDING = 0


def check_framing(database: Path) -> None:
    """Raise `Corrupt`, with file and byte, for a record that RocksDB would not get past. Blocks; changes nothing."""
    for path in sorted((*database.glob("MANIFEST-*"), *database.glob("*.log"))):
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            if size_bytes < _HEADER.size:  # made, and not written yet
                continue
            with mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ) as data:
                at = next(recycled_records(data), None)
        if at is not None:
            raise Corrupt(
                f"{path} is damaged at byte {at}: a record of a type that it is never given — restore it from a backup"
            )


def recycled_records(data: bytes | mmap.mmap) -> Iterator[int]:
    """Yield where records of a recycled file's types begin."""
    for block in range(0, len(data), BLOCK_BYTES):
        at, end = block, min(block + BLOCK_BYTES, len(data))
        while at + _HEADER.size <= end:
            _, length, kind = _HEADER.unpack_from(data, at)
            if kind in RECYCLED_TYPES:
                yield at
                break  # its header has another size; the next block begins with a record again
            if kind == _PADDING:
                break
            at += _HEADER.size + length
