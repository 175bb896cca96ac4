"""What a node leaves on disk is for its owner alone, whatever the umask; a setting opens its files
to the group.
"""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pyarrow as pa
import pytest

import streamingnode as sn
from flusher.cuts import Lease, check_writable, lease_path, write_lease
from spark_sink.runtime import _cache
from streamingnode.cli import main
from wal.errors import StorageFailed

_COLUMNS: dict[str, pa.DataType] = {"id": pa.int64(), "name": pa.string()}
SCHEMA = pa.schema(_COLUMNS)
OTHER_USER = 12345


@pytest.fixture(params=[0o000, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def within_reach(top: Path, bits: int) -> set[str]:
    """Return what somebody with permission `bits` gets at: files that are readable, by directories
    that let through.
    """
    found: set[str] = set()
    for path in top.iterdir():
        if path.is_dir() and mode(path) & (bits & 0o011):
            found |= {f"{path.name}/{below}" for below in within_reach(path, bits)}
        elif path.is_file() and mode(path) & (bits & 0o066):
            found.add(path.name)
    return found


async def make_node(
    directory: Path, backup: Path | None = None, *, group_may_read: bool = False
) -> None:
    config = sn.load_config(
        arguments={"cut_interval_s": None, "flush.group_may_read": group_may_read}
    )
    async with sn.open_node(directory, config=config) as node:
        await node.create_collection("people", SCHEMA, primary_key="id", if_not_exists=True)
        await node.insert("people", [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}])
        await node.flush()
        await node.delete("people", [1])
        await node.flush()
        if backup is not None:
            await node.backup(backup)
    write_lease(
        directory,
        Lease(table=str(directory.parent / "t"), node_id="n", collection_id=1, cut=1, tick=1),
    )


def test_a_node_its_backup_and_its_restored_twin_are_for_their_owner_alone(
    tmp_path: Path, umask: int
) -> None:
    node = tmp_path / "node"
    backup = tmp_path / "backup"
    restored = tmp_path / "restored"
    anyio.run(make_node, node, backup)
    assert main(["restore", str(backup), str(restored)]) == 0
    for top in (node, backup, restored):
        assert mode(top) == 0o700
        assert {path.name for path in top.iterdir()} >= {
            "log",
            "floor",
            "segments",
            "deletes",
            "cuts",
        }
        for path in top.rglob("*"):
            if path.is_dir():
                assert mode(path) == 0o700, path
            elif top is node and path.is_relative_to(top / "log"):
                # RocksDB makes these as the umask says, in a directory that nobody else enters
                continue
            else:
                assert mode(path) == 0o600, path


def test_a_directory_that_was_there_keeps_its_mode_and_hides_what_is_in_it(
    tmp_path: Path, umask: int
) -> None:
    node = tmp_path / "node"
    node.mkdir()
    node.chmod(0o755)
    anyio.run(make_node, node)
    assert mode(node) == 0o755
    assert within_reach(node, 0o077) == set()


def test_the_group_reads_segments_deletes_and_cuts_and_nothing_else_when_told_so(
    tmp_path: Path, umask: int
) -> None:
    node = tmp_path / "node"

    def open_with(*, group_may_read: bool) -> None:
        anyio.run(lambda: make_node(node, group_may_read=group_may_read))

    open_with(group_may_read=False)
    assert within_reach(node, 0o070) == set()
    open_with(group_may_read=True)  # files of the time before are opened, too
    files = {
        path.relative_to(node).as_posix()
        for path in node.rglob("*")
        if path.is_file() and path.relative_to(node).parts[0] in {"segments", "deletes", "cuts"}
    }
    assert {name.partition("/")[0] for name in files} == {"segments", "deletes", "cuts"}
    assert mode(node) == 0o710
    assert within_reach(node, 0o070) == files
    assert within_reach(node, 0o007) == set()
    open_with(group_may_read=False)
    assert within_reach(node, 0o070) == set()


AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from flusher.directory import cut_numbers, file_paths, read_cut
from flusher.directory import NodeDirectory
from flusher.cuts import check_writable
from wal.errors import StorageFailed

os.chdir(sys.argv[1])  # what is above belongs to the test
os.setgroups([]); os.setgid(os.stat("cuts").st_gid); os.setuid(int(sys.argv[2]))
node = NodeDirectory(Path("."))
cuts = [read_cut(node, cut).manifest for cut in cut_numbers(node)]
print(sum(len(node.read(path)) > 0 for manifest in cuts for path in file_paths(manifest)))
list_log = lambda node: os.listdir(f"{node}/log")
open_floor = lambda node: open(f"{node}/floor")
for private in (os.listdir, list_log, open_floor, check_writable):
    try:
        private(Path("."))
    except (PermissionError, StorageFailed) as error:
        print(type(error).__name__)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: only root becomes another user")
def test_another_user_of_the_group_reads_what_cuts_name_and_cannot_ingest(tmp_path: Path) -> None:
    node = tmp_path / "node"
    anyio.run(lambda: make_node(node, group_may_read=True))
    command = [sys.executable, "-c", AS_ANOTHER_USER, str(node), str(OTHER_USER)]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert said.stdout.split() == [
        "2",
        "PermissionError",
        "PermissionError",
        "PermissionError",
        "StorageFailed",
    ]


def test_a_lease_in_a_directory_opened_to_the_group_can_be_read_by_it(tmp_path: Path) -> None:
    leases = tmp_path / "leases"
    leases.mkdir()
    leases.chmod(0o2770)
    check_writable(tmp_path)
    lease = Lease(table=str(tmp_path / "t"), node_id="n", collection_id=1, cut=1, tick=1)
    write_lease(tmp_path, lease)
    assert mode(lease_path(tmp_path, Path(lease.table))) == 0o640


class TestSparkCache:
    """Spark is started by a script in the cache, so nobody else may write there."""

    def test_it_is_made_for_its_owner_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert mode(_cache()) == 0o700

    @pytest.mark.parametrize("bits", [0o770, 0o707, 0o720, 0o702])
    def test_one_that_others_may_write_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        (tmp_path / "streamingnode").mkdir()
        (tmp_path / "streamingnode").chmod(bits)
        with pytest.raises(StorageFailed, match="XDG_CACHE_HOME"):
            _cache()

    def test_a_link_to_somewhere_else_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        (tmp_path / "elsewhere").mkdir(0o700)
        (tmp_path / "streamingnode").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StorageFailed, match="only this user"):
            _cache()

    @pytest.mark.skipif(os.getuid() != 0, reason="needs root: only root gives files away")
    def test_one_of_another_user_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        (tmp_path / "streamingnode").mkdir(0o700)
        os.chown(tmp_path / "streamingnode", OTHER_USER, -1)
        with pytest.raises(StorageFailed, match="only this user"):
            _cache()
