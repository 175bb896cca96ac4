import asyncio

import pytest

from interceptors.timetick import PROMISED_AHEAD_MS
from tests.interceptors.timetick.tick_channel import TickChannel
from tests.wal.manual_log import insert, settle
from wal.errors import StorageFailed
from wal.timetick import physical_ms

pytestmark = pytest.mark.anyio


async def test_idle_tick_follows_the_clock_and_is_promised_before_readers_hear_of_it() -> None:
    channel = TickChannel()
    first = await channel.sync_operator.sync()
    channel.clock.now_ms += 200
    second = await channel.sync_operator.sync()
    assert physical_ms(second) - physical_ms(first) == 200
    assert len(channel.promised) == 1
    assert channel.promised[0] >= second
    channel.clock.now_ms += PROMISED_AHEAD_MS
    third = await channel.sync_operator.sync()
    assert len(channel.promised) == 2
    assert channel.promised[1] >= third > channel.promised[0]
    channel.clock.now_ms -= PROMISED_AHEAD_MS
    second = await channel.sync_operator.sync()
    assert len(channel.promised) == 2
    assert channel.tail.confirmed_tick == channel.acks.confirmed_tick == second
    assert channel.log.next_position == 1, "nothing was written"


async def test_tick_that_cannot_be_promised_is_an_error_and_readers_hear_of_it_once_it_can() -> (
    None
):
    channel = TickChannel()
    channel.promise_refusal = StorageFailed("the floor file cannot be written")
    for _ in range(2):
        with pytest.raises(StorageFailed):
            await asyncio.wait_for(channel.sync_operator.sync(), 60)
    assert channel.tail.confirmed_tick == channel.first_tick
    channel.promise_refusal = None
    assert await channel.sync_operator.sync() == channel.tail.confirmed_tick


@pytest.mark.parametrize("promise_ms", [2 * PROMISED_AHEAD_MS, 5 * PROMISED_AHEAD_MS])
async def test_disk_that_takes_longer_than_a_promise_reaches_ahead_does_not_keep_readers_from_ticks(
    promise_ms: int,
) -> None:
    channel = TickChannel()
    channel.promise_ms = promise_ms
    tick = await asyncio.wait_for(channel.sync_operator.sync(), 60)
    assert physical_ms(channel.promised[-1]) - physical_ms(tick) <= promise_ms, (
        "no further ahead than needed"
    )
    assert len(channel.promised) <= 4


async def test_calls_that_come_together_wait_for_one_promise() -> None:
    channel = TickChannel()
    ticks = await asyncio.gather(*(channel.sync_operator.sync() for _ in range(20)))
    assert len(channel.promised) == 1
    assert channel.promised[0] >= max(ticks)


async def test_consistent_tick_is_above_everything_acknowledged_and_wakes_readers() -> None:
    channel = TickChannel()
    append = await channel.start(insert())
    channel.log.write()
    result = await append
    reading = asyncio.ensure_future(channel.tail.changed.wait())
    tick = await channel.sync_operator.sync()
    assert tick > result.time_tick
    await reading
    assert channel.tail.confirmed_tick == tick


async def test_consistent_tick_waits_for_appends_in_flight() -> None:
    channel = TickChannel()
    append = await channel.start(insert())
    consistent = asyncio.ensure_future(channel.sync_operator.sync())
    await settle()
    assert not consistent.done()
    channel.log.write()
    assert await consistent > (await append).time_tick


async def test_cancelled_consistent_tick_leaves_nothing_that_waits() -> None:
    channel = TickChannel()
    append = await channel.start(insert())
    for _ in range(20):
        consistent = asyncio.ensure_future(channel.sync_operator.sync())
        await settle()
        consistent.cancel()
        await settle()
    assert channel.acks.pending == 2
    channel.log.write()
    await append
    assert channel.acks.pending == 0
