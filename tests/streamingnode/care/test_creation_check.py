"""A node whose creation was cut off is no damage, and looking at one leaves it as it was."""

import shutil
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

import streamingnode as sn
from streamingnode.care.findings import Severity
from streamingnode.care.records import read_node_records
from streamingnode.care.verify import verify_directory
from tests.streamingnode.sample_node import SETTINGS, Sample, copy_of
from wal.errors import Corrupt, InvalidArgument
from wal.failpoint import arm, disarm_all

LOOKS: dict[str, Callable[[Path], object]] = {
    "verify": verify_directory,
    "info": read_node_records,
}


def open_once(path: Path) -> None:
    async def opened() -> None:
        async with sn.open_node(path, **SETTINGS):
            pass

    anyio.run(opened)


def cut_off(path: Path, failpoint: str) -> Path:
    """Return the directory as it was when the creation of a node reached a failpoint."""
    original = path.with_name("original")

    def crash() -> None:
        shutil.copytree(original, path)

    try:
        arm(failpoint, crash)
        open_once(original)
    finally:
        disarm_all()
    return path


def files(path: Path) -> dict[Path, bytes | None]:
    """Return everything under a directory, but the lock that a look takes."""
    return {
        each: each.read_bytes() if each.is_file() else None
        for each in path.rglob("*")
        if each.name != "node.lock"
    }


@pytest.mark.parametrize("failpoint", ["recovery.database_created", "recovery.floor_created"])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_look_leaves_an_unfinished_creation_to_the_next_opening(
    tmp_path: Path, look: Callable[[Path], object], failpoint: str
) -> None:
    path = cut_off(tmp_path / "node", failpoint)
    before = files(path)
    if look is read_node_records:
        with pytest.raises(Corrupt, match="holds no database"):
            look(path)
    else:
        look(path)
    assert files(path) == before
    open_once(path)
    assert verify_directory(path).worst is None


@pytest.mark.parametrize("failpoint", ["recovery.database_created", "recovery.floor_created"])
def test_an_unfinished_creation_is_a_warning(tmp_path: Path, failpoint: str) -> None:
    [finding] = verify_directory(cut_off(tmp_path / "node", failpoint)).findings
    assert (finding.severity, finding.place) == (Severity.WARNING, "log")
    assert "next opening finishes it" in finding.next_step


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_node_that_lost_its_log_is_damaged_and_gets_no_empty_one(
    sample: Sample, tmp_path: Path, look: Callable[[Path], object]
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    (path / "log").rename(path / "log.tmp")
    report = verify_directory(path)
    assert report.damages
    if look is read_node_records:
        with pytest.raises(Corrupt):
            look(path)
    else:
        look(path)
    assert not (path / "log").exists()


def test_a_log_that_a_repair_of_an_earlier_release_left_half_replaced_is_refused(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    (path / "log").rename(path / "log.repaired")
    before = files(path)
    with pytest.raises(Corrupt, match="no database"):
        open_once(path)
    assert files(path) == before


def test_a_temporary_directory_of_somebody_else_makes_no_node(tmp_path: Path) -> None:
    (tmp_path / "log.tmp").mkdir()
    with pytest.raises(InvalidArgument, match="no node"):
        verify_directory(tmp_path)
