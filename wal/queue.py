"""Room for writes, in a log's queue and in the node's memory, and who waits for what is synced. On
the event loop.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from wal.errors import TooLarge


class Signal:
    """Wakes those who wait at the moment of `wake`, each to look again for what it waits for."""

    def __init__(self) -> None:
        self._waiting = OrderedDict[asyncio.Future[None], object]()

    async def wait(self, whose: object = None) -> None:
        """Return at the next `wake`, or `end` of who waits."""
        self._waiting[told := asyncio.get_running_loop().create_future()] = whose
        try:
            await told
        except asyncio.CancelledError:
            if not told.cancelled():
                self.wake(1)  # it was its turn, which is the next one's now
            raise
        finally:
            self._waiting.pop(told, None)

    def wake(self, count: int | None = None) -> None:
        """End the waits of now, or those of so many, who have waited longest; who comes later waits
        for the next time.
        """
        left = len(self._waiting) if count is None else count
        while self._waiting and left:
            if not (told := self._waiting.popitem(last=False)[0]).done():
                told.set_result(None)
                left -= 1

    def end(self, whose: object) -> None:
        """End the waits of one, and leave others alone."""
        for told in [
            told for told, each in self._waiting.items() if each is whose and not told.done()
        ]:
            del self._waiting[told]
            told.set_result(None)


class Budget:
    """At most `bytes_max` bytes held at a time, given out first come, first served."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self.changed = Signal()
        """Has the first who waits look again; `give_back` does that by itself."""
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._returned: deque[int] = deque()

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes more fit now, and nobody waits for them."""
        while self._returned:
            self.give_back(self._returned.popleft())
        return not self._waiting and self.held_bytes + size_bytes <= self.bytes_max

    async def wait(self, size_bytes: int, *, check: Callable[[], None] = lambda: None) -> None:
        """Return once so many bytes fit, but hold none of them. Raises what `check` raises, each
        time it looks.
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
        """Hold so many bytes more; return False, and hold nothing, when they do not fit now. Raises
        `TooLarge` for never.
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
        """Hold so many bytes more once they fit, none when it is cancelled before. Raises as
        `try_take` and `wait`.
        """
        if not self.try_take(size_bytes):
            await self.wait(size_bytes, check=check)
            self.held_bytes += size_bytes

    def keep(self, size_bytes: int) -> None:
        """Hold what has room, or is there already: a transaction that a restart finds open."""
        self.held_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Hold so many bytes less, and let in who fits now."""
        self.held_bytes -= size_bytes
        if self._waiting:
            self.changed.wake()

    def give_back_later(self, size_bytes: int) -> None:
        """Hold so many bytes less from the next `try_take` on; for any thread."""
        self._returned.append(size_bytes)


class PendingBytes:
    """What the writes of a node hold in memory, in three parts that together are at most
    `bytes_max`.

    A quarter for rows that wait to be put together or are on their way, a quarter for bodies on
    their way to the log, half for open transactions. Apart, because otherwise they could wait for
    each other in a circle: rows and bodies leave when the log has them, and a transaction ends when
    its caller says so, who may be waiting for the other two. So rows and bodies wait for room, and
    a transaction that finds none is refused.
    """

    def __init__(self, bytes_max: int) -> None:
        self.rows = Budget(bytes_max // 4)
        self.appends = Budget(bytes_max // 4)
        self.transactions = Budget(bytes_max // 2)


class SyncedPosition:
    """The last synced position of a log, which only ascends, and those who wait for it to move
    on.
    """

    def __init__(self, value: int) -> None:
        self.value = value
        self._moved = Signal()
        self._error: Exception | None = None

    def advance(self, position: int) -> None:
        """Move on to `position` and wake who waited for something up to it."""
        assert position >= self.value, "what is synced stays synced"
        self.value = position
        self._moved.wake()

    async def wait_beyond(self, position: int) -> None:
        """Return once a message after `position` is synced; raises what `end` was given."""
        while self.value <= position:
            if self._error is not None:
                raise self._error
            await self._moved.wait()

    def end(self, error: Exception) -> None:
        """End every wait, now and later, with `error`."""
        self._error = error
        self._moved.wake()
