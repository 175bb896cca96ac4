"""One directory, several processes: whoever owns the node may be killed, and nothing is lost or
doubled.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import streamingnode as sn
from flusher.flusher import Flusher
from streamingnode.care.inspect import check_free, holder
from streamingnode.config import load_config
from streamingnode.errors import DeadlineExceeded
from streamingnode.opening import visit_node
from streamingnode.reaching import check_same
from tests.streamingnode.remote import sharing_worker
from wal.address import SOCKET_NAME, SOCKET_PATH_BYTES_MAX
from wal.errors import AlreadyOwned, InvalidArgument, StorageFailed

pytestmark = pytest.mark.anyio

SCHEMA = pa.schema([("id", pa.int64())])
WORKERS = 3


class Worker:
    """One process, and the writes it was told of."""

    def __init__(self, directory: Path, number: int) -> None:
        command = [sys.executable, "-m", sharing_worker.__name__, str(directory), str(number)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.acknowledged: list[int] = []

    def read(self, writes: int) -> None:
        """Return when so many more writes have returned."""
        assert self.process.stdout is not None
        for _ in range(writes):
            line = self.process.stdout.readline()
            assert line.strip().isdecimal(), f"it ended: {line}"
            self.acknowledged.append(int(line))

    def end(self) -> str:
        """Let it close its node; return what it said last."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        *lines, last = self._rest().splitlines()
        self.acknowledged += map(int, lines)
        return last

    def kill(self) -> None:
        """End it as a crash would, and note what it had said."""
        self.process.kill()
        self.acknowledged += [int(line) for line in self._rest().splitlines()[:-1]]

    def _rest(self) -> str:
        """Return all that it said and that was not read, once it has ended."""
        assert self.process.stdout is not None
        with self.process:
            # `communicate` passes over what `readline` has taken and not returned
            return self.process.stdout.read()


def owner_of(directory: Path, workers: list[Worker]) -> Worker:
    """Return the worker that owns the node, once one of them does."""
    while not (owners := [worker for worker in workers if worker.process.pid == holder(directory)]):
        assert all(worker.process.poll() is None for worker in workers)
    return owners[0]


@contextmanager
def workers_of(directory: Path) -> Iterator[list[Worker]]:
    workers = [Worker(directory, number) for number in range(WORKERS)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()


@pytest.mark.may_block
def test_owners_are_killed_one_after_the_other_and_every_write_takes_place_once(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "data"
    with workers_of(directory) as workers:
        alive = list(workers)
        while len(alive) > 1:
            for worker in alive:
                worker.read(40)
            killed = owner_of(directory, alive)
            killed.kill()
            alive.remove(killed)
        (last,) = alive
        assert owner_of(directory, alive) is last, "it has taken over"
        last.read(40)
        assert last.end() == "ended", "and none of its writes failed"
    with sn.sync.open_node(directory) as node:
        rows = Counter(node.snapshot("rows")["id"].to_pylist())
    assert not [key for key, count in rows.items() if count > 1]
    assert not [key for worker in workers for key in worker.acknowledged if key not in rows]


@pytest.mark.may_block
async def test_stopped_owner_keeps_the_node_and_the_others_get_their_deadlines(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "data"
    owner = Worker(directory, 0)
    try:
        await asyncio.to_thread(owner.read, 10)
        async with sn.open_node(directory, share=True) as node:
            os.kill(owner.process.pid, signal.SIGSTOP)
            row = {"id": 1, "worker": 1}
            for call in (
                node.insert("rows", [row], timeout=0.2),
                node.create_collection("new", SCHEMA, primary_key="id", timeout=0.2),
                node.begin_transaction(timeout=0.2),
                node.snapshot("rows", timeout=0.2),
            ):
                with pytest.raises(DeadlineExceeded):
                    await call
            assert holder(directory) == owner.process.pid
            waiting = asyncio.ensure_future(node.upsert("rows", [row]))
            os.kill(owner.process.pid, signal.SIGCONT)
            await waiting
            assert holder(directory) == owner.process.pid
    finally:
        owner.kill()
    with sn.sync.open_node(directory) as node:
        rows = Counter(node.snapshot("rows")["id"].to_pylist())
    assert rows.keys() >= {1, *owner.acknowledged}
    assert set(rows.values()) == {1}


async def test_two_openers_of_one_process_share_and_the_second_goes_on_when_the_first_closes(
    tmp_path: Path,
) -> None:
    first = await sn.open_node(tmp_path / "data", share=True)
    async with sn.open_node(tmp_path / "data", share=True) as second:
        await first.create_collection("orders", SCHEMA, primary_key="id")
        await first.insert("orders", [{"id": 1}])
        await second.consistent_tick()
        await second.insert("orders", [{"id": 2}])
        await first.aclose()
        await second.insert("orders", [{"id": 3}])
        assert Counter((await second.snapshot("orders"))["id"].to_pylist()) == Counter([1, 2, 3])


@pytest.mark.parametrize(
    "failure",
    [StorageFailed("the disk is gone"), RuntimeError("a bug")],
    ids=lambda each: type(each).__name__,
)
async def test_owner_whose_background_work_fails_closes_the_node_and_it_is_opened_again(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamingnode.reaching.FAILED_PAUSE_S", 0.01)
    may_fail = asyncio.Event()
    has_failed = asyncio.Event()
    is_back = asyncio.Event()
    run = Flusher.run

    async def failing(flusher: Flusher) -> None:
        if has_failed.is_set():
            is_back.set()
            return await run(flusher)
        await may_fail.wait()
        has_failed.set()
        raise failure

    monkeypatch.setattr(Flusher, "run", failing)
    async with sn.open_node(tmp_path / "data", share=True) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await node.insert("orders", [{"id": 1}])
        may_fail.set()
        async with asyncio.timeout(60):
            await is_back.wait()
        await node.insert("orders", [{"id": 2}])
        assert (await node.flush()).number
        assert set((await node.snapshot("orders"))["id"].to_pylist()) == {1, 2}


async def test_second_opener_with_another_setting_is_refused_by_its_name(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path / "data", share=True, cut_interval_s=60):
        with pytest.raises(InvalidArgument, match=r"flush\.schedule\.interval_s"):
            await sn.open_node(tmp_path / "data", share=True, cut_interval_s=5)
        async with sn.open_node(tmp_path / "data", share=True) as node:
            assert node.config.flush.schedule.interval_s == 60


async def test_node_that_somebody_owns_without_clients_is_already_owned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamingnode.reaching.OPEN_S_MAX", 0.0)
    async with sn.open_node(tmp_path / "data", listen=False):
        with pytest.raises(AlreadyOwned):
            await sn.open_node(tmp_path / "data", share=True)


async def test_directory_with_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="shorter path"):
        await sn.open_node(tmp_path / ("d" * SOCKET_PATH_BYTES_MAX), share=True)


@pytest.mark.may_block
async def test_directory_where_no_socket_can_be_made_is_not_shared_and_commands_have_it_alone(
    tmp_path: Path,
) -> None:
    async with sn.open_node(tmp_path) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
    (tmp_path / SOCKET_NAME).mkdir()
    with pytest.raises(InvalidArgument, match="takes no socket"):
        await sn.open_node(tmp_path, share=True)
    assert holder(tmp_path) is None
    async with visit_node(tmp_path, lasting=True) as node:
        await node.insert("c", [{"id": 1}])
        with pytest.raises(AlreadyOwned):
            check_free(tmp_path)
    assert holder(tmp_path) is None


@pytest.mark.parametrize("options", [{"path": None}, {"observer": object()}])
def test_sharing_needs_a_directory_and_takes_no_observer(
    tmp_path: Path, options: dict[str, object]
) -> None:
    with pytest.raises(InvalidArgument, match="share=True"):
        sn.open_node(**{"path": tmp_path, "share": True, **options})  # type: ignore[arg-type]


async def test_a_group_larger_than_a_frame_is_the_same_setting_for_every_opener(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"wal.group_bytes_max": 64 << 20}
    async with sn.open_node(tmp_path / "data", share=True, **settings) as node:
        assert node.path == str(tmp_path / "data")


def test_a_setting_that_the_owner_does_not_know_is_not_the_same() -> None:
    with pytest.raises(InvalidArgument, match="interval_s is None in the process that owns"):
        check_same(load_config(arguments={"cut_interval_s": 5}), {})
