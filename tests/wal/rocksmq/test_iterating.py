"""An iterating consumer yields what it holds, and leaves to others what it is too slow for."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.wal.rocksmq.queues import Clock, opened, opened_in_memory
from wal.rocksmq.contract import ITERATED_AT_ONCE, Consumer
from wal.rocksmq.messages import ConsumerMessage
from wal.rocksmq.queue import RocksMQ

pytestmark = pytest.mark.anyio

SOON_S = 20


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["disk", "memory"])
async def mq(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock
) -> AsyncIterator[RocksMQ]:
    in_memory = request.param == "memory"
    queue = opened_in_memory(clock) if in_memory else opened(tmp_path / "node", clock)
    async with queue as mq:
        await mq.create_topic("t")
        await mq.create_consumer_group("t", "g")
        yield mq


async def soon(iteration: AsyncIterator[ConsumerMessage]) -> ConsumerMessage:
    """Return the next message of an iteration."""
    async with asyncio.timeout(SOON_S):
        return await anext(iteration)


async def worked_off(
    iteration: AsyncIterator[ConsumerMessage], consumer: Consumer, count: int
) -> list[bytes]:
    """Take messages of an iteration, acknowledge them, and return their payloads."""
    found = list[bytes]()
    for _ in range(count):
        message = await soon(iteration)
        await consumer.ack([message.message_id])
        found.append(message.payload)
    return found


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, stop)]


async def test_what_is_held_too_long_goes_to_others_and_is_not_yielded(
    mq: RocksMQ, clock: Clock
) -> None:
    await mq.produce("t", numbered(0, 7))
    one = await mq.register_consumer("t", "g", ack_timeout_s=10)
    iteration = aiter(one)
    assert await worked_off(iteration, one, 4) == numbered(0, 4)  # one, two and four at a time
    clock.ms += 10_000
    other = await mq.register_consumer("t", "g", ack_timeout_s=10)
    assert [message.payload for message in await other.consume(9)] == numbered(4, 7)
    await mq.produce("t", [b"7"])
    assert await worked_off(iteration, one, 1) == [b"7"]


async def test_what_is_held_too_long_and_nobody_else_has_comes_again(
    mq: RocksMQ, clock: Clock
) -> None:
    await mq.produce("t", numbered(0, 7))
    one = await mq.register_consumer("t", "g", ack_timeout_s=10)
    iteration = aiter(one)
    await worked_off(iteration, one, 4)
    clock.ms += 9_999
    message = await soon(iteration)
    assert (message.payload, message.delivery_count) == (b"4", 1)  # held for another millisecond
    clock.ms += 1
    message = await soon(iteration)
    assert (message.payload, message.delivery_count) == (b"4", 2)


async def test_what_a_seek_has_moved_past_is_not_yielded(mq: RocksMQ) -> None:
    ids = await mq.produce("t", numbered(0, 7))
    one = await mq.register_consumer("t", "g", ack_timeout_s=None)
    iteration = aiter(one)
    await worked_off(iteration, one, 4)
    await mq.seek("t", "g", ids[6])
    assert await worked_off(iteration, one, 1) == [b"6"]


async def test_what_it_gave_back_or_acknowledged_is_not_yielded(mq: RocksMQ) -> None:
    ids = await mq.produce("t", numbered(0, 7))
    one = await mq.register_consumer("t", "g", ack_timeout_s=None)
    iteration = aiter(one)
    await worked_off(iteration, one, 4)
    await one.give_back([ids[5]])
    await one.ack([ids[4]])
    assert await one.held(ids) == [ids[6]]
    assert await worked_off(iteration, one, 2) == [b"6", b"5"]
    await one.close()
    assert await one.held(ids) == []


async def test_what_one_loop_leaves_the_next_one_begins_with(mq: RocksMQ) -> None:
    await mq.produce("t", numbered(0, 7))
    one = await mq.register_consumer("t", "g", ack_timeout_s=None)
    found = list[bytes]()
    for _ in range(7):
        async with asyncio.timeout(SOON_S):
            async for message in one:
                found.append(message.payload)
                break
    assert found == numbered(0, 7)


async def test_two_tasks_share_one_consumer(mq: RocksMQ) -> None:
    await mq.produce("t", numbered(0, 7))
    one = await mq.register_consumer("t", "g", ack_timeout_s=None)
    iterations = aiter(one), aiter(one)
    found = list[bytes]()
    for at in range(7):
        found += await worked_off(iterations[at % 2], one, 1)
    assert found == numbered(0, 7)


@pytest.mark.parametrize("ack_timeout_s", [1.0, None])
async def test_two_slow_consumers_share_the_work(
    mq: RocksMQ, clock: Clock, ack_timeout_s: float | None
) -> None:
    await mq.produce("t", numbered(0, 12))
    consumers = [
        await mq.register_consumer("t", "g", ack_timeout_s=ack_timeout_s),
        await mq.register_consumer("t", "g", ack_timeout_s=ack_timeout_s),
    ]
    iterations = [aiter(consumer) for consumer in consumers]
    waiting = [await soon(iteration) for iteration in iterations]
    for at in range(2, 12, 2):  # each is at its next message while the other one is at one, too
        assert [message.payload for message in waiting] == numbered(at - 2, at)
        clock.ms += 300 if ack_timeout_s else 1_100
        for consumer, message in zip(consumers, waiting, strict=True):
            await consumer.ack([message.message_id])
        waiting = [await soon(iteration) for iteration in iterations]
        assert [message.delivery_count for message in waiting] == [1, 1]


async def test_it_takes_as_many_as_it_works_off_in_a_tenth_of_its_time(
    mq: RocksMQ, clock: Clock
) -> None:
    await mq.produce("t", numbered(0, 1_000))
    one = await mq.register_consumer("t", "g", ack_timeout_s=10)

    async def held() -> int:
        return (await mq.info())["t"].groups["g"].held

    iteration = aiter(one)
    taken = list[int]()
    while len(taken) < 9:
        message = await soon(iteration)
        await one.ack([message.message_id])
        if not one._fetched:
            taken.append(one._taken)
    assert taken == [1, 2, 4, 8, 16, 32, 64, ITERATED_AT_ONCE, ITERATED_AT_ONCE]
    for _ in range(ITERATED_AT_ONCE):
        message = await soon(iteration)
        clock.ms += 90  # nine seconds for a hundred
        await one.ack([message.message_id])
    await soon(iteration)
    assert await held() == 11  # as many as take a second
