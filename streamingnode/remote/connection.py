"""One connection, either end of it, over Unix sockets, TCP and TLS: bytes to frames, frames to
bytes, and back-pressure.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any, cast

import pyarrow as pa

from streamingnode.remote.room import Room, Share
from wal.errors import OnShutdown, StreamingNodeError
from wal.frames import (
    FRAME_BYTES_MAX,
    PARTS_MAX,
    PREFACE,
    Frame,
    FrameKind,
    FrameReader,
    LongFrames,
    encode_frame,
)
from wal.queue import Signal
from wal.runtime import Holding
from wal.sockets import hold_socket

PART_BYTES = 2 << 20
"""What a long reply is cut into, so that others get between its parts. Most batches of messages are
shorter.
"""
CLOSE_S_MAX = 1.0
"""How long the other side may take to read what was sent, and with TLS to say that it ends, too."""
SEND_BUFFER_BYTES = 4 << 20
"""With more waiting for the other side to read, `send_long` waits."""
UNBOUNDED_BYTES = 1 << 62
SOCKET_BYTES = 1 << 20
"""What a Unix socket holds, a batch of messages; by default a fifth of that, and both sides would
take turns over each.
"""


class Connection(asyncio.BufferedProtocol):
    """A connection, from when it is made until it is lost; lives on the event loop.

    `on_frame` is told of every frame that is whole, long ones put together again, in order; what it
    raises closes the connection. `on_lost` is told once, with the reason. `parts_bytes_max` bounds
    long frames that are not whole yet, and `room` what all connections hold; without it this one
    holds what it gets.
    """

    def __init__(
        self,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[Exception | None], None],
        *,
        parts_bytes_max: int,
        on_made: Callable[[], None] = lambda: None,
        is_node: bool = False,
        room: Room | None = None,
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._on_made = on_made
        self.share = Share(room or Room(UNBOUNDED_BYTES), self._read_on)
        """What it holds for frames, calls and writes."""
        self._parts_bytes_max = parts_bytes_max
        # from memory that Arrow keeps for the next one
        self._reader = FrameReader(allocate=pa.allocate_buffer)
        self._long_frames = LongFrames()
        self._transport: asyncio.Transport
        self._held: Holding
        self._is_full = False
        self._drained = Signal()
        self._sending = asyncio.Lock()
        self._long = asyncio.Semaphore(PARTS_MAX)
        self._is_node = is_node
        self.has_agreed = False
        self._error: Exception | None = None
        self.is_open = False
        self.received_at = asyncio.get_running_loop().time()
        """When something came last, by the loop's clock."""

    # --- asyncio's side ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, as each side does."""
        # uvloop's is none by its class
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True
        self._transport.set_write_buffer_limits(SEND_BUFFER_BYTES)
        # the system adapts others by itself
        if (of := self.peer("socket")).family == socket.AF_UNIX:
            of.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._held = hold_socket(of.fileno())
        self._transport.write(PREFACE)
        self._on_made()

    def get_buffer(self, _size_hint: int) -> memoryview:
        """Receive where the next bytes of a frame belong."""
        return self._reader.room()

    def buffer_updated(self, size_bytes: int) -> None:
        """Pass on the frames that are whole now."""
        self.received_at = asyncio.get_running_loop().time()
        try:
            for frame in self._reader.received(size_bytes):
                whole = self._long_frames.whole(frame)
                if whole is not None and self.is_open:
                    self._on_frame(whole)
        except StreamingNodeError as error:
            self.abort(error)
        if self._is_reading and not self.share.need(self._held_bytes):
            self._transport.pause_reading()

    @property
    def _held_bytes(self) -> int:
        """What the frames need that are not whole."""
        return self._reader.long_bytes + self._long_frames.held_bytes

    def _read_on(self) -> None:
        """Go on after there was no room."""
        self.received_at = asyncio.get_running_loop().time()  # it may have said much meanwhile
        if self._is_reading and not (self._is_node and self._is_full):
            self._transport.resume_reading()

    @property
    def _is_reading(self) -> bool:
        """Whether more may come; one that closes, which `close` begins, is not to be told of
        that.
        """
        return self.is_open and not self._transport.is_closing()

    def pause_writing(self) -> None:
        """Let `send_long` wait."""
        self._is_full = True
        if self._is_node:
            # who does not read answers asks nothing more; a client always reads
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Let those go on who wait."""
        self._is_full = False
        # who reads is there: nothing it says is heard meanwhile
        self.received_at = asyncio.get_running_loop().time()
        self._drained.wake()
        if self._is_node and self._is_reading and not self.share.is_waiting:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell that nothing comes any more, and let go of what came and of who is told."""
        self.is_open = False
        self._held.end()
        self.resume_writing()
        self._reader.drop()
        self._long_frames.drop()
        self.share.close()
        on_lost = self._on_lost
        why = self._error or error
        # Its owner refers to it, and an error to frames of the stack, which refer to both: without
        # these nothing waits for garbage collection.
        self._on_frame = self._on_lost = _nobody
        self._on_made = lambda: None
        self._error = None
        on_lost(why)

    # --- ours -------------------------------------------------------------------------------------

    def agreed(self) -> None:
        """Take frames of full size from now on: both sides know each other."""
        self._reader.frame_bytes_max = FRAME_BYTES_MAX
        self._long_frames.bytes_max = self._parts_bytes_max
        self.has_agreed = True

    def send(
        self, kind: FrameKind, number: int = 0, meta: object = None, *payload: bytes | memoryview
    ) -> None:
        """Send a frame, or drop it when the connection is lost, as `on_lost` tells. Raises
        `ProtocolError` if too long.
        """
        self.send_encoded(encode_frame(kind, number, meta, *payload))

    def send_encoded(self, frame: list[bytes | memoryview]) -> None:
        """Send what `encode_frame` returned."""
        if self.is_open:
            self._transport.writelines(frame)

    async def send_long(self, kind: FrameKind, number: int, *payload: bytes | memoryview) -> None:
        """Send a frame of any length in parts, each when the other side has read most of what was
        sent before.

        Raises `OnShutdown` when it is gone. What is cancelled ends with a `CANCEL`: the other side
        keeps no part of it.
        """
        parts: list[Sequence[bytes | memoryview]] = [payload]
        if sum(map(len, payload)) > PART_BYTES:
            whole = memoryview(b"".join(payload))
            parts = [[whole[at : at + PART_BYTES]] for at in range(0, len(whole), PART_BYTES)]
        kinds = [*repeat(FrameKind.PART, len(parts) - 1), kind]
        async with self._long:
            try:
                for what, part in zip(kinds, parts, strict=True):
                    # One part at a time, or each of a thousand streams would have one waiting.
                    async with self._sending:
                        while self._is_full:
                            await self._drained.wait()
                        if not self.is_open:
                            raise OnShutdown("the connection is lost — connect again")
                        self.send(what, number, None, *part)
            except asyncio.CancelledError:
                self.send(FrameKind.CANCEL, number)
                raise

    def peer(self, name: str) -> Any:
        """Return what the transport knows by this name, as `asyncio.BaseTransport.get_extra_info`
        does.
        """
        return self._transport.get_extra_info(name)

    def bound_sent(self, size_bytes: int) -> None:
        """Keep so much, and `SEND_BUFFER_BYTES` at most, for the other side to read."""
        if self._is_reading:
            self._transport.set_write_buffer_limits(min(size_bytes, SEND_BUFFER_BYTES))

    def close(self) -> None:
        """Close it when what was sent is on its way."""
        if self.is_open:
            self._transport.close()

    async def end(self) -> None:
        """Close it, and return when it has ended, after `CLOSE_S_MAX` at most: none may outlive its
        event loop.
        """
        self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                while self.is_open:
                    await self._drained.wait()
        self.abort(OnShutdown("it is closed — connect again"))

    def abort(self, error: Exception) -> None:
        """Close it now, because of an error, which `on_lost` is told."""
        self._error = self._error or error
        if self.is_open:
            self.is_open = False
            self._transport.abort()


def _nobody(_: object) -> None:
    """Take the place of who is told of nothing any more."""
