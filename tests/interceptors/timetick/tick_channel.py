"""The tick parts of one channel, put together on a log that a test steers."""

import asyncio
from collections.abc import Callable

from interceptors.chain import Chain, RedoInterceptor
from interceptors.timetick import AckManager, MvccManager, TimeTickInterceptor, TimeTickSyncOperator
from tests.wal.manual_log import ManualLog, StillClock, allocator, settle
from wal.append import AppendGroup, AppendResult, Pack
from wal.live_tail import LiveTail
from wal.log import log_end


class TickChannel:
    def __init__(
        self,
        *,
        durability: str = "fsync",
        oldest_open_begin: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.clock = StillClock()
        self.ticks = allocator(self.clock)
        self.first_tick = self.ticks.allocate()
        self.log = ManualLog(durability=durability)
        self.tail = LiveTail()
        self.tail.start(next_position=1, confirmed_tick=self.first_tick)
        self.promised: list[int] = []
        self.promise_refusal: Exception | None = None
        self.promise_ms = 0
        """How long the disk takes for one."""
        self.mvcc = MvccManager(self.first_tick)
        self.acks = AckManager(
            self.ticks, confirmed_tick=self.first_tick, tail=self.tail, mvcc=self.mvcc
        )
        self.sync_operator = TimeTickSyncOperator(self.acks, promise_tick=self._promise)
        self.timetick = TimeTickInterceptor(acks=self.acks, oldest_open_begin=oldest_open_begin)
        self.append_pack = Chain(
            [RedoInterceptor(wait_s_max=5), self.timetick], log_end(self.log)
        ).append

    async def append(self, group: AppendGroup) -> AppendResult:
        """Append a group alone."""
        await self.append_pack(Pack([group]))
        return group.result()

    async def start(self, group: AppendGroup) -> "asyncio.Task[AppendResult]":
        """Begin an append and run it as far as it gets."""

        async def run() -> AppendResult:
            return await self.append(group)

        task = asyncio.ensure_future(run())
        await settle()
        return task

    def published(self) -> list[int]:
        """Ticks of the entries readers can have."""
        return [entry.time_tick for entry in self.tail.read(1, bytes_max=1 << 30)]

    async def _promise(self, tick: int) -> None:
        assert tick > self.tail.confirmed_tick, "the promise comes before readers hear of it"
        if self.promise_refusal is not None:
            raise self.promise_refusal
        await asyncio.sleep(0)
        self.clock.now_ms += self.promise_ms
        self.promised.append(tick)
