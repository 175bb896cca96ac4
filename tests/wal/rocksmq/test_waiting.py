"""Consumers that wait: who is told of a message, and what happens when its time is over, or it is
cancelled or closed.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.wal.rocksmq.queues import Clock, opened, opened_in_memory
from wal.errors import OnShutdown
from wal.rocksmq.group import HELD_MAX, Group
from wal.rocksmq.messages import EntryCache
from wal.rocksmq.queue import RocksMQ
from wal.rocksmq.reading import TopicReader
from wal.rocksmq.topic import Topic

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["disk", "memory"])
async def mq(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RocksMQ]:
    in_memory = request.param == "memory"
    queue = opened_in_memory(Clock()) if in_memory else opened(tmp_path / "node", Clock())
    async with queue as mq:
        await mq.create_topic("t")
        await mq.create_consumer_group("t", "g")
        yield mq


async def test_what_a_closed_consumer_held_comes_to_one_who_waits(mq: RocksMQ) -> None:
    ids = await mq.produce("t", [b"0", b"1"])
    consumer = await mq.register_consumer("t", "g", ack_timeout_s=None)
    await consumer.consume(2)
    await consumer.ack([ids[0]])
    waiting = asyncio.ensure_future(mq.consume("t", "g", 9, wait_s=60))
    await asyncio.sleep(0)
    await consumer.close()
    assert [message.message_id for message in await waiting] == [ids[1]]
    with pytest.raises(OnShutdown, match="consumer"):
        await consumer.consume(1)


@pytest.mark.parametrize("moved_by", ["ack", "seek"])
async def test_what_was_done_with_while_another_read_it_does_not_come_to_that_one(
    tmp_path: Path, moved_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    may_read = asyncio.Event()
    read = TopicReader.read
    reading = 0

    async def held(reader: TopicReader, topic: Topic, first_id: int) -> bool:
        nonlocal reading
        reading += 1
        await may_read.wait()
        return await read(reader, topic, first_id)

    monkeypatch.setattr(TopicReader, "read", held)
    async with opened(tmp_path / "node", clock) as mq:
        await mq.create_topic("t")
        await mq.create_consumer_group("t", "g")
        ids = await mq.produce("t", [b"0", b"1", b"2"])
        first = await mq.register_consumer("t", "g", ack_timeout_s=1)
        second = await mq.register_consumer("t", "g", ack_timeout_s=60)
        assert len(await first.consume(3)) == 3
        clock.ms += 2_000
        monkeypatch.setattr(mq._reader, "_cache", EntryCache())
        late = asyncio.ensure_future(second.consume(3))
        while not reading:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if moved_by == "ack":
            await first.ack([ids[0], ids[1]])
        else:
            await mq.seek("t", "g", ids[2])
        may_read.set()
        assert [message.message_id for message in await late] == [ids[2]]


async def test_closing_a_consumer_ends_its_wait_and_what_is_produced_then_comes_to_others(
    mq: RocksMQ,
) -> None:
    consumer = await mq.register_consumer("t", "g", ack_timeout_s=None)
    waiting = asyncio.ensure_future(consumer.consume(9, wait_s=60))
    await asyncio.sleep(0)
    await consumer.close()
    ids = await mq.produce("t", [b"0"])
    assert await waiting == []
    assert [message.message_id for message in await mq.consume("t", "g", 9)] == list(ids)


async def test_who_waits_because_no_more_may_be_held_goes_on_at_an_acknowledgement(
    mq: RocksMQ,
) -> None:
    ids = await mq.produce("t", [b""] * (HELD_MAX + 1))
    holder = await mq.register_consumer("t", "g", ack_timeout_s=None)
    assert len(await holder.consume(HELD_MAX)) == HELD_MAX
    waiting = asyncio.ensure_future(mq.consume("t", "g", 9, wait_s=60))
    await asyncio.sleep(0)
    await holder.ack([ids[0]])
    async with asyncio.timeout(60):
        assert [message.message_id for message in await waiting] == [ids[-1]]


async def test_a_waiting_consumer_gets_what_is_produced_then(mq: RocksMQ) -> None:
    waiting = [asyncio.ensure_future(mq.consume("t", "g", 1, wait_s=60)) for _ in range(3)]
    await asyncio.sleep(0)
    await mq.produce("t", [b"0", b"1", b"2"])
    found = await asyncio.gather(*waiting)
    assert sorted(message.payload for one in found for message in one) == [b"0", b"1", b"2"]


async def test_a_consumer_that_waits_gives_up_after_its_time(mq: RocksMQ) -> None:
    assert await mq.consume("t", "g", 1, wait_s=0.01) == []
    assert not mq._signals["t", "g"]._waiting  # nothing is left of it


async def test_iterating_ends_when_the_consumer_is_closed_and_the_rest_comes_to_others(
    mq: RocksMQ,
) -> None:
    await mq.produce("t", [b"0", b"1", b"2"])
    consumer = await mq.register_consumer("t", "g")
    got = list[bytes]()
    async for message in consumer:
        got.append(message.payload)
        await consumer.close()
    assert got == [b"0"]
    assert [message.payload for message in await mq.consume("t", "g", 9)] == [b"0", b"1", b"2"]


async def test_who_waits_gets_what_another_one_who_waited_held_for_too_long(tmp_path: Path) -> None:
    async with opened(tmp_path / "other", lambda: int(monotonic() * 1000)) as mq:
        await mq.create_topic("t")
        await mq.create_consumer_group("t", "g")
        holder = await mq.register_consumer("t", "g", ack_timeout_s=0.02)
        waiting = [asyncio.ensure_future(holder.consume(1, wait_s=60))]
        await asyncio.sleep(0)
        waiting += [asyncio.ensure_future(mq.consume("t", "g", 1, wait_s=60)) for _ in range(2)]
        await asyncio.sleep(0)
        await mq.produce("t", [b"0"])
        async with asyncio.timeout(60):
            assert [message.payload for message in await waiting[0]] == [b"0"]
            done, left = await asyncio.wait(waiting[1:], return_when=asyncio.FIRST_COMPLETED)
        assert [message.payload for each in done for message in await each] == [b"0"]
        for each in left:
            each.cancel()


async def test_who_is_cancelled_when_it_is_its_turn_leaves_it_to_the_next(mq: RocksMQ) -> None:
    [held] = await mq.produce("t", [b"0"])
    holder = await mq.register_consumer("t", "g")
    await holder.consume(1)
    waiting = [asyncio.ensure_future(mq.consume("t", "g", 1, wait_s=60)) for _ in range(4)]
    await asyncio.sleep(0)
    await holder.give_back([held])  # the first one is told, and has not run yet
    waiting[0].cancel()
    waiting[2].cancel()
    async with asyncio.timeout(60):
        assert [message.payload for message in await waiting[1]] == [b"0"]
        await mq.produce("t", [b"1"])
        assert [message.payload for message in await waiting[3]] == [b"1"]


async def test_a_message_wakes_who_waits_longest_and_nobody_else(
    mq: RocksMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Group.take
    asked = list[int]()

    def counting(group: Group, *given: Any, **options: Any) -> list[int]:
        asked.append(1)
        return take(group, *given, **options)

    waiting = [asyncio.ensure_future(mq.consume("t", "g", 2, wait_s=60)) for _ in range(100)]
    await asyncio.sleep(0)
    # The first to take something has all know when its time is over; from then on one is woken for
    # two messages.
    await mq.produce("t", [b"0"])
    assert [message.payload for message in await waiting[0]] == [b"0"]
    for _ in range(3):
        await asyncio.sleep(0)
    monkeypatch.setattr(Group, "take", counting)
    await mq.produce("t", [b"%d" % number for number in range(1, 8)])
    await asyncio.wait(waiting[1:5])
    assert [[message.payload for message in each.result()] for each in waiting[1:5]] == [
        [b"1", b"2"],
        [b"3", b"4"],
        [b"5", b"6"],
        [b"7"],
    ]
    assert len(asked) < 8
    assert not any(each.done() for each in waiting[5:])
    for each in waiting:
        each.cancel()


async def test_who_waits_with_a_short_time_for_acknowledgements_does_not_ask_again_and_again(
    mq: RocksMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Group.take
    asked = list[int]()

    def counting(group: Group, *given: Any, **options: Any) -> list[int]:
        asked.append(1)
        return take(group, *given, **options)

    monkeypatch.setattr(Group, "take", counting)
    consumer = await mq.register_consumer("t", "g", ack_timeout_s=0.001)
    assert await consumer.consume(1, wait_s=0.1) == []
    assert len(asked) <= 2


async def test_closing_a_consumer_that_waits_has_no_other_one_look_again(
    mq: RocksMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Group.take
    asked = list[int]()

    def counting(group: Group, *given: Any, **options: Any) -> list[int]:
        asked.append(1)
        return take(group, *given, **options)

    consumers = [await mq.register_consumer("t", "g", ack_timeout_s=None) for _ in range(100)]
    waiting = [asyncio.ensure_future(each.consume(1, wait_s=60)) for each in consumers]
    await asyncio.sleep(0)
    monkeypatch.setattr(Group, "take", counting)
    for each, consuming in zip(consumers, waiting, strict=True):
        await each.close()
        assert await consuming == []
    assert len(asked) <= 200  # of each that closes, the next one or two
