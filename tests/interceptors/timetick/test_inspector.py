import asyncio
import logging
from collections.abc import Callable

import anyio
import pytest

from interceptors.timetick import TimeTickInspector
from tests.interceptors.timetick.tick_channel import TickChannel
from tests.wal.manual_log import insert, settle
from wal.errors import OnShutdown, StorageFull

pytestmark = pytest.mark.anyio

NEVER_S = 1e6


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
        with anyio.fail_after(10):
            await channel.acks.confirmed(channel.first_tick + 3)
        tasks.cancel_scope.cancel()
    assert channel.promised[-1] >= channel.tail.confirmed_tick


async def test_trigger_syncs_at_once() -> None:
    channel = TickChannel()
    inspector = TimeTickInspector(channel.sync_operator, interval_s=NEVER_S)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(inspector.run, channel.append)
        await settle()
        assert inspector.syncs == 0
        inspector.trigger()
        with anyio.fail_after(10):
            await channel.acks.confirmed(channel.first_tick + 1)
        tasks.cancel_scope.cancel()


async def test_trigger_during_a_sync_runs_exactly_one_more() -> None:
    channel = TickChannel()
    inspector = TimeTickInspector(channel.sync_operator, interval_s=NEVER_S)
    append = await channel.start(insert())  # holds the first sync up
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(inspector.run, channel.append)
        inspector.trigger()
        await settle()
        assert inspector.syncs == 0
        for _ in range(5):
            inspector.trigger()
        channel.log.write()
        await append
        await settle()
        assert inspector.syncs == 2
        tasks.cancel_scope.cancel()


async def test_persisted_tick_asked_for_during_a_sync_is_not_lost() -> None:
    channel = TickChannel()
    inspector = TimeTickInspector(channel.sync_operator, interval_s=NEVER_S)
    append = await channel.start(insert())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(inspector.run, channel.append)
        inspector.trigger()
        await settle()
        inspector.trigger_persisted()
        channel.log.write()
        await append
        await settle()
        channel.log.write()
        await settle()
        assert len(channel.published()) == 2
        tasks.cancel_scope.cancel()


async def test_persisted_tick_refused_by_a_full_disk_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    channel = TickChannel()
    inspector = TimeTickInspector(channel.sync_operator, interval_s=0.001)
    channel.log.refusal = StorageFull("data", 0, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(inspector.run, channel.append)
        inspector.trigger_persisted()
        await passes(lambda: bool(caplog.records))
        channel.log.refusal = None
        await passes(lambda: bool(channel.log.queue))
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("end", ["failed write", "closed"])
async def test_inspector_ends_with_the_log(end: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    channel = TickChannel()
    inspector = TimeTickInspector(channel.sync_operator, interval_s=NEVER_S)
    append = await channel.start(insert())
    if end == "failed write":
        channel.log.break_down()
        with pytest.raises(Exception, match="disk is gone"):
            await append
        inspector.trigger()
    else:
        channel.log.write()
        await append
        channel.log.refusal = OnShutdown("closed")
        inspector.trigger_persisted()
    with anyio.fail_after(10):
        await inspector.run(channel.append)
    assert "idle_ticks_ended" in caplog.text
