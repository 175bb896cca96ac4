"""The live tail of a log: what was just confirmed, handed to every tailing reader without touching the disk.

The writer never waits and never asks who reads: a reader that falls behind the memory kept is `Evicted` and returns
to the log.
"""

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from wal.errors import OnShutdown
from wal.message import LogEntry

CAPACITY_BYTES = 64 << 20
"""Entries kept for tailing readers: what a reader may be behind before it goes back to the disk."""
AGE_S = 30.0
"""Older entries are dropped even when there is room: no tailing reader is this late."""
READ_BYTES_MAX = 1 << 20
"""One read hands out about this much, so that a slow reader does not keep an evicted tail in memory."""


class Evicted(Exception):
    """What the reader asks for is no longer in memory; it is in the log."""


class TailRead(NamedTuple):
    """Entries in order, possibly none, and the tick up to which the reader has now seen everything."""

    entries: list[LogEntry]
    confirmed_tick: int


class LiveTail:
    """The newest confirmed entries of one log, from `first_position` up to `next_position`, and its confirmed tick.

    Entries come in with ascending ticks at dense positions; slices of them go out and stay valid whatever is evicted later.
    The oldest are evicted by bytes and by age, but never the last one. `clock` returns seconds and never goes back.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int = CAPACITY_BYTES,
        age_s: float = AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity_bytes, self._age_s, self._clock = capacity_bytes, age_s, clock
        self._entries: dict[int, LogEntry] = {}
        """By running numbers, from `_first` up to `_next`: evicting one moves none of the others."""
        self._first = self._next = 0
        self._appended_s: deque[float] = deque()
        self._sleepers: set[asyncio.Future[None]] = set()
        self._closed = False
        self.size_bytes = 0
        """Stored size of the entries in memory."""
        self.first_position = self.next_position = 0
        """Of the oldest message in memory and of the next one to come; 0 while the tail does not know its place."""
        self.confirmed_tick = 0
        """Everything at or below this tick has been published; nothing at or below it will be any more."""

    @property
    def entry_count(self) -> int:
        """How many entries are in memory."""
        return self._next - self._first

    def start(self, *, next_position: int, confirmed_tick: int) -> None:
        """Take the place the log is at, forgetting what is in memory; readers below it return to the log.

        Called before a term's first append. A tail that was not told takes its place from its first entry.
        """
        assert next_position >= max(1, self.next_position), "positions handed out are never taken back"
        assert confirmed_tick >= self.confirmed_tick, "a confirmed tick is a promise"
        self._entries.clear()
        self._appended_s.clear()
        self._first = self._next
        self.size_bytes = 0
        self.first_position = self.next_position = next_position
        self.confirmed_tick = confirmed_tick
        self.wake()

    def append(self, entry: LogEntry) -> None:
        """Publish a confirmed entry; ticks ascend, positions are dense. Never waits, never fails for a reader's sake."""
        if not self.next_position:
            self.first_position = self.next_position = entry.first_position
        assert entry.time_tick > self.confirmed_tick, "entries come in the order of their ticks"
        assert entry.first_position == self.next_position, "entries come at dense positions"
        now_s = self._clock()
        self._entries[self._next] = entry
        self._next += 1
        self._appended_s.append(now_s)
        self.size_bytes += entry.size_bytes
        self.next_position += len(entry.messages)
        self.confirmed_tick = entry.time_tick
        self._evict(now_s)
        self.wake()

    def advance(self, tick: int) -> None:
        """Publish an idle tick: everything at or below it has been published. It takes no space."""
        self.confirmed_tick = max(self.confirmed_tick, tick)
        if len(self._appended_s) > 1:
            self._evict(self._clock())
        self.wake()

    def snapshot_from(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        """Return the entries from the one that holds `position`, up to the one that reaches `bytes_max`.

        Empty at or past the end. Raises `Evicted` below `first_position`.
        """
        if position < self.first_position or not self.next_position:
            raise Evicted
        if position >= self.next_position:
            return []
        at = bisect_left(range(self._first, self._next), position, key=lambda i: self._entries[i].last_position)
        taken: list[LogEntry] = []
        size_bytes = 0
        for i in range(self._first + at, self._next):
            entry = self._entries[i]
            taken.append(entry)
            size_bytes += entry.size_bytes
            if size_bytes >= bytes_max:
                break
        return taken

    def open_reader(self, position: int) -> "TailReader | None":
        """Return a reader of everything from `position` on, past the end too, or None when that is not in memory."""
        return TailReader(self, position) if self.next_position and position >= self.first_position else None

    def check_open(self) -> None:
        """Raise `OnShutdown` when the tail is closed."""
        if self._closed:
            raise OnShutdown("the log is closing")

    def sleeper(self) -> "asyncio.Future[None]":
        """Return a future that ends when something is published, or the tail is closed; one of the caller's own."""
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.add(sleeper)
        return sleeper

    def forget(self, sleeper: "asyncio.Future[None]") -> None:
        """Nobody waits for a sleeper any more."""
        self._sleepers.discard(sleeper)

    def close(self) -> None:
        """Release every sleeping reader with `OnShutdown`; idempotent."""
        self._closed = True
        self.wake()

    def wake(self) -> None:
        """Have every sleeping reader look again."""
        if not self._sleepers:
            return
        sleepers, self._sleepers = self._sleepers, set()
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    def _evict(self, now_s: float) -> None:
        oldest_s = now_s - self._age_s
        times = self._appended_s
        while len(times) > 1 and (self.size_bytes > self._capacity_bytes or times[0] < oldest_s):
            entry = self._entries.pop(self._first)
            times.popleft()
            self._first += 1
            self.size_bytes -= entry.size_bytes
            self.first_position = entry.last_position + 1


class TailReader:
    """One reader's place in the live tail; used by one task at a time."""

    __slots__ = ("_closed", "_sleeper", "_tail", "_tick", "position")

    def __init__(self, tail: LiveTail, position: int) -> None:
        self._tail = tail
        self._tick = 0
        self.position = position
        """Of the next message this reader gets."""
        self._closed = False
        self._sleeper: asyncio.Future[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether `next` has something to return, or to raise, at once."""
        tail = self._tail
        return self._closed or self.position < tail.next_position or self._tick < tail.confirmed_tick

    async def next(self, *, bytes_max: int = READ_BYTES_MAX) -> TailRead:
        """Wait for the next entries, or for an idle tick, and return them.

        Returns about `bytes_max` of entries at most, one entry at least when there is one. Cancelling loses nothing.
        Raises `Evicted` when the reader was too slow, `OnShutdown` when the tail or the reader is closed.
        """
        tail = self._tail
        while True:
            if self._closed:
                raise OnShutdown("the reader is closed")
            entries = tail.snapshot_from(self.position, bytes_max=bytes_max)
            if entries:
                self.position = entries[-1].last_position + 1
            tick = tail.confirmed_tick if self.position >= tail.next_position else entries[-1].time_tick
            if entries or tick > self._tick:
                self._tick = tick
                return TailRead(entries, tick)
            tail.check_open()
            sleeper = self._sleeper = tail.sleeper()
            try:
                await sleeper
            finally:
                tail.forget(sleeper)

    def close(self) -> None:
        """End the reader; a task that waits in `next` gets `OnShutdown`. Other readers sleep on."""
        self._closed = True
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)
