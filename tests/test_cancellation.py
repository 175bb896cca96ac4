"""Every public call of a node on disk, cancelled at each of its waits: the node goes on, and nothing is lost or doubled."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.node import Node
from tests.cancelled import HANGS_S, Way, cancel_at

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False), pa.field("value", pa.int64())])
WAITS_MAX = 60
"""Above what any call below needs; one that still goes on then never ends."""


class Caller:
    """Calls of one node, each with a value of its own; knows what was tried and what was acknowledged."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.tried: set[int] = set()
        self.acknowledged: set[int] = set()
        self._last = 0

    def number(self) -> int:
        self._last += 1
        return self._last

    def rows(self) -> list[dict[str, int]]:
        value = self.number()
        self.tried.add(value)
        return [{"key": value, "value": value}]

    def acknowledge(self, rows: list[dict[str, int]]) -> None:
        self.acknowledged.update(row["value"] for row in rows)

    async def insert(self) -> None:
        rows = self.rows()
        await self.node.insert("c", rows)
        self.acknowledge(rows)

    async def insert_arrow(self) -> None:
        rows = self.rows()
        await self.node.insert("c", pa.Table.from_pylist(rows, schema=SCHEMA))
        self.acknowledge(rows)

    async def upsert(self) -> None:
        rows = self.rows()
        await self.node.upsert("c", rows)
        self.acknowledge(rows)

    async def transaction(self) -> None:
        rows = self.rows()
        async with self.node.transaction() as txn:
            await txn.insert("c", rows)
        self.acknowledge(rows)

    async def streamed_transaction(self) -> None:
        rows = self.rows()
        txn_id = await self.node.begin_transaction()
        await self.node.insert("c", rows, txn_id=txn_id)
        await self.node.commit_transaction(txn_id)
        self.acknowledge(rows)

    async def rolled_back_transaction(self) -> None:
        txn_id = await self.node.begin_transaction()
        await self.node.insert("c", [{"key": 0, "value": -1}], txn_id=txn_id)
        await self.node.rollback_transaction(txn_id)

    async def flush(self) -> None:
        await self.insert()
        await self.node.flush()

    async def collections(self) -> None:
        name = f"c{self.number()}"
        await self.node.create_collection(name, SCHEMA, primary_key="key", shards=2)
        await self.node.create_collection(name, SCHEMA, primary_key="key", shards=2, if_not_exists=True)
        await self.node.drop_collection(name)

    async def partitions(self) -> None:
        name, rows = f"p{self.number()}", self.rows()
        await self.node.create_partition("c", name)
        await self.node.insert("c", rows, partition=name)
        self.acknowledge(rows)

    async def read(self) -> None:
        async with self.node.read("c", until=await self.node.consistent_tick()) as messages:
            async for _ in messages:
                pass

    async def read_by_name(self) -> None:
        async with self.node.read("c", name="billing", until=await self.node.consistent_tick()) as messages:
            async for message in messages:
                await messages.ack(message)

    async def delete(self) -> None:
        await self.node.delete("c", [-self.number()])

    async def write_as_producer(self) -> None:
        rows = self.rows()
        producer = await self.node.producer("import")
        await producer.insert("c", rows)
        self.acknowledge(rows)
        await producer.put_note(b"rows")

    async def delete_reader_and_producer(self) -> None:
        await self.read_by_name()
        await self.node.delete_reader("c", "billing")
        await self.node.producer("brief")
        await self.node.delete_producer("brief")

    async def drop_partition(self) -> None:
        name = f"p{self.number()}"
        await self.node.create_partition("c", name)
        await self.node.drop_partition("c", name)

    async def verify(self) -> None:
        report = await self.node.verify()
        assert report.worst is None

    async def snapshot(self) -> None:
        await self.node.snapshot("c")


CALLS = [
    Caller.insert,
    Caller.insert_arrow,
    Caller.upsert,
    Caller.transaction,
    Caller.streamed_transaction,
    Caller.rolled_back_transaction,
    Caller.flush,
    Caller.collections,
    Caller.partitions,
    Caller.read,
    Caller.read_by_name,
    Caller.delete,
    Caller.write_as_producer,
    Caller.delete_reader_and_producer,
    Caller.drop_partition,
    Caller.verify,
    Caller.snapshot,
]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    async with sn.open_node(tmp_path, cut_interval_s=None) as opened:
        await opened.create_collection("c", SCHEMA, primary_key="key", shards=2)
        yield opened
    asyncio.get_running_loop().set_exception_handler(None)
    assert not unheard


async def at_each_wait(call: Callable[[], Awaitable[object]], way: Way, then: Callable[[], Awaitable[object]]) -> None:
    for wait in range(WAITS_MAX):
        if not await cancel_at(wait, call, way):
            return
        with anyio.fail_after(10):
            await then()
    pytest.fail(f"the call goes on after {WAITS_MAX} waits")


async def values(node: Node) -> Counter[int]:
    return Counter((await node.snapshot("c"))["value"].to_numpy().tolist())


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_cancelled_call_leaves_a_node_that_works_and_a_model_that_holds(
    node: Node, call: Callable[[Caller], Awaitable[None]], way: Way
) -> None:
    caller = Caller(node)
    await at_each_wait(lambda: call(caller), way, then=caller.insert)
    await call(caller)
    found = await values(node)
    assert found.keys() >= caller.acknowledged
    assert found.keys() <= caller.tried
    assert set(found.values()) <= {1}


@pytest.mark.parametrize("by_task", [True, False], ids=["task.cancel", "scope.cancel"])
@pytest.mark.parametrize("stage", ["opening", "closing"])
async def test_node_cancelled_while_it_opens_or_closes_lets_go_of_its_directory(
    tmp_path: Path, stage: str, *, by_task: bool
) -> None:
    before, turns, finished = asyncio.all_tasks(), 0, False
    while not finished:
        finished = await cancel_after(turns, tmp_path, stage, by_task=by_task)
        assert asyncio.all_tasks() == before, "a task outlived its node"
        turns = 1 + int(turns * 1.3)
    await use_once(tmp_path, leaving=asyncio.Event())


async def use_once(path: Path, leaving: asyncio.Event) -> None:
    async with sn.open_node(path, cut_interval_s=None) as node:
        await node.create_collection("c", SCHEMA, primary_key="key", if_not_exists=True)
        await node.insert("c", [{"key": 1, "value": 1}])
        await node.flush()
        leaving.set()


async def cancel_after(turns: int, path: Path, stage: str, *, by_task: bool) -> bool:
    """Use a node, cancel that so many turns of the event loop into a stage, and return whether it had ended by itself."""
    scope, leaving = anyio.CancelScope(), asyncio.Event()

    async def in_scope() -> None:
        with scope:
            await use_once(path, leaving)

    task = asyncio.get_running_loop().create_task(in_scope())
    if stage == "closing":
        await leaving.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    finished = task.done()
    (task.cancel if by_task else scope.cancel)()
    done, _ = await asyncio.wait((task,), timeout=HANGS_S)
    assert done, f"cancelled {turns} turns into {stage}, it hangs"
    if not task.cancelled():
        task.result()  # AlreadyOwned, when the one before kept the directory
    return finished
