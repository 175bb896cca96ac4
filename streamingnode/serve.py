"""The node as a process of its own: ready after recovery, ended by a signal, its clients first."""

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

from streamingnode.composition import compose
from streamingnode.config import load_config
from streamingnode.embedded import EmbeddedBackend
from streamingnode.listening import Listener
from streamingnode.opening import OpenNode, handed_over
from streamingnode.remote.address import SOCKET_NAME
from streamingnode.remote.auth import Endpoint
from wal.errors import InvalidArgument
from wal.files import FILE_MODE
from wal.runtime import Event, event_log, in_thread

_log = event_log(__name__)


async def serve_node(
    directory: Path,
    endpoints: Sequence[Endpoint],
    config_file: Path | None,
    settings: Mapping[str, object],
    ready: Callable[[list[str]], None],
) -> None:
    """Run the node in `directory` until a signal; `ready` is told where it listens. Raises what the node fails with."""
    arguments = {"listen": True, **settings}
    settle = partial(load_config, file=config_file, environment=os.environ, arguments=arguments)
    stop = _stop_on_signals()
    # By anybody: it may be the process that this one replaces.
    node = await handed_over(directory, partial(OpenNode, directory, settle, compose), by_anybody=True)
    try:
        backend = node._backend  # noqa: SLF001 - this is the other half of the node
        assert isinstance(backend, EmbeddedBackend), "it was opened here"
        assert isinstance(backend.listener, Listener), "it was asked to listen"
        server = backend.listener.server
        here = [] if backend.listener.path is None else [f"unix:{directory / SOCKET_NAME}"]
        addresses = [*here, *[await endpoint.listen(server) for endpoint in endpoints]]
        if not addresses:
            raise InvalidArgument(f"there can be no socket in {directory} — name a shorter path, or add --listen")
        if backend.http is not None:
            addresses.append(backend.http)
        await node.consistent_tick()  # ticks advance: it is ready for readers, too
        gc.collect()
        gc.freeze()  # what is loaded stays: no collection walks it again
        ready(addresses)
        await in_thread(notify, "READY=1")
        ending = [asyncio.ensure_future(each) for each in (stop.wait(), node.wait_closed())]
        await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        for each in ending:
            each.cancel()
        await in_thread(notify, "STOPPING=1")
        _log.info("node_stopping", path=str(directory))
    finally:
        await node.aclose()


def audit_to(file: Path) -> None:
    """Add what the server's audit log says to a file that only its owner reads. Raises `OSError`; blocks."""
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, FILE_MODE))
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    audit = logging.getLogger("streamingnode.audit")
    audit.setLevel(logging.INFO)
    audit.addHandler(handler)


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
"""Who says something, by the longest prefix of its logger's name; other people's loggers are a component each."""


class JsonLines(logging.Formatter):
    """Makes of each record one JSON object in one line: `time`, `level`, `component`, `logger`, `event` and its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; what JSON does not know is given as text."""
        name, component = record.name, None
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
            if "pchannel" in fields and "term" in fields:  # as the channel of an owner is written
                fields["channel"] = f"{fields.pop('pchannel')}:rw@{fields['term']}"
            return json.dumps(line | fields, default=str)
        fault = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps(line | {"event": record.getMessage()} | fault, default=str)


def log_as_json() -> None:
    """Have everything this process logs, from info on, on stderr as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _stop_on_signals() -> asyncio.Event:
    """Return what the first signal sets; the second one ends the process where it is, as a crash would."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def came() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, came)
    return stop


def notify(state: str) -> None:
    """Tell systemd, where it started this process with `Type=notify`; see sd_notify(3)."""
    if place := os.environ.get("NOTIFY_SOCKET"):
        address = f"\0{place[1:]}" if place.startswith("@") else place
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.sendto(state.encode(), address)
