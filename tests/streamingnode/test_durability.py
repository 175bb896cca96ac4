"""What an acknowledgement means is in the result, and readers do not see what power could still
take away.
"""

from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from streamingnode.composition import compose
from streamingnode.config import load_config
from streamingnode.opening import OpenNode, open_node
from wal.live_tail import LiveTail
from wal.rocks.floor import read_floor

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


@pytest.mark.may_block
async def test_no_reader_hears_of_a_tick_that_a_later_owner_could_go_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    advance = LiveTail.advance

    def advance_to_what_is_known(tail: LiveTail, tick: int) -> None:
        floor = read_floor(tmp_path)
        assert floor is not None
        assert tick <= floor.tick, "a kill now would let the next term give the tick again"
        heard.append(tick)
        advance(tail, tick)

    now_ms = 1_700_000_000_000
    node_at = partial(compose, now_ms=lambda: now_ms)
    async with OpenNode(tmp_path, load_config, node_at) as node:
        await node.create_collection("rows", SCHEMA, primary_key="id")
        monkeypatch.setattr(LiveTail, "advance", advance_to_what_is_known)
        for step_ms in (0, 1, 200, 999, 1000, 1001, 5000, 0, -3000):
            now_ms += step_ms
            given = await node.consistent_tick()
            assert given in heard
            await node.insert("rows", [{"id": now_ms}])
    last = heard[-1]
    async with OpenNode(tmp_path, load_config, node_at) as node:
        assert await node.consistent_tick() > last
