"""Names that survive a power cut: POSIX file systems keep a file made, renamed or removed once its directory is synced."""

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Return when the names in a directory are on disk. Blocks; raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
