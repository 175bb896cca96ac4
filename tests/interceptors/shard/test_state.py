import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.shard.state import (
    SNAPSHOT_FORMAT,
    GrowingSegment,
    SegmentLimits,
    SegmentStats,
    ShardState,
    due_seals,
)
from wal.errors import Corrupt, InvalidArgument, UnsupportedFormat
from wal.timetick import compose_tick

NOW_S = 100_000
LIMITS = SegmentLimits(
    bytes_max=1000,
    life_s_max=600,
    idle_s_max=60,
    idle_bytes_min=100,
    growing_bytes_high=10_000,
    growing_bytes_low=5_000,
)


def tick(seconds: float) -> int:
    return compose_tick(int(seconds * 1000))


def segment(
    number: int = 1,
    *,
    size: int = 1,
    rows: int = 1,
    age_s: float = 1,
    idle_s: float = 0,
    bytes_max: int = 1000,
) -> GrowingSegment:
    stats = SegmentStats(
        bytes_max=bytes_max, rows=rows, bytes=size, changed_tick=tick(NOW_S - idle_s) if rows else 0
    )
    return GrowingSegment(number, "p0_1v0", 1, 2, 1, tick(NOW_S - age_s), stats)


@pytest.mark.parametrize(
    "due, reason",
    [
        (segment(size=1001), "capacity"),
        (segment(size=1000), None),
        (segment(age_s=600), "lifetime"),
        (segment(age_s=599), None),
        (segment(age_s=599, idle_s=60, size=100), "idle"),
        (segment(age_s=599, idle_s=59, size=100), None),
        (segment(age_s=599, idle_s=60, size=99), None),
        (segment(age_s=6000, rows=0, size=0), None),
    ],
    ids=["full", "exactly full", "old", "young", "idle", "busy", "too small to be idle", "empty"],
)
def test_policy_names_its_reason_or_leaves_the_segment(
    due: GrowingSegment, reason: str | None
) -> None:
    assert [reason for _, reason in due_seals([due], LIMITS, tick=tick(NOW_S))] == (
        [reason] if reason else []
    )


def test_high_water_mark_seals_the_largest_first_down_to_the_low_one() -> None:
    sizes = {1: 1000, 2: 6000, 3: 4000, 4: 500}
    growing = [segment(number, size=size, bytes_max=1 << 30) for number, size in sizes.items()]
    seals = due_seals(growing, LIMITS, tick=tick(NOW_S))
    assert [(sealed.segment_id, reason) for sealed, reason in seals] == [
        (2, "growing_bytes_hwm"),
        (3, "growing_bytes_hwm"),
    ]


def test_total_at_the_high_water_mark_seals_nothing() -> None:
    growing = [segment(number, size=5000, bytes_max=1 << 30) for number in (1, 2)]
    assert due_seals(growing, LIMITS, tick=tick(NOW_S)) == []


@given(st.lists(st.integers(0, 6000), max_size=12))
def test_no_segment_is_sealed_twice_and_the_rest_is_within_the_marks(sizes: list[int]) -> None:
    growing = [segment(number, size=size, bytes_max=3000) for number, size in enumerate(sizes)]
    sealed = [each.segment_id for each, _ in due_seals(growing, LIMITS, tick=tick(NOW_S))]
    assert len(set(sealed)) == len(sealed)
    staying = sum(each.stats.bytes for each in growing if each.segment_id not in sealed)
    assert staying <= LIMITS.growing_bytes_high


@pytest.mark.parametrize(
    "wrong",
    [{"growing_bytes_low": 512 << 20}],
    ids=str,
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        SegmentLimits(**wrong)


# --- how full a segment is ------------------------------------------------------------------------


def filled(size_bytes: int, rows: int = 1, rows_max: int = 0) -> SegmentStats:
    return SegmentStats(bytes_max=400, rows_max=rows_max, rows=rows, bytes=size_bytes)


def test_hitting_a_limit_exactly_keeps_the_segment_open() -> None:
    assert not filled(400).reached
    assert not filled(0, rows=10, rows_max=10).reached


def test_insert_over_a_limit_fills_the_segment() -> None:
    assert filled(401).reached
    assert filled(0, rows=11, rows_max=10).reached


def test_row_limit_of_zero_is_no_limit() -> None:
    assert not filled(0, rows=1 << 40).reached


# --- in a checkpoint ------------------------------------------------------------------------------


def test_snapshot_of_a_newer_release_is_refused_as_such() -> None:
    newer = msgspec.msgpack.encode({"format": SNAPSHOT_FORMAT + 1, "something": "else"})
    with pytest.raises(UnsupportedFormat, match="format 2"):
        ShardState.restore(newer)


@pytest.mark.parametrize("damaged", [b"", b"\xc1", b"\x80", ShardState().snapshot()[:-1]], ids=repr)
def test_damaged_snapshot_is_refused_as_corrupt(damaged: bytes) -> None:
    with pytest.raises(Corrupt):
        ShardState.restore(damaged)


def test_empty_state_survives_its_snapshot() -> None:
    assert ShardState.restore(ShardState().snapshot()).snapshot() == ShardState().snapshot()
