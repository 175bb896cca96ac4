"""An event loop whose time passes only when nothing is left to do, and whose every choice is drawn
from a seed.

Ready callbacks run in a drawn order, work for a thread runs inline after a drawn delay. A loop with
nothing ready and no timer has found a deadlock; one that turns for ever without getting anywhere
has found a livelock.
"""

import asyncio
import heapq
import itertools
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TypeVar

import anyio
import anyio.lowlevel
from anyio._backends._asyncio import CancelScope

T = TypeVar("T")

TURN_S = 100e-6
"""Virtual cost of one turn: what waits by turning, as cancellation does, must not stop the
clock.
"""
TURNS_MAX = 300_000
HOP_S_MAX = 0.004
"""A hop to a thread and back takes up to this much, now and then a hundred times as much."""
SLOW_HOPS = 0.01
SHUFFLED_TURNS = 0.5


class Stuck(Exception):
    """Everything waits for something that never comes."""


class _Numbers:
    """Numbers of tasks and scopes, from the start again for each loop: their order in a set depends
    on them.
    """

    next = itertools.count()


class _OrderedTask(asyncio.Task[T]):
    """A task whose place in a set is that of its creation, not of its memory."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self.number = next(_Numbers.next)
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return self.number

    @classmethod
    def of(
        cls, loop: asyncio.AbstractEventLoop, work: Coroutine[object, object, T], **options: object
    ) -> "_OrderedTask[T]":
        """Return a task of the loop; a task factory."""
        return cls(work, loop=loop, **options)


class _OrderedFuture(asyncio.Future[T]):
    """A future of which the same is true."""

    def __init__(self, **options: object) -> None:
        self.number = next(_Numbers.next)
        super().__init__(**options)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return self.number


class OrderedScope(CancelScope):
    """A cancel scope of which the same is true: anyio keeps scopes in sets."""

    __slots__ = ("number",)

    def __hash__(self) -> int:
        if not hasattr(self, "number"):
            self.number: int = next(_Numbers.next)
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop; `halt_at_turn` ends `live` there, as a kill would."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self._choose = choose
        self._now_s = 0.0
        self.turns = 0
        self.halt_at_turn = 0
        _Numbers.next = itertools.count()
        self.set_task_factory(_OrderedTask.of)  # type: ignore[arg-type]

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._now_s

    def create_future(self) -> asyncio.Future[object]:
        """Return a future whose place in a set does not depend on memory."""
        return _OrderedFuture(loop=self)

    def hop_s(self) -> float:
        """Return how long the next hop to a thread takes."""
        delay = self._choose.random() * HOP_S_MAX
        return delay * 100 if self._choose.random() < SLOW_HOPS else delay

    def live(self, main: Coroutine[object, object, T]) -> T | None:
        """Run `main` to its end and return its result, or None when it was killed before."""
        task = self.create_task(main)
        task.add_done_callback(lambda _: self.stop())
        with suppress(_Halted):
            self.run_forever()
        return task.result() if task.done() else None

    def bury(self) -> None:
        """Let go of everything without running any of it on."""
        self._ready.clear()
        self._scheduled.clear()
        for task in sorted(asyncio.all_tasks(self), key=hash):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            for _ in range(100):  # each await in a clean-up refuses to end once
                try:
                    coroutine.close()
                    break
                except BaseException:
                    pass
        self._ready.clear()
        self._scheduled.clear()
        self.close()

    @staticmethod
    def silence_the_dead() -> None:
        """Say nothing, in this process, of what dead ones never awaited: it may be collected at any
        time.
        """
        sys.unraisablehook = lambda _: None
        warnings.simplefilter("ignore", RuntimeWarning)

    def run_in_executor(self, *_: object) -> asyncio.Future[object]:  # type: ignore[override]
        """Refuse: a thread would have a will of its own."""
        raise AssertionError("nothing in a simulation runs in a real thread")

    def _run_once(self) -> None:
        self.turns += 1
        if self.halt_at_turn and self.turns >= self.halt_at_turn:
            raise _Halted
        if self.turns > TURNS_MAX:
            raise Stuck(f"{TURNS_MAX} turns, and still going")
        self._now_s += TURN_S
        if not self._ready:
            self._sleep_until_due()
        self._take_due()
        batch = list(self._ready)
        self._ready.clear()
        if len(batch) > 1 and self._choose.random() < SHUFFLED_TURNS:
            self._choose.shuffle(batch)
        for handle in batch:
            if not handle.cancelled():
                handle._run()

    def _sleep_until_due(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():
            self._forget_first()
        if self._scheduled:
            self._now_s = max(self._now_s, self._scheduled[0].when())
        elif not self._stopping:
            waiting = [task.get_name() for task in asyncio.all_tasks(self) if not task.done()]
            raise Stuck(f"nothing will ever happen again, and these wait: {waiting}")

    def _take_due(self) -> None:
        while self._scheduled and (
            self._scheduled[0].cancelled() or self._scheduled[0].when() <= self._now_s
        ):
            timer = self._forget_first()
            if not timer.cancelled():
                self._ready.append(timer)

    def _forget_first(self) -> asyncio.TimerHandle:
        timer = heapq.heappop(self._scheduled)
        timer._scheduled = False  # type: ignore[attr-defined]
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, _: object) -> None:
        pass


class _Halted(BaseException):
    pass


async def run_inline(
    function: Callable[..., T],
    *arguments: object,
    abandon_on_cancel: bool = False,
    cancellable: bool = False,
    limiter: anyio.CapacityLimiter | None = None,
) -> T:
    """Stand in for `anyio.to_thread.run_sync`: the function runs on the loop, at a moment of its
    own.
    """
    await anyio.lowlevel.checkpoint()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    outcome: asyncio.Future[T] = loop.create_future()  # type: ignore[assignment]

    def work() -> None:
        try:
            result = function(*arguments)
        except Exception as error:
            if not outcome.done():
                outcome.set_exception(error)
        else:
            if not outcome.done():
                outcome.set_result(result)

    if limiter is not None:
        await limiter.acquire_on_behalf_of(outcome)
    try:
        loop.call_later(loop.hop_s(), work)
        with anyio.CancelScope(shield=not (abandon_on_cancel or cancellable)):
            await outcome
        return outcome.result()
    finally:
        if limiter is not None:
            limiter.release_on_behalf_of(outcome)
