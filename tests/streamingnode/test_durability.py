"""What an acknowledgement means is in the result, and readers do not see what power could still take away."""

from pathlib import Path

import pyarrow as pa
import pytest

from streamingnode.opening import open_node

pytestmark = pytest.mark.anyio
SCHEMA = pa.schema([pa.field("id", pa.int64())])


@pytest.mark.parametrize("durability,durable", [("fsync", True), ("os", False)])
async def test_a_result_says_whether_it_was_synced_when_it_was_acknowledged(
    tmp_path: Path, durability: str, durable: bool
) -> None:
    async with open_node(tmp_path, durability=durability) as node:
        await node.create_collection("rows", SCHEMA, primary_key="id")
        assert (await node.insert("rows", [{"id": 1}])).durable is durable
        assert (await node.upsert("rows", [{"id": 1}])).durable is durable


async def test_rows_acknowledged_before_their_sync_reach_readers_after_it(tmp_path: Path) -> None:
    async with open_node(tmp_path, durability="os") as node:
        await node.create_collection("rows", SCHEMA, primary_key="id")
        result = await node.insert("rows", [{"id": number} for number in range(100)])
        until = await node.consistent_tick()
        assert until > result.time_tick
        async with node.read("rows", until=until) as messages:
            assert sum([message.num_rows async for message in messages]) == 100
    async with open_node(tmp_path, durability="os") as node:
        assert (await node.snapshot("rows")).num_rows == 100
