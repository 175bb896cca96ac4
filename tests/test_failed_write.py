"""A node whose disk fails a sync: every call ends with a typed error, none hangs, and closing is quick."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest

import streamingnode as sn
from flusher import flush_run
from flusher.cuts import cut_writer
from streamingnode.node import Node
from wal.errors import Indeterminate, StreamingNodeError
from wal.rocks.engine import Engine

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False), pa.field("value", pa.int64())])
ROW = {"key": 1, "value": 1}
HANGS_S = 10


class Disk:
    """The syncs of every log store from here on: `good` more of them work, and none ends while the gate is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.good = 1 << 30
        self.gate = threading.Event()
        self.gate.set()
        sync = Engine.sync

        def gated(engine: Engine) -> None:
            self.gate.wait(HANGS_S)
            self.good -= 1
            if self.good < 0:
                raise OSError("IO error: the disk is gone")
            sync(engine)

        monkeypatch.setattr(Engine, "sync", gated)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Node]:
    async with sn.open_node(path, cut_interval_s=None) as node:
        await node.create_collection("c", SCHEMA, primary_key="key", if_not_exists=True)
        yield node


async def read_all(node: Node) -> int:
    async with node.read("c", until=await node.consistent_tick()) as messages:
        return sum([message.num_rows async for message in messages])


@pytest.mark.parametrize("good", [0, 1], ids=["the cut's", "the checkpoint's"])
async def test_flush_whose_sync_fails_and_every_call_after_it_end_with_a_typed_error(
    tmp_path: Path, disk: Disk, good: int
) -> None:
    calls: list[Callable[[Node], Awaitable[object]]] = [
        lambda node: node.flush(),
        lambda node: node.flush(),
        lambda node: node.insert("c", [ROW]),
        lambda node: node.consistent_tick(),
        lambda node: node.snapshot("c"),
        lambda node: node.begin_transaction(),
        lambda node: node.drop_collection("c"),
        read_all,
    ]
    with anyio.fail_after(HANGS_S):
        async with opened(tmp_path) as node:
            await node.insert("c", [ROW])
            disk.good = good
            failed = [await error_of(call(node)) for call in calls]
    assert isinstance(failed[good], Indeterminate)
    assert all(isinstance(error, StreamingNodeError) for error in failed[good:])
    disk.good = 1 << 30
    async with opened(tmp_path) as node:
        assert await read_all(node) == (await node.snapshot("c")).num_rows == 1
        assert (await node.flush()).number == 1


async def test_flush_hears_of_a_write_that_fails_while_its_files_are_written(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, goes_on = threading.Event(), threading.Event()
    publish = cut_writer.publish_cut

    def slowly(*arguments: Any) -> Any:
        writing.set()
        goes_on.wait(HANGS_S)
        return publish(*arguments)

    monkeypatch.setattr(flush_run, "publish_cut", slowly)
    with anyio.fail_after(HANGS_S):
        async with opened(tmp_path) as node:
            await node.insert("c", [ROW])
            flushing = asyncio.get_running_loop().create_task(error_of(node.flush()))
            await anyio.to_thread.run_sync(writing.wait)
            disk.good = 0
            assert await error_of(node.consistent_tick()) is None
            assert isinstance(await error_of(node.begin_transaction()), Indeterminate)
            goes_on.set()
            assert isinstance(await flushing, Indeterminate)


async def test_collection_that_exists_is_told_only_when_that_is_durable(tmp_path: Path, disk: Disk) -> None:
    async def create() -> None:
        await node.create_collection("new", SCHEMA, primary_key="key", if_not_exists=True)

    async with opened(tmp_path) as node:
        disk.gate.clear()
        creating = [asyncio.get_running_loop().create_task(create()) for _ in range(3)]
        done, _ = await asyncio.wait(creating, timeout=0.05)
        assert "new" in [each.name for each in node.collections()]
        assert not done
        disk.gate.set()
        await asyncio.gather(*creating)


async def error_of(call: Awaitable[object]) -> Exception | None:
    try:
        await call
    except Exception as error:
        return error
    return None
