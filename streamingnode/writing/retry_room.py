"""Keeps writes that may be repeated close together, so that none falls out of the window that recognises it.

The log remembers the newest results of a producer. A write whose outcome is open may come back as long as fewer writes than
that began after it; further ones wait here until its outcome is known or nobody asks any more. Lives on the event loop.
"""

import asyncio


class RetryRoom:
    """Room for `places` writes from the oldest open one on."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._next = 0
        self._open: dict[int, None] = {}
        self._moved: asyncio.Future[None] | None = None

    @property
    def open(self) -> int:
        """How many writes have an outcome that is not known."""
        return len(self._open)

    async def enter(self) -> int:
        """Take a place, and return its number: 0 for the first, one more each time. Cancelling while it waits takes none."""
        while self._open and self._next - next(iter(self._open)) >= self._places:
            if self._moved is None:
                self._moved = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._moved)
        number = self._next
        self._next += 1
        self._open[number] = None
        return number

    def leave(self, number: int) -> None:
        """Give a place back: the outcome is known, or nobody will ask for it again."""
        del self._open[number]
        if self._moved is not None:
            self._moved.set_result(None)
            self._moved = None
