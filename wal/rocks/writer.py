"""The writer thread: takes the queued writes, writes them, syncs once, raises the floor, and
notifies the event loop once.
"""

import asyncio
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic

from rocksdict import WriteBatch

from wal.errors import ChannelFenced, Indeterminate, StorageFailed
from wal.failpoint import failpoint
from wal.log import SpaceLevel
from wal.rocks.database import Engine
from wal.rocks.group_commit import GroupCommit, Write
from wal.rocks.layout import WAITING_MEMTABLES_MAX
from wal.rocks.opening import OwnedDirectory
from wal.rocks.space import SHORT_LOOK_BYTES

WRITE_BYTES_MAX = 1 << 20
"""Maximum size of one batch, plus one entry: a `write` holds the interpreter lock for about 1 ms
per MiB.
"""
FLOOR_SYNC_S = 0.2
"""A power cut loses at most this many seconds of the floor."""
SPACE_CHECK_S = 0.1
"""Maximum age of a look at the disk when something is written, and the delay until free space is
noticed.

A disk can pass the low-water mark unnoticed by at most what others, RocksDB's tables included,
write in this time, plus `LOOK_BYTES_MIN` of the log's own writes. After more of those, or half of
the distance to the mark, the writer looks sooner; before a batch of `SHORT_LOOK_BYTES` it always
takes the short look.
"""
OWNER_CHECK_S = 0.01
"""Maximum age of the last comparison with the token when a batch is written, and of the last check
of the floor file's name when a batch is acknowledged. Another owner needs longer than this to open
the database.
"""
TABLES_CHECK_S = 0.002
THREAD_NAME = "log-writer"


class Writer:
    """Owns the thread. `submit` queues writes in their order on disk; `commit` gets the outcome of
    each batch on the event loop.

    After a failed write or sync its records may be on the disk or not, and RocksDB cannot report
    which in this process.
    """

    def __init__(self, engine: Engine, owned: OwnedDirectory, commit: GroupCommit) -> None:
        self._engine = engine
        self._floor = owned.floor
        self._space = owned.space
        self._group_commit = commit
        self._sync_interval_s = (
            None if owned.options.durability == "fsync" else owned.options.sync_interval_ms / 1000
        )
        self._queue: SimpleQueue[Write | None] = SimpleQueue()
        self.submit: Callable[[Write], None] = self._queue.put
        self._tell_loop = asyncio.get_running_loop().call_soon_threadsafe
        self._taken: list[Write] = []
        self._unsynced: list[Write] = []
        self._failure: Exception | None = None
        self._stopping = False
        self._ending = threading.Event()
        self._unlooked_bytes = self._unasked_bytes = 0
        # before several memtables are full
        self._ask_after_bytes = min(WRITE_BYTES_MAX, owned.options.memtable_bytes)
        self._sync_due = self._floor_due = self._space_due = self._owner_due = monotonic()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write and sync all writes queued before, and wait for the thread to end. Never call it on
        the event loop.
        """
        self._ending.set()
        self._queue.put(None)
        self._thread.join()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        self._tend()
        while not self._stopping:
            self._taken = self._take()
            if self._taken:
                self._commit()
            self._tend()
        self._sync_due = self._floor_due = monotonic()
        self._tend()

    def _take(self) -> list[Write]:
        """Wait for a write or the next periodic task, and return the queued writes, up to one
        batch.
        """
        writes: list[Write] = []
        size = 0
        queue = self._queue
        try:
            write = queue.get(timeout=self._patience())
            while write is not None:
                writes.append(write)
                size += write.size_bytes
                if size >= WRITE_BYTES_MAX:
                    return writes
                write = queue.get_nowait()
        except Empty:
            return writes
        self._stopping = True
        return writes

    def _patience(self) -> float | None:
        """Return the seconds until the next periodic task, None when there is none, as after a
        failure.
        """
        if self._failure is not None:
            return None
        dues = []
        if self._unsynced:
            dues.append(self._sync_due)
        if self._floor.dirty:
            dues.append(self._floor_due)
        if self._space.verdict.level is not SpaceLevel.AMPLE:
            dues.append(self._space_due)
        return max(0.0, min(dues) - monotonic()) if dues else None

    def _commit(self) -> None:
        """Write the batch that was taken. Every exception counts as a failed write: if the thread
        ended, appends would hang.
        """
        if self._failure is not None:
            self._fail(self._failure)
            return
        size_bytes = sum(write.size_bytes for write in self._taken)
        try:
            self._look_before(size_bytes)
            self._wait_for_tables(size_bytes)
            # a sync that was due meanwhile may have failed, which also fails this batch
            if self._failure is None:
                self._write()
        except Exception as error:  # noqa: BLE001 - whatever it was, the outcome is open
            self._fail(error)

    def _write(self) -> None:
        # RocksDB's `write` holds the interpreter lock and `flush_wal` does not. So a batch is small
        # enough not to block the event loop for long, is written without sync, and is synced by
        # `flush_wal`.
        self._check_owner_before()
        writes = self._taken
        self._taken = []
        if not self._unsynced and self._sync_interval_s is not None:
            self._sync_due = monotonic() + self._sync_interval_s
        self._unsynced += writes
        failpoint("append.taken")
        batch = WriteBatch(raw_mode=True)
        batch.set_default_column_family(self._engine.entry_family)
        for write in writes:
            write.stage(batch, self._engine)
        failpoint("append.staged")
        self.write_batch(batch)
        failpoint("append.written")
        if self._sync_interval_s is None or any(write.urgent for write in writes):
            self._sync()
        else:
            self._check_owner_after()
            self._tell(self._group_commit.acknowledged, writes)

    def _sync(self) -> None:
        self.sync_log()
        failpoint("append.synced")
        self._check_owner_after()
        landed = self._unsynced
        if not self._floor.dirty:
            self._floor_due = monotonic() + FLOOR_SYNC_S
        last = {write.log_id: write for write in landed}
        self._floor.record(
            {log_id: write.position for log_id, write in last.items() if log_id},
            tick=max(write.tick for write in last.values()),
            meta=max((write.meta_version for write in landed if write.urgent), default=0),
        )
        failpoint("append.floor_recorded")
        if self._sync_interval_s is not None:
            self._sync_floor()  # only the floor shows how much of a torn tail was synced
        self._unsynced = []
        self._tell(self._group_commit.landed, landed)

    def _check_owner_before(self) -> None:
        """Raise `ChannelFenced`, with nothing of this batch written, if another owner has taken
        over.

        Acknowledgements do not rest on this comparison. It protects the other owner's files: a
        batch that fills a memtable makes RocksDB create a log file and a table, whose names the
        other owner may have used. An owner that slept through a take-over must not do that. While
        the last comparison is younger than `OWNER_CHECK_S`, the other owner is still opening the
        database, and RocksDB's own threads, which no comparison stops, are as dangerous.
        """
        now = monotonic()
        if now >= self._owner_due:
            self._floor.check_owner()
            self._owner_due = now + OWNER_CHECK_S

    def _check_owner_after(self) -> None:
        """Raise `Indeterminate`, and so do not acknowledge this batch, if another owner has taken
        over.

        The other owner writes its token first and reads the log after that. If its token is not
        here after the write, it will read the write. If its token is here, it may have read the log
        before the write: the outcome is open. So every acknowledged write is in its log, and this
        one comparison is enough, synced or not: both processes see the same pages.

        The name of the floor file is checked only every `OWNER_CHECK_S`. Replacing the directory by
        a copy loses what was written after the copy in any case.
        """
        now = monotonic()
        try:
            self._floor.check_token()
            if now >= self._owner_due:
                self._floor.check_place()
                self._owner_due = now + OWNER_CHECK_S
        except ChannelFenced as error:
            raise _left_open(error) from error

    def _sync_floor(self) -> None:
        self._floor.sync()
        failpoint("append.floor_synced")

    def _tend(self) -> None:
        """Run the periodic tasks that are due: the background sync, the floor's sync, a look at the
        disk's space.
        """
        if self._failure is not None:
            return
        now = monotonic()
        try:
            if self._unsynced and now >= self._sync_due:
                self._sync()
            if self._floor.dirty and now >= self._floor_due:
                self._sync_floor()
            if self._space.verdict.level is not SpaceLevel.AMPLE and now >= self._space_due:
                self._look_at_space(now)
        except Exception as error:  # noqa: BLE001 - whatever it was, the outcome is open
            self._fail(error)

    def _look_before(self, size_bytes: int) -> None:
        """Look at the disk unless the last look is recent: on an exhausted disk the reserve is
        released before a write fails.
        """
        self._unlooked_bytes += size_bytes
        now = monotonic()
        is_due = (
            now >= self._space_due or self._unlooked_bytes >= self._space.verdict.look_after_bytes
        )
        if not is_due and size_bytes >= SHORT_LOOK_BYTES:
            is_due = self._space.is_tight(size_bytes)
        if is_due:
            self._look_at_space(now)

    def _look_at_space(self, now: float) -> None:
        self._space_due = now + SPACE_CHECK_S
        self._unlooked_bytes = 0
        before = self._space.verdict
        verdict = self._space.look()
        if verdict.level is not before.level or (
            verdict.level >= SpaceLevel.FULL and verdict != before
        ):
            self._tell(self._group_commit.space_changed, verdict)

    def _wait_for_tables(self, size_bytes: int) -> None:
        """Wait while RocksDB writes tables more slowly than memtables fill: RocksDB's own wait
        would hold the interpreter lock.

        Meanwhile the queue fills up and holds back appends. Closing does not wait. Raises
        `StorageFailed` when a table could not be written: RocksDB may never try it again, and a
        write that finds no room would wait forever.
        """
        self._unasked_bytes += size_bytes
        if self._unasked_bytes < self._ask_after_bytes:
            return
        self._unasked_bytes = 0
        while self._failure is None and self.is_behind():
            if self.table_failures():
                raise StorageFailed(
                    f"RocksDB could not write a table at {self._engine.path} — check the disk"
                )
            if self._ending.wait(TABLES_CHECK_S):
                return
            self._tend()

    def _fail(self, error: Exception) -> None:
        cause = error.__cause__
        self._failure = cause if isinstance(cause, ChannelFenced) else error
        self._failure.with_traceback(None)  # its frames would keep the database open after closing
        error.with_traceback(None)
        written = self._unsynced
        taken = self._taken
        self._unsynced = []
        self._taken = []
        if written and isinstance(error, ChannelFenced):
            # The batch just taken is refused. These earlier writes are written but not synced:
            # their outcome is open.
            self._tell(self._group_commit.failed, written, _left_open(error))
            written = []
        self._tell(self._group_commit.failed, written + taken, error)

    def _tell(self, report: Callable[..., None], *arguments: object) -> None:
        try:
            self._tell_loop(report, *arguments)
        except RuntimeError:
            # The event loop ended without closing the store: no caller is left to submit writes or
            # to await them.
            self._stopping = True

    # --- calls on RocksDB ------------------------------------------------------------------

    def write_batch(self, batch: WriteBatch) -> None:
        """Write a batch atomically, without sync."""
        self._engine.database.write(batch)

    def sync_log(self) -> None:
        """Sync everything written."""
        self._engine.database.flush_wal(sync=True)

    def is_behind(self) -> bool:
        """Whether a write may have to wait for RocksDB to write memtables or tables; takes 4 us."""
        value = self._engine.entries.property_int_value
        return bool(
            (value("rocksdb.num-immutable-mem-table") or 0) >= WAITING_MEMTABLES_MAX
            or value("rocksdb.is-write-stopped")
            or value("rocksdb.actual-delayed-write-rate")
        )

    def table_failures(self) -> int:
        """Return how often RocksDB has failed to write a table since it was opened."""
        return self._engine.database.property_int_value("rocksdb.background-errors") or 0


def _left_open(error: ChannelFenced) -> Indeterminate:
    """Return the error for writes that another owner may have read or not."""
    outcome = Indeterminate(f"{error}; the writes under way may be in the log or not")
    outcome.__cause__ = error
    return outcome
