"""Many workers on one reader: order for each key, and nothing acknowledged before it is done."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamingnode as sn
from streamingnode.batching import ParallelConsumer
from streamingnode.node import Node
from streamingnode.read_message import ReadMessage
from tests.cancelled import Way, cancel_at
from tests.parts_of import WAYS, opened_one_way
from tests.streamingnode.batching_cases import (
    NEVER_S,
    SCHEMA,
    Interleaving,
    Work,
    first_id,
    insert_on_different_shards,
    left_over,
    note_acks,
    row,
    turns,
    until,
    until_now,
    write,
)
from wal.errors import InvalidArgument, LogReopening, OnShutdown

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


@pytest.fixture
async def shards(node: Node) -> list[int]:
    await node.create_collection("probe", SCHEMA, primary_key="id", shards=4)
    return await insert_on_different_shards(node, 4)


# --- ParallelConsumer -----------------------------------------------------------------------------


async def test_messages_of_a_reader_are_each_worked_off_once(any_node: Node) -> None:
    for number in range(30):
        await any_node.insert("spread", [row(number)])
    work = Work()
    async with await until_now(any_node) as reader:
        await ParallelConsumer(reader, work, workers=4).run()
    assert sorted(work.ended) == list(range(30))
    assert await left_over(any_node) == []


async def test_messages_of_different_shards_are_worked_off_side_by_side(
    node: Node, shards: list[int]
) -> None:
    work = Work()
    work.hold(*shards)
    async with await until_now(node) as reader:
        running = asyncio.get_running_loop().create_task(
            ParallelConsumer(reader, work, workers=3).run()
        )
        await until(lambda: len(work.begun) >= 3)
        await turns()
        assert work.begun == shards[:3]
        work.let_go(shards[1])
        await until(lambda: len(work.begun) >= 4)
        for each in (shards[3], shards[2], shards[0]):
            work.let_go(each)
        await running
    assert work.ended == [shards[1], shards[3], shards[2], shards[0]]


async def test_message_of_all_shards_comes_after_what_was_before_and_before_what_follows(
    node: Node, shards: list[int]
) -> None:
    async with node.transaction() as txn:
        await txn.insert("spread", [row(n) for n in range(100, 150)])
    await node.insert("spread", [row(n) for n in range(200, 250)])
    await node.insert("spread", [row(shards[0])])
    work = Work()
    work.hold(*shards[:2], 100, 200)
    async with node.read(
        "spread", until=await node.consistent_tick(), types=[sn.MessageType.INSERT]
    ) as reader:
        running = asyncio.get_running_loop().create_task(ParallelConsumer(reader, work).run())
        for held, after in (
            (shards[1], [*shards]),
            (shards[0], [*shards, 100]),
            (100, [*shards, 100, 200]),
        ):
            await until(lambda: set(shards) <= set(work.begun))
            work.let_go(held)
            await turns(20)
            assert work.begun == after
        work.let_go(200)
        await running
    assert work.begun == [*shards, 100, 200, shards[0]]


async def test_key_of_the_caller_decides_what_goes_side_by_side(node: Node) -> None:
    for number in range(6):
        await node.insert("orders", [row(number)])
    work = Work()
    work.hold(0)
    async with await until_now(node, "orders") as reader:
        consumer = ParallelConsumer(reader, work, key=lambda message: first_id(message) % 2)
        running = asyncio.get_running_loop().create_task(consumer.run())
        await until(lambda: len(work.ended) >= 3)
        await turns()
        assert work.begun == [0, 1, 3, 5]
        work.let_go(0)
        await running
    assert work.ended == [1, 3, 5, 0, 2, 4]


async def test_tick_comes_after_every_message_before_it(node: Node, shards: list[int]) -> None:
    work = Work()
    work.hold(shards[0])
    last = await node.consistent_tick()
    async with node.read(
        "spread", until=last, types=[sn.MessageType.INSERT], include_ticks=True
    ) as reader:
        running = asyncio.get_running_loop().create_task(ParallelConsumer(reader, work).run())
        await until(lambda: len(work.ended) >= 3)
        await turns()
        ticks = {
            kind: [each.time_tick for each in work.messages if each.type is kind]
            for kind in sn.MessageType
        }
        earliest = min(ticks[sn.MessageType.INSERT])  # of which the held one has not ended
        assert max(ticks[sn.MessageType.TIME_TICK], default=0) < earliest
        work.let_go(shards[0])
        await running
    assert work.messages[-1].type is sn.MessageType.TIME_TICK
    assert len(work.ended) > 4


async def test_no_more_messages_are_held_than_the_bound_says(node: Node) -> None:
    for number in range(12):
        await node.insert("orders", [row(number)])
    work = Work()
    work.hold(0)
    async with await until_now(node, "orders") as reader:
        consumer = ParallelConsumer(reader, work, key=first_id, in_flight_max=5)
        running = asyncio.get_running_loop().create_task(consumer.run())
        await until(lambda: len(work.ended) >= 4)
        await turns()
        assert work.begun == [0, 1, 2, 3, 4]
        work.let_go(0)
        await running
    assert work.ended == [1, 2, 3, 4, 0, *range(5, 12)]


async def test_nothing_past_unfinished_work_is_acknowledged(node: Node) -> None:
    for number in range(6):
        await node.insert("orders", [row(number)])
    work = Work()
    work.hold(3)
    async with await until_now(node, "orders") as reader:
        acked = note_acks(reader)
        consumer = ParallelConsumer(reader, work, key=first_id, ack_interval_s=0)
        running = asyncio.get_running_loop().create_task(consumer.run())
        await until(lambda: len(work.ended) >= 5 and acked[-1:] == [2])
        await turns()
        assert max(acked) == 2
        work.let_go(3)
        await running
    assert acked[-1] == 5
    assert acked == sorted(acked)


async def test_progress_is_acknowledged_while_the_reader_waits_for_more(node: Node) -> None:
    await node.insert("orders", [row(1)])
    work = Work()
    async with node.read("orders", name="worker", types=[sn.MessageType.INSERT]) as reader:
        acked = note_acks(reader)
        running = asyncio.get_running_loop().create_task(
            ParallelConsumer(reader, work, ack_interval_s=0.001).run()
        )
        await until(lambda: acked == [1])
        await node.insert("orders", [row(2)])
        await until(lambda: acked == [1, 2])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert work.ended == [1, 2]


async def test_progress_within_one_interval_is_acknowledged_once(node: Node) -> None:
    for number in range(6):
        await node.insert("orders", [row(number)])
    async with await until_now(node, "orders") as reader:
        acked = note_acks(reader)
        await ParallelConsumer(reader, Work(), ack_interval_s=NEVER_S).run()
    assert acked == [5]


async def test_reader_without_a_name_is_worked_off_without_progress(node: Node) -> None:
    for number in range(6):
        await node.insert("orders", [row(number)])
    work = Work()
    async with await until_now(node, "orders", None) as reader:
        await ParallelConsumer(reader, work, ack_interval_s=0).run()
    assert work.ended == list(range(6))


async def test_error_in_work_is_raised_when_the_others_have_ended(node: Node) -> None:
    for number in range(8):
        await node.insert("orders", [row(number)])
    work = Work()
    work.hold(1, 2, 3)
    error = ZeroDivisionError("as it is")
    async with await until_now(node, "orders") as reader:
        consumer = ParallelConsumer(reader, work, workers=3, key=first_id)
        running = asyncio.get_running_loop().create_task(consumer.run())
        await until(lambda: len(work.begun) >= 4)
        work.held[2].set_exception(error)
        await turns()
        work.let_go(3)
        await turns()
        assert not running.done()
        work.let_go(1)
        with pytest.raises(ZeroDivisionError) as caught:
            await running
    assert caught.value is error
    assert work.begun == [0, 1, 2, 3]
    assert work.ended == [0, 3, 1]
    assert await left_over(node, "orders") == [2, 3, 4, 5, 6, 7]


async def test_error_in_work_ends_a_consumer_whose_reader_waits(node: Node) -> None:
    work = Work()
    async with node.read("orders", types=[sn.MessageType.INSERT]) as reader:
        work.hold(1)
        await node.insert("orders", [row(1)])
        running = asyncio.get_running_loop().create_task(ParallelConsumer(reader, work).run())
        await until(lambda: work.begun)
        await turns()
        work.held[1].set_exception(ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            await running


async def test_work_that_is_cancelled_by_itself_fails_the_consumer(node: Node) -> None:
    for number in range(3):
        await node.insert("orders", [row(number)])
    work = Work()
    work.hold(1)
    work.held[1].cancel()
    async with await until_now(node, "orders") as reader:
        with pytest.raises(asyncio.CancelledError):
            await ParallelConsumer(reader, work).run()
    assert work.ended == [0]
    assert await left_over(node, "orders") == [1, 2]


async def test_error_in_key_fails_the_consumer_and_acknowledges_what_was_before(node: Node) -> None:
    for number in range(4):
        await node.insert("orders", [row(number)])
    work = Work()
    async with await until_now(node, "orders") as reader:
        with pytest.raises(ZeroDivisionError):
            await ParallelConsumer(
                reader, work, key=lambda message: 1 // (2 - first_id(message))
            ).run()
    assert set(work.ended) <= {0, 1}
    assert await left_over(node, "orders") == [each for each in range(4) if each not in work.ended]


async def test_error_of_the_reader_is_raised_when_all_work_has_ended(node: Node) -> None:
    work = Work()
    work.hold(0)
    await node.insert("orders", [row(0)])
    async with node.read("orders", types=[sn.MessageType.INSERT]) as reader:
        running = asyncio.get_running_loop().create_task(ParallelConsumer(reader, work).run())
        await until(lambda: work.begun)
        await reader.close()
        await turns()
        assert not running.done()
        work.let_go(0)
        with pytest.raises(OnShutdown):
            await running
    assert work.ended == [0]


async def test_acknowledgement_that_fails_fails_the_consumer(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.insert("orders", [row(0)])
    error = LogReopening("not back in time")

    async def refuse(_message: ReadMessage) -> None:
        raise error

    for interval_s in (0, NEVER_S):
        async with await until_now(node, "orders") as reader:
            monkeypatch.setattr(reader, "ack", refuse)
            with pytest.raises(LogReopening) as caught:
                await ParallelConsumer(reader, Work(), ack_interval_s=interval_s).run()
            assert caught.value is error


async def test_cancelled_consumer_cancels_its_work_and_keeps_its_place(node: Node) -> None:
    for number in range(6):
        await node.insert("orders", [row(number)])
    work = Work()
    work.hold(2)
    async with await until_now(node, "orders") as reader:
        consumer = ParallelConsumer(reader, work, key=first_id, ack_interval_s=NEVER_S)
        running = asyncio.get_running_loop().create_task(consumer.run())
        await until(lambda: len(work.ended) >= 5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert work.held[2].cancelled()
    assert await left_over(node, "orders") == [2, 3, 4, 5]


@pytest.mark.parametrize("way", Way)
async def test_consumer_cancelled_at_any_wait_keeps_the_place_where_work_ended(
    node: Node, way: Way
) -> None:
    for number in range(3):
        await node.insert("orders", [row(number)])

    async def call(name: str, work: Work) -> None:
        async with await until_now(node, "orders", name) as reader:
            await ParallelConsumer(reader, work, key=first_id, ack_interval_s=0).run()

    wait = 0
    came_that_far = True
    while came_that_far:
        name = f"worker{wait}"
        work = Work()
        came_that_far = await cancel_at(wait, partial(call, name, work), way)
        left = await left_over(node, "orders", name)
        assert left == list(range(3 - len(left), 3))
        assert set(range(3)) - set(left) <= set(work.ended)
        assert left == [] or came_that_far
        wait += 1
    assert wait > 3


async def test_consumer_runs_only_once(node: Node) -> None:
    async with await until_now(node, "orders") as reader:
        consumer = ParallelConsumer(reader, Work())
        await consumer.run()
        with pytest.raises(InvalidArgument, match="runs once"):
            await consumer.run()


@pytest.mark.parametrize(
    "bound", [{"workers": 0}, {"in_flight_max": 0}, {"ack_interval_s": -1}], ids=str
)
async def test_consumer_of_nothing_is_refused(node: Node, bound: dict[str, Any]) -> None:
    async with await until_now(node, "orders") as reader:
        with pytest.raises(InvalidArgument, match=next(iter(bound))):
            ParallelConsumer(reader, Work(), **bound)


@given(
    writes=st.lists(
        st.one_of(st.integers(0, 9), st.sampled_from(["many", "txn", "delete"])),
        min_size=1,
        max_size=14,
    ),
    ends=st.lists(st.integers(0, 99), min_size=1, max_size=8),
    by_key=st.booleans(),
    fails=st.one_of(st.none(), st.integers(1, 14)),
    workers=st.integers(1, 4),
    in_flight_max=st.sampled_from([1, 3, 100]),
    ack_interval_s=st.sampled_from([0, NEVER_S]),
)
def test_any_interleaving_keeps_the_order_of_each_key_and_acknowledges_only_finished_work(
    writes: list[int | str],
    ends: list[int],
    *,
    by_key: bool,
    fails: int | None,
    workers: int,
    **bounds: Any,
) -> None:
    def keys_of(message: ReadMessage) -> set[object]:
        return {first_id(message) % 3} if by_key else set(message.vchannels)

    async def main() -> None:
        async with sn.open_node(None) as node:
            await node.create_collection("spread", SCHEMA, primary_key="id", shards=3)
            ticks = [await write(node, each) for each in writes]
            work = Interleaving(keys_of, fails)
            async with await until_now(node) as reader:
                reader.ack = partial(work.ack, reader.ack, ticks)  # type: ignore[method-assign]
                key = (lambda message: first_id(message) % 3) if by_key else None
                consumer = ParallelConsumer(reader, work, workers=workers, key=key, **bounds)
                running = asyncio.get_running_loop().create_task(consumer.run())
                for turn in range(10_000):
                    await turns(3)
                    assert len(work.under_way) <= workers
                    if running.done():
                        break
                    if work.under_way:
                        tick = sorted(work.under_way)[ends[turn % len(ends)] % len(work.under_way)]
                        if not work.under_way[tick][0].done():
                            work.under_way[tick][0].set_result(None)
                with suppress(ZeroDivisionError):
                    await running
            assert len(work.begun) == len({each.time_tick for each in work.begun})
            if fails is None or fails > len(writes):
                assert work.done == set(ticks)
            unfinished = next((tick for tick in ticks if tick not in work.done), None)
            async with await until_now(node) as reader:
                assert [each.time_tick async for each in reader][:1] == (
                    [] if unfinished is None else [unfinished]
                )

    anyio.run(main)
