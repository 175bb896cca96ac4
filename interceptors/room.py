"""Room for an append in the node's memory and in the log's queue: what it waits for before anything else.

It stands behind the window of retries, because a write that is in the log already needs no room, also on a full disk; and
before redo, so that what waits there counts.
"""

from typing import Protocol

from wal.errors import OnShutdown
from wal.failpoint import failpoint
from wal.headers import DML, MessageType
from wal.log import Append, AppendGroup, AppendResult
from wal.queue import Budget


class Admit(Protocol):
    """Wait for room in a log's queue; see `wal.log.Log.admit`."""

    async def __call__(self, size_bytes: int, *, makes_room: bool = False) -> None:
        """Return once there is room."""


class RoomInterceptor:
    """Lets appends in as there is room in `memory`, which all of the node's logs share, and in the log's queue."""

    name = "room"

    def __init__(self, admit: Admit, memory: Budget) -> None:
        self._admit = admit
        self._memory = memory
        self._closing = False

    async def do_append(self, group: AppendGroup, append: Append) -> AppendResult:
        """Append once there is room; the group's bytes count until the log has acknowledged it, or it failed.

        Raises `TooLarge`, `OnShutdown` when the log closes meanwhile, and what `admit` raises. Cancelling while it waits
        means that the append never happened.
        """
        size_bytes = _counted_bytes(group)
        if size_bytes and not self._memory.try_take(size_bytes):
            await self._memory.take(size_bytes)
        try:
            await self._admit(group.size_bytes, makes_room=group.makes_room)
            failpoint("append.admitted")
            if self._closing:
                raise OnShutdown("the log closed while the append waited for room — reopen the node")
            return await append(group)
        finally:
            self._memory.give_back(size_bytes)

    async def ready(self) -> None:
        """Appends may always pass."""

    async def close(self) -> None:
        """Send away who waits, each as its turn comes: those before them end by themselves."""
        self._closing = True


def _counted_bytes(group: AppendGroup) -> int:
    """Return what a group counts for: nothing without rows or keys.

    Appends that hold room wait for just such groups, for a segment that is made, a commit or a schema change that ends; if
    those waited for room in turn, nobody would go on.
    """
    head = group.messages[0]
    rows = head.type in DML or (head.type is MessageType.BEGIN_TXN and len(group.messages) > 1)
    return group.size_bytes if rows else 0
