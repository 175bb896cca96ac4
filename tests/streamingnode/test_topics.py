"""`node.mq`: topics live in a node's directory, beside its rows."""

from pathlib import Path

import pyarrow as pa
import pytest

import streamingnode as sn
from wal.errors import InvalidArgument, OnShutdown

pytestmark = pytest.mark.anyio


async def test_topics_of_a_node_are_there_when_it_opens_again(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path / "node") as node:
        await node.create_collection("orders", pa.schema([pa.field("id", pa.int64())]), primary_key="id")
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
