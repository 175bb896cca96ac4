"""Room for writes, in a log's queue and in the node's memory, and who waits for what is synced. On the event loop."""

import asyncio
from collections import deque
from typing import NamedTuple

from wal.errors import TooLarge


class _Waiter(NamedTuple):
    """What waits, and whether it makes room on the disk, so that a full one does not end its wait."""

    size_bytes: int
    makes_room: bool
    turn: asyncio.Future[None]


class Admission:
    """Holds appends back, first come first served, while `queued_bytes` and the next size exceed `bytes_max`.

    A size over the bound passes alone. The bound is soft by what is admitted but not yet appended: admission reserves
    nothing, so an append that is given up owes nothing.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._waiters: deque[_Waiter] = deque()
        self.queued_bytes = 0

    async def wait(self, size_bytes: int, *, makes_room: bool = False) -> None:
        """Return once there is room; cancelling gives the place in the queue back."""
        if not self._waiters and self._fits(self.queued_bytes, size_bytes):
            return
        waiter = _Waiter(size_bytes, makes_room, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            # A turn may have been given and cancelled in the same step of the loop: the next one gets it.
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self._let_in()
            raise

    def take(self, size_bytes: int) -> None:
        """Count an append as queued."""
        self.queued_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count queued bytes as written, and let in who fits now."""
        self.queued_bytes -= size_bytes
        if self._waiters:
            self._let_in()

    def refuse(self, error: Exception, *, but_what_makes_room: bool = False) -> None:
        """End every wait with `error`; with `but_what_makes_room` those stay that make room, in their order."""
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if but_what_makes_room and waiter.makes_room:
                self._waiters.append(waiter)
            elif not waiter.turn.done():
                waiter.turn.set_exception(error)
        self._let_in()  # who stays may fit, now that larger ones before it are gone

    def _let_in(self) -> None:
        promised = self.queued_bytes
        while self._waiters and (self._waiters[0].turn.done() or self._fits(promised, self._waiters[0].size_bytes)):
            waiter = self._waiters.popleft()
            if not waiter.turn.done():
                waiter.turn.set_result(None)
                promised += waiter.size_bytes
        if self._waiters and not self.queued_bytes:
            # Nothing is queued whose completion would call again, and who was let in may never append.
            asyncio.get_running_loop().call_soon(self._let_in)

    def _fits(self, queued_bytes: int, size_bytes: int) -> bool:
        return not queued_bytes or queued_bytes + size_bytes <= self._bytes_max


class Budget:
    """At most `bytes_max` bytes held at a time, given out first come, first served."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._returned: deque[int] = deque()

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes more fit now."""
        while self._returned:
            self.give_back(self._returned.popleft())
        return self._fits(size_bytes)

    def try_take(self, size_bytes: int) -> bool:
        """Hold so many bytes more; return False, and hold nothing, when they do not fit now. Raises `TooLarge` for never."""
        if size_bytes > self.bytes_max:
            raise TooLarge(
                f"{size_bytes} bytes in one write, {self.bytes_max} may be pending — write fewer at a time, "
                "or raise writes.pending_bytes_max"
            )
        if self._waiters or not self.has_room(size_bytes):
            return False
        self.held_bytes += size_bytes
        return True

    async def take(self, size_bytes: int) -> None:
        """Hold so many bytes more once they fit; cancelled while it waits, it holds nothing. Raises as `try_take`."""
        if self.try_take(size_bytes):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was let in and cancelled in the same step of the loop
                self.held_bytes -= size_bytes
            self._let_in()
            raise

    def keep(self, size_bytes: int) -> None:
        """Hold what has room, or is there already: a transaction that a restart finds open."""
        self.held_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Hold so many bytes less, and let in who fits now."""
        self.held_bytes -= size_bytes
        self._let_in()

    def give_back_later(self, size_bytes: int) -> None:
        """Hold so many bytes less from the next `try_take` on; for any thread."""
        self._returned.append(size_bytes)

    def _let_in(self) -> None:
        while self._waiters and (self._waiters[0][1].done() or self._fits(self._waiters[0][0])):
            size_bytes, turn = self._waiters.popleft()
            if not turn.done():
                self.held_bytes += size_bytes
                turn.set_result(None)

    def _fits(self, size_bytes: int) -> bool:
        return self.held_bytes + size_bytes <= self.bytes_max


class PendingBytes:
    """What the writes of a node hold in memory, in three parts that together are at most `bytes_max`.

    A quarter for rows that wait to be put together, a quarter for appends on their way to the log, half for open
    transactions. Apart, because otherwise they could wait for each other in a circle: rows leave when an append ends, an
    append ends when the log has it, and a transaction ends when its caller says so, who may be waiting for the other two.
    So rows and appends wait for room, and a transaction that finds none is refused.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.rows, self.appends = Budget(bytes_max // 4), Budget(bytes_max // 4)
        self.transactions = Budget(bytes_max // 2)


class SyncedPosition:
    """The last synced position of a log, which only ascends, and those who wait for it to move on."""

    def __init__(self, value: int) -> None:
        self.value = value
        self._waiters: dict[asyncio.Future[None], int] = {}
        self._error: Exception | None = None

    def advance(self, position: int) -> None:
        """Move on to `position` and wake who waited for something up to it."""
        assert position >= self.value, "what is synced stays synced"
        self.value = position
        for waiter, beyond in list(self._waiters.items()):
            if beyond < position and not waiter.done():
                waiter.set_result(None)

    async def wait_beyond(self, position: int) -> None:
        """Return once a message after `position` is synced; raises what `end` was given."""
        if self.value > position:
            return
        if self._error is not None:
            raise self._error
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = position
        try:
            await waiter
        finally:
            del self._waiters[waiter]

    def end(self, error: Exception) -> None:
        """End every wait, now and later, with `error`."""
        self._error = error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)
