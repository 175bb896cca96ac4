"""The node as a process of its own: it is ready after recovery; a signal ends its clients, then
it.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from streamingnode.config import load_config
from streamingnode.embedded import EmbeddedBackend
from streamingnode.listening import Listener
from streamingnode.node import Node
from streamingnode.opening import load_what_is_slow, reach_node
from streamingnode.reaching import Wish
from streamingnode.remote.auth import Endpoint, Tokens
from streamingnode.remote.server import Server
from streamingnode.signals import ENDING
from wal.address import SOCKET_NAME
from wal.errors import InvalidArgument, StreamingNodeError
from wal.runtime import Event, event_log, first_of, in_thread

_log = event_log(__name__)


async def serve_node(
    directory: Path,
    endpoints: Sequence[Endpoint],
    config_file: Path | None,
    settings: Mapping[str, object],
    ready: Callable[[list[str]], None],
    reading: "TokensRead | None" = None,
) -> None:
    """Run the node in `directory` until a signal. Raises the error that ends the node.

    Calls `ready` with the addresses at which the node listens. With `reading`, SIGHUP reads the
    file of tokens again, and does not end the node.
    """
    arguments = {"listen": True, **settings}
    settle = partial(load_config, file=config_file, environment=os.environ, arguments=arguments)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    with ENDING.reacting(partial(loop.call_soon_threadsafe, stop.set)):
        await in_thread(load_what_is_slow)
        node = await reach_node(Wish.REPLACE, directory, settle)
        await _serve(node, directory, endpoints, ready, stop, reading)


async def _serve(
    node: Node,
    directory: Path,
    endpoints: Sequence[Endpoint],
    ready: Callable[[list[str]], None],
    stop: asyncio.Event,
    reading: "TokensRead | None",
) -> None:
    try:
        backend = node._backend  # noqa: SLF001 - this is the other half of the node
        assert isinstance(backend, EmbeddedBackend), "it was opened here"
        assert isinstance(backend.listener, Listener), "it was asked to listen"
        server = backend.listener.server
        here = [] if backend.listener.path is None else [f"unix:{directory / SOCKET_NAME}"]
        addresses = [*here, *[await endpoint.listen(server) for endpoint in endpoints]]
        if reading is not None:
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGHUP, reading.begin, endpoints, server
            )
        if not addresses:
            raise InvalidArgument(
                f"there can be no socket in {directory} — name a shorter path, or add --listen"
            )
        if backend.http is not None:
            addresses.append(backend.http)
        await node.consistent_tick()  # ticks advance, so it is ready for readers too
        gc.collect()
        gc.freeze()  # loaded objects stay for ever, so later collections skip them
        ready(addresses)
        await in_thread(notify, "READY=1")
        await first_of(stop.wait(), node.wait_closed())
        await in_thread(notify, "STOPPING=1")
        _log.info("node_stopping", path=str(directory))
    finally:
        await node.aclose()


class TokensRead:
    """Reads the file of tokens again at a signal, and calls `report` with the result.

    A file that cannot be read changes nothing. A connection ends if its token was removed or has
    other rights now; its client then connects again by itself, if it still may.
    """

    def __init__(self, file: Path, report: Callable[[str, Mapping[str, object]], None]) -> None:
        self._file = file
        self._report = report
        self._task: asyncio.Task[None] | None = None
        self._is_asked = False

    def begin(self, endpoints: Sequence[Endpoint], server: Server) -> None:
        """Read the file; if a read is under way, read it once more after that. Called on the event
        loop.
        """
        self._is_asked = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._read(endpoints, server))

    async def _read(self, endpoints: Sequence[Endpoint], server: Server) -> None:
        while self._is_asked:
            self._is_asked = False
            try:
                tokens = await in_thread(Tokens.read, self._file)
            except StreamingNodeError as error:
                text = f"tokens: {error}; the previous tokens stay"
                await in_thread(self._report, text, {"tokens": None, "error": str(error)})
                continue
            for endpoint in endpoints:
                endpoint.tokens = tokens
            ended = server.end_unless(tokens.are_those_of)
            clients = len(tokens.client)
            text = f"tokens: {clients} clients read from {self._file}, {ended} connections ended"
            await in_thread(self._report, text, {"tokens": clients, "ended": ended})


COMPONENTS = {
    "flusher": "flusher",
    "interceptors.timetick": "timetick-sync",
    "streamingnode": "node",
    "streamingnode.audit": "audit",
    "streamingnode.remote": "server",
    "wal": "wal",
    "wal.rocks.recovery": "wal-opener",
    "wal.rocks.store": "wal-opener",
    "wal.rocksmq": "rocksmq",
}
"""The component of a record, by the longest prefix of its logger's name; each foreign logger is a
component of its own.
"""


class JsonLines(logging.Formatter):
    """Formats each record as one JSON object in one line: `time`, `level`, `component`, `logger`,
    `event` and its fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a value without a JSON type becomes text."""
        name = record.name
        component = None
        while name and (component := COMPONENTS.get(name)) is None:
            name = name.rpartition(".")[0]
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "component": component or record.name,
            "logger": record.name,
        }
        if isinstance(record.msg, Event):
            fields = dict(record.msg.fields)
            if "pchannel" in fields and "term" in fields:  # written like the channel of an owner
                fields["channel"] = f"{fields.pop('pchannel')}:rw@{fields['term']}"
            return json.dumps(line | fields, default=str)
        fault = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps(line | {"event": record.getMessage()} | fault, default=str)


def log_as_json() -> None:
    """Log all records of this process, from level info, to stderr as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def notify(state: str) -> None:
    """Send `state` to systemd, if it started this process with `Type=notify`; see sd_notify(3)."""
    if place := os.environ.get("NOTIFY_SOCKET"):
        address = f"\0{place[1:]}" if place.startswith("@") else place
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.sendto(state.encode(), address)
