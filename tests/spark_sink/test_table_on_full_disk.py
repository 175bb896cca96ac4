"""Tables on a real disk that is full at each step of a commit, of its checkpoint and of a
compaction.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

import spark_sink
from spark_sink import table as table_module
from spark_sink import upkeep
from spark_sink.commit import INTENTS
from spark_sink.upkeep import compact
from tests.chaos.small_disk import SmallDisk, lacking, small_disk
from tests.spark_sink.node_builder import NodeBuilder, orders
from tests.spark_sink.table_reading import lease_of, rows_of
from tests.spark_sink.test_upkeep import opened, take
from wal import failpoint
from wal.errors import StorageFailed

pytestmark = pytest.mark.spark

BLOCK = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if lack := lacking():
        pytest.skip(lack)
    with small_disk(tmp_path, 16 << 20) as disk:
        yield disk
    failpoint.disarm_all()


@pytest.fixture
def tables(disk: SmallDisk) -> Path:
    return disk.path / "tables"


def check(node: NodeBuilder, tables: Path) -> None:
    """Fail unless every row is there once, and every file on the disk is one of a version."""
    path = tables / "orders"
    assert rows_of(path) == node.expected("orders")
    assert lease_of(node, path).cut == node.number
    assert not list((path / INTENTS).iterdir())
    committed = {found.note.attempt for found in opened(path).history()}
    assert {found.name for found in path.glob("cut-*")} <= committed


@pytest.mark.parametrize("step", ["created", "intended", "written", "sealed"])
def test_a_disk_that_is_full_before_a_commit_is_told_at_once_and_has_its_room_back(
    step: str, disk: SmallDisk, node: NodeBuilder, tables: Path
) -> None:
    node.create(shards=1)
    node.insert("orders", orders(*range(1000)))
    node.cut()
    failpoint.arm(f"ingest.{step}", disk.fill)
    with pytest.raises(StorageFailed, match="No space left on device"):
        spark_sink.ingest(None, node.path, tables, request_cut=False)
    assert not list((tables / "orders").glob("cut-*"))
    rounds = spark_sink.ingest_every(node.path, tables, every_s=0.001, request_cut=False)
    assert [(each.table, each.code) for each in next(rounds).failures] == [
        ("orders", "STORAGE_FAILED")
    ]
    disk.free()
    assert next(told for told in rounds if not told.failures).rows_added == 1000
    check(node, tables)


def test_a_checkpoint_without_room_takes_nothing_back_and_is_made_when_there_is_room(
    disk: SmallDisk, node: NodeBuilder, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "CHECKPOINT_COMMITS", 3)
    node.create(shards=1)
    take(node, tables, 1)
    node.insert("orders", orders(2))
    node.cut()
    failpoint.arm("ingest.sealed", lambda: disk.leave(2 * BLOCK))
    with pytest.raises(StorageFailed, match="No space left on device"):
        spark_sink.ingest(None, node.path, tables, request_cut=False)
    check(node, tables)
    assert not (tables / "orders" / "_checkpoint").exists()
    disk.free()
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    assert len(list((tables / "orders" / "_delta_log").glob("*.checkpoint.parquet"))) == 1
    check(node, tables)


@pytest.mark.parametrize("step", ["intended", "written"])
def test_a_compaction_without_room_leaves_nothing_and_ingests_go_on(
    step: str, disk: SmallDisk, node: NodeBuilder, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SMALL_FILES_MAX", 3)
    monkeypatch.setattr(upkeep, "NEWEST_FILES", 0)
    node.create(shards=1)
    take(node, tables, 1, 2, 3)
    rounds = spark_sink.ingest_every(node.path, tables, every_s=0.001, request_cut=False)
    failpoint.arm(f"compact.{step}", disk.fill)
    told = next(rounds)
    assert [each.code for each in told.failures] == ["STORAGE_FAILED"]
    assert "No space left on device" in told.failures[0].message
    check(node, tables)
    assert (next(rounds).failures, next(rounds).compacted) == ((), 0), "it waits"
    disk.free()
    node.insert("orders", orders(4))
    node.cut()
    assert next(rounds).rows_added == 1
    assert compact(opened(tables / "orders")) == 3
    check(node, tables)
    assert len(DeltaTable(str(tables / "orders")).file_uris()) == 1
