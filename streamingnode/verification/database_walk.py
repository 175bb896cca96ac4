"""The database of a node, read-only, from its facts to the last entry: what an owner would have to trust. Blocks.

In: a node directory nobody owns. Out: findings, bytes read step by step, and what the other walks need to know of the
database. The log is read as RocksDB recovers it when told to skip damaged records, so that what lies behind damage is seen
too and holes are named exactly; that an owner would stop earlier is the business of `wal.rocks.recovery`.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rocksdict import AccessType, DBRecoveryMode, Rdict

from flusher.checkpoint import Checkpoint, decode_checkpoint
from interceptors.idempotency.producers import ProducerRecord
from interceptors.idempotency.snapshot import decode_window
from scanner.named_reader import ReaderPosition
from streamingnode.verification.entry_scan import Unreadable, last_readable_position, scan_entries
from streamingnode.verification.finding import REPAIR, RESTORE, Kind, Report
from streamingnode.verification.log_check import LogCheck, LogExpectation
from wal.errors import Corrupt, StreamingNodeError
from wal.message_id import RocksMessageId
from wal.rocks.failures import classify_failure
from wal.rocks.floor import Floor
from wal.rocks.framing import check_framing
from wal.rocks.keys import (
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
from wal.rocks.options import DATABASE_NAME, ENTRY_FAMILY, RocksOptions, database_options, families
from wal.rocks.recovery import Survey, judge, scan_prefix

STEP_BYTES = 1 << 20
"""Read between two steps of a walk: a few milliseconds, so that it can be paced and ended."""

FACT_PREFIX = b"s"
CHECKPOINT, READER, PRODUCER = "checkpoint/", "reader/", "producer/"


@dataclass(slots=True)
class DatabaseFacts:
    """What the database says about the node; empty when it cannot be opened. Filled by `walk_database`."""

    node_id: str = ""
    opened: bool = False
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    last_ticks: dict[str, int] = field(default_factory=dict)


def walk_database(directory: Path, floor: Floor | None, facts: DatabaseFacts, report: Report) -> Iterator[int]:
    """Check the database and yield the bytes read after each step. Nothing is changed."""
    path = directory / DATABASE_NAME
    place = DATABASE_NAME
    if not (path / "CURRENT").is_file():
        report.damage(Kind.MISSING, place, "the directory holds no database", RESTORE)
        return
    try:
        floor = _compare(path, floor, report)
        database = open_read_only(path, DBRecoveryMode.skip_any_corrupted_record())
        found = readable_survey(database)
    except StreamingNodeError as error:
        report.damage(Kind.UNREADABLE, place, str(error).partition(" — ")[0], RESTORE)
        return
    try:
        yield from _walk_open(database, found, floor, facts, report)
    finally:
        database.close()


def open_read_only(path: Path, recovery: DBRecoveryMode) -> Rdict:
    """Open a database without changing it. Raises what `classify_failure` makes of RocksDB's errors."""
    check_framing(path)
    options = RocksOptions()
    settings = database_options(options, recovery=recovery)
    try:
        return Rdict(str(path), settings, column_families=families(options), access_type=AccessType.read_only())
    except Exception as error:
        raise classify_failure(error, path) from error


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


def _compare(path: Path, floor: Floor | None, report: Report) -> Floor | None:
    """Compare what an owner would open with what is behind damage, and with the floor; return the floor if it is ours."""
    surveys = []
    for recovery in (DBRecoveryMode.point_in_time(), DBRecoveryMode.skip_any_corrupted_record()):
        database = open_read_only(path, recovery)
        try:
            surveys.append(readable_survey(database))
        finally:
            database.close()
    reached, found = surveys
    if floor is None:
        return None
    if reached.node_id != floor.node_id:
        detail = f"belongs to node {reached.node_id}, the floor file beside it to node {floor.node_id}"
        report.damage(Kind.FOREIGN, path.name, detail, REPAIR)
        return None
    _judge(path, reached, found, floor, report)
    return floor


def _walk_open(
    database: Rdict, found: Survey, floor: Floor | None, facts: DatabaseFacts, report: Report
) -> Iterator[int]:
    facts.node_id, facts.opened = found.node_id, True
    read_bytes = _walk_records(database, facts, report)
    yield read_bytes
    entries = database.get_column_family(ENTRY_FAMILY)
    for name, log_id in found.log_ids.items():
        expected = LogExpectation(
            name=name,
            first_position=_first_position(database, log_id),
            floor_position=max(floor_reaches(floor, log_id), last_readable_position(entries, log_id)),
        )
        facts.last_ticks[name] = yield from _walk_log(entries, log_id, expected, report)


def _judge(path: Path, reached: Survey, found: Survey, floor: Floor, report: Report) -> None:
    try:
        judge(reached, found, floor, place=path.name)
    except Corrupt as error:
        report.damage(Kind.SHORT, path.name, str(error).partition(" — ")[0], REPAIR)


def _walk_log(entries: Rdict, log_id: int, expected: LogExpectation, report: Report) -> Generator[int, None, int]:
    """Check one log, yielding the bytes read; return the tick it ends at."""
    check = LogCheck(expected, report)
    step_bytes = 0
    for found in scan_entries(entries, log_id, end_position=expected.floor_position):
        if isinstance(found, Unreadable):
            check.failed(found)
            continue
        position, data = found
        check.take(position, data)
        step_bytes += len(data)
        if step_bytes >= STEP_BYTES:
            yield step_bytes
            step_bytes = 0
    check.finish()
    report.count("logs")
    yield step_bytes
    return check.last_tick


def _first_position(database: Rdict, log_id: int) -> int:
    recorded = database.get(first_position_key(log_id))
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
            msgspec.msgpack.decode(value, type=ReaderPosition)
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
