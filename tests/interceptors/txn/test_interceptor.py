from collections.abc import AsyncIterator

import anyio
import pytest

from interceptors.errors import CollectionNotFound, InvalidTransactionState, TransactionExpired
from interceptors.txn_session import TxnLimits
from tests.interceptors.live_channel import (
    Limits,
    LiveChannel,
    commit,
    delete,
    delete_body,
    insert,
    insert_body,
    settle_tasks,
)
from wal.append import AppendResult
from wal.errors import Overloaded, StorageFull
from wal.headers import BeginTxnHeader, CommitTxnHeader, MessageType
from wal.message import TransactionMessage

pytestmark = pytest.mark.anyio

LIMITS = Limits(txn=TxnLimits(size_bytes_max=1000, sessions_max=3, age_s_max=60))


@pytest.fixture
async def channel() -> AsyncIterator[LiveChannel]:
    async with LiveChannel.open(limits=LIMITS) as opened:
        yield opened


async def transactions(channel: LiveChannel) -> list[TransactionMessage]:
    return [
        message for message in await channel.visible() if isinstance(message, TransactionMessage)
    ]


# --- one group ------------------------------------------------------------------------------------


async def test_transaction_in_one_group_takes_the_groups_tick_as_id_and_needs_no_session(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a")
    result = await channel.transact(delete(info), insert(info, 3))
    assert result.txn_id == result.time_tick
    assert channel.txn.sessions == ()
    assert [txn.txn_id for txn in await transactions(channel)] == [result.txn_id]


async def test_transaction_in_one_group_assigns_bodies_in_their_order(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info, 5))
    await channel.transact(delete(info), insert(info, 3), delete(info))
    (txn,) = await transactions(channel)
    offsets = [
        getattr(body.header, "first_offset", getattr(body.header, "next_offset", None))
        for body in txn.bodies
    ]
    assert offsets == [5, 5, 8]


async def test_streamed_transaction_may_be_empty(channel: LiveChannel) -> None:
    await channel.commit(await channel.begin())
    assert [txn.bodies for txn in await transactions(channel)] == [()]


# --- streamed -------------------------------------------------------------------------------------


async def test_streamed_transaction_is_invisible_until_its_commit(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    txn_id = await channel.begin()
    await channel.append(insert_body(info, 2, txn_id=txn_id), delete_body(info, txn_id=txn_id))
    await channel.append(insert(info, 4))
    assert await transactions(channel) == []
    result = await channel.commit(txn_id)
    (txn,) = await transactions(channel)
    assert (result.txn_id, txn.txn_id, txn.time_tick) == (txn_id, txn_id, result.time_tick)
    assert result.row_offsets == {info.vchannels[0]: (5, 2)}
    assert [body.type for body in txn.bodies] == [MessageType.INSERT, MessageType.DELETE]


async def test_commit_names_the_vchannels_of_all_collections_it_touched(
    channel: LiveChannel,
) -> None:
    one = await channel.create_collection("a", shards=2)
    two = await channel.create_collection("b")
    txn_id = await channel.begin()
    await channel.append(insert_body(two, txn_id=txn_id))
    await channel.append(insert_body(one, shard=1, txn_id=txn_id))
    await channel.commit(txn_id)
    (txn,) = await transactions(channel)
    assert isinstance(txn.commit.header, CommitTxnHeader)
    assert txn.commit.header.vchannels == tuple(sorted([two.vchannels[0], one.vchannels[1]]))


async def test_rolled_back_transaction_never_appears(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    txn_id = await channel.begin()
    await channel.append(insert_body(info, txn_id=txn_id))
    await channel.rollback(txn_id)
    assert await transactions(channel) == []
    assert channel.txn.sessions == ()
    with pytest.raises(TransactionExpired):
        await channel.append(insert_body(info, txn_id=txn_id))


async def test_begin_without_keepalive_gets_the_default_in_the_log(channel: LiveChannel) -> None:
    await channel.begin()
    (entry,) = await channel.entries()
    assert entry.messages[0].header == BeginTxnHeader(10_000)


async def test_keepalive_is_no_longer_than_the_oldest_a_session_gets(channel: LiveChannel) -> None:
    await channel.begin(60_001)
    (begin_message,) = (await channel.entries())[-1].messages
    assert begin_message.header == BeginTxnHeader(60_000)


async def test_one_transaction_too_many_is_refused(channel: LiveChannel) -> None:
    for _ in range(3):
        await channel.begin()
    with pytest.raises(Overloaded):
        await channel.begin()


async def test_begin_that_the_log_refuses_leaves_no_session(channel: LiveChannel) -> None:
    channel.log.refusal = lambda _: StorageFull("disk", 1, 2)
    with pytest.raises(StorageFull):
        await channel.begin()
    assert channel.txn.sessions == ()


async def test_body_that_is_refused_does_not_count(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    txn_id = await channel.begin()
    with pytest.raises(CollectionNotFound):
        await channel.append(insert_body(info, txn_id=txn_id, collection_id=99))
    channel.log.refusal = lambda _: StorageFull("disk", 1, 2)
    with pytest.raises(StorageFull):
        await channel.append(insert_body(info, txn_id=txn_id))
    channel.log.refusal = lambda _: None
    await channel.append(insert_body(info, 2, txn_id=txn_id))
    await channel.commit(txn_id)
    (txn,) = await transactions(channel)
    assert len(txn.bodies) == 1


async def test_transaction_over_its_size_is_rolled_back_with_a_typed_error(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a")
    txn_id = await channel.begin()
    await channel.append(insert_body(info, 90, txn_id=txn_id))
    for attempt in (insert_body(info, 90, txn_id=txn_id), commit(txn_id)):
        with pytest.raises(TransactionExpired):
            await channel.append(attempt)
    assert await channel.txn.roll_back_due(channel.append_group) == 1
    assert (await channel.types())[-1] is MessageType.ROLLBACK_TXN
    assert await transactions(channel) == []


# --- commits and bodies on their way --------------------------------------------------------------


async def test_commit_waits_until_no_body_is_on_its_way(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    txn_id = await channel.begin()
    channel.log.hold()
    results: dict[str, AppendResult] = {}

    async def append_body() -> None:
        results["body"] = await channel.append(insert_body(info, txn_id=txn_id))

    async def append_commit() -> None:
        results["commit"] = await channel.commit(txn_id)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(append_body)
        await settle_tasks()
        tasks.start_soon(append_commit)
        await settle_tasks()
        assert MessageType.COMMIT_TXN not in await channel.types()
        with pytest.raises(InvalidTransactionState):
            await channel.append(insert_body(info, txn_id=txn_id))
        channel.log.release()
    assert list(results) == ["body", "commit"]
    assert len(await transactions(channel)) == 1


async def test_commit_given_up_while_it_waits_may_be_repeated(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    txn_id = await channel.begin()
    channel.log.hold()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.append, insert_body(info, txn_id=txn_id))
        await settle_tasks()
        async with anyio.create_task_group() as patience:
            patience.start_soon(channel.commit, txn_id)
            await settle_tasks()
            patience.cancel_scope.cancel()
        channel.log.release()
    await channel.commit(txn_id)
    assert len(await transactions(channel)) == 1


async def test_commit_given_up_and_not_repeated_is_rolled_back_by_expiry(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    txn_id = await channel.begin()
    channel.log.hold()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.append, insert_body(info, txn_id=txn_id))
        await settle_tasks()
        async with anyio.create_task_group() as patience:
            patience.start_soon(channel.commit, txn_id)
            await settle_tasks()
            patience.cancel_scope.cancel()
        channel.log.release()
    channel.pass_ms(10_001)
    assert await channel.txn.roll_back_due(channel.append_group) == 1
    assert await transactions(channel) == []


async def test_of_two_commits_that_wait_together_one_is_the_commit(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    txn_id = await channel.begin()
    channel.log.hold()
    outcomes: list[object] = []

    async def commit_once() -> None:
        try:
            outcomes.append(await channel.commit(txn_id))
        except InvalidTransactionState as error:
            outcomes.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.append, insert_body(info, txn_id=txn_id))
        await settle_tasks()
        tasks.start_soon(commit_once)
        tasks.start_soon(commit_once)
        await settle_tasks()
        channel.log.release()
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "InvalidTransactionState",
        "WriteResult",
    ]
    assert len(await transactions(channel)) == 1


async def test_second_commit_after_the_first_says_that_it_is_committed(
    channel: LiveChannel,
) -> None:
    txn_id = await channel.begin()
    await channel.commit(txn_id)
    with pytest.raises(InvalidTransactionState, match="committed"):
        await channel.commit(txn_id)


async def test_commit_that_the_log_refuses_is_rolled_back(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    txn_id = await channel.begin()
    await channel.append(insert_body(info, txn_id=txn_id))
    channel.log.refusal = lambda _: StorageFull("disk", 1, 2)
    with pytest.raises(StorageFull):
        await channel.commit(txn_id)
    assert await channel.txn.roll_back_due(channel.append_group) == 0
    channel.log.refusal = lambda _: None
    with pytest.raises(TransactionExpired):
        await channel.commit(txn_id)
    assert await channel.txn.roll_back_due(channel.append_group) == 1
    assert channel.txn.sessions == ()
    assert await transactions(channel) == []


async def test_commit_into_a_full_segment_waits_for_a_new_one_and_succeeds(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a")
    txn_id = await channel.begin()
    await channel.append(insert_body(info, 3, txn_id=txn_id))
    assert channel.shard.state.segments == {}
    await channel.commit(txn_id)
    (segment,) = channel.shard.state.segments.values()
    assert segment.stats.rows == 3
