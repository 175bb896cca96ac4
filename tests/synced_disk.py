"""A disk that keeps what was synced: the bytes of a file as of its last fsync, its name as of that
of its directory.

Only fsyncs of Python are seen. What RocksDB syncs by itself counts as on the disk at once, but for
its directory's name. `lose_power` copies what a power cut leaves; with it, each name that was made,
moved or removed since its directory was synced may have reached the disk or not, in any order.
"""

import os
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest

CALLERS_MAX = 4


class PowerCut(BaseException):
    """The machine is off."""


class _Name(NamedTuple):
    inode: int
    is_directory: bool


class SyncedDisk:
    """Follows everything below `root`, which is on the disk as it is now; `native` are names of
    RocksDB's directories.
    """

    def __init__(self, root: Path, *, native: Collection[str] = ("log", "log.tmp")) -> None:
        self.root = root
        self.syncs = 0
        self.cut_at: int | None = None
        """The sync at which power goes, before it takes place."""
        self.sites: dict[str, int] = {}
        """How often who synced: the innermost functions on the stack, last that which called
        fsync.
        """
        self.ignored = ""
        """A site whose syncs do nothing."""
        self._native = native
        self._names: dict[int, Mapping[str, _Name]] = {}
        self._bytes: dict[int, bytes] = {}
        self._held: dict[int, int] = {}
        self.keep(root)

    def keep(self, top: Path) -> None:
        """Take everything from `top` on for synced, as it is now."""
        for place, folders, files in os.walk(top):
            folders[:] = [folder for folder in folders if folder not in self._native]
            for path in (Path(place), *(Path(place) / file for file in files)):
                with _opened(path) as descriptor:
                    self._remember(descriptor)

    def sync(self, descriptor: int) -> None:
        """Stand for `os.fsync`."""
        site = _caller()
        self.sites[site] = self.sites.get(site, 0) + 1
        if site == self.ignored:
            return
        self.syncs += 1
        if self.cut_at is not None and self.syncs >= self.cut_at:
            raise PowerCut
        self._remember(descriptor)

    def unsynced_names(self) -> list[str]:
        """Return the names, relative to the root, that are on the disk and not in use, or the other
        way round.
        """
        found: list[str] = []
        for place, folders, _ in os.walk(self.root):
            folders[:] = [folder for folder in folders if folder not in self._native]
            now = self._list(place)
            kept = self._names.get(Path(place).stat().st_ino, {})
            changed = {name for name in {*now, *kept} if now.get(name) != kept.get(name)}
            found += [str((Path(place) / name).relative_to(self.root)) for name in changed]
        return sorted(found)

    def lose_power(self, target: Path, *, lucky: Callable[[str], bool] = lambda _: False) -> Path:
        """Make `target` what is left; of the names that were not synced those that are `lucky`."""
        with _opened(self.root) as descriptor:
            self._restore(descriptor, Path(), target, lucky)
        return target

    def forget(self) -> None:
        """Let go of the files held: while one is, no other gets its number."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _remember(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = self._list(f"/proc/self/fd/{descriptor}")
        else:
            self._bytes[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        self._hold(f"/proc/self/fd/{descriptor}", status.st_ino)

    def _hold(self, path: str, inode: int) -> None:
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _list(self, place: str) -> dict[str, _Name]:
        with os.scandir(place) as entries:
            names = {entry.name: _Name(entry.inode(), entry.is_dir()) for entry in entries}
        for name, found in names.items():
            self._hold(f"{place}/{name}", found.inode)
        return names

    def _restore(
        self, descriptor: int, place: Path, target: Path, lucky: Callable[[str], bool]
    ) -> None:
        target.mkdir()
        now = self._list(f"/proc/self/fd/{descriptor}")
        kept = self._names.get(os.fstat(descriptor).st_ino, {})
        for name in {*now, *kept}:
            found = (now if lucky(str(place / name)) else kept).get(name)
            if found is None:
                continue
            held = self._held[found.inode]
            if not found.is_directory:
                (target / name).write_bytes(self._bytes.get(found.inode, b""))
            elif name in self._native:
                shutil.copytree(
                    f"/proc/self/fd/{held}",
                    target / name,
                    ignore=shutil.ignore_patterns("node.sock"),
                )
            else:
                self._restore(held, place / name, target / name, lucky)


@contextmanager
def synced_disk(root: Path, *, cut_at: int | None = None) -> Iterator[SyncedDisk]:
    """Follow a directory inside the block, and let power go at sync number `cut_at`."""
    disk = SyncedDisk(root)
    disk.cut_at = cut_at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", disk.sync)
        try:
            yield disk
        finally:
            disk.forget()


def _caller() -> str:
    names: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while (
        frame is not None and len(names) < CALLERS_MAX and "/tests/" not in frame.f_code.co_filename
    ):
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return " > ".join(reversed(names))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
