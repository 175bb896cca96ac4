"""A node closed while everything is going on at once: it ends, every call told, no task left,
nothing lost or doubled.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.config import load_config
from streamingnode.node import Node
from wal.errors import OnShutdown, StreamingNodeError

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False), pa.field("value", pa.int64())])
ROUNDS = 8
CLOSES_S = 60
CONFIG = load_config(
    arguments={"cut_interval_s": None, "retention_s": 0, "flush.retention.interval_s": 0.02}
)


class Users:
    """Everything a program may do with a node, by many tasks; numbers are written once."""

    def __init__(self) -> None:
        self.tried: set[int] = set()
        self.acknowledged: set[int] = set()
        self._last = 0
        self._wanted = 0
        self._reached = asyncio.Event()

    async def acknowledge_more(self, rows: int) -> None:
        """Return when so many more rows are acknowledged."""
        self._wanted = len(self.acknowledged) + rows
        self._reached.clear()
        await self._reached.wait()

    def row(self) -> list[dict[str, int]]:
        self._last += 1
        self.tried.add(self._last)
        return [{"key": self._last, "value": self._last}]

    def acknowledge(self, rows: list[dict[str, int]]) -> None:
        self.acknowledged.update(row["value"] for row in rows)
        if len(self.acknowledged) >= self._wanted:
            self._reached.set()

    async def insert(self, node: Node) -> None:
        rows = self.row()
        await node.insert("a", rows)
        self.acknowledge(rows)

    async def pair(self, node: Node) -> None:
        rows = self.row()
        async with node.transaction() as txn:
            await txn.insert("a", rows)
            await txn.insert("b", rows)
        self.acknowledge(rows)

    async def streamed_pair(self, node: Node) -> None:
        rows = self.row()
        txn_id = await node.begin_transaction(keepalive_s=5)
        await node.insert("a", rows, txn_id=txn_id)
        await node.insert("b", rows, txn_id=txn_id)
        await node.commit_transaction(txn_id)
        self.acknowledge(rows)

    async def flush(self, node: Node) -> None:
        await node.flush()

    async def change_collections(self, node: Node) -> None:
        await node.create_collection("c", SCHEMA, primary_key="key", shards=2, if_not_exists=True)
        await together(
            *(node.insert("c", [{"key": 1, "value": 1}]) for _ in range(3)),
            node.drop_collection("c"),
        )

    async def change_partitions(self, node: Node) -> None:
        await node.create_partition("d", "eu", if_not_exists=True)
        row = [{"key": 1, "value": 1}]
        await together(
            node.insert("d", row, partition="eu"), node.flush(), node.drop_partition("d", "eu")
        )

    async def read(self, node: Node) -> None:
        async with node.read("a", until=await node.consistent_tick()) as messages:
            async for _ in messages:
                pass

    async def read_by_name(self, node: Node) -> None:
        async with node.read("b", name="billing", until=await node.consistent_tick()) as messages:
            async for message in messages:
                await messages.ack(message)

    async def snapshot(self, node: Node) -> None:
        await node.snapshot("b")


async def together(*calls: Awaitable[object]) -> None:
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, StreamingNodeError):
            raise outcome


async def until_closed(work: Callable[[Node], Awaitable[None]], node: Node) -> None:
    while True:
        try:
            await work(node)
        except OnShutdown:
            return
        except StreamingNodeError:
            pass  # overtaken by somebody else
        await asyncio.sleep(0)


async def values(node: Node, name: str) -> Counter[int]:
    return Counter((await node.snapshot(name))["value"].to_numpy().tolist())


async def test_node_closed_in_the_middle_of_everything_loses_nothing_and_leaves_nobody_waiting(
    tmp_path: Path,
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)  # shown when the test fails
    chance = random.Random(seed)
    users = Users()
    loop = asyncio.get_running_loop()
    unheard: list[object] = []
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    kinds = [Users.insert, Users.pair, Users.streamed_pair, Users.flush, Users.change_collections]
    kinds += [Users.change_partitions, Users.read, Users.read_by_name, Users.snapshot]
    for _ in range(ROUNDS):
        async with sn.open_node(tmp_path, config=CONFIG) as node:
            for name in ("a", "b", "d"):
                await node.create_collection(
                    name, SCHEMA, primary_key="key", shards=3, if_not_exists=True
                )
            tasks = {
                loop.create_task(until_closed(kind.__get__(users), node)) for kind in kinds * 2
            }
            await users.acknowledge_more(chance.randint(1, 60))
            closing_at = loop.time()
        assert loop.time() - closing_at < CLOSES_S
        done, waiting = await asyncio.wait(tasks, timeout=CLOSES_S)
        assert not waiting
        for task in done:
            task.result()
    loop.set_exception_handler(None)
    assert not unheard
    async with sn.open_node(tmp_path, cut_interval_s=None) as node:
        left = await values(node, "a")
        right = await values(node, "b")
    assert left.keys() >= users.acknowledged
    assert left.keys() <= users.tried
    assert right.keys() <= left.keys(), "a pair is there whole"
    assert {*left.values(), *right.values()} <= {1}
