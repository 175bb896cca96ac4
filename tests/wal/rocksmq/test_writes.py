"""The task that writes topics: calls of one write see each other, and closing leaves no call
waiting.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.failing_disk import FailingDisk
from tests.wal.rocksmq.queues import Clock, open_queue, opened
from wal.errors import GroupNotFound, Indeterminate, OnShutdown, TopicNotFound

pytestmark = pytest.mark.anyio


async def test_calls_of_one_write_see_each_other_in_their_order(tmp_path: Path) -> None:
    async with opened(tmp_path / "node") as mq:
        outcomes = await asyncio.gather(
            mq.create_topic("t"),
            mq.create_consumer_group("t", "g"),
            mq.produce("t", [b"0", b"1"]),
            mq.seek_to_latest("t", "g"),
            mq.produce("t", [b"2"]),
            mq.destroy_topic("t"),
            mq.produce("t", [b"3"]),
            mq.create_topic("t"),
            mq.ack("t", "g", []),
            return_exceptions=True,
        )
        produced, refused, later = outcomes[2], outcomes[6], outcomes[8]
        assert isinstance(produced, range)
        assert isinstance(refused, TopicNotFound)
        assert isinstance(later, GroupNotFound)
        info = (await mq.info())["t"]
        assert (info.begin_id > produced[-1] + 1, info.groups) == (True, {})
    async with opened(tmp_path / "node") as mq:
        assert await mq.get_latest_msg("t") == -1


async def test_a_call_with_what_is_no_name_raises_and_the_calls_beside_it_are_made(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path / "node") as mq:
        await mq.create_topic("t")
        no_name: Any = ["t"]
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(
                mq.produce("t", [b"0"]),
                mq.produce(no_name, [b"1"]),
                mq.ack("t", no_name, [1]),
                mq.produce("t", [b"2"]),
                return_exceptions=True,
            )
        assert [type(outcome) for outcome in outcomes] == [range, TypeError, TypeError, range]
        await mq.produce("t", [b"3"])


async def test_a_group_that_is_made_and_moved_in_one_write_begins_there(tmp_path: Path) -> None:
    async with opened(tmp_path / "node") as mq:
        await mq.create_topic("t")
        ids = await mq.produce("t", [b"0", b"1", b"2", b"3"])
        await asyncio.gather(
            mq.create_consumer_group("t", "g"),
            mq.ack("t", "g", [ids[0], ids[2]]),
            mq.create_consumer_group("t", "gone"),
            mq.destroy_consumer_group("t", "gone"),
        )
        assert not await mq.exist_consumer_group("t", "gone")
        assert [message.payload for message in await mq.consume("t", "g", 9)] == [b"1", b"3"]


async def test_a_call_that_is_cancelled_is_made_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    async with opened(tmp_path / "node") as mq:
        await mq.create_topic("t")
        disk.fail_at(9)
        disk.gate.clear()
        first = asyncio.ensure_future(mq.produce("t", [b"0"]))
        for _ in range(3):
            await asyncio.sleep(0)
        second = asyncio.ensure_future(mq.produce("t", [b"1"]))
        await asyncio.sleep(0)
        first.cancel()
        second.cancel()
        await asyncio.wait([first, second])
        disk.gate.set()
        [last] = await mq.produce("t", [b"2"])
        found = [await mq.get_message("t", each) for each in range(last - 2, last + 1)]
        assert [message and message.payload for message in found] == [b"0", b"1", b"2"]


async def test_closing_without_a_log_leaves_no_call_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    store, mq = await open_queue(tmp_path / "node", Clock())
    await mq.create_topic("t")
    never = asyncio.Event()

    async def never_back(_call: object) -> None:
        await never.wait()

    monkeypatch.setattr(mq._writer, "_in_term", never_back)
    disk.fail_at(1)
    with pytest.raises(Indeterminate):
        await mq.produce("t", [b"0"])
    waiting = [asyncio.ensure_future(mq.produce("t", [b"1"])) for _ in range(3)]
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await mq.close()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [OnShutdown] * 3
    await store.close()
