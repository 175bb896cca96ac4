"""Puts entries into the order of their ticks, and lets them go only when a tick says that nothing lower follows. No I/O.

Entries come in as a log hands them out, ticks beside them; entries go out strictly ascending. The log stores of this
project deliver in tick order already, and then this costs next to nothing; the promise to readers does not depend on it.
"""

from bisect import bisect_right

from wal.message import LogEntry


class ReorderBuffer:
    """Entries above the last tick popped. One entry for each tick: ticks are never given twice.

    What arrives at or below the last tick is too late to be delivered in order: it is refused and counted in `late_count`.
    The same entry again is refused.
    """

    __slots__ = ("_entries", "last_tick", "late_count", "size_bytes")

    def __init__(self) -> None:
        self._entries: dict[int, LogEntry] = {}
        self.last_tick = 0
        self.size_bytes = 0
        self.late_count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, entry: LogEntry) -> bool:
        """Take an entry; returns False when it is refused."""
        tick = entry.time_tick
        if tick <= self.last_tick:
            self.late_count += 1
            return False
        if tick in self._entries:
            return False
        self._entries[tick] = entry
        self.size_bytes += entry.size_bytes
        return True

    def pop_until(self, tick: int) -> list[LogEntry]:
        """Return the entries at or below a confirmed tick, ascending; a tick that is no news is ignored."""
        if tick <= self.last_tick:
            return []
        self.last_tick = tick
        ticks = sorted(self._entries)
        popped = [self._entries.pop(at) for at in ticks[: bisect_right(ticks, tick)]]
        self.size_bytes -= sum(entry.size_bytes for entry in popped)
        return popped
