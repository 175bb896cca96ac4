"""The node without `async` does the same things under the same names."""

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, assert_type, cast

import pyarrow as pa
import pytest

import streamingnode as sn
from interceptors.errors import CollectionNotFound, SchemaMismatch
from streamingnode import batching, sync
from streamingnode.collections import Collection
from streamingnode.node import Node
from streamingnode.read_message import ReadMessage
from streamingnode.reader import CollectionReader
from streamingnode.sync import (
    SyncConsumer,
    SyncNode,
    SyncProducer,
    SyncQueue,
    SyncReader,
    SyncTransaction,
)
from streamingnode.writing.producer import Producer
from streamingnode.writing.transaction import Transaction
from streamingnode.writing.write import WriteResult
from tests.streamingnode.append_double import schema_of
from wal.errors import AlreadyOwned, InvalidArgument, OnShutdown
from wal.rocksmq.contract import Consumer, MessageQueue
from wal.timetick import physical_ms

SCHEMA = schema_of(id=pa.int64(), item=pa.string())
ONLY_ASYNC = {"begin_closing", "aclose", "state", "next_messages", "close", "add", "begun"}
"""What other parts of the node call, and what a blocking class says in its own words."""


PAIRS = [
    (SyncNode, Node),
    (SyncTransaction, Transaction),
    (SyncProducer, Producer),
    (SyncReader, CollectionReader),
]
PAIRS += [(SyncQueue, MessageQueue), (SyncConsumer, Consumer)]


@pytest.mark.parametrize("blocking, original", PAIRS, ids=lambda kind: kind.__name__)
def test_every_public_name_is_there_with_the_same_arguments(blocking: type, original: type) -> None:
    public = _public_names(original) - ONLY_ASYNC
    assert public == _public_names(blocking) - {"close"}
    for name in public:
        theirs = getattr(original, name)
        if callable(theirs):
            ours = inspect.signature(getattr(blocking, name))
            assert list(ours.parameters) == list(inspect.signature(theirs).parameters), name
            for key, parameter in inspect.signature(theirs).parameters.items():
                assert parameter.default == ours.parameters[key].default, (name, key)
                assert parameter.kind == ours.parameters[key].kind, (name, key)


def test_opening_takes_what_the_asynchronous_package_does() -> None:
    ours = inspect.signature(sync.open_node)
    theirs = inspect.signature(sn.open_node)
    assert list(ours.parameters.values()) == list(theirs.parameters.values())


def test_a_type_checker_sees_results_and_blocking_sides() -> None:
    """What is claimed here the type checker holds, which also reads the tests."""
    with sn.sync.open_node(None) as node:
        node.create_collection("orders", SCHEMA, primary_key="id")
        assert_type(
            node.insert("orders", [{"id": 1, "item": "a"}], partition=None, timeout=9.0),
            WriteResult,
        )
        assert_type(node.path, str | None)
        assert_type(node.collections(), tuple[Collection, ...])
        assert_type(
            node.producer("feed").insert("orders", [{"id": 2, "item": "b"}], sequence=1),
            WriteResult,
        )
        with (
            node.transaction() as txn,
            node.read("orders", until=node.consistent_tick()) as messages,
        ):
            assert_type(txn, SyncTransaction)
            assert_type(messages, SyncReader)
            assert_type(list(messages), list[ReadMessage])
            with pytest.raises(TypeError):
                node.insert("orders", [], partitions="eu")  # type: ignore[call-arg]


def _public_names(kind: type) -> set[str]:
    return {name for each in kind.__mro__[:-1] for name in vars(each) if not name.startswith("_")}


def test_a_time_goes_wherever_a_tick_does() -> None:
    with sn.sync.open_node(None) as node:
        node.create_collection("orders", SCHEMA, primary_key="id")
        ticks = [node.insert("orders", [{"id": 0, "item": "a"}]).time_tick]
        while physical_ms(ticks[-1]) == physical_ms(ticks[0]):
            ticks.append(node.insert("orders", [{"id": len(ticks), "item": "a"}]).time_tick)
        moment = sn.tick_to_time(ticks[-1])
        before = [tick for tick in ticks if tick <= sn.time_to_tick(moment)]
        assert 0 < len(before) <= len(ticks)
        assert node.snapshot("orders", as_of=moment).num_rows == len(before)
        inserts = [sn.MessageType.INSERT]
        with node.read("orders", until=moment, types=inserts) as messages:
            assert [message.time_tick for message in messages] == before
        end = node.consistent_tick()
        with node.read(
            "orders", sn.DeliverPolicy.start_after(moment), until=end, types=inserts
        ) as messages:
            assert [message.time_tick for message in messages] == ticks[len(before) :]


def test_script_repeats_a_write_of_a_producer_and_has_it_once() -> None:
    with sn.sync.open_node(None) as node:
        node.create_collection("orders", SCHEMA, primary_key="id")
        feed = node.producer("feed")
        results = [feed.insert("orders", [{"id": 1, "item": "a"}], sequence=7) for _ in range(2)]
        assert results[0] == results[1]
        feed.upsert("orders", [{"id": 2, "item": "b"}])
        feed.delete("orders", [2])
        with feed.transaction(sequence=20) as txn:
            txn.insert("orders", [{"id": 3, "item": "c"}])
        assert (feed.name, feed.epoch, feed.last_sequence) == ("feed", 1, 20)
        assert sorted(row["id"] for row in node.snapshot("orders").to_pylist()) == [1, 3]
        assert node.delete_producer("feed")
        assert not node.delete_producer("feed")


def test_script_writes_and_reads_back() -> None:
    with sn.sync.open_node(None) as node:
        node.create_collection("orders", SCHEMA, primary_key="id", shards=2)
        result = node.insert("orders", [{"id": 1, "item": "a"}])
        with node.transaction() as txn:
            txn.insert("orders", [{"id": 2, "item": "b"}])
            txn.upsert("orders", [{"id": 1, "item": "c"}])
            txn.delete("orders", [3])
        assert txn.result is not None
        assert txn.result.time_tick > result.time_tick
        with node.read("orders", until=node.consistent_tick()) as messages:
            assert [message.type.name for message in messages] == [
                "CREATE_COLLECTION",
                "INSERT",
                "TXN",
            ]
        with node.read("orders", until=node.consistent_tick(), name="billing") as messages:
            (batch,) = messages.batches(max_rows=100, max_wait_s=1)
            messages.ack(batch[-1])
        with node.read("orders", until=node.consistent_tick(), name="billing") as messages:
            assert list(messages) == []
        assert sorted(row["item"] for row in node.snapshot("orders").to_pylist()) == ["b", "c"]
        assert node.flush().number == 1
        txn_id = node.begin_transaction()
        node.delete("orders", [1], txn_id=txn_id)
        node.rollback_transaction(txn_id)
        node.create_partition("orders", "eu")
        node.drop_partition("orders", "eu")
        node.drop_collection("orders")
        assert node.collections() == ()
        assert (node.path, node.durability) == (None, "fsync")


def test_what_a_loop_over_a_reader_leaves_is_what_the_next_one_begins_with() -> None:
    with sn.sync.open_node(None) as node:
        node.create_collection("orders", SCHEMA, primary_key="id")
        for n in range(6):
            node.insert("orders", [{"id": n, "item": "a"}])
        found: list[int] = []
        with node.read(
            "orders", types=[sn.MessageType.INSERT], until=node.consistent_tick()
        ) as messages:
            for message in messages:
                found += key_column(message)
                if len(found) % 2 == 0:
                    break
            found += key_column(next(iter(messages)))
            found += [
                key for message in next(messages.batches(max_rows=2)) for key in key_column(message)
            ]
            found += [key for message in messages for key in key_column(message)]
        assert found == list(range(6))


def key_column(message: ReadMessage) -> list[int]:
    table = message.to_arrow()
    assert table is not None
    return list(map(int, table["id"].to_numpy()))


def test_a_read_that_is_interrupted_takes_nothing_from_the_next_one() -> None:
    with sn.sync.open_node(None) as node:
        node.create_collection("orders", SCHEMA, primary_key="id")
        with node.read("orders", types=[sn.MessageType.INSERT]) as messages:
            node.insert("orders", [{"id": 1, "item": "a"}])
            with pytest.raises(KeyboardInterrupt), interrupted(lambda: threading.Event().wait(0.1)):
                next(messages.batches(max_rows=100, max_wait_s=600))
            assert key_column(next(iter(messages))) == [1]


def test_script_reaches_the_node_of_another_owner(tmp_path: Path) -> None:
    with sn.sync.open_node(tmp_path) as owner:
        with sn.sync.connect(f"unix:{tmp_path}/node.sock", name="script") as node:
            node.create_collection("orders", SCHEMA, primary_key="id")
            with node.transaction() as txn:
                txn.insert("orders", [{"id": 1, "item": "a"}])
            node.producer("feed").insert("orders", [{"id": 2, "item": "b"}], sequence=1)
            with node.read("orders", until=node.consistent_tick()) as messages:
                assert [message.type.name for message in messages] == [
                    "CREATE_COLLECTION",
                    "TXN",
                    "INSERT",
                ]
            assert node.path == str(tmp_path)
        assert sorted(row["id"] for row in owner.snapshot("orders").to_pylist()) == [1, 2]
    with pytest.raises(sn.errors.Unreachable):
        sn.sync.connect(f"unix:{tmp_path}/node.sock")


def test_errors_come_out_unchanged() -> None:
    error = RuntimeError("mine")
    with pytest.raises(RuntimeError) as caught, sn.sync.open_node(None) as node:
        node.create_collection("orders", SCHEMA, primary_key="id")
        with pytest.raises(SchemaMismatch):
            node.insert("orders", [{"id": "x", "item": "a"}])
        with pytest.raises(CollectionNotFound):
            node.collection("nowhere")
        with pytest.raises(KeyError), node.transaction() as txn:
            txn.insert("orders", [{"id": 1, "item": "a"}])
            raise KeyError
        assert node.snapshot("orders").num_rows == 0
        raise error
    assert caught.value is error
    with pytest.raises(OnShutdown, match="open it again"):
        node.flush()


def test_node_shows_where_it_is_and_how_it_stands(tmp_path: Path) -> None:
    node = sn.sync.open_node(tmp_path)
    assert (repr(node), repr(node._original)) == (
        f"<SyncNode {tmp_path} open>",
        f"<Node {tmp_path} open>",
    )
    node.close()
    assert repr(node) == f"<SyncNode {tmp_path} closed>"
    with sn.sync.open_node(None) as node:
        assert repr(node) == "<SyncNode in memory open>"


@pytest.mark.parametrize(
    "use", [list, lambda reader: list(reader.batches()), lambda reader: reader.ack(reader)]
)
def test_reader_outside_of_its_block_says_how_to_use_it(
    use: Callable[[SyncReader], object],
) -> None:
    with sn.sync.open_node(None) as node:
        node.create_collection("orders", SCHEMA, primary_key="id")
        with pytest.raises(InvalidArgument, match="inside `with node"):
            use(node.read("orders"))


MISTAKES: dict[str, Callable[[SyncNode], object]] = {
    "a policy in text": lambda node: node.read("orders", cast("Any", "all")),
    "a policy that is not called": lambda node: node.read(
        "orders", cast("Any", sn.DeliverPolicy.all)
    ),
    "a time for a tick": lambda node: node.read("orders", until=cast("Any", 1.5)),
    "a name of a reader": lambda node: node.read("orders", name="A"),
    "types in text": lambda node: node.read("orders", types=cast("Any", "INSERT")),
    "a keepalive": lambda node: node.transaction(keepalive_s=-1),
    "a timeout": lambda node: node.flush(timeout=0),
    "a tick to come": lambda node: node.snapshot("orders", as_of=(1 << 62)),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_wrong_argument_is_refused_at_the_call(mistake: Callable[[SyncNode], object]) -> None:
    with sn.sync.open_node(None) as node:
        node.create_collection("orders", SCHEMA, primary_key="id")
        with pytest.raises(InvalidArgument, match=" — "):
            mistake(node)
        assert node.insert("orders", [{"id": 1, "item": "a"}]).time_tick


def test_node_of_a_notebook_is_closed_by_hand(tmp_path: Path) -> None:
    node = sn.sync.open_node(tmp_path)
    node.create_collection("orders", SCHEMA, primary_key="id")
    txn = node.transaction()
    reader = node.read("orders")
    node.close()
    node.close()
    for use in (
        node.collections,
        txn.commit,
        lambda: list(reader),
        node.__enter__,
        reader.__enter__,
    ):
        with pytest.raises(OnShutdown, match="open it again"):
            use()
    with sn.sync.open_node(tmp_path) as again:
        assert [each.name for each in again.collections()] == ["orders"]


def test_node_that_is_never_closed_is_closed_with_the_program(tmp_path: Path) -> None:
    program = (
        "import pyarrow as pa, streamingnode as sn\n"
        f"node = sn.sync.open_node({str(tmp_path)!r})\n"
        "node.create_collection('orders', pa.schema([('id', pa.int64())]), primary_key='id')\n"
        "print(node.insert('orders', [{'id': 1}]).time_tick > 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)
    with sn.sync.open_node(tmp_path) as node:
        assert node.snapshot("orders").num_rows == 1


LEFT_OPEN = """
def messages():
    with node.read("orders") as messages:
        yield from messages

reading = messages()
next(reading)
"""
FORKED = """
import os
from wal.errors import StorageFailed

child = os.fork()
if not child:
    node.close()
    for call in (node.collections, lambda: node.insert("orders", [{"id": 2}], timeout=9)):
        try:
            call()
        except StorageFailed as error:
            print(error.code, flush=True)
    # as multiprocessing does: in exit() RocksDB waits for its threads, which are not there
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), node.snapshot("orders").num_rows)
"""


def program_with_a_node(path: Path, *lines: str) -> "subprocess.CompletedProcess[str]":
    """Run a program that opens a node with one row in it, and then these lines."""
    opening = (
        "import pyarrow as pa, streamingnode as sn",
        f"node = sn.sync.open_node({str(path)!r})",
        "node.create_collection('orders', pa.schema([('id', pa.int64())]), primary_key='id')",
        "node.insert('orders', [{'id': 1}])",
    )
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        "\n".join((*opening, *lines)),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("end", ["node.close()", ""], ids=["closed", "left to the program's end"])
def test_node_closes_while_a_reader_of_the_same_thread_is_open(tmp_path: Path, end: str) -> None:
    done = program_with_a_node(tmp_path, LEFT_OPEN, end, "print('ended')")
    assert (done.stdout, done.stderr, done.returncode) == ("ended\n", "", 0)
    with sn.sync.open_node(tmp_path) as node:
        assert node.snapshot("orders").num_rows == 1


def test_reader_is_left_quietly_when_its_node_was_closed_inside(tmp_path: Path) -> None:
    node = sn.sync.open_node(tmp_path)
    node.create_collection("orders", SCHEMA, primary_key="id")
    with node.read("orders"):
        node.close()


def test_calls_of_a_forked_child_are_refused_and_leave_the_node_alone(tmp_path: Path) -> None:
    done = program_with_a_node(tmp_path, FORKED)
    assert (done.stdout, done.stderr, done.returncode) == (
        "STORAGE_FAILED\nSTORAGE_FAILED\n0 1\n",
        "",
        0,
    )


def test_call_from_the_nodes_own_loop_is_refused_instead_of_waiting_for_itself(
    tmp_path: Path,
) -> None:
    with (
        sn.sync.open_node(tmp_path) as node,
        pytest.raises(InvalidArgument, match="in another thread"),
    ):
        node._loop.call(node.collections)


def test_node_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    with sn.sync.open_node(tmp_path):
        before = loops()
        with pytest.raises(AlreadyOwned):
            sn.sync.open_node(tmp_path)
        assert loops() == before


def test_opening_that_is_interrupted_ends_and_leaves_no_thread() -> None:
    begun = threading.Event()
    before = loops()

    @asynccontextmanager
    async def opening() -> AsyncIterator[None]:
        begun.set()
        await asyncio.Event().wait()
        yield

    with pytest.raises(KeyboardInterrupt), interrupted(begun.wait):
        sync.BlockingLoop().enter(opening())
    assert loops() == before


@contextmanager
def interrupted(when: Callable[[], object]) -> Iterator[None]:
    """Interrupt what this thread does in the block once `when` returns.

    Until it has heard of it: a signal that comes between a thread's last step and its wait for a
    lock wakes nobody.
    """
    heard = threading.Event()
    waiting = threading.get_ident()

    def interrupt(*_: object) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    def send() -> None:
        when()
        while not heard.is_set():
            signal.pthread_kill(waiting, signal.SIGINT)
            heard.wait(0.01)

    before = signal.signal(signal.SIGINT, interrupt)
    sending = threading.Thread(target=send)
    sending.start()
    try:
        yield
    finally:
        sending.join()
        signal.signal(signal.SIGINT, before)


def loops() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "portal" in thread.name]


def test_a_class_prints_under_the_name_that_it_is_imported_by(tmp_path: Path) -> None:
    for module in (sn, sn.sync, sn.errors, batching):
        names = getattr(module, "__all__", None) or vars(module).keys()
        for name in [each for each in names if not each.startswith("_")]:
            found = getattr(module, name)
            assert not isinstance(found, type) or found.__name__ == name
    with sn.sync.open_node(tmp_path / "node") as node:
        node.create_collection("c", pa.schema([("id", pa.int64())]), primary_key="id")
        assert repr(node.insert("c", [{"id": 1}])).startswith("WriteResult(")
        with sn.sync.connect(f"unix:{tmp_path}/node/node.sock") as client:
            assert repr(client.insert("c", [{"id": 2}])).startswith("WriteResult(")
