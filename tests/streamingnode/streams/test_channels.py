"""The channel service: names, owners, all or nothing, and what a crash between two steps leaves."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

import streamingnode as sn
from streamingnode.streams.channels import CHANNEL_KEY, ChannelService, OwnerDescription
from tests.parts_of import parts_of
from tests.wal.rocksmq.queues import open_queue
from wal.errors import Corrupt, InvalidArgument, StorageFailed, TopicNotFound
from wal.log import StateMap
from wal.rocks.store import RocksStore
from wal.rocksmq.queue import RocksMQ

pytestmark = pytest.mark.anyio

OWNER = OwnerDescription("proxy", "10.0.0.1:19530", "insert channels")


class Failing:
    """A map of state whose nth change fails, before or after it is done."""

    def __init__(self, state: StateMap, *, fail_at: int, done: bool) -> None:
        self._state = state
        self.get = state.get
        self.scan = state.scan
        self._left = fail_at
        self._done = done

    async def put(self, changes: Mapping[str, bytes | None]) -> None:
        self._left -= 1
        if self._left or self._done:
            await self._state.put(changes)
        if not self._left:
            raise StorageFailed("the disk is gone — put it back")


@asynccontextmanager
async def parts(path: Path) -> AsyncIterator[tuple[RocksStore, RocksMQ, ChannelService]]:
    store, queue = await open_queue(path)
    try:
        yield store, queue, ChannelService(store.state, queue)
    finally:
        await queue.close()
        await store.close()


async def test_names_are_made_by_the_service_and_never_given_out_twice(tmp_path: Path) -> None:
    async with parts(tmp_path) as (_, queue, service):
        names = await service.create_channels(OWNER, 3)
        assert len(set(names)) == 3
        assert set(await queue.info()) == set(names)
        await service.destroy_channels(names)
        assert not await queue.info()
        later = await service.create_channels(OWNER, 2)
        assert not set(later) & set(names)
    async with parts(tmp_path) as (_, _, service):
        assert not set(await service.create_channels(OWNER, 2)) & {*names, *later}


async def test_calls_at_the_same_time_get_names_of_their_own(tmp_path: Path) -> None:
    async with parts(tmp_path) as (_, _, service):
        names: list[str] = []

        async def create() -> None:
            names.extend(await service.create_channels(OWNER, 4))

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(create)
        assert len(set(names)) == 20


async def test_describing_keeps_the_order_of_the_request_over_a_restart(tmp_path: Path) -> None:
    async with parts(tmp_path) as (_, _, service):
        [one] = await service.create_channels(OWNER, 1)
        [other] = await service.create_channels(OwnerDescription("query"), 1)
    async with parts(tmp_path) as (_, _, service):
        asked = [other, one, other]
        found = await service.describe_channels(asked)
        assert [each.name for each in found] == asked
        assert [each.owner.role for each in found] == ["query", "proxy", "query"]
        assert found[1].owner == OWNER


async def test_destroying_is_all_or_nothing(tmp_path: Path) -> None:
    async with parts(tmp_path) as (_, queue, service):
        names = await service.create_channels(OWNER, 2)
        with pytest.raises(TopicNotFound, match="nowhere"):
            await service.destroy_channels([names[0], "nowhere"])
        assert [each.name for each in await service.describe_channels(names)] == names
        assert set(await queue.info()) == set(names)
        await service.destroy_channels([names[0], names[0]])
        with pytest.raises(TopicNotFound):
            await service.describe_channels(names)


@pytest.mark.parametrize("number", [0, -1, 4097, True, 1.5], ids=str)
async def test_a_number_of_channels_that_cannot_be_is_refused(tmp_path: Path, number: int) -> None:
    async with parts(tmp_path) as (_, _, service):
        with pytest.raises(InvalidArgument, match="num_channels"):
            await service.create_channels(OWNER, number)


async def test_an_owner_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async with parts(tmp_path) as (_, _, service):
        for owner in ("proxy", OwnerDescription("x" * 5000), OwnerDescription(7)):  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="owner"):
                await service.create_channels(owner, 1)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="list of names"):
            await service.describe_channels("channel_0")


async def test_a_topic_of_somebody_else_is_no_channel(tmp_path: Path) -> None:
    async with parts(tmp_path) as (_, queue, service):
        await queue.create_topic("channel_0")
        await queue.produce("channel_0", [b"theirs"])
        assert "channel_0" not in await service.create_channels(OWNER, 2)


async def test_an_empty_topic_that_somebody_subscribed_to_is_no_channel(tmp_path: Path) -> None:
    async with parts(tmp_path) as (_, queue, service):
        await queue.create_topic("channel_0")
        await queue.create_consumer_group("channel_0", "theirs")
        assert "channel_0" not in await service.create_channels(OWNER, 2)


async def test_a_topic_made_anew_is_left_alone_by_a_destruction_that_was_cut_off_behind_its_topic(
    tmp_path: Path,
) -> None:
    async with parts(tmp_path) as (store, queue, service):
        [name] = await service.create_channels(OWNER, 1)
        with pytest.raises(StorageFailed):
            failing = Failing(store.state, fail_at=2, done=False)
            await ChannelService(failing, queue).destroy_channels([name])
        await queue.create_topic(name)
        await queue.produce(name, [b"theirs"])
        assert await service.create_channels(OWNER, 1) != [name]
        assert (await queue.info())[name].bytes == len(b"theirs")


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
async def test_a_creation_that_fails_leaves_all_channels_or_none(
    tmp_path: Path, done: bool
) -> None:
    async with parts(tmp_path) as (store, queue, service):
        failing = ChannelService(
            Failing(store.state, fail_at=1, done=done),
            queue,
        )
        with pytest.raises(StorageFailed):
            await failing.create_channels(OWNER, 3)
        names = await service.create_channels(OWNER, 3)
        kept = [f"channel_{number}" for number in range(6 if done else 3)]
        assert [each.name for each in await service.describe_channels(kept)] == kept
        assert set(await queue.info()) == {*kept, *names} == set(kept)


@pytest.mark.parametrize("fail_at, done", [(1, False), (1, True), (2, False), (2, True)], ids=str)
async def test_a_destruction_that_fails_is_finished_or_did_nothing(
    tmp_path: Path, fail_at: int, done: bool
) -> None:
    async with parts(tmp_path) as (_, _, service):
        names = await service.create_channels(OWNER, 3)
    async with parts(tmp_path) as (store, queue, _):
        with pytest.raises(StorageFailed):
            failing = Failing(store.state, fail_at=fail_at, done=done)
            await ChannelService(failing, queue).destroy_channels(names[:2])
    async with parts(tmp_path) as (_, queue, service):
        left = names if (fail_at, done) == (1, False) else names[2:]
        assert [each.name for each in await service.describe_channels(left)] == left
        more = await service.create_channels(OWNER, 1)
        assert set(await queue.info()) == {*left, *more}


async def test_a_node_has_channels_of_its_own_and_a_blocking_one_too(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path / "node") as node:
        assert "channels" not in vars(parts_of(node))  # made when it is first used
        [name] = await node.channels.create_channels(OWNER, 1)
        assert node.channels is node.channels
        assert name in await node.mq.info()

    def blocking() -> str:
        with sn.sync.open_node(tmp_path / "node") as blocked:
            [found] = blocked.channels.describe_channels([name])
            blocked.channels.destroy_channels([name])
            return found.owner.role

    assert await anyio.to_thread.run_sync(blocking) == "proxy"


async def test_channels_of_a_node_in_memory_end_with_it() -> None:
    for _ in range(2):
        async with sn.open_node(None) as node:
            [name] = await node.channels.create_channels(OWNER, 1)
            assert name in await node.mq.info()
            await node.channels.destroy_channels([name])
            assert await node.mq.info() == {}


async def test_a_damaged_record_of_a_channel_is_corrupt_and_found_by_verify(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path / "node") as node:
        [name] = await node.channels.create_channels(OWNER, 1)
        assert not (await node.verify()).findings
        await parts_of(node).channel.state.put({CHANNEL_KEY + name: b"\xc1"})
        with pytest.raises(Corrupt, match="channel"):
            await node.channels.describe_channels([name])
        assert [CHANNEL_KEY in str(each) for each in (await node.verify()).findings] == [True]
