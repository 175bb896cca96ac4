"""A log whose reads fail or wait as a test tells, and the pauses between tries."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from wal.entry import LogEntry
from wal.log import Log


class FaultyLog:
    """A log whose reads fail as told: `failures` go out first, one for each read."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.failures: list[Exception] = []
        self.reads = 0
        self.gate: Callable[[], Awaitable[None]] | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    @property
    def as_log(self) -> Log:
        return cast("Log", self)

    async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        self.reads += 1
        if self.gate is not None:
            await self.gate()
        if self.failures:
            raise self.failures.pop(0)
        return await self._log.read(position, bytes_max=bytes_max)


class Pauses(list[float]):
    """Sleeps that are written down and take no time."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


class Doors:
    """Holds each read until it is let through."""

    def __init__(self) -> None:
        self._shut: list[asyncio.Future[None]] = []
        self._open = 0

    async def __call__(self) -> None:
        if self._open:
            self._open -= 1
            return
        door = asyncio.get_running_loop().create_future()
        self._shut.append(door)
        await door

    def open_next(self) -> None:
        """Let the read that waits through, or the next one."""
        if self._shut:
            self._shut.pop(0).set_result(None)
        else:
            self._open += 1
