"""The policy of a disk that fills up: levels, the low-water mark and the reserve, without a
disk.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wal.log import SpaceLevel
from wal.rocks.space import (
    EXHAUSTED_BYTES,
    LOG_FACTOR,
    LOOK_BYTES_MIN,
    MIB,
    NOT_LOOKED,
    REPLAY_BYTES,
    SpaceVerdict,
    judge,
    reserve_for,
)

MARK_BYTES = 256 * MIB
WRITE_BYTES_MAX = 5 * MIB  # one batch of the writer thread and one more entry

sizes = st.integers(0, 2 << 30)
levels = st.sampled_from(SpaceLevel)
marks = st.sampled_from([MIB, 4 * MIB, MARK_BYTES])


def judged(
    free_bytes: int,
    *,
    log_bytes: int = 0,
    reserve_bytes: int = 0,
    mark: int = MARK_BYTES,
    before: SpaceLevel,
) -> SpaceVerdict:
    return judge(
        free_bytes=free_bytes,
        log_bytes=log_bytes,
        reserve_bytes=reserve_bytes,
        free_bytes_min=mark,
        before=before,
    )


def level_of(free_bytes: int, *, before: SpaceLevel = SpaceLevel.AMPLE) -> SpaceLevel:
    return judged(free_bytes, before=before).level


@pytest.mark.parametrize(
    "free_bytes, expected",
    [
        (2 * MARK_BYTES, SpaceLevel.AMPLE),
        (2 * MARK_BYTES - 1, SpaceLevel.SHORT),
        (MARK_BYTES, SpaceLevel.SHORT),
        (MARK_BYTES - 1, SpaceLevel.FULL),
        (EXHAUSTED_BYTES, SpaceLevel.FULL),
        (EXHAUSTED_BYTES - 1, SpaceLevel.EXHAUSTED),
        (0, SpaceLevel.EXHAUSTED),
    ],
)
def test_a_level_begins_exactly_at_its_mark(free_bytes: int, expected: SpaceLevel) -> None:
    assert level_of(free_bytes) is expected


@given(sizes, sizes, sizes, marks, levels)
def test_less_free_space_is_never_a_better_level(
    less: int, more: int, log_bytes: int, mark: int, before: SpaceLevel
) -> None:
    less, more = sorted((less, more))
    worse, better = (
        judged(free, log_bytes=log_bytes, mark=mark, before=before).level for free in (less, more)
    )
    assert worse >= better


def test_appends_resume_only_a_little_above_the_mark_they_were_refused_at() -> None:
    assert level_of(MARK_BYTES, before=SpaceLevel.FULL) is SpaceLevel.FULL
    assert level_of(MARK_BYTES + MARK_BYTES // 16, before=SpaceLevel.FULL) is SpaceLevel.SHORT


def test_a_large_log_of_rocksdb_raises_the_mark() -> None:
    for log_bytes, mark in ((200 * MIB, LOG_FACTOR * 200 * MIB), (MIB, MARK_BYTES)):
        assert judged(0, log_bytes=log_bytes, before=SpaceLevel.AMPLE).needed_bytes == mark


@given(sizes, sizes, sizes, levels)
def test_without_a_mark_nothing_is_ever_refused(
    free: int, log: int, reserve: int, before: SpaceLevel
) -> None:
    verdict = judged(free, log_bytes=log, reserve_bytes=reserve, mark=0, before=before)
    assert verdict.level is SpaceLevel.AMPLE
    assert verdict.reserve_bytes >= reserve


@given(sizes, sizes, sizes, marks, levels)
def test_an_exhausted_disk_gives_its_reserve_up_and_no_other_does(
    free: int, log: int, reserve: int, mark: int, before: SpaceLevel
) -> None:
    verdict = judged(free, log_bytes=log, reserve_bytes=reserve, mark=mark, before=before)
    if verdict.level is SpaceLevel.EXHAUSTED:
        assert verdict.reserve_bytes == 0
    else:
        assert verdict.reserve_bytes >= reserve


@given(sizes, sizes, sizes, marks, levels)
def test_taking_the_reserve_never_exhausts_the_disk(
    free: int, log: int, reserve: int, mark: int, before: SpaceLevel
) -> None:
    verdict = judged(free, log_bytes=log, reserve_bytes=reserve, mark=mark, before=before)
    taken = verdict.reserve_bytes - reserve
    if taken > 0:
        assert free - taken >= max(EXHAUSTED_BYTES, verdict.needed_bytes // 2)


@given(sizes)
def test_the_reserve_has_room_for_replaying_the_log_it_is_for(log_bytes: int) -> None:
    assert reserve_for(log_bytes) >= log_bytes + REPLAY_BYTES


class SimulatedDisk:
    """A log that fills its disk under the policy: written until it is refused, given up now and
    then.
    """

    def __init__(self, capacity_bytes: int, mark_bytes: int) -> None:
        self.free_bytes = capacity_bytes
        self.log_bytes = 0
        self.reserve_bytes = 0
        self._mark_bytes = mark_bytes
        self._verdict: SpaceVerdict = NOT_LOOKED
        self._unlooked_bytes = 0
        self.look()

    @property
    def takes_appends(self) -> bool:
        return self._verdict.level < SpaceLevel.FULL

    def look(self) -> None:
        self._verdict = judged(
            self.free_bytes,
            log_bytes=self.log_bytes,
            reserve_bytes=self.reserve_bytes,
            mark=self._mark_bytes,
            before=self._verdict.level,
        )
        self.free_bytes -= self._verdict.reserve_bytes - self.reserve_bytes
        self.reserve_bytes = self._verdict.reserve_bytes
        self._unlooked_bytes = 0

    def write(self, size_bytes: int) -> None:
        self._unlooked_bytes += size_bytes
        if self._unlooked_bytes >= self._verdict.look_after_bytes:
            self.look()
        self.free_bytes -= size_bytes
        self.log_bytes += size_bytes

    def flush(self) -> None:
        """RocksDB brings its log into tables, which take as much."""
        self.log_bytes = 0


@given(
    st.integers(40 * MIB, 2 << 30),
    st.sampled_from([16 * MIB, MARK_BYTES]),
    st.lists(st.integers(1, WRITE_BYTES_MAX) | st.just(0), max_size=400),
)
def test_a_log_that_fills_its_disk_by_itself_stops_while_a_start_still_has_room(
    capacity: int, mark: int, writes: list[int]
) -> None:
    disk = SimulatedDisk(capacity, mark)
    for size in writes:
        if not size:
            disk.flush()
            disk.look()
        elif disk.takes_appends:
            disk.write(size)
        assert disk.free_bytes >= 0, "a write that was let in found no room"
        assert disk.free_bytes + disk.reserve_bytes >= disk.log_bytes + REPLAY_BYTES


@given(st.lists(st.integers(1, WRITE_BYTES_MAX), max_size=400))
def test_on_a_large_disk_the_reserve_keeps_up_with_the_log_whoever_takes_the_rest(
    writes: list[int],
) -> None:
    disk = SimulatedDisk(1 << 40, MARK_BYTES)
    for size in writes:
        disk.write(size)
        behind = disk.log_bytes + REPLAY_BYTES - disk.reserve_bytes
        assert behind <= WRITE_BYTES_MAX + LOOK_BYTES_MIN
