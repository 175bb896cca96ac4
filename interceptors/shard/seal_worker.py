"""Seals segments that a policy calls due, by writing FLUSH messages; cuts seal the rest.

Looks at an interval and whenever an insert meets a full segment. A seal that comes too late (a cut or a drop was first) is
refused by the shard interceptor and not tried again.
"""

import asyncio
from collections.abc import Callable

import anyio

from interceptors.shard.allocator import FINAL
from interceptors.shard.manager import ShardManager
from interceptors.shard.seal_policy import Seal, due_seals
from wal.append import Append, AppendGroup
from wal.errors import StreamingNodeError
from wal.event_log import event_log
from wal.headers import FlushHeader
from wal.message import MutableMessage
from wal.message_type import MessageType

SEAL_INTERVAL_S = 1.0
"""Policies count in minutes, except total growing bytes: a second of ingest is what may come on top of its high mark."""

_log = event_log(__name__)


class SealWorker:
    """Appends FLUSH messages for the due segments of `manager`; `last_tick` returns the newest tick handed out."""

    def __init__(
        self, manager: ShardManager, *, last_tick: Callable[[], int], interval_s: float = SEAL_INTERVAL_S
    ) -> None:
        self._manager = manager
        self._last_tick = last_tick
        self._interval_s = interval_s
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Look now: a segment is full."""
        self._wake.set()

    async def run(self, append: Append) -> None:
        """Work until cancelled, or until the log takes no more."""
        while True:
            with anyio.move_on_after(self._interval_s):
                await self._wake.wait()
            self._wake.clear()
            try:
                await self.seal_due(append)
            except FINAL as error:
                _log.info("seals_ended", reason=str(error))
                return

    async def seal_due(self, append: Append) -> int:
        """Seal what is due now, in one group; return how many.

        Raises `OnShutdown`, `ChannelFenced`, `Indeterminate` or `StorageFailed`; any other refusal is left to the next look.
        """
        due = due_seals(self._manager.state.segments.values(), self._manager.limits, tick=self._last_tick())
        if not due:
            return 0
        try:
            await append(AppendGroup([_flush(seal) for seal in due]))
        except FINAL:
            raise
        except StreamingNodeError as error:
            _log.debug("seal_delayed", segments=len(due), error=str(error))
            return 0
        return len(due)


def _flush(seal: Seal) -> MutableMessage:
    segment = seal.segment
    header = FlushHeader(segment.collection_id, segment.partition_id, segment.segment_id, seal.reason)
    return MutableMessage(MessageType.FLUSH, header, segment.vchannel)
