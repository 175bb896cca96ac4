"""When a growing segment is sealed before a cut does it. Pure: segments and a tick in, seals with their reasons out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from interceptors.shard.state import GrowingSegment
from wal.errors import InvalidArgument
from wal.timetick import physical_ms

CAPACITY = "capacity"
LIFETIME = "lifetime"
IDLE = "idle"
GROWING_BYTES_HWM = "growing_bytes_hwm"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLimits:
    """When segments end. All of them are soft; a cut seals everything anyway.

    A new segment's byte limit is taken up to `bytes_jitter` (a share of it) lower, so that segments that started together
    do not all end together; `rows_max` 0 is no limit. A segment lives `life_s_max` at most, and `idle_s_max` without new
    rows when it has `idle_bytes_min`. When all growing segments pass `growing_bytes_high`, the largest end until
    `growing_bytes_low` is reached.
    """

    bytes_max: int = 128 << 20
    rows_max: int = 0
    bytes_jitter: float = 0.1
    life_s_max: float = 86_400
    idle_s_max: float = 600
    idle_bytes_min: int = 16 << 20
    growing_bytes_high: int = 512 << 20
    growing_bytes_low: int = 256 << 20

    def __post_init__(self) -> None:
        positive = (self.bytes_max, self.life_s_max, self.idle_s_max, self.growing_bytes_low)
        if min(positive) <= 0 or self.rows_max < 0 or self.idle_bytes_min < 0 or not 0 <= self.bytes_jitter < 1:
            raise InvalidArgument(f"segment limits are positive, the jitter a share below 1: {self} — correct it")
        if self.growing_bytes_high <= self.growing_bytes_low:
            raise InvalidArgument(
                f"growing_bytes_high ({self.growing_bytes_high}) is not over growing_bytes_low ({self.growing_bytes_low}) — "
                "raise the one, or lower the other"
            )

    def bytes_max_of_next(self, share: float) -> int:
        """Return the byte limit of a new segment; `share` is a random number from 0 up to 1."""
        return max(1, int(self.bytes_max * (1 - self.bytes_jitter * share)))


class Seal(NamedTuple):
    """A segment to seal, and the policy that says so."""

    segment: GrowingSegment
    reason: str


def due_seals(segments: Iterable[GrowingSegment], limits: SegmentLimits, *, tick: int) -> list[Seal]:
    """Return what is to be sealed at `tick`, each segment at most once."""
    due: list[Seal] = []
    staying: list[GrowingSegment] = []
    for segment in segments:
        reason = _reason(segment, limits, tick)
        if reason is None:
            staying.append(segment)
        else:
            due.append(Seal(segment, reason))
    return [*due, *_over_high_water(staying, limits)]


def _reason(segment: GrowingSegment, limits: SegmentLimits, tick: int) -> str | None:
    stats = segment.stats
    if stats.reached:
        return CAPACITY
    now_ms = physical_ms(tick)
    if stats.rows and now_ms - physical_ms(segment.created_tick) >= limits.life_s_max * 1000:
        return LIFETIME
    is_idle = now_ms - physical_ms(stats.changed_tick) >= limits.idle_s_max * 1000
    if stats.rows and is_idle and stats.bytes >= limits.idle_bytes_min:
        return IDLE
    return None


def _over_high_water(segments: list[GrowingSegment], limits: SegmentLimits) -> Iterator[Seal]:
    total = sum(segment.stats.bytes for segment in segments)
    if total <= limits.growing_bytes_high:
        return
    for segment in sorted(segments, key=lambda each: (-each.stats.bytes, each.segment_id)):
        if total <= limits.growing_bytes_low:
            return
        total -= segment.stats.bytes
        yield Seal(segment, GROWING_BYTES_HWM)
