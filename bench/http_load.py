"""A load on `service_app`, as a process of its own:
`python -m bench.http_load PORT CONNECTIONS SECONDS` prints its figures.

Each connection is kept and has one request outstanding. The requests are put together from ready
pieces and of the answer only the status line is looked at, so that one process is far from being
what limits the service; `core` says how far.
"""

import argparse
import asyncio
import dataclasses
import itertools
import random
import string
import sys
import time
from typing import cast

import msgspec

from bench.baseline import Load, Measured, measure_appends
from bench.rows import VALUE_BYTES
from streamingnode.opening import run_async

WARM_UP_S = 1.0
"""At most, and no longer than what is measured."""
GIVE_UP_S = 60.0
"""A service that has not answered everything by so long after the end is given up."""
FIRST_ID = 10**9
FIRST_ITEM = 1000
ITEMS = 1000
"""Numbers of one length each: so all requests have one length."""
_VALUES = 64
"""Values made before the clock starts and used in turn."""
_ANSWER = b"HTTP/1.1 204 "
_END = b"\r\n\r\n"


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What one load came to; `core` is the part of a core that the load itself took, `sent` counts
    the warm-up too.
    """

    requests_per_s: float
    p50_s: float
    p99_s: float
    core: float
    sent: int


class Connection(asyncio.Protocol):
    """A kept connection with at most one request outstanding."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what to write to."""
        # uvloop's own derives from none of asyncio's
        self._transport = cast("asyncio.WriteTransport", transport)

    def post(self, request: bytes) -> asyncio.Future[None]:
        """Send one; the future is done when it is answered. It fails with `ConnectionError` for
        anything but a 204.
        """
        assert self._transport is not None, "connected"
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answered

    def data_received(self, data: bytes) -> None:
        """Take an answer, which has no body, or a part of it."""
        self._received += data
        answered = self._answered
        if answered is None or answered.done():
            return
        if not self._received.startswith(_ANSWER[: len(self._received)]):
            answered.set_exception(ConnectionError(self._received.decode(errors="replace")))
        elif self._received.endswith(_END):
            self._received = b""
            answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is outstanding."""
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError("the service hung up"))

    def close(self) -> None:
        """Hang up."""
        assert self._transport is not None, "connected"
        self._transport.close()


class Requests:
    """Orders, each with an id of its own; items come again."""

    def __init__(self) -> None:
        letters = random.Random(0)
        values = [
            "".join(letters.choices(string.ascii_letters, k=VALUE_BYTES)).encode()
            for _ in range(_VALUES)
        ]
        length = len(_body(FIRST_ID, FIRST_ITEM, values[0]))
        head = (
            b"POST /orders HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: "
            b"application/json\r\nContent-Length: %d\r\n\r\n"
        )
        self._head = head % length
        self._values = itertools.cycle(values)
        self.count = 0

    def next(self) -> bytes:
        """Return the next one."""
        number = self.count
        self.count = self.count + 1
        return self._head + _body(
            FIRST_ID + number, FIRST_ITEM + number % ITEMS, next(self._values)
        )


def _body(order: int, item: int, value: bytes) -> bytes:
    return b'{"id":%d,"item":%d,"value":"%b"}' % (order, item, value)


async def run_load(port: int, connections: int, seconds: float) -> Loaded:
    """Warm up, and measure. Raises `ConnectionError` when the service refuses a request or goes
    away.
    """
    loop = asyncio.get_running_loop()
    requests = Requests()
    async with asyncio.timeout(2 * seconds + GIVE_UP_S):
        idle = [
            (await loop.create_connection(Connection, "127.0.0.1", port))[1]
            for _ in range(connections)
        ]
        opened = list(idle)

        async def post() -> None:
            connection = idle.pop()
            await connection.post(requests.next())
            idle.append(connection)

        load = Load(outstanding=connections, batch=1, seconds=seconds)
        await measure_appends(dataclasses.replace(load, seconds=min(WARM_UP_S, seconds)), post)
        busy = time.process_time()
        began = time.perf_counter()
        measured: Measured = await measure_appends(load, post)
        core = (time.process_time() - busy) / (time.perf_counter() - began)
    for connection in opened:
        connection.close()
    return Loaded(
        requests_per_s=measured.rows_per_s,
        p50_s=measured.p50_s,
        p99_s=measured.p99_s,
        core=core,
        sent=requests.count,
    )


def main() -> None:
    """Run one load and print what it came to as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("connections", type=int)
    parser.add_argument("seconds", type=float)
    arguments = parser.parse_args()
    try:
        loaded = run_async(
            lambda: run_load(arguments.port, arguments.connections, arguments.seconds)
        )
    except* ConnectionError as failed:  # every connection says the same
        sys.exit(str(failed.exceptions[0]))
    print(msgspec.json.encode(loaded).decode())


if __name__ == "__main__":
    main()
