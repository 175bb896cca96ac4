"""What was begun ends before the cancellation goes on, whoever cancels."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
import pytest

from wal.runtime import Acknowledgement, Running, elapsed_ms, outlast

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


class Begun:
    """A coroutine that runs by itself, and what it came to."""

    def __init__(self, work: Callable[[], Coroutine[Any, None, None]]) -> None:
        self.ends: list[BaseException | None] = []
        self.running = Running(work(), self.ends.append)
        self.running.go_on()


async def test_running_begins_in_its_callers_turn_and_goes_on_when_what_it_awaits_is_done() -> None:
    until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    steps: list[str] = []

    async def work() -> None:
        steps.append("begun")
        await until
        steps.append("went on")
        await asyncio.sleep(0)
        steps.append("ended")

    begun = Begun(work)
    assert (steps, begun.ends) == (["begun"], [])
    until.set_result(None)
    await settle()
    assert (steps, begun.ends) == (["begun", "went on", "ended"], [None])


async def test_running_goes_on_in_the_step_of_an_acknowledgement_and_in_its_own_context() -> None:
    of_caller: ContextVar[str] = ContextVar("of_caller", default="none")
    until = Acknowledgement(asyncio.get_running_loop())
    seen: list[str] = []

    async def work() -> None:
        await until
        seen.append(of_caller.get())

    of_caller.set("mine")
    begun = Begun(work)
    of_caller.set("another")
    until.set_result(None)
    assert (seen, begun.ends) == (["mine"], [None])
    await settle()
    assert begun.ends == [None], "once"


async def test_running_hears_of_an_acknowledgement_that_fails() -> None:
    until = Acknowledgement(asyncio.get_running_loop())
    error = KeyError("mine")

    async def work() -> None:
        await until

    begun = Begun(work)
    until.set_exception(error)
    await settle()
    assert begun.ends == [error]


async def test_running_tells_what_it_raised_at_once_or_later() -> None:
    until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    error = KeyError("mine")

    async def fail(waits: bool) -> None:
        if waits:
            await until
        raise error

    assert Begun(partial(fail, False)).ends == [error]
    later = Begun(partial(fail, True))
    assert later.ends == []
    until.set_result(None)
    await settle()
    assert later.ends == [error]


@pytest.mark.parametrize("is_done", [False, True])
async def test_running_is_cancelled_where_it_waits_even_for_what_is_done_by_now(
    is_done: bool,
) -> None:
    until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    caught: list[BaseException] = []

    async def work() -> None:
        try:
            await until
        except asyncio.CancelledError as error:
            caught.append(error)
            raise

    begun = Begun(work)
    if is_done:
        until.set_result(None)
    begun.running.cancel()
    assert begun.ends == [], "not in the turn of who cancels"
    await settle()
    assert begun.ends == caught
    assert len(caught) == 1


async def test_running_that_waits_for_work_to_end_does_so_although_it_is_cancelled() -> None:
    work = Work()

    async def wait() -> None:
        await outlast(work.run())

    begun = Begun(wait)
    await settle()
    begun.running.cancel()
    await settle()
    assert begun.ends == []
    work.may_end.set()
    await settle()
    assert work.ended
    assert isinstance(begun.ends[0], asyncio.CancelledError)
