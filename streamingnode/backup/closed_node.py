"""Backup and restore of directories nobody has open, as the command line does them. Blocks."""

import time
from pathlib import Path

from streamingnode.backup.making import BackupResult, BackupSource, OnStep, make_backup
from streamingnode.backup.restoring import RestoreResult, make_restore, read_record
from streamingnode.backup.target import Target
from streamingnode.inspection.node_files import check_node
from wal.errors import Corrupt, InvalidArgument
from wal.files import DirectoryLock, disk_errors_typed
from wal.rocks.floor import read_floor
from wal.rocks.opening import BACKUP_RECORD_NAME


def _told_nobody(_part: str, _done: int) -> None:
    """Take no note of a step."""


def backup_directory(directory: Path, target: Path, *, on_step: OnStep = _told_nobody) -> BackupResult:
    """Copy a node that no process has open into a new directory, and verify the copy.

    Raises `InvalidArgument` when it is no node or the target lies in it, `AlreadyOwned` while it runs, `AlreadyExists` for a
    target in use, `Corrupt` when the node is not sound, `StorageFailed`. Nothing is at `target` then.
    """
    with disk_errors_typed(directory):
        is_backup = (check_node(directory) / BACKUP_RECORD_NAME).exists()
    if is_backup:
        raise InvalidArgument(f"{directory} is a backup already — copy it with any tool")
    lock = DirectoryLock(directory)
    try:
        floor = read_floor(directory)
        if floor is None:
            raise Corrupt(f"{directory} has a database and no floor file — run: streamingnode verify {directory}")
        source = BackupSource(
            directory=directory,
            database=directory,
            floor=floor,
            cuts_ahead=1,
            now_ms=time.time_ns() // 1_000_000,
        )
        building = Target(target, directory)
        try:
            return make_backup(source, building, on_step)
        finally:
            building.discard()
    finally:
        lock.release()


def restore_directory(backup: Path, target: Path, *, on_step: OnStep = _told_nobody) -> RestoreResult:
    """Make a node in a new directory from a backup, and verify it.

    Raises `InvalidArgument` when it is no backup or the target lies in it, `AlreadyExists` for a target that is not empty,
    `Corrupt` naming what is not as the backup says, `StorageFailed`. Nothing is at `target` then.
    """
    with disk_errors_typed(backup):
        record = read_record(backup)
    building = Target(target, backup)
    try:
        return make_restore(backup, record, building, on_step)
    finally:
        building.discard()
