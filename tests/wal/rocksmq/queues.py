"""A queue on a real store, with clocks that a test sets."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from wal.errors import LogReopening
from wal.memory_store import MemoryLogStore
from wal.rocks.layout import RocksOptions
from wal.rocks.store import RocksStore, open_rocks_store
from wal.rocksmq.contract import MqOptions
from wal.rocksmq.queue import RocksMQ

OPTIONS = RocksOptions(free_bytes_min=0, memtable_bytes=1 << 20)


class Clock:
    """Milliseconds that pass when a test says so."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.ms


async def open_queue(
    path: Path,
    clock: Callable[[], int] | None = None,
    options: MqOptions | None = None,
    rocks: RocksOptions = OPTIONS,
) -> tuple[RocksStore, RocksMQ]:
    store = await open_rocks_store(path, options=rocks)
    clock = clock or Clock()

    async def in_term(call: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await call()
            except LogReopening:
                await store.reopen()

    return store, RocksMQ(
        store, options or MqOptions(), now_ms=clock, elapsed_ms=clock, in_term=in_term
    )


@asynccontextmanager
async def opened_in_memory(clock: Callable[[], int] | None = None) -> AsyncIterator[RocksMQ]:
    """Yield a queue whose store is in memory."""
    store = MemoryLogStore()
    clock = clock or Clock()

    async def in_term(call: Callable[[], Awaitable[None]]) -> None:
        await call()

    mq = RocksMQ(store, MqOptions(), now_ms=clock, elapsed_ms=clock, in_term=in_term)
    try:
        yield mq
    finally:
        await mq.close()
        await store.close()


@asynccontextmanager
async def opened(
    path: Path, clock: Callable[[], int] | None = None, options: MqOptions | None = None
) -> AsyncIterator[RocksMQ]:
    store, mq = await open_queue(path, clock, options)
    try:
        yield mq
    finally:
        await mq.close()
        await store.close()
