"""Files that survive a power cut: written under a temporary name, synced, renamed, and the directory synced.

Assumes what POSIX file systems give: rename is atomic, fsync of a file keeps its bytes and fsync of its directory its name.
"""

import os
from pathlib import Path

from wal.failpoint import failpoint
from wal.synced_names import sync_directory


def write_durably(path: Path, content: bytes) -> None:
    """Replace `path` by `content`: after a crash it holds either the old or the new content, whole."""
    building = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with building.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    failpoint("ingest.lease_written")
    building.replace(path)
    failpoint("ingest.lease_renamed")
    sync_directory(path.parent)


def make_durable_directory(directory: Path) -> None:
    """Make a directory and those on the way to it, if they are missing; their names are on disk on return."""
    if not directory.is_dir():
        make_durable_directory(directory.parent)
        directory.mkdir(exist_ok=True)  # another job may make it in between
        sync_directory(directory.parent)


def sync_file(path: Path) -> None:
    """Return when the file's bytes are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
