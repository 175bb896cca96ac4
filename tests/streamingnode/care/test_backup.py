"""Backups of running and closed nodes: whole, verified; restored nodes begin a life of their
own.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import streamingnode as sn
from flusher.cuts import Lease, write_lease
from flusher.directory import CutLog
from flusher.manifest import with_checksum
from streamingnode.care import backup as making
from streamingnode.care.backup import RESTORE_TERM_STEP, backup_directory, restore_directory
from streamingnode.care.inspect import read_record
from streamingnode.care.verify import verify_directory
from streamingnode.node import Node
from tests.parts_of import parts_of
from tests.streamingnode.sample_node import (
    SCHEMA,
    SETTINGS,
    Sample,
    copy_of,
    files_of,
    flip,
    largest,
    rows_of,
    segment,
)
from wal.errors import AlreadyExists, AlreadyOwned, Corrupt, InvalidArgument, StreamingNodeError

NEXT_STEP = " — "


async def append_until(node: Node, stop: anyio.Event, acknowledged: dict[int, str]) -> None:
    key = 1_000_000
    while not stop.is_set():
        rows = {key + i: f"row {key + i}" for i in range(20)}
        await node.insert("orders", [{"id": each, "item": item} for each, item in rows.items()])
        acknowledged.update(rows)
        key += 20
        if key % 200 == 0:
            await node.flush()


def test_backups_under_running_appends_have_all_that_was_acknowledged_before(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.killed, tmp_path / "node")
    before: list[dict[int, str]] = []

    async def run() -> None:
        stop = anyio.Event()
        acknowledged = dict(sample.rows)
        async with sn.open_node(path, **SETTINGS | {"retention_s": 0}) as node:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(append_until, node, stop, acknowledged)
                for number in range(4):
                    before.append(dict(acknowledged))
                    result = await node.backup(tmp_path / f"backup-{number}")
                    assert result.cut >= 3
                stop.set()
            before.append(acknowledged)

    anyio.run(run)
    assert not (path / "backup.tmp").exists()
    for number in range(4):
        backup = tmp_path / f"backup-{number}"
        restored = tmp_path / f"restored-{number}"
        assert verify_directory(backup).worst is None
        restore_directory(backup, restored)
        found = rows_of(restored)
        assert before[number].items() <= found.items(), "everything acknowledged before the call"
        assert found.items() <= before[-1].items(), "and nothing that was never written"
    assert rows_of(path) == before[-1]


def test_a_backup_shares_no_bytes_with_the_node(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")

    async def run() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await node.backup(tmp_path / "backup")

    anyio.run(run)
    assert all(
        (tmp_path / "backup" / name).stat().st_nlink == 1 for name in files_of(tmp_path / "backup")
    )


@pytest.mark.parametrize("state", ["closed", "killed"])
def test_a_restored_backup_of_a_closed_node_has_every_row(
    sample: Sample, tmp_path: Path, state: str
) -> None:
    path = copy_of(getattr(sample, state), tmp_path / "node")
    made = backup_directory(path, tmp_path / "backup")
    assert made.cut == 3
    restored = restore_directory(tmp_path / "backup", tmp_path / "restored")
    assert restored == made
    assert rows_of(tmp_path / "restored") == sample.rows
    assert verify_directory(tmp_path / "restored").worst is None


def test_a_restored_node_has_a_term_no_owner_of_the_original_can_have(
    sample: Sample, tmp_path: Path
) -> None:
    backup_directory(copy_of(sample.closed, tmp_path / "node"), tmp_path / "backup")

    async def term(path: Path) -> int:
        async with sn.open_node(path, **SETTINGS) as node:
            return parts_of(node).measure().log.term

    original = max(anyio.run(term, tmp_path / "node") for _ in range(3))
    restore_directory(tmp_path / "backup", tmp_path / "restored")
    restored = anyio.run(term, tmp_path / "restored")
    assert original < RESTORE_TERM_STEP < restored
    backup_directory(tmp_path / "restored", tmp_path / "backup-2")
    restore_directory(tmp_path / "backup-2", tmp_path / "restored-2")
    assert anyio.run(term, tmp_path / "restored-2") > 2 * RESTORE_TERM_STEP


def test_ticks_of_a_restored_node_are_above_all_that_the_backup_has(
    sample: Sample, tmp_path: Path
) -> None:
    made = backup_directory(copy_of(sample.closed, tmp_path / "node"), tmp_path / "backup")
    restore_directory(tmp_path / "backup", tmp_path / "restored")

    async def insert() -> int:
        async with sn.open_node(tmp_path / "restored", **SETTINGS) as node:
            return (await node.insert("orders", [{"id": -1, "item": None}])).time_tick

    assert anyio.run(insert) > made.tick


# --- what is refused ------------------------------------------------------------------------------


def test_a_backup_is_not_opened_as_a_node(sample: Sample, tmp_path: Path) -> None:
    backup_directory(copy_of(sample.closed, tmp_path / "node"), tmp_path / "backup")
    before = {
        name: (tmp_path / "backup" / name).read_bytes() for name in files_of(tmp_path / "backup")
    }
    with pytest.raises(InvalidArgument, match="streamingnode restore"):
        rows_of(tmp_path / "backup")
    with pytest.raises(InvalidArgument, match="is a backup"):
        backup_directory(tmp_path / "backup", tmp_path / "again")
    assert {name: (tmp_path / "backup" / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("occupied", ["a file", "a directory with something"])
def test_nothing_is_written_where_something_is(
    sample: Sample, tmp_path: Path, occupied: str
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    target = tmp_path / "target"
    if occupied == "a file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    with pytest.raises(AlreadyExists, match=NEXT_STEP):
        backup_directory(path, target)
    backup_directory(path, tmp_path / "backup")
    with pytest.raises(AlreadyExists, match=NEXT_STEP):
        restore_directory(tmp_path / "backup", target)
    assert (target if target.is_file() else target / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    ["", "a\0b", 3, None, b"x", "/", "loop", "x" * 300, "x" * 250, "file/x"],
    ids=lambda n: f"{n!r:.9}",
)
def test_a_target_that_cannot_be_made_is_a_typed_error(
    sample: Sample, tmp_path: Path, name: Any
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("mine")
    before = set(tmp_path.iterdir())

    async def run() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            with pytest.raises(StreamingNodeError, match=NEXT_STEP):
                await node.backup(
                    tmp_path / name if name and isinstance(name, str) and "\0" not in name else name
                )

    anyio.run(run)
    if isinstance(name, str) and "\0" not in name and name:
        for source, target in ((path, tmp_path / name), (tmp_path / name, path)):
            make = backup_directory if source == path else restore_directory
            with pytest.raises(StreamingNodeError, match=NEXT_STEP):
                make(source, target)
    assert set(tmp_path.iterdir()) == before


def test_neither_a_backup_nor_a_node_is_made_inside_what_it_is_made_from(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    backup = tmp_path / "backup"
    backup_directory(path, backup)

    async def run() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            with pytest.raises(InvalidArgument, match=f"is inside .*{NEXT_STEP}"):
                await node.backup(path / "segments" / "backup")

    anyio.run(run)
    with pytest.raises(InvalidArgument, match=f"is inside .*{NEXT_STEP}"):
        backup_directory(path, path / "backup")
    with pytest.raises(InvalidArgument, match=f"is inside .*{NEXT_STEP}"):
        restore_directory(backup, backup / "node")
    assert verify_directory(path).worst is None
    assert verify_directory(backup).worst is None


def test_an_empty_directory_will_do_as_a_target(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    for name in ("backup", "restored"):
        (tmp_path / name).mkdir()
    backup_directory(path, tmp_path / "backup")
    restore_directory(tmp_path / "backup", tmp_path / "restored")
    assert rows_of(tmp_path / "restored") == sample.rows


@pytest.mark.parametrize("leads_to", ["an empty directory", "nothing"])
def test_a_link_stands_for_where_it_leads_to(sample: Sample, tmp_path: Path, leads_to: str) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    disk = tmp_path / "disk"
    link = tmp_path / "link"
    link.symlink_to(disk)
    if leads_to == "an empty directory":
        disk.mkdir()
    backup_directory(path, tmp_path / "backup")
    restore_directory(tmp_path / "backup", link)
    assert link.is_symlink()
    assert rows_of(disk) == sample.rows


def test_the_mount_of_a_disk_is_refused_before_anything_is_copied(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    with pytest.raises(InvalidArgument, match="is a mount point — name a new directory on it"):
        backup_directory(path, Path("/proc"))


def test_what_a_crashed_run_left_is_named_and_not_removed(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    (tmp_path / "backup.unfinished").mkdir()
    with pytest.raises(AlreadyExists, match="interrupted run"):
        backup_directory(path, tmp_path / "backup")
    assert (tmp_path / "backup.unfinished").is_dir()


def damage_segment(path: Path) -> None:
    flip(segment(path, 1), 600)


def damage_log(path: Path) -> None:
    table = largest(path, "log/*.sst")
    flip(table, table.stat().st_size // 3)


def lose_segment(path: Path) -> None:
    segment(path, 1).unlink()


@pytest.mark.parametrize("damage", [damage_segment, damage_log, lose_segment])
def test_a_damaged_node_gives_no_backup(sample: Sample, tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    path = copy_of(sample.closed, tmp_path / "node")
    damage(path)
    with pytest.raises(Corrupt):
        backup_directory(path, tmp_path / "backup")

    async def running() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            with pytest.raises(Corrupt):
                await node.backup(tmp_path / "backup")

    anyio.run(running)
    assert not list(tmp_path.glob("backup*"))
    assert not (path / "backup.tmp").exists()


@pytest.mark.parametrize("name", ["backup.json", "floor", "segment", "log"])
@pytest.mark.parametrize("how", ["flip", "cut", "missing"])
def test_a_backup_that_changed_is_not_restored(
    sample: Sample, tmp_path: Path, name: str, how: str
) -> None:
    backup = tmp_path / "backup"
    backup_directory(copy_of(sample.closed, tmp_path / "node"), backup)
    file = {"segment": segment(backup, 0), "log": largest(backup, "log/*.sst")}.get(
        name, backup / name
    )
    match how:
        case "flip":
            flip(file, min(40, file.stat().st_size - 1))
        case "cut":
            os.truncate(file, file.stat().st_size - 1)
        case _:
            file.unlink()
    with pytest.raises((Corrupt, InvalidArgument), match="backup"):
        restore_directory(backup, tmp_path / "restored")
    assert name == how.replace("missing", "backup.json") or verify_directory(backup).damages
    assert not list(tmp_path.glob("restored*"))


def test_a_record_that_names_files_outside_is_refused(sample: Sample, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    backup_directory(copy_of(sample.closed, tmp_path / "node"), backup)
    record = read_record(backup)
    outside = msgspec.structs.replace(record.files[0], path="../outside")
    (backup / "backup.json").write_bytes(
        with_checksum(msgspec.json.encode(msgspec.structs.replace(record, files=(outside,))))
    )
    with pytest.raises(Corrupt, match="outside"):
        restore_directory(backup, tmp_path / "restored")


def test_a_running_node_is_not_backed_up_from_outside(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")

    async def try_it() -> None:
        async with sn.open_node(path, **SETTINGS):
            with pytest.raises(AlreadyOwned):
                backup_directory(path, tmp_path / "backup")

    anyio.run(try_it)


def left_over(place: Path) -> list[Path]:
    return list(place.rglob("backup*"))


def test_a_cancelled_backup_leaves_nothing_and_the_next_one_works(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")

    async def run() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            for wait_s in (0, 0.001, 0.003, 0.01, 0.02, 0.05):
                with anyio.move_on_after(wait_s):
                    await node.backup(tmp_path / "backup")
                    shutil.rmtree(tmp_path / "backup")
                assert left_over(tmp_path) == []
            await node.backup(tmp_path / "backup")

    anyio.run(run)
    assert verify_directory(tmp_path / "backup").worst is None


def test_links_that_a_crash_left_are_a_warning_and_gone_after_the_next_backup(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    shutil.copytree(path / "log", path / "backup.tmp" / "log")
    [finding] = verify_directory(path).findings
    assert finding.place == "backup.tmp"

    async def run() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await node.backup(tmp_path / "backup")

    anyio.run(run)
    assert verify_directory(path).worst is None


def test_what_tables_take_while_the_backup_copies_is_not_in_it_and_takes_no_cut_away(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    copy_all = making._contents

    def copy_while_a_table_takes_a_newer_cut(
        *arguments: Any,
    ) -> Iterator[tuple[Path, str, int | None]]:
        (path / "leases").mkdir(exist_ok=True)
        node_id = CutLog(path).node_id
        write_lease(
            path, Lease(table=str(tmp_path / "t"), node_id=node_id, collection_id=1, cut=99, tick=1)
        )
        return copy_all(*arguments)

    async def run() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await node.backup(tmp_path / "backup")

    monkeypatch.setattr(making, "_contents", copy_while_a_table_takes_a_newer_cut)
    anyio.run(run)
    restore_directory(tmp_path / "backup", tmp_path / "restored")
    assert verify_directory(tmp_path / "restored").findings == []


@pytest.mark.may_block
@pytest.mark.parametrize("running", [True, False], ids=["running", "closed"])
def test_a_backup_has_what_the_table_of_a_dropped_collection_waits_for(
    tmp_path: Path, running: bool
) -> None:
    path = tmp_path / "node"
    made = tmp_path / "backup"

    async def run() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await node.create_collection("orders", SCHEMA, primary_key="id")
            await node.insert("orders", [{"id": 1, "item": "a"}])
            number = (await node.flush()).number
            collection_id = int(next(path.glob("segments/*")).name)
            node_id = CutLog(path).read(number).manifest.node_id
            lease = Lease(
                table=str(tmp_path / "orders"),
                node_id=node_id,
                collection_id=collection_id,
                cut=0,
                tick=0,
            )
            write_lease(path, lease)
            await node.drop_collection("orders")
            await node.flush()
            if running:
                await node.backup(made)

    anyio.run(run)
    if not running:
        backup_directory(path, made)
    restore_directory(made, tmp_path / "restored")
    assert (
        [each.name for each in (tmp_path / "restored").rglob("*.parquet")]
        == [each.name for each in path.rglob("*.parquet")]
        != []
    )


@pytest.mark.parametrize("of", ["node", "lease", "backup"])
def test_a_file_that_became_a_giant_of_holes_is_refused_before_it_is_copied(
    sample: Sample, tmp_path: Path, of: str
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    made = tmp_path / "backup"
    if of == "backup":
        backup_directory(path, made)
    giant = segment(made if of == "backup" else path, 0)
    if of == "lease":
        giant = path / "leases" / "orders.json"
        giant.parent.mkdir(exist_ok=True)
        giant.touch()
    os.truncate(giant, 1 << 40)
    with pytest.raises(Corrupt, match=f"{giant.name} has {1 << 40} bytes"):
        if of == "backup":
            restore_directory(made, tmp_path / "restored")
        else:
            backup_directory(path, made)
    assert {each.name for each in tmp_path.iterdir()} <= {"node", "backup"}
