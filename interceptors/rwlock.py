"""A lock that many share or one has for itself, first come first served, for tasks of one event loop.

Free locks are taken without suspending. Nobody overtakes: once someone waits, everyone queues, so neither sharers nor
exclusive holders starve. A lock is handed over at release, before the next holder runs; a holder that is cancelled between
the two gives it on.
"""

import asyncio
from collections import deque
from enum import Enum, unique


@unique
class Mode(Enum):
    """How a lock is held."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"


class RWLock:
    """One readers-writer lock; not reentrant, and does not know who holds it."""

    __slots__ = ("_exclusive", "_sharers", "_waiting")

    def __init__(self) -> None:
        self._sharers = 0
        self._exclusive = False
        self._waiting: deque[tuple[asyncio.Future[None], Mode]] = deque()

    @property
    def idle(self) -> bool:
        """Whether nobody holds the lock or waits for it."""
        return not (self._sharers or self._exclusive or self._waiting)

    def try_acquire(self, mode: Mode) -> bool:
        """Take the lock if nobody is in the way or in the queue; say whether it was taken."""
        if self._waiting or not self._free_for(mode):
            return False
        self._take(mode)
        return True

    async def acquire(self, mode: Mode) -> None:
        """Take the lock, waiting behind everyone who came before. Cancelling while waiting leaves no trace."""
        if self.try_acquire(mode):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((granted, mode))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._hand_over()  # those behind a cancelled exclusive waiter may be free to go
            else:  # cancelled after the lock was handed over and before this task ran
                self.release(mode)
            raise

    def release(self, mode: Mode) -> None:
        """Give up what `acquire` with the same mode took."""
        if mode is Mode.SHARED:
            assert self._sharers, "nobody shares this lock"
            self._sharers -= 1
        else:
            assert self._exclusive, "nobody has this lock exclusively"
            self._exclusive = False
        if self._waiting:
            self._hand_over()

    def _free_for(self, mode: Mode) -> bool:
        return not self._exclusive and (mode is Mode.SHARED or not self._sharers)

    def _take(self, mode: Mode) -> None:
        if mode is Mode.SHARED:
            self._sharers += 1
        else:
            self._exclusive = True

    def _hand_over(self) -> None:
        while self._waiting:
            granted, mode = self._waiting[0]
            if not granted.cancelled():
                if not self._free_for(mode):
                    return
                self._take(mode)
                granted.set_result(None)
            self._waiting.popleft()
