"""A disk that fails at the n-th call while a node is made, opened or recovered, for n = 1, 2, ...:
nothing is lost.

Every call of the operating system that changes the directory counts, and every write and sync of
the database; each n is tried on a directory of its own until a run does not come that far.
"""

import errno
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import numpy as np
import pytest

import streamingnode as sn
from tests.streamingnode.sample_node import SCHEMA, SETTINGS
from wal.errors import StreamingNodeError
from wal.rocks.writer import Writer

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

CALLS = ("pwrite", "fsync", "ftruncate", "rename", "replace", "unlink", "mkdir", "open")
HANGS_S = 60
KEYS = list(range(8))
"""Rows of the node whose opening is tried: some in a cut, some behind it, and a cut that was cut
off.
"""

KILLED_IN_A_CUT = """
import os, sys
import anyio
import streamingnode as sn
from tests.streamingnode.sample_node import SCHEMA, SETTINGS
from wal.failpoint import arm

async def main():
    async with sn.open_node(sys.argv[1], **SETTINGS) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await node.insert("orders", [{"id": key, "item": "x"} for key in range(4)])
        await node.flush()
        await node.insert("orders", [{"id": key, "item": "x"} for key in range(4, 8)])
        arm("flush.cut_published", lambda: os._exit(7))
        await node.flush()

anyio.run(main)
"""


class FailingCalls:
    """Fails the n-th call that changes the disk, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self._calls = itertools.count(1)
        self._at = at
        self.armed = False
        self.reached = False
        for name in CALLS:
            monkeypatch.setattr(
                os, name, self._failing(getattr(os, name), OSError(errno.EIO, "Input/output error"))
            )
        for name in ("write_batch", "sync_log"):
            monkeypatch.setattr(
                Writer, name, self._failing(getattr(Writer, name), OSError(errno.EIO, "IO error"))
            )

    def _failing(self, call: Callable[..., object], error: OSError) -> Callable[..., object]:
        def failing(*arguments: object, **named: object) -> object:
            if self.armed and next(self._calls) == self._at:
                self.reached = True
                raise error
            return call(*arguments, **named)

        return failing


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node that was killed between publishing a cut and remembering it."""
    path = tmp_path_factory.mktemp("killed") / "node"
    ran = subprocess.run([sys.executable, "-c", KILLED_IN_A_CUT, str(path)], check=False)
    assert ran.returncode == 7
    return path


async def open_and_close(path: Path, calls: FailingCalls) -> None:
    """Open and close a node while the disk may fail: it works, or says why not in a typed error."""
    calls.armed = True
    try:
        with anyio.fail_after(HANGS_S):
            async with sn.open_node(path, **SETTINGS):
                pass
    except StreamingNodeError:
        if not calls.reached:
            raise
    finally:
        calls.armed = False


async def rows_in(path: Path) -> list[int]:
    """Open a node on a disk that works again, make a cut, and return the keys in it."""
    async with sn.open_node(path, **SETTINGS) as node:
        await node.flush()
        table = await node.snapshot("orders")
        return [int(key) for key in np.sort(table["id"].to_numpy())]


async def test_node_whose_opening_fails_at_any_call_opens_next_time_with_all_its_rows(
    killed: Path, tmp_path: Path
) -> None:
    tried = 0
    for at in itertools.count(1):
        path = shutil.copytree(
            killed, tmp_path / str(at), ignore=shutil.ignore_patterns("node.sock")
        )
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = FailingCalls(monkeypatch, at)
            await open_and_close(path, calls)
        assert await rows_in(path) == KEYS, f"after call {at} failed"
        shutil.rmtree(path)
        if not calls.reached:
            break
        tried = at
    assert tried > 10


async def test_node_whose_making_fails_at_any_call_can_be_made_again(tmp_path: Path) -> None:
    tried = 0
    for at in itertools.count(1):
        path = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = FailingCalls(monkeypatch, at)
            await open_and_close(path, calls)
        async with sn.open_node(path, **SETTINGS) as node:
            await node.create_collection("orders", SCHEMA, primary_key="id")
            await node.insert("orders", [{"id": 1, "item": "x"}])
        assert await rows_in(path) == [1], f"after call {at} failed"
        shutil.rmtree(path)
        if not calls.reached:
            break
        tried = at
    assert tried > 10
