"""Files as every package needs them: names that survive a power cut, and how many files a process may have open.

POSIX file systems keep the name of a file made, renamed or removed once its directory is synced.
"""

import os
import resource
from pathlib import Path

from wal.errors import Overloaded


def sync_directory(directory: Path) -> None:
    """Return when the names in a directory are on disk. Blocks; raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_files_max() -> int | None:
    """Return how many descriptors this process may have, sockets included; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def no_descriptor_left(path: Path, error: object) -> Overloaded:
    """Return the error for work on `path` that found no descriptor; `error` is what the system said."""
    return Overloaded(
        f"no file descriptor is left for {path}, this process may have {open_files_max() or 'any number of'}: {error} — "
        "raise the limit (ulimit -n) or close files; an open node goes on by itself"
    )
