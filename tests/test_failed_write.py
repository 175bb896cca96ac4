"""A node whose disk fails a write comes back by itself; nothing acknowledged is missing or doubled,
and nothing hangs.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pyarrow as pa
import pytest

import streamingnode as sn
from flusher import cuts as cut_writer
from flusher import run as flush_run
from flusher.run import FlushOptions
from interceptors.errors import TransactionExpired
from streamingnode.config import load_config
from streamingnode.errors import LogReopening
from streamingnode.node import Node
from tests.failing_disk import FailingDisk, Fault
from tests.parts_of import parts_of
from wal.errors import ChannelFenced, Corrupt, Indeterminate, StorageFailed, StreamingNodeError
from wal.lifecycle import ReopenOptions
from wal.rocks.floor import FloorFile
from wal.rocks.opening import open_owned
from wal.rocks.writer import OWNER_CHECK_S

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False), pa.field("value", pa.int64())])
HANGS_S = 60
FOR_EVER = 1 << 30
QUICK: dict[str, object] = {
    "reopen": ReopenOptions(first_pause_s=0.001, longest_pause_s=0.01),
    "flush": FlushOptions(retry_first_s=0.001),
    "cut_interval_s": None,
    "ticks.interval_s": 0.01,
}
ROUNDS = 4
LAST = 2000


def row(key: int) -> dict[str, int]:
    return {"key": key, "value": key}


@pytest.fixture(params=Fault, ids=lambda fault: fault.name.lower())
def any_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    return FailingDisk(monkeypatch, request.param)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    return FailingDisk(monkeypatch)


@asynccontextmanager
async def opened(path: Path, **settings: object) -> AsyncIterator[Node]:
    config = load_config(arguments={**QUICK, **settings})
    async with sn.open_node(path, config=config) as node:
        for name in ("a", "b"):
            await node.create_collection(name, SCHEMA, primary_key="key", if_not_exists=True)
        yield node


class History:
    """What callers were told: keys acknowledged, and keys whose outcome was left open."""

    def __init__(self) -> None:
        self.acknowledged: list[int] = []
        self.open: list[int] = []

    async def write(self, key: int, call: Awaitable[object]) -> None:
        try:
            await call
        except Indeterminate:
            self.open.append(key)
        else:
            self.acknowledged.append(key)

    def check(self, keys: list[int]) -> None:
        found = Counter(keys)
        assert not [key for key, times in found.items() if times > 1]
        assert not set(self.acknowledged) - set(found)
        assert set(found) <= {*self.acknowledged, *self.open}


class Tailing:
    """A reader that is open all the time: whatever happens, its ticks ascend and its rows come
    once.
    """

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.last_tick = 0

    async def follow(self, node: Node, *, until_key: int, name: str | None = None) -> None:
        async with node.read("a", name=name) as messages:
            async for message in messages:
                assert message.time_tick > self.last_tick, "ticks ascend"
                self.last_tick = message.time_tick
                for part in message.bodies or (message,):
                    if part.type is sn.MessageType.INSERT:
                        table = part.to_arrow()
                        assert table is not None
                        self.keys += keys_in(table)
                if name is not None:
                    await messages.ack(message)
                if until_key in self.keys:
                    return


async def work(node: Node, history: History) -> None:
    """Insert, upsert, transact (buffered and by id) and cut, several at once."""

    async def in_transaction(key: int) -> None:
        async with node.transaction() as txn:
            await txn.insert("a", [row(key)])
            await txn.insert("b", [row(key)])

    async def by_id(key: int) -> None:
        txn_id = await node.begin_transaction()
        await node.insert("a", [row(key)], txn_id=txn_id)
        await node.commit_transaction(txn_id)

    for number in range(ROUNDS):
        at = 10 * number
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(history.write(at, node.insert("a", [row(at)])))
            tasks.create_task(history.write(at + 1, node.insert("a", [row(at + 1)])))
            tasks.create_task(history.write(at + 2, node.upsert("a", [row(at + 2)])))
            tasks.create_task(history.write(at + 3, in_transaction(at + 3)))
            tasks.create_task(history.write(at + 4, by_id(at + 4)))
            tasks.create_task(node.flush())


def keys_in(table: pa.Table) -> list[int]:
    return [key for key in table.column("key").to_pylist() if key is not None]


async def read_for_ever(node: Node) -> None:
    """Wait for what no longer comes once the node has ended."""
    async with node.read("a", sn.DeliverPolicy.latest()) as messages:
        async for _ in messages:
            pass


async def keys_of(node: Node, collection: str = "a") -> list[int]:
    return keys_in(await node.snapshot(collection))


async def run_with_failure(
    path: Path, disk: FailingDisk, number: int, times: int, durability: str
) -> None:
    history = History()
    tailing = Tailing()
    named = Tailing()
    with anyio.fail_after(HANGS_S):
        async with opened(path, durability=durability) as node:
            async with asyncio.TaskGroup() as readers:
                readers.create_task(tailing.follow(node, until_key=LAST))
                readers.create_task(named.follow(node, until_key=LAST, name="named"))
                disk.fail_at(number, times=times)
                await work(node, history)
                disk.heal()
                await history.write(LAST, node.insert("a", [row(LAST)]))
            await node.flush()
            log = parts_of(node).measure().log
            assert (log.state, log.store, log.reopened > 0) == ("open", "open", disk.reached)
            keys = await keys_of(node)
            in_both = {3 + 10 * number for number in range(ROUNDS)} & set(keys)
            assert in_both == set(await keys_of(node, "b")), "transactions are whole"
        async with opened(path) as node:
            assert sorted(await keys_of(node)) == sorted(keys), (
                "what was there after the reopen stays"
            )
    history.check(keys)
    assert sorted(tailing.keys) == sorted(named.keys) == sorted(keys)


async def run_to_the_end(
    path: Path, disk: FailingDisk, durability: str, *, times: int, step: int
) -> int:
    """Fail the first call, then one `step` later, and so on, until a run passes without reaching
    it.
    """
    number = 1
    disk.failed = 1
    while disk.reached:
        disk.failed = 0
        await run_with_failure(path / str(number), disk, number, times, durability)
        number += step
    return number


@pytest.mark.parametrize("durability", ["fsync", "os"])
async def test_node_comes_back_whichever_call_of_the_disk_fails(
    tmp_path: Path, any_disk: FailingDisk, durability: str
) -> None:
    assert await run_to_the_end(tmp_path, any_disk, durability, times=1, step=11) > 6


@pytest.mark.crash
@pytest.mark.parametrize("durability", ["fsync", "os"])
@pytest.mark.parametrize("times", [1, 3], ids=["once", "and the next two"])
async def test_node_comes_back_whichever_call_fails_and_fails_again(
    tmp_path: Path, any_disk: FailingDisk, times: int, durability: str
) -> None:
    assert await run_to_the_end(tmp_path, any_disk, durability, times=times, step=1) > 6


# --- a disk that stays broken ---------------------------------------------------------------------


async def test_calls_on_a_dead_disk_end_with_a_typed_error_and_what_was_acknowledged_can_be_read(
    tmp_path: Path, disk: FailingDisk
) -> None:
    calls: list[Callable[[Node], Awaitable[object]]] = [
        lambda node: node.insert("a", [row(2)]),
        lambda node: node.flush(),
        lambda node: node.consistent_tick(),
        lambda node: node.snapshot("a"),
        lambda node: node.begin_transaction(),
        lambda node: node.drop_collection("a"),
    ]
    patience = {"reopen.wait_s": 0.05}
    with anyio.fail_after(HANGS_S):
        async with opened(tmp_path, **patience) as node:
            tick = (await node.insert("a", [row(1)])).time_tick
            disk.fail_at(1, times=FOR_EVER)
            first, *later = [await error_of(call(node)) for call in calls]
            assert isinstance(first, Indeterminate)
            assert [type(error) for error in later] == [LogReopening] * len(later)
            assert all(error is not None and error.retryable == "yes" for error in later)
            async with node.read("a", until=tick) as messages:
                assert [message.num_rows async for message in messages if message.num_rows] == [1]
            log = parts_of(node).measure().log
            assert log.state != "open"
            assert log.attempts > 0
            assert "Input/output error" in log.last_error
        disk.heal()
        async with opened(tmp_path) as node:
            assert 1 in await keys_of(node)


async def test_cuts_asked_for_together_on_a_dead_disk_are_refused_together(
    tmp_path: Path, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, **{"reopen.wait_s": 0.2}) as node:
        await node.insert("a", [row(1)])
        disk.fail_at(1, times=FOR_EVER)
        await error_of(node.insert("a", [row(2)]))
        wal = parts_of(node).channel.wal
        waiting = 0
        most = 0
        wait_back = wal.wait_back

        async def counted() -> None:
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)
            try:
                await wait_back()
            finally:
                waiting -= 1

        monkeypatch.setattr(wal, "wait_back", counted)
        errors = await asyncio.gather(*(error_of(node.flush()) for _ in range(10)))
        assert [type(error) for error in errors] == [LogReopening] * 10
        assert most >= 10, "none waits for those before it to have waited"


async def test_closing_does_not_wait_for_a_dead_disk(tmp_path: Path, disk: FailingDisk) -> None:
    with anyio.fail_after(HANGS_S):
        async with opened(tmp_path) as node:
            await node.insert("a", [row(100)])
            disk.fail_at(1, times=FOR_EVER)
            writing = [
                asyncio.ensure_future(error_of(node.insert("a", [row(key)]))) for key in range(5)
            ]
            writing.append(asyncio.ensure_future(error_of(node.flush())))
            await until(lambda: parts_of(node).measure().log.attempts >= 2)
        errors = await asyncio.gather(*writing)
    assert all(isinstance(error, StreamingNodeError) for error in errors)


async def test_node_ends_when_verification_finds_that_something_acknowledged_is_gone(
    tmp_path: Path, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object, **__: object) -> None:
        raise Corrupt("an entry is missing")

    with anyio.fail_after(HANGS_S), pytest.raises(Corrupt, match="an entry is missing"):
        async with opened(tmp_path) as node:
            await node.insert("a", [row(1)])
            monkeypatch.setattr("wal.rocks.store.open_owned", damaged)
            disk.fail_at(1)
            await error_of(node.insert("a", [row(2)]))
            await read_for_ever(node)
    monkeypatch.undo()
    async with opened(tmp_path) as node:
        assert 1 in await keys_of(node)


async def test_node_whose_directory_was_taken_over_ends_and_says_by_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: FloorFile | None = None
    with anyio.fail_after(HANGS_S), pytest.raises(ChannelFenced, match="of term 77"):
        async with opened(tmp_path) as node:
            await node.insert("a", [row(1)])
            other = FloorFile(tmp_path)
            other.take_token(77)
            # A real take-over takes longer than that.
            later = time.monotonic() + OWNER_CHECK_S
            monkeypatch.setattr("wal.rocks.writer.monotonic", lambda: later)
            assert isinstance(await error_of(node.insert("a", [row(2)])), ChannelFenced)
            await read_for_ever(node)
    assert other is not None
    other.close()
    moved = tmp_path.with_name("moved")
    # the database stays open here until the process ends
    await anyio.to_thread.run_sync(tmp_path.rename, moved)
    async with opened(moved) as node:
        assert (await keys_of(node), parts_of(node).measure().log.term) == ([1], 78)


async def test_damage_that_is_gone_at_the_second_look_is_outlived(
    tmp_path: Path, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def unreadable_once(*given: Any, **options: Any) -> object:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise Corrupt("an entry is missing")
        return open_owned(*given, **options)

    monkeypatch.setattr("wal.rocks.store.open_owned", unreadable_once)
    async with opened(tmp_path) as node:
        disk.fail_at(1)
        await node.insert("a", [row(1)])
        assert await keys_of(node) == [1]
    assert looks == 2


# --- what is open at the time ---------------------------------------------------------------------


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
async def test_streamed_transaction_goes_on_over_a_reopen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    disk = FailingDisk(monkeypatch, fault)
    async with opened(tmp_path) as node:
        txn_id = await node.begin_transaction()
        await node.insert("a", [row(1)], txn_id=txn_id)
        disk.fail_at(1)
        await node.insert("b", [row(9)])
        assert disk.reached
        await node.insert("a", [row(2)], txn_id=txn_id)
        assert await keys_of(node) == []
        await node.commit_transaction(txn_id)
        assert sorted(await keys_of(node)) == [1, 2]
        assert parts_of(node).measure().writes.pending_transaction_bytes == 0, (
            "what the last term held"
        )


async def test_transaction_that_expires_while_the_log_is_away_is_rolled_back_in_the_log(
    tmp_path: Path, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept_ns = 0
    clock = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + slept_ns)
    monkeypatch.setattr("interceptors.txn.time", clock)
    async with opened(tmp_path) as node:
        txn_id = await node.begin_transaction(keepalive_s=60)
        await node.insert("a", [row(1)], txn_id=txn_id)
        disk.fail_at(1, times=3)
        slept_ns = 61 * 10**9
        await node.insert("a", [row(2)])
        await until(lambda: not parts_of(node).measure().writes.open_transactions)
        assert isinstance(await error_of(node.commit_transaction(txn_id)), TransactionExpired)
        assert await keys_of(node) == [2]
    async with opened(tmp_path) as node:
        assert parts_of(node).measure().writes.open_transactions == 0
        assert await keys_of(node) == [2]


async def test_flush_whose_checkpoint_fails_makes_the_same_cut_after_the_reopen(
    tmp_path: Path, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = cut_writer.publish_cut

    def publish_and_break(*arguments: Any) -> Any:
        published = publish(*arguments)
        disk.fail_at(1)
        return published

    monkeypatch.setattr(flush_run, "publish_cut", publish_and_break)
    with anyio.fail_after(HANGS_S):
        async with opened(tmp_path) as node:
            await node.insert("a", [row(1)])
            assert (await node.flush()).number == 1
            await node.consistent_tick()
            assert parts_of(node).measure().log.reopened == 1
            monkeypatch.undo()
            assert (await node.flush()).number == 1
            assert await keys_of(node) == [1]


async def test_flush_whose_checkpoint_fails_for_good_says_that_the_log_is_away(
    tmp_path: Path, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = cut_writer.publish_cut

    def publish_and_break(*arguments: Any) -> Any:
        published = publish(*arguments)
        disk.fail_at(1, times=FOR_EVER)
        return published

    monkeypatch.setattr(flush_run, "publish_cut", publish_and_break)
    with anyio.fail_after(HANGS_S):
        async with opened(tmp_path, **{"reopen.wait_s": 0.05}) as node:
            await node.insert("a", [row(1)])
            assert isinstance(await error_of(node.flush()), LogReopening)
            monkeypatch.setattr(flush_run, "publish_cut", publish)
            disk.heal()
            await until(lambda: parts_of(node).measure().flusher.cut_number == 1)


async def test_collection_that_exists_is_told_only_when_that_is_durable(
    tmp_path: Path, disk: FailingDisk
) -> None:
    async def create() -> None:
        await node.create_collection("new", SCHEMA, primary_key="key", if_not_exists=True)

    async with opened(tmp_path) as node:
        disk.fail_at(FOR_EVER)
        disk.gate.clear()
        creating = [asyncio.get_running_loop().create_task(create()) for _ in range(3)]
        done, _ = await asyncio.wait(creating, timeout=0.05)
        assert "new" in [each.name for each in node.collections()]
        assert not done
        disk.gate.set()
        await asyncio.gather(*creating)


async def test_ids_given_out_before_the_failure_are_given_to_nobody_else_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch, Fault.WRITE_LOST)
    async with opened(tmp_path) as node:
        given = [
            parts_of(node).channel.term.shards.allocate_id() for _ in range(5)
        ]  # by appends that wait, and come in the next term
        disk.fail_at(1)
        await node.insert("a", [row(1)])
        assert disk.reached
        assert parts_of(node).channel.term.shards.allocate_id() > max(given)


async def until(reached: Callable[[], bool]) -> None:
    while not reached():
        await anyio.lowlevel.checkpoint()


async def error_of(call: Awaitable[object]) -> StreamingNodeError | None:
    try:
        await call
    except StreamingNodeError as error:
        return error
    return None


async def test_a_write_that_fails_while_a_node_opens_is_the_disks_and_the_next_opening_goes_on(
    any_disk: FailingDisk, tmp_path: Path
) -> None:
    for number in (1, 2):  # the log's name, and the first tick
        any_disk.fail_at(number)
        with pytest.raises(StorageFailed, match="open the node again"):
            async with opened(tmp_path / str(number)):
                pytest.fail("it is not open")
        any_disk.heal()
        async with opened(tmp_path / str(number)) as node:
            await node.insert("a", [row(1)])


async def test_an_opening_that_loses_its_log_does_not_wait_for_it(
    disk: FailingDisk, tmp_path: Path
) -> None:
    async with opened(tmp_path) as node:
        await node.insert("a", [row(1)])
        async with node.read("a", name="gone") as messages:
            await messages.ack(await anext(messages))
        await node.drop_collection("a")
    disk.fail_at(2)  # behind the first tick: forgetting the reader
    waits_long = load_config(arguments={**QUICK, "reopen": ReopenOptions(wait_s=100 * HANGS_S)})
    with anyio.fail_after(HANGS_S), pytest.raises(StorageFailed):
        await sn.open_node(tmp_path, config=waits_long)
