"""Event log, clocks, tasks that outlast their caller, listening sockets, and the owner of background tasks."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from wal.errors import OnShutdown, StreamingNodeError, escaped

T = TypeVar("T")

_ELAPSED_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""On Linux the monotonic clock stands still while the machine sleeps; a laptop that wakes up has not seen a leap."""


def unix_ms() -> int:
    """Return the time of the machine's clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def elapsed_ms() -> int:
    """Return milliseconds from an arbitrary start, those the machine slept included, by a clock that nobody sets."""
    return time.clock_gettime_ns(_ELAPSED_CLOCK) // 1_000_000


_going_on: set[asyncio.Task[Any]] = set()
"""The event loop itself holds on to no task."""


async def outlast(work: Coroutine[Any, Any, T] | asyncio.Task[T], *, on_cancel: Callable[[], None] = lambda: None) -> T:
    """Return what `work` returns, or raise what it raises; any number of callers may wait for one task.

    A cancellation that comes meanwhile calls `on_cancel` and is raised when the work has ended; what that returned or
    raised is then lost, so the work keeps what somebody has to close.
    """
    # In a task of its own: anyio's shield does not hold against `Task.cancel`, which asyncio's timeouts and groups use.
    task = work if isinstance(work, asyncio.Task) else asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        on_cancel()
        with anyio.CancelScope(shield=True):  # anyio cancels again and again, asyncio may
            while not task.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait((task,))
        mark_heard(task)  # the cancellation is what the caller gets
        raise
    return task.result()


async def carry_on(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns, or raise what it raises; it goes on by itself when the caller is cancelled."""
    task = asyncio.get_running_loop().create_task(work)
    _going_on.add(task)
    task.add_done_callback(_going_on.discard)
    task.add_done_callback(mark_heard)  # there may be nobody left who listens
    await asyncio.wait((task,))
    return task.result()


def mark_heard(task: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging an exception that nobody asked for."""
    if not task.cancelled():
        task.exception()


BACKLOG = 1_024
"""Connections that the system keeps until they are accepted."""


async def accept_one_a_turn(listening: asyncio.AbstractServer) -> None:
    """Start a server that was made with a backlog of 1, and have the system keep `BACKLOG` connections for it.

    asyncio takes the backlog for how often it tries to accept in a row, and without descriptors each try is a traceback. Who
    makes a server to be started here has it, and can close it, however this ends.
    """
    await listening.start_serving()
    for each in listening.sockets:  # type: ignore[attr-defined]  # of its own class, which is uvloop's there
        with socket.socket(fileno=os.dup(each.fileno())) as same:
            same.listen(BACKLOG)


class Event(str):
    """An event as the line of text that it is by default, with the `fields` that a formatter may write in another way."""

    __slots__ = ("fields",)
    fields: EventDict


_key_values = structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True, repr_native_str=False)


def event_log(name: str) -> FilteringBoundLogger:
    """Return the logger of a module, which passes `__name__`: structured here, delivered by `logging` as configured there.

    An event is a short name and typed fields, never a sentence with values in it. It is one line, whatever is in a path; a
    traceback follows it, indented.
    """
    logger: FilteringBoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, structlog.processors.format_exc_info, _render],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    return logger


def _render(logger: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[Event], dict[str, bool]]:
    fields = dict(event)
    trace = str(event.pop("exception", ""))
    line = escaped(_key_values(logger, method, event))
    rendered = Event("\n    ".join([line, *map(escaped, trace.splitlines())]))
    rendered.fields = fields
    return (rendered,), {"exc_info": False}  # `Logger.exception` would print the traceback once more


class Scope:
    """A cancel scope that callbacks of the event loop may make and cancel, too; entered by a task.

    anyio's own is made when it is entered: outside of a task, where the package sniffio is
    installed, anyio cannot detect which library runs.
    """

    def __init__(self) -> None:
        self._entered: anyio.CancelScope | None = None
        self._is_cancelled = False

    def __enter__(self) -> None:
        self._entered = anyio.CancelScope()
        if self._is_cancelled:
            self._entered.cancel()
        self._entered.__enter__()

    def __exit__(self, *raised: object) -> bool:
        assert self._entered is not None, "entered before it is left"
        return self._entered.__exit__(*raised)

    def cancel(self) -> None:
        """Cancel what runs in it, or will."""
        self._is_cancelled = True
        if self._entered is not None:
            self._entered.cancel()


class Supervisor:
    """Owner of background tasks: none outlives it, and `on_failure` is called once, with the first failure."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[None], Scope] = {}
        self.failure: BaseException | None = None
        """What the first task that failed raised."""

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start `work` as a task. A task may end early; one that raises ends the node, unless it was cancelled."""
        # A task group costs ten times as much per task, wraps errors in groups, and has to be left by the task that entered
        # it. But a scope each: `Task.cancel` would leave a thread behind that works on while the node closes around it.
        scope = Scope()

        async def run() -> None:
            with scope:
                await work

        task = asyncio.get_running_loop().create_task(run())
        self._tasks[task] = scope
        task.add_done_callback(self._ended)
        return task

    def refusal(self) -> OnShutdown:
        """Return the error of a call that comes after the end; a new one each time, because a raised one grows frames."""
        if self.failure is None:
            return OnShutdown("the node is closed — open it again")
        refusal = OnShutdown(f"the node closed because its background work failed: {self.failure!r}")
        refusal.__cause__ = self.failure
        return refusal

    def explain(self, error: StreamingNodeError) -> None:
        """Raise the refusal that names what failed, if `error` is one that does not and the node has failed.

        A write whose outcome is open keeps its own error: what is true of it counts more than why.
        """
        if isinstance(error, OnShutdown) and self.failure not in (None, error.__cause__):
            raise self.refusal() from self.failure

    async def stop(self) -> None:
        """Cancel every task and return when all have ended; their errors no longer count. Idempotent."""
        while self._tasks:
            for scope in self._tasks.values():
                scope.cancel()
            await asyncio.wait(set(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        failure = None if task.cancelled() else task.exception()
        if failure is not None and self.failure is None:
            self.failure = failure
            self._on_failure(failure)
