"""Pages and retention, by the reference's vectors: what all groups have acknowledged goes, and its
space with it.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.failing_disk import FailingDisk
from tests.wal.rocksmq.queues import Clock, opened
from wal.errors import Truncated
from wal.rocksmq.contract import MqOptions
from wal.rocksmq.messages import EntryCache
from wal.rocksmq.queue import RocksMQ

pytestmark = pytest.mark.anyio

SMALL = MqOptions(page_bytes=10, retention_s=0, retention_bytes=None)


async def filled(mq: RocksMQ, topic: str = "t") -> range:
    await mq.create_topic(topic)
    await mq.create_consumer_group(topic, "g")
    return await mq.produce(topic, [b"message_%d" % number for number in range(100)])


async def test_pages_end_with_the_message_that_goes_over_and_go_once_acknowledged(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path / "node", options=SMALL) as mq:
        ids = await filled(mq)
        assert (await mq.info())["t"].pages == 50
        await mq.retain()
        assert (await mq.info())["t"].pages == 50
        await mq.ack("t", "g", [message.message_id for message in await mq.consume("t", "g", 5)])
        assert (await mq.info())["t"].acked_pages == 2
        await mq.retain()
        after = (await mq.info())["t"]
        assert (after.pages, after.acked_pages, after.begin_id) == (48, 0, ids[4])
        with pytest.raises(Truncated) as refused:
            await mq.seek("t", "g", ids[3])
        assert refused.value.earliest == ids[4]
        await mq.force_seek("t", "g", ids[0])
        assert [message.payload for message in await mq.consume("t", "g", 1)] == [b"message_4"]
    async with opened(tmp_path / "node", options=SMALL) as mq:
        after = (await mq.info())["t"]
        assert (after.pages, after.begin_id) == (48, ids[4])
        assert [message.payload for message in await mq.consume("t", "g", 9)] == [
            b"message_%d" % n for n in range(4, 13)
        ]


@pytest.mark.parametrize(
    "retention_s, retention_bytes, after_s, kept",
    [
        (None, None, 10**6, 50),
        (10, None, 9, 50),
        (10, None, 10, 0),
        (None, 100, 0, 5),
        (10**6, 100, 0, 5),
        (10, 100, 10, 0),
    ],
)
async def test_retention_is_by_time_by_size_by_both_or_not_at_all(
    tmp_path: Path, retention_s: float | None, retention_bytes: int | None, after_s: int, kept: int
) -> None:
    clock = Clock()
    options = MqOptions(page_bytes=10, retention_s=retention_s, retention_bytes=retention_bytes)
    async with opened(tmp_path / "node", clock, options) as mq:
        await mq.ack("t", "g", await filled(mq))
        clock.ms += after_s * 1000
        await mq.retain()
        assert (await mq.info())["t"].pages == kept


async def test_a_slow_group_or_one_that_went_back_keeps_its_pages(tmp_path: Path) -> None:
    async with opened(tmp_path / "node", options=SMALL) as mq:
        ids = await filled(mq)
        await mq.create_consumer_group("t", "slow")
        await mq.ack("t", "g", ids)
        await mq.retain()
        assert (await mq.info())["t"].pages == 50
        await mq.seek_to_latest("t", "slow")
        await mq.seek("t", "g", ids[10])
        await mq.retain()
        assert (await mq.info())["t"].begin_id == ids[10]
        await mq.destroy_consumer_group("t", "g")
        await mq.retain()
        assert (await mq.info())["t"].pages == 0
        assert await mq.get_latest_msg("t") == -1
        assert (await mq.produce("t", [b"next"]))[0] == ids[-1] + 1


async def test_without_a_group_nothing_is_given_up(tmp_path: Path) -> None:
    async with opened(tmp_path / "node", options=SMALL) as mq:
        await mq.create_topic("t")
        await mq.produce("t", [b"message_0"] * 9)
        await mq.retain()
        assert (await mq.info())["t"].pages == 4


async def test_what_retention_and_destroying_give_up_leaves_the_disk(tmp_path: Path) -> None:
    def used() -> int:
        size_bytes = 0
        for file in (tmp_path / "node" / "log").iterdir():
            with suppress(FileNotFoundError):  # RocksDB has just removed it
                size_bytes += file.stat().st_size
        return size_bytes

    options = MqOptions(page_bytes=1 << 20, retention_s=0)
    async with opened(tmp_path / "node", options=options) as mq:
        for topic in ("t", "u"):
            await mq.create_topic(topic)
            await mq.create_consumer_group(topic, "g")
            for number in range(24):
                await mq.produce(topic, [bytes([number]) * (1 << 20), b"x"])
        full = used()
        await mq.seek_to_latest("t", "g")
        await mq.retain()
        assert used() < 0.6 * full
        await mq.destroy_topic("u")
        assert used() < 0.05 * full


async def test_one_message_is_read_from_the_disk_while_it_is_kept(tmp_path: Path) -> None:
    async with opened(tmp_path / "node", options=SMALL) as mq:
        ids = await filled(mq)
        mq._reader._cache = EntryCache()
        found = await mq.get_message("t", ids[7])
        assert found
        assert found.payload == b"message_7"
        await mq.ack("t", "g", ids[:10])
        await mq.retain()
        assert await mq.get_message("t", ids[7]) is None


async def test_a_read_that_retention_overtakes_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "node", options=SMALL) as mq:
        ids = await filled(mq)
        mq._reader._cache = EntryCache()
        log = mq._writer.topics["t"].log
        read = log.read

        async def read_late(*given: Any, **options: Any) -> object:
            monkeypatch.undo()
            await mq.seek_to_latest("t", "g")
            await mq.retain()
            return await read(*given, **options)

        monkeypatch.setattr(log, "read", read_late)
        assert await mq.consume("t", "g", 9) == []
        assert (await mq.info())["t"].begin_id == ids[-1] + 1


async def test_one_message_that_retention_takes_while_it_is_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "node", options=SMALL) as mq:
        ids = await filled(mq)
        mq._reader._cache = EntryCache()
        log = mq._writer.topics["t"].log
        read = log.read

        async def read_late(*given: Any, **options: Any) -> object:
            monkeypatch.undo()
            await mq.seek_to_latest("t", "g")
            await mq.retain()
            return await read(*given, **options)

        monkeypatch.setattr(log, "read", read_late)
        assert await mq.get_message("t", ids[7]) is None


async def test_what_retention_takes_between_two_reads_of_a_delivery_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "node", options=SMALL) as mq:
        await mq.create_topic("t")
        await mq.create_consumer_group("t", "g")
        for payload in (b"1", b"2", b"3"):
            await mq.produce("t", [payload * (2 << 20)])
        mq._reader._cache = EntryCache()
        log = mq._writer.topics["t"].log
        read = log.read

        async def read_and_retain(*given: Any, **options: Any) -> object:
            found = await read(*given, **options)
            monkeypatch.undo()
            await mq.seek_to_latest("t", "g")
            await mq.retain()
            return found

        monkeypatch.setattr(log, "read", read_and_retain)
        assert await mq.consume("t", "g", 9) == [], "the seek is past what was read before it"
        assert await mq.consume("t", "g", 9) == []


async def test_an_open_page_goes_once_all_of_it_is_acknowledged_and_not_before(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path / "node", options=MqOptions(retention_s=0)) as mq:
        ids = await filled(mq)
        await mq.ack("t", "g", ids[:99])
        await mq.retain()
        assert (await mq.info())["t"].begin_id == ids[0]
        await mq.ack("t", "g", ids)
        await mq.retain()
        after = (await mq.info())["t"]
        assert (after.begin_id, after.end_id, after.bytes, after.pages) == (
            ids[-1] + 1,
            ids[-1],
            0,
            0,
        )
    async with opened(tmp_path / "node") as mq:
        assert (await mq.info())["t"].begin_id == ids[-1] + 1
        assert list(await mq.produce("t", [b"next"])) == [ids[-1] + 1]
        assert [message.payload for message in await mq.consume("t", "g", 9)] == [b"next"]


async def test_messages_of_no_bytes_are_given_up_as_others_are(tmp_path: Path) -> None:
    async with opened(tmp_path / "node", options=SMALL) as mq:
        await mq.create_topic("t")
        await mq.create_consumer_group("t", "g")
        ids = await mq.produce("t", [b""] * 30)
        await mq.ack("t", "g", ids)
        await mq.retain()
        assert (await mq.info())["t"].begin_id == ids[-1] + 1


@pytest.mark.parametrize(
    "ends", ["group gone", "group gone and node opened again", "group back at its end"]
)
async def test_a_page_that_a_group_went_back_to_is_not_acknowledged_any_more(
    tmp_path: Path, ends: str
) -> None:
    """A topic without groups keeps everything; and a page's time begins when it is acknowledged
    again.
    """
    clock = Clock()
    options = MqOptions(page_bytes=10, retention_s=10, retention_bytes=None)
    async with opened(tmp_path / "node", clock, options) as mq:
        ids = await filled(mq)
        await mq.ack("t", "g", ids)
        await mq.retain()  # closes the last page, too
        assert (await mq.info())["t"].acked_pages == 50
        clock.ms += 9_000
        await mq.seek("t", "g", ids[50])
        assert (await mq.info())["t"].acked_pages == 25
        if ends == "group back at its end":
            await mq.seek_to_latest("t", "g")
        else:
            await mq.destroy_consumer_group("t", "g")
        if ends == "group gone":
            clock.ms += 1_000
            await mq.retain()
            assert (await mq.info())["t"].begin_id == ids[50]
    async with opened(tmp_path / "node", clock, options) as mq:
        clock.ms += 1_000
        await mq.retain()
        assert (await mq.info())["t"].begin_id == ids[50]
        clock.ms += 9_000
        await mq.retain()
        left = 100 if ends == "group back at its end" else 50
        assert (await mq.info())["t"].begin_id == ids[0] + left


async def test_an_open_page_is_not_closed_while_messages_of_it_are_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    options = MqOptions(page_bytes=100, retention_s=0)
    async with opened(tmp_path / "node", options=options) as mq:
        await mq.create_topic("t")
        await mq.create_consumer_group("t", "g")
        ids = await mq.produce("t", [b"12345"])
        await mq.ack("t", "g", ids)
        disk.gate.clear()
        producing = asyncio.ensure_future(mq.produce("t", [b"1234567"]))
        async with asyncio.timeout(60):
            while not disk.waiting:  # noqa: ASYNC110 - the thread of the store sets it
                await asyncio.sleep(0)
        keeping = asyncio.ensure_future(mq.retain())
        for _ in range(9):
            await asyncio.sleep(0)
        disk.gate.set()
        await asyncio.gather(producing, keeping)
        found = (await mq.info())["t"]
        assert (found.begin_id, found.pages, found.bytes) == (ids[0], 0, 12)
