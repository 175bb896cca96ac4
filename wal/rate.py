"""How fast something goes lately: a count for each of the last seconds. Pure; the clock is the caller's."""

from collections.abc import Callable

WINDOW_S = 10
"""Long enough to be steady between two cuts, short enough to show what goes on now."""


class Rate:
    """Counts in whole seconds of `clock`, which returns seconds and never goes back. Lives on one thread."""

    __slots__ = ("_clock", "_counts", "_seconds", "_started", "total")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._counts = [0] * (WINDOW_S + 1)
        self._seconds = [-1] * (WINDOW_S + 1)
        self.total = 0

    def add(self, count: int) -> None:
        """Count something that happened now."""
        second = int(self._clock())
        slot = second % len(self._seconds)
        if self._seconds[slot] != second:
            self._seconds[slot], self._counts[slot] = second, 0
        self._counts[slot] += count
        self.total += count

    @property
    def per_second(self) -> float:
        """The mean over the last `WINDOW_S` whole seconds, or since the start if that is less; 0 in the first second."""
        now = self._clock()
        until = int(now)
        since = max(until - WINDOW_S, self._started)
        counted = sum(
            count
            for second, count in zip(self._seconds, self._counts, strict=True)
            if until - WINDOW_S <= second < until
        )
        return counted / (until - since) if until - since >= 1 else 0.0
