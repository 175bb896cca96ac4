"""Opening a node directory: own it, make what is missing, verify without changing anything, open it, take the term. Blocks.

The same steps from verifying on bring a database back after a failed write. A node is made in a directory that is new or
empty, or where the making of one was cut off; nothing else is touched.
"""

import os
import shutil
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rocksdict import AccessType, DBRecoveryMode, Rdict

from wal import files
from wal.errors import Corrupt, InvalidArgument, StorageFailed, StreamingNodeError, UnsupportedFormat
from wal.failpoint import failpoint
from wal.files import DIRECTORY_MODE, LOCK_NAME, DirectoryLock, read_regular, sync_directory
from wal.rocks.database import classified
from wal.rocks.floor import (
    FLOOR_BYTES,
    FLOOR_NAME,
    FLOOR_TEMPORARY_NAME,
    Floor,
    FloorFile,
    is_begun_floor,
    read_floor,
    write_floor,
)
from wal.rocks.layout import (
    DATABASE_NAME,
    ENTRY_FAMILY,
    RocksOptions,
    database_options,
    families,
    replay_memtable_bytes,
)
from wal.rocks.recovery import (
    Survey,
    check_framing,
    drop_behind_holes,
    drop_torn_end,
    has_torn_end,
    judge,
    survey,
    without_torn_end,
    write_facts,
    write_term,
)
from wal.rocks.space import SpaceWatch
from wal.runtime import event_log

_log = event_log(__name__)

TEMPORARY_SUFFIX = ".tmp"
NAMED_MAX = 5
BACKUP_RECORD_NAME = "backup.json"
"""Marks a directory as a backup; opening it as a node would change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDatabase:
    """A verified database, open for writing under `term`, with what was found in it."""

    database: Rdict
    found: Survey
    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedDirectory:
    """What an owner holds for as long as it owns the directory; `opened` is the database as it was found first."""

    directory: Path
    lock: DirectoryLock
    floor: FloorFile
    space: SpaceWatch
    opened: OpenedDatabase

    def release(self) -> None:
        """Give the directory up; idempotent. The database is closed before."""
        self.floor.close()
        self.lock.release()


def take_directory(directory: Path, options: RocksOptions) -> OwnedDirectory:
    """Own a directory and open its database. Raises as `wal.rocks.store.open_rocks_store`; nothing is held then."""
    _make_directory(directory)
    failpoint("recovery.directory_made")
    with classified(directory), ExitStack() as undo:
        check_place(directory)  # before anything is put there, the lock included
        lock = DirectoryLock(directory)
        undo.callback(lock.release)
        failpoint("recovery.directory_locked")
        space = SpaceWatch(directory, free_bytes_min=options.free_bytes_min)
        space.make_room_to_start()
        check_place(directory)  # once more, now that nobody else makes a node here
        if not (directory / DATABASE_NAME).exists():
            create_database(directory, options, uuid.uuid4().hex)
        failpoint("recovery.database_prepared")
        floor = FloorFile(directory)
        undo.callback(floor.close)
        opened = _open_verified(directory, options, floor)
        undo.callback(opened.database.close)
        space.look()
        undo.pop_all()
    return OwnedDirectory(directory=directory, lock=lock, floor=floor, space=space, opened=opened)


def open_again(owned: OwnedDirectory, options: RocksOptions, *, term_is_spent: bool) -> OpenedDatabase:
    """Verify and open the database of an owned directory after it was closed.

    Raises as `take_directory`, and `ChannelFenced`. It opens under the term of the token, until something was acknowledged
    in that (`term_is_spent`): so a disk on which no term gets that far does not use them up.
    """
    owned.space.make_room_to_start()
    # Raises for damage; what counts is the floor in memory, which knows all that was acknowledged.
    read_floor(owned.directory)
    opened = _open_verified(owned.directory, options, owned.floor, term=0 if term_is_spent else owned.floor.token_term)
    owned.space.look()
    return opened


def _open_verified(directory: Path, options: RocksOptions, floor: FloorFile, *, term: int = 0) -> OpenedDatabase:
    """Verify the database and open it under `term`, 0 for the next one."""
    is_first = not floor.token_term
    found = verify_database(directory, options, floor.known)
    failpoint("recovery.verified")
    # The token is written before the database is opened for good, and the floor read once more: so everything is found
    # that an owner which no lock kept out had acknowledged before it was fenced.
    if not is_first:
        floor.check_token()  # verifying takes long: that of an owner which came meanwhile is not to be written over
    floor.take_token(term or 1 + max(found.term, floor.known.term))
    failpoint("recovery.token_taken")
    if is_first:
        floor.reload()
    database, found = open_database(directory, options, floor.known)
    failpoint("recovery.database_opened")
    with classified(directory / DATABASE_NAME):
        try:
            _take_term(database, floor, found, options)
        except BaseException:
            with suppress(Exception):  # the first error is the one that counts; RocksDB repeats it here
                database.close()
            raise
    return OpenedDatabase(database=database, found=found, term=floor.token_term)


def _take_term(database: Rdict, floor: FloorFile, found: Survey, options: RocksOptions) -> None:
    """Make the token's term durable in both places before anything is done under it."""
    if found.term != floor.token_term:
        write_term(database, floor.token_term, options.durability)
        failpoint("recovery.term_written")
    database.flush_wal(sync=True)
    failpoint("recovery.term_synced")
    # What a killed owner wrote without acknowledging is part of the log now, and readers may see it.
    floor.record(found.last_positions, term=floor.token_term, meta=found.meta_version)
    failpoint("recovery.floor_recorded")
    floor.sync()
    failpoint("recovery.floor_synced")


def _make_directory(directory: Path) -> None:
    try:
        if directory.exists() and not directory.is_dir():
            raise InvalidArgument(f"{directory} is a file — name a directory")
        files.make_directory(directory)
    except OSError as error:
        raise StorageFailed(f"cannot make {directory}: {error.strerror} — choose a writable place") from error


def check_place(directory: Path) -> None:
    """Return if a node is in this directory, or one may be made in it. Changes nothing.

    Raises `UnsupportedFormat` naming what is there when that is something else, `Corrupt` when half of a node is missing,
    `InvalidArgument` for a backup, `OSError`.
    """
    names = set(os.listdir(directory)) - {"lost+found"}  # noqa: PTH208 - names are all we need
    if BACKUP_RECORD_NAME in names:
        raise InvalidArgument(f"{directory} is a backup — run: streamingnode restore {directory} <new directory>")
    floor, database = read_floor(directory), directory / DATABASE_NAME
    if database.exists():
        if floor is None and not (database / "CURRENT").exists():
            raise UnsupportedFormat(f"{directory} holds a {DATABASE_NAME} that is no node's — choose another directory")
        if floor is None:
            raise Corrupt(f"{directory} has a database and no floor file — restore it from a backup")
    elif floor is not None and floor.term:
        if "log.repaired" in names:  # left by a command that is gone
            raise Corrupt(f"{directory} was being repaired by an earlier release — restore it from a backup")
        raise Corrupt(f"{directory} has a floor file and no database — restore it from a backup")
    elif strangers := sorted(name for name in names if not _is_of_creation(directory, name, begun=floor is not None)):
        named = ", ".join(map(repr, strangers[:NAMED_MAX])) + (" and more" if len(strangers) > NAMED_MAX else "")
        raise UnsupportedFormat(f"{directory} holds {named} and no node — choose a new or an empty directory")


def _is_of_creation(directory: Path, name: str, *, begun: bool) -> bool:
    """Whether the making of a node that was cut off leaves this; with `begun` there is a floor that has seen nothing."""
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
    return not content.strip(b"0123456789\n\0")  # a power cut leaves zeros where the process's number was to be


def verify_database(directory: Path, options: RocksOptions, floor: Floor) -> Survey:
    """Check, changing nothing, that the database holds all it should, and return what it holds. Raises `Corrupt`."""
    path = directory / DATABASE_NAME
    check_framing(path)
    try:
        return _verify(path, options, floor)
    except Corrupt:
        if has_torn_end(path):
            # When that is not all that is wrong, what is wrong with the original is the error to tell.
            with suppress(StreamingNodeError, OSError), without_torn_end(path) as look_alike:
                return _verify(look_alike, options, floor)
        raise


def _verify(path: Path, options: RocksOptions, floor: Floor) -> Survey:
    found = _survey_read_only(path, options, DBRecoveryMode.point_in_time())
    try:
        behind_damage = _survey_read_only(path, options, DBRecoveryMode.skip_any_corrupted_record())
    except Corrupt:
        # RocksDB 10 adds the checksum of what it has read of a damaged record in several blocks to that of the next such
        # record, and refuses the database for it. Under durability `os` a power cut leaves both, and it proves nothing.
        if found.synced_each_batch:
            raise
        behind_damage = found
    judge(found, behind_damage, floor, place=str(path))
    for name, log_id in found.log_ids.items():
        kept, reached = found.last_positions[log_id], behind_damage.last_positions.get(log_id, 0)
        if reached > kept:  # acknowledged under durability `os`, taken by a power cut; opening for writing drops it
            _log.warning("torn_tail_dropped", path=str(path), log=name, kept=kept, dropped=reached - kept)
    return found


def open_for_reading(directory: Path, options: RocksOptions) -> Rdict:
    """Open a database that cannot be written now, so that what is in it can be read meanwhile; changes nothing."""
    path = directory / DATABASE_NAME
    with classified(path):
        return _open(path, options, DBRecoveryMode.point_in_time(), AccessType.read_only())


def open_database(directory: Path, options: RocksOptions, floor: Floor) -> tuple[Rdict, Survey]:
    """Open a verified database for writing, and check once more that it holds what the floor says."""
    path = directory / DATABASE_NAME
    with classified(path):
        if has_torn_end(path):
            _log.warning("torn_manifest_dropped", path=str(path))
            drop_torn_end(path)
        room_bytes = replay_memtable_bytes(options)
        database = _open(
            path, options, DBRecoveryMode.point_in_time(), AccessType.read_write(), memtable_bytes=room_bytes
        )
    try:
        with classified(path):
            found = drop_behind_holes(database, survey(database), floor)
            # After a failed sync the pages of the log's files may look clean in memory without being on the disk: so what
            # was in them is in new tables, synced, before anything is done.
            _bring_into_tables(database, options)
        judge(found, found, floor, place=str(path))
    except BaseException:
        with suppress(Exception):  # the first error is the one that counts; RocksDB repeats it here
            database.close()
        raise
    return database, found


def _bring_into_tables(database: Rdict, options: RocksOptions) -> None:
    """Do what RocksDB would do as it opens, but with the interpreter lock released: the larger part of the time it takes."""
    entries = database.get_column_family(ENTRY_FAMILY)
    try:
        for family in (entries, database):
            family.set_options({"write_buffer_size": str(options.memtable_bytes)})
            family.flush()
    finally:
        entries.close()  # or it would keep the database open for as long as a failure's traceback keeps this frame


def create_database(directory: Path, options: RocksOptions, node_id: str) -> None:
    """Make a node, each step synced: the floor, the database under a temporary name, the database under its own.

    A crash before the last step leaves a floor that has seen nothing, and at most a temporary database: by that floor, which
    carries a magic number and a checksum, the next open knows that it may start again. Later on, a database without a floor
    or a floor without its database is damage.
    """
    write_floor(directory, Floor(node_id=node_id))
    failpoint("recovery.floor_created")
    sync_directory(directory)
    path = directory / (DATABASE_NAME + TEMPORARY_SUFFIX)
    shutil.rmtree(path, ignore_errors=True)  # made behind a floor of ours: nobody else's
    with classified(directory):
        path.mkdir(DIRECTORY_MODE)  # RocksDB makes files as the umask says; nobody else gets to them
        database = _open(path, options, DBRecoveryMode.point_in_time(), AccessType.read_write(), create=True)
        write_facts(database, node_id)
        failpoint("recovery.facts_written")
        database.flush_wal(sync=True)
        database.close()
    sync_directory(path)
    failpoint("recovery.database_created")
    path.rename(directory / DATABASE_NAME)
    failpoint("recovery.database_renamed")
    sync_directory(directory)


def _survey_read_only(path: Path, options: RocksOptions, recovery: DBRecoveryMode) -> Survey:
    with classified(path):
        database = _open(path, options, recovery, AccessType.read_only())
        try:
            return survey(database)
        finally:
            database.close()


def _open(
    path: Path,
    options: RocksOptions,
    recovery: DBRecoveryMode,
    access: AccessType,
    *,
    create: bool = False,
    memtable_bytes: int | None = None,
) -> Rdict:
    settings = database_options(options, recovery=recovery, create=create, memtable_bytes=memtable_bytes)
    column_families = families(options, memtable_bytes=memtable_bytes)
    return Rdict(str(path), settings, column_families=column_families, access_type=access)
