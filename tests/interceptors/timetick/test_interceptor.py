import asyncio

import pytest

from interceptors.timetick import AckManager
from tests.interceptors.timetick.tick_channel import TickChannel
from tests.wal.manual_log import A, B, insert, settle
from wal.append import AppendGroup, Pack
from wal.errors import Indeterminate, OnShutdown, StorageFailed
from wal.log import log_end

pytestmark = pytest.mark.anyio


async def test_append_is_published_with_its_tick_before_its_caller_hears_of_it() -> None:
    channel = TickChannel()
    append = await channel.start(insert(A, B))
    assert not append.done()
    assert channel.published() == []
    channel.log.write()
    result = await append
    assert result.time_tick > channel.first_tick
    assert channel.published() == [result.time_tick]
    assert channel.tail.confirmed_tick == result.time_tick
    assert channel.mvcc.of(B) == (B, result.time_tick, True)
    assert channel.promised == [], "an entry carries its own tick"


async def test_tick_order_is_position_order_and_publication_order() -> None:
    channel = TickChannel()
    appends = [await channel.start(insert()) for _ in range(10)]
    channel.log.write()
    results = await asyncio.gather(*appends)
    assert [result.first_position for result in results] == list(range(1, 11))
    assert channel.published() == sorted(result.time_tick for result in results)


async def test_last_confirmed_is_the_own_position_while_no_transaction_is_open() -> None:
    channel = TickChannel()
    for _ in range(3):
        append = await channel.start(insert())
        channel.log.write()
        result = await append
        assert result.last_confirmed_position == result.first_position


async def test_last_confirmed_is_the_begin_of_the_oldest_open_transaction() -> None:
    channel = TickChannel(oldest_open_begin=lambda: 7)
    append = await channel.start(insert())
    channel.log.write()
    assert (await append).last_confirmed.position == 7


async def test_refused_append_gives_its_tick_back_and_readers_never_hear_of_it() -> None:
    channel = TickChannel()
    channel.log.refusal = StorageFailed("read-only")
    with pytest.raises(StorageFailed):
        await channel.append(insert())
    channel.log.refusal = None
    append = await channel.start(insert())
    channel.log.write()
    result = await append
    assert channel.published() == [result.time_tick]
    assert channel.acks.pending == 0


async def test_failed_write_stops_every_later_tick() -> None:
    channel = TickChannel()
    good = await channel.start(insert())
    bad = await channel.start(insert())
    sync = asyncio.ensure_future(channel.sync_operator.sync())
    await settle()
    channel.log.write(1)
    channel.log.break_down()
    good_tick = (await good).time_tick
    with pytest.raises(Indeterminate):
        await bad
    with pytest.raises(OnShutdown):
        await sync
    assert channel.published() == [good_tick]
    assert channel.tail.confirmed_tick == good_tick < channel.acks._indeterminate_tick


async def test_entry_written_but_not_synced_is_acknowledged_and_not_published() -> None:
    channel = TickChannel(durability="os")
    append = await channel.start(insert())
    channel.log.write()
    result = await append
    assert channel.published() == []
    assert channel.acks.confirmed_tick < result.time_tick
    consistent = asyncio.ensure_future(channel.sync_operator.sync())
    await settle()
    assert not consistent.done(), "a tick above an acknowledged append waits until that is synced"
    channel.log.sync()
    assert await consistent > result.time_tick
    assert channel.published() == [result.time_tick]


async def test_messages_may_be_used_again_once_the_append_returned_though_not_published_yet() -> (
    None
):
    channel = TickChannel(durability="os")
    group = insert(A, txn_id=5)
    append = await channel.start(group)
    channel.log.write()
    tick = (await append).time_tick
    group.messages[0].time_tick = tick + 100
    channel.log.sync()
    await settle()
    assert channel.published() == [tick]


async def test_background_sync_that_fails_after_the_acknowledgement_stops_later_ticks() -> None:
    channel = TickChannel(durability="os")
    append = await channel.start(insert())
    channel.log.write()
    await append
    channel.log.written[0].durable.set_exception(Indeterminate("sync failed"))
    await settle()
    with pytest.raises(OnShutdown):
        await channel.sync_operator.sync()


@pytest.mark.parametrize("outcome", ["durable", "failed"])
async def test_append_cancelled_in_the_queue_is_decided_by_the_log_alone(outcome: str) -> None:
    channel = TickChannel()
    append = await channel.start(insert())
    append.cancel()
    with pytest.raises(asyncio.CancelledError):
        await append
    assert channel.acks.pending == 1
    durable = channel.log.queue[0].durable
    if outcome == "durable":
        durable.set_result(None)
        await settle()
        assert len(channel.published()) == 1
    else:
        durable.set_exception(Indeterminate("gone"))
        await settle()
        assert channel.published() == []
        assert channel.acks._indeterminate_tick


async def test_write_nobody_can_know_the_end_of_counts_as_indeterminate() -> None:
    channel = TickChannel()
    append = await channel.start(insert())
    channel.log.queue[0].durable.cancel()
    channel.log.queue[0].written.cancel()
    with pytest.raises(asyncio.CancelledError):
        await append
    assert channel.acks._indeterminate_tick


# --- packs of several groups ----------------------------------------------------------------------


async def test_groups_of_a_pack_get_ticks_in_order_and_are_published_as_one_entry() -> None:
    channel = TickChannel(oldest_open_begin=lambda: 7)
    before = await channel.start(insert())
    (pack, task) = await start_pack(channel, insert(A), insert(A, B), insert(B))
    channel.log.write()
    await task
    results = [group.result() for group in pack.groups]
    first = (await before).time_tick + 1
    assert [result.time_tick for result in results] == [first, first + 1, first + 2]
    assert [result.first_position for result in results] == [2, 3, 5]
    assert [result.last_confirmed.position for result in results] == [7, 7, 7]
    _, entry = channel.tail.read(1, bytes_max=1 << 30)
    assert (entry.first_tick, entry.time_tick) == (first, first + 2)
    assert channel.tail.confirmed_tick == channel.acks.confirmed_tick == first + 2
    assert [channel.mvcc.of(name).time_tick for name in (A, B)] == [first + 1, first + 2]


async def test_no_tick_of_a_pack_is_confirmed_before_the_entry_is_durable() -> None:
    channel = TickChannel()
    pack, task = await start_pack(channel, insert(), insert())
    consistent = asyncio.ensure_future(channel.sync_operator.sync())
    await settle()
    assert not consistent.done()
    assert (channel.acks.oldest_pending_tick, channel.tail.confirmed_tick) == (
        pack.first_tick,
        channel.first_tick,
    )
    channel.log.write()
    await task
    assert await consistent > pack.time_tick


async def test_groups_that_leave_behind_tick_give_theirs_back_and_the_rest_stays_in_order() -> None:
    channel = TickChannel()
    gone = insert()

    async def end(pack: Pack) -> None:
        pack.leave(gone)
        pack.stamp(pack.time_tick, pack.last_confirmed)
        await log_end(channel.log)(pack)

    pack = Pack([insert(), gone, insert()])
    appending = asyncio.ensure_future(channel.timetick.do_append(pack, end))
    await settle()
    channel.log.write()
    await appending
    ticks = [group.result().time_tick for group in pack.groups]
    assert ticks == [channel.ticks.last - 1, channel.ticks.last]
    assert channel.acks.pending == 0
    assert channel.acks.confirmed_tick == channel.ticks.last


async def test_pack_that_all_groups_leave_confirms_its_ticks_and_publishes_nothing() -> None:
    channel = TickChannel()

    async def end(pack: Pack) -> None:
        for group in list(pack.groups):
            pack.leave(group, StorageFailed("no"))

    await channel.timetick.do_append(Pack([insert(), insert()]), end)
    assert (channel.published(), channel.acks.pending) == ([], 0)
    assert channel.acks.confirmed_tick == channel.ticks.last


async def test_pack_of_unknown_outcome_stops_every_tick_from_its_first_on() -> None:
    channel = TickChannel()
    good = await channel.start(insert())
    pack, task = await start_pack(channel, insert(), insert(), insert())
    channel.log.write(1)
    channel.log.break_down()
    with pytest.raises(Indeterminate):
        await task
    assert channel.acks._indeterminate_tick == pack.first_tick == (await good).time_tick + 1
    assert channel.tail.confirmed_tick == (await good).time_tick


async def start_pack(
    channel: TickChannel, *groups: AppendGroup
) -> tuple[Pack, "asyncio.Future[None]"]:
    pack = Pack(list(groups))
    task = asyncio.ensure_future(channel.append_pack(pack))
    await settle()
    return pack, task


async def test_ack_manager_of_a_term_without_a_first_tick_is_refused() -> None:
    channel = TickChannel()
    with pytest.raises(AssertionError):
        AckManager(channel.ticks, confirmed_tick=0, tail=channel.tail, mvcc=channel.mvcc)
