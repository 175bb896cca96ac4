"""The live tail of a log: what was just confirmed, handed to every tailing reader without touching the disk."""

import asyncio
from bisect import bisect_left
from typing import NamedTuple

from wal.errors import OnShutdown
from wal.message import LogEntry
from wal.position import FIRST_POSITION

CAPACITY_BYTES = 64 << 20
"""Entries kept for tailing readers: what a reader may be behind before it goes back to the disk."""


class Evicted(Exception):
    """What the reader asks for is no longer in memory; it is in the log."""


class TailRead(NamedTuple):
    """Entries in order, possibly none, and the tick up to which the reader has now seen everything."""

    entries: list[LogEntry]
    confirmed_tick: int


class LiveTail:
    """The newest confirmed entries of one log, from `first_position` up to `next_position`, and its confirmed tick.

    The writer never waits and never asks who reads. The oldest entries are evicted when there are too many bytes, but never
    the last one; what a reader was given stays valid, and one that falls behind returns to the log.
    """

    def __init__(self, *, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._entries: dict[int, LogEntry] = {}
        """By running numbers from `_first` on: evicting one moves none of the others."""
        self._first = 0
        self.sleepers: dict[asyncio.Event, None] = {}
        """Set when something is published, or the tail is closed; a reader's own, in the order in which they wait."""
        self.closed = False
        self.size_bytes = 0
        """Stored size of the entries in memory."""
        self.first_position = self.next_position = FIRST_POSITION
        """Of the oldest message in memory and of the next one to come."""
        self.confirmed_tick = 0
        """Everything at or below this tick has been published; nothing at or below it will be any more."""

    @property
    def entry_count(self) -> int:
        """How many entries are in memory."""
        return len(self._entries)

    def start(self, *, next_position: int, confirmed_tick: int) -> None:
        """Take the place the log is at, forgetting what is in memory; readers below it return to the log.

        Called before a term's first append.
        """
        assert next_position >= self.next_position, "positions handed out are never taken back"
        assert confirmed_tick >= self.confirmed_tick, "a confirmed tick is a promise"
        self._first += len(self._entries)
        self._entries.clear()
        self.size_bytes = 0
        self.first_position = self.next_position = next_position
        self.confirmed_tick = confirmed_tick
        self._wake()

    def append(self, entry: LogEntry) -> None:
        """Publish a confirmed entry; ticks ascend, positions are dense. Never waits, never fails for a reader's sake."""
        assert entry.time_tick > self.confirmed_tick, "entries come in the order of their ticks"
        assert entry.first_position == self.next_position, "entries come at dense positions"
        self._entries[self._first + len(self._entries)] = entry
        self.size_bytes += entry.size_bytes
        self.next_position += len(entry.messages)
        self.confirmed_tick = entry.time_tick
        while self.size_bytes > self._capacity_bytes and len(self._entries) > 1:
            oldest = self._entries.pop(self._first)
            self._first += 1
            self.size_bytes -= oldest.size_bytes
            self.first_position = oldest.last_position + 1
        self._wake()

    def advance(self, tick: int) -> None:
        """Publish an idle tick: everything at or below it has been published. It takes no space."""
        self.confirmed_tick = max(self.confirmed_tick, tick)
        self._wake()

    def snapshot_from(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        """Return the entries from the one that holds `position`, up to the one that reaches `bytes_max`.

        Empty at or past the end. Raises `Evicted` below `first_position`.
        """
        if position < self.first_position:
            raise Evicted
        if position >= self.next_position:
            return []
        numbers = range(self._first, self._first + len(self._entries))
        taken: list[LogEntry] = []
        size_bytes = 0
        for number in numbers[bisect_left(numbers, position, key=lambda each: self._entries[each].last_position) :]:
            entry = self._entries[number]
            taken.append(entry)
            size_bytes += entry.size_bytes
            if size_bytes >= bytes_max:
                break
        return taken

    def open_reader(self, position: int) -> "TailReader | None":
        """Return a reader of everything from `position` on, past the end too, or None when that is not in memory."""
        return TailReader(self, position) if position >= self.first_position else None

    def close(self) -> None:
        """Release every sleeping reader with `OnShutdown`; idempotent."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        for sleeper in self.sleepers:
            sleeper.set()


class TailReader:
    """One reader's place in the live tail; used by one task at a time."""

    __slots__ = ("_awake", "_closed", "_tail", "_tick", "position")

    def __init__(self, tail: LiveTail, position: int) -> None:
        self._tail = tail
        self._tick = 0
        self.position = position
        """Of the next message this reader gets."""
        self._closed = False
        self._awake = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether `next` has something to return, or to raise, at once."""
        tail = self._tail
        return self._closed or self.position < tail.next_position or self._tick < tail.confirmed_tick

    async def next(self, *, bytes_max: int) -> TailRead:
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
            if tail.closed:
                raise OnShutdown("the log is closing")
            self._awake.clear()
            tail.sleepers[self._awake] = None
            try:
                await self._awake.wait()
            finally:
                tail.sleepers.pop(self._awake, None)

    def close(self) -> None:
        """End the reader; a task that waits in `next` gets `OnShutdown`. Other readers sleep on."""
        self._closed = True
        self._awake.set()
