"""Either end of a connection over a Unix socket, TCP or TLS: converts between bytes and frames,
with back-pressure.
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
"""The size of the parts of a long reply, so that other frames fit in between. Most batches of
messages are shorter.
"""
CLOSE_S_MAX = 1.0
"""How long the other side may take to read sent data and, with TLS, to confirm the end."""
SEND_BUFFER_BYTES = 4 << 20
"""`send_long` waits while more than this is unsent."""
UNBOUNDED_BYTES = 1 << 62
SOCKET_BYTES = 1 << 20
"""The buffer of a Unix socket: it holds a batch of messages. The default is a fifth of that, so
both sides would take turns several times for each batch.
"""


class Connection(asyncio.BufferedProtocol):
    """A connection, from its start until it is lost; lives on the event loop.

    `on_frame` gets every complete frame in order, with long ones reassembled; an error of the node
    that it raises closes the connection. `on_lost` is called once, with the reason.
    `parts_bytes_max` bounds incomplete long frames. `room` bounds the memory of all connections;
    without it the memory of this one is unbounded.
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
        """The memory it holds for frames, calls and writes."""
        self._parts_bytes_max = parts_bytes_max
        # Arrow's allocator reuses the memory for later frames
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
        """When data was last received, by the loop's clock."""

    # --- asyncio's side ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Configure the transport and send the preface, as each side does."""
        # uvloop's transport does not inherit from `asyncio.Transport`
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True
        self._transport.set_write_buffer_limits(SEND_BUFFER_BYTES)
        # the system sizes the buffers of other sockets itself
        if (of := self.peer("socket")).family == socket.AF_UNIX:
            of.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._held = hold_socket(of.fileno())
        self._transport.write(PREFACE)
        self._on_made()

    def get_buffer(self, _size_hint: int) -> memoryview:
        """Return the buffer where the next bytes of a frame belong."""
        return self._reader.room()

    def buffer_updated(self, size_bytes: int) -> None:
        """Pass on the frames that are complete now."""
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
        """The memory that incomplete frames need."""
        return self._reader.long_bytes + self._long_frames.held_bytes

    def _read_on(self) -> None:
        """Continue to read after a wait for memory."""
        # it may have sent much in the meantime
        self.received_at = asyncio.get_running_loop().time()
        if self._is_reading and not (self._is_node and self._is_full):
            self._transport.resume_reading()

    @property
    def _is_reading(self) -> bool:
        """Whether the connection reads; it does not once `close` has begun."""
        return self.is_open and not self._transport.is_closing()

    def pause_writing(self) -> None:
        """Make `send_long` wait."""
        self._is_full = True
        if self._is_node:
            # the node reads no more requests of a client that does not read replies; a client
            # always reads
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Resume the waiting senders."""
        self._is_full = False
        # it reads, so it is alive; its own data was not read in the meantime
        self.received_at = asyncio.get_running_loop().time()
        self._drained.wake()
        if self._is_node and self._is_reading and not self.share.is_waiting:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Report the loss, and release received data and callbacks."""
        self.is_open = False
        self._held.end()
        self.resume_writing()
        self._reader.drop()
        self._long_frames.drop()
        self.share.close()
        on_lost = self._on_lost
        why = self._error or error
        # Break reference cycles, so that nothing waits for garbage collection: the owner refers to
        # this connection, and an error refers to stack frames that refer to both.
        self._on_frame = self._on_lost = _ignore
        self._on_made = lambda: None
        self._error = None
        on_lost(why)

    # --- ours -------------------------------------------------------------------------------------

    def agreed(self) -> None:
        """Accept frames of full size from now on: the handshake is done."""
        self._reader.frame_bytes_max = FRAME_BYTES_MAX
        self._long_frames.bytes_max = self._parts_bytes_max
        self.has_agreed = True

    def send(
        self, kind: FrameKind, number: int = 0, meta: object = None, *payload: bytes | memoryview
    ) -> None:
        """Send a frame; drops it when the connection is lost, which `on_lost` reports. Raises
        `ProtocolError` if it is too long.
        """
        self.send_encoded(encode_frame(kind, number, meta, *payload))

    def send_encoded(self, frame: list[bytes | memoryview]) -> None:
        """Send a frame that `encode_frame` has encoded; drops it when the connection is lost."""
        if self.is_open:
            self._transport.writelines(frame)

    async def send_long(self, kind: FrameKind, number: int, *payload: bytes | memoryview) -> None:
        """Send a frame of any length in parts, each once the other side has read most of the data
        sent before.

        Raises `OnShutdown` when the connection is lost. A cancelled call sends `CANCEL`, so that
        the other side drops its parts.
        """
        parts: list[Sequence[bytes | memoryview]] = [payload]
        if sum(map(len, payload)) > PART_BYTES:
            whole = memoryview(b"".join(payload))
            parts = [[whole[at : at + PART_BYTES]] for at in range(0, len(whole), PART_BYTES)]
        kinds = [*repeat(FrameKind.PART, len(parts) - 1), kind]
        async with self._long:
            try:
                for what, part in zip(kinds, parts, strict=True):
                    # One part at a time: otherwise each of a thousand streams would buffer a part.
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
        """Return the transport's `get_extra_info(name)`."""
        return self._transport.get_extra_info(name)

    def bound_sent(self, size_bytes: int) -> None:
        """Limit unsent data to this size, at most `SEND_BUFFER_BYTES`."""
        if self._is_reading:
            self._transport.set_write_buffer_limits(min(size_bytes, SEND_BUFFER_BYTES))

    def close(self) -> None:
        """Close the connection once all data is sent."""
        if self.is_open:
            self._transport.close()

    async def end(self) -> None:
        """Close the connection and wait for its end, at most `CLOSE_S_MAX`: no connection may
        outlive its event loop.
        """
        self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                while self.is_open:
                    await self._drained.wait()
        self.abort(OnShutdown("the connection is closed — connect again"))

    def abort(self, error: Exception) -> None:
        """Close the connection now and pass an error to `on_lost`; the first error stands."""
        self._error = self._error or error
        if self.is_open:
            self.is_open = False
            self._transport.abort()


def _ignore(_: object) -> None:
    """Do nothing, in place of a released callback."""
