"""Rows of many groups in one pack: each is refused, waits, or gets its place, as if it were
alone.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.errors import CollectionNotFound, PartitionNotFound, SchemaMismatch
from interceptors.shard.catalog import CollectionInfo
from interceptors.shard.state import SegmentLimits
from tests.interceptors.live_channel import (
    Limits,
    LiveChannel,
    delete,
    group_of,
    insert,
    settle_tasks,
    target_of,
)
from tests.wal.packed import piece, rows_group
from wal.append import AppendGroup, AppendResult, Pack
from wal.entry import LogEntry
from wal.errors import StorageFull
from wal.headers import DeleteHeader, InsertHeader, MessageType
from wal.message import Message, TransactionMessage
from wal.rows import Piece

pytestmark = pytest.mark.anyio


@pytest.fixture
async def channel() -> AsyncIterator[LiveChannel]:
    async with LiveChannel.open() as opened:
        yield opened


async def ready(channel: LiveChannel, name: str = "a", *, shards: int = 1) -> CollectionInfo:
    """Return a collection whose shards have segments."""
    info = await channel.create_collection(name, shards=shards)
    await channel.append(*(insert(info, shard=shard) for shard in range(shards)))
    return info


async def entries_after(channel: LiveChannel, position: int) -> list[LogEntry]:
    return [entry for entry in await channel.entries() if entry.first_position >= position]


def written(outcomes: Sequence[AppendResult | BaseException]) -> list[AppendResult]:
    for outcome in outcomes:
        assert isinstance(outcome, AppendResult), outcome
    return [outcome for outcome in outcomes if isinstance(outcome, AppendResult)]


def offset_of(message: Message) -> int:
    header = message.header
    assert isinstance(header, InsertHeader | DeleteHeader)
    return header.first_offset if isinstance(header, InsertHeader) else header.next_offset


# --- one entry ------------------------------------------------------------------------------------


async def test_groups_that_come_together_are_one_entry_at_ascending_ticks_and_positions(
    channel: LiveChannel,
) -> None:
    info = await ready(channel, shards=2)
    position = channel.memory.next_position
    groups = [
        group_of(insert(info, 2)),
        rows_group(delete(info, shard=1), insert(info, 1), is_transaction=True),
        group_of(insert(info, 1, shard=1), insert(info, 3)),
    ]
    results = written(await channel.pack(*groups))
    (entry,) = await entries_after(channel, position)
    ticks = [result.time_tick for result in results]
    assert ticks == list(range(ticks[0], ticks[0] + 3))
    assert (entry.first_tick, entry.time_tick) == (ticks[0], ticks[2])
    assert [result.message_id.position - position for result in results] == [0, 4, 6]
    assert [result.txn_id for result in results] == [0, ticks[1], 0]
    v0, v1 = info.vchannels
    assert [result.row_offsets for result in results] == [
        {v0: (1, 2)},
        {v0: (3, 1)},
        {v1: (1, 1), v0: (4, 3)},
    ]
    assert [entry.tick_at(result.message_id.position) for result in results] == ticks


async def test_results_of_a_pack_are_what_readers_of_the_log_find(channel: LiveChannel) -> None:
    info = await ready(channel, shards=2)
    groups = [
        group_of(insert(info, number, shard=number % 2), delete(info)) for number in range(1, 5)
    ]
    groups[2].is_transaction = True
    results = written(await channel.pack(*groups))
    before = len(groups)
    found = [
        message for message in await channel.visible() if message.time_tick >= results[0].time_tick
    ]
    for result in results:
        of_group = [message for message in found if message.time_tick == result.time_tick]
        inserted = [
            body
            for message in of_group
            for body in message.bodies
            if body.type is MessageType.INSERT
        ]
        assert {
            body.vchannel: (offset_of(body), getattr(body.header, "rows", 0)) for body in inserted
        } == dict(result.row_offsets)
        assert of_group[-1].message_id == result.message_id
    assert len({message.time_tick for message in found}) == before


# --- refused --------------------------------------------------------------------------------------


async def test_groups_that_fit_nothing_are_refused_alone_and_the_others_are_written(
    channel: LiveChannel,
) -> None:
    info = await ready(channel)
    gone = await ready(channel, "gone")
    await channel.drop_collection(gone)
    position = channel.memory.next_position
    groups = [
        group_of(insert(info)),
        group_of(insert(gone)),
        group_of(insert(info, partition_id=99)),
        group_of(insert(info, 2)),
        group_of(delete(gone)),
        group_of(insert(info, schema_version=2)),
        group_of(delete(info)),
    ]
    outcomes = await channel.pack(*groups)
    assert [type(outcome) for outcome in outcomes] == [
        AppendResult,
        CollectionNotFound,
        PartitionNotFound,
        AppendResult,
        CollectionNotFound,
        SchemaMismatch,
        AppendResult,
    ]
    (entry,) = await entries_after(channel, position)
    results = [outcome for outcome in outcomes if isinstance(outcome, AppendResult)]
    assert entry.rows is not None
    assert entry.rows.ticks.tolist() == [result.time_tick for result in results]
    assert [result.first_position for result in results] == [position, position + 1, position + 2]
    assert results[1].row_offsets == {info.vchannels[0]: (2, 2)}


async def test_group_with_one_misfit_among_its_pieces_is_refused_as_a_whole(
    channel: LiveChannel,
) -> None:
    info = await ready(channel)
    gone = await ready(channel, "gone")
    await channel.drop_collection(gone)
    both = rows_group(insert(info), insert(gone), is_transaction=True)
    refused, other = await channel.pack(both, group_of(insert(info)))
    assert isinstance(refused, CollectionNotFound)
    assert written([other])[0].row_offsets == {info.vchannels[0]: (1, 1)}


async def test_pack_of_nothing_but_misfits_leaves_no_trace(channel: LiveChannel) -> None:
    info = await ready(channel)
    await channel.drop_collection(info)
    before = channel.shard.state.snapshot()
    position = channel.memory.next_position
    outcomes = await channel.pack(*[group_of(insert(info)) for _ in range(3)])
    assert all(isinstance(outcome, CollectionNotFound) for outcome in outcomes)
    assert channel.shard.state.snapshot() == before
    assert channel.memory.next_position == position


async def test_pack_that_the_log_refuses_leaves_no_trace_and_each_group_hears_it(
    channel: LiveChannel,
) -> None:
    info = await ready(channel)
    before = channel.shard.state.snapshot()
    channel.log.refusal = lambda _: StorageFull("disk", 1, 2)
    outcomes = await channel.pack(group_of(insert(info, 5)), group_of(delete(info)))
    assert all(isinstance(outcome, StorageFull) for outcome in outcomes)
    assert channel.shard.state.snapshot() == before
    channel.log.refusal = lambda _: None
    assert (await channel.append(insert(info))).row_offsets == {info.vchannels[0]: (1, 1)}


# --- without a segment ----------------------------------------------------------------------------


async def test_groups_without_a_segment_come_behind_the_others_which_do_not_wait(
    channel: LiveChannel,
) -> None:
    info = await ready(channel)
    new = await channel.create_collection("new")
    position = channel.memory.next_position
    groups = [
        group_of(insert(new)),
        group_of(insert(info)),
        group_of(insert(new, 2)),
        group_of(delete(new)),
    ]
    results = written(await channel.pack(*groups))
    kinds = [
        "rows" if entry.rows is not None else entry.messages[0].type.name
        for entry in await entries_after(channel, position)
    ]
    assert kinds == ["rows", "CREATE_SEGMENT", "rows"]
    first, second, third, fourth = [result.time_tick for result in results]
    assert second < fourth < first < third
    assert [results[at].row_offsets for at in (0, 2)] == [
        {new.vchannels[0]: (0, 1)},
        {new.vchannels[0]: (1, 2)},
    ]


async def test_group_that_waits_for_a_segment_of_what_is_dropped_meanwhile_is_refused_alone(
    channel: LiveChannel,
) -> None:
    info = await ready(channel)
    new = await channel.create_collection("new")
    channel.log.refusal = refuse_segments
    waiting, other = channel.start(group_of(insert(new)), group_of(insert(info)))
    assert (await other).count == 1
    await channel.drop_collection(new)
    with pytest.raises(CollectionNotFound):
        await waiting
    assert channel.shard.wanted == {}


async def test_full_segment_takes_a_whole_pack_and_the_next_one_goes_to_another() -> None:
    async with LiveChannel.open(limits=Limits(segment=SegmentLimits(rows_max=4))) as channel:
        info = await ready(channel)
        for _ in range(2):
            written(await channel.pack(*[group_of(insert(info, 3)) for _ in range(3)]))
        rows = [
            message.header
            for message in await channel.messages()
            if message.type is MessageType.INSERT
        ]
        segments = [getattr(header, "segment_id", 0) for header in rows]
        assert segments == [segments[0]] * 4 + [segments[4]] * 3
        assert segments[4] != segments[0]


def refuse_segments(pack: Pack) -> Exception | None:
    is_segment = pack.first_type is MessageType.CREATE_SEGMENT
    return StorageFull("disk", 1, 2) if is_segment else None


# --- cancelled ------------------------------------------------------------------------------------


async def test_groups_cancelled_while_their_pack_waits_are_not_written(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a")
    channel.log.hold()
    waiting = channel.start(*[group_of(insert(info, rows)) for rows in (1, 2, 4)])
    await settle_tasks()
    waiting[1].cancel()
    channel.log.release()
    first = await waiting[0]
    third = await waiting[2]
    assert [result.row_offsets for result in (first, third)] == [
        {info.vchannels[0]: (0, 1)},
        {info.vchannels[0]: (1, 4)},
    ]
    assert third.time_tick == first.time_tick + 1
    assert (await channel.types()).count(MessageType.INSERT) == 2


async def test_group_cancelled_after_it_left_its_pack_does_not_come_again(
    channel: LiveChannel,
) -> None:
    info = await ready(channel)
    new = await channel.create_collection("new")
    channel.log.hold()
    leaving, other = channel.start(group_of(insert(new)), group_of(insert(info)))
    await settle_tasks()
    leaving.cancel()
    channel.log.release()
    await other
    await channel.packer.drain()
    await settle_tasks()
    assert channel.shard.state.next_offsets == {info.vchannels[0]: 2, new.vchannels[0]: 0}


async def test_group_cancelled_in_the_logs_queue_is_written(channel: LiveChannel) -> None:
    info = await ready(channel)
    channel.log.hold()
    queued, other = channel.start(group_of(insert(info, 2)), group_of(insert(info)))
    await settle_tasks()
    queued.cancel()
    channel.log.release()
    assert (await other).row_offsets == {info.vchannels[0]: (3, 1)}
    assert queued.cancelled()


# --- deletes and inserts that wait together -------------------------------------------------------


async def test_delete_takes_what_came_before_it_in_its_pack_and_nothing_after(
    channel: LiveChannel,
) -> None:
    info = await ready(channel)
    groups = [
        group_of(insert(info, 2)),
        group_of(delete(info)),
        group_of(insert(info)),
        group_of(delete(info)),
    ]
    groups.append(rows_group(delete(info), insert(info), delete(info), is_transaction=True))
    written(await channel.pack(*groups))
    bodies = [body for message in (await channel.visible())[-5:] for body in message.bodies]
    assert [(body.type.name, offset_of(body)) for body in bodies] == [
        ("INSERT", 1),
        ("DELETE", 3),
        ("INSERT", 3),
        ("DELETE", 4),
        ("DELETE", 4),
        ("INSERT", 4),
        ("DELETE", 5),
    ]


PIECES = st.tuples(
    st.sampled_from([MessageType.INSERT, MessageType.DELETE]),
    st.integers(0, 1),  # the collection
    st.integers(0, 1),  # the partition
    st.lists(st.integers(0, 2), min_size=1, max_size=4),  # the shards of its rows
)
GROUPS = st.tuples(st.lists(PIECES, min_size=1, max_size=3), st.booleans())


async def opened(channel: LiveChannel) -> list[tuple[CollectionInfo, tuple[int, int]]]:
    """Return two collections of two partitions, whose segments are all there."""
    found = []
    for name in ("a", "b"):
        info = await channel.create_collection(name, shards=3)
        partitions = (info.partitions[0].id, await channel.create_partition(info, "eu"))
        await channel.append(
            *(
                insert(info, shard=shard, partition_id=each)
                for shard in range(3)
                for each in partitions
            )
        )
        found.append((info, partitions))
    return found


def rows_of(
    collections: list[tuple[CollectionInfo, tuple[int, int]]],
    kind: MessageType,
    at: int,
    part: int,
    shards: list[int],
) -> Piece:
    info, partitions = collections[at]
    if kind is MessageType.INSERT:
        target = target_of(kind, info.id, partitions[part], info.schema_version, info.vchannels)
    else:
        target = target_of(kind, info.id, 0, 0, info.vchannels)
    return piece(target, *[(shard, b"row") for shard in shards])


def seen(message: Message | TransactionMessage) -> list[tuple[object, ...]]:
    return [(type(message), body.type, body.vchannel, body.header) for body in message.bodies]


@given(st.lists(GROUPS, min_size=1, max_size=6))
def test_a_pack_leaves_what_its_groups_leave_one_after_the_other(
    groups: list[tuple[list[tuple[MessageType, int, int, list[int]]], bool]],
) -> None:
    async def run(*, together: bool) -> tuple[object, ...]:
        async with LiveChannel.open() as channel:
            collections = await opened(channel)
            appended = [
                rows_group(
                    *[rows_of(collections, *each) for each in pieces], is_transaction=is_transaction
                )
                for pieces, is_transaction in groups
            ]
            before = channel.memory.next_position
            if together:
                results = written(await channel.pack(*appended))
            else:
                results = [await channel.append_group(group) for group in appended]
            found = [message for message in await channel.visible() if message.position >= before]
            state = channel.shard.state
            return (
                [seen(message) for message in found],
                [message.position for message in found],
                [
                    (result.first_position, result.count, dict(result.row_offsets))
                    for result in results
                ],
                {key: (each.stats.rows, each.stats.bytes) for key, each in state.segments.items()},
                (state.next_offsets, state.changes_since_cut, state.position),
            )

    assert asyncio.run(run(together=True)) == asyncio.run(run(together=False))


@pytest.mark.parametrize("held", [False, True])
async def test_many_writers_at_once_leave_every_row_once_and_offsets_without_gaps(
    channel: LiveChannel, held: bool
) -> None:
    info = await channel.create_collection("a", shards=2)
    results: list[AppendResult] = []

    async def write(rows: int) -> None:
        group: AppendGroup = group_of(insert(info, rows, shard=rows % 2))
        results.append(await channel.packer.append(group))

    if held:
        channel.log.hold()
    async with anyio.create_task_group() as tasks:
        for rows in range(1, 40):
            tasks.start_soon(write, rows)
            if rows % 7 == 0:
                await anyio.lowlevel.checkpoint()
        await settle_tasks()
        channel.log.release()
    assert len({result.time_tick for result in results}) == 39
    for shard, vchannel in enumerate(info.vchannels):
        spans = sorted(
            result.row_offsets[vchannel] for result in results if vchannel in result.row_offsets
        )
        assert [first for first, _ in spans] == [
            sum(count for _, count in spans[:at]) for at in range(len(spans))
        ]
        assert sum(count for _, count in spans) == sum(
            rows for rows in range(1, 40) if rows % 2 == shard
        )
    assert len(await channel.entries()) < 39
