"""What a start removes, and what it leaves alone."""

from pathlib import Path

import pytest

from flusher.checkpoint import NO_CHECKPOINT, Checkpoint
from flusher.cuts.cut_log import file_paths
from flusher.cuts.cut_writer import CutPoint, build_manifest, check_same_cut, publish_cut
from flusher.files.node_directory import NodeDirectory
from flusher.manifest import CutManifest, SegmentFile
from flusher.removal.orphans import cut_ahead, remove_orphans
from interceptors.shard.state import ShardState
from wal.errors import Corrupt

ROWS = 3


def publish(directory: NodeDirectory, number: int, previous_crc32c: int = 0) -> tuple[CutManifest, int]:
    path = f"segments/1/{number}.parquet"
    with directory.create(path + ".tmp") as file:
        file.write(b"rows")
    segment = SegmentFile(
        path=path,
        bytes=4,
        crc32c=1,
        rows=ROWS,
        collection_id=1,
        vchannel="p0_1v0",
        tick_min=1,
        tick_max=2,
        offset_min=0,
        offset_max=2,
        key_min=None,
        key_max=None,
        segment_id=number,
        partition_id=2,
    )
    manifest = build_manifest(point(number, previous_crc32c), [segment], ShardState(), node_id="me", created_ms=0)
    published = publish_cut(directory, manifest, [(path + ".tmp", path)])
    return manifest, published.crc32c


def point(number: int, previous_crc32c: int = 0) -> CutPoint:
    previous_tick = 10 * (number - 1)
    return CutPoint(number=number, tick=10 * number, previous_tick=previous_tick, previous_crc32c=previous_crc32c)


def touch(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"x")


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_only_temporary_and_unnamed_data_files_are_removed(tmp_path: Path) -> None:
    directory = NodeDirectory(tmp_path)
    manifest, _ = publish(directory, 1)
    kept = [
        "leases/t.json.tmp",
        "log/CURRENT",
        "segments/1/note.txt",
        *file_paths(manifest),
        "cuts/0000000000000001.json",
    ]
    touch(tmp_path, *kept[:3])
    rubbish = [
        "segments/1/9.parquet",
        "segments/1/1.parquet.tmp",
        "deletes/1/1-v.parquet",
        "cuts/0000000000000002.json.tmp",
    ]
    touch(tmp_path, *rubbish)
    assert sorted(remove_orphans(directory, first_kept=1)) == sorted(rubbish)
    assert files(tmp_path) == set(kept)
    assert remove_orphans(directory, first_kept=1) == []


@pytest.mark.parametrize("damage", ["missing", "torn"])
@pytest.mark.parametrize("damaged", [1, 2])
def test_nothing_that_might_be_data_is_removed_while_a_manifest_is_damaged(
    tmp_path: Path, damaged: int, damage: str
) -> None:
    directory = NodeDirectory(tmp_path)
    for number in (1, 2, 3):
        publish(directory, number)
    manifest = tmp_path / f"cuts/{damaged:016}.json"
    if damage == "missing":
        manifest.unlink()
    else:
        manifest.write_bytes(manifest.read_bytes()[:-20])
    touch(tmp_path, "segments/1/7.parquet.tmp")
    assert remove_orphans(directory, first_kept=1) == ["segments/1/7.parquet.tmp"]
    assert f"segments/1/{damaged}.parquet" in files(tmp_path)


@pytest.mark.parametrize("first_kept", [3, 2], ids=["all the round was to take", "more than it took"])
def test_what_a_cut_named_that_retention_took_is_removed(tmp_path: Path, first_kept: int) -> None:
    directory = NodeDirectory(tmp_path)
    for number in (1, 2, 3):
        publish(directory, number)
    (tmp_path / "cuts/0000000000000001.json").unlink()
    assert remove_orphans(directory, first_kept=first_kept) == ["segments/1/1.parquet"]


def test_the_cut_the_checkpoint_knows_is_not_ahead_and_the_next_one_is(tmp_path: Path) -> None:
    directory = NodeDirectory(tmp_path)
    assert cut_ahead(directory, NO_CHECKPOINT) is None
    first, crc32c = publish(directory, 1)
    ahead = cut_ahead(directory, NO_CHECKPOINT)
    assert ahead is not None
    assert ahead.manifest == first
    assert cut_ahead(directory, Checkpoint(cut_number=1, manifest_crc32c=crc32c)) is None


@pytest.mark.parametrize(
    "checkpoint",
    [Checkpoint(cut_number=1), Checkpoint(cut_number=3), Checkpoint(cut_number=5)],
    ids=["two cuts ahead", "other content", "cuts lost"],
)
def test_cuts_and_checkpoint_of_different_backups_are_corrupt(tmp_path: Path, checkpoint: Checkpoint) -> None:
    directory = NodeDirectory(tmp_path)
    for number in (1, 2, 3):
        publish(directory, number)
    with pytest.raises(Corrupt):
        cut_ahead(directory, checkpoint)


def test_a_cut_on_disk_that_the_log_does_not_tell_is_corrupt(tmp_path: Path) -> None:
    manifest, _ = publish(NodeDirectory(tmp_path), 1)
    rows = {"segments/1/1.parquet": ROWS}
    check_same_cut(manifest, point(1), rows)
    for wrong_rows in ({}, {"segments/1/1.parquet": ROWS + 1}, rows | {"segments/1/2.parquet": 1}):
        with pytest.raises(Corrupt):
            check_same_cut(manifest, point(1), wrong_rows)
    with pytest.raises(Corrupt):
        check_same_cut(manifest, point(1, previous_crc32c=7), rows)
