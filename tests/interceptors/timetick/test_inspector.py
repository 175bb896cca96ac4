import asyncio
from collections.abc import Callable

import anyio
import pytest

from interceptors.timetick import TimeTickInspector
from tests.interceptors.timetick.tick_channel import TickChannel
from tests.wal.manual_log import insert
from wal.errors import StorageFull

pytestmark = pytest.mark.anyio


async def passes(condition: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("it never happened")


async def test_idle_log_gets_ticks_by_the_timer_alone() -> None:
    channel = TickChannel()
    inspector = TimeTickInspector(channel.sync_operator, interval_s=0.001)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(inspector.run, channel.append)
        await passes(lambda: channel.acks.confirmed_tick > channel.first_tick + 3)
        tasks.cancel_scope.cancel()
    assert channel.promised[-1] >= channel.tail.confirmed_tick


async def test_tick_that_cannot_be_promised_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    channel = TickChannel()
    inspector = TimeTickInspector(channel.sync_operator, interval_s=0.001)
    channel.promise_refusal = StorageFull("data", 0, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(inspector.run, channel.append)
        await passes(lambda: "tick_not_written" in caplog.text)
        channel.promise_refusal = None
        await passes(lambda: channel.acks.confirmed_tick > channel.first_tick)
        tasks.cancel_scope.cancel()


async def test_inspector_ends_with_a_failed_write() -> None:
    channel = TickChannel()
    append = await channel.start(insert())
    channel.log.break_down()
    with pytest.raises(Exception, match="disk is gone"):
        await append
    with anyio.fail_after(60):
        await TimeTickInspector(channel.sync_operator, interval_s=0.001).run(channel.append)
