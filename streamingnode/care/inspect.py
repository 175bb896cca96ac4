"""What a directory says about itself to somebody who does not own it: a node's files, who has it, a
backup's record.

Files are read, nothing is opened or changed. A running node goes on meanwhile, so two answers may
be of two moments. Blocks.
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


def check_node(directory: Path) -> Path:
    """Return `directory` if it holds a node. Raises `InvalidArgument`; a name mistyped must not
    make a new node.
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
    raise InvalidArgument(f"{directory} {what} — name the directory a node was opened with")


def floor_of(directory: Path) -> Floor:
    """Return what a node's floor file says. Raises `Corrupt`, also when it is gone,
    `UnsupportedFormat`, `OSError`.
    """
    floor = read_floor(directory)
    if floor is None:
        raise Corrupt(f"{directory} has a database and no floor file — restore it from a backup")
    return floor


def holder(directory: Path) -> int | None:
    """Return the process that has a node open, 0 when it did not say which one it is, None when
    nobody has.
    """
    try:
        check_free(directory)
    except AlreadyOwned as owned:
        return owned.pid or 0
    return None


def check_free(directory: Path) -> None:
    """Return if nobody owns the node. Raises `AlreadyOwned`, and `StorageFailed` when nobody can
    tell.

    The question takes the lock for some microseconds, shared; an opener in just that moment is
    refused and may try again.
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
    """Keep a node from being opened while the block reads it; changes nothing, not even the pid in
    its lock file.

    Raises `AlreadyOwned`.
    """
    with ExitStack() as held:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        held.callback(os.close, descriptor)
        try:
            # an owner has the directory locked as well
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
    """Return for whom a node keeps its cuts past the minimum retention: collections without a
    table, tables that lag.
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
#
# Two lines as in a cut manifest: a JSON document and its CRC32C. It is written last, so a backup
# without it is not finished. Its presence keeps a node from being opened in the backup, which would
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

    `made_ms` is Unix time. All that is in it was read back and found sound.
    """

    format: int = RECORD_FORMAT
    node_id: str
    term: int
    tick: int
    cut: int
    made_ms: int
    files: tuple[CopiedFile, ...]


def read_record(backup: Path) -> BackupRecord:
    """Return what a backup says about itself.

    Raises `InvalidArgument` for a directory that is none, `Corrupt`, `UnsupportedFormat` for one of
    a newer release.
    """
    path = backup / BACKUP_RECORD_NAME
    try:
        document = checked_document(
            read_regular(path), str(path), step="restore from another backup"
        )
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidArgument(
            f"{backup} is no finished backup — name a directory that `backup` made"
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
