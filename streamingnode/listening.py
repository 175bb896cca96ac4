"""The listener for a node's clients at `node.sock` in its directory; its server also answers at
other addresses.

If the socket cannot be created, the node opens with a warning. The modules that answer clients are
loaded with the first client.
"""

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from wal.address import SOCKET_NAME
from wal.files import FILE_MODE
from wal.runtime import event_log, in_thread
from wal.sockets import accept_one_a_turn, stop_accepting

if TYPE_CHECKING:
    from streamingnode.embedded import EmbeddedBackend
    from streamingnode.remote.server import Server

_log = event_log(__name__)

GRACE_S = 3.0
"""How long closing waits for the calls of clients under way."""


class Listener:
    """Accepts the connections of one node from its opening on; the caller holds the directory's
    lock.
    """

    def __init__(self, backend: "EmbeddedBackend") -> None:
        self._backend = backend
        self._server: Server | None = None
        self.path: Path | None = None  # the path of the socket, if there is one
        self._socket: asyncio.AbstractServer | None = None

    @property
    def server(self) -> "Server":
        """The server that answers clients, created at its first use."""
        if self._server is None:
            from streamingnode.remote.server import Server

            self._server = Server(
                self._backend, connections_max=self._backend.config.serve.connections_max
            )
        return self._server

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return 0 if self._server is None else len(self._server.sessions)

    async def open(self, directory: Path) -> None:
        """Listen at `node.sock` in the node's directory, for this user only."""
        path = directory / SOCKET_NAME
        try:
            bound = await in_thread(_bind, path)
        except OSError as error:
            _log.warning("not_listening", path=str(path), error=str(error))
            return
        self.path = path
        loop = asyncio.get_running_loop()
        self._socket = await loop.create_unix_server(
            self._connected, sock=bound, backlog=1, start_serving=False
        )
        await accept_one_a_turn(self._socket)

    async def close(self) -> None:
        """Accept no more connections, wait up to `GRACE_S` for calls under way, and end all
        connections; idempotent.
        """
        if self._socket is not None:
            stop_accepting(self._socket)
        if self._server is not None:
            await self._server.drain(GRACE_S)
            await self._server.close()
        if self.path is not None:
            path = self.path
            self.path = None
            with suppress(OSError):
                await in_thread(path.unlink)

    def _connected(self) -> asyncio.BufferedProtocol:
        return self.server.connected()


def _bind(path: Path) -> socket.socket:
    with suppress(FileNotFoundError):
        # A killed owner left it: the lock is ours, so no other process listens there.
        path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(bound.fileno(), FILE_MODE)  # before it has a name: no other user can ever connect
        bound.bind(os.fspath(path))
        # on some systems the socket's mode is not the mode of its name
        os.chmod(path, FILE_MODE)  # noqa: PTH101
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound
