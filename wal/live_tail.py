"""The live tail of a log: what was just confirmed, handed to every tailing reader without touching the disk.

Confirmed entries come in from the append path, in tick order; readers take bounded slices of the same frozen entries. The
writer never waits and never asks who reads: a reader that falls behind the memory kept is `Evicted` and returns to the
log. Lives on one event loop; sleeping readers are woken by futures and cost nothing until then.
"""

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from wal.errors import OnShutdown
from wal.message import LogEntry

# --- pending queue ---
#
# The newest entries of a log, in memory and in order. No I/O, no waiting.
#
# Entries come in with ascending ticks at dense positions; slices of them go out and stay valid whatever is evicted later.
# Positions serve as the running offset. The queue never blocks its writer: it lets the oldest entries go, by bytes and by
# age, but never the last one. An idle tick is remembered as the newest confirmed tick and takes no space.


class Evicted(Exception):
    """What the reader asks for is no longer in memory; it is in the log."""


class PendingQueue:
    """Entries from `first_position` up to `next_position`, and everything confirmed up to `confirmed_tick`.

    `clock` returns seconds and never goes back. The queue knows its place from `restart` or from the first push; until
    then both positions are 0 and every snapshot is `Evicted`.
    """

    __slots__ = (
        "_age_s",
        "_appended_s",
        "_capacity_bytes",
        "_clock",
        "_entries",
        "_first",
        "_next",
        "confirmed_tick",
        "first_position",
        "next_position",
        "size_bytes",
    )

    def __init__(self, *, capacity_bytes: int, age_s: float, clock: Callable[[], float]) -> None:
        self._capacity_bytes = capacity_bytes
        self._age_s = age_s
        self._clock = clock
        self._entries: dict[int, LogEntry] = {}
        self._appended_s: deque[float] = deque()
        self._first = self._next = 0
        self.size_bytes = 0
        self.first_position = self.next_position = 0
        self.confirmed_tick = 0

    def __len__(self) -> int:
        return self._next - self._first

    def restart(self, *, next_position: int, confirmed_tick: int) -> None:
        """Forget all entries; the next one comes at `next_position`, above `confirmed_tick`."""
        assert next_position >= max(1, self.next_position), "positions handed out are never taken back"
        assert confirmed_tick >= self.confirmed_tick, "a confirmed tick is a promise"
        self._entries.clear()
        self._appended_s.clear()
        self._first = self._next
        self.size_bytes = 0
        self.first_position = self.next_position = next_position
        self.confirmed_tick = confirmed_tick

    def push(self, entry: LogEntry) -> None:
        """Take the next entry: it confirms its own tick."""
        if not self.next_position:
            self.restart(next_position=entry.first_position, confirmed_tick=self.confirmed_tick)
        assert entry.time_tick > self.confirmed_tick, "entries come in the order of their ticks"
        assert entry.first_position == self.next_position, "entries come at dense positions"
        self._entries[self._next] = entry
        self._next += 1
        now_s = self._clock()
        self._appended_s.append(now_s)
        self.size_bytes += entry.size_bytes
        self.next_position += len(entry.messages)
        self.confirmed_tick = entry.time_tick
        self._evict(now_s)

    def advance(self, tick: int) -> None:
        """Confirm everything at or below `tick`; a tick that an entry has overtaken says nothing new."""
        self.confirmed_tick = max(self.confirmed_tick, tick)
        if len(self._appended_s) > 1:
            self._evict(self._clock())

    def snapshot_from(self, position: int, *, bytes_max: int | None = None) -> list[LogEntry]:
        """Return the entries from the one that holds `position`, up to the one that reaches `bytes_max`.

        Empty at or past the end. Raises `Evicted` below `first_position`.
        """
        if position < self.first_position or not self.next_position:
            raise Evicted
        if position >= self.next_position:
            return []
        at = bisect_left(range(self._first, self._next), position, key=self._last_position_at)
        return self._slice(self._first + at, bytes_max)

    def _slice(self, start: int, bytes_max: int | None) -> list[LogEntry]:
        entries = self._entries
        if bytes_max is None:
            return [entries[i] for i in range(start, self._next)]
        taken: list[LogEntry] = []
        size_bytes = 0
        for i in range(start, self._next):
            entry = entries[i]
            taken.append(entry)
            size_bytes += entry.size_bytes
            if size_bytes >= bytes_max:
                break
        return taken

    def _evict(self, now_s: float) -> None:
        oldest_s = now_s - self._age_s
        times = self._appended_s
        while len(times) > 1 and (self.size_bytes > self._capacity_bytes or times[0] < oldest_s):
            entry = self._entries.pop(self._first)
            times.popleft()
            self._first += 1
            self.size_bytes -= entry.size_bytes
            self.first_position = entry.last_position + 1

    def _last_position_at(self, index: int) -> int:
        return self._entries[index].last_position


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
