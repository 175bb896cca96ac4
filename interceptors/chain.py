"""The append path as one callable: interceptors around the log end, wired once and not again for each append.

In comes a group with its term stamped, out goes the result of the log end, passed back through every interceptor. Nothing
here may suspend or fail by itself: what an append costs and risks is in the interceptors (order: ADR 0003).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

from wal.log import Append, AppendGroup, AppendObserver, AppendResult, Interceptor

Clock = Callable[[], float]
"""Seconds from an arbitrary start; for differences only."""


@dataclass(frozen=True, slots=True)
class Chain:
    """An append path and the interceptors that make it, outermost first."""

    append: Append
    interceptors: tuple[Interceptor, ...]

    @classmethod
    def of(cls, interceptors: Sequence[Interceptor], end: Append, *, observer: AppendObserver | None = None) -> Self:
        """Return the chain of `interceptors` (outermost first) around `end`; `observer` costs only when it is given."""
        return cls(build(interceptors, end, observer=observer), tuple(interceptors))

    async def ready(self) -> None:
        """Return once every interceptor lets appends pass; they are waited for outermost first."""
        for interceptor in self.interceptors:
            await interceptor.ready()

    async def close(self) -> None:
        """Close every interceptor, outermost first, even after one raised; idempotent when they are.

        What waits outside is told before what it waits for.
        """
        async with AsyncExitStack() as steps:
            for interceptor in reversed(self.interceptors):
                steps.push_async_callback(interceptor.close)


def build(
    interceptors: Sequence[Interceptor],
    end: Append,
    *,
    observer: AppendObserver | None = None,
    clock: Clock = time.perf_counter,
) -> Append:
    """Return the one callable that runs `interceptors`, outermost first, around `end`."""
    append = end
    for interceptor in reversed(interceptors):
        append = _around(interceptor, append) if observer is None else _timed(interceptor, append, observer, clock)
    return append


def _around(interceptor: Interceptor, append: Append) -> Append:
    do_append = interceptor.do_append
    return lambda group: do_append(group, append)


def _timed(interceptor: Interceptor, append: Append, observer: AppendObserver, clock: Clock) -> Append:
    name, do_append, timed = interceptor.name, interceptor.do_append, observer.interceptor_timed

    async def measured(group: AppendGroup) -> AppendResult:
        inner = _Stopwatch(append, clock)
        started = clock()
        try:
            return await do_append(group, inner)
        finally:
            ended = clock()
            if inner.called_at is None:
                timed(name, ended - started, 0.0, failed_before=True)
            else:
                timed(name, inner.called_at - started, ended - inner.returned_at, failed_before=False)

    return measured


class _Stopwatch:
    """An append that notes when it was first called and when it last returned (redo calls it more than once)."""

    __slots__ = ("_append", "_clock", "called_at", "returned_at")

    def __init__(self, append: Append, clock: Clock) -> None:
        self._append = append
        self._clock = clock
        self.called_at: float | None = None
        self.returned_at = 0.0

    async def __call__(self, group: AppendGroup) -> AppendResult:
        if self.called_at is None:
            self.called_at = self._clock()
        try:
            return await self._append(group)
        finally:
            self.returned_at = self._clock()
