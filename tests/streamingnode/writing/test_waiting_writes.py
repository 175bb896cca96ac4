"""Writes that wait end as their callers are told: cancelled, out of time, held back, closed over or
in doubt.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import streamingnode as sn
from interceptors.errors import TransactionExpired
from streamingnode.config import load_config
from streamingnode.errors import DeadlineExceeded
from streamingnode.writing.write import WriteResult
from tests.failing_disk import FailingDisk, Fault
from tests.parts_of import parts_of
from tests.streamingnode.writing.held_node import (
    HANGS_S,
    SCHEMA,
    SHARDS,
    Held,
    contents,
    rows,
    start,
    table,
    turns,
)
from wal.errors import Indeterminate, Overloaded
from wal.lifecycle import LogState, ReopenOptions
from wal.packer import PACKS_IN_FLIGHT_MAX
from wal.runtime import elapsed_ms, unix_ms

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]


async def test_write_cancelled_before_its_pack_has_its_place_never_happened(held: Held) -> None:
    held.hold()
    calls = [held.node.insert("c", rows(key)) for key in range(PACKS_IN_FLIGHT_MAX)]
    on_their_way = [task for call in calls for task in await start(call)]
    waiting = await start(*(held.node.insert("c", rows(key)) for key in range(10, 20)))
    for task in waiting[:5]:
        task.cancel()
    await turns()
    held.let_go()
    results = await asyncio.gather(*waiting[5:], *on_their_way)
    assert all(task.cancelled() for task in waiting[:5])
    assert (await held.found()).keys() == {*range(PACKS_IN_FLIGHT_MAX), *range(15, 20)}
    assert await held.groups() == [*[1] * PACKS_IN_FLIGHT_MAX, 5]
    assert len({result.time_tick for result in results if result}) == 5 + PACKS_IN_FLIGHT_MAX


async def test_write_cancelled_with_its_pack_under_way_is_in_the_log_and_hurts_nobody(
    held: Held,
) -> None:
    held.hold()
    first, cancelled, other = await start(*(held.node.insert("c", rows(key)) for key in range(3)))
    cancelled.cancel()
    await turns()
    assert cancelled.cancelled()
    held.let_go()
    assert await first
    assert await other
    assert (await held.found()).keys() == {0, 1, 2}


async def test_deadline_says_whether_the_write_may_still_take_effect(held: Held) -> None:
    held.hold()
    calls = [held.node.insert("c", rows(key)) for key in range(PACKS_IN_FLIGHT_MAX - 1)]
    tasks = [task for call in calls for task in await start(call)]
    (begun,) = await start(held.node.insert("c", rows(10), timeout=0.05))
    (waiting,) = await start(held.node.insert("c", rows(11), timeout=0.05))
    with pytest.raises(DeadlineExceeded):
        await begun
    with pytest.raises(Overloaded, match="did nothing"):
        await waiting
    held.let_go()
    await asyncio.gather(*tasks)
    assert (await held.found()).keys() == {*range(PACKS_IN_FLIGHT_MAX - 1), 10}


@pytest.mark.parametrize("wait", [True, False], ids=["each waits for its last", "all at once"])
async def test_back_pressure_of_a_small_bound_loses_nothing(tmp_path: Path, *, wait: bool) -> None:
    settings = {
        "writes.pending_bytes_max": 16 << 10,
        "wal.group_bytes_max": 4 << 10,
        "cut_interval_s": None,
    }
    with anyio.fail_after(HANGS_S):
        async with sn.open_node(tmp_path, config=load_config(arguments=settings)) as node:
            await node.create_collection("c", SCHEMA, primary_key="id", shards=SHARDS)
            kinds: list[Callable[[str, Any], Awaitable[WriteResult]]] = [node.insert, node.upsert]

            async def write(first: int) -> None:
                calls = [
                    kinds[key % 2](
                        "c", table(key, item="x" * 900) if key % 3 else rows(key, item="x" * 900)
                    )
                    for key in range(first, first + 5)
                ]
                if wait:
                    for call in calls:
                        await call
                        check_bounds()
                else:
                    await asyncio.gather(*calls)

            def check_bounds() -> None:
                writes = parts_of(node).measure().writes
                assert writes.pending_row_bytes <= 4 << 10
                assert writes.pending_append_bytes <= 4 << 10

            async with asyncio.TaskGroup() as tasks:
                for number in range(60):
                    tasks.create_task(write(5 * number))
            assert (await contents(node)).keys() == set(range(300))
            assert parts_of(node).measure().writes.pending_row_bytes == 0
        async with sn.open_node(tmp_path, cut_interval_s=None) as node:
            assert (await contents(node)).keys() == set(range(300))


async def test_cancelled_callers_give_back_what_they_held(held: Held) -> None:
    held.hold()
    tasks = await start(*(held.node.insert("c", rows(key)) for key in range(50)))
    assert parts_of(held.node).measure().writes.pending_row_bytes > 0
    for task in tasks:
        task.cancel()
    await turns()
    held.let_go()
    await asyncio.wait(tasks)
    await held.node.insert("c", rows(100))
    assert parts_of(held.node).measure().writes.pending_row_bytes == 0


async def test_closing_lets_what_waits_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    with anyio.fail_after(HANGS_S):
        async with sn.open_node(tmp_path, cut_interval_s=None) as node:
            await node.create_collection("c", SCHEMA, primary_key="id", shards=SHARDS)
            disk.gate.clear()
            tasks = [
                task
                for key in range(0, 30, 3)
                for task in await start(*(node.insert("c", rows(key + n)) for n in range(3)))
            ]
            closing = node.begin_closing()
            await turns()
            disk.gate.set()
            await closing
            assert all(await asyncio.gather(*tasks))
        async with sn.open_node(tmp_path, cut_interval_s=None) as node:
            assert (await contents(node)).keys() == set(range(30))


async def back(node: sn.Node) -> None:
    """Wait until the log is back."""
    while parts_of(node).measure().log.state != "open":
        await anyio.lowlevel.checkpoint()


async def test_writes_of_a_pack_whose_outcome_stays_open_are_all_indeterminate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    settings = {"reopen.wait_s": 0.05, "cut_interval_s": None}
    with anyio.fail_after(HANGS_S):
        async with sn.open_node(tmp_path, config=load_config(arguments=settings)) as node:
            await node.create_collection("c", SCHEMA, primary_key="id")
            await node.insert("c", rows(-1))
            disk.fail_at(1, times=1 << 30)
            outcomes = await asyncio.gather(
                *(node.insert("c", rows(key)) for key in range(4)), return_exceptions=True
            )
            assert {type(outcome) for outcome in outcomes} == {Indeterminate}
            disk.heal()
            await back(node)
            await node.upsert("c", rows(9))
            found = (await contents(node)).keys()
            assert found >= {-1, 9}
            assert found <= {-1, 9, *range(4)}


# --- transactions whose appends wait are not idle -------------------------------------------------


def pass_s(node: sn.Node, seconds: int) -> None:
    """Let time pass by which transactions are idle, and expire those that have been for too
    long.
    """
    transactions = parts_of(node).channel.term.transactions
    now_ms = transactions.now_ms
    transactions.now_ms = lambda: now_ms() + 1_000 * seconds
    transactions.expire()


@pytest.mark.parametrize("ends", ["body", "commit"])
async def test_transaction_whose_append_waits_for_room_longer_than_its_keepalive_goes_on(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    small = {"log.queue_bytes_max": 4_096, "wal.group_bytes_max": 4_096, "cut_interval_s": None}
    with anyio.fail_after(HANGS_S):
        async with sn.open_node(tmp_path / "node", config=load_config(arguments=small)) as node:
            await node.create_collection("c", SCHEMA, primary_key="id")
            await node.insert("c", rows(1))
            txn_id = await node.begin_transaction()
            await node.insert("c", rows(2), txn_id=txn_id)
            disk.gate.clear()
            before = await start(
                *(node.insert("c", rows(key, item="x" * 3_000)) for key in range(10, 13))
            )
            call = (
                node.insert("c", rows(3), txn_id=txn_id)
                if ends == "body"
                else node.commit_transaction(txn_id)
            )
            (waiting,) = await start(call)
            pass_s(node, 60)
            disk.gate.set()
            await asyncio.gather(*before, waiting)
            if ends == "body":
                await node.commit_transaction(txn_id)
            assert (await contents(node)).keys() >= {1, 2}


@pytest.mark.parametrize("ends", ["body", "commit"])
async def test_transaction_whose_append_waits_for_a_lost_log_longer_than_its_keepalive_goes_on(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch, Fault.WRITE_LOST)
    quick = {
        "reopen": ReopenOptions(first_pause_s=0.001, longest_pause_s=0.001),
        "cut_interval_s": None,
    }
    with anyio.fail_after(HANGS_S):
        async with sn.open_node(tmp_path / "node", config=load_config(arguments=quick)) as node:
            await node.create_collection("c", SCHEMA, primary_key="id")
            await node.insert("c", rows(1))
            txn_id = await node.begin_transaction()
            await node.insert("c", rows(2), txn_id=txn_id)
            disk.fail_at(1, times=1 << 30)
            wal = parts_of(node).channel.wal
            ticks = parts_of(node).channel.ticks
            (other,) = await start(node.insert("c", rows(10)))
            while wal.state is LogState.OPEN:
                await turns()
            call = (
                node.insert("c", rows(3), txn_id=txn_id)
                if ends == "body"
                else node.commit_transaction(txn_id)
            )
            (waiting,) = await start(call)
            later = SimpleNamespace(
                monotonic_ns=lambda: time.monotonic_ns() + 60_000_000_000,
                perf_counter=time.perf_counter,
            )
            monkeypatch.setattr("interceptors.txn.time", later)
            monkeypatch.setattr("wal.append.time", later)
            ticks._now_ms = lambda: unix_ms() + 60_000
            ticks._elapsed_ms = lambda: elapsed_ms() + 60_000
            disk.heal()
            await asyncio.gather(other, waiting)
            if ends == "body":
                await node.commit_transaction(txn_id)
            assert (await contents(node)).keys() >= {1, 2, 10}


@pytest.mark.parametrize("ends", ["body", "commit"])
async def test_transaction_is_expired_for_whoever_comes_after_its_keepalive(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sn.open_node(tmp_path / "node") as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
        txn_id = await node.begin_transaction()
        await node.insert("c", rows(1), txn_id=txn_id)
        late_ns = time.monotonic_ns() + 60_000_000_000
        monkeypatch.setattr(
            "wal.append.time",
            SimpleNamespace(monotonic_ns=lambda: late_ns, perf_counter=time.monotonic),
        )
        parts_of(node).channel.term.transactions.now_ms = lambda: late_ns // 1_000_000
        with pytest.raises(TransactionExpired):  # though nobody has looked since
            await (
                node.insert("c", rows(2), txn_id=txn_id)
                if ends == "body"
                else node.commit_transaction(txn_id)
            )
        assert not await contents(node)


async def test_transaction_whose_commit_waits_for_a_segment_is_idle_only_once_that_is_given_up(
    held: Held,
) -> None:
    await held.node.create_collection("new", SCHEMA, primary_key="id")
    txn_ids = [await held.node.begin_transaction() for _ in range(2)]
    for key, txn_id in enumerate(txn_ids):
        await held.node.insert("new", rows(key), txn_id=txn_id)
    held.hold()
    kept, given_up = await start(*(held.node.commit_transaction(txn_id) for txn_id in txn_ids))
    pass_s(held.node, 60)
    given_up.cancel()
    await turns()
    pass_s(held.node, 1)
    held.let_go()
    await kept
    with pytest.raises(TransactionExpired):
        await held.node.commit_transaction(txn_ids[1])
    assert (await held.found("new")).keys() == {0}
