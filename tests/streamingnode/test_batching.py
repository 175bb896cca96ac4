"""Rows of many callers go in few inserts, and each caller hears of its own."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import anyio
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamingnode as sn
from interceptors.errors import CollectionNotFound, PartitionNotFound, SchemaMismatch
from streamingnode.batching import AppendedRow, BatchAppender
from streamingnode.errors import DeadlineExceeded
from streamingnode.node import Node
from tests.cancelled import Way, cancel_at
from tests.parts_of import WAYS, opened_one_way
from tests.streamingnode.batching_cases import (
    BAD,
    CANCELLED,
    FLUSH,
    GOOD,
    NEVER_S,
    PAUSE,
    SCHEMA,
    Inserts,
    Row,
    ids_in,
    row,
    turns,
)
from wal.errors import Indeterminate, InvalidArgument, OnShutdown, Overloaded, TooLarge

pytestmark = pytest.mark.anyio


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with sn.open_node(None) as opened:
        await opened.create_collection("orders", SCHEMA, primary_key="id", partitions=["eu"])
        await opened.create_collection("spread", SCHEMA, primary_key="id", shards=4)
        yield opened


@pytest.fixture(params=WAYS)
async def any_node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with opened_one_way(request.param) as opened:
        await opened.create_collection("orders", SCHEMA, primary_key="id")
        await opened.create_collection("spread", SCHEMA, primary_key="id", shards=4)
        yield opened


# --- BatchAppender --------------------------------------------------------------------------------


async def test_rows_of_one_turn_go_in_one_insert_with_an_offset_each(any_node: Node) -> None:
    inserts = Inserts(any_node)
    async with BatchAppender(any_node, "orders", linger_s=0) as appender:
        told = await asyncio.gather(*(appender.append(row(n)) for n in range(50)))
        assert [each.row_offset for each in told] == list(range(50))
        assert {each.time_tick for each in told} == {told[0].batch.time_tick}
        assert appender.statistics == (1, 50, 0)
    assert inserts.ids == [list(range(50))]
    assert await ids_in(any_node) == list(range(50))


async def test_rows_of_several_shards_have_no_offset_and_those_of_one_do(node: Node) -> None:
    async with BatchAppender(node, "spread", linger_s=0) as appender:
        spread = await asyncio.gather(*(appender.append(row(n)) for n in range(50)))
        alone = await appender.append(row(50))
    assert len(spread[0].batch.row_offsets) > 1
    assert {each.row_offset for each in spread} == {None}
    ((offset, _),) = alone.batch.row_offsets.values()
    assert alone.row_offset == offset


async def test_rows_go_to_the_partition_that_was_named(node: Node) -> None:
    async with BatchAppender(node, "orders", partition="eu") as appender:
        await appender.append(row(1))
    await node.drop_partition("orders", "eu")
    assert (await node.snapshot("orders")).num_rows == 0


async def test_batch_that_is_full_does_not_linger(node: Node) -> None:
    inserts = Inserts(node)
    async with BatchAppender(node, "orders", rows_max=3, linger_s=NEVER_S) as appender:
        told = [await appender.submit(row(n)) for n in range(7)]
        await asyncio.gather(*told[:6])
        assert not told[6].done()
    assert inserts.ids == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize(
    "item", ["x" * 400, "é" * 100, "x" * 380], ids=["letters", "accents", "fewer"]
)
async def test_batch_that_has_its_bytes_does_not_linger(node: Node, item: str) -> None:
    inserts = Inserts(node)
    async with BatchAppender(node, "orders", bytes_max=1_000, linger_s=NEVER_S) as appender:
        told = [await appender.submit(row(n, item)) for n in range(4)]
        await asyncio.gather(*told[:2])
    assert inserts.ids == [[0, 1], [2, 3]]


async def test_large_row_does_not_go_with_a_batch_that_has_no_room_for_it(node: Node) -> None:
    inserts = Inserts(node)
    async with BatchAppender(node, "orders", bytes_max=1_000, linger_s=NEVER_S) as appender:
        told = [
            await appender.submit(row(number, "x" * size))
            for number, size in enumerate((10, 5_000))
        ]
        await asyncio.gather(*told)
    assert inserts.ids == [[0], [1]]


@pytest.mark.parametrize(
    "value",
    [
        b"x" * 5_000,
        ["x" * 1_000] * 5,
        {"a": {"b": "x" * 5_000}},
        [[1] * 400],
        pa.array([1.0] * 700),
    ],
    ids=["bytes", "list", "structs", "lists in lists", "array"],
)
async def test_every_kind_of_value_counts_as_pending(node: Node, value: object) -> None:
    inserts = Inserts(node)
    inserts.open.clear()
    async with BatchAppender(node, "orders") as appender:
        told = await appender.submit({"id": 1, "item": value})
        assert 5_000 < appender.statistics.pending_bytes < 8_000
        inserts.open.set()
        with pytest.raises(SchemaMismatch):
            await told
        assert appender.statistics.pending_bytes == 0


async def test_row_goes_when_its_linger_is_over(node: Node) -> None:
    async with BatchAppender(node, "orders", linger_s=0.001) as appender:
        assert (await appender.append(row(1))).row_offset == 0
        assert (await appender.append(row(2))).row_offset == 1


async def test_batch_grows_while_no_other_may_be_sent(node: Node) -> None:
    inserts = Inserts(node)
    told = list[asyncio.Future[AppendedRow]]()
    inserts.open.clear()
    async with BatchAppender(node, "orders", linger_s=0, batches_in_flight_max=2) as appender:
        for number in range(10):
            told.append(await appender.submit(row(number)))
            await turns()
        assert inserts.ids == [[0], [1]]
        inserts.open.set()
        await asyncio.gather(*told)
    assert inserts.ids == [[0], [1], list(range(2, 10))]
    assert inserts.most_under_way == 2


async def test_full_batches_wait_for_those_in_flight_and_keep_their_order(node: Node) -> None:
    inserts = Inserts(node)
    inserts.open.clear()
    async with BatchAppender(node, "orders", rows_max=2, batches_in_flight_max=1) as appender:
        for number in range(10):
            await appender.submit(row(number))
        await turns()
        assert inserts.ids == [[0, 1]]
        inserts.open.set()
    assert inserts.most_under_way == 1
    assert await ids_in(node) == list(range(10))


async def test_flush_waits_for_every_row_that_was_submitted(node: Node) -> None:
    inserts = Inserts(node)
    inserts.open.clear()
    async with BatchAppender(
        node, "orders", rows_max=2, linger_s=NEVER_S, batches_in_flight_max=1
    ) as appender:
        told = [await appender.submit(row(n)) for n in range(5)]
        flushing = asyncio.get_running_loop().create_task(appender.flush())
        await turns()
        assert not flushing.done()
        inserts.open.set()
        await flushing
        assert all(each.done() for each in told)


async def test_submitting_without_a_pause_lets_other_tasks_run(node: Node) -> None:
    async with BatchAppender(node, "orders", rows_max=10, linger_s=NEVER_S) as appender:
        told = [await appender.submit(row(n)) for n in range(1_000)]
        assert told[0].done()


@pytest.mark.parametrize(
    "error",
    [
        Indeterminate("lost"),
        DeadlineExceeded("late"),
        Overloaded("full"),
        CollectionNotFound("gone"),
        ValueError("bug"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_failed_insert_fails_its_own_rows_and_is_not_repeated(
    node: Node, error: Exception
) -> None:
    inserts = Inserts(node)
    inserts.errors += [None, error]
    async with BatchAppender(node, "orders", rows_max=2, batches_in_flight_max=1) as appender:
        told = [await appender.submit(row(n)) for n in range(6)]
    assert inserts.ids == [[0, 1], [2, 3], [4, 5]]
    assert [each.exception() for each in told] == [None, None, error, error, None, None]
    assert await ids_in(node) == [0, 1, 4, 5]
    assert appender.statistics == (2, 4, 0)


async def test_bad_rows_fail_alone_and_their_neighbours_go_in_order(any_node: Node) -> None:
    bad: dict[int, Row] = {
        0: row(0) | {"item": 7},
        5: {"item": "tea"},
        6: row(6) | {"more": 1},
        11: {"id": None, "item": "x"},
    }
    async with BatchAppender(any_node, "orders", rows_max=12) as appender:
        told = [await appender.submit(bad.get(n, row(n))) for n in range(12)]
    for number, each in enumerate(told):
        assert isinstance(each.exception(), SchemaMismatch) == (number in bad)
    good = [n for n in range(12) if n not in bad]
    assert [told[n].result().row_offset for n in good] == list(range(len(good)))
    assert await ids_in(any_node) == good


async def test_row_that_no_append_group_takes_fails_alone(node: Node) -> None:
    async with BatchAppender(node, "orders", bytes_max=1 << 30, linger_s=NEVER_S) as appender:
        assert appender.bytes_max == node.config.wal.group_bytes_max // 2
        told = [await appender.submit(row(n, "x" * (5 << 20 if n == 1 else 10))) for n in range(3)]
    assert isinstance(told[1].exception(), TooLarge)
    assert sorted(await ids_in(node)) == [0, 2]


async def test_partition_that_is_not_there_fails_the_rows_and_asks_once(node: Node) -> None:
    inserts = Inserts(node)
    async with BatchAppender(node, "orders", partition="us") as appender:
        told = [await appender.submit(row(n)) for n in range(3)]
    assert all(isinstance(each.exception(), PartitionNotFound) for each in told)
    assert inserts.ids == [[0, 1, 2]]


async def test_error_after_a_refusal_is_not_repeated_either(node: Node) -> None:
    inserts = Inserts(node)
    inserts.errors += [SchemaMismatch("a row does not fit"), Indeterminate("lost")]
    async with BatchAppender(node, "orders") as appender:
        told = [await appender.submit(row(n)) for n in range(4)]
    assert inserts.ids == [[0, 1, 2, 3], [0, 1], [2, 3]]
    assert [type(each.exception()) for each in told] == [
        Indeterminate,
        Indeterminate,
        type(None),
        type(None),
    ]


async def test_append_cancelled_before_it_is_sent_never_was(node: Node) -> None:
    inserts = Inserts(node)
    async with BatchAppender(node, "orders", linger_s=NEVER_S) as appender:
        appends = [
            asyncio.get_running_loop().create_task(appender.append(row(n))) for n in range(3)
        ]
        await turns()
        appends[1].cancel()
        await appender.flush()
        assert appends[1].cancelled()
    assert inserts.ids == [[0, 2]]


async def test_batch_of_which_all_rows_were_cancelled_asks_the_node_nothing(node: Node) -> None:
    inserts = Inserts(node)
    async with BatchAppender(node, "orders", linger_s=NEVER_S) as appender:
        (await appender.submit(row(1))).cancel()
        await appender.flush()
        assert appender.statistics == (0, 0, 0)
    assert inserts.ids == []


@pytest.mark.parametrize("error", [None, Overloaded("full")], ids=["it worked", "it failed"])
async def test_append_cancelled_on_its_way_is_decided_without_it(
    node: Node, error: Exception | None
) -> None:
    inserts = Inserts(node)
    inserts.open.clear()
    inserts.errors.append(error)
    async with BatchAppender(node, "orders", linger_s=0) as appender:
        told = [await appender.submit(row(n)) for n in range(2)]
        await turns()
        told[0].cancel()
        inserts.open.set()
    assert inserts.ids == [[0, 1]]
    assert told[1].exception() is error
    assert await ids_in(node) == ([] if error else [0, 1])


async def test_submit_waits_for_room_and_is_let_in_when_rows_are_told(node: Node) -> None:
    inserts = Inserts(node)
    inserts.open.clear()
    item = "x" * 400
    async with BatchAppender(node, "orders", bytes_max=500, pending_bytes_max=1_000) as appender:
        submits = [
            asyncio.get_running_loop().create_task(appender.submit(row(n, item))) for n in range(5)
        ]
        await turns()
        assert [submit.done() for submit in submits] == [True, True, False, False, False]
        assert 800 < appender.statistics.pending_bytes <= 1_000
        submits[3].cancel()
        inserts.open.set()
        await asyncio.wait(submits)
    assert inserts.ids == [[0], [1], [2], [4]]


async def test_who_waits_for_room_does_not_wait_for_the_linger(node: Node) -> None:
    inserts = Inserts(node)
    async with BatchAppender(node, "orders", linger_s=NEVER_S, pending_bytes_max=1_000) as appender:
        told = await asyncio.gather(*(appender.submit(row(n, "x" * 200)) for n in range(10)))
        assert [each.done() for each in told] == [True] * 8 + [False] * 2
    assert [len(batch) for batch in inserts.ids] == [4, 4, 2]


async def test_row_that_never_has_room_is_refused(node: Node) -> None:
    async with BatchAppender(node, "orders", pending_bytes_max=1_000) as appender:
        with pytest.raises(TooLarge, match="raise pending_bytes_max"):
            await appender.submit(row(1, "x" * 1_000))
        assert appender.statistics.pending_bytes == 0


async def test_what_is_no_row_is_refused_at_once(node: Node) -> None:
    async with BatchAppender(node, "orders") as appender:
        with pytest.raises(InvalidArgument, match="pass a dict"):
            await appender.submit([("id", 1)])  # type: ignore[arg-type]


async def test_row_that_its_caller_changes_later_goes_in_as_it_was(node: Node) -> None:
    async with BatchAppender(node, "orders", linger_s=NEVER_S) as appender:
        given_row = row(1)
        for number in range(3):
            given_row["id"] = number
            await appender.submit(given_row)
    assert await ids_in(node) == [0, 1, 2]


async def test_block_that_raises_still_sends_what_was_submitted(node: Node) -> None:
    told: list[asyncio.Future[AppendedRow]] = []
    with pytest.raises(ZeroDivisionError):
        async with BatchAppender(node, "orders", linger_s=NEVER_S) as appender:
            told += [await appender.submit(row(n)) for n in range(3)]
            raise ZeroDivisionError
    assert [each.result().row_offset for each in told] == [0, 1, 2]


@pytest.mark.parametrize("where", ["in the block", "as it ends"])
async def test_cancelled_block_waits_for_what_is_on_its_way_and_sends_nothing_more(
    node: Node, where: str
) -> None:
    inserts = Inserts(node)
    inserts.open.clear()
    told: list[asyncio.Future[AppendedRow]] = []

    async def block() -> None:
        async with BatchAppender(
            node, "orders", rows_max=2, linger_s=NEVER_S, batches_in_flight_max=1
        ) as appender:
            told.extend([await appender.submit(row(n)) for n in range(5)])
            if where == "in the block":
                await anyio.sleep_forever()

    task = asyncio.get_running_loop().create_task(block())
    await turns()
    task.cancel()
    await turns()
    assert not task.done()
    inserts.open.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert inserts.ids == [[0, 1]]
    assert [each.cancelled() for each in told] == [False, False, True, True, True]
    assert await ids_in(node) == [0, 1]


async def test_appender_is_entered_again_after_a_block_that_was_cancelled(node: Node) -> None:
    appender = BatchAppender(node, "orders", linger_s=NEVER_S)
    with anyio.CancelScope() as scope:
        async with appender:
            told = await appender.submit(row(1))
            scope.cancel()
            await anyio.sleep_forever()
    assert told.cancelled()
    async with appender:
        await appender.submit(row(2))
    assert await ids_in(node) == [2]


async def test_who_waits_for_room_is_refused_when_the_block_ends(node: Node) -> None:
    inserts = Inserts(node)
    inserts.open.clear()
    appender = BatchAppender(node, "orders", pending_bytes_max=500)
    async with appender:
        await appender.submit(row(0, "x" * 400))
        waiting = [
            asyncio.get_running_loop().create_task(appender.submit(row(n, "x" * 400)))
            for n in (1, 2)
        ]
        await turns()
        waiting[-1].add_done_callback(lambda _: inserts.open.set())
    await asyncio.wait(waiting)
    assert [type(each.exception()) for each in waiting] == [OnShutdown, OnShutdown]
    assert inserts.ids == [[0]]


async def test_appender_takes_rows_only_inside_of_its_block(node: Node) -> None:
    appender = BatchAppender(node, "orders")
    for _ in range(2):
        with pytest.raises(OnShutdown, match="async with"):
            await appender.append(row(1))
        async with appender:
            pass


async def test_appender_of_an_unknown_collection_does_not_open(node: Node) -> None:
    with pytest.raises(CollectionNotFound):
        async with BatchAppender(node, "nowhere"):
            pass


@pytest.mark.parametrize(
    "bound",
    [
        {"rows_max": 0},
        {"rows_max": True},
        {"bytes_max": 1.5},
        {"linger_s": -0.1},
        {"linger_s": float("nan")},
        {"linger_s": 1 << 2_000},
        {"linger_s": float("inf")},
        {"linger_s": "1"},
        {"pending_bytes_max": 0},
        {"batches_in_flight_max": 0},
    ],
    ids=str,
)
async def test_bound_that_bounds_nothing_is_refused(node: Node, bound: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(bound))):
        BatchAppender(node, "orders", **bound)


@pytest.mark.parametrize("way", Way)
async def test_appender_cancelled_at_any_wait_tells_every_row_the_truth(
    node: Node, way: Way
) -> None:
    acknowledged: set[int] = set()
    submitted: list[asyncio.Future[AppendedRow]] = []
    numbers = count()

    async def call() -> None:
        async with BatchAppender(
            node, "orders", rows_max=2, linger_s=0, pending_bytes_max=100
        ) as appender:
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(append, appender, next(numbers))
            submitted.append(await appender.submit(row(next(numbers))))

    async def append(appender: BatchAppender, number: int) -> None:
        await appender.append(row(number))
        acknowledged.add(number)

    wait = 0
    while await cancel_at(wait, call, way):
        wait += 1
    found = await ids_in(node)
    assert len(found) == len(set(found))
    assert acknowledged <= set(found)
    assert all(told.done() for told in submitted)
    assert wait > 2


@given(
    steps=st.lists(st.sampled_from([GOOD, GOOD, BAD, CANCELLED, PAUSE, FLUSH]), max_size=40),
    errors=st.lists(st.sampled_from([None, Indeterminate, Overloaded]), max_size=6),
    rows_max=st.integers(1, 6),
    linger_s=st.sampled_from([0, NEVER_S]),
    pending_bytes_max=st.sampled_from([100, 300, 1 << 20]),
    batches_in_flight_max=st.integers(1, 3),
)
def test_every_submitted_row_has_exactly_one_outcome_and_it_is_true(
    steps: list[str], errors: list[type[Exception] | None], **bounds: Any
) -> None:
    async def main() -> None:
        async with sn.open_node(None) as node:
            await node.create_collection("orders", SCHEMA, primary_key="id")
            inserts = Inserts(node)
            inserts.errors += [
                None if error is None else error("a test says so") for error in errors
            ]
            told: dict[int, asyncio.Future[AppendedRow]] = {}
            async with BatchAppender(node, "orders", **bounds) as appender:
                for number, step in enumerate(steps):
                    if step == PAUSE:
                        await turns(3)
                    elif step == FLUSH:
                        await appender.flush()
                        assert all(each.done() for each in told.values())
                    else:
                        told[number] = await appender.submit(
                            row(number) if step != BAD else {"id": number}
                        )
                        assert appender.statistics.pending_bytes <= bounds["pending_bytes_max"]
                        if step == CANCELLED:
                            told[number].cancel()
            found = await ids_in(node)
            assert len(found) == len(set(found)) <= appender.statistics.rows
            for number, each in told.items():
                assert each.done()
                if each.cancelled():
                    assert steps[number] == CANCELLED
                    continue
                error = each.exception()
                assert (number in found) == (error is None)
                assert error is None or isinstance(
                    error, (SchemaMismatch, Indeterminate, Overloaded)
                )
                if error is None:
                    assert found[each.result().row_offset or 0] == number
            if bounds["batches_in_flight_max"] == 1:
                assert found == sorted(found)
            assert inserts.most_under_way <= bounds["batches_in_flight_max"]
            assert appender.statistics.pending_bytes == 0

    anyio.run(main)
