"""Event log, clocks, tasks and threads that outlast their caller, and what is open for an event
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
"""On Linux the monotonic clock stands still while the machine sleeps; a laptop that wakes up has
not seen a leap.
"""


def unix_ms() -> int:
    """Return the time of the machine's clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def elapsed_ms() -> int:
    """Return milliseconds from an arbitrary start, those the machine slept included, by a clock
    that nobody sets.
    """
    return time.clock_gettime_ns(_ELAPSED_CLOCK) // 1_000_000


_going_on: set[asyncio.Task[Any]] = set()
"""The event loop itself holds on to no task."""


async def outlast(
    work: Coroutine[Any, Any, T] | asyncio.Task[T], *, on_cancel: Callable[[], None] = lambda: None
) -> T:
    """Return what `work` returns, or raise what it raises; any number of callers may wait for one
    task.

    A cancellation that comes meanwhile calls `on_cancel` and is raised when the work has ended;
    what that returned or raised is then lost, so the work keeps what somebody has to close.
    """
    # In a task of its own: anyio's shield does not hold against `Task.cancel`, which asyncio's
    # timeouts and groups use.
    task = work if isinstance(work, asyncio.Task) else asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        on_cancel()
        # anyio cancels again and again, asyncio may; what is no task has no scopes
        shield = anyio.CancelScope(shield=True) if asyncio.current_task() else nullcontext()
        with shield:
            while not task.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait((task,))
        mark_heard(task)  # the cancellation is what the caller gets
        raise
    return task.result()


async def first_of(*waits: Coroutine[Any, Any, object], timeout_s: float | None = None) -> bool:
    """Return whether one of `waits` ends within `timeout_s`; cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in tasks:
            each.cancel()
    return bool(done)


async def carry_on(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns, or raise what it raises; it goes on by itself when the caller is
    cancelled.
    """
    task = asyncio.get_running_loop().create_task(work)
    _going_on.add(task)
    task.add_done_callback(_going_on.discard)
    task.add_done_callback(mark_heard)  # there may be nobody left who listens
    await asyncio.wait((task,))
    return task.result()


class Acknowledgement(asyncio.Future[None]):
    """A future on whose result a `Running` goes on in the same step, not a turn later.

    A turn of the event loop costs a call of the system, and gives the interpreter lock away.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.waiting: Running | None = None

    def set_result(self, result: None) -> None:
        """Complete it, and have the `Running` that waits for it go on."""
        waiting = self.waiting
        if waiting is None:
            super().set_result(result)
            return
        self.remove_done_callback(waiting.go_on)  # it would be called a turn later
        super().set_result(result)
        waiting.go_on_now()


class Running:
    """A coroutine that begins in its caller's turn and goes on when what it waits for is done.

    It is no task: what it awaits are futures, and no scope or timeout of a task is around it.
    `ended` is called once, with what the coroutine raised, or None. asyncio has tasks that begin
    at once from Python 3.12 on.
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
        # What is done already cannot be cancelled, and the coroutine has not heard of it yet.
        if self._awaited is None or not self._awaited.cancel():
            self._is_cancelled = True

    def go_on(self, _: object = None) -> None:
        """Run the coroutine until it waits, or ends: the maker calls it once, to begin."""
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
        if awaited is None:  # it lets others run
            asyncio.get_running_loop().call_soon(self.go_on)
            return
        # Future's protocol with those who await it: it checks that somebody took it.
        awaited._asyncio_future_blocking = False  # noqa: SLF001
        if isinstance(awaited, Acknowledgement):
            awaited.waiting = self
        awaited.add_done_callback(self.go_on)

    def go_on_now(self) -> None:
        """Go on, in the context that it began in."""
        self._context.run(self.go_on)


def mark_heard(task: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging an exception that nobody asked for."""
    if not task.cancelled():
        task.exception()


class Event(str):
    """An event as the line of text that it is by default, with the `fields` that a formatter may
    write in another way.
    """

    __slots__ = ("fields",)
    fields: "EventDict"


def event_log(name: str) -> "FilteringBoundLogger":
    """Return the logger of a module, which passes `__name__`: structured here, delivered by
    `logging` as configured there.

    An event is a short name and typed fields, never a sentence with values in it. It is one line,
    whatever is in a path; a traceback follows it, indented.
    """
    return cast("FilteringBoundLogger", _EventLog(logging.getLogger(name)))


class _EventLog:
    """Passes on the events that `logging` wants.

    structlog is loaded with the first of them: that takes 0.1 s, and few commands have any.
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
    """Drop an event that nobody wants."""


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
    # `Logger.exception` would print the traceback once more
    return (rendered,), {"exc_info": False}


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        assert self._entered is not None, "entered before it is left"
        return self._entered.__exit__(kind, error, traceback)

    def cancel(self) -> None:
        """Cancel what runs in it, or will."""
        self._is_cancelled = True
        if self._entered is not None:
            self._entered.cancel()


class Supervisor:
    """Owner of background tasks: none outlives it, and `on_failure` is called once, with the first
    failure.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[None], Scope] = {}
        self.failure: BaseException | None = None
        """What the first task that failed raised."""

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start `work` as a task. A task may end early; one that raises ends the node, unless it
        was cancelled.
        """
        # A task group costs ten times as much per task, wraps errors in groups, and has to be left
        # by the task that entered it. But a scope each: `Task.cancel` would leave a thread behind
        # that works on while the node closes around it.
        scope = Scope()

        async def run() -> None:
            with scope:
                await work

        task = asyncio.get_running_loop().create_task(run())
        self._tasks[task] = scope
        task.add_done_callback(self._ended)
        return task

    def refusal(self) -> OnShutdown:
        """Return the error of a call that comes after the end; a new one each time, because a
        raised one grows frames.
        """
        if self.failure is None:
            return OnShutdown("the node is closed — open it again")
        refusal = OnShutdown(
            f"the node closed because its background work failed: {self.failure!r}"
        )
        refusal.__cause__ = self.failure
        return refusal

    def explain(self, error: StreamingNodeError) -> None:
        """Raise the refusal that names what failed, if `error` is one that does not and the node
        has failed.

        A write whose outcome is open keeps its own error: what is true of it counts more than why.
        """
        if isinstance(error, OnShutdown) and self.failure not in (None, error.__cause__):
            raise self.refusal() from self.failure

    async def stop(self) -> None:
        """Cancel every task and return when all have ended; their errors no longer count.
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
# Nothing of that node can be awaited any more, but its lock, threads and sockets are still there.
# Whoever opens something gives a holding with two plain functions, which need no event loop.

_log = event_log(__name__)

THREADS_S_MAX = 60.0
"""How long the threads of an ended loop may take for what they are doing, before it is left as it
is.
"""


class Holding:
    """Something that is open for the running event loop, until `end`.

    `let_go` closes it once the loop has ended; it may block, and runs in any thread. `in_child`
    runs in a forked child, where this is a copy: it must neither block nor change what the parent
    has, and what it raises is ignored.
    """

    def __init__(self, let_go: Callable[[], object], *, in_child: Callable[[], object]) -> None:
        self.loop = asyncio.get_running_loop()
        self.let_go = let_go
        self.in_child = in_child
        self.is_copy = False
        """Whether this process is a fork of the one that opened it."""
        _open[self] = None

    def end(self) -> None:
        """Forget it: it was closed in the ordinary way. Idempotent."""
        _open.pop(self, None)


_open: dict[Holding, None] = {}
"""All there are, oldest first. Only single operations on it, which the interpreter lock makes
atomic.
"""
_letting_go = threading.Lock()
_busy: Counter[asyncio.AbstractEventLoop] = Counter()
"""How many calls each event loop has under way in threads."""
_threads = threading.Condition()
"""Guards `_busy`, and is notified when a call ends."""


async def in_thread(
    call: Callable[[*Ts], T], *arguments: *Ts, limiter: anyio.CapacityLimiter | None = None
) -> T:
    """Return what a blocking call returns, in a worker thread; a cancellation is raised at its end.

    That is so however the cancellation comes: asyncio cancels every task when a loop ends, past
    anyio's shields. A call that has not begun when its loop is closed raises `OnShutdown`, and
    `let_go_of_ended` waits for those that have: none works on beside what comes after it.
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
                with suppress(RuntimeError):  # the loop was closed meanwhile
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
    """Something that one of two threads gets: whoever comes first."""

    def __init__(self) -> None:
        self._left = [True]

    def take(self) -> bool:
        """Return whether this call got it."""
        try:
            self._left.pop()
        except IndexError:
            return False
        return True


def let_go_of_ended() -> None:
    """Close what was left open by event loops that have ended, the newest first. Blocks.

    A loop whose threads do not end keeps what it has.
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
                except Exception as error:  # noqa: BLE001 - the others are let go of all the same
                    _log.warning("not_let_go", error=f"{type(error).__name__}: {error}")


def _threads_end(loop: asyncio.AbstractEventLoop) -> bool:
    with _threads:
        return _threads.wait_for(lambda: not _busy[loop], timeout=THREADS_S_MAX)


def _leave_in_child() -> None:
    global _letting_go, _threads  # noqa: PLW0603 - those of the parent may be held by its threads
    _letting_go = threading.Lock()
    _threads = threading.Condition()
    _busy.clear()
    for each in reversed(list(_open)):
        each.is_copy = True
        with suppress(Exception):
            each.in_child()
    _open.clear()


os.register_at_fork(after_in_child=_leave_in_child)
