"""Sends what is to go into a log: rows of many writes in one pack, whose cost is then paid once for
all of them, and messages in an entry of their own.

A write that comes alone is sent at once, in its caller's turn of the event loop. Those that come
while others are on their way wait in one queue until these have ended, or until they are many, and
go together. Each caller waits for one future. What is on its way belongs to the packer: a caller
that is cancelled marks its write, and ends the way of a pack without a place in the log that nobody
else waits for.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

from wal.append import AppendGroup, AppendResult, Pack
from wal.errors import StreamingNodeError
from wal.queue import Budget
from wal.runtime import Running, event_log

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


Send = Callable[[Pack], Coroutine[object, None, None]]
"""Sends a pack: settles each of its groups, or lets it leave; what it raises is of all groups that
are left. It waits for futures only: no scope or timeout of a task holds it.
"""


class Packer:
    """The writes of one log that wait or are on their way; lives on the event loop.

    What waits, or is on its way, counts in `memory`. While a pack is on its way, fewer than
    `company` writes wait for its end.
    """

    def __init__(
        self,
        send: Send,
        memory: Budget,
        *,
        in_flight_max: int = PACKS_IN_FLIGHT_MAX,
        company: int = 1,
    ) -> None:
        self.messages: set[Pack] = set()
        """On their way, as `rows` are; any number of them."""
        self._rows: set[Pack] = set()
        self._send = send
        self._memory = memory
        self._in_flight_max = in_flight_max
        self._company = company
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[AppendGroup] = deque()
        self._step: asyncio.Handle | None = None
        """What sends the next pack in the next turn of the event loop."""
        self._together = False
        """Whether the last pack was several writes: then one that comes alone may have company in
        this turn of the loop.
        """

    async def append(self, group: AppendGroup, send: Send | None = None) -> AppendResult:
        """Append a group, messages by `send`, and return what becomes of it.

        Cancelled before the log has it, it never happens; after that its outcome is decided without
        the caller. Raises `TooLarge` for rows that never fit the memory, and what `send` raises.
        """
        waiter: asyncio.Future[AppendResult] = self._loop.create_future()
        if group.messages:
            group.waiter = waiter
            self._start(Pack([group]), self.messages, send or self._send)
        else:
            if not self._memory.try_take(group.rows_bytes):
                await self._memory.take(group.rows_bytes)
            group.memory = self._memory
            group.waiter = waiter
            if self._waiting or self._rows or self._together:
                self._waiting.append(group)
                self._wake()
            else:
                self._start(Pack([group]), self._rows, self._send)
        try:
            return await waiter
        except asyncio.CancelledError:
            _mark_cancelled(group)
            raise

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
            pack.ticket is not None for pack in self._rows
        ):
            self._wake()
        return True

    async def join(self, group: AppendGroup) -> None:
        """Have a group that has a `waiter` wait for the next pack, once there is room in memory."""
        await self._memory.take(group.rows_bytes)
        group.memory = self._memory
        self._waiting.append(group)
        self._wake()

    def come_again(self, group: AppendGroup) -> None:
        """Put back a group that left its pack, in front of all that wait."""
        self._waiting.appendleft(group)
        self._wake()

    async def drain(self) -> None:
        """Return once every write of rows that came before has ended."""
        # Each holds its bytes until then, those that come again too.
        await self._memory.wait(self._memory.bytes_max)

    def _wake(self) -> None:
        """Have what waits sent in the next turn of the event loop, if it may go."""
        if self._step is None and self._may_go():
            self._step = self._loop.call_soon(self._send_next)

    def _send_next(self) -> None:
        """Send one pack of what waits, if it may still go."""
        self._step = None
        if not self._may_go():
            return
        if groups := self._take():
            self._together = len(groups) > 1
            pack = Pack(groups, come_again=self.come_again)
            self._start(pack, self._rows, self._send)
        if self._waiting:  # more than one pack holds
            self._wake()

    def _may_go(self) -> bool:
        """Whether what waits makes a pack while so many others are on their way."""
        waiting = self._waiting
        if not waiting or len(self._rows) >= self._in_flight_max:
            return False
        return (
            not self._rows
            or len(waiting) >= self._company
            or waiting[0].rows_bytes >= ALONE_BYTES_MIN
        )

    def _take(self) -> list[AppendGroup]:
        """Return the groups of the next pack, oldest first, without those whose callers are
        gone.
        """
        taken: list[AppendGroup] = []
        size_bytes = 0
        waiting = self._waiting
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
        return taken

    def _start(self, pack: Pack, others: set[Pack], send: Send) -> None:
        """Send a pack, as far as it comes in this turn of the event loop."""
        others.add(pack)
        pack.sending = Running(send(pack), partial(self._ended, pack, others))
        pack.sending.go_on()

    def _ended(self, pack: Pack, others: set[Pack], error: BaseException | None) -> None:
        """Settle what is left of a pack, and send what waited for its end."""
        others.discard(pack)
        pack.sending = None
        if error is not None:
            _settle_failed(pack, error)
        if self._waiting:
            self._wake()


def _mark_cancelled(group: AppendGroup) -> None:
    """End the way of a pack without a place in the log whose callers are all gone.

    A group that waits is left out when the next pack is taken.
    """
    pack = group.pack
    if pack is None or pack.sending is None or pack.ticket is not None:
        return
    if all(each.cancelled for each in pack.groups):
        pack.sending.cancel()


def _settle_failed(pack: Pack, error: BaseException) -> None:
    """Give the groups of a pack that have not left it the error that ended its way."""
    for group in list(pack.groups):
        if group.pack is not pack or group.outcome is not None:
            continue
        if isinstance(error, Exception):
            group.settle(error)
            continue
        group.release()
        if isinstance(group.waiter, asyncio.Future):
            group.waiter.cancel()
    if not isinstance(error, (StreamingNodeError, asyncio.CancelledError)):
        _log.error("pack_failed", exc_info=error)
