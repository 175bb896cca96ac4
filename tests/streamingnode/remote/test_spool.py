"""A client with a spool goes on writing while its node is away, and all of it takes place in order and once."""

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.errors import AlreadyOwned, Corrupt, InvalidArgument, Overloaded, StorageFull, Unreachable
from streamingnode.node import Node
from streamingnode.remote.answers import ClientWrites
from streamingnode.remote.spool import LEFT_OUT_BITS, LETTERS_NAME, LOG_NAME
from tests.streamingnode.remote.nodes import (
    SCHEMA,
    SETTINGS,
    SHARDS,
    Served,
    contents,
    keys_in_log,
    node_behind_proxy,
    rows,
    serving,
)
from tests.streamingnode.remote.proxy import Passing, Proxy, Way, kinds, proxied, until
from wal.frames import FrameKind

pytestmark = pytest.mark.anyio


async def lose(client: Node, proxy: Proxy) -> None:
    """Take the node away, and return when the client knows."""
    proxy.is_refusing = True
    proxy.cut()
    await in_state(client, "spooling")


async def come_back(client: Node, proxy: Proxy) -> None:
    """Bring the node back, and return when nothing is in the spool any more."""
    proxy.is_refusing = False
    await in_state(client, "direct")


async def some_rows(node: Node) -> None:
    """Return when there are any."""
    async with asyncio.timeout(20):
        while not await contents(node):  # noqa: ASYNC110 - what it waits for is asked anew
            await asyncio.sleep(0)


async def in_state(client: Node, state: str) -> None:
    await until(lambda: spool_of(client).state == state)


def spool_of(client: Node) -> Any:
    assert client.spool is not None
    return client.spool


@asynccontextmanager
async def opened(path: Path, proxy: Proxy) -> AsyncIterator[Served]:
    """Open a node on disk behind a proxy that may have been there before."""
    async with sn.open_node(path, **SETTINGS) as owner:
        await owner.create_collection("c", SCHEMA, primary_key="id", shards=SHARDS, if_not_exists=True)
        async with serving(owner, proxy=proxy) as served:
            yield served


async def versions(node: Node, key: int) -> list[int]:
    """Return the versions of a row, written as `item N`, in the order of the log."""
    found = []
    async with node.read("c", until=await node.consistent_tick()) as messages:
        async for message in messages:
            for part in message.bodies or (message,):
                if part.type is sn.MessageType.INSERT:
                    table = part.to_arrow()
                    assert table is not None
                    found += [int(row["item"]) for row in table.to_pylist() if row["id"] == key]
    return found


async def test_writes_while_the_node_is_away_are_kept_and_take_place_in_order_when_it_is_back(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        assert not (await client.insert("c", rows(1, 2, 3))).spooled
        await lose(client, served.proxy)
        results = [
            await client.insert("c", rows(4)),
            await client.upsert("c", rows(1, item="later")),
            await client.delete("c", [2]),
            await client.insert("c", pa.Table.from_pylist(rows(*range(100, 200)), schema=SCHEMA)),
        ]
        async with client.transaction() as txn:
            await txn.delete("c", [3])
            await txn.insert("c", rows(5))
        assert txn.result is not None
        results.append(txn.result)
        assert [(each.spooled, each.time_tick, each.message_ids, each.row_offsets) for each in results] == [
            (True, 0, (), {})
        ] * 5
        kept = spool_of(client)
        assert (kept.state, kept.frames, kept.writes, kept.dead_letters) == ("spooling", 5, 5, 0)
        assert kept.bytes > 0 <= kept.age_s
        await come_back(client, served.proxy)
        assert spool_of(client).frames == spool_of(client).bytes == 0
        assert not (await client.insert("c", rows(6))).spooled
        found = await contents(served.owner)
        assert found.keys() == {1, 4, 5, 6, *range(100, 200)}
        assert found[1] == "later 1"
        order = [key for key in await keys_in_log(served.owner) if key < 100]
        assert order[3:] == [4, 1, 5, 6]


async def test_a_client_with_a_spool_that_knows_its_node_opens_without_it(tmp_path: Path) -> None:
    async with proxied(1) as proxy:
        with pytest.raises(Unreachable):
            await sn.connect(proxy.url, spool=tmp_path / "spool")
        async with opened(tmp_path / "node", proxy):
            async with sn.connect(proxy.url, spool=tmp_path / "spool") as client:
                await client.insert("c", rows(1))
        proxy.node_port = 1
        async with sn.connect(proxy.url, spool=tmp_path / "spool") as client:
            assert client.collection("c").schema == SCHEMA
            assert (await client.upsert("c", rows(1, item="kept"))).spooled
        async with sn.connect(proxy.url, spool=tmp_path / "spool") as client:
            assert (await client.insert("c", rows(2))).spooled
            assert spool_of(client).frames == 2
            async with opened(tmp_path / "node", proxy) as served:
                await in_state(client, "direct")
                assert await contents(served.owner) == {1: "kept 1", 2: "tea 2"}
                assert not (await client.insert("c", rows(3))).spooled


async def test_two_writes_of_one_key_take_place_in_order_on_both_sides_of_a_spool_and_once(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        how = []
        for version in range(300):
            result = await client.upsert("c", [{"id": 1, "item": str(version)}])
            how.append(result.spooled)
            if version % 40 == 20:
                await lose(client, served.proxy)
            elif version % 40 == 30:
                served.proxy.is_refusing = False
            if version % 80 == 79:
                await come_back(client, served.proxy)
        await come_back(client, served.proxy)
        assert await versions(served.owner, 1) == list(range(300))
        assert {True, False} == set(how)


async def test_a_writer_that_never_pauses_reaches_the_node_again(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        await lose(client, served.proxy)
        for version in range(60):
            await client.upsert("c", [{"id": 1, "item": str(version)}])
        served.proxy.is_refusing = False
        version, to_replay, behind = 59, 0, 0
        while True:
            version += 1
            result = await client.upsert("c", [{"id": 1, "item": str(version)}])
            if not result.spooled:
                break
            if spool_of(client).state == "replaying":
                to_replay, behind = to_replay or spool_of(client).frames, behind + 1
            assert behind <= to_replay, "it gets shorter"
        assert behind, "some queued behind the spool"
        assert await versions(served.owner, 1) == list(range(version + 1))


async def test_cuts_in_the_middle_of_replays_lose_and_double_nothing(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        await lose(client, served.proxy)
        for key in range(80):
            await client.insert("c", rows(key))
        for cut in range(12):
            served.proxy.plan_cut(Way.TO_CLIENT if cut % 2 else Way.TO_NODE, 1200 + 97 * cut)
            served.proxy.is_refusing = False
            before = served.proxy.connections
            await until(lambda before=before: served.proxy.connections > before)  # type: ignore[misc]
            await until(lambda: not served.proxy.open_connections or spool_of(client).state == "direct")
        await come_back(client, served.proxy)
        assert await keys_in_log(served.owner) == list(range(80))
        assert spool_of(client).dead_letters == 0


async def test_answers_to_a_replay_that_never_come_are_asked_for_again(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool", give_up_s=0.05) as client:
        await lose(client, served.proxy)
        await asyncio.gather(*[client.insert("c", rows(key)) for key in range(40)])
        served.proxy.on_frame = kinds(FrameKind.RESULTS)
        served.proxy.is_refusing = False
        await until(lambda: spool_of(client).state == "replaying")
        await some_rows(served.owner)
        await lose(client, served.proxy)
        served.proxy.on_frame = lambda _: True
        await come_back(client, served.proxy)
        assert sorted(await keys_in_log(served.owner)) == list(range(40))


async def test_a_node_that_is_opened_again_in_the_middle_of_a_replay_has_each_write_once(tmp_path: Path) -> None:
    async with proxied(1) as proxy:
        async with opened(tmp_path / "node", proxy), sn.connect(proxy.url, spool=tmp_path / "spool"):
            pass
        proxy.node_port = 1
        async with sn.connect(proxy.url, spool=tmp_path / "spool") as client:
            for key in range(60):
                await client.insert("c", rows(key))
            for left in (40, 20):
                async with opened(tmp_path / "node", proxy):
                    await until(lambda left=left: spool_of(client).frames <= left)  # type: ignore[misc]
                proxy.node_port = 1
            async with opened(tmp_path / "node", proxy) as served:
                await in_state(client, "direct")
                assert await keys_in_log(served.owner) == list(range(60))


async def test_what_was_on_its_way_at_the_loss_is_told_its_result_and_is_not_kept_as_well(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        served.proxy.on_frame = kinds(FrameKind.RESULTS)
        before = asyncio.ensure_future(client.insert("c", rows(1)))
        await some_rows(served.owner)
        waiting = [asyncio.ensure_future(client.insert("c", rows(key))) for key in range(10, 40)]
        await until(lambda: served.proxy.passed[Way.TO_NODE] > 1_000)
        await lose(client, served.proxy)
        assert (await client.insert("c", rows(2))).spooled
        served.proxy.on_frame = lambda _: True
        await come_back(client, served.proxy)
        assert not (await before).spooled
        results = await asyncio.gather(*waiting)
        assert all(result.spooled or result.time_tick for result in results)
        assert sorted(await keys_in_log(served.owner)) == [1, 2, *range(10, 40)]


async def test_writes_that_wait_behind_those_in_doubt_are_kept_at_once(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        served.proxy.stop(Way.TO_NODE)
        sent = []
        for key in range(3):
            sent.append(asyncio.ensure_future(client.insert("c", rows(key))))
            for _ in range(5):
                await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(client.insert("c", rows(key))) for key in range(10, 30)]
        await asyncio.sleep(0)
        await lose(client, served.proxy)
        assert all(result.spooled for result in await asyncio.gather(*waiting))
        assert not sent[0].done()
        served.proxy.go_on()
        await come_back(client, served.proxy)
        await asyncio.gather(*sent)
        assert sorted(await keys_in_log(served.owner)) == [0, 1, 2, *range(10, 30)]


async def test_nothing_of_a_spool_is_sent_before_what_was_on_its_way_at_the_loss_is_answered(tmp_path: Path) -> None:
    sent: list[int] = []

    def unanswered(passing: Passing) -> bool:
        if passing.way is Way.TO_NODE and passing.kind == FrameKind.WRITES:
            sent.append(passing.number)
        return passing.kind != FrameKind.RESULTS

    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        await lose(client, served.proxy)
        await client.insert("c", rows(7))
        await come_back(client, served.proxy)  # the spool's producer is open
        served.proxy.on_frame = unanswered
        before = asyncio.ensure_future(client.upsert("c", rows(1)))
        await until(lambda: sent)
        await lose(client, served.proxy)
        assert (await client.delete("c", [1])).spooled
        served.proxy.is_refusing = False
        await until(lambda: len(sent) == 2)
        for _ in range(100):
            await client.consistent_tick()
        assert sent[0] == sent[1]
        assert len(sent) == 2
        served.proxy.on_frame = lambda _: True
        served.proxy.cut()
        assert not (await before).spooled
        await come_back(client, served.proxy)
        assert await contents(served.owner) == {7: "tea 7"}


async def test_many_callers_share_one_frame_and_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        await lose(client, served.proxy)
        syncs, fsync = list[int](), os.fsync

        def counted(descriptor: int) -> None:
            syncs.append(descriptor)
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", counted)
        await asyncio.gather(*[client.upsert("c", rows(key)) for key in range(200)])
        kept = spool_of(client)
        assert kept.writes == 200
        assert len(syncs) == kept.frames <= 3
        monkeypatch.undo()
        await come_back(client, served.proxy)
        assert len(await contents(served.owner)) == 200


# --- what is not kept -------------------------------------------------------------------------------------------------


async def test_calls_and_writes_of_named_producers_are_refused_without_the_node_and_wait_behind_the_spool(
    tmp_path: Path,
) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool", give_up_s=0.05) as client:
        producer = await client.producer("p")
        await lose(client, served.proxy)
        await client.insert("c", rows(1))
        for call in (
            client.snapshot("c"),
            client.create_collection("d", SCHEMA, primary_key="id"),
            client.begin_transaction(),
            client.statistics(),
            producer.insert("c", rows(2)),
        ):
            with pytest.raises(Unreachable):
                await call
        served.proxy.stop(Way.TO_NODE)
        served.proxy.is_refusing = False
        late = asyncio.ensure_future(producer.insert("c", rows(3), sequence=7))
        served.proxy.go_on()
        while not late.done():
            try:
                await late
            except Unreachable:
                late = asyncio.ensure_future(producer.insert("c", rows(3), sequence=7))
        assert not late.result().spooled
        assert await keys_in_log(served.owner) == [1, 3]
        assert producer.last_sequence == 7


async def test_a_spool_that_is_full_refuses_by_name_and_loses_nothing_of_what_it_has(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    async with node_behind_proxy() as served, served.client(spool=spool, spool_bytes_max=64 << 10) as client:
        await lose(client, served.proxy)
        kept = []
        for key in range(40):
            try:
                await client.insert("c", rows(key, item="x" * 3_000))
                kept.append(key)
            except Overloaded as error:
                assert "spool_bytes_max" in str(error)  # noqa: PT017 - some of the calls
        assert 15 < len(kept) < 25
        assert (spool / LOG_NAME).stat().st_size <= 64 << 10
        await client.insert("c", rows(1000))  # a small one fits
        with pytest.raises(Overloaded):
            await asyncio.gather(*[client.insert("c", rows(key, item="x" * 3_000)) for key in range(50, 60)])
        await come_back(client, served.proxy)
        assert await keys_in_log(served.owner) == [*kept, 1000]
        await lose(client, served.proxy)
        assert (await client.insert("c", rows(60, item="x" * 3_000))).spooled
        await come_back(client, served.proxy)


async def test_a_disk_that_is_full_in_the_middle_of_a_write_keeps_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_behind_proxy() as served:
        client = await sn.connect(served.proxy.url, spool=tmp_path / "spool")
        await lose(client, served.proxy)
        await client.insert("c", rows(1))
        pwrite = os.pwrite

        def half(descriptor: int, data: memoryview, at: int) -> int:
            if len(data) <= 100:
                raise OSError(28, "No space left on device")
            return pwrite(descriptor, data[: len(data) // 2], at)

        monkeypatch.setattr(os, "pwrite", half)
        with pytest.raises(StorageFull):
            await client.insert("c", rows(2, item="x" * 9_000))
        monkeypatch.undo()
        assert (await client.insert("c", rows(3))).spooled
        await client.aclose()
        async with served.client(spool=tmp_path / "spool") as client:
            assert spool_of(client).frames == 2
            await come_back(client, served.proxy)
            assert await keys_in_log(served.owner) == [1, 3]


async def test_a_write_that_the_node_refuses_for_good_is_a_dead_letter_and_the_rest_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = tmp_path / "spool"
    async with node_behind_proxy() as served, served.client(spool=spool) as client:
        await client.create_collection("gone", SCHEMA, primary_key="id", shards=2, partitions=["eu"])
        await lose(client, served.proxy)
        await client.insert("c", rows(1))
        both = client.insert("gone", rows(2), partition="eu"), client.insert("c", rows(3))
        assert all(result.spooled for result in await asyncio.gather(*both))
        async with client.transaction() as txn:
            await txn.upsert("gone", rows(4))
            await txn.insert("c", rows(5))
        await client.insert("c", rows(6))
        await served.owner.drop_collection("gone")
        await come_back(client, served.proxy)
        assert await keys_in_log(served.owner) == [1, 3, 6]
        assert spool_of(client).dead_letters == 2
        assert caplog.text.count("spooled_write_refused") == 2
    letters = {}
    for path in sorted((spool / LETTERS_NAME).iterdir()):
        table = pa.ipc.open_file(str(path)).read_all()
        said = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
        assert said["code"] == "COLLECTION_NOT_FOUND"
        letters[said["collection"], said["kind"], said["partition"]] = table.to_pylist()
    assert letters == {
        ("gone", "insert", "eu"): rows(2),
        ("gone", "delete", ""): [{"id": 4}],
        ("gone", "insert", "_default"): rows(4),
        ("c", "insert", "_default"): rows(5),
    }


async def test_a_node_that_refuses_for_now_is_asked_again_and_makes_nobody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamingnode.remote.spool.PAUSE_S", 0.01)
    refused = 0

    def overloaded(*_: object) -> None:
        nonlocal refused
        refused += 1
        raise Overloaded("the node has no room for now")

    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        await lose(client, served.proxy)
        await client.insert("c", rows(1))
        with monkeypatch.context() as patched:
            patched.setattr(ClientWrites, "target", overloaded)
            served.proxy.is_refusing = False
            await until(lambda: refused > 3)
            assert (await client.insert("c", rows(2))).spooled
        await come_back(client, served.proxy)
        assert await keys_in_log(served.owner) == [1, 2]
        assert spool_of(client).dead_letters == 0


# --- directories ------------------------------------------------------------------------------------------------------


async def test_a_directory_is_of_one_connection_and_of_one_node(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool"):
        with pytest.raises(AlreadyOwned):
            await sn.connect(served.proxy.url, spool=tmp_path / "spool")
    async with node_behind_proxy() as other:
        with pytest.raises(InvalidArgument, match="is node"):
            await sn.connect(other.proxy.url, spool=tmp_path / "spool")
    with pytest.raises(InvalidArgument, match="spool_bytes_max"):
        sn.connect("unix:x", spool=tmp_path / "spool", spool_bytes_max=10)


async def test_a_damaged_spool_is_refused_and_one_with_a_torn_end_is_not(tmp_path: Path) -> None:
    path = tmp_path / "spool" / LOG_NAME
    async with node_behind_proxy() as served:
        async with served.client(spool=tmp_path / "spool") as client:
            await lose(client, served.proxy)
            await client.insert("c", rows(1))
            await client.insert("c", rows(2, item="x" * 9_000))
        whole = path.read_bytes()
        path.write_bytes(whole[:60] + bytes([whole[60] ^ 1]) + whole[61:])
        with pytest.raises(Corrupt, match="move its directory"):
            await sn.connect(served.proxy.url, spool=tmp_path / "spool")
        path.write_bytes(whole + whole[20:100])
        with pytest.raises(Corrupt):
            await sn.connect(served.proxy.url, spool=tmp_path / "spool")
        path.write_bytes(whole[:-5])
        async with served.client(spool=tmp_path / "spool") as client:
            assert spool_of(client).frames == 1
            await client.insert("c", rows(3))
        async with served.client(spool=tmp_path / "spool") as client:
            assert spool_of(client).frames == 2
            await come_back(client, served.proxy)
            assert await keys_in_log(served.owner) == [1, 3]


async def test_a_spool_that_was_replayed_and_not_shortened_is_not_replayed_again(tmp_path: Path) -> None:
    """Also when the node remembers only the newest of its writes."""
    settings: dict[str, Any] = {"producers.results_per_producer_max": 8}
    async with node_behind_proxy(**settings) as served:
        async with served.client(spool=tmp_path / "spool") as client:
            await lose(client, served.proxy)
            for key in range(40):
                await client.insert("c", rows(key))
        kept, served.proxy.is_refusing = (tmp_path / "spool" / LOG_NAME).read_bytes(), False
        for _ in range(3):
            async with served.client(spool=tmp_path / "spool") as client:
                await in_state(client, "direct")
                assert spool_of(client).dead_letters == 0
            (tmp_path / "spool" / LOG_NAME).write_bytes(kept)  # as after a crash at its end
        assert await keys_in_log(served.owner) == list(range(40))


@pytest.mark.parametrize("left_out", [(5, 9), (9, 5)], ids=["more", "less"])
async def test_copies_of_one_directory_never_take_one_write_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: tuple[int, int]
) -> None:
    randbits, numbers = secrets.randbits, iter((1, *left_out, 1, 1))
    monkeypatch.setattr(secrets, "randbits", lambda bits: next(numbers) if bits == LEFT_OUT_BITS else randbits(bits))
    async with node_behind_proxy() as served:
        async with served.client(spool=tmp_path / "spool"):
            pass
        served.proxy.is_refusing = True
        shutil.copytree(tmp_path / "spool", tmp_path / "copy")
        for key, directory in enumerate(("spool", "copy")):
            async with served.client(spool=tmp_path / directory) as client:
                assert (await client.insert("c", rows(key))).spooled
        served.proxy.is_refusing = False
        for directory in ("spool", "copy"):
            async with served.client(spool=tmp_path / directory) as client:
                await in_state(client, "direct")
        assert sorted(await keys_in_log(served.owner)) == [0, 1]


async def test_a_spool_goes_on_when_its_producer_was_deleted(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        for key in range(2):
            await lose(client, served.proxy)
            await client.insert("c", rows(key))
            await come_back(client, served.proxy)
            (name,) = [each for each in served.owner._backend.channel.producers._records if each.startswith("spool-")]  # type: ignore[attr-defined]
            assert await served.owner.delete_producer(name)
        assert await keys_in_log(served.owner) == [0, 1]


@pytest.mark.may_block
def test_a_blocking_client_has_a_spool_too(tmp_path: Path) -> None:
    with sn.sync.open_node(tmp_path / "node") as owner:
        owner.create_collection("c", SCHEMA, primary_key="id")
        with sn.sync.connect(f"unix:{tmp_path}/node/node.sock", spool=tmp_path / "spool") as client:
            assert not client.insert("c", rows(1)).spooled
            told = client.statistics().spool
            assert told is not None
            assert told.state == "direct"
    with sn.sync.connect(f"unix:{tmp_path}/node/node.sock", spool=tmp_path / "spool") as client:
        assert client.insert("c", rows(2)).spooled
        assert client.spool is not None
        assert client.spool.writes == 1
