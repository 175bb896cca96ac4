"""What became of one allocated tick. Pure."""

from dataclasses import dataclass
from enum import Enum, unique

from wal.message import LogEntry


@unique
class AckKind(Enum):
    """How an allocated tick ended."""

    ENTRY = "entry"
    """A durable entry of the log carries it."""
    SYNC = "sync"
    """Nothing carries it: it only says that everything below it has ended."""
    FAILED = "failed"
    """Its append was refused before it reached the log; no reader ever hears of it."""


@dataclass(frozen=True, slots=True)
class AckDetail:
    """An acknowledged tick; `entry` is what readers get for it, present for `ENTRY` only."""

    kind: AckKind
    tick: int
    entry: LogEntry | None = None

    def __post_init__(self) -> None:
        assert self.tick > 0, "zero is no tick"
        assert (self.kind is AckKind.ENTRY) == (self.entry is not None), "entries, and only they, carry an entry"
        assert self.entry is None or self.entry.time_tick == self.tick, "an entry confirms its own tick"
