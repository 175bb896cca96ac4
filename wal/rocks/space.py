"""The free space on a log's disk, the limits that follow from it, and the reserve that a start
needs.

    level      free space                          appends   what makes room  reserve
    AMPLE      twice the low-water mark, or more   pass      passes           held, grows with log
    SHORT      less than that                      pass      is requested     held
    FULL       below the low-water mark            refused   passes           held
    EXHAUSTED  too little for any write            refused   refused          released

"What makes room" are cuts, seals, drops, rollbacks and ticks: little data, after which the log can
be truncated. With `free_bytes_min` 0 every level is AMPLE. `docs/adr/0008-disk-space.md` has the
reasons and the figures.
"""

import contextlib
import os
from pathlib import Path

from wal.errors import Corrupt
from wal.files import open_regular
from wal.log import SpaceLevel, StoreSpace
from wal.rocks.layout import DATABASE_NAME
from wal.runtime import event_log

MIB = 1 << 20
LOG_FACTOR = 2
"""The low-water mark is at least this many times RocksDB's own log."""
MAKE_ROOM_FACTOR = 2
"""Below this many low-water marks, room is made, so that a cut has room for its files before
appends are refused.
"""
RESUME_SHARE = 16
"""Appends resume a sixteenth above the mark at which they were refused: otherwise acceptance could
change with every append.
"""
EXHAUSTED_BYTES = MIB
"""About one batch of writes: with less free space the next write may fail with an open outcome."""
REPLAY_BYTES = MIB
"""What a start writes besides the replayed log: a manifest, the head of a new log, and the footers
of two tables.
"""
RESERVE_STEP_BYTES = 2 * MIB
"""The reserve grows in steps of this size; each is an allocation of 0.2 ms on the writer's thread.
"""
LOOK_BYTES_MIN = MIB // 2
"""Minimum written between two looks at the disk: a look takes 50 us, and writing this much takes at
least 2 ms.
"""
SHORT_LOOK_BYTES = MIB // 16
"""Each batch of at least this size is preceded by the short look, which takes about a hundredth of
the batch's time.
"""
RESERVE_NAME = "reserve"
ASK_AGAIN_BYTES = 1 << 20
ASK_AGAIN_LOOKS = 64
"""After a failed allocation the reserve is tried again when this much more space is free, and every
`ASK_AGAIN_LOOKS` looks: under a quota the free space does not show.
"""

_BLOCK_BYTES = 512
"""What `st_blocks` counts in, whatever the file system's blocks are."""
_ZEROS = bytes(MIB)

_log = event_log(__name__)


class SpaceVerdict(StoreSpace, frozen=True, kw_only=True):
    """The free space that a look found, and its consequences."""

    @property
    def look_after_bytes(self) -> int:
        """How many bytes may be written before the next look; 0 or less when the next write needs a
        look.

        This is half of the distance to a mark, at most what the reserve covers, and at least the
        minimum worth a look; but never so much that the disk would be exhausted.
        """
        mark = self.needed_bytes if self.level < SpaceLevel.FULL else EXHAUSTED_BYTES
        to_mark = (self.free_bytes - mark) // 2
        covered = self.reserve_bytes - REPLAY_BYTES - self.log_bytes
        to_exhausted = self.free_bytes - EXHAUSTED_BYTES
        return min(max(LOOK_BYTES_MIN, min(to_mark, covered)), to_exhausted)


NOT_LOOKED = SpaceVerdict(
    level=SpaceLevel.AMPLE, free_bytes=0, log_bytes=0, needed_bytes=0, reserve_bytes=0
)


def judge(
    *, free_bytes: int, log_bytes: int, reserve_bytes: int, free_bytes_min: int, before: SpaceLevel
) -> SpaceVerdict:
    """Return the verdict on a look's figures; `before` is the previous verdict's level. Pure."""
    needed = max(free_bytes_min, LOG_FACTOR * log_bytes) if free_bytes_min else 0
    level = _level(free_bytes, needed, before)
    reserve = 0
    if level is not SpaceLevel.EXHAUSTED:
        wanted = reserve_for(log_bytes)
        # The reserve has priority over appends: appends may be refused because of the space it
        # takes.
        fits = free_bytes - (wanted - reserve_bytes) >= max(needed // 2, REPLAY_BYTES)
        reserve = max(wanted, reserve_bytes) if fits else reserve_bytes
    return SpaceVerdict(
        level=level,
        free_bytes=free_bytes,
        log_bytes=log_bytes,
        needed_bytes=needed,
        reserve_bytes=reserve,
    )


def _level(free_bytes: int, needed_bytes: int, before: SpaceLevel) -> SpaceLevel:
    if not needed_bytes:
        return SpaceLevel.AMPLE
    if free_bytes < min(EXHAUSTED_BYTES, needed_bytes):
        return SpaceLevel.EXHAUSTED
    if free_bytes < needed_bytes + (
        needed_bytes // RESUME_SHARE if before >= SpaceLevel.FULL else 0
    ):
        return SpaceLevel.FULL
    return SpaceLevel.SHORT if free_bytes < MAKE_ROOM_FACTOR * needed_bytes else SpaceLevel.AMPLE


def reserve_for(log_bytes: int) -> int:
    """Return the size of the reserve that lets a start replay `log_bytes` of log, rounded up so
    that it rarely grows.
    """
    return -(-(log_bytes + REPLAY_BYTES) // RESERVE_STEP_BYTES) * RESERVE_STEP_BYTES


def log_bytes_of(database: Path) -> int:
    """Return the size of RocksDB's own log, which a start replays; 0 when there is no database.
    Raises `OSError`.
    """
    total = 0
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(database) as files:
        for file in files:
            if file.name.endswith(".log"):
                with contextlib.suppress(FileNotFoundError):  # RocksDB has just deleted it
                    total += file.stat().st_size
    return total


def free_bytes_of(path: Path) -> int:
    """Return how many bytes this user may still write on the disk of `path`. Raises `OSError`."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


class SpaceWatch:
    """Watches the disk of one node directory, and adjusts the reserve to the verdict.

    The reserve is a file of allocated blocks without content. Releasing it is a truncation, which
    needs no room. The file keeps its name, so that allocating it again needs no room in the
    directory. One thread at a time; a look takes some 50 us.
    """

    def __init__(self, directory: Path, *, free_bytes_min: int) -> None:
        self.verdict: SpaceVerdict = NOT_LOOKED
        self._directory = directory
        self._database = directory / DATABASE_NAME
        self._free_bytes_min = free_bytes_min
        self._reserve = directory / RESERVE_NAME
        self._looks_without_asking = self._refused_free_bytes = 0

    def make_room_to_start(self) -> None:
        """Release the reserve if the disk has too little other room to replay the log. Does nothing
        if the free space cannot be read.
        """
        with contextlib.suppress(OSError):
            needed_bytes = log_bytes_of(self._database) + REPLAY_BYTES
            if self._reserve_bytes() and free_bytes_of(self._directory) < needed_bytes:
                self._resize(0)

    def is_tight(self, size_bytes: int) -> bool:
        """Whether `size_bytes` may not find room: the short look, 2 us. False when the free space
        cannot be read.
        """
        try:
            return free_bytes_of(self._directory) < size_bytes + EXHAUSTED_BYTES
        except OSError:
            return False

    def look(self) -> SpaceVerdict:
        """Judge the disk, release or allocate the reserve, and return the verdict; the previous one
        when the free space cannot be read.
        """
        with contextlib.suppress(OSError):  # the next write will show the error
            held_bytes = self._reserve_bytes()
            self.verdict = self._judge(held_bytes)
            if self.verdict.level is SpaceLevel.EXHAUSTED and held_bytes:
                self._resize(0)
                self.verdict = self._judge(self._reserve_bytes())
            elif (
                self._looks_without_asking
                and self.verdict.free_bytes < self._refused_free_bytes + ASK_AGAIN_BYTES
            ):
                self._looks_without_asking -= 1
            elif self.verdict.reserve_bytes > held_bytes and not self._resize(
                self.verdict.reserve_bytes
            ):
                self._looks_without_asking = ASK_AGAIN_LOOKS
                self._refused_free_bytes = self.verdict.free_bytes
        return self.verdict

    def _judge(self, reserve_bytes: int) -> SpaceVerdict:
        return judge(
            free_bytes=free_bytes_of(self._directory),
            log_bytes=log_bytes_of(self._database),
            reserve_bytes=reserve_bytes,
            free_bytes_min=self._free_bytes_min,
            before=self.verdict.level,
        )

    def _reserve_bytes(self) -> int:
        try:
            return self._reserve.stat().st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            return 0

    def _resize(self, wanted_bytes: int) -> bool:
        """Resize the reserve and return whether it has that size now. A failed allocation is tried
        again later.
        """
        try:
            held_bytes = self._reserve_bytes()
            descriptor = open_regular(self._reserve, os.O_RDWR | os.O_CREAT)
            try:
                if wanted_bytes < held_bytes:
                    os.ftruncate(descriptor, wanted_bytes)
                else:
                    _allocate(descriptor, held_bytes, wanted_bytes)
            finally:
                os.close(descriptor)
        except (OSError, Corrupt) as error:
            _log.info(
                "reserve_not_held",
                path=str(self._reserve),
                wanted_bytes=wanted_bytes,
                error=str(error),
            )
            return False
        return True


def _allocate(descriptor: int, held_bytes: int, wanted_bytes: int) -> None:
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, wanted_bytes)
        else:  # macOS
            for at in range(held_bytes, wanted_bytes, len(_ZEROS)):
                os.pwrite(descriptor, _ZEROS[: wanted_bytes - at], at)
    except OSError:
        os.ftruncate(descriptor, held_bytes)  # otherwise a partial step would count as a whole one
        raise
