"""The open database and the threads that may touch it: the writer, readers, and one for compactions.

In: calls that read or compact. Out: their results on the event loop, failures as typed errors. They cannot be
abandoned, so that no iterator outlives the database. Writes and syncs are the writer thread's, and fail as RocksDB
fails. While a database is taken away and another put in its place, calls wait; so a call looks families up in its
thread, never before.
"""

import ctypes
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread
from rocksdict import Checkpoint, ColumnFamily, Rdict, WriteBatch

from wal.errors import StorageFailed, StreamingNodeError
from wal.outlast import outlast
from wal.rocks.failures import classify_failure
from wal.rocks.layout import ENTRY_FAMILY, META_FAMILY, WAITING_MEMTABLES_MAX

READERS_MAX = 2
"""Reading is decoding, which holds the interpreter lock: more threads would only take turns."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(slots=True)
class _Database:
    """An open database with its families; who holds a family's handle holds the database open."""

    whole: Rdict
    entries: Rdict
    entry_family: ColumnFamily
    meta_family: ColumnFamily


class Engine:
    """The database of an open store. `path` is for error texts."""

    __slots__ = ("_compactor", "_held", "_open", "_readers", "path")

    def __init__(self, path: Path, database: Rdict) -> None:
        self.path = path
        self._open: _Database | None = None
        self._held = False
        self._readers = anyio.CapacityLimiter(READERS_MAX)
        self._compactor = anyio.CapacityLimiter(1)
        self.install(database)

    @property
    def database(self) -> Rdict:
        """The whole database; its own methods mean the default family. Raises `StorageFailed` while there is none."""
        return self._present.whole

    @property
    def entries(self) -> Rdict:
        """The family of the entries."""
        return self._present.entries

    @property
    def entry_family(self) -> ColumnFamily:
        """The handle of the entries' family, for batches."""
        return self._present.entry_family

    @property
    def meta_family(self) -> ColumnFamily:
        """The handle of the default family, for batches."""
        return self._present.meta_family

    async def read(self, call: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
        """Run a call that reads, on a reader thread."""
        classified = partial(self._classified, partial(call, *arguments, **options))
        return await outlast(anyio.to_thread.run_sync(classified, limiter=self._readers))

    async def look(self, call: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
        """Run a call that reads while all others are held back."""
        assert self._held, "the others are held back"
        return await anyio.to_thread.run_sync(self._classified, partial(call, *arguments, **options))

    def get(self, key: bytes) -> bytes | None:
        """Return the record of the default family under `key`. Reader thread."""
        value = self.database.get(key)
        assert value is None or isinstance(value, bytes)
        return value

    def write(self, batch: WriteBatch) -> None:
        """Write a batch atomically, without sync. Writer thread."""
        self.database.write(batch)

    def sync(self) -> None:
        """Sync everything written. Writer thread."""
        self.database.flush_wal(sync=True)

    def is_behind(self) -> bool:
        """Whether a write may have to wait for memtables or tables to be written; 4 us. Writer thread."""
        entries = self.entries
        return bool(
            (entries.property_int_value("rocksdb.num-immutable-mem-table") or 0) >= WAITING_MEMTABLES_MAX
            or entries.property_int_value("rocksdb.is-write-stopped")
            or entries.property_int_value("rocksdb.actual-delayed-write-rate")
        )

    def table_failures(self) -> int:
        """How often RocksDB failed to write a table since it was opened. Writer thread."""
        return self.database.property_int_value("rocksdb.background-errors") or 0

    async def compact(self, begin: bytes, end: bytes) -> None:
        """Give back the space of deleted entries between two keys; one compaction at a time."""
        classified = partial(self._classified, partial(self._compact, begin, end))
        await outlast(anyio.to_thread.run_sync(classified, limiter=self._compactor))

    async def close(self) -> None:
        """Wait for the calls under way, hold new ones back, then close the database; idempotent."""
        if not self._held:
            self._held = True
            self._compactor.total_tokens = self._readers.total_tokens = 1
            await self._readers.acquire_on_behalf_of(self)
            await self._compactor.acquire_on_behalf_of(self)
        if self._open is not None:
            await anyio.to_thread.run_sync(self._classified, self._close)

    def leave(self) -> None:
        """Never close the database: another process has it open, whose files RocksDB would take for left-overs and remove.

        What RocksDB holds in memory stays with this process until it ends.
        """
        if self._open is not None:
            left, self._open = self._open, None
            left.whole.cancel_all_background(False)
            for part in (left.whole, left.entries, left.entry_family, left.meta_family):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))  # the last reference would close it

    def install(self, database: Rdict) -> None:
        """Put a database in the place of the closed one; calls are still held back."""
        assert self._open is None, "one database at a time"
        self._open = _Database(
            database,
            database.get_column_family(ENTRY_FAMILY),
            database.get_column_family_handle(ENTRY_FAMILY),
            database.get_column_family_handle(META_FAMILY),
        )

    def resume(self) -> None:
        """Let the calls go on that were held back; without a database they raise `StorageFailed`."""
        self._held = False
        self._readers.release_on_behalf_of(self)
        self._compactor.release_on_behalf_of(self)
        self._readers.total_tokens = READERS_MAX

    @property
    def _present(self) -> _Database:
        if self._open is None:
            raise StorageFailed(f"the database at {self.path} is closed since a write failed — it is being reopened")
        return self._open

    def _compact(self, begin: bytes, end: bytes) -> None:
        self.entries.compact_range(begin, end)
        self.database.flush()  # RocksDB's own log is kept while it holds a record of either family that is in no table

    def _close(self) -> None:
        entries, whole = self._present.entries, self._present.whole
        self._open = None
        try:
            entries.close()
        finally:  # after a failed write RocksDB repeats the failure in both, and lets go of the directory only after both
            whole.close()

    def _classified(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except Exception as error:
            # An error's traceback keeps its frames, a frame its iterator, and an iterator the database open.
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, StreamingNodeError):
                raise
            raise classify_failure(error, self.path) from error


def link_database(engine: Engine, target: Path) -> None:
    """Make a database at `target`, on the same disk, with everything written so far; it does not change any more.

    Its tables are hard links, so a flipped bit of the original is in both: copy the bytes before calling it a backup.
    """
    # Flushing first lets the event loop run; what the checkpoint itself flushes while it does not is then next to nothing.
    engine.entries.flush()
    engine.database.flush()
    Checkpoint(engine.database).create_checkpoint(str(target))
