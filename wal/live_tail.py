"""Entries that the readers of a log share: the live tail of newly confirmed entries, and recent
reads of readers behind it.
"""

import asyncio
from bisect import bisect_left
from operator import attrgetter

from wal.entry import LogEntry
from wal.position import FIRST_POSITION
from wal.queue import Signal

CAPACITY_BYTES = 64 << 20
"""Size of the entries kept for tailing readers: a reader further behind reads from the disk."""
SHARED_BYTES = 16 << 20
"""Size of the entries kept from disk reads: readers that catch up within this distance share one
read.
"""


class SharedReads:
    """Recent and running reads of one log, kept while at least one reader catches up.

    Failures are not shared: each reader gets its own.
    """

    def __init__(self) -> None:
        self._catching_up: set[object] = set()
        self.clear()

    @property
    def size_bytes(self) -> int:
        """The size of all kept entries, in bytes."""
        return sum([size_bytes for size_bytes, _ in self._ranges])

    def clear(self) -> None:
        """Forget everything, including running reads."""
        self._ranges: list[tuple[int, list[LogEntry]]] = []
        """Kept reads with their sizes, in the order of their last use."""
        self.under_way: dict[int, asyncio.Event] = {}
        """Running reads by position; each event is set when its read ends in any way."""

    def join(self, reader: object) -> None:
        """Keep reads from now on, while this reader catches up; idempotent."""
        self._catching_up.add(reader)

    def leave(self, reader: object) -> None:
        """Note that a reader has caught up or ended; the last one clears everything. Idempotent."""
        self._catching_up.discard(reader)
        if not self._catching_up:
            self.clear()

    def find(self, position: int, *, bytes_max: int, end_position: int) -> list[LogEntry]:
        """Return entries from the one that holds `position` on, as many as a disk read would
        return; none if they are not kept.

        Fewer entries would split a range into several reads, and the log may be truncated between
        them.
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
        """Keep the entries of a read and evict the least recently used ones."""
        if self._catching_up and entries:
            self._ranges.append((sum([entry.size_bytes for entry in entries]), entries))
            while self.size_bytes > SHARED_BYTES and len(self._ranges) > 1:
                del self._ranges[0]


class LiveTail:
    """The newest confirmed entries of one log, from `first_position` to before `next_position`, and
    its confirmed tick.

    The writer never waits for readers. The oldest entries are evicted when they exceed the
    capacity, except the last one. Entries that a reader has received stay valid; a reader that
    falls behind reads from the log.
    """

    def __init__(self, *, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._entries: dict[int, LogEntry] = {}
        """Entries by consecutive numbers from `_first` on, so that an eviction moves no other
        entry.
        """
        self._first = 0
        self.behind = SharedReads()
        """The shared reads of readers that have not reached the tail yet."""
        self.changed = Signal()
        """Wakes the readers when something is published, or the tail is closed."""
        self.closed = False
        self.size_bytes = 0
        self.first_position = self.next_position = FIRST_POSITION
        """`first_position` is that of the oldest message in memory, `next_position` that of the
        next new one.
        """
        self.confirmed_tick = 0
        """Everything at or below this tick has been published; later entries have higher ticks."""

    @property
    def entry_count(self) -> int:
        """The number of entries in memory."""
        return len(self._entries)

    def start(self, *, next_position: int, confirmed_tick: int) -> None:
        """Drop all entries and continue at the end of the log, before the first append of a
        term.
        """
        assert next_position >= self.next_position, "assigned positions are never reused"
        assert confirmed_tick >= self.confirmed_tick, "a confirmed tick is a promise"
        self._first += len(self._entries)
        self._entries.clear()
        self.behind.clear()
        self.size_bytes = 0
        self.first_position = self.next_position = next_position
        self.confirmed_tick = confirmed_tick
        self.changed.wake()

    def append(self, entry: LogEntry) -> None:
        """Publish a confirmed entry; ticks ascend, positions are dense. Never waits, and readers
        cannot make it fail.
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
        """Publish an idle tick: everything at or below it is published. It takes no space."""
        self.confirmed_tick = max(self.confirmed_tick, tick)
        self.changed.wake()

    def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        """Return the entries from the one that holds `position`, up to the one that reaches
        `bytes_max`; none at the end.

        `position` must not be below `first_position`: earlier entries are only in the log.
        """
        assert position >= self.first_position, "evicted"
        taken: list[LogEntry] = []
        if position >= self.next_position:
            return taken  # the usual case: a tailing reader has read everything
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
        """Publish nothing more and wake every waiting reader, which then ends; idempotent."""
        self.closed = True
        self.changed.wake()
