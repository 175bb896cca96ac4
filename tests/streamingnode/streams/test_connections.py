"""Streams of a client, whose connection is lost meanwhile, and streams without `async`."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import streamingnode as sn
from streamingnode.errors import AccessDenied
from streamingnode.remote.answers import Rights
from streamingnode.remote.server import Server
from streamingnode.streams.factory import MsgStreamFactory
from streamingnode.streams.messages import MsgPack, MsgType, TsMsg, new_memory_dispatcher
from streamingnode.sync import SyncMsgStreamFactory
from tests.parts_of import parts_of
from tests.streamingnode.remote.nodes import Served, node_behind_proxy
from tests.streamingnode.remote.proxy import until
from tests.streamingnode.streams.messages_of import ends, inserts, tick_of
from tests.streamingnode.streams.streams_on import send

pytestmark = pytest.mark.anyio


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with node_behind_proxy(tmp_path / "node") as served:
        yield served


async def lose_connection(served: Served) -> None:
    served.proxy.cut()
    await until(lambda: not served.proxy.open_connections)


async def test_what_a_stream_holds_comes_once_over_lost_connections(served: Served) -> None:
    async with (
        served.client() as client,
        MsgStreamFactory(served.owner.mq).new_msg_stream() as producer,
    ):
        await producer.as_producer(["a"])
        await send(producer, inserts(1), inserts(2), inserts(3))
        async with MsgStreamFactory(client.mq).new_msg_stream() as consumer:
            await consumer.as_consumer(["a"], "g")
            # the others are read with it
            got = [ends((await consumer.consume(timeout=60)).messages)]
            for number in (4, 5):
                await lose_connection(served)
                await send(producer, inserts(number))
                got.append(ends((await consumer.consume(timeout=60)).messages))
            await lose_connection(served)
            got += [ends((await consumer.consume(timeout=60)).messages) for _ in range(2)]
            assert got == [[1], [2], [3], [4], [5]]
        assert (await served.owner.mq.info())["a"].groups["g"].lag == 0


async def test_a_tick_stream_is_what_it_was_over_lost_connections(served: Served) -> None:
    factory = MsgStreamFactory(served.owner.mq)
    async with (
        served.client() as client,
        factory.new_msg_stream() as a,
        factory.new_msg_stream() as b,
    ):
        async with MsgStreamFactory(client.mq).new_tt_msg_stream() as ticks:
            await a.as_producer(["a"])
            await b.as_producer(["b"])
            await ticks.as_consumer(["a", "b"], "g")
            for tick in (10, 20, 30):
                await send(a, inserts(tick - 1, tick + 1), [tick_of(tick)])
                with pytest.raises(TimeoutError):
                    await ticks.consume(timeout=0.05)  # holds what is of `a`
                await lose_connection(served)
                await send(b, inserts(tick), [tick_of(tick)])
                pack = await ticks.consume(timeout=60)
                before = [tick - 9] if tick > 10 else []
                assert (ends(pack.messages), pack.end_ts) == ([*before, tick - 1, tick], tick)


async def test_a_tick_stream_is_what_it_was_when_the_node_does_not_notice_a_lost_connection(
    served: Served,
) -> None:
    factory = MsgStreamFactory(served.owner.mq)
    async with served.client() as client, factory.new_msg_stream() as producer:
        async with MsgStreamFactory(client.mq).new_tt_msg_stream() as ticks:
            await producer.as_producer(["a"])
            await ticks.as_consumer(["a"], "g")
            consuming = asyncio.ensure_future(ticks.consume(timeout=60))
            [lost] = served.server.sessions
            await until(lambda: lost._topics.waiting)
            served.proxy.cut_clients()
            await until(
                lambda: any(session._topics.waiting for session in served.server.sessions - {lost})
            )
            assert lost not in served.server.sessions, "the newer connection ended it"
            await send(producer, inserts(9))
            await send(producer, [tick_of(10)])
            pack = await consuming
            assert (ends(pack.messages), pack.end_ts) == ([9], 10)


async def test_a_client_consumes_with_the_right_to_and_needs_another_to_make_channels(
    served: Served,
) -> None:
    rights = Rights("reader", produce=frozenset(), admin=frozenset())
    factory = MsgStreamFactory(served.owner.mq)
    async with factory.new_msg_stream() as producer, factory.new_msg_stream() as first:
        await producer.as_producer(["a"])
        await first.as_consumer(["a"], "g")
        await send(producer, inserts(1))
    server = Server(parts_of(served.owner), connections_max=9)
    try:
        port = await server.listen_tcp("127.0.0.1", 0, lambda _hello, _connection: rights, None)
        async with sn.connect(f"tcp://127.0.0.1:{port}") as client:
            async with MsgStreamFactory(client.mq).new_msg_stream() as stream:
                await stream.as_consumer(["a"], "g")
                assert ends((await stream.consume(timeout=60)).messages) == [1]
                with pytest.raises(AccessDenied):
                    await stream.as_consumer(["new"], "g")
                with pytest.raises(AccessDenied):
                    await stream.as_producer(["a"])
    finally:
        await server.close()


@pytest.mark.parametrize("where", ["here", "over a connection"])
def test_streams_work_without_async(tmp_path: Path, where: str) -> None:
    settings: dict[str, Any] = {"serve.listen": True}
    with sn.sync.open_node(tmp_path / "node", **settings) as owner:
        if where == "here":
            use_streams(SyncMsgStreamFactory(owner.mq, new_memory_dispatcher))
        else:
            with sn.sync.connect(f"unix:{tmp_path}/node/node.sock") as client:
                use_streams(SyncMsgStreamFactory(client.mq, new_memory_dispatcher))


def use_streams(factory: SyncMsgStreamFactory) -> None:
    with factory.new_msg_stream() as producer, factory.new_tt_msg_stream() as consumer:
        producer.as_producer(["a", "b"])
        consumer.as_consumer(["a", "b"], "g")
        with producer.ticker(interval_s=0.01) as ticker:
            with ticker.stamp(2) as first:
                orders = [
                    TsMsg(MsgType.SEARCH, first + at, first + at, b"%d" % at, [at])
                    for at in range(2)
                ]
                assert set(producer.produce(MsgPack(orders))) == {"a", "b"}
            while not (pack := consumer.consume(timeout=60)).messages:
                pass
            assert [each.body for each in pack.messages] == [b"0", b"1"]
            consumer.seek(pack.start_positions)
            assert [each.body for each in next(iter(consumer)).messages] == [b"0", b"1"]
    factory.new_disposer(["a", "b"], "g")()
    with factory.new_msg_stream() as plain:
        plain.as_consumer(["a"], "other")
        assert [
            each.body for each in next(iter(plain)).messages if each.type is MsgType.SEARCH
        ] in ([b"0"], [])


@pytest.mark.parametrize(
    "wrong",
    [
        TsMsg(MsgType.INSERT, 1, 1, b"", (0,), id=1 << 63),
        TsMsg(MsgType.INSERT, 1, 1, b"", (0,), part=-1),
        TsMsg(MsgType.INSERT, 2, 1, b"", (0,)),
        TsMsg(MsgType.INSERT, 1, 1 << 64, b"", (0,)),
        TsMsg(MsgType.INSERT, "1", 1, b"", (0,)),  # type: ignore[arg-type]
        TsMsg(MsgType.INSERT, 1, 1, 3, (0,)),
        TsMsg(MsgType.INSERT, 1, 1, b"", ("x",)),  # type: ignore[arg-type]
        TsMsg(MsgType.INSERT, 1, 1, b"", None),  # type: ignore[arg-type]
        TsMsg(3333, 1, 1, b"", (0,)),  # type: ignore[arg-type]
        "text",
    ],
    ids=[
        "id",
        "part",
        "begins after its end",
        "tick",
        "tick as text",
        "body",
        "key",
        "keys",
        "type",
        "text",
    ],
)
async def test_a_message_that_cannot_be_is_refused_before_anything_is_produced(
    served: Served, wrong: Any
) -> None:
    async with MsgStreamFactory(served.owner.mq, new_memory_dispatcher).new_msg_stream() as stream:
        await stream.as_producer(["a", "b"])
        good = TsMsg(MsgType.SEARCH, 1, 1, b"", (1,))
        for pack in (MsgPack([good, wrong]), MsgPack([wrong])):
            with pytest.raises(sn.errors.InvalidArgument):
                await stream.produce(pack)
            if not isinstance(wrong, TsMsg) or wrong.hash_keys == (0,):
                with pytest.raises(sn.errors.InvalidArgument):
                    await stream.broadcast(pack)
        assert [await served.owner.mq.get_latest_msg(channel) for channel in "ab"] == [-1, -1]
