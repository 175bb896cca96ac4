"""A write that is sent again is there once, with its first result: over failed writes, deadlines,
restarts and crashes.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import streamingnode as sn
from interceptors.errors import ProducerFenced
from streamingnode.config import load_config
from streamingnode.errors import DeadlineExceeded
from streamingnode.node import Node
from streamingnode.writing.producer import Producer
from streamingnode.writing.write import WriteResult
from tests.failing_disk import FailingDisk, Fault
from tests.model_node import ModelNode
from wal.errors import Indeterminate, LogReopening
from wal.lifecycle import ReopenOptions

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

FIELDS: dict[str, pa.DataType] = {"key": pa.int64(), "pad": pa.string()}
SCHEMA = pa.schema(FIELDS)
HANGS_S = 60
GROUP_BYTES = 64 << 10
QUICK: dict[str, object] = {
    "cut_interval_s": None,
    "reopen": ReopenOptions(first_pause_s=0.001, longest_pause_s=0.01),
    "ticks.interval_s": 0.01,
    "wal.group_bytes_max": GROUP_BYTES,
}
IMPATIENT: dict[str, object] = {"reopen.wait_s": 0.05}
FOR_LONG = 1 << 30
"""So many calls in a row fail: the log does not come back before the disk heals."""

T = TypeVar("T")


def rows(*keys: int) -> list[dict[str, object]]:
    return [{"key": key, "pad": ""} for key in keys]


def many(first: int) -> pa.Table:
    """Return rows that take three append groups."""
    return pa.table(
        {"key": range(first, first + 60), "pad": ["x" * (GROUP_BYTES // 20)] * 60}, schema=SCHEMA
    )


@asynccontextmanager
async def opened(path: Path, **settings: object) -> AsyncIterator[Node]:
    with anyio.fail_after(HANGS_S):
        async with sn.open_node(path, config=load_config(arguments={**QUICK, **settings})) as node:
            await node.create_collection("c", SCHEMA, primary_key="key", if_not_exists=True)
            yield node


async def keys_of(node: Node) -> Counter[int]:
    snapshot: pa.Table = await node.snapshot("c")
    return Counter(snapshot["key"].to_numpy().tolist())


async def once_back(call: Callable[[], Coroutine[None, None, T]]) -> T:
    """Return what a call returns once the log is back, however long that takes."""
    while True:
        try:
            return await call()
        except LogReopening:
            continue


@pytest.fixture(params=Fault, ids=lambda fault: fault.name.lower())
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    return FailingDisk(monkeypatch, request.param)


# --- the node's own writes ------------------------------------------------------------------------


async def in_transaction(node: Node, *keys: int) -> None:
    async with node.transaction() as txn:
        await txn.insert("c", rows(*keys))


async def by_id(node: Node, key: int) -> None:
    txn_id = await node.begin_transaction()
    await node.insert("c", rows(key), txn_id=txn_id)
    await node.commit_transaction(txn_id)


async def streamed(node: Node, first: int) -> None:
    async with node.transaction() as txn:
        await txn.insert("c", many(first))


@pytest.mark.parametrize("number", range(1, 7))
async def test_no_caller_hears_of_a_failed_write_and_every_row_is_there_once(
    tmp_path: Path, disk: FailingDisk, number: int
) -> None:
    async with opened(tmp_path) as node:
        disk.fail_at(number)
        async with asyncio.TaskGroup() as tasks:
            for write in (
                node.insert("c", rows(1)),
                node.insert("c", rows(2)),
                node.insert("c", pa.Table.from_pylist(rows(3, 4), SCHEMA)),
                node.upsert("c", rows(5)),
                node.delete("c", [999]),
                in_transaction(node, 6, 7),
                by_id(node, 8),
                streamed(node, 1000),
                node.create_collection("other", SCHEMA, primary_key="key"),
            ):
                tasks.create_task(write)
        disk.heal()
        await node.insert("other", rows(1))
        assert await keys_of(node) == Counter([*range(1, 9), *range(1000, 1060)])
    async with opened(tmp_path) as node:
        assert await keys_of(node) == Counter([*range(1, 9), *range(1000, 1060)])


async def test_write_whose_outcome_stays_open_is_indeterminate_in_the_end(
    tmp_path: Path, disk: FailingDisk
) -> None:
    async with opened(tmp_path, **IMPATIENT) as node:
        await node.insert("c", rows(0))  # so that it is no segment that fails
        disk.fail_at(1, times=FOR_LONG)
        with pytest.raises(Indeterminate):
            await node.insert("c", rows(1))
        disk.heal()


async def test_closing_does_not_wait_for_a_log_that_is_lost(
    tmp_path: Path, disk: FailingDisk
) -> None:
    async with opened(tmp_path, **{"reopen.wait_s": HANGS_S}) as node:
        await node.insert("c", rows(0))  # so that it is no segment that fails
        disk.fail_at(1, times=1 << 30)
        inserting = asyncio.get_running_loop().create_task(node.insert("c", rows(1)))
        while not disk.reached:
            await anyio.lowlevel.checkpoint()
    outcome = (await asyncio.gather(inserting, return_exceptions=True))[0]
    assert isinstance(outcome, Indeterminate)


# --- a named producer -----------------------------------------------------------------------------

Repeat = Callable[[Producer, int], Coroutine[None, None, WriteResult | None]]


async def insert(producer: Producer, sequence: int) -> WriteResult:
    return await producer.insert("c", rows(sequence), sequence=sequence)


async def upsert(producer: Producer, sequence: int) -> WriteResult:
    return await producer.upsert("c", rows(sequence, sequence + 100), sequence=sequence)


async def transact(producer: Producer, sequence: int) -> WriteResult | None:
    async with producer.transaction(sequence=sequence) as txn:
        await txn.insert("c", rows(sequence))
        await txn.delete("c", [999])
    return txn.result


async def insert_many(producer: Producer, sequence: int) -> WriteResult:
    return await producer.insert("c", many(1000 * sequence), sequence=sequence)


KINDS: list[Repeat] = [insert, upsert, transact, insert_many]
ROWS: dict[Repeat, int] = {insert: 1, upsert: 2, transact: 1, insert_many: 60}


@pytest.mark.parametrize("write", KINDS)
async def test_repeating_an_indeterminate_write_finds_it_or_makes_it(
    tmp_path: Path, disk: FailingDisk, write: Repeat
) -> None:
    async with opened(tmp_path, **IMPATIENT) as node:
        producer = await node.producer("feed")
        await insert(producer, 1)
        disk.fail_at(3 if write is insert_many else 1, times=FOR_LONG)
        with pytest.raises(Indeterminate):
            await write(producer, 2)
        disk.heal()
        first = await once_back(partial(write, producer, 2))
        assert await write(producer, 2) == first
        keys = await keys_of(node)
        assert set(keys.values()) == {1}
        assert len(keys) == 1 + ROWS[write]
        assert producer.last_sequence == 2
    async with opened(tmp_path) as node:
        assert await write(await node.producer("feed"), 2) == first
        assert await keys_of(node) == keys


async def test_repeating_a_write_after_its_deadline_joins_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    async with opened(tmp_path) as node:
        producer = await node.producer("feed")
        await insert(producer, 1)
        disk.gate.clear()
        with pytest.raises(DeadlineExceeded):
            await producer.insert("c", rows(2), sequence=2, timeout=0.05)
        again = asyncio.get_running_loop().create_task(producer.insert("c", rows(2), sequence=2))
        # it waits for the same write, so it cannot say that nothing was done
        with pytest.raises(DeadlineExceeded):
            await producer.insert("c", rows(2), sequence=2, timeout=0.05)
        disk.gate.set()
        assert await again == await insert(producer, 2)
        assert await keys_of(node) == Counter([1, 2])


async def test_write_sent_twice_at_once_has_one_result_when_the_first_try_fails(
    tmp_path: Path, disk: FailingDisk
) -> None:
    async with opened(tmp_path) as node:
        producer = await node.producer("feed")
        await insert(producer, 1)
        disk.fail_at(1)
        first, again = await asyncio.gather(insert(producer, 2), insert(producer, 2))
        assert disk.reached
        assert again == first
        assert await keys_of(node) == Counter([1, 2])


async def test_write_that_joined_an_indeterminate_one_is_indeterminate_too(
    tmp_path: Path, disk: FailingDisk
) -> None:
    async with opened(tmp_path, **IMPATIENT) as node:
        producer = await node.producer("feed")
        await insert(producer, 1)
        disk.fail_at(1, times=FOR_LONG)
        outcomes = await asyncio.gather(
            insert(producer, 2), insert(producer, 2), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [Indeterminate, Indeterminate]
        disk.heal()


async def test_deadline_of_write_that_joined_indeterminate_one_does_not_say_that_nothing_was_done(
    tmp_path: Path, disk: FailingDisk
) -> None:
    async with opened(tmp_path) as node:
        producer = await node.producer("feed")
        await insert(producer, 1)
        disk.fail_at(1, times=1 << 30)
        first = asyncio.get_running_loop().create_task(insert(producer, 2))
        with pytest.raises(DeadlineExceeded):
            await producer.insert("c", rows(2), sequence=2, timeout=0.5)
        disk.heal()
        await first
        assert await keys_of(node) == Counter([1, 2])


async def test_producer_opened_again_takes_over_from_a_zombie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    async with opened(tmp_path) as node:
        zombie = await node.producer("feed")
        await insert(zombie, 1)
        disk.gate.clear()
        in_flight = asyncio.get_running_loop().create_task(insert(zombie, 2))
        opening = asyncio.get_running_loop().create_task(node.producer("feed"))
        await asyncio.wait((in_flight, opening), timeout=0.05)
        disk.gate.set()
        successor = await opening
        assert successor.last_sequence == 2, (
            "what was in flight is decided before the next one begins"
        )
        for sequence in (2, 3):
            with pytest.raises(ProducerFenced):
                await insert(zombie, sequence)
        assert await insert(successor, 2) == await in_flight
        assert await keys_of(node) == Counter([1, 2])


async def test_last_sequence_says_what_became_of_a_write_with_an_open_outcome(
    tmp_path: Path, disk: FailingDisk
) -> None:
    async with opened(tmp_path, **IMPATIENT) as node:
        producer = await node.producer("feed")
        await insert(producer, 1)
        disk.fail_at(1, times=FOR_LONG)
        with pytest.raises(Indeterminate):
            await insert(producer, 2)
        disk.heal()
        successor = await once_back(partial(node.producer, "feed"))
        assert await keys_of(node) == Counter(range(1, successor.last_sequence + 1))


async def test_deleting_a_producer_whose_last_write_fails_says_that_there_was_one(
    tmp_path: Path, disk: FailingDisk
) -> None:
    async with opened(tmp_path) as node:
        producer = await node.producer("feed")
        await insert(producer, 1)
        disk.fail_at(2)
        disk.gate.clear()
        deleting = asyncio.get_running_loop().create_task(node.delete_producer("feed"))
        await asyncio.wait((deleting,), timeout=0.05)
        last = asyncio.get_running_loop().create_task(insert(producer, 2))
        await asyncio.wait((deleting, last), timeout=0.05)
        disk.gate.set()
        assert await deleting
        outcome = (await asyncio.gather(last, return_exceptions=True))[0]
        in_log = await keys_of(node)
        assert disk.reached
        assert isinstance(outcome, ProducerFenced) == (in_log == Counter([1]))
        assert isinstance(outcome, WriteResult) == (in_log == Counter([1, 2]))


@pytest.mark.parametrize("number", range(1, 6))
async def test_write_that_landed_unheard_is_recognised_after_a_cut_and_a_restart(
    tmp_path: Path, disk: FailingDisk, number: int
) -> None:
    sequences = range(2, 8)
    async with opened(tmp_path, retention_s=0, **IMPATIENT) as node:
        producer = await node.producer("feed")
        await insert(producer, 1)
        disk.fail_at(number, times=FOR_LONG)
        writes = [insert(producer, sequence) for sequence in sequences]
        await asyncio.gather(*writes, node.flush(), return_exceptions=True)
        disk.heal()
        await once_back(node.flush)
    async with opened(tmp_path) as node:
        producer = await node.producer("feed")
        for sequence in sequences:
            await insert(producer, sequence)
        assert await keys_of(node) == Counter([1, *sequences])


async def test_two_producers_interleaved_over_a_restart_keep_their_own_sequences(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as node:
        producers = [await node.producer(name) for name in ("left", "right")]
        for sequence in range(1, 6):
            for offset, producer in enumerate(producers):
                await producer.insert("c", rows(10 * sequence + offset), sequence=sequence)
        await node.flush()
    async with opened(tmp_path) as node:
        left, right = [await node.producer(name) for name in ("left", "right")]
        assert (left.last_sequence, right.last_sequence) == (5, 5)
        await left.insert("c", rows(50), sequence=5)
        await right.insert("c", rows(61))
        assert (left.last_sequence, right.last_sequence) == (5, 6)
        assert (await keys_of(node)).keys() == {*range(10, 60, 10), *range(11, 61, 10), 61}


# --- over any number of crashes -------------------------------------------------------------------


class RetryMachine(RuleBasedStateMachine):
    """One feed that writes, repeats, crashes (a copy of the directory), cuts and is opened again;
    `told` is its model.
    """

    @initialize()
    def start(self) -> None:
        self.root = tempfile.TemporaryDirectory()
        self.model = ModelNode(Path(self.root.name), **{**QUICK, "retention_s": 0})
        self.told: dict[int, WriteResult] = {}
        self.kinds: dict[int, Repeat] = {}
        self.model.run(self.create())
        self.open_producer()

    async def create(self) -> None:
        await self.model.node.create_collection("c", SCHEMA, primary_key="key", shards=2)

    @rule()
    def open_producer(self) -> None:
        async def call() -> Producer:
            return await self.model.node.producer("feed")

        self.producer = self.model.run(call())
        assert self.producer.last_sequence == max(self.told, default=0)

    @rule(step=st.integers(1, 3), kind=st.sampled_from(KINDS))
    def write(self, step: int, kind: Repeat) -> None:
        sequence = max(self.told, default=0) + step
        self.kinds[sequence] = kind
        self.told[sequence] = self.call(sequence)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.told)))
        assert self.call(sequence) == self.told[sequence]

    @rule()
    def cut(self) -> None:
        self.model.run(self.model.node.flush())

    @rule()
    def crash(self) -> None:
        self.model.crash()
        self.open_producer()

    @rule()
    def restart(self) -> None:
        self.model.reopen()
        self.open_producer()

    @invariant()
    def every_write_is_there_once(self) -> None:
        keys = self.model.run(self.keys())
        assert sum(keys.values()) == sum(ROWS[self.kinds[sequence]] for sequence in self.told)

    async def keys(self) -> Counter[int]:
        return await keys_of(self.model.node)

    def call(self, sequence: int) -> WriteResult:
        async def call() -> WriteResult | None:
            return await self.kinds[sequence](self.producer, sequence)

        result = self.model.run(call())
        assert result is not None
        return result

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.end()
            self.root.cleanup()


RetryMachine.TestCase.settings = settings(max_examples=6, stateful_step_count=12, deadline=None)
TestRetries = RetryMachine.TestCase
