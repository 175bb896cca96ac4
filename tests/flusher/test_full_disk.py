"""A flusher without room on its disk, or without descriptors: who waits hears of it, nothing is given up, and it goes on."""

import os
from pathlib import Path
from typing import BinaryIO

import anyio
import pytest

from flusher.directory import NodeDirectory
from flusher.flusher import LASTING_FAULTS, FlusherState, short_of
from flusher.retention import RetentionOptions
from flusher.run import FlushOptions
from tests.flusher.cut_reading import manifests, rows_in
from tests.flusher.stamped_log import StampedLog, flusher_of
from wal.errors import Overloaded, StorageFailed, StorageFull
from wal.memory_store import MemoryLogStore

pytestmark = pytest.mark.anyio

MIB = 1 << 20


class FullDirectory(NodeDirectory):
    """A node directory on a disk whose free space a test decides, and on which no file can be made while it is none."""

    free = 0
    descriptors = 1024

    def create(self, path: str) -> BinaryIO:
        if not self.free:
            raise OSError(28, "No space left on device")
        if not self.descriptors:
            raise OSError(24, "Too many open files", path)
        return super().create(path)

    def can_open(self, count: int) -> bool:
        return count <= self.descriptors

    def free_bytes(self) -> int:
        return self.free


class Setup:
    """A flusher with a log of one cut; `pauses` are all it slept, and time passes only when it sleeps."""

    def __init__(self, root: Path, store: MemoryLogStore, log: StampedLog) -> None:
        self.directory, self.log = FullDirectory(root), log
        self.pauses: list[float] = []
        self.room_after_pauses = 1 << 30
        options = FlushOptions(retry_first_s=8.0, retry_max_s=8.0, retention=RetentionOptions(interval_s=7777.0))
        self.flusher = flusher_of(self.directory, store, log.log, options=options, sleep=self.sleep)

    async def sleep(self, seconds: float) -> None:
        if seconds == 7777.0:  # retention has its own rhythm
            await anyio.sleep_forever()
        self.pauses.append(seconds)
        if len(self.pauses) >= self.room_after_pauses:
            self.directory.free, self.directory.descriptors = 100 * MIB, 1024
        await anyio.lowlevel.checkpoint()


@pytest.fixture
async def setup(tmp_path: Path) -> Setup:
    store = MemoryLogStore()
    log = StampedLog(await store.open_log("p0"))
    table = log.create()
    log.insert(table, [1, 2, 3])
    log.cut()
    return Setup(tmp_path, store, log)


async def test_who_waits_for_a_cut_without_room_hears_that_and_how_much_it_takes(setup: Setup) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setup.flusher.run)
        for _ in range(3):
            with pytest.raises(StorageFull, match="free space on that disk") as full:
                await setup.flusher.wait_for_cut(1)
            assert full.value.needed_bytes >= MIB
        tasks.cancel_scope.cancel()
    assert setup.flusher.checkpoint.cut_number == 0
    assert setup.log.log.first_position == 1


async def test_a_flusher_goes_on_as_soon_as_there_is_room_and_not_after_its_pause(setup: Setup) -> None:
    setup.room_after_pauses = 3
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setup.flusher.run)
        with pytest.raises(StorageFull):
            await setup.flusher.wait_for_cut(1)
        while setup.flusher.state is not FlusherState.RUNNING or not setup.flusher.checkpoint.cut_number:
            await anyio.lowlevel.checkpoint()
        await setup.flusher.wait_for_cut(1)
        tasks.cancel_scope.cancel()
    assert sum(setup.pauses) < 1.0, setup.pauses
    [manifest] = manifests(setup.directory.root)
    assert [row.key for row in rows_in(setup.directory.root, manifest)] == [1, 2, 3]


async def test_who_waits_anew_after_room_was_made_gets_the_cut_and_no_stale_refusal(setup: Setup) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setup.flusher.run)
        with pytest.raises(StorageFull):
            await setup.flusher.wait_for_cut(1)
        setup.directory.free = 100 * MIB
        assert (await setup.flusher.wait_for_cut(1)).number == 1
        tasks.cancel_scope.cancel()


async def test_a_disk_that_stays_full_is_not_tried_more_often_than_any_other_fault(setup: Setup) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setup.flusher.run)
        while len(setup.pauses) < 64:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert setup.flusher.statistics().faults <= 1 + sum(setup.pauses) / 8


async def test_who_waits_for_a_cut_without_descriptors_hears_that_until_there_are_some(setup: Setup) -> None:
    setup.directory.free, setup.directory.descriptors = 100 * MIB, 0
    setup.room_after_pauses = 3
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setup.flusher.run)
        with anyio.fail_after(30), pytest.raises(Overloaded, match=r"no file descriptor is left .*ulimit -n"):
            await setup.flusher.wait_for_cut(1)
        told = setup.flusher.statistics()
        assert (told.state, told.short_of) == (FlusherState.BACKING_OFF, "file descriptors")
        assert "Too many open files" in told.last_error
        while not setup.flusher.checkpoint.cut_number:
            await anyio.lowlevel.checkpoint()
        assert (await setup.flusher.wait_for_cut(1)).number == 1
        assert setup.flusher.statistics().short_of == ""
        tasks.cancel_scope.cancel()
    assert sum(setup.pauses) < 1.0, setup.pauses


async def test_who_waits_for_a_cut_hears_of_a_fault_that_lasts_and_gets_the_cut_once_it_is_over(setup: Setup) -> None:
    setup.directory.free = 100 * MIB
    in_the_way = setup.directory.root / "segments"
    in_the_way.touch()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setup.flusher.run)
        for tries in (LASTING_FAULTS, LASTING_FAULTS + 1):
            with anyio.fail_after(30), pytest.raises(StorageFailed, match=f"{tries} tries in a row.* — check the disk"):
                await setup.flusher.wait_for_cut(1)
        in_the_way.unlink()
        assert (await setup.flusher.wait_for_cut(1)).number == 1
        tasks.cancel_scope.cancel()


async def test_who_waits_for_a_cut_hears_nothing_of_a_fault_that_passes(setup: Setup) -> None:
    setup.directory.free = 100 * MIB
    in_the_way = setup.directory.root / "segments"
    in_the_way.touch()

    async def clear() -> None:
        while setup.flusher.statistics().faults < LASTING_FAULTS - 1:
            await anyio.lowlevel.checkpoint()
        in_the_way.unlink()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setup.flusher.run)
        tasks.start_soon(clear)
        assert (await setup.flusher.wait_for_cut(1)).number == 1
        tasks.cancel_scope.cancel()


SPACE, DESCRIPTORS = "disk space", "file descriptors"


@pytest.mark.parametrize(
    "error, what",
    [
        (OSError(28, os.strerror(28)), SPACE),
        (OSError(122, os.strerror(122)), SPACE),
        (OSError(5, os.strerror(5)), ""),
        (OSError(24, os.strerror(24)), DESCRIPTORS),
        (OSError(23, os.strerror(23)), DESCRIPTORS),
        (StorageFull("data", 0, 1), SPACE),
        (StorageFailed("read-only"), ""),
        (Overloaded("no file descriptor is left"), DESCRIPTORS),
        (BaseExceptionGroup("", [OSError(5, "io"), BaseExceptionGroup("", [OSError(28, "full")])]), SPACE),
    ],
    ids=["ENOSPC", "EDQUOT", "EIO", "EMFILE", "ENFILE", "StorageFull", "StorageFailed", "Overloaded", "nested"],
)
def test_only_what_is_short_counts_as_a_shortage(error: BaseException, what: str) -> None:
    assert short_of(error) == what
