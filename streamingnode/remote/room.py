"""Memory for the data that clients send: one budget in bytes for all connections of a node. Lives
on the event loop.

The budget holds incomplete frames, arguments of open calls, and unanswered frames of writes. A
connection that needs more than is free stops reading until it gets it: back-pressure for its
client. Incomplete frames may use three quarters of the budget. They can wait for each other, while
calls and writes end by themselves.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

CLIENTS_BYTES_MAX = 256 << 20
"""The budget of all connections of a node. Each connection has 64 KiB more for receiving."""
SENT_BYTES_MAX = 512 << 20
"""Limit for data that is sent and not yet read by clients. Each client may have one part of a long
reply more.
"""


def sent_bytes_each(connections: int) -> int:
    """Return the limit for unread data of one of so many clients. The limit changes only at powers
    of two.
    """
    return SENT_BYTES_MAX >> connections.bit_length()


class Room:
    """A budget of `bytes_max` bytes, assigned first come, first served."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._waiting = OrderedDict["Share", float]()
        """The start of each wait, by the loop's clock, longest wait first."""

    @property
    def frames_bytes_max(self) -> int:
        """The limit up to which frames may be received: `held_bytes` including the frame."""
        return self.bytes_max // 4 * 3

    @property
    def longest_wait_s(self) -> float:
        """The longest current wait; 0 when no connection waits."""
        since = next(iter(self._waiting.values()), None)
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    def has_waiting(self, share: "Share") -> bool:
        """Whether a connection waits for memory."""
        return share in self._waiting

    def fits(self, missing_bytes: int) -> bool:
        """Whether a connection may continue to read when its frames need so many more bytes."""
        limit = self.frames_bytes_max if missing_bytes else self.bytes_max
        return self.held_bytes + missing_bytes <= limit

    def wait(self, share: "Share") -> None:
        """Add a connection to the queue; one that already waits keeps its place."""
        self._waiting.setdefault(share, asyncio.get_running_loop().time())

    def leave(self, share: "Share") -> None:
        """Remove a connection from the queue and admit the ones that fit now."""
        self._waiting.pop(share, None)
        self.let_in()

    def is_next(self, share: "Share") -> bool:
        """Whether no other connection waits before this one."""
        return next(iter(self._waiting), share) is share

    def let_in(self) -> None:
        """Admit waiting connections, in order, while they fit."""
        while self._waiting:
            share = next(iter(self._waiting))
            if not self.fits(share.missing_bytes):
                return
            del self._waiting[share]
            share.let_in()


class Share:
    """The memory that one connection holds; `on_room` is called when it may continue to read after
    a wait.
    """

    def __init__(self, room: Room, on_room: Callable[[], None]) -> None:
        self._room = room
        self._on_room = on_room
        self._needed_bytes = 0
        self.frames_bytes = 0
        """Memory for incomplete frames."""
        self.calls_bytes = 0
        """Memory for arguments of open calls."""
        self.writes_bytes = 0
        """Memory for unanswered frames of writes."""

    @property
    def missing_bytes(self) -> int:
        """The memory that incomplete frames still need."""
        return self._needed_bytes - self.frames_bytes

    @property
    def refusable_bytes(self) -> int:
        """The memory that a client may hold without end: all but writes."""
        return self.frames_bytes + self.calls_bytes

    @property
    def is_waiting(self) -> bool:
        """Whether its connection waits for memory."""
        return self._room.has_waiting(self)

    def need(self, frames_bytes: int) -> bool:
        """Hold so many bytes for incomplete frames; the number may rise or fall.

        Returns False when the connection must stop reading until `on_room` is called.
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
        """Hold the missing bytes, and let the connection continue to read."""
        self._hold_frames()
        self._on_room()

    def hold_call(self, size_bytes: int) -> None:
        """Hold the arguments of a call; a negative number releases them."""
        self.calls_bytes += size_bytes
        self._changed(size_bytes)

    def hold_writes(self, size_bytes: int) -> None:
        """Hold a frame of writes; a negative number releases it."""
        self.writes_bytes += size_bytes
        self._changed(size_bytes)

    def close(self) -> None:
        """Release the memory of frames and stop waiting. Calls and writes release theirs when they
        end.
        """
        self._on_room = _ignore
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


def _ignore() -> None:
    """Do nothing, in place of the callback of a closed connection."""
