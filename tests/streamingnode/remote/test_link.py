"""A client whose connection is cut: what it wrote is there once, and its producers go on."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

import streamingnode as sn
from interceptors.window import CLIENT_AGE_MS
from streamingnode.backend import Backend, Parts
from streamingnode.errors import (
    DeadlineExceeded,
    Indeterminate,
    PartitionNotFound,
    SchemaMismatch,
)
from streamingnode.node import Node
from streamingnode.remote import link as link_module
from streamingnode.remote import server as server_module
from streamingnode.remote.link import LinkState
from tests.parts_of import parts_of
from tests.streamingnode.remote.client_cases import (
    SOON_S,
    Told,
    pass_all,
    reached,
    streamed,
    write_all_kinds,
)
from tests.streamingnode.remote.nodes import (
    SCHEMA,
    SETTINGS,
    SHARDS,
    contents,
    keys_in_log,
    link_of,
    node_behind_proxy,
    rows,
    serving,
)
from tests.streamingnode.remote.proxy import Passing, Way, kinds, no_more, proxied, until
from wal.frames import FrameKind
from wal.runtime import elapsed_ms
from wal.wire_types import Welcome, WireError

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]


# --- writes over cuts -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", Way, ids=lambda way: way.name.lower())
async def test_writes_of_all_kinds_are_in_the_log_once_wherever_the_connection_is_cut(
    way: Way,
) -> None:
    told = Told()
    random_ = random.Random(way.name)
    async with node_behind_proxy() as served, served.client() as client:
        await write_all_kinds(client, told, 0)
        size = served.proxy.passed[way]
        for number in range(1, 26):
            # The next connection is cut somewhere, also in the handshake and in what is sent again.
            served.proxy.plan_cut(way, random_.randrange(max(size, 3000)))
            if number % 3 == 0:
                served.proxy.plan_cut(Way.TO_CLIENT, random_.randrange(3000))
            served.proxy.cut()
            await write_all_kinds(client, told, 100 * number)
        assert served.proxy.connections > 25
        assert not told.refused
        assert not told.open
        told.check(await keys_in_log(served.owner))
        assert (await contents(client)).keys() == set(told.acknowledged)


async def test_writes_whose_answers_never_come_are_answered_by_the_next_link_and_logged_once() -> (
    None
):
    told = Told()
    async with node_behind_proxy() as served, served.client() as client:
        producer = await client.producer("p")
        await asyncio.gather(
            *[told.write(client.insert("c", rows(key)), key) for key in (100, 101, 102)]
        )
        # all of a round in one frame, as those before it: none waits for an answer
        for first in range(0, 50, 10):
            served.proxy.on_frame = kinds(FrameKind.RESULTS)
            calls = [
                told.write(client.insert("c", rows(key)), key) for key in range(first, first + 4)
            ]
            calls += [told.write(producer.insert("c", rows(first + 5)), first + 5)]
            calls += [told.write(client.upsert("c", rows(first + 6)), first + 6)]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await reached(served.owner, *range(first, first + 4), first + 5, first + 6)
            served.proxy.on_frame = pass_all
            served.proxy.cut()
            await asyncio.gather(*tasks)
        assert len(told.acknowledged) == 33
        told.check(await keys_in_log(served.owner))
        assert producer.last_sequence == 5


@pytest.mark.parametrize("way", Way, ids=lambda way: way.name.lower())
async def test_a_byte_that_is_changed_on_the_way_loses_the_connection_and_no_write(
    way: Way,
) -> None:
    told = Told()
    random_ = random.Random(f"byte {way.name}")
    async with node_behind_proxy() as served, served.client() as client:
        link = link_of(client)
        for number in range(12):
            served.proxy.plan_corruption(way, random_.randrange(2500))
            served.proxy.cut()
            calls = [
                told.write(client.insert("c", rows(key)), key)
                for key in range(number * 10, number * 10 + 6)
            ]
            await asyncio.gather(*calls)
            await until(lambda: link.state is LinkState.READY)
        await told.write(client.insert("c", rows(1000)), 1000)
        told.check(await keys_in_log(served.owner))
        assert told.acknowledged


async def test_a_byte_that_is_changed_in_the_welcome_is_no_reason_to_give_up() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        served.proxy.plan_corruption(Way.TO_CLIENT, 60)
        served.proxy.cut()
        await until(lambda: link_of(client).state is not LinkState.READY)
        await client.insert("c", rows(1))


async def test_callers_that_hear_their_offsets_after_a_cut_hear_those_of_the_log() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        served.proxy.on_frame = kinds(FrameKind.RESULTS)
        tasks = [
            asyncio.ensure_future(client.insert("c", rows(*range(key, key + 3))))
            for key in range(0, 60, 3)
        ]
        await reached(served.owner, *range(60))
        served.proxy.on_frame = pass_all
        served.proxy.cut()
        results = await asyncio.gather(*tasks)
        given = Counter[tuple[str, int]]()
        for result in results:
            assert sum(count for _, count in result.row_offsets.values()) == 3
            given.update(
                (each, first + n)
                for each, (first, count) in result.row_offsets.items()
                for n in range(count)
            )
        assert set(given.values()) == {1}
        assert sum(given.values()) == 60


async def test_two_clients_that_are_cut_in_turn_write_each_row_once() -> None:
    told = Told()
    async with node_behind_proxy() as served, served.client() as one, served.client() as other:
        for number in range(10):
            tasks = [
                asyncio.ensure_future(told.write(client.insert("c", rows(key)), key))
                for client, first in ((one, 0), (other, 10_000))
                for key in range(first + number * 10, first + number * 10 + 5)
            ]
            await until(lambda: served.proxy.open_connections == 2)
            served.proxy.cut()
            await asyncio.gather(*tasks)
        told.check(await keys_in_log(served.owner))
        assert len(told.acknowledged) == 100


async def test_a_node_that_is_opened_again_under_load_has_each_acknowledged_row_once(
    tmp_path: Path,
) -> None:
    told = Told()
    stop = asyncio.Event()

    async def load(client: Node, first: int) -> None:
        writer = await client.producer(f"p{first}") if first % 2 else client
        key = first * 100_000
        while not stop.is_set():
            key += 1
            call = writer.upsert if key % 5 == 0 else writer.insert
            await told.write(call("c", rows(key)), key)

    async with proxied(1) as proxy:
        loads: list[asyncio.Task[None]] = []
        clients: list[Node] = []
        for life in range(4):
            async with sn.open_node(tmp_path, **SETTINGS) as owner:
                await owner.create_collection(
                    "c", SCHEMA, primary_key="id", shards=SHARDS, if_not_exists=True
                )
                async with serving(owner, proxy=proxy):
                    if not clients:
                        clients += [await sn.connect(proxy.url) for _ in range(2)]
                        loads += [asyncio.ensure_future(load(clients[n % 2], n)) for n in range(6)]
                    enough = len(told.acknowledged) + 60
                    await until(lambda enough=enough: len(told.acknowledged) >= enough)  # type: ignore[misc]
                    if life == 1:
                        await owner.flush()
                    if life == 3:
                        stop.set()
                        await asyncio.gather(*loads)
                        told.check(await keys_in_log(owner))
                        for client in clients:
                            await client.aclose()
        assert proxy.connections >= 8
        assert not told.refused


# --- named producers ------------------------------------------------------------------------------


async def test_a_sequence_that_is_sent_again_over_another_connection_is_one_write() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        producer = await client.producer("p")
        first = await producer.insert("c", rows(1), sequence=7)
        served.proxy.cut()
        assert await producer.insert("c", rows(2), sequence=7) == first
        assert (await producer.insert("c", rows(3))).time_tick > first.time_tick
        assert producer.last_sequence == 8
    assert sum(count for _, count in first.row_offsets.values()) == 1


async def test_a_write_after_a_cancelled_one_of_the_same_producer_is_written() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        producer = await client.producer("p")
        served.proxy.stop(Way.TO_CLIENT)
        cancelled = asyncio.ensure_future(producer.insert("c", rows(1)))
        await reached(served.owner, 1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        served.proxy.go_on()
        await producer.insert("c", rows(2))  # acknowledged
        assert (await contents(served.owner)).keys() == {1, 2}


async def test_a_write_after_one_in_doubt_and_a_refused_one_is_written() -> None:
    async with node_behind_proxy() as served, served.client(give_up_s=0.1) as client:
        await client.create_partition("c", "eu")
        producer = await client.producer("p")
        served.proxy.on_frame = kinds(FrameKind.RESULTS)
        in_doubt = asyncio.ensure_future(producer.insert("c", rows(1)))
        await reached(served.owner, 1)
        served.proxy.is_refusing = True
        served.proxy.cut()
        with pytest.raises(Indeterminate):
            await in_doubt
        served.proxy.is_refusing = False
        served.proxy.on_frame = pass_all
        await until(lambda: link_of(client).state is LinkState.READY)
        # the client does not hear of what is dropped
        served.proxy.on_frame = kinds(FrameKind.CATALOG)
        await served.owner.drop_partition("c", "eu")
        with pytest.raises(PartitionNotFound):
            await producer.insert("c", rows(2), partition="eu")
        await producer.insert("c", rows(3))  # acknowledged
        assert 3 in await contents(served.owner)


async def test_many_transactions_with_sequences_may_be_open_at_a_time() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        producer = await client.producer("p")
        transactions = [producer.transaction(sequence=each) for each in range(1, 1_100)]
        async with asyncio.timeout(SOON_S):
            await client.consistent_tick()
            await client.insert("c", rows(1))
        assert len(transactions) == 1_099
        assert served.proxy.connections == 1


async def test_a_node_is_verified_over_a_connection_as_in_its_own_process(tmp_path: Path) -> None:
    async with node_behind_proxy(tmp_path) as served, served.client() as client:
        await client.insert("c", rows(1))
        report = await client.verify()
        assert report == await served.owner.verify()


# --- the end --------------------------------------------------------------------------------------


async def test_what_was_begun_when_a_client_is_closed_ends_as_with_a_node_of_this_process() -> None:
    async with node_behind_proxy() as served:
        await served.owner.create_collection("other", SCHEMA, primary_key="id")
        client = await sn.connect(served.proxy.url)
        txn = await streamed(client)
        # Few upserts: all but the first wait at the client until that one is answered.
        begun = [asyncio.ensure_future(client.upsert("c", rows(key))) for key in range(100, 112)]
        begun.append(asyncio.ensure_future(txn.commit()))
        dropping = asyncio.ensure_future(client.drop_collection("other"))
        await asyncio.sleep(0)
        await client.aclose()
        await asyncio.gather(*begun, dropping)
        assert set(range(100, 112)) < (await contents(served.owner)).keys()


async def test_nothing_of_a_client_is_left_once_it_is_closed() -> None:
    async with node_behind_proxy() as served:
        async with served.client() as client:
            producer = await client.producer("p")
            held = producer.transaction(sequence=5)
            txn = await streamed(client)
            reader = client.read("c", name="billing")
            await reader.__aenter__()
            writing = asyncio.ensure_future(client.insert("c", rows(77)))
            await writing
            assert served.server.shared.transactions
        await served.all_gone()
        txns = parts_of(served.owner).channel.term.transactions
        await until(lambda: not txns.sessions)
        await until(lambda: not parts_of(served.owner).readers._open)
        async with served.owner.read("c", name="billing"):
            pass  # it is free again
        assert held.result is None
        assert txn.result is None


async def test_a_client_of_a_silent_node_gives_up_on_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "PING_S", 0.02)
    monkeypatch.setattr(link_module, "SILENT_S_MAX", 0.1)
    async with node_behind_proxy() as served, served.client() as client:
        served.proxy.on_frame = no_more
        calling = asyncio.ensure_future(client.consistent_tick())
        await until(lambda: served.proxy.connections > 1)
        served.proxy.on_frame = pass_all
        served.proxy.cut()
        assert await calling


async def test_a_node_of_another_version_and_a_server_of_another_protocol_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with node_behind_proxy() as served:
        monkeypatch.setattr(link_module, "VERSIONS", (9,))
        with pytest.raises(sn.errors.ProtocolError, match=r"speaks versions \(9,\)"):
            await sn.connect(f"tcp://127.0.0.1:{served.port}")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        with pytest.raises(sn.errors.ProtocolError, match="no part of this protocol"):
            await sn.connect(f"tcp://127.0.0.1:{other.sockets[0].getsockname()[1]}")


async def test_a_node_that_leaves_answers_what_it_has_and_its_client_begins_nothing_more() -> None:
    async with node_behind_proxy() as served, served.client(give_up_s=0.1) as client:
        begun = [asyncio.ensure_future(client.insert("c", rows(key))) for key in range(200)]
        await until(lambda: served.proxy.passed[Way.TO_NODE] > 1_000)
        draining = asyncio.ensure_future(served.server.drain(30))
        await until(lambda: link_of(client).is_leaving)
        late = asyncio.ensure_future(client.insert("c", rows(1_000)))
        await draining
        assert not any(session.is_busy for session in served.server.sessions)
        await served.server.close()
        outcomes = await asyncio.gather(*begun, late, return_exceptions=True)
        failures = [each for each in outcomes if isinstance(each, BaseException)]
        assert {type(each) for each in failures} == {sn.errors.Unreachable}, "nothing is in doubt"
        assert isinstance(outcomes[-1], sn.errors.Unreachable)
        found = await contents(served.owner)
        assert len(found) == len(outcomes) - len(failures)


async def test_a_client_that_stood_still_itself_keeps_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "PING_S", 0.02)
    monkeypatch.setattr(link_module, "SILENT_S_MAX", 0.1)
    async with node_behind_proxy() as served, served.client() as client:
        txn_id = await client.begin_transaction()
        for _ in range(3):
            stands_still_until = time.monotonic() + 0.2
            while time.monotonic() < stands_still_until:
                pass  # as a program that computes
            await client.consistent_tick()
        await client.commit_transaction(txn_id)
        assert served.proxy.connections == 1


async def test_a_client_finds_its_node_again_when_its_program_has_changed_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with sn.open_node("data"):
        client = await sn.connect("unix:data/node.sock")
    monkeypatch.chdir("/")
    async with sn.open_node(tmp_path / "data"):
        assert await client.consistent_tick() > 0
        await client.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "http://x:1",
        "tcp://",
        "tcp://x",
        "tcp://x:99999",
        "unix:",
        "tls://x:0",
        "",
        "tcp://x:1?a=b",
        "data",
    ],
)
async def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(sn.errors.InvalidArgument, match="no address"):
        sn.connect(url)


async def test_a_write_is_not_sent_again_when_the_node_may_have_forgotten_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "GIVE_UP_S_MAX", 0.2)
    async with node_behind_proxy() as served, served.client(give_up_s=0.2) as client:

        def cut_off(passing: Passing) -> bool:
            if passing.kind == FrameKind.RESULTS:
                served.proxy.cut()
            return passing.kind != FrameKind.RESULTS

        served.proxy.on_frame = cut_off
        with pytest.raises(Indeterminate):
            async with asyncio.timeout(SOON_S):
                await client.insert("c", rows(1))
        served.proxy.on_frame = pass_all
        await client.insert("c", rows(2))
        assert await keys_in_log(served.owner) == [1, 2]


async def test_a_write_is_not_sent_again_when_the_machine_has_slept_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with node_behind_proxy() as served, served.client() as client:
        window = parts_of(served.owner).channel.term.idempotency.window
        has_slept = False

        def cut_off_and_sleep(passing: Passing) -> bool:
            nonlocal has_slept
            if passing.kind == FrameKind.RESULTS and not has_slept:
                served.proxy.cut()
                return False
            # over the next connection; everything passes from here on
            if passing.kind == FrameKind.HELLO:
                has_slept = True
                slept_ms = elapsed_ms() + CLIENT_AGE_MS
                monkeypatch.setattr(link_module, "elapsed_ms", lambda: slept_ms)
                for now_ms in (1, 1 + CLIENT_AGE_MS):  # the node has found it idle, and forgets it
                    window._forget_idle(now_ms)
            return True

        served.proxy.on_frame = cut_off_and_sleep
        with pytest.raises(Indeterminate):
            async with asyncio.timeout(SOON_S):
                await client.insert("c", rows(1))
        assert has_slept
        await client.insert("c", rows(2))
        assert await keys_in_log(served.owner) == [1, 2]


async def test_a_refused_row_is_refused_before_it_is_sent() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        sent = served.proxy.passed[Way.TO_NODE]
        with pytest.raises(SchemaMismatch):
            await client.insert("c", [{"id": "no number", "item": "tea"}])
        assert served.proxy.passed[Way.TO_NODE] == sent


UNFIT: dict[str, Callable[[Node], Awaitable[object]]] = {
    "a number as a name": lambda node: node.create_partition("c", cast("str", 5)),
    "an object as a name": lambda node: node.create_partition("c", cast("str", object())),
    "a name that is no text": lambda node: node.create_partition("c", "\ud800"),
    "text as a truth": lambda node: node.seek_reader(
        "c", "r", sn.DeliverPolicy.all(), dry_run=cast("bool", "yes")
    ),
}


@pytest.mark.parametrize("unfit", UNFIT)
async def test_what_fits_no_call_is_an_invalid_argument_as_at_the_node_itself_and_is_not_sent(
    unfit: str,
) -> None:
    async with node_behind_proxy() as served, served.client() as client:
        sent = served.proxy.passed[Way.TO_NODE]
        for node in (served.owner, client):
            with pytest.raises(sn.errors.InvalidArgument):
                await UNFIT[unfit](node)
        assert served.proxy.passed[Way.TO_NODE] == sent


@pytest.mark.parametrize("number", [1 << 64, 1 << 70, -1 << 70])
async def test_a_number_over_what_crosses_is_an_invalid_argument(number: int) -> None:
    async with node_behind_proxy() as served, served.client() as client:
        for call in (
            client.abort_transaction(number),
            client.commit_transaction(number),
            client.insert("c", rows(1), txn_id=number),
        ):
            with pytest.raises(sn.errors.InvalidArgument):
                await call


async def test_a_client_connects_to_a_node_with_settings_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_a_later_release(*given: Any) -> Welcome:
        welcome = Welcome(*given)
        return msgspec.structs.replace(welcome, settings=welcome.settings | {"log.of_next_year": 1})

    monkeypatch.setattr(server_module, "Welcome", of_a_later_release)
    async with node_behind_proxy() as served, served.client() as client:
        assert client.config == served.owner.config


def test_an_error_of_a_class_that_is_not_known_says_whether_to_try_again() -> None:
    error = WireError("OF_NEXT_YEAR", "it is late — wait", "indeterminate", {"until": 5}).error()
    assert (error.code, error.retryable, str(error)) == (
        "OF_NEXT_YEAR",
        "indeterminate",
        "it is late — wait",
    )
    assert error.fields()["until"] == 5


@pytest.mark.parametrize("name", ["happened", "__class__", "__traceback__", "args"])
def test_an_error_with_fields_that_no_node_gives_it_is_an_error_with_its_text(name: str) -> None:
    error = WireError("DEADLINE_EXCEEDED", "it took longer", "indeterminate", {name: 5}).error()
    assert (type(error), str(error)) == (DeadlineExceeded, "it took longer")


def test_each_state_of_a_link_can_be_left_but_the_last() -> None:
    assert {state for state, after in link_module.TRANSITIONS.items() if not after} == {
        LinkState.CLOSED
    }
    assert set(link_module.TRANSITIONS) == set(LinkState)


async def test_a_client_keeps_to_the_bounds_of_a_node_that_was_opened_again_with_smaller_ones(
    tmp_path: Path,
) -> None:
    async with node_behind_proxy(tmp_path) as served, served.client() as client:
        proxy = served.proxy
        assert len((await client.insert("c", rows(*range(50), item="x" * 1000))).groups) == 0
        small: dict[str, Any] = {"wal.group_bytes_max": 16 << 10}
        await served.server.close()
        await served.owner.aclose()
        async with sn.open_node(tmp_path, **SETTINGS | small) as owner, serving(owner, proxy=proxy):
            await client.consistent_tick()
            assert client.config.wal.group_bytes_max == 16 << 10
            assert (
                len((await client.insert("c", rows(*range(100, 150), item="x" * 1000))).groups) > 2
            )
            assert len(await contents(owner)) == 100


async def test_a_client_has_everything_that_a_node_asks_of_what_it_works_with() -> None:
    asked = [name for name in {*dir(Backend), *Parts.__annotations__} if not name.startswith("_")]
    async with node_behind_proxy() as served, served.client() as client:
        assert [name for name in asked if not hasattr(client._backend, name)] == []
