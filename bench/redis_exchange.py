"""Redis in `bench remote`: streams written, read and awaited over a connection that parses no more
than it has to.
"""

import asyncio
import importlib
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from bench.baseline import Load, Measured, measure_warm
from bench.redis_streams import connected, serving, words
from bench.rows import VALUE_BYTES, rows_of

_STREAM = b"rows"
_FIRST_ENTRY = 1_000_000
VALUES: list[bytes] = [os.urandom(VALUE_BYTES) for _ in range(997)]
READ_COUNT = 1_000
"""Entries that the peer is asked for at a time."""


def redis_py() -> Any:
    """Return redis-py, where it is installed."""
    return importlib.import_module("redis.asyncio")  # optional, and in no lock


class Exchange(asyncio.BufferedProtocol):
    """A connection to the peer for who knows how many bytes a reply has: nothing is parsed, nothing
    is kept.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(1 << 20)
        self._left = 0
        self._is_first = True
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        # those of uvloop are none by their class
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, _sizehint: int) -> bytearray:
        """Receive into the same place again."""
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        """Count what came; an error ends the connection."""
        if self._is_first and self._buffer[:1] == b"-" and self._transport is not None:
            self._transport.abort()
        self._is_first = False
        self._left -= count
        if self._left <= 0 and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Tell who waits."""
        if self._done is not None and not self._done.done():
            said = (
                "the server hung up"
                if self._is_first
                else f"the server said {bytes(self._buffer[:80])!r}"
            )
            self._done.set_exception(ConnectionError(said))

    def ask(self, command: bytes, reply_bytes: int) -> asyncio.Future[None]:
        """Send a command; what is returned is done when so many bytes came, or raises
        `ConnectionError` for an error.
        """
        assert self._transport is not None, "connected"
        self._left = self._left + reply_bytes
        self._is_first = True
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(command)
        return self._done

    @classmethod
    @asynccontextmanager
    async def open(cls, socket: Path) -> "AsyncIterator[Exchange]":
        """Yield a connection."""
        transport, exchange = await asyncio.get_running_loop().create_unix_connection(
            cls, str(socket)
        )
        try:
            yield exchange
        finally:
            transport.close()


def entry_id(number: int) -> bytes:
    """Return the id of an entry; all of them have the same length."""
    return b"%d-0" % (_FIRST_ENTRY + number)


def add(number: int) -> bytes:
    """Return the command that adds an entry."""
    key = b"%d" % (_FIRST_ENTRY + number)
    return words(
        b"XADD", _STREAM, entry_id(number), b"id", key, b"value", VALUES[number % len(VALUES)]
    )


def added_bytes(count: int) -> int:
    """Return how long the replies to so many of them are."""
    return count * len(bulk(entry_id(0)))


def read_bytes(count: int) -> int:
    """Return how long the reply of XREAD with so many entries is."""
    fields = b"".join(map(bulk, (b"id", b"%d" % _FIRST_ENTRY, b"value", VALUES[0])))
    entry = len(b"*2\r\n" + bulk(entry_id(0)) + b"*4\r\n" + fields)
    return len(b"*1\r\n*2\r\n" + bulk(_STREAM) + b"*%d\r\n" % count) + count * entry


def bulk(text: bytes) -> bytes:
    """Return a text as Redis sends it."""
    return b"$%d\r\n%b\r\n" % (len(text), text)


async def fill_redis(socket: Path, count: int) -> None:
    """Add so many entries."""
    async with connected(socket), Exchange.open(socket) as exchange:
        for first in range(0, count, READ_COUNT):
            commands = b"".join(map(add, range(first, first + READ_COUNT)))
            await exchange.ask(commands, added_bytes(READ_COUNT))


async def read_redis(socket: Path, count: int) -> float:
    """Read them all with the lean client; return rows/s."""
    reply_bytes = read_bytes(READ_COUNT)
    async with Exchange.open(socket) as exchange:
        began = time.perf_counter()
        for first in range(0, count, READ_COUNT):
            after = entry_id(first - 1)
            await exchange.ask(
                words(b"XREAD", b"COUNT", b"%d" % READ_COUNT, b"STREAMS", _STREAM, after),
                reply_bytes,
            )
        return count / (time.perf_counter() - began)


async def read_redis_py(socket: Path, count: int) -> float:
    """Read them all with redis-py; return rows/s."""
    client = redis_py().Redis(unix_socket_path=str(socket))
    try:
        began = time.perf_counter()
        rows = 0
        after = b"0"
        while found := await client.xread({_STREAM: after}, count=READ_COUNT):
            ((_, entries),) = found
            rows = rows + len(entries)
            after = entries[-1][0]
        assert rows == count, f"{rows} rows were read, {count} added"
        return rows / (time.perf_counter() - began)
    finally:
        await client.aclose()


async def deliver_redis(socket: Path, count: int) -> list[float]:
    """Add entries that a reader waits for; return the time of each to its delivery, in seconds."""
    delays = list[float]()
    async with connected(socket), Exchange.open(socket) as writer, Exchange.open(socket) as reader:
        await writer.ask(add(0), added_bytes(1))
        for number in range(1, count + 1):
            block = words(b"XREAD", b"BLOCK", b"0", b"STREAMS", _STREAM, entry_id(number - 1))
            delivered = reader.ask(block, read_bytes(1))
            await asyncio.sleep(0.0005)  # the server is to be waiting for the entry when it comes
            began = time.perf_counter()
            added = writer.ask(add(number), added_bytes(1))
            await delivered
            delays.append(time.perf_counter() - began)
            await added
    return delays


def lacking_redis_py() -> str:
    """Return what is missing to ask the peer through redis-py, empty when nothing is."""
    return "" if find_spec("redis") else "needs redis — pip install 'redis[hiredis]'"


async def measure_redis_py(load: Load, directory: Path) -> Measured:
    """Return what redis-py does with one row at a time under `load`, with a connection for each
    outstanding one.
    """
    asked = redis_py()
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="bench-") as place,
        serving(Path(place)) as socket,
    ):
        async with connected(socket):
            pool = asked.BlockingConnectionPool(
                connection_class=asked.UnixDomainSocketConnection,
                path=str(socket),
                max_connections=load.outstanding,
                timeout=None,
            )
            client = asked.Redis.from_pool(pool)
            next_row = rows_of(1)
            try:
                return await measure_warm(load, lambda: client.xadd("rows", next_row()[0]))
            finally:
                await client.aclose()
