"""More connections than a node has descriptors or patience for, to a process of its own: others are
served meanwhile.
"""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import streamingnode as sn
from streamingnode.errors import Unreachable
from tests.streamingnode.remote.nodes import SCHEMA, contents, rows
from tests.streamingnode.remote.proxy import until
from tests.streamingnode.remote.raw import hello
from wal.frames import PREFACE

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SERVER = """
import asyncio, signal, sys
from pathlib import Path
import streamingnode.remote.server as server
from streamingnode.opening import run_async
from streamingnode.remote.auth import Endpoint
from streamingnode.serve import serve_node

directory, url, loop = sys.argv[1:]
server.HELLO_S_MAX, server.SILENCE_LOOK_S = 600, 0.2
signal.signal(signal.SIGUSR1, lambda *_: setattr(server, "HELLO_S_MAX", 1))
endpoint = Endpoint.of(url, tokens=None, tls=None, client_ca=False)
tell = lambda addresses: print(*addresses, flush=True)
serve = lambda: serve_node(Path(directory), [endpoint], None, {}, tell)
run_async(serve) if loop == "uvloop" else asyncio.run(serve())
"""
TRACEBACKS_MAX = 100
"""Far over one for each second of such a test, and far under what one turn of an accept loop that
spins writes.
"""
SLOW = 1_000


@contextmanager
def served(directory: Path, loop: str = "uvloop") -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Serve a node; yield its process, whose errors are in `errors` beside the directory, and its
    port.

    It waits for a hello as long as it takes, and no longer once it gets SIGUSR1.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVER, str(directory), f"tcp://127.0.0.1:{port}", loop]
    with (directory.parent / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("unix:")
            yield process, port
        finally:
            process.kill()
            process.communicate()


def descriptors(process: "subprocess.Popen[str]") -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))  # noqa: PTH208 - names are all we need


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_out_of_descriptors_accepting_pauses_and_nothing_spins(
    tmp_path: Path, loop: str
) -> None:
    with served(tmp_path / "data", loop) as (process, port):
        async with sn.connect(f"unix:{tmp_path}/data/node.sock") as client:
            await client.create_collection("c", SCHEMA, primary_key="id")
            most = descriptors(process) + 10
            _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, hard))
            waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
            await until(lambda: descriptors(process) >= most)
            for key in range(100):
                await client.insert("c", rows(key))
            for each in waiting:
                each.close()
            while True:
                try:
                    async with sn.connect(f"tcp://127.0.0.1:{port}") as other:
                        assert len(await contents(other)) == 100
                    break
                except Unreachable:  # one of those that were dropped before
                    continue
        assert (tmp_path / "errors").read_text().count("Traceback") < TRACEBACKS_MAX


async def test_a_thousand_connections_that_say_a_byte_now_and_then_hold_up_nobody_and_are_ended(
    tmp_path: Path,
) -> None:
    said = PREFACE + hello()[:-1] * 1_000
    with served(tmp_path / "data") as (process, port):
        async with sn.connect(f"tcp://127.0.0.1:{port}") as client:
            await client.create_collection("c", SCHEMA, primary_key="id")
            before = descriptors(process)
            key = 0
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(SLOW)]
            await until(lambda: descriptors(process) >= before + SLOW)
            ends = [asyncio.ensure_future(reader.read()) for reader, _ in slow]
            asyncio.get_running_loop().call_later(1, process.send_signal, signal.SIGUSR1)
            while not all(end.done() for end in ends):
                for end, (_, writer) in zip(ends, slow, strict=True):
                    if not end.done():
                        writer.write(said[key : key + 1])
                await client.insert("c", rows(key := key + 1))
            await asyncio.gather(*ends, return_exceptions=True)
            await until(lambda: descriptors(process) <= before)
            assert len(await contents(client)) == key
            for _, writer in slow:
                writer.close()
