"""An event loop that ends with a node or a client open: what it left is closed by whoever opens or
closes next.
"""

import asyncio
import gc
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import uvloop

import streamingnode as sn
from streamingnode.node import Node
from wal.errors import AlreadyOwned, InvalidArgument, OnShutdown
from wal.rocks.writer import THREAD_NAME
from wal.rocksmq.messages import ProducerMessage

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False)])

# What a loop leaves behind warns when it is collected: that is what these tests are about.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    gc.collect()  # here, where its warnings are expected


Program = Callable[[], Coroutine[Any, Any, Any]]
Run = Callable[[Program], Any]


def by_asyncio_run(program: Program) -> Any:
    return asyncio.run(program())


def by_uvloop_run(program: Program) -> Any:
    return uvloop.run(program())


def by_closing_the_loop(program: Program) -> Any:
    """End the loop without cancelling its tasks, as programs do that know no better."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(program())
    finally:
        loop.close()


every_end = pytest.mark.parametrize("run", [by_asyncio_run, by_uvloop_run, by_closing_the_loop])


async def with_collection(node: Node) -> Node:
    await node.create_collection("c", SCHEMA, primary_key="key", if_not_exists=True)
    return node


def keys_in(directory: Path) -> set[int]:
    with sn.sync.open_node(directory) as node:
        return {int(key) for key in node.snapshot("c")["key"].to_numpy()}


def writers() -> int:
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


@every_end
def test_a_directory_is_opened_again_after_its_loop_has_ended(tmp_path: Path, run: Run) -> None:
    before = writers()

    async def forgets() -> None:
        node = await with_collection(await sn.open_node(tmp_path / "node"))
        await node.insert("c", [{"key": 1}])

    for _ in range(2):
        run(forgets)
    assert keys_in(tmp_path / "node") == {1}
    assert writers() == before


@every_end
def test_a_node_is_closed_on_another_loop_once_its_own_has_ended(tmp_path: Path, run: Run) -> None:
    async def forgets() -> Node:
        return await with_collection(await sn.open_node(tmp_path / "node"))

    async def closes() -> None:
        with pytest.raises(
            OnShutdown, match="event loop of the node has ended — open the node again"
        ):
            await node.insert("c", [{"key": 1}])
        await node.aclose()
        await node.aclose()

    before = writers()
    node = run(forgets)
    assert "closed with its event loop" in repr(node)
    asyncio.run(closes())
    assert writers() == before
    assert keys_in(tmp_path / "node") == set()


def test_a_node_of_a_loop_that_may_run_again_is_its_own() -> None:
    """As under `run_until_complete`, and nest_asyncio: a loop that stands still has not ended."""
    loop = asyncio.new_event_loop()

    async def opens() -> Node:
        return await with_collection(await sn.open_node(None))

    async def closes() -> None:
        with pytest.raises(InvalidArgument, match="another event loop"):
            await node.aclose()

    node = loop.run_until_complete(opens())
    asyncio.run(closes())
    assert loop.run_until_complete(node.insert("c", [{"key": 1}])).time_tick
    loop.run_until_complete(node.aclose())
    loop.close()


@every_end
def test_no_acknowledged_write_is_lost_when_the_loop_ends_while_appends_are_in_flight(
    tmp_path: Path, run: Run
) -> None:
    acknowledged = set[int]()

    async def insert(node: Node, key: int) -> None:
        with suppress(asyncio.CancelledError):
            await node.insert("c", [{"key": key}])
            acknowledged.add(key)

    async def forgets() -> None:
        node = await with_collection(await sn.open_node(tmp_path / "node", durability="os"))
        inserts = [asyncio.ensure_future(insert(node, key)) for key in range(2_000)]
        kept.extend(inserts)
        await asyncio.wait(inserts[:500], return_when=asyncio.FIRST_COMPLETED)
        kept.append(asyncio.ensure_future(node.flush()))

    kept = list[Any]()
    run(forgets)
    assert acknowledged
    assert acknowledged <= keys_in(tmp_path / "node")


@every_end
def test_a_directory_whose_opening_was_cut_off_by_the_end_of_the_loop_is_free(
    tmp_path: Path, run: Run
) -> None:
    directory = tmp_path / "node"

    async def forgets() -> None:
        opening = asyncio.ensure_future(sn.open_node(directory).__aenter__())
        kept.append(opening)
        while not (directory / "node.lock").exists():  # noqa: ASYNC110 - a thread makes it
            await asyncio.sleep(0)

    kept = list[Any]()
    run(forgets)
    with sn.sync.open_node(directory) as node:
        assert node.collections() == ()


@every_end
def test_a_shared_node_is_taken_over_by_the_next_opener_in_the_same_process(
    tmp_path: Path, run: Run
) -> None:
    async def forgets() -> None:
        node = await with_collection(await sn.open_node(tmp_path / "node", share=True))
        await node.insert("c", [{"key": 1}])

    async def goes_on() -> None:
        async with sn.open_node(tmp_path / "node", share=True) as node:
            await node.insert("c", [{"key": 2}], timeout=60)

    run(forgets)
    asyncio.run(goes_on())
    assert keys_in(tmp_path / "node") == {1, 2}


@every_end
def test_what_monitors_ask_listens_again_at_the_same_port(tmp_path: Path, run: Run) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

    async def forgets() -> None:
        await sn.open_node(tmp_path / "node", http=address)

    async def opens() -> None:
        async with sn.open_node(tmp_path / "node", http=address) as node:
            await node.consistent_tick()

    run(forgets)
    asyncio.run(opens())


@every_end
def test_a_client_whose_loop_has_ended_lets_go_of_its_reader_and_its_consumer(
    tmp_path: Path, run: Run
) -> None:
    async def forgets() -> None:
        client = await sn.connect(address)
        reader = await client.read("c", name="billing").__aenter__()
        assert [message.type.name for message in await reader.next_messages()]
        consumer = await client.mq.register_consumer("events", "group", ack_timeout_s=None)
        kept.extend([reader, consumer, await consumer.consume(1)])

    async def goes_on() -> None:
        async with sn.connect(address) as client:
            async with client.read("c", name="billing") as reader:
                assert await reader.next_messages()
            async with await client.mq.register_consumer(
                "events", "group", ack_timeout_s=None
            ) as consumer:
                async with asyncio.timeout(60):
                    assert [message.payload async for message in first_of(consumer)] == [b"event"]

    kept = list[Any]()
    with sn.sync.open_node(tmp_path / "node") as node:
        node.create_collection("c", SCHEMA, primary_key="key")
        node.insert("c", [{"key": 1}])
        node.mq.create_topic("events")
        node.mq.create_consumer_group("events", "group")
        node.mq.produce("events", [ProducerMessage(b"event")])
        address = f"unix:{tmp_path}/node/node.sock"
        run(forgets)
        asyncio.run(goes_on())


async def first_of(consumer: Any) -> Any:
    async for message in consumer:
        yield message
        return


@every_end
def test_the_spool_of_a_client_whose_loop_has_ended_is_opened_again(
    tmp_path: Path, run: Run
) -> None:
    async def forgets() -> None:
        await sn.connect(address, spool=tmp_path / "spool")

    async def goes_on() -> None:
        async with sn.connect(address, spool=tmp_path / "spool") as client:
            await client.insert("c", [{"key": 1}])

    with sn.sync.open_node(tmp_path / "node") as node:
        node.create_collection("c", SCHEMA, primary_key="key")
        address = f"unix:{tmp_path}/node/node.sock"
        run(forgets)
        asyncio.run(goes_on())
        assert node.snapshot("c").num_rows == 1


def test_a_node_of_a_living_loop_keeps_its_directory(tmp_path: Path) -> None:
    async def second() -> None:
        with pytest.raises(AlreadyOwned) as owned:
            await sn.open_node(tmp_path / "node")
        assert owned.value.own

    with sn.sync.open_node(tmp_path / "node") as node:
        asyncio.run(second())
        node.consistent_tick()


@every_end
def test_a_node_in_memory_leaves_no_files_when_it_is_closed_after_its_loop(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def forgets() -> Node:
        return await with_collection(await sn.open_node(None))

    node = run(forgets)
    assert list(tmp_path.iterdir())
    asyncio.run(node.aclose())
    assert list(tmp_path.iterdir()) == []
