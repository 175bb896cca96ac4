"""The steps of a verification, of a directory that nobody has open and of a running node. Blocks; nothing is changed.

What retention takes of a running node meanwhile is not missed. Where its log is damaged the reading of it ends: what is
readable behind that is for `streamingnode verify`, when the node is closed.
"""

import asyncio
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anyio import from_thread

from flusher.cuts import decode_first_kept, kept_cuts_key
from flusher.directory import cut_numbers, measure_file
from flusher.flusher import Flusher
from streamingnode.care.database import (
    STATE_MAP,
    check_database_files,
    check_records,
    is_unfinished_creation,
    opened,
    stored_records,
)
from streamingnode.care.entries import check_topics, good_entries, read_topic, stored_entries
from streamingnode.care.files import LogFacts, check_cuts, check_leases, check_strays
from streamingnode.care.findings import OnStep, Report, no_progress
from streamingnode.care.inspect import check_node, kept_closed, read_record
from streamingnode.channel import Channel
from wal.errors import Corrupt, InvalidArgument, StreamingNodeError, Truncated
from wal.log import Log, LogStore
from wal.rocks.layout import DATABASE_NAME, ENTRY_FAMILY, meta_key
from wal.rocks.opening import BACKUP_RECORD_NAME
from wal.rocks.store import RocksStore
from wal.rocksmq.messages import TopicEntry
from wal.rocksmq.topic import PREFIX, Topic, decode_records

STEP_BYTES = 1 << 20
"""Read of a log between two steps: a few milliseconds, so that a walk can be paced and ended."""

T = TypeVar("T")


def verify_directory(directory: Path, *, tables: Path | None = None, on_step: OnStep = no_progress) -> Report:
    """Check everything in a node directory, owned by nobody meanwhile, and the tables fed from it; changes nothing.

    Raises `InvalidArgument` when it holds no node or there is no `tables`, `AlreadyOwned` while a process has it open,
    `PackageMissing` when tables are asked for and their library is not installed.
    """
    check_node(directory)
    if tables is not None and not tables.is_dir():
        raise InvalidArgument(f"there are no tables at {tables} — name the directory that `ingest --tables` made")
    with kept_closed(directory):
        return verify_unlocked(directory, tables=tables, on_step=on_step)


def verify_unlocked(directory: Path, *, tables: Path | None = None, on_step: OnStep = no_progress) -> Report:
    """As `verify_directory`, for a directory the caller owns already, or nobody else knows of."""
    report = Report(on_step=on_step)
    if is_unfinished_creation(directory):
        detail = "the node's creation was cut off, before it took anything"
        report.warn(DATABASE_NAME, detail, "open the node: the next opening finishes it")
        return report
    if (directory / BACKUP_RECORD_NAME).exists():
        _check_backup(directory, report)
    facts = _check_database(directory, report)
    named = check_cuts(directory, cut_numbers(directory), facts, report)
    leases = check_leases(directory, facts.node_id, report)
    check_strays(directory, named, report)
    if tables is not None:
        from streamingnode.care.tables import check_tables

        check_tables(directory, tables, leases, facts.node_id, report)
    return report


def _check_backup(directory: Path, report: Report) -> None:
    """Compare a backup with its own record: every file there, as long as it was, with the checksum it had."""
    step = "use another backup"
    try:
        files = read_record(directory).files
    except StreamingNodeError as error:
        report.error(BACKUP_RECORD_NAME, error, step)
        return
    for file in files:
        try:
            measured = measure_file(
                directory / file.path, expected_bytes=file.bytes, take=lambda chunk: report.read("backup", len(chunk))
            )
        except (OSError, Corrupt) as error:
            report.error(file.path, error, step)
            continue
        if measured != (file.bytes, file.crc32c):
            report.damage(file.path, f"is not what the backup had, {file.bytes} bytes of another checksum", step)


def _check_database(directory: Path, report: Report) -> LogFacts:
    """Check floor and database from their facts to the last entry: what an owner would have to trust."""
    with opened(directory, report) as (node_id, database):
        if database is None:
            return LogFacts(node_id=node_id)
        check_database_files(directory / DATABASE_NAME, database.rows, report)
        records = check_records(stored_records(database.rows), report)
        facts = LogFacts(node_id=node_id, checkpoint=records.checkpoint, first_kept=records.first_kept)
        log = database.log(report)
        if log is not None and log.first:  # else damage of the state map, which is named already
            facts.last_tick = read_bytes = 0
            for entry in good_entries(log, stored_entries(log), report):
                facts.last_tick, read_bytes = entry.time_tick, read_bytes + entry.size_bytes
                if read_bytes >= STEP_BYTES:
                    report.read("log", read_bytes)
                    read_bytes = 0
            report.read("log", read_bytes)
        entries = database.rows.get_column_family(ENTRY_FAMILY)
        check_topics(records.topics, lambda topic, at: read_topic(entries, topic, at, STEP_BYTES), report)
        return facts


def verify_running(directory: Path, channel: Channel, flusher: Flusher, loop: asyncio.AbstractEventLoop) -> Report:
    """Check log, cuts and leases of the node on `loop`, from a worker thread, which ends when its task is cancelled.

    Its floor file is written all the time, and what nothing names may be about to be named. Raises what the store raises
    while its log is being reopened or the node closes.
    """
    store, log = channel.store, channel.log
    report = Report(on_step=lambda _part, _bytes: from_thread.check_cancelled())
    try:
        stored = run_on(loop, store.scan_meta(""))
        topics = check_records(((meta_key(key), value) for key, value in stored.items()), report).topics
        check_topics(topics, partial(_read_topic_in_use, store, loop), report)
    except Corrupt as error:
        report.error(STATE_MAP, error)
    _check_log_in_use(log, loop, report)
    facts = LogFacts(node_id=store.node_id, checkpoint=flusher.checkpoint, running=True)
    numbers = cut_numbers(directory)
    # Asked for after the cuts were listed: it goes up before a cut goes.
    facts.first_kept = decode_first_kept(run_on(loop, store.get_meta(kept_cuts_key(log.name))))
    check_cuts(directory, numbers, facts, report)
    check_leases(directory, store.node_id, report)
    return report


def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns on the node's event loop; from another thread."""
    # Not in the caller's scope, as by `anyio.from_thread.run`: when that was cancelled before, `work` spins for ever.
    return asyncio.run_coroutine_threadsafe(work, loop).result()


def _read_topic_in_use(store: LogStore, loop: asyncio.AbstractEventLoop, topic: Topic, at: int) -> list[TopicEntry]:
    """Return entries of a topic, none when it was destroyed or shortened meanwhile."""
    assert isinstance(store, RocksStore), "a store in memory keeps no topics"
    engine = store.engine
    try:
        return run_on(loop, engine.read(lambda: read_topic(engine.entries, topic, at, STEP_BYTES)))
    except Corrupt:
        _, now = decode_records(run_on(loop, store.scan_meta(PREFIX)))
        if any((each.log_id, each.begin_id) == (topic.log_id, topic.begin_id) for each in now.values()):
            raise
        return []


def _check_log_in_use(log: Log, loop: asyncio.AbstractEventLoop, report: Report) -> None:
    """Read from the first entry kept to the last one synced now."""
    position, end = log.first_position, log.durable_position
    while position <= end:
        try:
            entries = run_on(loop, log.read(position, bytes_max=STEP_BYTES))
        except Truncated:
            position = log.first_position
            continue
        except Corrupt as error:
            report.error(f"log {log.name!r}, from position {position}", error)
            return
        position = entries[-1].last_position + 1
        report.count("log entries", len(entries))
        report.count("log positions", sum(entry.count for entry in entries))
        report.read("log", sum(entry.size_bytes for entry in entries))
