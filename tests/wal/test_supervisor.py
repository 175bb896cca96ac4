"""Background tasks have an owner: failures are told, and none outlives it."""

import asyncio
import threading

import pytest
from anyio import to_thread

from wal.runtime import Supervisor

pytestmark = pytest.mark.anyio


async def fail(error: Exception) -> None:
    raise error


async def wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_failure_is_told_once_and_kept() -> None:
    told: list[BaseException] = []
    supervisor = Supervisor(told.append)
    first, second = ValueError("first"), ValueError("second")
    supervisor.spawn(fail(first))
    supervisor.spawn(fail(second))
    await settle()
    assert told == [first]
    assert supervisor.failure is first


async def test_task_that_ends_by_itself_is_no_failure() -> None:
    supervisor = Supervisor(lambda _: pytest.fail("nothing failed"))
    task = supervisor.spawn(asyncio.sleep(0))
    await settle()
    assert task.done()
    assert supervisor.failure is None


async def test_stop_ends_every_task_and_may_be_repeated() -> None:
    supervisor = Supervisor(lambda _: pytest.fail("a cancelled task is no failure"))
    tasks = [supervisor.spawn(wait_for_ever()) for _ in range(3)]
    await supervisor.stop()
    await supervisor.stop()
    assert all(task.done() for task in tasks)


async def test_stop_waits_for_the_thread_that_a_task_waits_for() -> None:
    began, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def write_files() -> None:
        began.set()
        goes_on.wait(60)
        ended.set()

    async def flush() -> None:
        await to_thread.run_sync(write_files)

    supervisor = Supervisor(lambda _: pytest.fail("nothing failed"))
    supervisor.spawn(flush())
    await to_thread.run_sync(began.wait)
    asyncio.get_running_loop().call_later(0.02, goes_on.set)
    await supervisor.stop()
    assert ended.is_set()
