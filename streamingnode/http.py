"""HTTP of a node: its health, its readiness and its metrics, for probes and monitors.

Starlette routes the requests and uvicorn's protocol parses them, on the event loop of the node.
`uvicorn.Server` is left out: it takes the signals of the process and wakes ten times a second.
Further pages become routes of the same application.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from operator import attrgetter
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from spark_sink.errors import PackageMissing
from streamingnode.config import ServeOptions
from streamingnode.embedded import EmbeddedBackend
from streamingnode.metrics import NodeMetrics
from streamingnode.node import Node
from streamingnode.statistics import AppendMeter
from wal.address import is_loopback
from wal.errors import InvalidArgument, StreamingNodeError, brief
from wal.lifecycle import LogState
from wal.log import SpaceLevel
from wal.runtime import Supervisor, event_log, mark_heard
from wal.sockets import accept_one_a_turn, stop_accepting

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from uvicorn.config import Config
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState
except ImportError as error:
    package = (error.name or "starlette").partition(".")[0]
    raise PackageMissing(package, "http") from error

_log = event_log(__name__)

HEAD_BYTES_MAX = 8_192
"""The most bytes of the request line and the headers."""
REQUEST_S_MAX = 5.0
"""The time within which a client has to send its request."""
ANSWER_S_MAX = 5.0
"""The longest time that a client may leave sent data unread; a stream that flows lasts longer."""
CONNECTIONS_MAX = 32
"""The most connections at a time. One more ends the oldest, so that slow clients do not block a
probe.
"""
METRICS_S_MIN = 1.0
"""The shortest time between two renderings of the metrics, which delay appends; earlier requests
wait.
"""
READY_S_MAX = 1.0
"""The time within which the node has to confirm a new tick; once a second that takes an fsync."""

_HEADERS = [(b"cache-control", b"no-store"), (b"connection", b"close")]
# It is outside the tree of loggers, because the program may change the levels of those at any time.
_quiet = logging.Logger("uvicorn", level=logging.CRITICAL + 1)  # noqa: LOG001

Make = Callable[[], Coroutine[Any, Any, Response]]


def http_address(given: str, *, for_anybody: bool) -> tuple[str, int]:
    """Return the host and port of `HOST:PORT`.

    Raises `InvalidArgument` for anything else, and for an address that other machines reach unless
    it is `for_anybody`.
    """
    host = None
    port = None
    try:
        parts = urlsplit(f"//{given}")
        if parts.netloc == given and "@" not in given:
            host = parts.hostname
            port = parts.port
    except ValueError:
        host = None
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
    """Answers HTTP for one node. Until `watch` is called, it reports the state of recovery."""

    def __init__(self, options: ServeOptions, supervisor: Supervisor) -> None:
        """Raises `InvalidArgument` as `http_address` does."""
        assert options.http, "without an address there is no monitor"
        self._host, self._port = http_address(options.http, for_anybody=options.http_for_anybody)
        self._supervisor = supervisor
        self._node: Node | None = None
        self._server: asyncio.Server | None = None
        self._clients = ServerState()
        self._clients.default_headers = _HEADERS
        self._under_way: dict[Make, asyncio.Task[Response]] = {}
        """Answers under way, which concurrent requests share."""
        self._answers = set[asyncio.Task[Response]]()
        self._rendering = asyncio.Lock()
        self._rendered_at = -math.inf

    async def open(self) -> None:
        """Listen. Raises `InvalidArgument` for an address that is taken or not of this machine."""
        # These settings keep uvicorn from changing processes, environment and loggers.
        config = Config(
            self._application(),
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            workers=1,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
        config.load()
        connect = partial(_Connection, config, self._clients, {})
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                connect, self._host, self._port, backlog=1, start_serving=False
            )
        except OSError as error:
            raise InvalidArgument(
                f"http {self._host}:{self._port} cannot be listened at: {error.strerror} — "
                "end what has the port, or choose another with serve.http (--http)"
            ) from error
        await accept_one_a_turn(self._server)

    @property
    def address(self) -> str:
        """The URL of the node; for port 0 with the port that the system chose."""
        assert self._server is not None, "open comes first"
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def watch(self, node: Node, backend: EmbeddedBackend, appends: AppendMeter) -> None:
        """Answer for an open node from now on."""
        self._node = node
        self._measure = backend.measure
        self._metrics = NodeMetrics(backend, appends)

    async def close(self) -> None:
        """Stop accepting and end all connections; idempotent."""
        if self._server is not None:
            stop_accepting(self._server)
        for connection in list(self._clients.connections):
            connection.transport.abort()
        tasks = [*self._clients.tasks, *self._answers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _application(self) -> Starlette:
        pages: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/livez": self._live,
            "/readyz": partial(self._shared, self._ready),
            "/metrics": partial(self._shared, self._render),
        }
        routes = [Route(path, answer, methods=["GET"]) for path, answer in pages.items()]
        paths = ", ".join(pages)

        async def refused(_request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException), "it is registered for that"
            reason = f"there are {paths}" if error.status_code == 404 else "it takes GET"
            answer = _document(error.status_code, reason=reason)
            answer.headers.update(error.headers or {})
            return answer

        application = Starlette(
            routes=routes, exception_handlers={HTTPException: refused, Exception: _failed}
        )
        application.router.redirect_slashes = False
        return application

    # --- the answers ------------------------------------------------------------------------------

    async def _live(self, _request: Request) -> Response:
        failure = self._supervisor.failure
        if failure is not None:
            return _document(503, live=False, reason=brief(f"{type(failure).__name__}: {failure}"))
        return _document(200, live=True)

    async def _ready(self) -> Response:
        if self._node is None:
            recovering = LogState.RECOVERING.value
            return _document(503, ready=False, state=recovering, reason="the node is opening")
        stats = self._measure()
        state = stats.log.state
        not_ready = partial(_document, 503, ready=False, state=state)
        if state != LogState.OPEN.value:
            return not_ready(reason=f"the log takes no appends: {stats.log.last_error}")
        space = stats.space
        if space is not None and SpaceLevel[space.level.upper()] >= SpaceLevel.FULL:
            return not_ready(reason=f"the disk is {space.level}: appends are refused")
        try:  # a new tick is confirmed only after every append under way now is durable
            tick = await self._node.consistent_tick(timeout=READY_S_MAX)
        except StreamingNodeError as error:
            return not_ready(code=error.code, reason=str(error))
        return _document(200, ready=True, state=state, tick=tick)

    async def _render(self) -> Response:
        if self._node is None:
            return _document(503, reason="the node is opening")
        loop = asyncio.get_running_loop()
        async with self._rendering:
            # The answer is measured after all requests so far; later requests share the next one.
            await asyncio.sleep(self._rendered_at + METRICS_S_MIN - loop.time())
            self._under_way.pop(self._render, None)
            try:
                text, kind = await self._metrics.expose()
            finally:
                self._rendered_at = loop.time()
        return Response(text, headers={"content-type": kind})

    async def _shared(self, make: Make, _request: Request) -> Response:
        """Return an answer that concurrent requests share, so that many cost as much as one."""
        answer = self._under_way.get(make)
        if answer is None:
            answer = asyncio.get_running_loop().create_task(make())
            self._under_way[make] = answer
            self._answers.add(answer)
            answer.add_done_callback(partial(self._answered, make))
        return await asyncio.shield(answer)

    def _answered(self, make: Make, answer: "asyncio.Task[Response]") -> None:
        mark_heard(answer)
        self._answers.discard(answer)
        if self._under_way.get(make) is answer:
            del self._under_way[make]


class _Connection(H11Protocol):
    """One connection: uvicorn's protocol with bounds for slow and for many clients.

    uvicorn bounds the size of a request and idle connections, but not the time of a request or of a
    response; and `limit_concurrency` would refuse the probe, not the oldest client.
    """

    def __init__(self, config: Config, state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, state, app_state)
        # uvicorn's loggers belong to the program, and errors of clients are not logged.
        self.logger = _quiet
        self.access_log = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.opened_at = self.loop.time()
        self.transport.set_write_buffer_limits(high=0)  # paused while anything is unsent
        if len(self.connections) > CONNECTIONS_MAX:
            min(self.connections, key=attrgetter("opened_at")).transport.abort()
        self._end_in(REQUEST_S_MAX)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.flow.write_paused:
            self._end_in(None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_in(None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_in(ANSWER_S_MAX)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_in(None)

    def _end_in(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self.transport.abort)


async def _failed(request: Request, error: Exception) -> Response:
    _log.error("monitor_failed", path=request.url.path, exc_info=error)
    return _document(500, reason="see the event monitor_failed")


def _document(status: int, **fields: object) -> Response:
    body = msgspec.json.encode(fields) + b"\n"
    return Response(body, status, media_type="application/json")
