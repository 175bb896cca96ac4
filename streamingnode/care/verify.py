"""The steps of a verification: log, topics and records of a store, cuts and files, leases. For a
directory that no process has open also the floor, RocksDB's own files and left-overs.

Changes nothing. The engine's own readers detect damage by checksums. This module compares their
results: each cut is the one that the next cut follows, none is missing, and the newest is the one
in the log's checkpoint.
"""

import itertools
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from flusher.cuts import FIRST_CUT, LEASES, Lease, lease_files, lease_path
from flusher.directory import (
    CUTS,
    TOGETHER,
    Cut,
    CutLog,
    NodeDirectory,
    check_file,
    cut_numbers,
    living,
    manifest_path,
    measure_file,
    refuse_mixed,
)
from flusher.manifest import DATA, Checkpoint, SegmentFile
from streamingnode.care.findings import RESTORE, OnStep, Report, no_progress
from streamingnode.care.inspect import check_node, floor_of, kept_closed, read_record
from streamingnode.care.records import PCHANNEL, STATE_MAP, NodeRecords, check_records, reading
from wal.entry import LogEntry
from wal.errors import Corrupt, InvalidArgument, StreamingNodeError, Truncated
from wal.files import place_beneath, read_regular
from wal.log import BatchMap, Log, LogReader, StateMap
from wal.rocks import floor as parts
from wal.rocks import recovery
from wal.rocks.floor import BACKUP_RECORD_NAME, FLOOR_NAME, Floor, read_floor
from wal.rocks.layout import DATABASE_NAME
from wal.rocks.opening import check_may_read
from wal.rocks.recovery import torn_bytes
from wal.rocks.store import RocksReader
from wal.rocksmq.messages import decode_entry
from wal.rocksmq.topic import PREFIX as TOPICS
from wal.rocksmq.topic import Topic, decode_records

STEP_BYTES = 1 << 20
"""Bytes read of a log between two steps: a few milliseconds, so that progress can be shown and the
work be ended.
"""

_AT_START = "nothing to do: the node repairs it when it starts"
_OURS = re.compile(r"node\.[a-z]+|floor|reserve|backup\.json|log|cuts|segments|deletes|leases")
_OURS_BELOW = re.compile(r"cuts/\d{16}\.json|leases/[^/]*\.json")
_INGEST = (
    "run `streamingnode ingest` for each table, which writes the lease again; then remove any "
    "that are left over"
)


def verify_directory(
    directory: Path, *, tables: Path | None = None, on_step: OnStep = no_progress
) -> Report:
    """Check everything in a node directory and the tables fed from it; changes nothing, and keeps
    the node from being opened meanwhile.

    Raises `InvalidArgument` when it holds no node or `tables` does not exist, `AlreadyOwned` while
    a process has it open, `StorageFailed` without permission to read it, `PackageMissing` when the
    library to check tables is not installed.
    """
    check_node(directory)
    if tables is not None and not tables.is_dir():
        raise InvalidArgument(
            f"there are no tables at {tables} — name the directory that `ingest --tables` made"
        )
    with kept_closed(directory):
        return verify_unlocked(directory, tables=tables, on_step=on_step)


def verify_unlocked(
    directory: Path, *, tables: Path | None = None, on_step: OnStep = no_progress
) -> Report:
    """Verify as `verify_directory`, but a directory that the caller already owns, or that no other
    process uses.
    """
    report = Report(on_step=on_step)
    if _is_unfinished_creation(directory):
        detail = "the node's creation was interrupted, before it took any write"
        report.warn(DATABASE_NAME, detail, "open the node: the next opening finishes it")
        return report
    if (directory / BACKUP_RECORD_NAME).exists():
        _check_backup(directory, report)
    node_id, records = _check_database(directory, report)
    named = check_cuts(directory, cut_numbers(directory), node_id, records, report)
    leases = check_leases(directory, node_id, report)
    check_strays(directory, named, report)
    if tables is not None:
        from streamingnode.care.tables import check_tables

        check_tables(directory, tables, leases, node_id, report)
    return report


def _check_backup(directory: Path, report: Report) -> None:
    """Compare a backup with its own record: every file must exist with its recorded size and
    checksum.
    """
    step = "use another backup"
    with report.errors_at(BACKUP_RECORD_NAME, step):
        for file in read_record(directory).files:
            with report.errors_at(file.path, step):
                path = directory / file.path
                measured = measure_file(
                    path,
                    expected_bytes=file.bytes,
                    take=lambda chunk: report.read("backup", len(chunk)),
                )
                if measured != (file.bytes, file.crc32c):
                    detail = f"is not the file of the backup's record, which has {file.bytes} bytes"
                    report.damage(file.path, detail, step)


# --- the log, topics and the records beside them --------------------------------------------------


async def check_store(
    store: LogReader, topics: BatchMap | None, report: Report
) -> NodeRecords | None:
    """Read everything in a store: the node's log and each topic up to its end or first damage.
    Returns the store's records, None when they cannot be read.

    `topics` is the store's map of topics, None for a store without topics. The store is that of a
    running node, or one opened for reading. Raises as its log does, except `Corrupt`.
    """
    records: NodeRecords | None = None
    try:
        records = check_records(await store.state.scan(""), report)
    except Corrupt as error:
        report.error(STATE_MAP, error)
    if records is not None and topics is not None:
        for name, topic in records.topics.items():
            await _check_topic(topics, name, topic, report)
    try:
        log = await store.open_log(PCHANNEL)
    except Corrupt as error:
        report.error(f"log {PCHANNEL!r}", error)
        return records
    await _check_log(log, report)
    if records is not None:
        records.last_tick = log.last_tick
    return records


async def _check_log(log: Log, report: Report) -> None:
    """Read from the first kept entry to the last one that is durable now. Damage is reported at the
    position of the first damaged entry.
    """
    position = log.first_position
    end = log.durable_position
    step_bytes = STEP_BYTES
    before: LogEntry | None = None
    while position <= end:
        try:
            entries = await log.read(position, bytes_max=step_bytes)
            _check_order(before, entries)
            before = entries[-1]
        except Truncated:
            position = log.first_position
            before = None
            continue
        except Corrupt as error:
            if step_bytes > 1:
                step_bytes = 1  # entry by entry up to the damage
                continue
            report.error(f"log {log.name!r}, from position {position}", error)
            return
        position = entries[-1].last_position + 1
        report.count("log entries", len(entries))
        report.count("log positions", sum(entry.count for entry in entries))
        report.read("log", sum(entry.size_bytes for entry in entries))


def _check_order(before: LogEntry | None, entries: Sequence[LogEntry]) -> None:
    for entry in entries:
        if before is not None and (
            entry.first_tick <= before.time_tick or entry.wal_term < before.wal_term
        ):
            raise Corrupt(f"tick or term of the entry at position {entry.first_position} decrease")
        before = entry


async def _check_topic(state: BatchMap, name: str, topic: Topic, report: Report) -> None:
    message_id = topic.begin_id
    crc32c = topic.crc32c
    log = state.owned_log(
        topic.log_id,
        decode_entry,
        first_position=topic.begin_id,
        last_position=topic.end_id,
        title="read from id",
    )
    try:
        while message_id <= topic.end_id:
            entries = await log.read(message_id, bytes_max=STEP_BYTES)
            message_id = entries[-1].last_position + 1
            crc32c = entries[-1].crc32c
            report.count("topic messages", sum(len(entry.messages) for entry in entries))
            report.read("topics", sum(entry.size_bytes for entry in entries))
        if crc32c != topic.crc32c:
            raise Corrupt(
                f"its last entry, before id {message_id}, is not the one that was written"
            )
    except Corrupt as error:
        if await _is_kept(state, topic):
            report.error(f"topic {name!r}, from id {message_id}", error)
    finally:
        state.release(log)
    report.count("topics")


async def _is_kept(state: StateMap, topic: Topic) -> bool:
    """Whether a topic still exists with the same first id: it was not removed or shortened
    meanwhile.
    """
    _, topics = decode_records(await state.scan(TOPICS))
    now = {(each.log_id, each.begin_id) for each in topics.values()}
    return (topic.log_id, topic.begin_id) in now


# --- floor and database of a directory ------------------------------------------------------------


def _check_database(directory: Path, report: Report) -> tuple[str, NodeRecords | None]:
    """Check floor and database of a node that no process has open. Returns the node's id, empty
    when unknown, and its records, None when they cannot be read.
    """
    check_may_read(directory)
    floor = _check_floor(directory, report)
    node_id = "" if floor is None else floor.node_id
    records: NodeRecords | None = None
    with report.errors_at(DATABASE_NAME), reading(directory, floor) as (runner, store):
        node_id = store.node_id
        _check_database_files(directory / DATABASE_NAME, store.table_names(), report)
        if floor is not None:
            _check_end(directory / DATABASE_NAME, store, floor, report)
        records = runner.run(check_store(store, store.state, report))
    return node_id, records


def _check_end(path: Path, store: RocksReader, floor: Floor, report: Report) -> None:
    """Warn of a floor that is older than the log, and of torn tails, which the next owner drops."""
    if store.found.term > floor.term:
        step = "put log and floor of one backup together; opening the node trusts the log"
        report.warn(
            FLOOR_NAME, "is of an earlier term than the log beside it: it is an older copy", step
        )
    if not store.found.synced_each_batch and (torn := torn_bytes(path)):
        detail = f"torn tail, will be dropped: {torn} bytes, not acknowledged as durable"
        report.warn(DATABASE_NAME, detail, _AT_START)
    for name, kept in store.torn.items():
        behind = f"everything after position {kept} of log {name!r}, not acknowledged as durable"
        report.warn(DATABASE_NAME, f"torn tail, will be dropped: {behind}", _AT_START)


def _is_unfinished_creation(directory: Path) -> bool:
    """Whether the next opening creates the node here again: it never acknowledged anything."""
    if any((directory / name).exists() for name in (DATABASE_NAME, BACKUP_RECORD_NAME)):
        return False
    try:
        floor = read_floor(directory)
    except StreamingNodeError:
        return False
    # with cuts it was not just begun
    return floor is not None and not floor.term and not cut_numbers(directory)


def _check_floor(directory: Path, report: Report) -> Floor | None:
    """Check every part of the floor file and return the floor, None when there is no valid one."""
    floor: Floor | None = None
    with report.errors_at(FLOOR_NAME):
        floor = floor_of(directory)
        data = read_regular(directory / FLOOR_NAME, bytes_max=parts.FLOOR_READ_BYTES_MAX)
        report.bytes += len(data)
        if len(data) != parts.FLOOR_BYTES:
            report.warn(FLOOR_NAME, f"has {len(data)} bytes, not {parts.FLOOR_BYTES}", _AT_START)
        # A power cut may tear the part being written; then the other slot counts, which is one sync
        # older. A flipped bit looks the same.
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


def _check_database_files(path: Path, live: Collection[str], report: Report) -> None:
    """Check RocksDB's own files for damage that RocksDB silently accepts.

    RocksDB replays a log file that was copied under a newer name as if it were newer, and accepts a
    manifest whose last record is cut short. It ignores a table that is not `live` (not in its
    manifest), and removes it at the next start.
    """
    for table in sorted(path.glob("*.sst")):
        if table.name not in live:
            detail = "the database does not name it: left by a crash, or a copy"
            report.warn(f"{DATABASE_NAME}/{table.name}", detail, _AT_START)
    logs = sorted(path.glob("*.log"), key=lambda each: int(each.stem))
    begins = [
        (each, first) for each in logs if (first := recovery.first_sequence(each)) is not None
    ]
    for (original, earlier), (copied, later) in itertools.pairwise(begins):
        if later <= earlier:
            detail = (
                f"begins no later than the older {original.name}: it is a copy of an earlier file"
            )
            report.damage(f"{DATABASE_NAME}/{copied.name}", detail, f"move it away, or {RESTORE}")
    if torn := recovery.torn_manifest(path):
        detail = "its last record is cut short: by a crash during the write, or by lost bytes"
        report.warn(f"{DATABASE_NAME}/{torn[0].name}", detail, _AT_START)


# --- cuts, files, leases, left-overs --------------------------------------------------------------


def check_cuts(
    directory: Path, numbers: list[int], node_id: str, records: NodeRecords | None, report: Report
) -> frozenset[str] | None:
    """Check cuts with their files, newest first, and return the paths of all files that cuts name.

    Returns None when a cut is missing or unreadable, so that the paths are incomplete. `records` is
    None when the log beside the cuts cannot be read. Retention may delete cuts meanwhile.
    """
    cuts = CutLog(NodeDirectory(directory), node_id=node_id)
    named = set[str]()
    records = records or NodeRecords(first_kept=min(numbers, default=FIRST_CUT))
    if records.last_tick is not None:
        with report.errors_at(CUTS):
            refuse_mixed(directory, records.checkpoint, node_id, records.last_tick)
    all_known = _are_all_there(numbers, records, report)
    after = None
    living_ids = frozenset[int]()

    def read(chunk: bytes) -> None:
        report.read(CUTS, len(chunk))

    for number in reversed(numbers):
        report.read(CUTS, 0)
        try:
            cut = cuts.read_alone(number)
        except Truncated:
            continue  # retention deleted it after it was listed
        except (OSError, StreamingNodeError) as error:
            report.error(manifest_path(number), error)
            all_known = False
            continue
        report.count("cuts")
        _check_place(cut, after, records.checkpoint, report)
        living_ids = living_ids if after else living(cut.manifest)
        for file in cut.manifest.files:
            named.add(file.path)
            with report.errors_at(file.path):
                path = place_beneath(directory, file.path)
                try:
                    length, checksum = measure_file(path, expected_bytes=file.bytes, take=read)
                except FileNotFoundError:
                    # Retention removes files of a dropped collection before their cut's manifest,
                    # and other files after it.
                    is_kept = (directory / manifest_path(number)).exists()
                    if file.collection_id in living_ids and is_kept:
                        report.damage(
                            file.path,
                            f"cut {number} names it ({file.rows} rows), but it is missing",
                        )
                    continue
                check_file(file.path, file, length, checksum)
                report.count("segments" if isinstance(file, SegmentFile) else "delete files")
                report.count("rows", file.rows)
        after = cut
    return frozenset(named) if all_known else None


def _are_all_there(numbers: list[int], records: NodeRecords, report: Report) -> bool:
    """Whether all cuts exist, from the first that retention keeps to the newest on disk or in the
    checkpoint.
    """
    newest = max([*numbers[-1:], records.checkpoint.cut_number])
    first = records.first_kept
    edges = [first - 1, *(number for number in numbers if number >= first), newest + 1]
    gaps = [(low + 1, high - 1) for low, high in pairwise(edges) if high > low + 1]
    for low, high in gaps:
        others = f" with those up to cut {high}" if high > low else ""
        report.damage(manifest_path(low), f"is missing{others}, and retention did not delete it")
    return not gaps


def _check_place(cut: Cut, after: Cut | None, checkpoint: Checkpoint, report: Report) -> None:
    """Check that a cut is the one that the next cut follows and that the checkpoint names."""
    place = manifest_path(cut.number)
    if after is not None and after.number == cut.number + 1 and after.previous != cut.mark:
        detail = (
            f"is not the cut that cut {after.number} follows: one of them is from another history"
        )
        report.damage(place, detail, TOGETHER)
    if checkpoint.cut_number == cut.number and checkpoint.manifest_crc32c != cut.crc32c:
        report.damage(place, "is not the cut that the log's checkpoint names", TOGETHER)


def check_leases(directory: Path, node_id: str, report: Report) -> list[Lease]:
    """Check the leases, in which tables record the cuts they have taken, and return the readable
    ones.

    A lease ahead of the node is damage: its table took cuts that the node does not have, so the
    node is an older copy.
    """
    leases: list[Lease] = []
    try:
        found = list(lease_files(NodeDirectory(directory)))
    except Corrupt:
        report.warn(
            LEASES,
            "is a link, which holds up all retention",
            "put the directory that it leads to in its place",
        )
        return []
    for place, lease in found:
        if isinstance(lease, str):
            report.warn(place, f"does not decode, which holds up all retention: {lease}", _INGEST)
            continue
        leases.append(lease)
        # listed after the lease is read, which may name a cut that was just published
        newest = max(cut_numbers(directory), default=0)
        if lease_path(directory, Path(lease.table)).name != Path(place).name:
            report.warn(place, f"is of table {lease.table}: it was swapped or copied", _INGEST)
        if node_id and lease.node_id != node_id:
            report.warn(place, f"is of node {lease.node_id} and has no effect here", "move it away")
        elif lease.cut > newest:
            taken = f"table {lease.table} has taken cut {lease.cut}, the node's newest is {newest}"
            step = "restore a newer backup, or move the table away and ingest again"
            report.damage(place, f"{taken}: the node is an older copy", step)
    return leases


def check_strays(directory: Path, named: frozenset[str] | None, report: Report) -> None:
    """Warn of files that are not the node's; `named` are the files that cuts name, None when
    unknown.
    """
    node = NodeDirectory(directory)
    places = [path.name for path in sorted(directory.iterdir()) if not _OURS.fullmatch(path.name)]
    for top in (CUTS, LEASES, *(DATA if named is not None else ())):
        # a link in its place, already reported for every file in it
        with suppress(Corrupt):
            places += [path for path in node.files(top) if not _OURS_BELOW.fullmatch(path)]
    step = "nothing to do if the node wrote it: it removes it at its start; else move it away"
    for place in places:
        if named is None or place not in named:
            report.warn(place, "nothing names it: left by a crash, or not of this node", step)
