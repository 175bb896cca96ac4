"""Opening a node directory: own it, create what is missing, verify it without changes, open the
database, take the term. Blocks.

The steps from verifying on also reopen a database after a failed write.
"""

import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rocksdict import Rdict

from wal.errors import Corrupt, InvalidArgument, StorageFailed, UnsupportedFormat
from wal.failpoint import failpoint
from wal.files import (
    BRIEF,
    LOCK_NAME,
    DirectoryLock,
    disk_errors_typed,
    make_directory,
    read_regular,
    sync_directory,
)
from wal.rocks.database import classified, open_rocksdb, refuse_after_fork, same_settings
from wal.rocks.floor import (
    BACKUP_RECORD_NAME,
    FLOOR_BYTES,
    FLOOR_NAME,
    FLOOR_TEMPORARY_NAME,
    Floor,
    FloorFile,
    is_begun_floor,
    read_floor,
    write_floor,
)
from wal.rocks.layout import DATABASE_NAME, DURABILITY_KEY, TERM_KEY, RocksOptions, encode_number
from wal.rocks.log import last_position
from wal.rocks.recovery import (
    Survey,
    check_framing,
    drop_torn_end,
    recover,
    survey,
    torn_logs,
    torn_manifest,
    verify_database,
    verify_files,
    without_torn,
    write_facts,
)
from wal.rocks.space import SpaceWatch

TEMPORARY_SUFFIX = ".tmp"
NAMED_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedDirectory:
    """The resources of a directory's owner, held across reopenings of the database."""

    directory: Path
    options: RocksOptions
    lock: DirectoryLock
    floor: FloorFile
    space: SpaceWatch

    def release(self) -> None:
        """Release the directory; idempotent. The caller closes the database first."""
        self.floor.close()
        self.lock.release()


def take_directory(
    directory: Path, options: RocksOptions, *, brief: bool = False
) -> tuple[OwnedDirectory, Rdict, Survey]:
    """Own a directory and open its database. Raises as `wal.rocks.store.open_rocks_store`, and then
    holds nothing.
    """
    refuse_after_fork(directory)  # before anything is created or locked
    with disk_errors_typed(directory):
        if directory.exists() and not directory.is_dir():
            raise InvalidArgument(f"{directory} is a file — name a directory")
        make_directory(directory)
    failpoint("recovery.directory_made")
    with classified(directory), ExitStack() as undo:
        check_place(directory)  # before anything is written there, the lock included
        lock = DirectoryLock(directory, brief=brief)
        undo.callback(lock.release)
        failpoint("recovery.directory_locked")
        # again under the lock, which keeps other processes from creating a node here
        check_place(directory)
        if not (directory / DATABASE_NAME).exists():
            create_database(directory, options, uuid.uuid4().hex)
        failpoint("recovery.database_prepared")
        floor = FloorFile(directory)
        undo.callback(floor.close)
        space = SpaceWatch(directory, free_bytes_min=options.free_bytes_min)
        owned = OwnedDirectory(
            directory=directory, options=options, lock=lock, floor=floor, space=space
        )
        database, found = open_owned(owned)
        undo.pop_all()
    return owned, database, found


def open_owned(owned: OwnedDirectory, *, term_is_spent: bool = True) -> tuple[Rdict, Survey]:
    """Verify the database of an owned directory, open it and take the term. Returns the database
    and the survey of its content.

    Raises as `take_directory`, and `ChannelFenced`. After a failed write it opens under the token's
    term again, unless a write was acknowledged in that term (`term_is_spent`). So a disk on which
    no opening succeeds does not use up terms.
    """
    directory = owned.directory
    options = owned.options
    floor = owned.floor
    path = directory / DATABASE_NAME
    is_first = not floor.token_term
    owned.space.make_room_to_start()
    # Raises for damage. Verification uses the floor in memory, which includes all acknowledged
    # writes.
    read_floor(directory)
    found = verify_database(path, options, floor.known)
    failpoint("recovery.verified")
    # The token is written before the database is opened for writing, and the floor is read again
    # after that. So this opening finds everything that another owner, which no lock kept out,
    # acknowledged before the token fenced it.
    if not is_first:
        # Verifying takes long: never overwrite the token of an owner that came meanwhile.
        floor.check_owner()
    floor.take_token(
        1 + max(found.term, floor.known.term) if is_first or term_is_spent else floor.token_term
    )
    failpoint("recovery.token_taken")
    if is_first:
        floor.reload()
    with classified(path):
        drop_torn_end(path)
    database = open_rocksdb(path, options, writable=True)
    try:
        with classified(path):
            found = recover(path, database, options, floor.known)
            failpoint("recovery.database_opened")
            _take_term(database, floor, found, options)
            owned.space.look()
    except BaseException:
        with suppress(Exception):  # raise the first error; RocksDB repeats it here
            database.close()
        raise
    return database, found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDatabase:
    """A database opened for reading and its survey. `torn` holds the last whole position of each
    log with a torn tail, by name; the next owner drops those tails.
    """

    database: Rdict
    found: Survey
    torn: Mapping[str, int]


def open_for_reading(
    directory: Path, floor: Floor | None, *, past_damage: bool = False
) -> ReadDatabase:
    """Open the database of a directory without changing anything, and check that it holds all that
    `floor` records; with None there is no check.

    With `past_damage` it also reads what follows damage in RocksDB's log, and a log whose end
    cannot be read ends at 0. With a floor the database must not change meanwhile.

    Raises `Corrupt` for damage or when there is no database, `StorageFailed` when the database
    cannot be read, `UnsupportedFormat`.
    """
    path = directory / DATABASE_NAME
    refuse_after_fork(path)
    check_may_read(directory)
    if not (path / "CURRENT").is_file():
        raise Corrupt(f"{path} holds no database — restore the node from a backup")
    options = RocksOptions()
    check_framing(path)
    with classified(path), same_settings(path):
        if floor is not None:
            _verify_for_reading(path, options, floor)
        database = open_rocksdb(path, options, past_damage=past_damage)
        try:
            ends = last_readable if past_damage else last_position
            found = survey(database, last_position=ends)
            torn = {} if floor is None else torn_logs(database, found, floor)
        except BaseException:
            database.close()
            raise
    return ReadDatabase(database=database, found=without_torn(found, torn), torn=torn)


def check_may_read(directory: Path) -> None:
    """Raise `StorageFailed` when the database's directory is not writable: rocksdict writes its
    settings there even to read.
    """
    path = directory / DATABASE_NAME
    if path.exists() and not os.access(path, os.W_OK):
        raise StorageFailed(
            f"{path} cannot be written, which reading requires — make it writable, or read a copy"
        )


def last_readable(entries: Rdict, log_id: int) -> int:
    """Return the last position of a log, 0 when its end cannot be read."""
    with suppress(Exception):  # rocksdict raises nothing more exact
        return last_position(entries, log_id)
    return 0


def _verify_for_reading(path: Path, options: RocksOptions, floor: Floor) -> None:
    try:
        verify_files(path, options, floor)
    except Corrupt as error:
        if not torn_manifest(path):
            raise
        raise Corrupt(
            f"{path} has a torn end, as a power cut leaves — open the node, which drops it, and "
            "close it; if that fails, restore the node from a backup"
        ) from error


def _take_term(database: Rdict, floor: FloorFile, found: Survey, options: RocksOptions) -> None:
    """Make the token's term durable in database and floor before anything happens under it."""
    if found.term != floor.token_term:
        database.put(DURABILITY_KEY, options.durability.encode())
        database.put(TERM_KEY, encode_number(floor.token_term))
        failpoint("recovery.term_written")
    database.flush_wal(sync=True)
    failpoint("recovery.term_synced")
    # Unacknowledged writes of a killed owner are now part of the log, and readers may see them.
    floor.record(found.last_positions, term=floor.token_term, meta=found.meta_version)
    failpoint("recovery.floor_recorded")
    floor.sync()
    failpoint("recovery.floor_synced")


def check_place(directory: Path) -> None:
    """Check that a directory holds a node or may get one: it is empty, or a creation was
    interrupted. Changes nothing.

    Raises `UnsupportedFormat` naming foreign content, `Corrupt` when the floor or the database of a
    node is missing, `InvalidArgument` for a backup, `OSError`.
    """
    names = set(os.listdir(directory)) - {"lost+found"}  # noqa: PTH208 - names are all we need
    if BACKUP_RECORD_NAME in names:
        raise InvalidArgument(
            f"{directory} is a backup — run: streamingnode restore {directory} <new directory>"
        )
    floor = read_floor(directory)
    database = directory / DATABASE_NAME
    if database.exists():
        if floor is None and not (database / "CURRENT").exists():
            raise UnsupportedFormat(
                f"{directory} holds a {DATABASE_NAME} that is not a node's — choose another "
                "directory"
            )
        if floor is None:
            raise Corrupt(
                f"{directory} has a database and no floor file — restore it from a backup"
            )
    elif floor is not None and floor.term:
        raise Corrupt(f"{directory} has a floor file and no database — restore it from a backup")
    elif strangers := sorted(
        name for name in names if not _is_of_creation(directory, name, begun=floor is not None)
    ):
        named = ", ".join(map(repr, strangers[:NAMED_MAX])) + (
            " and more" if len(strangers) > NAMED_MAX else ""
        )
        raise UnsupportedFormat(
            f"{directory} holds {named} and no node — choose a new or an empty directory"
        )


def _is_of_creation(directory: Path, name: str, *, begun: bool) -> bool:
    """Whether an interrupted creation of a node leaves this file; with `begun` there is a floor
    without a term.
    """
    if name not in {LOCK_NAME, FLOOR_TEMPORARY_NAME}:
        return begun and name in {FLOOR_NAME, DATABASE_NAME + TEMPORARY_SUFFIX}
    try:
        content = read_regular(directory / name, bytes_max=FLOOR_BYTES)
    except FileNotFoundError:  # another process that creates a node here has moved on
        return True
    except Corrupt:
        return False
    if name == FLOOR_TEMPORARY_NAME:
        return is_begun_floor(content)
    return not content.replace(BRIEF.encode(), b"").strip(
        b"0123456789\n\0"
    )  # a power cut may leave zeros in place of the process id


def create_database(directory: Path, options: RocksOptions, node_id: str) -> None:
    """Create a node, each step synced: the floor, the database under a temporary name, the database
    under its own name.

    A crash before the last step leaves a floor without a term, and at most a temporary database.
    The floor carries a magic number and a checksum, so the next open recognizes it and starts
    again. Once the floor has a term, either of the two alone is damage.
    """
    write_floor(directory, Floor(node_id=node_id))
    failpoint("recovery.floor_created")
    sync_directory(directory)
    path = directory / (DATABASE_NAME + TEMPORARY_SUFFIX)
    # our floor exists, so this is from an interrupted creation
    shutil.rmtree(path, ignore_errors=True)
    database = open_rocksdb(path, options, writable=True, create=True)
    write_facts(database, node_id)
    failpoint("recovery.facts_written")
    database.flush_wal(sync=True)
    database.close()
    sync_directory(path)
    failpoint("recovery.database_created")
    path.rename(directory / DATABASE_NAME)
    failpoint("recovery.database_renamed")
    sync_directory(directory)
