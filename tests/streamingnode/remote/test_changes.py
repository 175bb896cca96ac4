"""A change is made once, whatever becomes of the connections that its client asks over."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

import streamingnode as sn
from streamingnode.errors import Indeterminate
from streamingnode.node import Node
from streamingnode.remote import changes as changes_module
from streamingnode.remote.answers import Rights
from streamingnode.remote.changes import LEFT_S_MAX, REPLIES_BYTES_MAX, ClientChanges, Reply
from streamingnode.remote.link import LinkState
from streamingnode.remote.server import Session
from tests.streamingnode.remote.client_cases import pass_all
from tests.streamingnode.remote.nodes import SCHEMA, SETTINGS, link_of, serving
from tests.streamingnode.remote.proxy import Passing, kinds, proxied, until
from wal.errors import OnShutdown
from wal.frames import FrameKind
from wal.wire_types import WireError

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

RIGHTS = Rights("test")


class Client:
    """The changes of one client, and the replies that it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[int, Reply]] = []
        self.made: list[int] = []
        self.changes = ClientChanges(RIGHTS, asyncio.get_running_loop().create_task)
        self.changes.attach(self.answer)

    async def answer(self, number: int, reply: Reply) -> None:
        self.got.append((number, reply))

    async def ask(self, number: int, payload: bytes = b"done") -> None:
        """Ask for a change, which takes a turn of the loop."""

        async def change() -> Reply:
            self.made.append(number)
            await asyncio.sleep(0)
            return Reply(payload)

        if not self.changes.answer_again(number):
            self.changes.begin(number, change)
        await anyio.wait_all_tasks_blocked()


async def test_a_number_that_comes_again_gets_the_reply_of_the_first_time() -> None:
    client = Client()
    for number in (1, 2, 1):
        await client.ask(number, b"%d" % number)
    assert client.made == [1, 2]
    assert client.got == [(1, Reply(b"1")), (2, Reply(b"2")), (1, Reply(b"1"))]


async def test_a_reply_is_kept_while_there_is_no_connection() -> None:
    client = Client()
    client.changes.detach(client.answer, now=5.0)
    assert client.changes.left_at == 5.0
    await client.ask(1)
    assert client.got == []
    client.changes.attach(client.answer)
    await client.ask(1)
    assert (client.made, client.got, client.changes.left_at) == ([1], [(1, Reply(b"done"))], None)


async def test_an_older_connection_that_ends_leaves_the_newer_one_attached() -> None:
    older = Client()
    newer = Client()
    older.changes.attach(newer.answer)
    older.changes.detach(older.answer, now=5.0)
    await older.ask(1)
    assert newer.got == [(1, Reply(b"done"))]


async def test_a_client_whose_connection_ends_before_its_welcome_has_left() -> None:
    client = Client()
    unheard = ClientChanges(RIGHTS, asyncio.get_running_loop().create_task)
    unheard.detach(client.answer, now=5.0)
    unheard.detach(client.answer, now=6.0)
    assert unheard.left_at == 5.0


async def test_replies_that_the_client_has_are_forgotten() -> None:
    client = Client()
    for number in (1, 2, 3):
        await client.ask(number)
    client.changes.settle(3)
    assert list(client.changes._replies) == [3]
    await client.ask(2)
    assert client.made == [1, 2, 3, 2], "the client said that it has this reply"


@pytest.mark.parametrize("bound", ["number", "bytes"])
async def test_a_reply_that_has_no_room_leaves_the_outcome_open(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client()
    if bound == "number":
        monkeypatch.setattr(changes_module, "REPLIES_MAX", 2)
    size_bytes = REPLIES_BYTES_MAX // 2 if bound == "bytes" else 1
    for number in (1, 2, 3):
        await client.ask(number, bytes(size_bytes))
    client.got.clear()
    for number in (1, 2, 3):
        await client.ask(number)
    assert client.made == [1, 2, 3]
    assert [number for number, _ in client.got] == [1, 2, 3]
    errors = [reply.error for _, reply in client.got]
    assert isinstance(errors[0], WireError)
    assert isinstance(errors[0].error(), Indeterminate)
    assert errors[1:] == [None, None]


@pytest.mark.parametrize("how", ["cancel", "end"])
async def test_a_change_that_nobody_waits_for_is_cancelled(how: str) -> None:
    client = Client()
    ended = asyncio.Event()

    async def change() -> Reply:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return Reply()

    task = client.changes.begin(1, change)
    await anyio.wait_all_tasks_blocked()
    if how == "cancel":
        assert client.changes.cancel(1)
        assert not client.changes.cancel(2)
    else:
        client.changes.end()
    await asyncio.wait([task])
    assert (ended.is_set(), client.changes.under_way, client.got) == (True, 0, [])


# --- over a connection ----------------------------------------------------------------------------


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[Node]:
    async with sn.open_node(tmp_path / "node", **SETTINGS) as owner:
        assert owner.mq is not None
        await owner.mq.create_topic("t")
        yield owner


async def produced(owner: Node) -> int:
    assert owner.mq is not None
    return (await owner.mq.info())["t"].produced


async def test_changes_that_a_new_node_does_not_know_are_in_doubt_and_reads_are_repeated(
    owner: Node,
) -> None:
    async with proxied(1) as proxy:
        async with serving(owner, proxy=proxy) as served:
            client = await sn.connect(proxy.url)
            served.proxy.on_frame = kinds(FrameKind.REPLY)
            producing = asyncio.ensure_future(client.mq.produce("t", [b"tea"]))
            creating = asyncio.ensure_future(
                client.create_collection("c", SCHEMA, primary_key="id")
            )
            reading = asyncio.ensure_future(client.mq.info())
            async with asyncio.timeout(60):
                # what it waits for is asked anew
                while not (await produced(owner) and owner.collections()):  # noqa: ASYNC110
                    await asyncio.sleep(0)
        served.proxy.on_frame = pass_all
        async with serving(owner, proxy=proxy):
            with pytest.raises(Indeterminate, match=r"before mq\.produce was answered"):
                await producing
            assert (await creating).name == "c", "its stamp is in the log"
            assert (await reading)["t"].produced == 1
            await client.aclose()
    assert await produced(owner) == 1


@pytest.mark.parametrize("cut_at", [FrameKind.WELCOME, FrameKind.CATALOG])
async def test_a_new_node_that_the_client_could_not_reach_at_first_does_not_pass_for_the_old_one(
    owner: Node, cut_at: FrameKind
) -> None:
    async with proxied(1) as proxy:
        async with serving(owner, proxy=proxy) as served:
            client = await sn.connect(proxy.url)
            served.proxy.on_frame = kinds(FrameKind.REPLY)
            producing = asyncio.ensure_future(client.mq.produce("t", [b"tea"]))
            async with asyncio.timeout(60):
                while not await produced(owner):  # noqa: ASYNC110
                    await asyncio.sleep(0)
        async with serving(owner, proxy=proxy) as served:

            def cut(passing: Passing) -> bool:
                if passing.kind == cut_at:
                    served.proxy.on_frame = pass_all
                    served.proxy.cut()
                return passing.kind != cut_at

            served.proxy.on_frame = cut
            with pytest.raises(Indeterminate):
                await producing
            assert served.proxy.on_frame is pass_all, "the client came once more"
            await client.aclose()
    assert await produced(owner) == 1


async def test_a_change_that_its_caller_gave_up_over_a_stalled_connection_is_cancelled(
    owner: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Session._run
    seen: list[str] = []

    async def noted(session: Session, number: int, name: str, payload: bytes) -> Reply:
        if name == "delete_producer":
            seen.append(name)
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("cancelled")
        return await run(session, number, name, payload)

    monkeypatch.setattr(Session, "_run", noted)
    async with serving(owner) as served, served.client() as client:
        deleting = asyncio.ensure_future(client.delete_producer("feed"))
        await until(lambda: seen)
        served.proxy.stall()
        deleting.cancel()
        await asyncio.wait([deleting])
        await until(lambda: served.proxy.held_bytes)
        connection = link_of(client)._connection
        assert connection is not None
        connection.abort(OnShutdown("the network"))
        await client.consistent_tick()
        await until(lambda: seen == ["delete_producer", "cancelled"])


async def test_a_change_that_its_caller_gave_up_without_a_connection_is_cancelled_before_others(
    owner: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Session._run
    seen: list[str] = []

    async def noted(session: Session, number: int, name: str, payload: bytes) -> Reply:
        seen.append(name)
        if name == "delete_producer":
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("cancelled")
        return await run(session, number, name, payload)

    monkeypatch.setattr(Session, "_run", noted)
    async with serving(owner) as served, served.client() as client:
        deleting = asyncio.ensure_future(client.delete_producer("feed"))
        await until(lambda: seen)
        served.proxy.is_refusing = True
        served.proxy.cut()
        await until(lambda: link_of(client).state is LinkState.CONNECTING)
        deleting.cancel()
        await asyncio.wait([deleting])
        await until(lambda: not served.server.sessions)
        assert seen == ["delete_producer"], "it goes on while its client may come back"
        served.proxy.is_refusing = False
        await client.consistent_tick()
        await until(lambda: len(seen) == 3)
    assert sorted(seen) == ["cancelled", "consistent_tick", "delete_producer"]


async def test_changes_of_a_client_that_is_gone_for_long_are_forgotten(
    owner: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(owner) as served:
        for number in range(3):
            async with served.client() as client:
                await client.mq.create_topic(f"t{number}")
        await until(lambda: not served.server.sessions)
        served.server.look()
        assert len(served.server.changes.clients) == 3
        first, *_ = served.server.changes.clients
        monkeypatch.setattr("streamingnode.remote.changes.LEFT_MAX", 2)
        served.server.look()
        assert first not in served.server.changes.clients
        for changes in served.server.changes.clients.values():
            changes.left_at = asyncio.get_running_loop().time() - LEFT_S_MAX - 1
        async with served.client() as client:
            await client.mq.create_topic("t3")
            served.server.look()
            assert [each.left_at for each in served.server.changes.clients.values()] == [None]


async def test_nobody_with_other_rights_gets_the_replies_of_a_client(owner: Node) -> None:
    async with serving(owner) as served:
        known = served.server.changes
        changes = known.of(1, RIGHTS)
        assert known.of(1, RIGHTS) is changes
        other = known.of(1, Rights("other"))
        assert other is not changes
        assert other.memory != changes.memory


async def test_the_node_keeps_no_reply_that_the_client_has(owner: Node) -> None:
    async with serving(owner) as served, served.client() as client:
        for number in range(20):
            await client.mq.create_topic(f"t{number}")
        await asyncio.gather(*[client.mq.produce("t", [b"tea"]) for _ in range(20)])
        await client.mq.create_topic("last")
        (changes,) = served.server.changes.clients.values()
        assert len(changes._replies) == 1
