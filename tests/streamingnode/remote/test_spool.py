"""A client with a spool goes on writing while its node is away, and all of it takes place in order
and once.
"""

import asyncio
from pathlib import Path

import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.errors import OnShutdown, Unreachable
from streamingnode.remote.client import COMPANY_MIN
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
        assert [
            (each.spooled, each.time_tick, each.message_ids, each.row_offsets) for each in results
        ] == [(True, 0, (), {})] * 5
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


async def test_two_writes_of_one_key_take_place_in_order_on_both_sides_of_a_spool_and_once(
    tmp_path: Path,
) -> None:
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
        version = 59
        to_replay = 0
        behind = 0
        while True:
            version += 1
            result = await client.upsert("c", [{"id": 1, "item": str(version)}])
            if not result.spooled:
                break
            if spool_of(client).state == "replaying":
                to_replay = to_replay or spool_of(client).frames
                behind = behind + 1
            assert behind <= to_replay, "it gets shorter"
        assert behind, "some queued behind the spool"
        assert await versions(served.owner, 1) == list(range(version + 1))


async def test_cuts_in_the_middle_of_replays_lose_and_double_nothing(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        await lose(client, served.proxy)
        for key in range(240):
            await client.insert("c", rows(key))
        for cut in range(12):
            served.proxy.plan_cut(Way.TO_CLIENT if cut % 2 else Way.TO_NODE, 1200 + 97 * cut)
            served.proxy.is_refusing = False
            before = served.proxy.connections
            await until(lambda before=before: served.proxy.connections > before)  # type: ignore[misc]
            await until(
                lambda: not served.proxy.open_connections or spool_of(client).state == "direct"
            )
        await come_back(client, served.proxy)
        assert await keys_in_log(served.owner) == list(range(240))
        assert spool_of(client).dead_letters == 0


async def test_answers_to_a_replay_that_never_come_are_asked_for_again(tmp_path: Path) -> None:
    async with (
        node_behind_proxy() as served,
        served.client(spool=tmp_path / "spool", give_up_s=0.05) as client,
    ):
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


async def test_a_node_that_is_opened_again_in_the_middle_of_a_replay_has_each_write_once(
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
                await in_state(client, "direct")
                assert await keys_in_log(served.owner) == list(range(60))


async def test_what_was_on_its_way_at_the_loss_is_told_its_result_and_is_not_kept_as_well(
    tmp_path: Path,
) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        is_passed = kinds(FrameKind.RESULTS)
        seen = list[int]()

        def on_frame(passing: Passing) -> bool:
            seen.append(passing.kind)
            return is_passed(passing)

        served.proxy.on_frame = on_frame
        before = asyncio.ensure_future(client.insert("c", rows(1)))
        await some_rows(served.owner)
        waiting = [asyncio.ensure_future(client.insert("c", rows(key))) for key in range(10, 40)]
        await until(lambda: seen.count(FrameKind.WRITES) > 1)
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
        for keys in (range(1), range(1, 1 + COMPANY_MIN)):  # a frame each
            sent += [asyncio.ensure_future(client.insert("c", rows(key))) for key in keys]
            for _ in range(5):
                await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(client.insert("c", rows(key))) for key in range(30, 50)]
        await asyncio.sleep(0)
        await lose(client, served.proxy)
        assert all(result.spooled for result in await asyncio.gather(*waiting))
        assert not any(each.done() for each in sent)
        served.proxy.go_on()
        await come_back(client, served.proxy)
        await asyncio.gather(*sent)
        assert sorted(await keys_in_log(served.owner)) == [*range(1 + COMPANY_MIN), *range(30, 50)]


async def test_writes_of_one_client_that_wait_at_the_loss_take_place_in_the_order_of_their_calls(
    tmp_path: Path,
) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        served.proxy.stop(Way.TO_NODE)
        sent = []
        for keys in (range(1), range(1, 1 + COMPANY_MIN)):  # a frame each
            sent += [asyncio.ensure_future(client.insert("c", rows(key))) for key in keys]
            for _ in range(5):
                await asyncio.sleep(0)
        waiting = [
            asyncio.ensure_future(client.upsert("c", [{"id": 99, "item": str(number)}]))
            for number in range(20)
        ]
        await asyncio.sleep(0)
        await lose(client, served.proxy)
        behind = [
            asyncio.ensure_future(client.upsert("c", [{"id": 99, "item": str(number)}]))
            for number in range(20, 25)
        ]
        assert all(result.spooled for result in await asyncio.gather(*waiting, *behind))
        served.proxy.go_on()
        await come_back(client, served.proxy)
        await asyncio.gather(*sent)
        assert await versions(served.owner, 99) == [*range(25)]


async def test_nothing_of_a_spool_is_sent_before_what_was_on_its_way_at_the_loss_is_answered(
    tmp_path: Path,
) -> None:
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


async def test_many_callers_share_few_frames(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        await lose(client, served.proxy)
        await asyncio.gather(*[client.upsert("c", rows(key)) for key in range(200)])
        kept = spool_of(client)
        assert kept.writes == 200
        assert kept.frames <= 3
        await come_back(client, served.proxy)
        assert len(await contents(served.owner)) == 200


async def test_client_closed_during_a_replay_tells_who_waits_and_goes_on_when_opened_again(
    tmp_path: Path,
) -> None:
    async with node_behind_proxy() as served:
        client = await sn.connect(served.proxy.url, spool=tmp_path / "spool")
        await lose(client, served.proxy)
        for key in range(10):
            await client.insert("c", rows(key))
        served.proxy.on_frame = kinds(FrameKind.RESULTS)
        served.proxy.is_refusing = False
        await some_rows(served.owner)
        waiting = [asyncio.ensure_future(client.insert("c", rows(key))) for key in range(100, 120)]
        await asyncio.sleep(0)
        await client.aclose()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(outcome, OnShutdown) for outcome in outcomes)
        served.proxy.on_frame = lambda _: True
        async with served.client(spool=tmp_path / "spool") as client:
            await in_state(client, "direct")
            assert await keys_in_log(served.owner) == list(range(10))


async def test_few_writes_wait_for_the_answer_to_those_before_them_as_without_a_spool(
    tmp_path: Path,
) -> None:
    frames = list[Passing]()

    def note(passing: Passing) -> bool:
        frames.extend([passing] if passing.kind == FrameKind.WRITES else ())
        return True

    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        served.proxy.on_frame = note
        served.proxy.stop(Way.TO_CLIENT)
        written = []
        for key in range(COMPANY_MIN - 1):
            written.append(asyncio.ensure_future(client.upsert("c", rows(key))))
            await until(lambda: frames)
            for _ in range(5):
                await asyncio.sleep(0)
        await some_rows(served.owner)
        served.proxy.go_on()
        await asyncio.gather(*written)
        assert len(frames) == 2


async def test_what_is_written_while_the_node_is_leaving_is_kept_at_once(tmp_path: Path) -> None:
    async with (
        node_behind_proxy() as served,
        served.client(spool=tmp_path / "spool", give_up_s=300) as client,
    ):
        (session,) = served.server.sessions
        session.connection.send(FrameKind.LEAVING)
        await in_state(client, "spooling")
        writing = asyncio.ensure_future(client.insert("c", rows(1)))
        served.proxy.is_refusing = True
        served.proxy.cut()
        assert (await writing).spooled
        await come_back(client, served.proxy)
        assert await keys_in_log(served.owner) == [1]
