"""What a power cut leaves of a log that is synced in the background is told from rot, before the
node was opened again.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest

import streamingnode as sn
from streamingnode.care.export import export_directory
from streamingnode.care.findings import Severity
from streamingnode.care.verify import verify_directory
from streamingnode.cli import main
from tests.streamingnode.care.test_export import rows_in
from tests.streamingnode.sample_node import SCHEMA, SETTINGS, flip, rows_of
from wal.rocks.recovery import BLOCK_BYTES

SYNCED = 100
UNSYNCED = 200
"""Inserts before and after the last sync; each more than a block of RocksDB's log."""
OS: dict[str, Any] = SETTINGS | {"durability": "os", "log.sync_interval_ms": 2_000}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node as a kill leaves it: everything acknowledged is in RocksDB's log, the first part of it
    synced.
    """
    place = tmp_path_factory.mktemp("torn")

    async def insert(node: sn.Node, first: int, last: int) -> None:
        for key in range(first, last):
            await node.insert("orders", [{"id": key, "item": f"item {key} " * 50}])

    async def make() -> None:
        async with sn.open_node(place / "alive", **OS) as node:
            await node.create_collection("orders", SCHEMA, primary_key="id", shards=2)
            await insert(node, 0, SYNCED)
            await node.producer("feed")  # its record is synced, and with it what came before
            await insert(node, SYNCED, SYNCED + UNSYNCED)
            shutil.copytree(
                place / "alive", place / "killed", ignore=shutil.ignore_patterns("node.sock")
            )

    anyio.run(make)
    return place / "killed"


def cut_by_power(killed: Path, path: Path, share: float) -> Path:
    """Return a copy with a hole in RocksDB's log, at a share of its length."""
    shutil.copytree(killed, path)
    log = max(path.glob("log/*.log"), key=lambda file: file.stat().st_size)
    flip(log, int(log.stat().st_size * share))
    return path


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
def test_torn_tail_is_a_warning_that_counts_its_bytes(
    killed: Path, tmp_path: Path, share: float
) -> None:
    path = cut_by_power(killed, tmp_path / "node", share)
    size = max(file.stat().st_size for file in path.glob("log/*.log"))
    [finding] = verify_directory(path).findings
    assert (finding.severity, finding.place) == (Severity.WARNING, "log")
    said = re.fullmatch(
        r"torn tail, will be dropped: (\d+) bytes, not acknowledged as durable", finding.detail
    )
    assert said is not None
    assert 0 <= int(said[1]) - size * (1 - share) < 2_000, "from the record that is torn to the end"
    assert export_directory(path, tmp_path / "out").missing == ()
    kept = rows_of(path)
    assert rows_in(tmp_path / "out") == kept
    assert SYNCED <= len(kept) < SYNCED + UNSYNCED
    assert verify_directory(path).findings == []


def test_command_says_that_the_tail_is_torn_and_does_not_call_it_damage(
    killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cut_by_power(killed, tmp_path / "node", 0.6)
    assert main(["verify", str(path)]) == 1
    assert "torn tail, will be dropped: " in capsys.readouterr().out


def test_log_that_ends_whole_has_no_torn_tail(killed: Path, tmp_path: Path) -> None:
    path = shutil.copytree(killed, tmp_path / "node")
    assert verify_directory(path).findings == []
    assert len(rows_of(path)) == SYNCED + UNSYNCED


def test_hole_in_what_was_synced_is_damage_although_more_is_torn(
    killed: Path, tmp_path: Path
) -> None:
    path = cut_by_power(killed, tmp_path / "node", 0.05)
    report = verify_directory(path)
    assert report.worst is Severity.DAMAGE
    assert export_directory(path, tmp_path / "out", salvage=True).missing
    assert not [finding for finding in report.findings if "torn" in finding.detail]


def test_hole_between_two_log_files_is_a_torn_tail_and_no_damage(tmp_path: Path) -> None:
    small = OS | {"log.memtable_bytes": 1 << 16}

    def newest(place: Path) -> Path:
        return max(place.glob("log/*.log"), key=lambda file: file.name)

    async def insert(node: sn.Node, key: int) -> None:
        await node.insert("orders", [{"id": key, "item": f"item {key} " * 50}])

    async def make() -> None:
        async with sn.open_node(tmp_path / "alive", **small) as node:
            await node.create_collection("orders", SCHEMA, primary_key="id")
            await insert(node, 0)
            await node.producer("feed")
            await insert(node, 1)
            shutil.copytree(
                tmp_path / "alive", tmp_path / "node", ignore=shutil.ignore_patterns("node.sock")
            )
            key = 2
            first = newest(tmp_path / "alive")
            while newest(tmp_path / "alive") == first:
                await insert(node, key)
                key += 1
            await insert(node, key)
            shutil.copy(newest(tmp_path / "alive"), tmp_path / "node" / "log")

    anyio.run(make)
    [finding] = verify_directory(tmp_path / "node").findings
    assert finding.severity is Severity.WARNING
    assert "torn tail, will be dropped: everything after position" in finding.detail
    assert export_directory(tmp_path / "node", tmp_path / "out").missing == ()
    assert sorted(rows_in(tmp_path / "out")) == sorted(rows_of(tmp_path / "node")) == [0, 1]
    assert verify_directory(tmp_path / "node").findings == []


def test_torn_entry_of_several_blocks_before_another_is_a_torn_tail_and_no_damage(
    tmp_path: Path,
) -> None:
    async def make() -> None:
        async with sn.open_node(tmp_path / "alive", **OS) as node:
            await node.create_collection("orders", SCHEMA, primary_key="id")
            await node.producer("feed")
            for key in range(2):
                await node.insert("orders", [{"id": key, "item": "tea" * 50_000}])
            shutil.copytree(
                tmp_path / "alive", tmp_path / "killed", ignore=shutil.ignore_patterns("node.sock")
            )

    anyio.run(make)
    log = max(tmp_path.glob("killed/log/*.log"), key=lambda file: file.stat().st_size)
    with log.open("r+b") as file:
        file.seek(2 * BLOCK_BYTES)
        file.write(bytes(4096))
    [finding] = verify_directory(tmp_path / "killed").findings
    assert (finding.severity, finding.detail.partition(",")[0]) == (Severity.WARNING, "torn tail")
    assert rows_of(tmp_path / "killed") == {}
