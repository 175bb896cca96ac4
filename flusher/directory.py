"""The disk under the flusher: every call that can fail, or after which power can fail, goes through here.

What we assume: `rename` is atomic; a file's bytes survive a power cut once the file is synced, its name once the directory
that holds it is. Nothing here runs on the event loop. Paths are relative to the node directory, with `/`.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import msgspec

from wal.files import (
    READ_BYTES_MAX,
    WRITE_BUFFER_BYTES,
    create_file,
    make_directory,
    open_regular,
    place_beneath,
    read_regular,
    set_group_access,
    sync_directory,
)

TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a file that is still being written; whatever carries it at start is rubbish."""


class NodeDirectory:
    """Files of one node, under `root`; `for_group` lets the group read what is made here.

    All methods block, and raise `OSError`, and `Corrupt` for what is no regular file and for a link in place of a directory.
    """

    def __init__(self, root: Path, *, for_group: bool = False) -> None:
        self.root = root
        self._for_group = for_group

    def create(self, path: str) -> BinaryIO:
        """Open a new file for writing, replacing one of that name; directories on the way are made durable."""
        place = place_beneath(self.root, path)
        self._make_parents(place.parent)
        return create_file(place, for_group=self._for_group)

    def set_access(self, tops: Iterable[str]) -> None:
        """Let the group read the directories `tops`, or nobody but the owner, whatever an earlier opening was told."""
        mode = self.root.stat().st_mode
        if self._for_group and not mode & 0o010:
            self.root.chmod(stat.S_IMODE(mode) | 0o010)
        for top in tops:
            set_group_access(place_beneath(self.root, f"{top}/"), for_group=self._for_group)

    def append(self, path: str) -> BinaryIO:
        """Open a file that `create` made, to go on at its end; one that is gone is not made anew."""
        return open(place_beneath(self.root, path), "ab", buffering=WRITE_BUFFER_BYTES, opener=_open_existing)

    def sync(self, file: BinaryIO) -> None:
        """Return when the file's bytes are on disk; its name is not, until `sync_parents`."""
        file.flush()
        os.fsync(file.fileno())

    def rename(self, source: str, target: str) -> None:
        """Give a file its final name, replacing what had it."""
        place_beneath(self.root, source).replace(place_beneath(self.root, target))

    def sync_parents(self, paths: list[str]) -> None:
        """Return when the names of `paths` are on disk; one sync for each directory."""
        for parent in sorted({(self.root / path).parent for path in paths}):
            sync_directory(parent)

    def remove(self, path: str) -> None:
        """Remove a file if it is there."""
        place_beneath(self.root, path).unlink(missing_ok=True)

    def read(self, path: str, *, bytes_max: int = READ_BYTES_MAX) -> bytes:
        """Return a file's content; one that is longer is `Corrupt`, and not read."""
        return read_regular(place_beneath(self.root, path), bytes_max=bytes_max)

    def size_bytes(self, path: str) -> int:
        """Return a file's length."""
        return (self.root / path).stat().st_size

    def free_bytes(self) -> int:
        """Return how much this user may still write on the disk."""
        disk = os.statvfs(self.root)
        return disk.f_bavail * disk.f_frsize

    def can_open(self, count: int) -> bool:
        """Whether this process may open that many files more, at a time."""
        opened: list[int] = []
        try:
            for _ in range(count):
                opened.append(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY))  # noqa: PERF401 - those opened are closed
        except OSError:
            return False
        finally:
            for descriptor in opened:
                os.close(descriptor)
        return True

    def files(self, under: str) -> list[str]:
        """Return all names below the directory `under` but directories, sorted; none when it does not exist."""
        top = place_beneath(self.root, f"{under}/")
        if not top.is_dir():
            return []
        return sorted(path.relative_to(self.root).as_posix() for path in top.rglob("*") if not path.is_dir())

    def numbered(self, under: str) -> list[int]:
        """Return the numbers that are names of directories right below `under` with something in them."""
        top = place_beneath(self.root, f"{under}/")
        names = [path.name for path in top.iterdir() if path.is_dir() and any(path.iterdir())] if top.is_dir() else []
        return sorted(int(name) for name in names if name.isdecimal())

    def _make_parents(self, directory: Path) -> None:
        if directory.is_dir():
            return
        self._make_parents(directory.parent)
        make_directory(directory, for_group=self._for_group)


def _open_existing(path: str, flags: int) -> int:
    return open_regular(Path(path), flags & ~os.O_CREAT)


LEASES = "leases"


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What one table has taken of one node; it may lag behind the table, which keeps files longer, and is never ahead."""

    table: str
    node_id: str
    collection_id: int
    cut: int
    tick: int


def lease_path(node: Path, table: Path) -> Path:
    """Return where the lease of a table lies; tables of one name in two places have a lease each."""
    return node / LEASES / f"{table.name}-{crc32(str(table.resolve().parent).encode()):08x}.json"
