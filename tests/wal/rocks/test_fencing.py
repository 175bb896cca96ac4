"""An owner that another one has overtaken, where it does nothing that would show it, or not any more."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

from tests.failing_disk import FailingDisk, Fault
from tests.wal.log_contract import append, stamped_group
from tests.wal.rocks.test_reopening import poison
from wal.errors import AlreadyOwned, ChannelFenced, StorageFailed
from wal.rocks.claim import Claim
from wal.rocks.directory import verify_database
from wal.rocks.floor import Floor, FloorFile, read_floor
from wal.rocks.group_commit import CommitState
from wal.rocks.options import RocksOptions
from wal.rocks.recovery import Survey
from wal.rocks.store import RocksStore, open_rocks_store

pytestmark = pytest.mark.anyio

OPTIONS = RocksOptions(free_bytes_min=0)
TICK = 1 << 40
ROOT = Path(__file__).parents[3]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RocksStore]:
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    yield store
    await store.close()


FAILING_OPENER = """
import fcntl, sys, anyio
from pathlib import Path
from wal.errors import StorageFailed
from wal.rocks import directory as opening
from wal.rocks.options import RocksOptions
from wal.rocks.recovery import Survey
from wal.rocks.store import open_rocks_store
fcntl.flock = lambda *_: None  # a file system without locks
directory = Path(sys.argv[1])
(directory / "log" / "LOCK").unlink()
survey, surveys = opening.survey, []
def fails_once_opened_for_writing(database):
    surveys.append(database)
    if len(surveys) == 3:
        raise StorageFailed("the disk cannot be read any more")
    return survey(database)
opening.survey = fails_once_opened_for_writing
async def main():
    try:
        await open_rocks_store(directory, options=RocksOptions(free_bytes_min=0))
    except StorageFailed as error:
        print(type(error).__name__)
anyio.run(main)
"""


async def overtake(store: RocksStore, directory: Path) -> None:
    other = Claim(directory)
    await anyio.to_thread.run_sync(other.take, store.term + 1)
    other.close()


async def test_idle_owner_that_was_overtaken_promises_no_tick(store: RocksStore, tmp_path: Path) -> None:
    await store.promise_tick(TICK)
    await overtake(store, tmp_path / "node")
    before = (tmp_path / "node" / "floor").read_bytes()
    with pytest.raises(ChannelFenced):
        await store.promise_tick(TICK + 1)
    assert store.state is CommitState.FENCED
    assert (tmp_path / "node" / "floor").read_bytes() == before
    with anyio.fail_after(10):
        await store.wait_failed()


async def test_owner_overtaken_between_a_promise_and_its_answer_promises_nothing(
    store: RocksStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other owner may have read the floor file before the promise was in it."""
    other, promise = Claim(tmp_path / "node"), FloorFile.promise

    def promise_once_overtaken(floor: FloorFile, tick: int) -> None:
        other.take(store.term + 1)
        promise(floor, tick)

    monkeypatch.setattr(FloorFile, "promise", promise_once_overtaken)
    with pytest.raises(ChannelFenced):
        await store.promise_tick(TICK)
    assert store.state is CommitState.FENCED
    other.close()


async def test_closing_waits_for_a_promise_that_is_being_written(
    store: RocksStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go, promise = threading.Event(), threading.Event(), FloorFile.promise

    def wait(floor: FloorFile, tick: int) -> None:
        writing.set()
        assert go.wait(30)
        promise(floor, tick)  # a closed descriptor would raise, and another file's would take the bytes

    monkeypatch.setattr(FloorFile, "promise", wait)
    promising = asyncio.ensure_future(store.promise_tick(TICK))
    await anyio.to_thread.run_sync(writing.wait)
    promising.cancel()
    closing = asyncio.ensure_future(store.close())
    while store.state is not CommitState.CLOSED:
        await anyio.lowlevel.checkpoint()
    go.set()
    await closing
    with pytest.raises(asyncio.CancelledError):
        await promising
    floor = await anyio.to_thread.run_sync(read_floor, tmp_path / "node")
    assert floor is not None
    assert floor.tick == TICK


async def test_a_promise_is_never_lowered_and_touches_no_file_on_the_event_loop(
    store: RocksStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_loop: list[str] = []

    def watched(name: str) -> Callable[..., object]:
        call = getattr(os, name)

        def watch(*arguments: object) -> object:
            if threading.current_thread() is threading.main_thread():
                on_the_loop.append(name)
            return call(*arguments)

        return watch

    for name in ("pread", "pwrite", "stat", "fsync"):
        monkeypatch.setattr(os, name, watched(name))
    for tick in (TICK + 5, TICK):
        await store.promise_tick(tick)
    monkeypatch.undo()
    assert on_the_loop == []
    floor = await anyio.to_thread.run_sync(read_floor, tmp_path / "node")
    assert floor is not None
    assert floor.tick == TICK + 5


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
            await store.promise_tick(TICK)
    reopening = asyncio.ensure_future(store.reopen())
    while store.state is not CommitState.REOPENING:
        await anyio.lowlevel.checkpoint()
    await overtake(store, tmp_path / "node")
    disk.gate.set()
    with pytest.raises(ChannelFenced):
        await reopening
    assert ticket.written.exception() is not None
    assert store.state is CommitState.FENCED


async def test_owner_overtaken_while_it_verifies_before_reopening_leaves_the_claim(
    store: RocksStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify_while_another_claims(directory: Path, options: RocksOptions, floor: Floor) -> Survey:
        found = verify_database(directory, options, floor)
        other.take(store.term + 1)
        return found

    await append(await store.open_log("p0"), b"before")
    disk = FailingDisk(monkeypatch, Fault.SYNC_LOST)
    await poison(store, disk)
    other = Claim(tmp_path / "node")
    monkeypatch.setattr("wal.rocks.possession.verify_database", verify_while_another_claims)
    with pytest.raises(ChannelFenced):
        await store.reopen()
    await anyio.to_thread.run_sync(other.check)
    assert store.state is CommitState.FENCED
    other.close()


@pytest.mark.parametrize("claimed_at", ["recovery.database_opened", "recovery.term_synced"])
async def test_owner_overtaken_while_it_opens_leaves_the_floor_and_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed_at: str
) -> None:
    await (await open_rocks_store(tmp_path / "node", options=OPTIONS)).close()
    other = Claim(tmp_path / "node")
    before = await anyio.to_thread.run_sync(read_floor, tmp_path / "node")
    assert before is not None

    def claim_there(name: str) -> None:
        if name == claimed_at:
            other.take(7)

    monkeypatch.setattr("wal.rocks.possession.failpoint", claim_there)
    with pytest.raises(ChannelFenced, match="of term 7"):
        await open_rocks_store(tmp_path / "node", options=OPTIONS)
    after = await anyio.to_thread.run_sync(read_floor, tmp_path / "node")
    assert after == msgspec.structs.replace(before, term=7)
    await anyio.to_thread.run_sync(other.check)
    other.close()


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


async def test_owner_that_only_the_lock_of_rocksdb_protects_goes_on_after_another_opening_failed(
    store: RocksStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await store.open_log("p0")
    await append(log, b"before")
    claimed: list[int] = []
    take = Claim.take

    def take_and_tell(claim: Claim, term: int) -> None:
        claimed.append(term)
        take(claim, term)

    monkeypatch.setattr(Claim, "take", take_and_tell)
    monkeypatch.setattr("fcntl.flock", lambda *_: None)  # a file system without such locks
    with pytest.raises(AlreadyOwned):
        await open_rocks_store(tmp_path / "node", options=OPTIONS)
    assert claimed == [store.term + 1]
    await append(log, b"after")


async def test_what_an_owner_acknowledges_is_in_the_files_that_a_failed_opening_leaves(
    store: RocksStore, tmp_path: Path
) -> None:
    log = await store.open_log("p0")
    await append(log, b"before")
    result = await anyio.run_process([sys.executable, "-c", FAILING_OPENER, str(tmp_path / "node")], cwd=ROOT)
    assert result.stdout == b"StorageFailed\n"
    with pytest.raises(ChannelFenced):
        await log.append(stamped_group(b"into files that nobody reads")).written
    assert store.state is CommitState.FENCED
