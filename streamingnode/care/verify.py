"""The steps of a verification of a directory that nobody has open. Blocks; nothing is changed."""

from functools import partial
from pathlib import Path

from flusher.directory import cut_numbers, measure_file
from streamingnode.care.database import (
    STEP_BYTES,
    check_database_files,
    check_records,
    check_topics,
    good_entries,
    is_unfinished_creation,
    opened,
    read_topic,
    stored_entries,
    stored_records,
)
from streamingnode.care.files import LogFacts, check_cuts, check_leases, check_strays
from streamingnode.care.findings import OnStep, Report, no_progress
from streamingnode.care.inspect import check_node, kept_closed, read_record
from wal.errors import Corrupt, InvalidArgument, StreamingNodeError
from wal.rocks.layout import DATABASE_NAME, ENTRY_FAMILY
from wal.rocks.opening import BACKUP_RECORD_NAME


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
        check_topics(records.topics, partial(read_topic, database.rows.get_column_family(ENTRY_FAMILY)), report)
        return facts
