"""The live tail of a log: what was just confirmed, handed to every tailing reader without touching the disk.

Confirmed entries come in from the append path, in tick order; readers take bounded slices of the same frozen entries. The
writer never waits and never asks who reads: a reader that falls behind the memory kept is `Evicted` and returns to the
log. Lives on one event loop; sleeping readers are woken by futures and cost nothing until then.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from wal.errors import OnShutdown
from wal.message import LogEntry
from wal.pending_queue import Evicted, PendingQueue

__all__ = ["Evicted", "LiveTail", "TailRead", "TailReader"]

CAPACITY_BYTES = 64 << 20
"""Entries kept for tailing readers: what a reader may be behind before it goes back to the disk."""
AGE_S = 30.0
"""Older entries are let go even when there is room: no tailing reader is this late."""
READ_BYTES_MAX = 1 << 20
"""One read hands out about this much, so that a slow reader does not keep an evicted tail in memory."""


class TailRead(NamedTuple):
    """Entries in order, possibly none, and the tick up to which the reader has now seen everything."""

    entries: list[LogEntry]
    confirmed_tick: int


class LiveTail:
    """The newest confirmed entries of one log, and its confirmed tick."""

    def __init__(
        self,
        *,
        capacity_bytes: int = CAPACITY_BYTES,
        age_s: float = AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = PendingQueue(capacity_bytes=capacity_bytes, age_s=age_s, clock=clock)
        self._bell = _Bell()

    @property
    def confirmed_tick(self) -> int:
        """Everything at or below this tick has been published; nothing at or below it will be any more."""
        return self._queue.confirmed_tick

    @property
    def first_position(self) -> int:
        """Position of the oldest message in memory; `next_position` when there is none."""
        return self._queue.first_position

    @property
    def next_position(self) -> int:
        """Position of the next message to be published; 0 while the tail does not know its place."""
        return self._queue.next_position

    @property
    def size_bytes(self) -> int:
        """Stored size of the entries in memory."""
        return self._queue.size_bytes

    @property
    def entry_count(self) -> int:
        """How many entries are in memory."""
        return len(self._queue)

    def start(self, *, next_position: int, confirmed_tick: int) -> None:
        """Take the place the log is at, forgetting what is in memory; readers below it return to the log.

        Called before a term's first append. A tail that was not told takes its place from its first entry.
        """
        self._queue.restart(next_position=next_position, confirmed_tick=confirmed_tick)
        self._published()

    def append(self, entry: LogEntry) -> None:
        """Publish a confirmed entry; ticks ascend, positions are dense. Never waits, never fails for a reader's sake."""
        self._queue.push(entry)
        self._published()

    def advance(self, tick: int) -> None:
        """Publish an idle tick: everything at or below it has been published."""
        self._queue.advance(tick)
        self._published()

    def open_reader(self, position: int) -> "TailReader | None":
        """Return a reader of everything from `position` on, or None when that is not in memory (any more).

        A position past the end is fine: the reader sleeps until the tail gets there.
        """
        covered = self._queue.next_position and position >= self._queue.first_position
        return TailReader(self._queue, self._bell, position) if covered else None

    def close(self) -> None:
        """Release every sleeping reader with `OnShutdown`; idempotent."""
        self._bell.close()

    def _published(self) -> None:
        if self._bell.sleepers:
            self._bell.ring()


class TailReader:
    """One reader's place in the live tail; used by one task at a time."""

    __slots__ = ("_bell", "_closed", "_position", "_queue", "_tick")

    def __init__(self, queue: PendingQueue, bell: "_Bell", position: int) -> None:
        self._queue = queue
        self._bell = bell
        self._position = position
        self._tick = 0
        self._closed = False

    @property
    def position(self) -> int:
        """Position of the next message this reader gets."""
        return self._position

    @property
    def ready(self) -> bool:
        """Whether `next` has something to return, or to raise, at once."""
        queue = self._queue
        return self._closed or self._position < queue.next_position or self._tick < queue.confirmed_tick

    async def next(self, *, bytes_max: int = READ_BYTES_MAX) -> TailRead:
        """Wait for the next entries, or for an idle tick, and return them.

        Returns about `bytes_max` of entries at most, one entry at least when there is one. Cancelling loses nothing.
        Raises `Evicted` when the reader was too slow, `OnShutdown` when the tail or the reader is closed.
        """
        while (read := self.poll(bytes_max=bytes_max)) is None:
            await self._bell.wait()
        return read

    def poll(self, *, bytes_max: int = READ_BYTES_MAX) -> TailRead | None:
        """Return what `next` would return without waiting, None when it would wait. Raises as `next` does."""
        if self._closed:
            raise OnShutdown("the reader is closed")
        entries = self._queue.snapshot_from(self._position, bytes_max=bytes_max)
        if entries:
            self._position = entries[-1].last_position + 1
        at_end = self._position >= self._queue.next_position
        tick = self._queue.confirmed_tick if at_end else entries[-1].time_tick
        if not entries and tick <= self._tick:
            self._bell.check_open()
            return None
        self._tick = tick
        return TailRead(entries, tick)

    def close(self) -> None:
        """End the reader; a task that waits in `next` gets `OnShutdown`."""
        self._closed = True
        self._bell.ring()


class _Bell:
    """Wakes whoever sleeps, by one future each: a cancelled sleeper takes only its own future along."""

    __slots__ = ("_closed", "sleepers")

    def __init__(self) -> None:
        self.sleepers: set[asyncio.Future[None]] = set()
        self._closed = False

    def check_open(self) -> None:
        if self._closed:
            raise OnShutdown("the log is closing")

    def ring(self) -> None:
        sleepers, self.sleepers = self.sleepers, set()
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    async def wait(self) -> None:
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleepers.add(sleeper)
        try:
            await sleeper
        finally:
            self.sleepers.discard(sleeper)

    def close(self) -> None:
        self._closed = True
        self.ring()
