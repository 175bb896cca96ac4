"""A client that connects again: what its connection of before still carries takes place no more."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

import streamingnode as sn
from streamingnode.node import Node
from streamingnode.remote import server as server_module
from streamingnode.remote.calls import CALLS, ReadCall
from streamingnode.remote.changes import Reply
from streamingnode.remote.server import Session
from tests.parts_of import parts_of
from tests.streamingnode.remote.client_cases import streamed
from tests.streamingnode.remote.nodes import Served, contents, link_of, node_behind_proxy, rows
from tests.streamingnode.remote.proxy import Way, until
from tests.streamingnode.remote.raw import frame_bytes, hello, raw_client
from tests.streamingnode.remote.session_cases import INSERTS
from tests.streamingnode.remote.test_auth import TOKENS, listening, token_file
from wal.errors import InvalidArgument, OnShutdown
from wal.frames import PREFACE, FrameKind
from wal.wire_types import WireError

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

CLIENT_ID = (1 << 62) + 17
CHANGES = [name for name, call in CALLS.items() if call.changes]
READS = [*(CALLS.keys() - CHANGES), "a call that the node does not know"]


def read_all(collection: int) -> ReadCall:
    """Return the call of a reader of all inserts."""
    return ReadCall(collection, "all", None, None, None, INSERTS, None, 1 << 20)


# --- every call of the table ----------------------------------------------------------------------


@pytest.mark.parametrize("name", READS + CHANGES)
async def test_a_call_that_comes_after_its_client_has_connected_again_is_not_looked_at(
    served: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = list[str]()
    run = Session._run

    async def noted(session: Session, number: int, called: str, payload: bytes) -> Reply:
        taken.append(called)
        return await run(session, number, called, payload)

    monkeypatch.setattr(Session, "_run", noted)
    async with raw_client(served.proxy.port) as older, raw_client(served.port) as newer:
        await older.greet(client_id=CLIENT_ID)
        served.proxy.stop(Way.TO_NODE)
        older.call(7, name, [])
        await newer.greet(client_id=CLIENT_ID)
        served.proxy.go_on()
        assert await older.frame() is None, "the connection has ended, and nothing is answered"
        await newer.still_served()
    assert taken == []


@pytest.mark.parametrize("name", READS)
async def test_a_read_that_is_under_way_has_ended_before_its_client_is_welcomed_again(
    served: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = list[str]()
    may_go_on = asyncio.Event()
    went_on = list[str]()
    run = Session._run

    async def held(session: Session, number: int, called: str, payload: bytes) -> Reply:
        began.append(called)
        await may_go_on.wait()
        went_on.append(called)
        return await run(session, number, called, payload)

    monkeypatch.setattr(Session, "_run", held)
    async with raw_client(served.port) as older, raw_client(served.port) as newer:
        await older.greet(client_id=CLIENT_ID)
        older.call(7, name, [])
        await until(lambda: began)
        session = served.server.clients[CLIENT_ID]
        await newer.greet(client_id=CLIENT_ID)
        assert not session._calls
        may_go_on.set()
        assert await older.frame() is None
        await newer.still_served()
    assert went_on == []


@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_that_is_under_way_goes_on_and_is_answered_over_the_newer_connection(
    served: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = list[str]()
    may_go_on = asyncio.Event()

    async def held(_session: Session, _number: int, called: str, _payload: bytes) -> Reply:
        began.append(called)
        await may_go_on.wait()
        return Reply(b"done")

    monkeypatch.setattr(Session, "_run", held)
    async with raw_client(served.port) as older, raw_client(served.port) as newer:
        await older.greet(client_id=CLIENT_ID)
        older.call(7, name, [])
        await until(lambda: began)
        await newer.greet(client_id=CLIENT_ID)
        newer.call(7, name, [])
        await newer.still_served()
        may_go_on.set()
        for _ in range(2):  # while it is under way, and when it has ended
            reply = await newer.expect(FrameKind.REPLY)
            assert (reply.number, bytes(reply.payload)) == (7, b"done")
            newer.call(7, name, [])
    assert began == [name], "it is made once"


@pytest.mark.parametrize("ends", ["done", "refused"])
async def test_a_change_that_ends_before_the_welcome_is_answered_after_it(
    served: Served, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = list[str]()
    may_change = asyncio.Event()
    may_read = asyncio.Event()

    async def held(_session: Session, _number: int, called: str, _payload: bytes) -> Reply:
        began.append(called)
        if called == "delete_producer":
            await may_change.wait()
            error = None if ends == "done" else WireError.of(InvalidArgument("not this one"))
            return Reply(error=error)
        while not may_read.is_set():
            with suppress(asyncio.CancelledError):
                await may_read.wait()
        return Reply()

    monkeypatch.setattr(Session, "_run", held)
    async with raw_client(served.port) as older, raw_client(served.port) as newer:
        await older.greet(client_id=CLIENT_ID)
        older.call(7, "delete_producer", [])
        older.call(8, "statistics", [])
        await until(lambda: len(began) == 2)
        before = served.server.clients[CLIENT_ID]
        newer.send(PREFACE + hello(CLIENT_ID))
        await until(lambda: served.server.clients[CLIENT_ID] is not before)
        changes = served.server.changes.clients[CLIENT_ID]
        may_change.set()
        await until(lambda: not changes.under_way)
        may_read.set()
        came = [await newer.frame(), await newer.frame()]
        assert [frame and frame.kind for frame in came] == [FrameKind.WELCOME, FrameKind.CATALOG]
        newer.call(7, "delete_producer", [])
        reply = await newer.frame()
        assert reply is not None
        kind = FrameKind.REPLY if ends == "done" else FrameKind.ERROR
        assert (reply.kind, reply.number) == (kind, 7)
    assert began == ["delete_producer", "statistics"], "it is made once"


async def test_a_client_whose_call_of_before_does_not_end_is_refused_and_asks_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SETTLE_S_MAX", 0.01)
    began = list[str]()
    may_end = asyncio.Event()

    async def stubborn(_session: Session, _number: int, called: str, _payload: object) -> Reply:
        began.append(called)
        while not may_end.is_set():
            with suppress(asyncio.CancelledError):
                await may_end.wait()
        return Reply()

    monkeypatch.setattr(Session, "_run", stubborn)
    async with raw_client(served.port) as older:
        await older.greet(client_id=CLIENT_ID)
        older.call(7, "flush", [])
        await until(lambda: began)
        try:
            for _ in range(2):  # and the refused one does not stand for the one before it
                async with raw_client(served.port) as refused:
                    refused.send(PREFACE + hello(CLIENT_ID))
                    assert (await refused.error()).code == "OVERLOADED"
                    await refused.ended()
        finally:
            may_end.set()
        await until(lambda: not served.server.clients)
        async with raw_client(served.port) as newer:
            await newer.greet(client_id=CLIENT_ID)


async def test_nothing_is_taken_between_a_hello_and_its_welcome(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with raw_client(served.port) as older, raw_client(served.port) as newer:
        await older.greet(client_id=CLIENT_ID)
        too_early = frame_bytes(FrameKind.CALL, 1, "statistics", b"\x90")
        newer.send(PREFACE + hello(CLIENT_ID) + too_early)
        assert await newer.frame() is None
        await older.ended()


# --- what would be undone -------------------------------------------------------------------------


@asynccontextmanager
async def client_of(path: Path) -> AsyncIterator[tuple[Served, Node]]:
    """Open a node with a topic of one group, and a client of it."""
    async with node_behind_proxy(path) as served, served.client() as client:
        assert served.owner.mq is not None
        await served.owner.mq.create_topic("t")
        await served.owner.mq.create_consumer_group("t", "g")
        yield served, client


async def repeated(served: Served, client: Node, call: Awaitable[object]) -> object:
    """Make a call whose first try is held back, and which the next connection answers."""
    connection = link_of(client)._connection
    assert connection is not None
    served.proxy.stall()
    calling = asyncio.ensure_future(call)
    await until(lambda: served.proxy.held_bytes)
    connection.abort(OnShutdown("the network"))
    return await calling


async def let_through(served: Served, client: Node) -> None:
    """Have what was held back go on to the node, and return when that has looked at it."""
    served.proxy.go_on()
    await until(lambda: not served.proxy.held_bytes)
    for each in range(3):  # each behind what came before it on the disk
        await client.producer(f"other{each}")
        await client.mq.create_topic(f"other{each}")


async def test_a_group_does_not_skip_what_came_after_its_seek(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (served, client):
        await repeated(served, client, client.mq.seek_to_latest("t", "g"))
        await client.mq.produce("t", [b"tea"] * 10)
        await let_through(served, client)
        assert (await client.mq.info())["t"].groups["g"].lag == 10


async def test_an_older_note_does_not_take_the_place_of_a_newer_one(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (served, client):
        producer = await client.producer("feed")
        await repeated(served, client, producer.put_note(b"older"))
        await producer.put_note(b"newer")
        await let_through(served, client)
        assert (await client.producer("feed")).note == b"newer"


async def test_a_producer_is_not_fenced_by_its_own_opening(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (served, client):
        producer = await repeated(served, client, client.producer("feed"))
        assert isinstance(producer, sn.Producer)
        await let_through(served, client)
        await producer.insert("c", rows(1))


async def test_a_topic_that_was_destroyed_since_is_not_made_again(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (served, client):
        await repeated(served, client, client.mq.create_topic("new"))
        await client.mq.destroy_topic("new")
        await let_through(served, client)
        assert "new" not in await client.mq.info()


async def test_a_transaction_goes_on_over_the_newer_connection(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (served, client):
        txn = await streamed(client)
        await repeated(served, client, client.consistent_tick())
        await let_through(served, client)
        await txn.commit()
        assert (await contents(served.owner)).keys() == set(range(6))


# --- whose connection it is -----------------------------------------------------------------------


async def test_a_hello_that_comes_late_replaces_no_newer_connection(served: Served) -> None:
    (info,) = parts_of(served.owner).catalog.collections()
    async with raw_client(served.proxy.port) as older, raw_client(served.port) as newer:
        served.proxy.stop(Way.TO_NODE)
        older.send(PREFACE + hello(CLIENT_ID, connection=1))
        await newer.greet(client_id=CLIENT_ID, connection=2)
        newer.call(1, "read", read_all(info.id))
        await newer.expect(FrameKind.OPENED)
        served.proxy.go_on()
        assert (await older.error()).code == "PROTOCOL_ERROR"
        await older.ended()
        await served.owner.insert("c", rows(1))
        await newer.expect(FrameKind.MESSAGES)


async def test_a_client_counts_its_hellos(served: Served) -> None:
    async with served.client() as client:
        for connection in (1, 2, 3):
            (session,) = served.server.sessions
            assert session._hello.connection == connection
            served.proxy.cut()
            await until(lambda: not served.server.sessions)
            await client.consistent_tick()


async def test_the_holder_of_another_token_takes_over_nothing_by_the_same_client_id(
    tmp_path: Path,
) -> None:
    async with listening(token_file(tmp_path)) as (node, server, port):
        info = parts_of(node).catalog.collection_by_name("c")
        async with raw_client(port) as client, raw_client(port) as other:
            await client.greet(client_id=CLIENT_ID, token=TOKENS["reader"], connection=1)
            client.call(1, "read", read_all(info.id))
            await client.expect(FrameKind.OPENED)
            other.send(PREFACE + hello(CLIENT_ID, token=TOKENS["admin"], connection=2))
            assert (await other.error()).code == "ACCESS_DENIED"
            await other.ended()
            await node.insert("c", rows(1))
            await client.expect(FrameKind.MESSAGES)
        await until(lambda: not server.clients)
        async with raw_client(port) as next_one:  # nobody has the id any more
            await next_one.greet(client_id=CLIENT_ID, token=TOKENS["admin"])
