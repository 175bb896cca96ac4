"""Opening a node directory: own it, make what is missing, verify without changing anything, open
it, take the term. Blocks.

The same steps from verifying on bring a database back after a failed write.
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
    """What an owner holds for as long as it owns the directory, whichever database is open."""

    directory: Path
    options: RocksOptions
    lock: DirectoryLock
    floor: FloorFile
    space: SpaceWatch

    def release(self) -> None:
        """Give the directory up; idempotent. The database is closed before."""
        self.floor.close()
        self.lock.release()


def take_directory(
    directory: Path, options: RocksOptions, *, brief: bool = False
) -> tuple[OwnedDirectory, Rdict, Survey]:
    """Own a directory and open its database. Raises as `wal.rocks.store.open_rocks_store`; nothing
    is held then.
    """
    refuse_after_fork(directory)  # before anything is made or locked
    with disk_errors_typed(directory):
        if directory.exists() and not directory.is_dir():
            raise InvalidArgument(f"{directory} is a file — name a directory")
        make_directory(directory)
    failpoint("recovery.directory_made")
    with classified(directory), ExitStack() as undo:
        check_place(directory)  # before anything is put there, the lock included
        lock = DirectoryLock(directory, brief=brief)
        undo.callback(lock.release)
        failpoint("recovery.directory_locked")
        check_place(directory)  # once more, now that nobody else makes a node here
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
    """Verify the database of an owned directory, open it and take the term; return it with what was
    found in it.

    Raises as `take_directory`, and `ChannelFenced`. After a failed write it opens under the term of
    the token, until something was acknowledged in that (`term_is_spent`): so a disk on which no
    term gets that far does not use them up.
    """
    directory = owned.directory
    options = owned.options
    floor = owned.floor
    path = directory / DATABASE_NAME
    is_first = not floor.token_term
    owned.space.make_room_to_start()
    # Raises for damage; what counts is the floor in memory, which knows all that was acknowledged.
    read_floor(directory)
    found = verify_database(path, options, floor.known)
    failpoint("recovery.verified")
    # The token is written before the database is opened for good, and the floor read once more: so
    # everything is found that an owner which no lock kept out had acknowledged before it was
    # fenced.
    if not is_first:
        # Verifying takes long: the token of an owner that came meanwhile is not to be written over.
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
        with suppress(Exception):  # the first error is the one that counts; RocksDB repeats it here
            database.close()
        raise
    return database, found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDatabase:
    """A database that was opened for reading: what is in it, and where logs end that have a torn
    tail, which the next owner drops, by name.
    """

    database: Rdict
    found: Survey
    torn: Mapping[str, int]


def open_for_reading(
    directory: Path, floor: Floor | None, *, past_damage: bool = False
) -> ReadDatabase:
    """Open the database of a directory without changing anything, and check that it holds what
    `floor` says; None compares it with nothing.

    With `past_damage` what is behind damage in RocksDB's log is read, too, and a log whose end
    cannot be read ends at 0. With a floor the database must not change meanwhile. Raises `Corrupt`,
    also when there is no database, `StorageFailed` when it cannot be read, `UnsupportedFormat`.
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
    """Raise `StorageFailed` where the database cannot be written: rocksdict writes its settings
    there, also to read.
    """
    path = directory / DATABASE_NAME
    if path.exists() and not os.access(path, os.W_OK):
        raise StorageFailed(
            f"{path} cannot be written, which reading it takes — make it writable, or read a copy"
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
            f"{path} ends with what a power cut tore — open the node, which drops that, and close "
            "it; if it refuses, restore the node from a backup"
        ) from error


def _take_term(database: Rdict, floor: FloorFile, found: Survey, options: RocksOptions) -> None:
    """Make the token's term durable in both places before anything is done under it."""
    if found.term != floor.token_term:
        database.put(DURABILITY_KEY, options.durability.encode())
        database.put(TERM_KEY, encode_number(floor.token_term))
        failpoint("recovery.term_written")
    database.flush_wal(sync=True)
    failpoint("recovery.term_synced")
    # What a killed owner wrote without acknowledging is part of the log now, and readers may see
    # it.
    floor.record(found.last_positions, term=floor.token_term, meta=found.meta_version)
    failpoint("recovery.floor_recorded")
    floor.sync()
    failpoint("recovery.floor_synced")


def check_place(directory: Path) -> None:
    """Return if a node is here, or may be made: the directory is new or empty, or a making was cut
    off. Changes nothing.

    Raises `UnsupportedFormat` naming what is there when that is something else, `Corrupt` when half
    of a node is missing, `InvalidArgument` for a backup, `OSError`.
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
                f"{directory} holds a {DATABASE_NAME} that is no node's — choose another directory"
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
    """Whether the making of a node that was cut off leaves this; with `begun` there is a floor that
    has seen nothing.
    """
    if name not in {LOCK_NAME, FLOOR_TEMPORARY_NAME}:
        return begun and name in {FLOOR_NAME, DATABASE_NAME + TEMPORARY_SUFFIX}
    try:
        content = read_regular(directory / name, bytes_max=FLOOR_BYTES)
    except FileNotFoundError:  # whoever makes a node here right now has gone on
        return True
    except Corrupt:
        return False
    if name == FLOOR_TEMPORARY_NAME:
        return is_begun_floor(content)
    return not content.replace(BRIEF.encode(), b"").strip(
        b"0123456789\n\0"
    )  # a power cut leaves zeros where the process's number was to be


def create_database(directory: Path, options: RocksOptions, node_id: str) -> None:
    """Make a node, each step synced: the floor, the database under a temporary name, the database
    under its own.

    A crash before the last step leaves a floor that has seen nothing, and at most a temporary
    database: by that floor, which carries a magic number and a checksum, the next open knows that
    it may start again. Later on, either alone is damage.
    """
    write_floor(directory, Floor(node_id=node_id))
    failpoint("recovery.floor_created")
    sync_directory(directory)
    path = directory / (DATABASE_NAME + TEMPORARY_SUFFIX)
    shutil.rmtree(path, ignore_errors=True)  # made behind a floor of ours: nobody else's
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
