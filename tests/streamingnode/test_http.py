"""Health of a node over HTTP: what it says of itself is so, and nobody keeps a probe out or the
node busy.
"""

import asyncio
import re
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamingnode as sn
from flusher.run import FlushOptions
from streamingnode import http
from streamingnode.channel import Channel
from streamingnode.config import ServeOptions
from streamingnode.errors import InvalidArgument, StorageFull
from streamingnode.http import CONNECTIONS_MAX, HEAD_BYTES_MAX, Monitor, Reply, http_address
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


async def test_metrics_without_their_library_name_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "streamingnode.metrics", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    async with sn.open_node(tmp_path, http=ANY_PORT) as node:
        answer = await ask(port_of(node), "/metrics")
        assert (answer.status, answer.document["code"]) == (501, "PACKAGE_MISSING")
        assert "metrics" in answer.document["reason"]
        assert (await ask(port_of(node), "/readyz")).status == 200


# --- who asks badly -------------------------------------------------------------------------------


@pytest.fixture
async def node() -> Any:
    async with sn.open_node(None, http=ANY_PORT) as opened:
        yield opened


@pytest.mark.parametrize(
    "request_bytes, status",
    [
        (b"POST /livez HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"HEAD /readyz HTTP/1.1\r\n\r\n", 405),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000, 405),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /livez/../metrics HTTP/1.1\r\n\r\n", 404),
        (b"GET /Livez HTTP/1.1\r\n\r\n", 404),
        (b"GET /livez\r\n\r\n", 400),
        (b"GET /livez HTTP/2.0\r\n\r\n", 400),
        (b"GET http://elsewhere/livez HTTP/1.1\r\n\r\n", 400),
        (b"GET /liv\xff HTTP/1.1\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\nX: \r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n", 431),
        (b"x" * 1_000_000, 431),
    ],
)
async def test_a_request_that_is_none_is_refused_and_the_next_one_is_answered(
    node: Node, request_bytes: bytes, status: int
) -> None:
    answer = await ask_raw(port_of(node), request_bytes)
    assert (answer.status, answer.headers["connection"]) == (status, "close")
    assert answer.document["reason"]
    assert (status == 405) == (answer.headers.get("allow") == "GET")
    assert (await ask(port_of(node), "/livez")).status == 200


async def test_a_client_that_leaves_half_way_leaves_nothing_behind(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    for sent in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n"):
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(node))
        writer.write(sent)
        writer.transport.abort()
    assert (await ask(port_of(node), "/livez")).status == 200
    assert not caplog.records


async def test_a_client_that_takes_too_long_to_ask_is_told_so(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "REQUEST_S_MAX", 0.01)
    assert (await ask_raw(port_of(node), b"GET /livez HTTP/1.1\r\n")).status == 408


async def test_a_client_that_does_not_take_its_answer_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def much() -> Reply:
        return Reply(200, b"x" * (64 << 20))

    monkeypatch.setattr(http, "ANSWER_S_MAX", 0.05)
    monitor = Monitor(ServeOptions(http=ANY_PORT), Supervisor(lambda _: None))
    monkeypatch.setitem(monitor._routes, "/metrics", much)
    await monitor.open()
    try:
        port = int(monitor.address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        while not monitor._connections:  # noqa: ASYNC110 - it is accepted meanwhile
            await asyncio.sleep(0)
        while monitor._connections:  # noqa: ASYNC110 - the node gives up on it
            await asyncio.sleep(0)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(64 << 20)
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

    async def noted(monitor: Monitor, make: Any) -> Reply:
        asked.append(make)
        return await shared(monitor, make)

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
        assert await reader.read() == b""
        idle.append(await asyncio.open_connection("127.0.0.1", port))
    for _, writer in idle:
        writer.close()


async def test_closing_the_node_ends_the_connections_of_monitors(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path, http=ANY_PORT) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(node))
        writer.write(b"GET /li")
        assert (await ask(port_of(node), "/livez")).status == 200
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
