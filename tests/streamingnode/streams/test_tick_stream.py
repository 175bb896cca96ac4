"""Streams aligned by ticks over a real queue, with the vectors of the reference, and restarts."""

import asyncio
import logging
import random
from pathlib import Path

import pytest

from streamingnode.errors import DeadlineExceeded
from streamingnode.streams.factory import MsgStreamFactory
from streamingnode.streams.messages import (
    MsgPack,
    MsgPosition,
    MsgType,
    TsMsg,
    new_memory_dispatcher,
)
from tests.streamingnode.streams.messages_of import (
    SEEK_LOG,
    creation,
    ends,
    insert,
    inserts,
    tick_of,
    told,
)
from tests.streamingnode.streams.streams_on import send, streams_in
from tests.wal.rocksmq.queues import Clock, opened
from wal.errors import Overloaded, Truncated
from wal.rocksmq.contract import MqOptions

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("everywhere")]


async def test_seeking_to_any_end_position_reproduces_the_remaining_packs(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, *SEEK_LOG)
        async with streams.tick_consumer("a") as consumer:
            packs = [await consumer.consume(timeout=60) for _ in range(4)]
            assert [sorted(ends(pack.messages)) for pack in packs] == [
                [1, 3],
                [9],
                [12, 13, 14],
                [19],
            ]
            assert [(pack.begin_ts, pack.end_ts) for pack in packs] == [
                (0, 5),
                (5, 11),
                (11, 15),
                (15, 20),
            ]
            for number in (2, 0, 1, 3):
                await consumer.seek(packs[number].end_positions)
                again = [await consumer.consume(timeout=60) for _ in packs[number + 1 :]]
                assert [told(each) for each in again] == [
                    told(each) for each in packs[number + 1 :]
                ]
                with pytest.raises(DeadlineExceeded):
                    await consumer.consume(timeout=0)


async def test_duplicated_ids_are_one_message_also_after_seek(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, [insert(1, id_=7)], [insert(1, id_=7)], [insert(1, id_=7)])
        await send(producer, [creation(2, id_=8)], [creation(2, id_=8)], [tick_of(15)])
        async with streams.tick_consumer("a") as consumer:
            pack = await consumer.consume(timeout=60)
            assert (len(pack.messages), pack.begin_ts, pack.end_ts) == (3, 0, 15)
            await consumer.seek(pack.start_positions)
            again = await consumer.consume(timeout=60)
            assert [each.type for each in again.messages].count(MsgType.INSERT) == 1
            assert len(again.messages) == 3


async def test_a_channel_without_ticks_is_named_and_what_came_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with streams_in(tmp_path) as streams, streams.producer("a", "b", "c") as producer:
        await producer.produce(MsgPack([insert(3, keys=[0, 1, 2])]))
        for channel in "ac":
            async with streams.producer(channel) as alone:
                await alone.broadcast(MsgPack([tick_of(5)]))
        async with streams.tick_consumer("a", "b", "c", idle_after_s=0) as consumer:
            with pytest.raises(DeadlineExceeded, match="from b —"):
                await consumer.consume(timeout=0.2)
            assert list(consumer.waiting_for) == ["b"]
            assert "channels=['b']" in caplog.text
            async with streams.producer("b") as alone:
                await alone.broadcast(MsgPack([tick_of(5)]))
            assert ends((await consumer.consume(timeout=60)).messages) == [3, 3, 3]


async def test_channels_that_never_meet_are_overloaded_before_memory_is_full(
    tmp_path: Path,
) -> None:
    async with streams_in(tmp_path) as streams:
        factory = MsgStreamFactory(streams.queue, new_memory_dispatcher)
        async with factory.new_msg_stream() as a, factory.new_msg_stream() as b:
            await a.as_producer(["a"])
            await b.as_producer(["b"])
            body = bytes(1 << 18)
            for number in range(1, 20):
                for odd, stream in enumerate((a, b)):
                    tick = number * 2 + odd
                    data = TsMsg(MsgType.SEARCH, tick, tick, body, (0,))
                    await stream.produce(
                        MsgPack([data, TsMsg(MsgType.TIME_TICK, tick, tick, b"", (0,))])
                    )
            async with streams.tick_consumer("a", "b", buffer_bytes_max=1 << 20) as consumer:
                for _ in range(2):
                    with pytest.raises(Overloaded, match="same ticks"):
                        await consumer.consume(timeout=60)
                assert consumer._merge.held_bytes < 2 << 20


async def test_more_batches_before_a_tick_than_a_group_may_hold_are_overloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("wal.rocksmq.group", "streamingnode.streams.stream"):
        monkeypatch.setattr(f"{module}.HELD_MAX", 8)
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, *[inserts(tick) for tick in range(1, 12)])
        async with streams.tick_consumer("a") as consumer:
            for _ in range(2):
                with pytest.raises(Overloaded, match="more often"):
                    await consumer.consume(timeout=60)


async def test_a_saved_position_goes_on_over_a_restart_of_the_queue(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, *SEEK_LOG)
        async with streams.tick_consumer("a") as consumer:
            saved = [(await consumer.consume(timeout=60)).end_positions for _ in range(2)][-1]
    async with streams_in(tmp_path) as streams, streams.tick_consumer("a") as consumer:
        await consumer.seek(saved)
        assert sorted(ends((await consumer.consume(timeout=60)).messages)) == [12, 13, 14]


async def test_a_subscription_alone_goes_on_without_losing_what_was_above_the_tick(
    tmp_path: Path,
) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, *SEEK_LOG)
        async with streams.tick_consumer("a") as consumer:
            await consumer.consume(timeout=60)
        async with streams.tick_consumer("a") as consumer:
            got = [ends((await consumer.consume(timeout=60)).messages) for _ in range(4)]
            assert {19, 14, 9, 12, 13} <= {each for pack in got for each in pack}


async def test_positions_of_one_kind_of_stream_lose_nothing_in_the_other(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, *SEEK_LOG)
        async with streams.tick_consumer("a") as ticks, streams.consumer("a", of="plain") as plain:
            aligned = await ticks.consume(timeout=60)
            # begins with the batch that 19, above the tick, is in
            await plain.seek(aligned.end_positions)
            assert ends((await plain.consume(timeout=60)).messages) == [1, 3, 19]
            single = await plain.consume(timeout=60)
            assert ends(single.messages) == [5]
            await ticks.seek(single.end_positions)  # behind the tick 5, with all that follows it
            pack = await ticks.consume(timeout=60)
            assert (sorted(ends(pack.messages)), pack.end_ts) == ([9], 11)


async def test_positions_at_different_ticks_meet_at_the_next_common_one(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a", "b") as producer:
        for tick in (5, 10, 15):
            await producer.produce(MsgPack([insert(tick - 1, keys=[0, 1])]))
            await producer.broadcast(MsgPack([tick_of(tick)]))
        async with streams.tick_consumer("a", "b") as consumer:
            first, second, _ = [await consumer.consume(timeout=60) for _ in range(3)]
            await consumer.seek([first.end_positions[0], second.end_positions[1]])
            pack = await consumer.consume(timeout=60)
            assert (pack.begin_ts, pack.end_ts, ends(pack.messages)) == (5, 10, [9])
            pack = await consumer.consume(timeout=60)
            assert (pack.begin_ts, pack.end_ts, ends(pack.messages)) == (10, 15, [14, 14])


async def test_a_position_that_retention_gave_up_names_the_earliest(tmp_path: Path) -> None:
    clock = Clock()
    options = MqOptions(page_bytes=10, retention_s=0)
    async with opened(tmp_path, clock, options) as queue:
        factory = MsgStreamFactory(queue)
        async with factory.new_msg_stream() as producer, factory.new_tt_msg_stream() as consumer:
            await producer.as_producer(["a"])
            await send(producer, *SEEK_LOG)
            await consumer.as_consumer(["a"], "g")
            packs = [await consumer.consume(timeout=60) for _ in range(4)]
            await consumer.close()
            clock.ms += 1000
            await queue.retain()
            async with factory.new_tt_msg_stream() as late:
                await late.as_consumer(["a"], "g")
                with pytest.raises(Truncated):
                    await late.seek(packs[0].start_positions)


async def test_random_traffic_is_what_a_sort_by_tick_makes_of_it(tmp_path: Path) -> None:
    chance = random.Random(7)
    names = ["a", "b", "c", "d", "e"]
    async with streams_in(tmp_path) as streams, streams.producer(*names) as producer:
        sent: list[tuple[int, int]] = []
        tick = 0
        ticks = []
        for _ in range(30):
            for _ in range(chance.randint(0, 6)):
                message = insert(
                    tick + chance.randint(1, 40), id_=len(sent) + 1, keys=[chance.randrange(5)]
                )
                sent.append((message.end_ts, message.id))
                await producer.produce(MsgPack([message]))
            tick += chance.randint(1, 10)
            ticks.append(tick)
            await producer.broadcast(MsgPack([tick_of(tick)]))
        positions: list[MsgPosition] = []
        got: list[list[tuple[int, int]]] = []
        while len(got) < len(ticks):  # a consumer that is made anew again and again
            async with streams.tick_consumer(*names) as consumer:
                if positions:
                    await consumer.seek(positions)
                for _ in range(min(chance.randint(1, 4), len(ticks) - len(got))):
                    pack = await consumer.consume(timeout=60)
                    got.append(sorted((each.end_ts, each.id) for each in pack.messages))
                    positions = pack.end_positions
        expected = [
            sorted(each for each in sent if begin < each[0] <= end)
            for begin, end in zip([0, *ticks], ticks, strict=False)
        ]
        assert got == expected


async def test_many_tasks_of_one_stream_share_its_packs(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        async with streams.tick_consumer("a") as consumer:
            waiting = [asyncio.ensure_future(consumer.consume(timeout=60)) for _ in range(3)]
            for tick in (1, 2, 3):
                await producer.broadcast(MsgPack([tick_of(tick)]))
            assert sorted([(await each).end_ts for each in waiting]) == [1, 2, 3]
