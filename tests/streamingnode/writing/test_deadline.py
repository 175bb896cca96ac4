"""The timeout of a transaction bounds what it waits for, and says whether it may still take
effect.
"""

import asyncio
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

import streamingnode as sn
from streamingnode.config import load_config
from streamingnode.errors import DeadlineExceeded, InvalidArgument, InvalidTransactionState
from streamingnode.node import Node
from streamingnode.writing import transaction
from streamingnode.writing.transaction import Transaction
from tests.cancelled import Way, cancel_at
from tests.failing_disk import FailingDisk
from tests.parts_of import WAYS, opened_one_way
from tests.streamingnode.writing.held_node import (
    HANGS_S,
    SCHEMA,
    Held,
    contents,
    rows,
    start,
)
from wal.errors import Overloaded
from wal.packer import PACKS_IN_FLIGHT_MAX

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SOON_S = 0.05
LONG_S = 60.0
WAITS_MAX = 100
SMALL_GROUPS = load_config(arguments={"wal.group_bytes_max": 64 << 10, "cut_interval_s": None})
LARGE = "x" * 20_000


async def over(txn: Transaction) -> None:
    """Return once the time of a transaction is over."""
    assert txn._deadline is not None
    while txn._deadline.left_s:
        await anyio.lowlevel.checkpoint()


def set_left_s(txn: Transaction, seconds: float) -> None:
    assert txn._deadline is not None
    txn._deadline._at = anyio.current_time() + seconds


async def nothing_is_open(node: Node) -> None:
    """Return once no transaction is open at a node."""
    with anyio.fail_after(HANGS_S):
        while await node.transactions():
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("way", ["transaction", "commit"])
async def test_a_commit_out_of_time_says_whether_it_may_still_take_effect(
    held: Held, way: str
) -> None:
    async def commit(key: int) -> None:
        if way == "transaction":
            async with held.node.transaction(timeout=SOON_S) as txn:
                await txn.upsert("c", rows(key))
                await txn.upsert("other", rows(key))
        else:
            txn = held.node.transaction()
            await txn.upsert("c", rows(key))
            await txn.upsert("other", rows(key))
            await txn.commit(timeout=SOON_S)

    held.hold()
    calls = [held.node.insert("c", rows(key)) for key in range(PACKS_IN_FLIGHT_MAX - 1)]
    beside = [task for call in calls for task in await start(call)]
    (begun,) = await start(commit(10))
    (waiting,) = await start(commit(11))
    with pytest.raises(DeadlineExceeded, match="may still take effect — read back") as doubt:
        await begun
    with pytest.raises(Overloaded, match="did nothing — try again") as refusal:
        await waiting
    assert (doubt.value.retryable, refusal.value.retryable) == ("indeterminate", "yes")
    assert isinstance(doubt.value, TimeoutError)
    held.let_go()
    await asyncio.gather(*beside)
    assert (await held.found()).keys() == {*range(PACKS_IN_FLIGHT_MAX - 1), 10}
    assert (await held.found("other")).keys() == {10}


async def test_rows_that_are_sent_before_the_commit_are_bounded_too_and_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "ROLLBACK_S_MAX", 2 * HANGS_S)  # who waits for it hangs
    disk = FailingDisk(monkeypatch)
    with anyio.fail_after(HANGS_S):
        async with sn.open_node(tmp_path, config=SMALL_GROUPS) as node:
            await node.create_collection("c", SCHEMA, primary_key="id")
            await node.insert("c", rows(0))
            with pytest.raises(Overloaded, match="the transaction did not reach the log within"):
                async with node.transaction(timeout=LONG_S) as txn:
                    for key in range(1, 8):
                        await txn.insert("c", rows(key, item=LARGE))
                    assert len(await node.transactions()) == 1
                    disk.gate.clear()
                    set_left_s(txn, SOON_S)
                    for key in range(8, 20):
                        await txn.insert("c", rows(key, item=LARGE))
            with pytest.raises(InvalidTransactionState, match="rolled back"):
                await txn.commit()
            disk.gate.set()
            await nothing_is_open(node)
            assert (await contents(node)).keys() == {0}


async def test_a_session_that_was_streamed_is_rolled_back_when_its_time_is_over() -> None:
    async with sn.open_node(None, config=SMALL_GROUPS) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
        with pytest.raises(Overloaded, match="did nothing"):
            async with node.transaction(timeout=LONG_S) as txn:
                for key in range(20):
                    await txn.insert("c", rows(key, item=LARGE))
                assert len(await node.transactions()) == 1
                set_left_s(txn, 0.0)
        await nothing_is_open(node)
        assert await contents(node) == {}


@pytest.mark.parametrize("way", WAYS)
async def test_time_that_is_over_in_the_callers_own_code_lets_nothing_begin(way: str) -> None:
    async with opened_one_way(way) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
        for end in ("leave the block", "commit", "roll back"):
            txn = node.transaction(timeout=0.001)
            await txn.insert("c", rows(1))
            await over(txn)
            if end == "roll back":
                await txn.rollback()
                continue
            with pytest.raises(Overloaded, match="did nothing"):
                if end == "commit":
                    await txn.commit(timeout=LONG_S)
                else:
                    async with txn:
                        await txn.insert("c", rows(2))
        assert await contents(node) == {}


@pytest.mark.parametrize("way", WAYS)
async def test_a_transaction_in_time_takes_place(way: str) -> None:
    async with opened_one_way(way, config=SMALL_GROUPS) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
        async with node.transaction(timeout=LONG_S) as small:
            await small.insert("c", rows(1))
        async with node.transaction(timeout=LONG_S) as large:
            for key in range(2, 20):
                await large.insert("c", rows(key, item=LARGE))
        async with node.transaction(timeout=LONG_S) as explicit:
            await explicit.insert("c", rows(20))
            result = await explicit.commit(timeout=LONG_S)
        async with node.transaction(timeout=LONG_S) as empty:
            pass
        assert explicit.result == result
        assert all(txn.result is not None for txn in (small, large, empty))
        assert (await contents(node)).keys() == set(range(1, 21))


async def test_a_time_that_is_none_is_refused_and_leaves_the_transaction_open() -> None:
    async with sn.open_node(None) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
        for wrong in (0, -1, "1", True, float("nan")):
            with pytest.raises(InvalidArgument, match="pass a number of seconds above 0"):
                node.transaction(timeout=wrong)  # type: ignore[arg-type]
        async with node.transaction() as txn:
            await txn.insert("c", rows(1))
            with pytest.raises(InvalidArgument, match="timeout=0"):
                await txn.commit(timeout=0)
        assert (await contents(node)).keys() == {1}


async def test_the_transaction_of_a_producer_is_repeated_exactly_after_its_time(
    held: Held,
) -> None:
    feed = await held.node.producer("feed")

    async def write(timeout: float) -> None:
        async with feed.transaction(sequence=7, timeout=timeout) as txn:
            await txn.insert("c", rows(1))
            await txn.insert("other", rows(1))

    held.hold()
    with pytest.raises(DeadlineExceeded):
        await write(SOON_S)
    held.let_go()
    await write(LONG_S)
    await write(LONG_S)
    assert len(await held.found()) == len(await held.found("other")) == 1


async def test_a_large_write_of_a_producer_waits_for_no_rollback_past_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "ROLLBACK_S_MAX", 2 * HANGS_S)  # who waits for it hangs
    disk = FailingDisk(monkeypatch)
    with anyio.fail_after(HANGS_S):
        async with sn.open_node(tmp_path, config=SMALL_GROUPS) as node:
            await node.create_collection("c", SCHEMA, primary_key="id")
            feed = await node.producer("feed")
            large = [row for key in range(20) for row in rows(key, item=LARGE)]
            disk.gate.clear()
            with pytest.raises(Overloaded, match="did nothing"):
                await feed.insert("c", large, sequence=1, timeout=SOON_S)
            disk.gate.set()
            await feed.insert("c", large, sequence=1, timeout=LONG_S)
            assert (await contents(node)).keys() == set(range(20))


@pytest.mark.parametrize("way", Way)
async def test_a_transaction_with_a_time_is_cancelled_at_each_of_its_waits(
    tmp_path: Path, way: Way
) -> None:
    async with sn.open_node(tmp_path, config=SMALL_GROUPS) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
        key = 0
        acknowledged: set[int] = set()
        tried: list[set[int]] = []

        async def call() -> None:
            nonlocal key
            mine = set(range(key, key + 6))
            key += 6
            tried.append(mine)
            async with node.transaction(timeout=LONG_S) as txn:
                for each in sorted(mine):
                    await txn.insert("c", rows(each, item=LARGE))
                await txn.commit(timeout=LONG_S)
            acknowledged.update(mine)

        waits = 0
        while await cancel_at(waits, call, way):
            waits += 1
            assert waits < WAITS_MAX
        found = (await contents(node)).keys()
        assert waits > 3
        assert acknowledged <= found
        for mine in tried:
            assert len(mine & found) in {0, len(mine)}


def test_a_blocking_transaction_takes_a_time(tmp_path: Path) -> None:
    with sn.sync.open_node(tmp_path) as node:
        node.create_collection("c", SCHEMA, primary_key="id")
        with node.transaction(timeout=LONG_S) as txn:
            txn.insert("c", rows(1))
        explicit = node.transaction()
        explicit.insert("c", rows(2))
        assert explicit.commit(timeout=LONG_S).time_tick
        with node.producer("feed").transaction(sequence=1, timeout=LONG_S) as once:
            once.insert("c", rows(3))
        with pytest.raises(Overloaded, match="did nothing"), node.transaction(timeout=1e-9) as late:
            late.insert("c", rows(4))
        assert set(node.snapshot("c")["id"].to_pylist()) == {1, 2, 3}
