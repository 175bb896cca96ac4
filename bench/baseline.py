"""Baselines measured beside the product: bare group commit and plain iteration on rocksdict,
without anything of ours.

The limit for appends: an asyncio queue, one writer thread, `write` of what is queued, `flush_wal`,
one wake-up of the event loop for the batch. No checksum, no order, no bound, no check: what is left
when all of that is free. Both sides get values that do not compress, RocksDB with the same settings
and the same warm-up, and are measured in the same run, since the same machine differs four-fold
between quiet and busy.
"""

import asyncio
import dataclasses
import itertools
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from rocksdict import DBRecoveryMode, Rdict, WriteBatch

from wal.rocks.layout import RocksOptions, database_options

WRITE_BYTES_MAX = 1 << 20
_KEY_BYTES = 8
_VALUES = 64
"""Values made before the clock starts and used in turn."""
WARM_UP_S = 0.2
"""How long a load runs before it is measured."""

_Queued = tuple[int, bytes, asyncio.Future[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One cell of the grid: `outstanding` tasks, each awaiting appends of `batch` rows of
    `row_bytes`, for `seconds`.
    """

    outstanding: int
    batch: int
    row_bytes: int = 1024
    seconds: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of it. Latencies are of one append, in seconds."""

    rows_per_s: float
    p50_s: float
    p99_s: float


async def measure_warm(load: Load, append: Callable[[], Awaitable[object]]) -> Measured:
    """Return what `measure_appends` measures once caches and threads have seen the load."""
    await measure_appends(dataclasses.replace(load, seconds=WARM_UP_S), append)
    return await measure_appends(load, append)


async def measure_appends(load: Load, append: Callable[[], Awaitable[object]]) -> Measured:
    """Run `append` (one batch) from `load.outstanding` tasks, each at least once, until the time is
    over.
    """
    latencies: list[float] = []
    deadline = time.perf_counter() + load.seconds

    async def appender() -> None:
        while True:
            started = time.perf_counter()
            await append()
            ended = time.perf_counter()
            latencies.append(ended - started)
            if ended >= deadline:
                return

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(load.outstanding):
            tasks.create_task(appender())
    elapsed = time.perf_counter() - started
    latencies.sort()
    return Measured(
        rows_per_s=len(latencies) * load.batch / elapsed,
        p50_s=statistics.median(latencies),
        p99_s=latencies[min(len(latencies) - 1, int(len(latencies) * 0.99))],
    )


class BareGroupCommit:
    """The limit: one value for each append, group commit, nothing else. `sync=False` leaves the
    syncing to the system.
    """

    def __init__(self, path: Path, *, sync: bool = True) -> None:
        self._database = open_database(path)
        self._sync = sync
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Queued | None] = SimpleQueue()
        self._next = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def append(self, value: bytes) -> asyncio.Future[None]:
        """Queue one value; the future is done once it is synced."""
        self._next += 1
        done = self._loop.create_future()
        self._queue.put((self._next, value, done))
        return done

    async def close(self) -> None:
        """Write what is queued, and close."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._database.close()

    def _run(self) -> None:
        queue = self._queue
        closing = False
        while not closing:
            writes: list[_Queued] = []
            size = 0
            item = queue.get()
            while item is not None:
                writes.append(item)
                size += len(item[1])
                if size >= WRITE_BYTES_MAX or queue.empty():
                    break
                item = queue.get_nowait()
            closing = item is None
            if writes:
                self._write(writes)

    def _write(self, writes: list[_Queued]) -> None:
        batch = WriteBatch(raw_mode=True)
        for position, value, _ in writes:
            batch.put(position.to_bytes(_KEY_BYTES, "big"), value)
        self._database.write(batch)
        if self._sync:
            self._database.flush_wal(sync=True)
        self._loop.call_soon_threadsafe(_settle, writes)


async def measure_bare_appends(load: Load, directory: Path, *, sync: bool = True) -> Measured:
    """Return the limit for `load`, on the disk of `directory`; a batch is one packed value that
    does not compress.
    """
    with scratch(directory) as path:
        commit = BareGroupCommit(path, sync=sync)
        values = itertools.cycle([os.urandom(load.row_bytes * load.batch) for _ in range(_VALUES)])
        try:
            return await measure_warm(load, lambda: commit.append(next(values)))
        finally:
            await commit.close()


def measure_plain_scan(
    directory: Path, *, rows: int, row_bytes: int = 1024, batch: int = 1
) -> float:
    """Return how many rows per second plain `iter()` yields, `batch` of them packed in one value
    that does not compress.

    The database is opened anew before, as a node's log is: nothing is left in memory but what the
    system keeps of files.
    """
    with scratch(directory) as path:
        database = open_database(path)
        values = itertools.cycle([os.urandom(row_bytes * batch) for _ in range(_VALUES)])
        for position in range(rows // batch):
            database.put(position.to_bytes(_KEY_BYTES, "big"), next(values))
        database.flush()
        database.close()
        database = open_database(path)
        started = time.perf_counter()
        count = sum(1 for _ in plain_scan(database))
        elapsed = time.perf_counter() - started
        database.close()
    return count * batch / elapsed


def plain_scan(database: Rdict) -> Iterator[tuple[bytes, bytes]]:
    """Yield every key and value, and ask at the end whether it was the end."""
    iterator = database.iter()
    iterator.seek_to_first()
    while iterator.valid():
        yield iterator.key(), iterator.value()
        iterator.next()
    iterator.status()


def open_database(path: Path) -> Rdict:
    """Return a database with the settings that a node's log has, in one column family."""
    options = RocksOptions()
    settings = database_options(options, recovery=DBRecoveryMode.point_in_time(), create=True)
    database = Rdict(str(path), settings)
    database.set_options(
        {"write_buffer_size": str(options.memtable_bytes)}
    )  # as a node does once it has replayed its log
    return database


@contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """Yield a path on the disk of `directory` that is removed again."""
    path = Path(tempfile.mkdtemp(dir=directory, prefix="bench-"))
    try:
        yield path / "scratch"
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _settle(writes: list[_Queued]) -> None:
    for _, _, done in writes:
        if not done.done():
            done.set_result(None)
