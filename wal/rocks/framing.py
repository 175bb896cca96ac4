"""A look at RocksDB's own log files before RocksDB reads them: some flipped bits would keep it reading for ever.

Log and manifest share one framing: blocks of 32 KiB, each beginning with a record, and records of checksum, length and type.
A flipped bit can turn a type into one of those that only recycled files have. No file of ours is recycled; RocksDB 10 takes
such a record for one of an older file, begins again, and never ends. Everything else that can be wrong with a record it
finds by itself. Layout: RocksDB's wiki, "Write Ahead Log File Format".
"""

import math
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wal.codec import crc32c
from wal.errors import Corrupt
from wal.files import not_regular, open_binary

BLOCK_BYTES = 32 << 10
RECYCLED_TYPES = frozenset({5, 6, 7, 8, 11})
"""Full, first, middle and last fragment, and the timestamp size, of a recycled file."""

_HEADER = struct.Struct("<IHB")
"""checksum, length, type."""
_SEQUENCE = struct.Struct("<Q")
"""Begins the content of the first record of a log file."""
NOTE_BYTES_MAX = 16 << 20
"""Of RocksDB's small files, which it reads into memory as a whole."""
JOURNAL_BYTES_MAX = 64 << 30
"""Of its manifest and of one log file, which it begins anew long before."""
_PADDING = 0
_WHOLE_RECORD, _FIRST_FRAGMENT, _MIDDLE_FRAGMENT = 1, 2, 3
_CRC_MASK = 0xA282EAD8
"""RocksDB stores a checksum rotated and with this added, so that one of checksums is not weak."""


def check_framing(database: Path) -> None:
    """Raise `Corrupt`, with file and byte, for what RocksDB would not get past. Blocks; changes nothing."""
    for entry in sorted(os.scandir(database), key=lambda each: each.name):
        if not entry.is_dir(follow_symlinks=False) and not entry.is_file(follow_symlinks=False):
            raise not_regular(Path(entry.path))  # RocksDB would wait for ever for a pipe
        bytes_max = _bytes_max(entry.name)
        try:
            size_bytes = entry.stat().st_size
        except FileNotFoundError:  # a running owner has removed it
            continue
        if size_bytes > bytes_max:
            raise Corrupt(f"{entry.path} has {size_bytes} bytes, it never gets {bytes_max} — restore it from a backup")
    for path in sorted((*database.glob("MANIFEST-*"), *database.glob("*.log"))):
        with _mapped(path) as data:
            at = next(recycled_records(data), None)
        if at is not None:
            raise Corrupt(
                f"{path} is damaged at byte {at}: a record of a type that it is never given — restore it from a backup"
            )


def _bytes_max(name: str) -> float:
    """Return how long a file may be that is read before its table says its length: one of holes costs nothing to make."""
    if name in {"CURRENT", "IDENTITY"} or name.startswith("OPTIONS-"):
        return NOTE_BYTES_MAX
    return JOURNAL_BYTES_MAX if name.startswith("MANIFEST-") or name.endswith(".log") else math.inf


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


def torn_bytes(database: Path) -> int:
    """Return how many bytes of RocksDB's log files lie behind the last whole record of their unbroken beginning. Blocks."""
    torn = 0
    for path in sorted(database.glob("*.log"), key=lambda each: int(each.stem)):
        with _mapped(path) as data:
            whole = 0 if torn else whole_bytes(data)
            torn += len(data[whole:].rstrip(b"\0"))
    return torn


def whole_bytes(data: bytes | mmap.mmap) -> int:
    """Return where the last whole record ends that has only whole ones before it."""
    whole = 0
    for following, kind, is_whole in _fragments(data):
        if not is_whole:
            break
        if kind not in (_FIRST_FRAGMENT, _MIDDLE_FRAGMENT):
            whole = following
    return whole


def _fragments(data: bytes | mmap.mmap) -> Iterator[tuple[int, int, bool]]:
    """Yield where each fragment ends, its type, and whether it is what was written; behind damage as far as lengths lead."""
    for block in range(0, len(data), BLOCK_BYTES):
        at, end = block, min(block + BLOCK_BYTES, len(data))
        while at + _HEADER.size <= end:
            checksum, length, kind = _HEADER.unpack_from(data, at)
            following = at + _HEADER.size + length
            if kind == _PADDING or following > end:
                yield following, kind, False
                break  # no telling where the next one begins, but in the next block
            yield following, kind, checksum == _checksum(data[at + _HEADER.size - 1 : following])
            at = following


def _checksum(type_and_content: bytes) -> int:
    plain = crc32c(type_and_content)
    return ((plain >> 15 | plain << 17) + _CRC_MASK) & 0xFFFFFFFF


@contextmanager
def _mapped(path: Path) -> Iterator[bytes | mmap.mmap]:
    """Yield a file's content; nothing of one too short to map, which is made and not written yet."""
    with open_binary(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes < _HEADER.size:
            yield b""
            return
        with mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ) as data:
            yield data


def first_sequence(path: Path) -> int | None:
    """Return the number that RocksDB gave the first change in one of its log files; None when nothing is in it."""
    with open_binary(path) as file:
        head = file.read(_HEADER.size + _SEQUENCE.size)
    if len(head) < _HEADER.size + _SEQUENCE.size or head[_HEADER.size - 1] == _PADDING:
        return None
    return int(_SEQUENCE.unpack_from(head, _HEADER.size)[0])


def torn_end(path: Path) -> int | None:
    """Return where a file ends before what is torn at its end; None when nothing is, or when more follows that is whole."""
    with _mapped(path) as data:
        whole = whole_bytes(data)
        return whole if _goes_on(data, whole) and not _begins_behind_damage(data) else None


def is_cut_short(path: Path) -> bool:
    """Whether a file in this framing ends with something that is no whole record."""
    with _mapped(path) as data:
        return _goes_on(data, whole_bytes(data))


def _goes_on(data: bytes | mmap.mmap, whole: int) -> bool:
    """Whether there is more behind the last whole record than room that was made ahead."""
    return bool(bytes(data[whole:]).rstrip(b"\0"))


def _begins_behind_damage(data: bytes | mmap.mmap) -> bool:
    damaged = False
    for _, kind, is_whole in _fragments(data):
        if damaged and is_whole and kind in (_WHOLE_RECORD, _FIRST_FRAGMENT):
            return True
        damaged = damaged or not is_whole
    return False
