"""Streams over the topics of a node: what each hands on, acknowledges, and says about bad input."""

import asyncio
from itertools import count
from pathlib import Path

import pytest

import streamingnode as sn
from streamingnode.errors import AccessDenied
from streamingnode.streams.messages import MessagePlace, MsgPack, MsgPosition, place_of, tick
from streamingnode.streams.stream import StreamOptions, SubscriptionPosition
from streamingnode.streams.tt_stream import RmqMsgStreamFactory
from streamingnode.streams.unmarshal import in_memory_dispatcher
from tests.streamingnode.streams.stream_cases import VECTOR, VECTOR_PACKS, factory_of, message, send, summary
from wal.errors import (
    ChannelIdle,
    ChannelNotFound,
    Corrupt,
    InvalidArgument,
    OnShutdown,
    Overloaded,
    TooLarge,
)
from wal.headers import MessageType

pytestmark = pytest.mark.anyio


async def test_messages_go_by_their_keys_and_come_once_in_the_order_of_each_channel(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory, factory.new_msg_stream() as stream:
        await stream.as_producer(["a", "b"])
        assert stream.get_produce_channels() == ["a", "b"]
        await stream.as_consumer(["a", "b"], "g")
        ids = await stream.produce(MsgPack(msgs=[message(ts, key=ts) for ts in range(1, 7)]))
        assert {channel: len(each) for channel, each in ids.items()} == {"a": 3, "b": 3}
        packs = [await stream.consume(), await stream.consume()]
        found = {pack.start_positions[0].channel: pack for pack in packs}
        assert {channel: summary(pack) for channel, pack in found.items()} == {
            "a": (2, 6, [2, 4, 6]),
            "b": (1, 5, [1, 3, 5]),
        }
        assert [each.message_id for each in found["a"].positions] == ids["a"]
        assert (found["a"].start_positions, found["a"].end_positions) == (
            found["a"].positions[:1],
            found["a"].positions[-1:],
        )


async def test_a_message_that_travels_alone_is_a_pack_whose_ends_are_its_position(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory, factory.new_msg_stream() as stream:
        await stream.as_producer(["a"])
        await stream.as_consumer(["a"], "g")
        await send(stream, [message(1), message(2)])
        for ts in (1, 2):
            pack = await stream.consume()
            assert summary(pack) == (ts, ts, [ts])
            assert pack.start_positions == pack.end_positions == pack.positions


async def test_broadcast_returns_ids_for_each_channel(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory, factory.new_msg_stream() as stream:
        await stream.as_producer(["a", "b", "c"])
        ids = await stream.broadcast(MsgPack(msgs=[message(1), message(2)]))
        indexes = {name: [place_of(MsgPosition(name, each)).at for each in found] for name, found in ids.items()}
        assert indexes == {"a": [0, 1], "b": [0, 1], "c": [0, 1]}
        last = place_of(MsgPosition("a", ids["a"][1]))
        assert await stream.get_latest_msg_id("a") == MessagePlace(last.queue_id).message_id
        with pytest.raises(InvalidArgument, match="empty"):
            await stream.broadcast(MsgPack(msgs=[]))


async def test_seek_goes_on_behind_a_message_also_within_what_travels_together(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory, factory.new_msg_stream() as stream:
        await stream.as_producer(["a"])
        await stream.as_consumer(["a"], "g")
        await stream.produce(MsgPack(msgs=[message(ts) for ts in (1, 2, 3)]))
        await stream.produce(MsgPack(msgs=[message(4)]))
        first = await stream.consume()
        for at, left in ((0, [2, 3]), (1, [3]), (2, [4])):
            await stream.seek([first.positions[at]])
            assert summary(await stream.consume())[2] == left
        await stream.seek([MsgPosition("a", await stream.get_latest_msg_id("a"))])
        await stream.produce(MsgPack(msgs=[message(5)]))
        assert summary(await stream.consume())[2] == [5]


async def test_the_last_pack_comes_again_unless_the_stream_is_closed_without_an_error(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory:
        async with factory.new_msg_stream() as producer:
            await producer.as_producer(["a"])
            await send(producer, [message(ts) for ts in (1, 2, 3)])
        with pytest.raises(RuntimeError):
            async with factory.new_msg_stream() as stream:
                await stream.as_consumer(["a"], "g")
                assert [summary(await stream.consume())[2] for _ in range(2)] == [[1], [2]]
                raise RuntimeError
        for expected in (2, 3):
            async with factory.new_msg_stream() as stream:
                await stream.as_consumer(["a"], "g")
                assert summary(await stream.consume())[2] == [expected]


async def test_a_new_subscription_begins_where_it_says(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory, factory.new_msg_stream() as producer:
        await producer.as_producer(["a"])
        ids = await producer.broadcast(MsgPack(msgs=[message(1)]))
        async with (
            factory.new_msg_stream() as early,
            factory.new_msg_stream() as late,
            factory.new_msg_stream() as lost,
        ):
            await early.as_consumer(["a"], "early")
            await late.as_consumer(["a"], "late", SubscriptionPosition.LATEST)
            await lost.as_consumer(["a"], "lost", SubscriptionPosition.UNKNOWN)
            await send(producer, [message(2)])
            assert summary(await early.consume())[2] == [1]
            assert summary(await late.consume())[2] == [2]
            with pytest.raises(InvalidArgument, match="unknown"):
                await lost.consume()
            await lost.seek([MsgPosition("a", ids["a"][0])])
            assert summary(await lost.consume())[2] == [2]


async def test_ticks_give_the_packs_of_the_reference_and_again_from_every_end_position(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory:
        async with factory.new_tt_msg_stream() as stream:
            await stream.as_producer(["a"])
            await stream.as_consumer(["a"], "g")
            await send(stream, VECTOR)
            packs = [await stream.consume() for _ in VECTOR_PACKS]
            assert [summary(pack) for pack in packs] == VECTOR_PACKS
            for pack in packs:
                assert [each.timestamp for each in pack.start_positions] == [pack.begin_ts]
                assert [each.timestamp for each in pack.end_positions] == [pack.end_ts]
        for at in range(len(packs) - 1):
            async with factory.new_tt_msg_stream() as stream:
                await stream.as_consumer(["a"], f"g{at}", SubscriptionPosition.UNKNOWN)
                await stream.seek(packs[at].end_positions)
                assert [await stream.consume() for _ in packs[at + 1 :]] == packs[at + 1 :]
                await stream.seek(packs[at].start_positions)
                assert await stream.consume() == packs[at]


async def test_repeated_inserts_are_one_in_a_pack_and_other_types_are_not(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory, factory.new_tt_msg_stream() as stream:
        await stream.as_producer(["a"])
        await stream.as_consumer(["a"], "g")
        create = message(2, kind=MessageType.CREATE_COLLECTION)
        await send(stream, [message(1), message(1), message(1), create, create, tick(15)])
        pack = await stream.consume()
        assert (pack.begin_ts, pack.end_ts, [each.id for each in pack.msgs]) == (0, 15, [1, 2, 2])
        await stream.seek(pack.start_positions)
        assert [each.id for each in (await stream.consume()).msgs] == [1, 2, 2]


async def test_a_pack_of_two_channels_waits_for_a_tick_that_both_have(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node", idle_s=0.01) as factory, factory.new_tt_msg_stream() as stream:
        await stream.as_consumer(["a", "b"], "g")
        async with factory.new_msg_stream() as a, factory.new_msg_stream() as b:
            await a.as_producer(["a"])
            await b.as_producer(["b"])
            await send(a, [message(1), tick(5), message(6), tick(10)])
            await send(b, [message(2), tick(7)])
            with pytest.raises(ChannelIdle) as idle:
                await stream.consume()
            assert idle.value.channels == ("b",)
            await send(b, [tick(10)])
            assert summary(await stream.consume()) == (0, 10, [1, 6, 2])


async def test_a_subscription_to_ticks_goes_on_without_a_seek_with_what_it_had_left_over(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory:
        for expected in ([1, 3], [9], [14, 12, 13], [19]):
            async with factory.new_tt_msg_stream() as stream:
                await stream.as_producer(["a"])
                await stream.as_consumer(["a"], "g")
                if expected == [1, 3]:
                    await send(stream, VECTOR)
                assert [each.end_ts for each in (await stream.consume()).msgs] == expected


async def test_a_ticker_writes_ticks_into_every_channel_of_its_producer(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory, factory.new_tt_msg_stream() as stream:
        await stream.as_producer(["a", "b"])
        await stream.as_consumer(["a", "b"], "g")
        stream.start_ticker(count(1).__next__, interval_s=0.001)
        ends = [(await stream.consume()).end_ts for _ in range(3)]
        assert ends == sorted(set(ends))
        with pytest.raises(InvalidArgument, match="has a ticker"):
            stream.start_ticker(count(1).__next__)


async def test_producing_tells_why_the_ticker_has_ended(tmp_path: Path) -> None:
    def fails() -> int:
        raise ZeroDivisionError

    async with factory_of(tmp_path / "node") as factory, factory.new_msg_stream() as stream:
        await stream.as_producer(["a"])
        stream.start_ticker(fails)
        await asyncio.sleep(0)
        with pytest.raises(ZeroDivisionError):
            await stream.produce(MsgPack(msgs=[message(1)]))


async def test_switched_off_producing_lets_a_single_create_collection_through(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory, factory.new_msg_stream() as stream:
        await stream.as_producer(["a"])
        create = message(1, kind=MessageType.CREATE_COLLECTION)
        stream.force_enable_produce(False)
        for refused in (stream.produce(MsgPack(msgs=[create])), stream.broadcast(MsgPack(msgs=[create, create]))):
            with pytest.raises(AccessDenied):
                await refused
        assert await stream.get_latest_msg_id("a") == b""
        await stream.broadcast(MsgPack(msgs=[create]))
        stream.force_enable_produce(True)
        assert len((await stream.produce(MsgPack(msgs=[message(2)])))["a"]) == 1
        assert await stream.produce(MsgPack(msgs=[])) == {}


async def test_a_rule_of_the_users_chooses_the_channels(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory, factory.new_msg_stream() as stream:
        await stream.as_producer(["a", "b"])
        stream.set_repack_func(lambda messages, _keys: {1: MsgPack(msgs=list(messages))})
        assert list(await stream.produce(MsgPack(msgs=[message(1)]))) == ["b"]


async def test_cancelling_consume_loses_no_message(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory, factory.new_msg_stream() as stream:
        await stream.as_producer(["a"])
        await stream.as_consumer(["a"], "g")
        for ts in range(1, 20):
            consuming = asyncio.ensure_future(stream.consume())
            for _ in range(ts % 4):
                await asyncio.sleep(0)
            sending = asyncio.ensure_future(send(stream, [message(ts)]))
            for _ in range(ts):
                await asyncio.sleep(0)
            consuming.cancel()
            await sending
            found = await asyncio.gather(consuming, return_exceptions=True)
            pack = found[0] if isinstance(found[0], MsgPack) else await stream.consume()
            assert summary(pack)[2] == [ts]


async def test_bad_calls_say_what_is_wrong_and_do_nothing(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory:
        stream = factory.new_tt_msg_stream()
        with pytest.raises(InvalidArgument, match="as_producer"):
            await stream.produce(MsgPack(msgs=[message(1)]))
        for names in ("ab", [""], ["a/b"]):
            with pytest.raises(InvalidArgument):
                await stream.as_producer(names)
        await stream.as_producer(["a", "b"])
        await stream.as_consumer(["a", "b"], "g")
        with pytest.raises(InvalidArgument, match="start"):
            await stream.consume()
        await stream.start()
        with pytest.raises(InvalidArgument, match="another stream"):
            await stream.as_consumer(["c"], "other")
        with pytest.raises(TooLarge):
            await stream.produce(MsgPack(msgs=[message(1), message(2, row=bytes(9 << 20))]))
        assert await stream.get_latest_msg_id("b") == b""
        good = MsgPosition("a", MessagePlace(1).message_id)
        for positions, wrong in (
            ([], InvalidArgument),
            ([MsgPosition("x", good.message_id)], ChannelNotFound),
            ([MsgPosition("a", b"")], InvalidArgument),
            ([MsgPosition("a", b"0")], InvalidArgument),
            ([good], InvalidArgument),
            ([good, MsgPosition("b", MessagePlace(2**63).message_id)], Exception),
        ):
            with pytest.raises(wrong):
                await stream.seek(positions)
        await stream.close()
        await stream.close()
        with pytest.raises(OnShutdown):
            await stream.consume()


async def test_a_bad_position_goes_to_the_end_when_that_is_wanted(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node", ignore_bad_position=True) as factory, factory.new_msg_stream() as stream:
        await stream.as_producer(["a"])
        await stream.as_consumer(["a"], "g")
        await send(stream, [message(1)])
        await stream.seek([MsgPosition("a", MessagePlace(2**63).message_id)])
        await send(stream, [message(2)])
        assert summary(await stream.consume())[2] == [2]


async def test_what_is_no_message_is_corrupt_until_a_seek(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path / "node") as node:
        async with RmqMsgStreamFactory(node.mq).new_msg_stream() as stream:
            await stream.as_producer(["a"])
            await stream.as_consumer(["a"], "g")
            await send(stream, [message(1)])
            [bad] = await node.mq.produce("a", [b"\xff\xff"])
            await send(stream, [message(2)])
            seen: list[int] = []
            for _ in range(3):
                with pytest.raises(Corrupt, match=str(bad)):
                    while True:
                        seen += summary(await stream.consume())[2]
            assert seen == [1]
            await stream.seek([MsgPosition("a", MessagePlace(bad).message_id)])
            assert summary(await stream.consume())[2] == [2]


async def test_a_channel_with_too_much_before_its_tick_is_named(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node", buffer_bytes_max=1000) as factory, factory.new_tt_msg_stream() as stream:
        await stream.as_producer(["a"])
        await stream.as_consumer(["a"], "g")
        await send(stream, [message(ts) for ts in range(1, 100)])
        with pytest.raises(Overloaded, match="'a'"):
            await stream.consume()


async def test_packs_of_an_iterator_end_with_the_stream(tmp_path: Path) -> None:
    async with factory_of(tmp_path / "node") as factory, factory.new_msg_stream() as stream:
        await stream.as_producer(["a"])
        await stream.as_consumer(["a"], "g")
        await send(stream, [message(1), message(2)])
        seen = []
        async for pack in stream.chan():
            seen += pack.msgs
            if len(seen) == 2:
                await stream.close()
        assert [each.id for each in seen] == [1, 2]


async def test_a_disposed_subscription_is_gone_and_disposing_may_be_repeated(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path / "node") as node:
        factory = RmqMsgStreamFactory(node.mq, new_dispatcher=in_memory_dispatcher, options=StreamOptions())
        async with factory.new_msg_stream() as stream:
            await stream.as_consumer(["a"], "g")
        dispose = factory.new_disposer(["a", "b"], "g")
        await dispose()
        await dispose()
        assert not await node.mq.exist_consumer_group("a", "g")
