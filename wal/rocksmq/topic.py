"""A topic: its messages, pages and groups as they are on the disk, and the changes of one write.

Pure: no I/O, no clock. A write works on a `TopicChange`, and the topic changes when the write is
durable: `TopicChange.stage` fills the write, and `TopicChange.land` applies it in memory.

The records in the state map are in `docs/format.md`, section "Topics": `mq/topic/<name>`,
`mq/group/<topic>/<name>`, and `mq/page/<log id>/<last id>`, both in hexadecimal; `mq/ids` outlives
topics.
"""

import math
import operator
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from wal.entry_log import Batch, OwnedLog
from wal.errors import GroupNotFound, shown
from wal.rocksmq.contract import GroupInfo, MqOptions, TopicInfo, check_place
from wal.rocksmq.group import Group, Ranges, acknowledge, all_below
from wal.rocksmq.messages import TopicEntry, encode_entry, parts_of

PREFIX = "mq/"
LOG_ID_FIRST = 1 << 31
"""Topics have the log ids from here on; no id is used twice."""

_encode = msgspec.msgpack.Encoder().encode


class Page(msgspec.Struct, frozen=True, array_like=True):
    """A closed page: its last id, its size, and in Unix ms when it was closed and when all groups
    had acknowledged it (0 before that).
    """

    end_id: int
    size_bytes: int
    closed_ms: int
    acked_ms: int = 0


class TopicRecord(msgspec.Struct, frozen=True, array_like=True):
    """A topic on disk. `end_id` is `begin_id` - 1 when it is empty; `crc32c` is the checksum of its
    last entry.
    """

    log_id: int
    begin_id: int
    end_id: int
    crc32c: int = 0
    open_bytes: int = 0


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """A group on disk: everything below `current_id` is acknowledged, and so are the ranges `acked`
    above it.

    `deliveries` are runs of ids above it: the first id, the id after the last, and the delivery
    count of each. Counts of acknowledged ids are ignored.
    """

    current_id: int
    acked: Ranges = []
    deliveries: list[tuple[int, int, int]] = []


class Topic:
    """One topic as it is on the disk, and its state that exists only in memory."""

    log: OwnedLog[TopicEntry]
    """Its messages; set when the topics of a store are loaded or the topic is created."""

    def __init__(self, name: str, record: TopicRecord, pages: Iterable[Page] = ()) -> None:
        self.name = name
        self.record = record
        self.pages = list(pages)
        """Closed pages in the order of ids, as of their keys."""
        self.acked_pages = sum(page.acked_ms > 0 for page in self.pages)
        """How many pages, from the first, all groups have acknowledged."""
        self.groups: dict[str, Group] = {}
        self.uncounted = set[str]()
        """Groups whose last deliveries no record counts yet."""
        self.newest_half = range(0)
        """Ids of the second half of the last read from the disk."""
        self.damage = ""
        """Why the topic must not be used; empty when it is sound."""
        self.produced = 0
        self.delivered = 0
        self.acked = 0

    @property
    def log_id(self) -> int:
        """The id of its log."""
        return self.record.log_id

    @property
    def begin_id(self) -> int:
        """The first kept id; `end_id` + 1 when the topic is empty."""
        return self.record.begin_id

    @property
    def end_id(self) -> int:
        """The last id."""
        return self.record.end_id

    @property
    def crc32c(self) -> int:
        """The checksum of its last entry."""
        return self.record.crc32c

    @property
    def info(self) -> TopicInfo:
        """The statistics of the topic."""
        end_id = self.end_id
        return TopicInfo(
            begin_id=self.begin_id,
            end_id=end_id,
            bytes=self.record.open_bytes + sum(page.size_bytes for page in self.pages),
            pages=len(self.pages),
            acked_pages=self.acked_pages,
            groups={
                name: GroupInfo(group.floor, group.lag(end_id), len(group.held))
                for name, group in self.groups.items()
            },
            produced=self.produced,
            delivered=self.delivered,
            acked=self.acked,
        )


class TopicChange:
    """The changes of one write to a topic. Calls change it in their order, each seeing the earlier
    changes.
    """

    def __init__(self, topic: Topic, *, is_new: bool = False) -> None:
        self.topic = topic
        self.begin_id = topic.begin_id
        self.next_id = topic.end_id + 1
        """The id of the next message."""
        self.entries: list[TopicEntry] = []
        """The produced entries, after staging."""
        self.acks: list[tuple[str, Sequence[int]]] = []
        """Acknowledged ids by group."""
        self.moved = set[str]()
        """Groups that are created or moved to another message."""
        self.removed = set[str]()
        """Groups that are removed."""
        self._is_new = is_new
        self._bodies: list[bytes] = []
        self._acked = {name: group.acked for name, group in topic.groups.items()}
        """Acknowledged ranges by group."""
        self._changed = dict[str, None]()
        """Groups whose records change."""
        self._crc32c = topic.crc32c
        self._open_bytes = topic.record.open_bytes
        self._pages = topic.pages.copy()
        self._acked_pages = topic.acked_pages
        self._records: dict[str, bytes | None] = {}
        self._record = topic.record

    # --- what calls do ----------------------------------------------------------------------------

    def has_group(self, group: str) -> bool:
        """Whether the topic has a group."""
        return group in self._acked

    def require_group(self, group: str) -> None:
        """Raise `GroupNotFound` unless the topic has a group."""
        if group not in self._acked:
            raise GroupNotFound(f"topic {self.topic.name!r} has no group {shown(group)}")

    def produce(self, bodies: Sequence[bytes]) -> range:
        """Add messages, and return their ids."""
        first = self.next_id
        self._bodies += bodies
        self.next_id += len(bodies) // 2
        return range(first, self.next_id)

    def acknowledge(self, group: str, ids: Sequence[int]) -> None:
        """Acknowledge messages that existed before this write; no ids change nothing. Raises as
        `wal.rocksmq.group.acknowledge`.
        """
        acked = acknowledge(self._acked[group], ids, end_id=self.topic.end_id)
        if not ids:
            return
        self._acked[group] = acked
        self._changed[group] = None
        self.acks.append((group, ids))

    def go_to(self, group: str, message_id: int) -> None:
        """Move a group, creating a new one, to the kept message nearest to `message_id`."""
        nearest = min(max(check_place(message_id), self.begin_id), self.next_id)
        self._acked[group] = all_below(nearest)
        self._changed[group] = None
        self.moved.add(group)
        self.removed.discard(group)

    def remove_group(self, group: str) -> None:
        """Remove a group."""
        del self._acked[group]
        self._changed[group] = None
        self.moved.discard(group)
        self.removed.add(group)

    def give_up(self, now_ms: int, options: MqOptions) -> None:
        """Delete the acknowledged pages that are older than `retention_s`, then the oldest ones
        above `retention_bytes`.

        The open page is closed if all groups have acknowledged its messages, so that an idle topic
        does not keep its space forever.
        """
        end_id = self.topic.end_id
        has_all = self._acked_below() > end_id == self.next_id - 1
        if self._open_bytes and has_all:
            self._close_page(end_id, now_ms)
        self._settle(now_ms)
        limit_s = math.inf if options.retention_s is None else options.retention_s
        bytes_max = math.inf if options.retention_bytes is None else options.retention_bytes
        acked_bytes = sum(page.size_bytes for page in self._pages[: self._acked_pages])
        gone = 0
        for page in self._pages[: self._acked_pages]:
            is_old = page.acked_ms + limit_s * 1000 <= now_ms
            if not is_old and acked_bytes <= bytes_max:
                break
            gone += 1
            acked_bytes -= page.size_bytes
            self.begin_id = page.end_id + 1
            self._records[self._page_key(page)] = None
        del self._pages[:gone]
        self._acked_pages -= gone

    # --- the write --------------------------------------------------------------------------------

    def stage(self, batch: Batch, *, page_bytes: int, now_ms: int) -> None:
        """Put the entries and the changed records into a write."""
        topic = self.topic
        first = topic.end_id + 1
        for part in parts_of(self._bodies):
            data = encode_entry(part, first_id=first, previous_crc32c=self._crc32c)
            entry = TopicEntry(part, data, first)
            batch.append(topic.log, entry.last_position, data)
            sizes = map(operator.add, map(len, part[::2]), map(len, part[1::2]))
            self._fill_pages(enumerate(sizes, first), page_bytes, now_ms)
            self.entries.append(entry)
            self._crc32c = entry.crc32c
            first = entry.last_position + 1
        if self.begin_id > topic.begin_id:
            batch.truncate(topic.log, self.begin_id)
        self._settle(now_ms)
        record = TopicRecord(
            topic.log_id, self.begin_id, self.next_id - 1, self._crc32c, self._open_bytes
        )
        if self._is_new or record != topic.record:
            self._records[f"{PREFIX}topic/{topic.name}"] = _encode(record)
        self._record = record
        for group in self._changed.keys() | topic.uncounted:
            self._records[_group_key(topic.name, group)] = self._group_record(group)
        topic.uncounted.clear()
        batch.records |= self._records

    def land(self) -> None:
        """Apply the write, which is durable, in memory."""
        topic = self.topic
        topic.produced += self._record.end_id - topic.end_id
        topic.record = self._record
        topic.pages = self._pages
        topic.acked_pages = self._acked_pages
        for name in self._changed:
            if name not in self._acked:
                topic.groups.pop(name, None)
            elif name in self.moved:
                topic.groups[name] = Group(self._acked[name])
            else:
                topic.groups[name].acked = self._acked[name]
        for name, ids in self.acks:
            if name in topic.groups:
                topic.acked += topic.groups[name].settle(ids)

    def drop(self) -> None:
        """Mark the delivery counts for another write: this write did not happen or its outcome is
        open.
        """
        self.topic.uncounted |= self.topic.groups.keys()

    def removal(self) -> dict[str, None]:
        """Return the keys of the records to remove with the topic, with None as values."""
        topic = self.topic
        keys = [f"{PREFIX}topic/{topic.name}"]
        keys += [_group_key(topic.name, group) for group in topic.groups.keys() | self._acked]
        keys += [self._page_key(page) for page in topic.pages]
        return dict.fromkeys(keys)

    def _group_record(self, group: str) -> bytes | None:
        acked = self._acked.get(group)
        if acked is None:
            return None
        floor = acked[0][1]
        runs = []
        if group not in self.moved:
            runs = self.topic.groups[group].deliveries.runs_from(floor)
        return _encode((floor, acked[1:], runs))

    # --- pages ------------------------------------------------------------------------------------

    def _fill_pages(self, sizes: Iterable[tuple[int, int]], page_bytes: int, now_ms: int) -> None:
        for message_id, size_bytes in sizes:
            self._open_bytes += size_bytes or 1  # so that a page of empty messages fills up too
            if self._open_bytes > page_bytes:  # the page includes the message that exceeds the size
                self._close_page(message_id, now_ms)

    def _close_page(self, end_id: int, now_ms: int) -> None:
        page = Page(end_id, self._open_bytes, now_ms)
        self._pages.append(page)
        self._records[self._page_key(page)] = _encode(page)
        self._open_bytes = 0

    def _acked_below(self) -> int:
        """Return the id below which all groups have acknowledged everything; 0 without a group."""
        return min([acked[0][1] for acked in self._acked.values()], default=0)

    def _settle(self, now_ms: int) -> None:
        """Mark exactly the pages that all groups have acknowledged; without a group nothing
        changes.
        """
        if not self._acked:
            return
        below = self._acked_below()
        before = self._acked_pages
        self._acked_pages = bisect_left(self._pages, below, key=operator.attrgetter("end_id"))
        for at in range(before, self._acked_pages):
            self._mark(at, now_ms)
        for at in range(self._acked_pages, before):  # a group moved back or is new
            self._mark(at, 0)

    def _mark(self, at: int, acked_ms: int) -> None:
        page = msgspec.structs.replace(self._pages[at], acked_ms=acked_ms)
        self._pages[at] = page
        self._records[self._page_key(page)] = _encode(page)

    def _page_key(self, page: Page) -> str:
        return f"{PREFIX}page/{self.topic.log_id:08x}/{page.end_id:016x}"


def _group_key(topic: str, group: str) -> str:
    return f"{PREFIX}group/{topic}/{group}"


def encode_ids(next_log_id: int, used: int) -> dict[str, bytes | None]:
    """Return the record that outlives topics, by its key: the next log id, and an id that is at
    least every id of removed topics.
    """
    return {f"{PREFIX}ids": _encode((next_log_id, used))}


def decode_records(records: Mapping[str, bytes]) -> tuple[tuple[int, int], dict[str, Topic]]:
    """Return the arguments of `encode_ids`, and the topics of the records under `PREFIX`.

    Raises `msgspec.MsgspecError`, `KeyError`, `ValueError`.
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
            acked = all_below(stored.current_id) + stored.acked
            group = Group(acked, stored.deliveries)
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
