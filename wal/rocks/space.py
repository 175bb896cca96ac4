"""How near the disk of a log is to full, what follows from it, and the reserve that a start needs.

    level      free space is                       appends    what makes room   reserve AMPLE
    twice the low-water mark, or more   pass       passes            held, and grows with the log
    SHORT      below that                          pass       is asked for      held FULL
    below the low-water mark            refused    passes            held EXHAUSTED  too little for
    any write            refused    refused           given up

"What makes room" are cuts, seals, drops, rollbacks and ticks: little data, after which log can be
given up. With `free_bytes_min` 0 every level is AMPLE. `docs/adr/0008-disk-space.md` has the
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
"""Room is made from this many low-water marks on, so that a cut has room for its files before
appends are refused.
"""
RESUME_SHARE = 16
"""Appends resume a sixteenth above the mark at which they were refused, or every append would find
another answer.
"""
EXHAUSTED_BYTES = MIB
"""One batch of writes, about: less than this, and the next one may fail, whose outcome nobody
knows.
"""
REPLAY_BYTES = MIB
"""What a start writes besides the replayed log: a manifest, the head of a new log, two footers of
tables.
"""
RESERVE_STEP_BYTES = 2 * MIB
"""Each step of the reserve is an allocation on the writer's thread, of 0.2 ms."""
LOOK_BYTES_MIN = MIB // 2
"""A look takes 50 us, and so much is written in 2 ms at best."""
SHORT_LOOK_BYTES = MIB // 16
"""The short look comes before each batch of so much, which takes about a hundred times as long."""
RESERVE_NAME = "reserve"
ASK_AGAIN_BYTES = 1 << 20
ASK_AGAIN_LOOKS = 64
"""A reserve that could not be had is asked for again with so much more room, and every so many
looks: a quota shows none.
"""

_BLOCK_BYTES = 512
"""What `st_blocks` counts in, whatever the file system's blocks are."""
_ZEROS = bytes(MIB)

_log = event_log(__name__)


class SpaceVerdict(StoreSpace, frozen=True, kw_only=True):
    """What a look found, and what follows."""

    @property
    def look_after_bytes(self) -> int:
        """How much may be written before the next look, 0 or less when nothing may.

        That is half of the way to a mark, no more than the reserve is for, and at least what is
        worth a look; but never so much that it would leave an exhausted disk.
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
    """Return what follows from what a look found, after one that was judged to be `before`.
    Pure.
    """
    needed = max(free_bytes_min, LOG_FACTOR * log_bytes) if free_bytes_min else 0
    level = _level(free_bytes, needed, before)
    reserve = 0
    if level is not SpaceLevel.EXHAUSTED:
        wanted = reserve_for(log_bytes)
        # It comes before appends: what it takes may well be what appends are refused for.
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
    """Return how large a reserve lets a start replay so much log, rounded up so that it seldom
    grows.
    """
    return -(-(log_bytes + REPLAY_BYTES) // RESERVE_STEP_BYTES) * RESERVE_STEP_BYTES


def log_bytes_of(database: Path) -> int:
    """Return the size of RocksDB's own log: what a start has to replay. 0 when there is no
    database. Raises `OSError`.
    """
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


class SpaceWatch:
    """Looks at the disk of one node directory, and keeps its reserve as the verdict says.

    The reserve is a file of blocks without content. Giving it up is a truncation, which needs no
    room; it keeps its name, so that taking it again needs no room in a directory. One thread at a
    time; a look takes some 50 us.
    """

    def __init__(self, directory: Path, *, free_bytes_min: int) -> None:
        self.verdict: SpaceVerdict = NOT_LOOKED
        self._directory = directory
        self._database = directory / DATABASE_NAME
        self._free_bytes_min = free_bytes_min
        self._reserve = directory / RESERVE_NAME
        self._looks_without_asking = self._refused_free_bytes = 0

    def make_room_to_start(self) -> None:
        """Give the reserve up if the disk has too little room beside it for replaying the log, and
        can tell.
        """
        with contextlib.suppress(OSError):
            needed_bytes = log_bytes_of(self._database) + REPLAY_BYTES
            if self._reserve_bytes() and free_bytes_of(self._directory) < needed_bytes:
                self._resize(0)

    def is_tight(self, size_bytes: int) -> bool:
        """Whether so much may not find room: the short look, 2 us. A disk that cannot tell is not
        tight.
        """
        try:
            return free_bytes_of(self._directory) < size_bytes + EXHAUSTED_BYTES
        except OSError:
            return False

    def look(self) -> SpaceVerdict:
        """Judge the disk, give up or take the reserve, and return the verdict: the last one when
        the disk cannot tell.
        """
        with contextlib.suppress(OSError):  # the next write will tell more
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
        """Return whether the reserve has that size now; one that cannot be had is done without and
        asked for again later.
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
        os.ftruncate(descriptor, held_bytes)  # half of a step would be taken for a whole one
        raise
