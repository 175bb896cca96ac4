"""A WAL of live channels on one memory log: each failed write ends a term, and the next one is
recovered from the log.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Self, cast

import anyio

from interceptors.idempotency import Sequences
from interceptors.recovery import recover
from tests.interceptors.live_channel import START_MS, Fails, Limits, LiveChannel, SteerableLog
from tests.wal.steered_wal import Store
from wal.adaptor import Wal
from wal.append import Append, AppendPack, AppendTicket, Pack
from wal.entry import LogEntry
from wal.errors import LogReopening
from wal.log import Log
from wal.memory_store import MemoryLog, MemoryLogStore
from wal.timetick import TickAllocator

FEED = 7
OTHER = 8
"""Producers that every term knows."""


class FailingLog(SteerableLog):
    """Takes nothing more once a write has failed, until the store is reopened."""

    def __init__(self, log: MemoryLog, store: Store) -> None:
        super().__init__(log)
        self._store = store

    def append(self, pack: Pack) -> AppendTicket:
        if not self._store.taking_writes:
            raise LogReopening("a write has failed")
        return super().append(pack)


class LiveTerm:
    """A live channel as a term, which makes its segments by itself."""

    def __init__(self, channel: LiveChannel) -> None:
        self._channel = channel
        self.append: AppendPack = channel.append_pack

    async def ready(self) -> None:
        await self._channel.chain.ready()

    async def work(self, append: Append, failed: Callable[[], Awaitable[None]]) -> None:
        async with anyio.create_task_group() as workers:
            workers.start_soon(self._channel.allocator.run, append)
            await failed()
            workers.cancel_scope.cancel()

    async def close(self) -> None:
        await self._channel.chain.close()

    def end(self) -> None:
        self._channel.txn.end()


class LiveWal:
    """`channel` is that of the present term."""

    channel: LiveChannel

    def __init__(self, memory: MemoryLog) -> None:
        self.memory = memory
        self.store = Store()
        self.sequences = Sequences()
        self.outstanding = dict[int, int]()
        self.log = FailingLog(memory, self.store)
        self.store.may_reopen.set()
        self._terms = 0
        self.wal = Wal(
            self.store,  # type: ignore[arg-type]  # a WAL needs only this much of a store
            cast("Log", self.log),
            self._open_term,
            ticks=TickAllocator(self._now_ms, self._now_ms),
        )

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[Self]:
        memory = await MemoryLogStore().open_log("p0")
        opened = cls(memory)
        await opened.wal.open()
        keeping = asyncio.get_running_loop().create_task(opened.wal.keep())
        try:
            yield opened
        finally:
            await opened.wal.close()
            await keeping

    def fail_once(
        self, fails: Fails, wanted: Callable[[Pack], bool] = lambda pack: not pack.messages
    ) -> None:
        """Let the next pack that is wanted fail, and with it the store, until that is reopened."""

        def judge(pack: Pack) -> Fails:
            if not wanted(pack):
                return Fails.NOT
            self.log.fails = lambda _: Fails.NOT
            self.store.fail()
            return fails

        self.log.fails = judge

    def _now_ms(self) -> int:
        return START_MS + 1000 * self._terms + 500  # above all ticks of the last channel

    async def _open_term(self, _first_tick: LogEntry, _end: AppendPack) -> LiveTerm:
        self._terms += 1
        now_ms = START_MS + 1000 * self._terms
        if self._terms > 1:
            self.outstanding = self.channel.idempotency.window.outstanding()
        recovered = await recover(self.memory, outstanding=self.outstanding)
        window = recovered.window
        for producer_id in (FEED, OTHER):
            window.fence(producer_id, 1)
        self.channel = LiveChannel(
            self.memory, recovered, now_ms, Limits(), log=self.log, sequences=self.sequences
        )
        return LiveTerm(self.channel)
