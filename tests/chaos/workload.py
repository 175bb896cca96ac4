"""What a node is asked while faults happen: many callers at once, each operation in the journal
before and after.

In: an open node, a seed, a first number. Out: journal records. Single inserts, wide rows, upserts
and deletes over few keys, buffered and streamed transactions over several collections, rollbacks,
cuts. A caller whose operation was refused goes on; one that stands still does so with the node.
"""

import asyncio
import itertools
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import anyio
import pyarrow as pa

import streamingnode as sn
from streamingnode.writing.write import WriteResult, nothing_at
from tests.chaos.operations import Begun, Ended, Kind, OperationWriter, Outcome, Row, RowWrite
from tests.chaos.rows import PRIMARY_KEY, REPLACED, SCHEMA, as_batch

T = TypeVar("T")

KEYS = 24
"""As many keys are upserted and deleted: few, so that they meet often."""
ROWS_MAX = 12
FILL_PAD = "x" * 1_000
FILL_ROWS = 500
FILL_ROW_BYTES = 1_024
REFUSED_PAUSE_S = 0.02
"""A refused caller waits so long before its next operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How many callers there are of each kind, when they stop (None: at the kill), and how often a
    cut is asked for.

    `producers` are named ones; what they write is asked for again by the next process.
    """

    inserters: int = 6
    upserters: int = 2
    buffered: int = 2
    streamed: int = 1
    producers: int = 0
    cut_pause_s: float | None = 0.02
    seconds: float | None = None


class Recorder:
    """Gives operations their ids and numbers, and writes both of their records."""

    def __init__(self, journal: OperationWriter, *, first: int) -> None:
        self._journal = journal
        self._ids = itertools.count(first)
        self._numbers = itertools.count(first)
        self.failures = 0
        self.succeeded_ns = 0

    def number(self) -> int:
        """Return a number no row had before."""
        return next(self._numbers)

    async def record(
        self,
        process: str,
        kind: Kind,
        writes: Sequence[RowWrite],
        call: Callable[[], Awaitable[WriteResult]],
    ) -> bool:
        """Run one operation; say whether it returned."""
        op = next(self._ids)
        begun = Begun(
            op=op, process=process, kind=kind, writes=tuple(writes), started_ns=time.monotonic_ns()
        )
        self._journal.write(begun)
        try:
            result = await call()
        except Exception as error:
            self._journal.write(_failed(op, error))
            self.failures += 1
            return False
        self._journal.write(_succeeded(op, result))
        self.succeeded_ns = time.monotonic_ns()
        return True


def _failed(op: int, error: Exception) -> Ended:
    outcome: Outcome = "failed" if isinstance(error, _GivenUp) else "indeterminate"
    name = type(error).__name__
    if isinstance(error, sn.StreamingNodeError):
        outcome = "indeterminate" if error.retryable == "indeterminate" else "failed"
        name = error.code
    return Ended(op=op, outcome=outcome, ended_ns=time.monotonic_ns(), error=name)


def _succeeded(op: int, result: WriteResult) -> Ended:
    return Ended(
        op=op,
        outcome="ok",
        ended_ns=time.monotonic_ns(),
        tick=result.time_tick,
        offsets=dict(result.row_offsets),
        positions=tuple(message_id.position for message_id in result.message_ids),
    )


class _GivenUp(Exception):
    """The transaction was rolled back by its caller, and must never be seen."""


async def make_collections(node: sn.Node, names: Sequence[str]) -> None:
    """Make what is missing."""
    for name in names:
        await node.create_collection(
            name, SCHEMA, primary_key=PRIMARY_KEY, shards=2, if_not_exists=True
        )


async def fill(node: sn.Node, size_bytes: int, *, first: int) -> int:
    """Put so many bytes of wide rows into one collection, and return how many rows that were."""
    await make_collections(node, ("events",))
    written = 0
    while written * FILL_ROW_BYTES < size_bytes:
        numbers = range(first + written, first + written + FILL_ROWS)
        columns: dict[str, list[object]] = {
            "key": list(numbers),
            "number": list(numbers),
            "pad": [FILL_PAD] * FILL_ROWS,
        }
        await node.insert("events", pa.RecordBatch.from_pydict(columns, schema=SCHEMA))
        written += FILL_ROWS
    return written


async def run_load(
    node: sn.Node, load: Load, recorder: Recorder, seed: int, end_s: float | None
) -> None:
    """Run all callers until the end, which without one never comes."""
    callers: list[tuple[str, _Caller, int]] = [
        ("insert", _insert, load.inserters),
        ("change", _change, load.upserters),
        ("buffered", _transaction, load.buffered),
        ("streamed", _streamed, load.streamed),
    ]
    async with anyio.create_task_group() as tasks:
        for name, caller, count in callers:
            for index in range(count):
                process = f"{os.getpid()}-{name}-{index}"
                choose = random.Random(f"{seed}-{name}-{index}")
                tasks.start_soon(_repeat, caller, _Asked(node, recorder, process, choose), end_s)
        if load.cut_pause_s is not None:
            tasks.start_soon(_cut, node, recorder, load.cut_pause_s, end_s)


@dataclass(frozen=True, slots=True)
class _Asked:
    node: sn.Node
    recorder: Recorder
    process: str
    choose: random.Random

    def new_rows(self, count: int) -> tuple[Row, ...]:
        numbers = [self.recorder.number() for _ in range(count)]
        return tuple(Row(number, number) for number in numbers)

    def replacing_rows(self, count: int) -> tuple[Row, ...]:
        return tuple(
            Row(key, self.recorder.number()) for key in self.choose.sample(range(KEYS), count)
        )


_Caller = Callable[[_Asked], Awaitable[bool]]


async def _repeat(caller: _Caller, asked: _Asked, end_s: float | None) -> None:
    for _ in until(end_s):
        await asyncio.sleep(0 if await caller(asked) else REFUSED_PAUSE_S)


async def _insert(asked: _Asked) -> bool:
    rows = asked.new_rows(asked.choose.randint(1, ROWS_MAX))

    async def call() -> WriteResult:
        # few dicts become Arrow together with those of others, a batch is it already
        if len(rows) <= 2:
            return await asked.node.insert("events", as_batch(rows).to_pylist())
        return await asked.node.insert("events", as_batch(rows))

    write = RowWrite(collection="events", action="insert", rows=rows)
    return await asked.recorder.record(asked.process, "insert", [write], call)


async def _change(asked: _Asked) -> bool:
    if asked.choose.random() < 0.3:
        keys = tuple(asked.choose.sample(range(KEYS), 2))
        write = RowWrite(collection=REPLACED, action="delete", keys=keys)
        return await asked.recorder.record(
            asked.process, "delete", [write], lambda: asked.node.delete(REPLACED, list(keys))
        )
    rows = asked.replacing_rows(asked.choose.randint(1, 3))
    write = RowWrite(collection=REPLACED, action="upsert", rows=rows)
    return await asked.recorder.record(
        asked.process, "upsert", [write], lambda: asked.node.upsert(REPLACED, as_batch(rows))
    )


def _pair_writes(asked: _Asked) -> list[RowWrite]:
    rows = asked.new_rows(asked.choose.randint(1, 4))
    return [
        RowWrite(collection="left", action="insert", rows=rows),
        RowWrite(collection=REPLACED, action="upsert", rows=asked.replacing_rows(1)),
        RowWrite(collection="right", action="insert", rows=rows),
    ]


async def _transaction(asked: _Asked) -> bool:
    writes = _pair_writes(asked)

    async def call() -> WriteResult:
        async with asked.node.transaction() as txn:
            for write in writes:
                method = txn.insert if write.action == "insert" else txn.upsert
                await method(write.collection, as_batch(write.rows))
        assert txn.result is not None, "left without an error, so committed"
        return txn.result

    return await asked.recorder.record(asked.process, "transaction", writes, call)


async def _streamed(asked: _Asked) -> bool:
    writes = _pair_writes(asked)
    gives_up = asked.choose.random() < 0.25

    async def call() -> WriteResult:
        node = asked.node
        txn_id = await _before_commit(node.begin_transaction())
        for write in writes:
            method = node.insert if write.action == "insert" else node.upsert
            await _before_commit(method(write.collection, as_batch(write.rows), txn_id=txn_id))
        if gives_up:
            await _before_commit(node.rollback_transaction(txn_id))
            raise _GivenUp
        return await node.commit_transaction(txn_id)

    return await asked.recorder.record(
        asked.process, "rollback" if gives_up else "streamed", writes, call
    )


async def _before_commit(step: Awaitable[T]) -> T:
    """Run a step before the commit: whatever becomes of it, the transaction was never asked to take
    effect.
    """
    try:
        return await step
    except sn.StreamingNodeError as error:
        raise _GivenUp from error


async def _cut(node: sn.Node, recorder: Recorder, pause_s: float, end_s: float | None) -> None:
    for _ in until(end_s):
        await asyncio.sleep(pause_s)
        await recorder.record("cut", "cut", (), lambda: _flushed(node))


def until(end_s: float | None) -> Iterator[None]:
    """Yield until a moment of the monotonic clock, or for ever."""
    while end_s is None or time.monotonic() < end_s:
        yield


async def _flushed(node: sn.Node) -> WriteResult:
    return nothing_at((await node.flush()).tick)
