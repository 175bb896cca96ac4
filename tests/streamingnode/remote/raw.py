"""A client that says whatever a test wants it to, byte by byte if need be."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import msgspec
import pyarrow as pa

from streamingnode.node import Node
from streamingnode.remote.calls import WireResults
from streamingnode.remote.writes import WireGroup, WireTarget, WireWrites
from streamingnode.writing.target import encoded
from tests.parts_of import parts_of
from wal.append import AppendResult
from wal.frames import FRAME_BYTES_MAX, PREFACE, Frame, FrameKind, FrameReader, encode_frame
from wal.headers import MessageType
from wal.position import CLIENT_PRODUCER_IDS
from wal.wire_types import VERSIONS, Hello, WireError, decode, encode

_client_ids = count(CLIENT_PRODUCER_IDS + 1)


def frame_bytes(
    kind: int, number: int = 0, meta: object = None, payload: bytes | memoryview = b""
) -> bytes:
    """Return a frame as it is on the wire."""
    return b"".join(bytes(part) for part in encode_frame(kind, number, meta, payload))


def hello(client_id: int | None = None, **fields: Any) -> bytes:
    """Return the first frame of a client."""
    given = Hello(VERSIONS, next(_client_ids) if client_id is None else client_id, **fields)
    return frame_bytes(FrameKind.HELLO, 0, given)


class Raw:
    """A connection, and the frames that came over it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader(FRAME_BYTES_MAX)
        self._came: list[Frame] = []

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)

    def say(
        self, kind: int, number: int = 0, meta: object = None, payload: bytes | memoryview = b""
    ) -> None:
        """Send a frame."""
        self.send(frame_bytes(kind, number, meta, payload))

    def call(self, number: int, name: str, request: object) -> None:
        """Send a call."""
        self.say(FrameKind.CALL, number, name, encode(request))

    async def greet(self, **fields: Any) -> None:
        """Say hello, and wait for the welcome and the catalog."""
        self.send(PREFACE + hello(**fields))
        await self.expect(FrameKind.WELCOME)
        await self.expect(FrameKind.CATALOG)

    async def frame(self) -> Frame | None:
        """Return the next frame, None at the end."""
        while not self._came:
            try:
                data = await self._reader.read(1 << 16)
            except OSError:
                return None
            if not data:
                return None
            self._came += list(self._frames.feed(data))
        return self._came.pop(0)

    async def expect(self, kind: FrameKind) -> Frame:
        """Return the next frame of a kind; others are passed over."""
        while (frame := await self.frame()) is not None:
            if frame.kind == kind:
                return frame
        raise AssertionError(f"the connection ended before a {kind.name} came")

    async def payload(self, kind: FrameKind) -> bytes:
        """Return the payload of the next frame of a kind, with the parts that came before it."""
        payload = b""
        while (frame := await self.frame()) is not None:
            if frame.kind in (kind, FrameKind.PART):
                payload += frame.payload
            if frame.kind == kind:
                return payload
        raise AssertionError(f"the connection ended before a {kind.name} came")

    async def error(self) -> WireError:
        """Return the error that comes next."""
        error: WireError = (await self.expect(FrameKind.ERROR)).value(WireError)
        return error

    async def result(self) -> AppendResult | WireError:
        """Return what became of the only write of the next results."""
        said: WireResults = decode((await self.expect(FrameKind.RESULTS)).payload, WireResults)
        outcomes: list[AppendResult | WireError] = [result for _, _, result in said[0]]
        (outcome,) = outcomes + [error for _, _, error in said[1]]
        return outcome

    async def ended(self) -> None:
        """Return when the node has closed the connection."""
        while await self.frame() is not None:
            pass

    async def still_served(self) -> None:
        """Return when the node has taken all that was sent before."""
        self.say(FrameKind.PING, 1)
        await self.expect(FrameKind.PONG)

    def close(self) -> None:
        """Close it at once."""
        self._writer.transport.abort()


@asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[Raw]:
    """Connect to a port, and say nothing yet."""
    client = Raw(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield client
    finally:
        client.close()


def writes_of(
    node: Node,
    keys: Iterable[int],
    *groups: WireGroup,
    collection: str = "c",
    settled: int = 1,
    batch: pa.RecordBatch | None = None,
    payload: bytes | None = None,
    **changes: Any,
) -> tuple[WireWrites, bytes]:
    """Return inserts of rows with these keys into a collection: by default as one group of sequence
    1.
    """
    info = parts_of(node).catalog.collection_by_name(collection)
    if batch is None:
        batch = pa.RecordBatch.from_pylist(
            [{"id": key, "item": f"tea {key}"} for key in keys],
            schema=pa.ipc.read_schema(pa.py_buffer(info.schema)),
        )
    data = bytes(encoded(batch)) if payload is None else payload
    (partition,) = [each.id for each in info.partitions]
    target = WireTarget(int(MessageType.INSERT), info.id, partition, info.schema_version, len(data))
    target = msgspec.structs.replace(target, **changes)
    wired = groups or (WireGroup(1, False, ((0, batch.num_rows),)),)
    return WireWrites(settled, (target,), wired), data
