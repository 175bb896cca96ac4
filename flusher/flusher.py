"""The flusher of one pchannel: keeps a run going, through failures of the disk, for as long as the node lives.

A fault of the disk (or of the log store) throws the run away and starts another from the checkpoint after a pause: the same
path as after a crash, so there is only one. Nothing is lost by that, because the log is truncated only behind checkpoints.
A full disk is such a fault, and so are file descriptors that run out: whoever waits for a cut hears of it, and the next run
begins as soon as there is more of what it lacked. Of other faults they hear when several tries in a row have failed.
Damage, where stored bytes are not what was written, is not retried: the flusher stops, the log grows, and whoever waits
for a cut gets the error; appends and readers go on. A write of the log store whose outcome is open is a fault like others:
the store is reopened meanwhile, and the stored checkpoint then says what became of it.
"""

import errno
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, unique
from pathlib import Path

import anyio
from anyio import to_thread

from flusher.checkpoint import NO_CHECKPOINT, Checkpoint, checkpoint_key, decode_checkpoint
from flusher.cut_log import Cut, CutLog, cut_numbers
from flusher.cuts import (
    NO_CUT,
    CutResult,
    are_all_there,
    cut_ahead,
    cut_result,
    decode_first_kept,
    kept_cuts_key,
    remove_orphans,
)
from flusher.directory import NodeDirectory
from flusher.retention import Retention, finish_removal
from flusher.run import FlushContext, FlushOptions, FlushRun
from interceptors.shard.state import ShardState
from interceptors.txn import steady_ms
from scanner.deliver_policy import DeliverPolicy
from scanner.scanner import Scanner
from wal.errors import ChannelFenced, Corrupt, OnShutdown, Overloaded, StorageFailed, StorageFull, StreamingNodeError
from wal.failpoint import failpoint
from wal.files import no_descriptor_left
from wal.live_tail import LiveTail
from wal.log import Log, LogStore
from wal.position import message_id_kind
from wal.tasks import event_log

# --- flusher state ---
#
# The states of a flusher, what changes them, and what an error of a run means for it. Pure.
#
# RECOVERING --recovered--> RUNNING --fault--> BACKING_OFF --retry--> RECOVERING any of these --damage--> FAILED any of
# these --close--> CLOSED
#
# `flusher` says what each of them is about.


@unique
class FlusherState(Enum):
    """What the flusher is doing."""

    RECOVERING = "recovering"
    RUNNING = "running"
    BACKING_OFF = "backing off"
    FAILED = "failed"
    CLOSED = "closed"


@unique
class FlusherEvent(Enum):
    """What changes that."""

    RECOVERED = "recovered"
    FAULT = "fault"
    RETRY = "retry"
    DAMAGE = "damage"
    CLOSE = "close"


@unique
class Shortage(Enum):
    """What a run may lack that the flusher cannot make room for: whoever waits for a cut hears of it."""

    DISK_SPACE = "disk space"
    DESCRIPTORS = "file descriptors"


ALIVE = (FlusherState.RECOVERING, FlusherState.RUNNING, FlusherState.BACKING_OFF)

TRANSITIONS: dict[tuple[FlusherState, FlusherEvent], FlusherState] = {
    (FlusherState.RECOVERING, FlusherEvent.RECOVERED): FlusherState.RUNNING,
    (FlusherState.RECOVERING, FlusherEvent.FAULT): FlusherState.BACKING_OFF,
    (FlusherState.RUNNING, FlusherEvent.FAULT): FlusherState.BACKING_OFF,
    (FlusherState.BACKING_OFF, FlusherEvent.RETRY): FlusherState.RECOVERING,
    **{(state, FlusherEvent.DAMAGE): FlusherState.FAILED for state in ALIVE},
    **{(state, FlusherEvent.CLOSE): FlusherState.CLOSED for state in ALIVE},
}


def classify(error: BaseException) -> FlusherEvent | None:
    """Return what an error of a run means for the flusher; None for one that is a bug and is not caught."""
    match error:
        case BaseExceptionGroup(exceptions=errors):
            events = [classify(each) for each in errors]
            order = (None, FlusherEvent.CLOSE, FlusherEvent.DAMAGE, FlusherEvent.FAULT)
            return next(event for event in order if event in events)
        case OnShutdown() | ChannelFenced():
            return FlusherEvent.CLOSE
        case OSError() | StorageFailed() | StreamingNodeError(retryable="yes" | "indeterminate"):
            return FlusherEvent.FAULT
        case StreamingNodeError():
            return FlusherEvent.DAMAGE
        case _:
            return None


def shortage_of(error: BaseException) -> Shortage | None:
    """Return what a run ended for want of, None when it was something else."""
    match error:
        case BaseExceptionGroup(exceptions=errors):
            return next((found for each in errors if (found := shortage_of(each)) is not None), None)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT) | StorageFull():
            return Shortage.DISK_SPACE
        case OSError(errno=errno.EMFILE | errno.ENFILE) | Overloaded():
            return Shortage.DESCRIPTORS  # nothing but the log store raises `Overloaded` in a run
        case _:
            return None


_log = event_log(__name__)

_ENDS = (OnShutdown, ChannelFenced)
ROOM_LOOK_S = 0.25
"""How often a flusher that lacks something looks whether there is more of it."""
ROOM_BYTES = 1 << 20
"""How much more has to be free to try again before the pause is over; less is noise of other programs."""
DESCRIPTORS = 8
"""What has to be free of them to try again before that: for files being written, a directory to sync, tables of RocksDB."""

LASTING_FAULTS = 3
"""Who waits for a cut hears of its files when so many tries in a row could not write them: after 1.5 s by default."""


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


async def always_back() -> None:
    """Return at once, where a log is never reopened."""


async def no_producers(_tick: int) -> bytes | None:
    """Save nothing, where nobody writes with producers."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushHooks:
    """What the flusher asks of, and tells, the rest of the node.

    `reader_floor` returns the lowest position of the log that a named reader still needs, None without one;
    `on_progress` is told the number of the cut in the making and how many bytes wait for it; `on_kept_tick` a tick at or
    below which cuts are published and no reader starts any more, after each round of retention. `save_producers` returns
    what the checkpoint of a cut at a tick keeps of producers; it is asked once readers have everything up to that tick.
    `log_is_back` returns once the log takes writes, and raises what its callers get when that takes too long.
    `next_id` returns an id above those of all segments that the log has so far.
    `elapsed_ms` is a clock that nobody sets, in milliseconds from an arbitrary start.
    """

    reader_floor: Callable[[], int | None] = lambda: None
    on_progress: Callable[[int, int], None] = lambda _number, _bytes: None
    on_kept_tick: Callable[[int], None] = lambda _tick: None
    save_producers: Callable[[int], Awaitable[bytes | None]] = no_producers
    log_is_back: Callable[[], Awaitable[object]] = always_back
    next_id: Callable[[], int] = lambda: sys.maxsize
    elapsed_ms: Callable[[], int] = steady_ms


NO_HOOKS = FlushHooks()


class Flusher:
    """Flushes one pchannel into the files of a node directory. Lives on the event loop; heavy work is in threads.

    `checkpoint` is the stored one, for those who ask before the first run has read it: the log before it may be gone.
    `now_ms` is the clock that ticks follow.
    """

    def __init__(
        self,
        root: Path | NodeDirectory,
        store: LogStore,
        log: Log,
        tail: LiveTail | None,
        *,
        options: FlushOptions,
        now_ms: Callable[[], int],
        hooks: FlushHooks = NO_HOOKS,
        checkpoint: Checkpoint = NO_CHECKPOINT,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.state = FlusherState.RECOVERING
        directory = root if isinstance(root, NodeDirectory) else NodeDirectory(root)
        self.cuts = CutLog(directory, node_id=store.node_id)
        self.cuts.anchor(
            checkpoint.cut_number, crc32c=checkpoint.manifest_crc32c, tick=checkpoint.tick
        )  # reads nothing
        self._directory = self.cuts.directory
        self._store = store
        self._channel_log = log
        self._tail = tail
        self._options = options
        self._hooks = hooks
        self._sleep = sleep
        self.retention = Retention(
            self.cuts,
            store,
            log,
            options=options.retention,
            now_ms=now_ms,
            elapsed_ms=hooks.elapsed_ms,
            reader_floor=hooks.reader_floor,
        )
        self._context = FlushContext(
            cuts=self.cuts,
            store=store,
            pchannel=log.name,
            options=options,
            now_ms=now_ms,
            on_cut=self._on_cut,
            on_progress=hooks.on_progress,
            kept_tick=lambda: self._kept_tick,
            save_producers=hooks.save_producers,
        )
        self._run: FlushRun | None = None
        self._checkpoint = checkpoint
        self._kept_tick = 0
        self._last_cut = NO_CUT
        self._changed = anyio.Event()
        self._failure: StreamingNodeError = OnShutdown("the flusher is closed")
        self._short: StorageFull | Overloaded | None = None
        """What keeps the flusher from its work, and would keep whoever waits for a cut waiting."""
        self._faults = self._file_faults = 0
        self._last_error = ""

    @property
    def checkpoint(self) -> Checkpoint:
        """The last durable checkpoint; everything at or below its tick is in files."""
        return self._checkpoint

    async def run(self) -> None:
        """Flush until cancelled, until the log is closed, or until damage is found; faults of the disk are outlived."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._retain)
                await self._keep_running()
                tasks.cancel_scope.cancel()
        finally:
            if self.state in ALIVE:
                self._apply(FlusherEvent.CLOSE)

    async def wait_for_cut(self, number: int) -> CutResult:
        """Return cut `number` once its checkpoint is durable, at once if it is already; cut 0 stands for "none yet".

        Raises `StorageFull` when the disk has no room for its files, `Overloaded` when this process may open no more: they
        are written once that has changed. Raises `StorageFailed` when one try after the other fails, and
        what `log_is_back` raises; tries go on, so the cut is made when that is over. Raises `Corrupt` and the like when the
        flusher has found damage, `OnShutdown` when it is closed, `Truncated` for a cut that is no longer kept.
        """
        if self._short is not None and self._checkpoint.cut_number < number:
            await self._look_for_relief()
        faults = self._faults
        while self._checkpoint.cut_number < number:
            if self.state not in ALIVE:
                raise self._failure
            if self._short is not None:
                raise self._short
            if self._faults > faults and not self._file_faults:  # of the log
                faults = self._faults
                await self._hooks.log_is_back()
                continue
            if self._faults > faults and self._file_faults >= LASTING_FAULTS:
                raise StorageFailed(
                    f"cut {number} is not made: {self._file_faults} tries in a row failed, the last with "
                    f"{self._last_error} — check the disk; it is tried on by itself"
                )
            if self._run is not None:
                self._run.hurry()
            await self._changed.wait()
        if number in {NO_CUT.number, self._last_cut.number}:
            return self._last_cut if number else NO_CUT
        return cut_result(await to_thread.run_sync(self.cuts.read, number))

    async def enforce_retention(self, *, short_of_space: bool = False) -> None:
        """Give up log and cuts that nobody needs, now; also done every `retention.interval_s` seconds.

        With `short_of_space` log is kept for `retention.min_age_short_s` only. Raises `OSError` and what the log raises;
        nothing that is needed is lost then.
        """
        if self._run is not None and self._checkpoint.cut_number:
            live = frozenset(info.id for info in self._run.state.catalog.collections())
            self._kept_tick = await self.retention.enforce(self._checkpoint, live, short_of_space=short_of_space)
            self._hooks.on_kept_tick(self._kept_tick)

    async def check_cuts(self) -> None:
        """Raise `Corrupt` when cuts are missing that retention did not give up."""
        numbers = await to_thread.run_sync(cut_numbers, self._directory)
        # Asked for after the cuts were listed: it goes up before a cut goes.
        first_kept = await self._first_kept()
        if not are_all_there(numbers, first_kept):
            raise Corrupt(f"of the cuts {first_kept} to {numbers[-1]} some are lost — restore them from a backup")

    def statistics(self) -> FlusherStatistics:
        """Return the present levels and counts."""
        cut = self._run.open_cut if self._run else None
        return FlusherStatistics(
            state=self.state,
            short_of=self._short_of,
            cut_number=self._checkpoint.cut_number,
            cut_tick=self._checkpoint.tick,
            cut_crc32c=self._checkpoint.manifest_crc32c,
            checkpoint_position=self._checkpoint.position,
            unflushed_rows=cut.rows if cut else 0,
            unflushed_bytes=cut.taken_bytes if cut else 0,
            held_bytes=cut.held_bytes if cut else 0,
            open_files=sum(1 for _ in cut.files()) if cut else 0,
            faults=self._faults,
            last_error=self._last_error,
        )

    async def _keep_running(self) -> None:
        pause_s = self._options.retry_first_s
        while self.state in ALIVE:
            cut_before = self._checkpoint.cut_number
            try:
                await self._run_once()
            except (Exception, BaseExceptionGroup) as error:
                event = classify(error)
                if event is None:
                    raise
                self._short = await self._shortage(error)
                self._note(self._short or error, event)
            if self.state is FlusherState.BACKING_OFF:
                pause_s = self._options.retry_first_s if self._checkpoint.cut_number > cut_before else pause_s
                await self._back_off(pause_s)
                pause_s = min(2 * pause_s, self._options.retry_max_s)
                self._short = None
                self._apply(FlusherEvent.RETRY)

    async def _run_once(self) -> None:
        stored = await self._store.get_meta(checkpoint_key(self._channel_log.name))
        checkpoint = decode_checkpoint(stored)
        failpoint("recovery.checkpoint_read")
        ahead = await to_thread.run_sync(self._tidy, checkpoint, self._hooks.next_id())
        self._checkpoint = checkpoint
        self._run = FlushRun(self._context, checkpoint, ahead)
        scanner = self._open_scanner(checkpoint)
        self._apply(FlusherEvent.RECOVERED)
        try:
            await self._run.follow(scanner)
        finally:
            await scanner.close()

    # --- a full disk, and descriptors that run out ------------------------------------------------------------------------

    async def _back_off(self, pause_s: float) -> None:
        """Wait that long; for want of something only until there is more of it."""
        if self._short is None:
            await self._sleep(pause_s)
            return
        while pause_s > 0 and self._short is not None:
            await self._sleep(min(pause_s, ROOM_LOOK_S))
            pause_s -= ROOM_LOOK_S
            await self._look_for_relief()

    async def _look_for_relief(self) -> None:
        """Forget what the flusher was short of if there is more of it by now."""
        if isinstance(self._short, StorageFull):
            before = self._short.free_bytes
            relieved = await to_thread.run_sync(self._directory.free_bytes) >= before + ROOM_BYTES
        else:
            relieved = await to_thread.run_sync(self._directory.can_open, DESCRIPTORS)
        if relieved:
            self._short = None

    async def _shortage(self, error: BaseException) -> StorageFull | Overloaded | None:
        shortage = shortage_of(error)
        if shortage is None:
            return None
        if shortage is Shortage.DESCRIPTORS:
            return no_descriptor_left(self._directory.root, _first(error))
        free_bytes = await to_thread.run_sync(self._directory.free_bytes)
        unwritten = self._run.open_cut.taken_bytes if self._run else 0
        return StorageFull(str(self._directory.root), free_bytes, max(unwritten, free_bytes + ROOM_BYTES))

    @property
    def _short_of(self) -> str:
        match self._short:
            case None:
                return ""
            case StorageFull():
                return Shortage.DISK_SPACE.value
            case Overloaded():
                return Shortage.DESCRIPTORS.value

    # --- a run and its end ------------------------------------------------------------------------------------------------

    async def _first_kept(self) -> int:
        return decode_first_kept(await self._store.get_meta(kept_cuts_key(self._channel_log.name)))

    def _tidy(self, checkpoint: Checkpoint, next_id: int) -> Cut | None:
        ahead = cut_ahead(self._directory, checkpoint)
        self.cuts.anchor(checkpoint.cut_number, crc32c=checkpoint.manifest_crc32c, tick=checkpoint.tick)
        failpoint("recovery.cuts_compared")
        stored = checkpoint.shard_state
        made = range(1 if stored is None else ShardState.restore(stored).next_id, next_id)
        removed = finish_removal(self.cuts)
        removed += remove_orphans(self._directory, checkpoint.cut_number + 1, segment_ids=made, ahead=ahead)
        failpoint("recovery.orphans_removed")
        if removed:
            _log.info("orphans_removed", count=len(removed), first=removed[0])
        return ahead

    def _open_scanner(self, checkpoint: Checkpoint) -> Scanner:
        start = message_id_kind(self._channel_log.wal_name)(checkpoint.start_position)
        policy = DeliverPolicy.start_from(start)
        return Scanner(self._channel_log, self._tail, policy, after_tick=checkpoint.tick, name="flusher")

    async def _retain(self) -> None:
        while True:
            await self._sleep(self._options.retention.interval_s)
            try:
                await self.enforce_retention()
            except _ENDS:
                return
            except (OSError, StreamingNodeError) as error:
                _log.warning("retention_failed", error=str(error))

    def _on_cut(self, checkpoint: Checkpoint, cut: CutResult) -> None:
        self._checkpoint, self._last_cut = checkpoint, cut
        self._file_faults = 0
        self._wake()

    def _note(self, error: BaseException, event: FlusherEvent) -> None:
        error = _first(error)
        self._last_error = f"{type(error).__name__}: {error}"
        if event is FlusherEvent.FAULT:
            self._faults += 1
            self._file_faults = self._file_faults + 1 if isinstance(error, OSError) else 0
            _log.warning("flush_failed", error=self._last_error, faults=self._faults)
        elif isinstance(error, StreamingNodeError):
            self._failure = error
            say = _log.error if event is FlusherEvent.DAMAGE else _log.info  # a closing node is nothing to worry about
            say("flusher_stopped", error=self._last_error)
        self._apply(event)

    def _apply(self, event: FlusherEvent) -> None:
        self.state = TRANSITIONS[self.state, event]
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
