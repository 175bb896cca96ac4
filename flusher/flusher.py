"""The flusher of one pchannel: keeps a run going, through failures of the disk, for as long as the node lives.

A fault of the disk, or of the log store, throws the run away and starts another from the checkpoint after a pause: the same
path as after a crash, so there is only one, and nothing is lost, because the log is truncated only behind checkpoints.
Damage is not retried: the flusher stops, the log grows, whoever waits for a cut gets the error; appends and readers go on.
"""

import errno
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, unique

import anyio
from anyio import to_thread

from flusher.cuts import are_all_there, cut_ahead, decode_first_kept, kept_cuts_key, remove_orphans
from flusher.directory import Cut, CutLog, cut_numbers
from flusher.manifest import NO_CHECKPOINT, Checkpoint, checkpoint_key, decode_checkpoint
from flusher.retention import Retention, finish_removal
from flusher.run import CutScheduleOptions, FlushContext, FlushRun
from scanner.deliver_policy import DeliverPolicy
from scanner.scanner import Scanner
from wal.errors import ChannelFenced, Corrupt, OnShutdown, Overloaded, StorageFailed, StorageFull, StreamingNodeError
from wal.failpoint import failpoint
from wal.files import no_descriptor_left
from wal.position import message_id_kind
from wal.runtime import event_log

ROOM_LOOK_S = 0.25
"""How often a flusher that is short of something looks whether there is more of it."""
ROOM_BYTES = 1 << 20
"""How much more has to be free to try again before the pause is over; less is noise of other programs."""
DESCRIPTORS = 8
"""What has to be free of them to try again before that: for files being written, a directory to sync, tables of RocksDB."""
SPACE_LOOK_S = 0.25
"""How soon a store that is short of space is noticed, and how long it needs to notice that it no longer is."""
SPACE_PAUSE_FIRST_S, SPACE_PAUSE_MAX_S = 0.5, 5.0
"""Making room that did not help is tried again after a pause that doubles: a disk that stays short costs cuts so often."""
LASTING_FAULTS = 3
"""Who waits for a cut hears of its files when so many tries in a row could not write them: after 1.5 s by default."""

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
    """Return what the flusher is in after an error of a run; None for one that is a bug and is not caught."""
    match error:
        case BaseExceptionGroup(exceptions=errors):
            states = [state_after(each) for each in errors]
            order = (None, FlusherState.CLOSED, FlusherState.FAILED, FlusherState.BACKING_OFF)
            return next(state for state in order if state in states)
        case OnShutdown() | ChannelFenced():
            return FlusherState.CLOSED
        case OSError() | StorageFailed() | StreamingNodeError(retryable="yes" | "indeterminate"):
            # Of a write whose outcome is open the stored checkpoint says what became of it, once the store is reopened.
            return FlusherState.BACKING_OFF
        case StreamingNodeError():
            return FlusherState.FAILED
        case _:
            return None


def short_of(error: BaseException | None) -> str:
    """Return what a run ended for want of, that the flusher cannot make room for; nothing when it was something else."""
    match error:
        case BaseExceptionGroup(exceptions=errors):
            return next(filter(None, map(short_of, errors)), "")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT) | StorageFull():
            return "disk space"
        case OSError(errno=errno.EMFILE | errno.ENFILE) | Overloaded():
            return "file descriptors"  # nothing but the log store raises `Overloaded` in a run
        case _:
            return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlusherStatistics:
    """Where the flusher is: what the last cut covered, what waits for the next, how often the disk failed.

    `short_of` names what it waits for to have more of before it tries again; nothing is "".
    """

    state: FlusherState
    short_of: str
    cut_number: int
    cut_tick: int
    cut_crc32c: int
    checkpoint_position: int
    unflushed_rows: int
    unflushed_bytes: int
    held_bytes: int
    open_files: int
    faults: int
    last_error: str


class Flusher:
    """Flushes one pchannel into the files of a node directory. Lives on the event loop; heavy work is in threads.

    `checkpoint` is the stored one, for those who ask before the first run has read it: the log before it may be gone.
    """

    def __init__(
        self,
        context: FlushContext,
        *,
        checkpoint: Checkpoint = NO_CHECKPOINT,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.state = FlusherState.RECOVERING
        self.checkpoint = checkpoint
        """The last durable checkpoint; everything at or below its tick is in files."""
        self.cuts = CutLog(context.directory, node_id=context.store.node_id)
        self._anchor(checkpoint)  # reads nothing
        self.schedule = CutSchedule(context.options.schedule, now_ms=context.now_ms)
        self.retention = Retention(
            self.cuts,
            context.store,
            context.log,
            options=context.options.retention,
            now_ms=context.now_ms,
            elapsed_ms=context.elapsed_ms,
            reader_floor=context.reader_floor,
        )
        self._context = context
        self._sleep = sleep
        self._run: FlushRun | None = None
        self._last_cut: Cut | None = None
        self._changed = anyio.Event()
        self._failure: StreamingNodeError = OnShutdown("the flusher is closed")
        self._short: StorageFull | Overloaded | None = None
        """What keeps the flusher from its work, and would keep whoever waits for a cut waiting."""
        self._faults = self._file_faults = 0
        self._last_error = ""

    async def run(self) -> None:
        """Flush until cancelled, until the log is closed, or until damage is found; faults of the disk are outlived."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._retain)
                await self._keep_running()
                tasks.cancel_scope.cancel()
        finally:
            if self.state in ALIVE:
                self._enter(FlusherState.CLOSED)

    async def wait_for_cut(self, number: int) -> Cut:
        """Return cut `number` once its checkpoint is durable, at once if it is already.

        Raises `StorageFull` when the disk has no room for its files, `Overloaded` when this process may open no more: they
        are written once that has changed. Raises `StorageFailed` when one try after the other fails, and
        what `log_is_back` raises; tries go on, so the cut is made when that is over. Raises `Corrupt` and the like when the
        flusher has found damage, `OnShutdown` when it is closed, `Truncated` for a cut that is no longer kept.
        """
        if self._short is not None and self.checkpoint.cut_number < number:
            await self._look_for_more()
        faults = self._faults
        while self.checkpoint.cut_number < number:
            if self.state not in ALIVE:
                raise self._failure
            if self._short is not None:
                raise self._short
            if self._faults > faults and not self._file_faults:  # of the log
                faults = self._faults
                await self._context.log_is_back()
                continue
            if self._faults > faults and self._file_faults >= LASTING_FAULTS:
                raise StorageFailed(
                    f"cut {number} is not made: {self._file_faults} tries in a row failed, the last with "
                    f"{self._last_error} — check the disk; it is tried on by itself"
                )
            if self._run is not None:
                self._run.stop_gathering()
            await self._changed.wait()
        if self._last_cut is not None and self._last_cut.number == number:
            return self._last_cut  # not kept by `cuts`: what becomes of it on disk is noticed by who reads it there
        return await to_thread.run_sync(self.cuts.read, number)

    async def enforce_retention(self, *, short_of_space: bool = False) -> None:
        """Give up log and cuts that nobody needs, now; also done every `retention.interval_s` seconds.

        With `short_of_space` log is kept for `retention.min_age_short_s` only. Raises `OSError` and what the log raises;
        nothing that is needed is lost then.
        """
        run = self._run
        if run is not None and self.checkpoint.cut_number:
            live = frozenset(info.id for info in run.state.catalog.collections())
            kept_tick = await self.retention.enforce(self.checkpoint, live, short_of_space=short_of_space)
            run.state.forget_below(kept_tick)
            self._context.on_kept_tick(kept_tick)

    async def check_cuts(self) -> None:
        """Raise `Corrupt` when cuts are missing that retention did not give up."""
        numbers = await to_thread.run_sync(cut_numbers, self._context.directory)
        # Asked for after the cuts were listed: it goes up before a cut goes.
        first_kept = decode_first_kept(await self._context.store.get_meta(kept_cuts_key(self._context.log.name)))
        if not are_all_there(numbers, first_kept):
            raise Corrupt(f"of the cuts {first_kept} to {numbers[-1]} some are lost — restore them from a backup")

    def statistics(self) -> FlusherStatistics:
        """Return the present levels and counts."""
        cut = self._run.open_cut if self._run else None
        return FlusherStatistics(
            state=self.state,
            short_of=short_of(self._short),
            cut_number=self.checkpoint.cut_number,
            cut_tick=self.checkpoint.tick,
            cut_crc32c=self.checkpoint.manifest_crc32c,
            checkpoint_position=self.checkpoint.position,
            unflushed_rows=cut.rows if cut else 0,
            unflushed_bytes=cut.taken_bytes if cut else 0,
            held_bytes=cut.held_bytes if cut else 0,
            open_files=len(cut.files) if cut else 0,
            faults=self._faults,
            last_error=self._last_error,
        )

    async def _retain(self) -> None:
        while True:
            await self._sleep(self._context.options.retention.interval_s)
            try:
                await self.enforce_retention()
            except (OnShutdown, ChannelFenced):
                return
            except (OSError, StreamingNodeError) as error:
                _log.warning("retention_failed", error=str(error))

    # --- a store that is short of space -----------------------------------------------------------------------------------

    async def reclaim_space(self, request_cut: Callable[[], Awaitable[int]]) -> None:
        """Make room before appends have to be refused, until the log is closed. `request_cut` as in `CutSchedule.run`."""
        store, pause_s = self._context.store, SPACE_PAUSE_FIRST_S
        while True:
            await self._sleep(SPACE_LOOK_S)
            if not store.short_of_space:
                pause_s = SPACE_PAUSE_FIRST_S
                continue
            try:
                await self._make_room(request_cut)
            except (OnShutdown, ChannelFenced):
                return
            except (OSError, StreamingNodeError) as error:
                _log.warning("no_room_made", error=str(error))
            await self._sleep(SPACE_LOOK_S)
            if store.short_of_space:
                await self._sleep(pause_s)
                pause_s = min(2 * pause_s, SPACE_PAUSE_MAX_S)
            else:
                pause_s = SPACE_PAUSE_FIRST_S

    async def _make_room(self, request_cut: Callable[[], Awaitable[int]]) -> None:
        await self.enforce_retention(short_of_space=True)  # what is in files, and nobody needs
        await self._sleep(SPACE_LOOK_S)
        if self._context.store.short_of_space:
            if number := await request_cut():
                await self.wait_for_cut(number)
            await self.enforce_retention(short_of_space=True)  # and what the cut brought into files

    # --- one run after the other ------------------------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        options = self._context.options
        pause_s = options.retry_first_s
        while self.state in ALIVE:
            cut_before = self.checkpoint.cut_number
            try:
                await self._run_once()
            except (Exception, BaseExceptionGroup) as error:
                state = state_after(error)
                if state is None:
                    raise
                self._short = await self._shortage(error)
                self._end_run(self._short or _first(error), state)
            if self.state is FlusherState.BACKING_OFF:
                pause_s = options.retry_first_s if self.checkpoint.cut_number > cut_before else pause_s
                await self._back_off(pause_s)
                pause_s = min(2 * pause_s, options.retry_max_s)
                self._short = None
                self._enter(FlusherState.RECOVERING)

    async def _run_once(self) -> None:
        log = self._context.log
        checkpoint = decode_checkpoint(await self._context.store.get_meta(checkpoint_key(log.name)))
        failpoint("recovery.checkpoint_read")
        ahead = await to_thread.run_sync(self._tidy, checkpoint, self._context.next_id())
        self.checkpoint = checkpoint
        self._run = FlushRun(
            self._context, self.cuts, checkpoint, ahead, report=self.schedule.report, on_cut=self._on_cut
        )
        policy = DeliverPolicy.start_from(message_id_kind(log.wal_name)(checkpoint.start_position))
        scanner = Scanner(log, self._context.tail, policy, after_tick=checkpoint.tick, name="flusher")
        self._enter(FlusherState.RUNNING)
        try:
            await self._run.follow(scanner)
        finally:
            await scanner.close()

    def _tidy(self, checkpoint: Checkpoint, next_id: int) -> Cut | None:
        """Remove what a crash left, and return the cut that is ahead of its checkpoint."""
        ahead = cut_ahead(self._context.directory, checkpoint)
        self._anchor(checkpoint)
        failpoint("recovery.cuts_compared")
        removed = finish_removal(self.cuts)
        made = range(checkpoint.state().next_id, next_id)
        removed += remove_orphans(self._context.directory, checkpoint.cut_number + 1, segment_ids=made, ahead=ahead)
        failpoint("recovery.orphans_removed")
        if removed:
            _log.info("orphans_removed", count=len(removed), first=removed[0])
        return ahead

    def _anchor(self, checkpoint: Checkpoint) -> None:
        self.cuts.anchor(checkpoint.cut_number, crc32c=checkpoint.manifest_crc32c, tick=checkpoint.tick)

    def _on_cut(self, checkpoint: Checkpoint, cut: Cut) -> None:
        self.checkpoint, self._last_cut = checkpoint, cut
        self._file_faults = 0
        self._wake()

    def _end_run(self, error: BaseException, state: FlusherState) -> None:
        self._last_error = f"{type(error).__name__}: {error}"
        if state is FlusherState.BACKING_OFF:
            self._faults += 1
            self._file_faults = self._file_faults + 1 if isinstance(error, OSError) else 0
            _log.warning("flush_failed", error=self._last_error, faults=self._faults)
        elif isinstance(error, StreamingNodeError):
            self._failure = error
            say = _log.error if state is FlusherState.FAILED else _log.info  # a closing node is nothing to worry about
            say("flusher_stopped", error=self._last_error)
        self._enter(state)

    def _enter(self, state: FlusherState) -> None:
        self.state = state
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # --- a full disk, and descriptors that run out ------------------------------------------------------------------------

    async def _back_off(self, pause_s: float) -> None:
        """Wait that long; for want of something only until there is more of it."""
        if self._short is None:
            await self._sleep(pause_s)
        while pause_s > 0 and self._short is not None:
            await self._sleep(min(pause_s, ROOM_LOOK_S))
            pause_s -= ROOM_LOOK_S
            await self._look_for_more()

    async def _look_for_more(self) -> None:
        """Forget what the flusher was short of if there is more of it by now."""
        if isinstance(self._short, StorageFull):
            before = self._short.free_bytes
            is_more = await to_thread.run_sync(self._context.directory.free_bytes) >= before + ROOM_BYTES
        else:
            is_more = await to_thread.run_sync(self._context.directory.can_open, DESCRIPTORS)
        if is_more:
            self._short = None

    async def _shortage(self, error: BaseException) -> StorageFull | Overloaded | None:
        """Return what whoever waits for a cut is told when a run ended for want of something."""
        what = short_of(error)
        if not what:
            return None
        if what == "file descriptors":
            return no_descriptor_left(self._context.directory.root, _first(error))
        free_bytes = await to_thread.run_sync(self._context.directory.free_bytes)
        unwritten = self._run.open_cut.taken_bytes if self._run else 0
        return StorageFull(str(self._context.directory.root), free_bytes, max(unwritten, free_bytes + ROOM_BYTES))


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# --- when a cut is asked for ------------------------------------------------------------------------------------------


def seconds_to_boundary(now_ms: int, interval_s: float | None) -> float | None:
    """Return how long it is to the next multiple of the interval since the epoch, in seconds; never 0, None without one.

    So the cuts of several nodes line up without a coordinator.
    """
    if interval_s is None:
        return None
    interval_ms = max(1, round(interval_s * 1000))
    return (interval_ms - now_ms % interval_ms) / 1000


class CutSchedule:
    """Asks for cuts, at boundaries of time and when much is unflushed; the shard manager makes none that would be empty."""

    def __init__(self, options: CutScheduleOptions, *, now_ms: Callable[[], int]) -> None:
        self._options = options
        self._now_ms = now_ms
        self._full = anyio.Event()
        self._asked = 0

    def report(self, cut_number: int, unflushed_bytes: int) -> None:
        """Take in how many bytes will go into cut `cut_number`; a run calls this as it reads."""
        # A cut asked for is on its way through the log: until the flusher meets it, the bytes it covers do not ask again.
        if cut_number > self._asked and unflushed_bytes >= self._options.bytes_max:
            self._full.set()

    async def run(self, request_cut: Callable[[], Awaitable[int]]) -> None:
        """Ask until the log is closed; a cut that could not be made is asked for again at the next boundary.

        `request_cut` returns the number of the cut that covers everything appended before, made now or earlier.
        """
        while True:
            await self._wait()
            self._full = anyio.Event()
            try:
                self._asked = await request_cut()
            except (OnShutdown, ChannelFenced):
                return
            except StreamingNodeError as error:
                _log.warning("cut_not_made", code=error.code, error=str(error))

    async def _wait(self) -> None:
        with anyio.move_on_after(seconds_to_boundary(self._now_ms(), self._options.interval_s)):
            await self._full.wait()
