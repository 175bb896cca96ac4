"""The open database, the threads that may touch it beside the writer's, and what its failures mean.

Two of them read and one compacts. Their calls cannot be abandoned, so that no iterator outlives the
database.
"""

import ctypes
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import anyio
from rocksdict import AccessType, ColumnFamily, DBRecoveryMode, Rdict

from wal.errors import (
    AlreadyOwned,
    Corrupt,
    OnShutdown,
    StorageFailed,
    StorageFull,
    StreamingNodeError,
)
from wal.files import DIRECTORY_MODE, no_descriptor_left
from wal.rocks.layout import ENTRY_FAMILY, META_FAMILY, RocksOptions, database_options, families
from wal.rocks.space import REPLAY_BYTES, free_bytes_of, log_bytes_of
from wal.runtime import in_thread, outlast

SETTINGS_NAME = "rocksdict-config.json"
READERS_MAX = 2
"""Reading is decoding, which holds the interpreter lock: more threads would only take turns."""

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


_is_used = False
"""Whether this process has ever opened a database: RocksDB has threads from then on, also when it
is closed.
"""
_was_used_before_fork = False
"""Whether the process that this one was forked from had: its threads are not here, and RocksDB
waits for them.
"""


def refuse_after_fork(path: Path) -> None:
    """Raise `StorageFailed` where RocksDB would hang: in a child of a process that has used it."""
    if _was_used_before_fork:
        raise StorageFailed(
            f"{path} cannot be opened: this process was forked from one that had opened a node, "
            "and RocksDB's "
            "threads are not here — open nodes after the fork only, or start processes with the "
            "spawn method"
        )


def _notice_fork() -> None:
    global _was_used_before_fork  # noqa: PLW0603 - of the process
    if _is_used and not _was_used_before_fork:
        _was_used_before_fork = True
        for register in _skippers:
            register()


def _destructor_skippers() -> list[Any]:
    """Return what ends a process before RocksDB's own end joins threads that a child does not have.

    That would crash, or hang: other threads have got their handles meanwhile. The functions are of
    the C library: one ends the process, with its exit code, the other writes out its buffers. What
    is registered last runs first.
    """
    libc = ctypes.CDLL(None)
    return [partial(libc["on_exit"], libc[name], None) for name in ("_exit", "fcloseall")]


_skippers: list[Any] = []
with suppress(AttributeError):  # where the C library is not glibc
    _skippers = _destructor_skippers()  # now: a child may find the loader's lock taken

os.register_at_fork(after_in_child=_notice_fork)


def open_rocksdb(
    path: Path,
    options: RocksOptions,
    *,
    writable: bool = False,
    create: bool = False,
    past_damage: bool = False,
) -> Rdict:
    """Open a database: as far as its log is whole, or with `past_damage` what is behind damage in
    it, too.

    Raises what RocksDB's failure means, and as `refuse_after_fork`. Nothing is changed unless it is
    `writable`.
    """
    global _is_used  # noqa: PLW0603 - of the process
    refuse_after_fork(path)
    recovery = (
        DBRecoveryMode.skip_any_corrupted_record()
        if past_damage
        else DBRecoveryMode.point_in_time()
    )
    _is_used = True  # first: another thread may fork while RocksDB starts its own
    with classified(path):
        if create:
            # RocksDB makes files as the umask says; nobody else gets to them
            path.mkdir(DIRECTORY_MODE)
        return Rdict(
            os.fsencode(path).decode(),  # RocksDB is told it in UTF-8, whatever the locale
            database_options(options, recovery=recovery, create=create),
            column_families=families(options),
            access_type=AccessType.read_write() if writable else AccessType.read_only(),
        )


@contextmanager
def same_settings(path: Path) -> Iterator[None]:
    """Leave rocksdict's settings file of a database as it was, or missing.

    RocksDB writes nothing when it opens read-only, but rocksdict writes its settings anew. A look
    must neither break what the next opening would finish nor mend what a second look finds.
    """
    settings = path / SETTINGS_NAME
    before = settings.read_bytes() if settings.exists() else None
    try:
        yield
    finally:
        if before is None:
            settings.unlink(missing_ok=True)
        elif not settings.exists() or settings.read_bytes() != before:
            settings.write_bytes(before)


class Engine:
    """The database of an open store and its families. `path` is for error texts.

    While a database is closed and another put in its place, calls wait; so a call looks families up
    in its thread, never before. Who holds a handle of a family holds the database open, too.
    """

    database: Rdict
    """The whole database; its own methods mean the default family. Only while it is open, as the
    families.
    """
    entries: Rdict
    entry_family: ColumnFamily
    meta_family: ColumnFamily

    def __init__(self, path: Path, database: Rdict) -> None:
        self.path = path
        self._is_open = self._held = False
        self._why_closed = "is closed since a write failed — it is being reopened"
        self._readers = anyio.CapacityLimiter(READERS_MAX)
        self._compactor = anyio.CapacityLimiter(1)
        self.install(database)

    async def read(self, call: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        """Run a call that reads, on a reader thread; its failures are typed."""
        return await outlast(in_thread(self.run, call, *arguments, limiter=self._readers))

    async def compact(self, begin: bytes, end: bytes) -> None:
        """Give back the space of deleted entries between two keys; one compaction at a time."""

        def compact() -> None:
            self.entries.compact_range(begin, end)
            # RocksDB keeps its own log while it holds a record of either family that is in no table
            self.database.flush()

        await outlast(in_thread(self.run, compact, limiter=self._compactor))

    async def close(self) -> None:
        """Wait for the calls under way, hold new ones back, then close the database; idempotent."""
        if not self._held:
            self._held = True
            self._compactor.total_tokens = self._readers.total_tokens = 1
            await self._readers.acquire_on_behalf_of(self)
            await self._compactor.acquire_on_behalf_of(self)
        if self._is_open:
            await in_thread(self.run, self._close)

    def let_go(self) -> None:
        """Close the database in this thread; no other uses it. Idempotent."""
        if self._is_open:
            self.run(self._close)

    def leave(self) -> None:
        """Never close the database: another process has it open, whose files RocksDB would remove
        as left-overs.
        """
        if self._is_open:
            self.database.cancel_all_background(False)
            self._keep_open()

    def leave_in_child(self) -> None:
        """Never close the database, which is the parent's: RocksDB would wait for threads that are
        not here.
        """
        self._why_closed = (
            "was opened before this process was forked — open nodes after the fork only"
        )
        if self._is_open:
            self._keep_open()

    def _keep_open(self) -> None:
        for part in (self.database, self.entries, self.entry_family, self.meta_family):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))  # the last reference would close it
        self._forget()

    def install(self, database: Rdict) -> None:
        """Put a database in the place of the closed one; calls are still held back."""
        assert not self._is_open, "one database at a time"
        self.database = database
        self.entries = database.get_column_family(ENTRY_FAMILY)
        self.entry_family = database.get_column_family_handle(ENTRY_FAMILY)
        self.meta_family = database.get_column_family_handle(META_FAMILY)
        self._is_open = True

    def resume(self) -> None:
        """Let the calls go on that were held back; without a database they raise
        `StorageFailed`.
        """
        self._held = False
        self._readers.release_on_behalf_of(self)
        self._compactor.release_on_behalf_of(self)
        self._readers.total_tokens = READERS_MAX

    def _close(self) -> None:
        entries = self.entries
        whole = self.database
        self._forget()
        try:
            entries.close()
        finally:
            # after a failed write RocksDB repeats the failure in both, and releases the directory
            # only after both
            whole.close()

    def _forget(self) -> None:
        self._is_open = False
        del self.database, self.entries, self.entry_family, self.meta_family

    def run(self, call: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        """Run a call in this thread, held back or not; its failures are typed."""
        with classified(self.path):
            if not self._is_open:
                why = self._why_closed
                raise StorageFailed(f"the database at {self.path} {why}")
            return call(*arguments)


@contextmanager
def classified(path: Path) -> Iterator[None]:
    """Raise what RocksDB raises in the block as what it means for the database at `path`."""
    try:
        yield
    except Exception as error:
        # Its traceback keeps the frames that ended, these an iterator or a family, and either the
        # database and its lock.
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, StreamingNodeError):
            raise
        raise classify_failure(error, path) from error


def classify_failure(error: Exception, path: Path) -> StreamingNodeError:
    """Return what a failed call on the database at `path` means for the caller, except a write: its
    outcome is open.
    """
    # RocksDB's exceptions are bare `Exception`s with a text. Tests hold the texts, so that another
    # wording is noticed.
    text = str(error)

    def says(*patterns: str) -> bool:
        return any(pattern in text for pattern in patterns)

    if isinstance(error, UnicodeError):
        return StorageFailed(
            f"{path} is no UTF-8, which RocksDB takes paths in — choose another one"
        )
    if says("While lock file", "lock hold by current process"):
        return AlreadyOwned(str(path), None)
    if (
        says("DB instance already closed", "DB already closed")
        or type(error).__name__ == "DbClosedError"
    ):
        return OnShutdown(f"the database at {path} is closed")
    if says("No space left on device"):
        free_bytes = 0
        with suppress(OSError):  # it may not be made yet
            free_bytes = free_bytes_of(path)
        return StorageFull(
            str(path), free_bytes, max(log_bytes_of(path), free_bytes) + REPLAY_BYTES
        )
    if says("Too many open files"):
        return no_descriptor_left(path, error)
    if says("Read-only file system", "Permission denied"):
        return StorageFailed(f"{path} cannot be written — make it writable for this user: {text}")
    if says("Corruption:", "No such file or directory", "create_if_missing is false"):
        return Corrupt(
            f"the database at {path} is damaged: {text} — restore the node from a backup, "
            "or take out what can be read: streamingnode export DIR OUT --salvage"
        )
    return StorageFailed(
        f"the database at {path} failed — check the disk and the system log: {text}"
    )
