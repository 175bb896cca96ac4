"""`node.mq`: topics live in a node's directory, beside its rows."""

from pathlib import Path

import anyio
import pyarrow as pa
import pytest

import streamingnode as sn
from wal.errors import InvalidArgument, OnShutdown
from wal.memory_store import MemoryLogStore
from wal.rocksmq.queue import RocksMQ

pytestmark = pytest.mark.anyio


async def test_topics_of_a_node_are_there_when_it_opens_again(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path / "node") as node:
        await node.create_collection(
            "orders", pa.schema([pa.field("id", pa.int64())]), primary_key="id"
        )
        await node.mq.create_topic("events")
        await node.mq.create_consumer_group("events", "billing")
        await node.insert("orders", [{"id": 1}])
        [message_id] = await node.mq.produce("events", [b"paid"])
    async with sn.open_node(tmp_path / "node") as node:
        async with await node.mq.register_consumer("events", "billing") as consumer:
            async for message in consumer:
                assert (message.message_id, message.payload) == (message_id, b"paid")
                await consumer.ack([message.message_id])
                break
        assert (await node.verify()).damages == []
        queue = node.mq
    with pytest.raises(OnShutdown):
        await queue.produce("events", [b"late"])


async def test_topics_of_a_node_in_memory_end_with_it() -> None:
    for _ in range(2):
        async with sn.open_node(None) as node:
            assert await node.mq.info() == {}
            await node.mq.create_topic("events")
            await node.mq.create_consumer_group("events", "group")
            await node.mq.produce("events", [b"0", b"1"])
            found = await node.mq.consume("events", "group", 9)
            assert [message.payload for message in found] == [b"0", b"1"]
            await node.mq.ack("events", "group", [message.message_id for message in found])
            assert (await node.mq.info())["events"].groups["group"].lag == 0


async def test_a_node_whose_store_keeps_no_topics_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryLogStore, "topic_store", None)
    async with sn.open_node(None) as node:
        with pytest.raises(InvalidArgument, match="directory"):
            _ = node.mq
        with pytest.raises(InvalidArgument, match="directory"):
            _ = node.channels


def test_topics_work_without_async(tmp_path: Path) -> None:
    with sn.sync.open_node(tmp_path / "node") as node:
        node.mq.create_topic("events")
        node.mq.create_consumer_group("events", "g")
        node.mq.produce("events", [b"a", b"b"])
        with node.mq.register_consumer("events", "g") as consumer:
            found = [next(iter(consumer)).payload]
        assert found == [b"a"]
        assert [message.payload for message in node.mq.consume("events", "g", 5)] == [b"a", b"b"]


async def test_retention_looks_after_topics_that_nobody_uses_and_a_node_without_topics_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = anyio.Event()

    async def keep(_queue: RocksMQ) -> None:
        looked.set()

    async with sn.open_node(tmp_path / "node") as node:
        await node.mq.create_topic("t")
    monkeypatch.setattr(RocksMQ, "keep", keep)
    async with sn.open_node(tmp_path / "node") as node:
        with anyio.fail_after(60):
            await looked.wait()
        await node.mq.destroy_topic("t")
    looked = anyio.Event()
    async with sn.open_node(tmp_path / "empty") as node:
        await node.flush()
    assert not looked.is_set()
