"""One connection, both ends: frames of any length arrive whole and in order, and who waits is let
go when it is lost.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from streamingnode.remote import connection as connection_module
from streamingnode.remote.connection import PART_BYTES, Connection
from tests.streamingnode.remote.proxy import until
from wal.errors import OnShutdown, ProtocolError
from wal.frames import PARTS_MAX, PREFACE, Frame, FrameKind

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

BOUND = 8 << 20


class End:
    """One end, and what it was told."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.lost: list[Exception | None] = []
        self.ended = asyncio.Event()
        self.connection = Connection(self.frames.append, self._on_lost, parts_bytes_max=BOUND)
        self.connection.agreed()

    def _on_lost(self, error: Exception | None) -> None:
        self.lost.append(error)
        self.ended.set()

    async def has(self, count: int) -> None:
        await until(lambda: len(self.frames) >= count)


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[End, End]]:
    loop = asyncio.get_running_loop()
    here = End()
    there = End()
    listener = await loop.create_server(lambda: there.connection, "127.0.0.1", 0)
    await loop.create_connection(lambda: here.connection, *listener.sockets[0].getsockname())
    try:
        yield here, there
    finally:
        for end in (here, there):
            end.connection.abort(OnShutdown("over"))
            await end.ended.wait()
        listener.close()


@pytest.mark.parametrize(
    "size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 7]
)
async def test_a_long_frame_arrives_as_it_was_sent(size: int) -> None:
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with joined() as (here, there):
        await here.connection.send_long(FrameKind.REPLY, 7, payload)
        await there.has(1)
        (frame,) = there.frames
        assert (frame.kind, frame.number, frame.meta) == (FrameKind.REPLY, 7, b"")
        assert bytes(frame.payload) == payload


async def test_frames_with_other_numbers_come_between_the_parts_of_long_ones() -> None:
    async with joined() as (here, there):
        sending = [
            here.connection.send_long(FrameKind.REPLY, n, bytes([n]) * (3 * PART_BYTES))
            for n in (1, 2)
        ]
        done = asyncio.gather(*sending)
        here.connection.send(FrameKind.PING, 3)
        await done
        await there.has(3)
        assert {
            (frame.number, bytes(frame.payload[:1]), len(frame.payload)) for frame in there.frames
        } == {
            (1, b"\1", 3 * PART_BYTES),
            (2, b"\2", 3 * PART_BYTES),
            (3, b"", 0),
        }


async def test_long_frames_over_the_bound_lose_the_connection() -> None:
    async with joined() as (here, there):
        for number in range(1, 10):
            here.connection.send(FrameKind.PART, number, None, bytes(PART_BYTES))
        await there.ended.wait()
        (error,) = there.lost
        assert isinstance(error, ProtocolError)
        assert there.frames == []


async def test_who_waits_for_the_other_side_to_read_is_let_go_when_it_is_lost() -> None:
    async with joined() as (here, there):
        assert there.connection._transport is not None
        there.connection._transport.pause_reading()
        sending = asyncio.ensure_future(
            here.connection.send_long(FrameKind.REPLY, 1, bytes(64 << 20))
        )
        await until(lambda: here.connection._is_full)
        there.connection.abort(OnShutdown("gone"))
        with pytest.raises(OnShutdown):
            await sending
        here.connection.send(FrameKind.PING)  # which nobody hears any more


async def test_a_connection_tells_once_that_it_is_lost_and_why() -> None:
    async with joined() as (here, there):
        here.connection.abort(ProtocolError("first"))
        here.connection.abort(ProtocolError("second"))
        await here.ended.wait()
        await there.ended.wait()
        assert [str(error)[:5] for error in here.lost] == ["first"]
        assert len(there.lost) == 1


async def test_frames_behind_one_that_closed_the_connection_are_not_acted_on() -> None:
    loop = asyncio.get_running_loop()
    end = End()
    listener = await loop.create_server(lambda: end.connection, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
    writer.write(PREFACE + b"\xff" * 100)
    await end.ended.wait()
    end.connection.get_buffer(-1)[:4] = b"more"
    end.connection.buffer_updated(4)
    assert end.frames == []
    assert len(end.lost) == 1
    writer.close()
    listener.close()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of which each waits until the one before was read."""
    monkeypatch.setattr(connection_module, "PART_BYTES", 64 << 10)
    monkeypatch.setattr(connection_module, "SEND_BUFFER_BYTES", 16 << 10)


@pytest.mark.usefixtures("small_parts")
async def test_a_long_frame_that_is_cancelled_leaves_nothing_at_the_other_side() -> None:
    async with joined() as (here, there):
        # else the system may hold all of it
        for end, buffer in ((here, socket.SO_SNDBUF), (there, socket.SO_RCVBUF)):
            end.connection.peer("socket").setsockopt(socket.SOL_SOCKET, buffer, 64 << 10)
        for number in range(1, PARTS_MAX + 3):
            sending = asyncio.ensure_future(
                here.connection.send_long(FrameKind.REPLY, number, bytes(6 << 20))
            )
            await until(lambda number=number: number in there.connection._long_frames._parts)  # type: ignore[misc]
            assert not sending.done()
            sending.cancel()
            await asyncio.wait([sending])
            there.frames.clear()
            here.connection.send(FrameKind.PING, number)
            await until(
                lambda: (
                    not there.connection.is_open
                    or FrameKind.PING in {each.kind for each in there.frames}
                )
            )
            assert there.connection._long_frames._parts == {}
        assert there.connection.is_open


@pytest.mark.usefixtures("small_parts")
async def test_any_number_of_long_frames_go_at_the_same_time() -> None:
    numbers = range(1, 2 * PARTS_MAX)
    async with joined() as (here, there):
        sent = [
            here.connection.send_long(FrameKind.REPLY, number, bytes(100_000)) for number in numbers
        ]
        await asyncio.gather(*sent)
        await there.has(len(numbers))
        assert {frame.number for frame in there.frames} == {*numbers}


@pytest.mark.usefixtures("small_parts")
async def test_who_reads_and_says_nothing_is_heard() -> None:
    """As long as it has much to read, nothing that it says is taken."""
    async with joined() as (here, there):
        there.connection.send(FrameKind.PING)
        await here.has(1)
        heard_at = here.connection.received_at
        await here.connection.send_long(FrameKind.REPLY, 1, bytes(7 << 20))
        assert here.connection.received_at > heard_at
        assert len(here.frames) == 1
        await there.has(1)


async def test_a_connection_has_ended_when_ending_it_returns_and_what_was_sent_has_arrived() -> (
    None
):
    async with joined() as (here, there):
        there.connection.send(FrameKind.PING)
        await here.has(1)
        here.connection.send(FrameKind.PING, 1, None, bytes(7 << 20))
        await here.connection.end()
        assert not here.connection.is_open
        await there.ended.wait()
        assert len(there.frames) == 1


async def test_a_connection_whose_other_side_does_not_read_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_module, "CLOSE_S_MAX", 0.01)
    async with joined() as (here, there):
        there.connection.send(FrameKind.PING)
        await here.has(1)
        there.connection._transport.pause_reading()
        for number in range(20):
            here.connection.send(FrameKind.PING, number, None, bytes(7 << 20))
        await here.connection.end()
        assert not here.connection.is_open
        await here.ended.wait()
