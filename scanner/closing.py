"""Waits that end when their scanner is closed, and that a cancelled caller can take up again."""

import asyncio
from typing import Any, TypeVar

from wal.errors import OnShutdown

T = TypeVar("T")


class Closing:
    """Set once, by `close`. Lives on one event loop."""

    __slots__ = ("_abandoned", "_closed", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._abandoned: set[asyncio.Future[Any]] = set()

    @property
    def is_set(self) -> bool:
        """Whether `close` was called."""
        return self._closed.done()

    def check_open(self) -> None:
        """Raise `OnShutdown` once closed."""
        if self._closed.done():
            raise OnShutdown(f"scanner {self._name} is closed")

    async def wait(self, task: asyncio.Task[T]) -> None:
        """Return when the task is done. Cancelling the caller leaves the task running. Raises `OnShutdown` once closed."""
        if not task.done():
            self.check_open()
            await asyncio.wait((task, self._closed), return_when=asyncio.FIRST_COMPLETED)
        self.check_open()

    def abandon(self, task: asyncio.Task[T] | None) -> None:
        """Cancel a task whose result nobody wants any more, its failure included."""
        if task is not None:
            self._abandoned.add(task)
            task.add_done_callback(self._forget)
            task.cancel()

    async def close(self) -> None:
        """End all waits, and wait for what was abandoned: a read may be on a thread; idempotent."""
        if not self._closed.done():
            self._closed.set_result(None)
        if self._abandoned:
            await asyncio.wait(self._abandoned)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()
