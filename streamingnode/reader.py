"""Reads collections: `async with node.read(["orders", "stock"], policy) as messages`.

A named reader of a collection without new messages would hold the log of all other collections. So
acknowledging the last delivered message also covers the log that was read after it, and a reader
that has nothing to acknowledge moves its place by itself.
"""

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from numbers import Real
from operator import attrgetter
from typing import Self, TypeVar

import anyio
import pyarrow as pa

from interceptors.shard.catalog import CollectionInfo
from scanner.scanner import ScanBatch
from streamingnode.backend import Backend, ReadRequest
from streamingnode.read_message import (
    DELIVERED_TYPES,
    ReadBatch,
    ReadCollection,
    ReadMessage,
    ReadRows,
    merge_tick,
)
from streamingnode.schema import decode_schema
from wal.entry import PackedRows, messages_of, up_to
from wal.errors import InvalidArgument, OnShutdown, StreamingNodeError, shown
from wal.headers import SYSTEM, MessageType
from wal.message import Message
from wal.position import message_id_kind
from wal.runtime import outlast
from wal.timetick import TICK_MAX

T = TypeVar("T")

LEASE_INTERVAL_S = 10.0
"""How often an idle named reader's place moves with the log; each move is one synced write."""


class CollectionReader:
    """An open reader of one collection or several; one task uses it at a time. Made by `Node.read`.

    It ends after everything at or below `until`, or after the message that its last collection was
    dropped. A reader that falls behind slows down neither writes nor other readers. Iterating it
    raises `Truncated` when the next messages are gone, `Corrupt` for damage, and `OnShutdown` when
    the node closes.
    """

    def __init__(
        self,
        backend: Backend,
        request: ReadRequest,
        *,
        include_ticks: bool,
        explain: Callable[[StreamingNodeError], None],
    ) -> None:
        """`explain` raises the error that ended the node, if that is why a call is refused."""
        infos = request.infos
        self._until = TICK_MAX if request.until is None else request.until
        self._types = request.types
        self._name = request.name
        self._reading = backend.read(request)
        self._include_ticks = include_ticks
        self._explain = explain
        self._channels = {
            vchannel: collection
            for info, collection in zip(infos, map(_read_collection, infos), strict=True)
            for vchannel in info.vchannels
        }
        self._left = {info.id for info in infos}
        """The collections that were not dropped, up to the messages read so far."""
        self._ready: deque[ReadMessage | ReadRows] = deque()
        self._entered = False
        self._open = False
        self._ended = False
        self._last_tick = 0
        """The place of the last delivered message; up to `_passed` there is no further one."""
        self._acknowledged_tick = self._held_position = 0
        """The place of a named reader: everything up to its tick is acknowledged, and the log is
        held from its position on.
        """
        self._passed: ReadMessage | None = None
        self._follow_at_s = 0.0
        self._message_id = message_id_kind(backend.wal_name)

    async def __aenter__(self) -> Self:
        """Find the place to start.

        Raises `Truncated`, `ReaderBusy`, and `InvalidArgument` for an id of another log or a tick
        in the future.
        """
        if self._entered:
            raise InvalidArgument("a reader reads once — open another with node.read()")
        self._entered = self._open = True
        try:
            self._held_position = await self._explained(self._reading.open())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReadMessage:
        """Return the next message. Cancelling loses nothing."""
        if not await self._has_more():
            raise StopAsyncIteration
        return self._take_message()

    async def next_messages(self) -> list[ReadMessage]:
        """Return the next messages, at least one, without waiting for more; an empty list at the
        end.
        """
        await self._has_more()
        return list(self._take_ready())

    async def batches(
        self, *, max_rows: int = 10_000, max_wait_s: float = 0.1
    ) -> AsyncIterator[ReadBatch]:
        """Yield batches of messages with up to `max_rows` rows, each at most `max_wait_s` after its
        first message.

        A message of more rows is a batch of its own; a message without rows counts as one row. No
        batch is empty. Writes that were packed in the log become message objects only when a batch
        is accessed. Cancelling loses nothing: the reader returns the gathered messages next. An
        error is raised after them.
        """
        if (
            not isinstance(max_rows, int)
            or max_rows < 1
            or not isinstance(max_wait_s, Real)
            or not max_wait_s >= 0
        ):
            raise InvalidArgument(
                f"{max_rows=}, {max_wait_s=} — pass at least 1 row and at least 0 seconds"
            )
        while await self._has_more():
            rows = sum([part.num_rows or 1 for part in self._ready])
            # the next call raises the error again
            with anyio.move_on_after(min(max_wait_s, 1e9)), suppress(StreamingNodeError):
                while rows < max_rows and not self._ended:
                    rows += await self._read_on()
            if parts := self._take_rows(max_rows):  # empty if it was closed meanwhile
                yield ReadBatch(parts)

    def _take_rows(self, rows_max: int) -> list[ReadMessage | ReadRows]:
        """Take ready messages of up to `rows_max` rows, or one message with more rows."""
        taken: list[ReadMessage | ReadRows] = []
        while self._ready and rows_max > 0:
            first = self._ready.popleft()
            if (first.num_rows or 1) > rows_max:
                fitting, rest = (
                    first.split(rows_max) if isinstance(first, ReadRows) else (None, first)
                )
                assert rest is not None, "the part has more rows than fit"
                self._ready.appendleft(rest)
                if fitting is None:
                    return taken or [self._take_message()]
                first = fitting
            taken.append(first)
            rows_max -= first.num_rows or 1
        return taken

    def _take_ready(self) -> Iterator[ReadMessage]:
        """Yield the ready messages, each taken only when it is requested."""
        while self._ready:
            yield self._take_message()

    def _take_message(self) -> ReadMessage:
        first = self._ready.popleft()
        if isinstance(first, ReadRows):
            first, *others = first.messages()
            self._ready.extendleft(reversed(others))
        return first

    async def ack(self, message: ReadMessage) -> None:
        """Make the reader start after `message` next time; durable when this returns.

        It also acknowledges all earlier messages, and lets the log be truncated up to it. Raises
        `InvalidArgument` for a reader without a name, and for a message that it has not delivered.
        """
        if not self._open:
            raise self._not_open()
        if self._name is None:
            raise InvalidArgument(
                "only a named reader keeps its place — open it with read(..., name=...)"
            )
        if not isinstance(message, ReadMessage):
            raise InvalidArgument(
                f"{shown(message)} is no message — pass one that this reader delivered"
            )
        is_own = type(message.last_confirmed) is self._message_id
        if not is_own or self._passed is None or message.time_tick > self._passed.time_tick:
            raise InvalidArgument(
                f"{message.message_id} was not delivered by this reader — acknowledge one that was"
            )
        upto = self._passed if message.time_tick == self._last_tick else message
        await self._explained(self._move(upto))

    async def close(self) -> None:
        """Close the reader, even if this call is cancelled, so that its name becomes free.
        Idempotent.
        """
        self._open = False
        self._ready.clear()
        # waits at most for one read, and small writes of the reader's position
        await outlast(self._reading.close())

    async def _explained(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except OnShutdown as refusal:
            self._explain(refusal)
            raise

    async def _has_more(self) -> bool:
        """Wait until a message is ready; False at the end."""
        while not self._ready and not self._ended:
            await self._read_on()
        return bool(self._ready)

    async def _read_on(self) -> int:
        """Wait for a batch, and return how many rows it made ready. Cancelling changes nothing."""
        if not self._open:
            raise self._not_open()
        batch = await self._explained(self._reading.next_batch())
        delivered = self._merge(batch)
        self._ready.extend(delivered)
        self._left -= {
            self._channels[message.vchannel].id
            for message in batch.visible
            if isinstance(message, Message) and message.type is MessageType.DROP_COLLECTION
        }
        self._ended = not self._left or batch.confirmed_tick >= self._until
        if delivered:
            self._last_tick = delivered[-1].time_tick
        if self._name is not None:
            self._passed = self._passed_by(batch)
            if not delivered:
                await self._follow(self._passed)
        return sum([part.num_rows or 1 for part in delivered])

    async def _follow(self, passed: ReadMessage) -> None:
        """Move a named reader's place if everything delivered is acknowledged, at most once an
        interval.
        """
        moved = passed.last_confirmed.position > self._held_position
        if (
            moved
            and self._acknowledged_tick >= self._last_tick
            and time.monotonic() >= self._follow_at_s
        ):
            self._follow_at_s = time.monotonic() + LEASE_INTERVAL_S
            # reading goes on; the next interval moves the place
            with suppress(StreamingNodeError):
                await self._move(passed)

    async def _move(self, upto: ReadMessage) -> None:
        # already moved that far, or moving
        self._acknowledged_tick = max(self._acknowledged_tick, upto.time_tick)
        await self._reading.ack(upto.last_confirmed.position, upto.time_tick)
        self._held_position = max(self._held_position, upto.last_confirmed.position)

    def _merge(self, batch: ScanBatch) -> list[ReadMessage | ReadRows]:
        delivered: list[ReadMessage | ReadRows] = []
        wanted = (self._channels, self._types)
        for _, group in groupby(batch.visible, attrgetter("time_tick")):
            visible = [kept for each in group if (kept := up_to(each, self._until)) is not None]
            if not visible:
                break
            part: ReadMessage | ReadRows | None
            if isinstance(rows := visible[0], PackedRows):
                part = ReadRows.of(rows, *wanted)
            else:
                part = merge_tick(list(messages_of(visible)), *wanted)
            if part is not None:
                delivered.append(part)
        if self._include_ticks:
            passed = self._passed_by(batch)
            if not delivered or delivered[-1].time_tick < passed.time_tick:
                delivered.append(passed)
        return delivered

    def _passed_by(self, batch: ScanBatch) -> ReadMessage:
        """Return the tick up to which everything was delivered, as a message.

        `until` bounds it, so that resuming after it misses none of the later messages.
        """
        until = min(self._until, batch.confirmed_tick)
        held_back = next((each for each in batch.visible if each.time_tick > until), None)
        resume_from = (
            held_back.last_confirmed if held_back else self._message_id(batch.resume_position)
        )
        return ReadMessage(
            type=MessageType.TIME_TICK,
            message_id=resume_from,
            last_confirmed=resume_from,
            time_tick=until,
        )

    def _not_open(self) -> StreamingNodeError:
        if self._entered:
            return OnShutdown("the reader is closed — open another with node.read()")
        return InvalidArgument(
            "the reader is not open — use it inside `with node.read(...) as messages`, `async "
            "with` outside of sn.sync"
        )


def _read_collection(info: CollectionInfo) -> ReadCollection:
    schema = decode_schema(info.schema)
    schemas = {
        MessageType.INSERT: schema,
        MessageType.DELETE: pa.schema([schema.field(info.primary_key)]),
    }
    return ReadCollection(info.id, info.name, schemas)


def check_types(types: Iterable[MessageType] | None) -> frozenset[MessageType]:
    """Return the message types to deliver. Raises `InvalidArgument` for a type that readers never
    get.
    """
    if types is None:
        return DELIVERED_TYPES
    chosen = list(types) if isinstance(types, Iterable) else []
    if not chosen or any(not isinstance(each, MessageType) or each in SYSTEM for each in chosen):
        raise InvalidArgument(
            f"types={shown(types)} — list what to deliver of inserts, deletes and DDL, as "
            "[sn.MessageType.INSERT]; "
            "ticks come with include_ticks=True, transactions with the types of their bodies"
        )
    return frozenset(chosen)
