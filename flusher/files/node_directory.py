"""The disk under the flusher: every call that can fail, or after which power can fail, goes through here.

What we assume: `rename` is atomic; a file's bytes survive a power cut once the file is synced, its name once the directory
that holds it is. Nothing here runs on the event loop. Paths are relative to the node directory, with `/`.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from wal.synced_names import sync_directory

TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a file that is still being written; whatever carries it at start is rubbish."""

WRITE_BUFFER_BYTES = 1 << 20
"""Gathers the many small writes of a Parquet file's headers between its pages."""


class NodeDirectory:
    """Files of one node, under `root`. All methods block; all raise `OSError`.

    `check_owned` raises when the directory has another owner now, and comes before each change: whoever owns it makes files
    of the same names.
    """

    def __init__(self, root: Path, *, check_owned: Callable[[], None] | None = None) -> None:
        self.root = root
        self._check_owned = check_owned or _nobody_asks

    def create(self, path: str) -> BinaryIO:
        """Open a new file for writing, replacing one of that name; directories on the way are made durable."""
        self._check_owned()
        self._make_parents((self.root / path).parent)
        return (self.root / path).open("wb", buffering=WRITE_BUFFER_BYTES)

    def sync(self, file: BinaryIO) -> None:
        """Return when the file's bytes are on disk; its name is not, until `sync_parents`."""
        file.flush()
        os.fsync(file.fileno())

    def rename(self, source: str, target: str) -> None:
        """Give a file its final name, replacing what had it."""
        self._check_owned()
        (self.root / source).replace(self.root / target)

    def sync_parents(self, paths: list[str]) -> None:
        """Return when the names of `paths` are on disk; one sync for each directory."""
        for parent in sorted({(self.root / path).parent for path in paths}):
            sync_directory(parent)

    def remove(self, path: str) -> None:
        """Remove a file if it is there."""
        self._check_owned()
        (self.root / path).unlink(missing_ok=True)

    def read(self, path: str) -> bytes:
        """Return a file's content."""
        return (self.root / path).read_bytes()

    def size_bytes(self, path: str) -> int:
        """Return a file's length."""
        return (self.root / path).stat().st_size

    def free_bytes(self) -> int:
        """Return how much this user may still write on the disk."""
        disk = os.statvfs(self.root)
        return disk.f_bavail * disk.f_frsize

    def files(self, under: str) -> list[str]:
        """Return all files below the directory `under`, sorted; none when it does not exist."""
        top = self.root / under
        if not top.is_dir():
            return []
        return sorted(path.relative_to(self.root).as_posix() for path in top.rglob("*") if path.is_file())

    def numbered(self, under: str) -> list[int]:
        """Return the numbers that are names of directories right below `under` with something in them."""
        top = self.root / under
        names = [path.name for path in top.iterdir() if path.is_dir() and any(path.iterdir())] if top.is_dir() else []
        return sorted(int(name) for name in names if name.isdecimal())

    def _make_parents(self, directory: Path) -> None:
        if directory.is_dir():
            return
        self._make_parents(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def _nobody_asks() -> None:
    """Stand in where a directory can have no other owner, or is only read."""
