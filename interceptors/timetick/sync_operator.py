"""Ticks without rows: they tell readers of an idle log how far it is complete, and answer "consistent up to when?"."""

import asyncio

from interceptors.timetick.ack_manager import AckManager
from wal.append import Append, AppendGroup
from wal.headers import TimeTickHeader
from wal.message import MutableMessage
from wal.message_type import MessageType


class TimeTickSyncOperator:
    """Makes one log's readers advance. `source_id` names the node in ticks that are written to the log."""

    def __init__(self, acks: AckManager, *, source_id: str) -> None:
        self._acks = acks
        self._source_id = source_id

    @property
    def confirmed_tick(self) -> int:
        """Everything at or below it has ended, and readers have been told."""
        return self._acks.confirmed_tick

    async def sync(self) -> int:
        """Return a new confirmed tick, above every append that was acknowledged before the call.

        Waits for the appends in flight, costs no fsync, and readers have been told of the tick when it returns. Cancelling
        leaves nothing behind. Raises `Indeterminate` when an append in flight has no known outcome.
        """
        await asyncio.sleep(0)  # on an idle log nothing else suspends, and a loop of this would let nobody run
        tick = self._acks.mark()
        await self._acks.confirmed(tick)
        return tick

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
