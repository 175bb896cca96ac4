"""A repair that a crash cut off is finished by whoever comes next: the node itself, or another repair."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

import streamingnode as sn
from streamingnode.cli import main
from streamingnode.repair import repairing
from streamingnode.repair.repairing import RECORD, repair_directory
from streamingnode.verification.finding import Kind
from streamingnode.verification.walk import verify_directory
from tests.streamingnode.sample_node import CUTS, PER_CUT, SETTINGS, Sample, copy_of, flip, largest, rows_of
from wal.errors import Corrupt
from wal.rocks.replacement import REPLACEMENT_NAME

Cut = Callable[[Path, pytest.MonkeyPatch], None]


class PowerCutError(Exception):
    """Nothing after this happens."""


def cut_power(*_arguments: object) -> None:
    raise PowerCutError


def repair(path: Path, *, dry_run: bool = False) -> repairing.RepairResult:
    return repair_directory(path, dry_run=dry_run, accept_loss=True, backup=None, now_ms=lambda: 1_792_000_000_123)


def damaged(sample: Sample, path: Path) -> Path:
    """Return a node whose log has a hole behind the newest cut, and a file of nobody beside it."""
    copy_of(sample.closed, path)
    table = largest(path, "log/*.sst")
    flip(table, int(table.stat().st_size * 0.92))
    (path / "notes.txt").write_text("mine")
    return path


def interrupted(path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> Path:
    """Repair until just before `step` of the module; what was done until then stays."""
    with monkeypatch.context() as patched:
        patched.setattr(repairing, step, cut_power)
        with pytest.raises(PowerCutError):
            repair(path)
    return path


@pytest.fixture
def between(sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node whose damaged log was moved away, and whose new one is not in its place yet."""

    def moves(directory: Path, place: Path, path: str) -> None:
        (directory / path).rename(place / path)
        if path == "log":
            raise PowerCutError

    node = damaged(sample, tmp_path / "node")
    with monkeypatch.context() as patched:
        patched.setattr(repairing, "_move", moves)
        with pytest.raises(PowerCutError):
            repair(node)
    assert not (node / "log").exists()
    return node


def test_opening_puts_the_new_log_in_its_place(between: Path, sample: Sample, caplog: pytest.LogCaptureFixture) -> None:
    kept = rows_of(between)
    assert kept.items() < sample.rows.items()
    assert len(kept) >= CUTS * PER_CUT - 4
    assert "interrupted_repair_finished" in caplog.text
    assert not (between / REPLACEMENT_NAME).exists()
    assert verify_directory(between).findings == []


def test_another_repair_puts_the_new_log_in_its_place(between: Path, sample: Sample) -> None:
    result = repair(between)
    assert result.plan.actions == []
    assert verify_directory(between).findings == []
    assert rows_of(between).items() < sample.rows.items()
    [place] = (between / "quarantine").iterdir()
    assert (place / "log" / "CURRENT").exists()
    assert json.loads((place / RECORD).read_text())["done"] is False


def test_verify_and_a_dry_run_say_so_and_change_nothing(
    between: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    before = sorted(between.rglob("*"))
    [finding] = verify_directory(between).findings
    assert (finding.kind, finding.place) == (Kind.UNFINISHED, "log")
    assert repair(between, dry_run=True).plan.actions == []
    assert sorted(between.rglob("*")) == before
    for command in ("verify", "info", "doctor"):
        assert main([command, str(between)]) in {0, 1}
    assert "a repair was cut off" in capsys.readouterr().out
    assert sorted(between.rglob("*")) == before


def test_backup_of_a_node_in_between_finishes_the_repair_first(between: Path, tmp_path: Path) -> None:
    assert main(["backup", str(between), str(tmp_path / "backup")]) == 0
    assert main(["verify", str(between)]) == 0


@pytest.mark.parametrize("step", ["_require_whole", "write_floor", "_move", "_new_log", "build_database"])
def test_crash_before_the_old_log_is_moved_leaves_it_damaged_and_another_repair_mends_it(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = interrupted(damaged(sample, tmp_path / "node"), monkeypatch, step)
    with pytest.raises(Corrupt):
        rows_of(path)
    finished = repair_directory(path, dry_run=False, accept_loss=True, backup=None, now_ms=lambda: 1_792_000_000_124)
    assert finished.done
    assert finished.after.findings == []
    assert not (path / REPLACEMENT_NAME).exists()
    assert rows_of(path).items() < sample.rows.items()


def test_crash_before_the_new_log_is_in_place_gives_no_term_and_no_position_twice(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damaged(sample, tmp_path / "node")
    positions = verify_directory(copy_of(sample.closed, tmp_path / "untouched")).counts["log positions"]
    with monkeypatch.context() as patched, pytest.raises(PowerCutError):
        patched.setattr(
            repairing, "finish_replacement", lambda _: cut_power() if (path / "quarantine").exists() else None
        )
        repair(path)

    async def insert_one() -> tuple[int, int]:
        async with sn.open_node(path, **SETTINGS) as node:
            result = await node.insert("orders", [{"id": -1, "item": None}])
            return result.message_ids[0].position, node.statistics().log.term

    position, term = anyio.run(insert_one)
    assert position > positions
    assert term > 1 << 16
    assert verify_directory(path).findings == []


def test_replacement_beside_a_log_counts_for_nothing(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    shutil.copytree(path / "log", path / REPLACEMENT_NAME)
    [finding] = verify_directory(path).findings
    assert (finding.kind, finding.place) == (Kind.ORPHAN, REPLACEMENT_NAME)
    assert rows_of(path) == sample.rows
    assert repair(path).after.findings == []


def test_stale_replacement_in_the_place_of_a_lost_log_is_refused(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    shutil.copytree(path / "log", path / REPLACEMENT_NAME)

    async def go_on() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await node.insert("orders", [{"id": -1, "item": None}])

    anyio.run(go_on)
    shutil.rmtree(path / "log")
    with pytest.raises(Corrupt, match="was acknowledged"):
        rows_of(path)
