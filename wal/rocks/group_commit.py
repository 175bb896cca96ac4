"""Group commit as the event loop sees it: whether writes are taken, room in the queue, and what became of them.

In: writes from logs and the state map. Out: settled futures, in order. The writer thread (`writer.py`) does the work; this
side keeps the state machine. A failed write poisons the store: the writes from it on are `Indeterminate`, later ones are
refused with the same error, and reads go on.
"""

from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path

from wal.admission import Admission
from wal.errors import Indeterminate, OnShutdown, StorageFailed, StorageFull, StreamingNodeError
from wal.rocks.options import RocksOptions
from wal.rocks.write import Write, acknowledge, fail, settle


class CommitState(Enum):
    """Whether writes are taken. A store that can reopen itself adds its states between POISONED and OPEN."""

    OPEN = auto()
    POISONED = auto()
    CLOSED = auto()
    FORKED = auto()


class CommitEvent(Enum):
    """What happens to a store."""

    WRITE_FAILED = auto()
    CLOSE_ASKED = auto()
    PROCESS_FORKED = auto()


TRANSITIONS: dict[tuple[CommitState, CommitEvent], CommitState] = {
    (CommitState.OPEN, CommitEvent.WRITE_FAILED): CommitState.POISONED,
    (CommitState.OPEN, CommitEvent.CLOSE_ASKED): CommitState.CLOSED,
    (CommitState.OPEN, CommitEvent.PROCESS_FORKED): CommitState.FORKED,
    (CommitState.POISONED, CommitEvent.WRITE_FAILED): CommitState.POISONED,
    (CommitState.POISONED, CommitEvent.CLOSE_ASKED): CommitState.CLOSED,
    (CommitState.POISONED, CommitEvent.PROCESS_FORKED): CommitState.FORKED,
    (CommitState.CLOSED, CommitEvent.WRITE_FAILED): CommitState.CLOSED,
    (CommitState.CLOSED, CommitEvent.PROCESS_FORKED): CommitState.CLOSED,
    (CommitState.FORKED, CommitEvent.PROCESS_FORKED): CommitState.FORKED,
}


class GroupCommit:
    """The loop's side of the writer thread: all of it runs on the event loop and none of it blocks.

    `submit` hands a write to the thread; the thread reports back to the methods at the end.
    """

    __slots__ = ("_admission", "_cause", "_directory", "_free_bytes", "_options", "_submit", "state")

    def __init__(self, directory: Path, options: RocksOptions, submit: Callable[[Write], None]) -> None:
        self.state = CommitState.OPEN
        self._directory = directory
        self._options = options
        self._submit = submit
        self._admission = Admission(options.queue_bytes_max)
        self._cause: Exception | None = None
        self._free_bytes: int | None = None

    @property
    def acknowledges_when_synced(self) -> bool:
        """Whether an append is acknowledged only once it is synced."""
        return self._options.durability == "fsync"

    @property
    def poisoned(self) -> bool:
        """Whether a write has failed, also after closing."""
        return self._cause is not None

    @property
    def queued_bytes(self) -> int:
        """Bytes handed over and not yet synced."""
        return self._admission.queued_bytes

    async def admit(self, size_bytes: int) -> None:
        """Wait for room in the queue; see `wal.log.Log.admit`."""
        self.check_writable()
        if self._free_bytes is not None:
            raise self._storage_full(self._free_bytes)
        await self._admission.wait(size_bytes)

    def submit(self, write: Write) -> None:
        """Hand a write to the thread. Raises what the state says; a low disk stops nothing that was admitted."""
        self.check_writable()
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

    def apply(self, event: CommitEvent) -> None:
        """Move to the next state, and refuse whoever waits for room."""
        self.state = TRANSITIONS[self.state, event]
        if event is not CommitEvent.PROCESS_FORKED:  # the waits of a forked child belong to its parent's event loop
            self._admission.refuse(self.refusal())

    def refusal(self) -> StreamingNodeError:
        """Return the error for a call that the state does not allow."""
        match self.state:
            case CommitState.POISONED:
                return _indeterminate(self._directory, self._cause)
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
        acknowledge(writes)

    def landed(self, writes: list[Write]) -> None:
        """These writes are synced."""
        settle(writes)
        self._admission.give_back(sum(write.size_bytes for write in writes))

    def failed(self, writes: list[Write], error: Exception) -> None:
        """The outcome of these writes is open, and of all later ones."""
        self._cause = error
        self.apply(CommitEvent.WRITE_FAILED)
        fail(writes, _indeterminate(self._directory, error))
        self._admission.give_back(sum(write.size_bytes for write in writes))

    def space_changed(self, free_bytes: int) -> None:
        """The disk went below the low-water mark, or is above it again."""
        low = free_bytes < self._options.free_bytes_min
        self._free_bytes = free_bytes if low else None
        if low:
            self._admission.refuse(self._storage_full(free_bytes))

    def _storage_full(self, free_bytes: int) -> StorageFull:
        return StorageFull(str(self._directory), free_bytes, self._options.free_bytes_min)


def _indeterminate(directory: Path, cause: Exception | None) -> Indeterminate:
    error = Indeterminate(
        f"a write to {directory} failed and may or may not be in the log: {cause} — open the node again to find out"
    )
    error.__cause__ = cause
    return error
