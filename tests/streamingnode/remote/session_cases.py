"""One client on the node's side in these tests, and what no client of ours sends."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pyarrow as pa

import streamingnode as sn
from streamingnode.remote.calls import WireResults
from streamingnode.remote.server import Session
from streamingnode.remote.writes import WireWrites
from tests.streamingnode.remote.nodes import SCHEMA, Served, contents, rows
from tests.streamingnode.remote.raw import Raw, frame_bytes, hello, raw_client
from wal.frames import GREETING_BYTES_MAX, PREFACE, FrameKind
from wal.headers import MessageType
from wal.wire_types import decode

INSERTS = (MessageType.INSERT,)
IDS = [2**31, 2**31 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(80),
    "zeros": bytes(100),
    "wrong preface": b"SNWP\n\n\x1a\n" + hello(),
    "giant length": PREFACE + b"\xff\xff\xff\xff" + bytes(40),
    "over the greeting": PREFACE + GREETING_BYTES_MAX.to_bytes(4, "little") + bytes(40),
    "wrong checksum": PREFACE + hello()[:4] + b"\0\0\0\0" + hello()[8:],
    "a call first": PREFACE + frame_bytes(FrameKind.CALL, 1, "statistics", b"\x90"),
    "an unknown kind first": PREFACE + frame_bytes(999, 1),
    "a hello of nothing": PREFACE + frame_bytes(FrameKind.HELLO, 0),
    "a hello of another type": PREFACE + frame_bytes(FrameKind.HELLO, 0, [1, 2]),
    "a deep hello": PREFACE
    + b"".join(bytes(each) for each in [frame_bytes(FrameKind.HELLO, 0, {"versions": [[[[]]]]})]),
}


AFTER_HELLO = {
    "garbage": b"\x80" * 200,
    "a giant length": b"\xff\xff\xff\xff" + bytes(40),
    "a wrong checksum": frame_bytes(FrameKind.PING, 1)[:4]
    + b"\0\0\0\0"
    + frame_bytes(FrameKind.PING, 1)[8:],
    "a second hello": hello(),
    "a call without a number": frame_bytes(FrameKind.CALL, 0, "statistics", b"\x90"),
    "a call whose name is none": frame_bytes(FrameKind.CALL, 1, ["statistics"], b"\x90"),
    "writes of another type": frame_bytes(FrameKind.WRITES, 1, {"settled": 1}),
    "writes that claim a giant array": frame_bytes(
        FrameKind.WRITES, 1, msgspec.Raw(b"\x93\x01\xdd\xff\xff\xff\xff")
    ),
}


async def serves(served: Served, key: int = 77_777) -> None:
    """Check that another client can write and read."""
    async with sn.connect(f"tcp://127.0.0.1:{served.port}") as client:
        await client.upsert("c", rows(key))
        assert key in await contents(client)


@asynccontextmanager
async def greeted(served: Served) -> AsyncIterator[Raw]:
    """Open a client that has said hello."""
    async with raw_client(served.port) as client:
        await client.greet()
        yield client


async def told_of(client: Raw, writes: int) -> tuple[set[int], set[str]]:
    """Return which of so many writes a client is told are in the log, and the codes of what the
    others are refused with.
    """
    told = set[int]()
    failed = list[str]()
    while len(told) + len(failed) < writes:
        results, failures = decode((await client.expect(FrameKind.RESULTS)).payload, WireResults)
        told |= {group for _, group, _ in results}
        failed += [error.code for _, _, error in failures]
    return told, set(failed)


def session_of(served: Served) -> Session:
    (session,) = served.server.sessions
    return session


def changed(made: tuple[WireWrites, bytes], field: str, number: int) -> tuple[WireWrites, bytes]:
    """Return writes whose target has another number there."""
    writes, data = made
    targets = (msgspec.structs.replace(writes.targets[0], **{field: number}),)
    return msgspec.structs.replace(writes, targets=targets), data


def parts_bytes(served: Served) -> int:
    return sum(each.connection._long_frames.held_bytes for each in served.server.sessions)


def waiting_bytes(served: Served) -> int:
    """What waits for clients to read it."""
    found = [each.connection._transport for each in served.server.sessions]
    return sum(each.get_write_buffer_size() for each in found if each is not None)


def squeezed(mebibytes: int) -> bytes:
    """Return a row of this size as an Arrow message of a few KiB."""
    batch = pa.RecordBatch.from_pydict(
        {"id": pa.array([1], pa.int64()), "item": pa.array(["x" * (mebibytes << 20)])},
        schema=SCHEMA,
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        writer.write_batch(batch)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages.read_next_message()
    return bytes(messages.read_next_message().serialize())
