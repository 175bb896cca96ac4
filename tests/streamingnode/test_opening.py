"""A node's block ends in order, and every error comes out of it as it is."""

import asyncio
import gc
import logging
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamingnode as sn
from streamingnode.config import NodeConfig
from streamingnode.node import Node
from streamingnode.opening import OpenNode
from wal.errors import Corrupt, InvalidArgument, OnShutdown, StorageFailed
from wal.queue import PendingBytes
from wal.runtime import Supervisor

pytestmark = pytest.mark.anyio


class Parts:
    """Parts that are not there: only how they are opened and closed counts."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.closed = anyio.Event()
        self.open_error: Exception | None = None
        self.fail_first: Exception | None = None
        self.supervisor: Supervisor | None = None

    async def compose(
        self, path: Path | None, config: NodeConfig, supervisor: Supervisor, closing: AsyncExitStack
    ) -> Node:
        self.supervisor = supervisor
        self.events.append("open")
        if self.open_error is not None:
            raise self.open_error
        closing.push_async_callback(self._close)
        if self.fail_first is not None:
            self.work(self.fail_first)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
        none: Any = _NoParts()
        return Node(none, supervisor, closing)

    async def _close(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.events.append("closed")
        self.closed.set()

    def node(self) -> OpenNode:
        return OpenNode(None, NodeConfig, self.compose)

    def work(self, error: Exception) -> None:
        async def fail() -> None:
            raise error

        assert self.supervisor is not None
        self.supervisor.spawn(fail())


async def _nothing() -> None: ...


class _NoParts:
    path = None

    def __init__(self) -> None:
        self.pending = PendingBytes(1 << 20)
        self.config = NodeConfig()

    def append(self) -> None: ...

    def consistent_tick(self) -> None: ...

    async def drain(self) -> None: ...


async def test_exception_in_the_block_comes_out_unchanged_after_closing() -> None:
    parts = Parts()
    error = RuntimeError("mine")
    with pytest.raises(RuntimeError) as caught:
        async with parts.node():
            raise error
    assert caught.value is error
    assert parts.events == ["open", "closed"]


async def test_failure_while_opening_comes_out_unchanged() -> None:
    parts = Parts()
    parts.open_error = Corrupt("torn")
    with pytest.raises(Corrupt) as caught:
        async with parts.node():
            pytest.fail("not reached")
    assert caught.value is parts.open_error


async def test_failed_background_work_closes_the_node_and_leaves_the_block_alone() -> None:
    parts = Parts()
    error = Corrupt("segment")
    reached = False
    with pytest.raises(Corrupt) as caught:
        async with parts.node():
            parts.work(error)
            await parts.closed.wait()
            await anyio.lowlevel.checkpoint()
            reached = True
    assert reached, "the block was cancelled"
    assert caught.value is error
    assert parts.events == ["open", "closed"]


async def test_failed_background_work_is_raised_even_when_the_block_did_not_wait() -> None:
    parts = Parts()
    with pytest.raises(Corrupt):
        async with parts.node():
            parts.work(Corrupt("segment"))
            for _ in range(3):
                await anyio.lowlevel.checkpoint()


async def test_error_of_the_block_wins_over_failed_background_work() -> None:
    parts = Parts()
    with pytest.raises(KeyError):
        async with parts.node():
            parts.work(Corrupt("segment"))
            await parts.closed.wait()
            raise KeyError


async def test_background_work_that_fails_while_the_rest_opens_is_raised_by_the_opening() -> None:
    parts = Parts()
    parts.fail_first = Corrupt("segment")
    with pytest.raises(Corrupt) as caught:
        async with parts.node():
            pytest.fail("not reached")
    assert caught.value is parts.fail_first
    assert parts.events == ["open", "closed"]


async def test_calls_after_failed_background_work_name_it() -> None:
    parts = Parts()
    with pytest.raises(Corrupt):
        async with parts.node() as node:
            parts.work(Corrupt("segment 7"))
            await parts.closed.wait()
            with pytest.raises(OnShutdown, match="segment 7") as refused:
                node.collections()
            assert isinstance(refused.value.__cause__, Corrupt)


async def test_refusal_that_leaves_the_block_becomes_the_failure_that_it_names() -> None:
    parts = Parts()
    error = Corrupt("segment 7")
    with pytest.raises(Corrupt) as caught:
        async with parts.node() as node:
            parts.work(error)
            await parts.closed.wait()
            node.collections()
    assert caught.value is error


async def test_awaited_node_is_closed_once_by_whichever_task_comes_first() -> None:
    parts = Parts()
    node = await parts.node()
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(node.aclose)
    await node.aclose()
    assert parts.events == ["open", "closed"]
    with pytest.raises(OnShutdown, match="is closed"):
        node.collections()


async def test_closing_raises_what_failed_to_everybody_who_closes() -> None:
    parts = Parts()
    node = await parts.node()
    parts.work(Corrupt("segment"))
    await parts.closed.wait()
    for _ in range(2):
        with pytest.raises(Corrupt, match="segment"):
            await node.aclose()
    assert parts.events == ["open", "closed"]


async def test_awaiting_an_opening_a_second_time_is_refused() -> None:
    opening = Parts().node()
    async with opening:
        with pytest.raises(InvalidArgument, match="used already"):
            await opening


@pytest.mark.parametrize("turns", range(4))
async def test_cancelled_closing_goes_on_to_its_end_before_it_says_so(turns: int) -> None:
    parts = Parts()
    node = await parts.node()
    closing = asyncio.ensure_future(node.aclose())
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()
    closing.cancel()
    await asyncio.wait((closing,))
    if not closing.cancelled():
        closing.result()
    await node.aclose()
    assert parts.events == ["open", "closed"]


async def test_cancelled_block_still_closes_everything() -> None:
    parts = Parts()
    with anyio.CancelScope() as scope:
        async with parts.node():
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert parts.events == ["open", "closed"]


async def test_tasks_of_the_node_end_with_it() -> None:
    parts = Parts()
    async with parts.node():
        assert parts.supervisor is not None
        task = parts.supervisor.spawn(anyio.sleep_forever())
    assert task.done()


async def test_wrong_setting_is_refused_before_anything_opens() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'durability'"):
        async with sn.open_node(None, durabilty="os"):
            pytest.fail("not reached")


def test_ready_made_config_does_not_mix_with_settings() -> None:
    with pytest.raises(InvalidArgument, match="config="):
        sn.open_node(None, config=NodeConfig(), durability="os")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"name": 5}, {"name": "x" * 100_000}, {"token": 5}, {"token": "x" * 100_000}),
        *({"name": "\ud800"}, {"token": "\ud800"}),
    ],
)
def test_what_a_node_would_not_take_as_a_client_is_refused_before_it_is_asked(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="is no text of up to"):
        sn.connect("unix:node.sock", **wrong)


@pytest.mark.parametrize(
    "use",
    [
        sn.open_node,
        lambda path: sn.open_node(None, config_file=path),
        lambda path: sn.connect("unix:node.sock", token_file=path),
        lambda path: sn.connect("unix:node.sock", spool=path),
    ],
    ids=["node", "settings", "token", "spool"],
)
def test_a_path_with_half_a_surrogate_pair_names_nothing(use: Callable[[str], object]) -> None:
    with pytest.raises(InvalidArgument, match=r"names no .* — give a path"):
        use("data/\ud800")


async def test_a_backup_to_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path / "node") as node:
        with pytest.raises(InvalidArgument, match="names no directory"):
            await node.backup(f"{tmp_path}/\ud800")


def test_a_tls_context_for_an_address_that_speaks_none_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="in the clear"):
        sn.connect("tcp://127.0.0.1:1", tls=ssl.create_default_context())


@pytest.mark.parametrize(
    "paths",
    [
        {"url": "unix:node.sock"},
        {"url": "tcp://host:1", "token_file": "token"},
        {"url": "tcp://host:1", "spool": "spool"},
    ],
    ids=lambda paths: list(paths)[-1],
)
def test_paths_from_a_directory_that_is_gone_are_refused_as_the_disks(
    paths: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(StorageFailed, match="the current directory"):
        sn.connect(**paths)


def test_importing_prints_nothing_and_loads_no_arrow_and_no_database() -> None:
    program = (
        "import sys, streamingnode\n"
        "heavy = {'pyarrow', 'numpy', 'rocksdict', 'anyio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import streamingnode.opening\n"
        "assert callable(streamingnode.open_node)\n"
        "assert set(streamingnode.__all__) <= set(dir(streamingnode))\n"
        "for name in streamingnode.__all__: getattr(streamingnode, name)\n"
    )
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, check=True, timeout=60
    )
    assert (found.stdout, found.stderr) == (b"", b"")


def test_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = sn.nothing_like_it


def test_block_that_is_thrown_away_after_its_event_loop_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    loop = asyncio.new_event_loop()
    # a task that did not end is what this is about
    loop.set_exception_handler(lambda _loop, _context: None)
    entered = asyncio.Event()

    async def block() -> None:
        async with Parts().node():
            entered.set()
            await loop.create_future()

    task = loop.create_task(block())
    loop.run_until_complete(entered.wait())
    loop.close()
    del task
    gc.collect()
    assert raised == []


def test_event_loop_that_ends_around_a_node_that_nobody_closed_says_nothing_of_its_parts(
    tmp_path: Path,
) -> None:
    async def forget() -> None:
        node = await sn.open_node(tmp_path / "data", cut_interval_s=None)
        forgotten.append(node)

    told: list[dict[str, object]] = []
    forgotten: list[sn.Node] = []
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda _loop, context: told.append(context))
        runner.run(forget())
    assert told == []


async def test_a_node_that_closes_says_nothing_that_somebody_is_woken_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with sn.open_node(tmp_path / "data") as node:
        await node.flush()  # it reads on
    said = {record.getMessage().partition(" ")[0] for record in caplog.records}
    assert not said & {"event=node_failed", "event=flusher_stopped", "event=log_not_reopened"}
