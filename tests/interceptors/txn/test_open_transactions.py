from collections.abc import AsyncIterator

import anyio
import pytest

from interceptors import txn
from interceptors.errors import CollectionNotFound, InvalidTransactionState, TransactionExpired
from interceptors.txn import Commits
from interceptors.txn_session import SessionState, TxnLimits
from tests.interceptors.live_channel import (
    Limits,
    LiveChannel,
    commit,
    delete_body,
    insert,
    insert_body,
    settle_tasks,
)
from wal.append import AppendGroup, AppendResult, Pack
from wal.errors import AlreadyExists, OnShutdown, StorageFull
from wal.headers import MessageType
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


# --- expiry ---------------------------------------------------------------------------------------


async def test_expired_transaction_is_refused_and_its_rollback_logged(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    txn_id = await channel.begin(10)
    await channel.append(insert_body(info, txn_id=txn_id))
    channel.pass_ms(11)
    for attempt in (insert_body(info, txn_id=txn_id), commit(txn_id)):
        with pytest.raises(TransactionExpired):
            await channel.append(attempt)
    assert await channel.txn.roll_back_due(channel.append_group) == 1
    assert channel.txn.oldest_open_begin() is None


@pytest.mark.parametrize(
    "ends", ["acknowledged", "refused by the log", "refused on the way", "cancelled"]
)
async def test_only_a_body_that_was_acknowledged_extends_the_keepalive(
    channel: LiveChannel, ends: str
) -> None:
    info = await channel.create_collection("a")
    await channel.append(insert(info))
    txn_id = await channel.begin(10)
    channel.pass_ms(9)
    match ends:
        case "acknowledged":
            await channel.append(insert_body(info, txn_id=txn_id))
        case "refused by the log":
            channel.log.refusal = lambda _: StorageFull("disk", 1, 2)
            with pytest.raises(StorageFull):
                await channel.append(insert_body(info, txn_id=txn_id))
            channel.log.refusal = lambda _: None
        case "refused on the way":
            with pytest.raises(CollectionNotFound):
                await channel.append(insert_body(info, txn_id=txn_id, collection_id=99))
        case _:
            channel.log.hold()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(channel.append, insert_body(info, txn_id=txn_id))
                await settle_tasks()
                tasks.cancel_scope.cancel()
            channel.log.release()
    channel.pass_ms(1)
    expired = await channel.txn.roll_back_due(channel.append_group)
    assert expired == (0 if ends == "acknowledged" else 1)


async def test_fences_that_no_open_transaction_may_span_are_forgotten_while_others_are_always_open(
    channel: LiveChannel,
) -> None:
    txn_id = await channel.begin()
    for number in range(20):
        await channel.create_collection(f"c{number}")
        before = txn_id
        txn_id = await channel.begin()
        await channel.rollback(before)
    assert len(channel.txn._fences) <= 2


async def test_timer_expires_what_no_client_asks_for(channel: LiveChannel) -> None:
    await channel.begin(10)
    await channel.begin(30)
    channel.pass_ms(20)
    assert await channel.txn.roll_back_due(channel.append_group) == 1
    channel.pass_ms(20)
    assert await channel.txn.roll_back_due(channel.append_group) == 1
    assert channel.txn.sessions == ()


async def test_client_may_roll_back_what_expired_and_the_worker_does_not_repeat_it(
    channel: LiveChannel,
) -> None:
    txn_id = await channel.begin(10)
    channel.pass_ms(11)
    channel.txn.expire()
    await channel.rollback(txn_id)
    assert await channel.txn.roll_back_due(channel.append_group) == 0
    assert (await channel.types()).count(MessageType.ROLLBACK_TXN) == 1


async def test_rollback_worker_writes_a_rollback_as_soon_as_a_session_failed(
    channel: LiveChannel,
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.txn.run, channel.append_group)
        await channel.begin(10)
        await settle_tasks()
        channel.pass_ms(11)
        channel.txn.expire()
        await settle_tasks()
        tasks.cancel_scope.cancel()
    assert channel.txn.sessions == ()


@pytest.mark.parametrize("leap_ms", [-3_600_000, 3_600_000], ids=["back", "ahead"])
async def test_clock_that_is_set_moves_no_keepalive(channel: LiveChannel, leap_ms: int) -> None:
    txn_id = await channel.begin(10)
    channel.now_ms += leap_ms
    channel.pass_ms(9)
    assert await channel.txn.roll_back_due(channel.append_group) == 0
    channel.pass_ms(1)
    assert await channel.txn.roll_back_due(channel.append_group) == 1
    with pytest.raises(TransactionExpired):
        await channel.commit(txn_id)


async def test_clock_set_back_makes_no_transaction_older_or_younger(channel: LiveChannel) -> None:
    txn_id = await channel.begin(60_000)
    channel.now_ms -= 3_600_000
    channel.pass_ms(60_000)
    with pytest.raises(TransactionExpired, match="maximum age"):
        await channel.commit(txn_id)


# --- exclusive messages ---------------------------------------------------------------------------


async def test_exclusive_message_ends_the_transactions_of_its_vchannels_only(
    channel: LiveChannel,
) -> None:
    one = await channel.create_collection("a")
    two = await channel.create_collection("b")
    hit = await channel.begin()
    spared = await channel.begin()
    await channel.append(insert_body(one, txn_id=hit))
    await channel.append(insert_body(two, txn_id=spared))
    await channel.create_partition(one, "eu")
    with pytest.raises(TransactionExpired, match="schema change"):
        await channel.commit(hit)
    await channel.commit(spared)
    assert [txn.txn_id for txn in await transactions(channel)] == [spared]


async def test_first_body_behind_an_exclusive_message_ends_the_transaction(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a")
    txn_id = await channel.begin()
    await channel.create_partition(info, "eu")
    with pytest.raises(TransactionExpired, match="schema change"):
        await channel.append(insert_body(info, txn_id=txn_id))


async def test_transaction_begun_after_an_exclusive_message_is_free(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    older = await channel.begin()
    await channel.create_partition(info, "eu")
    younger = await channel.begin()
    await channel.append(insert_body(info, txn_id=younger))
    await channel.commit(younger)
    await channel.rollback(older)


async def test_exclusive_message_that_is_refused_ends_no_transaction(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    await channel.create_partition(info, "eu")
    txn_id = await channel.begin()
    await channel.append(insert_body(info, txn_id=txn_id))
    with pytest.raises(AlreadyExists):
        await channel.create_partition(info, "eu")
    await channel.commit(txn_id)


# --- where readers resume -------------------------------------------------------------------------


async def test_oldest_open_begin_follows_the_oldest_transaction(channel: LiveChannel) -> None:
    first = await channel.begin()
    second = await channel.begin()
    assert channel.txn.oldest_open_begin() == 1
    await channel.commit(second)
    assert channel.txn.oldest_open_begin() == 1
    await channel.commit(first)
    assert channel.txn.oldest_open_begin() is None


async def test_begin_counts_as_open_from_its_place_in_the_log(channel: LiveChannel) -> None:
    channel.log.hold()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.begin)
        await settle_tasks()
        assert channel.txn.oldest_open_begin() == 1
        channel.log.release()


async def test_scope_of_a_commit_has_the_vchannels_of_its_bodies(channel: LiveChannel) -> None:
    info = await channel.create_collection("a", shards=3)
    txn_id = await channel.begin()
    await channel.append(
        insert_body(info, shard=2, txn_id=txn_id), insert_body(info, shard=0, txn_id=txn_id)
    )
    scope = channel.txn.scope_of(Pack([AppendGroup([commit(txn_id)])]))
    assert set(scope) == {"", info.vchannels[0], info.vchannels[2]}


async def test_rollback_of_what_a_drop_overtook_waits_for_no_vchannel_and_leaves_no_lock(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a", shards=2)
    txn_id = await channel.begin()
    await channel.append(insert_body(info, shard=1, txn_id=txn_id))
    await channel.drop_collection(info)
    assert await channel.txn.roll_back_due(channel.append_group) == 1
    assert not set(info.vchannels) & set(channel.lock._locks)


# --- after a restart ------------------------------------------------------------------------------


async def test_open_transaction_survives_a_restart_and_commits(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    txn_id = await channel.begin()
    await channel.append(insert_body(info, 2, txn_id=txn_id))
    async with LiveChannel.open(channel.memory) as reopened:
        assert reopened.txn.oldest_open_begin() == channel.txn.oldest_open_begin()
        await reopened.append(insert_body(info, 3, txn_id=txn_id))
        await reopened.commit(txn_id)
        (txn,) = await transactions(reopened)
    assert [getattr(body.header, "first_offset", None) for body in txn.bodies] == [0, 2]


async def test_transaction_overtaken_before_a_restart_stays_dead_after_it(
    channel: LiveChannel,
) -> None:
    info = await channel.create_collection("a")
    txn_id = await channel.begin()
    await channel.append(insert_body(info, 2, txn_id=txn_id))
    await channel.create_partition(info, "eu")
    async with LiveChannel.open(channel.memory) as reopened:
        with pytest.raises(TransactionExpired):
            await reopened.commit(txn_id)
        assert await reopened.txn.roll_back_due(reopened.append_group) == 1


async def test_restart_counts_as_idle_time(channel: LiveChannel) -> None:
    await channel.begin(10)
    async with LiveChannel.open(channel.memory, later_ms=9) as reopened:
        assert await reopened.txn.roll_back_due(reopened.append_group) == 0
        reopened.pass_ms(1)
        assert await reopened.txn.roll_back_due(reopened.append_group) == 1


async def test_restart_counts_as_age(channel: LiveChannel) -> None:
    info = await channel.create_collection("a")
    txn_id = await channel.begin(60_000)
    async with LiveChannel.open(channel.memory, LIMITS, later_ms=59_000) as reopened:
        await reopened.append(delete_body(info, txn_id=txn_id))
        reopened.pass_ms(1_000)
        with pytest.raises(TransactionExpired, match="maximum age"):
            await reopened.commit(txn_id)


async def test_state_of_a_commit_in_the_logs_hands_is_left_to_the_log(channel: LiveChannel) -> None:
    txn_id = await channel.begin(10)
    channel.log.hold()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.commit, txn_id)
        await settle_tasks()
        channel.pass_ms(1000)
        channel.txn.expire()
        with pytest.raises(InvalidTransactionState, match=SessionState.COMMITTING.name):
            await channel.rollback(txn_id)
        channel.log.release()
    assert len(await transactions(channel)) == 1


# --- commits that are repeated --------------------------------------------------------------------


def test_transaction_without_a_commit_is_not_taken_for_committed_nor_for_forgotten() -> None:
    known = Commits()
    known.add(7)
    assert 7 in known
    assert 5 not in known
    assert known.known_after == 0


def test_forgetting_a_commit_makes_older_ones_unknown_and_not_uncommitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(txn, "COMMITS_MAX", 2)
    known = Commits(known_after=3)
    for txn_id in (9, 5, 8, 20):
        known.add(txn_id)
    assert [txn_id in known for txn_id in (9, 5, 8, 20)] == [False, False, True, True]
    assert known.known_after == 9, (
        "not the id forgotten last: commits do not come in the order of begins"
    )


# --- the end of the log ---------------------------------------------------------------------------


async def test_rollback_worker_ends_when_the_log_takes_no_more() -> None:
    async with LiveChannel.open() as channel:
        await channel.begin(10)
        channel.pass_ms(11)
        channel.txn.expire()
        groups: list[AppendGroup] = []

        async def closed(group: AppendGroup) -> AppendResult:
            groups.append(group)
            raise OnShutdown("closed")

        await channel.txn.run(closed)
        assert len(groups) == 1
        assert len(channel.txn.sessions) == 1
