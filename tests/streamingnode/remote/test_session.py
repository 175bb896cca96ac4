"""What is no part of the protocol, and the bounds of a connection."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

import streamingnode as sn
from scanner.deliver_policy import StartingPoint
from streamingnode.errors import Overloaded
from streamingnode.remote import server as server_module
from streamingnode.remote.answers import WRITE_BYTES_MAX
from streamingnode.remote.calls import AckCall, ReadCall
from streamingnode.remote.writes import WireGroup
from tests.parts_of import parts_of
from tests.streamingnode.remote.nodes import Served, keys_in_log, rows, serving
from tests.streamingnode.remote.proxy import until
from tests.streamingnode.remote.raw import frame_bytes, hello, raw_client, writes_of
from tests.streamingnode.remote.session_cases import (
    AFTER_HELLO,
    GARBAGE,
    INSERTS,
    greeted,
    parts_bytes,
    serves,
    session_of,
)
from wal.append import AppendResult
from wal.frames import FRAME_HEADER_BYTES, GREETING_BYTES_MAX, PREFACE, FrameKind
from wal.wire_types import WireError

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]


# --- what is no frame, or comes at the wrong time -------------------------------------------------


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
async def test_what_does_not_begin_with_a_hello_ends_the_connection(
    served: Served, said: bytes
) -> None:
    async with raw_client(served.port) as client:
        client.send(said)
        await client.ended()


@pytest.mark.parametrize("said", AFTER_HELLO.values(), ids=AFTER_HELLO)
async def test_what_is_no_part_of_the_protocol_ends_the_connection(
    served: Served, said: bytes
) -> None:
    async with greeted(served) as client, greeted(served) as other:
        client.send(said)
        await client.ended()
        await other.still_served()


@pytest.mark.parametrize("depth", [1_000, 30_000])
async def test_a_value_that_is_nested_deeply_ends_the_connection_or_is_refused(
    served: Served, depth: int
) -> None:
    bomb = b"\x91" * depth + b"\x90"
    async with greeted(served) as client:
        client.say(FrameKind.CALL, 1, "snapshot", bomb)
        assert (await client.error()).code == "PROTOCOL_ERROR"
        client.say(FrameKind.WRITES, 2, msgspec.Raw(bomb))
        await client.ended()


@pytest.mark.parametrize(
    "payload", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b""]
)
async def test_arguments_that_claim_more_than_there_is_are_refused(
    served: Served, payload: bytes
) -> None:
    async with greeted(served) as client:
        for number, name in enumerate(
            ("snapshot", "transaction", "read", "ack", "create_collection"), 1
        ):
            client.say(FrameKind.CALL, number, name, payload)
            assert (await client.error()).code == "PROTOCOL_ERROR"
        await client.still_served()


async def test_half_a_frame_holds_nobody_else_up(served: Served) -> None:
    async with greeted(served) as client:
        client.send(frame_bytes(FrameKind.PING, 1)[: FRAME_HEADER_BYTES - 1])
        await serves(served)


async def test_kinds_that_the_node_does_not_know_are_skipped(served: Served) -> None:
    async with greeted(served) as client:
        for kind in (0, 19, 500, 65_535, FrameKind.RESULTS, FrameKind.WELCOME):
            client.say(kind, 1, {"new": True}, b"x" * 1000)
        await client.still_served()


async def test_a_call_that_the_node_does_not_know_is_refused_by_name(served: Served) -> None:
    async with greeted(served) as client:
        for number, name in enumerate(
            ("", "x" * 5000, "__class__", "close", "append", "_changes"), 1
        ):
            client.say(FrameKind.CALL, number, name, b"\x90")
            assert (await client.error()).code in {"INVALID_ARGUMENT", "PROTOCOL_ERROR"}


async def test_versions_without_a_common_one_and_ids_of_no_client_are_refused(
    served: Served,
) -> None:
    for said in (
        frame_bytes(FrameKind.HELLO, 0, {"versions": [2, 3], "client_id": 1 << 62}),
        hello(client_id=5),
        hello(client_id=1 << 63),
    ):
        async with raw_client(served.port) as client:
            client.send(PREFACE + said)
            assert (await client.error()).code == "PROTOCOL_ERROR"
            await client.ended()


async def test_a_hello_that_comes_byte_by_byte_is_a_hello(served: Served) -> None:
    async with raw_client(served.port) as client:
        for byte in PREFACE + hello():
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        await client.expect(FrameKind.WELCOME)


# --- bounds ---------------------------------------------------------------------------------------


async def test_calls_over_the_bound_are_refused_and_the_others_go_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "CALLS_MAX", 3)
    (info,) = parts_of(served.owner).catalog.collections()
    async with greeted(served) as client:
        for number in range(1, 5):
            client.call(
                number,
                "read",
                ReadCall(info.id, "latest", None, None, None, INSERTS, None, 1 << 20),
            )
        assert (await client.error()).code == "OVERLOADED"
        client.say(FrameKind.END, 1)
        await until(lambda: len(session_of(served)._calls) == 2)
        client.call(9, "statistics", [])
        await client.expect(FrameKind.REPLY)


async def test_a_second_call_of_the_same_number_ends_the_connection(served: Served) -> None:
    (info,) = parts_of(served.owner).catalog.collections()
    async with greeted(served) as client:
        for _ in range(2):
            client.call(
                1, "read", ReadCall(info.id, "latest", None, None, None, INSERTS, None, 1 << 20)
            )
        await client.ended()


async def test_writes_over_the_window_end_the_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, data = writes_of(served.owner, range(10_000))
    async with greeted(served) as client:
        # Those that are without an answer at a time: all of one turn of the event loop.
        frames = [
            frame_bytes(FrameKind.WRITES, n, writes, data)
            for n in range(1, WRITE_BYTES_MAX // len(data) + 3)
        ]
        monkeypatch.setattr("streamingnode.remote.answers.WRITE_BYTES_MAX", len(data))
        client.send(b"".join(frames[:40]))
        await client.ended()


async def test_connections_over_the_bound_are_told_so(served: Served) -> None:
    async with serving(served.owner, connections_max=8) as small:
        async with greeted(small), greeted(small):
            async with raw_client(small.port) as third:
                third.send(PREFACE + hello())
                assert (await third.error()).code == "OVERLOADED"
                await third.ended()
        await small.all_gone()
        await serves(small)


async def test_one_address_has_a_part_of_the_connections_and_the_nodes_own_socket_all(
    served: Served, tmp_path: Path
) -> None:
    async with serving(served.owner, connections_max=8) as small:
        own = await asyncio.get_running_loop().create_unix_server(
            small.server.connected, tmp_path / "s"
        )
        async with own, greeted(small), greeted(small):
            async with raw_client(small.port) as third:
                third.send(PREFACE + hello())
                assert (await third.error()).code == "OVERLOADED"
                await third.ended()
            async with AsyncExitStack() as others:
                for _ in range(5):
                    await others.enter_async_context(sn.connect(f"unix:{tmp_path / 's'}"))
        await small.all_gone()


async def test_a_client_over_the_bound_raises_that_it_is(served: Served) -> None:
    async with serving(served.owner, connections_max=4) as small, greeted(small):
        with pytest.raises(Overloaded):
            await sn.connect(f"tcp://127.0.0.1:{small.port}")


async def test_who_says_nothing_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SILENCE_LOOK_S", 0.01)
    async with serving(served.owner) as quick:
        async with raw_client(quick.port) as silent, greeted(quick) as quiet:
            monkeypatch.setattr(server_module, "HELLO_S_MAX", 0.05)
            monkeypatch.setattr(server_module, "SILENT_S_MAX", 0.15)
            silent.send(PREFACE)
            await silent.ended()
            await quiet.ended()
        await quick.all_gone()


async def test_nothing_is_kept_of_long_frames_before_the_hello(served: Served) -> None:
    async with raw_client(served.port) as client:
        client.send(PREFACE)
        for number in range(1, 50):
            client.say(FrameKind.PART, number, None, bytes(GREETING_BYTES_MAX - 1000))
        before = parts_bytes(served)
        assert before == 0
        await until(lambda: parts_bytes(served) > GREETING_BYTES_MAX or not served.server.sessions)
        assert parts_bytes(served) <= GREETING_BYTES_MAX


async def test_long_frames_that_have_begun_are_bounded_in_number(served: Served) -> None:
    async with greeted(served) as client:
        client.send(b"".join(frame_bytes(FrameKind.PART, number) for number in range(1, 5_000)))
        client.say(FrameKind.PING, 1)
        while (frame := await client.frame()) is not None and frame.kind != FrameKind.PONG:
            pass
        assert all(
            len(each.connection._long_frames._parts) <= server_module.CALLS_MAX
            for each in served.server.sessions
        )


async def test_long_frames_over_the_bound_end_the_connection(served: Served) -> None:
    async with greeted(served) as client:
        for number in range(1, 20):
            client.say(FrameKind.PART, number, None, bytes(1 << 20))
        await client.ended()


async def test_a_reader_that_goes_on_may_acknowledge_what_it_had_before_anything_new_is_sent(
    served: Served,
) -> None:
    written = await served.owner.insert("c", rows(1))
    (info,) = parts_of(served.owner).catalog.collections()
    had = StartingPoint(written.last_confirmed_position, written.time_tick)
    async with greeted(served) as client:
        client.call(1, "read", ReadCall(info.id, "all", None, None, "billing", INSERTS, had, 0))
        await client.expect(FrameKind.OPENED)
        client.call(2, "ack", AckCall(1, *had))
        await client.expect(FrameKind.REPLY)
    assert [reader.tick for reader in await served.owner.readers()] == [written.time_tick]


async def test_what_an_older_connection_carried_is_not_written_a_second_time(
    served: Served,
) -> None:
    client_id = 1 << 62
    first, second = (
        writes_of(served.owner, [key], WireGroup(key, False, ((0, 1),)), settled=key)
        for key in (1, 2)
    )
    async with raw_client(served.port) as older, raw_client(served.port) as newer:
        await older.greet(client_id=client_id)
        for number, (writes, data) in enumerate((first, second), 1):
            older.say(FrameKind.WRITES, number, writes, data)
            assert isinstance(await older.result(), AppendResult)
        await newer.greet(client_id=client_id)
        await older.ended()
        newer.say(FrameKind.WRITES, 1, *first)  # the second says that the first was told
        refused = await newer.result()
        assert isinstance(refused, WireError)
        assert refused.code == "SEQUENCE_TOO_OLD"
        newer.say(FrameKind.WRITES, 2, *second)
        assert isinstance(await newer.result(), AppendResult)
    assert sorted(await keys_in_log(served.owner)) == [1, 2]
