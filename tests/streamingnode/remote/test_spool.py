"""The writes of a client with a spool take place in order and once, whether its node is there or
away.
"""

import asyncio
from pathlib import Path

import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.batching import BatchAppender
from streamingnode.errors import InvalidArgument, OnShutdown, Overloaded, Unreachable
from tests.streamingnode.remote.nodes import (
    SCHEMA,
    contents,
    keys_in_log,
    node_behind_proxy,
    rows,
)
from tests.streamingnode.remote.proxy import Passing, Way, kinds, proxied, until
from tests.streamingnode.remote.spool_cases import (
    come_back,
    emptied,
    in_state,
    lose,
    opened,
    some_rows,
    spool_of,
    versions,
)
from wal.frames import FrameKind

pytestmark = pytest.mark.anyio


async def test_writes_while_the_node_is_away_are_kept_and_take_place_in_order_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        assert (await client.insert("c", rows(1, 2, 3))).spooled
        await come_back(client, served.proxy)
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
        assert [(each.spooled, each.durable) for each in results] == [(True, True)] * 5
        kept = spool_of(client)
        assert (kept.state, kept.frames, kept.writes, kept.dead_letters) == ("away", 5, 5, 0)
        assert kept.bytes > 0 <= kept.age_s
        await come_back(client, served.proxy)
        assert spool_of(client).frames == spool_of(client).bytes == 0
        await client.insert("c", rows(6))
        await emptied(client)
        found = await contents(served.owner)
        assert found.keys() == {1, 4, 5, 6, *range(100, 200)}
        assert found[1] == "later 1"
        order = [key for key in await keys_in_log(served.owner) if key < 100]
        assert order[3:] == [4, 1, 5, 6]


@pytest.mark.parametrize(
    "attribute",
    ["time_tick", "row_offsets", "message_id", "message_ids", "last_confirmed", "txn_id"],
)
async def test_a_spooled_result_has_no_place_in_the_log_and_says_how_to_wait_for_one(
    tmp_path: Path, attribute: str
) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        result = await client.insert("c", rows(1))
        with pytest.raises(InvalidArgument, match="consistent_tick"):
            getattr(result, attribute)
        large = await client.insert("c", [{"id": key, "item": "x" * 900_000} for key in range(9)])
        with pytest.raises(InvalidArgument, match="consistent_tick"):
            getattr(large, attribute)
        assert repr(large) == "WriteResult(spooled=True)"


async def test_calls_see_what_the_client_wrote_before_them(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        producer = await client.producer("p")
        for key in range(0, 30, 3):
            await client.insert("c", rows(key))
            assert (await client.snapshot("c")).num_rows == key + 1
            result = await producer.insert("c", rows(key + 1))
            assert not result.spooled
            assert result.time_tick
            await client.insert("c", rows(key + 2))
            assert len(await keys_in_log(client)) == key + 3
        await client.insert("c", rows(100))
        await client.drop_collection("c")
        assert spool_of(client).dead_letters == 0


async def test_a_streamed_transaction_is_behind_what_was_written_before_it(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        await client.insert("c", rows(1))
        txn_id = await client.begin_transaction()
        await client.insert("c", rows(2), txn_id=txn_id)
        result = await client.commit_transaction(txn_id)
        assert not result.spooled
        assert await keys_in_log(served.owner) == [1, 2]


async def test_rows_of_an_appender_go_through_the_spool(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        async with BatchAppender(client, "c") as appender:
            told = [await appender.submit(row) for row in rows(*range(20))]
        appended = [await each for each in told]
        assert all(each.batch.spooled and each.row_offset is None for each in appended)
        with pytest.raises(InvalidArgument, match="consistent_tick"):
            _ = appended[0].time_tick
        assert len(await keys_in_log(client)) == 20


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
                await emptied(client)
                assert await contents(served.owner) == {1: "kept 1", 2: "tea 2"}


async def test_closing_waits_for_a_node_that_takes_what_is_kept(tmp_path: Path) -> None:
    async with node_behind_proxy() as served:
        async with served.client(spool=tmp_path / "spool") as client:
            await asyncio.gather(*[client.insert("c", rows(key)) for key in range(100)])
        assert len(await keys_in_log(served.owner)) == 100


async def test_two_writes_of_one_key_take_place_in_order_over_losses_and_once(
    tmp_path: Path,
) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        for version in range(300):
            await client.upsert("c", [{"id": 1, "item": str(version)}])
            if version % 40 == 20:
                await lose(client, served.proxy)
            elif version % 40 == 30:
                served.proxy.is_refusing = False
            if version % 80 == 79:
                await come_back(client, served.proxy)
        await come_back(client, served.proxy)
        assert await versions(served.owner, 1) == list(range(300))


async def test_a_writer_that_never_pauses_waits_for_room_while_the_node_takes_what_is_kept(
    tmp_path: Path,
) -> None:
    async with (
        node_behind_proxy() as served,
        served.client(spool=tmp_path / "spool", spool_bytes_max=64 << 10) as client,
    ):
        for version in range(100):
            await client.upsert("c", [{"id": 1, "item": str(version).zfill(4_000)}])
            assert spool_of(client).bytes <= 64 << 10
        await emptied(client)
        assert await versions(served.owner, 1) == list(range(100))
        served.proxy.stop(Way.TO_NODE)
        while spool_of(client).bytes < 60 << 10:
            version += 1
            await client.upsert("c", [{"id": 1, "item": str(version).zfill(4_000)}])
        waiting = [
            asyncio.ensure_future(client.upsert("c", [{"id": 1, "item": str(v).zfill(4_000)}]))
            for v in range(version + 1, version + 5)
        ]
        for _ in range(5):
            await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="did nothing"):
            await client.upsert("c", [{"id": 1, "item": "no"}], timeout=0.05)
        assert not any(each.done() for each in waiting)
        served.proxy.go_on()
        await asyncio.gather(*waiting)
        await emptied(client)
        assert await versions(served.owner, 1) == list(range(version + 5))


async def test_cuts_while_writes_are_sent_lose_and_double_nothing(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        await lose(client, served.proxy)
        for key in range(240):
            await client.insert("c", rows(key))
        for cut in range(12):
            served.proxy.plan_cut(Way.TO_CLIENT if cut % 2 else Way.TO_NODE, 1200 + 97 * cut)
            served.proxy.is_refusing = False
            before = served.proxy.connections
            await until(lambda before=before: served.proxy.connections > before)  # type: ignore[misc]
            await until(lambda: not served.proxy.open_connections or not spool_of(client).frames)
        await come_back(client, served.proxy)
        assert await keys_in_log(served.owner) == list(range(240))
        assert spool_of(client).dead_letters == 0


async def test_writes_whose_answers_never_come_are_sent_again(tmp_path: Path) -> None:
    async with (
        node_behind_proxy() as served,
        served.client(spool=tmp_path / "spool", give_up_s=0.05) as client,
    ):
        served.proxy.on_frame = kinds(FrameKind.RESULTS)
        await asyncio.gather(*[client.insert("c", rows(key)) for key in range(40)])
        await some_rows(served.owner)
        await lose(client, served.proxy)
        served.proxy.on_frame = lambda _: True
        await come_back(client, served.proxy)
        assert sorted(await keys_in_log(served.owner)) == list(range(40))


async def test_a_node_that_is_opened_again_while_writes_are_sent_has_each_write_once(
    tmp_path: Path,
) -> None:
    async with proxied(1) as proxy:
        async with (
            opened(tmp_path / "node", proxy),
            sn.connect(proxy.url, spool=tmp_path / "spool"),
        ):
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
                await emptied(client)
                assert await keys_in_log(served.owner) == list(range(60))


async def test_writes_are_kept_at_once_while_those_before_them_are_in_doubt(
    tmp_path: Path,
) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        served.proxy.stop(Way.TO_NODE)
        for number in range(20):
            await client.upsert("c", [{"id": 99, "item": str(number)}])
        await lose(client, served.proxy)
        for number in range(20, 25):
            await client.upsert("c", [{"id": 99, "item": str(number)}])
        served.proxy.go_on()
        await come_back(client, served.proxy)
        assert await versions(served.owner, 99) == [*range(25)]


async def test_one_message_is_sent_when_the_one_before_it_is_answered(tmp_path: Path) -> None:
    sent: list[int] = []

    def unanswered(passing: Passing) -> bool:
        if passing.way is Way.TO_NODE and passing.kind == FrameKind.WRITES:
            sent.append(passing.number)
        return passing.kind != FrameKind.RESULTS

    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        served.proxy.on_frame = unanswered
        await client.upsert("c", rows(1))
        await until(lambda: sent)
        await client.delete("c", [1])
        assert spool_of(client).frames == 2
        served.proxy.cut()
        await until(lambda: len(sent) == 2)
        for _ in range(100):
            await client.statistics()
        assert sent[0] == sent[1]
        assert len(sent) == 2
        served.proxy.on_frame = lambda _: True
        served.proxy.cut()
        await come_back(client, served.proxy)
        assert await contents(served.owner) == {}
        assert await keys_in_log(served.owner) == [1]


async def test_many_callers_share_few_frames(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        await lose(client, served.proxy)
        await asyncio.gather(*[client.upsert("c", rows(key)) for key in range(200)])
        kept = spool_of(client)
        assert kept.writes == 200
        assert kept.frames <= 3
        await come_back(client, served.proxy)
        assert len(await contents(served.owner)) == 200


async def test_client_closed_while_writes_are_sent_goes_on_when_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamingnode.remote.spool.GRACE_S", 0.05)
    monkeypatch.setattr("streamingnode.remote.client.GRACE_S", 0.05)
    async with node_behind_proxy() as served:
        client = await sn.connect(served.proxy.url, spool=tmp_path / "spool")
        served.proxy.on_frame = kinds(FrameKind.RESULTS)
        for key in range(10):
            await client.insert("c", rows(key))
        await some_rows(served.owner)
        waiting = asyncio.ensure_future(client.consistent_tick())
        await asyncio.sleep(0)
        await client.aclose()
        with pytest.raises(OnShutdown):
            await waiting
        with pytest.raises(OnShutdown):
            await client.insert("c", rows(100))
        served.proxy.on_frame = lambda _: True
        async with served.client(spool=tmp_path / "spool") as client:
            await emptied(client)
            assert await keys_in_log(served.owner) == list(range(10))


async def test_what_is_written_while_the_node_is_leaving_is_kept_at_once(tmp_path: Path) -> None:
    async with (
        node_behind_proxy() as served,
        served.client(spool=tmp_path / "spool", give_up_s=300) as client,
    ):
        (session,) = served.server.sessions
        session.connection.send(FrameKind.LEAVING)
        await in_state(client, "away")
        writing = asyncio.ensure_future(client.insert("c", rows(1)))
        served.proxy.is_refusing = True
        served.proxy.cut()
        assert (await writing).spooled
        await come_back(client, served.proxy)
        assert await keys_in_log(served.owner) == [1]
