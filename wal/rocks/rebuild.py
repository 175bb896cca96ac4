"""A new database out of records and entries of another: for repair, which never writes into a damaged one. Blocks."""

from collections.abc import Iterable
from pathlib import Path

from rocksdict import DBRecoveryMode, Rdict, WriteBatch

from wal.files import sync_directory
from wal.rocks.failures import classify_failure
from wal.rocks.layout import ENTRY_FAMILY, META_FAMILY, RocksOptions, database_options, families

BATCH_BYTES = 1 << 20


def build_database(path: Path, records: Iterable[tuple[bytes, bytes]], entries: Iterable[tuple[bytes, bytes]]) -> None:
    """Make a database at `path` with these small records and log entries; durable but for the names of its directory.

    Raises what `classify_failure` makes of RocksDB's errors; what was made is of no use then.
    """
    options = RocksOptions()
    settings = database_options(options, recovery=DBRecoveryMode.point_in_time(), create=True)
    try:
        database = Rdict(str(path), settings, column_families=families(options))
        try:
            _write(database, META_FAMILY, records)
            _write(database, ENTRY_FAMILY, entries)
            database.flush_wal(sync=True)
        finally:
            database.close()
    except Exception as error:
        raise classify_failure(error, path) from error
    sync_directory(path)


def _write(database: Rdict, family: str, items: Iterable[tuple[bytes, bytes]]) -> None:
    batch, size = _new_batch(database, family), 0
    for key, value in items:
        batch.put(key, value)
        size += len(key) + len(value)
        if size >= BATCH_BYTES:
            database.write(batch)
            batch, size = _new_batch(database, family), 0
    database.write(batch)


def _new_batch(database: Rdict, family: str) -> WriteBatch:
    batch = WriteBatch(raw_mode=True)
    batch.set_default_column_family(database.get_column_family_handle(family))
    return batch
