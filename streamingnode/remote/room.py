"""Room for what clients send: one budget in bytes for all connections of a node. On the event loop.

Held are frames that are not whole yet, arguments of calls that have not ended, and frames of writes
without an answer. A connection that needs more than there is does not read on until it has that: so
its client waits. Frames that are not whole leave a quarter to what is: they may wait for each
other, while calls and writes end by themselves.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

CLIENTS_BYTES_MAX = 256 << 20
"""What all connections of a node hold at most, besides 64 KiB that each receives at a time."""
SENT_BYTES_MAX = 512 << 20
"""What waits for all clients to read it, besides one part of a long answer for each."""


def sent_bytes_each(connections: int) -> int:
    """Return what may wait for one of so many clients; the same up to the next power of two."""
    return SENT_BYTES_MAX >> connections.bit_length()


class Room:
    """At most `bytes_max` bytes, given out first come, first served."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._waiting = OrderedDict["Share", float]()
        """Since when each waits, by the loop's clock; the first has waited longest."""

    @property
    def frames_bytes_max(self) -> int:
        """What is held when a frame may begin, that frame included."""
        return self.bytes_max // 4 * 3

    @property
    def longest_wait_s(self) -> float:
        """How long the first has waited who waits; 0 where nobody does."""
        since = next(iter(self._waiting.values()), None)
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    def has_waiting(self, share: "Share") -> bool:
        """Whether a connection waits for room."""
        return share in self._waiting

    def fits(self, missing_bytes: int) -> bool:
        """Whether a connection may read on that holds so many bytes too little for its frames."""
        limit = self.frames_bytes_max if missing_bytes else self.bytes_max
        return self.held_bytes + missing_bytes <= limit

    def wait(self, share: "Share") -> None:
        """Let a connection in when it is its turn; it keeps its place."""
        self._waiting.setdefault(share, asyncio.get_running_loop().time())

    def leave(self, share: "Share") -> None:
        """Have a connection wait no more, and let in who fits now."""
        self._waiting.pop(share, None)
        self.let_in()

    def is_next(self, share: "Share") -> bool:
        """Whether nobody waits before this one."""
        return next(iter(self._waiting), share) is share

    def let_in(self) -> None:
        """Have those read on who fit now."""
        while self._waiting:
            share = next(iter(self._waiting))
            if not self.fits(share.missing_bytes):
                return
            del self._waiting[share]
            share.let_in()


class Share:
    """What one connection holds; `on_room` is called when one that had to wait may read on."""

    def __init__(self, room: Room, on_room: Callable[[], None]) -> None:
        self._room = room
        self._on_room = on_room
        self._needed_bytes = 0
        self.frames_bytes = 0
        """For frames that are not whole."""
        self.calls_bytes = 0
        """Arguments of calls that have not ended."""
        self.writes_bytes = 0
        """Frames of writes without an answer."""

    @property
    def missing_bytes(self) -> int:
        """What is still needed for frames that are not whole."""
        return self._needed_bytes - self.frames_bytes

    @property
    def refusable_bytes(self) -> int:
        """What may be held without end, as the client likes: all but writes."""
        return self.frames_bytes + self.calls_bytes

    @property
    def is_waiting(self) -> bool:
        """Whether its connection waits for room."""
        return self._room.has_waiting(self)

    def need(self, frames_bytes: int) -> bool:
        """Hold so many bytes for frames that are not whole, more or less than before.

        Returns False when the connection may not read on: it has to wait until `on_room` is called.
        """
        self._needed_bytes = frames_bytes
        if self.missing_bytes < 0:
            self._hold_frames()
        room = self._room
        if room.fits(self.missing_bytes) and (not self.missing_bytes or room.is_next(self)):
            self._hold_frames()
            return True
        room.wait(self)
        return False

    def let_in(self) -> None:
        """Hold what is missing, and have the connection read on."""
        self._hold_frames()
        self._on_room()

    def hold_call(self, size_bytes: int) -> None:
        """Hold the arguments of a call; with a negative number no longer."""
        self.calls_bytes += size_bytes
        self._changed(size_bytes)

    def hold_writes(self, size_bytes: int) -> None:
        """Hold a frame of writes; with a negative number no longer."""
        self.writes_bytes += size_bytes
        self._changed(size_bytes)

    def close(self) -> None:
        """Hold nothing for frames, and wait no longer; calls and writes give back their own."""
        self._on_room = _nobody
        self._needed_bytes = 0
        self._hold_frames()
        self._room.leave(self)

    def _hold_frames(self) -> None:
        more_bytes = self.missing_bytes
        self.frames_bytes += more_bytes
        self._changed(more_bytes)

    def _changed(self, more_bytes: int) -> None:
        self._room.held_bytes += more_bytes
        if more_bytes < 0:
            self._room.let_in()


def _nobody() -> None:
    """Take the place of who is gone."""
