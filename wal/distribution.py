"""Many measurements as a few numbers: how many, how much in all, and what most of them stay below. Pure.

Values are counted in buckets an eighth of an octave wide, so a percentile is at most 13 % above the true one, whatever the
unit and however many there are; the largest value is exact.
"""

from math import frexp

import msgspec

BUCKETS_PER_OCTAVE = 8


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements since the start, in the unit of the field that holds it; all 0 without any."""

    count: int = 0
    total: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Histogram:
    """Takes measurements one by one, about 1 us each; not safe across threads."""

    __slots__ = ("_buckets", "_count", "_max", "_total")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._count = 0
        self._total = 0.0
        self._max = 0.0

    def record(self, value: float) -> None:
        """Count a measurement; one below 0 (a clock was set back) counts as 0."""
        if value > 0:
            fraction, octave = frexp(value)
            bucket = octave * BUCKETS_PER_OCTAVE + int((fraction - 0.5) * 2 * BUCKETS_PER_OCTAVE)
        else:
            value, bucket = 0.0, _NOTHING
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self._count += 1
        self._total += value
        self._max = max(self._max, value)

    def distribution(self) -> Distribution:
        """Return what was counted so far."""
        p50, p99 = self._percentiles((self._count + 1) // 2, self._count - self._count // 100)
        return Distribution(count=self._count, total=self._total, p50=p50, p99=p99, max=self._max)

    def _percentiles(self, *ranks: int) -> list[float]:
        """Return the upper ends of the buckets in which the values of these ascending ranks lie."""
        found: list[float] = []
        seen = 0
        for bucket, count in sorted(self._buckets.items()):
            seen += count
            while len(found) < len(ranks) and seen >= ranks[len(found)]:
                found.append(min(_upper_end(bucket), self._max))
        return found or [0.0] * len(ranks)


_NOTHING = -(1 << 20)
"""The bucket of 0, below that of the least float."""


def _upper_end(bucket: int) -> float:
    if bucket == _NOTHING:
        return 0.0
    octave, part = divmod(bucket, BUCKETS_PER_OCTAVE)
    return float((0.5 + (part + 1) / (2 * BUCKETS_PER_OCTAVE)) * 2.0**octave)
