"""Ticks ascend whatever the clock does."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wal.manual_log import StillClock
from wal.errors import InvalidArgument
from wal.timetick import (
    CLOCK_LEAP_MS_MAX,
    TICK_MAX,
    TickAllocator,
    add_ms,
    compose_tick,
    physical_ms,
    tick_given,
    tick_to_time,
    time_to_tick,
)

NOW_MS = 1_790_000_000_000


@given(st.integers(0, 2**44), st.integers(0, 2**18 - 1))
def test_a_tick_gives_back_the_time_and_counter_it_was_composed_of(ms: int, counter: int) -> None:
    tick = compose_tick(ms, counter)
    assert (physical_ms(tick), tick - compose_tick(ms)) == (ms, counter)


@given(st.integers(0, TICK_MAX))
def test_the_time_of_a_tick_leads_back_to_the_first_tick_of_its_millisecond(tick: int) -> None:
    assert time_to_tick(tick_to_time(tick)) == compose_tick(physical_ms(tick))


@given(st.datetimes(datetime(1970, 1, 2), datetime(3000, 1, 1)), st.integers(-23, 23))  # noqa: DTZ001
def test_a_moment_is_one_tick_in_whichever_zone_it_is_told(naive: datetime, hours: int) -> None:
    moment = naive.replace(tzinfo=UTC)
    assert time_to_tick(moment.astimezone(timezone(timedelta(hours=hours)))) == time_to_tick(moment)


def test_a_time_without_a_zone_or_outside_the_range_becomes_no_tick() -> None:
    for moment in (
        datetime(2026, 1, 1),  # noqa: DTZ001
        datetime(1969, 12, 31, tzinfo=UTC),
        datetime(3500, 1, 1, tzinfo=UTC),
    ):
        with pytest.raises(InvalidArgument):
            time_to_tick(moment)


def test_what_is_no_tick_has_no_time() -> None:
    for tick in (-1, TICK_MAX + 1, True):
        with pytest.raises(InvalidArgument):
            tick_to_time(tick)


def test_adding_a_duration_leaves_the_logical_counter_alone() -> None:
    assert add_ms(compose_tick(1000, 7), 250) == compose_tick(1250, 7)


@given(st.lists(st.integers(-(10**7), 10**7), min_size=1, max_size=50), st.integers(0, 2**60))
def test_ticks_ascend_strictly_under_any_clock(steps: list[int], above: int) -> None:
    clock = StillClock(NOW_MS)
    allocator = TickAllocator(clock, clock, above=above)
    ticks: list[int] = []
    for step in steps:
        clock.now_ms = NOW_MS + step
        ticks.append(allocator.allocate())
    assert all(earlier < later for earlier, later in zip([above, *ticks], ticks, strict=False))


@given(steps=st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 600)), max_size=30))
def test_ticks_allocated_together_follow_one_another_above_all_earlier_ones(
    steps: list[tuple[int, int]],
) -> None:
    clock = StillClock(NOW_MS)
    allocator = TickAllocator(clock, clock)
    last = 0
    for change_ms, count in steps:
        clock.now_ms += change_ms
        first = allocator.allocate(count)
        assert first > last
        assert first >= compose_tick(clock.now_ms)
        last = first + count - 1
        assert allocator.last == last
    assert allocator.allocate() > last


def test_more_ticks_than_the_counter_holds_run_ahead_into_the_next_millisecond() -> None:
    allocator = TickAllocator(lambda: 5, lambda: 5, above=compose_tick(5, 2**18 - 1))
    assert allocator.allocate() == compose_tick(6, 0)


def test_an_observed_tick_is_never_handed_out_again() -> None:
    allocator = TickAllocator(lambda: NOW_MS, lambda: 0)
    seen = compose_tick(NOW_MS + 60_000, 3)
    allocator.observe(seen)
    assert allocator.allocate() == seen + 1


class Clocks:
    """A clock that a test sets, and the time that really passes."""

    def __init__(self) -> None:
        self.now_ms = NOW_MS
        self.elapsed_ms = 77
        self.leaps: list[int] = []
        self.allocator = TickAllocator(
            lambda: self.now_ms, lambda: self.elapsed_ms, on_leap=self.leaps.append
        )

    def tick_after(self, *, passed_ms: int, set_by_ms: int = 0) -> int:
        """Let time pass and set the clock besides; return the time of the next tick."""
        self.elapsed_ms += passed_ms
        self.now_ms += passed_ms + set_by_ms
        return physical_ms(self.allocator.allocate())


HOUR_MS = CLOCK_LEAP_MS_MAX


def test_a_clock_that_leaps_ahead_is_told_once_and_not_followed_until_it_comes_back() -> None:
    clocks = Clocks()
    assert clocks.tick_after(passed_ms=1_000) == NOW_MS + 1_000
    assert clocks.tick_after(passed_ms=1_000, set_by_ms=HOUR_MS + 1) == NOW_MS + 2_000
    assert clocks.tick_after(passed_ms=10 * HOUR_MS) == NOW_MS + 2_000 + 10 * HOUR_MS
    assert clocks.leaps == [HOUR_MS + 1]
    back_ms = clocks.tick_after(passed_ms=1_000, set_by_ms=-2 * HOUR_MS)
    assert back_ms >= NOW_MS + 2_000 + 10 * HOUR_MS
    assert clocks.tick_after(passed_ms=3 * HOUR_MS) == clocks.now_ms


def test_a_clock_that_leaps_less_than_the_bound_is_followed() -> None:
    clocks = Clocks()
    assert clocks.tick_after(passed_ms=5, set_by_ms=HOUR_MS) == clocks.now_ms
    assert clocks.leaps == []


def test_a_clock_that_is_set_back_and_forth_again_is_no_leap() -> None:
    clocks = Clocks()
    started_ms = clocks.tick_after(passed_ms=0)
    assert clocks.tick_after(passed_ms=1, set_by_ms=-3 * HOUR_MS) == started_ms
    assert clocks.tick_after(passed_ms=1, set_by_ms=3 * HOUR_MS) == clocks.now_ms
    assert clocks.leaps == []


def test_hours_that_really_passed_are_no_leap() -> None:
    clocks = Clocks()
    assert clocks.tick_after(passed_ms=48 * HOUR_MS) == clocks.now_ms == NOW_MS + 48 * HOUR_MS
    assert clocks.leaps == []


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(-(10**8), 10**8)), max_size=50))
def test_ticks_never_run_further_ahead_of_the_time_that_passed_than_corrections_took_them(
    steps: list[tuple[int, int]],
) -> None:
    clocks = Clocks()
    before = clocks.tick_after(passed_ms=0)
    for passed_ms, set_by_ms in steps:
        at_ms = clocks.tick_after(passed_ms=passed_ms, set_by_ms=set_by_ms)
        assert before <= at_ms <= max(before, clocks.now_ms)  # never back, never ahead of the clock
        before = at_ms


def test_a_tick_may_be_given_as_the_time_it_stands_for() -> None:
    moment = datetime(2026, 11, 22, 12, tzinfo=UTC)
    assert tick_given("as_of", moment) == time_to_tick(moment)
    assert tick_given("as_of", 7) == 7
    for wrong in (1.5, True, "now", None, TICK_MAX + 1, moment.replace(tzinfo=None)):
        with pytest.raises(InvalidArgument):
            tick_given("as_of", wrong)
