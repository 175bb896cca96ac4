"""How far a consumer group of a topic has come, and who holds what. Pure: no I/O, no clock.

For one group a message is ahead, held, returned or acknowledged:

    ahead -> held (taken) -> acknowledged (ack)
             held -> returned (its time is over, its consumer closed, it could not be read) -> held
    any -> acknowledged (ack, or a seek beyond it); any -> ahead (a seek back)
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from wal.errors import Overloaded

HELD_MAX = 16_384
"""Messages of a group that were delivered and not acknowledged: no new ones are delivered above it."""
GAPS_MAX = 16_384
"""Ranges of acknowledged ids above one that is not, in a group: its record has them all."""


class Ranges:
    """Ids as disjoint ranges, which do not touch, in ascending order."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        pairs = list(ranges)
        self.starts, self.stops = [start for start, _ in pairs], [stop for _, stop in pairs]

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self.starts, number) - 1
        return at >= 0 and number < self.stops[at]

    def add(self, start: int, stop: int) -> None:
        """Add a range, and join what it touches."""
        low, high = bisect_left(self.stops, start), bisect_right(self.starts, stop)
        if low < high:
            start, stop = min(start, self.starts[low]), max(stop, self.stops[high - 1])
        self.starts[low:high], self.stops[low:high] = [start], [stop]

    def touches(self, start: int, stop: int) -> bool:
        """Whether adding a range makes no further one."""
        return bisect_left(self.stops, start) < bisect_right(self.starts, stop)

    def free(self, start: int, stop: int) -> Iterable[tuple[int, int]]:
        """Return the ranges between two ids that have none of these."""
        if self.stops and self.stops[-1] > start:
            return self._between(start, stop)
        return ((start, stop),) if start < stop else ()

    def _between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        at = bisect_right(self.stops, start)
        while start < stop:
            begins = self.starts[at] if at < len(self.starts) else stop
            if start < begins:
                yield start, min(begins, stop)
            start, at = (self.stops[at] if at < len(self.stops) else stop), at + 1


def runs_of(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where each run of ids that follow each other starts and stops; ids ascend, and none comes twice."""
    start = ids[0]
    if ids[-1] - start >= len(ids):
        for each, following in pairwise(ids):
            if following != each + 1:
                yield start, each + 1
                start = following
    yield start, ids[-1] + 1


class Lease(msgspec.Struct, eq=False, gc=False):
    """Whose a delivery is, and until when, in seconds of the queue's clock; None: until its consumer closes."""

    owner: int
    deadline: float | None


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """A group on disk: all below `current_id` is acknowledged, and so are the ranges above it."""

    current_id: int
    acked: tuple[tuple[int, int], ...] = ()


class Group:
    """One consumer group of one topic."""

    def __init__(self, record: GroupRecord) -> None:
        self.floor, self.acked = record.current_id, Ranges(record.acked)
        self.next_id = self.floor
        """From here on nothing was delivered."""
        self.held: dict[int, Lease] = {}
        self._returned: list[int] = []
        self.due: float | None = None
        """When to look for what comes again, None for never; perhaps too early."""

    def take_over(self, before: "Group", *, end_id: int) -> None:
        """Go on from the group up to a failed write: what was delivered up to `end_id` stays with who holds it."""
        self.held = {each: lease for each, lease in before.held.items() if self._is_open(each) and each <= end_id}
        self.due, self.next_id = before.due, max(self.floor, min(before.next_id, end_id + 1))
        open_ids = (each for run in self.acked.free(self.floor, self.next_id) for each in range(*run))
        self._returned = [each for each in open_ids if each not in self.held]

    @property
    def record(self) -> GroupRecord:
        """What is stored of it."""
        return GroupRecord(self.floor, tuple(zip(self.acked.starts, self.acked.stops, strict=True)))

    def lag(self, end_id: int) -> int:
        """Return how many messages are not acknowledged."""
        return end_id + 1 - self.floor - sum(self.acked.stops) + sum(self.acked.starts)

    def take(self, lease: Lease, count: int, *, end_id: int) -> list[int]:
        """Hold up to `count` messages: first what was returned, then the next ones up to `end_id`; ids ascend."""
        ids: list[int] = []
        while self._returned and len(ids) < count:
            each = heapq.heappop(self._returned)
            if self._is_open(each) and each not in self.held:
                ids.append(each)
        room = min(count, HELD_MAX - len(self.held)) - len(ids)
        if room > 0:
            for start, stop in self.acked.free(self.next_id, end_id + 1):
                self.next_id = min(stop, start + room)
                ids.extend(range(start, self.next_id))
                room -= self.next_id - start
                if not room:
                    break
        held = self.held
        for each in ids:
            held[each] = lease
        if ids and lease.deadline is not None:
            self.due = lease.deadline if self.due is None else min(self.due, lease.deadline)
        return ids

    def give_back(self, ids: Iterable[int], *, lease: Lease | None = None, owner: int | None = None) -> None:
        """Have those messages come again that a delivery, or else a consumer, still holds."""
        for each in ids:
            held = self.held.get(each)
            if held is not None and (held is lease or held.owner == owner):
                del self.held[each]
                heapq.heappush(self._returned, each)

    def expire(self, now: float) -> None:
        """Have what was held for too long come again."""
        if self.due is None or now < self.due:
            return
        timed = [(each, lease, lease.deadline) for each, lease in self.held.items() if lease.deadline is not None]
        for each, lease, deadline in timed:
            if deadline <= now:
                self.give_back((each,), lease=lease)
        self.due = min((deadline for _, _, deadline in timed if deadline > now), default=None)

    def ack(self, ids: Iterable[int]) -> int:
        """Acknowledge messages, and return how many of them were held.

        Raises `Overloaded`, and acknowledges none, when too many gaps would be left.
        """
        acked, ordered, held_before = self.acked, sorted(set(ids)), len(self.held)
        if ordered == [self.floor] and not acked.starts:  # one after the other, as most are
            self.held.pop(self.floor, None)
            self.floor += 1
            self.next_id = max(self.next_id, self.floor)
            return held_before - len(self.held)
        runs = [(max(start, self.floor), stop) for start, stop in runs_of(ordered) if stop > self.floor]
        room = GAPS_MAX - len(acked.starts)
        if (
            len(runs) > room
            and sum(start > self.floor and not acked.touches(start, stop) for start, stop in runs) > room
        ):
            raise Overloaded(
                f"acknowledged messages of the group would lie in over {GAPS_MAX} ranges — acknowledge the earliest first"
            )
        for run in runs:
            acked.add(*run)
        for each in ordered:
            self.held.pop(each, None)
        if acked.starts and acked.starts[0] <= self.floor:
            self.floor = acked.stops[0]
            del acked.starts[0], acked.stops[0]
        self.next_id = max(self.next_id, self.floor)
        return held_before - len(self.held)

    def _is_open(self, message_id: int) -> bool:
        return message_id >= self.floor and message_id not in self.acked
