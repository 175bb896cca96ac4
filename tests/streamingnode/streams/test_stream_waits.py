"""Streams that run out of time, are cancelled, or acknowledge slowly: what is there is given, and
nothing is lost.
"""

import asyncio
import math
from pathlib import Path

import pytest

from streamingnode.errors import DeadlineExceeded
from streamingnode.streams.messages import MsgPosition
from streamingnode.streams.stream import MsgStream
from streamingnode.streams.subscription import Subscription
from tests.cancelled import Way, cancel_at
from tests.failing_disk import FailingDisk
from tests.streamingnode.batching_cases import until
from tests.streamingnode.streams.messages_of import ends, inserts, tick_of
from tests.streamingnode.streams.streams_on import send, streams_in
from wal.errors import InvalidArgument
from wal.rocksmq.contract import Consumer
from wal.rocksmq.messages import ConsumerMessage
from wal.rocksmq.queue import RocksMQ

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("everywhere")]


async def drained(stream: MsgStream) -> list[list[int]]:
    """Return the ticks of all packs that are there."""
    found: list[list[int]] = []
    while True:
        try:
            found.append(ends((await stream.consume(timeout=0)).messages))
        except DeadlineExceeded:
            return found


async def test_without_any_time_what_is_there_is_given(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, *[[tick_of(number), *inserts(number + 1)] for number in range(1, 5)])
        async with streams.consumer("a") as consumer, streams.tick_consumer("a", of="t") as ticked:
            assert await drained(consumer) == [[1, 2], [2, 3], [3, 4], [4, 5]]
            assert await drained(ticked) == [[], [2], [3], [4]]
            await send(producer, inserts(6))
            assert await drained(consumer) == [[6]]


async def test_a_pack_that_is_there_waits_for_no_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, inserts(1), inserts(2), inserts(3), inserts(4))
        async with streams.consumer("a") as consumer:
            assert ends((await consumer.consume(timeout=20)).messages) == [1]
            disk.gate.clear()
            for number in (2, 3, 4):
                consumer._acked_s = 0.0  # it is time to acknowledge, and the disk takes nothing
                assert ends((await consumer.consume(timeout=0)).messages) == [number]
            with pytest.raises(DeadlineExceeded):
                await consumer.consume(timeout=0)
            disk.gate.set()
            await until(
                lambda: (
                    len(consumer._subscriptions["a"].acked) == 4
                    or (consumer._acknowledge() and False)
                )
            )
        assert (await streams.queue.info())["a"].groups["g"].lag == 0


@pytest.mark.parametrize("way", Way, ids=lambda way: way.name.lower())
async def test_a_seek_that_is_cancelled_is_undone_or_has_to_be_repeated(
    tmp_path: Path, way: Way
) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, inserts(1), inserts(2), inserts(3))
        async with streams.consumer("a") as consumer:
            first, _, third = [await consumer.consume(timeout=20) for _ in range(3)]
            has_to_be_repeated = False
            waiting = asyncio.ensure_future(consumer.consume())
            waiting.cancel()
            for wait in range(40):
                await consumer.seek(third.end_positions)
                waiting = asyncio.ensure_future(consumer.consume())
                await until(lambda: consumer._subscriptions["a"].fetch)
                if not await cancel_at(wait, lambda: consumer.seek(first.end_positions), way):
                    break
                # it goes on where it was, or has moved, whole
                if consumer._subscriptions["a"].placed:
                    waiting.cancel()
                    await asyncio.wait([waiting])
                    assert await drained(consumer) in ([], [[2], [3]], [[3]])
                else:
                    has_to_be_repeated = True
                    with pytest.raises(InvalidArgument, match=r"call seek\(\) first"):
                        await waiting
            assert has_to_be_repeated
            assert ends((await waiting).messages) == [2]
            assert await drained(consumer) == [[3]]


async def with_five_of_six_consumed(consumer: MsgStream) -> list[MsgPosition]:
    """Consume five of six batches, acknowledge three, and return the end of the first."""
    first = await consumer.consume(timeout=60)
    consumer._acked_s = math.inf  # it is time to acknowledge only when the test says so
    await consumer.consume(timeout=60)
    await consumer.consume(timeout=60)
    await consumer._acknowledged()  # of one that the first call may have begun
    consumer._acked_s = 0.0
    await consumer.consume(timeout=60)
    await until(lambda: len(consumer._subscriptions["a"].acked) == 3)
    consumer._acked_s = math.inf
    await consumer.consume(timeout=60)
    return list(first.end_positions)


async def test_a_consumer_that_opens_during_a_cancelled_seek_begins_where_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    seek = RocksMQ.seek
    asked: list[int] = []

    async def noted(queue: RocksMQ, topic: str, group: str, message_id: int) -> None:
        asked.append(message_id)
        await seek(queue, topic, group, message_id)

    monkeypatch.setattr(RocksMQ, "seek", noted)
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, *[inserts(number) for number in range(1, 7)])

        async def consumed() -> list[list[int]]:
            async with streams.consumer("a") as consumer:
                return await drained(consumer)

        async with streams.consumer("a") as consumer:
            place = await with_five_of_six_consumed(consumer)
            disk.gate.clear()
            seeking = asyncio.ensure_future(consumer.seek(place))
            await until(lambda: asked)
            seeking.cancel()
            await asyncio.wait([seeking])
        opening = asyncio.ensure_future(consumed())
        # a consumer that did not wait for the seek would get the messages of before it meanwhile
        await asyncio.wait([opening], timeout=0.3)
        disk.gate.set()
        assert await opening == [[2], [3], [4], [5], [6]]


async def test_a_seek_that_was_cancelled_before_the_queue_got_it_leaves_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, *[inserts(number) for number in range(1, 7)])
        asked: list[int] = []

        async def never(_topic: str, _group: str, message_id: int) -> None:
            asked.append(message_id)
            await asyncio.get_running_loop().create_future()

        async with streams.consumer("a") as consumer:
            place = await with_five_of_six_consumed(consumer)
            monkeypatch.setattr(streams.queue, "seek", never)
            seeking = asyncio.ensure_future(consumer.seek(place))
            await until(lambda: asked)
            seeking.cancel()
            await asyncio.wait([seeking])
        async with streams.consumer("a") as consumer:
            assert await drained(consumer) == [[4], [5], [6]]


async def test_what_a_read_from_before_an_acknowledgement_brings_again_is_passed_over() -> None:
    """Over a new connection it is asked anew, before the node hears of the acknowledgement."""
    answers: list[asyncio.Future[list[ConsumerMessage]]] = []

    async def deliver(count: int, *, wait_s: float) -> list[ConsumerMessage]:
        answers.append(asyncio.get_running_loop().create_future())
        return await answers[-1]

    async def nothing(ids: object) -> None:
        pass

    one, other = (ConsumerMessage(number, b"", {}) for number in (1, 2))
    subscription = Subscription("a", Consumer(deliver, nothing, nothing), placed=True)
    subscription.take([one])
    subscription.fetched.clear()
    subscription.handed_on = [1]
    reading = subscription.fetching()
    await asyncio.sleep(0)
    await subscription.acknowledge()
    answers[0].set_result([one, other])
    await reading
    await subscription.refill()
    assert list(subscription.fetched) == [other]
