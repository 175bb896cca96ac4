"""Directories that hold no sound node, belong to another, are read-only or full: a typed error, and
nothing is lost.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest
from rocksdict import DBRecoveryMode, Rdict

import streamingnode as sn
from streamingnode.care.verify import verify_directory
from streamingnode.node import Node
from tests.streamingnode.append_double import schema_of
from wal.errors import (
    AlreadyOwned,
    Corrupt,
    InvalidArgument,
    StorageFailed,
    StorageFull,
    StreamingNodeError,
    UnsupportedFormat,
)
from wal.rocks.layout import FORMAT_KEY, RocksOptions, database_options, encode_number, families
from wal.runtime import in_thread

pytestmark = pytest.mark.anyio

SCHEMA = schema_of(id=pa.int64(), item=pa.string())
ROW = {"id": -1, "item": "tea"}
NEXT_STEP = " — "
MIB = 1 << 20


async def open_and_close(path: Any, **settings: Any) -> None:
    async with sn.open_node(path, **settings):
        pass


def write_newer_format(path: Path) -> None:
    options = RocksOptions()
    settings = database_options(options, recovery=DBRecoveryMode.point_in_time())
    database = Rdict(str(path / "log"), settings, column_families=families(options))
    database.put(FORMAT_KEY, encode_number(99))
    database.close()


def replace_log_by_a_file(path: Path) -> None:
    shutil.rmtree(path / "log")
    (path / "floor").unlink()
    (path / "log").write_text("something else")


def replace_by_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x")


DIRECTORIES: dict[str, tuple[type[StreamingNodeError], str, Callable[[Path], object]]] = {
    "newer format": (UnsupportedFormat, "99", write_newer_format),
    "something else": (UnsupportedFormat, "not a node's", replace_log_by_a_file),
    "floor gone": (Corrupt, "no floor file", lambda path: (path / "floor").unlink()),
    "log gone": (Corrupt, "no database", lambda path: shutil.rmtree(path / "log")),
    "a file": (InvalidArgument, "is a file", replace_by_a_file),
}


@pytest.mark.parametrize("kind, text, change", DIRECTORIES.values(), ids=DIRECTORIES.keys())
async def test_a_directory_that_is_no_sound_node_is_refused_and_left_alone(
    tmp_path: Path, kind: type[StreamingNodeError], text: str, change: Callable[[Path], object]
) -> None:
    path = tmp_path / "node"
    await open_and_close(path)
    change(path)
    before = sorted(each.name for each in path.iterdir()) if path.is_dir() else path.read_text()
    with pytest.raises(kind, match=text) as caught:
        await open_and_close(path)
    assert NEXT_STEP in str(caught.value)
    assert (
        sorted(each.name for each in path.iterdir()) if path.is_dir() else path.read_text()
    ) == before


def contents(path: Path) -> dict[str, bytes | None]:
    """Every name under a directory, and what its files hold."""
    found = {each.relative_to(path).as_posix(): each for each in path.rglob("*")}
    return {name: each.read_bytes() if each.is_file() else None for name, each in found.items()}


def put(path: Path, *names: str) -> None:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"mine")


def leave_only_segments(path: Path) -> None:
    put(path, "segments/1/3.parquet", "deletes/1/0000000001-p0_1v0.parquet", "node.lock")
    (path / "node.lock").write_text("17\n")


STRANGERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a folder of images": (
        "'segments'",
        lambda path: put(path, "segments/cat.parquet", "segments/1/1.parquet"),
    ),
    "what is left of a node": ("'deletes', 'segments'", leave_only_segments),
    "one hidden file": ("'.gitignore'", lambda path: put(path, ".gitignore")),
    "a temporary log of somebody else": ("'log.tmp'", lambda path: put(path, "log.tmp/notes.txt")),
    "a temporary floor of somebody else": ("'floor.tmp'", lambda path: put(path, "floor.tmp")),
    "a lock of somebody else": ("'node.lock'", lambda path: put(path, "node.lock")),
    "a reserve of somebody else": ("'reserve'", lambda path: put(path, "reserve")),
    "more than can be named": (
        "'a', 'b', 'c', 'd', 'e' and more",
        lambda path: put(path, *"abcdefgh"),
    ),
}


@pytest.mark.parametrize("text, fill", STRANGERS.values(), ids=STRANGERS.keys())
async def test_a_directory_of_other_things_is_refused_by_their_names_and_nothing_is_touched(
    tmp_path: Path, text: str, fill: Callable[[Path], object]
) -> None:
    fill(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UnsupportedFormat, match=f"holds {text} and no node — choose"):
        await open_and_close(tmp_path)
    assert contents(tmp_path) == before


async def test_a_node_is_made_in_an_empty_file_system(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    await open_and_close(tmp_path)
    await open_and_close(tmp_path)


async def test_files_that_a_node_never_wrote_stay_in_its_directories(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await node.insert("orders", [ROW])
        await node.flush()
        await node.insert("orders", [ROW])
    mine = [
        "segments/cat.png",
        "segments/1/1000.parquet",
        "deletes/old.parquet",
        "cuts/notes.json.tmp",
    ]
    put(tmp_path, *mine)
    async with sn.open_node(tmp_path) as node:
        await node.flush()
        assert await rows_of(node) == 2
    assert [name for name in mine if (tmp_path / name).read_bytes() != b"mine"] == []


@pytest.mark.parametrize(
    "path",
    [
        "s3://bucket/node",
        "file:///srv/node",
        Path("gs://bucket/node"),
        "unix:data/node.sock",
        "data/node.sock",
    ],
    ids=str,
)
async def test_an_address_is_no_directory(
    tmp_path: Path, path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="is an address — "):
        await open_and_close(path)
    assert contents(tmp_path) == {}


async def test_a_path_that_leads_nowhere_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nothing")
    (tmp_path / "file").write_text("x")
    for path in ("loop", "loop/node", "file/node", "x" * 300):
        with pytest.raises(StorageFailed, match=NEXT_STEP):
            await open_and_close(tmp_path / path)
    with pytest.raises(StorageFailed, match=NEXT_STEP):
        await open_and_close(tmp_path / "gone")


@pytest.mark.parametrize(
    "name", ["floor", "node.lock", "log/CURRENT", "cuts/0000000000000001.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
async def test_something_else_in_place_of_a_file_is_a_typed_error_at_once(
    tmp_path: Path, name: str, kind: str
) -> None:
    async with sn.open_node(tmp_path / "node", free_bytes_min=0) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await node.insert("orders", [ROW])
        await node.flush()
    place = tmp_path / "node" / name
    place.rename(tmp_path / "original")
    match kind:
        case "pipe":
            os.mkfifo(place)
        case "link":
            place.symlink_to(tmp_path / "original")
        case _:
            place.mkdir()
    with pytest.raises((Corrupt, StorageFailed), match=NEXT_STEP):
        async with sn.open_node(tmp_path / "node", free_bytes_min=0) as node:
            await node.snapshot("orders")


@pytest.mark.may_block
@pytest.mark.parametrize("name", ["CURRENT", "IDENTITY", "OPTIONS-*", "MANIFEST-*", "*.log"])
async def test_a_giant_of_holes_in_the_database_is_refused_at_once(
    tmp_path: Path, name: str
) -> None:
    await open_and_close(tmp_path)
    giant = max((tmp_path / "log").glob(name))
    os.truncate(giant, 1 << 40)
    with pytest.raises(Corrupt, match=f"{giant} has {1 << 40} bytes, .*{NEXT_STEP}"):
        await open_and_close(tmp_path)


@pytest.mark.may_block
@pytest.mark.parametrize("name", ["segments", "segments/*", "deletes", "cuts", "leases"])
async def test_a_link_in_place_of_a_directory_is_not_followed(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    path = tmp_path / "node"
    async with sn.open_node(path, cut_interval_s=None, free_bytes_min=0) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await node.insert("orders", [ROW])
        await node.delete("orders", [99])
        await node.flush()
    (path / "leases").mkdir()
    (path / "leases" / "orders.json").write_text("{}")
    (place,) = path.glob(name)
    place.rename(outside)
    place.symlink_to(outside)
    before = contents(outside)
    mode = outside.stat().st_mode
    with pytest.raises(Corrupt, match=f"{place} is a link — put the directory"):
        settings: dict[str, Any] = {"retention_s": 0, "flush.group_may_read": True}
        async with sn.open_node(path, cut_interval_s=None, free_bytes_min=0, **settings) as node:
            await node.snapshot("orders")
    report = await in_thread(verify_directory, path)
    assert any("is a link" in finding.detail for finding in report.findings)
    assert (contents(outside), outside.stat().st_mode) == (before, mode)


async def test_a_cut_of_a_copy_that_went_its_own_way_is_corrupt(tmp_path: Path) -> None:
    async def cut(path: Path, item: str) -> None:
        async with sn.open_node(path, cut_interval_s=None, free_bytes_min=0) as node:
            await node.create_collection("orders", SCHEMA, primary_key="id", if_not_exists=True)
            await node.insert("orders", [{"id": 1, "item": item}])
            await node.flush()

    path = tmp_path / "node"
    copy = tmp_path / "copy"
    await cut(path, "first")
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("node.sock"))
    for each in (path, copy):
        await cut(each, each.name)
        await cut(each, "last")
    second = "cuts/0000000000000002.json"
    assert (path / second).read_bytes() != (copy / second).read_bytes()
    for name in (
        second,
        *(str(each.relative_to(copy)) for each in (copy / "segments").rglob("*.parquet")),
    ):
        shutil.copyfile(copy / name, path / name)
    async with sn.open_node(path, cut_interval_s=None, free_bytes_min=0) as node:
        with pytest.raises(Corrupt, match="not the cut 2 that this node made"):
            await node.snapshot("orders")


async def test_a_directory_in_use_names_its_process(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path) as node:
        with pytest.raises(
            AlreadyOwned, match=rf"this process \(pid {os.getpid()}\).* — "
        ) as caught:
            await open_and_close(node.path)
    assert caught.value.pid == os.getpid()


@pytest.mark.parametrize("path", [5, b"node", "", "a\0b"], ids=repr)
async def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(InvalidArgument, match="names no directory"):
        await open_and_close(path)


async def test_a_program_may_change_its_directory_while_a_node_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with sn.open_node("node") as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        await node.insert("orders", [ROW])
        assert (await node.flush()).number == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MiB; mounting one takes a right that not everybody has."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(path)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("may not mount a tmpfs here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


async def fill(node: Node, error: type[StreamingNodeError]) -> int:
    """Insert until it is refused; return how many rows were acknowledged."""
    rows = pa.table({"id": range(1000), "item": [os.urandom(1024).hex() for _ in range(1000)]})
    acknowledged = 0
    with pytest.raises(error, match=NEXT_STEP):
        while True:
            await node.insert("orders", rows)
            acknowledged += len(rows)
    return acknowledged


async def rows_of(node: Node) -> int:
    return (await node.snapshot("orders")).num_rows


@pytest.mark.may_block
async def test_a_read_only_disk_is_refused_and_serves_again_when_it_is_not(disk: Path) -> None:
    async with sn.open_node(disk / "node", free_bytes_min=MIB) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await node.insert("orders", [ROW])
    remount(disk, "ro")
    for path in (disk / "node", disk / "new"):
        with pytest.raises(StorageFailed, match=f"Read-only file system{NEXT_STEP}"):
            await open_and_close(path)
    remount(disk, "rw")
    async with sn.open_node(disk / "node", free_bytes_min=MIB) as node:
        assert await rows_of(node) == 1


@pytest.mark.may_block
async def test_a_disk_that_gets_low_refuses_appends_and_serves_readers_until_it_has_room(
    disk: Path,
) -> None:
    # the node looks ten times a second, and an empty tmpfs takes 50 MiB in that time
    remount(disk, "size=192m")
    async with sn.open_node(disk / "node", free_bytes_min=152 * MIB, cut_interval_s=None) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        async with node.read("orders", name="auditor"):
            # from here on it holds the log, of which a node short of space gives up what is in
            # files
            pass
        acknowledged = await fill(node, StorageFull)
        assert await rows_of(node) == acknowledged
        async with node.read(
            "orders", name="auditor", until=await node.consistent_tick()
        ) as messages:
            assert sum([message.num_rows async for message in messages]) == acknowledged
        with pytest.raises(StorageFull):
            async with node.transaction() as txn:
                await txn.insert("orders", [ROW])
        remount(disk, "size=512m")
        await insert_when_possible(node)
        assert (await node.flush()).number > 0
        assert await rows_of(node) == acknowledged + 1


async def insert_when_possible(node: Node) -> None:
    """The node looks at the disk ten times a second."""
    with anyio.fail_after(60):
        while True:
            try:
                await node.insert("orders", [ROW])
            except StorageFull:
                await node.consistent_tick()  # lets the loop turn
            else:
                return


def by_a_directory(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.mkdir()


def by_a_file(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.write_text("odd")


def by_a_loop(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(path)


@pytest.mark.may_block
@pytest.mark.parametrize(
    "place, replace",
    [
        ("cuts", by_a_file),
        ("cuts", by_a_loop),
        ("cuts/*.json", by_a_directory),
        ("cuts/*.json", by_a_loop),
        ("segments", by_a_file),
        ("segments", by_a_loop),
        ("segments/*", by_a_file),
        ("segments/*/*.parquet", by_a_directory),
        ("segments/*/*.parquet", by_a_loop),
    ],
)
async def test_what_stands_in_the_place_of_a_cut_is_a_typed_error_of_every_call(
    tmp_path: Path, place: str, replace: Callable[[Path], None]
) -> None:
    def damage() -> None:
        (path,) = tmp_path.glob(place)
        replace(path)

    async with sn.open_node(tmp_path, cut_interval_s=None) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await node.insert("orders", [ROW])
        await node.flush()
        damage()
        for call in (node.snapshot("orders", as_of=0), node.verify(), node.flush()):
            with suppress(StreamingNodeError):
                await call
        with pytest.raises(StreamingNodeError, match=NEXT_STEP):
            await node.snapshot("orders")


@pytest.mark.parametrize("file", ["", "a\0b", 3, b"x.toml"], ids=repr)
def test_what_names_no_config_file_is_refused(file: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"names no config file{NEXT_STEP}"):
        sn.open_node(None, config_file=file)


async def test_opening_where_the_working_directory_is_gone_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StorageFailed, match=NEXT_STEP):
        await open_and_close("node")
