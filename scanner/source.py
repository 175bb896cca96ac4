"""Finds where a scan starts in a log, and reads the entries from there: from the log, then from the
live tail.

Log and tail hold the same entries at the same positions, and a switch carries only the position
over. So no switch loses or repeats an entry, in either direction; an eviction from the tail
switches back to the log.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from scanner.deliver_policy import DeliverPolicy, Start, StartingPoint
from wal.entry import LogEntry
from wal.errors import InvalidArgument, OnShutdown, StorageFailed, Truncated
from wal.live_tail import LiveTail, SharedReads
from wal.log import Log
from wal.measure import Histogram
from wal.position import FIRST_POSITION, MessageId, message_id_kind
from wal.runtime import mark_heard

T = TypeVar("T")


class Closing:
    """Waits that end when their scanner is closed. A cancelled caller can resume one. Lives on one
    event loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._abandoned: set[asyncio.Future[Any]] = set()

    def check_open(self) -> None:
        """Raise `OnShutdown` once closed."""
        if self.closed.done():
            raise OnShutdown(f"scanner {self._name} is closed")

    async def wait(self, task: asyncio.Task[T]) -> None:
        """Return when the task is done. Raises `OnShutdown` once closed. Cancelling the caller
        leaves the task running.
        """
        if not task.done():
            await asyncio.wait((task, self.closed), return_when=asyncio.FIRST_COMPLETED)
        self.check_open()

    def abandon(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel a task and ignore its result or failure."""
        if task is not None:
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
            task.add_done_callback(mark_heard)
            task.cancel()

    async def close(self) -> None:
        """End all waits, then wait for abandoned tasks: a read may be on a thread. Idempotent."""
        if not self.closed.done():
            self.closed.set_result(None)
        if self._abandoned:
            await asyncio.wait(self._abandoned)


READ_TRIES_MAX = 8
READ_PAUSE_FIRST_S = 0.1
READ_PAUSE_MAX_S = 5.0
"""Pauses between tries double from the first to the longest; the last try's failure is raised."""


class LogReads:
    """Timed reads of a log, retried when the storage failed without a verdict on the data.

    `Corrupt` and `Truncated` are final and raised at once. Reads share entries with reads by others
    that are under way or just ended.
    """

    def __init__(self, log: Log, shared: SharedReads | None = None) -> None:
        self.log = log
        self.shared = shared or SharedReads()
        self.seconds = Histogram()

    async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        """Read as `Log.read` does. Raises the error of the last try."""
        pause_s = READ_PAUSE_FIRST_S
        for _ in range(READ_TRIES_MAX - 1):
            try:
                return await self._read(position, bytes_max)
            except (StorageFailed, OSError):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, READ_PAUSE_MAX_S)
        return await self._read(position, bytes_max)

    async def entry_at(self, position: int) -> LogEntry | None:
        """Return the synced entry that holds `position`, None past the end. Raises as `read`."""
        entries = await self.read(position, bytes_max=1)
        return entries[0] if entries else None

    async def bisect(
        self, wanted: Callable[[LogEntry], bool]
    ) -> tuple[LogEntry | None, LogEntry | None]:
        """Return the last entry that is not wanted, and the first one that is; None for a missing
        one.

        `wanted` must be true for all entries after the first wanted one. Raises as `read` does.
        """
        low = self.log.first_position
        high = self.log.durable_position + 1
        before: LogEntry | None = None
        first: LogEntry | None = None
        while low < high:
            entry = await self.entry_at((low + high) // 2)
            assert entry is not None, "what is synced can be read"
            if wanted(entry):
                first = entry
                high = entry.first_position
            else:
                before = entry
                low = entry.last_position + 1
        return before, first

    async def _read(self, position: int, bytes_max: int) -> list[LogEntry]:
        shared = self.shared
        # entries below the first position are gone, even if still in memory
        while position >= self.log.first_position:
            if entries := shared.find(
                position, bytes_max=bytes_max, end_position=self.log.durable_position
            ):
                return entries
            if (others := shared.under_way.get(position)) is None:
                break
            await others.wait()
        under_way = shared.under_way
        over = under_way[position] = asyncio.Event()
        started = time.perf_counter()
        try:
            entries = await self.log.read(position, bytes_max=bytes_max)
            # A read of a single entry helps no other reader, and entries of another term must not
            # be shared.
            if bytes_max > 1 and shared.under_way is under_way:
                shared.keep(entries)
        finally:
            under_way.pop(position, None)
            # in each case: waiters would otherwise hang after a reader that was closed
            over.set()
        self.seconds.record(time.perf_counter() - started)
        return entries


async def find_start(
    reads: LogReads, start: DeliverPolicy | StartingPoint, end_position: int, confirmed_tick: int
) -> StartingPoint:
    """Return the starting point for `start`: the last-confirmed position of the first wanted entry,
    so that transactions come whole.

    `end_position` and `confirmed_tick` are the log's last synced position and its tail's tick when
    the reader was opened. Raises `Truncated` when wanted entries are, or may be, no longer kept;
    `InvalidArgument` for an id of another kind of log or of a message that does not exist yet.
    Cancelling loses nothing.
    """
    match start:
        case StartingPoint(position):
            # it is a last-confirmed position itself; entries before it may be truncated at any time
            _check_there(reads.log, message_id_kind(reads.log.wal_name)(position))
            return start
        case DeliverPolicy(Start.ALL):
            return await _start_at_earliest(reads)
        case DeliverPolicy(Start.LATEST):
            return await _start_at_end(reads, end_position, confirmed_tick)
        case DeliverPolicy(Start.FROM | Start.AFTER, MessageId() as message_id):
            return await _start_at_message(reads, message_id, inclusive=start.start is Start.FROM)
        case DeliverPolicy(Start.AFTER_TICK, int() as tick):
            return await _start_after_tick(reads, tick)
        case _:
            raise AssertionError(f"{start} has no starting point")


def _start_with(log: Log, entry: LogEntry | None, *, after_tick: int) -> StartingPoint:
    if entry is None:  # the log is empty
        return StartingPoint(log.first_position, after_tick)
    needed = entry.first_position if entry.time_tick > after_tick else entry.last_position + 1
    # truncated while the entry was read: the entries up to there would be skipped
    if needed < log.first_position:
        raise Truncated(
            message_id_kind(log.wal_name)(needed), message_id_kind(log.wal_name)(log.first_position)
        )
    # Transactions that begin below the first position have either ended before the truncation, or
    # are lost. A commit without its begin reveals a lost one.
    return StartingPoint(max(entry.last_confirmed_position, log.first_position), after_tick)


async def _start_at_earliest(reads: LogReads) -> StartingPoint:
    """Start with the first entry after which no transaction misses its begin.

    After a truncation the log may have commits whose begins are gone. Entries before the last such
    commit would be a history with a hole: rows, a missing transaction, rows. Last-confirmed
    positions ascend, so bisecting finds the first entry that needs nothing from before the
    truncation.
    """
    while (first_position := reads.log.first_position) > FIRST_POSITION:

        def needs_nothing_gone(entry: LogEntry, kept: int = first_position) -> bool:
            return entry.last_confirmed_position >= kept

        try:
            _, earliest = await reads.bisect(needs_nothing_gone)
        except Truncated:
            continue  # the log was truncated meanwhile
        return StartingPoint(first_position, earliest.first_tick - 1 if earliest else 0)
    return StartingPoint(first_position, 0)


async def _start_at_end(reads: LogReads, end_position: int, confirmed_tick: int) -> StartingPoint:
    log = reads.log
    # truncated meanwhile, beyond entries that came after the end
    if end_position + 1 < log.first_position:
        kind = message_id_kind(log.wal_name)
        raise Truncated(kind(end_position + 1), kind(log.first_position))
    entry = await reads.entry_at(end_position) if end_position >= log.first_position else None
    return _start_with(log, entry, after_tick=max(entry.time_tick if entry else 0, confirmed_tick))


async def _start_at_message(
    reads: LogReads, message_id: MessageId, *, inclusive: bool
) -> StartingPoint:
    log = reads.log
    position = message_id.position
    if type(message_id) is not message_id_kind(log.wal_name):
        raise InvalidArgument(
            f"{message_id} is not an id of a {log.wal_name} log — use one that this log returned"
        )
    _check_there(log, message_id, inclusive=inclusive)
    is_next = inclusive and position == log.next_position
    last = position - 1 if is_next else position
    if last > log.durable_position:
        await log.wait_beyond(last - 1)
    if is_next:
        return await _start_at_end(reads, last, 0)
    entry = await reads.entry_at(position)
    assert entry is not None, "what is synced can be read"
    tick = entry.tick_at(position)
    return _start_with(log, entry, after_tick=tick - 1 if inclusive else tick)


def _check_there(log: Log, message_id: MessageId, *, inclusive: bool = True) -> None:
    if message_id.position < log.first_position:
        raise Truncated(message_id, type(message_id)(log.first_position))
    if message_id.position >= log.next_position + inclusive:
        raise InvalidArgument(
            f"no message has the id {message_id} yet — start at the end to read new messages"
        )


async def _start_after_tick(reads: LogReads, tick: int) -> StartingPoint:
    log = reads.log
    while True:
        first_position = log.first_position
        try:
            below, above = await reads.bisect(lambda entry: entry.time_tick > tick)
        except Truncated:
            if log.first_position == first_position:
                raise
            continue  # the log was truncated meanwhile, perhaps not up to the tick
        is_within = above is not None and above.first_tick <= tick
        if below is not None or is_within or log.first_position == FIRST_POSITION:
            return _start_with(log, above or below, after_tick=tick)
        # truncated entries may have had ticks above the given one
        if log.first_position == first_position:
            raise Truncated(f"tick {tick}", message_id_kind(log.wal_name)(first_position))


class Read(NamedTuple):
    """Entries in order, possibly none, and the tick up to which the reader now has everything."""

    entries: list[LogEntry]
    confirmed_tick: int


class EntrySource:
    """Every entry of a log from a position on, once, in order; used by one task at a time.

    Without a tail it always reads the log. It reads at most one batch of about `read_bytes` ahead.
    """

    def __init__(
        self,
        reads: LogReads,
        tail: LiveTail | None,
        position: int,
        *,
        read_bytes: int,
        closing: Closing,
    ) -> None:
        self._reads = reads
        self._tail = tail
        self._closing = closing
        self._position = position
        self._read_bytes = read_bytes
        self.tailing = False
        """Whether the next entries come from the live tail."""
        self._waiting = False
        self._confirmed_tick = 0
        self._reading: asyncio.Task[list[LogEntry]] | None = None

    async def next(self) -> Read:
        """Wait for the next entries, or an idle tick, and return them. Cancelling loses nothing.

        Raises `Corrupt` and `Truncated` as the log does, `OnShutdown` when the scanner or the tail
        is closed.
        """
        if self.tailing:
            # Yield to the loop: a reader that always finds entries would keep the writer and all
            # others from it.
            await asyncio.sleep(0)
        tail = self._tail
        while True:
            self._closing.check_open()
            if tail is None or not self._switch_to(tail):
                entries = await self._read_log()
                return Read(entries, entries[-1].time_tick)
            if (read := self._read_tail(tail)) is not None:
                return read
            if tail.closed:
                raise OnShutdown("the log is closing")
            self._waiting = True
            try:
                await tail.changed.wait()
            finally:
                self._waiting = False

    def close(self) -> None:
        """Abandon the read under way, and wake a wait in `next`, which then checks whether the
        scanner is closed.
        """
        self._stop_reading()
        if self._tail is not None and self._waiting:
            self._tail.changed.wake()

    def _switch_to(self, tail: LiveTail) -> bool:
        """Use the live tail if it has everything from the position on, else the log; return whether
        it is the tail.
        """
        self.tailing = self._position >= tail.first_position
        if self.tailing:
            self._stop_reading()
        return self.tailing

    def _read_tail(self, tail: LiveTail) -> Read | None:
        """Return the entries and tick of the tail that are new to this reader, None without any."""
        entries = tail.read(self._position, bytes_max=self._read_bytes)
        if entries:
            self._position = entries[-1].last_position + 1
        tick = (
            tail.confirmed_tick if self._position >= tail.next_position else entries[-1].time_tick
        )
        if not entries and tick <= self._confirmed_tick:
            return None
        self._confirmed_tick = tick
        return Read(entries, tick)

    async def _read_log(self) -> list[LogEntry]:
        """Wait for the next synced entries, and start reading those after them."""
        reading = self._reading = self._reading or self._start_reading()
        await self._closing.wait(reading)
        self._reading = None
        entries = reading.result()
        self._position = entries[-1].last_position + 1
        if self._position <= self._reads.log.durable_position:
            self._reading = self._start_reading()
        return entries

    def _start_reading(self) -> asyncio.Task[list[LogEntry]]:
        self._reads.shared.join(self)
        position = self._position
        reads = self._reads

        async def read() -> list[LogEntry]:
            while not (entries := await reads.read(position, bytes_max=self._read_bytes)):
                await reads.log.wait_beyond(position - 1)
            return entries

        return asyncio.get_running_loop().create_task(read())

    def _stop_reading(self) -> None:
        self._reads.shared.leave(self)
        self._closing.abandon(self._reading)
        self._reading = None
