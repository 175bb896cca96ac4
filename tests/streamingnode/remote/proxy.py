"""What stands between a client and its node in these tests, and does to their bytes what networks
do.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import Any, NamedTuple

import anyio.lowlevel

from wal.frames import FRAME_HEADER_BYTES, PREFACE, FrameKind

CHUNK_BYTES = 256 << 10
HANGS_S = 60
"""No condition takes this long to come true."""


class Way(Enum):
    """Which way bytes go."""

    TO_NODE = "to the node"
    TO_CLIENT = "to the client"


class Passing(NamedTuple):
    """What is about to be passed on: a frame, or the preface, which has no kind."""

    way: Way
    kind: int
    number: int
    data: bytes


async def until(reached: Callable[[], object]) -> None:
    """Return once this is true. Raises `TimeoutError` when it never is."""
    async with asyncio.timeout(HANGS_S):
        while not reached():
            await anyio.lowlevel.checkpoint()


class Proxy:
    """Passes bytes between clients and the node at a port, until it is told otherwise.

    `on_frame` sees each frame before it is passed, and says whether it is. A way that is stopped
    takes bytes, and keeps them. Cuts that are planned are of the next connection.
    """

    def __init__(self, port: int) -> None:
        self.node_port = port
        self.port = 0
        self.on_frame: Callable[[Passing], bool] = lambda _: True
        self.connections = 0
        """How many were made to the node."""
        self.refused = 0
        self.is_refusing = False
        self.stopped: set[Way] = set()
        self.passed: dict[Way, int] = dict.fromkeys(Way, 0)
        """Bytes of the newest connection."""
        self._cut_after: dict[Way, int] = {}
        self._corrupt_at: dict[Way, int] = {}
        self._moved = asyncio.Event()
        self._links: list[_Relay] = []
        self._listener: asyncio.Server | None = None

    async def open(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self.cut()
        self.go_on()
        for link in self._links:
            await link.ended()

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def open_connections(self) -> int:
        """How many are open to clients."""
        return sum(link.is_open for link in self._links)

    def cut(self) -> None:
        """Cut all connections, both halves."""
        for link in self._links:
            link.cut()

    def cut_clients(self) -> None:
        """Cut all connections for the client, and have the node not notice."""
        for link in self._links:
            link.cut_client()

    def plan_cut(self, way: Way, after_bytes: int) -> None:
        """Cut the next connection once so many bytes were passed one way."""
        self._cut_after[way] = after_bytes

    def plan_corruption(self, way: Way, at: int) -> None:
        """Change one byte of what the next connection passes one way."""
        self._corrupt_at[way] = at

    def stop(self, *ways: Way) -> None:
        """Pass nothing more these ways, of connections there are and of later ones."""
        self.stopped.update(ways or Way)

    def stall(self) -> None:
        """Keep what clients send over the connections there are, also once they have left."""
        for link in self._links:
            link.is_stalled = True

    @property
    def held_bytes(self) -> int:
        """What connections that are stalled keep for the node."""
        return sum(link.held_bytes for link in self._links)

    def go_on(self) -> None:
        """Pass on what was kept, and all that comes."""
        self.stopped.clear()
        for link in self._links:
            link.is_stalled = False
        self._moved.set()
        self._moved = asyncio.Event()

    async def wait_free(self, way: Way, link: "_Relay") -> None:
        while way in self.stopped or (way is Way.TO_NODE and link.is_stalled):
            await self._moved.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            self.refused += 1
            writer.transport.abort()
            return
        try:
            to_node = await asyncio.open_connection("127.0.0.1", self.node_port, limit=CHUNK_BYTES)
        except OSError:
            self.refused += 1
            writer.transport.abort()
            return
        self.connections += 1
        cut_after = self._cut_after
        self._cut_after = {}
        corrupt_at = self._corrupt_at
        self._corrupt_at = {}
        self._links.append(_Relay(self, (reader, writer), to_node, cut_after, corrupt_at))


class _Relay:
    """One connection, both halves."""

    def __init__(
        self,
        proxy: Proxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        node: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        cut_after: dict[Way, int],
        corrupt_at: dict[Way, int],
    ) -> None:
        self._proxy = proxy
        self._client = client[1]
        self._node = node[1]
        self._cut_after = cut_after
        self._corrupt_at = corrupt_at
        self._passed = proxy.passed = dict.fromkeys(Way, 0)
        self.is_open = True
        self.is_stalled = False
        self.held_bytes = 0
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._pump(Way.TO_NODE, client[0], node[1])),
            loop.create_task(self._pump(Way.TO_CLIENT, node[0], client[1])),
        ]

    def cut(self) -> None:
        self.is_open = False
        for writer in (self._client, self._node):
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()

    def cut_client(self) -> None:
        self.is_open = False
        self._client.transport.abort()
        for task in self._tasks:
            task.cancel()

    async def ended(self) -> None:
        await asyncio.wait(self._tasks)

    async def _pump(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        held = b""
        has_preface = False
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                held += data
                while True:
                    if not has_preface:
                        size = len(PREFACE)
                    elif len(held) >= FRAME_HEADER_BYTES:
                        size = FRAME_HEADER_BYTES + struct.unpack_from("<I", held)[0]
                    else:
                        break
                    if len(held) < size:
                        break
                    unit = held[:size]
                    held = held[size:]
                    kind = struct.unpack_from("<H", unit, 16)[0] if has_preface else 0
                    number = struct.unpack_from("<Q", unit, 8)[0] if has_preface else 0
                    has_preface = True
                    self.held_bytes = len(unit) if self.is_stalled and way is Way.TO_NODE else 0
                    await self._proxy.wait_free(way, self)
                    self.held_bytes = 0
                    if self._proxy.on_frame(Passing(way, kind, number, unit)):
                        await self._pass(way, unit, writer)
                    if not self.is_open:
                        return
        if self.is_open and not (self.is_stalled and way is Way.TO_CLIENT):
            self.cut()

    async def _pass(self, way: Way, data: bytes, writer: asyncio.StreamWriter) -> None:
        before = self._passed[way]
        corrupt_at = self._corrupt_at.get(way, -1) - before
        if 0 <= corrupt_at < len(data):
            data = data[:corrupt_at] + bytes([data[corrupt_at] ^ 0x10]) + data[corrupt_at + 1 :]
        left = self._cut_after.get(way, before + len(data) + 1) - before
        writer.write(data[: max(left, 0)])
        self._passed[way] += len(data)
        if left <= len(data):
            with suppress(OSError):
                await writer.drain()
            writer.write_eof() if writer.can_write_eof() else None
            self.is_open = False
            # What was written arrives first: the transports are closed, not aborted.
            self._client.close()
            self._node.close()
            return
        await writer.drain()


@asynccontextmanager
async def proxied(port: int) -> AsyncIterator[Proxy]:
    """Open a proxy to a port."""
    proxy = Proxy(port)
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.close()


def kinds(*wanted: FrameKind, way: Way = Way.TO_CLIENT) -> Callable[[Passing], bool]:
    """Return what drops frames of these kinds that go one way."""
    return lambda passing: not (passing.way is way and passing.kind in wanted)


def no_more(*_: Any) -> bool:
    """Drop every frame."""
    return False
