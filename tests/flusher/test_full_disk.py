"""A flusher without room on its disk, or without descriptors: who waits hears of it, nothing is
given up, and it goes on.
"""

import os
from pathlib import Path
from typing import BinaryIO

import anyio
import pytest

from flusher.directory import NodeDirectory
from flusher.flusher import LASTING_FAULTS, Flusher, FlusherState, decisive, short_of
from flusher.run import FlushOptions
from tests.flusher.cut_reading import manifests, rows_in
from tests.flusher.stamped_log import StampedLog, flusher_of
from wal.errors import Overloaded, StorageFailed, StorageFull
from wal.memory_store import MemoryLogStore

pytestmark = pytest.mark.anyio

MIB = 1 << 20


class FullDirectory(NodeDirectory):
    """A node directory on a disk whose free space a test decides, and on which no file can be made
    while it is none.
    """

    free = 0
    descriptors = 1024

    def create(self, path: str) -> BinaryIO:
        if not self.free:
            raise OSError(28, "No space left on device")
        if not self.descriptors:
            raise OSError(24, "Too many open files", path)
        return super().create(path)

    def free_bytes(self) -> int:
        return self.free


class Setup:
    """A flusher with a log of one cut, which pauses for ever after a fault unless somebody waits
    for a cut.
    """

    def __init__(self, root: Path, store: MemoryLogStore, log: StampedLog) -> None:
        self.directory = FullDirectory(root)
        self.log = log
        self._store = store
        self.flusher = self.flusher_with(pause_s=3600.0)

    def flusher_with(self, *, pause_s: float) -> Flusher:
        options = FlushOptions(retry_first_s=pause_s, retry_max_s=pause_s)
        return flusher_of(self.directory, self._store, self.log.log, options=options)


@pytest.fixture
async def setup(tmp_path: Path) -> Setup:
    store = MemoryLogStore()
    log = StampedLog(await store.open_log("p0"))
    table = log.create()
    log.insert(table, [1, 2, 3])
    log.cut()
    return Setup(tmp_path, store, log)


async def test_who_waits_for_a_cut_without_room_hears_that_and_how_much_it_takes(
    setup: Setup,
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setup.flusher.run)
        for _ in range(3):
            with pytest.raises(StorageFull, match="free space on that disk") as full:
                await setup.flusher.wait_for_cut(1)
            assert full.value.needed_bytes >= MIB
        tasks.cancel_scope.cancel()
    assert setup.flusher.checkpoint.cut_number == 0
    assert setup.log.log.first_position == 1


async def test_a_flusher_that_nobody_waits_for_goes_on_after_its_pause(setup: Setup) -> None:
    flusher = setup.flusher_with(pause_s=0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(flusher.run)
        while flusher.statistics().faults < 3:
            await anyio.lowlevel.checkpoint()
        setup.directory.free = 100 * MIB
        while not flusher.checkpoint.cut_number:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    [manifest] = manifests(setup.directory.root)
    assert [row.key for row in rows_in(setup.directory.root, manifest)] == [1, 2, 3]


async def test_who_waits_anew_after_room_was_made_gets_the_cut_at_once_and_no_stale_refusal(
    setup: Setup,
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setup.flusher.run)
        with pytest.raises(StorageFull):
            await setup.flusher.wait_for_cut(1)
        setup.directory.free = 100 * MIB
        with anyio.fail_after(60):
            assert (await setup.flusher.wait_for_cut(1)).number == 1
        tasks.cancel_scope.cancel()


async def test_who_waits_for_a_cut_without_descriptors_hears_that_until_there_are_some(
    setup: Setup,
) -> None:
    setup.directory.free = 100 * MIB
    setup.directory.descriptors = 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setup.flusher.run)
        with (
            anyio.fail_after(60),
            pytest.raises(Overloaded, match=r"no file descriptor is left .*ulimit -n"),
        ):
            await setup.flusher.wait_for_cut(1)
        told = setup.flusher.statistics()
        assert (told.state, told.short_of) == (FlusherState.BACKING_OFF, "file descriptors")
        assert "Too many open files" in told.last_error
        setup.directory.descriptors = 1024
        with anyio.fail_after(60):
            assert (await setup.flusher.wait_for_cut(1)).number == 1
        assert setup.flusher.statistics().short_of == ""
        tasks.cancel_scope.cancel()


async def test_who_waits_for_a_cut_hears_of_a_fault_that_lasts_and_gets_the_cut_once_it_is_over(
    setup: Setup,
) -> None:
    setup.directory.free = 100 * MIB
    flusher = setup.flusher_with(pause_s=0.01)
    in_the_way = setup.directory.root / "segments"
    in_the_way.touch()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(flusher.run)
        for tries in (LASTING_FAULTS, LASTING_FAULTS + 1):
            with (
                anyio.fail_after(60),
                pytest.raises(StorageFailed, match=f"{tries} tries in a row.* — check the disk"),
            ):
                await flusher.wait_for_cut(1)
        in_the_way.unlink()
        assert (await flusher.wait_for_cut(1)).number == 1
        tasks.cancel_scope.cancel()


async def test_who_waits_for_a_cut_hears_nothing_of_a_fault_that_passes(setup: Setup) -> None:
    setup.directory.free = 100 * MIB
    flusher = setup.flusher_with(pause_s=0.01)
    in_the_way = setup.directory.root / "segments"
    in_the_way.touch()

    async def clear() -> None:
        while flusher.statistics().faults < LASTING_FAULTS - 1:
            await anyio.lowlevel.checkpoint()
        in_the_way.unlink()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(flusher.run)
        tasks.start_soon(clear)
        assert (await flusher.wait_for_cut(1)).number == 1
        tasks.cancel_scope.cancel()


SPACE = "disk space"
DESCRIPTORS = "file descriptors"


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
        (
            BaseExceptionGroup(
                "", [OSError(5, "io"), BaseExceptionGroup("", [OSError(28, "full")])]
            ),
            SPACE,
        ),
    ],
    ids=[
        "ENOSPC",
        "EDQUOT",
        "EIO",
        "EMFILE",
        "ENFILE",
        "StorageFull",
        "StorageFailed",
        "Overloaded",
        "nested",
    ],
)
def test_only_what_is_short_counts_as_a_shortage(error: BaseException, what: str) -> None:
    assert short_of(decisive(error)) == what


async def test_full_disk_is_told_how_many_bytes_the_cut_still_needs(tmp_path: Path) -> None:
    store = MemoryLogStore()
    log = StampedLog(await store.open_log("p0"))
    table = log.create()
    for number in range(6):
        log.insert(table, [number], item="x" * MIB)
    log.rows.clear()
    log.cut()
    options = FlushOptions(retry_first_s=3600.0, retry_max_s=3600.0)
    flusher = flusher_of(FullDirectory(tmp_path), store, log.log, options=options)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(flusher.run)
        with pytest.raises(StorageFull) as full:
            await flusher.wait_for_cut(1)
        assert full.value.needed_bytes >= 6 * MIB
        assert flusher.statistics().unflushed_rows == 6
        tasks.cancel_scope.cancel()
