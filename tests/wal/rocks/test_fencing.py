"""The fencing token, and promises of ticks while an owner closes or is overtaken."""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.failing_disk import FailingDisk, Fault
from tests.wal.log_contract import append, stamped_pack
from wal.errors import ChannelFenced, Indeterminate, StorageFailed
from wal.rocks.floor import Floor, FloorFile, read_floor, write_floor
from wal.rocks.layout import RocksOptions
from wal.rocks.log import RocksLog, last_position
from wal.rocks.recovery import Survey, verify_database
from wal.rocks.store import RocksStore, open_rocks_store
from wal.rocks.writer import OWNER_CHECK_S

pytestmark = pytest.mark.anyio

OPTIONS = RocksOptions(free_bytes_min=0)
TICK = 1 << 40


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RocksStore]:
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    yield store
    await store.close()


async def overtake(store: RocksStore, directory: Path) -> None:
    other = FloorFile(directory)
    await anyio.to_thread.run_sync(other.take_token, store.term + 1)
    other.close()


async def test_closing_waits_for_a_promise_that_is_being_written(
    store: RocksStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = threading.Event()
    go = threading.Event()
    promise = FloorFile.promise

    def wait(floor: FloorFile, tick: int) -> None:
        writing.set()
        assert go.wait(60)
        # a closed descriptor would raise, and another file's would take the bytes
        promise(floor, tick)

    monkeypatch.setattr(FloorFile, "promise", wait)
    promising = asyncio.ensure_future(store.promise_tick(TICK))
    await anyio.to_thread.run_sync(writing.wait)
    promising.cancel()
    closing = asyncio.ensure_future(store.close())
    while store.condition != "closed":
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
    ticket = log.append(stamped_pack(b"left"))
    with monkeypatch.context() as floor:
        floor.setattr(FloorFile, "promise", broken)
        with pytest.raises(StorageFailed):
            await store.promise_tick(TICK)
    reopening = asyncio.ensure_future(store.reopen())
    while store.condition != "reopening":
        await anyio.lowlevel.checkpoint()
    await overtake(store, tmp_path / "node")
    disk.gate.set()
    with pytest.raises(ChannelFenced):
        await reopening
    assert ticket.written.exception() is not None
    assert store.condition == "fenced"


async def test_owner_overtaken_while_it_reopens_is_fenced_and_leaves_the_token_of_the_other(
    store: RocksStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[FloorFile] = []

    def overtaken(*given: Any) -> Survey:
        others.append(FloorFile(tmp_path / "node"))
        others[0].take_token(store.term + 1)
        return verify_database(*given)

    log = await store.open_log("p0")
    FailingDisk(monkeypatch, Fault.SYNC_LOST).fail_at(1)
    with pytest.raises(Indeterminate):
        await append(log, b"lost")
    monkeypatch.setattr("wal.rocks.opening.verify_database", overtaken)
    with pytest.raises(ChannelFenced):
        await store.reopen()
    assert store.condition == "fenced"
    with pytest.raises(ChannelFenced):
        await store.promise_tick(TICK)
    await anyio.to_thread.run_sync(others[0].check_token)
    others[0].close()


class Clock:
    """The writer's time, which a test decides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("wal.rocks.writer.monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def written_end(store: RocksStore, log: RocksLog) -> int:
    """Return the last position that RocksDB has, acknowledged or not."""
    return await store._engine.read(lambda: last_position(store._engine.entries, log.log_id))


async def test_owner_overtaken_since_its_last_comparison_writes_nothing(
    clock: Clock, store: RocksStore, tmp_path: Path
) -> None:
    log = await store.open_log("p0")
    await append(log, b"before")
    await overtake(store, tmp_path / "node")
    clock.now_s += OWNER_CHECK_S
    for _ in range(2):
        with pytest.raises(ChannelFenced):
            await log.append(stamped_pack(b"too late")).durable
    assert await written_end(store, log) == 1


async def test_owner_overtaken_right_after_a_comparison_acknowledges_nothing_and_writes_one_batch(
    clock: Clock, store: RocksStore, tmp_path: Path
) -> None:
    log = await store.open_log("p0")
    await append(log, b"before")
    await overtake(store, tmp_path / "node")
    with pytest.raises(Indeterminate, match="taken over"):
        await log.append(stamped_pack(b"open")).durable
    with pytest.raises(ChannelFenced):
        await log.append(stamped_pack(b"later")).durable
    assert await written_end(store, log) == 2


@pytest.fixture
async def lazy(clock: Clock, tmp_path: Path) -> AsyncIterator[RocksStore]:
    """A store that acknowledges before it syncs, and syncs at its end."""
    options = RocksOptions(free_bytes_min=0, durability="os", sync_interval_ms=60_000)
    store = await open_rocks_store(tmp_path / "node", options=options)
    await store.open_log("p0")
    yield store
    await store.close()


async def test_write_that_is_not_synced_is_not_acknowledged_either_when_it_was_overtaken(
    lazy: RocksStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await lazy.open_log("p0")
    disk = FailingDisk(monkeypatch, Fault.WRITE_LOST)
    disk.gate.clear()
    ticket = log.append(stamped_pack(b"overtaken"))
    while not disk.waiting:  # it is about to be written; the other owner may not read it any more
        await anyio.lowlevel.checkpoint()
    await overtake(lazy, tmp_path / "node")
    disk.gate.set()
    with pytest.raises(Indeterminate, match="taken over"):
        await ticket.written


async def test_what_was_written_and_not_synced_before_another_owner_came_is_indeterminate(
    clock: Clock, lazy: RocksStore, tmp_path: Path
) -> None:
    log = await lazy.open_log("p0")
    acknowledged = log.append(stamped_pack(b"acknowledged"))
    await acknowledged.written
    await overtake(lazy, tmp_path / "node")
    clock.now_s += OWNER_CHECK_S
    with pytest.raises(ChannelFenced):
        await log.append(stamped_pack(b"too late")).written
    with pytest.raises(Indeterminate, match="taken over"):
        await acknowledged.durable


async def test_a_batch_soon_after_another_costs_one_look_at_the_floor_file(
    clock: Clock, store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await store.open_log("p0")
    looks: list[str] = []

    def counted(name: str) -> Callable[..., object]:
        call = getattr(os, name)

        def count(*arguments: object) -> object:
            looks.append(name)
            return call(*arguments)

        return count

    with monkeypatch.context() as counting:
        for name in ("pread", "stat", "statvfs"):
            counting.setattr(os, name, counted(name))
        for _ in range(10):
            await append(log, b"x")
        clock.now_s += OWNER_CHECK_S
        await append(log, b"x")
    assert looks == [*["pread"] * 10, "pread", "stat", "pread"]


@pytest.fixture
def token(tmp_path: Path) -> FloorFile:
    write_floor(tmp_path, Floor(node_id="0" * 32))
    return FloorFile(tmp_path)


def test_owner_whose_next_token_was_not_written_is_not_fenced_by_its_last_one(
    token: FloorFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    token.take_token(4)

    def fail(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="Input/output error"):
            token.take_token(5)
    token.check_token()
    token.take_token(5)
    token.check_token()
    token.close()


def test_owner_is_fenced_by_the_token_of_another_opening(token: FloorFile, tmp_path: Path) -> None:
    token.take_token(4)
    other = FloorFile(tmp_path)
    other.take_token(5)
    with pytest.raises(ChannelFenced, match="of term 5"):
        token.check_token()
    other.close()
    token.close()
