"""A node and what it hands out, entered by one task and left by another, under the plugins and
hooks that programs have.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pyarrow as pa
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

import streamingnode as sn
from flusher.run import FlushRun
from interceptors.shard.interceptor import ShardManager
from streamingnode.node import Node
from streamingnode.reader import CollectionReader
from streamingnode.writing.producer import Producer
from streamingnode.writing.transaction import Transaction
from wal.errors import Corrupt, OnShutdown, StorageFull

pytestmark = pytest.mark.may_block
in_asyncio = pytest.mark.asyncio
in_anyio = pytest.mark.anyio

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False)])
HANGS_S = 60


async def with_collection(node: Node) -> Node:
    await node.create_collection("c", SCHEMA, primary_key="key", if_not_exists=True)
    return node


async def use(node: Node, key: int) -> None:
    """Write and read in the task of a test, which has opened nothing itself."""
    result = await node.insert("c", [{"key": key}])
    async with node.read("c", until=result.time_tick) as messages:
        assert [message.type.name async for message in messages][-1] == "INSERT"


# --- pytest-asyncio: set-up and tear-down of a fixture are two tasks ------------------------------


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with sn.open_node(tmp_path / "node") as opened:
        yield await with_collection(opened)


@pytest_asyncio.fixture
async def awaited_node(tmp_path: Path) -> AsyncIterator[Node]:
    opened = await sn.open_node(tmp_path / "node")
    yield await with_collection(opened)
    await opened.aclose()


@pytest_asyncio.fixture
async def reader(node: Node) -> AsyncIterator[CollectionReader]:
    async with node.read("c", name="billing") as messages:
        yield messages


@pytest_asyncio.fixture
async def transaction(node: Node) -> AsyncIterator[Transaction]:
    async with node.transaction() as txn:
        yield txn


@pytest_asyncio.fixture
async def producer(node: Node) -> Producer:
    return await node.producer("import")


@in_asyncio
async def test_fixtures_of_pytest_asyncio_open_and_close_all_that_a_node_hands_out(
    node: Node, reader: CollectionReader, transaction: Transaction, producer: Producer
) -> None:
    await use(node, 1)
    await transaction.insert("c", [{"key": 2}])
    await producer.insert("c", [{"key": 3}])
    assert len(await reader.next_messages())


@in_asyncio
async def test_fixture_of_pytest_asyncio_awaits_a_node_and_closes_it(awaited_node: Node) -> None:
    await use(awaited_node, 1)


# --- anyio's own plugin ---------------------------------------------------------------------------


@pytest.fixture
async def node_of_anyio(tmp_path: Path) -> AsyncIterator[Node]:
    async with sn.open_node(tmp_path / "node") as opened:
        yield await with_collection(opened)


@pytest.fixture
async def awaited_node_of_anyio(tmp_path: Path) -> AsyncIterator[Node]:
    opened = await sn.open_node(tmp_path / "node")
    yield await with_collection(opened)
    await opened.aclose()


@pytest.fixture
async def reader_of_anyio(node_of_anyio: Node) -> AsyncIterator[CollectionReader]:
    async with node_of_anyio.read("c") as messages:
        yield messages


@in_anyio
async def test_fixtures_of_anyio_open_and_close_a_node_and_a_reader(
    node_of_anyio: Node, reader_of_anyio: CollectionReader
) -> None:
    await use(node_of_anyio, 1)
    assert len(await reader_of_anyio.next_messages())


@in_anyio
async def test_fixture_of_anyio_awaits_a_node_and_closes_it(awaited_node_of_anyio: Node) -> None:
    await use(awaited_node_of_anyio, 1)


# --- a framework with hooks for its start and its end ---------------------------------------------

NODE = web.AppKey("node", Node)


def with_context(app: web.Application, path: Path) -> None:
    async def keep(app: web.Application) -> AsyncIterator[None]:
        async with sn.open_node(path) as opened:
            app[NODE] = await with_collection(opened)
            yield

    app.cleanup_ctx.append(keep)


def with_hooks(app: web.Application, path: Path) -> None:
    async def start(app: web.Application) -> None:
        app[NODE] = await with_collection(await sn.open_node(path))

    async def end(app: web.Application) -> None:
        await app[NODE].aclose()

    app.on_startup.append(start)
    app.on_cleanup.append(end)


async def order(request: web.Request) -> web.Response:
    await use(request.app[NODE], 1)
    return web.Response(text="taken")


@in_anyio
@pytest.mark.parametrize("install", [with_context, with_hooks])
async def test_hooks_of_a_web_framework_open_and_close_a_node_in_tasks_of_their_own(
    tmp_path: Path, install: Callable[[web.Application, Path], None]
) -> None:
    for _ in range(2):
        app = web.Application()
        app.router.add_post("/orders", order)
        install(app, tmp_path / "node")
        runner = web.AppRunner(app)
        await asyncio.create_task(runner.setup())
        handled = await asyncio.create_task(
            app._handle(make_mocked_request("POST", "/orders", app=app))
        )
        assert isinstance(handled, web.Response)
        assert handled.text == "taken"
        await asyncio.create_task(runner.cleanup())


# --- any task, any order --------------------------------------------------------------------------


@in_anyio
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
async def test_nodes_and_readers_are_left_in_any_order_by_any_task(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    first = sn.open_node(tmp_path / "first")
    second = sn.open_node(None)
    node = await with_collection(await asyncio.create_task(first.__aenter__()))
    await asyncio.create_task(second.__aenter__())
    reader = node.read("c")
    await asyncio.create_task(reader.__aenter__())
    contexts: list[AbstractAsyncContextManager[object, bool | None]] = [first, second, reader]
    for index in order:
        with anyio.fail_after(HANGS_S):
            await asyncio.create_task(contexts[index].__aexit__(None, None, None))
    async with sn.open_node(tmp_path / "first"):
        pass


@in_anyio
async def test_scope_around_the_opening_does_not_reach_the_open_node(tmp_path: Path) -> None:
    with anyio.CancelScope() as scope:
        node = await with_collection(await sn.open_node(tmp_path / "node"))
    scope.cancel()
    await use(node, 1)
    await node.aclose()


# --- a node that fails ----------------------------------------------------------------------------


async def next_message(node: Node) -> None:
    async with node.read("c", sn.DeliverPolicy.latest()) as messages:
        await anext(messages)


async def next_batch_by_name(node: Node) -> None:
    async with node.read("c", sn.DeliverPolicy.latest(), name="billing") as messages:
        async for _ in messages.batches():
            pass


async def committed_transaction(node: Node) -> None:
    async with node.transaction() as txn:
        await txn.insert("full", [{"key": 1}])


async def write_of_a_producer(node: Node) -> None:
    await (await node.producer("import")).insert("full", [{"key": 1}])


WAITING: dict[str, Callable[[Node], Awaitable[object]]] = {
    "a message": next_message,
    "a batch of a named reader": next_batch_by_name,
    "a cut": lambda node: node.flush(),
    "a backup": lambda node: node.backup(Path(str(node.path)).with_name("backup")),
    "a segment, for an insert": lambda node: node.insert("full", [{"key": 1}]),
    "a segment, for an upsert": lambda node: node.upsert("full", [{"key": 1}]),
    "a segment, for a transaction": committed_transaction,
    "a segment, for a producer": write_of_a_producer,
    "a segment, with a deadline": lambda node: node.insert("full", [{"key": 1}], timeout=60),
}


def no_segment(*_: object) -> None:
    raise StorageFull("disk", 0, 1)


async def no_cut(*_: object) -> None:
    await anyio.sleep_forever()


async def fail(error: Exception) -> None:
    raise error


@in_anyio
@pytest.mark.parametrize("call", WAITING.values(), ids=WAITING.keys())
async def test_call_that_waits_while_its_node_fails_names_the_failure_and_the_block_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Node], Awaitable[object]]
) -> None:
    monkeypatch.setattr(FlushRun, "follow", no_cut)
    monkeypatch.setattr("streamingnode.embedded.GRACE_S", 0.05)
    failure = Corrupt("segment 7")
    unheard = list[Any]()
    reached = False
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    with anyio.fail_after(HANGS_S), pytest.raises(Corrupt) as raised:
        async with sn.open_node(tmp_path / "node", cut_interval_s=None) as node:
            await with_collection(node)
            await node.insert("c", [{"key": 1}])
            await node.create_collection("full", SCHEMA, primary_key="key")
            monkeypatch.setattr(ShardManager, "new_segment", no_segment)
            waiting = asyncio.ensure_future(call(node))
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
            assert not waiting.done()
            node._supervisor.spawn(fail(failure))
            with pytest.raises(OnShutdown, match="segment 7") as refused:
                await waiting
            assert refused.value.__cause__ is failure
            with pytest.raises(OnShutdown, match="segment 7"):
                await node.consistent_tick()
            reached = True
    assert reached
    assert raised.value is failure
    asyncio.get_running_loop().set_exception_handler(None)
    assert not unheard


@in_anyio
async def test_failed_node_lets_go_of_its_directory_before_anybody_closes_it(
    tmp_path: Path,
) -> None:
    node = await with_collection(await sn.open_node(tmp_path / "node"))
    node._supervisor.spawn(fail(Corrupt("segment 7")))
    while node._supervisor.failure is None:
        await anyio.lowlevel.checkpoint()
    assert repr(node) == f"<Node {tmp_path / 'node'} failed>"
    await node.begin_closing()  # which the failure has begun: nobody closes the node here
    async with sn.open_node(tmp_path / "node") as again:
        await use(again, 1)
    with pytest.raises(Corrupt):
        await node.aclose()
