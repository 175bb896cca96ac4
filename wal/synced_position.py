"""The last synced position of a log, and those who wait for it to move on.

In: the store's completed writes. Out: wake-ups of readers, by futures and without polling.
"""

import asyncio


class SyncedPosition:
    """A position that only ascends; lives on the event loop."""

    __slots__ = ("_error", "_waiters", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self._waiters: dict[asyncio.Future[None], int] = {}
        self._error: Exception | None = None

    def advance(self, position: int) -> None:
        """Move on to `position` and wake who waited for something up to it."""
        assert position >= self.value, "what is synced stays synced"
        self.value = position
        for waiter, beyond in list(self._waiters.items()):
            if beyond < position and not waiter.done():
                waiter.set_result(None)

    async def wait_beyond(self, position: int) -> None:
        """Return once a message after `position` is synced; raises what `end` was given."""
        if self.value > position:
            return
        if self._error is not None:
            raise self._error
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = position
        try:
            await waiter
        finally:
            del self._waiters[waiter]

    def end(self, error: Exception) -> None:
        """End every wait, now and later, with `error`."""
        self._error = error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)
