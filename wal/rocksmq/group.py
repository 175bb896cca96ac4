"""One consumer group of one topic: what it has acknowledged, who holds what, and how often each
message was delivered.

Pure: no I/O, no clock. For a group a message is open, held or acknowledged:

    open -> held (taken, the first ones first) -> acknowledged (ack)
            held -> open (its time is over, its consumer closed, it could not be read)
    any -> acknowledged (ack, or a seek beyond it); any -> open (a seek back)

What is acknowledged changes when the disk has it; who holds what is known in memory alone. Each
delivery of a message, which is `open -> held` and a consumer that gets it, is counted.
"""

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain, filterfalse, groupby, islice

from wal.codec import MESSAGES_PER_ENTRY_MAX
from wal.errors import InvalidArgument, Overloaded, TooLarge, shown

HELD_MAX = 16_384
"""Messages of a group that were delivered and not acknowledged: no more are delivered above it."""
GAPS_MAX = 16_384
"""Ranges of acknowledged ids above one that is not, in a group: its record has them all."""

Ranges = list[tuple[int, int]]
"""Ranges of ids, from the first to behind the last. They ascend and do not touch."""
Lease = tuple[object, float]
"""The owner of a delivery, and until when it holds the message, in seconds of the queue's clock;
infinity: until its consumer closes.
"""

_START = operator.itemgetter(0)
_STOP = operator.itemgetter(1)


def all_below(message_id: int) -> Ranges:
    """Return what a group has acknowledged that begins at a message."""
    return [(0, message_id)]


def acknowledge(acked: Ranges, given: Sequence[int], *, end_id: int) -> Ranges:
    """Return the acknowledged ranges with some messages added, which are at most `end_id`.

    The first range is all below the first message that is not acknowledged. Raises
    `InvalidArgument`, `TooLarge`, and `Overloaded` when too many gaps would be left.
    """
    ids = _checked(given, end_id)
    if len(acked) == 1 and ids[0] <= acked[0][1] and ids[-1] - ids[0] < len(ids):
        return all_below(max(acked[0][1], ids[-1] + 1))  # all in order, as most are
    acked = acked.copy()
    for start, stop in _runs(ids):
        low = bisect_left(acked, start, key=_STOP)
        high = bisect_right(acked, stop, key=_START)
        touched = acked[low:high] or [(start, stop)]
        acked[low:high] = [(min(start, touched[0][0]), max(stop, touched[-1][1]))]
    if len(acked) > 1 + GAPS_MAX:
        raise Overloaded(
            f"acknowledged messages of the group would lie in over {GAPS_MAX} ranges — "
            "acknowledge the earliest first"
        )
    return acked


def _checked(given: Sequence[int], end_id: int) -> list[int]:
    """Return ids in ascending order; of none, one that every group has acknowledged."""
    try:
        if len(given) > MESSAGES_PER_ENTRY_MAX:
            raise TooLarge(
                f"{len(given)} ids in one call — acknowledge at most {MESSAGES_PER_ENTRY_MAX}, "
                "or seek"
            )
        ids = sorted(set(given)) or [0]
    except TypeError:
        ids = [-1]
    if set(map(type, ids)) != {int} or ids[0] < 0 or ids[-1] > end_id:
        raise InvalidArgument(
            f"ids={shown(given)} — acknowledge a list of ids up to {end_id}, that consume gave"
        )
    return ids


def _runs(ids: Iterable[int]) -> Ranges:
    """Return ids, which ascend, as ranges."""
    runs = []
    for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
        found = [each for _, each in run]
        runs.append((found[0], found[-1] + 1))
    return runs


class Deliveries:
    """How often each message of a group was delivered: a number for each range of ids. Pure.

    At most `HELD_MAX` messages have a number above 0 and are not acknowledged: those that come
    again come before new ones, so all of them were held when the last new one was delivered.
    """

    def __init__(self, runs: Iterable[tuple[int, int, int]] = ()) -> None:
        self._starts = [-1]
        """Where each range begins, the first below any id; it ends where the next one begins."""
        self._counts = [0]
        """Of each range; that of the first and of the last one is 0."""
        for start, stop, count in runs:
            self._add(start, stop, count)

    def runs_from(self, message_id: int) -> list[tuple[int, int, int]]:
        """Return the ranges that were delivered, from an id on, as a record has them."""
        ranges = zip(self._starts, self._starts[1:], self._counts, strict=False)
        return [
            (max(start, message_id), stop, count)
            for start, stop, count in ranges
            if count and stop > message_id
        ]

    def add(self, ids: Sequence[int]) -> None:
        """Count a delivery of messages, whose ids ascend."""
        if ids and ids[-1] - ids[0] == len(ids) - 1:
            # Most are new, and next to those before; or all before are acknowledged.
            if len(self._starts) == 1:
                self._starts += [ids[0], ids[-1] + 1]
                self._counts += [1, 0]
            elif ids[0] == self._starts[-1] and self._counts[-2] == 1:
                self._starts[-1] = ids[-1] + 1
            else:
                self._add(ids[0], ids[-1] + 1)
            return
        for start, stop in _runs(ids):
            self._add(start, stop)

    def of(self, ids: Sequence[int]) -> list[int]:
        """Return how often each of some messages was delivered; nothing for once each."""
        low = bisect_right(self._starts, ids[0]) - 1
        high = bisect_right(self._starts, ids[-1])
        if set(self._counts[low:high]) == {1}:
            return []
        return [self._counts[bisect_right(self._starts, each) - 1] for each in ids]

    def forget_below(self, message_id: int) -> None:
        """Forget messages below an id, which are acknowledged."""
        if len(self._starts) == 1 or self._starts[1] >= message_id:
            return
        if message_id < self._starts[2]:
            self._starts[1] = message_id
        elif message_id >= self._starts[-1]:
            del self._starts[1:], self._counts[1:]
        else:
            first = self._split(message_id)
            self._starts[1:first] = []
            self._counts[1:first] = []
            self._join(1, 1)

    def _add(self, start: int, stop: int, times: int = 1) -> None:
        low = self._split(start)
        high = self._split(stop)
        self._counts[low:high] = [count + times for count in self._counts[low:high]]
        self._join(low, high)

    def _split(self, at: int) -> int:
        """Have a range begin at an id, and return its index."""
        index = bisect_left(self._starts, at)
        if index == len(self._starts) or self._starts[index] != at:
            self._starts.insert(index, at)
            self._counts.insert(index, self._counts[index - 1])
        return index

    def _join(self, low: int, high: int) -> None:
        """Make one of neighbours with the same number, where ranges `low` to `high` begin."""
        for index in range(min(high, len(self._starts) - 1), max(low, 1) - 1, -1):
            if self._counts[index] == self._counts[index - 1]:
                del self._starts[index], self._counts[index]


class Group:
    """One consumer group of one topic."""

    def __init__(self, acked: Ranges, deliveries: Iterable[tuple[int, int, int]] = ()) -> None:
        self.acked = acked
        """What is acknowledged on the disk; never changed, but replaced. The first range is all
        below the first message that is not.
        """
        self.first_open = 0
        """No message below it is open."""
        self.held: dict[int, Lease] = {}
        self.due = math.inf
        """When to look for what comes again; perhaps too early."""
        self.deliveries = Deliveries(deliveries)
        self.counted_ahead = set[int]()
        """Messages whose next delivery is counted: they were taken, and nobody got them."""
        self.exact_below = 0
        """Deliveries of messages below it are on the disk before they are made."""

    def count_exactly(self) -> None:
        """Count on the disk first what an earlier opening may have delivered without a record."""
        acked_above = sum(stop - start for start, stop in self.acked[1:])
        self.exact_below = self.floor + HELD_MAX + acked_above

    @property
    def floor(self) -> int:
        """The first message that is not acknowledged."""
        return self.acked[0][1]

    def lag(self, end_id: int) -> int:
        """Return how many messages up to `end_id` are not acknowledged."""
        return end_id + 1 - sum([stop - start for start, stop in self.acked])

    def settle(self, ids: Sequence[int]) -> int:
        """Let go of messages whose acknowledgement is on the disk; return how many were held."""
        held = self.held
        held_before = len(held)
        for each in ids:
            held.pop(each, None)
        self.counted_ahead.difference_update(ids)
        self.deliveries.forget_below(self.floor)
        return held_before - len(held)

    def take(self, lease: Lease, count: int, *, end_id: int, now: float = 0.0) -> list[int]:
        """Hold up to `count` messages, the first open ones up to `end_id`; return their ids, which
        ascend. What was held too long is open.
        """
        if now >= self.due:
            self.expire(now)
        held = self.held
        room = min(count, HELD_MAX - len(held))
        open_ids: Iterable[int] = range(self.first_open, end_id + 1)
        if self.first_open < self.acked[-1][1]:
            acked = self.acked[bisect_right(self.acked, self.first_open, key=_STOP) :]
            bounds = [self.first_open, *chain.from_iterable(acked), end_id + 1]
            open_ids = chain.from_iterable(map(range, bounds[::2], bounds[1::2]))
        ids = list(islice(filterfalse(held.__contains__, open_ids), room))
        for each in ids:
            held[each] = lease
        if ids and lease[1] < self.due:
            self.due = lease[1]
        if len(ids) < room:
            self.first_open = end_id + 1
        elif ids:
            self.first_open = ids[-1] + 1
        return ids

    def count(self, ids: Sequence[int]) -> Sequence[int]:
        """Count a delivery of messages that were just taken; return those not counted before."""
        if self.counted_ahead and not self.counted_ahead.isdisjoint(ids):
            new = [each for each in ids if each not in self.counted_ahead]
            self.counted_ahead.difference_update(ids)
            ids = new
        self.deliveries.add(ids)
        return ids

    def give_back(self, ids: Iterable[int], whose: object, *, undelivered: bool = False) -> None:
        """Have those messages come again that are held under this lease, or by this owner.

        The next delivery of those that nobody got is counted already.
        """
        for each in ids:
            if (lease := self.held.get(each)) is not None and (whose is lease or whose is lease[0]):
                del self.held[each]
                self.first_open = min(self.first_open, each)
                if undelivered:
                    self.counted_ahead.add(each)

    def held_by(self, owner: object, ids: Iterable[int], *, until: float) -> list[int]:
        """Return which of these messages an owner holds, and longer than until then."""
        leases = [(each, self.held.get(each)) for each in ids]
        return [each for each, lease in leases if lease and lease[0] is owner and lease[1] > until]

    def expire(self, now: float) -> None:
        """Have what was held for too long come again."""
        for each in [each for each, (_, deadline) in self.held.items() if deadline <= now]:
            self.give_back([each], self.held[each])
        self.due = min([deadline for _, deadline in self.held.values()], default=math.inf)
