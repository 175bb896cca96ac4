"""Steady mixed load on one node for hours, in one process, with a sample of what it costs every few
seconds.

In: a directory, and for how long. Out: samples, and what the named reader missed. Inserts, upserts,
both kinds of transactions, a named reader that checks that every row comes once and in order,
readers that come and go, some that never read, cuts, leases as an ingest would write them,
retention that gives up log and files. Nothing kept here grows with time.
"""

import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

import streamingnode as sn
from flusher.cuts import Lease, write_lease
from tests.chaos.memory_use import in_use_bytes
from tests.chaos.operations import Row
from tests.chaos.rows import COLLECTIONS, REPLACED, as_batch
from tests.chaos.workload import KEYS, make_collections
from wal.errors import StorageFailed, Truncated

SETTINGS: dict[str, object] = {
    "cut_interval_s": None,
    "retention_s": 20.0,
    "flush.retention.interval_s": 5.0,
    "log.memtable_bytes": 4 << 20,
    "tail.capacity_bytes": 8 << 20,
}
"""Buffers so small that all are full, and turned over, within the warm-up."""
INSERTERS = 4
INSERT_PAUSE_S = 0.02
UPSERT_PAUSE_S = 0.03
TRANSACTION_PAUSE_S = 0.05
STREAMED_PAUSE_S = 0.2
CUT_PAUSE_S = 2.0
READ_PAUSE_S = 1.0
ACK_EVERY = 50
SAMPLE_S = 2.0
SAMPLES = "samples.jsonl"
MISSED = "missed.txt"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What the process has at one moment, and how long the inserts since the last sample took, in
    seconds.
    """

    at_s: float
    resident_bytes: int
    in_use_bytes: int
    descriptors: int
    disk_bytes: int
    inserts: int
    read: int
    p99_s: float


class Soak:
    """The clients of one node and what they have counted."""

    def __init__(self, node: sn.Node, directory: Path, out: Path, *, seconds: float) -> None:
        self._node = node
        self._directory = directory
        self._out = out
        self._end_s = time.monotonic() + seconds
        self._took_s: list[float] = []
        self._inserted = self._read = 0
        self._choose = random.Random(0)
        self._numbers = itertools.count(1 << 40)

    async def run(self) -> None:
        """Run everything until the end; the named reader last, so that it meets every row."""
        async with anyio.create_task_group() as tasks, self._never_read():
            tasks.start_soon(self._read_by_name)
            for index in range(INSERTERS):
                tasks.start_soon(self._every, INSERT_PAUSE_S, self._inserter(index))
            tasks.start_soon(self._every, UPSERT_PAUSE_S, self._upsert)
            tasks.start_soon(self._every, TRANSACTION_PAUSE_S, self._transaction)
            tasks.start_soon(self._every, STREAMED_PAUSE_S, self._streamed)
            tasks.start_soon(self._every, CUT_PAUSE_S, self._cut)
            tasks.start_soon(self._every, READ_PAUSE_S, self._come_and_go)
            with (self._out / SAMPLES).open("ab") as samples:
                await self._every(SAMPLE_S, lambda: self._sample(samples.write))

    async def _every(self, pause_s: float, work: Callable[[], Awaitable[None]]) -> None:
        """Work at moments that are so far apart, whatever the work takes, until the end."""
        due_s = time.monotonic()
        while (now_s := time.monotonic()) < self._end_s:
            await work()
            due_s = max(due_s + pause_s, now_s)
            await anyio.sleep(max(0.0, due_s - time.monotonic()))

    # --- writers ----------------------------------------------------------------------------------

    def _inserter(self, index: int) -> Callable[[], Awaitable[None]]:
        numbers = itertools.count(index, INSERTERS)

        async def insert() -> None:
            number = next(numbers)
            begun_s = time.perf_counter()
            await self._node.insert("events", as_batch([Row(number, number)]))
            self._took_s.append(time.perf_counter() - begun_s)
            self._inserted += 1

        return insert

    def _rows(self, count: int) -> list[Row]:
        return [Row(key, next(self._numbers)) for key in self._choose.sample(range(KEYS), count)]

    async def _upsert(self) -> None:
        await self._node.upsert(REPLACED, as_batch(self._rows(2)))

    async def _transaction(self) -> None:
        async with self._node.transaction() as txn:
            await txn.insert("left", as_batch(self._rows(2)))
            await txn.upsert(REPLACED, as_batch(self._rows(1)))

    async def _streamed(self) -> None:
        txn_id = await self._node.begin_transaction()
        for name in ("left", "right"):
            await self._node.insert(name, as_batch(self._rows(1)), txn_id=txn_id)
        if self._choose.random() < 0.2:
            await self._node.rollback_transaction(txn_id)
        else:
            await self._node.commit_transaction(txn_id)

    async def _cut(self) -> None:
        """Make a cut, and say as tables would that they have taken it."""
        cut = await self._node.flush()
        await anyio.to_thread.run_sync(
            self._write_leases, self._node.collections(), cut.number, cut.tick
        )

    def _write_leases(self, collections: Sequence[sn.Collection], cut: int, tick: int) -> None:
        for each in collections:
            table = str(self._directory.parent / "tables" / each.name)
            lease = Lease(
                table=table, node_id=self._node.node_id, collection_id=each.id, cut=cut, tick=tick
            )
            write_lease(self._directory, lease)

    # --- readers ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _never_read(self) -> AsyncIterator[None]:
        """Hold readers open that nobody reads from."""
        latest = sn.DeliverPolicy.latest()
        async with self._node.read("events", latest), self._node.read(REPLACED, latest):
            yield

    async def _read_by_name(self) -> None:
        """Read every insert, and note the first that does not come when it is due."""
        due = {index: index for index in range(INSERTERS)}
        async with self._node.read(
            "events", name="soak", include_ticks=True
        ) as messages:  # it looks at the clock with each
            async for message in messages:
                rows = message.to_arrow()
                for number in () if rows is None else rows["number"].to_numpy().tolist():
                    if due[number % INSERTERS] != number:
                        (self._out / MISSED).write_text(
                            f"{due[number % INSERTERS]} was due, {number} came"
                        )
                        return
                    due[number % INSERTERS] = number + INSERTERS
                    self._read += 1
                if self._read % ACK_EVERY == 0:
                    await messages.ack(message)
                if time.monotonic() > self._end_s and self._read >= self._inserted:
                    return

    async def _come_and_go(self) -> None:
        # Rows that every table has taken are given up, under a reader too; and the leases here are
        # of no table.
        with suppress(Truncated, StorageFailed):
            async with self._node.read(
                "left", until=await self._node.consistent_tick()
            ) as messages:
                async for _ in messages:
                    break
            await self._node.snapshot(REPLACED)

    # --- samples ----------------------------------------------------------------------------------

    async def _sample(self, write: Callable[[bytes], int]) -> None:
        took_s = sorted(self._took_s)
        self._took_s = []
        sample = Sample(
            at_s=time.monotonic(),
            resident_bytes=resident_bytes(),
            in_use_bytes=in_use_bytes(),
            descriptors=len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - names are enough
            disk_bytes=await anyio.to_thread.run_sync(_disk_bytes, self._directory),
            inserts=self._inserted,
            read=self._read,
            p99_s=took_s[len(took_s) * 99 // 100] if took_s else 0.0,
        )
        write(msgspec.json.encode(sample) + b"\n")


async def soak(directory: Path, out: Path, *, seconds: float) -> None:
    """Open a node and soak it."""
    async with sn.open_node(directory, config=sn.load_config(arguments=SETTINGS)) as node:
        await make_collections(node, COLLECTIONS)
        await Soak(node, directory, out, seconds=seconds).run()


def read_samples(out: Path) -> list[Sample]:
    """Return the samples of a run, a last one that was cut short left out."""
    lines = (out / SAMPLES).read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Sample) for line in lines]


def resident_bytes() -> int:
    """Return how much memory this process has; Linux only."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _disk_bytes(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                # thousands of files
                total += os.stat(os.path.join(folder, name)).st_size  # noqa: PTH116, PTH118
            except FileNotFoundError:
                continue
    return total
