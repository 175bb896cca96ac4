"""Answers that are lost or come late: nobody is told that a write that may be there is not."""

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.errors import (
    CollectionNotFound,
    DeadlineExceeded,
    Indeterminate,
    OnShutdown,
    Overloaded,
    PartitionNotFound,
    ProtocolError,
    StreamingNodeError,
    TransactionExpired,
    Unreachable,
)
from streamingnode.remote.link import LinkState
from tests.failing_disk import FailingDisk
from tests.parts_of import parts_of
from tests.streamingnode.remote.client_cases import (
    SOON_S,
    Told,
    pass_all,
    reached,
    streamed,
    without_answers_to_commits,
)
from tests.streamingnode.remote.nodes import (
    SCHEMA,
    SETTINGS,
    contents,
    keys_in_log,
    link_of,
    node_behind_proxy,
    rows,
    serving,
)
from tests.streamingnode.remote.proxy import Passing, kinds, proxied, until
from wal.frames import FrameKind

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]


# --- answers in doubt -----------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [False, True], ids=["client", "spool"])
async def test_a_write_that_is_given_up_before_it_is_sent_or_kept_does_not_take_place(
    tmp_path: Path, *, keeps: bool
) -> None:
    options: dict[str, Any] = {"spool": tmp_path / "spool"} if keeps else {}

    # so that the next one goes in a pack, by a task that no caller can cancel
    async def several(*keys: int) -> None:
        await asyncio.gather(*[client.upsert("c", rows(key)) for key in keys])

    async with node_behind_proxy() as served, served.client(**options) as client:
        await several(1, 2, 3)
        served.proxy.is_refusing = True
        served.proxy.cut()
        await until(lambda: link_of(client).state is not LinkState.READY)
        turn = asyncio.Lock()
        if keeps:
            await several(4, 5, 6)
            # before a message is kept, the disk has what is known of the node
            turn = client._backend._saving  # type: ignore[attr-defined]
        async with turn:
            with pytest.raises(Overloaded, match="did nothing"):
                await client.upsert("c", rows(7), timeout=0.1)
        served.proxy.is_refusing = False
        await client.upsert("c", rows(8))
        async with asyncio.timeout(60):
            # what it waits for is asked anew
            while 8 not in (found := await keys_in_log(served.owner)):  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert found == [1, 2, 3, *((4, 5, 6) if keeps else ()), 8]


async def test_write_in_the_log_is_not_refused_when_it_comes_again_to_a_dropped_partition() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        await client.create_partition("c", "eu")
        served.proxy.on_frame = kinds(FrameKind.RESULTS)
        writing = asyncio.ensure_future(client.insert("c", rows(1), partition="eu"))
        await reached(served.owner, 1)
        await served.owner.drop_partition("c", "eu")
        served.proxy.on_frame = pass_all
        served.proxy.cut()
        try:
            await writing
        except PartitionNotFound:
            assert 1 not in await keys_in_log(served.owner)
        except Indeterminate:
            pass


async def test_a_commit_that_comes_again_while_the_first_is_under_way_is_told_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    async with node_behind_proxy(tmp_path) as served, served.client() as client:
        txn = await streamed(client)
        disk.gate.clear()
        wal = parts_of(served.owner).channel.wal
        commits = without_answers_to_commits(served)
        try:
            # Its last bodies first, which the gate holds as well: they go before the commit.
            disk.gate.set()
            await txn._stream_bodies()
            disk.gate.clear()
            committing = asyncio.ensure_future(txn.commit())
            await until(lambda: commits and wal.in_flight)
            served.proxy.on_frame = pass_all
            served.proxy.cut_clients()
            await until(lambda: link_of(client).connections == 2)
            await asyncio.wait([committing], timeout=0.2)
        finally:
            disk.gate.set()
        result = await committing
        assert (await contents(served.owner)).keys() == set(range(6))
        assert result.txn_id


async def test_a_commit_without_an_answer_is_in_doubt_when_the_client_gives_up() -> None:
    async with node_behind_proxy() as served, served.client(give_up_s=0.1) as client:
        txn = await streamed(client)
        without_answers_to_commits(served)
        committing = asyncio.ensure_future(txn.commit())
        await reached(served.owner, *range(6))
        served.proxy.is_refusing = True
        served.proxy.cut()
        with pytest.raises(Indeterminate):
            await committing


async def test_a_commit_without_an_answer_is_in_doubt_when_the_client_is_closed() -> None:
    async with node_behind_proxy() as served:
        async with served.client() as client:
            txn = await streamed(client)
            without_answers_to_commits(served)
            committing = asyncio.ensure_future(txn.commit())
            await reached(served.owner, *range(6))
        with pytest.raises(Indeterminate):
            await committing


async def test_a_deadline_that_passes_after_commit_was_sent_says_that_it_may_take_effect() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        producer = await client.producer("p")
        commits = without_answers_to_commits(served)
        large = [{"id": key, "item": "x" * 900_000} for key in range(6)]
        with pytest.raises(DeadlineExceeded):
            await producer.insert("c", large, timeout=1)
        assert commits
        await reached(served.owner, *range(6))


async def test_writes_are_in_doubt_when_the_client_gives_up_and_when_it_is_closed() -> None:
    told = Told()
    async with node_behind_proxy() as served:
        async with served.client(give_up_s=0.1) as client:
            served.proxy.on_frame = kinds(FrameKind.RESULTS)
            first = asyncio.ensure_future(told.write(client.insert("c", rows(1)), 1))
            await reached(served.owner, 1)
            served.proxy.is_refusing = True
            served.proxy.cut()
            await first
            assert told.open == [1]
            with pytest.raises(Unreachable):
                await client.insert("c", rows(2))
            with pytest.raises(Unreachable):
                await client.consistent_tick()
            served.proxy.is_refusing = False
            served.proxy.on_frame = pass_all
            await until(lambda: link_of(client).state is LinkState.READY)
            await told.write(client.insert("c", rows(3)), 3)
            served.proxy.on_frame = kinds(FrameKind.RESULTS)
            last = asyncio.ensure_future(told.write(client.insert("c", rows(4)), 4))
            await reached(served.owner, 4)
            await link_of(client).close()
            await last
        assert told.open == [1, 4]
        assert told.acknowledged == [3]
        told.check(await keys_in_log(served.owner))
        with pytest.raises(OnShutdown):
            await client.insert("c", rows(5))


async def test_calls_are_answered_over_a_cut() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        await client.insert("c", rows(1))
        await client.producer("old")
        loop = asyncio.get_running_loop()
        served.proxy.on_frame = kinds(FrameKind.REPLY)
        calling: list[asyncio.Future[Any]] = [
            loop.create_task(client.consistent_tick()),
            loop.create_task(client.snapshot("c")),
            asyncio.ensure_future(client.statistics()),
            loop.create_task(client.create_collection("new", SCHEMA, primary_key="id")),
            loop.create_task(client.create_partition("c", "eu")),
        ]
        deleting = loop.create_task(client.delete_producer("old"))
        await until(lambda: "new" in {each.name for each in served.owner.collections()})
        await until(lambda: "eu" in served.owner.collection("c").partitions)
        await until(lambda: "old" not in parts_of(served.owner).channel.producers._records)
        served.proxy.on_frame = pass_all
        served.proxy.cut()
        assert await deleting, "there was one"
        await asyncio.gather(*calling)
        assert {each.name for each in client.collections()} == {"c", "new"}
        assert client.collection("c").partitions == ("_default", "eu")


async def test_the_node_of_another_directory_at_the_same_address_is_refused(tmp_path: Path) -> None:
    async with proxied(1) as proxy:
        async with sn.open_node(tmp_path / "one", **SETTINGS) as one:
            async with serving(one, proxy=proxy):
                client = await sn.connect(proxy.url, give_up_s=5)
        async with (
            sn.open_node(tmp_path / "other", **SETTINGS) as other,
            serving(other, proxy=proxy),
        ):
            with pytest.raises((ProtocolError, Unreachable)):
                await client.consistent_tick()
            assert link_of(client).state is LinkState.LOST
            await client.aclose()


async def test_a_client_gives_up_on_a_node_that_ends_each_connection_before_its_catalog() -> None:
    async with node_behind_proxy() as served, served.client(give_up_s=0.2) as client:

        def cut_at_catalog(passing: Passing) -> bool:
            if passing.kind == FrameKind.CATALOG:
                served.proxy.cut()
            return passing.kind != FrameKind.CATALOG

        served.proxy.on_frame = cut_at_catalog
        served.proxy.cut()
        async with asyncio.timeout(SOON_S):
            with pytest.raises(Unreachable):
                await client.consistent_tick()
        assert served.proxy.connections < 20


async def test_a_request_that_is_too_long_is_refused_and_the_client_survives_a_cut() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        long = pa.field("x" * (9 << 20), pa.int64())
        with pytest.raises(StreamingNodeError):
            await client.create_collection(
                "long", pa.schema([SCHEMA.field("id"), long]), primary_key="id"
            )
        served.proxy.cut()
        async with asyncio.timeout(SOON_S):
            await client.consistent_tick()


async def test_a_call_that_was_not_sent_is_in_no_doubt() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        connection = link_of(client)._connection
        assert connection is not None
        connection.abort(OnShutdown("the network"))
        # it may not be repeated, and comes before anybody noticed
        assert not await client.delete_producer("nobody")
        assert link_of(client).connections == 2


# --- transactions ---------------------------------------------------------------------------------


async def test_a_streamed_transaction_over_a_cut_expires_and_leaves_nothing_open() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        txn = await streamed(client)
        assert len(served.server.shared.transactions) == 1
        served.proxy.cut()
        await until(
            lambda: link_of(client).connections == 2 and link_of(client).state is LinkState.READY
        )
        with pytest.raises(TransactionExpired):
            await txn.commit()
        await until(lambda: not served.server.shared.transactions)
        txns = parts_of(served.owner).channel.term.transactions
        await until(lambda: not txns.sessions)
        assert await contents(served.owner) == {}


async def test_nothing_is_kept_of_transactions_of_a_client_that_expired_or_ended_elsewhere() -> (
    None
):
    async with node_behind_proxy() as served, served.client() as client:
        gone = [await client.begin_transaction() for _ in range(3)]
        for txn_id in gone:
            await served.owner.abort_transaction(txn_id)
        txn_id = await client.begin_transaction()
        assert list(served.server.shared.transactions) == [txn_id]
        with pytest.raises(TransactionExpired):
            await client.commit_transaction(gone[0])
        await client.commit_transaction(txn_id)
        with pytest.raises(sn.errors.InvalidTransactionState, match="committed already"):
            await client.commit_transaction(txn_id)


async def test_a_transaction_whose_begin_is_cut_off_is_not_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    async with node_behind_proxy(tmp_path) as served, served.client() as client:
        wal = parts_of(served.owner).channel.wal
        await client.insert("c", rows(100))
        txn = client.transaction(keepalive_s=600)
        disk.gate.clear()
        writing = [
            asyncio.ensure_future(txn.insert("c", [{"id": key, "item": "x" * 1_000_000}]))
            for key in range(6)
        ]
        await until(lambda: wal.in_flight)
        served.proxy.cut()
        await until(lambda: link_of(client).connections == 2)
        disk.gate.set()
        done = await asyncio.gather(*writing, return_exceptions=True)
        assert any(isinstance(each, TransactionExpired) for each in done)
        await client.insert("c", rows(101))
        txns = parts_of(served.owner).channel.term.transactions
        await until(lambda: not txns.sessions)
        with pytest.raises(TransactionExpired):
            await txn.rollback()
        assert (await contents(served.owner)).keys() == {100, 101}


async def test_sequence_that_was_given_is_not_drawn_again_when_its_second_try_is_refused() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        await served.owner.create_collection("other", SCHEMA, primary_key="id")
        await client.consistent_tick()
        producer = await client.producer("p")
        served.proxy.on_frame = kinds(FrameKind.RESULTS, FrameKind.CATALOG)
        first = asyncio.ensure_future(producer.insert("c", rows(1), sequence=5))
        await reached(served.owner, 1)
        first.cancel()
        await asyncio.wait([first])
        await served.owner.drop_collection("other")
        served.proxy.on_frame = kinds(FrameKind.CATALOG)
        with pytest.raises(CollectionNotFound):
            await producer.insert("other", rows(1), sequence=5)
        await producer.insert("c", rows(2))
        assert sorted(await keys_in_log(served.owner)) == [1, 2]


async def test_a_call_that_ends_each_connection_it_goes_over_is_given_up_and_others_go_on() -> None:
    async with node_behind_proxy() as served, served.client(give_up_s=0.1) as client:

        def passes(passing: Passing) -> bool:
            if ends := passing.kind == FrameKind.CALL and b"statistics" in passing.data:
                served.proxy.cut()
            return not ends

        served.proxy.on_frame = passes
        # and not in doubt: it changes nothing
        with pytest.raises(Unreachable, match="before statistics was answered"):
            await client.statistics()
        await client.insert("c", rows(1))
