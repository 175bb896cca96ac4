"""Reads one log from a deliver policy on: ordered, assembled, filtered, in bounded batches.

Entries come from `scanner.source`; they pass the reorder buffer, which confirmed ticks release, then the transaction
buffer, then the filter; batches go out. Everything between two waits is one step without suspension, so a cancelled caller
finds the same batch again.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import msgspec

from scanner.deliver_policy import DeliverAll, DeliverPolicy, StartFrom
from scanner.errors import ReaderBusy
from scanner.reorder import ReorderBuffer, ScanFilter
from scanner.source import REAL, Closing, Mode, PatientLog, Retry, ScanMeter, Surroundings, SwitchableReader
from scanner.starting_point import StartingPoint, find_start, log_end
from wal.errors import Corrupt, OnShutdown, Overloaded, Truncated, UnsupportedFormat
from wal.headers import MessageType
from wal.live_tail import LiveTail, TailRead
from wal.log import Log
from wal.measure import Distribution
from wal.message import AnyMessage, LogEntry, Message, TransactionBuffer, TransactionMessage
from wal.position import message_id_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanLimits:
    """Bounds of one scanner. A batch ends with the entry that reaches one of them; one batch is read ahead."""

    batch_bytes: int = 1 << 20
    batch_messages: int = 4096
    retry: Retry = field(default_factory=Retry)


class ScanBatch(NamedTuple):
    """Messages with ascending ticks, all parts of a tick in one batch.

    Everything at or below `confirmed_tick` has now been delivered; without messages it is an idle tick. A scanner that
    starts from `resume_position` with `after_tick=confirmed_tick` continues here.
    """

    messages: list[AnyMessage]
    confirmed_tick: int
    resume_position: int


class ScanStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a scanner holds, has met and has measured; sizes in bytes, times in seconds.

    `backlog` are the messages of the log (all of it, filtered or not) behind its place. `read_s` times reads of the log,
    `delivery_s` goes from a message's tick, in whole milliseconds, to its delivery while the scanner tails.
    """

    name: str
    mode: Mode | None
    position: int
    backlog: int
    batches: int
    messages: int
    messages_per_s: float
    read_s: Distribution
    delivery_s: Distribution
    reorder_bytes: int
    transaction_bytes: int
    evictions: int
    read_retries: int
    late_entries: int
    dropped_bodies: int
    dropped_commits: int


class Scanner:
    """One reader of one log; used by one task at a time, closed by any.

    `vchannels` and `types` None means all; ticks above `after_tick` are delivered. Without a tail, new entries are read
    from the log as soon as they are synced. Must be created on the event loop: `latest` counts from that moment.
    Raises `InvalidArgument` for a type list that names a system type.
    """

    def __init__(
        self,
        log: Log,
        tail: LiveTail | None,
        policy: DeliverPolicy,
        *,
        vchannels: frozenset[str] | None = None,
        types: frozenset[MessageType] | None = None,
        after_tick: int = 0,
        name: str = "scanner",
        limits: ScanLimits | None = None,
        surroundings: Surroundings = REAL,
    ) -> None:
        self.name = name
        self._meter = ScanMeter(surroundings)
        self._log = log
        self._tail = tail
        self._policy = policy
        self._filter = ScanFilter(vchannels=vchannels, types=types, after_tick=after_tick)
        self._limits = limits or ScanLimits()
        self._patient = PatientLog(log, self._limits.retry, self._meter, sleep=surroundings.sleep)
        self._end = log_end(log, tail)
        self._closing = Closing(name)
        self._opening: asyncio.Task[SwitchableReader] | None = None
        self._source: SwitchableReader | None = None
        self._reorder = ReorderBuffer()
        self._transactions = TransactionBuffer(begin_missing=self._miss_begin)
        self._released: deque[LogEntry] = deque()
        self._confirmed_tick = 0
        self._delivered_tick = 0
        self._resume_position = 0
        self._next_position = 0
        """Behind the last entry that was delivered or filtered out."""
        self._failure: Exception | None = None
        self._unread: deque[AnyMessage] = deque()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set

    @property
    def statistics(self) -> ScanStatistics:
        """What the scanner holds and has met so far."""
        source, meter = self._source, self._meter
        return ScanStatistics(
            name=self.name,
            mode=source.mode if source else None,
            position=self._resume_position,
            backlog=max(self._log.next_position - self._next_position, 0) if source else 0,
            batches=meter.batches,
            messages=meter.messages.total,
            messages_per_s=meter.messages.per_second,
            read_s=meter.read_s.distribution(),
            delivery_s=meter.delivery_s.distribution(),
            reorder_bytes=self._reorder.size_bytes,
            transaction_bytes=self._transactions.size_bytes,
            evictions=source.evictions if source else 0,
            read_retries=self._patient.retries,
            late_entries=self._reorder.late_count,
            dropped_bodies=self._transactions.bodies_dropped,
            dropped_commits=self._transactions.commits_dropped,
        )

    @property
    def place(self) -> StartingPoint:
        """Where another scanner would continue after the last batch; where this one starts, once it is open."""
        return StartingPoint(self._resume_position, self._delivered_tick)

    async def open(self) -> None:
        """Find the starting point; idempotent, `next_batch` does it by itself.

        Raises `Truncated` when the policy starts below what is kept, `InvalidArgument` for an id of another kind of log.
        """
        if self._source is None:
            await self._open()

    async def next_batch(self) -> ScanBatch:
        """Wait for the next batch. Cancelling loses nothing: the next call returns the same one.

        Raises `Corrupt` or `Truncated` when the log cannot be read on, now and at every later call, `StorageFailed` when
        the storage kept failing, `OnShutdown` when the scanner or the log is closed.
        """
        self._closing.check_open()
        source = self._source or await self._open()
        while True:
            batch = self._next_released()
            if batch is not None:
                return batch
            if self._failure is not None:
                raise self._failure
            try:
                self._take(await source.next())
            except Truncated as failure:
                if self._confirmed_tick or not isinstance(self._policy, DeliverAll):
                    self._failure = failure
                else:
                    # The log was truncated between finding its earliest entry and reading it.
                    source.close()
                    source = await self._open()
            except (Corrupt, UnsupportedFormat) as failure:
                self._failure = failure

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnyMessage:
        """Return the next message; not to be mixed with `next_batch`."""
        while not self._unread:
            self._unread.extend((await self.next_batch()).messages)
        return self._unread.popleft()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the scan; a task that waits in `next_batch` gets `OnShutdown`. Idempotent."""
        self._closing.abandon(self._opening)
        self._opening = None
        if self._source is not None:
            self._source.close()
        self._released.clear()
        self._unread.clear()
        await self._closing.close()

    async def _open(self) -> SwitchableReader:
        self._opening = self._opening or asyncio.get_running_loop().create_task(self._find_source())
        opening = self._opening
        await self._closing.wait(opening)
        self._opening = None
        self._source = opening.result()
        return self._source

    async def _find_source(self) -> SwitchableReader:
        start = await find_start(self._log, self._patient, self._policy, self._end)
        if self._filter.after_tick and isinstance(self._policy, StartFrom):
            # Resumed: the position is a last-confirmed one itself, and what lies before it may be given up at any time.
            start = start._replace(position=max(start.position, self._policy.message_id.position))
        self._filter.after_tick = max(self._filter.after_tick, start.after_tick)
        self._delivered_tick = self._filter.after_tick
        self._resume_position = self._next_position = start.position
        return SwitchableReader(
            self._log,
            self._tail,
            self._patient,
            start.position,
            read_bytes=self._limits.batch_bytes,
            closing=self._closing,
        )

    def _take(self, read: TailRead) -> None:
        for entry in read.entries:
            self._reorder.push(entry)
        self._released.extend(self._reorder.pop_until(read.confirmed_tick))
        self._confirmed_tick = max(self._confirmed_tick, read.confirmed_tick)

    def _next_released(self) -> ScanBatch | None:
        """Return the next batch of what is released, None when that would be no news."""
        messages, tick = self._process()
        if not messages and tick <= self._delivered_tick:
            return None
        self._delivered_tick = tick
        self._meter.delivered(messages, tailing=self._source is not None and self._source.mode is Mode.TAILING)
        return ScanBatch(messages, tick, self._resume_position)

    def _process(self) -> tuple[list[AnyMessage], int]:
        """Return released messages up to a bound, and the tick up to which that is everything."""
        messages: list[AnyMessage] = []
        if self._failure is not None:
            return messages, self._delivered_tick
        released, limits, tick, size_bytes = self._released, self._limits, self._delivered_tick, 0
        observe, select = self._transactions.observe, self._filter.select
        while released and size_bytes < limits.batch_bytes and len(messages) < limits.batch_messages:
            entry = released.popleft()
            try:
                visible = observe(entry)
            except (Corrupt, Truncated) as failure:
                # What came before the damage is delivered; the next call fails.
                self._failure = failure
                return messages, tick
            tick = entry.time_tick
            messages.extend(select(visible, tick))
            size_bytes += entry.size_bytes
            if messages and isinstance(messages[-1], TransactionMessage):
                size_bytes += messages[-1].size_bytes
            self._resume_position = entry.last_confirmed_position
            self._next_position = entry.last_position + 1
        return messages, tick if released else max(tick, self._confirmed_tick)

    def _miss_begin(self, commit: Message) -> None:
        # Only a scan of all that is kept accepts that a transaction in front of it is gone.
        if isinstance(self._policy, DeliverAll) or not self._filter.wants_commit(commit):
            return
        earliest = message_id_kind(self._log.wal_name)(self._log.first_position)
        raise Truncated(f"transaction {commit.txn_id}, begun before {self._policy},", earliest)


# --- registry ---
#
# The open scanners of one log: unique names, a bound, and one call that closes them with the log's WAL.


SCANNERS_MAX = 1024
"""Each scanner may hold two batches; a thousand of them is 2 GiB at worst and more readers than one node feeds well."""


class ScannerRegistry:
    """Opens and closes the scanners of one log; lives on the event loop."""

    def __init__(
        self, log: Log, tail: LiveTail | None, *, limits: ScanLimits | None = None, scanners_max: int = SCANNERS_MAX
    ) -> None:
        self._log = log
        self._tail = tail
        self._limits = limits or ScanLimits()
        self._scanners_max = scanners_max
        self._scanners: dict[str, Scanner] = {}
        self._made = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._open_scanners())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the open scanners."""
        return tuple(self._open_scanners())

    def statistics(self) -> tuple[ScanStatistics, ...]:
        """Return what each open scanner holds and has met, oldest first."""
        return tuple(scanner.statistics for scanner in self._open_scanners().values())

    def open(
        self,
        policy: DeliverPolicy,
        *,
        vchannels: frozenset[str] | None = None,
        types: frozenset[MessageType] | None = None,
        after_tick: int = 0,
        name: str | None = None,
        limits: ScanLimits | None = None,
    ) -> Scanner:
        """Return a new scanner; without a name it gets one.

        Raises `ReaderBusy` for a name in use, `Overloaded` at the bound, `OnShutdown` when closed, `InvalidArgument`
        as `Scanner` does.
        """
        self._check_room(name)
        self._made += 1
        scanner = Scanner(
            self._log,
            self._tail,
            policy,
            vchannels=vchannels,
            types=types,
            after_tick=after_tick,
            name=name or f"{self._log.name}/{self._made}",
            limits=limits or self._limits,
        )
        self._scanners[scanner.name] = scanner
        return scanner

    async def close(self) -> None:
        """Close every scanner and open no more; idempotent."""
        self._closed = True
        scanners, self._scanners = self._scanners, {}
        for scanner in scanners.values():
            await scanner.close()

    def _check_room(self, name: str | None) -> None:
        if self._closed:
            raise OnShutdown(f"log {self._log.name} is closing")
        scanners = self._open_scanners()
        if name in scanners:
            raise ReaderBusy(f"a scanner named {name!r} is open on {self._log.name} — close it, or use another name")
        if len(scanners) >= self._scanners_max:
            raise Overloaded(f"{len(scanners)} scanners are open on {self._log.name} — close one first")

    def _open_scanners(self) -> dict[str, Scanner]:
        self._scanners = {name: scanner for name, scanner in self._scanners.items() if not scanner.closed}
        return self._scanners
