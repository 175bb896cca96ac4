"""Group commit as the event loop sees it: whether writes are taken, room in the queue, and what became of them.

In: writes from logs and the state map. Out: settled futures, in order. The writer thread (`writer.py`) does the work; this
side keeps the state machine of the store:

    OPEN --write failed--> POISONED --reopen--> REOPENING --released--> VERIFYING --verified--> OPEN
                              ^                                             |
                              +----------------- reopen failed -------------+
    OPEN, POISONED, REOPENING --taken over--> FENCED        any of these --close--> CLOSED

A failed write poisons the store: the writes from it on are `Indeterminate`, and later ones are refused with the same error
until the database was closed, verified and opened again. Reads of logs go on, but for the time that takes.
"""

import asyncio
from collections.abc import Callable
from enum import Enum, unique
from pathlib import Path

from wal.errors import ChannelFenced, Indeterminate, OnShutdown, StorageFailed, StorageFull, StreamingNodeError
from wal.failpoint import failpoint
from wal.queue import Admission
from wal.rocks.layout import RocksOptions
from wal.rocks.space import SpaceLevel, SpaceVerdict
from wal.rocks.writer import Write, acknowledge, fail, settle
from wal.tasks import event_log

_log = event_log(__name__)


@unique
class CommitState(Enum):
    """Whether writes are taken."""

    OPEN = "open"
    POISONED = "poisoned"
    """A write failed; what was synced can be read."""
    REOPENING = "reopening"
    """The database is being closed."""
    VERIFYING = "verifying"
    """It is checked without changing anything, then opened."""
    FENCED = "fenced"
    """Another owner's token is in the directory."""
    CLOSED = "closed"
    FORKED = "forked"


@unique
class CommitEvent(Enum):
    """What happens to a store."""

    WRITE_FAILED = "write failed"
    REOPEN_ASKED = "reopen asked"
    RELEASED = "database released"
    VERIFIED = "verified"
    REOPEN_FAILED = "reopen failed"
    TAKEN_OVER = "taken over"
    CLOSE_ASKED = "close asked"
    PROCESS_FORKED = "process forked"


_S, _E = CommitState, CommitEvent
_ON_THE_WAY = (_S.REOPENING, _S.VERIFYING)
TRANSITIONS: dict[tuple[CommitState, CommitEvent], CommitState] = {
    (_S.OPEN, _E.WRITE_FAILED): _S.POISONED,
    (_S.POISONED, _E.WRITE_FAILED): _S.POISONED,
    (_S.POISONED, _E.REOPEN_ASKED): _S.REOPENING,
    (_S.REOPENING, _E.WRITE_FAILED): _S.REOPENING,
    (_S.REOPENING, _E.RELEASED): _S.VERIFYING,
    (_S.VERIFYING, _E.VERIFIED): _S.OPEN,
    (_S.VERIFYING, _E.REOPEN_FAILED): _S.POISONED,
    **{(state, _E.TAKEN_OVER): _S.FENCED for state in (_S.OPEN, _S.POISONED, _S.REOPENING, _S.FENCED)},
    (_S.FENCED, _E.WRITE_FAILED): _S.FENCED,
    # Whoever closes a store while it reopens waits for the end of that, which changes nothing any more.
    **{(_S.CLOSED, event): _S.CLOSED for event in _E if event not in (_E.CLOSE_ASKED, _E.REOPEN_ASKED)},
    **{(state, _E.CLOSE_ASKED): _S.CLOSED for state in (_S.OPEN, _S.POISONED, *_ON_THE_WAY, _S.FENCED)},
    **{(state, _E.PROCESS_FORKED): _S.FORKED for state in _S if state is not _S.CLOSED},
}

_REFUSING = frozenset({_E.WRITE_FAILED, _E.TAKEN_OVER, _E.CLOSE_ASKED})
"""Events after which nobody who waits for room gets it. The waits of a forked child belong to its parent's event loop."""


class GroupCommit:
    """The loop's side of the writer thread: all of it runs on the event loop and none of it blocks.

    `submit` hands a write to the thread; the thread reports back to the methods at the end.
    """

    __slots__ = (
        "_admission",
        "_cause",
        "_directory",
        "_lost",
        "_options",
        "_submit",
        "has_acknowledged",
        "space",
        "state",
        "taken_over",
    )

    def __init__(self, directory: Path, options: RocksOptions, *, space: SpaceVerdict) -> None:
        self.state = CommitState.OPEN
        self.taken_over = False
        """Whether another owner has the directory, also after closing."""
        self.has_acknowledged = False
        """Whether a write was acknowledged since the store took writes last."""
        self.space = space
        self._directory = directory
        self._options = options
        self._submit: Callable[[Write], None] | None = None
        self._admission = Admission(options.queue_bytes_max)
        self._cause: Exception | None = None
        self._lost = asyncio.Event()

    def submit_to(self, submit: Callable[[Write], None]) -> None:
        """Hand writes over by `submit` from now on."""
        self._submit = submit

    @property
    def poisoned(self) -> bool:
        """Whether a write has failed since the store took writes last, also after closing."""
        return self._cause is not None

    async def wait_failed(self) -> None:
        """Wait until no writes are taken because one has failed, or because another owner has taken over."""
        await self._lost.wait()

    @property
    def queued_bytes(self) -> int:
        """Bytes handed over and not yet synced."""
        return self._admission.queued_bytes

    async def admit(self, size_bytes: int, *, makes_room: bool = False) -> None:
        """Wait for room in the queue; see `wal.log.Log.admit`."""
        self.check_writable()
        self.check_space(makes_room=makes_room)
        await self._admission.wait(size_bytes, makes_room=makes_room)

    def check_space(self, *, makes_room: bool) -> None:
        """Raise `StorageFull` when the disk is too short of space for this write."""
        if self.space.level >= (SpaceLevel.EXHAUSTED if makes_room else SpaceLevel.FULL):
            raise self._storage_full()

    def submit(self, write: Write) -> None:
        """Hand a write to the thread. Raises what the state says; a low disk stops nothing that was admitted."""
        self.check_writable()
        assert self._submit is not None, "a store that is open has a writer"
        self._admission.take(write.size_bytes)
        self._submit(write)

    def check_writable(self) -> None:
        """Raise unless writes are taken."""
        if self.state is not CommitState.OPEN:
            raise self.refusal()

    def check_readable(self) -> None:
        """Raise when the store is closed, or was opened by the process this one was forked from."""
        if self.state in (CommitState.CLOSED, CommitState.FORKED):
            raise self.refusal()

    def check_promising(self) -> None:
        """Raise unless ticks may be promised: a failed write does not hinder that, another owner does."""
        if self.state not in (CommitState.OPEN, CommitState.POISONED):
            raise self.refusal()

    def apply(self, event: CommitEvent) -> None:
        """Move to the next state, and refuse whoever waits for room where there will be none."""
        self.state = TRANSITIONS[self.state, event]
        if event in _REFUSING:
            self._admission.refuse(self.refusal())
        if event in (CommitEvent.WRITE_FAILED, CommitEvent.TAKEN_OVER):
            self._lost.set()
            self.taken_over = self.taken_over or event is CommitEvent.TAKEN_OVER
        elif event is CommitEvent.VERIFIED:
            self._lost.clear()
            self._cause = None
            self.has_acknowledged = False

    def refusal(self) -> StreamingNodeError:
        """Return the error for a call that the state does not allow."""
        match self.state:
            case CommitState.POISONED | CommitState.REOPENING | CommitState.VERIFYING:
                return _indeterminate(self._directory, self._cause)
            case CommitState.FENCED:
                return _fence_in(self._cause) or ChannelFenced(
                    f"{self._directory} was taken over by another owner — this one writes no more"
                )
            case CommitState.FORKED:
                return StorageFailed(
                    f"{self._directory} was opened before this process was forked — open it in one process only, "
                    "and start others with the spawn method"
                )
            case CommitState.OPEN | CommitState.CLOSED:
                return OnShutdown(f"{self._directory} is closed")

    # --- reports of the writer thread -----------------------------------------------------------------------------------

    def acknowledged(self, writes: list[Write]) -> None:
        """The operating system has these writes."""
        self.has_acknowledged = True
        acknowledge(writes)

    def landed(self, writes: list[Write]) -> None:
        """These writes are synced."""
        failpoint("append.landed")
        self.has_acknowledged = True
        settle(writes)
        failpoint("append.acknowledged")
        self._admission.give_back(sum(write.size_bytes for write in writes))

    def failed(self, writes: list[Write], error: Exception) -> None:
        """The outcome of these writes is open, and of all later ones; of a `ChannelFenced`, nothing was written."""
        if self._cause is None:
            _log.warning("write_failed", directory=str(self._directory), error=str(error), writes=len(writes))
        self._cause = error
        self.apply(CommitEvent.WRITE_FAILED if _fence_in(error) is None else CommitEvent.TAKEN_OVER)
        typed = isinstance(error, (ChannelFenced, Indeterminate))
        fail(writes, error if typed else _indeterminate(self._directory, error))
        self._admission.give_back(sum(write.size_bytes for write in writes))

    def space_changed(self, verdict: SpaceVerdict) -> None:
        """The disk is nearer to full than it was, or less near."""
        before, self.space = self.space, verdict
        if verdict.level is not before.level:
            say = _log.warning if verdict.level >= SpaceLevel.FULL else _log.info
            say(
                "disk_space", level=verdict.level.name, free_bytes=verdict.free_bytes, needed_bytes=verdict.needed_bytes
            )
        if verdict.level >= SpaceLevel.FULL:
            passes = verdict.level < SpaceLevel.EXHAUSTED
            self._admission.refuse(self._storage_full(), but_what_makes_room=passes)

    def _storage_full(self) -> StorageFull:
        return StorageFull(str(self._directory), self.space.free_bytes, self.space.needed_bytes)


def _fence_in(error: BaseException | None) -> ChannelFenced | None:
    """Return what says that another owner has taken over, if that is why a write failed."""
    while error is not None and not isinstance(error, ChannelFenced):
        error = error.__cause__
    return error


def _indeterminate(directory: Path, cause: Exception | None) -> Indeterminate:
    error = Indeterminate(f"a write to {directory} failed and may or may not be in the log: {cause}")
    error.__cause__ = cause
    return error
