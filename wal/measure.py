"""Summaries of many measurements: count, total, percentiles and recent rate. Pure."""

from collections.abc import Callable, Sequence
from math import frexp

import msgspec

BUCKETS_PER_OCTAVE = 8
"""With this many, a percentile is at most 13 % above the true one, for every unit and number of
measurements.
"""
WINDOW_S = 10
"""Long enough to be steady between two cuts, short enough to show the current rate."""
_NOTHING = -(1 << 20)
"""The bucket of 0. It lies so far below the bucket of the least float that its upper end is 0,
too.
"""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of all measurements since the start, in the unit of the field that holds it; all 0
    without measurements.
    """

    count: int = 0
    total: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Histogram:
    """Records measurements one by one, about 1 us each; not thread-safe."""

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._total = self._max = 0.0

    def record(self, value: float, times: int = 1) -> None:
        """Record a measurement, or `times` equal ones; a negative value (a clock was set back)
        counts as 0.
        """
        if value > 0:
            fraction, octave = frexp(value)
            bucket = octave * BUCKETS_PER_OCTAVE + int((fraction - 0.5) * 2 * BUCKETS_PER_OCTAVE)
        else:
            value = 0.0
            bucket = _NOTHING
        self._buckets[bucket] = self._buckets.get(bucket, 0) + times
        self._total += value * times
        self._max = max(self._max, value)

    def distribution(self) -> Distribution:
        """Return the summary of all measurements so far."""
        count = sum(self._buckets.values())
        p50 = self._at_rank((count + 1) // 2)
        p99 = self._at_rank(count - count // 100)
        return Distribution(count=count, total=self._total, p50=p50, p99=p99, max=self._max)

    def at_most(self, bounds: Sequence[float]) -> list[int]:
        """Return the number of measurements up to each bound; exact for powers of two, which are
        ends of buckets.
        """
        ends = [(_end(bucket), count) for bucket, count in self._buckets.items()]
        return [sum([count for end, count in ends if end <= bound]) for bound in bounds]

    def _at_rank(self, rank: int) -> float:
        """Return the upper end of the bucket that holds the value of this rank."""
        seen = 0
        for bucket, count in sorted(self._buckets.items()):
            seen += count
            if seen >= rank:
                return min(_end(bucket), self._max)
        return 0.0


def _end(bucket: int) -> float:
    octave, part = divmod(bucket, BUCKETS_PER_OCTAVE)
    return (0.5 + (part + 1) / (2 * BUCKETS_PER_OCTAVE)) * 2.0**octave


class Rate:
    """Counts events by whole seconds of `clock`, which returns seconds and never goes back. For one
    thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._counts: dict[int, int] = {}
        self.total = 0

    def add(self, count: int, at_s: float | None = None) -> None:
        """Count `count` events that happened now, or at an earlier time of the clock."""
        second = int(self._clock() if at_s is None else at_s)
        if second not in self._counts:
            self._counts = {
                each: self._counts[each] for each in self._counts if each >= second - WINDOW_S
            }
        self._counts[second] = self._counts.get(second, 0) + count
        self.total += count

    @property
    def per_second(self) -> float:
        """The mean over the last `WINDOW_S` whole seconds, or since the start if that is less; 0 in
        the first second.
        """
        until = int(self._clock())
        since = max(until - WINDOW_S, self._started)
        if until - since < 1:
            return 0.0
        counted = sum(
            count for second, count in self._counts.items() if until - WINDOW_S <= second < until
        )
        return counted / (until - since)
