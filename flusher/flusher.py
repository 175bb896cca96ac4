"""The flusher of one pchannel: it restarts failed runs for as long as the node is open.

After a fault of the disk or the log store, the flusher discards the run, pauses, and starts another
one from the checkpoint. This is the same path as after a crash, so there is only one. It loses no
data, because the log is truncated only behind checkpoints. Damage is not retried: the flusher
stops, the log grows, and `wait_for_cut` raises the error; appends and readers go on.
"""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, unique

import anyio
from anyio import sleep

from flusher.cuts import cut_ahead, decode_first_kept, kept_cuts_key, remove_orphans
from flusher.directory import Cut, CutLog
from flusher.manifest import Checkpoint, checkpoint_key, decode_checkpoint
from flusher.retention import Retention, finish_removal
from flusher.run import CutScheduleOptions, FlushContext, FlushRun
from scanner.deliver_policy import StartingPoint
from scanner.scanner import Scanner
from wal.errors import (
    Corrupt,
    Ends,
    OnShutdown,
    Overloaded,
    StorageFailed,
    StorageFull,
    StreamingNodeError,
    ends_of,
)
from wal.failpoint import failpoint
from wal.files import no_descriptor_left
from wal.runtime import event_log, in_thread

SPACE_LOOK_S = 0.25
"""How soon a shortage of space is noticed, and how long the store needs to notice that it is over.
"""
SPACE_PAUSE_S = 2.0
"""Pause after making room did not help: each further attempt on a full disk makes a cut."""
SPACE_BYTES_MIN = 1 << 20
"""Least number of bytes, beyond those free, that `StorageFull` asks for."""
LASTING_FAULTS = 3
"""`wait_for_cut` raises after this many tries in a row failed to write files: after 1.5 s by
default.
"""

_log = event_log(__name__)


@unique
class FlusherState(Enum):
    """What the flusher is doing."""

    RECOVERING = "recovering"
    RUNNING = "running"
    BACKING_OFF = "backing off"
    FAILED = "failed"
    CLOSED = "closed"


ALIVE = (FlusherState.RECOVERING, FlusherState.RUNNING, FlusherState.BACKING_OFF)


def state_after(error: BaseException) -> FlusherState | None:
    """Return the state of the flusher after an error of a run; None for a bug, which it does not
    catch.
    """
    match error:
        case StreamingNodeError(ends=Ends.LOG):
            return FlusherState.CLOSED
        case OSError() | StorageFailed() | StreamingNodeError(retryable="yes" | "indeterminate"):
            # After an indeterminate write the stored checkpoint shows the outcome, once the store
            # is reopened.
            return FlusherState.BACKING_OFF
        case StreamingNodeError():
            return FlusherState.FAILED
        case _:
            return None


def short_of(error: BaseException | None) -> str:
    """Return the resource whose lack ended a run and that the flusher cannot free; "" for other
    errors.
    """
    match error:
        case OSError(errno=errno.ENOSPC | errno.EDQUOT) | StorageFull():
            return "disk space"
        case OSError(errno=errno.EMFILE | errno.ENFILE) | Overloaded():
            return "file descriptors"  # only the log store raises `Overloaded` in a run
        case _:
            return ""


def decisive(error: BaseException) -> BaseException:
    """Return the error of a group that decides the next state.

    The order is: a bug, the end of the log, damage, a shortage, another fault.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    order = (None, FlusherState.CLOSED, FlusherState.FAILED, FlusherState.BACKING_OFF)
    return min(
        map(decisive, error.exceptions),
        key=lambda each: (order.index(state_after(each)), not short_of(each)),
    )


async def _try(work: Awaitable[object], event: str) -> bool:
    """Await work that is retried later when it fails; log the failure as `event`. Returns False
    once the log is closed.
    """
    try:
        await work
    except (OSError, StreamingNodeError) as error:
        if ends_of(error) is Ends.LOG:
            return False
        _log.warning(event, error=str(error))
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FlusherStatistics:
    """The flusher's progress: what the last cut covers, what is unflushed, and how often a run
    failed.

    `short_of` names the resource that the flusher waits for, "" for none.
    """

    state: FlusherState
    short_of: str
    cut_number: int
    cut_tick: int
    cut_crc32c: int
    checkpoint_position: int
    unflushed_since_tick: int
    unflushed_rows: int
    unflushed_bytes: int
    held_bytes: int
    faults: int
    last_error: str


class Flusher:
    """Flushes one pchannel into the files of a node directory. Lives on the event loop; heavy work
    is in threads.

    `checkpoint` is the stored one. Callers may need it before the first run has read it, because
    the log before it may be gone.
    """

    def __init__(self, context: FlushContext, checkpoint: Checkpoint) -> None:
        self.state = FlusherState.RECOVERING
        self.checkpoint = checkpoint
        """The last durable checkpoint; everything at or below its tick is in files."""
        self.cuts = CutLog(context.directory, node_id=context.store.node_id)
        self._anchor(checkpoint)  # no I/O
        self.schedule = CutSchedule(context.options.schedule, now_ms=context.now_ms)
        self.retention = Retention(context, self.cuts)
        self._context = context
        self._run: FlushRun | None = None
        self._last_cut: Cut | None = None
        self._changed = asyncio.Event()
        self._asked = asyncio.Event()  # set by `wait_for_cut`; ends a pause
        self._failure: StreamingNodeError | None = None
        # the shortage that ended the last run, if one did
        self._short: StorageFull | Overloaded | None = None
        self._faults = self._file_faults = 0
        self._last_error = ""

    async def run(self) -> None:
        """Flush until cancelled, until the log is closed, or until damage is found. Survives faults
        of the disk.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._retain)
                await self._keep_running()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            # without the group: callers need the cause, not the place
            raise decisive(errors) from None
        finally:
            if self.state in ALIVE:
                self._enter(FlusherState.CLOSED)

    async def wait_for_cut(self, number: int) -> Cut:
        """Return cut `number` once its checkpoint is durable; ends a pause between tries.

        Raises `StorageFull`, `Overloaded` or `StorageFailed` when its files cannot be written, and
        the errors of `log_is_back`; the flusher goes on trying, so it makes the cut later. Raises
        `Corrupt` and other permanent errors when the flusher has stopped on one, `OnShutdown` when
        it is closed, `Truncated` for a cut that is no longer kept.
        """
        self._asked.set()
        faults = self._faults
        while self.checkpoint.cut_number < number:
            if self.state not in ALIVE:
                # without its traceback: each raise would add frames
                raise (self._failure or OnShutdown("the flusher is closed")).with_traceback(None)
            is_new_fault = self._faults > faults
            if is_new_fault and self._short is not None:
                raise self._short.with_traceback(None)
            if is_new_fault and not self._file_faults:  # a fault of the log
                faults = self._faults
                await self._context.log_is_back()
                continue
            if is_new_fault and self._file_faults >= LASTING_FAULTS:
                raise StorageFailed(
                    f"cut {number} is not made: {self._file_faults} tries in a row failed, the "
                    "last with "
                    f"{self._last_error} — check the disk; the node goes on trying"
                )
            if self._run is not None:
                self._run.stop_gathering()
            await self._changed.wait()
        if self._last_cut is not None and self._last_cut.number == number:
            # not cached in `cuts`, so that later reads notice changes on disk
            return self._last_cut
        return await in_thread(self.cuts.read, number)

    async def enforce_retention(self, *, short_of_space: bool = False) -> None:
        """Remove the log and the cuts that nobody needs, now and not at the next interval. Raises
        as `Retention.enforce`.
        """
        run = self._run
        if run is not None and self.checkpoint.cut_number:
            kept_tick = await self.retention.enforce(
                self.checkpoint, run.state, short_of_space=short_of_space
            )
            run.state.forget_below(kept_tick)
            self._context.on_kept_tick(kept_tick)

    async def check_cuts(self) -> None:
        """Raise `Corrupt` when cuts are missing that retention did not remove."""
        numbers = await in_thread(self.cuts.look)
        # Read after the listing: retention increases this number before it removes a cut.
        first_kept = decode_first_kept(
            await self._context.store.state.get(kept_cuts_key(self._context.log.name))
        )
        if numbers and numbers[0] > first_kept:
            raise Corrupt(
                f"cuts {first_kept} to {numbers[0] - 1} are lost — restore them from a backup"
            )

    def statistics(self) -> FlusherStatistics:
        """Return the present levels and counts."""
        cut = self._run.open_cut if self._run else None
        return FlusherStatistics(
            state=self.state,
            short_of=short_of(self._short) if self.state is FlusherState.BACKING_OFF else "",
            cut_number=self.checkpoint.cut_number,
            cut_tick=self.checkpoint.tick,
            cut_crc32c=self.checkpoint.manifest_crc32c,
            checkpoint_position=self.checkpoint.position,
            unflushed_since_tick=cut.first_tick if cut and cut.files else 0,
            unflushed_rows=sum(file.rows for file in cut.files.values()) if cut else 0,
            unflushed_bytes=cut.taken_bytes if cut else 0,
            held_bytes=cut.held_bytes if cut else 0,
            faults=self._faults,
            last_error=self._last_error,
        )

    async def _retain(self) -> None:
        # not a polling loop: each round does work
        while await _try(self.enforce_retention(), "retention_failed"):  # noqa: ASYNC110
            await sleep(self._context.options.retention.interval_s)

    async def reclaim_space(self, request_cut: Callable[[], Awaitable[int]]) -> None:
        """Make room before appends are refused, until the log is closed. `request_cut` as in
        `CutSchedule.run`.
        """
        store = self._context.store
        is_open = True
        while is_open:
            await sleep(SPACE_LOOK_S)
            if store.short_of_space:
                is_open = await _try(self._make_room(request_cut), "no_room_made")
                await sleep(SPACE_LOOK_S)
                if store.short_of_space:
                    await sleep(SPACE_PAUSE_S)

    async def _make_room(self, request_cut: Callable[[], Awaitable[int]]) -> None:
        # first what is already in files and not needed
        await self.enforce_retention(short_of_space=True)
        await sleep(SPACE_LOOK_S)
        if self._context.store.short_of_space:
            if number := await request_cut():
                await self.wait_for_cut(number)
            await self.enforce_retention(short_of_space=True)  # then what the cut wrote to files

    async def _keep_running(self) -> None:
        options = self._context.options
        pause_s = options.retry_first_s
        while self.state in ALIVE:
            cut_before = self.checkpoint.cut_number
            try:
                await self._run_once()
            except (Exception, BaseExceptionGroup) as error:
                state = state_after(cause := decisive(error))
                if state is None:
                    raise
                await self._end_run(state, cause)
            if self.state is FlusherState.BACKING_OFF:
                pause_s = (
                    options.retry_first_s if self.checkpoint.cut_number > cut_before else pause_s
                )
                self._asked = asyncio.Event()
                with anyio.move_on_after(pause_s):
                    await self._asked.wait()
                pause_s = min(2 * pause_s, options.retry_max_s)
                self._enter(FlusherState.RECOVERING)

    async def _run_once(self) -> None:
        context = self._context
        checkpoint = decode_checkpoint(
            await context.store.state.get(checkpoint_key(context.log.name))
        )
        failpoint("recovery.checkpoint_read")
        ahead = await in_thread(self._tidy, checkpoint, context.next_id())
        self.checkpoint = checkpoint
        self._run = FlushRun(
            context, checkpoint, ahead, report=self.schedule.report, on_cut=self._on_cut
        )
        start = StartingPoint(checkpoint.start_position, checkpoint.tick)
        scanner = Scanner(context.log, context.tail, start, name="flusher")
        self._enter(FlusherState.RUNNING)
        try:
            await self._run.follow(scanner)
        finally:
            await scanner.close()

    def _tidy(self, checkpoint: Checkpoint, next_id: int) -> Cut | None:
        """Remove what a crash left, and return the cut that is ahead of the checkpoint, if any."""
        ahead = cut_ahead(self._context.directory, checkpoint)
        self._anchor(checkpoint)
        failpoint("recovery.cuts_compared")
        finish_removal(self.cuts)
        made = range(checkpoint.state().next_id, next_id)
        remove_orphans(
            self._context.directory, checkpoint.cut_number + 1, segment_ids=made, ahead=ahead
        )
        failpoint("recovery.orphans_removed")
        return ahead

    def _anchor(self, checkpoint: Checkpoint) -> None:
        self.cuts.anchor(
            checkpoint.cut_number, crc32c=checkpoint.manifest_crc32c, tick=checkpoint.tick
        )

    def _on_cut(self, checkpoint: Checkpoint, cut: Cut) -> None:
        self.cuts.append(cut)
        self.checkpoint = checkpoint
        self._last_cut = cut
        self._file_faults = 0
        self._wake()

    async def _end_run(self, state: FlusherState, error: BaseException) -> None:
        directory = self._context.directory
        wanted = short_of(error)
        self._short = None
        if wanted == "disk space":
            free_bytes = await in_thread(directory.free_bytes)
            unwritten = self._run.open_cut.taken_bytes if self._run else 0
            self._short = StorageFull(
                str(directory.root), free_bytes, max(unwritten, free_bytes + SPACE_BYTES_MIN)
            )
        elif wanted == "file descriptors":
            self._short = no_descriptor_left(directory.root, error)
        error = self._short or error
        self._last_error = f"{type(error).__name__}: {error}"
        if state is FlusherState.BACKING_OFF:
            self._faults += 1
            self._file_faults = self._file_faults + 1 if isinstance(error, OSError) else 0
            _log.warning("flush_failed", error=self._last_error, faults=self._faults)
        elif isinstance(error, StreamingNodeError):
            self._failure = error
            if state is FlusherState.FAILED:  # a closing node is not an error
                _log.error("flusher_stopped", error=self._last_error)
        self._enter(state)

    def _enter(self, state: FlusherState) -> None:
        self.state = state
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class CutSchedule:
    """Requests cuts, at time boundaries and when many bytes are unflushed. The shard manager makes
    no empty cuts.
    """

    def __init__(self, options: CutScheduleOptions, *, now_ms: Callable[[], int]) -> None:
        self._options = options
        self._now_ms = now_ms
        self._full = asyncio.Event()
        self._asked = 0

    def report(self, cut_number: int, unflushed_bytes: int) -> None:
        """Record that `unflushed_bytes` will go into cut `cut_number`; a run calls this as it
        reads.
        """
        # A requested cut travels through the log: until the flusher reads it, the bytes that it
        # covers must not request another.
        if cut_number > self._asked and unflushed_bytes >= self._options.bytes_max:
            self._full.set()

    async def run(self, request_cut: Callable[[], Awaitable[int]]) -> None:
        """Request cuts until the log is closed; a request that failed is repeated at the next
        boundary.

        `request_cut` returns the number of the cut that covers everything appended before, whether
        made now or earlier.
        """
        is_open = True
        while is_open:
            with anyio.move_on_after(self.seconds_to_boundary()):
                await self._full.wait()
            self._full = asyncio.Event()
            is_open = await _try(self._ask(request_cut), "cut_not_made")

    async def _ask(self, request_cut: Callable[[], Awaitable[int]]) -> None:
        self._asked = await request_cut()

    def seconds_to_boundary(self) -> float | None:
        """Return the seconds to the next multiple of the interval since the epoch, never 0; None
        without an interval.

        Multiples of the epoch align the cuts of several nodes without a coordinator.
        """
        if self._options.interval_s is None:
            return None
        # Whole milliseconds: a remainder of nanoseconds would request a second cut.
        interval_ms = max(1, round(self._options.interval_s * 1000))
        return (interval_ms - self._now_ms() % interval_ms) / 1000
