"""The whole walk over a node directory that nobody owns: in which order, and what each part tells the next. Blocks.

A walk is an iterator of bytes read: whoever drives it decides about pace, progress and end. `verify_directory` drives one as
fast as the disk goes, unless its `on_step` takes its time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flusher.checkpoint import NO_CHECKPOINT
from flusher.cuts import FIRST_CUT
from streamingnode.inspection.node_files import check_node
from streamingnode.verification.backup_walk import walk_backup
from streamingnode.verification.creation_check import is_unfinished_creation, warn_of_unfinished
from streamingnode.verification.cut_walk import CutExpectation, walk_cuts
from streamingnode.verification.database_walk import DatabaseFacts, walk_database
from streamingnode.verification.finding import Report
from streamingnode.verification.floor_check import check_floor
from streamingnode.verification.stray_check import check_leases, check_strays
from wal.errors import InvalidArgument
from wal.files import DirectoryLock
from wal.rocks.floor import FLOOR_NAME
from wal.rocks.opening import BACKUP_RECORD_NAME

PCHANNEL = "p0"

OnStep = Callable[[str, int], None]
"""Told the part that is looked at, and the bytes read of it since the last call."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a walk: its name, and its steps."""

    name: str
    steps: Iterator[int]


def verify_directory(directory: Path, *, tables: Path | None = None, on_step: OnStep | None = None) -> Report:
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


def verify_unlocked(directory: Path, *, tables: Path | None = None, on_step: OnStep | None = None) -> Report:
    """As `verify_directory`, for a directory the caller owns already, or nobody else knows of."""
    report = Report()
    for part in walk_directory(directory, report, tables=tables):
        for read_bytes in part.steps:
            report.bytes += read_bytes
            if on_step is not None:
                on_step(part.name, read_bytes)
    return report


def walk_directory(directory: Path, report: Report, *, tables: Path | None) -> Iterator[Part]:
    """Yield the parts of the walk; each is to be walked to its end before the next is asked for."""
    if (directory / BACKUP_RECORD_NAME).exists():
        yield Part("backup", walk_backup(directory, report))
    facts = DatabaseFacts()
    if is_unfinished_creation(directory):
        floor = check_floor(directory, report) if (directory / FLOOR_NAME).exists() else None
        warn_of_unfinished(report)
    else:
        floor = check_floor(directory, report)
        yield Part("log", walk_database(directory, floor, facts, report))
    node_id = facts.node_id or ("" if floor is None else floor.node_id)
    yield Part("cuts", walk_cuts(directory, _expected_cuts(facts, node_id), report))
    check_leases(directory, node_id, report)
    check_strays(directory, report)
    if tables is not None:
        yield Part("tables", walk_tables_of(directory, tables, node_id, report))


def _expected_cuts(facts: DatabaseFacts, node_id: str) -> CutExpectation:
    if not facts.opened:
        return CutExpectation(node_id=node_id, checkpoint=None)
    return CutExpectation(
        node_id=node_id,
        checkpoint=facts.checkpoints.get(PCHANNEL, NO_CHECKPOINT),
        last_tick=facts.last_ticks.get(PCHANNEL),
        first_kept=facts.first_kept.get(PCHANNEL, FIRST_CUT),
    )


def walk_tables_of(directory: Path, tables: Path, node_id: str, report: Report) -> Iterator[int]:
    """Walk the tables; their library is needed only here."""
    from streamingnode.verification.table_walk import walk_tables

    return walk_tables(directory, tables, node_id, report)
