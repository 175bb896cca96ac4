"""Topics and groups on a real store: what is produced is delivered, acknowledged, and found again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.wal.rocksmq.queues import Clock, opened
from wal.rocksmq.messages import ProducerMessage
from wal.rocksmq.queue import RocksMQ

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def mq(tmp_path: Path, clock: Clock) -> AsyncIterator[RocksMQ]:
    async with opened(tmp_path / "node", clock) as mq:
        await mq.create_topic("t")
        await mq.create_consumer_group("t", "g")
        yield mq


async def test_a_message_that_was_produced_is_consumed_with_its_properties(mq: RocksMQ) -> None:
    [produced] = await mq.produce("t", [ProducerMessage(b"hello", {"kind": "greeting"})])
    [message] = await mq.consume("t", "g", 10)
    assert (message.message_id, message.payload, message.properties) == (produced, b"hello", {"kind": "greeting"})
    assert await mq.consume("t", "g", 10) == []


async def test_ids_of_a_topic_follow_each_other_whoever_produces(mq: RocksMQ) -> None:
    ids = await asyncio.gather(*(mq.produce("t", [b"%d" % number] * (1 + number % 3)) for number in range(50)))
    flat = [each for one in ids for each in one]
    assert flat == list(range(flat[0], flat[0] + len(flat)))
    found = await mq.consume("t", "g", 1000)
    assert [message.message_id for message in found] == flat
    assert [message.payload for message in found] == [b"%d" % n for n in range(50) for _ in range(1 + n % 3)]


async def test_what_was_acknowledged_stays_so_and_the_rest_comes_again_after_reopening(tmp_path: Path) -> None:
    async with opened(tmp_path / "node") as mq:
        await mq.create_topic("t")
        await mq.create_consumer_group("t", "g")
        ids = await mq.produce("t", [b"0", b"1", b"2", b"3", b"4"])
        await mq.consume("t", "g", 4)
        await mq.ack("t", "g", [ids[0], ids[2]])
        before = await mq.info()
    async with opened(tmp_path / "node") as mq:
        assert [message.payload for message in await mq.consume("t", "g", 9)] == [b"1", b"3", b"4"]
        [after] = (await mq.info()).values()
        assert (after.begin_id, after.end_id, after.bytes) == (before["t"].begin_id, ids[-1], 5)
        assert (after.groups["g"].current_id, after.groups["g"].lag, after.groups["g"].held) == (ids[1], 3, 3)
        assert list(await mq.produce("t", [b"5"])) == [ids[-1] + 1]
