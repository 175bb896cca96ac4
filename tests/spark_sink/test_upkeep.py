"""Tables of many cuts: their files stay few, their log short, and every version that is kept reads
as before.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable

import spark_sink
from spark_sink import table as table_module
from spark_sink import upkeep
from spark_sink.columns import TableFile
from spark_sink.commit import ABANDONED_AGE_S, INTENTS
from spark_sink.table import OpenTable
from spark_sink.upkeep import (
    NEWEST_FILES,
    SMALL_FILE_BYTES,
    SMALL_FILES_MAX,
    compact,
    keep_versions,
    remove_unused,
    small_files,
)
from tests.spark_sink.node_builder import NodeBuilder, orders
from tests.spark_sink.table_reading import rows_of
from tests.synced_disk import PowerCut
from wal import failpoint
from wal.errors import StorageFailed
from wal.failpoint import ENVIRONMENT_VARIABLE

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoint.disarm_all()


def take(node: NodeBuilder, tables: Path, *numbers: int) -> None:
    for number in numbers:
        node.insert("orders", orders(number))
        node.cut()
        spark_sink.ingest(None, node.path, tables, request_cut=False)


def opened(path: Path) -> OpenTable:
    table = OpenTable.load(path)
    assert table is not None
    return table


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "SMALL_FILES_MAX", 3)
    monkeypatch.setattr(upkeep, "NEWEST_FILES", 0)


def files(*sizes: int, partition: str = "_default") -> list[TableFile]:
    """Return files of these sizes, the oldest first."""
    return [
        TableFile(f"{partition}/{number}", size, 1, partition, tick_min=number)
        for number, size in enumerate(sizes)
    ]


def test_few_small_files_and_large_ones_stay_as_they_are() -> None:
    assert not list(
        small_files(files(*[1] * (SMALL_FILES_MAX + NEWEST_FILES - 1), *[SMALL_FILE_BYTES] * 100))
    )


def test_the_newest_files_whose_keys_change_most_stay_as_they_are() -> None:
    (group,) = small_files(files(*[1] * (SMALL_FILES_MAX + NEWEST_FILES)))
    assert sorted(file.tick_min or 0 for file in group) == list(range(SMALL_FILES_MAX))


def test_small_files_of_each_partition_become_one() -> None:
    enough = SMALL_FILES_MAX + NEWEST_FILES
    of_two = files(*[1] * enough) + files(*[2] * enough, partition="eu")
    assert [{file.partition for file in group} for group in small_files(of_two)] == [
        {"_default"},
        {"eu"},
    ]


@pytest.mark.parametrize("cuts", [4_320, pytest.param(43_200, marks=pytest.mark.long)])
def test_files_stay_few_and_rows_are_copied_few_times_over_a_day_of_cuts(cuts: int) -> None:
    sizes = list[int]()
    copied = 0
    most = 0
    for _ in range(cuts):
        sizes.append(1000)
        most = max(most, len(sizes))
        for group in small_files(files(*sizes)):
            copied += (merged := sum(file.bytes for file in group))
            sizes = [
                size
                for number, size in enumerate(sizes)
                if number not in {int(f.path[9:]) for f in group}
            ]
            sizes.append(merged)
    assert most <= SMALL_FILES_MAX + NEWEST_FILES + 24
    assert copied <= 12 * 1000 * cuts


def test_a_compacted_table_has_the_same_rows_at_every_version(
    node: NodeBuilder, tables: Path, few: None
) -> None:
    node.create(shards=1)
    take(node, tables, 1, 2, 3, 4)
    path = tables / "orders"
    assert compact(opened(path)) == 3
    assert len(DeltaTable(str(path)).file_uris()) == 1
    take(node, tables, 5)
    for entry in DeltaTable(str(path)).history():
        expected = node.history.get(entry["streamingnode"]["cut"], {}).get("orders", [])
        assert len(rows_of(path, entry["version"])) == len(expected)
    assert rows_of(path) == node.expected("orders")
    assert not list((path / INTENTS).iterdir())
    history = list(opened(path).history())
    at_four = next(found for found in history if found.note.cut == 4)
    assert len(opened(path).at_version(at_four.version).files()) == 1, (
        "the compacted version is the state at its cut"
    )


def test_an_ingest_meanwhile_wins_or_is_kept(node: NodeBuilder, tables: Path, few: None) -> None:
    node.create(shards=1)
    take(node, tables, 1, 2, 3)
    failpoint.arm("compact.written", lambda: take(node, tables, 4))
    assert compact(opened(tables / "orders")) == 2
    assert rows_of(tables / "orders") == node.expected("orders")


def test_a_second_compaction_of_the_same_files_is_given_up(
    node: NodeBuilder, tables: Path, few: None
) -> None:
    node.create(shards=1)
    take(node, tables, 1, 2, 3)
    path = tables / "orders"

    def compact_as_well() -> None:
        compact(opened(path))

    failpoint.arm("compact.written", compact_as_well)
    assert compact(opened(path)) == 0
    assert rows_of(path) == node.expected("orders")
    assert len(DeltaTable(str(path)).file_uris()) == 1


@pytest.mark.parametrize("place", ["compact.intended", "compact.written", "compact.committed"])
def test_a_compaction_that_fails_at_any_step_takes_and_doubles_no_row(
    place: str, node: NodeBuilder, tables: Path, few: None
) -> None:
    node.create(shards=1)
    take(node, tables, 1, 2, 3)

    def fail() -> None:
        raise PowerCut

    failpoint.arm(place, fail)
    with pytest.raises(PowerCut):
        compact(opened(tables / "orders"))
    assert rows_of(tables / "orders") == node.expected("orders")
    take(node, tables, 4, 5)
    compact(opened(tables / "orders"))
    assert rows_of(tables / "orders") == node.expected("orders")


def test_old_commits_and_files_go_and_what_is_kept_reads_as_before(
    node: NodeBuilder, tables: Path, few: None
) -> None:
    node.create(shards=1)
    path = tables / "orders"
    take(node, tables, 1, 2, 3)
    keep_versions(opened(path), 3600)
    compact(opened(path))
    take(node, tables, *range(4, 40))
    log = path / "_delta_log"
    before = len(list(log.iterdir()))
    for file in log.iterdir():
        os.utime(file, (0, 0))
    take(node, tables, *range(40, 60))
    left = sorted(int(file.name[:20]) for file in log.glob("*.json"))
    assert left[0] > 0
    assert len(list(log.iterdir())) < before
    remove_unused(opened(path))
    assert not list(path.glob(f"cut-{1:016d}-*")), "compacted, and of no version that is kept"
    for found in opened(path).history():
        assert len(rows_of(path, found.version)) == found.note.cut
    assert rows_of(path) == node.expected("orders")


def test_the_commit_of_the_newest_ingest_stays_in_the_log_whatever_other_tools_commit_after_it(
    node: NodeBuilder, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "CHECKPOINT_COMMITS", 3)
    node.create(shards=1)
    path = tables / "orders"
    take(node, tables, 1)
    keep_versions(opened(path), 60)
    DeltaTable(str(path)).alter.set_table_properties({"delta.appendOnly": "false"})
    for file in (path / "_delta_log").iterdir():
        os.utime(file, (0, 0))
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    assert next(opened(path).history()).note.cut == 1
    take(node, tables, 2)
    assert next(opened(path).history()).note.cut == 2
    for file in (path / "_delta_log").iterdir():
        os.utime(file, (0, 0))
    take(node, tables, 3, 4, 5)
    assert not (path / "_delta_log" / f"{0:020}.json").exists()


def test_the_version_that_was_the_newest_until_now_stays_however_old_its_commit_is(
    node: NodeBuilder, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "CHECKPOINT_COMMITS", 3)
    node.create(shards=1)
    node.create_partition("orders", "eu")
    path = tables / "orders"
    node.insert("orders", orders(1), "eu")
    take(node, tables, 2)
    keep_versions(opened(path), 60)
    for file in (path / "_delta_log").iterdir():
        os.utime(file, (0, 0))
    until_now = opened(path)
    node.drop_partition("orders", "eu")
    take(node, tables, 3)
    remove_unused(opened(path))
    assert list((path / "_delta_log").glob("*.checkpoint.parquet")), (
        "the log may give up what is before it"
    )
    assert all((path / file.path).exists() for file in until_now.files())
    assert [found.note.cut for found in opened(path).history()] == [2, 1, 0]


def test_a_compacted_table_tells_no_ranges_of_floats_which_would_leave_out_not_a_number(
    node: NodeBuilder, tables: Path, few: None
) -> None:
    node.create(shards=1)
    for number in range(3):
        node.insert("orders", orders(number, amount=math.nan if number == 1 else 1.0))
        node.cut()
        spark_sink.ingest(None, node.path, tables, request_cut=False)
    assert compact(opened(tables / "orders")) == 2
    delta = DeltaTable(str(tables / "orders"))
    [told] = pa.table(delta.get_add_actions(flatten=True)).to_pylist()
    assert (told["max.id"], told.get("max.amount")) == (2, None)
    read = duckdb.read_parquet(delta.file_uris(), hive_partitioning=True)
    assert read.filter("amount > 5").project("id").fetchall() == [(1,)]


def test_a_compaction_that_is_told_to_stop_begins_no_other_partition(
    node: NodeBuilder, tables: Path, few: None
) -> None:
    node.create(shards=1)
    node.create_partition("orders", "eu")
    for number in range(3):
        node.insert("orders", orders(10 + number), "eu")
        take(node, tables, number)
    assert compact(opened(tables / "orders"), is_stopping=iter([False, True]).__next__) == 2
    assert rows_of(tables / "orders") == node.expected("orders")


def test_files_of_an_attempt_under_way_stay(node: NodeBuilder, tables: Path) -> None:
    node.create(shards=1)
    take(node, tables, 1)
    path = tables / "orders"
    mine = "cut-0000000000000009-aaaaaaaa"
    nobodys = "cut-0000000000000009-bbbbbbbb"
    for name in (mine, nobodys):
        (path / name).mkdir()
        (path / name / "a.parquet").touch()
    (path / INTENTS / mine).touch()
    remove_unused(opened(path))
    assert ((path / mine).exists(), (path / nobodys).exists()) == (True, False)


COMPACTION = """
import sys
from pathlib import Path
from spark_sink import upkeep
from tests.spark_sink.test_upkeep import opened

upkeep.SMALL_FILES_MAX, upkeep.NEWEST_FILES = 3, 0
upkeep.compact(opened(Path(sys.argv[1])))
"""


@pytest.mark.parametrize(
    "step", ["compact.intended", "compact.written", "compact.committed", "ingest.file_synced"]
)
def test_a_compaction_killed_at_any_step_while_ingests_go_on_takes_and_doubles_no_row(
    step: str, node: NodeBuilder, tables: Path, few: None
) -> None:
    node.create(shards=1)
    path = tables / "orders"
    take(node, tables, 1, 2, 3)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), ENVIRONMENT_VARIABLE: f"{step}=kill"}
    number = count(4)
    with subprocess.Popen([sys.executable, "-c", COMPACTION, str(path)], env=environment) as job:
        while job.poll() is None:
            take(node, tables, next(number))
        assert job.returncode == -signal.SIGKILL
    assert rows_of(path) == node.expected("orders")
    for intent in (path / INTENTS).iterdir():
        os.utime(intent, (0, 0))
    take(node, tables, next(number))
    compact(opened(path))
    assert rows_of(path) == node.expected("orders")
    assert not list((path / INTENTS).iterdir())
    assert {file.path.partition("/")[0] for file in opened(path).files()} <= {
        found.name for found in path.glob("cut-*")
    }


CHECKPOINT = """
import sys
import spark_sink
from spark_sink import table

table.CHECKPOINT_COMMITS = 3
spark_sink.ingest(None, sys.argv[1], sys.argv[2], request_cut=False)
"""


@pytest.mark.parametrize("step", ["compact.checkpoint_made", "compact.checkpointed"])
def test_an_ingest_killed_at_its_checkpoint_leaves_a_table_that_reads_and_is_checkpointed_again(
    step: str, node: NodeBuilder, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.create(shards=1)
    take(node, tables, 1)
    node.insert("orders", orders(2))
    node.cut()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), ENVIRONMENT_VARIABLE: f"{step}=kill"}
    command = [sys.executable, "-c", CHECKPOINT, str(node.path), str(tables)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert rows_of(tables / "orders") == node.expected("orders")
    monkeypatch.setattr(table_module, "CHECKPOINT_COMMITS", 3)
    take(node, tables, 3, 4, 5)
    assert rows_of(tables / "orders") == node.expected("orders")
    assert list((tables / "orders" / "_delta_log").glob("*.checkpoint.parquet"))
    assert not (tables / "orders" / "_checkpoint").exists()


def test_an_attempt_whose_commit_the_log_gave_up_is_not_taken_for_a_dead_one(
    node: NodeBuilder, tables: Path
) -> None:
    node.create(shards=1)
    path = tables / "orders"
    take(node, tables, 1)
    [attempt] = path.glob("cut-*")
    take(node, tables, 2)
    table = DeltaTable(str(path))
    table.create_checkpoint()
    for commit in sorted((path / "_delta_log").glob("*.json"))[:-1]:
        commit.unlink()
    (path / INTENTS / attempt.name).touch()
    os.utime(path / INTENTS / attempt.name, (0, 0))
    take(node, tables, 3)
    assert rows_of(path) == node.expected("orders")
    assert not list((path / INTENTS).iterdir())


def test_a_file_that_another_tool_removed_before_its_commit_is_not_committed(
    node: NodeBuilder, tables: Path, few: None
) -> None:
    node.create(shards=1)
    path = tables / "orders"
    take(node, tables, 1, 2, 3)

    def vacuum() -> None:
        removed = DeltaTable(str(path)).vacuum(
            0, enforce_retention_duration=False, dry_run=False, full=True
        )
        assert len(removed) == 1

    failpoint.arm("ingest.sealed", vacuum)
    node.insert("orders", orders(4))
    node.cut()
    with pytest.raises(StorageFailed, match="was removed before its commit"):
        spark_sink.ingest(None, node.path, tables, request_cut=False)
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    assert rows_of(path) == node.expected("orders")


def test_a_compacted_file_that_another_tool_removed_before_its_commit_takes_no_rows_along(
    node: NodeBuilder, tables: Path, few: None
) -> None:
    node.create(shards=1)
    path = tables / "orders"
    take(node, tables, 1, 2, 3)

    def vacuum() -> None:
        DeltaTable(str(path)).vacuum(0, enforce_retention_duration=False, dry_run=False, full=True)

    failpoint.arm("compact.written", vacuum)
    with pytest.raises(StorageFailed, match="removed by another tool"):
        compact(opened(path))
    assert rows_of(path) == node.expected("orders")


def test_a_vacuum_of_another_tool_leaves_an_attempt_under_way_alone(
    node: NodeBuilder, tables: Path
) -> None:
    node.create(shards=1)
    path = tables / "orders"
    take(node, tables, 1)
    keep_versions(opened(path), 60)
    mine = path / "cut-0000000000000009-aaaaaaaa" / "a.parquet"
    mine.parent.mkdir()
    mine.touch()
    os.utime(mine, (time.time() - ABANDONED_AGE_S / 2,) * 2)
    assert DeltaTable(str(path)).vacuum(dry_run=True, full=True) == []


def test_a_vacuum_of_another_tool_changes_no_row_of_the_newest_version(
    node: NodeBuilder, tables: Path, few: None
) -> None:
    node.create(shards=1)
    path = tables / "orders"
    take(node, tables, 1, 2, 3)
    compact(opened(path))
    DeltaTable(str(path)).vacuum(0, enforce_retention_duration=False, dry_run=False, full=True)
    remove_unused(opened(path))
    take(node, tables, 4, 5)
    compact(opened(path))
    assert rows_of(path) == node.expected("orders")


def test_two_that_keep_versions_for_different_times_go_on(node: NodeBuilder, tables: Path) -> None:
    node.create(shards=1)
    both = [
        spark_sink.ingest_every(node.path, tables, every_s=0.001, request_cut=False, keep_s=keep_s)
        for keep_s in (60, 90)
    ]
    for number in range(4):
        node.insert("orders", orders(number))
        node.cut()
        assert [next(rounds).failures for rounds in both] == [(), ()]
    assert rows_of(tables / "orders") == node.expected("orders")
