import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from interceptors.errors import CollectionNotFound, PartitionNotFound, SchemaMismatch
from interceptors.shard.decision import Decision, decide
from interceptors.shard.state import SegmentLimits
from tests.interceptors.live_channel import (
    Limits,
    LiveChannel,
    commit,
    delete,
    group_of,
    insert,
    insert_body,
    settle_tasks,
)
from tests.wal.packed import pack_of
from wal.append import Pack
from wal.errors import AlreadyExists, InvalidArgument, StorageFull
from wal.headers import (
    CutHeader,
    DeleteHeader,
    DropCollectionHeader,
    FlushHeader,
    InsertHeader,
    MessageType,
)
from wal.message import Message, MutableMessage

pytestmark = pytest.mark.anyio


@pytest.fixture
async def channel() -> AsyncIterator[LiveChannel]:
    limits = Limits(segment=SegmentLimits(bytes_max=100))
    async with LiveChannel.open(limits=limits) as opened:
        yield opened


async def of_type(channel: LiveChannel, kind: MessageType) -> list[Message]:
    return [message for message in await channel.messages() if message.type is kind]


def segment_ids(messages: list[Message]) -> list[int]:
    return [getattr(message.header, "segment_id", 0) for message in messages]


# --- rows -----------------------------------------------------------------------------------------


async def test_row_offsets_are_contiguous_on_each_vchannel(channel: LiveChannel) -> None:
    info = await channel.create_collection("a", shards=2)
    first = await channel.append(insert(info, 3), insert(info, 2, shard=1))
    second = await channel.append(insert(info, 1), insert(info, 4))
    v0, v1 = info.vchannels
    assert first.row_offsets == {v0: (0, 3), v1: (0, 2)}
    assert second.row_offsets == {v0: (3, 5)}
    headers = [message.header for message in await of_type(channel, MessageType.INSERT)]
    assert [header.first_offset for header in headers if isinstance(header, InsertHeader)] == [
        0,
        0,
        3,
        4,
    ]


async def test_look_at_the_state_before_the_log_has_a_group_takes_no_offset_back(
    channel: LiveChannel,
) -> None:
    def look(_: Pack) -> None:
        # as a thread would, that asks at any moment
        assert channel.shard.state.catalog.collections()

    info = await channel.create_collection("a")
    await channel.append(insert(info))
    channel.log.refusal = look
    offsets = [
        (await channel.append(insert(info, 2))).row_offsets[info.vchannels[0]] for _ in range(3)
    ]
    assert offsets == [(1, 2), (3, 2), (5, 2)]


async def test_delete_gets_the_next_offset_of_its_moment(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(delete(info))
    await channel.append(delete(info), insert(info, 3), delete(info))
    headers = [message.header for message in await of_type(channel, MessageType.DELETE)]
    assert [header.next_offset for header in headers if isinstance(header, DeleteHeader)] == [
        0,
        0,
        3,
    ]


async def test_segment_is_created_before_its_first_row(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    (created,), (row,) = (
        await of_type(channel, MessageType.CREATE_SEGMENT),
        await of_type(channel, MessageType.INSERT),
    )
    assert created.time_tick < row.time_tick
    assert segment_ids([created]) == segment_ids([row])


async def test_rows_waiting_for_one_segment_share_it(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(channel.append, insert(info))
    assert len(await of_type(channel, MessageType.CREATE_SEGMENT)) == 1
    assert len(channel.shard.wanted) == 0


async def test_segments_that_are_missing_together_are_made_in_one_group(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a", shards=3)
    await channel.append(*(insert(info, shard=shard) for shard in range(3)))
    assert (
        len({message.time_tick for message in await of_type(channel, MessageType.CREATE_SEGMENT)})
        == 1
    )


async def test_full_segment_takes_the_crossing_rows_and_no_more(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    for rows in (10, 1, 1):  # the first hits the limit exactly, the second crosses it
        await channel.append(insert(info, rows))
    first, crossing, after = segment_ids(await of_type(channel, MessageType.INSERT))
    assert first == crossing != after


async def test_oversized_insert_fits_an_empty_segment(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info, 1000))
    assert len(await of_type(channel, MessageType.INSERT)) == 1


async def test_partitions_have_segments_of_their_own(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    eu = await channel.create_partition(info, "eu")
    await channel.append(insert(info), insert(info, partition_id=eu))
    assert len(set(segment_ids(await of_type(channel, MessageType.INSERT)))) == 2


REFUSED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "collection": ({"collection_id": 99}, CollectionNotFound),
    "partition": ({"partition_id": 99}, PartitionNotFound),
    "schema version": ({"schema_version": 2}, SchemaMismatch),
}


@pytest.mark.parametrize("misfit", REFUSED)
@pytest.mark.parametrize("kind", ["rows", "transaction", "bodies"])
async def test_refused_group_changes_neither_itself_nor_the_state(
    channel: LiveChannel, misfit: str, kind: str
) -> None:
    fields, error = REFUSED[misfit]
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    txn_id = await channel.begin()
    if kind == "bodies":
        group = group_of(
            insert_body(info, txn_id=txn_id), insert_body(info, txn_id=txn_id, **fields)
        )
    else:
        group = group_of(insert(info), insert(info, **fields))
        group.is_transaction = kind == "transaction"
    headers = [message.header for message in group.messages]
    before = channel.shard.state.snapshot()
    with pytest.raises(error):
        await channel.append_group(group)
    assert channel.shard.state.snapshot() == before
    assert [message.header for message in group.messages] == headers


async def test_group_the_log_refuses_leaves_no_trace(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    before = channel.shard.state.snapshot()
    channel.log.refusal = lambda _: StorageFull("disk", 1, 2)
    with pytest.raises(StorageFull):
        await channel.append(insert(info, 5))
    with pytest.raises(StorageFull):
        await channel.create_collection("b")
    with pytest.raises(StorageFull):
        await channel.cut()
    assert channel.shard.state.snapshot() == before
    channel.log.refusal = lambda _: None
    result = await channel.append(insert(info))
    assert result.row_offsets == {info.vchannels[0]: (1, 1)}
    await channel.create_collection("b")


async def test_appends_on_their_way_count_for_those_behind_them(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    channel.log.hold()
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(channel.append, insert(info, 2))
        await settle_tasks()
        assert channel.shard.state.next_offsets == {info.vchannels[0]: 7}
        channel.log.release()


# --- DDL ------------------------------------------------------------------------------------------


async def test_of_two_concurrent_creates_of_one_name_one_wins(channel: LiveChannel) -> None:
    outcomes: list[str] = []

    async def create() -> None:
        try:
            await channel.create_collection("a")
            outcomes.append("created")
        except AlreadyExists:
            outcomes.append("refused")

    channel.log.hold()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(create)
        tasks.start_soon(create)
        await settle_tasks()
        channel.log.release()
    assert sorted(outcomes) == ["created", "refused"]
    assert len(channel.shard.catalog.collections()) == 1


async def test_collections_partitions_and_segments_never_share_an_id(channel: LiveChannel) -> None:
    one = await channel.create_collection("a")
    two = await channel.create_collection("b")
    eu = await channel.create_partition(two, "eu")
    await channel.append(insert(one))
    ids = [
        one.id,
        one.partitions[0].id,
        two.id,
        two.partitions[0].id,
        eu,
        *channel.shard.state.segments,
    ]
    assert len(set(ids)) == len(ids) == 6


async def test_dropped_collection_takes_its_segments_and_offsets_along(
    channel: LiveChannel,
) -> None:
    one = await channel.create_collection("a")
    two = await channel.create_collection("b")
    await channel.append(insert(one))
    await channel.append(insert(two))
    await channel.drop_collection(one)
    assert [segment.collection_id for segment in channel.shard.state.segments.values()] == [two.id]
    assert list(channel.shard.state.next_offsets) == list(two.vchannels)
    with pytest.raises(CollectionNotFound):
        await channel.append(insert(one))
    with pytest.raises(CollectionNotFound):
        await channel.drop_collection(one)


async def test_dropped_partition_takes_its_segments_along(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    eu = await channel.create_partition(info, "eu")
    await channel.append(insert(info), insert(info, partition_id=eu))
    await channel.drop_partition(info, eu)
    assert [segment.partition_id for segment in channel.shard.state.segments.values()] == [
        info.partitions[0].id
    ]
    with pytest.raises(PartitionNotFound):
        await channel.append(insert(info, partition_id=eu))


@pytest.mark.parametrize("keep", [1, 3])
async def test_ddl_has_one_part_for_each_vchannel(channel: LiveChannel, keep: int) -> None:
    info = await channel.create_collection("a", shards=2)
    header = DropCollectionHeader(info.id)
    parts = [
        MutableMessage(MessageType.DROP_COLLECTION, header, name)
        for name in (*info.vchannels, "p0_9v0")
    ]
    with pytest.raises(AssertionError, match="one part for each"):
        await channel.append(*parts[:keep])
    assert channel.shard.catalog.collection(info.id).dropped_tick == 0


async def test_rows_waiting_for_a_segment_of_what_is_dropped_meanwhile_hear_it(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a")
    eu = await channel.create_partition(info, "eu")
    channel.log.refusal = _refuse_segments
    errors: list[Exception] = []

    async def append() -> None:
        try:
            await channel.append(insert(info, partition_id=eu))
        except PartitionNotFound as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(append)
        await anyio.lowlevel.checkpoint()
        tasks.start_soon(channel.drop_partition, info, eu)
    assert len(errors) == 1
    assert len(channel.shard.wanted) == 0


def _refuse_segments(pack: Pack) -> Exception | None:
    is_segment = pack.first_type is MessageType.CREATE_SEGMENT
    return StorageFull("disk", 1, 2) if is_segment else None


# --- cuts and seals -------------------------------------------------------------------------------


async def test_cut_seals_every_growing_segment_and_counts_up(channel: LiveChannel) -> None:
    one = await channel.create_collection("a")
    two = await channel.create_collection("b", shards=2)
    await channel.append(insert(one))
    await channel.append(insert(two), insert(two, shard=1))
    growing = sorted(channel.shard.state.segments)
    for _ in range(2):
        await channel.cut()
    headers = [message.header for message in await of_type(channel, MessageType.CUT)]
    assert headers == [CutHeader(1, tuple(growing)), CutHeader(2, ())]
    assert channel.shard.state.segments == {}


async def test_rows_after_a_cut_go_to_a_new_segment_at_the_next_offset(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info, 2))
    await channel.cut()
    result = await channel.append(insert(info))
    before, after = segment_ids(await of_type(channel, MessageType.INSERT))
    assert before != after
    assert result.row_offsets == {info.vchannels[0]: (2, 1)}


async def test_cut_ends_no_transaction(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    txn_id = await channel.begin()
    await channel.append(insert_body(info, txn_id=txn_id))
    await channel.cut()
    await channel.commit(txn_id)
    assert channel.shard.state.changes_since_cut


async def test_only_rows_deletes_and_drops_are_something_to_cut(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    eu = await channel.create_partition(info, "eu")
    txn_id = await channel.begin()
    await channel.append(insert_body(info, txn_id=txn_id))
    await channel.rollback(txn_id)
    assert not channel.shard.state.changes_since_cut
    for change in (
        lambda: channel.append(insert(info)),
        lambda: channel.append(delete(info)),
        lambda: channel.transact(delete(info)),
        lambda: channel.drop_partition(info, eu),
        lambda: channel.drop_collection(info),
    ):
        await change()
        assert channel.shard.state.changes_since_cut
        await channel.cut()
        assert not channel.shard.state.changes_since_cut


async def test_dropped_collection_is_remembered_until_a_later_cut_and_forgetting(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a")
    await channel.drop_collection(info)
    end = channel.ticks.allocate()
    channel.shard.state.forget_below(end)
    assert channel.shard.catalog.collection(info.id).dropped_tick > 0
    await channel.cut()
    channel.shard.state.forget_below(end)
    with pytest.raises(CollectionNotFound):
        channel.shard.catalog.collection(info.id)


async def test_sealer_flushes_what_a_policy_calls_due(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info, 11))
    (full,) = channel.shard.state.segments
    assert await channel.sealer.seal_due(channel.append_group) == 1
    (flush,) = await of_type(channel, MessageType.FLUSH)
    assert flush.header == FlushHeader(info.id, info.partitions[0].id, full, "capacity")
    assert flush.vchannel == info.vchannels[0]
    assert await channel.sealer.seal_due(channel.append_group) == 0


async def test_full_segment_wakes_the_sealer_when_rows_come_for_it(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.sealer.run, channel.append_group)
        await channel.append(insert(info, 11))
        await channel.append(insert(info))
        await settle_tasks()
        tasks.cancel_scope.cancel()
    (created, _) = segment_ids(await of_type(channel, MessageType.CREATE_SEGMENT))
    assert segment_ids(await of_type(channel, MessageType.FLUSH)) == [created]


async def test_seal_that_comes_too_late_is_refused(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    (number,) = channel.shard.state.segments
    await channel.cut()
    header = FlushHeader(info.id, info.partitions[0].id, number, "idle")
    with pytest.raises(InvalidArgument):
        await channel.append(MutableMessage(MessageType.FLUSH, header, info.vchannels[0]))


# --- the step of the tick -------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
async def test_pack_is_queued_without_suspending(channel: LiveChannel, groups: int) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    channel.log.hold()
    pack = pack_of(*[group_of(insert(info)) for _ in range(groups)])
    appending = channel.append_pack(pack)
    assert asyncio.iscoroutine(appending)
    waited_for = appending.send(None)  # the first suspension of the whole chain
    assert pack.ticket is not None
    assert waited_for is pack.ticket.written
    appending.close()


async def test_rows_older_than_their_segment_are_a_bug(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    (segment,) = channel.shard.state.segments.values()
    txn_id = await channel.begin()
    await channel.append(insert_body(info, txn_id=txn_id))

    def decide_at(tick: int) -> Decision:
        return decide(channel.shard.state, [commit(txn_id)], channel.txn.bodies_of, tick=tick)

    with pytest.raises(AssertionError):
        decide_at(segment.created_tick)
    assert decide_at(segment.created_tick + 1).missing == ()
