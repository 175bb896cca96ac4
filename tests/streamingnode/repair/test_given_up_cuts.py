"""Repairs with a backup leave alone what retention gave up, and bring a cut back whole or not at all."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

import streamingnode as sn
from flusher.manifest import CutManifest, decode_manifest, manifest_name
from streamingnode.repair.plan import ActionKind
from streamingnode.repair.repairing import RepairResult, repair_directory
from streamingnode.verification.finding import Severity
from streamingnode.verification.walk import verify_directory
from tests.streamingnode.sample_node import SCHEMA, SETTINGS, copy_of, flip

CUTS, GIVEN_UP = 6, 4
RETAINING = SETTINGS | {"retention_s": 0, "flush.retention.interval_s": 0.01}


@dataclass(frozen=True, slots=True)
class Retained:
    """A node whose retention took the first cuts, and a backup that was made before."""

    node: Path
    backup: Path


@pytest.fixture(scope="module")
def retained(tmp_path_factory: pytest.TempPathFactory) -> Retained:
    place = tmp_path_factory.mktemp("retained")
    made = Retained(place / "node", place / "backup")
    anyio.run(make, made)
    shutil.rmtree(made.node / "leases")  # the lease is of no table, which is a finding of its own
    return made


async def make(made: Retained) -> None:
    async with sn.open_node(made.node, **RETAINING) as node:
        collection = await node.create_collection("orders", SCHEMA, primary_key="id", shards=1)
        for key in range(CUTS):
            await node.insert("orders", [{"id": key, "item": "x"}])
            await node.flush()
        await node.backup(made.backup)
        lease = {"node_id": cut(made.node, 1).node_id, "collection_id": collection.id, "cut": GIVEN_UP}
        (made.node / "leases").mkdir(exist_ok=True)
        (made.node / "leases" / "table.json").write_text(json.dumps(lease))
        with anyio.fail_after(10):
            while segment_of(made.backup, GIVEN_UP) in paths(made.node):
                await anyio.lowlevel.checkpoint()


def manifest(number: int) -> str:
    return f"cuts/{manifest_name(number)}"


def cut(path: Path, number: int) -> CutManifest:
    return decode_manifest((path / manifest(number)).read_bytes(), name=manifest(number))


def segment_of(path: Path, number: int) -> str:
    return cut(path, number).segments[0].path


def paths(path: Path) -> set[str]:
    return {each.relative_to(path).as_posix() for top in ("cuts", "segments") for each in (path / top).rglob("*.*")}


def repair(path: Path, backup: Path) -> RepairResult:
    return repair_directory(path, dry_run=False, accept_loss=False, backup=backup, now_ms=lambda: 1_792_000_000_123)


def test_cuts_that_retention_took_are_not_brought_back(retained: Retained, tmp_path: Path) -> None:
    path = copy_of(retained.node, tmp_path / "node")
    result = repair(path, retained.backup)
    assert result.plan.actions == result.plan.left == []
    assert result.after.worst is None


def test_a_flipped_bit_in_the_backup_does_no_harm_to_a_sound_node(retained: Retained, tmp_path: Path) -> None:
    path, backup = copy_of(retained.node, tmp_path / "node"), copy_of(retained.backup, tmp_path / "backup")
    flip(backup / segment_of(backup, 1), 100)
    repair(path, backup)
    assert verify_directory(path).worst is None
    assert paths(path) == paths(retained.node)


@pytest.mark.parametrize("number", [GIVEN_UP + 1, CUTS])
def test_a_kept_cut_still_comes_back_and_none_before_it(retained: Retained, tmp_path: Path, number: int) -> None:
    path = copy_of(retained.node, tmp_path / "node")
    (path / manifest(number)).unlink()
    (path / segment_of(retained.backup, number)).unlink()
    assert repair(path, retained.backup).after.worst is None
    assert paths(path) == paths(retained.node)


def test_a_given_up_cut_that_is_still_there_is_mended(retained: Retained, tmp_path: Path) -> None:
    path, there = copy_of(retained.node, tmp_path / "node"), GIVEN_UP - 1
    for number in range(there, GIVEN_UP + 1):
        for each in (manifest(number), segment_of(retained.backup, number)):
            shutil.copy(retained.backup / each, path / each)
    flip(path / segment_of(retained.backup, there), 100)
    (path / manifest(GIVEN_UP)).unlink()  # a gap is damage: retention takes the earliest first
    result = repair(path, retained.backup)
    assert {each.place for each in result.plan.actions} == {
        segment_of(retained.backup, there),
        manifest(GIVEN_UP),
    }
    assert result.after.worst is None


def test_files_of_a_given_up_cut_are_moved_aside(retained: Retained, tmp_path: Path) -> None:
    path, left_over = copy_of(retained.node, tmp_path / "node"), segment_of(retained.backup, GIVEN_UP)
    shutil.copy(retained.backup / left_over, path / left_over)
    result = repair(path, retained.backup)
    assert [(each.kind, each.place) for each in result.plan.actions] == [(ActionKind.MOVE, left_over)]
    assert result.after.worst is None


def test_a_manifest_without_all_of_its_files_is_left_with_the_reason(retained: Retained, tmp_path: Path) -> None:
    path, backup = copy_of(retained.node, tmp_path / "node"), copy_of(retained.backup, tmp_path / "backup")
    lost = segment_of(backup, CUTS)
    for each in (path / lost, backup / lost):
        flip(each, 100)
    (path / manifest(CUTS)).unlink()
    result = repair(path, backup)
    assert result.plan.actions == []
    assert [each.place for each in result.plan.left] == [manifest(CUTS)]
    assert lost in result.plan.left[0].reason
    assert result.after.worst is Severity.DAMAGE


def test_a_manifest_comes_back_after_a_damaged_file_that_nothing_named(retained: Retained, tmp_path: Path) -> None:
    path, damaged = copy_of(retained.node, tmp_path / "node"), segment_of(retained.backup, CUTS)
    flip(path / damaged, 100)
    (path / manifest(CUTS)).unlink()
    result = repair(path, retained.backup)
    assert [each.place for each in result.plan.actions] == [damaged, manifest(CUTS)]
    assert result.after.worst is None
