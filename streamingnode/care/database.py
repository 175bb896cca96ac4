"""The floor file and the database of a node that nobody has open, as a tool reads them: nothing is
changed. Blocks.

RocksDB writes nothing when it opens read-only. rocksdict does: it makes the directory if there is
none, and writes its own settings file anew each time. A look must neither break what the next
opening would finish nor mend what a second one finds.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rocksdict import Rdict

from flusher.cuts import CUTS_RECORD, FIRST_CUT, decode_first_kept
from flusher.directory import cut_numbers
from flusher.manifest import NO_CHECKPOINT, Checkpoint, checkpoint_key, decode_checkpoint
from interceptors.idempotency import ProducerRecord
from interceptors.window import decode_window
from scanner.named_reader import ReaderPosition
from streamingnode.care.findings import RESTORE, Report
from streamingnode.care.inspect import floor_of
from streamingnode.streams.channels import CHANNEL_KEY, OwnerDescription
from wal.entry import LogEntry
from wal.errors import Corrupt, StorageFailed, StreamingNodeError
from wal.files import read_regular
from wal.position import RocksMessageId
from wal.rocks import floor as parts
from wal.rocks import layout, recovery
from wal.rocks.database import classified, open_rocksdb
from wal.rocks.floor import BACKUP_RECORD_NAME, FLOOR_NAME, Floor, read_floor
from wal.rocks.layout import DATABASE_NAME, meta_key
from wal.rocks.log import current_entry, decode_rocks_entry, first_kept, last_position, read_range
from wal.rocksmq.messages import TopicEntry
from wal.rocksmq.messages import decode_entry as decode_topic_entry
from wal.rocksmq.topic import PREFIX as TOPICS
from wal.rocksmq.topic import Topic, decode_records

PCHANNEL = "p0"
STATE_MAP = f"{DATABASE_NAME}, state map"
SETTINGS_NAME = "rocksdict-config.json"
CHECKPOINT = "checkpoint/"
READER = "reader/"
PRODUCER = "producer/"

STEP_BYTES = 1 << 20
"""Read of a log between two steps: a few milliseconds, so that a walk can be paced and ended."""

PROBES_MAX = 1 << 20
"""Positions tried behind damage, about 20 us each; a damaged block holds a few entries."""

LOOKS_AGAIN = 4
"""How often a database is opened again that looks damaged: its owner may just have removed a file
that it does without.
"""

Stored = tuple[int, bytes] | Exception
"""The last position of an entry and its bytes, or why reading failed here."""

_AT_START = "nothing to do: the node sees to it when it starts"


def is_unfinished_creation(directory: Path) -> bool:
    """Whether the next opening makes the node here anew: nothing was ever acknowledged by it."""
    if any((directory / name).exists() for name in (DATABASE_NAME, BACKUP_RECORD_NAME)):
        return False
    try:
        floor = read_floor(directory)
    except StreamingNodeError:
        return False
    # with cuts it was more than begun
    return floor is not None and not floor.term and not cut_numbers(directory)


def check_floor(directory: Path, report: Report) -> Floor | None:
    """Check every part of the floor file and return what it says; None when it says nothing."""
    floor: Floor | None = None
    with report.errors_at(FLOOR_NAME):
        floor = floor_of(directory)
        data = read_regular(directory / FLOOR_NAME, bytes_max=parts.FLOOR_READ_BYTES_MAX)
        report.bytes += len(data)
        if len(data) != parts.FLOOR_BYTES:
            report.warn(FLOOR_NAME, f"has {len(data)} bytes, not {parts.FLOOR_BYTES}", _AT_START)
        # A power cut may tear what was being written; the other slot, older by a sync, counts then.
        # So looks a flipped bit.
        for name, begin, end, decode in (
            ("slot 0", 0, parts.SLOT_BYTES, parts.decode_slot),
            ("slot 1", parts.SLOT_BYTES, parts.PROMISE_OFFSET, parts.decode_slot),
            ("the promised tick", parts.PROMISE_OFFSET, parts.TOKEN_OFFSET, parts.decode_promise),
            (
                "its owner's fencing token",
                parts.TOKEN_OFFSET,
                parts.FLOOR_BYTES,
                parts.decode_token_term,
            ),
        ):
            if any(data[begin:end]) and not decode(data[begin:end]):
                report.warn(
                    FLOOR_NAME,
                    f"{name} fails its checksum: torn by a power cut, or damaged",
                    _AT_START,
                )
    return floor


def open_read_only(path: Path, *, past_damage: bool = False) -> Rdict:
    """Open a database without changing it. Raises `Corrupt`, also when there is none, and what
    RocksDB's errors mean.
    """
    if not (path / "CURRENT").is_file():
        raise Corrupt(f"{path} holds no database — {RESTORE}")
    recovery.check_framing(path)
    settings = path / SETTINGS_NAME
    with classified(path):
        before = settings.read_bytes() if settings.exists() else None
        try:
            return open_rocksdb(path, layout.RocksOptions(), past_damage=past_damage)
        finally:
            if before is None:
                settings.unlink(missing_ok=True)
            elif not settings.exists() or settings.read_bytes() != before:
                settings.write_bytes(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLog:
    """The log of a closed node: it must hold everything from position `first` to `end`.

    `first` is 0 when nobody knows. What a log that `is_torn` has behind `end`, the next owner
    drops.
    """

    log_id: int
    entries: Rdict
    first: int
    end: int
    is_torn: bool


@dataclass(frozen=True, slots=True)
class ClosedDatabase:
    """The database of a closed node, with what is behind damage too; `floor` is None when it is not
    this database's.
    """

    rows: Rdict
    found: recovery.Survey
    floor: Floor | None

    def log(self, report: Report) -> ClosedLog | None:
        """Return the node's log, None when it was not made yet. A tail that an owner will drop is a
        warning.
        """
        log_id = self.found.log_ids.get(PCHANNEL)
        if log_id is None:
            return None
        last = self.found.last_positions[log_id]
        first = 0
        kept = last
        acknowledged = 0
        try:
            first = first_kept(self.rows, log_id)
        except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more exact
            report.damage(STATE_MAP, f"does not tell where the log begins: {error}")
        if self.floor is not None:
            acknowledged = self.floor.positions.get(log_id, 0)
            if not self.found.synced_each_batch:
                with suppress(Exception):  # damage, which whoever reads the entries names
                    kept = recovery.chain_end(self.rows, log_id, self.floor)
        if kept < last:
            torn = f"what is behind position {kept}, up to {last}, not acknowledged as durable"
            report.warn(DATABASE_NAME, f"torn tail, will be dropped: {torn}", _AT_START)
        return ClosedLog(
            log_id=log_id,
            entries=self.rows.get_column_family(layout.ENTRY_FAMILY),
            first=first,
            end=max(kept, acknowledged),
            is_torn=kept < last,
        )

    def checkpoint(self) -> Checkpoint:
        """Return the log's checkpoint. Raises `Corrupt`, and `UnsupportedFormat` for that of a
        newer release.
        """
        with classified(Path(self.rows.path())):
            return decode_checkpoint(self.rows.get(meta_key(checkpoint_key(PCHANNEL))))

    def records(self, report: Report) -> "NodeRecords":
        """Return what is beside the log; see `check_records`. Raises what RocksDB's failure
        means.
        """
        with classified(Path(self.rows.path())):
            stored = recovery.scan_prefix(self.rows, layout.META_PREFIX)
            return check_records(
                {key[len(layout.META_PREFIX) :].decode(): stored[key] for key in stored}, report
            )


@contextmanager
def opened(directory: Path, report: Report) -> Iterator[tuple[str, ClosedDatabase | None]]:
    """Check floor and database of a node, and open it for the block: its id, empty when unknown,
    and what can be read.
    """
    path = directory / DATABASE_NAME
    # no damage, and rocksdict writes its settings there
    if path.exists() and not os.access(path, os.W_OK):
        raise StorageFailed(
            f"{path} cannot be written, which reading it takes — make it writable, or read a copy"
        )
    floor = check_floor(directory, report)
    node_id = "" if floor is None else floor.node_id
    database = None
    with ExitStack() as databases:
        with report.errors_at(DATABASE_NAME):
            database = _open_checked(path, floor, report, databases)
            node_id = database.found.node_id
        yield node_id, database


def _open_checked(
    path: Path, floor: Floor | None, report: Report, databases: ExitStack
) -> ClosedDatabase:
    """Open a database with as much of its log as RocksDB reads, and compare it with the floor.

    What an owner would open is the log up to the first damaged record. What is behind that is read
    too, so that holes are named exactly, unless damage proves nothing: under durability `os` a
    power cut leaves some. Raises `Corrupt` and what else RocksDB's failure means when it cannot be
    opened at all.
    """
    try:
        reached = _open_surveyed(path, floor, databases)
    except Corrupt as error:
        try:
            behind = _open_surveyed(path, floor, databases, past_damage=True)
        except Corrupt:
            if not recovery.torn_manifest(path):
                raise
            step = f"open the node, which drops that, and close it; if it refuses, {RESTORE}"
            raise Corrupt(f"{path} ends with what a power cut tore — {step}") from error
        report.error(DATABASE_NAME, error)
        return behind
    try:
        behind = _open_surveyed(path, floor, databases, past_damage=True)
    except Corrupt as error:
        # RocksDB does not always get there, and a torn tail is no damage.
        if reached.found.synced_each_batch:
            report.error(DATABASE_NAME, error)
        behind = reached
    if floor is None:
        return behind
    try:
        recovery.judge(reached.found, behind.found, floor, place=DATABASE_NAME)
    except Corrupt as error:  # an owner would not find all that was acknowledged
        report.error(DATABASE_NAME, error)
        return behind
    if reached.found.term > floor.term:
        step = "put log and floor of one backup together; opening the node trusts the log"
        report.warn(
            FLOOR_NAME, "is of an earlier term than the log beside it: it is an older copy", step
        )
    if not reached.found.synced_each_batch and (torn := recovery.torn_bytes(path)):
        detail = f"torn tail, will be dropped: {torn} bytes, not acknowledged as durable"
        report.warn(DATABASE_NAME, detail, _AT_START)
    return reached


def _open_surveyed(
    path: Path, floor: Floor | None, databases: ExitStack, *, past_damage: bool = False
) -> ClosedDatabase:
    """Open a database until `databases` are closed, and look at what it holds; a log whose end
    cannot be read ends at 0.
    """

    def last_readable(entries: Rdict, log_id: int) -> int:
        with suppress(Exception):  # rocksdict raises nothing more exact
            return last_position(entries, log_id)
        return 0

    database = databases.enter_context(closing(open_read_only(path, past_damage=past_damage)))
    with classified(path):
        found = recovery.survey(database, last_position=last_readable)
    is_its_own = floor is not None and floor.node_id == found.node_id
    return ClosedDatabase(database, found, floor if is_its_own else None)


def check_database_files(path: Path, database: Rdict, report: Report) -> None:
    """Look at RocksDB's own files for what it passes over in silence.

    It replays a log file that somebody copied under a newer name as if it were newer, and goes on
    with a manifest whose last record is cut short. A table that its manifest does not name it
    ignores, and removes at the next start.
    """
    live = {Path(str(each["name"])).name for each in database.live_files()}
    for table in sorted(path.glob("*.sst")):
        if table.name not in live:
            detail = "the database does not name it: a crash before it did, or a copy"
            report.warn(f"{DATABASE_NAME}/{table.name}", detail, _AT_START)
    logs = sorted(path.glob("*.log"), key=lambda each: int(each.stem))
    begins = [
        (each, first) for each in logs if (first := recovery.first_sequence(each)) is not None
    ]
    for (original, earlier), (copied, later) in itertools.pairwise(begins):
        if later <= earlier:
            detail = (
                f"begins no later than {original.name}, which is older: it is a copy of what "
                "came before"
            )
            report.damage(f"{DATABASE_NAME}/{copied.name}", detail, f"move it away, or {RESTORE}")
    if torn := recovery.torn_manifest(path):
        detail = "its last record is cut short: a crash while it was written, or bytes are lost"
        report.warn(f"{DATABASE_NAME}/{torn[0].name}", detail, _AT_START)


# --- every entry of its log, going on behind what cannot be read ----------------------------------
#
# An entry is believed when its checksum holds and it follows on the one before it: in position,
# checksum, tick and term. What lies between two good entries is named as one range.


def stored_entries(log: ClosedLog) -> Iterator[Stored]:
    """Yield what is stored from the entry that holds position `first` on; behind damage, positions
    up to `end` are tried.
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
    """Yield the entries that are what was written, and report what does not follow or is not
    there.
    """
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
    """Return an entry that may stand at a position, directly behind `before` if that is known.
    Raises `Corrupt`.
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
        # Behind a gap, nothing tells what it has to follow.
    if entry.last_position != last:
        raise Corrupt(
            f"the key of position {last} holds the entry that ends at {entry.last_position}"
        )
    if entry.first_position < expected:
        raise Corrupt(f"an entry begins at position {entry.first_position}, which another one has")
    if before is not None and (
        entry.first_tick <= before.time_tick or entry.wal_term < before.wal_term
    ):
        raise Corrupt(f"tick or term of the entry at position {entry.first_position} go back")
    return entry


def _lost(first: int, last: int, failure: str, report: Report) -> None:
    detail = failure.partition(" — ")[0] or "missing, and was acknowledged"
    report.damage(f"log {PCHANNEL!r}, positions {first} to {max(first, last)}", detail)


# --- records and topics ---------------------------------------------------------------------------


@dataclass(slots=True)
class NodeRecords:
    """What a node keeps beside its log; named readers by `<collection id>/<name>`."""

    checkpoint: Checkpoint = NO_CHECKPOINT
    readers: dict[str, ReaderPosition] = field(default_factory=dict)
    first_kept: int = FIRST_CUT
    """The number of the earliest cut that is kept."""
    topics: dict[str, Topic] = field(default_factory=dict)
    last_tick: int | None = None
    """That of the last entry of the log, if that was read to its end."""


def check_records(state_map: Mapping[str, bytes], report: Report) -> NodeRecords:
    """Decode every record whose meaning is known, and return what is of use; the others are
    damage.
    """
    records = NodeRecords()
    for key, value in state_map.items():
        report.read("log", len(key) + len(value))
        try:
            if key.startswith(CHECKPOINT):
                records.checkpoint = decode_checkpoint(value)
                if records.checkpoint.producers is not None:
                    decode_window(records.checkpoint.producers, RocksMessageId)
            elif key.startswith(READER):
                records.readers[key.removeprefix(READER)] = msgspec.msgpack.decode(
                    value, type=ReaderPosition
                )
            elif key.startswith(CUTS_RECORD):
                records.first_kept = decode_first_kept(value)
            elif key.startswith(PRODUCER):
                msgspec.msgpack.decode(value, type=ProducerRecord)
            elif key.startswith(CHANNEL_KEY):
                msgspec.msgpack.decode(value, type=OwnerDescription)
        except Exception as error:  # noqa: BLE001 - any way in which it does not decode
            report.damage(f"{DATABASE_NAME}, record {key!r}", f"does not decode: {error}")
    try:
        _, records.topics = decode_records(
            {key: value for key, value in state_map.items() if key.startswith(TOPICS)}
        )
    except Exception as error:  # noqa: BLE001 - any way in which they do not decode
        report.damage(STATE_MAP, f"the records of topics do not decode: {error}")
    return records


def read_node_records(directory: Path) -> tuple[recovery.Survey, NodeRecords]:
    """Return how far the logs of a node go, and its records.

    Beside a running owner they may be a moment old, or not be read at all when files go away again
    and again. Raises `Corrupt`, `StorageFailed` or `UnsupportedFormat`.
    """
    for _ in range(LOOKS_AGAIN):
        with suppress(Corrupt):
            return _look_at_records(directory)
    return _look_at_records(directory)


def _look_at_records(directory: Path) -> tuple[recovery.Survey, NodeRecords]:
    path = directory / DATABASE_NAME
    report = Report()
    with classified(path), closing(open_read_only(path)) as rows:
        database = ClosedDatabase(rows, recovery.survey(rows), None)
        records = database.records(report)
    for damage in report.damages:
        raise Corrupt(f"{damage.place} {damage.detail} — {damage.next_step}")
    return database.found, records


def read_topic(entries: Rdict, topic: Topic, message_id: int) -> list[TopicEntry]:
    """Return entries of a topic from the one that holds a message on. Raises `Corrupt`."""
    kept = topic.begin_id, topic.end_id
    return read_range(entries, topic.log_id, decode_topic_entry, message_id, kept, STEP_BYTES)


def check_topics(
    topics: Mapping[str, Topic], read: Callable[[Topic, int], list[TopicEntry]], report: Report
) -> None:
    """Read every topic to its end; of a damaged one, what is behind the damage is not looked at.

    `read` returns entries of a topic from the one that holds an id on; none to let it be.
    """
    for name, topic in topics.items():
        message_id = topic.begin_id
        crc32c = topic.crc32c
        try:
            while message_id <= topic.end_id:
                entries = read(topic, message_id)
                if not entries:
                    break
                count = sum(len(entry.messages) for entry in entries)
                message_id = entries[-1].last_position + 1
                crc32c = entries[-1].crc32c
                report.count("topic messages", count)
                report.read("topics", sum(entry.size_bytes for entry in entries))
            if message_id > topic.end_id and crc32c != topic.crc32c:
                raise Corrupt(
                    f"its last entry is another one than was written before id {message_id}"
                )
        except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more exact
            report.error(f"topic {name!r}, from id {message_id}", error)
        report.count("topics")
