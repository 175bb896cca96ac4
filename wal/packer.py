"""Sends appends into a log: the rows of many writes share a pack and its fixed cost; messages get
their own entry.

A write that arrives alone is sent at once, in its caller's turn of the event loop. Writes that
arrive while others are on their way wait in one queue and go together, once the others have ended
or enough writes wait. Each caller waits for one future. The packer owns the packs on their way: a
cancelled caller marks its write, and cancels a pack that has no place in the log and no other
caller.
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
"""While this many packs are on their way, writes wait and are collected."""
PACK_BYTES_MAX = 1 << 20
"""The limit of a pack, by the sizes of its writes: larger packs block the log's writer. A larger
write goes alone.
"""
PACK_GROUPS_MAX = 512
"""The writes of a pack: they block the event loop for about 2 ms, from their ticks to the log's
queue.
"""
JOINED_MIN = 64
"""This many waiting writes of connections are sent without waiting for a pack that is on its
way.
"""
ALONE_BYTES_MIN = 64 << 10
"""A write of at least this size does not wait for others."""

_log = event_log(__name__)


Send = Callable[[Pack], Coroutine[object, None, None]]
"""Sends a pack: settles or removes each of its groups. An error that it raises applies to all
remaining groups. It may await only futures: scopes and timeouts of tasks do not apply.
"""


class Packer:
    """The waiting and running writes of one log; lives on the event loop.

    Waiting and running rows count against `memory`. While a pack is on its way, fewer than
    `company` waiting writes stay queued until it ends.
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
        """Packs of messages on their way, without a limit."""
        self._rows: set[Pack] = set()
        self._send = send
        self._memory = memory
        self._in_flight_max = in_flight_max
        self._company = company
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[AppendGroup] = deque()
        self._step: asyncio.Handle | None = None
        """The scheduled call that sends the next pack in the next turn of the event loop."""
        self._together = False
        """Whether the last pack had several writes: then a write waits for others that may arrive
        in the same turn of the loop.
        """

    async def append(self, group: AppendGroup, send: Send | None = None) -> AppendResult:
        """Append a group and return its result; `send` replaces the default for messages.

        A group that is cancelled before the log has it never happens; after that its outcome is
        decided without the caller. Raises `TooLarge` for rows that can never fit the memory, and
        the errors of `send`.
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
        """Queue groups that have a `waiter` for the next pack; return False when they do not all
        fit in memory.

        Fewer than `JOINED_MIN` writes wait while a pack is in the log's queue, which only the disk
        delays: over connections writes arrive a few at a time, and the fixed cost of a pack equals
        ten writes.
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
        """Queue a group that has a `waiter` for the next pack, once it fits in memory."""
        await self._memory.take(group.rows_bytes)
        group.memory = self._memory
        self._waiting.append(group)
        self._wake()

    def come_again(self, group: AppendGroup) -> None:
        """Put a group that left its pack back at the head of the queue."""
        self._waiting.appendleft(group)
        self._wake()

    async def drain(self) -> None:
        """Wait until every earlier write of rows has ended."""
        # Each write holds its bytes until it ends, even one that is appended again.
        await self._memory.wait(self._memory.bytes_max)

    def _wake(self) -> None:
        """Schedule a pack for the next turn of the event loop, if one may be sent."""
        if self._step is None and self._may_go():
            self._step = self._loop.call_soon(self._send_next)

    def _send_next(self) -> None:
        """Send one pack of waiting writes, if it may still be sent."""
        self._step = None
        if not self._may_go():
            return
        if groups := self._take():
            self._together = len(groups) > 1
            pack = Pack(groups, come_again=self.come_again)
            self._start(pack, self._rows, self._send)
        if self._waiting:  # more writes than one pack holds
            self._wake()

    def _may_go(self) -> bool:
        """Whether the waiting writes may be sent now, given the packs on their way."""
        waiting = self._waiting
        if not waiting or len(self._rows) >= self._in_flight_max:
            return False
        return (
            not self._rows
            or len(waiting) >= self._company
            or waiting[0].rows_bytes >= ALONE_BYTES_MIN
        )

    def _take(self) -> list[AppendGroup]:
        """Return the groups of the next pack, oldest first, without those whose callers have
        left.
        """
        taken: list[AppendGroup] = []
        size_bytes = 0
        waiting = self._waiting
        while waiting and len(taken) < PACK_GROUPS_MAX:
            size_bytes += waiting[0].rows_bytes
            if taken and size_bytes > PACK_BYTES_MAX:
                break
            group = waiting.popleft()
            # inlines `cancelled`, to save a call for each group
            if (waiter := group.waiter) is not None and waiter.done():
                group.release()
            else:
                taken.append(group)
        return taken

    def _start(self, pack: Pack, others: set[Pack], send: Send) -> None:
        """Start sending a pack; it runs as far as it can in this turn of the event loop."""
        others.add(pack)
        pack.sending = Running(send(pack), partial(self._ended, pack, others))
        pack.sending.go_on()

    def _ended(self, pack: Pack, others: set[Pack], error: BaseException | None) -> None:
        """Settle the remaining groups of a failed pack, and schedule writes that waited for its
        end.
        """
        others.discard(pack)
        pack.sending = None
        if error is not None:
            _settle_failed(pack, error)
        if self._waiting:
            self._wake()


def _mark_cancelled(group: AppendGroup) -> None:
    """Cancel a pack that has no place in the log when all of its callers have left.

    A waiting group is skipped when the next pack is formed.
    """
    pack = group.pack
    if pack is None or pack.sending is None or pack.ticket is not None:
        return
    if all(each.cancelled for each in pack.groups):
        pack.sending.cancel()


def _settle_failed(pack: Pack, error: BaseException) -> None:
    """Settle the remaining groups of a pack with the error that ended it."""
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
