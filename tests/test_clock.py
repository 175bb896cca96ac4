"""Clocks that run backwards, stand still or leap between two opens: ticks go on ascending, and
nothing is lost by it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pyarrow as pa
import pytest

from interceptors.errors import TransactionExpired
from interceptors.shard.state import ShardState
from streamingnode.composition import compose
from streamingnode.config import load_config
from streamingnode.node import Node
from streamingnode.opening import OpenNode
from tests.failing_disk import FailingDisk, Fault
from tests.parts_of import parts_of

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False), pa.field("value", pa.int64())])
NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
TEN_YEARS_MS = 3650 * 24 * HOUR_MS
OFTEN = {"flush.retention.interval_s": 0.01}


def opened_at(path: Path, now_ms: int | Callable[[], int], **settings: float) -> OpenNode:
    """Open a node whose clock stands still, or is what a test says."""
    arguments: dict[str, object] = {"cut_interval_s": None, "retention_s": 0, **settings}
    clock = now_ms if callable(now_ms) else lambda: now_ms
    return OpenNode(path, lambda: load_config(arguments=arguments), partial(compose, now_ms=clock))


def first_position(node: Node) -> int:
    return parts_of(node).channel.log.first_position


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
        with anyio.fail_after(60):
            while parts_of(node).measure().writes.open_transactions:
                await anyio.lowlevel.checkpoint()
        with pytest.raises(TransactionExpired):
            await node.commit_transaction(txn_id)


async def test_clock_that_was_set_ends_no_transaction_when_the_log_is_reopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch, Fault.WRITE_LOST)
    clock = [NOW_MS]
    async with opened_at(tmp_path, lambda: clock[0]) as node:
        await node.create_collection("c", SCHEMA, primary_key="key")
        txn_ids = [await node.begin_transaction() for _ in range(2)]
        await node.insert("c", [{"key": 1, "value": 1}], txn_id=txn_ids[0])
        clock[0] += HOUR_MS // 2
        disk.fail_at(1)
        await node.insert("c", [{"key": 2, "value": 2}])
        assert parts_of(node).measure().log.reopened == 1
        for txn_id in txn_ids:
            await node.commit_transaction(txn_id)
        assert (await node.snapshot("c")).num_rows == 2


async def test_log_written_under_a_clock_that_was_ahead_is_given_up_after_its_retention(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened_at(tmp_path, NOW_MS + TEN_YEARS_MS) as node:
        await node.create_collection("c", SCHEMA, primary_key="key")
        await node.insert("c", [{"key": 1, "value": 1}])
        await node.flush()
    assert "ticks_ahead_of_clock" not in caplog.text
    now_ms = NOW_MS
    async with opened_at(tmp_path, lambda: now_ms, retention_s=24 * 3600, **OFTEN) as node:
        assert parts_of(node).measure().ticks.ahead_s == pytest.approx(TEN_YEARS_MS / 1000, abs=60)
        await node.insert("c", [{"key": 2, "value": 2}])
        await node.flush()
        kept = first_position(node)
        for _ in range(25):
            now_ms += HOUR_MS
            await node.insert("c", [{"key": now_ms, "value": 3}])
            await node.flush()
        with anyio.fail_after(60):
            while first_position(node) == kept:
                await anyio.lowlevel.checkpoint()
        assert (await node.snapshot("c")).num_rows == 27
    assert caplog.text.count("ticks_ahead_of_clock") == 1
    assert "until=2033-" in caplog.text


async def test_a_clock_that_leaps_ahead_while_the_node_is_open_makes_no_log_old(
    tmp_path: Path,
) -> None:
    leap_ms = 0
    async with opened_at(tmp_path, lambda: NOW_MS + leap_ms, retention_s=24 * 3600) as node:
        await node.create_collection("c", SCHEMA, primary_key="key")
        for key in (1, 2):
            await node.insert("c", [{"key": key, "value": key}])
            await node.flush()
            leap_ms = TEN_YEARS_MS
        await node.insert("c", [{"key": 3, "value": 3}])
        await node.flush()
        await parts_of(node).flusher.retention.enforce(
            parts_of(node).flusher.checkpoint, ShardState()
        )
        assert first_position(node) == 1
