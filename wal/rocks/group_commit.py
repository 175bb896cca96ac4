"""Group commit as the event loop sees it: whether the store takes writes, room in the queue, and
the outcomes of writes.

The writer thread (`writer.py`) does the work. A failed write raises `Indeterminate`, and so do the
writes queued after it. Later writes are refused with `LogReopening` until the database was closed,
verified and opened again.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, unique
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
from rocksdict import WriteBatch

from wal.errors import (
    ChannelFenced,
    Indeterminate,
    LogReopening,
    OnShutdown,
    StorageFailed,
    StorageFull,
    StreamingNodeError,
)
from wal.failpoint import failpoint
from wal.log import SpaceLevel
from wal.queue import Budget, SyncedPosition
from wal.rocks.database import Engine
from wal.rocks.layout import RocksOptions, entry_key
from wal.rocks.space import SpaceVerdict
from wal.runtime import event_log

_log = event_log(__name__)

Outcome = asyncio.Future[None]


class EntryWrite(msgspec.Struct, eq=False):
    """One log entry."""

    log_id: int
    position: int
    tick: int
    value: bytes
    size_bytes: int
    written: Outcome
    durable: Outcome
    synced: SyncedPosition

    urgent: ClassVar = False
    meta_version: ClassVar = 0

    def stage(self, batch: WriteBatch, _engine: Engine) -> None:
        """Put the entry into a batch whose default family is that of the entries."""
        batch.put(entry_key(self.log_id, self.position), self.value)


class BatchWrite:
    """A batch of records (None removes), entries of logs that the floor does not list, and key
    ranges to delete (end exclusive). It is synced at once.

    `meta_version` is the new version of the state map, 0 if it does not change. `ends` are the last
    positions of the logs of `entries` after the write.
    """

    urgent = True
    log_id = position = tick = 0

    def __init__(
        self,
        records: Mapping[bytes, bytes | None],
        meta_version: int = 0,
        *,
        entries: Sequence[tuple[bytes, bytes]] = (),
        dropped: Sequence[tuple[bytes, bytes]] = (),
        ends: Mapping[SyncedPosition, int] | None = None,
    ) -> None:
        self.records = records
        self.meta_version = meta_version
        self.entries = entries
        self.dropped = dropped
        self.ends = ends or {}
        self.size_bytes = sum(
            len(key) + len(value or b"")
            for each in (records.items(), entries)
            for key, value in each
        )
        # A batch is always synced, so one future serves as both.
        self.written = self.durable = asyncio.get_running_loop().create_future()

    def stage(self, batch: WriteBatch, engine: Engine) -> None:
        """Put the changes into a batch."""
        for key, value in self.records.items():
            if value is None:
                batch.delete(key, engine.meta_family)
            else:
                batch.put(key, value, engine.meta_family)
        for key, value in self.entries:
            batch.put(key, value)
        for begin, end in self.dropped:
            # The family must be named: a range deletion ignores the batch's default family.
            batch.delete_range(begin, end, engine.entry_family)


Write = EntryWrite | BatchWrite


@unique
class StoreState(IntEnum):
    """The state of a store, worst last: a store only moves to a higher state, except by reopening.
    Only `OPEN` takes writes.
    """

    OPEN = 0
    READ_ONLY = 1
    """It was opened for reading only."""
    FAILED = 2
    """A write failed; what was synced can be read. Only this state leads back to `OPEN`, by
    reopening.
    """
    FENCED = 3
    """Another owner's token is in the directory."""
    CLOSED = 4
    FORKED = 5
    """This process is a fork of the owner."""


class GroupCommit:
    """The event loop's side of the writer thread, which reports to the methods at the end of this
    class. No method blocks the loop.
    """

    def __init__(self, directory: Path, options: RocksOptions, *, space: SpaceVerdict) -> None:
        self.state = StoreState.OPEN
        self.taken_over = False
        """Whether another owner has the directory, also after closing."""
        self.reopening = False
        """Whether the database is being closed, verified and opened again. The store sets it."""
        self.has_acknowledged = False
        """Whether a write was acknowledged since the store last began to take writes."""
        self.space = space
        self._directory = directory
        self.admission = Budget(options.queue_bytes_max)
        self.hand_over: Callable[[Write], None]
        """Queues a write for the writer thread; the store sets it when it starts one."""
        self.cause: Exception | None = None
        """Why a write has failed since the store last began to take writes; kept after closing."""
        self.lost = asyncio.Event()
        """Set while the store refuses writes because a write failed or another owner has taken
        over.
        """

    async def admit(self, size_bytes: int, *, makes_room: bool = False) -> None:
        """Wait for room in the queue; see `wal.log.Log.admit`."""
        self.check_admitted(makes_room=makes_room)
        # Admission reserves no room, so an append cancelled after it has nothing to return. An
        # append larger than the bound passes alone. Writes that make room are small and rare and
        # pass at once: behind others they might wait for the room that they make.
        size_bytes = min(size_bytes, self.admission.bytes_max)
        if not makes_room and not self.admission.has_room(size_bytes):
            await self.admission.wait(
                size_bytes, check=partial(self.check_admitted, makes_room=False)
            )

    def check_admitted(self, *, makes_room: bool) -> None:
        """Raise when the store refuses writes, and `StorageFull` when the disk is too full for this
        kind of write.
        """
        self.check_writable()
        if self.space.level >= (SpaceLevel.EXHAUSTED if makes_room else SpaceLevel.FULL):
            raise StorageFull(str(self._directory), self.space.free_bytes, self.space.needed_bytes)

    def submit(self, write: Write) -> Outcome:
        """Queue a write for the writer thread and return its `durable` future. Raises the error of
        the state; a low disk raises nothing here.
        """
        self.check_writable()
        self.admission.keep(write.size_bytes)
        self.hand_over(write)
        return write.durable

    def check_writable(self) -> None:
        """Raise when the store refuses writes."""
        if self.state is not StoreState.OPEN:
            raise self.refusal()

    def check_settled(self) -> None:
        """Raise when the database may hold data that is not durable, as after a failed write."""
        if self.state > StoreState.READ_ONLY:
            raise self.refusal()

    def check_readable(self) -> None:
        """Raise when the store is closed, or was opened in the parent of this forked process."""
        if self.state >= StoreState.CLOSED:
            raise self.refusal()

    def check_promising(self) -> None:
        """Raise when ticks may not be promised: while reopening, after a take-over, a fork or
        closing. A failed write alone does not prevent it.
        """
        if self.reopening or self.state > StoreState.FAILED:
            raise self.refusal()

    def refuse(self, state: StoreState) -> None:
        """Refuse writes from now on because of `state`, and wake the appends that wait for room,
        which then raise.
        """
        self.state = max(self.state, state)
        # In a forked child the waiting appends belong to the parent's event loop.
        if state is not StoreState.FORKED:
            self.admission.changed.wake()
        if state in (StoreState.FAILED, StoreState.FENCED):
            self.taken_over = self.taken_over or state is StoreState.FENCED
            self.lost.set()

    def close_without_loop(self) -> None:
        """Refuse writes from now on. Wakes no waiting append: their event loop has ended."""
        self.state = max(self.state, StoreState.CLOSED)

    def resume(self) -> None:
        """Take writes again after the database was verified and opened. Does nothing if the store
        was closed or taken over meanwhile.
        """
        if self.state is StoreState.FAILED:
            self.state = StoreState.OPEN
            self.cause = None
            self.has_acknowledged = False
            self.lost.clear()

    def refusal(self) -> StreamingNodeError:
        """Return the error for a call that the current state does not allow."""
        match self.state:
            case StoreState.FAILED:
                return LogReopening(
                    f"{self._directory} takes no writes since one failed: {self.cause}"
                )
            case StoreState.FENCED:
                return _fence_in(self.cause) or ChannelFenced(
                    f"{self._directory} was taken over by another owner — this one writes no more"
                )
            case StoreState.READ_ONLY:
                return StorageFailed(
                    f"{self._directory} was opened for reading only — open the node to change it"
                )
            case StoreState.FORKED:
                return StorageFailed(
                    f"{self._directory} was opened before this process was forked — open it in one "
                    "process only, "
                    "and start others with the spawn method"
                )
            case StoreState.OPEN | StoreState.CLOSED:
                return OnShutdown(f"{self._directory} is closed")

    # --- reports of the writer thread -------------------------------------------------------------

    def acknowledged(self, writes: list[Write]) -> None:
        """Complete `written` of these writes: the operating system has them."""
        self.has_acknowledged = True
        for write in writes:
            if not write.written.done():
                write.written.set_result(None)

    def landed(self, writes: list[Write]) -> None:
        """Complete these writes, which are synced: first they become visible to readers, then their
        futures complete.
        """
        failpoint("append.landed")
        ends = dict[SyncedPosition, int]()
        for write in writes:
            if isinstance(write, EntryWrite):
                ends[write.synced] = write.position
            else:
                ends |= write.ends
        for synced, position in ends.items():
            synced.advance(position)
        for write in writes:
            if not write.durable.done():
                write.durable.set_result(None)
        self.acknowledged(writes)
        failpoint("append.acknowledged")
        self.admission.give_back(sum([write.size_bytes for write in writes]))

    def failed(self, writes: list[Write], error: Exception) -> None:
        """Fail these writes and refuse later ones. Their outcome is open, but with `ChannelFenced`
        nothing was written.
        """
        if self.cause is None:
            _log.warning(
                "write_failed", directory=str(self._directory), error=str(error), writes=len(writes)
            )
        self.cause = error
        self.refuse(StoreState.FAILED if _fence_in(error) is None else StoreState.FENCED)
        typed = error
        if not isinstance(error, (ChannelFenced, Indeterminate)):
            typed = Indeterminate(
                f"a write to {self._directory} failed and may or may not be in the log: {error}"
            )
            typed.__cause__ = error
        for write in writes:
            for outcome in (write.written, write.durable):
                if not outcome.done():
                    outcome.set_exception(typed)
                    # Marks the exception as retrieved: otherwise an abandoned append would log a
                    # traceback.
                    outcome.exception()
        self.admission.give_back(sum(write.size_bytes for write in writes))

    def space_changed(self, verdict: SpaceVerdict) -> None:
        """Take a new verdict on the disk's free space, log a change of level, and wake waiting
        appends when the disk is full.
        """
        before = self.space
        self.space = verdict
        if verdict.level is not before.level:
            say = _log.warning if verdict.level >= SpaceLevel.FULL else _log.info
            say(
                "disk_space",
                level=verdict.level.name,
                free_bytes=verdict.free_bytes,
                needed_bytes=verdict.needed_bytes,
            )
        if verdict.level >= SpaceLevel.FULL:
            self.admission.changed.wake()


def _fence_in(error: BaseException | None) -> ChannelFenced | None:
    """Return the `ChannelFenced` in an error's chain of causes, None when there is none."""
    while error is not None and not isinstance(error, ChannelFenced):
        error = error.__cause__
    return error
