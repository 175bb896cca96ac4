"""The reserve on a real directory, under free space that the test decides."""

import logging
from pathlib import Path

import pytest

from wal.log import SpaceLevel
from wal.rocks import space
from wal.rocks.space import (
    ASK_AGAIN_LOOKS,
    MIB,
    RESERVE_NAME,
    RESERVE_STEP_BYTES,
    SpaceWatch,
    log_bytes_of,
)

MARK_BYTES = 8 * MIB


class Disk:
    def __init__(self) -> None:
        self.free_bytes = 1 << 40
        self.is_gone = False

    def free(self, _path: Path) -> int:
        if self.is_gone:
            raise OSError(5, "the disk is gone")
        return self.free_bytes


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(space, "free_bytes_of", disk.free)
    return disk


@pytest.fixture
def watch(tmp_path: Path, disk: Disk) -> SpaceWatch:
    (tmp_path / "log").mkdir()
    return SpaceWatch(tmp_path, free_bytes_min=MARK_BYTES)


def reserve_bytes(directory: Path) -> int:
    path = directory / RESERVE_NAME
    return path.stat().st_blocks * 512 if path.exists() else 0


def test_the_reserve_holds_real_blocks_and_grows_with_the_log(
    tmp_path: Path, watch: SpaceWatch
) -> None:
    watch.look()
    assert RESERVE_STEP_BYTES <= reserve_bytes(tmp_path) < RESERVE_STEP_BYTES + MIB
    (tmp_path / "log" / "000012.log").write_bytes(bytes(5 * MIB))
    (tmp_path / "log" / "LOG").write_bytes(bytes(5 * MIB))
    (tmp_path / "log" / "000009.sst").write_bytes(bytes(5 * MIB))
    assert log_bytes_of(tmp_path / "log") == 5 * MIB
    watch.look()
    assert 6 * MIB <= reserve_bytes(tmp_path) < 7 * MIB


def test_an_exhausted_disk_gets_the_reserve_and_keeps_it_until_half_the_mark_stays_free(
    tmp_path: Path, watch: SpaceWatch, disk: Disk
) -> None:
    watch.look()
    disk.free_bytes = 0
    assert watch.look().level is SpaceLevel.EXHAUSTED
    assert reserve_bytes(tmp_path) == 0
    disk.free_bytes = RESERVE_STEP_BYTES + MARK_BYTES // 2 - 1
    assert watch.look().level is SpaceLevel.FULL
    assert reserve_bytes(tmp_path) == 0
    disk.free_bytes += 1
    watch.look()
    assert reserve_bytes(tmp_path) >= RESERVE_STEP_BYTES


def test_a_start_gives_the_reserve_up_only_when_replaying_the_log_has_no_room(
    tmp_path: Path, watch: SpaceWatch, disk: Disk
) -> None:
    watch.look()
    (tmp_path / "log" / "000012.log").write_bytes(bytes(MIB))
    disk.free_bytes = 2 * MIB
    watch.make_room_to_start()
    assert reserve_bytes(tmp_path) > 0
    disk.free_bytes -= 1
    watch.make_room_to_start()
    assert reserve_bytes(tmp_path) == 0


def test_a_reserve_that_cannot_be_had_is_done_without_and_said_once(
    tmp_path: Path, watch: SpaceWatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / RESERVE_NAME).mkdir()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert watch.look().level is SpaceLevel.AMPLE
    assert caplog.text.count("reserve_not_held") == 1


class Quota:
    """Refuses blocks, as a quota does that `statvfs` does not know of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_met = True
        self.asked = 0
        self._allocate = space._allocate
        monkeypatch.setattr(space, "_allocate", self._refuse)

    def _refuse(self, descriptor: int, held_bytes: int, wanted_bytes: int) -> None:
        self.asked += 1
        if self.is_met:
            raise OSError(122, "Disk quota exceeded")
        self._allocate(descriptor, held_bytes, wanted_bytes)


def test_a_reserve_that_was_refused_is_asked_for_again_after_a_while(
    tmp_path: Path, watch: SpaceWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = Quota(monkeypatch)
    for _ in range(1 + ASK_AGAIN_LOOKS):
        watch.look()
    assert quota.asked == 1
    quota.is_met = False
    for _ in range(2):
        watch.look()
        assert (quota.asked, reserve_bytes(tmp_path) >= RESERVE_STEP_BYTES) == (2, True)


def test_a_disk_that_cannot_tell_stays_what_it_was_and_is_not_tight(
    tmp_path: Path, watch: SpaceWatch, disk: Disk
) -> None:
    disk.free_bytes = MARK_BYTES - 1
    before = watch.look()
    disk.is_gone = True
    watch.make_room_to_start()
    assert watch.look() is before
    assert not watch.is_tight(MIB)
    assert log_bytes_of(tmp_path / "log" / "000012.log") == 0


@pytest.mark.parametrize("free_bytes, is_tight", [(2 * MIB - 1, True), (2 * MIB, False)])
def test_a_write_is_tight_when_it_would_leave_an_exhausted_disk(
    watch: SpaceWatch, disk: Disk, free_bytes: int, *, is_tight: bool
) -> None:
    disk.free_bytes = free_bytes
    assert watch.is_tight(MIB) is is_tight
