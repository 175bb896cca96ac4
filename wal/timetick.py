"""Time ticks: uint64 hybrid timestamps, Unix milliseconds above an 18-bit logical counter. No clock of its own.

One allocator serves a whole node, so that ticks order all of its logs. The clock is injected; a clock that stands still,
runs backwards or leaps ahead changes how ticks look, never their order.
"""

from collections.abc import Callable

LOGICAL_BITS = 18
LOGICAL_MASK = (1 << LOGICAL_BITS) - 1
TICK_MAX = (1 << 63) - 1
"""Ticks stay below 2^63 so that they fit the signed 64-bit columns of Parquet readers; that is the year 3084."""

CLOCK_LEAP_MS_MAX = 3_600_000
"""A clock this far ahead of the last tick is not believed: ticks then advance by the logical counter only."""


def compose_tick(physical_ms: int, logical: int = 0) -> int:
    """Return the tick of a Unix time in milliseconds and a logical counter."""
    return (physical_ms << LOGICAL_BITS) | logical


def physical_ms(tick: int) -> int:
    """Return the Unix time in milliseconds a tick carries."""
    return tick >> LOGICAL_BITS


def logical(tick: int) -> int:
    """Return the logical counter a tick carries."""
    return tick & LOGICAL_MASK


def add_ms(tick: int, duration_ms: int) -> int:
    """Return the tick `duration_ms` later; the logical counter stays."""
    return tick + (duration_ms << LOGICAL_BITS)


class TickAllocator:
    """Hands out strictly ascending ticks, each above every tick it has seen.

    `now_ms` returns Unix milliseconds. `above` is the highest tick ever promised by an earlier term; `leap_ms_max` bounds
    how far the clock may run ahead of the last tick (0 at first start: there is no last tick to compare with).
    Not safe across threads: it lives on the event loop.
    """

    __slots__ = ("_last", "_leap_ms_max", "_now_ms", "clock_leaps")

    def __init__(self, now_ms: Callable[[], int], *, above: int = 0, leap_ms_max: int = 0) -> None:
        self._now_ms = now_ms
        self._last = above
        self._leap_ms_max = leap_ms_max
        self.clock_leaps = 0

    @property
    def last(self) -> int:
        """The highest tick handed out or observed."""
        return self._last

    def allocate(self) -> int:
        """Return a tick above all earlier ones."""
        self._last = max(self._last + 1, self._clock_tick())
        return self._last

    def observe(self, tick: int) -> None:
        """Never hand out `tick` or anything below it: how cause stays before effect across nodes."""
        self._last = max(self._last, tick)

    def _clock_tick(self) -> int:
        now = self._now_ms()
        if self._leap_ms_max and self._last and now - physical_ms(self._last) > self._leap_ms_max:
            self.clock_leaps += 1
            return 0
        return compose_tick(now)
