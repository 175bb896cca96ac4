"""Appends that must wait for something inside the chain: unwound, waited for outside of everything, and done again.

An inner interceptor never waits itself, because from the tick to the log's queue nothing may suspend. It raises `Redo`
with what to wait for; locks are released and the tick given back on the way out; here the append waits and starts over, with
a new tick. Who releases the wait is whoever owns the awaited future: the shard manager, a transaction session, the ticks.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

from wal.errors import OnShutdown, Overloaded
from wal.log import Append, AppendGroup, AppendResult


class Redo(Exception):
    """An append that can go on only after `until`; never leaves the chain.

    `until` may be a shared future: nobody who waits for it ever cancels it. An exception it ends with is the append's.
    `waiting_for` completes the sentence "the append waited for ..." and is shown to people.
    """

    def __init__(self, until: Awaitable[object], *, waiting_for: str = "a step inside the append path") -> None:
        self.until = until
        self.waiting_for = waiting_for
        super().__init__(waiting_for)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedoLimits:
    """Bounds of one append's redoing: past either of them it fails instead of hanging or spinning."""

    attempts_max: int = 1000
    """Far above what a crowd on one full segment needs; meets only a wait that ends without having helped."""
    wait_s_max: float = 30.0
    """All waits of one append together, by the event loop's clock: longer than a busy disk, shorter than patience."""


class RedoInterceptor:
    """Runs the rest of the chain again for as long as it asks for that, within the limits; made on the event loop."""

    name = "redo"

    def __init__(self, limits: RedoLimits | None = None) -> None:
        self._limits = limits or RedoLimits()
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def do_append(self, group: AppendGroup, append: Append) -> AppendResult:
        """Append, and append again after each `Redo`.

        Raises `Overloaded` at a bound, `OnShutdown` when the WAL closes meanwhile. Cancelling while it waits means
        that the append never happened.
        """
        try:
            return await append(group)
        except Redo as redo:
            first = redo
        return await self._again(group, append, first)

    async def ready(self) -> None:
        """Appends may always pass."""

    async def close(self) -> None:
        """Send every waiting append away with `OnShutdown`; one that is past its wait ends by itself."""
        if not self._stopping.done():
            self._stopping.set_result(None)

    async def _again(self, group: AppendGroup, append: Append, signal: Redo) -> AppendResult:
        deadline = asyncio.get_running_loop().time() + self._limits.wait_s_max
        for _ in range(self._limits.attempts_max - 1):
            assert group.ticket is None, "what has its place in the log is never redone"
            await self._wait(signal, deadline)
            try:
                return await append(group)
            except Redo as redo:
                signal = redo
        raise Overloaded(
            f"the append waited for {signal.waiting_for} and was redone {self._limits.attempts_max} times in vain — "
            "try again later"
        )

    async def _wait(self, signal: Redo, deadline: float) -> None:
        until = asyncio.ensure_future(signal.until)
        try:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            await asyncio.wait((until, self._stopping), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.done():
                raise OnShutdown(f"the log closed while the append waited for {signal.waiting_for} — reopen the node")
            if not until.done():
                raise Overloaded(
                    f"the append waited {self._limits.wait_s_max:g} s for {signal.waiting_for} — try again later"
                )
            if not until.cancelled():  # whoever owned it gave up without a verdict: the next attempt will tell
                until.result()
        finally:
            if until is not signal.until:
                until.cancel()
