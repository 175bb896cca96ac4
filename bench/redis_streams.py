"""The durable peer: Redis Streams with `appendfsync always`, a server of our own on a Unix socket
of a scratch directory.

One connection, pipelined, over a client of a few lines that parses nothing but the ends of replies:
faster than the client libraries a Python program would use, so the comparison favours the peer.
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Self

PROGRAM = "redis-server"
START_S = 30.0
"""A server that does not answer by then is given up."""
_LOOK_S = 0.01
_LINES_PER_REPLY = 2
"""The length of an entry's id, and the id."""
_KEY = b"id"
_VALUE = b"value"


def lacking() -> str:
    """Return what is missing to run the peer, empty when nothing is."""
    return "" if shutil.which(PROGRAM) else f"needs {PROGRAM} — apt-get install {PROGRAM}"


def entry_command(stream: bytes, key: bytes, value: bytes) -> bytes:
    """Return the command that appends one row to a stream."""
    return words(b"XADD", stream, b"*", _KEY, key, _VALUE, value)


def words(*given: bytes) -> bytes:
    """Return the words of a command as the server reads them."""
    return b"*%d\r\n" % len(given) + b"".join(
        b"$%d\r\n%b\r\n" % (len(word), word) for word in given
    )


class Connection:
    """A pipelined connection: replies come in the order of the commands."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def open(cls, socket: Path) -> Self:
        """Connect."""
        return cls(*await asyncio.open_unix_connection(str(socket)))

    async def append(self, commands: bytes, count: int) -> None:
        """Send `count` appends at once and return when all are answered, which is after the
        server's fsync.

        Raises `ConnectionError` when the server refuses one or goes away.
        """
        await self.send(commands, count * _LINES_PER_REPLY)

    async def send(self, commands: bytes, lines: int) -> None:
        """Send commands and return when they are answered, with so many lines. Raises as `append`
        does.
        """
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((lines, done))
        self._writer.write(commands)
        await done

    async def close(self) -> None:
        """Hang up."""
        self._listening.cancel()
        self._writer.close()
        await self._writer.wait_closed()

    async def _listen(self) -> None:
        lines = 0
        while data := await self._reader.read(1 << 16):
            if data[:1] == b"-":
                self._fail(data)
            lines += data.count(b"\r\n")
            while self._waiting and lines >= (needed := self._waiting[0][0]):
                lines -= needed
                _, done = self._waiting.popleft()
                done.set_result(None)
        self._fail(b"the server hung up")

    def _fail(self, reason: bytes) -> None:
        while self._waiting:
            _, done = self._waiting.popleft()
            done.set_exception(ConnectionError(reason.decode(errors="replace")))


@contextmanager
def serving(directory: Path) -> Iterator[Path]:
    """Yield the socket of a new server whose data is in `directory`, synced before each answer;
    ended afterwards.
    """
    # The server changes into its directory before it makes the socket, whose path may have 107
    # bytes.
    with tempfile.TemporaryDirectory(prefix="redis-") as place:
        socket = Path(place) / "socket"
        settings = (
            "--port",
            "0",
            "--unixsocket",
            str(socket),
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
        )
        server = subprocess.Popen(
            [PROGRAM, *settings, "--save", "", "--dir", str(directory.absolute())],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"]},
        )
        try:
            yield socket
        finally:
            server.terminate()
            server.wait()


@asynccontextmanager
async def connected(socket: Path) -> AsyncIterator[Connection]:
    """Yield a connection to a server that has just been started. Raises `TimeoutError` when it does
    not answer.
    """
    async with asyncio.timeout(START_S):
        # it says nothing when it listens
        while (connection := await _try_to_connect(socket)) is None:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
    try:
        yield connection
    finally:
        await connection.close()


async def _try_to_connect(socket: Path) -> Connection | None:
    """Return None while the server has not made its socket, or has not begun to listen on it."""
    try:
        return await Connection.open(socket)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
