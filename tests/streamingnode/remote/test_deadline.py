"""The timeout of a client's transaction, over connections that are lost and with a spool."""

import asyncio
from pathlib import Path

import anyio
import pytest

from streamingnode.errors import DeadlineExceeded, Overloaded
from streamingnode.remote.link import LinkState
from streamingnode.writing import transaction
from tests.streamingnode.remote.client_cases import (
    SOON_S as SOON,
)
from tests.streamingnode.remote.client_cases import (
    pass_all,
    reached,
    streamed,
    without_answers_to_commits,
)
from tests.streamingnode.remote.nodes import contents, keys_in_log, link_of, node_behind_proxy, rows
from tests.streamingnode.remote.proxy import HANGS_S, Passing, Way, kinds, until
from tests.streamingnode.remote.spool_cases import come_back, lose
from wal.frames import FrameKind

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SHORT_S = 0.1


@pytest.fixture(autouse=True)
def nobody_waits_for_a_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "ROLLBACK_S_MAX", 2 * HANGS_S)


@pytest.mark.parametrize("is_named", [False, True], ids=["node", "producer"])
async def test_a_commit_whose_answer_does_not_come_in_time_is_in_doubt(*, is_named: bool) -> None:
    async with node_behind_proxy() as served, served.client() as client:
        feed = await client.producer("feed")
        served.proxy.on_frame = kinds(FrameKind.RESULTS)
        with pytest.raises(DeadlineExceeded, match="may still take effect"):
            if is_named:
                async with feed.transaction(sequence=1, timeout=SHORT_S) as txn:
                    await txn.insert("c", rows(1))
            else:
                async with client.transaction(timeout=SHORT_S) as txn:
                    await txn.insert("c", rows(1))
        await reached(served.owner, 1)
        served.proxy.on_frame = pass_all
        if is_named:
            async with feed.transaction(sequence=1, timeout=SOON) as again:
                await again.insert("c", rows(1))
        await client.insert("c", rows(2))
        assert await keys_in_log(served.owner) == [1, 2]


async def test_a_transaction_that_finds_no_node_in_time_did_nothing() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        served.proxy.is_refusing = True
        served.proxy.cut()
        await until(lambda: link_of(client).state is not LinkState.READY)
        for key in (1, 2):
            with anyio.fail_after(HANGS_S), pytest.raises(Overloaded, match="did nothing"):
                txn = client.transaction(timeout=SHORT_S if key == 1 else None)
                await txn.insert("c", rows(key))
                await txn.commit(timeout=SHORT_S if key == 2 else None)
        with anyio.fail_after(HANGS_S), pytest.raises(Overloaded, match="did nothing"):
            async with client.transaction(timeout=SHORT_S) as large:
                for key in range(10, 20):
                    await large.insert("c", [{"id": key, "item": "x" * 1_000_000}])
        served.proxy.is_refusing = False
        await client.insert("c", rows(3))
        assert await contents(served.owner) == {3: "tea 3"}


async def test_the_commit_of_a_streamed_transaction_without_an_answer_is_in_doubt() -> None:
    async with node_behind_proxy() as served, served.client() as client:
        txn = await streamed(client)
        commits = without_answers_to_commits(served)
        with pytest.raises(DeadlineExceeded, match="may still take effect"):
            await txn.commit(timeout=1)
        await until(lambda: commits)
        await reached(served.owner, *range(6))
        served.proxy.on_frame = pass_all


async def test_rows_that_stay_on_the_way_are_rolled_back_when_their_time_is_over() -> None:
    def rows_are_lost(passing: Passing) -> bool:
        return passing.way is Way.TO_CLIENT or passing.kind != FrameKind.CALL

    async with node_behind_proxy() as served, served.client() as client:
        txn = client.transaction(timeout=SOON)
        for key in range(6):
            await txn.insert("c", [{"id": key, "item": "x" * 1_000_000}])
        assert len(await served.owner.transactions()) == 1
        assert txn._deadline is not None
        served.proxy.on_frame = rows_are_lost
        txn._deadline._at = anyio.current_time() + SHORT_S
        with anyio.fail_after(HANGS_S), pytest.raises(Overloaded, match="did nothing"):
            await txn.commit()
        served.proxy.on_frame = pass_all
        served.proxy.cut()  # the session goes with its connection
        async with asyncio.timeout(HANGS_S):
            # what it waits for is asked anew
            while await served.owner.transactions():  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert await contents(served.owner) == {}


async def test_with_a_spool_a_commit_is_kept_in_time_and_one_that_cannot_be_did_nothing(
    tmp_path: Path,
) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        feed = await client.producer("feed")
        await lose(client, served.proxy)
        async with client.transaction(timeout=SOON) as kept:
            await kept.insert("c", rows(1))
        assert kept.result is not None
        assert kept.result.spooled
        with anyio.fail_after(HANGS_S):
            with pytest.raises(Overloaded, match="did nothing"):
                async with client.transaction(timeout=SHORT_S) as large:
                    for key in range(10, 20):
                        await large.insert("c", [{"id": key, "item": "x" * 1_000_000}])
            with pytest.raises(Overloaded, match="did nothing"):
                async with feed.transaction(timeout=SHORT_S) as named:
                    await named.insert("c", rows(2))
        await come_back(client, served.proxy)
        await client.insert("c", rows(3))
        assert (await contents(client)).keys() == {1, 3}
