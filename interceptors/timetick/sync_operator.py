"""Ticks without rows: they tell readers of an idle log how far it is complete, and answer "consistent up to when?".

Such a tick is in no entry, so before a reader hears of it the store remembers that no later term may go below it. That is
written a moment ahead, by a thread: most ticks then have nothing to wait for, and the event loop never has.
"""

import asyncio
from collections.abc import Awaitable, Callable

from interceptors.timetick.ack_manager import AckManager, Unpromised
from wal.append import Append, AppendGroup
from wal.headers import TimeTickHeader
from wal.message import MutableMessage
from wal.message_type import MessageType
from wal.timetick import add_ms

PROMISED_AHEAD_MS = 1_000
"""An idle log syncs a page this often. The next opening's ticks begin above it, ahead of the clock by as much."""


class TimeTickSyncOperator:
    """Makes one log's readers advance. `source_id` names the node in ticks that are written to the log.

    `promise_tick` has the store remember a tick; see `LogStore.promise_tick`.
    """

    def __init__(self, acks: AckManager, *, promise_tick: Callable[[int], Awaitable[None]], source_id: str) -> None:
        self._acks = acks
        self._promise_tick = promise_tick
        self._source_id = source_id
        self._promising = asyncio.Lock()

    @property
    def confirmed_tick(self) -> int:
        """Everything at or below it has ended, and readers have been told."""
        return self._acks.confirmed_tick

    async def sync(self) -> int:
        """Return a new confirmed tick, above every append that was acknowledged before the call.

        Waits for the appends in flight, costs an fsync a second at most, and readers have been told of the tick when it
        returns. Cancelling leaves nothing behind. Raises `Indeterminate` when an append in flight has no known outcome, and
        what keeps the store from remembering the tick.
        """
        await asyncio.sleep(0)  # on an idle log nothing else suspends, and a loop of this would let nobody run
        while True:
            try:
                tick = self._acks.mark()
            except Unpromised as unpromised:
                await self.promise(unpromised.tick)
            else:
                await self._acks.confirmed(tick)
                return tick

    async def promise(self, tick: int) -> None:
        """Let ticks be marked up to `tick`, and a moment further. Raises what the store raises."""
        async with self._promising:
            if tick > self._acks.promised_tick:
                promised_tick = add_ms(tick, PROMISED_AHEAD_MS)
                await self._promise_tick(promised_tick)
                self._acks.promised_tick = promised_tick

    async def consistent_tick(self, *, at_least: int = 0) -> int:
        """Return what `sync` does, at or above `at_least`, which must be a tick of this node's allocator."""
        tick = await self.sync()
        while tick < at_least:
            tick = await self.sync()
        return tick

    async def persist(self, append: Append) -> int:
        """Append a tick message, so that readers of the log itself find it, and return its tick. Raises as `append`."""
        message = MutableMessage(MessageType.TIME_TICK, TimeTickHeader(source_id=self._source_id))
        result = await append(AppendGroup([message]))
        return result.time_tick
