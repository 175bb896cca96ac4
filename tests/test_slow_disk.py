"""A node whose disk is slow: appends wait in a bounded queue, deadlines are kept, and the event
loop goes on.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode import composition
from streamingnode.errors import DeadlineExceeded
from streamingnode.node import Node
from tests.streamingnode.append_double import schema_of
from wal.errors import Indeterminate, Overloaded
from wal.rocks.store import RocksStore, open_rocks_store
from wal.rocks.writer import Writer

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

KIB = 1 << 10
MIB = 1 << 20
SCHEMA = schema_of(id=pa.int64(), item=pa.string())
GROUP_BYTES = 100 * KIB
QUEUE_BYTES = MIB
HANGS_S = 60


class Disk:
    """The syncs of every log store from here on: none ends while the gate is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.stores: list[RocksStore] = []
        sync = Writer.sync_log

        def slow(writer: Writer) -> None:
            assert self.gate.wait(HANGS_S), (
                "a sync of the disk held the event loop, where the gate is opened"
            )
            sync(writer)

        async def noted(*arguments: object, **options: object) -> RocksStore:
            # as it is called
            self.stores.append(await open_rocks_store(*arguments, **options))  # type: ignore[arg-type]
            return self.stores[-1]

        monkeypatch.setattr(Writer, "sync_log", slow)
        monkeypatch.setattr(composition, "open_rocks_store", noted)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def rows(start: int) -> pa.Table:
    return pa.table({"id": range(start, start + 100), "item": ["x" * KIB] * 100}, schema=SCHEMA)


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Node]:
    settings: dict[str, Any] = {"log.queue_bytes_max": QUEUE_BYTES}
    async with sn.open_node(path, cut_interval_s=None, **settings) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        yield node


async def ids(node: Node) -> set[int]:
    return {each for each in (await node.snapshot("orders"))["id"].to_pylist() if each is not None}


async def test_appends_wait_in_a_bounded_queue_while_the_event_loop_goes_on(
    tmp_path: Path, disk: Disk
) -> None:
    async with opened(tmp_path) as node:
        await node.insert("orders", rows(0))
        [store] = disk.stores
        disk.gate.clear()
        inserts = [
            asyncio.ensure_future(node.insert("orders", rows(1000 * number)))
            for number in range(1, 41)
        ]
        while store.queued_bytes <= QUEUE_BYTES / 2:
            disk.gate.set()  # the sync that waits, and no other
            disk.gate.clear()
            await asyncio.sleep(0)
        for _ in range(500):
            await asyncio.sleep(0)
            assert store.queued_bytes <= QUEUE_BYTES + 2 * GROUP_BYTES
        disk.gate.set()
        while not all(each.done() for each in inserts):
            await asyncio.sleep(0)
            assert store.queued_bytes <= QUEUE_BYTES + 2 * GROUP_BYTES
        await asyncio.gather(*inserts)
        assert len(await ids(node)) == 4100


async def test_a_deadline_on_a_slow_disk_tells_whether_the_rows_may_be_there(
    tmp_path: Path, disk: Disk
) -> None:
    async with opened(tmp_path) as node:
        await node.insert("orders", rows(0))
        disk.gate.clear()
        begun = 0
        refused = 0
        for number in range(1, 31):
            try:
                await node.insert("orders", rows(1000 * number), timeout=0.02)
            except DeadlineExceeded:
                begun += 1
            except Overloaded:
                refused += 1
        assert issubclass(DeadlineExceeded, Indeterminate)
        assert begun * GROUP_BYTES <= QUEUE_BYTES + GROUP_BYTES
        assert refused > 0
        disk.gate.set()
        await node.insert("orders", rows(100_000))
        found = await ids(node)
        assert {each for each in found if each % 1000 == 0} == {
            *(1000 * n for n in range(begun + 1)),
            100_000,
        }, "what was begun is there, what was not is not"


async def test_readers_go_on_while_the_disk_takes_no_write(tmp_path: Path, disk: Disk) -> None:
    async with opened(tmp_path) as node:
        await node.insert("orders", rows(0))
        tick = await node.consistent_tick()
        disk.gate.clear()
        with pytest.raises(DeadlineExceeded):
            await node.insert("orders", rows(1000), timeout=0.05)
        with anyio.fail_after(HANGS_S):
            async with node.read("orders", sn.DeliverPolicy.all(), until=tick) as messages:
                assert sum([message.num_rows async for message in messages]) == 100
        disk.gate.set()
