"""`node.mq`: topics live in a node's directory, beside its rows."""

from pathlib import Path

import anyio
import pyarrow as pa
import pytest

import streamingnode as sn
from wal.errors import InvalidArgument, OnShutdown
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


async def test_a_node_in_memory_says_that_it_has_no_topics() -> None:
    async with sn.open_node(None) as node:
        with pytest.raises(InvalidArgument, match="directory"):
            _ = node.mq


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
