"""How near the disk of a log is to full, and what follows from it. Pure: a reading in, a verdict out.

    level      free space is                       appends    what makes room   reserve
    AMPLE      twice the low-water mark, or more   pass       passes            held, and grows with the log
    SHORT      below that                          pass       is asked for      held
    FULL       below the low-water mark            refused    passes            held
    EXHAUSTED  too little for any write            refused    refused           given up

"What makes room" are cuts, seals, drops, rollbacks and ticks: little data, after which log can be given up. The low-water
mark is `free_bytes_min`, or twice RocksDB's own log if that is more. The reserve is a file as large as what a start has to
write when it replays that log. It is given up when nothing else is left, also by a start, and taken again when half the mark
stays free. A disk that is exhausted becomes FULL by that, and what makes room has the reserve to do so.

With `free_bytes_min` 0 there is no mark: every level is AMPLE, and only a start gives the reserve up. `space_watch` does the
I/O, `writer` asks it, and `docs/adr/0008-disk-space.md` has the reasons and the figures.
"""

from enum import IntEnum, unique

import msgspec

MIB = 1 << 20
LOG_FACTOR = 2
"""The low-water mark is at least this many times RocksDB's own log."""
MAKE_ROOM_FACTOR = 2
"""Room is made from this many low-water marks on, so that a cut has room for its files before appends are refused."""
RESUME_SHARE = 16
"""Appends resume a sixteenth above the mark at which they were refused, or every append would find another answer."""
EXHAUSTED_BYTES = MIB
"""One batch of writes, about: less than this, and the next one may fail, whose outcome nobody knows."""
REPLAY_BYTES = MIB
"""What a start writes besides the replayed log: a manifest, the head of a new log, two footers of tables."""
RESERVE_STEP_BYTES = 2 * MIB
RESERVE_STEP_BYTES_LARGE = 16 * MIB
"""The reserve of a log of this size or more grows in steps of it: each step is an allocation on the writer's thread."""
LOOK_BYTES_MIN = MIB // 2
"""A look takes 50 us, and so much is written in 2 ms at best."""


@unique
class SpaceLevel(IntEnum):
    """How short the disk is."""

    AMPLE = 0
    SHORT = 1
    FULL = 2
    EXHAUSTED = 3


class SpaceReading(msgspec.Struct, frozen=True, kw_only=True):
    """What is found on the disk: bytes free beside the reserve, bytes of RocksDB's own log, bytes the reserve holds."""

    free_bytes: int
    log_bytes: int
    reserve_bytes: int


class SpaceVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What follows: `needed_bytes` is the low-water mark (0: none), `reserve_bytes` what the reserve is to hold now."""

    level: SpaceLevel
    free_bytes: int
    log_bytes: int
    needed_bytes: int
    reserve_bytes: int

    @property
    def look_after_bytes(self) -> int:
        """How much may be written before the next look: half of the way to a mark, and no more than the reserve is for."""
        above = self.free_bytes - (self.needed_bytes if self.level < SpaceLevel.FULL else EXHAUSTED_BYTES)
        return max(LOOK_BYTES_MIN, min(above // 2, self.reserve_bytes - REPLAY_BYTES - self.log_bytes))


NOT_LOOKED = SpaceVerdict(level=SpaceLevel.AMPLE, free_bytes=0, log_bytes=0, needed_bytes=0, reserve_bytes=0)


def judge(reading: SpaceReading, *, free_bytes_min: int, before: SpaceLevel) -> SpaceVerdict:
    """Return what follows from a reading, after one that was judged to be `before`."""
    needed = low_water_mark(reading.log_bytes, free_bytes_min=free_bytes_min)
    level = _level(reading.free_bytes, needed, before)
    return SpaceVerdict(
        level=level,
        free_bytes=reading.free_bytes,
        log_bytes=reading.log_bytes,
        needed_bytes=needed,
        reserve_bytes=0 if level is SpaceLevel.EXHAUSTED else _reserve(reading, needed),
    )


def low_water_mark(log_bytes: int, *, free_bytes_min: int) -> int:
    """Return how much has to be free for appends to pass; 0 when `free_bytes_min` is."""
    return max(free_bytes_min, LOG_FACTOR * log_bytes) if free_bytes_min else 0


def start_needs_reserve(reading: SpaceReading) -> bool:
    """Whether a start, which writes the replayed log, has too little room beside the reserve."""
    return reading.free_bytes < reading.log_bytes + REPLAY_BYTES


def reserve_for(log_bytes: int) -> int:
    """Return how large a reserve lets a start replay so much log, rounded up so that it seldom grows."""
    step = RESERVE_STEP_BYTES if log_bytes < RESERVE_STEP_BYTES_LARGE else RESERVE_STEP_BYTES_LARGE
    return -(-(log_bytes + REPLAY_BYTES) // step) * step


def _level(free_bytes: int, needed_bytes: int, before: SpaceLevel) -> SpaceLevel:
    if not needed_bytes:
        return SpaceLevel.AMPLE
    if free_bytes < min(EXHAUSTED_BYTES, needed_bytes):
        return SpaceLevel.EXHAUSTED
    if free_bytes < needed_bytes + (needed_bytes // RESUME_SHARE if before >= SpaceLevel.FULL else 0):
        return SpaceLevel.FULL
    return SpaceLevel.SHORT if free_bytes < MAKE_ROOM_FACTOR * needed_bytes else SpaceLevel.AMPLE


def _reserve(reading: SpaceReading, needed_bytes: int) -> int:
    held, wanted = reading.reserve_bytes, reserve_for(reading.log_bytes)
    missing = wanted - held
    # It comes before appends: what it takes may well be what appends are refused for.
    fits = reading.free_bytes - missing >= max(needed_bytes // 2, REPLAY_BYTES)
    return wanted if missing > 0 and fits else held
