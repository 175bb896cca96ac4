"""A whole node that keeps no more log than it must: what is given up, who holds it, and that
nothing is lost by it.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pyarrow as pa
import pytest

import streamingnode as sn
from interceptors.errors import CollectionNotFound
from scanner.deliver_policy import DeliverPolicy
from scanner.named_reader import ReaderPosition
from streamingnode import reader
from streamingnode.channel import Channel
from streamingnode.config import load_config
from streamingnode.node import Node
from streamingnode.opening import OpenNode
from streamingnode.snapshot import take_snapshot
from streamingnode.writing.write import WriteResult
from tests.parts_of import parts_of
from wal.errors import Truncated

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False), pa.field("value", pa.int64())])
PATIENCE_S = 60


def open_thrifty(path: Path) -> OpenNode:
    """Open a node that gives up log as soon as a cut has it."""
    settings = {
        "cut_interval_s": None,
        "retention_s": 0,
        "flush.retention.interval_s": 0.005,
        "ticks.interval_s": 0.01,
    }
    return sn.open_node(path, config=load_config(arguments=settings))


async def create(node: Node, *names: str) -> None:
    for name in names:
        await node.create_collection(name, SCHEMA, primary_key="key", shards=2, if_not_exists=True)


async def insert(node: Node, name: str, *values: int) -> WriteResult:
    return await node.insert(name, [{"key": value, "value": value} for value in values])


def remembered(node: Node) -> set[int]:
    """Return the ids of the collections that the live catalog knows, dropped ones too."""
    return {info.id for info in parts_of(node).channel.catalog.collections(dropped=True)}


async def is_kept(node: Node, written: WriteResult) -> bool:
    try:
        async with node.read("c", DeliverPolicy.start_from(written.message_ids[0])):
            return True
    except Truncated:
        return False


async def until_given_up(node: Node, written: WriteResult) -> None:
    with anyio.fail_after(PATIENCE_S):
        while await is_kept(node, written):
            await anyio.lowlevel.checkpoint()


async def a_round_of_retention(node: Node) -> None:
    """Return when the log was looked at after now: something that nobody holds was given up."""
    marker = await insert(node, "c", -1)
    await node.flush()
    await insert(node, "c", -2)
    await until_given_up(node, marker)


async def inserted(node: Node, name: str, policy: DeliverPolicy) -> list[int]:
    values: list[int] = []
    async with node.read(
        name, policy, until=await node.consistent_tick(), types=[sn.MessageType.INSERT]
    ) as messages:
        async for message in messages:
            for part in message.bodies or (message,):
                table = part.to_arrow()
                assert table is not None
                values += sorted(table["value"].to_numpy().tolist())
    return values


async def snapshot(node: Node, name: str, as_of: int | None = None) -> Counter[int]:
    found = await node.snapshot(name, as_of=as_of)
    return Counter(found["value"].to_numpy().tolist())


async def test_what_a_cut_has_is_given_up_and_still_in_every_snapshot(tmp_path: Path) -> None:
    async with open_thrifty(tmp_path) as node:
        await create(node, "c")
        old = await insert(node, "c", 1, 2)
        later = await insert(node, "c", 3)
        await node.flush()
        await insert(node, "c", 4)
        await until_given_up(node, later)
        assert await inserted(node, "c", DeliverPolicy.all()) == [4]
        with pytest.raises(Truncated):
            await inserted(node, "c", DeliverPolicy.start_after(old.time_tick))
        assert await snapshot(node, "c") == Counter([1, 2, 3, 4])
        assert await snapshot(node, "c", as_of=old.time_tick) == Counter([1, 2])
    async with open_thrifty(tmp_path) as node:
        assert await snapshot(node, "c") == Counter([1, 2, 3, 4]), (
            "at once, before the flusher has found its place"
        )
        assert await inserted(node, "c", DeliverPolicy.all()) == [4]


async def test_named_reader_holds_what_it_has_not_acknowledged_also_while_it_is_closed(
    tmp_path: Path,
) -> None:
    async with open_thrifty(tmp_path) as node:
        await create(node, "c", "d")
        for value in range(5):
            await insert(node, "d", value)
        async with node.read("d", name="billing", types=[sn.MessageType.INSERT]) as messages:
            await messages.ack(await anext(messages))
        first_held = await insert(node, "c", 100)
        await node.flush()
    async with open_thrifty(tmp_path) as node:
        for _ in range(3):
            await insert(node, "c", 101)
            await node.flush()
        assert await is_kept(node, first_held)
        until = await node.consistent_tick()
        async with node.read(
            "d", name="billing", types=[sn.MessageType.INSERT], until=until
        ) as messages:
            found = [message async for message in messages]
            assert [message.num_rows for message in found] == [1] * 4
            await messages.ack(found[-1])
        await until_given_up(node, first_held)


async def test_idle_named_reader_that_has_acknowledged_everything_lets_the_log_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LEASE_INTERVAL_S", 0.0)
    async with open_thrifty(tmp_path) as node:
        await create(node, "c", "quiet")
        await insert(node, "quiet", 1)

        async def follow(started: anyio.Event) -> None:
            async with node.read("quiet", name="billing") as messages:
                async for message in messages:
                    await messages.ack(message)
                    if message.type is sn.MessageType.INSERT:
                        started.set()

        async with anyio.create_task_group() as tasks:
            started = anyio.Event()
            tasks.start_soon(follow, started)
            await started.wait()
            await a_round_of_retention(node)
            tasks.cancel_scope.cancel()
        await insert(node, "quiet", 2)
        async with node.read(
            "quiet", name="billing", until=await node.consistent_tick()
        ) as messages:
            assert [message.num_rows async for message in messages] == [1], (
                "nothing missed, nothing twice"
            )


async def test_idle_named_reader_with_something_unacknowledged_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LEASE_INTERVAL_S", 0.0)
    types = [sn.MessageType.INSERT]
    async with open_thrifty(tmp_path) as node:
        await create(node, "c", "quiet")
        async with node.read("quiet", name="billing", types=types) as messages:
            await insert(node, "quiet", 1)
            await anext(messages)
            held = await insert(node, "c", 1)
            with anyio.move_on_after(0.1):  # ten idle ticks
                await anext(messages)
            for _ in range(3):
                await insert(node, "c", 2)
                await node.flush()
        async with node.read(
            "quiet", name="billing", types=types, until=await node.consistent_tick()
        ) as messages:
            assert [message.num_rows async for message in messages] == [1]
        assert await is_kept(node, held)


@pytest.mark.parametrize("reopened", [False, True], ids=["at once", "after reopening"])
async def test_reader_of_a_dropped_collection_holds_nothing(
    tmp_path: Path, *, reopened: bool
) -> None:
    async with open_thrifty(tmp_path) as node:
        await create(node, "c", "gone")
        async with node.read("gone", name="billing"):
            pass
        await node.drop_collection("gone")
        if not reopened:
            await a_round_of_retention(node)
    async with open_thrifty(tmp_path) as node:
        await a_round_of_retention(node)


async def test_dropped_collection_is_forgotten_once_a_cut_has_told_of_it_and_no_reader_starts_below(
    tmp_path: Path,
) -> None:
    async with open_thrifty(tmp_path) as node:
        await create(node, "c", "gone")
        await insert(node, "gone", 1)
        known_before = parts_of(node).channel.catalog.collection_by_name("gone")
        async with node.read("c", name="billing"):
            pass  # holds the log from here on
        await node.drop_collection("gone")
        for _ in range(3):
            await insert(node, "c", 1)
            await node.flush()
        with anyio.move_on_after(0.05):  # ten rounds of retention
            await anyio.sleep_forever()
        assert known_before.id in remembered(node)
        await node.delete_reader("c", "billing")
        await a_round_of_retention(node)
        with anyio.fail_after(PATIENCE_S):
            while known_before.id in remembered(node):
                await anyio.lowlevel.checkpoint()
        with pytest.raises(CollectionNotFound, match="gone"):
            await take_snapshot(parts_of(node).channel, parts_of(node).flusher, known_before, None)


async def test_deleted_reader_holds_nothing(tmp_path: Path) -> None:
    async with open_thrifty(tmp_path) as node:
        await create(node, "c")
        async with node.read("c", name="billing"):
            with pytest.raises(sn.StreamingNodeError, match="billing"):
                await node.delete_reader("c", "billing")
        assert await node.delete_reader("c", "billing")
        assert not await node.delete_reader("c", "billing")
        await a_round_of_retention(node)


async def test_transaction_open_over_cuts_and_restarts_is_held_and_committed_whole(
    tmp_path: Path,
) -> None:
    async with open_thrifty(tmp_path) as node:
        await create(node, "c", "d")
        before = await insert(node, "c", 1)
        txn_id = await node.begin_transaction(keepalive_s=600)
        await node.insert("d", [{"key": 1, "value": 1}], txn_id=txn_id)
        within = await insert(node, "c", 2)
        await node.flush()
        await until_given_up(node, before)
        assert await is_kept(node, within)
    async with open_thrifty(tmp_path) as node:
        await node.insert("d", [{"key": 2, "value": 2}], txn_id=txn_id)
        await insert(node, "c", 3)
        await node.flush()
    async with open_thrifty(tmp_path) as node:
        await node.commit_transaction(txn_id)
        assert await snapshot(node, "d") == Counter([1, 2])
        assert await inserted(node, "d", DeliverPolicy.all()) == [1, 2]
        await a_round_of_retention(node)
        assert not await is_kept(node, within)
        assert await snapshot(node, "d") == Counter([1, 2])


@pytest.mark.parametrize(
    "policy_of", [lambda _: DeliverPolicy.all(), DeliverPolicy.start_from], ids=["all", "from"]
)
async def test_new_named_reader_whose_place_is_given_up_before_it_is_held_does_not_stay_broken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy_of: Callable[[sn.MessageId], DeliverPolicy],
) -> None:
    async with open_thrifty(tmp_path) as node:
        await create(node, "c")
        find_position_as_it_is = Channel.find_position
        first = await insert(node, "c", 1)

        async def find_position(channel: Channel, policy: DeliverPolicy) -> ReaderPosition:
            found = await find_position_as_it_is(channel, policy)
            if await is_kept(node, first):
                await insert(node, "c", 2)
                await node.flush()
                await insert(node, "c", 3)
                await until_given_up(node, first)
            return found

        monkeypatch.setattr(Channel, "find_position", find_position)
        policy = policy_of(first.message_ids[0])
        types = [sn.MessageType.INSERT]
        if policy == DeliverPolicy.all():
            async with node.read("c", policy, name="billing", types=types) as messages:
                assert (await anext(messages)).num_rows == 1
            return
        with pytest.raises(Truncated):
            async with node.read("c", policy, name="billing", types=types):
                pytest.fail("not reached")
        async with node.read("c", name="billing", types=types) as messages:
            assert (await anext(messages)).num_rows == 1


@pytest.mark.parametrize("is_past", [False, True], ids=["as of now", "as of a tick"])
async def test_snapshot_that_the_first_cut_and_its_truncation_overtake_has_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_past: bool
) -> None:
    async with open_thrifty(tmp_path / "node") as node:
        await create(node, "c")
        written = await insert(node, "c", 1, 2, 3)
        ask = Channel.consistent_tick
        overtaking = [True]

        async def overtaken(channel: Channel) -> int:
            # the snapshot has chosen where it begins, and asks for its end
            if overtaking and overtaking.pop():
                await node.flush()
                await until_given_up(node, written)
            return await ask(channel)

        monkeypatch.setattr(Channel, "consistent_tick", overtaken)
        assert await snapshot(node, "c", written.time_tick if is_past else None) == Counter(
            [1, 2, 3]
        )
