"""The timer of idle ticks: syncs a log at an interval, and at once when someone asks.

One sync at a time, and no request is lost: one that comes during a sync runs another when it ends.
"""

import asyncio

import anyio

from interceptors.timetick.sync_operator import TimeTickSyncOperator
from wal.append import Append
from wal.errors import ChannelFenced, Indeterminate, OnShutdown, StreamingNodeError
from wal.event_log import event_log

INTERVAL_S = 0.2
"""How long an idle log may keep its readers waiting."""

_ENDED = (ChannelFenced, Indeterminate, OnShutdown)
_log = event_log(__name__)


class TimeTickInspector:
    """Drives the sync operator of one log; made and used on the event loop."""

    def __init__(self, operator: TimeTickSyncOperator, *, interval_s: float = INTERVAL_S) -> None:
        self._operator = operator
        self._interval_s = interval_s
        self._wanted = asyncio.Event()
        self._persist_wanted = False
        self.syncs = 0

    def trigger(self) -> None:
        """Ask for an idle tick now."""
        self._wanted.set()

    def trigger_persisted(self) -> None:
        """Ask for a tick in the log now."""
        self._persist_wanted = True
        self._wanted.set()

    async def run(self, append: Append) -> None:
        """Sync until cancelled, or until the log takes no more: closed, fenced, or failed in a write."""
        while True:
            with anyio.move_on_after(self._interval_s):
                await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._sync(append)
            except _ENDED as error:
                _log.info("idle_ticks_ended", reason=str(error))
                return
            except StreamingNodeError as error:  # a full disk refuses ticks too; the next interval tries again
                _log.warning("tick_not_written", error=str(error))

    async def _sync(self, append: Append) -> None:
        if self._persist_wanted:
            self._persist_wanted = False
            try:
                await self._operator.persist(append)
            except BaseException:
                self._persist_wanted = True
                raise
        else:
            await self._operator.sync()
        self.syncs += 1
