"""One file back from a backup: only the one the node wrote, durably, and nothing else of the
directory changes.
"""

import itertools
import json
import os
import shutil
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import streamingnode as sn
from flusher.directory import manifest_path
from flusher.manifest import decode_manifest
from streamingnode.care.backup import backup_directory, restore_file
from streamingnode.care.records import NodeRecords, read_node_records
from streamingnode.care.verify import verify_directory
from tests.streamingnode.care.test_failing_disk import fail_at
from tests.streamingnode.sample_node import (
    CUT_1,
    CUT_2,
    CUT_3,
    FILE_DAMAGE,
    SCHEMA,
    SETTINGS,
    Damage,
    Sample,
    copy_of,
    flip,
    rows_of,
    segment,
)
from wal.errors import Corrupt, InvalidArgument, StreamingNodeError
from wal.rocks.floor import Floor
from wal.rocks.opening import ReadDatabase, open_for_reading
from wal.rocks.recovery import Survey


@pytest.fixture(scope="module")
def backup(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("backup") / "good"
    backup_directory(sample.closed, path)
    return path


def content(path: Path) -> dict[str, bytes]:
    found = {
        each.relative_to(path).as_posix(): each.read_bytes()
        for each in path.rglob("*")
        if each.is_file()
    }
    return {name: data for name, data in found.items() if name != "node.lock"}


@pytest.mark.parametrize(
    "damage", [damage for damage, _ in FILE_DAMAGE.values()], ids=FILE_DAMAGE.keys()
)
def test_damaged_files_come_back_one_by_one(
    sample: Sample, backup: Path, tmp_path: Path, damage: Damage
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    sound = content(sample.closed)
    damage(path)
    damaged = sorted(name for name, data in sound.items() if content(path).get(name) != data)
    for name in reversed(damaged):  # the newest manifest first: it vouches for the one before it
        result = restore_file(backup, path, name)
        assert (result.path, result.bytes) == (name, len(sound[name]))
    assert content(path) == sound
    assert verify_directory(path).worst is None
    assert rows_of(path) == sample.rows


def test_a_delete_file_and_what_is_no_file_any_more_come_back(
    sample: Sample, backup: Path, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    sound = content(sample.closed)
    deletes = min((path / "deletes").rglob("*.parquet"))
    deletes.unlink()
    os.mkfifo(deletes)
    shutil.rmtree(path / "segments")
    for name in sound:
        if name.startswith(("segments/", "deletes/")):
            restore_file(backup, path, name)
    assert content(path) == sound
    assert verify_directory(path).worst is None


def test_a_manifest_is_vouched_for_by_the_one_after_it(
    sample: Sample, backup: Path, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    sound = content(sample.closed)
    for name in (CUT_1, CUT_2, CUT_3):
        (path / name).unlink()
    with pytest.raises(Corrupt):
        restore_file(backup, path, CUT_1)
    for name in (CUT_3, CUT_2, CUT_1):
        restore_file(backup, path, name)
    assert content(path) == sound


def test_a_file_that_is_not_the_one_the_node_wrote_is_not_taken(
    sample: Sample, backup: Path, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    other = copy_of(backup, tmp_path / "backup")
    lost = segment(path, 1).relative_to(path).as_posix()
    flip(path / lost, 600)
    before = content(path)
    flip(other / lost, 700)
    with pytest.raises(Corrupt, match="is not the file that this node wrote for cut"):
        restore_file(other, path, lost)
    os.truncate(other / lost, 100)
    with pytest.raises(Corrupt, match="is not the file that this node wrote for cut"):
        restore_file(other, path, lost)
    (other / lost).unlink()
    with pytest.raises(InvalidArgument, match="does not have"):
        restore_file(other, path, lost)
    shutil.copy(backup / CUT_2, other / CUT_3)
    with pytest.raises(Corrupt, match="is not the file that this node wrote for cut 3"):
        restore_file(other, path, CUT_3)
    assert content(path) == before


@pytest.mark.parametrize(
    "name",
    [
        "floor",
        "log/CURRENT",
        "../node/floor",
        "/etc/passwd",
        "",
        "cuts",
        "segments/1/999.parquet",
        "cuts/0000000000000004.json",
        "cuts/0000000000000000.json",
    ],
)
def test_what_is_no_file_of_a_cut_is_refused(
    sample: Sample, backup: Path, tmp_path: Path, name: str
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    before = content(path)
    with pytest.raises(InvalidArgument):
        restore_file(backup, path, name)
    assert content(path) == before


def test_another_node_a_backup_and_a_node_in_use_are_refused(
    sample: Sample, stranger: Path, backup: Path, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    backup_directory(stranger, tmp_path / "other")
    with pytest.raises(InvalidArgument, match="is of node"):
        restore_file(tmp_path / "other", path, CUT_1)
    with pytest.raises(InvalidArgument, match="is a backup"):
        restore_file(backup, copy_of(backup, tmp_path / "copy"), CUT_1)
    with pytest.raises(InvalidArgument, match="not a finished backup"):
        restore_file(path, path, CUT_1)


def test_files_come_back_beside_the_running_node_which_reads_them(
    sample: Sample, backup: Path, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    lost = segment(path, 1).relative_to(path).as_posix()

    async def lose_and_restore() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            (path / lost).unlink()
            with pytest.raises(Corrupt):
                await node.snapshot("orders")
            assert (await anyio.to_thread.run_sync(restore_file, backup, path, lost)).path == lost
            assert (await node.snapshot("orders")).num_rows == len(sample.rows)
            assert (await node.verify()).worst is None

    anyio.run(lose_and_restore)
    assert verify_directory(path).worst is None


def test_a_database_of_which_files_go_while_it_is_read_is_read_again(
    sample: Sample, backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner flushes and compacts: one look in thirty failed beside one that was written to as
    fast as it took.
    """
    path = copy_of(sample.closed, tmp_path / "node")
    looks = itertools.count()

    def open_once_gone(place: Path, floor: Floor | None) -> ReadDatabase:
        if next(looks) % 3 < 2:
            raise Corrupt(
                "While opening a file for sequentially reading: 000083.log: No such file or "
                "directory"
            )
        return open_for_reading(place, floor)

    monkeypatch.setattr("wal.rocks.store.open_for_reading", open_once_gone)
    assert restore_file(backup, path, CUT_1).path == CUT_1


def test_a_file_that_retention_gave_up_meanwhile_does_not_stay(
    sample: Sample, backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    lost = segment(path, 1)
    looks = itertools.count()

    def given_up_at_the_second_look(directory: Path) -> tuple[Survey, NodeRecords]:
        found, records = read_node_records(directory)
        records.first_kept += 100 * next(looks)
        return found, records

    monkeypatch.setattr("streamingnode.care.backup.read_node_records", given_up_at_the_second_look)
    lost.unlink()
    with pytest.raises(InvalidArgument, match="deleted cut"):
        restore_file(backup, path, lost.relative_to(path).as_posix())
    assert not lost.exists()


def test_a_failing_disk_leaves_the_old_file_or_the_new_one(
    sample: Sample, backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = content(sample.closed)
    lost = segment(sample.closed, 1).relative_to(sample.closed).as_posix()

    def attempt(at: int) -> bool:
        path = copy_of(sample.closed, tmp_path / "node")
        flip(path / lost, 600)
        damaged = content(path)
        with monkeypatch.context() as patched:
            reached = fail_at(patched, at)
            try:
                restore_file(backup, path, lost)
            except StreamingNodeError:
                assert reached()
        assert content(path) in (damaged, sound)
        return reached()

    assert next(n for n in itertools.count(1) if not attempt(n)) - 1 >= 2


def test_a_cut_that_retention_took_is_not_brought_back(tmp_path: Path) -> None:
    path = tmp_path / "node"
    backup = tmp_path / "backup"
    given_up = 2

    async def make() -> None:
        async with sn.open_node(
            path, **SETTINGS | {"retention_s": 0, "flush.retention.interval_s": 0.01}
        ) as node:
            collection = await node.create_collection("orders", SCHEMA, primary_key="id", shards=1)
            for key in range(4):
                await node.insert("orders", [{"id": key, "item": "x"}])
                await node.flush()
            await node.backup(backup)
            node_id = decode_manifest((path / CUT_1).read_bytes(), name="").node_id
            lease = {"node_id": node_id, "collection_id": collection.id, "cut": given_up}
            (path / "leases").mkdir(exist_ok=True)
            (path / "leases" / "table.json").write_text(json.dumps(lease))
            with anyio.fail_after(60):
                while len(list((path / "segments").rglob("*.parquet"))) > 4 - given_up:
                    await anyio.lowlevel.checkpoint()

    anyio.run(make)
    before = content(path)
    taken = decode_manifest((backup / CUT_2).read_bytes(), name="").segments[0].path
    for name in (CUT_2, CUT_1, taken):
        with pytest.raises(InvalidArgument):
            restore_file(backup, path, name)
    assert content(path) == before
    kept = manifest_path(given_up + 1)
    (path / kept).unlink()
    restore_file(backup, path, kept)
    assert content(path) == before
