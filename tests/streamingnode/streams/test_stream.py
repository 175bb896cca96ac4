"""Plain streams over a real queue: producing, consuming, positions, subscriptions."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streamingnode.errors import AccessDenied, DeadlineExceeded
from streamingnode.streams.factory import MsgStreamFactory, Ticker
from streamingnode.streams.messages import (
    MsgPack,
    MsgPosition,
    MsgType,
    TsMsg,
    new_memory_dispatcher,
)
from streamingnode.streams.stream import MsgStream, StartPosition
from tests.streamingnode.batching_cases import until
from tests.streamingnode.streams.messages_of import creation, ends, insert, inserts, tick_of
from tests.streamingnode.streams.streams_on import send, streams_in
from wal.errors import (
    GroupNotFound,
    InvalidArgument,
    OnShutdown,
    TooLarge,
    TopicNotFound,
    UnsupportedFormat,
)
from wal.rocksmq.messages import ProducerMessage
from wal.rocksmq.queue import RocksMQ

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("everywhere")]


async def consumed(stream: MsgStream, count: int) -> list[list[int]]:
    """Return the ticks of so many packs."""
    return [ends((await stream.consume(timeout=60)).messages) for _ in range(count)]


async def test_rows_arrive_in_the_channels_of_their_keys(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a", "b") as producer:
        assert producer.get_produce_channels() == ["a", "b"]
        ids = await producer.produce(MsgPack([insert(1, keys=[0, 1, 2]), insert(2, keys=[3])]))
        assert {channel: len(each) for channel, each in ids.items()} == {"a": 1, "b": 1}
        async with streams.consumer("a", "b") as consumer:
            packs = [await consumer.consume(timeout=60) for _ in "ab"]
            rows = {
                p.end_positions[0].channel: [list(m.body.row_ids) for m in p.messages]
                for p in packs
            }
            assert rows == {"a": [[0], [2]], "b": [[1], [0]]}
            for pack in packs:
                assert pack.start_positions == pack.end_positions
                assert pack.end_positions[0].message_id == ids[pack.end_positions[0].channel][0]


async def test_a_broadcast_goes_to_every_channel_and_says_its_ids(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a", "b") as producer:
        ids = await producer.broadcast(MsgPack([tick_of(5), creation(6)]))
        latest = {channel: await producer.get_latest_msg_id(channel) for channel in "ab"}
        assert {channel: each[-1] for channel, each in ids.items()} == latest
        async with streams.consumer("a", "b") as consumer:
            assert await consumed(consumer, 2) == [[5, 6], [5, 6]]


async def test_a_repack_func_has_its_way_until_it_is_taken_back(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a", "b") as producer:
        producer.set_repack_func(lambda messages, _: {1: MsgPack(list(messages))})
        assert list(await producer.produce(MsgPack([insert(1, keys=[0, 2])]))) == ["b"]
        producer.set_repack_func(None)
        assert list(await producer.produce(MsgPack([insert(1, keys=[0, 2])]))) == ["a"]


async def test_a_large_pack_is_cut_and_stays_in_order(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams:
        factory = MsgStreamFactory(streams.queue, new_memory_dispatcher)
        async with factory.new_msg_stream() as producer, factory.new_msg_stream() as consumer:
            await producer.as_producer(["a"])
            many = [
                TsMsg(MsgType.SEARCH, number, number, bytes(1 << 20), (0,))
                for number in range(1, 21)
            ]
            assert len((await producer.produce(MsgPack(many)))["a"]) == 20
            await consumer.as_consumer(["a"], "g")
            assert await consumed(consumer, 20) == [[number] for number in range(1, 21)]
            with pytest.raises(TooLarge):
                await producer.produce(
                    MsgPack([*many, TsMsg(MsgType.SEARCH, 1, 1, bytes(5 << 20), (0,))])
                )
            with pytest.raises(DeadlineExceeded):  # nothing of that pack was produced
                await consumer.consume(timeout=0)


async def test_producing_that_is_off_lets_one_creation_of_a_collection_through(
    tmp_path: Path,
) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        producer.force_enable_produce(False)
        for refused in (
            producer.produce(MsgPack([insert(1)])),
            producer.broadcast(MsgPack([tick_of(1)])),
        ):
            with pytest.raises(AccessDenied, match="force_enable_produce"):
                await refused
        with pytest.raises(AccessDenied):
            await producer.broadcast(MsgPack([creation(1), creation(2)]))
        assert await producer.broadcast(MsgPack([creation(1)]))
        producer.force_enable_produce(True)
        assert await producer.produce(MsgPack([insert(1)]))


async def test_an_empty_pack_is_produced_to_nobody_and_broadcast_to_nobody(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        assert await producer.produce(MsgPack([])) == {}
        with pytest.raises(InvalidArgument, match="empty"):
            await producer.broadcast(MsgPack([]))
        assert await producer.get_latest_msg_id("a") == -1


async def test_a_stream_without_channels_names_the_call_that_is_missing(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.factory().new_msg_stream() as stream:
        with pytest.raises(InvalidArgument, match="as_producer"):
            await stream.produce(MsgPack([insert(1)]))
        with pytest.raises(InvalidArgument, match="as_consumer"):
            await stream.consume()
        with pytest.raises(InvalidArgument, match="list of names"):
            await stream.as_producer("a")
        with pytest.raises(InvalidArgument, match="list of names"):
            await stream.as_producer([""])


async def test_a_consumer_may_come_before_its_producer(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.factory().new_msg_stream() as stream:
        with pytest.raises(TopicNotFound):
            await stream.get_latest_msg_id("a")
        await stream.as_consumer(["a"], "g")
        async with streams.producer("a") as producer:
            await send(producer, inserts(1))
        assert await consumed(stream, 1) == [[1]]


async def test_new_subscriptions_begin_where_they_are_told(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, inserts(1), inserts(2))
        async with (
            streams.consumer("a", of="early") as early,
            streams.consumer("a", of="late", position=StartPosition.LATEST) as late,
        ):
            await send(producer, inserts(3))
            assert await consumed(early, 3) == [[1], [2], [3]]
            assert await consumed(late, 1) == [[3]]


async def test_a_new_subscription_is_at_the_latest_as_soon_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut_off(*_given: object) -> None:
        raise OnShutdown("the process is gone")

    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, inserts(1))
        monkeypatch.setattr(RocksMQ, "force_seek", cut_off)
        async with streams.consumer("a", position=StartPosition.LATEST) as consumer:
            await send(producer, inserts(2))
            assert await consumed(consumer, 1) == [[2]]


async def test_a_subscription_that_exists_goes_on_where_it_was(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, inserts(1), inserts(2), inserts(3))
        async with streams.consumer("a") as consumer:
            assert await consumed(consumer, 1) == [[1]]
        for position in (StartPosition.LATEST, StartPosition.UNKNOWN):
            async with streams.consumer("a", position=position) as consumer:
                assert len(await consumed(consumer, 1)) == 1
        async with streams.consumer("a") as consumer:
            with pytest.raises(DeadlineExceeded):
                await consumer.consume(timeout=0)


async def test_a_subscription_at_an_unknown_place_has_to_seek_first(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        ids = await producer.produce(MsgPack(inserts(1)))
        await send(producer, inserts(2))
        async with streams.consumer("a", position=StartPosition.UNKNOWN) as consumer:
            with pytest.raises(InvalidArgument, match="seek"):
                await consumer.consume()
            await consumer.seek([MsgPosition("a", ids["a"][0])])
            assert await consumed(consumer, 1) == [[2]]


async def test_a_pack_whose_work_failed_comes_again(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, inserts(1), inserts(2), inserts(3))
        with pytest.raises(RuntimeError):
            async with streams.consumer("a") as consumer:
                await consumed(consumer, 2)
                raise RuntimeError
        async with streams.consumer("a") as consumer:
            assert await consumed(consumer, 2) == [[2], [3]]


async def test_subscriptions_each_get_everything_and_consumers_of_one_share_it(
    tmp_path: Path,
) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, *[inserts(number) for number in range(1, 41)])
        async with streams.consumer("a", of="x") as one, streams.consumer("a", of="x") as other:
            got = await consumed(one, 1) + await consumed(other, 1)
            while len(got) < 40:
                for each in (one, other):
                    try:
                        got += [ends((await each.consume(timeout=0.05)).messages)]
                    except DeadlineExceeded:
                        continue
            assert sorted(got) == [[number] for number in range(1, 41)]
        async with streams.consumer("a", of="y") as alone:
            assert await consumed(alone, 40) == [[number] for number in range(1, 41)]


async def test_seek_goes_on_behind_a_message_or_with_it(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a", "b") as producer:
        for number in (1, 2, 3):
            await producer.broadcast(MsgPack(inserts(number)))
        async with streams.consumer("a", "b") as consumer:
            packs = [await consumer.consume(timeout=60) for _ in range(6)]
            of = {
                (p.end_positions[0].channel, p.messages[0].end_ts): p.end_positions[0]
                for p in packs
            }
            await consumer.seek([of["a", 1], of["b", 2]])
            assert sorted(await consumed(consumer, 3)) == [[2], [3], [3]]
            await consumer.seek([of["a", 3]], include_current=True)
            assert await consumed(consumer, 1) == [[3]]
            await consumer.seek([of["b", 3]])
            with pytest.raises(DeadlineExceeded, match="a, b"):
                await consumer.consume(timeout=0)


async def test_seek_wakes_a_consumer_that_waits(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        ids = await producer.produce(MsgPack(inserts(1)))
        async with streams.consumer("a") as consumer:
            await consumed(consumer, 1)
            waiting = asyncio.ensure_future(consumer.consume())
            await until(lambda: consumer._subscriptions["a"].fetch)
            await consumer.seek([MsgPosition("a", ids["a"][0])], include_current=True)
            assert ends((await waiting).messages) == [1]


async def test_a_position_that_cannot_be_is_refused_before_anything_moves(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a", "b") as producer:
        ids = await producer.broadcast(MsgPack(inserts(1)))
        async with streams.consumer("a") as consumer:
            here = MsgPosition("a", ids["a"][0])
            other = MsgPosition("b", ids["b"][0])
            await consumed(consumer, 1)
            for positions in ([here, other], [here, here], []):
                with pytest.raises(InvalidArgument):
                    await consumer.seek(positions, include_current=True)
            with pytest.raises(DeadlineExceeded):
                await consumer.consume(timeout=0)
            with pytest.raises(InvalidArgument, match="does not exist yet"):
                await consumer.seek([MsgPosition("a", ids["a"][0] + 1000)])


async def test_a_bad_position_is_ignored_where_that_is_asked_for(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        ids = await producer.produce(MsgPack(inserts(1)))
        async with streams.consumer("a", ignore_bad_position=True) as consumer:
            await consumer.seek([MsgPosition("a", ids["a"][0] + 1000)])
            await send(producer, inserts(2))
            assert await consumed(consumer, 1) == [[2]]


async def test_cancelling_a_consume_loses_no_pack(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a", "b") as producer:
        async with streams.consumer("a", "b") as consumer:
            got: list[list[int]] = []
            for number in range(1, 30):
                waiting = asyncio.ensure_future(consumer.consume())
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                sending = asyncio.ensure_future(
                    producer.produce(MsgPack([insert(number, keys=[number])]))
                )
                for _ in range(number % 11):
                    await asyncio.sleep(0)
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    got.append(ends((await waiting).messages))
                await sending
            while len(got) < 29:
                got += await consumed(consumer, 1)
            assert sorted(got) == [[number] for number in range(1, 30)]


async def test_what_somebody_else_put_into_a_channel_is_named_and_waits(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await streams.queue.produce("a", [ProducerMessage(b"raw")])
        await send(producer, inserts(1))
        async with streams.consumer("a") as consumer:
            for _ in range(2):
                with pytest.raises(UnsupportedFormat) as raised:
                    await consumer.consume(timeout=60)
                assert "of channel a" in raised.value.__notes__[0]


async def test_chan_yields_packs_until_the_stream_is_closed(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, inserts(1), inserts(2))
        async with streams.consumer("a") as consumer:
            got: list[list[int]] = []
            closing: list[asyncio.Future[None]] = []
            async for pack in consumer.chan():
                got.append(ends(pack.messages))
                if len(got) == 2:
                    closing.append(asyncio.ensure_future(consumer.close()))
            assert got == [[1], [2]]
            await closing[0]


async def test_a_closed_stream_refuses_everything(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        async with streams.consumer("a") as consumer:
            waiting = asyncio.ensure_future(consumer.consume())
            await asyncio.sleep(0)
            await consumer.close()
            await consumer.close()
            with pytest.raises(OnShutdown):
                await waiting
        await producer.close()
        calls = [
            producer.start(),
            producer.as_producer(["b"]),
            producer.as_consumer(["a"], "g"),
            producer.produce(MsgPack([insert(1)])),
            producer.broadcast(MsgPack([insert(1)])),
            consumer.consume(),
        ]
        for call in calls:
            with pytest.raises(OnShutdown):
                await call


async def test_one_stream_consumes_for_one_subscription_and_each_channel_once(
    tmp_path: Path,
) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a", "b") as producer:
        async with streams.consumer("a") as consumer:
            await consumer.as_consumer(["a", "b"], "g")
            for subscription, position in (("other", StartPosition.EARLIEST), ("g", "latest")):
                with pytest.raises(InvalidArgument, match="open a stream for each"):
                    await consumer.as_consumer(["a"], subscription, position)  # type: ignore[arg-type]
            await producer.broadcast(MsgPack(inserts(1)))
            assert await consumed(consumer, 2) == [[1], [1]]


async def test_a_disposer_removes_the_subscription_and_may_run_twice(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, inserts(1))
        async with streams.consumer("a") as consumer:
            assert await consumed(consumer, 1) == [[1]]
        dispose = streams.factory().new_disposer(["a", "nowhere"], "g")
        await dispose()
        await dispose()
        assert not await streams.queue.exist_consumer_group("a", "g")
        async with streams.consumer("a") as consumer:  # a new one of that name begins anew
            assert await consumed(consumer, 1) == [[1]]
            await dispose()
            with pytest.raises(GroupNotFound):
                await consumer.consume(timeout=60)


async def test_tasks_that_subscribe_a_stream_at_the_same_moment_do_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with streams_in(tmp_path) as streams, streams.factory().new_msg_stream() as stream:
        joined: list[object] = []
        monkeypatch.setattr(stream._merge, "add", joined.append)
        await asyncio.gather(*[stream.as_consumer(["a"], "g") for _ in range(3)])
        assert joined == ["a"]


async def test_streams_that_subscribe_at_the_same_moment_share_the_subscription(
    tmp_path: Path,
) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a", "b") as producer:
        streams_of = [streams.factory().new_msg_stream() for _ in range(3)]
        await asyncio.gather(*[each.as_consumer(["a", "b"], "g") for each in streams_of])
        await send(producer, inserts(1))
        assert await consumed(streams_of[0], 1) == [[1]]
        for each in streams_of:
            await each.close()


async def test_a_channel_that_cannot_seek_goes_on_where_it_was(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a", "b") as producer:
        ids = [await producer.broadcast(MsgPack(inserts(number))) for number in (1, 2, 3)]
        async with streams.consumer("a", "b") as consumer:
            await consumed(consumer, 2)
            bad = MsgPosition("b", ids[2]["b"][0] + 1000)
            with pytest.raises(InvalidArgument, match="does not exist yet"):
                await consumer.seek([MsgPosition("a", ids[1]["a"][0]), bad])
            # a from its new place, b from its old one
            assert sorted(await consumed(consumer, 3)) == [[2], [3], [3]]


async def test_a_close_that_is_cancelled_gives_everything_back(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, inserts(1), inserts(2))
        stream = streams.factory().new_msg_stream()
        await stream.as_consumer(["a"], "g")
        assert await consumed(stream, 1) == [[1]]
        async with stream._turn:  # as while another task consumes
            closing = asyncio.ensure_future(stream.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await closing
        async with streams.consumer("a") as consumer:
            assert await consumed(consumer, 1) == [[2]]


async def test_what_was_worked_off_before_a_seek_back_counts_no_more(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, inserts(1), inserts(2), inserts(3))
        async with streams.consumer("a") as consumer:
            first, _, _ = [await consumer.consume(timeout=60) for _ in range(3)]
            await consumer.seek(first.end_positions, include_current=True)
        async with streams.consumer("a") as consumer:
            assert await consumed(consumer, 3) == [[1], [2], [3]]


async def test_what_was_read_ahead_is_forgotten_by_a_seek_and_kept_by_one_that_fails(
    tmp_path: Path,
) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        ids = [(await producer.produce(MsgPack(inserts(number))))["a"][0] for number in (1, 2, 3)]
        async with streams.consumer("a") as consumer:
            assert await consumed(consumer, 1) == [[1]]  # the others are read, too
            with pytest.raises(InvalidArgument, match="does not exist yet"):
                await consumer.seek([MsgPosition("a", ids[2] + 1000)])
            assert await consumed(consumer, 1) == [[2]]
            await consumer.seek([MsgPosition("a", ids[0])])
            assert await consumed(consumer, 2) == [[2], [3]]
            waiting = asyncio.ensure_future(consumer.consume())
            await until(lambda: consumer._subscriptions["a"].fetch)
            waiting.cancel()
            await send(producer, inserts(4))
            await until(lambda: consumer._subscriptions["a"].fetching().done())
            await consumer.seek([MsgPosition("a", ids[1])])
            assert await consumed(consumer, 2) == [[3], [4]]


async def test_a_stream_that_waits_has_acknowledged_what_was_worked_off(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, inserts(1))
        async with streams.consumer("a") as consumer:
            await consumed(consumer, 1)
            assert (await streams.queue.info())["a"].groups["g"].lag == 1
            waiting = asyncio.ensure_future(consumer.consume())
            await until(lambda: consumer._subscriptions["a"].acked)
            assert (await streams.queue.info())["a"].groups["g"].lag == 0
            waiting.cancel()


TICKS_THAT_CANNOT_BE = (-1, 1 << 63, 1 << 70, 1.5, "1", None)


@pytest.mark.parametrize("tick", TICKS_THAT_CANNOT_BE, ids=repr)
async def test_a_tick_that_cannot_be_is_refused_and_nothing_is_produced(
    tmp_path: Path, tick: Any
) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        for message in (insert(0), creation(0)):
            for ticks in ((tick, tick), (0, tick)):
                message.begin_ts = ticks[0]
                message.end_ts = ticks[1]
                for produce in (producer.produce, producer.broadcast):
                    with pytest.raises(InvalidArgument, match=r"a message (has|is) invalid"):
                        await produce(MsgPack([message]))
        message.set_ts(5, 4)
        with pytest.raises(
            InvalidArgument, match=r"ticks 5 to 4: .* begin_ts is at most end_ts — "
        ):
            await producer.produce(MsgPack([message]))
        assert await producer.get_latest_msg_id("a") == -1


@pytest.mark.parametrize("tick", TICKS_THAT_CANNOT_BE, ids=repr)
async def test_a_seek_to_a_tick_that_cannot_be_is_refused_and_the_stream_goes_on(
    tmp_path: Path, tick: Any
) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        await send(producer, [insert(1)], [tick_of(2)])
        for kind in (streams.consumer, streams.tick_consumer):
            async with kind("a", of=kind.__name__) as consumer:
                first = await consumer.get_latest_msg_id("a") - 1
                with pytest.raises(InvalidArgument, match="at most one position"):
                    await consumer.seek([MsgPosition("a", first, tick, inclusive=True)])
                assert ends((await consumer.consume(timeout=60)).messages) == [1]


@pytest.mark.parametrize("count", [0, -1, 1 << 70, 1.5, "1", None], ids=repr)
async def test_a_stamp_of_what_is_no_count_is_refused_and_the_ticker_goes_on(
    tmp_path: Path, count: Any
) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        ticker = Ticker(producer)
        with pytest.raises(InvalidArgument, match="ids were asked for"), ticker.stamp(count):
            pass
        assert await ticker.tick() == ticker.last_tick > 0
