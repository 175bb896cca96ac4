"""RocksMQ: topics and consumer groups in a node's store; `MessageQueue` is the contract.

The topics in memory match those on the disk: `writes.py` changes both. The messages that consumers
hold are recorded only in memory, and survive a failed write.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TypeVar

import msgspec

from wal.entry_log import Batch
from wal.errors import (
    AlreadyExists,
    Corrupt,
    GroupNotFound,
    OnShutdown,
    StreamingNodeError,
    shown,
)
from wal.log import TopicStore
from wal.queue import Signal
from wal.rocksmq import contract
from wal.rocksmq.contract import (
    ACK_TIMEOUT_S,
    CONSUME_BYTES_MAX,
    Consumer,
    MessageQueue,
    MqOptions,
    TopicInfo,
)
from wal.rocksmq.group import HELD_MAX, Group, Lease
from wal.rocksmq.messages import ConsumerMessage, ProducerMessage, bodies_of, check_name, size_of
from wal.rocksmq.reading import TopicReader
from wal.rocksmq.topic import Topic, TopicChange
from wal.rocksmq.writes import Draft, TopicWriter, find_topic
from wal.runtime import carry_on, event_log, mark_heard
from wal.timetick import IdAllocator, TickAllocator

_log = event_log(__name__)
T = TypeVar("T")

CHECK_S_MAX = 600.0
"""Maximum seconds between two runs of retention, which otherwise runs ten times within
`retention_s`, and the interval of logged statistics.
"""
COUNTED_S = 0.01
"""How many seconds a count of deliveries waits for another write to join."""

ANYBODY = asyncio.Event(), ACK_TIMEOUT_S
"""The default consumer: the event of its closing, which owns its messages, and how many seconds it
may hold them.
"""


class RocksMQ(MessageQueue):
    """The topics of a store; see `MessageQueue`. Open the store before the queue and close it after
    the queue.

    `in_term` runs a call that needs the log, and runs it again when a failed write ended it. Leases
    use the clock `elapsed_ms`, pages use `now_ms`.
    """

    def __init__(
        self,
        store: TopicStore,
        options: MqOptions,
        *,
        now_ms: Callable[[], int],
        elapsed_ms: Callable[[], int],
        in_term: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
    ) -> None:
        self._state = store.state
        self._options = options
        self._now_ms = now_ms
        self._elapsed_ms = elapsed_ms
        self._writer = TopicWriter(
            store,
            options,
            IdAllocator(TickAllocator(now_ms, elapsed_ms)),
            now_ms=now_ms,
            in_term=in_term,
            on_landed=self._landed,
            on_opened=self._opened,
        )
        self._reader = TopicReader(self._writer)
        self._signals = defaultdict[tuple[str, str], Signal](Signal)
        """By topic and group: wakes consumers that wait for messages. Only as many as there are
        messages for are woken, and each wakes the next.
        """
        self._counting: asyncio.TimerHandle | None = None
        """`_counting` is the timer of the next write of delivery counts; `_counted` is the future
        of the write that is not yet drafted.
        """
        self._counted: asyncio.Future[None] | None = None
        self._closed = False

    # --- topics and groups ------------------------------------------------------------------------

    async def create_topic(self, topic: str) -> None:
        check_name("topic", topic)
        await self._writer.begin(lambda draft: self._writer.make_topic(draft, topic))

    async def destroy_topic(self, topic: str) -> None:
        batch = await self._writer.begin(lambda draft: self._writer.destroy_topic(draft, topic))
        # the topic is removed even if its space is reclaimed only later
        with suppress(StreamingNodeError):
            await self._state.reclaim(batch)

    async def create_consumer_group(self, topic: str, group: str, *, at: int = 0) -> None:
        check_name("group", group)

        def create(draft: Draft) -> None:
            change = draft.find(topic)
            if change.has_group(group):
                raise AlreadyExists(
                    f"topic {topic!r} has a group {group!r} — use it, or another name"
                )
            change.go_to(group, at)

        await self._writer.begin(create)

    async def destroy_consumer_group(self, topic: str, group: str) -> None:
        await self._writer.begin(lambda draft: draft.find(topic, group).remove_group(group))

    async def exist_consumer_group(self, topic: str, group: str) -> bool:
        with suppress(GroupNotFound):
            await self._group(topic, group)
            return True
        return False

    async def register_consumer(
        self, topic: str, group: str, *, ack_timeout_s: float | None = ACK_TIMEOUT_S
    ) -> Consumer:
        # Behind all calls that came before: such as a seek whose caller was cancelled.
        await self._writer.begin(lambda draft: draft.find(topic, group), makes_room=None)
        lasts_s = contract.check_numbers(ack_timeout_s=ack_timeout_s)
        closed = asyncio.Event()  # also the owner of the consumer's leases

        async def give_back(ids: Sequence[int] | None) -> None:
            if ids is None:
                closed.set()
                if (topic, group) in self._signals:
                    self._signals[topic, group].end(closed)
            self._give_back(topic, group, ids, closed)

        async def held(ids: Sequence[int], for_s: float) -> list[int]:
            _, state = await self._group(topic, group)
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
        return await self._writer.begin(
            lambda draft: draft.find(topic).produce(bodies),
            size_bytes=size_bytes,
            makes_room=False,
        )

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
            if self._closed or not self._writer.is_open:
                await self._open()
            found, state = self._group_of(topic, group)
            # closed during a wait, also for the log: nothing would return messages taken now
            if closed.is_set():
                # the wake-up may have been for this consumer: pass it on
                self._wake(topic, group, 1)
                return []
            now = self._elapsed_ms() / 1000
            due = state.due
            lease = closed, now + ack_timeout_s
            ids = state.take(lease, count, end_id=found.end_id, now=now)
            if ids:
                if state.due < due:
                    self._wake(topic, group)  # each waits until the new, earlier deadline
                elif state.first_open <= found.end_id:
                    self._wake(topic, group, 1)  # the next consumer takes the rest
                self._reader.read_ahead(found, ids[-1])
                messages = await self._taken(found, group, state, lease, ids)
                if messages:  # else retention overtook the group, or others took them
                    found.delivered += len(messages)
                    return messages
                continue
            left_s = until - monotonic()
            if not left_s > 0:  # also for NaN, which timers do not take
                return []
            left_s = min(left_s, max(state.due - now, 0.001), CHECK_S_MAX)
            # not `wait_for`: its task would start too late to see a wake-up that happens now
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._signals[topic, group].wait(closed)

    async def _taken(
        self, found: Topic, group: str, state: Group, lease: Lease, ids: Sequence[int]
    ) -> list[ConsumerMessage]:
        """Return the messages that a delivery holds, each with how often it was delivered.

        It leaves out those that were acknowledged, moved past by a seek or given to others while
        they were read.
        """
        counted = self._count(found, group, state, ids)
        counts = state.deliveries.of(ids)
        messages = [] if counted else self._reader.recent(found, ids)
        has_waited = len(messages) < len(ids)
        if has_waited:
            messages = await self._fetch(found, group, lease, ids, counted)
        if counts:
            messages = _with_counts(messages, counts)
        return self._still_held(found.name, group, lease, messages) if has_waited else messages

    async def _fetch(
        self,
        found: Topic,
        group: str,
        lease: Lease,
        ids: Sequence[int],
        counted: asyncio.Future[None] | None,
    ) -> list[ConsumerMessage]:
        """Return the messages of a delivery, after its count is written if that must come first.

        When they exceed `CONSUME_BYTES_MAX`, it returns the first ones.
        """
        messages = list[ConsumerMessage]()
        size_bytes = 0
        try:
            if counted is not None:
                with suppress(StreamingNodeError):  # a failing disk does not prevent reading
                    await asyncio.shield(counted)
                if isinstance(lease[0], asyncio.Event) and lease[0].is_set():
                    return []  # closed meanwhile: the consumer has returned all of them
            while len(messages) < len(ids) and size_bytes < CONSUME_BYTES_MAX:
                if part := self._reader.recent(found, ids, len(messages)):
                    messages += part
                    size_bytes += sum(map(size_of, part))
                # A cancelled call returns its messages at once: otherwise the next consumer would
                # get later ones first.
                elif not await carry_on(self._reader.read(found, ids[len(messages)])):
                    break
        except Corrupt:
            if not messages:  # else deliver the messages before the damage first
                raise
        except BaseException:
            messages = []
            raise
        finally:
            self._give_back(found.name, group, ids[len(messages) :], lease, undelivered=True)
        return messages

    def _still_held(
        self, topic: str, group: str, lease: Lease, messages: list[ConsumerMessage]
    ) -> list[ConsumerMessage]:
        """Return those of some messages that are held under a lease, in the group of now."""
        found = self._writer.topics.get(topic)
        state = None if found is None else found.groups.get(group)
        if state is None:
            return []
        held = state.held
        return [each for each in messages if held.get(each.message_id) is lease]

    async def ack(self, topic: str, group: str, ids: Sequence[int]) -> None:
        await self._writer.begin(lambda draft: draft.find(topic, group).acknowledge(group, ids))

    async def seek(self, topic: str, group: str, message_id: int) -> None:
        def seek(draft: Draft) -> None:
            change = draft.find(topic, group)
            kept = (change.begin_id, change.next_id - 1)
            change.go_to(group, contract.check_place(message_id, kept))

        await self._writer.begin(seek)

    async def force_seek(self, topic: str, group: str, message_id: int) -> None:
        await self._writer.begin(lambda draft: draft.find(topic, group).go_to(group, message_id))

    async def get_latest_msg(self, topic: str) -> int:
        found = await self._topic(topic)
        return found.end_id if found.end_id >= found.begin_id else -1

    async def get_message(self, topic: str, message_id: int) -> ConsumerMessage | None:
        contract.check_place(message_id)
        while True:
            found = await self._topic(topic)
            if not found.begin_id <= message_id <= found.end_id:
                return None
            if messages := self._reader.recent(found, [message_id]):
                return messages[0]
            await carry_on(self._reader.read(found, message_id))

    async def notify(self, topic: str, group: str) -> None:
        await self._group(topic, group)
        self._wake(topic, group)

    async def info(self) -> dict[str, TopicInfo]:
        await self._open()
        return self.statistics()

    def statistics(self) -> dict[str, TopicInfo]:
        """Return the statistics of the topics in memory, also while the log reopens."""
        return {name: topic.info for name, topic in self._writer.topics.items()}

    async def close(self) -> None:
        """Finish the writes that have begun and refuse all other calls; idempotent."""
        if self._closed:
            return
        if self._counting is not None:
            self._counting.cancel()
            self._write_counts()
        self._closed = True
        for signal in self._signals.values():
            signal.wake()
        await self._writer.close()
        await self._reader.close()

    # --- retention --------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Delete pages that retention no longer keeps, and log statistics, until cancelled."""
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
                # an error of the disk, or a log that does not reopen: try again later
                _log.warning("retention_failed", error=str(error))
            if monotonic() - logged_s >= CHECK_S_MAX:
                logged_s = monotonic()
                for name, topic in self.statistics().items():
                    _log.info("topic_statistics", topic=name, **msgspec.structs.asdict(topic))

    async def retain(self) -> None:
        """Delete the pages that retention no longer keeps, of every topic, and reclaim the
        space.
        """

        def give_up(draft: Draft) -> Batch:
            for name in self._writer.topics:
                if draft.has(name):
                    draft.find(name, damaged=True).give_up(self._now_ms(), self._options)
            return draft.batch

        await self._state.reclaim(await self._writer.begin(give_up))

    # --- the topics, and what changes them --------------------------------------------------------

    async def _open(self) -> None:
        """Load or update the topics from the store if needed. Raises `OnShutdown` after closing."""
        if self._closed:
            raise OnShutdown("the queue is closed")
        await self._writer.open()

    async def _topic(self, topic: str) -> Topic:
        """Return an undamaged topic. Raises `TopicNotFound`, `Corrupt`, and as `_open`."""
        await self._open()
        return find_topic(self._writer.topics, topic)

    async def _group(self, topic: str, group: str) -> tuple[Topic, Group]:
        """Return an undamaged topic and one of its groups. Raises as `_topic`, `GroupNotFound`."""
        await self._open()
        return self._group_of(topic, group)

    def _group_of(self, topic: str, group: str) -> tuple[Topic, Group]:
        found = find_topic(self._writer.topics, topic)
        state = found.groups.get(group)
        if state is None:
            raise GroupNotFound(f"topic {topic!r} has no group {shown(group)}")
        return found, state

    def _landed(self, draft: Draft) -> None:
        """Wake the consumers that a durable change of topics concerns."""
        for topic in draft.destroyed:
            for group in topic.groups:
                self._signals.pop((topic.name, group), Signal()).wake()
        for change in draft.changes.values():
            if change is not None:
                self._wake_for(change)

    def _wake_for(self, change: TopicChange) -> None:
        topic = change.topic
        for entry in change.entries:
            self._reader.keep(topic, entry)
            for group in topic.groups:
                self._wake(topic.name, group, 1)
        for group in change.moved:
            self._wake(topic.name, group)
        for group in change.removed:
            self._signals.pop((topic.name, group), Signal()).wake()
        for group, ids in change.acks:
            state = topic.groups.get(group)
            if state is not None and len(state.held) + len(ids) >= HELD_MAX:
                # others may wait because the group held `HELD_MAX`
                self._wake(topic.name, group, 1)

    def _opened(self) -> None:
        """Wake all consumers: the topics were loaded, or may have changed."""
        for signal in self._signals.values():
            signal.wake()
        if any(topic.uncounted for topic in self._writer.topics.values()):
            self._count_soon()

    def _count(
        self, found: Topic, group: str, state: Group, ids: Sequence[int]
    ) -> asyncio.Future[None] | None:
        """Count a delivery in memory and write the count within `COUNTED_S`. Returns the write if
        the delivery must wait for it, else None.

        The count exposes a message that kills its process on each delivery. After a kill the disk
        may lack the count of the last deliveries. So from the next opening on, each delivery of
        such a message is written before it is made.
        """
        new = state.count(ids)
        found.uncounted.add(group)
        if new and new[0] < state.exact_below:
            return self._write_counts()
        self._count_soon()
        return None

    def _count_soon(self) -> None:
        if self._counting is None:
            self._counting = asyncio.get_running_loop().call_later(COUNTED_S, self._end_counting)

    def _end_counting(self) -> None:
        self._counting = None
        if not self._closed and self._writer.is_open:  # else `_opened` starts it again
            self._write_counts()

    def _write_counts(self) -> asyncio.Future[None]:
        """Let the next write record the deliveries that no record counts yet. Returns its future,
        which must not be cancelled.
        """
        if self._counted is None or self._counted.done():
            self._counted = self._writer.begin(self._change_counts)
            self._counted.add_done_callback(mark_heard)  # there may be no waiter
        return self._counted

    def _change_counts(self, draft: Draft) -> None:
        self._counted = None  # later deliveries go into another write
        for name, topic in self._writer.topics.items():
            if topic.uncounted and draft.has(name):
                draft.find(name, damaged=True)

    def _give_back(
        self,
        topic: str,
        group: str,
        ids: Sequence[int] | None,
        holder: object,
        *,
        undelivered: bool = False,
    ) -> None:
        """Open messages for delivery again; None means all that `holder` holds. Acts on the group's
        current state: a seek may have replaced it.
        """
        found = self._writer.topics.get(topic)
        state = None if found is None else found.groups.get(group)
        if ids == [] or state is None:
            return
        given = list(state.held) if ids is None else ids
        state.give_back(given, holder, undelivered=undelivered)
        self._wake(topic, group, 1)

    def _wake(self, topic: str, group: str, count: int | None = None) -> None:
        if (topic, group) in self._signals:
            self._signals[topic, group].wake(count)


def _with_counts(
    messages: Sequence[ConsumerMessage], counts: Sequence[int]
) -> list[ConsumerMessage]:
    """Return copies of messages with their delivery counts; all groups share the messages in
    memory.
    """
    return [
        message if count == 1 else msgspec.structs.replace(message, delivery_count=count)
        for message, count in zip(messages, counts, strict=False)
    ]
