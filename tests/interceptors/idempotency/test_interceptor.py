"""Retries on a live channel: recognised, joined, taken over, refused; and the same after the log
was read again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.errors import CollectionNotFound, ProducerFenced, SequenceTooOld
from interceptors.recovery import recover
from interceptors.shard.catalog import CollectionInfo
from tests.interceptors.live_channel import (
    LiveChannel,
    begin,
    commit,
    delete,
    group_of,
    insert,
    insert_body,
    settle_tasks,
)
from wal.append import AppendGroup, AppendResult
from wal.entry import LogEntry
from wal.errors import Overloaded
from wal.headers import MessageType, RollbackTxnHeader
from wal.message import MutableMessage
from wal.position import ProducerStamp
from wal.rows import Piece

pytestmark = pytest.mark.anyio

FEED = 7
OTHER = 8


@pytest.fixture
async def channel() -> AsyncIterator[LiveChannel]:
    async with LiveChannel.open() as channel:
        know(channel)
        yield channel


def know(channel: LiveChannel) -> None:
    for producer_id in (FEED, OTHER):
        channel.idempotency.window.fence(producer_id, 1)


def named(
    sequence: int,
    *what: Piece | MutableMessage,
    producer_id: int = FEED,
    epoch: int = 1,
    is_transaction: bool = False,
) -> AppendGroup:
    """Return rows or messages as write `sequence` of a producer."""
    group = group_of(*what, producer=ProducerStamp(producer_id, epoch, sequence))
    group.is_transaction = is_transaction
    return group


def write(
    channel: LiveChannel,
    sequence: int,
    *what: Piece | MutableMessage,
    producer_id: int = FEED,
    epoch: int = 1,
) -> Awaitable[AppendResult]:
    """Append rows or messages as write `sequence` of a producer."""
    return channel.append_group(named(sequence, *what, producer_id=producer_id, epoch=epoch))


def start(write: Awaitable[AppendResult]) -> asyncio.Task[AppendResult]:
    async def run() -> AppendResult:
        return await write

    return asyncio.get_running_loop().create_task(run())


def stamps_in(entry: LogEntry) -> Sequence[ProducerStamp | None]:
    """Return the stamps of an entry: of its messages, or of each of its groups."""
    return (entry.producer,) if entry.rows is None else entry.rows.producers


async def entries_of(channel: LiveChannel, *sequences: int) -> list[int]:
    """Return how many entries the log has for each sequence of the feed."""
    stamps = [stamp for entry in await channel.entries() for stamp in stamps_in(entry)]
    return [
        sum(stamp is not None and stamp.sequence == each for stamp in stamps) for each in sequences
    ]


async def rows(channel: LiveChannel, info: CollectionInfo) -> AppendResult:
    return await write(channel, 1, insert(info, 3), insert(info, 2, shard=1))


async def transaction(channel: LiveChannel, info: CollectionInfo) -> AppendResult:
    return await channel.append_group(
        named(1, delete(info), insert(info, 2), insert(info, 1), is_transaction=True)
    )


async def streamed_commit(channel: LiveChannel, info: CollectionInfo) -> AppendResult:
    if not hasattr(channel, "open_txn"):
        channel.open_txn = await channel.begin()  # type: ignore[attr-defined]
        await channel.append(insert_body(info, 4, txn_id=channel.open_txn))  # type: ignore[attr-defined]
    return await write(channel, 1, commit(channel.open_txn))  # type: ignore[attr-defined]


async def streamed_begin(channel: LiveChannel, _info: CollectionInfo) -> AppendResult:
    return await write(channel, 1, begin())


async def rollback(channel: LiveChannel, _info: CollectionInfo) -> AppendResult:
    if not hasattr(channel, "open_txn"):
        channel.open_txn = await channel.begin()  # type: ignore[attr-defined]
    txn_id = channel.open_txn  # type: ignore[attr-defined]
    message = MutableMessage(MessageType.ROLLBACK_TXN, RollbackTxnHeader("asked"), txn_id=txn_id)
    return await write(channel, 1, message)


KINDS = [rows, transaction, streamed_begin, streamed_commit, rollback]


@pytest.mark.parametrize("kind", KINDS)
async def test_repeated_write_returns_the_first_result_and_leaves_one_entry(
    channel: LiveChannel, kind: Callable[[LiveChannel, CollectionInfo], Awaitable[AppendResult]]
) -> None:
    info = await channel.create_collection("c", shards=2)
    first = await kind(channel, info)
    await channel.append(insert(info))
    assert await kind(channel, info) == first
    assert await entries_of(channel, 1) == [1]


@pytest.mark.parametrize("kind", KINDS)
async def test_result_read_off_the_log_is_what_the_first_try_returned(
    channel: LiveChannel, kind: Callable[[LiveChannel, CollectionInfo], Awaitable[AppendResult]]
) -> None:
    info = await channel.create_collection("c", shards=2)
    first = await kind(channel, info)
    window = (await recover(channel.memory)).window
    assert window.find(ProducerStamp(FEED, 1, 1)) == first


async def test_retry_joins_a_first_try_in_flight(channel: LiveChannel) -> None:
    info = await channel.create_collection("c")
    await channel.append(insert(info))
    channel.log.hold()
    tries = [start(write(channel, 1, insert(info))) for _ in range(3)]
    await settle_tasks()
    assert not any(each.done() for each in tries)
    channel.log.release()
    first, *others = await asyncio.gather(*tries)
    assert others == [first, first]
    assert await entries_of(channel, 1) == [1]
    assert len(channel.idempotency._under_way) == 0


async def test_joined_retry_says_that_its_write_may_be_in_the_log(channel: LiveChannel) -> None:
    info = await channel.create_collection("c")
    await channel.append(insert(info))
    channel.log.hold()
    first = start(write(channel, 1, insert(info)))
    await settle_tasks()
    retry = named(1, insert(info))
    joined = start(channel.append_group(retry))
    await settle_tasks()
    assert retry.pack is not None
    assert retry.pack.ticket is None
    assert retry.begun
    channel.log.release()
    assert await joined == await first


async def test_first_try_cancelled_in_the_queue_still_answers_its_retry(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("c", shards=2)
    for shard in (0, 1):
        await channel.append(insert(info, shard=shard))
    channel.log.hold()
    first = start(write(channel, 1, insert(info, 2), insert(info, 3, shard=1)))
    await settle_tasks()
    first.cancel()
    await settle_tasks()
    assert first.cancelled()
    retry = start(write(channel, 1, insert(info, 2), insert(info, 3, shard=1)))
    await settle_tasks()
    channel.log.release()
    result = await retry
    assert result == await write(channel, 1, insert(info, 2))
    assert result == (await recover(channel.memory)).window.find(ProducerStamp(FEED, 1, 1))
    assert await entries_of(channel, 1) == [1]


async def test_retry_takes_over_from_a_first_try_cancelled_before_the_queue(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("c")
    first = start(write(channel, 1, insert(info)))
    await asyncio.sleep(0)  # it waits for its first segment
    retry = start(write(channel, 1, insert(info)))
    await asyncio.sleep(0)
    assert len(channel.idempotency._under_way) == 1
    first.cancel()
    assert (await retry).count == 1
    assert first.cancelled()
    assert await entries_of(channel, 1) == [1]


async def test_cancelled_retry_leaves_the_first_try_alone(channel: LiveChannel) -> None:
    info = await channel.create_collection("c")
    await channel.append(insert(info))
    channel.log.hold()
    first, retry = [start(write(channel, 1, insert(info))) for _ in range(2)]
    await settle_tasks()
    retry.cancel()
    await settle_tasks()
    channel.log.release()
    assert (await first).count == 1
    assert retry.cancelled()


async def test_refused_first_try_is_forgotten_and_may_be_repeated(channel: LiveChannel) -> None:
    info = await channel.create_collection("c")
    await channel.append(insert(info))
    channel.log.refusal = lambda _pack: Overloaded("not now")
    tries = [start(write(channel, 1, insert(info))) for _ in range(2)]
    outcomes = await asyncio.gather(*tries, return_exceptions=True)
    assert all(isinstance(each, Overloaded) for each in outcomes)
    channel.log.refusal = lambda _pack: None
    assert (await write(channel, 1, insert(info))).count == 1
    assert await entries_of(channel, 1) == [1]


async def test_a_refusal_is_no_result(channel: LiveChannel) -> None:
    info = await channel.create_collection("c")
    await channel.drop_collection(info)
    for _ in range(2):
        with pytest.raises(CollectionNotFound):
            await write(channel, 1, insert(info))
    assert channel.idempotency.window.last_sequence(FEED) == 0


async def test_producers_that_use_the_same_sequences_do_not_meet(channel: LiveChannel) -> None:
    info = await channel.create_collection("c")
    results = {}
    for sequence in (1, 2, 3):
        for producer_id in (FEED, OTHER):
            results[producer_id, sequence] = await write(
                channel, sequence, insert(info), producer_id=producer_id
            )
    assert len({each.time_tick for each in results.values()}) == 6
    for (producer_id, sequence), result in results.items():
        assert await write(channel, sequence, insert(info), producer_id=producer_id) == result


async def test_zombie_is_refused_and_its_write_in_flight_answers_the_new_epoch(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("c")
    await channel.append(insert(info))
    channel.log.hold()
    first = start(write(channel, 1, insert(info)))
    await settle_tasks()
    channel.idempotency.window.fence(FEED, 2)
    settled = asyncio.get_running_loop().create_task(channel.idempotency.settled(FEED))
    for sequence in (1, 2):
        with pytest.raises(ProducerFenced):
            await write(channel, sequence, insert(info))
    retry = start(write(channel, 1, insert(info), epoch=2))
    await settle_tasks()
    assert not settled.done()
    channel.log.release()
    assert await retry == await first
    await settled
    assert await entries_of(channel, 1, 2) == [1, 0]


async def test_gaps_are_kept_open_until_they_fall_out_of_the_window(channel: LiveChannel) -> None:
    info = await channel.create_collection("c")
    kept = channel.idempotency.window.limits.results_per_producer_max
    await write(channel, 10, insert(info))
    await write(channel, 5, insert(info))
    for sequence in range(11, 11 + kept - 1):
        await write(channel, sequence, insert(info))
    with pytest.raises(SequenceTooOld):
        await write(channel, 3, insert(info))
    assert (await write(channel, 9, insert(info))).count == 1
    assert await entries_of(channel, 3, 5, 9, 10) == [0, 1, 1, 1]


@given(
    st.lists(
        st.tuples(st.sampled_from([FEED, OTHER]), st.integers(1, 6), st.integers(0, 4)), max_size=25
    )
)
def test_a_window_read_off_the_log_knows_what_the_live_one_knows(
    steps: list[tuple[int, int, int]],
) -> None:
    async def run() -> None:
        async with LiveChannel.open() as channel:
            know(channel)
            info = await channel.create_collection("c", shards=2)
            results: dict[tuple[int, int], AppendResult] = {}
            for producer_id, sequence, kind in steps:
                what: Sequence[Piece | MutableMessage] = (
                    [insert(info, 2)],
                    [delete(info)],
                    [insert(info), insert(info, 3, shard=1)],
                    [begin()],
                    [insert(info), insert(info, 2, shard=1)],
                )[kind]
                group = named(sequence, *what, producer_id=producer_id, is_transaction=kind == 2)
                result = await channel.append_group(group)
                assert results.setdefault((producer_id, sequence), result) == result
            window = (await recover(channel.memory)).window
            for (producer_id, sequence), result in results.items():
                assert window.find(ProducerStamp(producer_id, 1, sequence)) == result

    asyncio.run(run())
