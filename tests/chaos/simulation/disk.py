"""The disk of a simulated machine, as the log store sees it: writes in order, of which a first part
is synced.

A killed process leaves all that was written. A power cut leaves what was synced and any first part
of the rest: pages of one file reach the disk in order or are cut off by a checksum. The floor file
is a page of its own and may be newer or older.
"""

import random
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from wal.errors import Corrupt


@dataclass(frozen=True, slots=True)
class EntryWritten:
    """One log entry."""

    log: str
    first_position: int
    last_position: int
    tick: int
    data: bytes


@dataclass(frozen=True, slots=True)
class RecordsWritten:
    """Changes of the state map (None removes)."""

    changes: Mapping[str, bytes | None]


@dataclass(frozen=True, slots=True)
class RangeDropped:
    """Everything of a log before a position."""

    log: str
    position: int


@dataclass(frozen=True, slots=True)
class TermTaken:
    """A new owner."""

    term: int


Written = EntryWritten | RecordsWritten | RangeDropped | TermTaken


@dataclass(slots=True)
class StoredLog:
    """What a log holds."""

    first_position: int = 1
    last_positions: list[int] = field(default_factory=list)
    entries: list[EntryWritten] = field(default_factory=list)


@dataclass(slots=True)
class Floor:
    """What the floor file says."""

    positions: dict[str, int] = field(default_factory=dict)
    tick: int = 0
    term: int = 0

    def copy(self) -> "Floor":
        """Return the same, apart."""
        return Floor(dict(self.positions), self.tick, self.term)


class Disk:
    """What outlives a process; `floor_synced` and `synced` are what outlives the power too."""

    def __init__(self) -> None:
        self.writes: list[Written] = []
        self.synced = 0
        self.floor = Floor()
        self.floor_synced = Floor()
        self.owner = 0
        """Grows with each process; a process of the past can do nothing any more."""

    def sync(self) -> None:
        """Make everything written outlive a power cut."""
        self.synced = len(self.writes)

    def lose_power(self, choose: random.Random) -> int:
        """Forget some of what was not synced, and return how many writes that were."""
        kept = choose.choice([self.synced, choose.randint(self.synced, len(self.writes))])
        lost = len(self.writes) - kept
        del self.writes[kept:]
        self.synced = kept
        if choose.random() < 0.5:  # the kernel may have written the page by itself
            self.floor = self.floor_synced
        # Only what a completed sync had made durable is ever recorded, so either page is true.
        self.floor_synced = self.floor.copy()
        return lost

    def read(self) -> tuple[dict[str, StoredLog], dict[str, bytes], int]:
        """Return logs, state map and term. Raises `Corrupt` when less is there than the floor
        says.
        """
        logs: dict[str, StoredLog] = {}
        records: dict[str, bytes] = {}
        term = 0
        for written in self.writes:
            match written:
                case EntryWritten(log=name):
                    log = logs.setdefault(name, StoredLog())
                    log.entries.append(written)
                    log.last_positions.append(written.last_position)
                case RecordsWritten(changes=changes):
                    apply_changes(records, changes)
                case RangeDropped(log=name, position=position):
                    drop_before(logs[name], position)
                case TermTaken():
                    term = written.term
        for name, position in self.floor.positions.items():
            log = logs.get(name, StoredLog())
            if not log.last_positions or log.last_positions[-1] < position:
                raise Corrupt(
                    f"log {name!r} ends at {log.last_positions[-1:]}, the floor is {position}"
                )
        return logs, records, max(term, self.floor.term)


def drop_before(log: StoredLog, position: int) -> None:
    """Forget the entries before the one that holds `position`; the last entry stays."""
    count = min(bisect_left(log.last_positions, position), len(log.entries) - 1)
    if count > 0:
        log.first_position = log.last_positions[count - 1] + 1
        del log.entries[:count], log.last_positions[:count]


def apply_changes(records: dict[str, bytes], changes: Mapping[str, bytes | None]) -> None:
    """Set and remove records."""
    for key, value in changes.items():
        if value is None:
            records.pop(key, None)
        else:
            records[key] = value
