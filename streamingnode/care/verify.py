"""The steps of a verification of a directory that nobody has open: database, cuts and files,
leases, left-overs. Blocks.

Nothing is changed. The engine's own readers tell what is damaged, by its checksum. Here what they
read is held against one another: each cut is the one that the next one follows, none is missing,
the newest is the one that the log knows.
"""

import re
from contextlib import suppress
from functools import partial
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
from streamingnode.care.database import (
    STATE_MAP,
    NodeRecords,
    check_database_files,
    check_topics,
    good_entries,
    is_unfinished_creation,
    opened,
    read_topic,
    stored_entries,
)
from streamingnode.care.findings import OnStep, Report, no_progress
from streamingnode.care.inspect import check_node, kept_closed, read_record
from wal.errors import Corrupt, InvalidArgument, StreamingNodeError, Truncated
from wal.files import place_beneath
from wal.rocks.floor import BACKUP_RECORD_NAME
from wal.rocks.layout import DATABASE_NAME, ENTRY_FAMILY

_OURS = re.compile(r"node\.[a-z]+|floor|reserve|backup\.json|log|cuts|segments|deletes|leases")
_OURS_BELOW = re.compile(r"cuts/\d{16}\.json|leases/[^/]*\.json")
_INGEST = (
    "run `streamingnode ingest` for each table, which writes it again; then remove what is "
    "left over"
)


def verify_directory(
    directory: Path, *, tables: Path | None = None, on_step: OnStep = no_progress
) -> Report:
    """Check everything in a node directory, owned by nobody meanwhile, and the tables fed from it;
    changes nothing.

    Raises `InvalidArgument` when it holds no node or there is no `tables`, `AlreadyOwned` while a
    process has it open, `StorageFailed` to who may not read it, `PackageMissing` when tables are
    asked for and their library is not installed.
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
    """As `verify_directory`, for a directory the caller owns already, or nobody else knows of."""
    report = Report(on_step=on_step)
    if is_unfinished_creation(directory):
        detail = "the node's creation was cut off, before it took anything"
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
    """Compare a backup with its own record: every file there, as long as it was, with the checksum
    it had.
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
                    detail = f"is not what the backup had, {file.bytes} bytes of another checksum"
                    report.damage(file.path, detail, step)


def _check_database(directory: Path, report: Report) -> tuple[str, NodeRecords | None]:
    """Check floor and database to the last entry; return the node's id, and its records if they can
    be read.
    """
    records: NodeRecords | None = None
    with opened(directory, report) as (node_id, database):
        if database is not None:
            check_database_files(directory / DATABASE_NAME, database.rows, report)
            with report.errors_at(STATE_MAP):
                records = database.records(report)
            known = records or NodeRecords()
            log = database.log(report)
            if log is not None and log.first:  # else nobody knows where it begins
                known.last_tick = 0
                for entry in good_entries(log, stored_entries(log), report):
                    known.last_tick = entry.time_tick
            check_topics(
                known.topics,
                partial(read_topic, database.rows.get_column_family(ENTRY_FAMILY)),
                report,
            )
    return node_id, records


# --- cuts, files, leases, left-overs --------------------------------------------------------------


def check_cuts(
    directory: Path, numbers: list[int], node_id: str, records: NodeRecords | None, report: Report
) -> frozenset[str] | None:
    """Check cuts with their files, newest first, and return the paths of all files that are named.

    None when nobody knows them, as a cut is missing or cannot be read. `records` are None when the
    log beside them could not be asked. Retention may take cuts meanwhile.
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
            continue  # retention took it since it was listed
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
                    # Retention removes files of a dropped collection before their cut, and those of
                    # a cut after it.
                    is_kept = (directory / manifest_path(number)).exists()
                    if file.collection_id in living_ids and is_kept:
                        report.damage(
                            file.path,
                            f"cut {number} names it ({file.rows} rows) and it is not there",
                        )
                    continue
                check_file(file.path, file, length, checksum)
                report.count("segments" if isinstance(file, SegmentFile) else "delete files")
                report.count("rows", file.rows)
        after = cut
    return frozenset(named) if all_known else None


def _are_all_there(numbers: list[int], records: NodeRecords, report: Report) -> bool:
    """Whether no cut is missing from the earliest that retention kept to the newest that the log
    knows.
    """
    newest = max([*numbers[-1:], records.checkpoint.cut_number])
    first = records.first_kept
    edges = [first - 1, *(number for number in numbers if number >= first), newest + 1]
    gaps = [(low + 1, high - 1) for low, high in pairwise(edges) if high > low + 1]
    for low, high in gaps:
        others = f" with those up to cut {high}" if high > low else ""
        report.damage(manifest_path(low), f"is missing{others}, and retention did not take it")
    return not gaps


def _check_place(cut: Cut, after: Cut | None, checkpoint: Checkpoint, report: Report) -> None:
    """Check that a cut is the one which the next one follows, and which the log knows."""
    place = manifest_path(cut.number)
    if after is not None and after.number == cut.number + 1 and after.previous != cut.mark:
        detail = (
            f"is not the cut that cut {after.number} follows: one of them is of another history"
        )
        report.damage(place, detail, TOGETHER)
    if checkpoint.cut_number == cut.number and checkpoint.manifest_crc32c != cut.crc32c:
        report.damage(place, "is not the cut that the log knows", TOGETHER)


def check_leases(directory: Path, node_id: str, report: Report) -> list[Lease]:
    """Look at what tables say they have taken, and return the leases that can be read.

    One ahead of the node is damage: its table took cuts that the node never made, so the node is an
    older copy.
    """
    leases: list[Lease] = []
    try:
        found = list(lease_files(NodeDirectory(directory)))
    except Corrupt:
        report.warn(
            LEASES,
            "is a link, and holds all retention",
            "put the directory that it leads to in its place",
        )
        return []
    for place, lease in found:
        if isinstance(lease, str):
            report.warn(
                place, f"does not decode, and holds all retention until it does: {lease}", _INGEST
            )
            continue
        leases.append(lease)
        # listed after the lease, which may be of a cut just made
        newest = max(cut_numbers(directory), default=0)
        if lease_path(directory, Path(lease.table)).name != Path(place).name:
            report.warn(place, f"is of table {lease.table}: it was swapped or copied", _INGEST)
        if node_id and lease.node_id != node_id:
            report.warn(place, f"is of node {lease.node_id}; it holds nothing here", "move it away")
        elif lease.cut > newest:
            taken = f"table {lease.table} has taken cut {lease.cut}, the node's newest is {newest}"
            step = "restore a newer backup, or move the table away and ingest again"
            report.damage(place, f"{taken}: the node is an older copy", step)
    return leases


def check_strays(directory: Path, named: frozenset[str] | None, report: Report) -> None:
    """Look for what is not of the node; `named` are the files that cuts name, None when nobody
    knows them.
    """
    node = NodeDirectory(directory)
    places = [path.name for path in sorted(directory.iterdir()) if not _OURS.fullmatch(path.name)]
    for top in (CUTS, LEASES, *(DATA if named is not None else ())):
        # a link in its place, which every file that is named in it has told
        with suppress(Corrupt):
            places += [path for path in node.files(top) if not _OURS_BELOW.fullmatch(path)]
    step = "nothing to do if the node wrote it: it removes that when it starts; else move it away"
    for place in places:
        if named is None or place not in named:
            report.warn(
                place, "nothing names it: a crash left it there, or somebody else put it", step
            )
