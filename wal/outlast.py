"""Work that no cancellation cuts short: `outlast` waits for its end before the caller is cancelled, `carry_on` does not.

In: work that must not be left half done, or left to a thread that nobody waits for. Out: its result. anyio's shield does
not hold against `asyncio.Task.cancel`, which is what asyncio's own timeouts and task groups use; so the work gets a task of
its own, which nobody cancels.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


async def outlast(work: Coroutine[Any, Any, T] | asyncio.Task[T], *, on_cancel: Callable[[], None] = lambda: None) -> T:
    """Return what `work` returns, or raise what it raises; any number of callers may wait for one task.

    A cancellation that comes meanwhile calls `on_cancel` and is raised when the work has ended; what that returned or
    raised is then lost, so the work keeps what somebody has to let go of.
    """
    task = work if isinstance(work, asyncio.Task) else asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        on_cancel()
        await _end_of(task)
        raise
    return task.result()


async def carry_on(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns, or raise what it raises; it goes on by itself when the caller is cancelled."""
    task = asyncio.get_running_loop().create_task(work)
    _going_on.add(task)
    task.add_done_callback(_ended)
    await asyncio.wait((task,))
    return task.result()


_going_on: set[asyncio.Task[Any]] = set()
"""The event loop itself holds on to no task."""


def _ended(task: asyncio.Task[Any]) -> None:
    _going_on.discard(task)
    if not task.cancelled():
        task.exception()  # counts as heard: there may be nobody left who listens


async def _end_of(task: asyncio.Task[T]) -> None:
    with anyio.CancelScope(shield=True):  # anyio cancels again and again, asyncio may
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # counts as heard: the cancellation is what the caller gets
