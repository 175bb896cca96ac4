"""How far a consumer group of a topic has come, and who holds what. Pure: no I/O, no clock.

For one group a message is open, held or acknowledged:

    open -> held (taken, the first ones first) -> acknowledged (ack)
            held -> open (its time is over, its consumer closed, it could not be read)
    any -> acknowledged (ack, or a seek beyond it); any -> open (a seek back)
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, filterfalse, islice, pairwise
from operator import itemgetter

import msgspec

from wal.errors import Overloaded

HELD_MAX = 16_384
"""Messages of a group that were delivered and not acknowledged: no more are delivered above it."""
GAPS_MAX = 16_384
"""Ranges of acknowledged ids above one that is not, in a group: its record has them all."""

_START, _STOP = itemgetter(0), itemgetter(1)


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
    """Whose a delivery is, and until when, in seconds of the queue's clock; infinity: until its consumer closes."""

    owner: int
    deadline: float


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """A group on disk: all below `current_id` is acknowledged, and so are the ranges above it."""

    current_id: int
    acked: tuple[tuple[int, int], ...] = ()


class Group:
    """One consumer group of one topic."""

    def __init__(self, record: GroupRecord) -> None:
        self._acked = [(0, record.current_id), *record.acked]
        """Ranges of ids, which do not touch, in ascending order; the first one is all below the first open message."""
        self._next_id = 0
        """No message below it is open."""
        self.held: dict[int, Lease] = {}
        self.due = math.inf
        """When to look for what comes again; perhaps too early."""

    def take_over(self, before: "Group", *, end_id: int) -> None:
        """Go on from the group up to a failed write: what was delivered up to `end_id` stays with who holds it."""
        self.held = {each: lease for each, lease in before.held.items() if each <= end_id and not self._is_acked(each)}
        self.due = before.due

    @property
    def floor(self) -> int:
        """The first message that is not acknowledged."""
        return self._acked[0][1]

    @property
    def record(self) -> GroupRecord:
        """What is stored of it."""
        return GroupRecord(self.floor, tuple(self._acked[1:]))

    def lag(self, end_id: int) -> int:
        """Return how many messages are not acknowledged."""
        return end_id + 1 - sum([stop - start for start, stop in self._acked])

    def take(self, lease: Lease, count: int, *, end_id: int) -> list[int]:
        """Hold up to `count` messages, the first open ones up to `end_id`; ids ascend."""
        held = self.held
        open_ids: Iterable[int] = range(self._next_id, end_id + 1)
        if self._next_id < self._acked[-1][1]:
            acked = self._acked[bisect_right(self._acked, self._next_id, key=_STOP) :]
            bounds = [self._next_id, *chain.from_iterable(acked), end_id + 1]
            open_ids = chain.from_iterable(map(range, bounds[::2], bounds[1::2]))
        room = max(0, min(count, HELD_MAX - len(held)))
        ids = list(islice(filterfalse(held.__contains__, open_ids), room))
        for each in ids:
            held[each] = lease
        if len(ids) < room:
            self._next_id = end_id + 1
        elif ids:
            self._next_id = ids[-1] + 1
        if ids and lease.deadline < self.due:
            self.due = lease.deadline
        return ids

    def give_back(self, ids: Iterable[int], is_meant: Callable[[Lease], bool]) -> None:
        """Have those messages come again that are held under a lease that is meant."""
        for each in ids:
            if each in self.held and is_meant(self.held[each]):
                del self.held[each]
                self._next_id = min(self._next_id, each)

    def expire(self, now: float) -> None:
        """Have what was held for too long come again."""
        if now >= self.due:
            self.give_back(list(self.held), lambda lease: lease.deadline <= now)
            self.due = min([lease.deadline for lease in self.held.values()], default=math.inf)

    def ack(self, ids: Sequence[int]) -> int:
        """Acknowledge messages, and return how many of them were held.

        Raises `Overloaded`, and acknowledges none, when too many gaps would be left.
        """
        acked, held_before = self._acked.copy(), len(self.held)
        for start, stop in runs_of(sorted(set(ids))):
            low, high = bisect_left(acked, start, key=_STOP), bisect_right(acked, stop, key=_START)
            touched = acked[low:high] or [(start, stop)]
            acked[low:high] = [(min(start, touched[0][0]), max(stop, touched[-1][1]))]
        if len(acked) > 1 + GAPS_MAX:
            raise Overloaded(
                f"acknowledged messages of the group would lie in over {GAPS_MAX} ranges — acknowledge the earliest first"
            )
        self._acked = acked
        for each in ids:
            self.held.pop(each, None)
        return held_before - len(self.held)

    def _is_acked(self, message_id: int) -> bool:
        return message_id < self._acked[bisect_right(self._acked, message_id, key=_START) - 1][1]
