"""Named writes in packs: each is recognised, joined or refused by itself, and what goes with it is
not held up.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.chain import Redo
from interceptors.errors import CollectionNotFound, ProducerFenced, SequenceTooOld
from interceptors.recovery import recover
from interceptors.shard.catalog import CollectionInfo
from tests.interceptors.live_channel import (
    LiveChannel,
    commit,
    group_of,
    insert,
    insert_body,
    settle_tasks,
)
from wal.append import AppendGroup, AppendResult
from wal.errors import Overloaded
from wal.headers import MessageType
from wal.position import ProducerStamp

pytestmark = pytest.mark.anyio

FEED = 7
OTHER = 8
NEXT = 0
"""The sequence that stands for the next one."""


@pytest.fixture
async def channel() -> AsyncIterator[LiveChannel]:
    async with LiveChannel.open() as channel:
        know(channel)
        yield channel


def know(channel: LiveChannel) -> None:
    for producer_id in (FEED, OTHER):
        channel.idempotency.window.fence(producer_id, 1)


async def ready(channel: LiveChannel) -> CollectionInfo:
    info = await channel.create_collection("a")
    await channel.append(insert(info, 10))
    return info


def named(
    info: CollectionInfo, sequence: int, rows: int = 1, *, producer_id: int = FEED, epoch: int = 1
) -> AppendGroup:
    return group_of(insert(info, rows), producer=ProducerStamp(producer_id, epoch, sequence))


async def rows_in(channel: LiveChannel) -> list[int]:
    """Return how many rows each insert in the log has, in order, from the second on."""
    inserts = [
        message for message in await channel.messages() if message.type is MessageType.INSERT
    ]
    return [getattr(message.header, "rows", 0) for message in inserts[1:]]


async def sequences_in(channel: LiveChannel) -> list[int]:
    """Return the sequences of the feed's groups, in the order of the log."""
    entries = await channel.entries()
    stamps = [
        stamp
        for entry in entries
        for stamp in (entry.rows.producers if entry.rows else [entry.producer])
    ]
    return [stamp.sequence for stamp in stamps if stamp is not None and stamp.producer_id == FEED]


async def test_retry_of_what_is_in_the_log_hears_its_first_result_and_the_others_are_written(
    channel: LiveChannel,
) -> None:
    info = await ready(channel)
    (first,) = await channel.pack(named(info, 1))
    other, again, new = await channel.pack(
        group_of(insert(info, 2)), named(info, 1, 5), named(info, 2, 3)
    )
    assert again == first
    assert isinstance(other, AppendResult)
    assert isinstance(new, AppendResult)
    assert await rows_in(channel) == [1, 2, 3]
    assert await sequences_in(channel) == [1, 2]


async def test_the_same_write_twice_in_one_pack_is_one_write_and_both_hear_of_it(
    channel: LiveChannel,
) -> None:
    info = await ready(channel)
    first, again, other = await channel.pack(
        named(info, 1), named(info, 1), group_of(insert(info, 2))
    )
    assert isinstance(first, AppendResult)
    assert again == first
    assert isinstance(other, AppendResult)
    assert await rows_in(channel) == [1, 2]
    assert channel.idempotency._under_way == {}


async def test_fenced_and_forgotten_writes_are_refused_alone(channel: LiveChannel) -> None:
    info = await ready(channel)
    channel.idempotency.window.fence(OTHER, 2)
    channel.idempotency.window.producers[FEED].floor = 4
    fenced, unknown, too_old, fenced_next, new = await channel.pack(
        named(info, 1, producer_id=OTHER),
        named(info, 1, producer_id=99),
        named(info, 3),
        named(info, NEXT, producer_id=OTHER),
        named(info, 5, 4),
    )
    assert [type(each) for each in (fenced, unknown, fenced_next)] == [ProducerFenced] * 3
    assert isinstance(too_old, SequenceTooOld)
    assert isinstance(new, AppendResult)
    assert await rows_in(channel) == [4]


async def test_commit_that_waits_while_its_producer_is_opened_again_is_refused_and_rolled_back(
    channel: LiveChannel,
) -> None:
    info = await ready(channel)
    txn_id = await channel.begin()
    channel.log.hold()
    body = asyncio.get_running_loop().create_task(channel.append(insert_body(info, txn_id=txn_id)))
    await settle_tasks()
    next_write = group_of(commit(txn_id), producer=ProducerStamp(FEED, 1, NEXT))
    committing = asyncio.get_running_loop().create_task(channel.append_group(next_write))
    await settle_tasks()
    channel.idempotency.window.fence(FEED, 2)
    await channel.idempotency.settled(FEED)  # the new owner is told of its last sequence now
    channel.log.release()
    await body
    with pytest.raises(ProducerFenced):
        await committing
    assert await channel.txn.roll_back_due(channel.append_group) == 1
    assert MessageType.COMMIT_TXN not in await channel.types()
    assert (await sequences_in(channel), channel.txn.sessions) == ([], ())


async def test_retry_of_a_write_under_way_leaves_its_pack_which_does_not_wait_for_it(
    channel: LiveChannel,
) -> None:
    info = await ready(channel)
    channel.log.hold()
    (first,) = channel.start(named(info, 1))
    await settle_tasks()
    retry_group = named(info, 1)
    retry, other = channel.start(retry_group, group_of(insert(info, 2)))
    await settle_tasks()
    assert await rows_in(channel) == [1, 2]
    assert retry_group.begun
    assert not retry.done()
    channel.log.release()
    assert await retry == await first
    assert isinstance(await other, AppendResult)
    assert await rows_in(channel) == [1, 2]


async def test_retry_in_a_pack_hears_why_the_first_try_was_refused(channel: LiveChannel) -> None:
    info = await ready(channel)
    channel.log.refusal = lambda _pack: Overloaded("not now")
    outcomes = await channel.pack(named(info, 1), named(info, 1), named(info, 2))
    assert all(isinstance(outcome, Overloaded) for outcome in outcomes)
    channel.log.refusal = lambda _pack: None
    (later,) = await channel.pack(named(info, 1))
    assert isinstance(later, AppendResult)


async def test_refused_group_of_a_pack_is_no_result_and_its_retry_is_a_first_try(
    channel: LiveChannel,
) -> None:
    info = await ready(channel)
    gone = await channel.create_collection("gone")
    await channel.drop_collection(gone)
    refused, written = await channel.pack(named(gone, 1), named(info, 2))
    assert isinstance(refused, CollectionNotFound)
    assert isinstance(written, AppendResult)
    (again,) = await channel.pack(named(info, 1))
    assert isinstance(again, AppendResult)
    assert await sequences_in(channel) == [2, 1]


async def test_cancelled_group_of_a_pack_leaves_its_retry_a_first_try(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    channel.log.hold()
    waiting = channel.start(named(info, 1), named(info, 2))
    await settle_tasks()
    waiting[0].cancel()
    channel.log.release()
    await waiting[1]
    (again,) = await channel.pack(named(info, 1))
    assert isinstance(again, AppendResult)
    assert await sequences_in(channel) == [2, 1]


async def test_sequences_are_drawn_in_the_order_of_the_log_and_none_for_what_is_refused(
    channel: LiveChannel,
) -> None:
    info = await ready(channel)
    gone = await channel.create_collection("gone")
    await channel.drop_collection(gone)
    groups = [
        named(each, NEXT, rows) for each, rows in ((info, 1), (gone, 2), (info, 3), (info, 4))
    ]
    outcomes = await channel.pack(*groups)
    assert [type(each) for each in outcomes] == [
        AppendResult,
        CollectionNotFound,
        AppendResult,
        AppendResult,
    ]
    assert await sequences_in(channel) == [1, 2, 3]
    for sequence, outcome in zip((1, 2, 3), (outcomes[0], *outcomes[2:]), strict=True):
        assert channel.idempotency.window.find(ProducerStamp(FEED, 1, sequence)) == outcome
    assert channel.idempotency._under_way == {}


@pytest.mark.parametrize("sequence", [NEXT, 5], ids=["drawn", "given"])
async def test_write_that_left_its_pack_and_comes_again_meanwhile_is_written_once(
    channel: LiveChannel, sequence: int
) -> None:
    info = await ready(channel)
    leaving = named(info, sequence, 1)
    stays = named(info, 9, 2)
    retry_group = named(info, sequence or 1, 1)
    at_once: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    at_once.set_result(None)
    sent_back: list[Redo] = [Redo(at_once, waiting_for="a lock", groups=[leaving])]
    channel.log.refusal = lambda _pack: sent_back.pop() if sent_back else None
    channel.log.hold()
    first, second = channel.start(leaving, stays)
    await settle_tasks()
    assert not leaving.cancelled
    assert not second.done()
    assert leaving.begun == (await rows_in(channel) == [2, 1])
    channel.log.release()
    result = await first
    await second
    assert await rows_in(channel) == [2, 1]
    assert leaving.producer is not None
    assert leaving.producer.sequence == (sequence or 1)
    assert await channel.pack(retry_group) == [result]
    assert (await recover(channel.memory)).window.find(leaving.producer) == result
    assert channel.idempotency._under_way == {}


async def test_write_that_waits_to_come_again_has_not_begun(channel: LiveChannel) -> None:
    info = await ready(channel)
    leaving = named(info, 5)
    stays = named(info, 9)
    later: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    sent_back: list[Redo] = [Redo(later, waiting_for="a lock", groups=[leaving])]
    channel.log.refusal = lambda _pack: sent_back.pop() if sent_back else None
    first, second = channel.start(leaving, stays)
    await second
    assert not leaving.begun
    later.set_result(None)
    await first
    assert leaving.begun


# --- over the log ---------------------------------------------------------------------------------


WRITES = st.tuples(
    st.sampled_from([FEED, OTHER, 0]), st.integers(0, 6), st.integers(1, 3), st.booleans()
)


@given(st.lists(st.lists(WRITES, min_size=1, max_size=5), max_size=8))
def test_a_window_read_off_a_log_of_packs_is_the_live_one(
    packs: list[list[tuple[int, int, int, bool]]],
) -> None:
    async def run() -> None:
        async with LiveChannel.open() as channel:
            know(channel)
            info = await channel.create_collection("a")
            told: dict[ProducerStamp, AppendResult] = {}
            for writes in packs:
                groups = []
                for producer_id, sequence, rows, is_transaction in writes:
                    stamp = ProducerStamp(producer_id, 1, sequence) if producer_id else None
                    groups.append(group_of(insert(info, rows), producer=stamp))
                    groups[-1].is_transaction = is_transaction
                    if stamp is not None and sequence:  # so that nobody draws it
                        channel.sequences.reach(producer_id, sequence)
                for group, outcome in zip(groups, await channel.pack(*groups), strict=True):
                    assert isinstance(outcome, AppendResult)
                    if group.producer is not None:
                        assert told.setdefault(group.producer, outcome) == outcome
            recovered = (await recover(channel.memory)).window
            live = channel.idempotency.window
            know_of = {key: known.results for key, known in live.producers.items() if known.results}
            assert {key: known.results for key, known in recovered.producers.items()} == know_of
            assert all(live.find(stamp) == result for stamp, result in told.items())
            unnamed = sum(not producer_id for writes in packs for producer_id, *_ in writes)
            inserts = (await channel.types()).count(MessageType.INSERT)
            assert inserts == unnamed + len({result.time_tick for result in told.values()})

    asyncio.run(run())
