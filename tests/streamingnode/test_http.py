"""Health of a node over HTTP: what it says of itself is so, and nobody keeps a probe out or the
node busy.
"""

import asyncio
import logging
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import Response

import streamingnode as sn
from flusher.run import FlushOptions
from streamingnode import http
from streamingnode.channel import Channel
from streamingnode.config import ServeOptions
from streamingnode.errors import InvalidArgument, PackageMissing, StorageFull
from streamingnode.http import CONNECTIONS_MAX, HEAD_BYTES_MAX, Monitor, http_address
from streamingnode.metrics import NodeMetrics
from streamingnode.node import Node
from streamingnode.opening import visit_node
from tests.failing_disk import FailingDisk
from tests.streamingnode.http_asking import Answer, ask, ask_raw, free_port, port_of
from tests.streamingnode.remote.nodes import SCHEMA, rows
from wal.lifecycle import ReopenOptions
from wal.rocks.writer import Writer
from wal.runtime import Supervisor

pytestmark = pytest.mark.anyio

ANY_PORT = "127.0.0.1:0"
QUICK: dict[str, Any] = {
    "reopen": ReopenOptions(first_pause_s=0.001, longest_pause_s=0.01),
    "flush": FlushOptions(retry_first_s=0.001),
    "cut_interval_s": None,
}
FOR_EVER = 1 << 30


@pytest.fixture(autouse=True)
def metrics_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no test wait a second for metrics, but for the one of that."""
    monkeypatch.setattr(http, "METRICS_S_MIN", 0.05)


async def ask_until(port: int, path: str, status: int) -> Answer:
    while (answer := await ask(port, path)).status != status:
        pass
    return answer


# --- what is answered -----------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [False, True])
async def test_an_open_node_is_alive_and_ready_with_ticks_that_advance(
    in_memory: bool, tmp_path: Path
) -> None:
    async with sn.open_node(None if in_memory else tmp_path, http=ANY_PORT) as node:
        port = port_of(node)
        assert await ask(port, "/livez") == Answer(
            200, (await ask(port, "/livez")).headers, b'{"live":true}\n'
        )
        ticks = [(await ask(port, "/readyz?verbose")).document["tick"] for _ in range(3)]
        assert ticks == sorted(set(ticks))
        await node.create_collection("c", SCHEMA, primary_key="id")
        written = await node.insert("c", rows(1))
        ready = await ask(port, "/readyz")
        assert (ready.status, ready.document["ready"], ready.document["state"]) == (
            200,
            True,
            "open",
        )
        assert ready.document["tick"] > written.time_tick
    with pytest.raises(ConnectionRefusedError):
        await ask(port, "/livez")


async def test_a_node_that_recovers_is_alive_and_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_open = anyio.Event()
    port = free_port()
    open_channel = Channel.open

    async def slow(channel: Channel) -> None:
        await may_open.wait()
        await open_channel(channel)

    monkeypatch.setattr(Channel, "open", slow)
    opening = sn.open_node(tmp_path, http=f"127.0.0.1:{port}")
    async with anyio.create_task_group() as tasks:

        async def look() -> None:
            ready = None
            while ready is None:
                with suppress(ConnectionRefusedError):
                    ready = await ask(port, "/readyz")
            assert (ready.status, ready.document["state"]) == (503, "recovering")
            assert (await ask(port, "/livez")).status == 200
            assert (await ask(port, "/metrics")).status == 503
            may_open.set()

        tasks.start_soon(look)
        async with opening:
            assert (await ask(port, "/readyz")).status == 200


async def test_a_node_whose_log_is_reopened_is_alive_and_ready_again_when_the_log_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    config = sn.load_config(arguments={**QUICK, "http": ANY_PORT})
    async with sn.open_node(tmp_path, config=config) as node, anyio.create_task_group() as tasks:
        port = port_of(node)
        await node.create_collection("c", SCHEMA, primary_key="id")
        disk.fail_at(1, times=FOR_EVER)
        tasks.start_soon(node.insert, "c", rows(1))
        ready = await ask_until(port, "/readyz", 503)
        assert ready.document["state"] != "open" or ready.document["code"]
        while (ready := await ask(port, "/readyz")).document["state"] not in {
            "reopening",
            "waiting",
            "recovering",
        }:
            pass
        assert ready.status == 503
        assert "the log takes no appends" in ready.document["reason"]
        assert (await ask(port, "/livez")).status == 200
        metrics = (await ask(port, "/metrics")).body.decode()
        assert re.search(r'_recovery_info\{.*state="open"\} 0.0', metrics)
        disk.heal()
        await ask_until(port, "/readyz", 200)
        metrics = (await ask(port, "/metrics")).body.decode()
        assert re.search(r"_log_reopened_total\{.*\} [1-9]", metrics)


async def test_a_node_whose_disk_does_not_answer_is_not_ready_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    write = Writer.write_batch
    answers.set()

    def hanging(writer: Writer, batch: Any) -> None:
        answers.wait()
        write(writer, batch)

    monkeypatch.setattr(Writer, "write_batch", hanging)
    monkeypatch.setattr(http, "READY_S_MAX", 0.05)
    async with sn.open_node(tmp_path, http=ANY_PORT) as node, anyio.create_task_group() as tasks:
        await node.create_collection("c", SCHEMA, primary_key="id")
        answers.clear()
        try:
            tasks.start_soon(node.insert, "c", rows(1))
            ready = await ask_until(port_of(node), "/readyz", 503)
            assert ready.document["state"] == "open"
            assert ready.document["code"] in {"DEADLINE_EXCEEDED", "OVERLOADED"}
            assert (await ask(port_of(node), "/livez")).status == 200
        finally:
            answers.set()
        await ask_until(port_of(node), "/readyz", 200)


async def test_a_node_that_refuses_appends_for_want_of_space_is_not_ready(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path, http=ANY_PORT, free_bytes_min=1 << 50) as node:
        with pytest.raises(StorageFull):
            await node.create_collection("c", SCHEMA, primary_key="id")
        ready = await ask(port_of(node), "/readyz")
        assert ready.status == 503
        assert "appends are refused" in ready.document["reason"]


async def test_a_node_whose_background_work_failed_is_not_alive() -> None:
    async def fail() -> None:
        raise RuntimeError("broken")

    supervisor = Supervisor(lambda _: None)
    monitor = Monitor(ServeOptions(http=ANY_PORT), supervisor)
    await monitor.open()
    try:
        port = int(monitor.address.rpartition(":")[2])
        assert (await ask(port, "/livez")).status == 200
        await asyncio.wait({supervisor.spawn(fail())})
        live = await ask(port, "/livez")
        assert (live.status, live.document) == (
            503,
            {"live": False, "reason": "RuntimeError: broken"},
        )
    finally:
        await monitor.close()


async def test_a_node_that_closes_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await sn.open_node(tmp_path, http=ANY_PORT)
    may_close = anyio.Event()
    drain = node._backend.drain

    async def slow() -> None:
        await may_close.wait()
        await drain()

    monkeypatch.setattr(node._backend, "drain", slow)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(node.aclose)
        ready = await ask_until(port_of(node), "/readyz", 503)
        assert ready.document["code"] == "ON_SHUTDOWN"
        may_close.set()


@pytest.mark.parametrize("package", ["prometheus_client", "starlette", "uvicorn"])
async def test_a_package_of_http_that_is_missing_refuses_the_opening_and_names_the_extra(
    package: str, tmp_path: Path
) -> None:
    program = f"""
import sys
sys.modules[{package!r}] = None
import streamingnode as sn

try:
    sn.sync.open_node("data", http="127.0.0.1:0")
except sn.StreamingNodeError as error:
    print(error.code, error.package)
    print(error)
sn.sync.open_node("data").close()
print("opened without")
"""
    done = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=tmp_path, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await done.communicate()
    first, second, last = said.decode().splitlines()
    assert (first, last) == (f"PACKAGE_MISSING {package}", "opened without")
    assert second == str(PackageMissing(package, "http"))
    assert "[http]" in second


# --- who asks badly -------------------------------------------------------------------------------


@pytest.fixture
async def node() -> Any:
    async with sn.open_node(None, http=ANY_PORT) as opened:
        yield opened


def asking(line: str, body: str = "") -> bytes:
    return f"{line} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    "request_bytes, status",
    [
        (asking("POST /livez", "abc"), 405),
        (asking("DELETE /metrics"), 405),
        (asking("GET /"), 404),
        (asking("GET /livez/"), 404),
        (asking("GET /livez/../metrics"), 404),
        (asking("GET /Livez"), 404),
        (asking("GET http://elsewhere/livez"), 404),
    ],
)
async def test_what_there_is_not_is_refused_in_json_and_the_next_request_is_answered(
    node: Node, request_bytes: bytes, status: int
) -> None:
    answer = await ask_raw(port_of(node), request_bytes)
    assert (answer.status, answer.headers["connection"]) == (status, "close")
    assert answer.document["reason"]
    assert ("GET" in answer.headers.get("allow", "")) == (status == 405)
    assert (await ask(port_of(node), "/livez")).status == 200


async def test_a_head_is_answered_without_a_body(node: Node) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(node))
    writer.write(asking("HEAD /livez"))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"cache-control: no-store" in head
    assert not body
    writer.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /livez\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",  # without a host
        b"GET /liv\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES_MAX,
        b"x" * 1_000_000,
        asking("POST /metrics", "x" * 1_000_000),
    ],
)
async def test_what_is_no_request_ends_its_connection_and_the_next_one_is_answered(
    node: Node, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(node))
    writer.write(request_bytes)
    with suppress(ConnectionResetError):  # closed before all of it was read
        answered = await reader.read()
        assert answered.startswith((b"HTTP/1.1 400", b"HTTP/1.1 405"))
    writer.close()
    assert (await ask(port_of(node), "/livez")).status == 200
    assert not caplog.records


async def test_a_program_that_serves_by_uvicorn_keeps_its_signals_and_loggers(node: Node) -> None:
    before = dict(environment_of_uvicorn())
    async with sn.open_node(None, http=ANY_PORT) as other:
        assert (await ask(port_of(other), "/livez")).status == 200
        assert dict(environment_of_uvicorn()) == before
    assert dict(environment_of_uvicorn()) == before
    access = logging.getLogger("uvicorn.access")
    assert access.propagate
    assert access.getEffectiveLevel() == logging.getLogger().getEffectiveLevel()


def environment_of_uvicorn() -> Iterator[tuple[object, object]]:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield number, signal.getsignal(number)
    for name in ("", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logger = logging.getLogger(name)
        yield name, (logger.level, logger.propagate, logger.disabled, list(logger.handlers))


async def test_a_client_that_leaves_half_way_leaves_nothing_behind(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    for sent in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n"):
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(node))
        writer.write(sent)
        writer.transport.abort()
    assert (await ask(port_of(node), "/livez")).status == 200
    assert not caplog.records


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\n"])
async def test_a_client_that_takes_too_long_to_ask_is_cut_off(
    sent: bytes, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "REQUEST_S_MAX", 0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(node))
    writer.write(sent)
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


async def test_a_client_that_does_not_take_its_answer_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def much(_monitor: Monitor, _request: Request) -> Response:
        return Response(b"x" * (64 << 20))

    monkeypatch.setattr(http, "ANSWER_S_MAX", 0.05)
    monkeypatch.setattr(Monitor, "_live", much)
    monitor = Monitor(ServeOptions(http=ANY_PORT), Supervisor(lambda _: None))
    await monitor.open()
    connections = monitor._clients.connections
    try:
        port = int(monitor.address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(asking("GET /livez"))
        while not connections:  # noqa: ASYNC110 - it is accepted meanwhile
            await asyncio.sleep(0)
        while connections:  # noqa: ASYNC110 - the node cuts it off
            await asyncio.sleep(0)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(64 << 20)
        writer.close()
    finally:
        await monitor.close()


async def test_a_client_that_takes_its_answer_slowly_gets_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 8 << 20

    async def much(_monitor: Monitor, _request: Request) -> Response:
        return Response(b"x" * size)

    monkeypatch.setattr(Monitor, "_live", much)
    monitor = Monitor(ServeOptions(http=ANY_PORT), Supervisor(lambda _: None))
    await monitor.open()
    try:
        port = int(monitor.address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(asking("GET /livez"))
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(size >> 16):
            assert len(await reader.readexactly(1 << 16)) == 1 << 16
            await asyncio.sleep(0)
        assert await reader.read() == b""
        writer.close()
    finally:
        await monitor.close()


async def test_many_who_ask_for_metrics_cost_the_node_one_rendering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[object]()
    rendered = list[float]()
    may_go_on = asyncio.Event()
    shared = Monitor._shared
    expose = NodeMetrics.expose

    async def noted(monitor: Monitor, make: Any, request: Request) -> Response:
        asked.append(make)
        return await shared(monitor, make, request)

    async def held(metrics: NodeMetrics) -> tuple[bytes, str]:
        rendered.append(asyncio.get_running_loop().time())
        await may_go_on.wait()
        return await expose(metrics)

    monkeypatch.setattr(Monitor, "_shared", noted)
    monkeypatch.setattr(NodeMetrics, "expose", held)
    async with sn.open_node(None, http=ANY_PORT) as node, anyio.create_task_group() as tasks:
        port = port_of(node)
        answers = list[Answer]()

        async def ask_once() -> None:
            answers.append(await ask(port, "/metrics"))

        tasks.start_soon(ask_once)
        while not rendered:  # noqa: ASYNC110 - by the node
            await asyncio.sleep(0)
        for _ in range(16):  # while the first one is rendered: their answer is measured after that
            tasks.start_soon(ask_once)
        while len(asked) < 17:  # noqa: ASYNC110 - by the node
            await asyncio.sleep(0)
        may_go_on.set()
        while len(answers) < 17:  # noqa: ASYNC110 - by the node
            await asyncio.sleep(0)
    assert {answer.status for answer in answers} == {200}
    first, second = rendered
    assert second - first >= http.METRICS_S_MIN


async def test_many_idle_clients_keep_no_probe_out_and_the_oldest_goes_first(node: Node) -> None:
    port = port_of(node)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX)]
    for reader, _ in idle[:3]:
        assert (await ask(port, "/livez")).status == 200
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        idle.append(await asyncio.open_connection("127.0.0.1", port))
    for _, writer in idle:
        writer.close()


async def test_closing_the_node_ends_the_connections_of_monitors(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path, http=ANY_PORT) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(node))
        writer.write(b"GET /li")
        assert (await ask(port_of(node), "/livez")).status == 200
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


async def test_a_bug_in_an_answer_is_told_and_logged(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise KeyError("gone")

    monkeypatch.setattr("streamingnode.metrics.NodeMetrics.measure", lambda _: broken())
    assert (await ask(port_of(node), "/metrics")).status == 500
    assert "monitor_failed" in caplog.text
    assert (await ask(port_of(node), "/livez")).status == 200


# --- where it listens -----------------------------------------------------------------------------


async def test_a_port_in_use_is_an_error_that_names_it_and_leaves_nothing_open(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(InvalidArgument, match=f"{address} cannot be listened at.* — .*--http"):
            await sn.open_node(tmp_path, http=address)
    async with sn.open_node(tmp_path, http=address) as node:
        assert (await ask(port_of(node), "/readyz")).status == 200


@pytest.mark.parametrize(
    "address", ["0.0.0.0:9464", "[::]:9464", "192.0.2.1:80", "node.example:9464"]
)
async def test_an_address_that_other_machines_reach_is_refused_unless_it_is_for_anybody(
    address: str,
) -> None:
    with pytest.raises(InvalidArgument, match="without a token"):
        await sn.open_node(None, http=address)
    assert http_address(address, for_anybody=True)[1] == int(address.rpartition(":")[2])


@pytest.mark.parametrize(
    "address",
    ["9464", ":9464", "localhost", "127.0.0.1:", "a:b", "h:99999", "u@h:1", "h:1/x", "[::1"],
)
def test_what_is_no_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument, match="give HOST:PORT"):
        http_address(address, for_anybody=True)


async def test_a_command_does_not_answer_monitors_in_the_place_of_its_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("STREAMINGNODE_SERVE_HTTP", f"127.0.0.1:{port}")
    async with visit_node(tmp_path, lasting=False):
        with pytest.raises(ConnectionRefusedError):
            await ask(port, "/livez")
    async with sn.open_node(tmp_path):
        assert (await ask(port, "/readyz")).status == 200
