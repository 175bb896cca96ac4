"""Bounds for writes in a log's queue and in the node's memory, and waits for synced positions.
Lives on the event loop.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from wal.errors import TooLarge


class Signal:
    """Wakes the tasks that wait at the moment of `wake`; each then checks its condition again."""

    def __init__(self) -> None:
        self._waiting = OrderedDict[asyncio.Future[None], object]()

    async def wait(self, owner: object = None) -> None:
        """Return at the next `wake`, or at `end` of `owner`."""
        self._waiting[waiter := asyncio.get_running_loop().create_future()] = owner
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self.wake(1)  # it was woken, so pass the wake-up on to the next waiter
            raise
        finally:
            self._waiting.pop(waiter, None)

    def wake(self, count: int | None = None) -> None:
        """End all current waits, or the `count` longest ones; later waits last until the next
        `wake`.
        """
        left = len(self._waiting) if count is None else count
        while self._waiting and left:
            if not (waiter := self._waiting.popitem(last=False)[0]).done():
                waiter.set_result(None)
                left -= 1

    def end(self, owner: object) -> None:
        """End only the waits with this `owner`."""
        for waiter in [
            waiter for waiter, each in self._waiting.items() if each is owner and not waiter.done()
        ]:
            del self._waiting[waiter]
            waiter.set_result(None)


class Budget:
    """At most `bytes_max` bytes held at a time, assigned first come, first served."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self.changed = Signal()
        """Makes the first waiter check again; `give_back` wakes it by itself."""
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._returned: deque[int] = deque()

    def has_room(self, size_bytes: int) -> bool:
        """Return whether so many more bytes fit now, with no earlier waiter."""
        while self._returned:
            self.give_back(self._returned.popleft())
        return not self._waiting and self.held_bytes + size_bytes <= self.bytes_max

    async def wait(self, size_bytes: int, *, check: Callable[[], None] = lambda: None) -> None:
        """Wait until so many bytes fit, without holding them. Raises the errors of `check`, which
        runs before each test.
        """
        self._waiting += 1
        try:
            async with self._turn:
                check()
                while self.held_bytes + size_bytes > self.bytes_max:
                    await self.changed.wait()
                    check()
        finally:
            self._waiting -= 1

    def try_take(self, size_bytes: int) -> bool:
        """Hold so many more bytes and return True; return False when they do not fit now. Raises
        `TooLarge` when they can never fit.
        """
        if self.has_room(size_bytes):
            self.held_bytes += size_bytes
            return True
        if size_bytes > self.bytes_max:
            raise TooLarge(
                f"{size_bytes} bytes in one write, {self.bytes_max} may be pending — write fewer "
                "at a time, "
                "or raise writes.pending_bytes_max"
            )
        return False

    async def take(self, size_bytes: int, *, check: Callable[[], None] = lambda: None) -> None:
        """Wait until so many more bytes fit, then hold them; holds none when cancelled. Raises the
        errors of `try_take` and `wait`.
        """
        if not self.try_take(size_bytes):
            await self.wait(size_bytes, check=check)
            self.held_bytes += size_bytes

    def keep(self, size_bytes: int) -> None:
        """Hold bytes without a check: the caller has checked them, or they exist already, as a
        transaction that is open after a restart.
        """
        self.held_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Release so many bytes, and wake waiters."""
        self.held_bytes -= size_bytes
        if self._waiting:
            self.changed.wake()

    def give_back_later(self, size_bytes: int) -> None:
        """Release so many bytes at the next `try_take`; callable from any thread."""
        self._returned.append(size_bytes)


class PendingBytes:
    """The memory of a node's writes: three budgets of `bytes_max` together.

    A quarter is for rows that wait to be packed or are on their way, a quarter for bodies on their
    way to the log, half for open transactions. They are separate to avoid a deadlock: rows and
    bodies leave when the log has them, but a transaction ends when its caller ends it, and that
    caller may be waiting for the other two. So rows and bodies wait for space, and a transaction
    without space is refused.
    """

    def __init__(self, bytes_max: int) -> None:
        self.rows = Budget(bytes_max // 4)
        self.appends = Budget(bytes_max // 4)
        self.transactions = Budget(bytes_max // 2)


class SyncedPosition:
    """The last synced position of a log, which only ascends, and the waits for it to advance."""

    def __init__(self, value: int) -> None:
        self.value = value
        self._moved = Signal()
        self._error: Exception | None = None

    def advance(self, position: int) -> None:
        """Advance to `position` and wake the waiters."""
        assert position >= self.value, "synced data stays synced"
        self.value = position
        self._moved.wake()

    async def wait_beyond(self, position: int) -> None:
        """Wait until a message after `position` is synced; raises the error passed to `end`."""
        while self.value <= position:
            if self._error is not None:
                raise self._error
            await self._moved.wait()

    def end(self, error: Exception) -> None:
        """End every current and later wait with `error`."""
        self._error = error
        self._moved.wake()
