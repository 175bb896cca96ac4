"""Every public call of a node on disk, cancelled at each of its waits: the node goes on, and
nothing is lost or doubled.
"""

import asyncio
import inspect
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.care.backup import LINKS
from streamingnode.node import Node
from streamingnode.reader import CollectionReader
from streamingnode.writing.producer import Producer
from streamingnode.writing.transaction import Transaction
from tests.cancelled import HANGS_S, Way, cancel_at

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False), pa.field("value", pa.int64())])
WAITS_MAX = 60
"""Above what any call below needs; one that still goes on then never ends."""


class Caller:
    """Calls of one node, each with a value of its own; knows what was tried and what was
    acknowledged.

    Every method is one line of the table: cancelled at each of its waits, in each way.
    """

    def __init__(self, node: Node, place: Path) -> None:
        self.node = node
        self._place = place
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

    async def transaction_with_a_timeout(self) -> None:
        rows = self.rows()
        more = self.rows()
        async with self.node.transaction(timeout=HANGS_S) as txn:
            await txn.insert("c", rows)
        self.acknowledge(rows)
        txn = self.node.transaction()
        await txn.insert("c", more)
        await txn.commit(timeout=HANGS_S)
        self.acknowledge(more)

    async def writes_that_go_together(self) -> None:
        """Its own writes are cancelled with it; others that wait beside them are not."""
        beside = [asyncio.get_running_loop().create_task(self.insert()) for _ in range(3)]
        try:
            await self.insert()
            await self.upsert()
            await self.transaction()
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.shield(asyncio.gather(*beside))

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
        await self.node.create_collection(
            name, SCHEMA, primary_key="key", shards=2, if_not_exists=True
        )
        await self.node.drop_collection(name)

    async def partitions(self) -> None:
        name = f"p{self.number()}"
        rows = self.rows()
        await self.node.create_partition("c", name)
        await self.node.insert("c", rows, partition=name)
        self.acknowledge(rows)

    async def read(self) -> None:
        async with self.node.read("c", until=await self.node.consistent_tick()) as messages:
            async for _ in messages:
                pass

    async def read_by_name(self) -> None:
        async with self.node.read(
            "c", name="billing", until=await self.node.consistent_tick()
        ) as messages:
            async for message in messages:
                await messages.ack(message)

    async def read_batches(self) -> None:
        tick = await self.node.consistent_tick()
        async with self.node.read("c", until=tick) as messages:
            async for _ in messages.batches(max_rows=2, max_wait_s=60):
                pass
        async with self.node.read("c", until=tick) as messages:
            while await messages.next_messages():
                pass
        reader = self.node.read("c")
        try:
            await reader.__aenter__()
        finally:
            await reader.close()

    async def transaction_of_all_kinds(self) -> None:
        rows = self.rows()
        txn = self.node.transaction()
        await txn.insert("c", [{"key": 0, "value": -1}])
        await txn.delete("c", [0])
        await txn.upsert("c", pa.Table.from_pylist(rows, schema=SCHEMA))
        await txn.commit()
        self.acknowledge(rows)

    async def transaction_that_is_given_up(self) -> None:
        async with self.node.transaction() as txn:
            await txn.insert("c", [{"key": 0, "value": -1}])
            await txn.rollback()

    async def delete(self) -> None:
        await self.node.delete("c", [-self.number()])

    async def write_as_producer(self) -> None:
        rows = self.rows()
        more = self.rows()
        producer = await self.node.producer("import")
        await producer.insert("c", rows)
        self.acknowledge(rows)
        await producer.upsert("c", more)
        self.acknowledge(more)
        await producer.delete("c", [-self.number()])
        await producer.put_note(b"rows")

    async def delete_reader_and_producer(self) -> None:
        await self.read_by_name()
        await self.node.delete_reader("c", "billing")
        await self.node.producer("brief")
        await self.node.delete_producer("brief")

    async def move_a_reader(self) -> None:
        await self.read_by_name()
        await self.node.seek_reader("c", "billing", sn.DeliverPolicy.all())
        assert [each.name for each in await self.node.readers()] == ["billing"]

    async def abort_a_transaction(self) -> None:
        txn_id = await self.node.begin_transaction()
        await self.node.insert("c", [{"key": 0, "value": -1}], txn_id=txn_id)
        assert txn_id in [each.txn_id for each in await self.node.transactions()]
        await self.node.abort_transaction(txn_id)

    async def drop_partition(self) -> None:
        name = f"p{self.number()}"
        await self.node.create_partition("c", name)
        await self.node.drop_partition("c", name)

    async def verify(self) -> None:
        report = await self.node.verify()
        assert report.worst is None

    async def back_up(self) -> None:
        place = self._place / f"backup{self.number()}"
        try:
            await self.node.backup(place)
        except asyncio.CancelledError:
            assert not any(self._place.iterdir())
            raise
        shutil.rmtree(place)

    async def snapshot(self) -> None:
        await self.node.snapshot("c")

    async def wait_closed(self) -> None:
        with anyio.move_on_after(0):  # it ends with the node alone
            await self.node.wait_closed()

    async def open_and_close_another(self) -> None:
        place = self._place / "another"
        try:
            node = await sn.open_node(place, cut_interval_s=None)
            await node.aclose()
        finally:
            async with sn.open_node(place, cut_interval_s=None):  # it let go of its directory
                pass
            shutil.rmtree(place)


CALLS = [call for name, call in vars(Caller).items() if inspect.iscoroutinefunction(call)]
PUBLIC = (Node, Transaction, Producer, CollectionReader)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    (tmp_path / "beside").mkdir()
    async with sn.open_node(tmp_path / "node", cut_interval_s=None) as opened:
        await opened.create_collection("c", SCHEMA, primary_key="key", shards=2)
        yield opened
    asyncio.get_running_loop().set_exception_handler(None)
    assert not unheard


async def at_each_wait(
    call: Callable[[], Awaitable[object]], way: Way, then: Callable[[], Awaitable[object]]
) -> None:
    for wait in range(WAITS_MAX):
        if not await cancel_at(wait, call, way):
            return
        with anyio.fail_after(60):
            await then()
    pytest.fail(f"the call goes on after {WAITS_MAX} waits")


async def values(node: Node) -> Counter[int]:
    return Counter((await node.snapshot("c"))["value"].to_numpy().tolist())


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_cancelled_call_leaves_a_node_that_works_and_a_model_that_holds(
    node: Node, call: Callable[[Caller], Awaitable[None]], way: Way, tmp_path: Path
) -> None:
    caller = Caller(node, tmp_path / "beside")
    await at_each_wait(lambda: call(caller), way, then=caller.insert)
    await call(caller)
    found = await values(node)
    assert found.keys() >= caller.acknowledged
    assert found.keys() <= caller.tried
    assert set(found.values()) <= {1}


async def test_every_public_coroutine_is_cancelled_by_some_line_of_the_table(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    met: set[str] = set()
    public = {
        f"{kind.__name__}.{name}": (kind, name, call)
        for kind in PUBLIC
        for name, call in vars(kind).items()
        if (name in SPECIAL or not name.startswith("_"))
        and (inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call))
    }
    for full_name, (kind, name, call) in public.items():
        monkeypatch.setattr(kind, name, noting(call, partial(met.add, full_name)))
    caller = Caller(node, tmp_path / "beside")
    for line in CALLS:
        await line(caller)
    assert not public.keys() - met, "add a line to the table for these"


SPECIAL = ("__aenter__", "__aexit__", "__anext__")


def noting(call: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    @wraps(call)
    def noted(*arguments: Any, **options: Any) -> Any:
        note()
        return call(*arguments, **options)

    return noted


@pytest.mark.parametrize("by_task", [True, False], ids=["task.cancel", "scope.cancel"])
async def test_backup_cancelled_at_any_moment_leaves_nothing_and_the_next_one_works(
    node: Node, tmp_path: Path, *, by_task: bool
) -> None:
    await node.insert("c", [{"key": key, "value": key} for key in range(100)])
    place = tmp_path / "beside" / "backup"
    turns = 0
    finished = False
    while not finished:
        finished = await cancel_after(turns, lambda: node.backup(place), by_task=by_task)
        if finished:
            shutil.rmtree(place)
        assert not any(place.parent.iterdir()), f"cancelled {turns} turns in"
        turns = 1 + int(turns * 1.5)
    assert (await node.backup(place)).files


async def test_backup_cancelled_while_its_links_are_removed_leaves_nothing(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backup is complete then, and its caller gets the cancellation instead of its record."""
    await node.insert("c", [{"key": 1, "value": 1}])
    place = tmp_path / "beside" / "backup"
    loop = asyncio.get_running_loop()
    remove = shutil.rmtree
    backing_up = asyncio.ensure_future(node.backup(place))

    async def cancel() -> None:
        backing_up.cancel()
        for _ in range(20):  # turns in which the cancellation reaches what waits for the thread
            await asyncio.sleep(0)

    def cancel_at_the_end(path: Path, *, ignore_errors: bool = False) -> None:
        if path.name == LINKS and place.exists():
            asyncio.run_coroutine_threadsafe(cancel(), loop).result()
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", cancel_at_the_end)
    await asyncio.wait([backing_up])
    assert backing_up.cancelled()
    assert not any(place.parent.iterdir())


@pytest.mark.parametrize("by_task", [True, False], ids=["task.cancel", "scope.cancel"])
@pytest.mark.parametrize("stage", ["opening", "closing"])
async def test_node_cancelled_while_it_opens_or_closes_lets_go_of_its_directory(
    tmp_path: Path, stage: str, *, by_task: bool
) -> None:
    before = asyncio.all_tasks()
    turns = 0
    finished = False
    while not finished:
        leaving = asyncio.Event()
        finished = await cancel_after(
            turns,
            partial(use_once, tmp_path, leaving),
            by_task=by_task,
            begin=leaving if stage == "closing" else None,
        )
        assert asyncio.all_tasks() == before, "a task outlived its node"
        turns = 1 + int(turns * 1.5)
    await use_once(tmp_path, leaving=asyncio.Event())


async def use_once(path: Path, leaving: asyncio.Event) -> None:
    async with sn.open_node(path, cut_interval_s=None) as node:
        await node.create_collection("c", SCHEMA, primary_key="key", if_not_exists=True)
        await node.insert("c", [{"key": 1, "value": 1}])
        await node.flush()
        leaving.set()


async def cancel_after(
    turns: int,
    call: Callable[[], Awaitable[object]],
    *,
    by_task: bool,
    begin: asyncio.Event | None = None,
) -> bool:
    """Cancel a call so many turns of the event loop after it began, or `begin`; return whether it
    had ended by itself.
    """
    scope = anyio.CancelScope()

    async def in_scope() -> None:
        with scope:
            await call()

    task = asyncio.get_running_loop().create_task(in_scope())
    if begin is not None:
        await begin.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    finished = task.done()
    (task.cancel if by_task else scope.cancel)()
    done, _ = await asyncio.wait((task,), timeout=HANGS_S)
    assert done, f"cancelled {turns} turns in, it hangs"
    if not task.cancelled():
        task.result()  # AlreadyOwned, when the one before kept the directory
    return finished
