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
from wal.entry_log import Batch
from wal.errors import AlreadyExists, GroupNotFound, Indeterminate, TopicNotFound
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
    assert first == [ids[4], ids[5]]
    await consumer.close()
    left = [message.message_id for message in await mq.consume("t", "g", 9)]
    assert left in ([ids[1]], [ids[1], ids[3]])


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


async def test_calls_that_come_while_a_write_fails_are_made_in_the_topics_there_are_then(
    mq: RocksMQ, disk: FailingDisk
) -> None:
    disk.fail_at(1)
    disk.gate.clear()
    failing = asyncio.ensure_future(mq.produce("t", [b"failed"]))
    await asyncio.sleep(0)
    later = [asyncio.ensure_future(mq.produce("t", [b"%d" % number])) for number in range(3)]
    await asyncio.sleep(0)
    disk.gate.set()
    with pytest.raises(Indeterminate):
        await failing
    ids = [(await each)[0] for each in later]
    found = {message.message_id: message.payload for message in await mq.consume("t", "g", 9)}
    assert [found[each] for each in ids] == [b"0", b"1", b"2"]
    assert [each for each in found.values() if each not in (b"0", b"1", b"2")] in ([], [b"failed"])


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


async def has_the_group(mq: RocksMQ) -> bool:
    topic = (await mq.info()).get("t")
    return topic is not None and "g" in topic.groups


@pytest.mark.parametrize("what", ["topic", "group"])
async def test_nothing_is_gone_before_the_disk_has_that(
    mq: RocksMQ, disk: FailingDisk, what: str
) -> None:
    disk.fail_at(1)
    disk.gate.clear()
    removing = asyncio.ensure_future(
        mq.destroy_topic("t") if what == "topic" else mq.destroy_consumer_group("t", "g")
    )
    for _ in range(3):
        await asyncio.sleep(0)
    assert await has_the_group(mq)
    assert await mq.exist_consumer_group("t", "g")
    assert await mq.consume("t", "g", 1) == []
    changes = [
        asyncio.ensure_future(each)
        for each in (
            mq.ack("t", "g", []),
            *([mq.produce("t", [b"0"])] if what == "topic" else []),
        )
    ]
    done, _ = await asyncio.wait(changes, timeout=0.02)
    assert not done
    disk.gate.set()
    with pytest.raises(Indeterminate):
        await removing
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    refused = [each for each in outcomes if isinstance(each, (TopicNotFound, GroupNotFound))]
    assert len(refused) == (0 if await has_the_group(mq) else len(outcomes))


async def test_what_was_refused_beside_a_removal_that_failed_is_looked_at_again(
    mq: RocksMQ, disk: FailingDisk
) -> None:
    disk.fail_at(1)
    removed, acked = await asyncio.gather(
        mq.destroy_consumer_group("t", "g"), mq.ack("t", "g", []), return_exceptions=True
    )
    assert isinstance(removed, Indeterminate)
    if await has_the_group(mq):
        assert acked is None
    else:
        assert isinstance(acked, GroupNotFound)


async def test_a_removal_that_fails_after_its_caller_was_cancelled_is_nobodys_error(
    mq: RocksMQ, disk: FailingDisk
) -> None:
    disk.fail_at(1)
    disk.gate.clear()
    removing = asyncio.ensure_future(mq.destroy_consumer_group("t", "g"))
    for _ in range(3):  # it is on its way to the disk
        await asyncio.sleep(0)
    removing.cancel()
    await asyncio.wait([removing])
    disk.gate.set()
    await mq.create_topic("behind it")
    assert disk.reached
    await mq.destroy_topic("t")
    await mq.destroy_topic("behind it")
    # asyncio tells of an error that nobody heard when it is collected, which fails the test
    gc.collect()
    assert await mq.info() == {}


async def test_many_groups_that_are_removed_together_are_one_write(
    mq: RocksMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"g{number}" for number in range(50)]
    write = mq._state.write
    writes = list[int]()
    await asyncio.gather(*[mq.create_consumer_group("t", name) for name in names])

    def counting(batch: Batch) -> Any:
        writes.append(1)
        return write(batch)

    monkeypatch.setattr(mq._state, "write", counting)
    await asyncio.gather(*[mq.destroy_consumer_group("t", name) for name in names])
    assert len(writes) == 1


async def test_a_group_is_not_said_to_be_there_before_the_disk_has_it(
    mq: RocksMQ, disk: FailingDisk
) -> None:
    disk.fail_at(1)
    making = [mq.create_consumer_group("t", "new") for _ in range(2)]
    first, second = await asyncio.gather(*making, return_exceptions=True)
    assert isinstance(first, Indeterminate)
    assert second is None or isinstance(second, AlreadyExists)
    assert await mq.exist_consumer_group("t", "new")
