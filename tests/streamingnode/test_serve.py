"""The node as a process of its own: when it says that it is ready it is, verbs work beside it, and
a signal ends it.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import anyio
import pytest

import streamingnode as sn
from streamingnode.care.inspect import check_free, holder
from streamingnode.cli import main
from streamingnode.cli.command import open_place
from streamingnode.embedded import EmbeddedBackend
from streamingnode.opening import OpenNode, visit_node
from tests.streamingnode.remote.nodes import SCHEMA, contents, rows
from wal.errors import AlreadyOwned
from wal.files import DirectoryLock

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

HANGS_S = 60
PROGRAM = [sys.executable, "-m", "streamingnode"]

BROKEN_DISK = """
import sys
from wal.rocks.writer import Writer
from streamingnode.cli.program import main

written = 0
write = Writer.write_batch

def failing(writer, batch):
    global written
    written += 1
    if written > int(sys.argv[1]):
        raise OSError(5, "Input/output error")
    write(writer, batch)

Writer.write_batch = failing
sys.exit(main(["serve", sys.argv[2]]))
"""


@contextmanager
def serving(directory: Path, *command: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a node, and return when it has said that it is ready, or has ended."""
    arguments = command or (*PROGRAM, "serve", str(directory))
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            process.ready = process.stdout.readline()  # type: ignore[attr-defined]
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            for stream in (process.stdout, process.stderr):
                _rest(stream)


def _rest(stream: IO[str] | None) -> str:
    return "" if stream is None or stream.closed else stream.read()


async def run(*arguments: str, given: str = "") -> str:
    """Run a verb to its end, and return what it printed."""
    done = await anyio.run_process([*PROGRAM, *arguments], input=given.encode(), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


async def test_a_node_that_says_it_is_ready_serves_clients_and_verbs_until_a_signal(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    with serving(path) as process:
        assert "node.sock" in process.ready  # type: ignore[attr-defined]
        client = await sn.connect(f"unix:{path / 'node.sock'}", give_up_s=0.2)
        await client.create_collection("orders", SCHEMA, primary_key="id")
        await client.insert("orders", rows(1, 2))
        row = '{"id": 3, "item": "from outside"}\n'
        listed, _ = await asyncio.gather(
            run("collection", "ls", str(path)), run("insert", str(path), "orders", given=row)
        )
        assert "orders" in listed
        tailed, *_ = await asyncio.gather(
            run("tail", str(path), "orders", "--json"),
            run("flush", str(path)),
            run("backup", str(path), str(tmp_path / "copy")),
        )
        assert "from outside" in tailed
        assert (await contents(client, "orders")).keys() == {1, 2, 3}
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS_S) == 0
        with pytest.raises(sn.errors.Unreachable):
            await client.consistent_tick()
        await client.aclose()
        assert not (path / "node.sock").exists()
    async with sn.open_node(path) as node:
        assert (await contents(node, "orders")).keys() == {1, 2, 3}


async def test_a_signal_under_load_loses_nothing_and_systemd_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    acknowledged = list[int]()
    refused = list[int]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(HANGS_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with serving(path) as process:
            assert await asyncio.to_thread(systemd.recv, 100) == b"READY=1"
            async with sn.connect(f"unix:{path / 'node.sock'}", give_up_s=0.2) as client:
                await client.create_collection("c", SCHEMA, primary_key="id")

                async def write(first: int) -> None:
                    with suppress(sn.errors.Indeterminate):
                        for key in range(first, first + 100_000):
                            try:
                                await client.insert("c", rows(key))
                            except sn.errors.Unreachable:
                                refused.append(key)
                                return
                            acknowledged.append(key)

                writing = [
                    asyncio.ensure_future(write(first)) for first in range(0, 2_000_000, 100_000)
                ]
                # what it waits for is written meanwhile
                while len(acknowledged) < 500:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                process.send_signal(signal.SIGTERM)
                await asyncio.gather(*writing)
            assert process.wait(HANGS_S) == 0
            assert await asyncio.to_thread(systemd.recv, 100) == b"STOPPING=1"
    async with sn.open_node(path) as node:
        found = await contents(node)
    assert found.keys() >= set(acknowledged)
    assert not found.keys() & set(refused)


async def test_a_second_signal_ends_it_at_once_and_nothing_acknowledged_is_lost(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as process:
        client = await sn.connect(f"unix:{tmp_path / 'node.sock'}", give_up_s=0.2)
        await client.create_collection("c", SCHEMA, primary_key="id")
        await client.insert("c", rows(1))
        os.kill(process.pid, signal.SIGSTOP)  # so that it finds both
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(HANGS_S) == 1
        await client.aclose()
    async with sn.open_node(tmp_path) as node:
        assert await contents(node) == {1: "tea 1"}


async def test_a_node_whose_disk_fails_for_good_ends_with_an_error(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir()
    with serving(path, sys.executable, "-c", BROKEN_DISK, "0", str(path)) as process:
        assert process.wait(HANGS_S) != 0
        assert process.ready == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize("option", ["--tokens", "--tls-cert", "--tls-key", "--tls-client-ca"])
def test_who_may_connect_is_not_passed_over_where_there_is_no_address(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "data"), option, str(tmp_path / "file")]) == 2
    assert "--listen" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_a_directory_that_somebody_else_serves_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        second = subprocess.run(
            [*PROGRAM, "serve", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=HANGS_S,
            check=False,
        )
        assert (second.returncode, second.stdout) == (4, "")
        assert "ALREADY_OWNED" in second.stderr
        assert "share=True" in second.stderr
        assert process.poll() is None


def test_a_node_that_nobody_could_reach_is_not_called_ready(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100)  # too long for a socket in it
    serve = [*PROGRAM, "serve", str(path)]
    refused = subprocess.run(serve, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "name a shorter path, or add --listen" in refused.stderr
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with serving(path, *serve, "--listen", url) as process:
        assert process.ready == f"ready: {url}\n"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("default_interrupt")
async def test_a_command_that_has_directory_hands_it_over_to_a_service_and_goes_on_as_its_client(
    tmp_path: Path,
) -> None:
    async with sn.open_node(tmp_path) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
    with serving(tmp_path, *PROGRAM, "tail", str(tmp_path), "c", "--follow", "--json") as tail:
        assert holder(tmp_path) == tail.pid
        async with sn.open_node(tmp_path) as node:
            assert holder(tmp_path) == os.getpid()
            await node.insert("c", rows(1))
            assert tail.stdout is not None
            assert "tea 1" in await asyncio.to_thread(tail.stdout.readline)
        async with sn.open_node(tmp_path, share=True, cut_interval_s=77) as node:
            assert holder(tmp_path) == os.getpid()
            await node.insert("c", rows(2))
            assert "tea 2" in await asyncio.to_thread(tail.stdout.readline)
        tail.send_signal(signal.SIGINT)
        assert tail.wait(HANGS_S) == 130


@pytest.mark.usefixtures("default_interrupt")
async def test_a_bridge_hands_the_directory_over_to_a_service_and_goes_on_as_its_client(
    tmp_path: Path,
) -> None:
    async with sn.open_node(tmp_path) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
        await node.mq.create_topic("events")
    bridge = await anyio.open_process(
        [*PROGRAM, "bridge", str(tmp_path), "events", "c"], stderr=subprocess.DEVNULL
    )
    try:
        with anyio.fail_after(HANGS_S):
            while holder(tmp_path) != bridge.pid:
                await anyio.lowlevel.checkpoint()
        async with sn.open_node(tmp_path) as node:
            assert holder(tmp_path) == os.getpid()
            await node.mq.produce("events", [b'{"id": 1, "item": "tea 1"}'])
            with anyio.fail_after(HANGS_S):
                while not await contents(node):
                    await node.consistent_tick()
            assert await contents(node) == {1: "tea 1"}
    finally:
        bridge.send_signal(signal.SIGINT)
        with anyio.fail_after(HANGS_S):
            code = await bridge.wait()
    assert code == 130


async def test_a_command_whose_output_nobody_reads_keeps_no_service_from_the_directory(
    tmp_path: Path,
) -> None:
    """As `tail data c | less` does, with more than a pipe holds."""
    async with sn.open_node(tmp_path) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
        for key in range(0, 4_000, 400):
            await node.insert("c", rows(*range(key, key + 400), item="tea " * 20))
    with serving(tmp_path, *PROGRAM, "tail", str(tmp_path), "c") as tail:
        assert holder(tmp_path) == tail.pid
        async with sn.open_node(tmp_path) as node:
            assert holder(tmp_path) == os.getpid()
            assert tail.stdout is not None
            assert len(await asyncio.to_thread(tail.stdout.readlines)) == 10
            assert tail.wait(HANGS_S) == 0


async def test_a_service_waits_for_a_command_that_ends_by_itself(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path):
        pass
    lock = DirectoryLock(tmp_path, brief=True)
    with pytest.raises(AlreadyOwned):
        check_free(tmp_path)
    asyncio.get_running_loop().call_later(0.2, lock.release)
    async with sn.open_node(tmp_path):
        assert holder(tmp_path) == os.getpid()


async def test_a_service_does_not_wait_for_another_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamingnode.reaching.PAUSE_S", 1000)
    async with sn.open_node(tmp_path):
        pass
    for is_brief, patience_s in ((False, 5.0), (True, -1.0)):
        monkeypatch.setattr("streamingnode.reaching.OWNER_S_MAX", patience_s)
        lock = DirectoryLock(tmp_path, brief=is_brief)
        try:
            with pytest.raises(AlreadyOwned):
                await sn.open_node(tmp_path)
        finally:
            lock.release()


async def test_two_commands_go_on_over_every_service_that_has_the_directory_meanwhile(
    tmp_path: Path,
) -> None:
    async with sn.open_node(tmp_path) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
    command = (*PROGRAM, "tail", str(tmp_path), "c", "--follow", "--json")
    with serving(tmp_path, *command) as owner, serving(tmp_path, *command) as client:
        for key in range(3):
            async with sn.open_node(tmp_path) as node:
                await node.insert("c", rows(key))
                for tail in (owner, client):
                    assert tail.stdout is not None
                    assert f"tea {key}" in await asyncio.to_thread(tail.stdout.readline)


async def test_a_command_that_lasts_takes_over_from_the_one_that_had_the_directory(
    tmp_path: Path,
) -> None:
    async with sn.open_node(tmp_path) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
    first = await visit_node(tmp_path, lasting=True)
    async with visit_node(tmp_path, lasting=True) as second:
        await second.insert("c", rows(1))
        await first.aclose()
        await second.insert("c", rows(2))
        assert holder(tmp_path) == os.getpid()
        assert (await second.snapshot("c")).num_rows == 2


async def test_a_command_that_is_asked_for_the_directory_while_it_still_opens_hands_it_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node listens before the command knows that it is open."""
    async with sn.open_node(tmp_path):
        pass
    enter = OpenNode.__aenter__
    ask = EmbeddedBackend.hand_over
    is_open = asyncio.Event()
    is_asked = asyncio.Event()
    is_served = asyncio.Event()

    async def open_late(opening: OpenNode) -> sn.Node:
        node = await enter(opening)
        if isinstance(node._backend, EmbeddedBackend) and not is_open.is_set():
            is_open.set()
            await is_asked.wait()
        return node

    async def hand_over(backend: EmbeddedBackend) -> None:
        await ask(backend)
        is_asked.set()

    async def run_command() -> None:
        async with visit_node(tmp_path, lasting=True):
            await is_served.wait()

    monkeypatch.setattr(OpenNode, "__aenter__", open_late)
    monkeypatch.setattr(EmbeddedBackend, "hand_over", hand_over)
    command = asyncio.create_task(run_command())
    await is_open.wait()
    async with sn.open_node(tmp_path):
        is_served.set()
        await command


async def test_a_command_waits_for_a_service_that_is_opening(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path):
        pass
    lock = DirectoryLock(tmp_path)
    asyncio.get_running_loop().call_later(0.2, lock.release)
    async with await open_place(tmp_path) as node:
        assert node.path == str(tmp_path)
