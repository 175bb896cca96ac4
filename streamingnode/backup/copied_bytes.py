"""Copying a file so that the disk can be checked afterwards: bytes moved, synced, and forgotten by the page cache."""

import os
from collections.abc import Callable
from pathlib import Path

from streamingnode.inspection.backup_record import CopiedFile
from wal.codec import crc32c
from wal.errors import Corrupt
from wal.files import create_file, make_directory, open_binary, sync_directory

CHUNK_BYTES = 1 << 20


def copy_file(
    source: Path, directory: Path, path: str, on_bytes: Callable[[int], None], *, bytes_max: int | None = None
) -> CopiedFile:
    """Copy `source` to `directory / path` and return what was read; `on_bytes` is told each chunk, and may raise.

    Durable when it ends, but for the names: `sync_directories` makes those so. Raises `OSError`, and `Corrupt` for a file
    that is longer than `bytes_max` before any of it is read: it may be a terabyte of holes.
    """
    target = directory / path
    for parent in reversed(target.relative_to(directory).parents):
        make_directory(directory / parent)
    length = checksum = 0
    with open_binary(source) as reading, create_file(target, exclusive=True) as writing:
        size_bytes = os.fstat(reading.fileno()).st_size
        if bytes_max is not None and size_bytes > bytes_max:
            raise Corrupt(
                f"{source} has {size_bytes} bytes, it was written with {bytes_max} — restore it from a backup"
            )
        while chunk := reading.read(CHUNK_BYTES):
            writing.write(chunk)
            length += len(chunk)
            checksum = crc32c(chunk, checksum)
            on_bytes(len(chunk))
        writing.flush()
        os.fsync(writing.fileno())
        _forget(writing.fileno())
    return CopiedFile(path=path, bytes=length, crc32c=checksum)


def sync_directories(top: Path) -> None:
    """Return when the names of everything below `top` are on disk, and its own."""
    for parent, _, _ in os.walk(top):
        sync_directory(Path(parent))
    sync_directory(top.parent)


def _forget(descriptor: int) -> None:
    """Drop the pages from memory, so that verifying reads what the disk has; where the system knows how."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
