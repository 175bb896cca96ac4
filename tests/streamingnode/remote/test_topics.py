"""`node.mq`, of a node of this process and of a client: the same cases; and what only a connection
can do to it.
"""

import asyncio
import math
from collections import UserList, deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

import streamingnode as sn
from streamingnode.errors import AccessDenied
from streamingnode.node import Node
from streamingnode.remote import topics
from streamingnode.remote.answers import Rights
from streamingnode.remote.calls import Access
from streamingnode.remote.server import Server
from streamingnode.remote.topics import CONSUMERS_MAX
from streamingnode.streams.channels import ChannelDescription, ChannelService, OwnerDescription
from tests.parts_of import parts_of
from tests.streamingnode.remote.client_cases import SOON_S
from tests.streamingnode.remote.nodes import Served, node_behind_proxy
from tests.streamingnode.remote.proxy import Passing, Way, until
from tests.wal.rocksmq.queues import Clock
from wal.errors import (
    AlreadyExists,
    GroupNotFound,
    InvalidArgument,
    OnShutdown,
    Overloaded,
    TooLarge,
    TopicNotFound,
    Truncated,
)
from wal.frames import FrameKind
from wal.memory_store import MemoryLogStore
from wal.rocksmq.contract import Consumer, MessageQueue
from wal.rocksmq.messages import ConsumerMessage, ProducerMessage
from wal.rocksmq.queue import RocksMQ

pytestmark = pytest.mark.anyio


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A served node with a topic `t` and a group `g`, of whose clients nothing is left in the
    end.
    """
    async with node_behind_proxy(tmp_path / "node") as served:
        await served.owner.mq.create_topic("t")
        await served.owner.mq.create_consumer_group("t", "g")
        yield served
        await served.all_gone()


@pytest.fixture
async def client(served: Served) -> AsyncIterator[Node]:
    """A client of it."""
    async with served.client() as client:
        yield client


@pytest.fixture(params=["embedded", "remote"])
async def node(served: Served, request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    """The node itself, and a client of it."""
    if request.param == "embedded":
        yield served.owner
    else:
        async with served.client() as client:
            yield client


def payloads(messages: list[ConsumerMessage]) -> list[bytes]:
    return [message.payload for message in messages]


# --- the same, embedded and remote ----------------------------------------------------------------


async def test_what_was_produced_is_consumed_with_its_properties_and_gone_once_acknowledged(
    node: Node,
) -> None:
    ids = await node.mq.produce("t", [ProducerMessage(b"a", {"kind": "x"}), b"b"])
    assert isinstance(ids, range)
    found = await node.mq.consume("t", "g", 10)
    assert found == [
        ConsumerMessage(ids[0], b"a", {"kind": "x"}),
        ConsumerMessage(ids[1], b"b", {}),
    ]
    await node.mq.ack("t", "g", list(ids))
    info = (await node.mq.info())["t"]
    assert (info.end_id, info.produced, info.acked, info.groups["g"].lag) == (ids[-1], 2, 2, 0)
    assert await node.mq.get_latest_msg("t") == ids[-1]
    with pytest.raises(AlreadyExists):
        await node.mq.check_topic_valid("t")


async def test_topics_and_groups_are_made_and_removed(node: Node) -> None:
    await node.mq.create_topic("u")
    await node.mq.create_topic("u")
    await node.mq.create_consumer_group("u", "h")
    with pytest.raises(AlreadyExists):
        await node.mq.create_consumer_group("u", "h")
    assert await node.mq.exist_consumer_group("u", "h")
    await node.mq.destroy_consumer_group("u", "h")
    assert not await node.mq.exist_consumer_group("u", "h")
    await node.mq.destroy_topic("u")
    assert set(await node.mq.info()) == {"t"}


async def test_seeking_goes_in_both_directions(node: Node) -> None:
    ids = await node.mq.produce("t", [b"0", b"1", b"2"])
    await node.mq.seek("t", "g", ids[2])
    assert payloads(await node.mq.consume("t", "g", 9)) == [b"2"]
    await node.mq.seek("t", "g", ids[1])
    assert payloads(await node.mq.consume("t", "g", 9)) == [b"1", b"2"]
    await node.mq.force_seek("t", "g", 0)
    assert payloads(await node.mq.consume("t", "g", 9)) == [b"0", b"1", b"2"]
    await node.mq.seek_to_latest("t", "g")
    assert await node.mq.consume("t", "g", 9) == []
    with pytest.raises(Truncated) as told:
        await node.mq.seek("t", "g", ids[0] - 1)
    assert told.value.fields()["earliest"] == ids[0]


async def test_what_cannot_be_is_refused_with_the_same_errors(node: Node) -> None:
    mq = node.mq
    for call, kind in (
        (mq.produce("no", [b"a"]), TopicNotFound),
        (mq.consume("t", "no", 1), GroupNotFound),
        (mq.register_consumer("t", "no"), GroupNotFound),
        (mq.consume("t", "g", 0), InvalidArgument),
        (mq.consume("t", "g", "many"), InvalidArgument),  # type: ignore[arg-type]
        (mq.consume("t", "g", 1, wait_s="long"), InvalidArgument),  # type: ignore[arg-type]
        (mq.register_consumer("t", "g", ack_timeout_s="long"), InvalidArgument),  # type: ignore[arg-type]
        (mq.consume("t", "g", 1, wait_s=1 << 2_000), InvalidArgument),
        (mq.register_consumer("t", "g", ack_timeout_s=10**5_000), InvalidArgument),
        (mq.get_message("t", "there"), InvalidArgument),  # type: ignore[arg-type]
        (mq.produce("t", [ProducerMessage(b"a", 5)]), InvalidArgument),  # type: ignore[arg-type]
        (mq.seek("t", "g", "there"), InvalidArgument),  # type: ignore[arg-type]
        (mq.produce("t", []), InvalidArgument),
        (mq.produce("t", [bytearray(b"a")]), InvalidArgument),  # type: ignore[list-item]
        (mq.produce("t", [bytes(17 << 20)]), TooLarge),
        (mq.create_topic("a/b"), InvalidArgument),
        (mq.ack("t", "g", [1 << 62]), InvalidArgument),
        (mq.register_consumer("t", "g", ack_timeout_s=0), InvalidArgument),
    ):
        with pytest.raises(kind):
            await call
    assert (await mq.info())["t"].produced == 0


async def test_consumers_of_a_group_compete_and_what_one_gives_back_goes_to_another(
    node: Node,
) -> None:
    await node.mq.produce("t", [b"0", b"1", b"2"])
    async with await node.mq.register_consumer("t", "g", ack_timeout_s=None) as one:
        mine = await one.consume(2)
        async with await node.mq.register_consumer("t", "g") as other:
            assert payloads(await other.consume(9)) == [b"2"]
            await one.give_back([mine[0].message_id])
            assert payloads(await other.consume(9)) == [b"0"]
        await one.ack([mine[1].message_id])
    assert sorted(payloads(await node.mq.consume("t", "g", 9))) == [b"0", b"2"]
    with pytest.raises(OnShutdown):
        await one.consume(1)


async def test_a_consumer_that_waits_gets_what_is_produced_then(node: Node) -> None:
    async with await node.mq.register_consumer("t", "g") as consumer:
        waiting = asyncio.ensure_future(anext(aiter(consumer)))
        await node.mq.produce("t", [b"news"])
        assert (await waiting).payload == b"news"


async def test_a_wait_that_is_no_number_of_seconds_holds_nobody_up(node: Node) -> None:
    async with asyncio.timeout(SOON_S):
        assert await node.mq.consume("t", "g", 1, wait_s=math.nan) == []


async def test_a_wait_that_is_cancelled_loses_nothing(node: Node) -> None:
    async with await node.mq.register_consumer("t", "g", ack_timeout_s=None) as consumer:
        for turns in range(12):
            waiting = asyncio.ensure_future(consumer.consume(1, wait_s=60))
            for _ in range(turns):
                await asyncio.sleep(0)
            producing = asyncio.ensure_future(node.mq.produce("t", [b"%d" % turns]))
            for _ in range(2 * turns):
                await asyncio.sleep(0)
            waiting.cancel()
            got = await asyncio.gather(waiting, return_exceptions=True)
            await producing
            found = got[0] if isinstance(got[0], list) else await consumer.consume(1, wait_s=60)
            assert payloads(found) == [b"%d" % turns]
            await consumer.ack([found[0].message_id])


# --- over a connection ----------------------------------------------------------------------------


async def test_what_a_lost_client_held_comes_to_others_at_once(served: Served) -> None:
    await served.owner.mq.produce("t", [b"0", b"1"])
    async with served.client() as lost:
        consumer = await lost.mq.register_consumer("t", "g", ack_timeout_s=None)
        assert payloads(await consumer.consume(1)) == [b"0"]
        assert payloads(await lost.mq.consume("t", "g", 1)) == [b"1"]
        waiting = asyncio.ensure_future(served.owner.mq.consume("t", "g", 2, wait_s=60))
        served.proxy.is_refusing = True
        served.proxy.cut()
        found = payloads(await waiting)
        while len(found) < 2:
            found += payloads(await served.owner.mq.consume("t", "g", 2, wait_s=60))
        assert found == [b"0", b"1"]


async def test_a_consumer_goes_on_over_the_next_connection(served: Served, client: Node) -> None:
    consumer = await client.mq.register_consumer("t", "g", ack_timeout_s=None)
    waiting = asyncio.ensure_future(consumer.consume(1, wait_s=60))
    await until(lambda: any(session._topics.waiting for session in served.server.sessions))
    served.proxy.cut()
    await until(lambda: served.proxy.open_connections)
    await served.owner.mq.produce("t", [b"news"])
    found = await waiting
    assert payloads(found) == [b"news"]
    await consumer.ack([found[0].message_id])
    assert (await served.owner.mq.info())["t"].groups["g"].lag == 0
    await consumer.close()


async def iterated(
    served: Served, client: Node, clock: Clock
) -> tuple[Consumer, AsyncIterator[ConsumerMessage]]:
    """Stop the time, and return a consumer that has seven messages and is at the fourth."""
    assert isinstance(served.owner.mq, RocksMQ)
    served.owner.mq._elapsed_ms = clock
    await served.owner.mq.produce("t", [b"%d" % number for number in range(7)])
    consumer = await client.mq.register_consumer("t", "g", ack_timeout_s=10)
    consumer._now = lambda: clock() / 1000
    iteration = aiter(consumer)
    for number in range(4):  # it takes one, two and four
        message = await anext(iteration)
        assert message.payload == b"%d" % number
        await consumer.ack([message.message_id])
    return consumer, iteration


async def test_an_iterating_client_passes_over_what_it_has_held_too_long(
    served: Served, client: Node
) -> None:
    clock = Clock()
    _, iteration = await iterated(served, client, clock)
    clock.ms += 10_000
    assert payloads(await served.owner.mq.consume("t", "g", 9)) == [b"4", b"5", b"6"]
    await served.owner.mq.produce("t", [b"7"])
    async with asyncio.timeout(SOON_S):
        assert (await anext(iteration)).payload == b"7"


async def test_an_iterating_client_passes_over_what_a_lost_connection_gave_to_others(
    served: Served, client: Node
) -> None:
    clock = Clock()
    consumer, iteration = await iterated(served, client, clock)
    served.proxy.cut()
    async with asyncio.timeout(SOON_S):
        found = await served.owner.mq.consume("t", "g", 9, wait_s=SOON_S)
        while len(found) < 3:
            found += await served.owner.mq.consume("t", "g", 9, wait_s=SOON_S)
    assert payloads(found) == [b"4", b"5", b"6"]
    assert await consumer.held([message.message_id for message in found]) == []
    await served.owner.mq.produce("t", [b"7"])
    clock.ms += 100  # what it was told is relied on for less
    async with asyncio.timeout(SOON_S):
        assert (await anext(iteration)).payload == b"7"


async def test_an_iterating_client_asks_its_node_no_more_than_ten_times_a_second(
    served: Served, client: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    clock = Clock()
    held = topics.ClientTopics.held

    async def counted(self: topics.ClientTopics, *arguments: Any, **named: Any) -> Sequence[int]:
        asked.append(clock.ms)
        return await held(self, *arguments, **named)

    monkeypatch.setattr(topics.ClientTopics, "held", counted)
    consumer, iteration = await iterated(served, client, clock)
    assert not asked
    for number in range(4, 7):
        clock.ms += 60
        message = await anext(iteration)
        assert message.payload == b"%d" % number
        await consumer.ack([message.message_id])
    assert asked == [clock.ms - 60]


async def test_how_often_a_message_was_delivered_crosses_the_connection(node: Node) -> None:
    ids = await node.mq.produce("t", [b"0", b"1"])
    async with await node.mq.register_consumer("t", "g") as consumer:
        for time in (1, 2, 3):
            assert [message.delivery_count for message in await consumer.consume(1)] == [time]
            assert await consumer.held(ids) == [ids[0]]
            await consumer.give_back([ids[0]])
            assert await consumer.held(ids) == []
        assert [message.delivery_count for message in await consumer.consume(2)] == [4, 1]
        await consumer.give_back(ids)
        assert await consumer.held(ids) == []
        for call in (consumer.held, consumer.give_back):
            for wrong in (5, ["there"], [[1]]):
                with pytest.raises(InvalidArgument, match="pass a list"):
                    await call(wrong)  # type: ignore[arg-type]


async def test_a_cancelled_wait_ends_at_the_node(served: Served, client: Node) -> None:
    waiting = asyncio.ensure_future(client.mq.consume("t", "g", 1, wait_s=60))
    [session] = served.server.sessions
    await until(lambda: session._topics.waiting)
    waiting.cancel()
    await until(lambda: not session._topics.waiting)
    assert await served.owner.mq.produce("t", [b"a"])
    assert payloads(await served.owner.mq.consume("t", "g", 1)) == [b"a"]


async def test_an_answer_that_crosses_the_cancellation_comes_again(
    served: Served, client: Node
) -> None:
    consumer = await client.mq.register_consumer("t", "g", ack_timeout_s=None)
    await served.owner.mq.produce("t", [b"a"])
    served.proxy.stop(Way.TO_CLIENT)
    asked = asyncio.ensure_future(consumer.consume(1))
    [session] = served.server.sessions
    await until(lambda: session._topics._delivered)
    asked.cancel()
    await until(lambda: not session._topics._delivered)
    assert payloads(await served.owner.mq.consume("t", "g", 1, wait_s=60)) == [b"a"]
    served.proxy.go_on()


async def test_a_produce_whose_answer_was_lost_takes_place_once_and_is_answered(
    served: Served, client: Node
) -> None:
    def no_replies(passing: Passing) -> bool:
        return passing.kind != FrameKind.REPLY

    served.proxy.on_frame = no_replies
    producing = asyncio.ensure_future(client.mq.produce("t", [b"once"]))
    served_info = served.owner.mq.info
    async with asyncio.timeout(60):
        # what it waits for is asked anew
        while (await served_info())["t"].produced == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
    served.proxy.on_frame = lambda _: True
    served.proxy.cut()
    (message_id,) = await producing
    assert await client.mq.get_latest_msg("t") == message_id
    assert (await served_info())["t"].produced == 1


async def test_a_node_that_closes_does_not_wait_for_who_waits_for_messages(tmp_path: Path) -> None:
    async with node_behind_proxy(tmp_path / "node") as served, served.client() as client:
        await client.mq.create_topic("t")
        await client.mq.create_consumer_group("t", "g")
        waiting = asyncio.ensure_future(client.mq.consume("t", "g", 1, wait_s=60))
        [session] = served.server.sessions
        await until(lambda: session._topics.waiting)
        assert not session.is_busy
        waiting.cancel()


async def test_consumers_of_a_connection_are_bounded(client: Node) -> None:
    for _ in range(CONSUMERS_MAX):
        await client.mq.register_consumer("t", "g")
    with pytest.raises(Overloaded, match="close some"):
        await client.mq.register_consumer("t", "g")


async def test_consumers_of_topics_that_are_gone_leave_their_places_to_others(
    client: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "CONSUMERS_MAX", 4)
    for number in range(9):
        name = f"reply-{number}"
        await client.mq.create_topic(name)
        await client.mq.create_consumer_group(name, "g")
        await client.mq.produce(name, [b"a"])
        assert payloads(await client.mq.consume(name, "g", 1)) == [b"a"]
        await client.mq.destroy_topic(name)


async def test_each_of_many_answers_that_cross_their_cancellations_comes_again(
    served: Served, client: Node
) -> None:
    consumers = [
        await client.mq.register_consumer("t", "g", ack_timeout_s=None) for _ in range(100)
    ]
    await served.owner.mq.produce("t", [b"a"] * 100)
    served.proxy.stop(Way.TO_CLIENT)
    asked = [asyncio.ensure_future(consumer.consume(1)) for consumer in consumers]
    async with asyncio.timeout(60):
        # what it waits for is asked anew
        while (await served.owner.mq.info())["t"].delivered < 100:  # noqa: ASYNC110
            await asyncio.sleep(0)
    for each in asked:
        each.cancel()
    found = list[bytes]()
    async with asyncio.timeout(60):
        while len(found) < 100:
            found += payloads(await served.owner.mq.consume("t", "g", 100, wait_s=20))
    served.proxy.go_on()


async def test_one_message_is_read_whatever_groups_have_had(node: Node) -> None:
    ids = await node.mq.produce("t", [ProducerMessage(b"a", {"k": "v"}), b"b"])
    await node.mq.ack("t", "g", ids)
    assert await node.mq.get_message("t", ids[0]) == ConsumerMessage(ids[0], b"a", {"k": "v"})
    assert await node.mq.get_message("t", await node.mq.get_latest_msg("t")) == ConsumerMessage(
        ids[1], b"b", {}
    )
    for nowhere in (-1, ids[0] - 1, ids[1] + 1):
        assert await node.mq.get_message("t", nowhere) is None
    with pytest.raises(TopicNotFound):
        await node.mq.get_message("other", ids[0])


async def test_a_client_has_every_call_of_a_queue_and_of_the_channel_service_and_no_others(
    client: Node,
) -> None:
    for kind, remote in ((MessageQueue, client.mq), (ChannelService, client.channels)):
        names = {name for name in vars(kind) if not name.startswith("_")}
        assert names & {"create_topic", "create_channels"}
        assert all(callable(getattr(remote, name)) for name in names)
        assert not hasattr(remote, "flush")


async def test_a_client_of_a_node_whose_store_keeps_no_topics_gets_that_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MemoryLogStore, "topic_store", None)
    async with node_behind_proxy() as served, served.client() as client:
        with pytest.raises(InvalidArgument, match="directory"):
            await client.mq.info()


@pytest.mark.parametrize(
    "access, refused",
    [
        (Access.CONSUME, {"produce", "create", "destroy"}),
        (Access.PRODUCE, {"consume", "ack", "seek", "create", "destroy"}),
        (Access.ADMIN, {"consume", "ack", "seek", "produce"}),
    ],
)
async def test_each_right_allows_its_calls_on_its_topics_only(
    served: Served, access: Access, refused: set[str]
) -> None:
    server = Server(parts_of(served.owner), connections_max=100)
    nothing = Rights("some", frozenset(), frozenset(), frozenset())
    rights = msgspec.structs.replace(nothing, **{access.value: frozenset({"t"})})
    port = await server.listen_tcp("127.0.0.1", 0, lambda _hello, _connection: rights, None)
    try:
        async with sn.connect(f"tcp://127.0.0.1:{port}") as client:
            denied = set()
            mq = client.mq
            for topic in ("t", "other"):
                for name, call in (
                    ("produce", mq.produce(topic, [b"a"])),
                    ("consume", mq.consume(topic, "g", 1)),
                    ("ack", mq.ack(topic, "g", [])),
                    ("seek", mq.seek_to_latest(topic, "g")),
                    ("create", mq.create_topic(topic)),
                    ("destroy", mq.destroy_consumer_group(topic, "g")),
                ):
                    try:
                        await call
                    except AccessDenied:
                        denied.add((topic, name))
            names = {"produce", "consume", "ack", "seek", "create", "destroy"}
            assert denied == {("t", name) for name in refused} | {("other", name) for name in names}
    finally:
        await server.close()


def test_topics_of_another_process_work_without_async(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"serve.listen": True}
    with sn.sync.open_node(tmp_path / "node", **settings) as owner:
        owner.mq.create_topic("t")
        owner.mq.create_consumer_group("t", "g")
        with sn.sync.connect(f"unix:{tmp_path}/node/node.sock") as client:
            client.mq.produce("t", [b"a", b"b"])
            with client.mq.register_consumer("t", "g") as consumer:
                message = next(iter(consumer))
                consumer.ack([message.message_id])
        assert [each.payload for each in owner.mq.consume("t", "g", 5)] == [b"b"]


async def test_channels_are_created_described_and_destroyed(node: Node) -> None:
    """In this process and over a connection."""
    owner = OwnerDescription("shop", "host:1")
    names = await node.channels.create_channels(owner, 2)
    assert await node.channels.describe_channels(names[1:]) == [ChannelDescription(names[1], owner)]
    with pytest.raises(TopicNotFound):
        await node.channels.destroy_channels([names[0], "nobody"])
    await node.channels.destroy_channels(names[:1])
    assert [each.name for each in await node.channels.describe_channels()] == names[1:]
    with pytest.raises(InvalidArgument):
        await node.channels.create_channels("me", 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [list, tuple, deque, UserList])
async def test_any_sequence_of_messages_with_any_mapping_of_properties_is_produced(
    node: Node, kind: Any
) -> None:
    properties = MappingProxyType({"a": "b"})
    ids = await node.mq.produce(
        "t", kind([b"1", ProducerMessage(b"2", properties), ProducerMessage(b"3")])
    )
    found = await node.mq.consume("t", "g", 9)
    assert [(each.payload, each.properties) for each in found] == [
        (b"1", {}),
        (b"2", {"a": "b"}),
        (b"3", {}),
    ]
    await node.mq.ack("t", "g", kind(ids))
    assert (await node.mq.info())["t"].groups["g"].lag == 0
