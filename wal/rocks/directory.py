"""Making and opening the database of a node directory, so that a crash at any step leaves something that opens.

Creation, in this order, each step synced: the database under a temporary name, with its facts; the floor file; the database
under its own name. A crash before the last step leaves a temporary database, and at most a floor that has seen nothing:
the next open starts again. Later on, a database without a floor or a floor without its database is damage.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rocksdict import AccessType, DBRecoveryMode, Rdict, WriteBatch

from wal.errors import Corrupt, StorageFailed, StreamingNodeError, UnsupportedFormat
from wal.rocks.failures import classify_failure
from wal.rocks.floor import Floor, create_floor, read_floor
from wal.rocks.keys import FORMAT_KEY, META_VERSION_KEY, NODE_ID_KEY, TERM_KEY, encode_number
from wal.rocks.options import RocksOptions, database_options, families
from wal.rocks.recovery import STORE_FORMAT, Survey, judge, survey

DATABASE_NAME = "log"
TEMPORARY_SUFFIX = ".tmp"


def make_directory(directory: Path) -> None:
    """Make the node directory if it is missing, so that it survives a power cut. Raises `StorageFailed`."""
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True)
            _sync_directory(directory.parent)
    except OSError as error:
        raise StorageFailed(f"cannot make {directory}: {error.strerror} — choose a writable place") from error


def prepare_database(directory: Path, options: RocksOptions, make_node_id: Callable[[], str]) -> Floor:
    """Make the database if there is none yet, and return the floor of the directory. The caller owns the directory.

    Raises `UnsupportedFormat` for a directory that holds something else, `Corrupt` when half of a node is missing.
    """
    database, floor = directory / DATABASE_NAME, read_floor(directory)
    if database.exists():
        if not (database / "CURRENT").exists() and floor is None:
            raise UnsupportedFormat(f"{directory} holds a {DATABASE_NAME} that is no node's — choose another directory")
        if floor is None:
            raise Corrupt(f"{directory} has a database and no floor file — restore it from a backup")
        return floor
    if floor is not None and floor.term:
        raise Corrupt(f"{directory} has a floor file and no database — restore it from a backup")
    _create(directory, options, make_node_id())
    created = read_floor(directory)
    assert created is not None
    return created


def verify_database(directory: Path, options: RocksOptions, floor: Floor) -> None:
    """Check, without changing anything, that the database holds all it should. Raises `Corrupt` with the place."""
    path = directory / DATABASE_NAME
    found = _survey_read_only(path, options, DBRecoveryMode.point_in_time())
    behind_damage = _survey_read_only(path, options, DBRecoveryMode.skip_any_corrupted_record())
    judge(found, behind_damage, floor, place=str(path))


def open_database(directory: Path, options: RocksOptions, floor: Floor) -> tuple[Rdict, Survey]:
    """Open a verified database for writing, and check once more that it holds what the floor says."""
    path = directory / DATABASE_NAME
    with _classified(path):
        database = _open(path, options, DBRecoveryMode.point_in_time(), AccessType.read_write())
    try:
        with _classified(path):
            found = survey(database)
        judge(found, found, floor, place=str(path))
    except BaseException:
        database.close()
        raise
    return database, found


def _create(directory: Path, options: RocksOptions, node_id: str) -> None:
    path = directory / (DATABASE_NAME + TEMPORARY_SUFFIX)
    shutil.rmtree(path, ignore_errors=True)
    with _classified(directory):
        database = _open(path, options, DBRecoveryMode.point_in_time(), AccessType.read_write(), create=True)
        facts = WriteBatch(raw_mode=True)
        facts.put(FORMAT_KEY, encode_number(STORE_FORMAT))
        facts.put(NODE_ID_KEY, node_id.encode())
        facts.put(TERM_KEY, encode_number(0))
        facts.put(META_VERSION_KEY, encode_number(0))
        database.write(facts)
        database.flush_wal(sync=True)
        database.close()
    _sync_directory(path)
    create_floor(directory, node_id)
    _sync_directory(directory)
    path.rename(directory / DATABASE_NAME)
    _sync_directory(directory)


def _survey_read_only(path: Path, options: RocksOptions, recovery: DBRecoveryMode) -> Survey:
    with _classified(path):
        database = _open(path, options, recovery, AccessType.read_only())
        try:
            return survey(database)
        finally:
            database.close()


def _open(
    path: Path, options: RocksOptions, recovery: DBRecoveryMode, access: AccessType, *, create: bool = False
) -> Rdict:
    settings = database_options(options, recovery=recovery, create=create)
    return Rdict(str(path), settings, column_families=families(options), access_type=access)


@contextmanager
def _classified(path: Path) -> Iterator[None]:
    try:
        yield
    except StreamingNodeError:
        raise
    except Exception as error:
        raise classify_failure(error, path) from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
