"""How often a message was delivered, also over closing, crashes and failed writes."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.copying import copy_at_rest
from tests.failing_disk import FailingDisk
from tests.wal.rocksmq.queues import Clock, open_queue, opened
from wal.entry_log import Batch
from wal.errors import Indeterminate
from wal.rocksmq.group import Deliveries, Group, all_below
from wal.rocksmq.messages import ConsumerMessage
from wal.rocksmq.queue import RocksMQ
from wal.rocksmq.topic import LOG_ID_FIRST, GroupRecord, Topic, TopicChange, TopicRecord

pytestmark = pytest.mark.anyio

END = 30


def counts(messages: list[ConsumerMessage]) -> dict[bytes, int]:
    return {message.payload: message.delivery_count for message in messages}


async def with_group(mq: RocksMQ, *payloads: bytes) -> list[int]:
    """Make a topic `t` with a group `g` and these messages, and return their ids."""
    await mq.create_topic("t")
    await mq.create_consumer_group("t", "g")
    return list(await mq.produce("t", payloads))


@given(st.lists(st.sets(st.integers(0, END), min_size=1), max_size=12), st.integers(0, END))
def test_runs_have_what_a_dict_would_have(deliveries: list[set[int]], floor: int) -> None:
    runs = Deliveries()
    model = dict.fromkeys(range(END + 2), 0)
    for ids in deliveries:
        runs.add(sorted(ids))
        model |= {each: model[each] + 1 for each in ids}
    for low in range(END + 1):
        expected = [model[each] for each in range(low, END + 2)]
        assert runs.of(range(low, END + 2)) == ([] if set(expected) == {1} else expected)
    runs.forget_below(floor)
    model |= dict.fromkeys(range(floor), 0)
    assert runs.of(range(END + 2)) == [model[each] for each in range(END + 2)]
    stored = runs.runs_from(0)
    assert Deliveries(stored).runs_from(0) == stored
    found = {each: count for start, stop, count in stored for each in range(start, stop)}
    assert found == {each: count for each, count in model.items() if count}
    assert not [one for one, after in pairwise(stored) if one[1:] == after[::2]]
    assert [each for start, stop, _ in runs.runs_from(9) for each in range(start, stop)] == [
        each for each in found if each >= 9
    ]


def recorded(topic: Topic, ids: Sequence[int]) -> GroupRecord:
    """Acknowledge messages, and return the record of the group."""
    change = TopicChange(topic)
    change.acknowledge("g", ids)
    batch = Batch()
    change.stage(batch, page_bytes=1, now_ms=1)
    change.land()
    record = batch.records["mq/group/t/g"]
    assert record is not None
    return msgspec.msgpack.decode(record, type=GroupRecord)


def test_what_was_acknowledged_is_no_longer_in_the_record() -> None:
    topic = Topic("t", TopicRecord(LOG_ID_FIRST, 1, 9))
    topic.groups["g"] = group = Group(all_below(1))
    group.count(group.take((1, 9.0), 9, end_id=9))
    assert recorded(topic, [3]) == GroupRecord(1, [(3, 4)], [(1, 10, 1)])
    assert recorded(topic, [1, 2]) == GroupRecord(4, [], [(4, 10, 1)])
    assert recorded(topic, range(4, 10)) == GroupRecord(10, [], [])


async def test_each_delivery_to_a_group_counts(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as mq:
        ids = await with_group(mq, b"0", b"1", b"2")
        consumer = await mq.register_consumer("t", "g", ack_timeout_s=10)
        assert counts(await consumer.consume(2)) == {b"0": 1, b"1": 1}
        await consumer.ack(ids[:1])
        await consumer.give_back(ids[1:2])
        assert counts(await consumer.consume(9)) == {b"1": 2, b"2": 1}
        clock.ms += 10_001
        assert counts(await consumer.consume(9)) == {b"1": 3, b"2": 2}
        await consumer.close()
        assert counts(await mq.consume("t", "g", 9)) == {b"1": 4, b"2": 3}
        await mq.create_consumer_group("t", "other")
        assert counts(await mq.consume("t", "other", 9)) == {b"0": 1, b"1": 1, b"2": 1}
        message = await mq.get_message("t", ids[1])
        assert message is not None
        assert message.delivery_count == 1


async def test_a_seek_begins_to_count_anew(tmp_path: Path) -> None:
    async with opened(tmp_path) as mq:
        ids = await with_group(mq, b"0", b"1")
        await mq.consume("t", "g", 2)
        await mq.seek("t", "g", ids[0])
        assert counts(await mq.consume("t", "g", 2)) == {b"0": 1, b"1": 1}


async def test_counts_go_on_over_closing_and_every_crash_after_an_opening(tmp_path: Path) -> None:
    """A message that kills its process each time it comes is found by its count."""
    async with opened(tmp_path / "0") as mq:
        ids = await with_group(mq, b"0", b"1", b"2")
        await mq.consume("t", "g", 2)
    for life in range(1, 4):
        store, mq = await open_queue(tmp_path / f"{life - 1}")
        delivered = await mq.consume("t", "g", 2)
        copy_at_rest(tmp_path / f"{life - 1}", tmp_path / f"{life}")  # killed as soon as it had it
        assert counts(delivered) == {b"0": life + 1, b"1": life + 1}
        await mq.close()
        await store.close()
    async with opened(tmp_path / "3") as mq:
        assert counts(await mq.consume("t", "g", 9)) == {b"0": 5, b"1": 5, b"2": 1}
        await mq.ack("t", "g", ids)
    async with opened(tmp_path / "3") as mq:
        assert (await mq.info())["t"].groups["g"].lag == 0


async def test_a_group_of_this_opening_is_counted_soon_after(tmp_path: Path) -> None:
    async with opened(tmp_path / "0") as mq:
        await with_group(mq, b"0", b"1")
        await mq.consume("t", "g", 1)
        while mq._counting is not None:  # noqa: ASYNC110 - a timer of the queue ends it
            await asyncio.sleep(0)
        await mq.create_topic("u")  # written after it
        copy_at_rest(tmp_path / "0", tmp_path / "1")
    async with opened(tmp_path / "1") as mq:
        assert counts(await mq.consume("t", "g", 9)) == {b"0": 2, b"1": 1}


async def test_what_nobody_got_is_counted_once_when_somebody_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a call that is cancelled while the count is written, the next one has no write."""
    disk = FailingDisk(monkeypatch)
    async with opened(tmp_path) as mq:
        await with_group(mq, b"0")
    async with opened(tmp_path) as mq:
        disk.gate.clear()
        asked = asyncio.ensure_future(mq.consume("t", "g", 1))
        async with asyncio.timeout(60):
            while not disk.waiting:  # noqa: ASYNC110 - the thread of the store sets it
                await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        assert counts(await mq.consume("t", "g", 1)) == {b"0": 1}
        disk.gate.set()


async def test_counts_are_kept_over_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    async with opened(tmp_path) as mq:
        ids = await with_group(mq, b"0", b"1")
        consumer = await mq.register_consumer("t", "g", ack_timeout_s=None)
        await consumer.consume(2)
        disk.fail_at(1)
        with pytest.raises(Indeterminate):
            await mq.produce("t", [b"2"])
        await consumer.give_back(ids)
        assert counts(await consumer.consume(2)) == {b"0": 2, b"1": 2}
    async with opened(tmp_path) as mq:
        assert counts(await mq.consume("t", "g", 2)) == {b"0": 3, b"1": 3}


def test_a_first_delivery_takes_no_more_bytes_on_its_way_than_before() -> None:
    first = ConsumerMessage(1, b"", {})
    again = ConsumerMessage(1, b"", {}, 2)
    assert b"delivery" not in msgspec.msgpack.encode(first)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(again), type=ConsumerMessage) == again
