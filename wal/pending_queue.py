"""The newest entries of a log, in memory and in order. No I/O, no waiting.

Entries come in with ascending ticks at dense positions; slices of them go out and stay valid whatever is evicted later.
Positions serve as the running offset. The queue never blocks its writer: it lets the oldest entries go, by bytes and by
age, but never the last one. An idle tick is remembered as the newest confirmed tick and takes no space.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from wal.message import LogEntry


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
