"""What was begun ends before the cancellation goes on, whoever cancels."""

import asyncio
import time

import anyio
import pytest

from wal.runtime import elapsed_ms, outlast

pytestmark = pytest.mark.anyio


class Work:
    """Something that ends when it is told to."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.ended = False

    async def run(self) -> str:
        await self.may_end.wait()
        self.ended = True
        return "done"


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_result_and_error_come_through() -> None:
    async def fail() -> None:
        raise KeyError("mine")

    work = Work()
    work.may_end.set()
    assert await outlast(work.run()) == "done"
    with pytest.raises(KeyError, match="mine"):
        await outlast(fail())


async def test_cancelled_task_waits_for_the_end_of_the_work_however_often_it_is_cancelled() -> None:
    work = Work()
    told = 0

    def tell() -> None:
        nonlocal told
        told += 1

    task = asyncio.get_running_loop().create_task(outlast(work.run(), on_cancel=tell))
    await settle()
    for _ in range(3):
        task.cancel()
        await settle()
    assert not task.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (work.ended, told) == (True, 1)


async def test_cancelled_scope_waits_for_the_end_of_the_work() -> None:
    work = Work()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outlast, work.run())
        await settle()
        tasks.cancel_scope.cancel()
        asyncio.get_running_loop().call_soon(work.may_end.set)
    assert work.ended


async def test_error_behind_a_cancellation_is_heard() -> None:
    may_fail = asyncio.Event()

    async def fail() -> None:
        await may_fail.wait()
        raise KeyError

    task = asyncio.get_running_loop().create_task(outlast(fail()))
    await settle()
    task.cancel()
    may_fail.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_time_that_the_machine_sleeps_has_elapsed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Linux alone has one that stops
    goes_on = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    slept_ten_minutes = {time.CLOCK_MONOTONIC: 5 * 10**9} | {goes_on: 605 * 10**9}
    monkeypatch.setattr(time, "clock_gettime_ns", slept_ten_minutes.__getitem__)
    assert elapsed_ms() == 605_000
