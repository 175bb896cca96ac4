"""Changes of topics: one write at a time. Each write holds all calls that arrived during the write
before it.

    call -> change of a draft -> one batch of the store -> durable: topics change, callers return
                                                        -> failed: callers get `Indeterminate`

The outcome of a failed write is resolved once the store is open again: the store either has all of
it, and the topics change as if it had succeeded, or it has none of it, and nothing changes.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar

import msgspec

from wal.entry_log import Batch
from wal.errors import (
    Corrupt,
    OnShutdown,
    StreamingNodeError,
    TopicNotFound,
    shown,
)
from wal.log import TopicStore
from wal.queue import Signal
from wal.rocksmq.contract import MqOptions
from wal.rocksmq.messages import PRODUCE_BYTES_MAX, decode_entry
from wal.rocksmq.topic import (
    LOG_ID_FIRST,
    PREFIX,
    Topic,
    TopicChange,
    TopicRecord,
    decode_records,
    encode_ids,
)
from wal.runtime import event_log
from wal.timetick import IdAllocator

_log = event_log(__name__)
T = TypeVar("T")

SLOW_S = 0.2
"""A write of produced messages, or a read for consumers, that takes longer is logged: once, however
many calls wait for it.
"""


class Draft:
    """The topics as one write will leave them. Calls change the draft in their order."""

    def __init__(self, topics: Mapping[str, Topic]) -> None:
        self.batch = Batch()
        self.changes: dict[str, TopicChange | None] = {}
        """The change of each topic by name; None for a destroyed topic."""
        self.destroyed: list[Topic] = []
        self._topics = topics

    def has(self, name: str) -> bool:
        """Whether a topic of this name exists in the draft."""
        if name in self.changes:
            return self.changes[name] is not None
        return name in self._topics

    def find(self, name: str, *groups: str, damaged: bool = False) -> TopicChange:
        """Return the change of a topic that has these groups; a damaged topic only with `damaged`.

        Raises `TopicNotFound`, `GroupNotFound`, `Corrupt`.
        """
        change = self.changes.get(name)
        if change is None:
            if name in self.changes:
                raise _no_topic(name)
            change = TopicChange(find_topic(self._topics, name, damaged=damaged))
            self.changes[name] = change
        for group in groups:
            change.require_group(group)
        return change

    def create(self, topic: Topic) -> None:
        """Add a topic."""
        self.changes[topic.name] = TopicChange(topic, is_new=True)

    def destroy(self, name: str) -> int:
        """Remove a topic, and return the id that its next message would have got."""
        change = self.find(name, damaged=True)
        self.changes[name] = None
        self.destroyed.append(change.topic)
        self.batch.records |= change.removal()
        self.batch.remove(change.topic.log)
        return change.next_id

    def stage(self, *, page_bytes: int, now_ms: int) -> None:
        """Fill the batch with the changes of all calls."""
        for change in self.changes.values():
            if change is not None:
                change.stage(self.batch, page_bytes=page_bytes, now_ms=now_ms)

    def drop(self) -> None:
        """Drop the draft: the batch was not written or its outcome is open."""
        for change in self.changes.values():
            if change is not None:
                change.drop()


class Call(msgspec.Struct, eq=False, gc=False):
    """A call that waits for its write. `change` applies it to a draft and returns the result."""

    change: Callable[[Draft], Any]
    done: asyncio.Future[Any]
    size_bytes: int
    makes_room: bool | None
    """Whether it is made on a low disk, too; None when it changes nothing."""
    result: Any = None
    error: Exception | None = None
    """Why the call is refused."""

    def settle(self) -> None:
        """Complete the call with its result, or with the error that refuses it."""
        if self.done.done():
            return
        if self.error is None:
            self.done.set_result(self.result)
        else:
            self.done.set_exception(self.error)

    def fail(self, error: Exception) -> None:
        """Fail the call with an error."""
        self.error = error
        self.settle()


class TopicWriter:
    """Owns the topics of a store, and the only task that writes them.

    `on_landed` is called with each durable draft, after the topics have changed and before callers
    return. `on_opened` is called when the topics are loaded, first and after each reopening.
    """

    def __init__(
        self,
        store: TopicStore,
        options: MqOptions,
        ids: IdAllocator,
        *,
        now_ms: Callable[[], int],
        in_term: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
        on_landed: Callable[[Draft], None],
        on_opened: Callable[[], None],
    ) -> None:
        self.topics: dict[str, Topic] = {}
        self.landed = Signal()
        """Wakes when a write has ended."""
        self._store = store
        self._state = store.state
        self._options = options
        self._ids = ids
        self._now_ms = now_ms
        self._in_term = in_term
        self._on_landed = on_landed
        self._on_opened = on_opened
        self._next_log_id = LOG_ID_FIRST
        self._openings = 0
        """The store's `openings` when the topics were last compared with it."""
        self._opening = asyncio.Lock()
        self._doubt: Draft | None = None
        """The draft of a failed write, until its outcome is resolved."""
        self._calls = deque[Call]()
        self._since = 0.0
        """When the first of these calls arrived."""
        self._writing: asyncio.Task[None] | None = None
        self._is_opening = False
        """Whether this task waits for the store to take writes."""
        self._closed = False
        self._make_future = asyncio.get_running_loop().create_future

    # --- what there is ----------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the topics match the store, and the store takes writes."""
        return self._openings == self._store.openings and self._store.taking_writes

    async def open(self) -> None:
        """Bring the topics in line with the store's current opening. Raises the errors of reopening
        it.
        """
        while not self.is_open:
            if self._closed:
                raise OnShutdown("the queue is closed")
            await self._in_term(self._open)

    async def _open(self) -> None:
        async with self._opening:
            openings = self._store.openings
            records = await self._state.scan(PREFIX)
            if openings == self._openings:
                return
            if self._openings == 0:
                self._load(records)
            elif self._doubt is not None:
                self._settle(self._doubt, records)
            for topic in self.topics.values():
                await self._go_on(topic)
            if openings != self._store.openings:
                return
            self._openings = openings
            self._on_opened()

    def _load(self, records: Mapping[str, bytes]) -> None:
        try:
            (self._next_log_id, used), self.topics = decode_records(records)
        except (msgspec.MsgspecError, ValueError, KeyError) as error:
            raise Corrupt(f"the records of topics do not decode: {error!r}") from error
        for topic in self.topics.values():
            self._open_log(topic)
        self._ids.update_id(max(used, *(topic.end_id for topic in self.topics.values()), 0))

    def _settle(self, draft: Draft, records: Mapping[str, bytes]) -> None:
        """Resolve a failed batch: apply it if the store has it; a batch is written as a whole or
        not at all.
        """
        changes = draft.batch.records.items()
        self._doubt = None
        if all(records.get(key) == value for key, value in changes):
            self._land(draft)

    async def _go_on(self, topic: Topic) -> None:
        topic.damage = ""
        try:
            await topic.log.go_on(topic.begin_id, topic.end_id, topic.crc32c)
        except Corrupt as error:
            topic.damage = f"topic {topic.name!r} {error}"

    def _open_log(self, topic: Topic) -> None:
        topic.log = self._state.owned_log(
            topic.log_id,
            decode_entry,
            first_position=topic.begin_id,
            last_position=topic.end_id,
            title=f"topic {topic.name!r}, read from id",
        )

    def make_topic(self, draft: Draft, name: str) -> None:
        """Create a topic in a draft; does nothing if it exists."""
        if draft.has(name):
            return
        begin = self._ids.alloc_one()
        topic = Topic(name, TopicRecord(self._next_log_id, begin, begin - 1))
        self._next_log_id += 1
        self._open_log(topic)
        draft.create(topic)
        draft.batch.records |= encode_ids(self._next_log_id, begin)

    def destroy_topic(self, draft: Draft, name: str) -> Batch:
        """Remove a topic in a draft, and return the batch. A later topic of the same name begins
        above its ids.
        """
        self._ids.update_id(draft.destroy(name))
        draft.batch.records |= encode_ids(self._next_log_id, self._ids.alloc_one())
        return draft.batch

    # --- writes -----------------------------------------------------------------------------------

    def begin(
        self, change: Callable[[Draft], T], *, size_bytes: int = 0, makes_room: bool | None = True
    ) -> asyncio.Future[T]:
        """Apply a change with the next write, and return the future of its result. Cancelling the
        future does not undo the change.

        Raises `OnShutdown` when the writer is closed.
        """
        if self._closed:
            raise OnShutdown("the queue is closed")
        if not self._calls:
            self._since = monotonic()
        done: asyncio.Future[T] = self._make_future()
        self._calls.append(Call(change, done, size_bytes, makes_room))
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_calls())
        return done

    async def close(self) -> None:
        """Finish the calls that have begun, and end; idempotent. Calls that wait for the store to
        take writes raise `OnShutdown`.
        """
        self._closed = True
        if self._writing is None:
            return
        if self._is_opening:
            self._writing.cancel()
        await asyncio.wait([self._writing])

    async def _write_calls(self) -> None:
        try:
            while self._calls:
                await self._write_some()
        finally:
            self._writing = None
            self._refuse(OnShutdown("the queue is closed"))  # no task is left to run them
            self.landed.wake()

    async def _write_some(self) -> None:
        if not self.is_open:
            self._is_opening = True
            try:
                await self.open()
            except StreamingNodeError as error:
                self._refuse(error)
                return
            finally:
                self._is_opening = False
        began = self._since
        taken = monotonic()
        draft = Draft(self.topics)
        calls = self._take(draft)
        draft.stage(page_bytes=self._options.page_bytes, now_ms=self._now_ms())
        if not draft.batch.is_empty:
            try:
                outcome = self._state.write(draft.batch)
            except StreamingNodeError:  # nothing was written: the calls wait for the log
                draft.drop()
                self._calls.extendleft(reversed(calls))
                return
            try:
                await outcome
            except StreamingNodeError as error:
                self._fail(draft, calls, error)
                return
            self._land(draft)
        for call in calls:
            call.settle()
        _tell_slow_write(draft, began, taken)

    def _take(self, draft: Draft) -> list[Call]:
        """Take calls for the next write, and apply their changes to its draft."""
        calls = list[Call]()
        size_bytes = 0
        admitted: set[bool | None] = {None}  # the same for all calls of this step
        while self._calls and size_bytes < PRODUCE_BYTES_MAX:
            call = self._calls.popleft()
            makes_room = call.makes_room
            call.error = None
            try:
                if makes_room not in admitted:
                    self._store.check_admitted(makes_room=bool(makes_room))
                    admitted.add(makes_room)
                call.result = call.change(draft)
            except Exception as error:  # noqa: BLE001 - the caller's, as what is no name raises one
                call.error = error
            calls.append(call)
            size_bytes += call.size_bytes
        self._since = monotonic()
        return calls

    def _land(self, draft: Draft) -> None:
        """Apply a draft whose batch is durable to the topics."""
        for topic in draft.destroyed:
            self._state.release(topic.log)
        for name, change in draft.changes.items():
            if change is None:
                self.topics.pop(name, None)
            else:
                change.land()
                self.topics[name] = change.topic
        self._on_landed(draft)
        self.landed.wake()

    def _fail(self, draft: Draft, calls: Sequence[Call], error: StreamingNodeError) -> None:
        """Fail the calls of a batch whose outcome is open. A call that was refused in this draft
        runs again: the change that caused the refusal may not have happened.
        """
        self._doubt = draft
        draft.drop()
        for call in reversed(calls):
            if call.error is None:
                call.fail(error)
            else:
                self._calls.appendleft(call)
        self.landed.wake()

    def _refuse(self, error: StreamingNodeError) -> None:
        while self._calls:
            self._calls.popleft().fail(error)


def find_topic(topics: Mapping[str, Topic], name: str, *, damaged: bool = False) -> Topic:
    """Return a topic; a damaged one only with `damaged`. Raises `TopicNotFound`, `Corrupt`."""
    topic = topics.get(name)
    if topic is None:
        raise _no_topic(name)
    if topic.damage and not damaged:
        raise Corrupt(topic.damage)
    return topic


def _no_topic(name: str) -> TopicNotFound:
    return TopicNotFound(f"there is no topic {shown(name)}")


def _tell_slow_write(draft: Draft, began: float, taken: float) -> None:
    if monotonic() - began <= SLOW_S:
        return
    for change in draft.changes.values():
        if change is not None and change.entries:
            tell_slow("produce", change.topic, began, taken=taken, written=monotonic())


def tell_slow(what: str, topic: Topic, began: float, **steps: float) -> None:
    """Log a slow call, with the milliseconds from its beginning to the end of each step."""
    _log.warning(
        f"slow_{what}",
        topic=topic.name,
        **{f"{step}_ms": int((at - began) * 1000) for step, at in steps.items()},
    )
