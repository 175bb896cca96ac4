"""Reads one log from a deliver policy on: ordered, assembled, filtered, in bounded batches.

Entries pass the reorder buffer, which confirmed ticks release, then the transaction buffer, then
the filter. Nothing suspends between two waits, so a call after a cancelled one returns the same
batch.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Self

import msgspec

from scanner.deliver_policy import DeliverPolicy, StartingPoint
from scanner.reorder import ReorderBuffer, ScanFilter
from scanner.source import Closing, EntrySource, LogReads, find_start
from wal.entry import LogEntry, TransactionBuffer, Visible
from wal.errors import Corrupt, OnShutdown, Overloaded, Truncated, UnsupportedFormat
from wal.headers import MessageType
from wal.live_tail import LiveTail
from wal.log import Log
from wal.measure import Distribution, Histogram, Rate
from wal.message import Message, TransactionMessage
from wal.position import message_id_kind
from wal.timetick import physical_ms

BATCH_BYTES = 1 << 20
BATCH_MESSAGES = 4096
"""A batch ends with the entry that reaches either bound; one batch is read ahead."""


class ScanBatch(NamedTuple):
    """Messages and packed rows with ascending ticks; all parts of a tick are in one batch.

    Everything at or below `confirmed_tick` is delivered with this batch; a batch without messages
    is an idle tick. A scanner that starts at `StartingPoint(resume_position, confirmed_tick)`
    continues after it.
    """

    visible: list[Visible]
    confirmed_tick: int
    resume_position: int


class ScanStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a scanner has delivered and measured; times in seconds.

    `mode` is "opening", "catching up" from the log, or "tailing". `backlog` counts the messages of
    the log, including filtered ones, after the scanner's position. `read_s` are the times of log
    reads. `delivery_s`, measured while tailing, are the times from a message's tick, in whole
    milliseconds, to its delivery.
    """

    name: str
    mode: str
    position: int
    backlog: int
    batches: int
    messages: int
    messages_per_s: float
    read_s: Distribution
    delivery_s: Distribution
    transaction_bytes: int


class Scanner:
    """One reader of one log; used by one task at a time, closed by any.

    None for `vchannels` or `types` means all. Without a tail, new entries are read from the log as
    soon as they are synced. `on_delivery` is called with the number of delivered messages, and the
    bytes of the entries read for them. Create it on the event loop: `latest` counts from that
    moment. Raises `InvalidArgument` for a type list that names a system type.
    """

    def __init__(
        self,
        log: Log,
        tail: LiveTail | None,
        start: DeliverPolicy | StartingPoint,
        *,
        vchannels: frozenset[str] | None = None,
        types: frozenset[MessageType] | None = None,
        name: str = "scanner",
        batch_bytes: int = BATCH_BYTES,
        batch_messages: int = BATCH_MESSAGES,
        on_delivery: Callable[[int, int], None] = lambda _messages, _bytes: None,
    ) -> None:
        self.name = name
        self._log = log
        self._tail = tail
        self._start = start
        self._takes_what_there_is = start == DeliverPolicy.all()
        self._filter = ScanFilter(vchannels=vchannels, types=types)
        self._batch_bytes = batch_bytes
        self._batch_messages = batch_messages
        self._reads = LogReads(log, None if tail is None else tail.behind)
        self._end_position = log.durable_position
        self._end_tick = 0 if tail is None else tail.confirmed_tick
        self._closing = Closing(name)
        self._opening: asyncio.Task[EntrySource] | None = None
        self._source: EntrySource | None = None
        self._reorder = ReorderBuffer()
        self._transactions = TransactionBuffer(begin_missing=self._miss_begin)
        self._released: deque[LogEntry] = deque()
        self._delivered_tick = 0
        self._resume_position = 0
        self._next_position = 0
        """The position after the last entry that was delivered or filtered out."""
        self._failure: Exception | None = None
        self._batches = 0
        self._messages = Rate(time.perf_counter)
        self._on_delivery = on_delivery
        self._delivery_s = Histogram()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.closed.done()

    @property
    def statistics(self) -> ScanStatistics:
        """What the scanner has delivered and measured so far."""
        source = self._source
        reading = "tailing" if source and source.tailing else "catching up"
        return ScanStatistics(
            name=self.name,
            mode=reading if source else "opening",
            position=self._resume_position,
            backlog=max(self._log.next_position - self._next_position, 0) if source else 0,
            batches=self._batches,
            messages=self._messages.total,
            messages_per_s=self._messages.per_second,
            read_s=self._reads.seconds.distribution(),
            delivery_s=self._delivery_s.distribution(),
            transaction_bytes=self._transactions.size_bytes,
        )

    @property
    def place(self) -> StartingPoint:
        """Where another scanner would continue after the last batch; after `open`, where this one
        starts.
        """
        return StartingPoint(self._resume_position, self._delivered_tick)

    async def open(self) -> EntrySource:
        """Find the starting point. Idempotent; `next_batch` calls it.

        Raises `Truncated` when the policy starts below what is kept, `InvalidArgument` for an id of
        another kind of log.
        """
        if self._source is None:
            opening = self._opening = self._opening or asyncio.get_running_loop().create_task(
                self._find_source()
            )
            await self._closing.wait(opening)
            self._opening = None
            self._source = opening.result()
        return self._source

    async def next_batch(self) -> ScanBatch:
        """Wait for the next batch. Cancelling loses nothing: the next call returns the same one.

        Raises `Corrupt` or `Truncated` when the log cannot be read further, then at every later
        call, too. Raises `StorageFailed` when the storage keeps failing, `OnShutdown` when the
        scanner or the log is closed.
        """
        self._closing.check_open()
        source = await self.open()
        while True:
            if (batch := self._next_released(source)) is not None:
                return batch
            if self._failure is not None:
                # without its traceback: each raise would add frames
                raise self._failure.with_traceback(None)
            if self._released:
                # A batch's worth was filtered out. Continue here: no later event may wake this loop
                # for the rest.
                await asyncio.sleep(0)
                continue
            try:
                read = await source.next()
            except (Corrupt, Truncated, UnsupportedFormat) as failure:
                is_fresh = self._takes_what_there_is and not self._reorder.last_tick
                if not (isinstance(failure, Truncated) and is_fresh):
                    self._failure = failure
                    continue
                # The log was truncated between finding its earliest entry and reading it.
                source.close()
                self._source = None
                source = await self.open()
                continue
            for entry in read.entries:
                self._reorder.push(entry)
            self._released.extend(self._reorder.pop_until(read.confirmed_tick))

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()  # the caller gets no scanner to close
            raise
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the scan; a task that waits in `next_batch` raises `OnShutdown`. Idempotent."""
        self._closing.abandon(self._opening)
        self._opening = None
        if self._source is not None:
            self._source.close()
        self._released.clear()
        await self._closing.close()

    async def _find_source(self) -> EntrySource:
        start = await find_start(self._reads, self._start, self._end_position, self._end_tick)
        self._filter.after_tick = self._delivered_tick = start.after_tick
        self._resume_position = self._next_position = start.position
        return EntrySource(
            self._reads,
            self._tail,
            start.position,
            read_bytes=self._batch_bytes,
            closing=self._closing,
        )

    def _next_released(self, source: EntrySource) -> ScanBatch | None:
        """Return the next bounded batch of released entries; None when it would change nothing."""
        delivered: list[Visible] = []
        count = 0
        released = self._released
        tick = self._delivered_tick
        size_bytes = 0
        observe = self._transactions.observe
        select = self._filter.select
        while released and self._failure is None:
            if size_bytes >= self._batch_bytes or count >= self._batch_messages:
                break
            entry = released.popleft()
            try:
                visible = observe(entry)
            except (Corrupt, Truncated) as failure:
                # deliver what comes before the damage; the next call raises
                self._failure = failure
                break
            tick = entry.time_tick
            selected = select(visible, tick)
            delivered.extend(selected)
            count += sum([each.count for each in selected])
            size_bytes += entry.size_bytes
            if selected and isinstance(selected[-1], TransactionMessage):
                size_bytes += selected[-1].size_bytes
            # positions only move forward
            self._resume_position = max(self._resume_position, entry.last_confirmed_position)
            self._next_position = entry.last_position + 1
        if not released and self._failure is None:
            tick = max(tick, self._reorder.last_tick)
        if not delivered and tick <= self._delivered_tick:
            return None
        self._delivered_tick = tick
        if delivered:
            self._batches += 1
            self._messages.add(count)
            self._on_delivery(count, size_bytes)
            if source.tailing:  # when catching up, the age of messages is not the scanner's delay
                self._delivery_s.record(time.time() - physical_ms(delivered[-1].time_tick) / 1000)
        return ScanBatch(delivered, tick, self._resume_position)

    def _miss_begin(self, commit: Message) -> None:
        # Only a scan of everything kept accepts a transaction whose begin is gone.
        if self._takes_what_there_is or not self._filter.wants_commit(commit):
            return
        earliest = message_id_kind(self._log.wal_name)(self._log.first_position)
        raise Truncated(f"transaction {commit.txn_id}, begun before {self._start},", earliest)


SCANNERS_MAX = 1024
"""Each scanner may hold two batches: a thousand hold 2 GiB at worst, and are more readers than one
node feeds well.
"""


class ScannerRegistry:
    """Opens and names the scanners of one log, up to a bound, and closes them. Lives on the event
    loop.
    """

    def __init__(self, log: Log, tail: LiveTail | None) -> None:
        self._log = log
        self._tail = tail
        self._scanners: list[Scanner] = []
        self._made = 0
        self._closed = False
        self.delivered = (0, 0)
        """The number of messages that all scanners have delivered, and the bytes of their entries.
        """

    def statistics(self) -> tuple[ScanStatistics, ...]:
        """Return the statistics of each open scanner, oldest first."""
        return tuple(scanner.statistics for scanner in self._open_scanners())

    def open(
        self,
        start: DeliverPolicy | StartingPoint,
        *,
        vchannels: frozenset[str] | None = None,
        types: frozenset[MessageType] | None = None,
    ) -> Scanner:
        """Return a new scanner.

        Raises `Overloaded` at the bound, `OnShutdown` when closed, `InvalidArgument` as `Scanner`.
        """
        if self._closed:
            raise OnShutdown(f"log {self._log.name} is closing")
        scanners = self._open_scanners()
        if len(scanners) >= SCANNERS_MAX:
            raise Overloaded(
                f"{len(scanners)} scanners are open on {self._log.name} — close one first"
            )
        self._made += 1
        name = f"{self._log.name}/{self._made}"
        scanner = Scanner(
            self._log,
            self._tail,
            start,
            vchannels=vchannels,
            types=types,
            name=name,
            on_delivery=self._count,
        )
        scanners.append(scanner)
        return scanner

    async def close(self) -> None:
        """Close every scanner and open no more; idempotent."""
        self._closed = True
        scanners = self._scanners
        self._scanners = []
        for scanner in scanners:
            await scanner.close()

    def _count(self, messages: int, size_bytes: int) -> None:
        self.delivered = self.delivered[0] + messages, self.delivered[1] + size_bytes

    def _open_scanners(self) -> list[Scanner]:
        self._scanners = [scanner for scanner in self._scanners if not scanner.closed]
        return self._scanners
