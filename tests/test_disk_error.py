"""A disk whose sync really fails, by a system call that returns EIO: the node comes back without
being told to.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import streamingnode as sn
from streamingnode.config import load_config

PROGRAM = """
import json, sys, anyio, pyarrow as pa, streamingnode as sn
from tests.parts_of import parts_of

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False)])

async def main():
    acknowledged, read, has_read_all = [], [], anyio.Event()
    async with sn.open_node(sys.argv[1], cut_interval_s=None, **{"log.free_bytes_min": 0}) as node:
        await node.create_collection("c", SCHEMA, primary_key="key")
        print("open", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        async def follow():
            async with node.read("c") as messages:
                async for message in messages:
                    if message.num_rows:
                        read.extend(message.to_arrow().column("key").to_pylist())
                    if len(read) >= 30:
                        has_read_all.set()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            for key in range(30):
                await node.insert("c", [{"key": key}])
                acknowledged.append(key)
            with anyio.move_on_after(10):
                await has_read_all.wait()
            tasks.cancel_scope.cancel()
        reopened = parts_of(node).measure().log.reopened
        told = {"acknowledged": acknowledged, "read": read, "reopened": reopened}
        print(json.dumps(told), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)  # closing has a disk that works

anyio.run(main)
"""


@pytest.mark.crash
@pytest.mark.parametrize("when", [2, 5, 9])
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_node_outlives_every_failed_fdatasync_with_all_rows_once(tmp_path: Path, when: int) -> None:
    """Each thread has a counter of its own, so each term's writer meets the fault again, and so may
    an attempt to reopen.
    """
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "node")]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as node:
        assert node.stdin is not None
        assert node.stdout is not None
        assert node.stdout.readline() == "open\n"
        with attached(node.pid, f"inject=fdatasync:error=EIO:when={when}", tmp_path / "trace"):
            print(file=node.stdin, flush=True)
            told = json.loads(node.stdout.readline())
        print(file=node.stdin, flush=True)
    assert node.returncode == 0
    assert told["acknowledged"] == told["read"] == list(range(30))
    assert told["reopened"] >= 2
    assert (tmp_path / "trace").read_text().count("EIO") >= told["reopened"]
    config = load_config(arguments={"log.free_bytes_min": 0})
    with sn.sync.open_node(tmp_path / "node", config=config) as again:
        assert again.snapshot("c").column("key").to_pylist() == list(range(30))


@contextmanager
def attached(pid: int, inject: str, trace: Path) -> Iterator[None]:
    """Run strace on a process; the fault counts from here on."""
    command = [
        "strace",
        "-f",
        "-p",
        str(pid),
        "-o",
        str(trace),
        "-e",
        "trace=fdatasync",
        "-e",
        inject,
    ]
    with (trace.parent / "told").open("w+") as told:
        strace = subprocess.Popen(command, stderr=told)
        while "attached" not in (trace.parent / "told").read_text():
            assert strace.poll() is None, "strace may trace here"
        try:
            yield
        finally:
            strace.terminate()
            strace.wait()
