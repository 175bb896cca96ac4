"""The open database, its reader and compaction threads, and the errors that RocksDB's failures
become.

The writer thread is in `writer.py`. Two threads read and one compacts. Their calls cannot be
abandoned, so that no iterator outlives the database.
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
"""Reads mostly decode, which holds the interpreter lock: more threads would only take turns."""

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


_is_used = False
"""Whether this process has ever opened a database. RocksDB's threads stay after the database is
closed.
"""
_was_used_before_fork = False
"""Whether the parent of this forked process had opened a database. RocksDB would wait here for the
parent's threads, which do not exist in the child.
"""


def refuse_after_fork(path: Path) -> None:
    """Raise `StorageFailed` in a child of a process that has used RocksDB, where RocksDB would
    hang.
    """
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
    """Return exit handlers that end a child before RocksDB's destructors join threads of the
    parent.

    Those destructors would crash or hang, because other threads now have the handles. Both handlers
    call the C library: `fcloseall` writes out its buffers, then `_exit` ends the process with its
    exit code. The handler registered last runs first.
    """
    libc = ctypes.CDLL(None)
    return [partial(libc["on_exit"], libc[name], None) for name in ("_exit", "fcloseall")]


_skippers: list[Any] = []
with suppress(AttributeError):  # the C library is not glibc
    _skippers = _destructor_skippers()  # on import: in a child the loader's lock may be taken

os.register_at_fork(after_in_child=_notice_fork)


def open_rocksdb(
    path: Path,
    options: RocksOptions,
    *,
    writable: bool = False,
    create: bool = False,
    past_damage: bool = False,
) -> Rdict:
    """Open a database up to the first damage in RocksDB's log, or with `past_damage` also read what
    follows the damage.

    Raises the typed error for RocksDB's failure (see `classify_failure`), and as
    `refuse_after_fork`. Changes RocksDB's files only if `writable`; rocksdict rewrites its settings
    file (see `same_settings`).
    """
    global _is_used  # noqa: PLW0603 - of the process
    refuse_after_fork(path)
    recovery = (
        DBRecoveryMode.skip_any_corrupted_record()
        if past_damage
        else DBRecoveryMode.point_in_time()
    )
    _is_used = True  # before the opening: another thread may fork while RocksDB starts its threads
    with classified(path):
        if create:
            # RocksDB creates files by the umask; the directory's mode keeps other users out
            path.mkdir(DIRECTORY_MODE)
        return Rdict(
            os.fsencode(path).decode(),  # RocksDB takes paths in UTF-8, whatever the locale
            database_options(options, recovery=recovery, create=create),
            column_families=families(options),
            access_type=AccessType.read_write() if writable else AccessType.read_only(),
        )


@contextmanager
def same_settings(path: Path) -> Iterator[None]:
    """Leave rocksdict's settings file of a database as it was, or missing.

    RocksDB writes nothing when it opens read-only, but rocksdict rewrites its settings. A read must
    neither break what the next opening would finish nor repair what a second read would find.
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
    """The database of an open store and its column families. `path` is for error texts.

    While one database is replaced by another, calls wait. So a call looks up families in its own
    thread when it runs, never before. A reference to a family keeps the database open.
    """

    database: Rdict
    """The whole database; its methods act on the default family. This attribute and the families
    exist only while the database is open.
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
        """Run a reading call on a reader thread and return its result. Raises typed errors."""
        return await outlast(in_thread(self.run, call, *arguments, limiter=self._readers))

    async def compact(self, begin: bytes, end: bytes) -> None:
        """Reclaim the space of deleted entries between two keys; one compaction at a time."""

        def compact() -> None:
            self.entries.compact_range(begin, end)
            # RocksDB keeps a log file while a record in it, of either family, is in no table
            self.database.flush()

        await outlast(in_thread(self.run, compact, limiter=self._compactor))

    async def close(self) -> None:
        """Hold back new calls, wait for the running ones, then close the database; idempotent."""
        if not self._held:
            self._held = True
            self._compactor.total_tokens = self._readers.total_tokens = 1
            await self._readers.acquire_on_behalf_of(self)
            await self._compactor.acquire_on_behalf_of(self)
        if self._is_open:
            await in_thread(self.run, self._close)

    def let_go(self) -> None:
        """Close the database in this thread. No other thread may be using it. Idempotent."""
        if self._is_open:
            self.run(self._close)

    def leave(self) -> None:
        """Abandon the database without closing it: closing would remove files of the other process
        that has it open, as left-overs.
        """
        if self._is_open:
            self.database.cancel_all_background(False)
            self._keep_open()

    def leave_in_child(self) -> None:
        """Abandon the parent's database without closing it: RocksDB would wait for threads that do
        not exist in this child.
        """
        self._why_closed = (
            "was opened before this process was forked — open nodes after the fork only"
        )
        if self._is_open:
            self._keep_open()

    def _keep_open(self) -> None:
        for part in (self.database, self.entries, self.entry_family, self.meta_family):
            # dropping the last reference would close it
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
        self._forget()

    def install(self, database: Rdict) -> None:
        """Put a database in the place of the closed one. Calls stay held back until `resume`."""
        assert not self._is_open, "one database at a time"
        self.database = database
        self.entries = database.get_column_family(ENTRY_FAMILY)
        self.entry_family = database.get_column_family_handle(ENTRY_FAMILY)
        self.meta_family = database.get_column_family_handle(META_FAMILY)
        self._is_open = True

    def resume(self) -> None:
        """Let held-back calls continue. Without a database they raise `StorageFailed`."""
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
            # after a failed write both closings raise that failure again, and RocksDB releases the
            # directory only after both
            whole.close()

    def _forget(self) -> None:
        self._is_open = False
        del self.database, self.entries, self.entry_family, self.meta_family

    def run(self, call: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        """Run a call in this thread, even while calls are held back. Raises typed errors."""
        with classified(self.path):
            if not self._is_open:
                why = self._why_closed
                raise StorageFailed(f"the database at {self.path} {why}")
            return call(*arguments)


@contextmanager
def classified(path: Path) -> Iterator[None]:
    """Convert RocksDB's exceptions in the block to typed errors about the database at `path`."""
    try:
        yield
    except Exception as error:
        # The traceback keeps its frames alive, a frame may keep an iterator or a family, and each
        # of these keeps the database open and locked.
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, StreamingNodeError):
            raise
        raise classify_failure(error, path) from error


def classify_failure(error: Exception, path: Path) -> StreamingNodeError:
    """Return the typed error for a failed call on the database at `path`. Not for writes: their
    outcome is open.
    """
    # RocksDB raises bare `Exception`s with a text. Tests pin the texts, so that a change of wording
    # is noticed.
    text = str(error)

    def says(*patterns: str) -> bool:
        return any(pattern in text for pattern in patterns)

    if isinstance(error, UnicodeError):
        return StorageFailed(
            f"{path} is not UTF-8, which RocksDB requires of paths — choose another one"
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
        with suppress(OSError):  # the directory may not exist yet
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
