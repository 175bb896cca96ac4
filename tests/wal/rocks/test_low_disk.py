"""The writer's looks at the disk: before a write can fail, and no more often than that takes."""

import asyncio
import errno
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from tests.failing_disk import FailingDisk
from tests.wal.log_contract import append, payloads_of, read_all, stamped_pack
from wal.errors import StorageFull
from wal.log import SpaceLevel
from wal.rocks.layout import RocksOptions
from wal.rocks.space import (
    EXHAUSTED_BYTES,
    MIB,
    RESERVE_NAME,
    SHORT_LOOK_BYTES,
    SpaceVerdict,
    SpaceWatch,
)
from wal.rocks.store import RocksStore, open_rocks_store
from wal.rocks.writer import SPACE_CHECK_S

pytestmark = pytest.mark.anyio

MARK_BYTES = 64 * MIB


class Disk:
    """Free space and time that a test decides."""

    free_bytes = 1 << 40
    now_s = 0.0


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wal.rocks.space.free_bytes_of", lambda _: disk.free_bytes)
        patch.setattr("wal.rocks.writer.monotonic", lambda: disk.now_s)
        yield disk


@pytest.fixture
async def store(tmp_path: Path, disk: Disk) -> AsyncIterator[RocksStore]:
    store = await open_rocks_store(
        tmp_path / "node",
        options=RocksOptions(free_bytes_min=MARK_BYTES),
    )
    await append(await store.open_log("p0"), b"before")
    yield store
    await store.close()


@pytest.mark.parametrize(
    "payload, after_s",
    [(b"small", SPACE_CHECK_S), (bytes(SHORT_LOOK_BYTES), 0.0)],
    ids=["small, the last look is old", "large, the last look is new"],
)
async def test_a_disk_that_is_suddenly_full_is_noticed_before_the_next_write(
    tmp_path: Path, store: RocksStore, disk: Disk, payload: bytes, after_s: float
) -> None:
    reserve = tmp_path / "node" / RESERVE_NAME
    assert (await anyio.Path(reserve).stat()).st_size > 0
    log = await store.open_log("p0")
    disk.free_bytes = 0
    disk.now_s += after_s
    await log.append(stamped_pack(payload)).written
    assert (await anyio.Path(reserve).stat()).st_size == 0
    assert store.short_of_space
    for makes_room in (False, True):
        with pytest.raises(StorageFull):
            await log.admit(1, makes_room=makes_room)
    with pytest.raises(StorageFull):
        await store.state.put({"k": b"v"})


async def test_what_makes_room_passes_on_a_full_disk_and_rows_do_not(
    store: RocksStore, disk: Disk
) -> None:
    disk.free_bytes = MARK_BYTES - 1
    log = await store.open_log("p0")
    while store.space.level is SpaceLevel.AMPLE:
        await append(log, bytes(MIB))
    with pytest.raises(StorageFull):
        await log.admit(1)
    await log.admit(1, makes_room=True)
    await store.state.put({"k": b"v"})


async def test_small_writes_on_an_ample_disk_look_once_in_so_long(
    store: RocksStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []

    def count(_path: Path) -> int:
        looks.append(_path)
        return disk.free_bytes

    monkeypatch.setattr("wal.rocks.space.free_bytes_of", count)
    log = await store.open_log("p0")
    for times in (0, 1, 2):
        for _ in range(20):
            await append(log, b"x")
        assert len(looks) == times
        disk.now_s += SPACE_CHECK_S


async def test_the_logs_own_writes_do_not_exhaust_a_disk_between_two_looks(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.free_bytes = EXHAUSTED_BYTES + 1000
    store = await open_rocks_store(tmp_path / "node", options=RocksOptions(free_bytes_min=0))
    log = await store.open_log("p0")
    looks: list[str] = []
    look = SpaceWatch.look

    def count(watch: SpaceWatch) -> SpaceVerdict:
        looks.append("look")
        return look(watch)

    monkeypatch.setattr(SpaceWatch, "look", count)
    await append(log, bytes(100))
    assert looks == []
    await append(log, bytes(1000))
    assert looks == ["look"], "far less was written than else is worth a look"
    await store.close()


async def test_what_makes_room_and_waits_for_the_queue_gets_through_when_the_disk_becomes_full(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = FailingDisk(monkeypatch)
    store = await open_rocks_store(
        tmp_path / "node",
        options=RocksOptions(free_bytes_min=MARK_BYTES, queue_bytes_max=1000),
    )
    log = await store.open_log("p0")
    slow.gate.clear()
    first = log.append(stamped_pack(bytes(MIB)))
    # of a batch of its own, before which the writer looks
    second = log.append(stamped_pack(bytes(MIB)))
    disk.free_bytes = MARK_BYTES - 1
    rows = asyncio.ensure_future(log.admit(10))
    drop = asyncio.ensure_future(log.admit(10, makes_room=True))
    await asyncio.sleep(0)
    slow.gate.set()
    with pytest.raises(StorageFull):
        await rows
    await drop
    await asyncio.gather(first.written, second.written)
    await store.close()


KILLED = """
import os, sys, anyio
from pathlib import Path
from tests.wal.log_contract import append
from wal.rocks.layout import RocksOptions
from wal.rocks.store import open_rocks_store
async def main(directory):
    store = await open_rocks_store(directory, options=RocksOptions(free_bytes_min=0))
    log = await store.open_log("p0")
    await append(log, b"first")
    await append(log, b"second")
    os.kill(os.getpid(), 9)
anyio.run(main, Path(sys.argv[1]))
"""


async def test_log_without_room_for_its_tables_opens_with_all_it_had_once_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    command = [sys.executable, "-c", KILLED, str(tmp_path / "node")]
    killed = await anyio.run_process(
        command, check=False, stderr=None, cwd=Path(__file__).parents[3]
    )
    assert killed.returncode == -9
    options = RocksOptions(free_bytes_min=0)
    for _ in range(2):
        with (
            monkeypatch.context() as full,
            pytest.raises(StorageFull, match="free space on that disk"),
        ):
            full.setattr("wal.rocks.recovery._bring_into_tables", no_room)
            await open_rocks_store(tmp_path / "node", options=options)
    store = await open_rocks_store(tmp_path / "node", options=options)
    assert payloads_of(await read_all(await store.open_log("p0"))) == [[b"first"], [b"second"]]
    await store.close()
