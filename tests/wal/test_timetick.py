"""Ticks ascend whatever the clock does."""

from hypothesis import given
from hypothesis import strategies as st

from wal.timetick import CLOCK_LEAP_MS_MAX, TickAllocator, add_ms, compose_tick, logical, physical_ms

NOW_MS = 1_790_000_000_000


@given(st.integers(0, 2**44), st.integers(0, 2**18 - 1))
def test_a_tick_gives_back_the_time_and_counter_it_was_composed_of(ms: int, counter: int) -> None:
    tick = compose_tick(ms, counter)
    assert (physical_ms(tick), logical(tick)) == (ms, counter)


def test_adding_a_duration_leaves_the_logical_counter_alone() -> None:
    assert add_ms(compose_tick(1000, 7), 250) == compose_tick(1250, 7)


@given(st.lists(st.integers(-(10**7), 10**7), min_size=1, max_size=50), st.integers(0, 2**60))
def test_ticks_ascend_strictly_under_any_clock(steps: list[int], above: int) -> None:
    clock = iter([max(0, NOW_MS + step) for step in steps])
    allocator = TickAllocator(lambda: next(clock), above=above)
    ticks = [allocator.allocate() for _ in steps]
    assert all(earlier < later for earlier, later in zip([above, *ticks], ticks, strict=False))


def test_more_ticks_than_the_counter_holds_run_ahead_into_the_next_millisecond() -> None:
    allocator = TickAllocator(lambda: 5, above=compose_tick(5, 2**18 - 1))
    assert allocator.allocate() == compose_tick(6, 0)


def test_an_observed_tick_is_never_handed_out_again() -> None:
    allocator = TickAllocator(lambda: NOW_MS)
    seen = compose_tick(NOW_MS + 60_000, 3)
    allocator.observe(seen)
    assert allocator.allocate() == seen + 1


def test_a_clock_that_leaps_ahead_is_counted_and_not_followed() -> None:
    now = NOW_MS
    allocator = TickAllocator(lambda: now, leap_ms_max=CLOCK_LEAP_MS_MAX)
    first = allocator.allocate()
    now += CLOCK_LEAP_MS_MAX + 1
    assert allocator.allocate() == first + 1
    assert allocator.clock_leaps == 1


def test_a_clock_that_leaps_less_than_the_bound_is_followed() -> None:
    now = NOW_MS
    allocator = TickAllocator(lambda: now, leap_ms_max=CLOCK_LEAP_MS_MAX)
    allocator.allocate()
    now += CLOCK_LEAP_MS_MAX
    assert physical_ms(allocator.allocate()) == now
    assert allocator.clock_leaps == 0
