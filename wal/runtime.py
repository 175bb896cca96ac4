"""Event log, clocks, and tasks that outlast their caller."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from wal.errors import escaped

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
        _mark_heard(task)  # the cancellation is what the caller gets
        raise
    return task.result()


async def carry_on(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns, or raise what it raises; it goes on by itself when the caller is cancelled."""
    task = asyncio.get_running_loop().create_task(work)
    _going_on.add(task)
    task.add_done_callback(_going_on.discard)
    task.add_done_callback(_mark_heard)  # there may be nobody left who listens
    await asyncio.wait((task,))
    return task.result()


def _mark_heard(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from logging an exception that nobody asked for."""
    if not task.cancelled():
        task.exception()


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


def _render(logger: WrappedLogger, method: str, event: EventDict) -> str:
    trace = str(event.pop("exception", ""))
    line = escaped(_key_values(logger, method, event))
    return "\n    ".join([line, *map(escaped, trace.splitlines())])
