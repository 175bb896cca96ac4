"""Repairs: what can be proven is put back, nothing is lost without a name and a place, and a dry run changes nothing."""

import json
import os
import shutil
from pathlib import Path

import anyio
import pytest

import streamingnode as sn
from streamingnode.backup.closed_node import backup_directory
from streamingnode.repair.plan import ActionKind
from streamingnode.repair.repairing import RECORD, RepairResult, repair_directory
from streamingnode.verification.walk import verify_directory
from tests.streamingnode.sample_node import (
    CUTS,
    FILE_DAMAGE,
    PER_CUT,
    SETTINGS,
    Damage,
    Sample,
    copy_of,
    flip,
    largest,
    rows_of,
    segment,
)
from wal.errors import AlreadyOwned, Corrupt, InvalidArgument
from wal.failpoint import arm, disarm_all

NOW_MS = 1_792_000_000_123


def repair(path: Path, *, backup: Path | None = None, accept_loss: bool = False, dry_run: bool = False) -> RepairResult:
    return repair_directory(path, dry_run=dry_run, accept_loss=accept_loss, backup=backup, now_ms=lambda: NOW_MS)


@pytest.fixture(scope="session")
def backup(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("backup") / "good"
    backup_directory(sample.closed, path)
    return path


@pytest.mark.parametrize("damage", [damage for damage, _ in FILE_DAMAGE.values()], ids=FILE_DAMAGE.keys())
def test_files_come_back_from_a_backup_and_damaged_ones_are_kept(
    sample: Sample, backup: Path, tmp_path: Path, damage: Damage
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    damage(path)
    damaged = {each: (path / each).read_bytes() for each in _paths(path)}
    result = repair(path, backup=backup)
    assert result.done
    assert result.after.worst is None
    assert {action.kind for action in result.plan.actions} == {ActionKind.REPLACE}
    assert rows_of(path) == sample.rows
    for action in result.plan.actions:
        if action.place in damaged:
            assert (Path(result.quarantine) / action.place).read_bytes() == damaged[action.place]


def _paths(path: Path) -> list[str]:
    return [each.relative_to(path).as_posix() for top in ("cuts", "segments") for each in (path / top).rglob("*.*")]


@pytest.mark.parametrize("damage", [damage for damage, _ in FILE_DAMAGE.values()], ids=FILE_DAMAGE.keys())
def test_without_a_backup_damaged_files_stay_and_are_named(sample: Sample, tmp_path: Path, damage: Damage) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    damage(path)
    before = {each: (path / each).read_bytes() for each in _paths(path)}
    result = repair(path, accept_loss=True)
    assert not result.done
    assert result.plan.actions == []
    assert result.plan.left
    assert {each: (path / each).read_bytes() for each in _paths(path)} == before


def test_a_file_of_a_backup_that_is_not_the_one_the_node_knows_is_not_taken(
    sample: Sample, backup: Path, tmp_path: Path
) -> None:
    path, other = copy_of(sample.closed, tmp_path / "node"), copy_of(backup, tmp_path / "backup")
    for each in (path, other):
        flip(segment(each, 1), 600)
    result = repair(path, backup=other)
    assert result.plan.actions == []
    assert "so it is in the backup" in result.plan.left[0].reason


def test_a_dry_run_changes_nothing(sample: Sample, backup: Path, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    segment(path, 1).unlink()
    (path / "notes.txt").write_text("mine")
    before = sorted(path.rglob("*"))
    result = repair(path, backup=backup, dry_run=True)
    assert [action.kind for action in result.plan.actions] == [ActionKind.REPLACE, ActionKind.MOVE]
    assert not result.done
    assert sorted(path.rglob("*")) == before


def test_strangers_and_left_overs_are_moved_never_removed(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    (path / "notes.txt").write_text("mine")
    (path / "segments" / "1" / "999.parquet").write_bytes(b"unnamed")
    result = repair(path)
    assert result.after.worst is None
    place = Path(result.quarantine)
    assert (place / "notes.txt").read_text() == "mine"
    assert (place / "segments" / "1" / "999.parquet").read_bytes() == b"unnamed"
    record = json.loads((place / RECORD).read_text())
    assert record["done"] is True
    assert [action["place"] for action in record["actions"]] == ["notes.txt", "segments/1/999.parquet"]
    assert all(action["reason"] for action in record["actions"])


@pytest.mark.parametrize("number", [1, CUTS])
def test_a_cut_that_a_strangers_manifest_replaced_is_named_as_lost(
    sample: Sample, stranger: Path, tmp_path: Path, number: int
) -> None:
    path, place = copy_of(sample.closed, tmp_path / "node"), f"cuts/{number:016d}.json"
    shutil.copy(stranger / place, path / place)
    result = repair(path)
    assert [(action.kind, action.place) for action in result.plan.actions] == [(ActionKind.MOVE, place)]
    [left] = [each for each in result.plan.left if each.place == place]
    assert f"cut {number} of this node" in left.reason
    assert "streamingnode repair --backup" in left.next_step


# --- the log ----------------------------------------------------------------------------------------------------------


def damage_log(path: Path, part: float) -> None:
    """Flip a bit in the part of the log's table that entries of this age are in."""
    table = largest(path, "log/*.sst")
    flip(table, int(table.stat().st_size * part))


def test_damage_before_the_checkpoint_costs_no_row_because_files_have_them(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    damage_log(path, 0.3)
    result = repair(path)
    assert [(action.kind, action.gives_up) for action in result.plan.actions] == [(ActionKind.NEW_LOG, ())]
    assert result.after.worst is None
    assert rows_of(path) == sample.rows
    assert verify_directory(path).worst is None


def test_damage_behind_the_checkpoint_is_only_given_up_when_that_is_accepted(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    damage_log(path, 0.92)
    [finding] = verify_directory(path).findings
    refused = repair(path)
    assert not refused.done
    assert verify_directory(path).findings == [finding]
    result = repair(path, accept_loss=True)
    [given_up] = result.plan.actions[0].gives_up
    first = int(finding.place.rpartition("positions ")[2].partition(" to ")[0])
    assert f"positions {first} to " in given_up
    assert "still readable in quarantine: positions" in given_up
    assert result.after.worst is None
    kept = rows_of(path)
    assert kept.items() < sample.rows.items()
    assert len(kept) >= CUTS * PER_CUT - 4, "everything in cuts is there"


def test_the_quarantined_log_still_has_every_byte(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    damage_log(path, 0.92)
    damaged = {each.name: each.read_bytes() for each in (path / "log").iterdir()}
    result = repair(path, accept_loss=True)
    kept = {each.name: each.read_bytes() for each in (Path(result.quarantine) / "log").iterdir()}
    assert {name: kept[name] for name in damaged if name.endswith((".sst", ".log"))} == {
        name: content for name, content in damaged.items() if name.endswith((".sst", ".log"))
    }


@pytest.mark.parametrize("part", [0.3, 0.92])
def test_a_repaired_node_goes_on_and_gives_no_position_or_term_twice(
    sample: Sample, tmp_path: Path, part: float
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")

    async def insert_one() -> tuple[int, int, int]:
        async with sn.open_node(path, **SETTINGS) as node:
            result = await node.insert("orders", [{"id": -1, "item": None}])
            tick = await node.consistent_tick()
            await node.flush(timeout=30)
            async with node.read("orders", until=tick) as messages:
                last = [message async for message in messages][-1]
            return last.message_id.position, result.time_tick, node.statistics().log.term

    untouched = copy_of(sample.closed, tmp_path / "untouched")
    ends = verify_directory(untouched).counts["log positions"]
    damage_log(path, part)
    assert repair(path, accept_loss=True).done
    position, tick, term = anyio.run(insert_one)
    assert position > ends
    assert tick > 0
    assert term > 1 << 16
    assert verify_directory(path).worst is None
    assert rows_of(path)[-1] is None


def test_a_lost_end_of_the_log_is_named_and_given_up_only_when_accepted(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.killed, tmp_path / "node")
    log = largest(path, "log/*.log")
    os.truncate(log, int(log.stat().st_size * 0.95))
    with pytest.raises(Corrupt):
        rows_of(path)
    assert not repair(path).done
    result = repair(path, accept_loss=True)
    assert "positions" in result.plan.actions[0].gives_up[0]
    assert result.after.worst is None
    assert rows_of(path).items() < sample.rows.items()


def test_a_log_that_no_longer_knows_the_cuts_is_left_alone(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.killed, tmp_path / "node")
    os.truncate(largest(path, "log/*.log"), 0)
    before = sorted(path.rglob("*"))
    result = repair(path, accept_loss=True)
    assert not result.done
    assert [each.place for each in result.plan.left] == ["log", "cuts"]
    assert sorted(path.rglob("*")) == before


def test_a_cut_whose_end_the_repaired_log_no_longer_reaches_is_kept_aside_with_its_files(
    sample: Sample, tmp_path: Path
) -> None:
    path, crashed = copy_of(sample.closed, tmp_path / "node"), tmp_path / "crashed"

    def crash() -> None:
        shutil.copytree(path, crashed)

    async def cut() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await node.insert("orders", [{"id": key, "item": "x" * 1000} for key in range(-100, 0)])
            arm("flush.cut_published", crash)
            await node.flush()

    try:
        anyio.run(cut)
    finally:
        disarm_all()
    assert verify_directory(crashed).worst is None, "a cut ahead of its checkpoint is what a crash leaves"
    log = largest(crashed, "log/*.log")
    flip(log, log.stat().st_size // 3)
    result = repair(crashed, accept_loss=True)
    assert result.after.worst is None
    moved = {action.place for action in result.plan.actions if action.kind is ActionKind.MOVE}
    assert f"cuts/{CUTS + 1:016d}.json" in moved
    assert all((Path(result.quarantine) / place).is_file() for place in moved)
    given_up = [text for action in result.plan.actions for text in action.gives_up]
    assert any(f"rows of cut {CUTS + 1}" in text for text in given_up)
    assert rows_of(crashed).items() <= sample.rows.items()


def test_stranger_in_a_damaged_log_goes_to_quarantine_with_the_whole_log(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    damage_log(path, 0.3)
    (path / "log" / "notes.txt").write_text("mine")
    result = repair(path)
    assert [action.kind for action in result.plan.actions] == [ActionKind.NEW_LOG]
    assert result.after.worst is None
    assert (Path(result.quarantine) / "log" / "notes.txt").read_text() == "mine"
    assert rows_of(path) == sample.rows


def test_no_file_is_taken_out_of_a_damaged_log_that_stays(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.killed, tmp_path / "node")
    os.truncate(largest(path, "log/*.log"), 0)
    (path / "log" / "notes.txt").write_text("mine")
    result = repair(path, accept_loss=True)
    assert result.plan.actions == []
    assert (path / "log" / "notes.txt").exists()


# --- the floor file ---------------------------------------------------------------------------------------------------


def test_a_missing_floor_is_written_anew_and_says_what_is_unknown(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    (path / "floor").unlink()
    assert not repair(path).done
    result = repair(path, accept_loss=True)
    assert "nothing tells any more" in result.plan.actions[0].gives_up[0]
    assert result.after.worst is None
    assert rows_of(path) == sample.rows


def test_a_foreign_floor_beside_log_and_cuts_of_one_node_is_replaced(
    sample: Sample, stranger: Path, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    shutil.copy(stranger / "floor", path / "floor")
    result = repair(path, accept_loss=True)
    assert (Path(result.quarantine) / "floor").read_bytes() == (stranger / "floor").read_bytes()
    assert result.after.worst is None
    assert rows_of(path) == sample.rows


def test_a_foreign_log_is_left_because_nothing_here_can_replace_it(
    sample: Sample, stranger: Path, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    shutil.rmtree(path / "log")
    shutil.copytree(stranger / "log", path / "log")
    result = repair(path, accept_loss=True)
    assert not [action for action in result.plan.actions if action.place in {"log", "floor"}]
    assert "log" in {each.place for each in result.plan.left}


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_backup_and_a_running_node_are_not_repaired(sample: Sample, backup: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is a backup"):
        repair(backup)
    path = copy_of(sample.closed, tmp_path / "node")

    async def try_it() -> None:
        async with sn.open_node(path, **SETTINGS):
            with pytest.raises(AlreadyOwned):
                repair(path)

    anyio.run(try_it)


def test_a_repair_that_fails_has_moved_nothing(sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    damage_log(path, 0.92)

    def fail(*_arguments: object) -> None:
        raise Corrupt("the new log is no better")

    monkeypatch.setattr("streamingnode.repair.repairing.build_database", fail)
    findings = verify_directory(path).findings
    with pytest.raises(Corrupt, match="no better"):
        repair(path, accept_loss=True)
    assert verify_directory(path).findings == findings
    [place] = (path / "quarantine").iterdir()
    assert json.loads((place / RECORD).read_text())["done"] is False


def test_a_sound_node_has_nothing_to_repair(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.killed, tmp_path / "node")
    result = repair(path)
    assert result.plan.actions == result.plan.left == []
    assert not (path / "quarantine").exists()
