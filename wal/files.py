"""Files and names on the disk: opened only where they are regular files, and named so that the names survive a power cut.

Whoever opens a file of a node does it through here. A pipe in its place would make an opener wait for ever, a device may do
anything, a link leads somewhere else, and a file of a terabyte without blocks costs nothing to make: each is a typed error,
at once. Everything blocks.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal

from wal.errors import Corrupt

READ_BYTES_MAX = 256 << 20
"""More than anything has that is read as a whole, a manifest of 500,000 files included."""

_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV})
"""What opening says of a link, a directory, a socket and a device without its driver."""


def open_regular(path: Path, flags: int = os.O_RDONLY, *, mode: int = 0o666) -> int:
    """Open a file and return its descriptor, without waiting and without following a link in its place.

    Raises `Corrupt` for what is no regular file, and `OSError`.
    """
    try:
        # Non-blocking: a pipe that nobody writes to opens, and is refused below.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise not_regular(path) from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise not_regular(path)


def open_binary(path: Path, mode: Literal["rb", "wb"] = "rb", *, buffering: int = -1) -> BinaryIO:
    """Open a file as `open_regular` does."""
    return open(path, mode, buffering, opener=lambda name, flags: open_regular(Path(name), flags))


def read_regular(path: Path, *, bytes_max: int = READ_BYTES_MAX) -> bytes:
    """Return the content of a file that is at most so long.

    Raises `Corrupt` for a longer one before any of it is read, and for what is no regular file; `OSError`.
    """
    with open_binary(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > bytes_max:
            raise Corrupt(f"{path} has {size_bytes} bytes, at most {bytes_max} were written — restore it from a backup")
        return file.read(bytes_max)


def sync_directory(directory: Path) -> None:
    """Return when the names in a directory are on disk. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def not_regular(path: Path) -> Corrupt:
    """Return the error for something else in the place of a file."""
    return Corrupt(f"{path} is no regular file — remove what is there, and restore the file from a backup")
