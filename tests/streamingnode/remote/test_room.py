"""What all clients together have under way is bounded, and nothing of it stays when they leave."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamingnode.errors import Overloaded
from streamingnode.remote import room as room_module
from streamingnode.remote import server as server_module
from streamingnode.remote.calls import ReadCall
from streamingnode.remote.connection import PART_BYTES
from streamingnode.remote.room import SENT_BYTES_MAX, Room, Share, sent_bytes_each
from streamingnode.remote.writes import WireGroup
from tests.failing_disk import FailingDisk
from tests.parts_of import parts_of
from tests.streamingnode.remote.nodes import Served, node_behind_proxy, rows
from tests.streamingnode.remote.proxy import Passing, Way, until
from tests.streamingnode.remote.raw import Raw, frame_bytes, raw_client, writes_of
from tests.streamingnode.remote.session_cases import INSERTS, serves, waiting_bytes
from wal.frames import FRAME_HEADER_BYTES, RECEIVED_BYTES, FrameKind

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

LONG_BYTES = 1 << 20
BYTES_MAX = 4 * LONG_BYTES
CLIENT_ID = (1 << 62) + 18


def begun(size_bytes: int = LONG_BYTES) -> bytes:
    """Return a long frame without its end."""
    payload = bytes(size_bytes - FRAME_HEADER_BYTES - 11)
    return frame_bytes(FrameKind.CALL, 1, "statistics", payload)[:-1]


def shares(served: Served) -> list[Share]:
    return [session.connection.share for session in served.server.sessions]


def waiting(served: Served) -> int:
    return sum(share.is_waiting for share in shares(served))


@asynccontextmanager
async def clients(served: Served, count: int) -> AsyncIterator[list[Raw]]:
    """Open so many clients that have said hello, to a node with room for three long frames."""
    served.server.room.bytes_max = BYTES_MAX
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(raw_client(served.port)) for _ in range(count)]
        for client in opened:
            await client.greet()
        yield opened


def read_all(served: Served, credit_bytes: int = 1 << 20) -> ReadCall:
    """Return the call of a reader of all inserts."""
    info = parts_of(served.owner).catalog.collection_by_name("c")
    return ReadCall(info.id, "all", None, None, None, INSERTS, None, credit_bytes)


# --- the bound ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_parts", [False, True], ids=["frames", "parts"])
async def test_frames_that_are_not_whole_are_bounded_over_all_connections(
    served: Served, *, in_parts: bool
) -> None:
    room = served.server.room
    async with clients(served, 12) as opened:
        for client in opened:
            if in_parts:
                for number in range(1, 5):
                    client.say(FrameKind.PART, number, None, bytes(LONG_BYTES // 4))
            else:
                client.send(begun())
        await until(lambda: waiting(served) >= len(opened) - 3)
        held = [share.frames_bytes for share in shares(served)]
        assert sum(held) == room.held_bytes <= room.frames_bytes_max == 3 * LONG_BYTES
        assert max(held) <= LONG_BYTES
        await serves(served)  # what is whole finds room, and others are not held up
        connections = [session.connection for session in served.server.sessions]
        kept = sum(each._long_frames.held_bytes + len(each._reader._buffer) for each in connections)
        assert kept <= room.frames_bytes_max + len(opened) * RECEIVED_BYTES
    # Who waits for room is not read from: that it has gone shows when it is given a sign of life.
    while served.server.sessions:
        served.server.look()
        await asyncio.sleep(0)
    assert room.held_bytes == 0


async def test_who_waited_for_room_goes_on_when_others_have_ended(served: Served) -> None:
    async with clients(served, 6) as opened:
        for client in opened:
            client.send(begun())
        await until(lambda: waiting(served) == 3)
        for client in opened:
            client.send(b"\0")
        for client in opened:
            assert (await client.error()).code == "PROTOCOL_ERROR"
            await client.still_served()
    await until(lambda: not served.server.sessions)
    assert served.server.room.held_bytes == 0


async def test_room_that_nobody_gives_back_is_taken_from_the_connection_that_holds_most(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "ROOM_S_MAX", -1.0)
    async with clients(served, 3) as (small, large, late):
        small.send(begun(LONG_BYTES))
        large.send(begun(2 * LONG_BYTES))
        await until(lambda: served.server.room.held_bytes == 3 * LONG_BYTES)
        late.send(begun())
        await until(lambda: waiting(served) == 1)
        served.server.look()
        assert (await large.error()).code == "OVERLOADED"
        await large.ended()
        late.send(b"\0")
        assert (await late.error()).code == "PROTOCOL_ERROR"
        small.send(b"\0")
        await small.still_served()


async def test_who_waits_is_given_signs_of_life_and_is_not_taken_for_silent(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with clients(served, 2) as (holding, late):
        holding.send(begun(3 * LONG_BYTES))
        await until(lambda: served.server.room.held_bytes == 3 * LONG_BYTES)
        late.send(begun())
        await until(lambda: waiting(served) == 1)
        monkeypatch.setattr(server_module, "SILENT_S_MAX", -1.0)
        served.server.look()
        await late.expect(FrameKind.PONG)
        await holding.ended()  # and that makes room
        late.send(b"\0")
        assert (await late.error()).code == "PROTOCOL_ERROR"


async def test_arguments_and_writes_are_held_until_they_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    async with node_behind_proxy(tmp_path) as served, clients(served, 1) as (client,):
        room = served.server.room
        client.call(1, "read", read_all(served))
        await client.expect(FrameKind.OPENED)
        assert 0 < room.held_bytes < 100
        client.say(FrameKind.END, 1)
        await until(lambda: not room.held_bytes)
        disk.gate.clear()
        try:
            made, data = writes_of(served.owner, [1], WireGroup(1, False, ((0, 1),)))
            client.say(FrameKind.WRITES, 2, made, data)
            await client.still_served()
            assert room.held_bytes > len(data)
        finally:
            disk.gate.set()
        await client.result()
        assert room.held_bytes == 0


@pytest.mark.parametrize("connections", [1, 127, 128, 4_095, 4_096])
def test_what_waits_to_be_read_is_bounded_over_all_connections(connections: int) -> None:
    assert connections * sent_bytes_each(connections) >= SENT_BYTES_MAX // 4 or connections < 127
    assert connections * sent_bytes_each(connections) <= SENT_BYTES_MAX


async def test_what_many_clients_do_not_read_is_bounded_together(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_module, "SENT_BYTES_MAX", 1 << 20)
    for key in range(12):
        await served.owner.insert("c", [{"id": key, "item": "x" * 1_000_000}])
    async with clients(served, 6) as opened:
        for client in opened:
            client.call(1, "read", read_all(served, credit_bytes=1 << 40))
        connections = [session.connection for session in served.server.sessions]
        await until(lambda: all(each._is_full for each in connections))
        await serves(served)
        assert waiting_bytes(served) <= room_module.SENT_BYTES_MAX + len(opened) * PART_BYTES


async def test_a_client_that_is_refused_for_want_of_room_raises_that_or_goes_on(
    served: Served,
) -> None:
    async with served.client() as client:
        (session,) = served.server.sessions
        held = list[int]()

        def refuse_once(passing: Passing) -> bool:
            if passing.way is Way.TO_NODE and passing.kind == FrameKind.CALL and not held:
                held.append(passing.number)
                session.refuse(Overloaded("no room"))
                return False
            return True

        served.proxy.on_frame = refuse_once
        assert await client.consistent_tick()
        assert held
        await client.insert("c", rows(1))


def test_shares_are_let_in_in_order_and_hold_what_they_say() -> None:
    async def run() -> None:
        room = Room(100)
        let_in = list[str]()
        first, second, third, small = (
            Share(room, partial(let_in.append, name)) for name in ("1", "2", "3", "small")
        )
        assert first.need(50)
        assert not second.need(50)
        assert not third.need(10)  # it would fit, and comes later
        assert small.need(0)
        small.hold_call(60)
        assert not small.need(0)  # over the bound
        assert room.held_bytes == 110
        first.need(20)
        assert let_in == []
        small.hold_call(-60)
        assert let_in == ["2"]
        second.close()
        assert let_in == ["2", "3", "small"]
        for each in (first, third):
            each.close()
        assert room.held_bytes == 0
        assert room.longest_wait_s == 0.0

    asyncio.run(run())


# --- nothing stays --------------------------------------------------------------------------------


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def leave(client: Raw, _: Served) -> None:
    client.close()


async def break_the_protocol(client: Raw, _: Served) -> None:
    client.send(b"\1")  # the end of a frame whose checksum is wrong
    await client.ended()


async def be_refused(client: Raw, served: Served) -> None:
    for session in list(served.server.sessions):
        session.refuse(Overloaded("no room"))
    await client.ended()


async def be_replaced(client: Raw, served: Served) -> None:
    async with raw_client(served.port) as newer:
        await newer.greet(client_id=CLIENT_ID)
        await client.ended()


@pytest.mark.parametrize("how", [leave, break_the_protocol, be_refused, be_replaced])
async def test_nothing_of_a_connection_that_is_lost_waits_for_garbage_collection(
    served: Served, how: Any
) -> None:
    before = pa.total_allocated_bytes()
    with without_garbage_collection():
        async with raw_client(served.port) as client:
            await client.greet(client_id=CLIENT_ID)
            client.call(5, "read", read_all(served))
            await client.expect(FrameKind.OPENED)
            group = WireGroup(1, False, ((0, 1),))
            client.say(FrameKind.WRITES, 6, *writes_of(served.owner, [1], group))
            await client.result()
            client.call(7, "no such call", [])
            await client.error()
            client.say(FrameKind.PART, 8, None, bytes(LONG_BYTES))
            client.send(begun())
            await until(lambda: served.server.room.held_bytes >= 2 * LONG_BYTES)
            (session,) = served.server.sessions
            parts = (session, session.connection, session._writes, session._topics)
            kept: list[weakref.ref[Any]] = [*map(weakref.ref, parts)]
            del session, parts
            await how(client, served)
            await until(lambda: not served.server.sessions and not served.server.shared.tasks)
            await until(lambda: not [each for each in kept if each() is not None])
        assert served.server.room.held_bytes == 0
        assert pa.total_allocated_bytes() - before < LONG_BYTES
