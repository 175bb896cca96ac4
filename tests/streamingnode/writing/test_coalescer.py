"""Small concurrent inserts go together, and each of them behaves as if it were alone."""

import asyncio
from collections.abc import AsyncIterator

import anyio
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.errors import SchemaMismatch
from streamingnode.errors import DeadlineExceeded
from streamingnode.writing.coalescer import Coalescer
from streamingnode.writing.result import WriteResult
from streamingnode.writing.write import Write
from tests.streamingnode.append_double import (
    DEFAULT_PARTITION_ID,
    EU_PARTITION_ID,
    AppendDouble,
    decoded,
    schema_of,
    write_target,
    writes_on,
)
from wal.errors import Indeterminate, OnShutdown, Overloaded, StorageFull, TooLarge
from wal.queue import PendingBytes
from wal.runtime import Supervisor

pytestmark = pytest.mark.anyio

SCHEMA = schema_of(id=pa.int64(), item=pa.string())
GROUP_BYTES_MAX = 64 << 10
ROW_BYTES = 560
"""What a row counts for while it waits: 512, 16 for each cell, and its text."""


class Inserts:
    """A coalescer over an append double, and the tasks of its callers."""

    def __init__(self, *, shards: int = 1, bytes_max: int = 1 << 20, **limits: int) -> None:
        pending = PendingBytes(4 * bytes_max)
        self.memory = pending.rows
        self.log = AppendDouble()
        self.target = write_target(SCHEMA, shards=shards)
        self.supervisor = Supervisor(self._failed)
        writes = writes_on(self.log, group_bytes_max=GROUP_BYTES_MAX, pending=pending)
        self.coalescer = Coalescer(self.supervisor, writes)
        for name, limit in limits.items():
            setattr(self.coalescer, name, limit)
        self.failures: list[BaseException] = []

    def start(
        self, *ids: object, partition_id: int = DEFAULT_PARTITION_ID, timeout: float | None = None
    ) -> "asyncio.Task[WriteResult]":
        rows = [{"id": key, "item": f"item {key}"} for key in ids]
        return self.start_rows(rows, partition_id=partition_id, timeout=timeout)

    def start_rows(
        self, rows: list[dict[str, object]], *, partition_id: int = DEFAULT_PARTITION_ID, timeout: float | None = None
    ) -> "asyncio.Task[WriteResult]":
        async def insert() -> WriteResult:
            return await self.coalescer.insert(Write("insert", self.target, partition_id), rows, timeout=timeout)

        return asyncio.get_running_loop().create_task(insert())

    @property
    def waiting(self) -> int:
        return sum(len(lane.waiting) for lane in self.coalescer._lanes.values())

    @property
    def ids(self) -> list[object]:
        return [row["id"] for row in self.log.rows(SCHEMA)]

    def _failed(self, failure: BaseException) -> None:
        self.failures.append(failure)


@pytest.fixture
async def inserts() -> AsyncIterator[Inserts]:
    made = Inserts()
    yield made
    made.log.let_go()
    await made.coalescer.drain()
    await made.supervisor.stop()
    assert made.failures == []


async def test_inserts_of_one_turn_go_into_one_group_in_call_order(inserts: Inserts) -> None:
    results = await asyncio.gather(inserts.start(1), inserts.start(2, 3), inserts.start(4))
    assert len(inserts.log.groups) == 1
    assert inserts.ids == [1, 2, 3, 4]
    assert [result.row_offsets for result in results] == [{"p0_7v0": (0, 1)}, {"p0_7v0": (1, 2)}, {"p0_7v0": (3, 1)}]
    assert {result.time_tick for result in results} == {1}


async def test_partitions_do_not_share_a_group(inserts: Inserts) -> None:
    await asyncio.gather(inserts.start(1), inserts.start(2, partition_id=EU_PARTITION_ID))
    assert len(inserts.log.groups) == 2


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=12), shards=st.integers(1, 4))
async def test_every_insert_is_told_the_offsets_of_its_own_rows(counts: list[int], shards: int) -> None:
    inserts = Inserts(shards=shards)
    keys = iter(range(1000))
    asked = [[next(keys) for _ in range(count)] for count in counts]
    results = await asyncio.gather(*(inserts.start(*each) for each in asked))
    stored = {
        f"p0_7v{shard}": [row["id"] for row in inserts.log.rows(SCHEMA, vchannel=f"p0_7v{shard}")]
        for shard in range(shards)
    }
    for own, result in zip(asked, results, strict=True):
        told = [
            key
            for vchannel, (first, count) in result.row_offsets.items()
            for key in stored[vchannel][first : first + count]
        ]
        assert sorted(map(int, map(str, told))) == own
        assert len(result.message_ids) == len(result.row_offsets)
    await inserts.coalescer.drain()


@pytest.mark.parametrize("bad", [{"id": "x", "item": "a"}, {"id": 1}, {"id": None, "item": "a"}, ["no dict"]])
async def test_bad_insert_fails_alone_with_its_own_row(inserts: Inserts, bad: dict[str, object]) -> None:
    good = inserts.start(1)
    failing = inserts.start_rows([{"id": 5, "item": "fits"}, bad])
    also_good = inserts.start(2)
    assert (await good).row_offsets == {"p0_7v0": (0, 1)}
    assert (await also_good).row_offsets == {"p0_7v0": (1, 1)}
    with pytest.raises(Exception, match=r"row 1\b") as caught:
        await failing
    if isinstance(caught.value, SchemaMismatch):
        assert caught.value.row == 1
    assert inserts.ids == [1, 2]


async def test_group_of_bad_inserts_only_is_not_appended(inserts: Inserts) -> None:
    with pytest.raises(SchemaMismatch):
        await inserts.start("x")
    assert inserts.log.groups == []


async def test_error_of_the_append_reaches_every_insert_of_the_group(inserts: Inserts) -> None:
    inserts.log.error = StorageFull("data", 0, 1)
    outcomes = await asyncio.gather(inserts.start(1), inserts.start(2), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StorageFull, StorageFull]
    inserts.log.error = None
    assert (await inserts.start(3)).row_offsets == {"p0_7v0": (0, 1)}


async def test_bug_behind_the_append_reaches_its_callers_and_the_owner_of_the_tasks() -> None:
    inserts = Inserts()
    inserts.log.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        await inserts.start(1)
    await inserts.coalescer.drain()
    await anyio.lowlevel.checkpoint()
    assert [type(failure) for failure in inserts.failures] == [ZeroDivisionError]


async def test_bug_in_one_group_leaves_nobody_behind_it_waiting() -> None:
    inserts = Inserts(groups_in_flight_max=1, group_bytes_max=2 * ROW_BYTES)
    outcomes = iter([None, ZeroDivisionError("a bug")])
    inserts.log.refuse = lambda _: next(outcomes, None)
    inserts.log.hold()
    first = inserts.start(0)
    await inserts.log.arrival()
    hit, behind = [inserts.start(n) for n in (1, 2)], [inserts.start(n) for n in (3, 4, 5)]
    await anyio.lowlevel.checkpoint()
    inserts.log.let_go()
    await first
    for task in hit:
        with pytest.raises(ZeroDivisionError):
            await task
    with anyio.fail_after(5):
        for task in behind:
            await task
    assert inserts.ids == [0, 3, 4, 5]


async def test_closing_tells_those_in_a_group_and_those_that_wait_apart() -> None:
    inserts = Inserts(groups_in_flight_max=1)
    inserts.log.hold()
    under_way = inserts.start(1)
    await inserts.log.arrival()
    waiting = inserts.start(2)
    await anyio.lowlevel.checkpoint()
    await inserts.supervisor.stop()
    with anyio.fail_after(5):
        with pytest.raises(Indeterminate):
            await under_way
        with pytest.raises(OnShutdown):
            await waiting


async def test_insert_cancelled_before_its_group_is_made_never_happened(inserts: Inserts) -> None:
    first, second = inserts.start(1), inserts.start(2)
    await asyncio.sleep(0)  # both have joined, the group is made in the next turn
    first.cancel()
    result = await second
    assert inserts.ids == [2]
    assert result.row_offsets == {"p0_7v0": (0, 1)}
    assert first.cancelled()


async def test_insert_cancelled_in_a_group_is_in_the_log_and_hurts_nobody(inserts: Inserts) -> None:
    inserts.log.hold()
    first, second = inserts.start(1), inserts.start(2)
    await inserts.log.arrival()
    first.cancel()
    await asyncio.sleep(0)
    inserts.log.let_go()
    assert (await second).row_offsets == {"p0_7v0": (1, 1)}
    assert inserts.ids == [1, 2]


async def test_bad_insert_whose_caller_is_gone_takes_no_row_of_others(inserts: Inserts) -> None:
    cancelled = inserts.start("bad")
    good = inserts.start(1)
    await asyncio.sleep(0)
    cancelled.cancel()
    assert (await good).row_offsets == {"p0_7v0": (0, 1)}


async def test_groups_in_flight_are_bounded_and_what_waits_goes_together() -> None:
    inserts = Inserts(groups_in_flight_max=2)
    inserts.log.hold()
    tasks = []
    for key in range(10):
        tasks.append(inserts.start(key))
        for _ in range(4):
            await asyncio.sleep(0)
    assert inserts.log.in_flight == 2
    assert inserts.waiting == 8
    inserts.log.let_go()
    await asyncio.gather(*tasks)
    assert sorted(len(decoded(message, SCHEMA)) for message in inserts.log.messages) == [1, 1, 8]
    assert sorted(map(str, inserts.ids)) == sorted(map(str, range(10)))


async def test_callers_wait_when_too_many_bytes_wait() -> None:
    inserts = Inserts(groups_in_flight_max=1, group_bytes_max=2 * ROW_BYTES, bytes_max=3 * ROW_BYTES)
    inserts.log.hold()
    tasks = [inserts.start(key) for key in range(20)]
    for _ in range(10):
        await asyncio.sleep(0)
        assert inserts.memory.held_bytes <= 3 * ROW_BYTES
    assert inserts.waiting == 1, "three rows fit, two of them on their way"
    tasks[2].cancel()
    inserts.log.let_go()
    del tasks[2]
    results = await asyncio.gather(*tasks)
    assert sorted(map(int, map(str, inserts.ids))) == [0, 1, *range(3, 20)]
    assert len({result.row_offsets["p0_7v0"] for result in results}) == 19
    assert inserts.memory.held_bytes == 0


async def test_large_nested_values_count_for_what_they_hold() -> None:
    inserts = Inserts(bytes_max=10_000)
    for value in ("x" * 10_000, ["x" * 5_000] * 2, {"a": {"b": b"x" * 10_000}}, np.zeros(1_250)):
        with pytest.raises(TooLarge, match="pending_bytes_max"):
            await inserts.start_rows([{"id": 1, "item": value}], timeout=60)


async def test_group_ends_at_its_rows() -> None:
    inserts = Inserts(group_bytes_max=3 * ROW_BYTES)
    await asyncio.gather(*(inserts.start(key) for key in range(8)))
    assert [group.messages[0].header.rows for group in inserts.log.groups] == [3, 3, 2]  # type: ignore[attr-defined]


async def test_group_over_the_size_limit_is_halved_between_inserts(inserts: Inserts) -> None:
    small = [inserts.start(key) for key in range(3)]
    large = [inserts.start_rows([{"id": 10 + n, "item": "x" * 30_000}]) for n in range(5)]
    results = await asyncio.gather(*small, *large)
    assert inserts.ids == [0, 1, 2, 10, 11, 12, 13, 14]
    assert all(group.size_bytes <= GROUP_BYTES_MAX for group in inserts.log.groups)
    assert [result.row_offsets["p0_7v0"] for result in results] == [(n, 1) for n in range(8)]


async def test_one_insert_over_the_size_limit_is_split_and_says_so(inserts: Inserts) -> None:
    result = await inserts.start_rows([{"id": n, "item": "x" * 30_000} for n in range(5)])
    assert len(result.groups) == len(inserts.log.groups) > 1
    assert inserts.ids == list(range(5))


async def test_deadline_before_the_group_says_that_nothing_was_done() -> None:
    inserts = Inserts(groups_in_flight_max=1)
    inserts.log.hold()
    first = inserts.start(1)
    await inserts.log.arrival()
    with pytest.raises(Overloaded):
        await inserts.start(2, timeout=0.001)
    inserts.log.let_go()
    await first
    assert inserts.ids == [1]


async def test_deadline_in_a_group_is_a_timeout_of_open_outcome(inserts: Inserts) -> None:
    inserts.log.hold()
    with pytest.raises(TimeoutError) as caught:
        await inserts.start(1, timeout=0.2)
    assert isinstance(caught.value, DeadlineExceeded)
    assert caught.value.retryable == "indeterminate"
    inserts.log.let_go()
    await inserts.coalescer.drain()
    assert inserts.ids == [1]


async def test_insert_under_way_when_the_owner_stops_is_indeterminate() -> None:
    inserts = Inserts()
    inserts.log.hold()
    task = inserts.start(1)
    await inserts.log.arrival()
    await inserts.supervisor.stop()
    with pytest.raises(Indeterminate):
        await task


async def test_insert_that_comes_alone_after_another_takes_no_turn_of_the_loop_before_the_log(inserts: Inserts) -> None:
    await inserts.start(1)
    write = Write("insert", inserts.target, DEFAULT_PARTITION_ID)
    inserting = inserts.coalescer.insert(write, [{"id": 2, "item": "b"}])
    assert asyncio.iscoroutine(inserting)
    with pytest.raises(StopIteration):  # the log's double acknowledges at once
        inserting.send(None)
    assert inserts.ids == [1, 2]


async def test_inserts_that_come_while_a_lone_one_is_on_its_way_go_together_once_it_ends() -> None:
    inserts = Inserts(groups_in_flight_max=1)
    await inserts.start(1)
    inserts.log.hold()
    others = [inserts.start(number) for number in range(2, 5)]
    await asyncio.sleep(0)  # the first is on its way, the others wait
    inserts.log.let_go()
    await asyncio.gather(*others)
    assert [len(group.messages) for group in inserts.log.groups] == [1, 1, 1]
    assert inserts.ids == [1, 2, 3, 4]


async def test_bad_insert_that_comes_alone_names_its_own_row_and_leaves_the_lane_free(inserts: Inserts) -> None:
    await inserts.start(1)
    with pytest.raises(SchemaMismatch, match="row 0"):
        await inserts.start("bad")
    assert (await inserts.start(2)).row_offsets == {"p0_7v0": (1, 1)}
