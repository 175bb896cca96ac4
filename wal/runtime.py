"""The event log, clocks, tasks and threads that outlive their caller, and the resources of an event
loop.
"""

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from contextvars import copy_context
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

import anyio
import anyio.to_thread

from wal.errors import OnShutdown, StreamingNodeError, escaped

if TYPE_CHECKING:
    from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_ELAPSED_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""On Linux the monotonic clock stops while the machine sleeps. `CLOCK_BOOTTIME` does not, so a
laptop that wakes up causes no leap.
"""


def unix_ms() -> int:
    """Return the system clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def elapsed_ms() -> int:
    """Return milliseconds from an arbitrary start, including sleep of the machine, by a clock that
    cannot be set.
    """
    return time.clock_gettime_ns(_ELAPSED_CLOCK) // 1_000_000


_going_on: set[asyncio.Task[Any]] = set()
"""Keeps strong references: the event loop itself has only weak ones to its tasks."""


async def outlast(
    work: Coroutine[Any, Any, T] | asyncio.Task[T], *, on_cancel: Callable[[], None] = lambda: None
) -> T:
    """Return the result of `work`, or raise its error; any number of callers may wait for one task.

    A cancellation calls `on_cancel` and is raised once the work has ended. The result or error of
    the work is then lost, so the work itself must keep anything that has to be closed.
    """
    # Run it in a separate task: anyio's shield does not protect against `Task.cancel`, which
    # asyncio's timeouts and groups use.
    task = work if isinstance(work, asyncio.Task) else asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        on_cancel()
        # anyio cancels repeatedly, and asyncio may; code outside a task has no scopes
        shield = anyio.CancelScope(shield=True) if asyncio.current_task() else nullcontext()
        with shield:
            while not task.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait((task,))
        mark_heard(task)  # the caller gets the cancellation instead
        raise
    return task.result()


async def first_of(*waits: Coroutine[Any, Any, object], timeout_s: float | None = None) -> bool:
    """Return whether one of `waits` ends within `timeout_s`; cancels the other ones."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in tasks:
            each.cancel()
    return bool(done)


async def carry_on(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or raise its error; `work` goes on in the background when the
    caller is cancelled.
    """
    task = asyncio.get_running_loop().create_task(work)
    _going_on.add(task)
    task.add_done_callback(_going_on.discard)
    task.add_done_callback(mark_heard)  # no caller may be left
    await asyncio.wait((task,))
    return task.result()


class Acknowledgement(asyncio.Future[None]):
    """A future that resumes a waiting `Running` in the step that completes it, not a turn later.

    A turn of the event loop costs a system call and releases the interpreter lock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.waiting: Running | None = None

    def set_result(self, result: None) -> None:
        """Complete the future and resume the `Running` that waits for it."""
        waiting = self.waiting
        if waiting is None:
            super().set_result(result)
            return
        self.remove_done_callback(waiting.go_on)  # it would run a turn later
        super().set_result(result)
        waiting.go_on_now()


class Running:
    """A coroutine that starts in its caller's turn and resumes when the future it waits for is
    done.

    It is not a task: it may await only futures, and scopes and timeouts of tasks do not apply.
    `ended` is called once, with the error of the coroutine or None. From Python 3.12 on, asyncio
    has tasks that start at once.
    """

    __slots__ = ("_awaited", "_context", "_coroutine", "_ended", "_is_cancelled")

    def __init__(
        self,
        coroutine: Coroutine[Any, None, None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self._coroutine = coroutine
        self._ended = ended
        self._context = copy_context()
        self._awaited: asyncio.Future[Any] | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """Raise `CancelledError` where the coroutine waits, in a later turn of the event loop."""
        # A completed future cannot be cancelled. The coroutine has not resumed yet, so cancel it
        # then.
        if self._awaited is None or not self._awaited.cancel():
            self._is_cancelled = True

    def go_on(self, _: object = None) -> None:
        """Run the coroutine until it waits or ends. Its creator calls this once to start it."""
        try:
            if self._is_cancelled:
                self._is_cancelled = False
                awaited = self._coroutine.throw(asyncio.CancelledError())
            else:
                awaited = self._coroutine.send(None)
        except StopIteration:
            self._ended(None)
            return
        except BaseException as error:
            self._ended(error)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            return
        self._awaited = awaited
        if awaited is None:  # it yields to other callbacks
            asyncio.get_running_loop().call_soon(self.go_on)
            return
        # The protocol of asyncio's futures: the awaiting side must reset this flag.
        awaited._asyncio_future_blocking = False  # noqa: SLF001
        if isinstance(awaited, Acknowledgement):
            awaited.waiting = self
        awaited.add_done_callback(self.go_on)

    def go_on_now(self) -> None:
        """Resume in the context that it started in."""
        self._context.run(self.go_on)


def mark_heard(task: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


class Event(str):
    """An event as a line of text, with its `fields` for formatters that render it differently."""

    __slots__ = ("fields",)
    fields: "EventDict"


def event_log(name: str) -> "FilteringBoundLogger":
    """Return the logger of a module, which passes `__name__`. Events are structured; `logging`
    delivers them as configured.

    An event is a short name and typed fields, never a sentence with values in it. It is always one
    line, even when a field has line breaks; an indented traceback may follow.
    """
    return cast("FilteringBoundLogger", _EventLog(logging.getLogger(name)))


class _EventLog:
    """Passes on the events whose level `logging` has enabled.

    structlog is loaded with the first event: that takes 0.1 s, and few commands have any events.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __getattr__(self, method: str) -> Callable[..., object]:
        level = logging.ERROR if method == "exception" else getattr(logging, method.upper())
        if not self._logger.isEnabledFor(level):
            return _pass_over
        passed: Callable[..., object] = getattr(_structured(self._logger), method)
        return passed


def _pass_over(_event: str, **_fields: object) -> None:
    """Drop an event of a disabled level."""


@cache
def _structured(logger: logging.Logger) -> "FilteringBoundLogger":
    import structlog

    structured: FilteringBoundLogger = structlog.wrap_logger(
        logger,
        processors=[structlog.processors.format_exc_info, _render],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    return structured


def _render(
    logger: "WrappedLogger", method: str, event: "EventDict"
) -> tuple[tuple[Event], dict[str, bool]]:
    from structlog.processors import KeyValueRenderer

    key_values = KeyValueRenderer(key_order=["event"], drop_missing=True, repr_native_str=False)
    fields = dict(event)
    trace = str(event.pop("exception", ""))
    line = escaped(key_values(logger, method, event))
    rendered = Event("\n    ".join([line, *map(escaped, trace.splitlines())]))
    rendered.fields = fields
    # otherwise `Logger.exception` would print the traceback again
    return (rendered,), {"exc_info": False}


class Scope:
    """A cancel scope that callbacks of the event loop may also create and cancel; a task enters it.

    The anyio scope is created only on entering. Outside a task, when the package sniffio is
    installed, anyio cannot detect the async library.
    """

    def __init__(self) -> None:
        self._entered: anyio.CancelScope | None = None
        self._is_cancelled = False

    def __enter__(self) -> None:
        self._entered = anyio.CancelScope()
        if self._is_cancelled:
            self._entered.cancel()
        self._entered.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        assert self._entered is not None, "a scope is entered before it exits"
        return self._entered.__exit__(kind, error, traceback)

    def cancel(self) -> None:
        """Cancel the work that runs in the scope, or will run in it."""
        self._is_cancelled = True
        if self._entered is not None:
            self._entered.cancel()


class Supervisor:
    """Owns background tasks: none outlives it. `on_failure` is called once, with the first
    failure.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[None], Scope] = {}
        self.failure: BaseException | None = None
        """The error of the first failed task."""

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start `work` as a task. A task may end early; a task that raises, except by cancellation,
        ends the node.
        """
        # Not a task group: it costs ten times as much per task, wraps errors in groups, and must be
        # left by the task that entered it. Each task has a scope, because `Task.cancel` would leave
        # a thread running while the node closes.
        scope = Scope()

        async def run() -> None:
            with scope:
                await work

        task = asyncio.get_running_loop().create_task(run())
        self._tasks[task] = scope
        task.add_done_callback(self._ended)
        return task

    def refusal(self) -> OnShutdown:
        """Return the error for a call after the end; a new object each time, because each raise
        adds frames to its traceback.
        """
        if self.failure is None:
            return OnShutdown("the node is closed — open it again")
        refusal = OnShutdown(
            f"the node closed because its background work failed: {self.failure!r}"
        )
        refusal.__cause__ = self.failure
        return refusal

    def explain(self, error: StreamingNodeError) -> None:
        """If the node has failed and `error` is a refusal without the cause, raise the refusal that
        names it.

        A write with an unknown outcome keeps its own error: its outcome matters more than the
        cause.
        """
        if isinstance(error, OnShutdown) and self.failure not in (None, error.__cause__):
            raise self.refusal() from self.failure

    async def stop(self) -> None:
        """Cancel every task and return when all have ended; their errors are ignored from now on.
        Idempotent.
        """
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


# --- what is open for an event loop ---------------------------------------------------------------
#
# A program may end its event loop and leave a node open, as notebooks and test suites do, or fork.
# Nothing of that node can be awaited any more, but its lock, threads and sockets still exist. So
# each resource is registered as a `Holding` with two plain functions, which need no event loop.

_log = event_log(__name__)

THREADS_S_MAX = 60.0
"""How long the threads of an ended loop may take to finish; after that the loop's resources are
left open.
"""


class Holding:
    """A resource that is open for the running event loop, until `end`.

    `let_go` closes the resource after the loop has ended; it may block and runs in any thread.
    `in_child` runs in a forked child on a copy of the resource. It must not block or change the
    parent's resource; its errors are ignored.
    """

    def __init__(self, let_go: Callable[[], object], *, in_child: Callable[[], object]) -> None:
        self.loop = asyncio.get_running_loop()
        self.let_go = let_go
        self.in_child = in_child
        self.is_copy = False
        """Whether this process is a fork of the process that opened the resource."""
        _open[self] = None

    def end(self) -> None:
        """Forget the resource: it was closed normally. Idempotent."""
        _open.pop(self, None)


_open: dict[Holding, None] = {}
"""All holdings, oldest first. Use only single operations on it, which the interpreter lock makes
atomic.
"""
_letting_go = threading.Lock()
_busy: Counter[asyncio.AbstractEventLoop] = Counter()
"""The number of running calls in threads, by event loop."""
_threads = threading.Condition()
"""Guards `_busy`, and is notified when a call ends."""


async def in_thread(
    call: Callable[[*Ts], T], *arguments: *Ts, limiter: anyio.CapacityLimiter | None = None
) -> T:
    """Run a blocking call in a worker thread and return its result. A cancellation is raised once
    the call has ended.

    This holds for every kind of cancellation, even when asyncio ignores anyio's shields and cancels
    every task at the end of a loop. A call that has not begun when its loop is closed raises
    `OnShutdown`. `let_go_of_ended` waits for calls that have begun, so no call runs while later
    code uses the same resources.
    """
    loop = asyncio.get_running_loop()
    begins = _Token()
    ends = _Token()
    ended = asyncio.Event()

    def run() -> T:
        with _threads:
            if loop.is_closed() or not begins.take():
                raise OnShutdown("the call was cancelled, or its event loop has ended")
            _busy[loop] += 1
        try:
            return call(*arguments)
        finally:
            with _threads:
                _busy[loop] -= 1
                if not _busy[loop]:
                    del _busy[loop]
                _threads.notify_all()
            if not ends.take():
                with suppress(RuntimeError):  # the loop may be closed by now
                    loop.call_soon_threadsafe(ended.set)

    try:
        return await anyio.to_thread.run_sync(run, limiter=limiter)
    except asyncio.CancelledError:
        if not begins.take() and ends.take():
            with anyio.CancelScope(shield=True):
                while not ended.is_set():
                    with suppress(asyncio.CancelledError):
                        await ended.wait()
        raise


class _Token:
    """A token that the first of two threads gets."""

    def __init__(self) -> None:
        self._left = [True]

    def take(self) -> bool:
        """Return whether this call got the token."""
        try:
            self._left.pop()
        except IndexError:
            return False
        return True


def let_go_of_ended() -> None:
    """Close the resources that ended event loops have left open, newest first. Blocks.

    The resources of a loop whose threads do not end stay open.
    """
    if not _open:
        return
    with _letting_go:
        ended = {each.loop for each in list(_open) if each.loop.is_closed()}
        for loop in ended:
            if not _threads_end(loop):
                _log.error("threads_of_ended_loop", busy=_busy[loop])
                continue
            for each in [each for each in reversed(list(_open)) if each.loop is loop]:
                each.end()
                try:
                    each.let_go()
                except Exception as error:  # noqa: BLE001 - the others must still be closed
                    _log.warning("not_let_go", error=f"{type(error).__name__}: {error}")


def _threads_end(loop: asyncio.AbstractEventLoop) -> bool:
    with _threads:
        return _threads.wait_for(lambda: not _busy[loop], timeout=THREADS_S_MAX)


def _leave_in_child() -> None:
    global _letting_go, _threads  # noqa: PLW0603 - threads of the parent may hold the old ones
    _letting_go = threading.Lock()
    _threads = threading.Condition()
    _busy.clear()
    for each in reversed(list(_open)):
        each.is_copy = True
        with suppress(Exception):
            each.in_child()
    _open.clear()


os.register_at_fork(after_in_child=_leave_in_child)
