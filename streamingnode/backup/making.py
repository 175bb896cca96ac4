"""Making a backup: from a node that runs, or from a directory that nobody owns.

In: a database that no longer changes (linked by the running node, or simply closed), and the node directory around it. Out:
a directory with the database, the cuts its checkpoint knows and all their files, leases, a floor file, and the record of it
all, which was verified by a full scan before it got its name.

Consistent without holding anything up: the database comes first and says which cut is its newest; cuts up to that one never
change. Retention may take the oldest of them meanwhile, manifest first: such a cut is left out, and all before it.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from flusher.checkpoint import Checkpoint
from flusher.cut_log import CUTS, cut_numbers, living, manifest_path, read_cut
from flusher.directory import NodeDirectory
from flusher.retention import LEASE_BYTES_MAX, LEASES
from streamingnode.backup.copied_bytes import copy_file
from streamingnode.backup.target import Target
from streamingnode.inspection.backup_record import RECORD_FORMAT, BackupRecord, CopiedFile, encode_record
from streamingnode.inspection.node_records import read_node_records
from streamingnode.verification.finding import Report, Severity
from streamingnode.verification.walk import walk_directory
from wal.codec import crc32c
from wal.errors import Corrupt, Truncated
from wal.files import disk_errors_typed, place_beneath, read_regular, write_file
from wal.rocks.floor import FLOOR_NAME, Floor, write_floor
from wal.rocks.layout import DATABASE_NAME
from wal.rocks.opening import BACKUP_RECORD_NAME

_NOT_COPIED = ("LOCK", "LOG")
"""RocksDB's lock and its own notes: no part of the data."""


class BackupResult(msgspec.Struct, frozen=True, kw_only=True):
    """A backup that was verified: everything acknowledged up to `tick` is in it; `cut` is the newest cut in it."""

    path: str
    node_id: str
    tick: int
    cut: int
    files: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupSource:
    """What is copied: `database` is a directory that holds `log`, unchanging, and leases that were read before it was made.

    So was `floor`.
    With `cuts_ahead` the cut after the checkpoint's is taken too: of a node nobody owns it is whole.
    """

    directory: Path
    database: Path
    floor: Floor
    cuts_ahead: int
    now_ms: int


OnStep = Callable[[str, int], None]
"""Told of each step: what is done, and of how many bytes. What it raises ends the work."""


def make_backup(source: BackupSource, target: Target, on_step: OnStep) -> BackupResult:
    """Copy, verify and publish, and return what was made. Blocks.

    Raises `Corrupt` when the copy is not sound, `StorageFailed` when the disk fails. The caller discards the target then.
    """
    building = target.building
    with disk_errors_typed(building):
        files: list[CopiedFile] = []
        records = read_node_records(source.database)
        checkpoints = list(records.checkpoints.values())
        newest = max((checkpoint.cut_number for checkpoint in checkpoints), default=0) + source.cuts_ahead
        _copy_all(source, building, newest, files, partial(on_step, "copy"))
        floor = msgspec.structs.replace(
            source.floor,
            generation=0,
            term=max(source.floor.term, records.survey.term),
            meta_version=records.survey.meta_version,
            positions=dict(records.survey.last_positions),
        )
        write_floor(building, floor)
        content = read_regular(building / FLOOR_NAME)
        files.append(CopiedFile(path=FLOOR_NAME, bytes=len(content), crc32c=crc32c(content)))
        check_copy(building, on_step)
        record = _record(source, records.survey.node_id, floor, checkpoints, files, building)
        write_file(building / BACKUP_RECORD_NAME, encode_record(record), exclusive=True)
        target.publish()
    return BackupResult(
        path=str(target.path),
        node_id=record.node_id,
        tick=record.tick,
        cut=record.cut,
        files=len(files),
        bytes=record.bytes,
    )


def check_copy(building: Path, on_step: OnStep) -> None:
    """Read everything back. Raises `Corrupt` naming the first thing that is not sound."""
    report = Report()
    for part in walk_directory(building, report, tables=None):
        for step in part.steps:
            on_step("verify", step)
    damage = [finding for finding in report.findings if finding.severity is Severity.DAMAGE]
    if damage:
        first, more = damage[0], len(damage) - 1
        others = f" (and {more} more)" if more else ""
        raise Corrupt(
            f"the copy is not sound, so it was given up: {first.place}: {first.detail}{others} — verify the original"
        )


def _copy_all(
    source: BackupSource, building: Path, newest: int, files: list[CopiedFile], on_bytes: Callable[[int], None]
) -> None:
    def copy(path: Path, name: str, bytes_max: int | None = None) -> None:
        files.append(copy_file(path, building, name, on_bytes, bytes_max=bytes_max))

    for path in sorted((source.database / DATABASE_NAME).iterdir()):
        if path.is_file() and not path.name.startswith(_NOT_COPIED):
            copy(path, f"{DATABASE_NAME}/{path.name}")
    numbers = [number for number in cut_numbers(source.directory) if number <= newest]
    here = living(read_cut(NodeDirectory(source.directory), numbers[-1]).manifest) if numbers else frozenset()
    for number in numbers:
        copied = _copy_cut(source.directory, building, number, here, on_bytes)
        if copied is None:
            files[:] = [file for file in files if file.path.startswith(f"{DATABASE_NAME}/")]
            _drop_cuts(building)
        else:
            files += copied
    for path in sorted((source.database / LEASES).glob("*.json")):
        copy(path, f"{LEASES}/{path.name}", LEASE_BYTES_MAX)


def _copy_cut(
    directory: Path, building: Path, number: int, here: frozenset[int], on_bytes: Callable[[int], None]
) -> list[CopiedFile] | None:
    """Copy one cut with its files; None when retention takes it meanwhile.

    Those of collections that are not `here`, at the newest cut, may be gone; a table may wait for those that are not.
    """
    place = manifest_path(number)
    try:
        manifest = read_cut(NodeDirectory(directory), number).manifest
        copied = [copy_file(directory / place, building, place, on_bytes)]
        for file in (*manifest.segments, *manifest.deletes):
            path = place_beneath(directory, file.path)
            if file.collection_id in here or path.exists():
                copied.append(copy_file(path, building, file.path, on_bytes, bytes_max=file.bytes))
    except Truncated:
        return None
    except FileNotFoundError as error:
        if (directory / place).exists():
            raise Corrupt(
                f"cut {number} names {error.filename}, which is not there — verify the original: streamingnode verify"
            ) from error
        return None
    return copied


def _drop_cuts(building: Path) -> None:
    """Give up the cuts copied so far: retention took a later one, so it had taken these."""
    for name in (CUTS, "segments", "deletes"):
        shutil.rmtree(building / name, ignore_errors=True)


def _record(
    source: BackupSource,
    node_id: str,
    floor: Floor,
    checkpoints: list[Checkpoint],
    files: list[CopiedFile],
    building: Path,
) -> BackupRecord:
    return BackupRecord(
        format=RECORD_FORMAT,
        node_id=node_id,
        term=floor.term,
        tick=max([floor.tick, *(checkpoint.tick for checkpoint in checkpoints)]),
        cut=max(cut_numbers(building), default=0),
        made_ms=source.now_ms,
        files=tuple(files),
    )
