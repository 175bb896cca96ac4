"""Clocks that run backwards, stand still or leap between two opens: ticks go on ascending, and nothing is lost by it."""

from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pyarrow as pa
import pytest

from streamingnode.composition import compose
from streamingnode.config import load_config
from streamingnode.opening import OpenNode
from wal.errors import TransactionExpired

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False), pa.field("value", pa.int64())])
NOW_MS = 1_700_000_000_000


def opened_at(path: Path, now_ms: int) -> OpenNode:
    """Open a node whose clock stands still."""
    settings = {"cut_interval_s": None, "retention_s": 0}
    return OpenNode(path, lambda: load_config(arguments=settings), partial(compose, now_ms=lambda: now_ms))


async def test_ticks_ascend_over_every_open_whatever_the_clock_says(tmp_path: Path) -> None:
    ticks: list[int] = []
    clocks = [NOW_MS, NOW_MS - 86_400_000, NOW_MS, 0, NOW_MS + 86_400_000, NOW_MS]
    for number, now_ms in enumerate(clocks, 1):
        async with opened_at(tmp_path, now_ms) as node:
            ticks.append(await node.consistent_tick())
            await node.create_collection("c", SCHEMA, primary_key="key", if_not_exists=True)
            ticks.append((await node.insert("c", [{"key": number, "value": number}])).time_tick)
            ticks.append((await node.flush()).tick)
            assert (await node.snapshot("c")).num_rows == number
            ticks.append(await node.consistent_tick())  # in no entry: only promised
    assert ticks == sorted(set(ticks))


async def test_idle_transaction_ends_although_the_clock_stands_still(tmp_path: Path) -> None:
    async with opened_at(tmp_path, NOW_MS) as node:
        await node.create_collection("c", SCHEMA, primary_key="key")
        txn_id = await node.begin_transaction(keepalive_s=0.01)
        with anyio.fail_after(10):
            while node.statistics().writes.open_transactions:
                await anyio.lowlevel.checkpoint()
        with pytest.raises(TransactionExpired):
            await node.commit_transaction(txn_id)
