"""Reads a directory without owning it: a node's files, the process that has it open, a backup's
record.

Only reads files: opens no node and changes nothing. A running node continues meanwhile, so two
results may be of two moments. Blocks.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from flusher.cuts import read_leases
from flusher.directory import CutLog, living
from flusher.manifest import checked_document
from wal.codec import decode_versioned
from wal.errors import AlreadyOwned, Corrupt, InvalidArgument
from wal.files import LOCK_NAME, disk_errors_typed, open_regular, read_owner, read_regular
from wal.rocks.floor import BACKUP_RECORD_NAME, FLOOR_NAME, Floor, read_floor
from wal.rocks.layout import DATABASE_NAME


def is_node(directory: Path) -> bool:
    """Whether the directory holds a node."""
    return (directory / FLOOR_NAME).is_file() or (directory / DATABASE_NAME / "CURRENT").is_file()


def is_vacant(directory: Path) -> bool:
    """Whether a new node may be made here: the directory does not exist, or is empty. Raises
    `StorageFailed`.
    """
    with disk_errors_typed(directory):
        return not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))


def check_node(directory: Path) -> Path:
    """Return `directory` if it holds a node, else raise `InvalidArgument`: a mistyped name must not
    create a new node.
    """
    with disk_errors_typed(directory):
        if is_node(directory):
            return directory
    what = (
        "is no node directory"
        if directory.is_dir()
        else "is a file"
        if directory.exists()
        else "does not exist"
    )
    raise InvalidArgument(
        f"{directory} {what} — name the directory a node was opened with; `streamingnode "
        "collection create` makes a new node"
    )


def floor_of(directory: Path) -> Floor:
    """Return the floor in a node's floor file. Raises `Corrupt`, also when the file is missing,
    `UnsupportedFormat`, `OSError`.
    """
    floor = read_floor(directory)
    if floor is None:
        raise Corrupt(f"{directory} has a database and no floor file — restore it from a backup")
    return floor


def holder(directory: Path) -> int | None:
    """Return the id of the process that has a node open, 0 when the id is unknown, None when no
    process has.
    """
    try:
        check_free(directory)
    except AlreadyOwned as owned:
        return owned.pid or 0
    return None


def check_free(directory: Path) -> None:
    """Raise `AlreadyOwned` if a process owns the node, and `StorageFailed` when that cannot be
    determined.

    The check holds a shared lock for some microseconds; opening the node in that moment fails and
    may be tried again.
    """
    with disk_errors_typed(directory), suppress(FileNotFoundError):
        descriptor = open_regular(directory / LOCK_NAME)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, is_brief = read_owner(descriptor)
            raise AlreadyOwned(str(directory), pid, brief=is_brief) from None
        finally:
            os.close(descriptor)


@contextmanager
def kept_closed(directory: Path) -> Iterator[None]:
    """Keep a node from being opened while the block reads it. Changes nothing, not even the process
    id in the lock file.

    Raises `AlreadyOwned`.
    """
    with ExitStack() as held:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        held.callback(os.close, descriptor)
        try:
            # an owner locks the directory as well
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owned = AlreadyOwned(str(directory), holder(directory) or None)
            owned.args = (
                f"{owned.happened} — stop that process, or make a backup, and read that instead",
            )
            raise owned from None
        # closing is not enough: see `DirectoryLock`
        held.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
        yield


def cut_holders(cuts: CutLog) -> list[str]:
    """Return the reasons why a node keeps cuts beyond the minimum retention: collections without a
    table, and lagging tables.
    """
    if not cuts.numbers:
        return []
    newest = cuts.read(cuts.newest).manifest
    leases = read_leases(cuts.directory, node_id=newest.node_id)
    waited_for = living(newest) - {lease.collection_id for lease in leases}
    without_table = [each.name for each in newest.collections if each.collection_id in waited_for]
    behind = [
        f"table {lease.table} at cut {lease.cut}" for lease in leases if lease.cut < newest.number
    ]
    return [f"collection {name}, which has no table" for name in without_table] + behind


# --- a backup's record ----------------------------------------------------------------------------
# Two lines as in a cut manifest: a JSON document and its CRC32C. The record is written last, so a
# backup without it is unfinished. Its presence prevents opening the backup as a node, which would
# change it. `docs/format.md`, section "Backup".

RECORD_FORMAT = 1


class CopiedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file; `path` is relative to the backup."""

    path: str
    bytes: int
    crc32c: int


class BackupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One backup: everything that node `node_id` acknowledged up to `tick`; `cut` is the newest cut
    in it.

    `made_ms` is Unix time in milliseconds. All files were read back and found sound.
    """

    format: int = RECORD_FORMAT
    node_id: str
    term: int
    tick: int
    cut: int
    made_ms: int
    files: tuple[CopiedFile, ...]


def read_record(backup: Path) -> BackupRecord:
    """Return the record of a backup.

    Raises `InvalidArgument` for a directory that is not a backup, `Corrupt`, `UnsupportedFormat`
    for a backup of a newer release.
    """
    path = backup / BACKUP_RECORD_NAME
    try:
        document = checked_document(
            read_regular(path), str(path), step="restore from another backup"
        )
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidArgument(
            f"{backup} is not a finished backup — name a directory that `backup` made"
        ) from None
    record = decode_versioned(
        document, BackupRecord, RECORD_FORMAT, str(path), decode=msgspec.json.decode
    )
    for file in record.files:
        if file.path.startswith("/") or ".." in file.path.split("/"):
            raise Corrupt(
                f"{path} names {file.path!r}, which is outside of it — restore from another backup"
            )
    return record
