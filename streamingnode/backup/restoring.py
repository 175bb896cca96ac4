"""A node out of a backup: every file checked on the way, the whole verified, and a life of its own from the first tick.

The restored node keeps its id, so that it goes on with its tables where they are not ahead of it. Its term jumps: whatever
the original did after the backup, no owner of one history can be taken for an owner of the other. A table that took cuts of
the original after the backup is refused by the ingest and named by `verify --tables`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from streamingnode.backup.copied_bytes import copy_file
from streamingnode.backup.making import OnStep, check_copy
from streamingnode.backup.target import Target
from streamingnode.inspection.backup_record import BackupRecord, CopiedFile, decode_record
from wal.errors import Corrupt, InvalidArgument
from wal.files import disk_errors_typed, read_regular
from wal.rocks.floor import read_floor, write_floor
from wal.rocks.opening import BACKUP_RECORD_NAME

RESTORE_TERM_STEP = 1 << 16
"""Terms are counted up once for each owner; a restored node starts at the next multiple of this, which no owner before it
came near. Terms stay below 2^31 for 32,767 restores of restores."""


class RestoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """A node made from a backup: it holds what was acknowledged up to `tick`, and its next owner has a term above `term`."""

    path: str
    node_id: str
    term: int
    tick: int
    cut: int
    files: int
    bytes: int


def read_record(backup: Path) -> BackupRecord:
    """Return what a backup says about itself. Raises `InvalidArgument` for a directory that is none, `Corrupt`."""
    path = backup / BACKUP_RECORD_NAME
    try:
        return decode_record(read_regular(path), name=str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidArgument(f"{backup} is no finished backup — name a directory that `backup` made") from None


def make_restore(backup: Path, record: BackupRecord, target: Target, on_step: OnStep) -> RestoreResult:
    """Copy, verify and publish, and return what was made. Blocks.

    Raises `Corrupt` naming the file that is not what the backup says, `StorageFailed` when the disk fails. The caller
    discards the target then.
    """
    building = target.building
    with disk_errors_typed(building):
        for file in record.files:
            _copy_checked(backup, building, file, partial(on_step, "copy"))
        floor = read_floor(building)
        if floor is None or floor.node_id != record.node_id:
            raise Corrupt(f"{backup} has no floor file of node {record.node_id} — restore from another backup")
        term = (floor.term // RESTORE_TERM_STEP + 1) * RESTORE_TERM_STEP
        write_floor(building, msgspec.structs.replace(floor, term=term, tick=max(floor.tick, record.tick)))
        check_copy(building, on_step)
        target.publish()
    return RestoreResult(
        path=str(target.path),
        node_id=record.node_id,
        term=term,
        tick=record.tick,
        cut=record.cut,
        files=len(record.files),
        bytes=record.bytes,
    )


def _copy_checked(backup: Path, building: Path, file: CopiedFile, on_bytes: Callable[[int], None]) -> None:
    try:
        copied = copy_file(backup / file.path, building, file.path, on_bytes, bytes_max=file.bytes)
    except FileNotFoundError:
        raise Corrupt(f"{backup} lacks {file.path} — restore from another backup") from None
    if copied.bytes != file.bytes:
        raise Corrupt(
            f"{backup / file.path} has {copied.bytes} bytes, the backup had {file.bytes} — restore from another backup"
        )
    if copied.crc32c != file.crc32c:
        raise Corrupt(f"{backup / file.path} fails its checksum — restore from another backup")
