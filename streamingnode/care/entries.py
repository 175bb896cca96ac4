"""Every entry of a log whose database nobody has open, going on behind what cannot be read. Blocks.

An entry is believed when its checksum holds; it is in place when its positions follow on, its previous checksum is that of
the entry before it, and ticks and terms ascend. What lies between two good entries is named as one range.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rocksdict import Rdict

from streamingnode.care.findings import Kind, Report
from wal.codec import decode_entry
from wal.errors import StreamingNodeError
from wal.message import LogEntry
from wal.position import RocksMessageId
from wal.rocks.layout import entry_key, split_entry_key

PROBES_MAX = 1 << 20
"""Positions tried behind damage, about 20 us each; a damaged block holds a few entries."""


class Unreadable(str):
    """Why reading failed here; the scan goes on behind it."""

    __slots__ = ()


Scanned = tuple[int, bytes] | Unreadable
"""The last position of an entry and its bytes, or a place where reading failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLog:
    """One log of a closed node: it must hold everything from position `first` to `end`.

    `first` is 0 when nobody knows. What a log that `is_torn` has behind `end`, the next owner drops.
    """

    name: str
    log_id: int
    entries: Rdict
    first: int
    end: int
    is_torn: bool


def read_entries(log: ClosedLog, report: Report) -> Iterator[LogEntry]:
    """Yield each good entry from the one that holds position `first` on; the others are findings."""
    found = scan_entries(log.entries, log.log_id, start=log.first, end=log.end)
    return checked_entries(found, log, report)


def scan_entries(entries: Rdict, log_id: int, *, start: int, end: int) -> Iterator[Scanned]:
    """Yield what is stored from the entry that holds position `start` on; behind damage, positions up to `end` are tried."""
    position, probes = start, 0
    while position <= max(end, start) and probes <= PROBES_MAX:
        iterator = entries.iter()
        iterator.seek(entry_key(log_id, position))
        try:
            while iterator.valid():
                found_id, last = split_entry_key(iterator.key())
                if found_id != log_id:
                    return
                yield last, iterator.value()
                position, probes = last + 1, 0
                iterator.next()
            iterator.status()  # without this a damaged block looks like the end
            return
        except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more exact
            if not probes:
                yield Unreadable(error)
            position, probes = position + 1, probes + 1


def checked_entries(found: Iterable[Scanned], log: ClosedLog, report: Report) -> Iterator[LogEntry]:
    """Yield the entries that are what was written, and report what does not follow or is not there."""

    def positions(first: int, last: object) -> str:
        return f"log {log.name!r}, positions {first} to {last}"

    def lost(kind: Kind, last: int, detail: str) -> None:
        report.damage(kind, positions(expected, last), f"{detail}: {failure}" if failure else detail)

    expected, failure = log.first, ""
    before: LogEntry | None = None
    for each in _decoded(found, log):
        if isinstance(each, Unreadable):
            failure = failure or each
            continue
        entry, data = each
        place = positions(entry.first_position, entry.last_position)
        if entry.first_position > expected:
            lost(Kind.GAP, entry.first_position - 1, "missing or unreadable")
        elif entry.first_position < expected:
            report.damage(Kind.DUPLICATE, place, f"the entry begins before position {expected}, which is taken")
        elif before is not None and not failure and (wrong := _does_not_follow(before, entry, data)):
            report.damage(Kind.CONTENT, place, f"the entry {wrong}")
        expected, failure, before = max(expected, entry.last_position + 1), "", entry
        report.count("log entries")
        report.count("log positions", len(entry.messages))
        yield entry
    if expected <= log.end:
        lost(Kind.SHORT, log.end, "was acknowledged and is not there")
    elif failure:
        report.damage(Kind.CHECKSUM, positions(expected, "?"), failure)


def _decoded(found: Iterable[Scanned], log: ClosedLog) -> Iterator[tuple[LogEntry, bytes] | Unreadable]:
    for each in found:
        if isinstance(each, Unreadable):
            yield each
            continue
        last, data = each
        if log.is_torn and last > log.end:
            return
        try:
            entry = decode_entry(data, wal_name=RocksMessageId.wal_name, previous_crc32c=None)
        except StreamingNodeError as error:
            yield Unreadable(error)
            continue
        if entry.last_position == last:
            yield entry, data
        else:
            yield Unreadable(f"the key of position {last} holds the entry that ends at {entry.last_position}")


def _does_not_follow(before: LogEntry, entry: LogEntry, data: bytes) -> str:
    """Return why an entry is not the one after another; nothing when it is."""
    if int.from_bytes(data[8:12], "little") != before.crc32c:
        return "carries the checksum of another entry as that of the one before it"
    if entry.time_tick <= before.time_tick:
        return f"has tick {entry.time_tick}, the one before it {before.time_tick}"
    if entry.wal_term < before.wal_term:
        return f"is of term {entry.wal_term}, the one before it of {before.wal_term}"
    return ""
