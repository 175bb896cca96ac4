"""What writes hold in memory stays within its bound, and none of them waits for ever, whatever they
do at the same time.
"""

import gc
from collections.abc import Awaitable
from random import Random

import anyio
import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.config import load_config
from streamingnode.writing.transaction import Transaction
from tests.parts_of import parts_of
from tests.streamingnode.append_double import schema_of
from wal.errors import Overloaded

pytestmark = pytest.mark.anyio

SCHEMA = schema_of(key=pa.int64(), pad=pa.string())
BYTES_MAX = 128 << 10
SETTINGS = {
    "writes.pending_bytes_max": BYTES_MAX,
    "wal.group_bytes_max": 8 << 10,
    "cut_interval_s": None,
}


def rows(key: int, size_bytes: int) -> list[dict[str, object]]:
    return [{"key": key, "pad": "x" * size_bytes}]


def check_bounds(node: sn.Node) -> None:
    writes = parts_of(node).measure().writes
    assert writes.pending_row_bytes <= BYTES_MAX // 4
    assert writes.pending_append_bytes <= BYTES_MAX // 4
    assert writes.pending_transaction_bytes <= BYTES_MAX // 2


@pytest.mark.parametrize("seed", range(3))
async def test_writes_of_all_kinds_end_and_stay_within_the_bound(seed: int) -> None:
    """Transactions also write beside themselves while they hold room: no write may wait for what an
    open one holds.
    """
    random = Random(seed)
    refused = 0
    committed = 0
    async with sn.open_node(None, config=load_config(arguments=SETTINGS)) as node:
        await node.create_collection("c", SCHEMA, primary_key="key", shards=2)

        async def write(key: int) -> None:
            for call in random.choices([node.insert, node.upsert], k=4):
                await call("c", rows(key, random.randrange(7_000)))
                check_bounds(node)

        async def transact(key: int) -> None:
            nonlocal refused, committed
            try:
                async with node.transaction() as txn:
                    for _ in range(random.randrange(1, 6)):
                        await txn.insert("c", rows(key, random.randrange(7_000)))
                        check_bounds(node)
                        await node.insert("c", rows(1_000 + key, random.randrange(4_000)))
            except Overloaded:
                refused += 1
            else:
                committed += 1

        with anyio.fail_after(90):
            async with anyio.create_task_group() as tasks:
                for key in range(40):
                    tasks.start_soon(write, key)
                    tasks.start_soon(transact, 100 + key)
        writes = parts_of(node).measure().writes
        assert (
            writes.pending_row_bytes,
            writes.pending_append_bytes,
            writes.pending_transaction_bytes,
        ) == (0, 0, 0)
        assert committed, "the bound lets work through"
        assert refused, "and it was met"


async def as_many_as_fit(node: sn.Node) -> list[Transaction]:
    """Return open transactions that leave no room for another."""
    buffered = list[Transaction]()
    with pytest.raises(Overloaded, match="pending_bytes_max"):
        for key in range(100):
            txn = node.transaction()
            await txn.insert("c", rows(key, 3_000))
            buffered.append(txn)
    return buffered


async def expect_refusal(call: Awaitable[object]) -> None:
    with pytest.raises(Overloaded, match="pending_bytes_max") as caught:
        await call
    assert caught.value.retryable == "yes"


async def test_open_transactions_are_refused_at_the_bound_and_keep_nobody_else_from_writing() -> (
    None
):
    async with sn.open_node(None, config=load_config(arguments=SETTINGS)) as node:
        await node.create_collection("c", SCHEMA, primary_key="key")
        streamed = await node.begin_transaction()
        for key in range(5):
            await node.insert("c", rows(key, 6_000), txn_id=streamed)
        buffered = await as_many_as_fit(node)
        assert len(buffered) > 5
        for refused in (
            node.insert("c", rows(9, 3_000), txn_id=streamed),
            buffered[0].insert("c", rows(9, 3_000)),
        ):
            check_bounds(node)
            await expect_refusal(refused)
        for key in range(30):
            await node.insert("c", rows(key, 7_000))
        await buffered[0].commit()  # goes on without the refused rows
        await node.commit_transaction(streamed)
        await buffered[1].rollback()
        del buffered, refused  # the others are ended by nobody
        gc.collect()
        await node.insert("c", rows(1, 10))
        async with node.transaction() as txn:
            await txn.insert("c", rows(9, 10))
        assert parts_of(node).measure().writes.pending_transaction_bytes == 0
        assert (await node.snapshot("c")).num_rows == 5 + 1 + 30 + 2


async def test_rows_that_waited_for_a_segment_do_not_stay_until_garbage_collection() -> None:
    async with sn.open_node(None, cut_interval_s=None) as node:
        await node.create_collection("c", SCHEMA, primary_key="key")
        await node.create_collection("other", SCHEMA, primary_key="key")
        gc.collect()
        gc.disable()
        try:
            before = pa.total_allocated_bytes()
            for collection in ("c", "other"):  # the first write of each waits for its segment
                await node.insert(
                    collection, pa.table({"key": [1], "pad": ["x" * (2 << 20)]}, schema=SCHEMA)
                )
            await node.insert("c", rows(2, 10))  # the log's last write stays until the next one
            assert pa.total_allocated_bytes() - before < 1 << 20
        finally:
            gc.enable()
