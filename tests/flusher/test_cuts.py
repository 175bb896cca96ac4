"""What a start removes, and what it leaves alone."""

from pathlib import Path

import pytest

from flusher.cuts import build_manifest, check_same_cut, cut_ahead, publish_cut, remove_orphans
from flusher.directory import CutLog, NodeDirectory, file_paths
from flusher.manifest import NO_CHECKPOINT, Checkpoint, CutManifest, SegmentFile
from flusher.retention import SET_ASIDE_SUFFIX, finish_removal
from interceptors.shard.state import ShardState
from wal.codec import crc32c
from wal.errors import Corrupt

ROWS = 3


def publish(
    directory: NodeDirectory, number: int, previous_crc32c: int = 0
) -> tuple[CutManifest, int]:
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
    manifest = build_manifest(
        before(number, previous_crc32c),
        10 * number,
        [segment],
        ShardState(),
        node_id="me",
        created_ms=0,
    )
    published = publish_cut(directory, manifest)
    return manifest, published.crc32c


def before(number: int, previous_crc32c: int = 0) -> Checkpoint:
    return Checkpoint(
        cut_number=number - 1, tick=10 * (number - 1), manifest_crc32c=previous_crc32c
    )


def touch(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"x")


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_only_what_the_cut_in_the_making_wrote_is_removed(tmp_path: Path) -> None:
    directory = NodeDirectory(tmp_path)
    manifest, _ = publish(directory, 1)
    kept = [
        "leases/t.json.tmp",
        "log/CURRENT",
        "segments/1/note.txt",
        "segments/1/2.parquet",  # an id from before the last cut
        "segments/1/21.parquet",  # one that the log has not given
        "segments/1/012.parquet",
        "segments/1/12.png",
        "segments/images/12.parquet",
        "segments/12.parquet",
        "segments/1/deep/12.parquet",
        "segments/1/1.parquet.tmp",
        "deletes/1/0000000001-p0_1v0.parquet",
        "deletes/1/0000000002-mine.parquet",
        "deletes/2/0000000002-p0_1v0.parquet",
        "cuts/0000000000000003.json.tmp",
        "cuts/notes.json.tmp",
    ]
    rubbish = [
        "segments/1/12.parquet",
        "segments/1/20.parquet.tmp",
        "deletes/1/0000000002-p0_1v0.parquet",
        "deletes/1/0000000002-p0_1v1.parquet.tmp",
        "cuts/0000000000000002.json.tmp",
    ]
    touch(tmp_path, *kept, *rubbish)
    kept += [*file_paths(manifest), "cuts/0000000000000001.json"]
    for _ in range(2):
        remove_orphans(directory, 2, segment_ids=range(10, 21), ahead=None)
        assert files(tmp_path) == set(kept)


def test_files_of_a_cut_ahead_of_its_checkpoint_stay(tmp_path: Path) -> None:
    directory = NodeDirectory(tmp_path)
    publish(directory, 1)
    touch(tmp_path, "segments/1/2.parquet", "segments/1/1.parquet.tmp")
    ahead = cut_ahead(directory, NO_CHECKPOINT)
    remove_orphans(directory, 1, segment_ids=range(1, 9), ahead=ahead)
    assert files(tmp_path) == {"segments/1/1.parquet", "cuts/0000000000000001.json"}


def chain(directory: NodeDirectory, cuts: int) -> None:
    crc32c = 0
    for number in range(1, cuts + 1):
        _, crc32c = publish(directory, number, crc32c)


def set_aside(root: Path, number: int) -> Path:
    manifest = root / f"cuts/{number:016}.json"
    return manifest.rename(manifest.with_name(manifest.name + SET_ASIDE_SUFFIX))


def test_a_removal_that_a_crash_cut_off_goes_on_with_what_its_manifest_named(
    tmp_path: Path,
) -> None:
    directory = NodeDirectory(tmp_path)
    chain(directory, 3)
    before = files(tmp_path)
    set_aside(tmp_path, 1)
    for _ in range(2):
        finish_removal(CutLog(directory))
        assert files(tmp_path) == before - {"segments/1/1.parquet", "cuts/0000000000000001.json"}


@pytest.mark.parametrize(
    "damage", ["torn", "of another history", "under another number", "before a cut that is lost"]
)
def test_a_manifest_set_aside_that_is_none_of_ours_removes_nothing(
    tmp_path: Path, damage: str
) -> None:
    directory = NodeDirectory(tmp_path)
    chain(directory, 3)
    aside = set_aside(tmp_path, 1)
    match damage:
        case "torn":
            aside.write_bytes(aside.read_bytes()[:-20])
        case "of another history":
            aside.write_bytes(aside.read_bytes().replace(b"p0_1v0", b"p1_1v0"))
            document = aside.read_bytes().partition(b"\n")[0]
            aside.write_bytes(document + b"\ncrc32c:%08x\n" % crc32c(document))
        case "under another number":
            aside.rename(aside.with_name(f"{9:016}.json{SET_ASIDE_SUFFIX}"))
        case _:
            (tmp_path / "cuts/0000000000000002.json").unlink()
    before = files(tmp_path)
    finish_removal(CutLog(directory))
    assert files(tmp_path) == before


def test_a_lost_directory_of_cuts_is_named_and_corrupt(tmp_path: Path) -> None:
    with pytest.raises(Corrupt, match="cuts is 0, the checkpoint is at 2"):
        cut_ahead(NodeDirectory(tmp_path), Checkpoint(cut_number=2))


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
def test_cuts_and_checkpoint_of_different_backups_are_corrupt(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    directory = NodeDirectory(tmp_path)
    for number in (1, 2, 3):
        publish(directory, number)
    with pytest.raises(Corrupt):
        cut_ahead(directory, checkpoint)


def test_a_cut_on_disk_that_the_log_does_not_tell_is_corrupt(tmp_path: Path) -> None:
    manifest, _ = publish(NodeDirectory(tmp_path), 1)
    rows = {"segments/1/1.parquet": ROWS}
    check_same_cut(manifest, before(1), 10, rows)
    for wrong_rows in ({}, {"segments/1/1.parquet": ROWS + 1}, rows | {"segments/1/2.parquet": 1}):
        with pytest.raises(Corrupt):
            check_same_cut(manifest, before(1), 10, wrong_rows)
    with pytest.raises(Corrupt):
        check_same_cut(manifest, before(1, previous_crc32c=7), 10, rows)
