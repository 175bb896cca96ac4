"""Background tasks have an owner: failures are told, and none outlives it."""

import asyncio
import importlib.util
import threading
from collections.abc import Callable
from contextvars import Context

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
    first = ValueError("first")
    second = ValueError("second")
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


def spawn_outside(spawn: Callable[[], None]) -> None:
    """Call back with a context of its own: `anyio.run` leaves a name in its program's, `uvloop.run`
    does not.
    """
    asyncio.get_running_loop().call_soon(spawn, context=Context())


async def test_work_is_spawned_by_a_callback_outside_of_any_task_also_beside_sniffio() -> None:
    assert importlib.util.find_spec("sniffio"), "with it anyio knows its backend in tasks only"
    supervisor = Supervisor(lambda _: pytest.fail("nothing failed"))
    spawned = list[asyncio.Task[None]]()
    spawn_outside(lambda: spawned.append(supervisor.spawn(wait_for_ever())))
    await settle()
    spawn_outside(lambda: spawned.append(supervisor.spawn(wait_for_ever())))
    await asyncio.sleep(0)
    assert [task.done() for task in spawned] == [False, False]
    await supervisor.stop()  # the second one before its first step
    assert [task.done() for task in spawned] == [True, True]


async def test_stop_waits_for_the_thread_that_a_task_waits_for() -> None:
    began = threading.Event()
    goes_on = threading.Event()
    ended = threading.Event()

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
