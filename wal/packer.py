"""Puts writes that wait together into one pack: what a pack of a hundred costs once, none of them
costs again.

A write that comes alone goes at once, in its caller's own task. Those that come while others are on
their way wait until these have ended, or until they are many, and go together, by a task that no
caller can cancel.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from wal.append import AppendGroup, AppendResult, Pack
from wal.errors import StreamingNodeError
from wal.queue import Budget
from wal.runtime import event_log

PACKS_IN_FLIGHT_MAX = 4
"""With as many on their way, writes wait and are put together meanwhile."""
PACK_BYTES_MAX = 1 << 20
"""As writes count; larger packs hold the log's writer. A larger write goes alone."""
PACK_GROUPS_MAX = 512
"""About 2 ms of the event loop, which is held from their ticks to the log's queue."""
JOINED_MIN = 64
"""So many writes of connections do not wait for a pack that is on its way."""
ALONE_BYTES_MIN = 64 << 10
"""A write of so many bytes does not wait for others."""

_log = event_log(__name__)


class Packer:
    """The writes of one log that wait; lives on the event loop. `send` settles all groups of a pack
    that do not come again.

    What waits, or is on its way, counts in `memory`. Fewer than `company` writes wait while another
    pack is on its way, and for who is told of that.
    """

    def __init__(
        self,
        send: Callable[[Pack], Awaitable[None]],
        memory: Budget,
        *,
        in_flight_max: int = PACKS_IN_FLIGHT_MAX,
        company: int = 1,
    ) -> None:
        self._send = send
        self._memory = memory
        self._in_flight_max = in_flight_max
        self._company = company
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[AppendGroup] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: set[Pack] = set()
        """Packs that are together, not those of a single write."""
        self._in_flight = 0
        self._starting = False
        self._together = False
        """Whether the last pack was several writes: then one that comes alone may have company in
        this turn of the loop.
        """

    def append(self, group: AppendGroup) -> Awaitable[AppendResult]:
        """Append a group of rows with others that wait; what is returned is awaited at once, and
        raises what becomes of it.

        Cancelled while it waits, it never happened; once the log has it, its outcome is decided
        without the caller.
        """
        if not (self._waiting or self._in_flight or self._together):
            return self._append_alone(group)
        return (
            self._append_together(group)
            if self._memory.try_take(group.rows_bytes)
            else self._append_later(group)
        )

    def try_join(self, groups: Sequence[AppendGroup]) -> bool:
        """Have groups that have a `waiter` wait for the next pack; return False when there is no
        room in memory for all.

        Few of them wait for a pack that is in the log's queue, which the disk alone keeps: over
        connections writes come a handful at a time, and what a pack costs once is as much as ten
        writes.
        """
        size_bytes = sum([group.rows_bytes for group in groups])
        if not self._memory.has_room(size_bytes):
            return False
        self._memory.keep(size_bytes)
        for group in groups:
            group.memory = self._memory
        self._waiting += groups
        if len(self._waiting) >= JOINED_MIN or not any(
            pack.ticket is not None for pack in self._under_way
        ):
            self._start()
        return True

    async def join(self, group: AppendGroup) -> None:
        """Have a group that has a `waiter` wait for the next pack, once there is room in memory."""
        await self._memory.take(group.rows_bytes)
        self._append_together(group)

    def come_again(self, group: AppendGroup) -> None:
        """Put back a group that left its pack, in front of all that wait."""
        self._waiting.appendleft(group)
        self._start()

    async def drain(self) -> None:
        """Return once every write that came before has ended."""
        # each holds its bytes until then, those that come again too
        await self._memory.wait(self._memory.bytes_max)
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _append_later(self, group: AppendGroup) -> AppendResult:
        await self._memory.take(group.rows_bytes)
        return await self._append_together(group)

    async def _append_alone(self, group: AppendGroup) -> AppendResult:
        # others may have come since the call
        if self._in_flight or self._waiting or not self._memory.try_take(group.rows_bytes):
            return await self._append_later(group)
        group.memory = self._memory
        self._in_flight += 1
        try:
            await self._send(Pack([group]))
            return group.result()
        finally:
            group.release()
            self._sent()

    def _append_together(self, group: AppendGroup) -> asyncio.Future[AppendResult]:
        """Have a group wait whose bytes are taken; what is returned is its `waiter`, unless it has
        one.
        """
        told: asyncio.Future[AppendResult] = self._loop.create_future()
        group.waiter = group.waiter or told
        group.memory = self._memory
        self._waiting.append(group)
        if not self._starting:
            self._start()
        return told

    def _start(self) -> None:
        """Have what waits sent in the next turn of the event loop, unless it is to wait for packs
        that are on their way.
        """
        if (
            not self._starting
            and self._in_flight < self._in_flight_max
            and self._may_go(self._in_flight)
        ):
            self._starting = True
            self._in_flight += 1
            task = self._loop.create_task(self._send_waiting())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _sent(self) -> None:
        self._in_flight -= 1
        if self._waiting:
            self._start()

    async def _send_waiting(self) -> None:
        """Send packs until nothing waits."""
        self._starting = False
        try:
            while groups := self._take():
                if self._waiting:  # more than one pack holds
                    self._start()
                pack = Pack(list(groups), come_again=self.come_again)
                self._under_way.add(pack)
                try:
                    await self._send(pack)
                except Exception as error:  # noqa: BLE001
                    # a task's border: the error is the callers'
                    for group in groups:
                        if group.pack is pack:  # else it left, and was told or comes again
                            group.settle(error)
                    if not isinstance(error, StreamingNodeError):
                        _log.exception("pack_failed")
                finally:
                    self._under_way.discard(pack)
                if self._company > 1:
                    # who was told, over this connection or another, writes again: with these
                    await asyncio.sleep(0)
        finally:
            self._sent()

    def _may_go(self, others: int) -> bool:
        """Whether what waits makes a pack while so many others are on their way."""
        waiting = self._waiting
        return (
            not others
            or len(waiting) >= self._company
            or bool(waiting and waiting[0].rows_bytes >= ALONE_BYTES_MIN)
        )

    def _take(self) -> list[AppendGroup]:
        """Return the groups of the next pack, oldest first, without those whose callers are gone;
        none if it may not go.
        """
        taken: list[AppendGroup] = []
        size_bytes = 0
        waiting = self._waiting
        if not self._may_go(self._in_flight - 1):
            return taken
        while waiting and len(taken) < PACK_GROUPS_MAX:
            size_bytes += waiting[0].rows_bytes
            if taken and size_bytes > PACK_BYTES_MAX:
                break
            group = waiting.popleft()
            # `cancelled`, without a call for each
            if (waiter := group.waiter) is not None and waiter.done():
                group.release()
            else:
                taken.append(group)
        if taken:
            self._together = len(taken) > 1
        return taken
