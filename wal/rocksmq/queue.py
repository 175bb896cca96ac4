"""RocksMQ: topics and consumer groups in the database of a node; `MessageQueue` is its contract.

What callers change in one turn of the event loop is one write of the store's writer thread:
messages of a topic as one entry, positions of groups, pages. The topics in memory are those on the
disk and what is on its way there; after a failed write they are read again, and only what consumers
hold is kept.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic

import msgspec

from wal.codec import entry_crc32c
from wal.errors import (
    AlreadyExists,
    Corrupt,
    GroupNotFound,
    OnShutdown,
    StreamingNodeError,
    TopicNotFound,
    shown,
)
from wal.queue import Signal
from wal.rocks.database import Engine
from wal.rocks.layout import entry_key
from wal.rocks.log import last_entry, read_range
from wal.rocks.store import RocksStore
from wal.rocksmq import contract
from wal.rocksmq.contract import (
    ACK_TIMEOUT_S,
    CONSUME_BYTES_MAX,
    Consumer,
    MessageQueue,
    MqOptions,
    TopicInfo,
)
from wal.rocksmq.messages import (
    PRODUCE_BYTES_MAX,
    ConsumerMessage,
    EntryCache,
    ProducerMessage,
    TopicEntry,
    bodies_of,
    check_name,
    decode_entry,
    size_of,
)
from wal.rocksmq.topic import (
    HELD_MAX,
    PREFIX,
    Group,
    Lease,
    Topic,
    TopicRecord,
    decode_records,
    encode_ids,
)
from wal.runtime import carry_on, event_log, mark_heard
from wal.timetick import IdAllocator, TickAllocator

_log = event_log(__name__)

READ_BYTES = 1 << 20
"""So much is read at once, and checked: what follows is mostly asked for next."""
SLOW_S = 0.2
"""A write of what was produced, or a read for consumers, that takes longer is logged: once, however
many wait for it.
"""
CHECK_S_MAX = 600.0
"""How often retention is looked at, if not ten times within its own time, and statistics are
logged.
"""

COUNTED_S = 0.01
"""How long a count of deliveries waits for another write to go with."""

ANYBODY = asyncio.Event(), ACK_TIMEOUT_S
"""The end of a consumer, which is whose its messages are, and how many seconds it may hold them."""


class _Write:
    """All that is changed in one turn of the event loop, and who waits for it."""

    def __init__(self) -> None:
        self.changes = dict[str, bytes | None]()
        self.topics = dict[Topic, None]()
        self.dropped: list[tuple[bytes, bytes]] = []
        self.room = 0
        self.began = 0.0
        self.admitted = 0.0
        """How many bytes may still be produced in it, 0 until the store was asked for room; when it
        was, and had some.
        """
        self.produced: list[tuple[Topic, TopicEntry]] = []
        self._new = asyncio.get_running_loop().create_future
        self._waiting = list[asyncio.Future[None]]()

    def done(self, topic: Topic | None = None, group: str = "") -> asyncio.Future[None]:
        """Bring what has changed of a topic and a group, too; return what each who waits may wait
        for, and cancel.
        """
        if topic is not None:
            self.topics[topic] = None
            if group:
                topic.changed_groups.add(group)
        self._waiting.append(told := self._new())
        return told

    def end(self, error: BaseException | None = None) -> None:
        """Tell who waits what became of it."""
        for told in self._waiting:
            if not told.done():
                told.set_result(None) if error is None else told.set_exception(error)


class RocksMQ(MessageQueue):
    """The topics of a `RocksStore`; see `MessageQueue`. `open` of the store comes first, `close`
    before its own.

    `in_term` calls what reads them again after a failed write. Leases go by `elapsed_ms`, pages by
    `now_ms`.
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
        self._store = store
        self._options = options
        self._in_term = in_term
        self._now_ms = now_ms
        self._elapsed_ms = elapsed_ms
        self.ids = IdAllocator(TickAllocator(now_ms, elapsed_ms))
        self._topics: dict[str, Topic] = {}
        self._signals = defaultdict[tuple[str, str], Signal](Signal)
        """Of each topic and group: who waits for messages looks again; as many as there are for,
        each wakes the next.
        """
        self._cache = EntryCache()
        self._next_write: _Write | None = None
        # the last one; if it fails, nothing is gone
        self._removal: asyncio.Future[None] | None = None
        self._loading = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._openings = 0
        self._next_log_id = 0
        self._closed = False
        self._ahead: asyncio.Future[bool] | None = None
        self._counting: asyncio.TimerHandle | None = None
        self._uncounted: dict[Topic, None] = {}
        """Topics of which the disk lacks deliveries, for the write that the timer makes."""

    # --- topics and groups ------------------------------------------------------------------------

    async def create_topic(self, topic: str) -> None:
        check_name("topic", topic)
        with suppress(TopicNotFound):
            await self._find(topic, changes=True)
        write = self._write()
        if topic not in self._topics:
            begin = self.ids.alloc_one()
            self._topics[topic] = Topic(
                topic, TopicRecord(self._next_log_id, begin, begin - 1), is_new=True
            )
            self._next_log_id += 1
            write.changes |= encode_ids(self._next_log_id, begin)
        # also of a topic that was there: it may be on its way
        await write.done(self._topics[topic])

    async def destroy_topic(self, topic: str) -> None:
        found = await self._find(topic, changes=True, damaged=True)
        self._flush()  # what was produced before is in the write before
        del self._topics[topic]
        self.ids.update_id(found.next_id)
        write = self._write()
        write.changes |= found.removal() | encode_ids(self._next_log_id, self.ids.alloc_one())
        write.dropped.append(
            dropped := (entry_key(found.log_id, 0), entry_key(found.log_id + 1, 0))
        )
        await self._removed(write.done(), topic, found.groups)
        with suppress(StreamingNodeError):  # it is gone, also if its space is given back later only
            await self._store.engine.compact(*dropped)

    async def create_consumer_group(self, topic: str, group: str, *, at: int = 0) -> None:
        check_name("group", group)
        found = await self._find(topic, changes=True)
        if group in found.groups:
            await self._write().done()  # it may be on its way
            raise AlreadyExists(f"topic {topic!r} has a group {group!r} — use it, or another name")
        await self._go_to(at, found, group)

    async def destroy_consumer_group(self, topic: str, group: str) -> None:
        found = await self._find(topic, group, changes=True)
        del found.groups[group]
        await self._removed(self._write().done(found, group), topic, [group])

    async def _removed(
        self, removal: asyncio.Future[None], topic: str, groups: Iterable[str]
    ) -> None:
        """Have who waits for messages of groups that are no more in memory look again, and return
        when they are gone.
        """
        for group in groups:
            self._signals.pop((topic, group), Signal()).wake()
        self._removal = removal
        removal.add_done_callback(mark_heard)  # who called may be cancelled, and others wait for it
        await asyncio.shield(removal)

    async def exist_consumer_group(self, topic: str, group: str) -> bool:
        with suppress(GroupNotFound):
            return group in (await self._find(topic, group)).groups
        return False

    async def register_consumer(
        self, topic: str, group: str, *, ack_timeout_s: float | None = ACK_TIMEOUT_S
    ) -> Consumer:
        await self._find(topic, group)
        lasts_s = contract.check_numbers(ack_timeout_s=ack_timeout_s)
        closed = asyncio.Event()  # is whose a lease is, too

        async def give_back(ids: Sequence[int] | None) -> None:
            if ids is None:
                closed.set()
                if (topic, group) in self._signals:
                    self._signals[topic, group].end(closed)
            self._give_back(topic, group, ids, closed)

        async def held(ids: Sequence[int], for_s: float) -> list[int]:
            state = (await self._find(topic, group)).groups[group]
            return state.held_by(closed, ids, until=self._elapsed_ms() / 1000 + for_s)

        deliver = partial(self.consume, topic, group, by=(closed, lasts_s))
        return Consumer(
            deliver,
            partial(self.ack, topic, group),
            give_back,
            _held=held,
            _now=lambda: self._elapsed_ms() / 1000,
            _lasts_s=lasts_s,
        )

    # --- messages ---------------------------------------------------------------------------------

    async def produce(self, topic: str, messages: Sequence[ProducerMessage | bytes]) -> range:
        bodies, size_bytes = bodies_of(messages)
        write = self._next_write
        # else the first of this turn has asked
        if write is None or not write.room or topic not in self._topics:
            began = monotonic()
            await self._ready()
            await self._store.admit(size_bytes)
            # raises; and the log may have come back while this waited for room
            await self._find(topic)
            write = self._write()
            write.room = write.room or PRODUCE_BYTES_MAX
            write.began = began
            write.admitted = monotonic()
        found = self._topic(topic)
        first = found.next_id + len(found.bodies) // 2
        found.bodies += bodies
        done = write.done(found)
        write.room -= size_bytes
        if write.room <= 0:
            self._flush()
        await done
        return range(first, first + len(messages))

    async def consume(
        self,
        topic: str,
        group: str,
        count: int,
        *,
        wait_s: float = 0.0,
        by: tuple[asyncio.Event, float] = ANYBODY,
    ) -> list[ConsumerMessage]:
        contract.check_numbers(count=count, wait_s=wait_s)
        until = monotonic() + wait_s
        (closed, ack_timeout_s) = by
        while True:
            state = (found := await self._find(topic, group)).groups[group]
            # while it waited, also for the log: what it took now nobody would give back
            if closed.is_set():
                self._wake(topic, group, 1)  # it may have been its turn
                return []
            now = self._elapsed_ms() / 1000
            due = state.due
            lease = closed, now + ack_timeout_s
            if ids := state.take(lease, count, end_id=found.end_id, now=now):
                if (topic, group) in self._signals and (
                    state.due < due or state.first_open <= found.end_id
                ):
                    # Each has to know until when to wait, or the next one takes what is left.
                    self._signals[topic, group].wake(None if state.due < due else 1)
                self._read_ahead(found, ids[-1])
                new = state.count(ids)
                counts = state.deliveries.of(ids)
                is_exact = bool(new) and new[0] < state.exact_below
                counted = self._count(found, group, at_once=is_exact)
                messages = [] if counted else self._cache.messages(found.log_id, ids)
                if len(messages) < len(ids):
                    messages = await self._fetch(found, group, lease, ids, counted)
                if messages:  # else retention has come after the group, or the consumer was closed
                    found.delivered += len(messages)
                    return _with_counts(messages, counts) if counts else messages
            elif (left := until - monotonic()) > 0:  # not if it is no number, which no timer takes
                left = min(left, max(state.due - now, 0.001), CHECK_S_MAX)
                # not `wait_for`: its task would come too late for what happens now
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._signals[topic, group].wait(closed)
            else:
                return []

    async def ack(self, topic: str, group: str, ids: Sequence[int]) -> None:
        state = (found := await self._find(topic, group, changes=True)).groups[group]
        if len(state.held) >= HELD_MAX:  # others may wait until there is room
            self._wake(topic, group, 1)
        found.acked += state.ack(ids, end_id=found.end_id)
        if len(ids):
            await (self._next_write or self._write()).done(found, group)

    async def seek(self, topic: str, group: str, message_id: int) -> None:
        found = await self._find(topic, group, changes=True)
        await self._go_to(
            contract.check_place(message_id, (found.begin_id, found.end_id)), found, group
        )

    async def force_seek(self, topic: str, group: str, message_id: int) -> None:
        found = await self._find(topic, group, changes=True)
        await self._go_to(message_id, found, group)

    async def _go_to(self, message_id: int, found: Topic, group: str) -> None:
        """Have a group, which may be new, go on at the nearest message that is kept."""
        found.groups[group] = Group(
            min(max(contract.check_place(message_id), found.begin_id), found.end_id + 1)
        )
        self._wake(found.name, group)
        await self._write().done(found, group)

    async def get_latest_msg(self, topic: str) -> int:
        return found.end_id if (found := await self._find(topic)).end_id >= found.begin_id else -1

    async def get_message(self, topic: str, message_id: int) -> ConsumerMessage | None:
        while (
            (found := await self._find(topic)).begin_id
            <= contract.check_place(message_id)
            <= found.end_id
        ):
            if messages := self._cache.messages(found.log_id, [message_id]):
                return messages[0]
            await carry_on(self._read(found, message_id))
        return None

    async def notify(self, topic: str, group: str) -> None:
        await self._find(topic, group)
        self._wake(topic, group)

    async def info(self) -> dict[str, TopicInfo]:
        await self._ready()
        while await self._is_removing():
            await self._ready()
        return self.statistics()

    def statistics(self) -> dict[str, TopicInfo]:
        """Return what is known of the topics now, also while the log comes back."""
        return {name: topic.info for name, topic in self._topics.items()}

    async def close(self) -> None:
        """Write what was begun, and refuse all else; idempotent. The store is closed after it."""
        if not self._closed:
            if self._counting is not None:
                self._counting.cancel()
                self._write_counts()
            self._flush()
            self._closed = True
            for signal in self._signals.values():
                signal.wake()
            if self._ahead is not None:
                await asyncio.wait([self._ahead])

    # --- retention --------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Give up pages when they may go, and log statistics, until cancelled."""
        retention_s = self._options.retention_s
        logged_s = monotonic()
        pause_s = (
            CHECK_S_MAX if retention_s is None else min(max(retention_s / 10, 1.0), CHECK_S_MAX)
        )
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.retain()
            except StreamingNodeError as error:
                # of the disk, or a log that does not come back: it is tried again
                _log.warning("retention_failed", error=str(error))
            if monotonic() - logged_s >= CHECK_S_MAX:
                logged_s = monotonic()
                for name, topic in self.statistics().items():
                    _log.info("topic_statistics", topic=name, **msgspec.structs.asdict(topic))

    async def retain(self) -> None:
        """Give up the pages of every topic that retention allows, and their space."""
        await self._ready()
        now_ms = self._now_ms()
        write = self._write()
        for topic in self._topics.values():
            write.topics[topic] = None
            if topic.give_up(now_ms, self._options):
                write.dropped.append(
                    (entry_key(topic.log_id, 0), entry_key(topic.log_id, topic.begin_id))
                )
        await write.done()
        for begin, end in write.dropped:
            await self._store.engine.compact(begin, end)

    # --- what is in memory, and what is written ---------------------------------------------------

    async def _find(
        self, topic: str, *groups: str, changes: bool = False, damaged: bool = False
    ) -> Topic:
        """As `_topic`, which only raises that something is not there once the disk has that it is
        gone.
        """
        while True:
            if self._next_write is None:
                await self._ready(changes=changes)
            try:
                return self._topic(topic, *groups, damaged=damaged)
            except (TopicNotFound, GroupNotFound):
                if not await self._is_removing():
                    raise

    async def _is_removing(self) -> bool:
        """Return whether something was on its way to be removed, when the disk has that, or has
        failed.
        """
        if self._removal is None or self._removal.done():
            return False
        await asyncio.wait([self._removal])
        return True

    def _topic(self, topic: str, *groups: str, damaged: bool = False) -> Topic:
        """Return a topic that is sound and has these groups, or raise."""
        if (found := self._topics.get(topic)) is None:
            raise TopicNotFound(f"there is no topic {shown(topic)}")
        if found.damage and not damaged:
            raise Corrupt(found.damage)
        for group in groups:
            if group not in found.groups:
                raise GroupNotFound(f"topic {topic!r} has no group {shown(group)}")
        return found

    async def _ready(self, *, changes: bool = False) -> None:
        """Have the topics of the database that is open, or raise; asked once in a turn: then there
        is a write of it.
        """
        while (
            self._closed or self._openings != self._store.openings or not self._store.taking_writes
        ):
            if self._closed:
                raise OnShutdown("the queue is closed")
            await self._in_term(self._load)
        # before anything is changed in memory; of a low disk a write in the queue hears no more
        if changes:
            self._store.check_admitted(makes_room=True)

    async def _load(self) -> None:
        """Read the topics anew, and keep what consumers hold."""
        async with self._loading:
            openings = self._store.openings
            engine = self._store.engine
            before = self._topics
            records = await self._store.state.scan(PREFIX)
            if openings == self._openings:
                return
            try:
                ids, topics = decode_records(records)
            except (msgspec.MsgspecError, ValueError, KeyError) as error:
                raise Corrupt(f"the records of topics do not decode: {error!r}") from error
            await engine.read(_check_ends, engine, topics)
            if openings != self._store.openings:
                return
            self._topics = topics
            (self._next_log_id, used) = ids
            self._openings = openings
            self.ids.update_id(max(used, *(topic.end_id for topic in topics.values()), 0))
            for name, topic in topics.items():
                # one with another log id was made anew
                if (old := before.get(name)) and old.log_id == topic.log_id:
                    topic.produced = old.produced
                    topic.delivered = old.delivered
                    topic.acked = old.acked
                    for group in topic.groups.keys() & old.groups.keys():
                        topic.groups[group].take_over(old.groups[group], end_id=topic.end_id)
                        self._count(topic, group, at_once=False)
            for signal in self._signals.values():
                signal.wake()

    def _write(self) -> _Write:
        """Return the write of this turn."""
        if (write := self._next_write) is None:
            write = self._next_write = _Write()
            asyncio.get_running_loop().call_soon(self._flush)
        return write

    def _flush(self) -> None:
        """Hand what was changed in this turn to the writer thread. Never suspends, so call order is
        the order on disk.
        """
        write = self._next_write
        self._next_write = None
        if write is None:
            return
        now_ms = self._now_ms()
        stored = list[tuple[bytes, bytes]]()
        for topic in write.topics:
            for data, entry in topic.write(page_bytes=self._options.page_bytes, now_ms=now_ms):
                stored.append((entry_key(topic.log_id, entry.last_position), data))
                write.produced.append((topic, entry))
            write.changes |= topic.changes(now_ms)
            self._uncounted.pop(topic, None)
        try:
            outcome = self._store.state.write(write.changes, entries=stored, dropped=write.dropped)
        except StreamingNodeError as error:  # nothing was done, and what is in memory is read again
            write.end(error)
            return
        outcome.add_done_callback(partial(self._landed, write))

    def _landed(self, write: _Write, outcome: asyncio.Future[None]) -> None:
        """The disk has a write: consumers may see it, then who waits for it is told."""
        error = outcome.exception()
        for topic, entry in () if error else write.produced:
            topic.produced += entry.last_position - topic.end_id
            topic.end_id = entry.last_position
            self._cache.put(topic.log_id, entry)
            for group in topic.groups:
                self._wake(topic.name, group, 1)
        write.end(error)
        if write.produced and (written := monotonic()) - write.began > SLOW_S:
            for topic in {topic for topic, _ in write.produced}:
                _tell_slow("produce", topic, write.began, admitted=write.admitted, written=written)

    def _count(self, found: Topic, group: str, *, at_once: bool) -> asyncio.Future[None] | None:
        """Write how often messages were delivered: now, and return the write, or in `COUNTED_S`.

        A message that ends its process each time it comes is to be found by its count. After a kill
        the disk may lack what was delivered last. From the next opening on it has each delivery of
        such a message before it is made.
        """
        found.changed_groups.add(group)
        if at_once:
            # as on a full disk, where an acknowledgement makes room
            with suppress(StreamingNodeError):
                self._store.check_admitted(makes_room=True)
                return self._write().done(found, group)
        self._uncounted[found] = None
        if self._counting is None:
            self._counting = asyncio.get_running_loop().call_later(COUNTED_S, self._write_counts)
        return None

    def _write_counts(self) -> None:
        self._counting = None
        topics = self._uncounted
        self._uncounted = {}
        if self._closed or self._openings != self._store.openings or not self._store.taking_writes:
            return  # the topics are read again, and take over what is counted
        with suppress(StreamingNodeError):
            self._store.check_admitted(makes_room=True)
            for topic in topics:
                if self._topics.get(topic.name) is topic:
                    self._write().topics[topic] = None

    async def _fetch(
        self,
        found: Topic,
        group: str,
        lease: Lease,
        ids: Sequence[int],
        counted: asyncio.Future[None] | None,
    ) -> list[ConsumerMessage]:
        """Return the messages that a delivery holds, once it is counted.

        Of more than fits into one answer, it returns the first.
        """
        messages = list[ConsumerMessage]()
        size_bytes = 0
        try:
            if counted is not None:
                with suppress(StreamingNodeError):  # a disk that fails keeps nobody from reading
                    await counted
                if isinstance(lease[0], asyncio.Event) and lease[0].is_set():
                    return []  # closed meanwhile, the consumer has given all of it back
            while len(messages) < len(ids) and size_bytes < CONSUME_BYTES_MAX:
                if part := self._cache.messages(found.log_id, ids, len(messages)):
                    messages += part
                    size_bytes += sum(map(size_of, part))
                # Cancelled, it gives back at once: who asks next must not get what comes behind
                # that first.
                elif not await carry_on(self._read(found, ids[len(messages)])):
                    break
        except Corrupt:
            if not messages:  # else what lies before damage is delivered first
                raise
        except BaseException:
            messages = []
            raise
        finally:
            self._give_back(found.name, group, ids[len(messages) :], lease, undelivered=True)
        return messages

    def _give_back(
        self,
        topic: str,
        group: str,
        ids: Sequence[int] | None,
        whose: object,
        *,
        undelivered: bool = False,
    ) -> None:
        """Have messages come again, None: all, in the group of now: a failed write or a seek may
        have come between.
        """
        if ids != [] and topic in self._topics and (state := self._topics[topic].groups.get(group)):
            given = list(state.held) if ids is None else ids
            state.give_back(given, whose, undelivered=undelivered)
            self._wake(topic, group, 1)

    def _wake(self, topic: str, group: str, count: int | None = None) -> None:
        if (topic, group) in self._signals:
            self._signals[topic, group].wake(count)

    def _read_ahead(self, found: Topic, delivered_id: int) -> None:
        # Once half of what was read is delivered, what follows is read, while acknowledgements are
        # on their way.
        if delivered_id in found.newest_half and (self._ahead is None or self._ahead.done()):
            self._ahead = asyncio.ensure_future(self._read(found, found.newest_half.stop))
            self._ahead.add_done_callback(mark_heard)  # who wants it meets it

    async def _read(self, found: Topic, first_id: int) -> bool:
        """Have a message in memory, and what follows; return False if it was given up meanwhile.
        Raises `Corrupt`.
        """
        engine = self._store.engine
        began = monotonic()

        def read() -> list[TopicEntry]:
            kept = min(found.begin_id, first_id), found.end_id
            read_some = partial(
                read_range, engine.entries, found.log_id, decode_entry, first_id, kept
            )
            try:
                return read_some(READ_BYTES)
            except Corrupt:
                return read_some(1)  # this one alone may be sound

        async with self._reading:
            # Others may have read it since it was looked for: consumers want the same at the same
            # time.
            if not self._cache.find(found.log_id, first_id):
                turn = monotonic()
                try:
                    entries = await engine.read(read)
                except Corrupt as error:
                    if self._topics.get(found.name) is not found or found.begin_id > first_id:
                        return False
                    raise Corrupt(
                        f"topic {found.name!r}, read from id {first_id}: {error}"
                    ) from error
                for each in reversed(entries):  # what is asked for is the last to be forgotten
                    self._cache.put(found.log_id, each)
                first = entries[0].first_position
                end = entries[-1].last_position + 1
                if end <= found.end_id:
                    found.newest_half = range((first + end) // 2, end)
                if (taken := monotonic()) - began > SLOW_S:
                    _tell_slow("consume", found, began, turn=turn, taken=taken)
        return True


def _with_counts(
    messages: Sequence[ConsumerMessage], counts: Sequence[int]
) -> list[ConsumerMessage]:
    """Return messages with how often each was delivered; those of the cache are for all groups."""
    return [
        message if count == 1 else msgspec.structs.replace(message, delivery_count=count)
        for message, count in zip(messages, counts, strict=False)
    ]


def _tell_slow(what: str, topic: Topic, began: float, **steps: float) -> None:
    _log.warning(
        f"slow_{what}",
        topic=topic.name,
        **{f"{step}_ms": int((at - began) * 1000) for step, at in steps.items()},
    )


def _check_ends(engine: Engine, topics: Mapping[str, Topic]) -> None:
    """Note with each topic whether its last entry is another one than was written last. Reader
    thread.
    """
    for name, topic in topics.items():
        last = last_entry(engine.entries, topic.log_id)
        reached = (0, 0) if last is None else (last[0], entry_crc32c(last[1]))
        if topic.begin_id <= topic.end_id and reached != (topic.end_id, topic.crc32c):
            topic.damage = (
                f"topic {name!r} reaches id {reached[0]}, and {topic.end_id} was acknowledged"
            )
