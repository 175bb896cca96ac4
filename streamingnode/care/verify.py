"""The steps of a verification, of a directory that nobody has open and of a running node. Blocks; nothing is changed.

What retention takes of a running node meanwhile is not missed. Where its log is damaged the reading of it ends: what is
readable behind that is for `streamingnode verify`, when the node is closed.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from anyio import from_thread
from rocksdict import Rdict

from flusher.cuts import FIRST_CUT, decode_first_kept, kept_cuts_key
from flusher.directory import cut_numbers, measure_file
from flusher.flusher import Flusher
from flusher.manifest import NO_CHECKPOINT, Checkpoint
from interceptors.shard.state import decode_snapshot
from scanner.named_reader import ReaderPosition
from streamingnode.care.database import (
    PCHANNEL,
    ClosedDatabase,
    NodeRecords,
    check_database_files,
    check_floor,
    is_unfinished_creation,
    open_closed,
)
from streamingnode.care.entries import read_entries
from streamingnode.care.files import LogFacts, check_cuts, check_leases, check_oldest, check_strays
from streamingnode.care.findings import RESTORE, Kind, OnStep, Report, no_progress
from streamingnode.care.inspect import check_node, decode_record
from streamingnode.channel import Channel
from wal.errors import Corrupt, InvalidArgument, StreamingNodeError, Truncated
from wal.files import DirectoryLock, read_regular
from wal.headers import DropCollectionHeader
from wal.log import Log
from wal.message import LogEntry
from wal.rocks.floor import FLOOR_NAME, Floor
from wal.rocks.layout import (
    DATABASE_NAME,
    FIRST_POSITION_PREFIX,
    LOG_ID_PREFIX,
    META_PREFIX,
    decode_log_id,
    decode_number,
    meta_key,
)
from wal.rocks.opening import BACKUP_RECORD_NAME
from wal.rocks.recovery import has_torn_end

STEP_BYTES = 1 << 20
"""Read of a log between two steps: a few milliseconds, so that a walk can be paced and ended."""

FLOOR_READS_MAX = 3
"""The owner writes the floor file while it is read; what looks torn three times in a row is."""

T = TypeVar("T")

_FACT_PREFIX = b"s"
_OPEN_OR_RESTORE = f"open the node: what a power cut tore it drops, and starts; if it refuses, {RESTORE}"


def verify_directory(directory: Path, *, tables: Path | None = None, on_step: OnStep = no_progress) -> Report:
    """Check everything in a node directory, owned by nobody meanwhile, and the tables fed from it; changes nothing.

    Raises `InvalidArgument` when it holds no node or there is no `tables`, `AlreadyOwned` while a process has it open,
    `PackageMissing` when tables are asked for and their library is not installed.
    """
    if not is_unfinished_creation(directory):
        check_node(directory)
    if tables is not None and not tables.is_dir():
        raise InvalidArgument(f"there are no tables at {tables} — name the directory that `ingest --tables` made")
    lock = DirectoryLock(directory)
    try:
        return verify_unlocked(directory, tables=tables, on_step=on_step)
    finally:
        lock.release()


def verify_unlocked(directory: Path, *, tables: Path | None = None, on_step: OnStep = no_progress) -> Report:
    """As `verify_directory`, for a directory the caller owns already, or nobody else knows of."""
    report = Report(on_step=on_step)
    _check_backup(directory, report)
    if is_unfinished_creation(directory):
        floor = check_floor(directory, report) if (directory / FLOOR_NAME).exists() else None
        facts = LogFacts(node_id="" if floor is None else floor.node_id)
        detail = "the node's creation was cut off, before it took anything"
        report.warn(Kind.UNFINISHED, DATABASE_NAME, detail, "open the node: the next opening finishes it")
    else:
        facts = _check_database(directory, check_floor(directory, report), report)
    named = check_cuts(directory, facts, report)
    leases = check_leases(directory, facts.node_id, report)
    check_strays(directory, named, report)
    if tables is not None:
        from streamingnode.care.tables import check_tables

        check_tables(directory, tables, leases, facts.node_id, report)
    return report


# --- a backup ---------------------------------------------------------------------------------------------------------


def _check_backup(directory: Path, report: Report) -> None:
    """Compare a backup with its own record: every file there, as long as it was, with the checksum it had."""
    step = "use another backup"
    try:
        content = read_regular(directory / BACKUP_RECORD_NAME)
        record = decode_record(content, name=BACKUP_RECORD_NAME)
    except FileNotFoundError:
        return
    except StreamingNodeError as error:
        report.damage(Kind.CHECKSUM, BACKUP_RECORD_NAME, error.happened, step)
        return
    report.read("backup", len(content))
    for file in record.files:
        try:
            length, checksum = measure_file(
                directory / file.path, expected_bytes=file.bytes, take=lambda chunk: report.read("backup", len(chunk))
            )
        except FileNotFoundError:
            report.damage(Kind.MISSING, file.path, "the backup had it and it is not there", step)
            continue
        except Corrupt as error:
            report.damage(Kind.UNREADABLE, file.path, error.happened, step)
            continue
        report.count("files of the backup")
        if length != file.bytes:
            report.damage(Kind.LENGTH, file.path, f"has {length} bytes, the backup had {file.bytes}", step)
        elif checksum != file.crc32c:
            report.damage(Kind.CHECKSUM, file.path, "is not what the backup had", step)


# --- the log of a closed node -----------------------------------------------------------------------------------------


def _check_database(directory: Path, floor: Floor | None, report: Report) -> LogFacts:
    """Check the database from its facts to the last entry: what an owner would have to trust."""
    path, facts = directory / DATABASE_NAME, LogFacts(node_id="" if floor is None else floor.node_id)
    if not (path / "CURRENT").is_file():
        report.damage(Kind.MISSING, DATABASE_NAME, "the directory holds no database")
        return facts
    try:
        database = open_closed(directory, floor, report)
    except StreamingNodeError as error:
        step = _OPEN_OR_RESTORE if has_torn_end(path) else RESTORE
        report.damage(Kind.UNREADABLE, DATABASE_NAME, error.happened, step)
        return facts
    try:
        check_database_files(path, database.rows, report)
        records = _check_records(_stored(database.rows), report)
        facts.node_id = database.found.node_id
        facts.checkpoint = records.checkpoints.get(PCHANNEL, NO_CHECKPOINT)
        facts.first_kept = records.first_kept.get(PCHANNEL, FIRST_CUT)
        _check_logs(database, records, facts, report)
    finally:
        database.rows.close()
    return facts


def _check_logs(database: ClosedDatabase, records: NodeRecords, facts: LogFacts, report: Report) -> None:
    for log in database.logs(report):
        if not log.first:
            continue  # nobody knows where it has to begin: damage of the state map, which is named already
        dropped: set[int] = set()
        last_tick = read_bytes = 0
        for entry in read_entries(log, report):
            dropped |= _dropped_in([entry])
            last_tick, read_bytes = entry.time_tick, read_bytes + entry.size_bytes
            if read_bytes >= STEP_BYTES:
                report.read("log", read_bytes)
                read_bytes = 0
        report.read("log", read_bytes)
        report.count("logs")
        if log.name == PCHANNEL:
            facts.last_tick = last_tick
        checkpoint = records.checkpoints.get(log.name, NO_CHECKPOINT)
        _warn_of_readers(records.readers, dropped, checkpoint, log.name, log.first, report)


def _stored(database: Rdict) -> Iterator[tuple[bytes, bytes]]:
    iterator = database.iter()
    iterator.seek_to_first()
    while iterator.valid():
        yield iterator.key(), iterator.value()
        iterator.next()
    iterator.status()  # without this a damaged block looks like the end


# --- records and readers ----------------------------------------------------------------------------------------------


def _check_records(stored: Iterable[tuple[bytes, bytes]], report: Report) -> NodeRecords:
    """Decode every small record whose meaning is known."""
    records, read_bytes = NodeRecords(), 0
    try:
        for key, value in stored:
            read_bytes += len(key) + len(value)
            report.count("records")
            _check_record(key, value, records, report)
    except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more exact
        report.damage(Kind.CHECKSUM, f"{DATABASE_NAME}, state map", f"cannot be read to its end: {error}")
    report.read("log", read_bytes)
    return records


def _check_record(key: bytes, value: bytes, records: NodeRecords, report: Report) -> None:
    place = f"{DATABASE_NAME}, record {key!r}"
    try:
        if key.startswith(META_PREFIX):
            records.take(key[len(META_PREFIX) :].decode(), value)
        elif key.startswith(LOG_ID_PREFIX):
            decode_log_id(value)
        elif key.startswith(FIRST_POSITION_PREFIX):
            decode_number(value)
        elif not key.startswith(_FACT_PREFIX):
            report.warn(Kind.FOREIGN, place, "is none of a node's", "nothing to do; another program wrote it")
    except Exception as error:  # noqa: BLE001 - any way in which it does not decode
        report.damage(Kind.CONTENT, place, f"does not decode: {error}")


def _dropped_in(entries: Iterable[LogEntry]) -> set[int]:
    """Return the collections that the entries drop."""
    headers = (message.header for entry in entries for message in entry.messages)
    return {header.collection_id for header in headers if isinstance(header, DropCollectionHeader)}


def _warn_of_readers(
    readers: Mapping[str, ReaderPosition],
    dropped: set[int],
    checkpoint: Checkpoint,
    pchannel: str,
    first_position: int,
    report: Report,
) -> None:
    """Report named readers that would go on before the first position of their log: what they would read next is gone.

    Those of dropped collections are left out: nobody can open them, and the node forgets them when it starts.
    """
    snapshot = None
    if checkpoint.shard_state is not None:
        with suppress(StreamingNodeError):  # then nobody knows which collections are dropped
            snapshot = decode_snapshot(checkpoint.shard_state)
    names = {} if snapshot is None else {info.id: info.name for info in snapshot.collections if not info.dropped_tick}
    created_before = 0 if snapshot is None else snapshot.next_id
    for key, at in readers.items():
        number, _, name = key.partition("/")
        collection_id = int(number) if number.isdecimal() else -1
        lives = collection_id not in dropped and (collection_id in names or collection_id >= created_before)
        if lives and at.pchannel == pchannel and at.position < first_position:
            collection = names.get(collection_id, str(collection_id))
            detail = (
                f"would go on at position {at.position}, and the log begins at {first_position}: it cannot be opened, "
                "and the log is kept for it all the same"
            )
            step = "take the rows it missed from a snapshot or a table, delete the reader, and open it anew"
            report.warn(Kind.BEHIND, f"log, named reader {name!r} of collection {collection!r}", detail, step)


# --- a running node ---------------------------------------------------------------------------------------------------


def verify_running(directory: Path, channel: Channel, flusher: Flusher, loop: asyncio.AbstractEventLoop) -> Report:
    """Check everything that the node on `loop` has, from a worker thread, which ends when its task is cancelled.

    Raises what the store raises while its log is being reopened or the node closes.
    """
    store, log = channel.store, channel.log
    report = Report(on_step=lambda _part, _bytes: from_thread.check_cancelled())
    _check_floor_in_use(directory, report)
    # Places of readers only go forward: one behind where the log began before they were looked up was left behind.
    first_position = log.first_position
    try:
        stored = run_on(loop, store.scan_meta(""))
    except Corrupt as error:
        report.damage(Kind.CHECKSUM, f"{DATABASE_NAME}, state map", str(error))
        stored = {}
    records = _check_records(((meta_key(key), value) for key, value in stored.items()), report)
    dropped = _check_log_in_use(log, loop, report)
    _warn_of_readers(records.readers, dropped, flusher.checkpoint, log.name, first_position, report)
    numbers = cut_numbers(directory)
    # Asked for after the cuts were listed: it goes up before a cut goes.
    first_kept = decode_first_kept(run_on(loop, store.get_meta(kept_cuts_key(log.name))))
    check_oldest(numbers, first_kept, report)
    facts = LogFacts(node_id=store.node_id, checkpoint=flusher.checkpoint, running=True)
    named = check_cuts(directory, facts, report)
    check_leases(directory, store.node_id, report)
    check_strays(directory, named, report, running=True)
    return report


def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns on the node's event loop; from another thread."""
    # Not in the caller's scope, as by `anyio.from_thread.run`: when that was cancelled before, `work` spins for ever.
    return asyncio.run_coroutine_threadsafe(work, loop).result()


def _check_floor_in_use(directory: Path, report: Report) -> None:
    found = Report()
    for _ in range(FLOOR_READS_MAX):
        found = Report()
        check_floor(directory, found)
        if not found.findings:
            break
    report.findings += found.findings
    report.count("floor files")
    report.bytes += found.bytes


def _check_log_in_use(log: Log, loop: asyncio.AbstractEventLoop, report: Report) -> set[int]:
    """Read from the first entry kept to the last one synced now, and return the collections that are dropped there."""
    dropped: set[int] = set()
    position, end = log.first_position, log.durable_position
    while position <= end:
        try:
            entries = run_on(loop, log.read(position, bytes_max=STEP_BYTES))
        except Truncated:
            position = log.first_position
            continue
        except Corrupt as error:
            report.damage(Kind.GAP, f"log {log.name!r}, from position {position}", str(error))
            return dropped
        position = entries[-1].last_position + 1
        dropped |= _dropped_in(entries)
        report.count("log entries", len(entries))
        report.count("log positions", sum(len(entry.messages) for entry in entries))
        report.read("log", sum(entry.size_bytes for entry in entries))
    report.count("logs")
    return dropped
