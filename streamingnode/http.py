"""What a monitor asks of a node over HTTP: whether it lives, whether it is ready, and its metrics.

A few lines of HTTP/1.1: GET of three paths, one request for each connection, everything bounded. It
changes nothing, and gives out no rows.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from spark_sink.errors import PackageMissing
from streamingnode.config import ServeOptions
from streamingnode.embedded import EmbeddedBackend
from streamingnode.node import Node
from streamingnode.remote.address import is_loopback
from streamingnode.statistics import AppendMeter
from wal.errors import InvalidArgument, StreamingNodeError, brief
from wal.lifecycle import LogState
from wal.log import SpaceLevel
from wal.runtime import Supervisor, event_log, in_thread, mark_heard
from wal.sockets import accept_one_a_turn, stop_accepting

if TYPE_CHECKING:
    from streamingnode.metrics import NodeMetrics

_log = event_log(__name__)

HEAD_BYTES_MAX = 8_192
"""Of a request: its line and its headers."""
REQUEST_S_MAX = 5.0
"""Until a client has sent its request."""
ANSWER_S_MAX = 5.0
"""Until a client has taken its answer."""
LINGER_S_MAX = 1.0
LINGER_BYTES_MAX = 1 << 20
"""What is read and thrown away of a client that still sends: closing before that could lose the
answer.
"""
CONNECTIONS_MAX = 32
"""At a time; a further one takes the place of the oldest, so that slow clients keep no probe
out.
"""
METRICS_S_MIN = 1.0
"""From one rendering of the metrics to the next: appends wait for it. Who asks earlier waits."""
READY_S_MAX = 1.0
"""How long a new tick may take: an fsync is part of it once a second."""

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]")


class Reply(NamedTuple):
    """What is answered: a status, and a body of a kind."""

    status: int
    body: bytes
    kind: str = "application/json"

    def encode(self) -> bytes:
        """Return the bytes of the response."""
        allow = "Allow: GET\r\n" if self.status == 405 else ""
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n{allow}Content-Type: "
            f"{self.kind}\r\n"
            f"Content-Length: {len(self.body)}\r\nCache-Control: no-store\r\nConnection: "
            "close\r\n\r\n"
        )
        return head.encode() + self.body


Make = Callable[[], Coroutine[Any, Any, Reply]]


def http_address(given: str, *, for_anybody: bool) -> tuple[str, int]:
    """Return the host and port of `HOST:PORT`. Raises `InvalidArgument`, for one open to other
    machines unless they may.
    """
    try:
        parts = urlsplit(f"//{given}")
        host, port = (
            (parts.hostname, parts.port)
            if parts.netloc == given and "@" not in given
            else (None, None)
        )
    except ValueError:
        host = port = None
    if not host or port is None:
        raise InvalidArgument(
            f"{given!r} is no address for HTTP — give HOST:PORT, as 127.0.0.1:9464"
        )
    if not (is_loopback(host) or for_anybody):
        raise InvalidArgument(
            f"http {given} is open to other machines, which may read the metrics without a token — "
            "use 127.0.0.1, or allow it with serve.http_for_anybody (--http-for-anybody)"
        )
    return host, port


class Monitor:
    """Answers HTTP for one node; on its event loop. Until `watch` is called the node is
    recovering.
    """

    def __init__(self, options: ServeOptions, supervisor: Supervisor) -> None:
        """Raises `InvalidArgument` for an address that is none, or open to other machines."""
        assert options.http, "without an address there is no monitor"
        self._host, self._port = http_address(options.http, for_anybody=options.http_for_anybody)
        self._supervisor = supervisor
        self._node: Node | None = None
        self._connections = dict[asyncio.Task[Any], None]()
        """By age, the oldest first."""
        self._server: asyncio.AbstractServer | None = None
        self._routes: dict[str, Callable[[], Awaitable[Reply]]] = {
            "/livez": self._live,
            "/readyz": partial(self._shared, self._ready),
            "/metrics": partial(self._shared, self._metrics),
        }
        self._under_way: dict[Make, asyncio.Task[Reply]] = {}
        """Answers that whoever asks now shares."""
        self._answers = set[asyncio.Task[Reply]]()
        self._rendering = asyncio.Lock()
        self._rendered_at = -math.inf

    async def open(self) -> None:
        """Listen. Raises `InvalidArgument` for an address that cannot be had."""
        try:
            self._server = await asyncio.start_server(
                self._connected,
                self._host,
                self._port,
                limit=HEAD_BYTES_MAX,
                backlog=1,
                start_serving=False,
            )
        except OSError as error:
            raise InvalidArgument(
                f"http {self._host}:{self._port} cannot be listened at: {error.strerror} — "
                "end what has the port, or choose another with serve.http (--http)"
            ) from error
        await accept_one_a_turn(self._server)

    @property
    def address(self) -> str:
        """Where it listens, as a URL; the port is the one it got for 0."""
        assert self._server is not None, "open comes first"
        # uvloop has a class of its own
        host, port = self._server.sockets[0].getsockname()[:2]  # type: ignore[attr-defined]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def watch(self, node: Node, backend: EmbeddedBackend, appends: AppendMeter) -> None:
        """Tell from now on how an open node is."""

        @cache  # its library is loaded with the first question
        def make_metrics() -> "NodeMetrics":
            from streamingnode.metrics import NodeMetrics

            return NodeMetrics(backend, appends)

        self._node = node
        self._measure = backend.measure
        self._make_metrics = make_metrics

    async def close(self) -> None:
        """Take no more connections, and end those there are; idempotent."""
        if self._server is not None:
            stop_accepting(self._server)
        for task in list(self._connections):
            task.cancel()
        for answer in self._answers:
            answer.cancel()
        await asyncio.gather(*self._connections, *self._answers, return_exceptions=True)

    # --- the answers ------------------------------------------------------------------------------

    async def _live(self) -> Reply:
        if (failure := self._supervisor.failure) is not None:
            return _document(503, live=False, reason=brief(f"{type(failure).__name__}: {failure}"))
        return _document(200, live=True)

    async def _ready(self) -> Reply:
        if self._node is None:
            return _document(
                503, ready=False, state=LogState.RECOVERING.value, reason="the node is opening"
            )
        told = self._measure()
        state = told.log.state
        space = told.space
        if state != LogState.OPEN.value:
            return _document(
                503,
                ready=False,
                state=state,
                reason=f"the log takes no appends: {told.log.last_error}",
            )
        if space is not None and SpaceLevel[space.level.upper()] >= SpaceLevel.FULL:
            return _document(
                503,
                ready=False,
                state=state,
                reason=f"the disk is {space.level}: appends are refused",
            )
        try:  # ticks advance, and everything that is on its way now is written
            tick = await self._node.consistent_tick(timeout=READY_S_MAX)
        except StreamingNodeError as error:
            return _document(503, ready=False, state=state, code=error.code, reason=str(error))
        return _document(200, ready=True, state=state, tick=tick)

    async def _metrics(self) -> Reply:
        if self._node is None:
            return _document(503, reason="the node is opening")
        loop = asyncio.get_running_loop()
        async with self._rendering:
            # Each answer is measured after its question, and those of the second before share it.
            await asyncio.sleep(self._rendered_at + METRICS_S_MIN - loop.time())
            self._under_way.pop(self._metrics, None)
            try:
                metrics = await in_thread(self._make_metrics)
                return Reply(200, *await metrics.expose())
            except PackageMissing as error:
                return _document(501, code=error.code, reason=str(error))
            finally:
                self._rendered_at = loop.time()

    async def _shared(self, make: Make) -> Reply:
        """Return an answer that all who ask meanwhile get: many cost the node no more than one."""
        answer = self._under_way.get(make)
        if answer is None:
            answer = self._under_way[make] = asyncio.get_running_loop().create_task(make())
            self._answers.add(answer)
            answer.add_done_callback(partial(self._answered, make))
        return await asyncio.shield(answer)  # one who leaves ends it for nobody else

    def _answered(self, make: Make, answer: "asyncio.Task[Reply]") -> None:
        mark_heard(answer)  # all who asked may have left
        self._answers.discard(answer)
        if self._under_way.get(make) is answer:
            del self._under_way[make]

    # --- the connections --------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio calls it in one"
        if len(self._connections) >= CONNECTIONS_MAX:
            next(iter(self._connections)).cancel()
        self._connections[task] = None
        try:
            # so that `drain` waits until all of it is sent
            writer.transport.set_write_buffer_limits(high=0)
            # A client that leaves, or is too slow, is not worth a word.
            with suppress(
                OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError
            ):
                reply = await self._answer(reader)
                async with asyncio.timeout(ANSWER_S_MAX):
                    writer.write(reply.encode())
                    await writer.drain()
                    writer.write_eof()
                taken = 0
                async with asyncio.timeout(LINGER_S_MAX):
                    while taken < LINGER_BYTES_MAX and (more := await reader.read(HEAD_BYTES_MAX)):
                        taken += len(more)
        finally:
            del self._connections[task]
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> Reply:
        try:
            async with asyncio.timeout(REQUEST_S_MAX):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _document(431, reason=f"the request has over {HEAD_BYTES_MAX} bytes")
        except TimeoutError:
            return _document(408, reason=f"the request took over {REQUEST_S_MAX:g} s")
        request = _REQUEST_LINE.fullmatch(head.partition(b"\r\n")[0])
        if request is None:
            return _document(400, reason="this is no HTTP/1.1 request")
        route = self._routes.get(request[2].partition(b"?")[0].decode())
        if route is None:
            return _document(404, reason=f"there are {', '.join(self._routes)}")
        if request[1] != b"GET":
            return _document(405, reason="it takes GET")
        try:
            return await route()
        except Exception:  # noqa: BLE001 - a bug, which is not to end as silence
            _log.error("monitor_failed", path=request[2].decode(), exc_info=True)
            return _document(500, reason="see the event monitor_failed")


def _document(status: int, **fields: object) -> Reply:
    return Reply(status, msgspec.json.encode(fields) + b"\n")
