"""The database of a node, read-only, from its facts to the last entry: what an owner would have to trust. Blocks.

In: a node directory nobody owns. Out: findings, bytes read step by step, and what the other walks need to know of the
database. The log is read as RocksDB recovers it when told to skip damaged records, so that what lies behind damage is seen
too and holes are named exactly; that an owner would stop earlier is the business of `wal.rocks.recovery`.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rocksdict import DBRecoveryMode, Rdict

from flusher.checkpoint import NO_CHECKPOINT, Checkpoint, decode_checkpoint
from flusher.cuts import CUTS_RECORD, decode_first_kept
from interceptors.idempotency import ProducerRecord
from interceptors.window import decode_window
from scanner.named_reader import ReaderPosition
from streamingnode.inspection.read_only import open_read_only
from streamingnode.verification.database_files import check_database_files
from streamingnode.verification.entry_scan import Unreadable, last_readable_position, scan_entries
from streamingnode.verification.finding import RESTORE, Kind, Report
from streamingnode.verification.log_check import LogCheck, LogExpectation
from streamingnode.verification.reader_check import READER, readers_behind, still_live, warn_of_readers
from wal.errors import Corrupt, StreamingNodeError
from wal.position import RocksMessageId
from wal.rocks.floor import FLOOR_NAME, Floor
from wal.rocks.layout import (
    DATABASE_NAME,
    DURABILITY_KEY,
    ENTRY_FAMILY,
    FIRST_POSITION_PREFIX,
    LOG_ID_PREFIX,
    META_PREFIX,
    META_VERSION_KEY,
    NODE_ID_KEY,
    TERM_KEY,
    decode_log_id,
    decode_number,
    first_position_key,
    meta_key,
)
from wal.rocks.recovery import Survey, chain_end, has_torn_end, judge, scan_prefix, torn_bytes

STEP_BYTES = 1 << 20
"""Read between two steps of a walk: a few milliseconds, so that it can be paced and ended."""

OPEN_OR_RESTORE = f"open the node: what a power cut tore it drops, and starts; if it refuses, {RESTORE}"

FACT_PREFIX = b"s"
CHECKPOINT, PRODUCER = "checkpoint/", "producer/"


@dataclass(slots=True)
class DatabaseFacts:
    """What the database says about the node; empty when it cannot be opened. Filled by `walk_database`."""

    node_id: str = ""
    opened: bool = False
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    last_ticks: dict[str, int] = field(default_factory=dict)
    first_kept: dict[str, int] = field(default_factory=dict)
    """The number of the earliest cut that is kept, by pchannel."""
    readers: dict[str, ReaderPosition] = field(default_factory=dict)
    """The places of named readers, by key of the state map."""


def walk_database(directory: Path, floor: Floor | None, facts: DatabaseFacts, report: Report) -> Iterator[int]:
    """Check the database and yield the bytes read after each step. Nothing is changed."""
    path, place = directory / DATABASE_NAME, DATABASE_NAME
    if not (path / "CURRENT").is_file():
        report.damage(Kind.MISSING, place, "the directory holds no database", RESTORE)
        return
    try:
        compared = compare_with_floor(path, floor, report)
        database = open_read_only(path, compared.recovery)
        found = readable_survey(database)
    except StreamingNodeError as error:
        report.damage(Kind.UNREADABLE, place, error.happened, OPEN_OR_RESTORE if has_torn_end(path) else RESTORE)
        return
    try:
        check_database_files(path, database, report)
        yield from _walk_open(database, found, compared.floor, facts, report)
    finally:
        database.close()


def floor_reaches(floor: Floor | None, log_id: int) -> int:
    """Return the last position the floor knows of a log, 0 for none."""
    return 0 if floor is None else floor.positions.get(log_id, 0)


def readable_survey(database: Rdict) -> Survey:
    """Return what a database holds, with 0 as the end of a log whose end cannot be read. Raises `Corrupt`."""
    try:
        ids = {key[len(LOG_ID_PREFIX) :].decode(): decode_log_id(value) for key, value in _log_ids(database)}
        entries = database.get_column_family(ENTRY_FAMILY)
        return Survey(
            node_id=_fact(database, NODE_ID_KEY).decode(),
            term=decode_number(_fact(database, TERM_KEY)),
            meta_version=decode_number(_fact(database, META_VERSION_KEY)),
            log_ids=ids,
            last_positions={log_id: last_readable_position(entries, log_id) for log_id in ids.values()},
            synced_each_batch=database.get(DURABILITY_KEY) != b"os",
        )
    except Exception as error:
        raise Corrupt(f"the facts about the store cannot be read: {error}") from error


def _log_ids(database: Rdict) -> Iterable[tuple[bytes, bytes]]:
    return scan_prefix(database, LOG_ID_PREFIX).items()


def _fact(database: Rdict, key: bytes) -> bytes:
    value = database.get(key)
    if not isinstance(value, bytes):
        raise Corrupt(f"there is no record {key!r}")
    return value


@dataclass(frozen=True, slots=True)
class Compared:
    """The floor, if it is this database's, and how far the log is to be read: behind damage, or as an owner would."""

    floor: Floor | None
    recovery: DBRecoveryMode


def compare_with_floor(path: Path, floor: Floor | None, report: Report) -> Compared:
    """Compare what an owner would open with what is behind damage, and with the floor."""
    as_owner, behind_damage = DBRecoveryMode.point_in_time(), DBRecoveryMode.skip_any_corrupted_record()
    reached = found = _survey(path, as_owner)
    try:
        found = _survey(path, behind_damage)
    except Corrupt:
        if reached.synced_each_batch:
            raise
        behind_damage = as_owner  # RocksDB does not always get there, and a torn tail is no damage
    if floor is None:
        return Compared(None, behind_damage)
    if reached.node_id != floor.node_id:
        detail = f"belongs to node {reached.node_id}, the floor file beside it to node {floor.node_id}"
        report.damage(Kind.FOREIGN, path.name, detail, RESTORE)
        return Compared(None, behind_damage)
    try:
        judge(reached, found, floor, place=path.name)
    except Corrupt as error:
        report.damage(Kind.SHORT, path.name, error.happened, RESTORE)
        return Compared(floor, behind_damage)
    if reached.term > floor.term:
        detail = f"is of term {floor.term}, the log beside it of {reached.term}: it is an older copy"
        step = "put log and floor of one backup together; opening the node trusts the log"
        report.warn(Kind.MIXED, FLOOR_NAME, detail, step)
    if reached.synced_each_batch:
        return Compared(floor, behind_damage)
    if torn := torn_bytes(path):
        detail = f"torn tail, will be dropped: {torn} bytes, not acknowledged as durable"
        report.warn(Kind.TORN, path.name, detail, "nothing to do: the node drops it when it starts")
    return Compared(floor, as_owner)


def _survey(path: Path, recovery: DBRecoveryMode) -> Survey:
    database = open_read_only(path, recovery)
    try:
        return readable_survey(database)
    finally:
        database.close()


def _walk_open(
    database: Rdict, found: Survey, floor: Floor | None, facts: DatabaseFacts, report: Report
) -> Iterator[int]:
    facts.node_id, facts.opened = found.node_id, True
    read_bytes = _walk_records(database, facts, report)
    yield read_bytes
    entries = database.get_column_family(ENTRY_FAMILY)
    for name, log_id in found.log_ids.items():
        first = first_position(database, log_id)
        if first is None:
            continue  # damage of the state map, which is named already: nobody knows where the log has to begin
        last = last_readable_position(entries, log_id)
        kept = last if floor is None else end_kept(database, found, log_id, floor, report)
        expected = LogExpectation(
            name=name,
            first_position=first,
            floor_position=max(floor_reaches(floor, log_id), kept),
        )
        facts.last_ticks[name] = yield from _walk_log(entries, log_id, expected, report, is_torn=kept < last)
        _check_readers(entries, log_id, expected, facts, report)


def _check_readers(entries: Rdict, log_id: int, expected: LogExpectation, facts: DatabaseFacts, report: Report) -> None:
    checkpoint, first = facts.checkpoints.get(expected.name, NO_CHECKPOINT), expected.first_position
    behind = readers_behind(facts.readers, pchannel=expected.name, first_position=first, checkpoint=checkpoint)
    last = expected.floor_position  # an owner lets the log end there
    warn_of_readers(still_live(behind, entries, log_id, position=checkpoint.position, last=last), first, report)


def end_kept(database: Rdict, found: Survey, log_id: int, floor: Floor, report: Report) -> int:
    """Return where an owner will let the log end, and warn when that is before its last entry."""
    last = found.last_positions[log_id]
    if found.synced_each_batch:
        return last
    try:
        kept = chain_end(database, log_id, floor)
    except Exception:  # noqa: BLE001 - damage, which the walk over the entries names
        return last
    if kept < last:
        detail = (
            f"torn tail, will be dropped: what is behind position {kept}, up to {last}, not acknowledged as durable"
        )
        report.warn(Kind.TORN, DATABASE_NAME, detail, "nothing to do: the node drops it when it starts")
    return kept


def _walk_log(
    entries: Rdict, log_id: int, expected: LogExpectation, report: Report, *, is_torn: bool
) -> Generator[int, None, int]:
    """Check one log, of a torn one what is kept; yield the bytes read and return the tick it ends at."""
    check = LogCheck(expected, report)
    step_bytes = 0
    for found in scan_entries(entries, log_id, end_position=expected.floor_position):
        if isinstance(found, Unreadable):
            check.failed(found)
            continue
        position, data = found
        if is_torn and position > expected.floor_position:
            break
        check.take(position, data)
        step_bytes += len(data)
        if step_bytes >= STEP_BYTES:
            yield step_bytes
            step_bytes = 0
    check.finish()
    report.count("logs")
    yield step_bytes
    return check.last_tick


def first_position(database: Rdict, log_id: int) -> int | None:
    """Return the first position kept of a log, None when the record of it cannot be read."""
    try:
        recorded = database.get(first_position_key(log_id))
    except Exception:  # noqa: BLE001 - rocksdict raises nothing more exact
        return None
    return decode_number(recorded) if isinstance(recorded, bytes) else 1


def _walk_records(database: Rdict, facts: DatabaseFacts, report: Report) -> int:
    """Read every small record and decode those whose meaning is known; return the bytes read."""
    iterator = database.iter()
    iterator.seek_to_first()
    read_bytes = 0
    try:
        while iterator.valid():
            key, value = iterator.key(), iterator.value()
            read_bytes += len(key) + len(value)
            _check_record(key, value, facts, report)
            iterator.next()
        iterator.status()
    except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more exact
        report.damage(Kind.CHECKSUM, f"{DATABASE_NAME}, state map", f"cannot be read to its end: {error}", RESTORE)
    return read_bytes


def _check_record(key: bytes, value: bytes, facts: DatabaseFacts, report: Report) -> None:
    report.count("records")
    place = f"{DATABASE_NAME}, record {key!r}"
    try:
        if key.startswith(meta_key(CHECKPOINT)):
            name = key[len(meta_key(CHECKPOINT)) :].decode()
            checkpoint = facts.checkpoints[name] = decode_checkpoint(value)
            if checkpoint.producers is not None:
                decode_window(checkpoint.producers, RocksMessageId)
        elif key.startswith(meta_key(READER)):
            at = msgspec.msgpack.decode(value, type=ReaderPosition)
            facts.readers[key[len(META_PREFIX) :].decode()] = at
        elif key.startswith(meta_key(CUTS_RECORD)):
            facts.first_kept[key[len(meta_key(CUTS_RECORD)) :].decode()] = decode_first_kept(value)
        elif key.startswith(meta_key(PRODUCER)):
            msgspec.msgpack.decode(value, type=ProducerRecord)
        elif key.startswith(LOG_ID_PREFIX):
            decode_log_id(value)
        elif key.startswith(FIRST_POSITION_PREFIX):
            decode_number(value)
        elif not key.startswith((FACT_PREFIX, META_PREFIX)):
            report.warn(Kind.FOREIGN, place, "is none of a node's", "nothing to do; another program wrote it")
    except Exception as error:  # noqa: BLE001 - any way in which it does not decode
        report.damage(Kind.CONTENT, place, f"does not decode: {error}", RESTORE)
