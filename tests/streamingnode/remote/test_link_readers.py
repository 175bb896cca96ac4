"""Readers over cuts, and calls that are cancelled."""

import asyncio
import random
from pathlib import Path

import pytest

import streamingnode as sn
from scanner.deliver_policy import DeliverPolicy, StartingPoint
from scanner.scanner import ScanBatch
from streamingnode.embedded import EmbeddedReading
from streamingnode.errors import (
    StreamingNodeError,
    Unreachable,
)
from streamingnode.remote import link as link_module
from streamingnode.remote.client import RemoteReading
from streamingnode.remote.link import LinkState
from tests.failing_disk import FailingDisk
from tests.parts_of import parts_of
from tests.streamingnode.remote.client_cases import (
    SMALL,
    SOON_S,
    filled,
    pass_all,
    streamed,
)
from tests.streamingnode.remote.nodes import (
    keys_in_log,
    link_of,
    node_behind_proxy,
    rows,
)
from tests.streamingnode.remote.proxy import Passing, Way, kinds, until
from wal.errors import LogReopening, OnShutdown
from wal.frames import FrameKind
from wal.packer import PACKS_IN_FLIGHT_MAX

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]


# --- readers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "billing"])
async def test_a_reader_that_is_cut_off_again_and_again_misses_and_repeats_nothing(
    name: str | None,
) -> None:
    random_ = random.Random(f"reader {name}")
    found = list[int]()
    async with (
        node_behind_proxy() as served,
        served.client() as client,
        client.read("c", name=name) as messages,
    ):
        for key in range(0, 240, 6):
            if key % 5 == 1:
                served.proxy.cut()
            else:  # of the next connection
                served.proxy.plan_cut(Way.TO_CLIENT, random_.randrange(500, 6000))
            await served.owner.insert("c", rows(key))
            txn = served.owner.transaction()
            await txn.insert("c", rows(key + 1))
            await served.owner.insert("c", rows(key + 2))
            await txn.insert("c", rows(key + 3))
            await txn.commit()
            await served.owner.upsert("c", rows(key + 4))
            await served.owner.insert("c", rows(key + 5))
            if key % 4 == 2:
                served.proxy.cut()
            while len(found) < key + 6:
                message = await anext(messages)
                for part in message.bodies or (message,):
                    if part.type is sn.MessageType.INSERT:
                        table = part.to_arrow()
                        assert table is not None
                        found += map(int, table["id"].to_numpy())
        assert sorted(found) == list(range(240))
        assert [key for key in found if key % 6 in {0, 2, 5}] == [
            key for key in range(240) if key % 6 in {0, 2, 5}
        ]
        assert served.proxy.connections > 15


async def test_a_streamed_transaction_that_spans_a_cut_is_read_once_and_whole() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        async with client.read("c", types=[sn.MessageType.INSERT]) as messages:
            txn = await streamed(served.owner)
            await served.owner.insert("c", rows(50))
            first = await anext(messages)
            served.proxy.cut()
            await txn.commit()
            second = await anext(messages)
        assert (first.num_rows, second.num_rows) == (1, 6)


async def test_reader_of_what_is_to_come_misses_nothing_when_cut_before_its_first_batch() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        served.proxy.on_frame = kinds(FrameKind.MESSAGES)
        async with client.read("c", sn.DeliverPolicy.latest()) as messages:
            served.proxy.is_refusing = True
            served.proxy.cut()
            served.proxy.on_frame = pass_all
            written = await served.owner.insert("c", rows(1))
            await served.owner.consistent_tick()
            served.proxy.is_refusing = False
            async with asyncio.timeout(SOON_S):
                assert (await anext(messages)).time_tick == written.time_tick


async def test_a_message_can_be_acknowledged_after_a_cut() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        await served.owner.insert("c", rows(1))
        await served.owner.insert("c", rows(2))
        async with client.read("c", name="billing", types=[sn.MessageType.INSERT]) as messages:
            message = await anext(messages)
            served.proxy.cut()
            await until(lambda: link_of(client).connections == 2)
            await messages.ack(message)
            assert (await anext(messages)).time_tick > message.time_tick


async def test_an_acknowledgement_under_way_at_a_cut_is_repeated() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        await served.owner.insert("c", rows(1))
        async with client.read("c", name="billing", types=[sn.MessageType.INSERT]) as messages:
            message = await anext(messages)
            lost = list[Passing]()

            def passes(frame: Passing) -> bool:
                if frame.kind != FrameKind.CALL or lost:
                    return True
                lost.append(frame)
                served.proxy.cut()
                return False

            served.proxy.on_frame = passes
            await messages.ack(message)
            assert lost
        assert [reader.tick for reader in await client.readers()] == [message.time_tick]


async def test_a_read_that_is_given_up_while_the_node_is_away_can_be_asked_again() -> None:
    """What waits with a deadline, as `batches` does, gives up now and then; what it had met stays
    met.
    """
    async with node_behind_proxy() as served, served.client(give_up_s=30) as client:
        async with client.read(
            "c", sn.DeliverPolicy.latest(), types=[sn.MessageType.INSERT]
        ) as messages:
            served.proxy.is_refusing = True
            served.proxy.cut()
            await until(lambda: link_of(client).state is not LinkState.READY)
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(messages), 0.02)
            served.proxy.is_refusing = False
            await client.insert("c", rows(1))
            assert (await asyncio.wait_for(anext(messages), 60)).num_rows == 1


async def test_a_named_reader_goes_on_at_once_although_the_node_has_not_heard_of_the_loss() -> None:
    async with node_behind_proxy() as served, served.client(give_up_s=1) as client:
        await served.owner.insert("c", rows(1))
        async with client.read("c", name="billing", types=[sn.MessageType.INSERT]) as messages:
            await anext(messages)
            served.proxy.cut_clients()
            await served.owner.insert("c", rows(2))
            assert (await anext(messages)).num_rows == 1


async def test_named_reader_that_is_cut_while_it_opens_opens_over_the_next_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening = list[EmbeddedReading]()
    scan = EmbeddedReading._scan
    may_end = asyncio.Event()

    async def scan_slowly(reading: EmbeddedReading, start: DeliverPolicy | StartingPoint) -> None:
        opening.append(reading)
        if len(opening) == 1:
            await may_end.wait()
        await scan(reading, start)

    monkeypatch.setattr(EmbeddedReading, "_scan", scan_slowly)
    async with node_behind_proxy() as served, served.client() as client:
        messages = client.read("c", name="billing")
        entering = asyncio.ensure_future(messages.__aenter__())
        await until(lambda: opening)
        served.proxy.cut_clients()
        async with asyncio.timeout(SOON_S):
            await entering
            assert (await anext(messages)).type is sn.MessageType.CREATE_COLLECTION
        await messages.close()


async def test_a_reader_that_is_closed_while_it_opens_again_leaves_no_stream() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        messages = await client.read("c", name="billing").__aenter__()
        await anext(messages)
        waiting = asyncio.ensure_future(anext(messages))
        reading = messages._reading
        assert isinstance(reading, RemoteReading)
        served.proxy.is_refusing = True
        served.proxy.cut()
        await until(lambda: not reading._is_open)
        await messages.close()
        served.proxy.is_refusing = False
        with pytest.raises(OnShutdown):
            await waiting
        assert not link_of(client)._streams
        async with asyncio.timeout(SOON_S), client.read("c", name="billing"):
            pass


async def test_a_reader_goes_on_after_an_error_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [LogReopening("not back in time")]
    next_batch = EmbeddedReading.next_batch

    async def fails_once(reading: EmbeddedReading) -> ScanBatch:
        if failing:
            raise failing.pop()
        return await next_batch(reading)

    monkeypatch.setattr(EmbeddedReading, "next_batch", fails_once)
    async with node_behind_proxy() as served, served.client() as client:
        async with client.read("c", name="billing") as messages:
            with pytest.raises(LogReopening):
                await anext(messages)
            async with asyncio.timeout(SOON_S):
                assert (await anext(messages)).type is sn.MessageType.CREATE_COLLECTION


async def test_a_reader_of_a_node_that_stays_away_ends_with_a_typed_error() -> None:
    async with node_behind_proxy() as served, served.client(give_up_s=0.1) as client:
        async with client.read("c", sn.DeliverPolicy.latest()) as messages:
            served.proxy.is_refusing = True
            served.proxy.cut()
            with pytest.raises(Unreachable):
                while True:
                    await anext(messages)


# --- cancelling -----------------------------------------------------------------------------------


async def test_a_call_that_is_cancelled_is_cancelled_at_the_node() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        (session,) = served.server.sessions
        served.proxy.on_frame = kinds(FrameKind.REPLY)
        reading = asyncio.ensure_future(anext(client.read("c", sn.DeliverPolicy.latest())))
        with pytest.raises(StreamingNodeError):
            await reading  # it was not entered
        async with client.read("c", sn.DeliverPolicy.latest()):
            assert len(session._calls) == 1
        await until(lambda: not session._calls)
        assert not session._streams


async def test_a_write_that_waits_at_the_node_is_not_written_once_its_caller_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    async with node_behind_proxy(tmp_path) as served, served.client() as client:
        disk.gate.clear()
        packer = parts_of(served.owner).channel.wal.packer
        loop = asyncio.get_running_loop()
        on_their_way = []
        for key in range(PACKS_IN_FLIGHT_MAX):
            on_their_way.append(loop.create_task(served.owner.insert("c", rows(key))))
            await until(lambda key=key: len(packer._rows) == key + 1 and not packer._waiting)  # type: ignore[misc]
        waiting = loop.create_task(client.insert("c", rows(100)))
        await until(lambda: packer._waiting)
        waiting.cancel()
        await asyncio.wait([waiting])
        await until(lambda: all(group.cancelled for group in packer._waiting))
        disk.gate.set()
        await asyncio.gather(*on_their_way)
        await client.insert("c", rows(200))
        assert sorted(await keys_in_log(served.owner)) == [*range(PACKS_IN_FLIGHT_MAX), 200]


async def test_a_write_that_waits_for_room_is_not_written_once_its_caller_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    async with node_behind_proxy(tmp_path, **SMALL) as served, served.client() as client:
        disk.gate.clear()
        sessions = served.server.sessions
        tasks = await filled(served.owner, served, 0, 40)
        cancelled = asyncio.ensure_future(client.insert("c", rows(1000, item="x" * 3000)))
        await until(lambda: any(each._writes._joining for each in sessions))
        sent = served.proxy.passed[Way.TO_NODE]
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await until(lambda: served.proxy.passed[Way.TO_NODE] > sent)
        disk.gate.set()
        await asyncio.gather(*tasks)
        await client.insert("c", rows(2000))
        assert 1000 not in await keys_in_log(served.owner)


async def test_a_client_that_only_reads_pings_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node ends the connection of a client that sends nothing, whatever it sends the client."""
    monkeypatch.setattr(link_module, "PING_S", 0.05)
    async with node_behind_proxy() as served, served.client() as client:
        pings = 0

        def count(passing: Passing) -> bool:
            nonlocal pings
            pings += passing.kind == FrameKind.PING
            return True

        served.proxy.on_frame = count
        async with client.read("c", sn.DeliverPolicy.latest()) as messages, asyncio.timeout(SOON_S):
            number = 0
            while pings < 5:  # one message after the other, so that the connection is never quiet
                number += 1
                await served.owner.insert("c", rows(number))
                await anext(messages)


async def test_a_client_whose_writes_wait_long_for_room_keeps_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "PING_S", 0.02)
    monkeypatch.setattr(link_module, "SILENT_S_MAX", 0.2)
    disk = FailingDisk(monkeypatch)
    async with node_behind_proxy(tmp_path, **SMALL) as served, served.client() as client:
        disk.gate.clear()
        tasks = await filled(served.owner, served, 0, 40)
        tasks.append(asyncio.ensure_future(client.insert("c", rows(1000, item="x" * 3000))))
        pings = 0

        def count(passing: Passing) -> bool:
            nonlocal pings
            pings += passing.kind == FrameKind.PING
            return True

        served.proxy.on_frame = count
        try:
            await until(lambda: pings >= 20 or link_of(client).connections > 1)
        finally:
            disk.gate.set()
        await asyncio.gather(*tasks)
        assert link_of(client).connections == 1
        assert len(await keys_in_log(served.owner)) == 41
