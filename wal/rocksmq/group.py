"""What a topic is beside its messages: how far each group has come, who holds what, and pages. Pure: no I/O, no clock.

For one group a message is ahead, held, returned or acknowledged:

    ahead -> held (taken) -> acknowledged (ack)
             held -> returned (its time is over, its consumer closed, it could not be read) -> held
    any -> acknowledged (ack, or a seek beyond it); any -> ahead (a seek back)
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

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

    def __len__(self) -> int:
        return len(self.starts)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self.starts, number) - 1
        return at >= 0 and number < self.stops[at]

    def pairs(self) -> list[tuple[int, int]]:
        """Return each range as where it starts and where it stops."""
        return list(zip(self.starts, self.stops, strict=True))

    @property
    def count(self) -> int:
        """How many ids there are."""
        return sum(self.stops) - sum(self.starts)

    def add(self, start: int, stop: int) -> None:
        """Add a range, and join what it touches."""
        low, high = bisect_left(self.stops, start), bisect_right(self.starts, stop)
        if low < high:
            start, stop = min(start, self.starts[low]), max(stop, self.stops[high - 1])
        self.starts[low:high], self.stops[low:high] = [start], [stop]

    def touches(self, start: int, stop: int) -> bool:
        """Whether adding a range makes no further one."""
        return bisect_left(self.stops, start) < bisect_right(self.starts, stop)

    def drop_below(self, floor: int) -> int:
        """Forget what is below `floor`, and return where the ids that follow on it stop."""
        at = bisect_left(self.stops, floor)
        if at < len(self.starts) and self.starts[at] <= floor:
            floor, at = self.stops[at], at + 1
        del self.starts[:at], self.stops[:at]
        return floor

    def free(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges between two ids that have none of these."""
        at = bisect_right(self.stops, start)
        while start < stop:
            begins = self.starts[at] if at < len(self.starts) else stop
            if start < begins:
                yield start, min(begins, stop)
            start, at = (self.stops[at] if at < len(self.stops) else stop), at + 1


def runs_of(ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield where each run of ids that follow each other starts and stops; ids ascend."""
    start = stop = None
    for each in ids:
        if start is None or stop is None or each > stop:
            if start is not None and stop is not None:
                yield start, stop
            start = each
        stop = each + 1
    if start is not None and stop is not None:
        yield start, stop


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
        return GroupRecord(self.floor, tuple(self.acked.pairs()))

    def lag(self, end_id: int) -> int:
        """Return how many messages are not acknowledged."""
        return end_id + 1 - self.floor - self.acked.count

    def take(self, lease: Lease, count: int, *, end_id: int) -> list[int]:
        """Hold up to `count` messages: first what was returned, then the next ones up to `end_id`; each part ascends."""
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
        self.held.update(dict.fromkeys(ids, lease))
        if ids and lease.deadline is not None:
            self.due = lease.deadline if self.due is None else min(self.due, lease.deadline)
        return ids

    def give_back(self, lease: Lease, ids: Iterable[int]) -> None:
        """Have messages that a delivery still holds come again."""
        for each in ids:
            if self.held.get(each) is lease:
                del self.held[each]
                heapq.heappush(self._returned, each)

    def give_back_of(self, owner: int, ids: Iterable[int]) -> None:
        """Have those messages that a consumer still holds come again."""
        for each in ids:
            if (lease := self.held.get(each)) is not None and lease.owner == owner:
                self.give_back(lease, (each,))

    def expire(self, now: float) -> None:
        """Have what was held for too long come again."""
        if self.due is None or now < self.due:
            return
        timed = [(each, lease, lease.deadline) for each, lease in self.held.items() if lease.deadline is not None]
        for each, lease, deadline in timed:
            if deadline <= now:
                self.give_back(lease, (each,))
        self.due = min((deadline for _, _, deadline in timed if deadline > now), default=None)

    def ack(self, ids: Sequence[int]) -> int:
        """Acknowledge messages, and return how many of them were held.

        Raises `Overloaded`, and acknowledges none, when too many gaps would be left.
        """
        runs = list(runs_of(sorted(ids)))
        added = [run for run in runs if run[0] > self.floor and not self.acked.touches(*run)]
        if len(self.acked) + len(added) > GAPS_MAX:
            raise Overloaded(
                f"acknowledged messages of the group would lie in over {GAPS_MAX} ranges — acknowledge the earliest first"
            )
        for start, stop in runs:
            if stop > self.floor:
                self.acked.add(max(start, self.floor), stop)
        held_before = len(self.held)
        for each in ids:
            self.held.pop(each, None)
        self.floor = self.acked.drop_below(self.floor)
        self.next_id = max(self.next_id, self.floor)
        return held_before - len(self.held)

    def seek(self, message_id: int) -> None:
        """Go on at a message: what is below it is acknowledged, all else is ahead."""
        self.floor = self.next_id = message_id
        self.acked, self.due = Ranges(), None
        self.held.clear()
        self._returned.clear()

    def _is_open(self, message_id: int) -> bool:
        return message_id >= self.floor and message_id not in self.acked


class Page(msgspec.Struct, array_like=True):
    """A closed page: its last id, its bytes, when it was closed and when all groups had acknowledged it, in Unix ms."""

    end_id: int
    size_bytes: int
    closed_ms: int
    acked_ms: int = 0


class TopicRecord(msgspec.Struct, frozen=True, array_like=True):
    """A topic on disk; `end_id` is one less than `begin_id` when it holds nothing, and the checksum is its last entry's."""

    log_id: int
    begin_id: int
    end_id: int
    crc32c: int
    open_bytes: int


class Topic:
    """One topic: where it begins and ends, its pages and its groups."""

    def __init__(self, record: TopicRecord, pages: Iterable[Page] = ()) -> None:
        self.log_id, self.begin_id, self.end_id, self.crc32c, self.open_bytes = msgspec.structs.astuple(record)
        self.next_id = self.end_id + 1
        """Ids from here on are free; those between it and `end_id` are on their way to the disk."""
        self.groups: dict[str, Group] = {}
        self.pages = sorted(pages, key=lambda page: page.end_id)
        self.acked_pages = sum(page.acked_ms > 0 for page in self.pages)
        """So many of the first ones are acknowledged."""
        self.kept_bytes = self.open_bytes + sum(page.size_bytes for page in self.pages)
        self.produced = self.delivered = self.acked = 0

    @property
    def record(self) -> TopicRecord:
        """What is stored of it, with what is on its way."""
        return TopicRecord(self.log_id, self.begin_id, self.next_id - 1, self.crc32c, self.open_bytes)

    def add(self, sizes: Iterable[int], *, page_bytes: int, now_ms: int) -> list[Page]:
        """Count the sizes of the messages that get the next ids into pages, and return the pages that they close."""
        closed: list[Page] = []
        for size_bytes in sizes:
            self.open_bytes += size_bytes
            self.kept_bytes += size_bytes
            if self.open_bytes > page_bytes:  # it closes with the message that takes it over
                closed.append(Page(self.next_id, self.open_bytes, now_ms))
                self.open_bytes = 0
            self.next_id += 1
        self.pages += closed
        return closed

    def settle(self, now_ms: int) -> list[Page]:
        """Mark the pages that all groups have acknowledged, and no others; return those whose mark changed.

        Without a group nothing changes: nobody is there who could have acknowledged.
        """
        if not self.groups:
            return []
        floor, before = min(group.floor for group in self.groups.values()), self.acked_pages
        while self.acked_pages < len(self.pages) and self.pages[self.acked_pages].end_id < floor:
            self.pages[self.acked_pages].acked_ms = now_ms
            self.acked_pages += 1
        while self.acked_pages and self.pages[self.acked_pages - 1].end_id >= floor:  # a group went back, or is new
            self.acked_pages -= 1
            self.pages[self.acked_pages].acked_ms = 0
        return self.pages[min(before, self.acked_pages) : max(before, self.acked_pages)]

    def close_page(self, now_ms: int) -> list[Page]:
        """Close the open page if all groups have acknowledged what is in it: a topic that idles holds no space for ever."""
        last = min((group.floor for group in self.groups.values()), default=0) - 1
        if not self.open_bytes or not last == self.end_id == self.next_id - 1:
            return []
        self.pages.append(Page(last, self.open_bytes, now_ms))
        self.open_bytes = 0
        return self.settle(now_ms)

    def drop(self, now_ms: int, *, retention_s: float | None, retention_bytes: int | None) -> list[Page]:
        """Give up the acknowledged pages that are old enough, then the oldest above the size; return them."""
        acked, count = self.pages[: self.acked_pages], 0
        if retention_s is not None:
            while count < len(acked) and acked[count].acked_ms + retention_s * 1000 <= now_ms:
                count += 1
        if retention_bytes is not None:
            size_bytes = sum(page.size_bytes for page in acked[count:])
            while count < len(acked) and size_bytes > retention_bytes:
                size_bytes -= acked[count].size_bytes
                count += 1
        dropped = acked[:count]
        if dropped:
            del self.pages[:count]
            self.acked_pages -= count
            self.begin_id = dropped[-1].end_id + 1
            self.kept_bytes -= sum(page.size_bytes for page in dropped)
        return dropped
