"""Whether the entries of one log are all there and follow each other. Pure: bytes in, findings out.

In: entries in key order as they were read, and where reading failed. Out: findings, each naming the positions. An entry is
believed when its checksum holds; it is in place when its positions follow on, its previous checksum is that of the
entry before it, and ticks and terms ascend. What lies between two good entries is named as one range.
"""

from dataclasses import dataclass

from streamingnode.verification.finding import RESTORE, Kind, Report
from wal.codec import decode_entry
from wal.errors import StreamingNodeError
from wal.message import LogEntry
from wal.position import RocksMessageId


@dataclass(frozen=True, slots=True, kw_only=True)
class LogExpectation:
    """What must be there at least: positions from `first_position`, up to the one the floor file knows."""

    name: str
    first_position: int
    floor_position: int


class LogCheck:
    """Takes the entries of one log in order; call `finish` at the end."""

    def __init__(self, expected: LogExpectation, report: Report) -> None:
        self._expected = expected
        self._report = report
        self._next = expected.first_position
        self._before: LogEntry | None = None
        self._reason = ""

    @property
    def last_tick(self) -> int:
        """Tick of the last good entry, 0 for none."""
        return 0 if self._before is None else self._before.time_tick

    @property
    def next_position(self) -> int:
        """The first position that no good entry so far holds."""
        return self._next

    def failed(self, reason: str) -> None:
        """Reading failed after the last entry taken."""
        self._reason = self._reason or reason

    def take(self, last_position: int, data: bytes) -> LogEntry | None:
        """Check the entry under the key of `last_position`; return it when it is what was written."""
        try:
            entry = decode_entry(data, wal_name=RocksMessageId.wal_name, previous_crc32c=None)
        except StreamingNodeError as error:
            self.failed(str(error))
            return None
        if entry.last_position != last_position:
            self.failed(f"the key of position {last_position} holds the entry that ends at {entry.last_position}")
            return None
        self._place(entry, data)
        return entry

    def finish(self) -> None:
        """Compare the end with what was acknowledged."""
        expected = self._expected
        if self._next <= expected.floor_position:
            self._lost(self._next, expected.floor_position, Kind.SHORT, "was acknowledged and is not there")
        elif self._reason:
            self._report.damage(Kind.CHECKSUM, self._place_of(self._next, None), self._reason, RESTORE)

    def _place(self, entry: LogEntry, data: bytes) -> None:
        before = self._before
        if entry.first_position > self._next:
            self._lost(self._next, entry.first_position - 1, Kind.GAP, "missing or unreadable")
        elif entry.first_position < self._next:
            self._broken(entry, Kind.DUPLICATE, f"begins before position {self._next}, which is taken")
        elif before is not None and self._reason == "":
            self._follows(before, entry, data)
        self._reason = ""
        self._before = entry
        self._next = max(self._next, entry.last_position + 1)
        self._report.count("log entries")
        self._report.count("log positions", entry.last_position - entry.first_position + 1)

    def _follows(self, before: LogEntry, entry: LogEntry, data: bytes) -> None:
        if int.from_bytes(data[8:12], "little") != before.crc32c:
            self._broken(entry, Kind.CONTENT, "carries the checksum of another entry as that of the one before it")
        elif entry.time_tick <= before.time_tick:
            self._broken(entry, Kind.CONTENT, f"has tick {entry.time_tick}, the one before it {before.time_tick}")
        elif entry.wal_term < before.wal_term:
            self._broken(entry, Kind.CONTENT, f"is of term {entry.wal_term}, the one before it of {before.wal_term}")

    def _lost(self, first: int, last: int, kind: Kind, detail: str) -> None:
        reason = f"{detail}: {self._reason}" if self._reason else detail
        self._report.damage(kind, self._place_of(first, last), reason, RESTORE)

    def _broken(self, entry: LogEntry, kind: Kind, detail: str) -> None:
        place = self._place_of(entry.first_position, entry.last_position)
        self._report.damage(kind, place, f"the entry {detail}", RESTORE)

    def _place_of(self, first: int, last: int | None) -> str:
        return f"log {self._expected.name!r}, positions {first} to {'?' if last is None else last}"
