"""Looks at the disk of a log, and keeps its reserve as the verdict says: the I/O around `space`. Not for the event loop.

The reserve is the file `reserve` in the node directory. It has blocks and no content. Giving it up is a truncation, which
needs no room; it keeps its name, so that taking it again needs no room in a directory.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wal.errors import Corrupt
from wal.event_log import event_log
from wal.files import open_regular
from wal.rocks.layout import DATABASE_NAME
from wal.rocks.space import (
    EXHAUSTED_BYTES,
    NOT_LOOKED,
    SpaceLevel,
    SpaceReading,
    SpaceVerdict,
    judge,
    start_needs_reserve,
)

RESERVE_NAME = "reserve"
_BLOCK_BYTES = 512
"""What `st_blocks` counts in, whatever the file system's blocks are."""
_ZEROS = bytes(1 << 20)
ASK_AGAIN_BYTES = 1 << 20
"""How much more has to be free for a reserve that could not be had to be asked for again; less is noise of others."""
ASK_AGAIN_LOOKS = 256
"""It is asked for again after so many looks anyhow, half a minute or more: room under a quota is not seen as free space."""

_log = event_log(__name__)


def log_bytes(database: Path) -> int:
    """Return the size of RocksDB's own log: what a start has to replay. 0 when there is no database. Raises `OSError`."""
    total = 0
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(database) as files:
        for file in files:
            if file.name.endswith(".log"):
                with contextlib.suppress(FileNotFoundError):  # RocksDB has just given it up
                    total += file.stat().st_size
    return total


def free_bytes_of(path: Path) -> int:
    """Return how much this user may still write on the disk of `path`. Raises `OSError`."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


@dataclass(slots=True)
class _Refused:
    """A reserve that could not be had: its size, what was free then, and how many looks that is ago."""

    wanted_bytes: int
    free_bytes: int
    looks: int = 0


class SpaceWatch:
    """Free space, low-water mark and reserve of one node directory. One thread at a time; `look` is cheap, some 50 us."""

    __slots__ = ("_database", "_directory", "_free_bytes", "_free_bytes_min", "_refused", "_reserve", "verdict")

    def __init__(self, directory: Path, *, free_bytes_min: int, free_bytes: Callable[[Path], int]) -> None:
        self.verdict: SpaceVerdict = NOT_LOOKED
        self._directory, self._database = directory, directory / DATABASE_NAME
        self._free_bytes_min, self._free_bytes = free_bytes_min, free_bytes
        self._reserve = directory / RESERVE_NAME
        self._refused: _Refused | None = None

    def make_room_to_start(self) -> None:
        """Give the reserve up if the disk has too little room for replaying the log, and can tell."""
        try:
            reading = self._read()
        except OSError:
            return
        if reading.reserve_bytes and start_needs_reserve(reading):
            self._resize(reading.reserve_bytes, 0)

    def is_tight(self, size_bytes: int) -> bool:
        """Whether so much may not find room: the short look, 2 us. A disk that cannot tell is not tight."""
        try:
            return self._free_bytes(self._directory) < size_bytes + EXHAUSTED_BYTES
        except OSError:
            return False

    def look(self) -> SpaceVerdict:
        """Read, judge, give up or take the reserve, and return the verdict: the last one when the disk cannot tell."""
        with contextlib.suppress(OSError):  # the next write will tell more
            self.verdict = self._look()
        return self.verdict

    def _look(self) -> SpaceVerdict:
        verdict = self._judge()
        if verdict.level is SpaceLevel.EXHAUSTED and self._reserve_bytes():
            self._resize(self._reserve_bytes(), 0)
            verdict = self._judge()
        elif verdict.reserve_bytes > self._reserve_bytes() and self._is_worth_asking(verdict):
            had = self._resize(self._reserve_bytes(), verdict.reserve_bytes)
            self._refused = None if had else _Refused(verdict.reserve_bytes, verdict.free_bytes)
        return verdict

    def _is_worth_asking(self, verdict: SpaceVerdict) -> bool:
        """Whether a reserve of this size was not just refused: by a quota, perhaps, or to a file that cannot be made."""
        refused = self._refused
        if refused is None:
            return True
        refused.looks += 1
        return (
            verdict.reserve_bytes > refused.wanted_bytes
            or verdict.free_bytes >= refused.free_bytes + ASK_AGAIN_BYTES
            or refused.looks >= ASK_AGAIN_LOOKS
        )

    def _judge(self) -> SpaceVerdict:
        return judge(self._read(), free_bytes_min=self._free_bytes_min, before=self.verdict.level)

    def _read(self) -> SpaceReading:
        return SpaceReading(
            free_bytes=self._free_bytes(self._directory),
            log_bytes=log_bytes(self._database),
            reserve_bytes=self._reserve_bytes(),
        )

    def _reserve_bytes(self) -> int:
        try:
            return self._reserve.stat().st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            return 0

    def _resize(self, held_bytes: int, wanted_bytes: int) -> bool:
        """Return whether the reserve has that size now; one that cannot be had is done without and asked for again later."""
        try:
            descriptor = open_regular(self._reserve, os.O_RDWR | os.O_CREAT, mode=0o600)
            try:
                if wanted_bytes < held_bytes:
                    os.ftruncate(descriptor, wanted_bytes)
                else:
                    _allocate(descriptor, held_bytes, wanted_bytes)
            finally:
                os.close(descriptor)
        except (OSError, Corrupt) as error:
            _log.info("reserve_not_held", path=str(self._reserve), wanted_bytes=wanted_bytes, error=str(error))
            return False
        _log.info("reserve_resized", path=str(self._reserve), before_bytes=held_bytes, bytes=wanted_bytes)
        return True


def _allocate(descriptor: int, held_bytes: int, wanted_bytes: int) -> None:
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, wanted_bytes)
        else:  # macOS
            for at in range(held_bytes, wanted_bytes, len(_ZEROS)):
                os.pwrite(descriptor, _ZEROS[: wanted_bytes - at], at)
    except OSError:
        os.ftruncate(descriptor, held_bytes)  # half of a step would be taken for a whole one
        raise
