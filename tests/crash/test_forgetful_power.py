"""The driver of the forgetful disk: orders and cuts that cross each other confuse nobody."""

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.forgetful.power import ForgetfulMount, lacking

pytestmark = pytest.mark.crash

CYCLES = 40


def write(path: Path) -> None:
    with suppress(OSError):  # power goes under it
        path.write_bytes(b"x")


def test_armed_cut_that_comes_while_power_is_taken_away_is_not_taken_for_the_answer(
    tmp_path: Path,
) -> None:
    if lack := lacking():
        pytest.skip(lack)
    with ForgetfulMount(tmp_path / "disk") as disk:
        for cycle in range(CYCLES):
            disk.arm(1)
            writer = threading.Thread(target=write, args=(disk.path / "crossing",), daemon=True)
            writer.start()
            disk.off()
            disk.on(seed=cycle)
            writer.join()
            (disk.path / "afterwards").write_bytes(b"power is on")


def test_armed_cut_is_told_whenever_one_asks(tmp_path: Path) -> None:
    if lack := lacking():
        pytest.skip(lack)
    with ForgetfulMount(tmp_path / "disk") as disk:
        assert not disk.went_off(0.0)
        disk.arm(1)
        writer = threading.Thread(target=write, args=(disk.path / "f",), daemon=True)
        writer.start()
        assert disk.went_off(30.0)
        assert disk.went_off(0.0)
        disk.on(seed=1)
        writer.join()
        disk.arm(1_000)
        assert not disk.went_off(0.0)
