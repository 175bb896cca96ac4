"""An owner that another one has overtaken, where it does nothing that would show it, or not any more."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from tests.failing_disk import FailingDisk, Fault
from tests.wal.log_contract import append, stamped_group
from wal.errors import ChannelFenced, StorageFailed
from wal.rocks.claim import Claim
from wal.rocks.floor import FloorFile
from wal.rocks.group_commit import CommitState
from wal.rocks.options import RocksOptions
from wal.rocks.store import RocksStore, open_rocks_store

pytestmark = pytest.mark.anyio

OPTIONS = RocksOptions(free_bytes_min=0)
TICK = 1 << 40


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RocksStore]:
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    yield store
    await store.close()


async def overtake(store: RocksStore, directory: Path) -> None:
    other = Claim(directory)
    await anyio.to_thread.run_sync(other.take, store.term + 1)
    other.close()


async def test_idle_owner_that_was_overtaken_promises_no_tick(store: RocksStore, tmp_path: Path) -> None:
    store.promise_tick(TICK)
    await overtake(store, tmp_path / "node")
    before = (tmp_path / "node" / "floor").read_bytes()
    with pytest.raises(ChannelFenced):
        store.promise_tick(TICK + 1)
    assert store.state is CommitState.FENCED
    assert (tmp_path / "node" / "floor").read_bytes() == before
    with anyio.fail_after(10):
        await store.wait_failed()


async def test_owner_overtaken_while_it_writes_what_is_left_before_reopening_is_fenced(
    store: RocksStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    log = await store.open_log("p0")
    await append(log, b"before")
    disk = FailingDisk(monkeypatch, Fault.SYNC_LOST)
    disk.gate.clear()
    ticket = log.append(stamped_group(b"left"))
    with monkeypatch.context() as floor:
        floor.setattr(FloorFile, "promise", broken)
        with pytest.raises(StorageFailed):
            store.promise_tick(TICK)
    reopening = asyncio.ensure_future(store.reopen())
    while store.state is not CommitState.REOPENING:
        await anyio.lowlevel.checkpoint()
    await overtake(store, tmp_path / "node")
    disk.gate.set()
    with pytest.raises(ChannelFenced):
        await reopening
    assert ticket.written.exception() is not None
    assert store.state is CommitState.FENCED


async def test_opening_that_fails_after_the_database_was_changed_does_not_give_the_claim_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise StorageFailed("no")

    await (await open_rocks_store(tmp_path / "node", options=OPTIONS)).close()
    owner = Claim(tmp_path / "node")
    monkeypatch.setattr("wal.rocks.possession._take_term", broken)
    with pytest.raises(StorageFailed):
        await open_rocks_store(tmp_path / "node", options=OPTIONS)
    with pytest.raises(ChannelFenced):
        owner.check()
    owner.close()
    monkeypatch.undo()
    await (await open_rocks_store(tmp_path / "node", options=OPTIONS)).close()
