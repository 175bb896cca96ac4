"""The open database and the threads that may touch it: the writer, readers, and one for compactions.

In: calls that read or compact. Out: their results on the event loop, failures as typed errors. They cannot be abandoned, so
that no iterator outlives the database. Writes and syncs are the writer thread's, and fail as RocksDB fails.
"""

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread
from rocksdict import ColumnFamily, Rdict, WriteBatch

from wal.errors import StreamingNodeError
from wal.outlast import outlast
from wal.rocks.failures import classify_failure
from wal.rocks.options import ENTRY_FAMILY, META_FAMILY

READERS_MAX = 2
"""Reading is decoding, which holds the interpreter lock: more threads would only take turns."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Engine:
    """The database of an open store. `path` is for error texts."""

    __slots__ = ("_compactor", "_readers", "database", "entries", "entry_family", "meta_family", "path")

    def __init__(self, path: Path, database: Rdict) -> None:
        self.path = path
        self.database = database
        self.entries = database.get_column_family(ENTRY_FAMILY)
        self.entry_family: ColumnFamily = database.get_column_family_handle(ENTRY_FAMILY)
        self.meta_family: ColumnFamily = database.get_column_family_handle(META_FAMILY)
        self._readers = anyio.CapacityLimiter(READERS_MAX)
        self._compactor = anyio.CapacityLimiter(1)

    async def read(self, call: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
        """Run a call that reads, on a reader thread."""
        classified = partial(self._classified, partial(call, *arguments, **options))
        return await outlast(anyio.to_thread.run_sync(classified, limiter=self._readers))

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

    async def compact(self, begin: bytes, end: bytes) -> None:
        """Give back the space of deleted entries between two keys; one compaction at a time."""
        classified = partial(self._classified, partial(self.entries.compact_range, begin, end))
        await outlast(anyio.to_thread.run_sync(classified, limiter=self._compactor))

    async def close(self) -> None:
        """Wait for the calls under way, then close the database."""
        self._compactor.total_tokens = self._readers.total_tokens = 1
        await self._readers.acquire_on_behalf_of(self)
        await self._compactor.acquire_on_behalf_of(self)
        await anyio.to_thread.run_sync(self._classified, self._close)

    def _close(self) -> None:
        del self.entry_family, self.meta_family
        try:
            self.entries.close()
        finally:  # after a failed write RocksDB repeats the failure in both, and lets go of the directory only after both
            self.database.close()

    def _classified(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except Exception as error:
            # An error's traceback keeps its frames, a frame its iterator, and an iterator the database open.
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, StreamingNodeError):
                raise
            raise classify_failure(error, self.path) from error
