"""One consumer group of one topic: its acknowledged messages, the leases of its consumers, and how
often each message was delivered.

Pure: no I/O, no clock. For a group a message is open, held or acknowledged:

    open -> held (taken, the first ones first) -> acknowledged (ack)
            held -> open (its time is over, its consumer closed, it could not be read)
    any -> acknowledged (ack, or a seek beyond it); any -> open (a seek back)

Acknowledgements take effect when they are durable; leases exist only in memory. A delivery is `open
-> held` with a consumer that gets the message; each delivery is counted.
"""

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain, filterfalse, groupby, islice

from wal.codec import MESSAGES_PER_ENTRY_MAX
from wal.errors import InvalidArgument, Overloaded, TooLarge, shown

HELD_MAX = 16_384
"""Maximum number of delivered, unacknowledged messages of a group; at this number no more are
delivered.
"""
GAPS_MAX = 16_384
"""Maximum number of ranges of acknowledged ids above an unacknowledged one, in a group: its record
holds all of them.
"""

Ranges = list[tuple[int, int]]
"""Ranges of ids: the first id and the id after the last. They ascend and do not touch."""
Lease = tuple[object, float]
"""The owner of a delivery, and the end of the lease in seconds of the queue's clock; infinity means
until the consumer closes.
"""

_START = operator.itemgetter(0)
_STOP = operator.itemgetter(1)


def all_below(message_id: int) -> Ranges:
    """Return the acknowledged ranges of a group that begins at a message."""
    return [(0, message_id)]


def acknowledge(acked: Ranges, given: Sequence[int], *, end_id: int) -> Ranges:
    """Return the acknowledged ranges with the ids `given` added; each must be at most `end_id`.

    The first range holds all ids below the first unacknowledged message. Raises `InvalidArgument`,
    `TooLarge`, and `Overloaded` when too many gaps would be left.
    """
    ids = _checked(given, end_id)
    if len(acked) == 1 and ids[0] <= acked[0][1] and ids[-1] - ids[0] < len(ids):
        return all_below(max(acked[0][1], ids[-1] + 1))  # in order, the common case
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
    """Return ids in ascending order; for no ids [0], which every group has acknowledged."""
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
            f"ids={shown(given)} — acknowledge a list of ids that consume returned, up to {end_id}"
        )
    return ids


def _runs(ids: Iterable[int]) -> Ranges:
    """Return ascending ids as ranges."""
    runs = []
    for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
        found = [each for _, each in run]
        runs.append((found[0], found[-1] + 1))
    return runs


class Deliveries:
    """Delivery counts of a group's messages: one number for each range of ids. Pure.

    At most `HELD_MAX` unacknowledged messages have a count above 0: redeliveries come before new
    messages, so all of them were held when the last new message was delivered.
    """

    def __init__(self, runs: Iterable[tuple[int, int, int]] = ()) -> None:
        self._starts = [-1]
        """First id of each range, -1 for the first range; a range ends where the next one begins.
        """
        self._counts = [0]
        """Count of each range; 0 for the first and the last range."""
        for start, stop, count in runs:
            self._add(start, stop, count)

    def runs_from(self, message_id: int) -> list[tuple[int, int, int]]:
        """Return the delivered ranges from `message_id` on, in the form of a group's record."""
        ranges = zip(self._starts, self._starts[1:], self._counts, strict=False)
        return [
            (max(start, message_id), stop, count)
            for start, stop, count in ranges
            if count and stop > message_id
        ]

    def add(self, ids: Sequence[int]) -> None:
        """Count a delivery of messages; their ids ascend."""
        if ids and ids[-1] - ids[0] == len(ids) - 1:
            # The common cases: the messages are new and follow the last ones, or all earlier ones
            # are acknowledged.
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
        """Return the delivery count of each message; an empty list if all were delivered once."""
        low = bisect_right(self._starts, ids[0]) - 1
        high = bisect_right(self._starts, ids[-1])
        if set(self._counts[low:high]) == {1}:
            return []
        return [self._counts[bisect_right(self._starts, each) - 1] for each in ids]

    def forget_below(self, message_id: int) -> None:
        """Drop the counts of acknowledged messages below an id."""
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
        """Split ranges so that one begins at an id, and return its index."""
        index = bisect_left(self._starts, at)
        if index == len(self._starts) or self._starts[index] != at:
            self._starts.insert(index, at)
            self._counts.insert(index, self._counts[index - 1])
        return index

    def _join(self, low: int, high: int) -> None:
        """Merge neighbours with the same count at the beginnings of ranges `low` to `high`."""
        for index in range(min(high, len(self._starts) - 1), max(low, 1) - 1, -1):
            if self._counts[index] == self._counts[index - 1]:
                del self._starts[index], self._counts[index]


class Group:
    """One consumer group of one topic."""

    def __init__(self, acked: Ranges, deliveries: Iterable[tuple[int, int, int]] = ()) -> None:
        self.acked = acked
        """Acknowledged ranges on the disk; replaced, never mutated. The first range holds all ids
        below the first unacknowledged message.
        """
        self.first_open = 0
        """No message below it is open."""
        self.held: dict[int, Lease] = {}
        self.due = math.inf
        """When the next lease may expire; possibly earlier than it does."""
        self.deliveries = Deliveries(deliveries)
        self.counted_ahead = set[int]()
        """Messages whose next delivery is already counted: they were taken, but no consumer got
        them.
        """
        self.exact_below = 0
        """Counts of deliveries of messages below this id are written to the disk before the
        delivery.
        """

    def count_exactly(self) -> None:
        """Write counts before delivery for all messages that an earlier opening may have delivered
        without a record.
        """
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
        """Release messages whose acknowledgement is durable; return how many were held."""
        held = self.held
        held_before = len(held)
        for each in ids:
            held.pop(each, None)
        self.counted_ahead.difference_update(ids)
        self.deliveries.forget_below(self.floor)
        return held_before - len(held)

    def take(self, lease: Lease, count: int, *, end_id: int, now: float = 0.0) -> list[int]:
        """Hold the first open messages up to `end_id`, at most `count`; return their ids,
        ascending. Messages with an expired lease are open.
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
        """Count a delivery of messages that were just taken; return the ids that were not counted
        ahead.
        """
        if self.counted_ahead and not self.counted_ahead.isdisjoint(ids):
            new = [each for each in ids if each not in self.counted_ahead]
            self.counted_ahead.difference_update(ids)
            ids = new
        self.deliveries.add(ids)
        return ids

    def give_back(self, ids: Iterable[int], holder: object, *, undelivered: bool = False) -> None:
        """Open messages that are held under this lease or by this owner; `holder` is either.

        With `undelivered` no consumer got them, so their next delivery counts as already counted.
        """
        for each in ids:
            if (lease := self.held.get(each)) is not None and (
                holder is lease or holder is lease[0]
            ):
                del self.held[each]
                self.first_open = min(self.first_open, each)
                if undelivered:
                    self.counted_ahead.add(each)

    def held_by(self, owner: object, ids: Iterable[int], *, until: float) -> list[int]:
        """Return which of these messages an owner holds until later than `until`."""
        leases = [(each, self.held.get(each)) for each in ids]
        return [each for each, lease in leases if lease and lease[0] is owner and lease[1] > until]

    def expire(self, now: float) -> None:
        """Open the messages whose lease has expired."""
        for each in [each for each, (_, deadline) in self.held.items() if deadline <= now]:
            self.give_back([each], self.held[each])
        self.due = min([deadline for _, deadline in self.held.values()], default=math.inf)
