"""One unbroken sequence of entries out of two sources: the log, and the live tail once it reaches back far enough.

    CATCH_UP --covered--> TAILING        the tail has everything from the reader's position on
    CATCH_UP --read-----> CATCH_UP       entries came from the log
    CATCH_UP --ended----> WAITING        no tail that could take over, and nothing more in the log
    WAITING  --grown----> CATCH_UP       the log has more
    TAILING  --read-----> TAILING        entries or an idle tick came from the tail
    TAILING  --evicted--> CATCH_UP       the reader was too slow: the same position, from the log

Both sources hold the same entries at the same positions, and the position is the only thing carried over: so a switch can
neither lose nor repeat an entry.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto, unique
from typing import Any, TypeVar

from wal.errors import OnShutdown, StorageFailed
from wal.live_tail import Evicted, LiveTail, TailRead, TailReader
from wal.log import Log
from wal.measure import Histogram, Rate
from wal.message import AnyMessage, LogEntry
from wal.timetick import physical_ms

# --- tailing ---
#
# Reads a log's entries from the live tail, leaving the event loop its turns.


class Tailing:
    """The entries published from a reader's position on; used by one task at a time."""

    __slots__ = ("_read_bytes", "_reader")

    def __init__(self, reader: TailReader, *, read_bytes: int) -> None:
        self._reader = reader
        self._read_bytes = read_bytes

    @property
    def position(self) -> int:
        """Position of the next message."""
        return self._reader.position

    async def next(self) -> TailRead:
        """Wait for the next entries or an idle tick. Cancelling loses nothing. Raises as `TailReader.next`."""
        if self._reader.ready:
            # A reader that always finds something would keep the loop from the writer and from everyone else.
            await asyncio.sleep(0)
        return await self._reader.next(bytes_max=self._read_bytes)

    def close(self) -> None:
        """End a wait in `next`."""
        self._reader.close()


# --- closing ---
#
# Waits that end when their scanner is closed, and that a cancelled caller can take up again.


T = TypeVar("T")


class Closing:
    """Set once, by `close`. Lives on one event loop."""

    __slots__ = ("_abandoned", "_closed", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._abandoned: set[asyncio.Future[Any]] = set()

    @property
    def is_set(self) -> bool:
        """Whether `close` was called."""
        return self._closed.done()

    def check_open(self) -> None:
        """Raise `OnShutdown` once closed."""
        if self._closed.done():
            raise OnShutdown(f"scanner {self._name} is closed")

    async def wait(self, task: asyncio.Task[T]) -> None:
        """Return when the task is done. Cancelling the caller leaves the task running. Raises `OnShutdown` once closed."""
        if not task.done():
            self.check_open()
            await asyncio.wait((task, self._closed), return_when=asyncio.FIRST_COMPLETED)
        self.check_open()

    def abandon(self, task: asyncio.Task[T] | None) -> None:
        """Cancel a task whose result nobody wants any more, its failure included."""
        if task is not None:
            self._abandoned.add(task)
            task.add_done_callback(self._forget)
            task.cancel()

    async def close(self) -> None:
        """End all waits, and wait for what was abandoned: a read may be on a thread; idempotent."""
        if not self._closed.done():
            self._closed.set_result(None)
        if self._abandoned:
            await asyncio.wait(self._abandoned)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()


# --- surroundings ---
#
# What a scanner takes from the machine: clocks and pauses, so that tests bring their own.


Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """`now_s` is the Unix time, `monotonic` a clock that never goes back; seconds."""

    sleep: Sleep = asyncio.sleep
    now_s: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.perf_counter


REAL = Surroundings()


# --- scan meter ---
#
# What one scanner measures while it runs: reads of the log, deliveries, how late these are. Costs nothing per message.


class ScanMeter:
    """The measurements of one scanner; `started = meter.clock()` begins one that takes time."""

    __slots__ = ("_now_s", "batches", "clock", "delivery_s", "messages", "read_s")

    def __init__(self, surroundings: Surroundings) -> None:
        self._now_s = surroundings.now_s
        self.clock = surroundings.monotonic
        self.read_s = Histogram()
        self.delivery_s = Histogram()
        self.messages = Rate(self.clock)
        self.batches = 0

    def read(self, started: float) -> None:
        """Take in a read of the log."""
        self.read_s.record(self.clock() - started)

    def delivered(self, messages: Sequence[AnyMessage], *, tailing: bool) -> None:
        """Take in a batch. Only a tailing reader's is timed: before that, the age of what it reads is not its doing."""
        if not messages:
            return
        self.batches += 1
        self.messages.add(len(messages))
        if tailing:
            self.delivery_s.record(self._now_s() - physical_ms(messages[-1].time_tick) / 1000)


# --- patient read ---
#
# Reads that outlast a passing fault of the storage, a bounded number of times.


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Pauses between tries double from `pause_first_s` to `pause_max_s`; after `tries_max` the failure is the caller's."""

    tries_max: int = 8
    pause_first_s: float = 0.1
    pause_max_s: float = 5.0


class PatientLog:
    """The read side of a log, tried again where the storage failed without saying anything about the data.

    `Corrupt` and `Truncated` are facts and come through at once.
    """

    def __init__(self, log: Log, retry: Retry, meter: ScanMeter, *, sleep: Sleep) -> None:
        self._log = log
        self._meter = meter
        self._retry = retry
        self._sleep = sleep
        self.retries = 0

    async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        """Read as `Log.read` does; raises what the last try raised."""
        pause_s = self._retry.pause_first_s
        for _ in range(self._retry.tries_max - 1):
            try:
                return await self._read(position, bytes_max)
            except (StorageFailed, OSError):
                self.retries += 1
                await self._sleep(pause_s)
                pause_s = min(2 * pause_s, self._retry.pause_max_s)
        return await self._read(position, bytes_max)

    async def entry_at(self, position: int) -> LogEntry | None:
        """Return the synced entry that holds `position`, None past the end. Raises as `read` does."""
        entries = await self.read(position, bytes_max=1)
        return entries[0] if entries else None

    async def _read(self, position: int, bytes_max: int) -> list[LogEntry]:
        started = self._meter.clock()
        entries = await self._log.read(position, bytes_max=bytes_max)
        self._meter.read(started)
        return entries


# --- catch up ---
#
# Reads a log's entries from the disk, in batches, one batch ahead of whoever processes them.


class CatchUp:
    """Consecutive synced entries of a log from `position` on; used by one task at a time.

    At most one batch of about `read_bytes` is read ahead.
    """

    __slots__ = ("_closing", "_log", "_read_bytes", "_reader", "_reading", "position")

    def __init__(self, log: Log, reader: PatientLog, position: int, *, read_bytes: int, closing: Closing) -> None:
        self._log = log
        self._reader = reader
        self._read_bytes = read_bytes
        self._closing = closing
        self._reading: asyncio.Task[list[LogEntry]] | None = None
        self.position = position

    async def next(self) -> list[LogEntry]:
        """Return the next entries, none at the end of the log. Cancelling loses nothing. Raises as `PatientLog.read`."""
        reading = self._reading = self._reading or self._read_ahead()
        await self._closing.wait(reading)
        self._reading = None
        entries = reading.result()
        if entries:
            self.position = entries[-1].last_position + 1
            if self.position <= self._log.durable_position:
                self._reading = self._read_ahead()
        return entries

    def close(self) -> None:
        """Give up the batch read ahead."""
        self._closing.abandon(self._reading)
        self._reading = None

    def _read_ahead(self) -> asyncio.Task[list[LogEntry]]:
        read = self._reader.read(self.position, bytes_max=self._read_bytes)
        return asyncio.get_running_loop().create_task(read)


@unique
class Mode(Enum):
    """Where a reader's entries come from."""

    CATCH_UP = "catching up"
    WAITING = "waiting"
    TAILING = "tailing"


@unique
class Event(Enum):
    """What a step of a reader came to."""

    READ = auto()
    COVERED = auto()
    ENDED = auto()
    GROWN = auto()
    EVICTED = auto()


TRANSITIONS: dict[tuple[Mode, Event], Mode] = {
    (Mode.CATCH_UP, Event.READ): Mode.CATCH_UP,
    (Mode.CATCH_UP, Event.COVERED): Mode.TAILING,
    (Mode.CATCH_UP, Event.ENDED): Mode.WAITING,
    (Mode.WAITING, Event.GROWN): Mode.CATCH_UP,
    (Mode.TAILING, Event.READ): Mode.TAILING,
    (Mode.TAILING, Event.EVICTED): Mode.CATCH_UP,
}

Step = tuple[Event, TailRead | None]


class SwitchableReader:
    """Every entry of a log from a position on, once, in order; used by one task at a time.

    Without a tail it stays with the log. `evictions` counts how often it was too slow for the tail.
    """

    def __init__(
        self,
        log: Log,
        tail: LiveTail | None,
        reader: PatientLog,
        position: int,
        *,
        read_bytes: int,
        closing: Closing,
    ) -> None:
        self._log = log
        self._tail = tail
        self._reader = reader
        self._read_bytes = read_bytes
        self._closing = closing
        self._catch_up = self._from_log(position)
        self._tailing: Tailing | None = None
        self._growing: asyncio.Task[None] | None = None
        self._steps: dict[Mode, Callable[[], Awaitable[Step]]] = {
            Mode.CATCH_UP: self._step_catch_up,
            Mode.WAITING: self._step_waiting,
            Mode.TAILING: self._step_tailing,
        }
        self.mode = Mode.CATCH_UP
        self.evictions = 0

    @property
    def position(self) -> int:
        """Position of the next message to be read."""
        return self._catch_up.position if self._tailing is None else self._tailing.position

    async def next(self) -> TailRead:
        """Wait for the next entries, or an idle tick, and return them. Cancelling loses nothing.

        Raises `Corrupt` and `Truncated` as the log does, `OnShutdown` when the scanner or the tail is closed.
        """
        while True:
            event, read = await self._steps[self.mode]()
            self.mode = TRANSITIONS[self.mode, event]
            if read is not None:
                return read

    def close(self) -> None:
        """Let go of what is read ahead and of a wait in `next`."""
        self._catch_up.close()
        self._closing.abandon(self._growing)
        self._growing = None
        if self._tailing is not None:
            self._tailing.close()

    async def _step_catch_up(self) -> Step:
        if self._cover():
            return Event.COVERED, None
        entries = await self._catch_up.next()
        if not entries:
            return Event.ENDED, None
        return Event.READ, TailRead(entries, entries[-1].time_tick)

    async def _step_waiting(self) -> Step:
        if self._growing is None:
            self._growing = asyncio.get_running_loop().create_task(self._await_growth(self.position))
        growing = self._growing
        await self._closing.wait(growing)
        self._growing = None
        growing.result()
        return Event.GROWN, None

    async def _step_tailing(self) -> Step:
        assert self._tailing is not None
        try:
            return Event.READ, await self._tailing.next()
        except Evicted:
            self._catch_up = self._from_log(self._tailing.position)
            self._tailing = None
            self.evictions += 1
            return Event.EVICTED, None

    def _cover(self) -> bool:
        reader = self._tail.open_reader(self.position) if self._tail is not None else None
        if reader is None:
            return False
        self._tailing = Tailing(reader, read_bytes=self._read_bytes)
        self._catch_up.close()
        return True

    def _from_log(self, position: int) -> CatchUp:
        return CatchUp(self._log, self._reader, position, read_bytes=self._read_bytes, closing=self._closing)

    async def _await_growth(self, position: int) -> None:
        await self._log.wait_beyond(position - 1)
