"""What many readers of a log share: its live tail, which was just confirmed, and what those behind
it have just read.
"""

import asyncio
from bisect import bisect_left
from operator import attrgetter

from wal.entry import LogEntry
from wal.position import FIRST_POSITION
from wal.queue import Signal

CAPACITY_BYTES = 64 << 20
"""Entries kept for tailing readers: what a reader may be behind before it goes back to the disk."""
SHARED_BYTES = 16 << 20
"""Entries kept of what was read from the disk: what readers that catch up may be apart for one read
to serve them all.
"""


class SharedReads:
    """What was last read of one log, and what is being read, while somebody catches up; nothing is
    kept after that.

    What fails is not shared: each reader finds out by itself.
    """

    def __init__(self) -> None:
        self._catching_up: set[object] = set()
        self.clear()

    @property
    def size_bytes(self) -> int:
        """How much is kept."""
        return sum([size_bytes for size_bytes, _ in self._ranges])

    def clear(self) -> None:
        """Forget everything; what is being read is not kept."""
        self._ranges: list[tuple[int, list[LogEntry]]] = []
        """In the order of their last use, with their sizes."""
        self.under_way: dict[int, asyncio.Event] = {}
        """Reads that have begun, by position; set when they are over, however they ended."""

    def join(self, reader: object) -> None:
        """Keep what is read from now on, for as long as this reader catches up; idempotent."""
        self._catching_up.add(reader)

    def leave(self, reader: object) -> None:
        """Let go what only a reader that does not catch up any more would need; idempotent."""
        self._catching_up.discard(reader)
        if not self._catching_up:
            self.clear()

    def find(self, position: int, *, bytes_max: int, end_position: int) -> list[LogEntry]:
        """Return entries from the one that holds `position` on, as many as a read would: none if
        they are not kept.

        Less would have a reader take a log that one read holds in several, between which it may be
        truncated.
        """
        for at, (_, entries) in enumerate(self._ranges):
            if entries[0].first_position <= position <= entries[-1].last_position:
                rest = entries[bisect_left(entries, position, key=attrgetter("last_position")) :]
                if (
                    rest[-1].last_position == end_position
                    or sum([each.size_bytes for each in rest]) >= bytes_max
                ):
                    self._ranges.append(self._ranges.pop(at))
                    return rest
        return []

    def keep(self, entries: list[LogEntry]) -> None:
        """Keep what was read, in the place of what has not been used for the longest time."""
        if self._catching_up and entries:
            self._ranges.append((sum([entry.size_bytes for entry in entries]), entries))
            while self.size_bytes > SHARED_BYTES and len(self._ranges) > 1:
                del self._ranges[0]


class LiveTail:
    """The newest confirmed entries of one log, from `first_position` up to `next_position`, and its
    confirmed tick.

    The writer never waits and never asks who reads. The oldest entries are evicted when there are
    too many bytes, but never the last one; what a reader was given stays valid, and one that falls
    behind returns to the log.
    """

    def __init__(self, *, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._entries: dict[int, LogEntry] = {}
        """By running numbers from `_first` on: evicting one moves none of the others."""
        self._first = 0
        self.behind = SharedReads()
        """What the readers have read that are not up to the tail yet."""
        self.changed = Signal()
        """Wakes the readers when something is published, or the tail is closed."""
        self.closed = False
        self.size_bytes = 0
        self.first_position = self.next_position = FIRST_POSITION
        """Of the oldest message in memory and of the next one to come."""
        self.confirmed_tick = 0
        """Everything at or below this tick has been published; nothing at or below it will be any
        more.
        """

    @property
    def entry_count(self) -> int:
        """How many entries are in memory."""
        return len(self._entries)

    def start(self, *, next_position: int, confirmed_tick: int) -> None:
        """Forget what is in memory and go on where the log is, before a term's first append."""
        assert next_position >= self.next_position, "positions handed out are never taken back"
        assert confirmed_tick >= self.confirmed_tick, "a confirmed tick is a promise"
        self._first += len(self._entries)
        self._entries.clear()
        self.behind.clear()
        self.size_bytes = 0
        self.first_position = self.next_position = next_position
        self.confirmed_tick = confirmed_tick
        self.changed.wake()

    def append(self, entry: LogEntry) -> None:
        """Publish a confirmed entry; ticks ascend, positions are dense. Never waits, never fails
        for a reader's sake.
        """
        assert entry.first_tick > self.confirmed_tick, "entries come in the order of their ticks"
        assert entry.first_position == self.next_position, "entries come at dense positions"
        self._entries[self._first + len(self._entries)] = entry
        self.size_bytes += entry.size_bytes
        self.next_position = entry.last_position + 1
        self.confirmed_tick = entry.time_tick
        while self.size_bytes > self._capacity_bytes and len(self._entries) > 1:
            oldest = self._entries.pop(self._first)
            self._first += 1
            self.size_bytes -= oldest.size_bytes
            self.first_position = oldest.last_position + 1
        self.changed.wake()

    def advance(self, tick: int) -> None:
        """Publish an idle tick: everything at or below it has been published. It takes no space."""
        self.confirmed_tick = max(self.confirmed_tick, tick)
        self.changed.wake()

    def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        """Return the entries from the one that holds `position`, up to the one that reaches
        `bytes_max`; none at the end.

        What lies below `first_position` is only in the log any more, and must not be asked for.
        """
        assert position >= self.first_position, "evicted"
        taken: list[LogEntry] = []
        if position >= self.next_position:
            return taken  # mostly: who tails has read what there is
        numbers = range(self._first, self._first + len(self._entries))
        size_bytes = 0
        for number in numbers[
            bisect_left(numbers, position, key=lambda each: self._entries[each].last_position) :
        ]:
            entry = self._entries[number]
            taken.append(entry)
            size_bytes += entry.size_bytes
            if size_bytes >= bytes_max:
                break
        return taken

    def close(self) -> None:
        """Publish nothing more, and send every waiting reader away; idempotent."""
        self.closed = True
        self.changed.wake()
