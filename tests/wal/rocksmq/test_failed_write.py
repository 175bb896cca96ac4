"""A queue over a failed write: what was acknowledged stands, what was left open is there or not,
and the queue goes on.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.failing_disk import FailingDisk, Fault
from tests.wal.rocksmq.queues import Clock, open_queue
from wal.errors import GroupNotFound, Indeterminate, TopicNotFound
from wal.rocksmq.queue import RocksMQ

pytestmark = pytest.mark.anyio


@pytest.fixture(params=Fault, ids=lambda fault: fault.name.lower())
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    return FailingDisk(monkeypatch, request.param)


@pytest.fixture
async def mq(tmp_path: Path, disk: FailingDisk) -> AsyncIterator[RocksMQ]:
    store, mq = await open_queue(tmp_path / "node", Clock())
    await mq.create_topic("t")
    await mq.create_consumer_group("t", "g")
    yield mq
    disk.heal()
    await mq.close()
    await store.close()


async def test_a_failed_produce_is_in_the_topic_whole_or_not_at_all_and_ids_stay_dense(
    mq: RocksMQ, disk: FailingDisk
) -> None:
    before = await mq.produce("t", [b"before"])
    disk.fail_at(1)
    outcomes = await asyncio.gather(
        mq.produce("t", [b"a1", b"a2"]),
        mq.produce("t", [b"b1"]),
        mq.create_topic("u"),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [Indeterminate] * 3
    after = await mq.produce("t", [b"after"])
    found = await mq.consume("t", "g", 9)
    assert [message.message_id for message in found] == list(range(before[0], after[-1] + 1))
    assert [message.payload for message in found] in (
        [b"before", b"after"],
        [b"before", b"a1", b"a2", b"b1", b"after"],
    )
    await mq.create_topic("u")


async def test_what_consumers_hold_stays_with_them_and_what_was_acknowledged_stays_so(
    mq: RocksMQ, disk: FailingDisk
) -> None:
    ids = await mq.produce("t", [b"%d" % number for number in range(6)])
    consumer = await mq.register_consumer("t", "g", ack_timeout_s=None)
    await consumer.consume(4)
    await consumer.ack([ids[0], ids[2]])
    disk.fail_at(1)
    with pytest.raises(Indeterminate):
        await consumer.ack([ids[3]])
    first = [message.message_id for message in await mq.consume("t", "g", 9)]
    assert first in ([ids[4], ids[5]], [ids[3], ids[4], ids[5]])
    await consumer.close()
    assert [message.message_id for message in await mq.consume("t", "g", 9)] == [ids[1]]


async def test_who_waits_for_messages_goes_on_waiting_over_a_failed_write(
    mq: RocksMQ, disk: FailingDisk
) -> None:
    waiting = asyncio.ensure_future(mq.consume("t", "g", 1, wait_s=60))
    await asyncio.sleep(0)
    disk.fail_at(1)
    with pytest.raises(Indeterminate):
        await mq.create_topic("u")
    assert not waiting.done()
    await mq.produce("t", [b"at last"])
    assert [message.payload for message in await waiting] == [b"at last"]


async def test_who_waits_for_room_over_a_reopening_produces_to_the_topic_there_is_then(
    mq: RocksMQ, disk: FailingDisk
) -> None:
    room = mq._store._commit.admission
    disk.fail_at(1)
    disk.gate.clear()
    failing = asyncio.ensure_future(mq.produce("t", [b"failed"]))
    await asyncio.sleep(0)
    async with room._turn:  # as if others stood before it
        room.keep(room.bytes_max)
        waiting = asyncio.ensure_future(mq.produce("t", [b"waited"]))
        await asyncio.sleep(0)
        disk.gate.set()
        with pytest.raises(Indeterminate):
            await failing
        await mq._store.reopen()
        room.give_back(room.bytes_max)
    await waiting
    found = [message.payload for message in await mq.consume("t", "g", 9)]
    assert found in ([b"waited"], [b"failed", b"waited"])


async def test_under_many_failures_nothing_acknowledged_is_lost_and_nothing_untried_appears(
    mq: RocksMQ, disk: FailingDisk
) -> None:
    told: dict[int, bytes] = {}
    tried = Counter[bytes]()
    for round_ in range(4):
        disk.fail_at(1 + round_ % 3)
        payloads = [b"%d-%d" % (round_, number) for number in range(12)]
        tried.update(payloads)
        for at in range(0, 12, 3):
            produced = await asyncio.gather(
                *(mq.produce("t", [payload]) for payload in payloads[at : at + 3]),
                return_exceptions=True,
            )
            for payload, outcome in zip(payloads[at:], produced, strict=False):
                if isinstance(outcome, range):
                    told[outcome[0]] = payload
                else:
                    assert isinstance(outcome, Indeterminate)
    disk.heal()
    found = {message.message_id: message.payload for message in await mq.consume("t", "g", 1000)}
    assert told.items() <= found.items()
    assert Counter(found.values()) <= tried
    assert len(told) > len(tried) // 2


async def test_counts_of_a_topic_go_on_over_a_failed_write(mq: RocksMQ, disk: FailingDisk) -> None:
    ids = await mq.produce("t", [b"0", b"1", b"2"])
    await mq.consume("t", "g", 2)
    await mq.ack("t", "g", ids[:1])
    disk.fail_at(1)
    with pytest.raises(Indeterminate):
        await mq.create_topic("u")
    info = (await mq.info())["t"]
    assert (info.produced, info.delivered, info.acked) == (3, 2, 1)


async def test_a_consumer_that_is_closed_while_the_log_comes_back_takes_nothing(
    mq: RocksMQ, disk: FailingDisk
) -> None:
    await mq.produce("t", [b"0"])
    consumer = await mq.register_consumer("t", "g", ack_timeout_s=None)
    disk.fail_at(1)
    with pytest.raises(Indeterminate):
        await mq.create_topic("u")
    asking = asyncio.ensure_future(consumer.consume(1))
    await asyncio.sleep(0)  # it waits for the log
    await consumer.close()
    assert await asking == []
    assert [message.payload for message in await mq.consume("t", "g", 1)] == [b"0"]


async def told_of_the_group(mq: RocksMQ) -> bool:
    topic = (await mq.info()).get("t")
    return topic is not None and "g" in topic.groups


@pytest.mark.parametrize("what", ["topic", "group"])
async def test_nobody_hears_that_something_is_gone_before_the_disk_has_that(
    mq: RocksMQ, disk: FailingDisk, what: str
) -> None:
    disk.fail_at(1)
    disk.gate.clear()
    removing = asyncio.ensure_future(
        mq.destroy_topic("t") if what == "topic" else mq.destroy_consumer_group("t", "g")
    )
    await asyncio.sleep(0)
    calls = [
        told_of_the_group(mq),
        mq.exist_consumer_group("t", "g"),
        mq.consume("t", "g", 1),
        mq.ack("t", "g", []),
    ]
    asking = [
        asyncio.ensure_future(each)
        for each in (*calls, *([mq.produce("t", [b"0"])] if what == "topic" else []))
    ]
    done, _ = await asyncio.wait(asking, timeout=0.02)
    assert not done
    disk.gate.set()
    with pytest.raises(Indeterminate):
        await removing
    told = await asyncio.gather(*asking, return_exceptions=True)
    refused = [
        each for each in told if each is False or isinstance(each, (TopicNotFound, GroupNotFound))
    ]
    assert len(refused) == (0 if await told_of_the_group(mq) else len(told))


async def test_only_who_asks_for_what_is_being_removed_waits_for_that(
    mq: RocksMQ, disk: FailingDisk
) -> None:
    await mq.produce("t", [b"0"])
    await mq.create_consumer_group("t", "other")
    disk.gate.clear()
    removing = asyncio.ensure_future(mq.destroy_consumer_group("t", "g"))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert [message.payload for message in await mq.consume("t", "other", 1)] == [b"0"]
    assert not removing.done()
    disk.gate.set()
    await removing


async def test_a_removal_that_fails_after_its_caller_was_cancelled_is_nobodys_error(
    mq: RocksMQ, disk: FailingDisk
) -> None:
    disk.fail_at(1)
    disk.gate.clear()
    removing = asyncio.ensure_future(mq.destroy_consumer_group("t", "g"))
    await asyncio.sleep(0)
    removing.cancel()
    await asyncio.wait([removing])
    disk.gate.set()
    await mq.info()
    await mq.destroy_topic("t")
    # asyncio tells of an error that nobody heard when it is collected, which fails the test
    gc.collect()
    assert await mq.info() == {}


async def test_many_groups_that_are_removed_together_are_one_write(
    mq: RocksMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"g{number}" for number in range(50)]
    write_meta = mq._store.state.write
    writes = list[int]()
    await asyncio.gather(*[mq.create_consumer_group("t", name) for name in names])

    def counting(*given: Any, **options: Any) -> Any:
        writes.append(1)
        return write_meta(*given, **options)

    monkeypatch.setattr(mq._store.state, "write", counting)
    await asyncio.gather(*[mq.destroy_consumer_group("t", name) for name in names])
    assert len(writes) == 1


async def test_a_group_is_not_called_there_before_the_disk_has_it(
    mq: RocksMQ, disk: FailingDisk
) -> None:
    disk.fail_at(1)
    making = [asyncio.ensure_future(mq.create_consumer_group("t", "new")) for _ in range(2)]
    for each in making:
        with pytest.raises(Indeterminate):
            await each
