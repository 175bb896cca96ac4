"""Owner of a node's background tasks: none outlives the node, and none dies unnoticed.

The first one that fails ends the node: the failure is kept, whoever owns the node is told and closes it, and `explain` names
it to the calls that this ends.
"""

import asyncio
from collections.abc import Callable, Coroutine

import anyio

from wal.errors import OnShutdown, StreamingNodeError


class Supervisor:
    """Starts, watches and ends tasks; lives on one event loop. `on_failure` is called once, with the first failure."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[None], anyio.CancelScope] = {}
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        """What the first task that failed raised."""
        return self._failure

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start `work` as a task. A task may end early; one that raises ends the node, unless it was cancelled."""
        # A task group costs ten times as much per task, wraps errors in groups, and has to be left by the task that entered
        # it. But a scope each: `Task.cancel` would leave a thread behind that works on while the node closes around it.
        scope = anyio.CancelScope()
        task = asyncio.get_running_loop().create_task(_within(scope, work))
        self._tasks[task] = scope
        task.add_done_callback(self._ended)
        return task

    def refusal(self) -> OnShutdown:
        """Return the error of a call that comes after the end; a new one each time, because a raised one grows frames."""
        if self._failure is None:
            return OnShutdown("the node is closed — open it again")
        refusal = OnShutdown(f"the node closed because its background work failed: {self._failure!r}")
        refusal.__cause__ = self._failure
        return refusal

    def explain(self, error: StreamingNodeError) -> None:
        """Raise the refusal that names what failed, if `error` is one that does not and the node has failed.

        A write whose outcome is open keeps its own error: what is true of it counts more than why.
        """
        if isinstance(error, OnShutdown) and self._failure not in (None, error.__cause__):
            raise self.refusal() from self._failure

    async def stop(self) -> None:
        """Cancel every task and return when all have ended; their errors no longer count. Idempotent."""
        while self._tasks:
            for scope in self._tasks.values():
                scope.cancel()
            await asyncio.wait(set(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if task.cancelled():
            return
        failure = task.exception()
        if failure is not None and self._failure is None:
            self._failure = failure
            self._on_failure(failure)


async def _within(scope: anyio.CancelScope, work: Coroutine[None, None, None]) -> None:
    with scope:
        await work
