"""An ingest whose machine loses power at each of its steps: every table reads, and no lease is
ahead of its table.
"""

import copy
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

import spark_sink
from flusher.cuts import Lease
from spark_sink import table as table_module
from spark_sink import upkeep
from spark_sink.commit import INTENTS
from spark_sink.ingestion import LOCKS
from spark_sink.table import OpenTable
from spark_sink.upkeep import compact, keep_versions
from tests.spark_sink.conftest import STEPS, Ingest
from tests.spark_sink.node_builder import NodeBuilder, ordered, orders
from tests.spark_sink.table_reading import rows_of
from tests.synced_disk import PowerCut, SyncedDisk, synced_disk

pytestmark = pytest.mark.spark

_BESIDE_THE_POINT = re.compile(r"\.crc$|\.locks|/cut-[^/]+/.")
"""Hadoop's side files, locks, and what is inside an attempt: only all of that together is of
use.
"""


@pytest.fixture
def node(tmp_path: Path) -> NodeBuilder:
    """A node on a disk of its own, the tables beside it in a directory that an ingest has to
    make.
    """
    return NodeBuilder(tmp_path / "disk" / "data")


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "made" / "tables"


@pytest.fixture
def disk(node: NodeBuilder, tmp_path: Path) -> Iterator[SyncedDisk]:
    with synced_disk(tmp_path / "disk") as disk:
        yield disk


class Lefts:
    """What power cuts leave at each step of an ingest, checked one by one."""

    def __init__(self, disk: SyncedDisk, node: NodeBuilder, target: Path) -> None:
        self._disk = disk
        self._node = node
        self._target = target
        self.checked = 0
        self.steps: set[str] = set()

    def at_step(self, step: str) -> None:
        """Check what is left by a power cut now: of the names not synced none, all, and each
        alone.
        """
        self.steps.add(step)
        self.check(lambda _: False)
        self.check(lambda _: True)
        for name in self._disk.unsynced_names():
            if not _BESIDE_THE_POINT.search(name):
                self.check(lambda found, name=name: found == name or found.startswith(f"{name}/"))  # type: ignore[misc]

    def check(self, lucky: Callable[[str], bool]) -> Path:
        self.checked += 1
        left = self._disk.lose_power(self._target / str(self.checked), lucky=lucky)
        tables = {
            path.name: path
            for path in (left / "made" / "tables").glob("[!.]*")
            if (path / "_delta_log").is_dir()
        }
        marks = {name: self._check_table(name, path) for name, path in tables.items()}
        for path in (left / "data" / "leases").glob("*.json"):
            lease = msgspec.json.decode(path.read_bytes(), type=Lease)
            assert lease.cut <= marks[Path(lease.table).name], (
                "a lease ahead of its table gives up rows"
            )
        return left

    def _check_table(self, name: str, path: Path) -> int:
        """Fail unless a table reads as its collection at the cut it names; return that cut."""
        table = OpenTable.load(path)
        if table is None:
            return -1
        cut = table.watermark.cut
        bare = name.partition("@")[0]
        states = [state for number, state in sorted(self._node.history.items()) if number <= cut]
        # dropped, it stays as it was
        expected = next((state[bare] for state in reversed(states) if bare in state), [])
        assert rows_of(path) == ordered(expected)
        for attempt in path.glob("cut-*"):
            known = (path / INTENTS / attempt.name).exists() or attempt.name in table.attempts()
            assert known or not any(attempt.rglob("*")), "nobody will ever remove these files"
        return cut


def give_up(step: str, lefts: Lefts | None = None) -> None:
    """Die right after a commit, before it is synced; the kernel and its memory live on."""
    if lefts is not None:
        lefts.at_step(step)
    if step == "ingest.committed":
        raise PowerCut


def test_a_power_cut_at_any_step_leaves_tables_that_read_and_leases_that_lag(
    disk: SyncedDisk, node: NodeBuilder, tmp_path: Path, ingest: Ingest
) -> None:
    assert run(disk, node, tmp_path / "left", ingest).steps == set(STEPS)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_sync_of_an_ingest_can_be_left_out(
    node: NodeBuilder, tmp_path: Path, ingest: Ingest
) -> None:
    """Each in turn does nothing, and the test above has to see it."""
    root = tmp_path / "disk"
    start = copy.deepcopy(node)
    unnoticed = set[str]()
    sites = [""]
    tried = set[str]()
    while sites:
        shutil.rmtree(root)
        node = copy.deepcopy(start)
        (node.path / "cuts").mkdir(parents=True)
        with synced_disk(root) as disk:
            disk.ignored = sites.pop()
            try:
                run(disk, node, tmp_path / f"left-{len(tried)}", ingest)
            except (AssertionError, DeltaError, KeyError, OSError, msgspec.DecodeError):
                assert disk.ignored, "with all syncs nothing is lost"
            else:
                unnoticed.add(disk.ignored)
            if not disk.ignored:
                sites += sorted(disk.sites)
            tried.add(disk.ignored)
    assert len(tried) > 18
    assert unnoticed == {""}, "\n".join(sorted(unnoticed))


def run(disk: SyncedDisk, node: NodeBuilder, target: Path, ingest: Ingest) -> Lefts:
    """Ingest three times, and check what power cuts leave of the first and the last.

    The second dies after its commit, and so does a job of another machine beside the last: before
    its lease is written.
    """
    target.mkdir()
    lefts = Lefts(disk, node, target)
    node.create()
    node.create_partition("orders", "eu")
    node.insert("orders", orders(1, 2, 3))
    node.insert("orders", orders(4, 5), "eu")
    node.create("old")
    node.insert("old", orders(1))
    node.create("empty")
    make_cut(disk, node)
    ingest(on_step=lefts.at_step)
    check_end(lefts, {"orders": 1, "old": 1, "empty": 1})

    node.insert("orders", orders(7))
    make_cut(disk, node)
    with pytest.raises(PowerCut):
        ingest(on_step=lambda step: give_up(step, lefts))

    node.upsert("orders", orders(2, 6, amount=2.0))
    node.drop_partition("orders", "eu")
    node.drop("old")
    make_cut(disk, node)

    def another_job_commits(step: str) -> None:
        lefts.at_step(step)
        if step == "ingest.finished" and node.number == 3:
            # as on a machine whose locks we do not see
            shutil.rmtree(node.path.parent / "made" / "tables" / LOCKS)
            node.insert("orders", orders(8))
            make_cut(disk, node)
            with pytest.raises(PowerCut):
                ingest(on_step=give_up)

    ingest(on_step=another_job_commits)
    check_end(lefts, {"orders": 4, "empty": 3})
    return lefts


def make_cut(disk: SyncedDisk, node: NodeBuilder) -> None:
    """Make a cut, which is on the disk."""
    node.cut()
    disk.keep(node.path)


def check_end(lefts: Lefts, cuts: dict[str, int]) -> None:
    """Fail unless all that an ingest told is left of it by a power cut after its end."""
    left = lefts.check(lambda _: False)
    leases = [
        msgspec.json.decode(path.read_bytes(), type=Lease)
        for path in (left / "data" / "leases").glob("*.json")
    ]
    assert {Path(lease.table).name: lease.cut for lease in leases} == cuts
    found = {path.name: OpenTable.load(path) for path in (left / "made" / "tables").glob("[!.]*")}
    assert {
        name: table and table.watermark.cut for name, table in found.items() if "@" not in name
    } == cuts


@pytest.fixture
def at_every_sync(disk: SyncedDisk, node: NodeBuilder, tmp_path: Path) -> Iterator[Lefts]:
    """Checks what a power cut leaves before each sync of the block that begins with `steps.add`."""
    (tmp_path / "left").mkdir()
    lefts = Lefts(disk, node, tmp_path / "left")
    disk.ignored = "none"  # called from a test, every site is ""

    def sync(descriptor: int) -> None:
        if lefts.steps:
            lefts.at_step("sync")
        disk.sync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        yield lefts


def take(disk: SyncedDisk, node: NodeBuilder, tables: Path, *numbers: int) -> None:
    for number in numbers:
        node.insert("orders", orders(number))
        make_cut(disk, node)
        spark_sink.ingest(None, node.path, tables, request_cut=False)


def test_a_power_cut_of_a_compaction_takes_and_doubles_no_row(
    disk: SyncedDisk,
    node: NodeBuilder,
    tables: Path,
    at_every_sync: Lefts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upkeep, "SMALL_FILES_MAX", 3)
    monkeypatch.setattr(upkeep, "NEWEST_FILES", 0)
    node.create(shards=1)
    take(disk, node, tables, 1, 2, 3)
    at_every_sync.steps.add("compaction")
    table = OpenTable.load(tables / "orders")
    assert table is not None
    assert compact(table) == 2
    assert at_every_sync.checked > 10
    left = at_every_sync.check(lambda _: False) / "made" / "tables" / "orders"
    assert len(DeltaTable(str(left)).file_uris()) == 1


def test_a_power_cut_while_a_log_gets_its_checkpoint_and_gives_up_commits_leaves_a_table_that_reads(
    disk: SyncedDisk,
    node: NodeBuilder,
    tables: Path,
    at_every_sync: Lefts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_module, "CHECKPOINT_COMMITS", 3)
    node.create(shards=1)
    log = tables / "orders" / "_delta_log"
    take(disk, node, tables, 1, 2)
    table = OpenTable.load(tables / "orders")
    assert table is not None
    keep_versions(table, 60)
    for path in log.iterdir():
        os.utime(path, (0, 0))
    at_every_sync.steps.add("checkpoint")
    take(disk, node, tables, 3, 4, 5)
    at_every_sync.at_step("end")
    assert not (log / f"{0:020}.json").exists()
    assert len(list(log.glob("*.checkpoint.parquet"))) == 2
    assert rows_of(tables / "orders") == node.expected("orders")
