"""Copying a file so that the disk can be checked afterwards: bytes moved, synced, and forgotten by the page cache."""

import os
from collections.abc import Generator
from pathlib import Path

from streamingnode.inspection.backup_record import CopiedFile
from wal.codec import crc32c
from wal.files import create_file, make_directory, sync_directory

CHUNK_BYTES = 1 << 20


def copy_file(source: Path, directory: Path, path: str) -> Generator[int, None, CopiedFile]:
    """Copy `source` to `directory / path`, yielding the bytes after each chunk; return what was read. Raises `OSError`.

    Durable when it ends, but for the names: `sync_directories` makes those so.
    """
    target = directory / path
    for parent in reversed(target.relative_to(directory).parents):
        make_directory(directory / parent)
    length = checksum = 0
    with source.open("rb") as reading, create_file(target, exclusive=True) as writing:
        while chunk := reading.read(CHUNK_BYTES):
            writing.write(chunk)
            length += len(chunk)
            checksum = crc32c(chunk, checksum)
            yield len(chunk)
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
