"""Cancels a call at its n-th wait, in each way a program can: what a caller's bad luck amounts to,
tried out one by one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from enum import Enum

import anyio

HANGS_S = 60
"""No call takes this long; past it something waits for what never comes."""


class Way(Enum):
    """Who cancels (`asyncio.Task.cancel`, or an anyio scope), and whether what is waited for comes
    in the same turn.
    """

    TASK = "task.cancel"
    TASK_LATE = "task.cancel, as the wait ends"
    SCOPE = "scope.cancel"
    SCOPE_LATE = "scope.cancel, as the wait ends"


async def cancel_at(wait: int, call: Callable[[], Awaitable[object]], way: Way) -> bool:
    """Run `call`, cancel it at its `wait`-th wait (from 0), and return whether it came that far."""
    late = way in (Way.TASK_LATE, Way.SCOPE_LATE)
    watched: list[_Watched] = []

    async def by_task() -> None:
        task = asyncio.current_task()
        assert task is not None
        watched.append(_Watched(call(), wait, task.cancel, late=late))
        await watched[0]

    async def by_scope() -> None:
        with anyio.CancelScope() as scope:
            watched.append(_Watched(call(), wait, scope.cancel, late=late))
            await watched[0]

    work: Coroutine[None, None, None] = (
        by_task() if way in (Way.TASK, Way.TASK_LATE) else by_scope()
    )
    task = asyncio.get_running_loop().create_task(work)
    done, _ = await asyncio.wait((task,), timeout=HANGS_S)
    assert done, f"cancelled at wait {wait} by {way.value}, the call hangs: {task.get_stack()}"
    if not task.cancelled():
        task.result()
    return watched[0].came_that_far


class _Watched:
    """A call whose waits are counted; at one of them `cancel` is called, at once or when what it
    waits for is there.
    """

    def __init__(
        self, call: Awaitable[object], wait: int, cancel: Callable[[], object], *, late: bool
    ) -> None:
        self._call = call
        self._wait = wait
        self._cancel = cancel
        self._late = late
        self.came_that_far = False

    def __await__(self) -> Generator[object, None, object]:
        steps = self._call.__await__()
        thrown: BaseException | None = None
        count = 0
        while True:
            try:
                awaited = next(steps) if thrown is None else steps.throw(thrown)
            except StopIteration as end:
                return end.value
            if count == self._wait:
                self.came_that_far = True
                self._arm(awaited)
            count = count + 1
            thrown = None
            try:
                yield awaited
            except BaseException as error:
                thrown = error

    def _arm(self, awaited: object) -> None:
        if self._late and isinstance(awaited, asyncio.Future):
            awaited.add_done_callback(lambda _: self._cancel())
        else:
            asyncio.get_running_loop().call_soon(self._cancel)
