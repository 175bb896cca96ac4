"""RocksMQ: topics and consumer groups in the database of a node; `MessageQueue` is its contract.

What callers change in one turn of the event loop is one write of the store's writer thread: messages of a topic as one
entry, positions of groups, pages. The topics in memory are those on the disk and what is on its way there; after a failed
write they are read again, and only what consumers hold is kept.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count as counter
from time import monotonic

import msgspec

from wal.codec import MESSAGES_PER_ENTRY_MAX, entry_crc32c
from wal.errors import (
    AlreadyExists,
    Corrupt,
    GroupNotFound,
    InvalidArgument,
    OnShutdown,
    StreamingNodeError,
    TopicNotEmpty,
    TopicNotFound,
    Truncated,
    shown,
)
from wal.queue import Signal
from wal.rocks.database import Engine
from wal.rocks.layout import entry_key
from wal.rocks.log import last_entry, read_range
from wal.rocks.store import RocksStore
from wal.rocksmq.contract import ACK_TIMEOUT_S, Consumer, MqOptions, TopicInfo
from wal.rocksmq.group import Group, GroupRecord, Lease, Topic, TopicRecord, runs_of
from wal.rocksmq.messages import (
    ENTRY_BYTES_TARGET,
    Body,
    ConsumerMessage,
    EntryCache,
    ProducerMessage,
    TopicEntry,
    bodies_of,
    check_name,
    decode_entry,
    encode_entry,
)
from wal.rocksmq.records import (
    IDS_KEY,
    LOG_ID_FIRST,
    PREFIX,
    IdsRecord,
    decode_records,
    encode,
    group_key,
    page_key,
    topic_key,
)
from wal.rocksmq.upkeep import fail, info_of, watched
from wal.timetick import IdAllocator, TickAllocator

CONSUME_BYTES_MAX = 16 << 20
"""Of one call; at least one message is returned."""
READ_BYTES = 1 << 20
"""So much is read at once, and checked: what follows is mostly asked for next."""


class _Batch:
    """What goes into one write."""

    def __init__(self) -> None:
        self.changes: dict[str, bytes | None] = {}
        self.dropped: list[tuple[bytes, bytes]] = []
        self.bodies: dict[str, list[Body]] = {}
        self.groups: set[tuple[str, str]] = set()
        self.durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class RocksMQ:
    """The topics of a `RocksStore`; see `MessageQueue`. `open` of the store comes first, `close` before its own.

    `in_term` calls what reads them again after a failed write. Leases go by `elapsed_ms`, pages by `now_ms`.
    """

    def __init__(
        self,
        store: RocksStore,
        options: MqOptions,
        *,
        now_ms: Callable[[], int],
        elapsed_ms: Callable[[], int],
        in_term: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
    ) -> None:
        self._store, self._options, self._in_term = store, options, in_term
        self._now_ms, self._elapsed_ms = now_ms, elapsed_ms
        self.ids = IdAllocator(TickAllocator(now_ms, elapsed_ms))
        self._topics: dict[str, Topic] = {}
        self._damaged: dict[str, Corrupt] = {}
        self._signals: dict[tuple[str, str], Signal] = {}
        self._cache = EntryCache()
        self._batch: _Batch | None = None
        self._last: asyncio.Future[None] | None = None
        self._loading, self._openings, self._closed = asyncio.Lock(), 0, False
        self._next_log_id, self._owners = LOG_ID_FIRST, counter(1)

    # --- topics and groups ------------------------------------------------------------------------------------------------

    async def create_topic(self, topic: str) -> None:
        """See `MessageQueue.create_topic`."""
        check_name("topic", topic)
        with suppress(TopicNotFound):
            await self._find(topic, changes=True)
        if topic not in self._topics:
            begin = self.ids.alloc_one()
            record = TopicRecord(self._next_log_id, begin, begin - 1, 0, 0)
            self._next_log_id += 1
            self._topics[topic] = Topic(record)
            changes = self._pending().changes
            changes[topic_key(topic)], changes[IDS_KEY] = encode(record), encode(IdsRecord(self._next_log_id, begin))
        await self._written()

    async def destroy_topic(self, topic: str) -> None:
        """See `MessageQueue.destroy_topic`."""
        found = await self._find(topic, changes=True)
        self._flush()  # what was produced before is in the write before
        del self._topics[topic]
        self._cache.forget(found.log_id)
        self.ids.update_id(found.next_id)
        batch = self._pending()
        batch.changes |= dict.fromkeys([topic_key(topic), *(group_key(topic, group) for group in found.groups)])
        batch.changes |= dict.fromkeys(page_key(found.log_id, page.end_id) for page in found.pages)
        batch.changes[IDS_KEY] = encode(IdsRecord(self._next_log_id, self.ids.alloc_one()))
        begin, end = entry_key(found.log_id, 0), entry_key(found.log_id + 1, 0)
        batch.dropped.append((begin, end))
        for group in found.groups:
            self._wake(topic, group)
        await self._written()
        await self._store.engine.compact(begin, end)

    async def create_consumer_group(self, topic: str, group: str) -> None:
        """See `MessageQueue.create_consumer_group`."""
        check_name("group", group)
        found = await self._find(topic, changes=True)
        if group in found.groups:
            raise AlreadyExists(f"topic {topic!r} has a group {group!r} — use it, or another name")
        found.groups[group] = Group(GroupRecord(found.begin_id))
        await self._changed(topic, group)

    async def destroy_consumer_group(self, topic: str, group: str) -> None:
        """See `MessageQueue.destroy_consumer_group`."""
        found, _ = await self._find_group(topic, group, changes=True)
        del found.groups[group]
        self._wake(topic, group)
        await self._changed(topic, group)

    async def exist_consumer_group(self, topic: str, group: str) -> bool:
        """See `MessageQueue.exist_consumer_group`."""
        return group in (await self._find(topic)).groups

    async def register_consumer(
        self, topic: str, group: str, *, ack_timeout_s: float | None = ACK_TIMEOUT_S
    ) -> Consumer:
        """See `MessageQueue.register_consumer`."""
        await self._find_group(topic, group)
        if ack_timeout_s is not None and not ack_timeout_s > 0:
            raise InvalidArgument(
                f"ack_timeout_s={ack_timeout_s!r} is no time — give seconds above 0, or None for never"
            )
        owner = next(self._owners)

        async def give_back(ids: Sequence[int] | None) -> None:
            if topic in self._topics and (state := self._topics[topic].groups.get(group)):
                state.give_back_of(owner, list(state.held) if ids is None else ids)
                self._wake(topic, group)

        deliver = partial(self._deliver, topic, group, owner=owner, ack_timeout_s=ack_timeout_s)
        return Consumer(deliver, partial(self.ack, topic, group), give_back)

    # --- messages ---------------------------------------------------------------------------------------------------------

    async def produce(self, topic: str, messages: Sequence[ProducerMessage | bytes]) -> range:
        """See `MessageQueue.produce`."""
        bodies, size_bytes = bodies_of(messages)
        with watched("produce", topic) as passed:
            await self._ready()
            await self._store.admit(size_bytes)
            found = await self._find(topic)
            passed("admitted")
            first = found.next_id + len(self._pending().bodies.setdefault(topic, []))
            self._pending().bodies[topic] += bodies
            await self._written()
            passed("written")
        return range(first, first + len(bodies))

    async def consume(self, topic: str, group: str, count: int, *, wait_s: float = 0.0) -> list[ConsumerMessage]:
        """See `MessageQueue.consume`."""
        return await self._deliver(topic, group, count, wait_s, owner=0, ack_timeout_s=ACK_TIMEOUT_S)

    async def _deliver(
        self, topic: str, group: str, count: int, wait_s: float, *, owner: int, ack_timeout_s: float | None
    ) -> list[ConsumerMessage]:
        if not isinstance(count, int) or count < 1:
            raise InvalidArgument(f"count={count!r} — ask for at least one message")
        until = monotonic() + wait_s
        while True:
            found, state = await self._find_group(topic, group)
            now = self._elapsed_ms() / 1000
            state.expire(now)
            lease = Lease(owner, None if ack_timeout_s is None else now + ack_timeout_s)
            if ids := state.take(lease, count, end_id=found.end_id):
                return await self._fetch(topic, group, lease, ids)
            left = until - monotonic()
            if left <= 0:
                return []
            if state.due is not None:
                left = min(left, max(state.due - now, 0.001))
            with suppress(TimeoutError):
                async with asyncio.timeout(left):  # not `wait_for`: its task would come too late for what happens now
                    await self._signals.setdefault((topic, group), Signal()).wait()

    async def ack(self, topic: str, group: str, ids: Sequence[int]) -> None:
        """See `MessageQueue.ack`."""
        found, state = await self._find_group(topic, group, changes=True)
        if not ids:
            return
        if not all(type(each) is int for each in ids) or max(ids) > found.end_id:
            raise InvalidArgument(f"topic {topic!r} ends at {found.end_id} — acknowledge ids that consume gave")
        lag = state.lag(found.end_id)
        state.ack(ids)
        found.acked += lag - state.lag(found.end_id)
        await self._changed(topic, group)

    async def seek(self, topic: str, group: str, message_id: int) -> None:
        """See `MessageQueue.seek`."""
        found, _ = await self._find_group(topic, group)
        if type(message_id) is not int:
            raise InvalidArgument(f"{shown(message_id)} is no message id — pass one that consume or produce gave")
        if message_id < found.begin_id:
            raise Truncated(message_id, found.begin_id)
        if message_id > found.end_id + 1:
            raise InvalidArgument(f"{message_id} is yet to come in topic {topic!r} — go to {found.end_id + 1} at most")
        await self.force_seek(topic, group, message_id)

    async def force_seek(self, topic: str, group: str, message_id: int) -> None:
        """See `MessageQueue.force_seek`."""
        found, state = await self._find_group(topic, group, changes=True)
        state.seek(min(max(message_id, found.begin_id), found.end_id + 1))
        self._wake(topic, group)
        await self._changed(topic, group)

    async def seek_to_latest(self, topic: str, group: str) -> None:
        """See `MessageQueue.seek_to_latest`."""
        await self.force_seek(topic, group, (await self._find(topic)).end_id + 1)

    async def get_latest_msg(self, topic: str) -> int:
        """See `MessageQueue.get_latest_msg`."""
        found = await self._find(topic)
        return found.end_id if found.end_id >= found.begin_id else -1

    async def check_topic_valid(self, topic: str) -> None:
        """See `MessageQueue.check_topic_valid`."""
        if await self.get_latest_msg(topic) >= 0:
            raise TopicNotEmpty(f"topic {topic!r} holds messages")

    async def notify(self, topic: str, group: str) -> None:
        """See `MessageQueue.notify`."""
        await self._find_group(topic, group)
        self._wake(topic, group)

    async def info(self) -> dict[str, TopicInfo]:
        """See `MessageQueue.info`."""
        await self._ready()
        return self.statistics()

    def statistics(self) -> dict[str, TopicInfo]:
        """Return what is known of the topics now, also while the log comes back."""
        return {name: info_of(topic) for name, topic in self._topics.items()}

    async def close(self) -> None:
        """Write what was begun, and refuse all else; idempotent. The store is closed after it."""
        if not self._closed:
            self._flush()
            self._closed = True
            for signal in self._signals.values():
                signal.wake()

    # --- retention -------------------------------------------------------------------------------------------------------

    async def retain(self) -> None:
        """Give up the pages of every topic that retention allows, and their space."""
        await self._ready()
        self._flush()  # a group that went back has its pages no longer acknowledged
        freed, options, now_ms = [], self._options, self._now_ms()
        for name, topic in self._topics.items():
            closed = topic.close_page(now_ms)
            pages = topic.drop(now_ms, retention_s=options.retention_s, retention_bytes=options.retention_bytes)
            if closed or pages:
                batch = self._pending()
                batch.bodies.setdefault(name, [])  # its record is written
                batch.changes |= {page_key(topic.log_id, page.end_id): encode(page) for page in closed}
                batch.changes |= dict.fromkeys(page_key(topic.log_id, page.end_id) for page in pages)
            if pages:
                freed.append((entry_key(topic.log_id, 0), entry_key(topic.log_id, topic.begin_id)))
                self._pending().dropped.append(freed[-1])
        await self._written()
        for begin, end in freed:
            await self._store.engine.compact(begin, end)

    # --- what is in memory, and what is written -------------------------------------------------------------------------

    async def _find(self, topic: str, *, changes: bool = False) -> Topic:
        await self._ready()
        if changes:  # before anything is changed in memory; of a low disk a write in the queue hears no more
            self._store.check_admitted(makes_room=True)
        if topic in self._damaged:
            raise self._damaged[topic]
        found = self._topics.get(topic)
        if found is None:
            raise TopicNotFound(f"there is no topic {shown(topic)}")
        return found

    async def _find_group(self, topic: str, group: str, *, changes: bool = False) -> tuple[Topic, Group]:
        found = await self._find(topic, changes=changes)
        if group not in found.groups:
            raise GroupNotFound(f"topic {topic!r} has no group {shown(group)}")
        return found, found.groups[group]

    async def _ready(self) -> None:
        """Have the topics of the database that is open, or raise."""
        while not self._closed and (self._openings != self._store.openings or not self._store.taking_writes):
            await self._in_term(self._load)
        if self._closed:
            raise OnShutdown("the queue is closed")

    async def _load(self) -> None:
        async with self._loading:
            openings, engine = self._store.openings, self._store.engine
            records = await self._store.scan_meta(PREFIX)
            if openings != self._openings:
                try:
                    ids, topics = decode_records(records)
                except (msgspec.MsgspecError, ValueError, KeyError) as error:
                    raise Corrupt(f"the records of topics do not decode: {error!r}") from error
                damaged = await engine.read(_damaged, engine, topics)
                if openings == self._store.openings:
                    self._install(ids, topics, damaged)
                    self._openings = openings

    def _install(self, ids: IdsRecord, topics: dict[str, Topic], damaged: dict[str, Corrupt]) -> None:
        before, self._topics, self._damaged, self._last = self._topics, topics, damaged, None
        self._next_log_id = ids.next_log_id
        self.ids.update_id(max(ids.used, *(topic.end_id for topic in topics.values()), 0))
        for name, topic in topics.items():
            for group in topic.groups.keys() & before[name].groups.keys() if name in before else ():
                topic.groups[group].take_over(before[name].groups[group], end_id=topic.end_id)
        for signal in self._signals.values():
            signal.wake()

    def _pending(self) -> _Batch:
        if self._batch is None:
            self._batch = _Batch()
            asyncio.get_running_loop().call_soon(self._flush)
        return self._batch

    async def _written(self) -> None:
        """Return once everything that was changed up to now is on the disk."""
        last = self._last if self._batch is None else self._batch.durable
        if last is not None:
            await asyncio.shield(last)

    async def _changed(self, topic: str, group: str) -> None:
        self._pending().groups.add((topic, group))
        await self._written()

    def _wake(self, topic: str, group: str) -> None:
        if signal := self._signals.get((topic, group)):
            signal.wake()

    def _flush(self) -> None:
        """Hand what was changed in this turn to the writer thread. Never suspends, so call order is the order on disk."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        self._last, changes, now_ms = batch.durable, batch.changes, self._now_ms()
        for topic, group in batch.groups:
            if found := self._topics.get(topic):
                state = found.groups.get(group)
                changes[group_key(topic, group)] = None if state is None else encode(state.record)
                changes |= {page_key(found.log_id, page.end_id): encode(page) for page in found.settle(now_ms)}
        produced: list[tuple[str, Topic, list[TopicEntry]]] = []
        stored: list[tuple[bytes, bytes]] = []
        for name, bodies in batch.bodies.items():
            found, entries = self._topics[name], []
            for part in _parts_of(bodies):
                data = encode_entry(part, first_id=found.next_id, previous_crc32c=found.crc32c)
                found.crc32c = entry_crc32c(data)
                entries.append(TopicEntry(data, found.next_id, len(part)))
                sizes = [len(payload) + len(properties) for payload, properties in part]
                closed = found.add(sizes, page_bytes=self._options.page_bytes, now_ms=now_ms)
                changes |= {page_key(found.log_id, page.end_id): encode(page) for page in closed}
                stored.append((entry_key(found.log_id, found.next_id - 1), data))
            changes[topic_key(name)] = encode(found.record)
            produced.append((name, found, entries))
        try:
            outcome = self._store.write_meta(changes, entries=stored, dropped=batch.dropped)
        except StreamingNodeError as error:  # nothing was done, and what is in memory is read again
            fail(batch.durable, error)
            return
        outcome.add_done_callback(partial(self._landed, batch.durable, produced))

    def _landed(
        self,
        durable: asyncio.Future[None],
        produced: Sequence[tuple[str, Topic, list[TopicEntry]]],
        outcome: asyncio.Future[None],
    ) -> None:
        """The disk has a batch: consumers may see it, then who waits for it is told."""
        if error := outcome.exception():
            fail(durable, error)
            return
        for name, topic, entries in produced:
            for entry in entries:
                topic.end_id = entry.last_position
                topic.produced += entry.count
                self._cache.put(topic.log_id, entry)
            for group in topic.groups:
                self._wake(name, group)
        durable.set_result(None)

    async def _fetch(self, topic: str, group: str, lease: Lease, ids: Sequence[int]) -> list[ConsumerMessage]:
        """Return the messages that a delivery holds; of more than fits into one answer, the first."""
        found, messages, size_bytes = self._topics[topic], list[ConsumerMessage](), 0
        taken = 0
        try:
            with watched("consume", topic) as passed:
                for first, stop in runs_of(ids):
                    start = first
                    while start < stop and size_bytes < CONSUME_BYTES_MAX:
                        entry = self._cache.find(found.log_id, start)
                        if entry is None:
                            entry = await self._read(topic, group, found, start)
                            passed("read")
                        if entry is None:
                            break
                        part = entry.messages()[start - entry.first_position : stop - entry.first_position]
                        size_bytes += sum(len(message.payload) for message in part)
                        start += len(part)
                        messages += part
            taken = len(messages)
        finally:
            if taken < len(ids) and topic in self._topics and (state := self._topics[topic].groups.get(group)):
                state.give_back(lease, ids[taken:])  # of now: a failed write may have come between
                self._wake(topic, group)
        found.delivered += taken
        return messages

    async def _read(self, topic: str, group: str, found: Topic, start: int) -> TopicEntry | None:
        """Return the entry that holds a message from the disk, None when the message was given up meanwhile."""
        engine, kept = self._store.engine, (found.begin_id, found.end_id)

        def read() -> list[TopicEntry]:
            return read_range(engine.entries, found.log_id, decode_entry, start, kept, READ_BYTES)

        try:
            entries = await engine.read(read)
        except Corrupt as error:
            now, _ = await self._find_group(topic, group)
            if now.log_id != found.log_id or now.begin_id > start:  # the group has gone on, and retention after it
                return None
            raise Corrupt(f"topic {topic!r}, read from id {start}: {error}") from error
        for entry in entries:
            self._cache.put(found.log_id, entry)
        return entries[0]


def _parts_of(bodies: Sequence[Body]) -> Iterator[Sequence[Body]]:
    """Yield the messages of each entry."""
    start = size_bytes = 0
    for at, (payload, properties) in enumerate(bodies):
        if at > start and (size_bytes >= ENTRY_BYTES_TARGET or at - start >= MESSAGES_PER_ENTRY_MAX):
            yield bodies[start:at]
            start, size_bytes = at, 0
        size_bytes += len(payload) + len(properties)
    if bodies:
        yield bodies[start:]


def _damaged(engine: Engine, topics: dict[str, Topic]) -> dict[str, Corrupt]:
    """Return the topics whose last entry is not the one that was written last. Reader thread."""
    found: dict[str, Corrupt] = {}
    for name, topic in topics.items():
        last = last_entry(engine.entries, topic.log_id)
        reached = (0, 0) if last is None else (last[0], entry_crc32c(last[1]))
        if topic.begin_id <= topic.end_id and reached != (topic.end_id, topic.crc32c):
            found[name] = Corrupt(f"topic {name!r} reaches id {reached[0]}, and {topic.end_id} was acknowledged")
    return found
