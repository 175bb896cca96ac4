"""The server's side of connections: who is connected to a node, and the end of it."""

import asyncio
import ssl
import time
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any

import anyio

from streamingnode.embedded import EmbeddedBackend
from streamingnode.errors import Unauthenticated
from streamingnode.remote.answers import Rights
from streamingnode.remote.connection import Connection
from streamingnode.remote.session import Authenticate, Session, Shared
from wal.errors import OnShutdown, ProtocolError
from wal.runtime import accept_one_a_turn, event_log

_log = event_log(__name__)

HELLO_S_MAX = 10.0
"""How long a connection may take to say who it is."""
CATALOG_PAUSE_S = 0.02
"""Until clients hear of a collection that another one made, at most."""
DRAIN_PAUSE_S = 0.02
"""Between two looks whether clients still wait for answers."""
CLOSE_S_MAX = 1.0
"""How long closing waits for clients to read what was sent to them."""
SILENT_S_MAX = 60.0
"""A client says something every few seconds; one that does not is gone."""


class Server:
    """Takes connections for one open node, which outlives it. On the event loop; `close` comes before the node's end."""

    def __init__(self, backend: EmbeddedBackend, *, connections_max: int) -> None:
        self.shared = Shared(backend, connections_max=connections_max)
        self._listeners: list[asyncio.AbstractServer] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Begin to tell clients of collections, and to look for those that are gone."""
        self._spawn(self._tell_catalog())
        self._spawn(self._drop_silent())

    async def listen_tcp(self, host: str, port: int, authenticate: Authenticate, tls: ssl.SSLContext | None) -> int:
        """Take connections at an address; return the port. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        patience_s = None if tls is None else HELLO_S_MAX
        connected = partial(self._connected, authenticate)
        listener = await loop.create_server(connected, host, port, ssl=tls, ssl_handshake_timeout=patience_s, backlog=1)
        accept_one_a_turn(listener)
        self._listeners.append(listener)
        found: int = listener.sockets[0].getsockname()[1]
        return found

    async def drain(self, grace_s: float) -> None:
        """Take no more connections, tell clients to leave, and let what they have under way end for a while."""
        for listener in self._listeners:
            listener.close()
        for session in self.shared.sessions:
            session.say_goodbye()
        with anyio.move_on_after(grace_s if self.shared.sessions else 0):
            await asyncio.sleep(DRAIN_PAUSE_S)  # what clients sent before they heard of it is on its way
            while any(session.is_busy for session in self.shared.sessions):  # noqa: ASYNC110 - of many things
                await asyncio.sleep(DRAIN_PAUSE_S)

    async def close(self) -> None:
        """End every connection; idempotent."""
        for listener in self._listeners:
            listener.close()
        for task in list(self._tasks):
            task.cancel()
        for session in list(self.shared.sessions):
            session.connection.close()
            session.lost(None)
        patience_s: float | None = CLOSE_S_MAX
        sessions = list(self.shared.sessions)
        while ending := [*self._tasks, *(task for session in sessions for task in session.ending)]:
            _, pending = await asyncio.wait(ending, timeout=patience_s)
            if pending:  # clients that do not read what was sent to them
                patience_s = None
                _abort(sessions)
        _abort(sessions)
        self.shared.sessions.clear()

    def connected_here(self) -> Connection:
        """Take a connection from who may open the node's directory, too."""
        return self._connected(lambda hello, _: Rights(hello.name[:128] or "local"))

    def _connected(self, authenticate: Authenticate) -> Connection:
        return Session(self.shared, authenticate).connection

    async def _tell_catalog(self) -> None:
        """Tell clients what has changed of the collections, by looking: a reader would cost every append something."""
        catalog, version = self.shared.backend.catalog, -1
        while True:
            await asyncio.sleep(CATALOG_PAUSE_S)
            now = self.shared.backend.catalog
            if now is catalog and now.version == version:
                continue
            catalog, version = now, now.version
            for session in self.shared.sessions:
                if session.rights is not None:
                    session.work(session.send_catalog())

    async def _drop_silent(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(HELLO_S_MAX / 2)
            for session in list(self.shared.sessions):
                limit = HELLO_S_MAX if session.rights is None else SILENT_S_MAX
                since = session.began_at if session.rights is None else session.connection.received_at
                if loop.time() - since > limit:
                    session.connection.abort(ProtocolError(f"nothing came for {limit:g} s"))
                elif session.rights is not None and session.rights.until_s <= time.time():
                    session.connection.abort(Unauthenticated(f"the token of {session.rights.name!r} has expired"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, OnShutdown):
            _log.error("server_task_failed", error=f"{type(error).__name__}: {error}")


def _abort(sessions: Iterable[Session]) -> None:
    for session in sessions:
        session.connection.abort(OnShutdown("the node is closed — connect again"))
