"""Reads a node whose log is damaged, also after the damage. Blocks.

An owner refuses such a node, and a verification ends at the first damage. An export with `salvage`
reads all that is left. Changes nothing.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rocksdict import Rdict

from flusher.manifest import Checkpoint, checkpoint_key, decode_checkpoint
from streamingnode.care.findings import Report
from streamingnode.care.inspect import floor_of
from streamingnode.care.records import PCHANNEL, STATE_MAP
from wal.entry import LogEntry
from wal.errors import Corrupt, StreamingNodeError
from wal.rocks import layout
from wal.rocks.database import classified
from wal.rocks.floor import FLOOR_NAME, Floor
from wal.rocks.layout import DATABASE_NAME, meta_key
from wal.rocks.log import current_entry, decode_rocks_entry, first_kept
from wal.rocks.opening import ReadDatabase, check_may_read, open_for_reading

STEP_BYTES = 1 << 20
"""Bytes read of a log between two steps: a few milliseconds, so that progress can be shown and the
work be ended.
"""

PROBES_MAX = 1 << 20
"""Maximum number of positions tried after damage, about 20 us each; a damaged block holds a few
entries.
"""

Stored = tuple[int, bytes] | Exception
"""The last position of an entry and its bytes, or the error of reading here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLog:
    """The log of a closed node, which must hold every position from `first` to `end`.

    `first` is 0 when unknown. If `is_torn`, the next owner drops everything after `end`.
    """

    log_id: int
    entries: Rdict
    first: int
    end: int
    is_torn: bool


@dataclass(frozen=True, slots=True)
class ClosedDatabase:
    """The database of a closed node, including data after damage; `floor` is None when it belongs
    to another database.
    """

    opened: ReadDatabase
    floor: Floor | None

    def log(self, report: Report) -> ClosedLog | None:
        """Return the node's log, None when it does not exist yet."""
        rows = self.opened.database
        found = self.opened.found
        log_id = found.log_ids.get(PCHANNEL)
        if log_id is None:
            return None
        first = 0
        acknowledged = 0 if self.floor is None else self.floor.positions.get(log_id, 0)
        try:
            first = first_kept(rows, log_id)
        except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more exact
            report.damage(STATE_MAP, f"the beginning of the log cannot be read: {error}")
        return ClosedLog(
            log_id=log_id,
            entries=rows.get_column_family(layout.ENTRY_FAMILY),
            first=first,
            end=max(found.last_positions[log_id], acknowledged),
            is_torn=PCHANNEL in self.opened.torn,
        )

    def checkpoint(self) -> Checkpoint:
        """Return the log's checkpoint. Raises `Corrupt`, and `UnsupportedFormat` for a checkpoint
        of a newer release.
        """
        rows = self.opened.database
        with classified(Path(rows.path())):
            return decode_checkpoint(rows.get(meta_key(checkpoint_key(PCHANNEL))))


@contextmanager
def opened_past_damage(
    directory: Path, report: Report
) -> Iterator[tuple[str, ClosedDatabase | None]]:
    """Open the database of a node for the block, and yield the node's id, empty when unknown, and
    the database, None when unreadable. What an owner would refuse goes into `report` as damage.
    """
    check_may_read(directory)
    floor: Floor | None = None
    with report.errors_at(FLOOR_NAME):
        floor = floor_of(directory)
    opened: ReadDatabase | None = None
    with report.errors_at(DATABASE_NAME):
        opened = _open(directory, floor, report)
    if opened is None:
        yield ("" if floor is None else floor.node_id), None
        return
    node_id = opened.found.node_id
    with closing(opened.database):
        is_its_own = floor is not None and floor.node_id == node_id
        yield node_id, ClosedDatabase(opened, floor if is_its_own else None)


def _open(directory: Path, floor: Floor | None, report: Report) -> ReadDatabase:
    """Open a database as an owner would; if that is refused, open it including data after
    damage.
    """
    if floor is not None:
        try:
            return open_for_reading(directory, floor)
        except Corrupt as error:
            report.error(DATABASE_NAME, error)
    return open_for_reading(directory, None, past_damage=True)


# --- every entry of its log, continuing after unreadable ones ---------------------------------- An
# entry is good when its checksum is right and it continues the entry before it in position,
# checksum, tick and term. The positions between two good entries are reported as one range.


def stored_entries(log: ClosedLog) -> Iterator[Stored]:
    """Yield the stored entries from the one that holds position `first`; after damage, try the
    positions up to `end`.
    """
    position = log.first
    probes = 0
    while position <= max(log.end, log.first) and probes <= PROBES_MAX:
        iterator = log.entries.iter()
        iterator.seek(layout.entry_key(log.log_id, position))
        try:
            while (current := current_entry(iterator, log.log_id)) is not None:
                if log.is_torn and current[0] > log.end:
                    return
                yield current
                position = current[0] + 1
                probes = 0
                iterator.next()
            return
        except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more exact
            if not probes:
                yield error
            position = position + 1
            probes = probes + 1


def good_entries(log: ClosedLog, stored: Iterable[Stored], report: Report) -> Iterator[LogEntry]:
    """Yield the good entries, and report the ranges between them as damage."""
    expected = log.first
    failure = ""
    read_bytes = 0
    before: LogEntry | None = None
    for each in stored:
        try:
            entry = _decoded(each, expected, before)
        except (StreamingNodeError, OSError) as error:
            failure = failure or str(error)
            before = None
            continue
        if failure or entry.first_position > expected:
            _lost(expected, entry.first_position - 1, failure, report)
        expected = entry.last_position + 1
        failure = ""
        before = entry
        read_bytes += entry.size_bytes
        if read_bytes >= STEP_BYTES:
            report.read("log", read_bytes)
            read_bytes = 0
        report.count("log entries")
        report.count("log positions", entry.count)
        yield entry
    report.read("log", read_bytes)
    if failure or expected <= log.end:
        _lost(expected, log.end, failure, report)


def _decoded(stored: Stored, expected: int, before: LogEntry | None) -> LogEntry:
    """Return a stored entry if it may be at position `expected` or after it, directly after
    `before` if that is known. Raises `Corrupt`.
    """
    if isinstance(stored, Exception):
        raise Corrupt(str(stored))
    last, data = stored
    try:
        entry = decode_rocks_entry(data, None if before is None else before.crc32c)
    except Corrupt:
        entry = decode_rocks_entry(data, None)
        if entry.first_position <= expected:
            raise
        # After a gap the previous checksum is unknown.
    if entry.last_position != last:
        raise Corrupt(
            f"the key of position {last} holds the entry that ends at {entry.last_position}"
        )
    if entry.first_position < expected:
        raise Corrupt(
            f"an entry begins at position {entry.first_position}, which another entry holds"
        )
    if before is not None and (
        entry.first_tick <= before.time_tick or entry.wal_term < before.wal_term
    ):
        raise Corrupt(f"tick or term of the entry at position {entry.first_position} decrease")
    return entry


def _lost(first: int, last: int, failure: str, report: Report) -> None:
    detail = failure.partition(" — ")[0] or "missing, but acknowledged"
    report.damage(f"log {PCHANNEL!r}, positions {first} to {max(first, last)}", detail)
