"""Room in a log's queue: who may append next when writes come faster than the disk takes them.

In: sizes before an append, what is queued, what has been written. Out: a wait, first come first served. A store asks it
in `admit`, and tells it of each append and each completed write. The bound is soft by what is admitted but not yet
appended: admission reserves nothing, so an append that is given up owes nothing.
"""

import asyncio
from collections import deque
from typing import NamedTuple


class _Place(NamedTuple):
    """A place in the queue: what waits, and whether it makes room on the disk, so that a full one does not end its wait."""

    size_bytes: int
    makes_room: bool
    turn: asyncio.Future[None]


class Admission:
    """A gate that holds appends back while `queued_bytes` and the next size exceed `bytes_max`.

    A size over the bound passes alone. Lives on the event loop; no polling.
    """

    __slots__ = ("_bytes_max", "_waiters", "queued_bytes")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._waiters: deque[_Place] = deque()
        self.queued_bytes = 0

    @property
    def waiting(self) -> int:
        """How many appends wait for room."""
        return len(self._waiters)

    async def wait(self, size_bytes: int, *, makes_room: bool = False) -> None:
        """Return once there is room; cancelling gives the place in the queue back."""
        if not self._waiters and self._fits(self.queued_bytes, size_bytes):
            return
        place = _Place(size_bytes, makes_room, asyncio.get_running_loop().create_future())
        self._waiters.append(place)
        try:
            await place.turn
        except asyncio.CancelledError:
            self._leave(place)
            raise

    def take(self, size_bytes: int) -> None:
        """Count an append as queued."""
        self.queued_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count queued bytes as written, and let in who fits now."""
        self.queued_bytes -= size_bytes
        if self._waiters:
            self._let_in()

    def refuse(self, error: Exception, *, but_what_makes_room: bool = False) -> None:
        """End every wait with `error`; with `but_what_makes_room` those stay that make room, in their order."""
        waiters, self._waiters = self._waiters, deque()
        for place in waiters:
            if but_what_makes_room and place.makes_room:
                self._waiters.append(place)
            elif not place.turn.done():
                place.turn.set_exception(error)
        self._let_in()  # who stays may fit, now that larger ones before it are gone

    def _let_in(self) -> None:
        promised = self.queued_bytes
        while self._waiters and (self._waiters[0].turn.done() or self._fits(promised, self._waiters[0].size_bytes)):
            place = self._waiters.popleft()
            if not place.turn.done():
                place.turn.set_result(None)
                promised += place.size_bytes
        if self._waiters and not self.queued_bytes:
            # Nothing is queued whose completion would call again, and who was let in may never append.
            asyncio.get_running_loop().call_soon(self._let_in)

    def _leave(self, place: _Place) -> None:
        # A turn may have been given and cancelled in the same step of the loop: the next one gets it.
        if place in self._waiters:
            self._waiters.remove(place)
        self._let_in()

    def _fits(self, queued_bytes: int, size_bytes: int) -> bool:
        return not queued_bytes or queued_bytes + size_bytes <= self._bytes_max
