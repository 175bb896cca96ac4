"""What holds the log as an operator sees and ends it: of a node of this process, and over a
connection to one.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.node import Node
from tests.parts_of import WAYS, opened_one_way, parts_of
from wal.errors import InvalidArgument, Truncated

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])
PATIENCE_S = 60


@pytest.fixture(params=WAYS)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with opened_one_way(request.param, None, cut_interval_s=None) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
        yield node


async def read(node: Node, name: str) -> list[int]:
    """Return the keys that a named reader gets, and acknowledge them."""
    keys: list[int] = []
    async with node.read("c", name=name, until=await node.consistent_tick()) as messages:
        async for message in messages:
            if (rows := message.to_arrow()) is not None:
                keys += map(int, rows["id"].to_numpy())
                await messages.ack(message)
    await wait_closed(node)
    return keys


async def test_readers_are_told_with_who_has_them_open_and_how_far_they_are(node: Node) -> None:
    assert await node.readers() == ()
    await node.create_collection("b", SCHEMA, primary_key="id")
    written = await node.insert("c", [{"id": 1}])
    assert await read(node, "billing") == [1]
    async with node.read("b", name="z"), node.read("c", name="a"):
        found = await node.readers()
        assert [(*each.collections, each.name, each.is_open) for each in found] == [
            ("b", "z", True),
            ("c", "a", True),
            ("c", "billing", False),
        ]
    seen = found[-1]
    assert seen.tick >= written.time_tick
    assert 0 <= seen.behind_s < PATIENCE_S
    assert found[1].backlog > seen.backlog >= 0
    await node.insert("b", [{"id": 1}])
    assert (await node.readers())[-1].backlog > seen.backlog, (
        "what others write counts: the log holds it"
    )


async def test_a_reader_goes_on_where_it_is_moved_to(node: Node) -> None:
    written = [await node.insert("c", [{"id": key}]) for key in (1, 2, 3)]
    assert await read(node, "r") == [1, 2, 3]
    for policy, expected in (
        (sn.DeliverPolicy.all(), [1, 2, 3]),
        (sn.DeliverPolicy.start_from(written[1].message_ids[0]), [2, 3]),
        (sn.DeliverPolicy.start_after(written[1].message_ids[0]), [3]),
        (sn.DeliverPolicy.start_after(written[0].time_tick), [2, 3]),
        (sn.DeliverPolicy.latest(), []),
    ):
        before = await places(node)
        would = await node.seek_reader("c", "r", policy, dry_run=True)
        assert await places(node) == before, "a dry run changes nothing"
        moved = await node.seek_reader("c", "r", policy)
        assert await places(node) == [(moved.message_id, moved.tick)]
        if policy != sn.DeliverPolicy.latest():
            assert (would.message_id, would.tick) == (moved.message_id, moved.tick)
        assert await read(node, "r") == expected, policy
    assert await read(node, "r") == []


async def places(node: Node) -> list[tuple[str, int]]:
    return [(each.message_id, each.tick) for each in await node.readers()]


async def test_an_active_reader_is_neither_moved_nor_removed_until_it_is_closed(node: Node) -> None:
    async with node.read("c", name="r"):
        for change in (
            node.seek_reader("c", "r", sn.DeliverPolicy.latest()),
            node.delete_reader("c", "r"),
        ):
            with pytest.raises(sn.errors.ReaderBusy, match="close it first"):
                await change
    await wait_closed(node)
    await node.seek_reader("c", "r", sn.DeliverPolicy.latest())
    assert await node.delete_reader("c", "r")


async def wait_closed(node: Node) -> None:
    """Return when nobody has a reader open: over a connection that takes a moment after the reader
    was left.
    """
    with anyio.fail_after(PATIENCE_S):
        while any(each.is_open for each in await node.readers()):
            await anyio.lowlevel.checkpoint()


async def test_what_cannot_be_sought_is_refused_and_the_reader_stays(node: Node) -> None:
    await node.insert("c", [{"id": 1}])
    with pytest.raises(sn.errors.ReaderNotFound, match="has no reader 'r' — "):
        await node.seek_reader("c", "r", sn.DeliverPolicy.all())
    assert await read(node, "r") == [1]
    before = await places(node)
    with pytest.raises(InvalidArgument, match="is yet to come"):
        await node.seek_reader("c", "r", sn.DeliverPolicy.start_after(1 << 62))
    with pytest.raises(InvalidArgument, match="is no deliver policy"):
        await node.seek_reader("c", "r", "latest")  # type: ignore[arg-type]
    with pytest.raises(sn.errors.CollectionNotFound):
        await node.seek_reader("no", "r", sn.DeliverPolicy.all())
    assert await places(node) == before


async def test_a_place_that_was_given_up_before_the_reader_held_it_is_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.insert("c", [{"id": 1}])
    assert await read(node, "r") == [1]
    (before,) = await node.readers()
    channel = parts_of(node).channel
    opening = channel.read
    opened = list[object]()

    def truncated_at_the_second_look(policy: sn.DeliverPolicy, **options: object) -> object:
        opened.append(policy)
        if len(opened) == 2:
            raise Truncated(str(policy), before.message_id)
        return opening(policy, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(channel, "read", truncated_at_the_second_look)
    with pytest.raises(Truncated):
        await node.seek_reader("c", "r", sn.DeliverPolicy.all())
    (now,) = await node.readers()
    assert (now.message_id, now.tick) == (before.message_id, before.tick)


async def test_a_reader_whose_collection_is_dropped_while_it_is_moved_is_moved_or_gone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await read(node, "r") == []
    readers = parts_of(node).readers
    moving = readers.move

    async def drop_and_move(*to: Any) -> None:
        await node.drop_collection("c")
        await moving(*to)

    monkeypatch.setattr(readers, "move", drop_and_move)
    with suppress(sn.errors.CollectionNotFound):
        await node.seek_reader("c", "r", sn.DeliverPolicy.all())
    assert await node.readers() == ()


async def test_a_moved_reader_holds_the_log_from_its_new_place_on_over_a_restart(
    tmp_path: Path,
) -> None:
    settings = {
        "cut_interval_s": None,
        "retention_s": 0,
        "flush.retention.interval_s": 0.005,
        "ticks.interval_s": 0.01,
    }
    config = sn.load_config(arguments=settings)
    async with sn.open_node(tmp_path / "data", config=config) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
        await node.insert("c", [{"id": 1}])
        async with node.read("c", name="r"):
            pass
        second = await node.insert("c", [{"id": 2}])
        await node.seek_reader("c", "r", sn.DeliverPolicy.start_from(second.message_ids[0]))
    async with sn.open_node(tmp_path / "data", config=config) as node:
        log = parts_of(node).channel.log
        with anyio.fail_after(PATIENCE_S):
            while log.first_position == 1:  # what only the old place held goes
                await node.insert("c", [{"id": 3}])
                await node.flush()
        assert (await read(node, "r"))[:2] == [2, 3]


async def test_open_transactions_are_told_and_aborted_whoever_began_them(node: Node) -> None:
    assert await node.transactions() == ()
    first, second = [await node.begin_transaction(keepalive_s=60) for _ in range(2)]
    await node.insert("c", [{"id": 1}], txn_id=first)
    told = await node.transactions()
    assert [(each.txn_id, each.collections, each.bodies, each.state) for each in told] == [
        (first, ("c",), 1, "in_flight"),
        (second, (), 0, "in_flight"),
    ]
    assert told[0].age_s >= told[0].idle_s >= 0
    assert told[0].bytes > 0
    assert told[0].keepalive_s == 60
    await node.abort_transaction(first)
    assert [each.txn_id for each in await node.transactions()] == [second]
    with pytest.raises(sn.errors.TransactionExpired):
        await node.insert("c", [{"id": 2}], txn_id=first)
    await node.insert("c", [{"id": 3}], txn_id=second)
    await node.commit_transaction(second)
    assert (await node.snapshot("c"))["id"].to_pylist() == [3]
    for ended in (first, second, 5):
        with pytest.raises((sn.errors.TransactionExpired, sn.errors.InvalidTransactionState)):
            await node.abort_transaction(ended)


async def test_a_transaction_of_another_client_is_aborted_over_a_connection() -> None:
    async with opened_one_way("remote", None) as client:
        await client.create_collection("c", SCHEMA, primary_key="id")
        owner_backend = parts_of(client)
        id_ = await client.begin_transaction(keepalive_s=60)
        await client.insert("c", [{"id": 1}], txn_id=id_)
        await owner_backend.abort_transaction(id_)
        with pytest.raises(sn.errors.TransactionExpired):
            await client.commit_transaction(id_)
        assert (await client.snapshot("c")).num_rows == 0


async def test_a_move_that_is_cancelled_leaves_a_reader_that_can_be_opened(node: Node) -> None:
    await node.insert("c", [{"id": 1}])
    assert await read(node, "r") == [1]
    moving = asyncio.ensure_future(node.seek_reader("c", "r", sn.DeliverPolicy.all()))
    await anyio.lowlevel.checkpoint()
    moving.cancel()
    await asyncio.wait((moving,))
    await wait_closed(node)
    assert await read(node, "r") in ([], [1])
