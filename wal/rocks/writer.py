"""The writer thread: takes what is queued, writes it, syncs once, and tells the event loop once.

In: writes in the order that becomes their order on disk. Out: the same writes, in batches, to a listener on the event loop;
or a failure, after which nothing more is written. The floor file is raised after each sync and before its
acknowledgements.

Why a thread and why two steps: RocksDB's `write` holds the interpreter lock and `flush_wal` does not, so a batch is written
without sync, in pieces small enough for the event loop, and synced by the call that lets the loop run.

A write or sync that fails may have left its records or not, and RocksDB says nothing more about them in this process.
Everything from that batch on is indeterminate, until the directory is opened again and verified. Before each write, and
again before its acknowledgements, the fencing token is compared: a writer that was overtaken acknowledges nothing more.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from rocksdict import WriteBatch

from wal.errors import ChannelFenced, Indeterminate
from wal.failpoint import failpoint
from wal.rocks.database import Engine
from wal.rocks.floor import FloorFile
from wal.rocks.layout import SyncOptions
from wal.rocks.space import SpaceLevel, SpaceVerdict
from wal.rocks.space_watch import SpaceWatch
from wal.rocks.write import Write

WRITE_BYTES_MAX = 1 << 20
"""One `write` holds the interpreter lock for about 1 ms per MiB; at most this and one more entry go into one."""
FLOOR_SYNC_S = 0.2
"""A power cut forgets at most this much of the floor."""
SPACE_CHECK_S = 0.1
"""How old a look at the disk may be when something is written, and how soon free space is noticed."""
TABLES_CHECK_S = 0.002
THREAD_NAME = "rocksmq-writer"


class WriterListener(Protocol):
    """Where the writer reports to; called on the event loop, in order."""

    def acknowledged(self, writes: list[Write]) -> None:
        """The operating system has these writes."""

    def landed(self, writes: list[Write]) -> None:
        """These writes are synced."""

    def failed(self, writes: list[Write], error: Exception) -> None:
        """The outcome of these writes is open, and of all later ones."""

    def space_changed(self, verdict: SpaceVerdict) -> None:
        """The disk is nearer to full than it was, or less near."""


class Writer:
    """Owns the thread. `queue` brings the writes; None in it asks for the end.

    `tell` runs a call on the event loop and may be called from any thread. `space` has looked once already.
    """

    def __init__(
        self,
        engine: Engine,
        floor: FloorFile,
        options: SyncOptions,
        *,
        queue: SimpleQueue[Write | None],
        listener: WriterListener,
        tell: Callable[..., object],
        check_owned: Callable[[], None],
        space: SpaceWatch,
        monotonic: Callable[[], float],
    ) -> None:
        self._engine, self._floor, self._options = engine, floor, options
        self._queue, self._listener, self._tell_loop = queue, listener, tell
        self._check_owned, self._space, self._monotonic = check_owned, space, monotonic
        self._unsynced: list[Write] = []
        self._failure: Exception | None = None
        self._stopping = False
        self._ending = threading.Event()
        self._unlooked_bytes = self._unasked_bytes = self._table_failures = 0
        self._sync_due = self._floor_due = self._space_due = self._monotonic()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write and sync everything queued before, and wait for the end of the thread. Not on the event loop."""
        self._ending.set()
        self._queue.put(None)
        self._thread.join()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._tend(self._monotonic())
        while not self._stopping:
            writes = self._take()
            if writes and self._is_ready_for(writes):
                self._commit(writes)
            self._tend(self._monotonic())
        self._finish()

    def _take(self) -> list[Write]:
        """Wait for a write or the next duty; return what is queued, up to one batch."""
        writes: list[Write] = []
        size, queue = 0, self._queue
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
        """Return how long nothing has to be done, None for ever."""
        dues = []
        if self._unsynced:
            dues.append(self._sync_due)
        if self._floor.dirty:
            dues.append(self._floor_due)
        if self._space.verdict.level is not SpaceLevel.AMPLE:
            dues.append(self._space_due)
        return max(0.0, min(dues) - self._monotonic()) if dues else None

    def _commit(self, writes: list[Write]) -> None:
        if self._failure is not None:
            self._tell(self._listener.failed, writes, self._failure)
            return
        if not self._unsynced and self._options.interval_s is not None:
            self._sync_due = self._monotonic() + self._options.interval_s
        self._unsynced += writes
        try:
            self._check_owned()
            failpoint("append.taken")
            self._write(writes)
            if self._options.interval_s is None or any(write.urgent for write in writes):
                self._sync()
            else:
                self._tell(self._listener.acknowledged, writes)
        except Exception as error:  # noqa: BLE001 - whatever it was, the outcome is open
            self._fail(error)

    def _write(self, writes: list[Write]) -> None:
        batch = WriteBatch(raw_mode=True)
        batch.set_default_column_family(self._engine.entry_family)
        for write in writes:
            write.stage(batch)
        failpoint("append.staged")
        self._engine.write(batch)
        failpoint("append.written")

    def _sync(self) -> None:
        self._engine.sync()
        failpoint("append.synced")
        self._check_owned_still()
        landed = self._unsynced
        if not self._floor.dirty:
            self._floor_due = self._monotonic() + FLOOR_SYNC_S
        last = {write.log_id: write for write in landed}
        self._floor.record(
            {log_id: write.position for log_id, write in last.items() if log_id},
            tick=max(write.tick for write in last.values()),
            meta=max((write.meta_version for write in landed if write.urgent), default=0),
        )
        failpoint("append.floor_recorded")
        if self._options.interval_s is not None:
            self._sync_floor()  # of a torn tail the floor alone can tell how much was synced
        self._unsynced = []
        self._tell(self._listener.landed, landed)

    def _sync_floor(self) -> None:
        self._floor.sync()
        failpoint("append.floor_synced")

    def _check_owned_still(self) -> None:
        """Raise `Indeterminate` when another owner came between a write and now: it may have read the write, or not."""
        try:
            self._check_owned()
        except ChannelFenced as error:
            raise Indeterminate(f"{error}; what was being written may be in the log, or not") from error

    def _tend(self, now: float) -> None:
        """Do what is due: the background sync, the floor's sync, a look at the disk's space."""
        if self._failure is None:
            try:
                if self._unsynced and now >= self._sync_due:
                    self._sync()
                if self._floor.dirty and now >= self._floor_due:
                    self._sync_floor()
            except Exception as error:  # noqa: BLE001 - whatever it was, the outcome is open
                self._fail(error)
        if now >= self._space_due and self._space.verdict.level is not SpaceLevel.AMPLE:
            self._look_at_space(now)

    def _is_ready_for(self, writes: list[Write]) -> bool:
        """Do what comes before a write. A failure here is a failed write: were it to end the thread, appends would hang."""
        try:
            self._look_before(writes)
            self._wait_for_tables(writes)
        except Exception as error:  # noqa: BLE001 - whatever it was, the thread goes on
            self._unsynced += writes
            self._fail(error)
            return False
        return True

    def _look_before(self, writes: list[Write]) -> None:
        """Look at the disk unless that was just done: an exhausted one gives its reserve up before a write fails."""
        size_bytes = sum(write.size_bytes for write in writes)
        self._unlooked_bytes += size_bytes
        now = self._monotonic()
        is_due = now >= self._space_due or self._unlooked_bytes >= self._space.verdict.look_after_bytes
        if is_due or self._space.is_tight(size_bytes):
            self._look_at_space(now)

    def _wait_for_tables(self, writes: list[Write]) -> None:
        """Wait while RocksDB makes tables slower than they fill: its own wait would hold the interpreter lock.

        Appends are held back meanwhile, by the queue that fills up. Closing does not wait; nor does it when a table could
        not be written: RocksDB may never try that again, and says so at the next write.
        """
        self._unasked_bytes += sum(write.size_bytes for write in writes)
        if self._unasked_bytes < WRITE_BYTES_MAX:
            return
        self._unasked_bytes = 0
        while self._failure is None and self._engine.is_behind() and not self._ending.wait(TABLES_CHECK_S):
            failures = self._engine.table_failures()
            if failures > self._table_failures:
                self._table_failures = failures
                return
            self._tend(self._monotonic())

    def _look_at_space(self, now: float) -> None:
        self._space_due, self._unlooked_bytes = now + SPACE_CHECK_S, 0
        before = self._space.verdict
        verdict = self._space.look()
        if verdict.level is not before.level or (verdict.level >= SpaceLevel.FULL and verdict != before):
            self._tell(self._listener.space_changed, verdict)

    def _fail(self, error: Exception) -> None:
        cause = error.__cause__
        self._failure = cause if isinstance(cause, ChannelFenced) else error
        self._failure.with_traceback(None)  # its frames would keep the database open after closing
        error.with_traceback(None)
        failed, self._unsynced = self._unsynced, []
        self._tell(self._listener.failed, failed, error)

    def _finish(self) -> None:
        self._sync_due = self._floor_due = self._monotonic()
        self._tend(self._monotonic())

    def _tell(self, report: Callable[..., None], *arguments: object) -> None:
        try:
            self._tell_loop(report, *arguments)
        except RuntimeError:
            # The event loop ended without closing the store: nobody is left to submit or to be told.
            self._stopping = True
