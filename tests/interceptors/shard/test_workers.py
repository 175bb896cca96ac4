from collections.abc import AsyncIterator

import anyio
import pytest

from interceptors.shard.catalog import CollectionInfo
from interceptors.shard.interceptor import ATTEMPTS_MAX, RETRY_S
from tests.interceptors.live_channel import LiveChannel, insert, settle_tasks
from wal.append import AppendGroup, AppendResult, Pack
from wal.errors import Indeterminate, OnShutdown, Overloaded, StorageFull
from wal.headers import MessageType

pytestmark = pytest.mark.anyio


@pytest.fixture
async def channel() -> AsyncIterator[LiveChannel]:
    async with LiveChannel.open() as opened:
        yield opened


class RefuseSegments:
    """Refuses the first `times` CREATE_SEGMENT groups."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error = error
        self.left = times
        self.tried: list[Pack] = []

    def __call__(self, pack: Pack) -> Exception | None:
        if pack.first_type is not MessageType.CREATE_SEGMENT:
            return None
        self.tried.append(pack)
        self.left -= 1
        return self.error if self.left >= 0 else None


async def test_allocation_is_tried_again_with_fresh_messages_after_pauses(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a")
    refusal = channel.log.refusal = RefuseSegments(StorageFull("disk", 1, 2), times=3)
    await channel.append(insert(info))
    assert channel.pauses == [RETRY_S] * 3
    messages = [pack.messages[0] for pack in refusal.tried]
    assert len({id(message) for message in messages}) == 4
    assert len({getattr(message.header, "segment_id", 0) for message in messages}) == 4


async def test_allocation_that_fails_for_good_ends_every_wait_with_a_typed_error(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a")
    refusal = channel.log.refusal = RefuseSegments(StorageFull("disk", 1, 2), times=10**6)
    errors: list[Overloaded] = []

    async def append() -> None:
        with pytest.raises(Overloaded, match="disk") as caught:
            await channel.append(insert(info))
        errors.append(caught.value)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(append)
    assert len(errors) == 3
    assert len(refusal.tried) == ATTEMPTS_MAX
    assert channel.shard.wanted == {}


async def test_more_segments_than_go_into_one_entry_are_made_one_entry_after_the_other(
    channel: LiveChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interceptors.shard.interceptor.AT_ONCE_MAX", 2)
    info = await channel.create_collection("a", shards=5)
    made = channel.log.refusal = RefuseSegments(StorageFull("disk", 1, 2), times=0)
    await channel.append(*(insert(info, shard=shard) for shard in range(5)))
    assert [len(pack.messages) for pack in made.tried] == [2, 2, 1]


async def test_insert_after_a_failed_allocation_asks_again(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    channel.log.refusal = RefuseSegments(StorageFull("disk", 1, 2), times=ATTEMPTS_MAX)
    with pytest.raises(Overloaded):
        await channel.append(insert(info))
    await channel.append(insert(info))


async def test_failed_write_is_not_tried_again(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    refusal = channel.log.refusal = RefuseSegments(Indeterminate("write failed"), times=10**6)
    with pytest.raises(Overloaded, match="write failed"):
        await channel.append(insert(info))
    assert len(refusal.tried) == 1


async def test_closing_ends_the_waits_and_refuses_new_ones(channel: LiveChannel) -> None:
    one = await channel.create_collection("a")
    two = await channel.create_collection("b")
    channel.log.hold()
    errors: list[OnShutdown] = []

    async def append(info: CollectionInfo) -> None:
        with pytest.raises(OnShutdown) as caught:
            await channel.append(insert(info))
        errors.append(caught.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(append, one)
        await settle_tasks()
        await channel.shard.close()
    await append(two)
    channel.log.release()
    await settle_tasks()  # the segment that was on its way arrives, and nobody waits for it
    assert len(errors) == 2
    assert len(channel.shard.state.segments) == 1


# --- seals ----------------------------------------------------------------------------------------


class Refuse:
    def __init__(self, error: Exception) -> None:
        self.error = error
        self.groups: list[AppendGroup] = []

    async def __call__(self, group: AppendGroup) -> AppendResult:
        self.groups.append(group)
        raise self.error


async def test_refused_seal_is_left_to_the_next_look() -> None:
    async with LiveChannel.open() as channel:
        await channel.append(insert(await channel.create_collection("a"), 1))
        channel.now_ms += 86_400_000 + 1
        with pytest.raises(StorageFull):
            await channel.sealer.seal_due(Refuse(StorageFull("disk", 1, 2)))
        assert await channel.sealer.seal_due(channel.append_group) == 1


async def test_sealer_goes_on_after_a_refusal_and_ends_when_the_log_takes_no_more() -> None:
    async with LiveChannel.open() as channel:
        await channel.append(insert(await channel.create_collection("a"), 1))
        channel.now_ms += 86_400_000 + 1
        refusing = Refuse(StorageFull("disk", 1, 2))
        channel.shard.segment_full.set()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(channel.sealer.run, refusing)
            await settle_tasks()
            refusing.error = OnShutdown("closed")
            channel.shard.segment_full.set()
        assert len(refusing.groups) == 2
