"""Ending a transaction by its id when the first answer was lost: what the node says of it is what
the log says.
"""

from contextlib import suppress
from pathlib import Path

import anyio.lowlevel
import pyarrow as pa
import pytest

import streamingnode as sn
from interceptors.errors import InvalidTransactionState, TransactionExpired
from streamingnode.config import load_config
from streamingnode.node import Node
from streamingnode.opening import OpenNode
from tests.failing_disk import FailingDisk, Fault
from tests.parts_of import parts_of
from wal.append import AppendGroup, AppendResult
from wal.errors import Indeterminate
from wal.lifecycle import ReopenOptions

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False)])
QUICK: dict[str, object] = {
    "reopen": ReopenOptions(first_pause_s=0.001),
    "cut_interval_s": None,
}


def opened(path: Path) -> OpenNode:
    return sn.open_node(path, config=load_config(arguments=QUICK))


async def begun(node: Node, key: int) -> int:
    txn_id = await node.begin_transaction()
    await node.insert("a", [{"key": key}], txn_id=txn_id)
    return txn_id


async def keys(node: Node) -> list[int]:
    return sorted((await node.snapshot("a"))["key"].to_numpy().tolist())


async def test_commit_that_landed_before_the_log_was_reopened_is_told_and_known_when_it_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch, Fault.SYNC_DONE)
    async with opened(tmp_path) as node:
        await node.create_collection("a", SCHEMA, primary_key="key")
        earlier = await begun(node, 1)
        in_doubt = await begun(node, 2)
        given_up = await begun(node, 3)
        await node.commit_transaction(earlier)
        await node.rollback_transaction(given_up)
        disk.fail_at(1)
        await node.commit_transaction(in_doubt)
        for committed in (in_doubt, earlier):
            with pytest.raises(InvalidTransactionState, match="committed already"):
                await node.commit_transaction(committed)
        with pytest.raises(TransactionExpired):
            await node.commit_transaction(given_up)
        assert parts_of(node).measure().log.reopened == 1
        assert await keys(node) == [1, 2]


async def test_commit_that_was_lost_with_its_write_takes_place_in_the_next_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch, Fault.WRITE_LOST)
    async with opened(tmp_path) as node:
        await node.create_collection("a", SCHEMA, primary_key="key")
        await node.insert("a", [{"key": 1}])  # so that there is a segment
        in_doubt = await begun(node, 2)
        disk.fail_at(1)
        await node.commit_transaction(in_doubt)
        assert await keys(node) == [1, 2]


async def test_transaction_that_lost_rows_to_its_bound_does_not_commit_over_a_reopened_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch, Fault.WRITE_LOST)
    async with sn.open_node(
        tmp_path, config=load_config(arguments={**QUICK, "txn.size_bytes_max": 2_000})
    ) as node:
        await node.create_collection("a", SCHEMA, primary_key="key")
        txn_id = await begun(node, 1)
        disk.fail_at(1)  # the rollback
        with pytest.raises(TransactionExpired, match="over its maximum size"):
            await node.insert("a", [{"key": key} for key in range(1_000)], txn_id=txn_id)
        while not parts_of(node).measure().log.reopened:
            await anyio.lowlevel.checkpoint()
        with pytest.raises(TransactionExpired):
            await node.commit_transaction(txn_id)
        assert await keys(node) == []


async def test_transaction_that_ended_before_what_a_start_reads_is_not_said_to_be_lost(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as node:
        await node.create_collection("a", SCHEMA, primary_key="key")
        committed = await begun(node, 1)
        await node.commit_transaction(committed)
        await node.flush()
    async with opened(tmp_path) as node:
        with pytest.raises(InvalidTransactionState, match="ended too long ago"):
            await node.commit_transaction(committed)
        with pytest.raises(TransactionExpired):
            await node.commit_transaction(await node.consistent_tick())
        assert await keys(node) == [1]


async def test_collection_that_others_made_in_the_next_term_is_found_and_not_asked_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    async with opened(tmp_path) as node:
        await node.create_collection("a", SCHEMA, primary_key="key")
        channel = parts_of(node).channel
        append = channel.append
        before = channel.catalog

        async def overtaken(group: AppendGroup) -> AppendResult:
            channel.append = append
            disk.fail_at(1)
            with suppress(Indeterminate):
                await node.insert("a", [{"key": 1}])
            await node.create_collection("b", SCHEMA, primary_key="key")
            assert channel.catalog is not before
            return await append(group)

        channel.append = overtaken
        made = await node.create_collection(
            "b", SCHEMA, primary_key="key", if_not_exists=True, timeout=10
        )
        assert made == node.collection("b")
