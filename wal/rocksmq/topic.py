"""A topic and its consumer groups: messages that wait to be written, pages, how far each group has
come and who holds what.

Pure: no I/O, no clock. For one group a message is open, held or acknowledged:

    open -> held (taken, the first ones first) -> acknowledged (ack)
            held -> open (its time is over, its consumer closed, it could not be read)
    any -> acknowledged (ack, or a seek beyond it); any -> open (a seek back)

Each delivery of a message, which is `open -> held` and a consumer that gets it, is counted.

The records in the state map are in `docs/format.md`, section "Topics": `mq/topic/<name>`,
`mq/group/<topic>/<name>`, and `mq/page/<log id>/<last id>`, both in hexadecimal; `mq/ids` is what
outlives topics.
"""

import math
import operator
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, filterfalse, groupby, islice

import msgspec

from wal.codec import MESSAGES_PER_ENTRY_MAX
from wal.errors import InvalidArgument, Overloaded, TooLarge, shown
from wal.rocksmq.contract import GroupInfo, MqOptions, TopicInfo
from wal.rocksmq.messages import TopicEntry, encode_entry, parts_of

PREFIX = "mq/"
LOG_ID_FIRST = 1 << 31
"""Log ids from here on are topics'; none is used twice."""

HELD_MAX = 16_384
"""Messages of a group that were delivered and not acknowledged: no more are delivered above it."""
GAPS_MAX = 16_384
"""Ranges of acknowledged ids above one that is not, in a group: its record has them all."""

_START = operator.itemgetter(0)
_STOP = operator.itemgetter(1)
_encode = msgspec.msgpack.Encoder().encode


class Page(msgspec.Struct, array_like=True):
    """A closed page: its last id, its bytes, when it was closed and when all groups had
    acknowledged it, in Unix ms.
    """

    end_id: int
    size_bytes: int
    closed_ms: int
    acked_ms: int = 0


class TopicRecord(msgspec.Struct, frozen=True, array_like=True):
    """A topic on disk; `end_id` is one less than `begin_id` when it holds nothing, and the checksum
    is its last entry's.
    """

    log_id: int
    begin_id: int
    end_id: int
    crc32c: int = 0
    open_bytes: int = 0


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """A group on disk: all below this id is acknowledged, and so are the ranges above it.

    `deliveries` are runs of ids above it: the first, the one behind the last, and how often each
    was delivered. Acknowledged ids in a run mean nothing.
    """

    current_id: int
    acked: list[tuple[int, int]] = []
    deliveries: list[tuple[int, int, int]] = []


Lease = tuple[object, float]
"""Whose a delivery is, and until when, in seconds of the queue's clock; infinity: until its
consumer closes.
"""


class Topic:
    """One topic in memory, ahead of the disk by what is on its way; `changes` is what the disk does
    not have yet.
    """

    def __init__(
        self, name: str, record: TopicRecord, pages: Iterable[Page] = (), *, is_new: bool = False
    ) -> None:
        self.name = name
        self.log_id, self.begin_id, self.end_id, self.crc32c, self.open_bytes = (
            msgspec.structs.astuple(record)
        )
        self.next_id = self.end_id + 1
        """Ids from here on are free; those between it and `end_id` are on their way to the disk."""
        self.bodies: list[bytes] = []
        """Messages that get the next ids when this turn of the event loop is written."""
        self.groups: dict[str, Group] = {}
        self.changed_groups: set[str] = set()
        self.pages = list(pages)  # in the order of ids, as their keys are
        self.acked_pages = sum(page.acked_ms > 0 for page in self.pages)
        """So many of the first ones are acknowledged."""
        self.newest_half = range(0)
        """The second half of what was read from the disk last."""
        self.damage = ""
        """Why it is not to be used."""
        self.produced = self.delivered = self.acked = 0
        self._stored = None if is_new else record
        self._changes: dict[str, bytes | None] = {}
        """Records of pages that the disk does not have yet."""

    @property
    def info(self) -> TopicInfo:
        """What is told of it."""
        groups = {
            name: GroupInfo(group.floor, group.lag(self.end_id), len(group.held))
            for name, group in self.groups.items()
        }
        kept_bytes = self.open_bytes + sum(page.size_bytes for page in self.pages)
        pages = (len(self.pages), self.acked_pages)
        counts = (self.produced, self.delivered, self.acked)
        return TopicInfo(self.begin_id, self.end_id, kept_bytes, *pages, groups, *counts)

    def write(self, *, page_bytes: int, now_ms: int) -> Iterator[tuple[bytes, TopicEntry]]:
        """Give the waiting messages their ids and pages; yield the bytes of each entry of them, and
        the entry.
        """
        bodies = self.bodies
        self.bodies = []
        for part in parts_of(bodies):
            data = encode_entry(part, first_id=self.next_id, previous_crc32c=self.crc32c)
            entry = TopicEntry(part, data, self.next_id)
            self.crc32c = entry.crc32c
            yield data, entry
            for size_bytes in map(operator.add, map(len, part[::2]), map(len, part[1::2])):
                self.open_bytes += size_bytes or 1  # so that a page of nothing ends, too
                if self.open_bytes > page_bytes:  # it closes with the message that takes it over
                    self._close_page(self.next_id, now_ms)
                self.next_id += 1

    def changes(self, now_ms: int) -> dict[str, bytes | None]:
        """Return the records that differ from those on the disk by key, None for one that goes;
        they count as written.
        """
        self._settle(now_ms)
        changes = self._changes
        self._changes = {}
        for each in self.changed_groups:
            group = self.groups.get(each)
            changes[self._group_key(each)] = None if group is None else _encode(group.record)
        record = TopicRecord(
            self.log_id, self.begin_id, self.next_id - 1, self.crc32c, self.open_bytes
        )
        if record != self._stored:
            self._stored = record
            changes[f"{PREFIX}topic/{self.name}"] = _encode(record)
        self.changed_groups.clear()
        return changes

    def removal(self) -> dict[str, bytes | None]:
        """Return what removes all its records."""
        keys = *map(self._group_key, self.groups), *map(self._page_key, self.pages)
        return dict.fromkeys([f"{PREFIX}topic/{self.name}", *keys])

    def give_up(self, now_ms: int, options: MqOptions) -> bool:
        """Give up the acknowledged pages that are old enough, then the oldest above the size;
        return whether any went.

        If all groups have acknowledged what is in the open page it is closed: a topic that idles
        holds no space for ever.
        """
        if self.open_bytes and self._acked_below() - 1 == self.end_id == self.next_id - 1:
            self._close_page(self.end_id, now_ms)
        self._settle(now_ms)
        limits = options.retention_s, options.retention_bytes
        limit_s, bytes_max = (math.inf if limit is None else limit for limit in limits)
        begin_id = self.begin_id
        acked_bytes = sum(page.size_bytes for page in self.pages[: self.acked_pages])
        while self.acked_pages and (
            self.pages[0].acked_ms + limit_s * 1000 <= now_ms or acked_bytes > bytes_max
        ):
            page = self.pages.pop(0)
            acked_bytes -= page.size_bytes
            self.acked_pages -= 1
            self.begin_id = page.end_id + 1
            self._changes[self._page_key(page)] = None
        return bool(self.begin_id > begin_id)

    def _acked_below(self) -> int:
        """Below it all groups have acknowledged everything; 0 without a group: nobody is there who
        could have.
        """
        return min([group.floor for group in self.groups.values()], default=0)

    def _close_page(self, end_id: int, now_ms: int) -> None:
        self.pages.append(page := Page(end_id, self.open_bytes, now_ms))
        self._changes[self._page_key(page)] = _encode(page)
        self.open_bytes = 0

    def _settle(self, now_ms: int) -> None:
        """Mark the pages that all groups have acknowledged, and no others; without a group nothing
        changes.
        """
        below = self._acked_below()
        count = self.acked_pages
        count = (
            bisect_left(self.pages, below, key=operator.attrgetter("end_id"))
            if self.groups
            else count
        )
        for page in self.pages[min(count, self.acked_pages) : max(count, self.acked_pages)]:
            # 0 where a group went back, or is new
            page.acked_ms = now_ms if count > self.acked_pages else 0
            self._changes[self._page_key(page)] = _encode(page)
        self.acked_pages = count

    def _page_key(self, page: Page) -> str:
        return f"{PREFIX}page/{self.log_id:08x}/{page.end_id:016x}"

    def _group_key(self, group: str) -> str:
        return f"{PREFIX}group/{self.name}/{group}"


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

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """The ranges that were delivered, as a record has them."""
        ranges = zip(self._starts, self._starts[1:], self._counts, strict=False)
        return [(start, stop, count) for start, stop, count in ranges if count]

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
        for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
            found = [each for _, each in run]
            self._add(found[0], found[-1] + 1)

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

    def __init__(
        self,
        current_id: int,
        acked: Iterable[tuple[int, int]] = (),
        deliveries: Iterable[tuple[int, int, int]] = (),
    ) -> None:
        self._acked = [(0, current_id), *acked]
        """Ranges of ids, which do not touch, in ascending order; the first one is all below the
        first open message.
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
        acked_above = sum(stop - start for start, stop in self._acked[1:])
        self.exact_below = self.floor + HELD_MAX + acked_above

    def take_over(self, before: "Group", *, end_id: int) -> None:
        """Go on from the group up to a failed write: what was delivered up to `end_id` stays with
        who holds it.
        """
        for each, lease in before.held.items():
            if self._acked[bisect_right(self._acked, each, key=_START) - 1][1] <= each <= end_id:
                self.held[each] = lease
        self.due = before.due
        self.deliveries = before.deliveries
        self.deliveries.forget_below(self.floor)
        self.counted_ahead = before.counted_ahead

    @property
    def floor(self) -> int:
        """The first message that is not acknowledged."""
        return self._acked[0][1]

    @property
    def record(self) -> tuple[int, list[tuple[int, int]], list[tuple[int, int, int]]]:
        """What is stored of it: the fields of a `GroupRecord`."""
        return self.floor, self._acked[1:], self.deliveries.runs

    def lag(self, end_id: int) -> int:
        """Return how many messages are not acknowledged."""
        return end_id + 1 - sum([stop - start for start, stop in self._acked])

    def take(self, lease: Lease, count: int, *, end_id: int, now: float = 0.0) -> list[int]:
        """Hold up to `count` messages, the first open ones up to `end_id`; ids ascend. What was
        held too long is open.
        """
        if now >= self.due:
            self.expire(now)
        held = self.held
        room = min(count, HELD_MAX - len(self.held))
        open_ids: Iterable[int] = range(self.first_open, end_id + 1)
        if self.first_open < self._acked[-1][1]:
            acked = self._acked[bisect_right(self._acked, self.first_open, key=_STOP) :]
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

    def ack(self, given: Sequence[int], *, end_id: int) -> int:
        """Acknowledge messages up to `end_id`, and return how many of them were held.

        Raises `InvalidArgument`, `TooLarge`, and `Overloaded` when too many gaps would be left;
        then none is acknowledged.
        """
        try:
            if len(given) > MESSAGES_PER_ENTRY_MAX:
                raise TooLarge(
                    f"{len(given)} ids in one call — acknowledge at most {MESSAGES_PER_ENTRY_MAX}, "
                    "or seek"
                )
            ids = sorted(set(given)) or [0]  # of none, what is acknowledged since ever
        except TypeError:
            ids = [-1]
        if set(map(type, ids)) != {int} or ids[0] < 0 or ids[-1] > end_id:
            raise InvalidArgument(
                f"ids={shown(given)} — acknowledge a list of ids up to {end_id}, that consume gave"
            )
        acked = self._acked
        held_before = len(self.held)
        # all in order, as most are
        if len(acked) == 1 and ids[0] <= acked[0][1] and ids[-1] - ids[0] < len(ids):
            acked = [(0, max(acked[0][1], ids[-1] + 1))]
        else:
            acked = acked.copy()
            # of ids that follow each other
            for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
                start = (found := list(run))[0][1]
                stop = found[-1][1] + 1
                low = bisect_left(acked, start, key=_STOP)
                high = bisect_right(acked, stop, key=_START)
                touched = acked[low:high] or [(start, stop)]
                acked[low:high] = [(min(start, touched[0][0]), max(stop, touched[-1][1]))]
        if len(acked) > 1 + GAPS_MAX:
            raise Overloaded(
                f"acknowledged messages of the group would lie in over {GAPS_MAX} ranges — "
                "acknowledge the earliest first"
            )
        self._acked = acked
        self.deliveries.forget_below(self.floor)
        self.counted_ahead.difference_update(ids)
        for each in ids:
            self.held.pop(each, None)
        return held_before - len(self.held)


def encode_ids(next_log_id: int, used: int) -> dict[str, bytes | None]:
    """Return the record of what outlives topics, by its key: the next log id, and an id that none
    of those gone is above.
    """
    return {f"{PREFIX}ids": _encode((next_log_id, used))}


def decode_records(records: Mapping[str, bytes]) -> tuple[tuple[int, int], dict[str, Topic]]:
    """Return the topics that the records under `PREFIX` tell of. Raises what msgspec raises,
    `KeyError`, `ValueError`.
    """
    decode = msgspec.msgpack.decode
    ids = (LOG_ID_FIRST, 0)
    pages = defaultdict[int, list[Page]](list)
    topics = dict[str, Topic]()
    # pages, topics, then groups
    for key in sorted(records, key=lambda key: (key.startswith(f"{PREFIX}group/"), key)):
        (kind, *names) = key.removeprefix(PREFIX).split("/")
        value = records[key]
        if kind == "group":
            stored = decode(value, type=GroupRecord)
            group = Group(stored.current_id, stored.acked, stored.deliveries)
            group.count_exactly()
            topics[names[0]].groups[names[1]] = group
        elif kind == "ids":
            ids = decode(value, type=tuple[int, int])
        elif kind == "page":
            pages[int(names[0], 16)].append(decode(value, type=Page))
        elif kind == "topic":
            record = decode(value, type=TopicRecord)
            topics[names[0]] = Topic(names[0], record, pages[record.log_id])
    return ids, topics
