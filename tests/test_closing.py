"""Calls that are under way when their node closes: each hears in bounded time what is true of
it.
"""

import asyncio
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pyarrow as pa
import pytest

import streamingnode as sn
from interceptors.shard.interceptor import ShardManager
from streamingnode.channel import flush
from streamingnode.opening import OpenNode
from tests.failing_disk import FailingDisk
from tests.parts_of import parts_of
from wal.errors import Indeterminate, OnShutdown, StorageFull, StreamingNodeError
from wal.rocks.opening import open_owned

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False)])
HANGS_S = 60
QUICK_GRACE_S = 0.2
CLOSES_S = 60


def opened(path: Path | None) -> OpenNode:
    return sn.open_node(path, cut_interval_s=None)


async def error_of(call: Awaitable[object]) -> StreamingNodeError | None:
    try:
        await call
    except StreamingNodeError as error:
        return error
    return None


async def test_tick_and_cut_of_a_call_that_closing_overtakes_are_refused_as_closed() -> None:
    async with opened(None) as node:
        channel = parts_of(node).channel
        flusher = parts_of(node).flusher
    for call in (channel.consistent_tick(), flush(channel, flusher)):
        with pytest.raises(OnShutdown) as refused:
            await call
        assert refused.value.__cause__ is not refused.value


async def test_who_waits_for_a_tick_when_the_term_ends_hears_that_it_does_not_come() -> None:
    async with opened(None) as node:
        acks = parts_of(node).channel.term.acks
        acks.promised_tick = acks.allocate().tick + (1 << 40)  # an append that does not end
        mark = acks.mark()
        assert mark is not None
        waiting = mark.confirmed
        assert waiting is not None
        assert not waiting.done()
    assert waiting.done()
    assert type(waiting.exception()) is OnShutdown
    with pytest.raises(OnShutdown):
        acks.mark()


async def test_write_that_fails_while_the_node_closes_leaves_open_only_what_it_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    with anyio.fail_after(HANGS_S):
        async with opened(tmp_path) as node:
            await node.create_collection("a", SCHEMA, primary_key="key")
            await node.insert("a", [{"key": 1}])
            await node.flush()
            disk.gate.clear()
            disk.fail_at(1)
            calls = [
                asyncio.ensure_future(error_of(call))
                for call in (node.begin_transaction(), node.consistent_tick(), node.flush())
            ]
            await anyio.lowlevel.checkpoint()
            asyncio.get_running_loop().call_later(0.2, disk.gate.set)
        begin, tick, cut = await asyncio.gather(*calls)
    assert disk.reached
    assert type(begin) is Indeterminate
    assert (type(tick), type(cut)) == (OnShutdown, OnShutdown), "they wrote nothing"


async def test_insert_that_waits_for_a_segment_in_vain_holds_closing_no_longer_than_its_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise StorageFull("disk", 0, 1)

    loop = asyncio.get_running_loop()
    async with opened(None) as node:
        await node.create_collection("a", SCHEMA, primary_key="key")
        monkeypatch.setattr(ShardManager, "new_segment", full)
        monkeypatch.setattr("streamingnode.embedded.GRACE_S", QUICK_GRACE_S)
        inserts = [
            asyncio.ensure_future(error_of(node.insert("a", [{"key": key}]))) for key in range(4)
        ]
        inserts.append(asyncio.ensure_future(error_of(node.insert("a", [{"key": 9}], timeout=600))))
        await anyio.lowlevel.checkpoint()
        began = loop.time()
    assert QUICK_GRACE_S <= loop.time() - began < CLOSES_S
    assert [type(error) for error in await asyncio.gather(*inserts)] == [OnShutdown] * 5


async def test_term_that_opens_while_appends_are_stopped_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    reopens = threading.Event()
    stopped = threading.Event()

    def open_when_stopped(*given: Any, **options: Any) -> object:
        reopens.set()
        assert stopped.wait(HANGS_S)
        return open_owned(*given, **options)

    monkeypatch.setattr("wal.rocks.store.open_owned", open_when_stopped)
    with anyio.fail_after(HANGS_S):
        async with opened(tmp_path) as node:
            await node.create_collection("a", SCHEMA, primary_key="key")
            disk.fail_at(1)
            refused = asyncio.ensure_future(error_of(node.insert("a", [{"key": 1}])))
            await anyio.to_thread.run_sync(reopens.wait)
            closing = asyncio.ensure_future(parts_of(node).channel.wal.close())
            assert type(await refused) in (OnShutdown, Indeterminate)
            assert not closing.done()
            stopped.set()
            await closing
            assert type(await error_of(node.begin_transaction())) is OnShutdown
