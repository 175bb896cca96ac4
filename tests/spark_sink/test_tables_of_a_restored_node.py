"""Real nodes, backups and tables: a table ahead of its node is refused, and `verify --tables` names
what is wrong.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

import spark_sink
import streamingnode as sn
from spark_sink.errors import TableAhead
from streamingnode.care.backup import backup_directory, restore_directory
from streamingnode.care.findings import Report, Severity
from streamingnode.care.verify import verify_directory
from tests.parts_of import parts_of
from tests.spark_sink.table_reading import rows_of
from tests.streamingnode.append_double import schema_of
from tests.streamingnode.sample_node import swap
from wal.errors import AlreadyExists, Corrupt, InvalidArgument, Truncated

pytestmark = pytest.mark.spark

SCHEMA = schema_of(id=pa.int64(), item=pa.string())
SETTINGS: dict[str, Any] = {"cut_interval_s": None, "free_bytes_min": 0}


def write(path: Path, first: int, last: int, *, delete: tuple[int, ...] = ()) -> None:
    """Insert rows, perhaps delete some, and cut."""

    async def run() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await node.create_collection(
                "orders", SCHEMA, primary_key="id", shards=2, if_not_exists=True
            )
            await node.insert(
                "orders", [{"id": key, "item": f"item {key}"} for key in range(first, last)]
            )
            if delete:
                await node.delete("orders", list(delete))
            await node.flush()

    anyio.run(run)


@pytest.fixture
def fed(spark: SparkSession, tmp_path: Path, tables: Path) -> Path:
    """A node with two cuts, both in its table."""
    path = tmp_path / "data"
    for first in (0, 100):
        write(path, first, first + 100)
        spark_sink.ingest(spark, path, tables, request_cut=False)
    return path


def says(report: Report, *texts: str) -> bool:
    """Whether there are findings, all damage, and each says one of these."""
    return report.findings == report.damages != [] and all(
        any(text in finding.detail for text in texts) for finding in report.findings
    )


def test_a_node_and_its_table_are_sound_together(
    fed: Path, tables: Path, spark: SparkSession
) -> None:
    report = verify_directory(fed, tables=tables)
    assert report.findings == []
    assert (report.counts["tables"], report.counts["table rows"]) == (1, 200)
    assert report.counts["cuts compared with tables"] == 2
    write(fed, 200, 250, delete=(1, 2, 220))
    spark_sink.ingest(spark, fed, tables, request_cut=False)
    report = verify_directory(fed, tables=tables)
    assert report.findings == []
    assert report.counts["table rows"] == 247


def test_a_restored_node_older_than_its_table_is_refused_and_named(
    fed: Path, tables: Path, spark: SparkSession, tmp_path: Path
) -> None:
    backup_directory(fed, tmp_path / "backup")
    write(fed, 200, 250)
    spark_sink.ingest(spark, fed, tables, request_cut=False)
    restored = tmp_path / "restored"
    restore_directory(tmp_path / "backup", restored)
    assert says(
        verify_directory(restored, tables=tables), "restored from an older copy", "is an older copy"
    )
    before = rows_of(tables / "orders")
    with pytest.raises(TableAhead, match="the node was restored from an older copy — "):
        spark_sink.ingest(spark, restored, tables, request_cut=False)
    for first in (1000, 2000):  # it goes on, and has a cut of that number, but another one
        write(restored, first, first + 10)
    assert says(verify_directory(restored, tables=tables), "has another cut 3")
    with pytest.raises(TableAhead, match="another cut 3"):
        spark_sink.ingest(spark, restored, tables, request_cut=False)
    assert rows_of(tables / "orders") == before


def test_a_restored_node_as_new_as_its_table_goes_on_exactly_once(
    fed: Path, tables: Path, spark: SparkSession, tmp_path: Path
) -> None:
    backup_directory(fed, tmp_path / "backup")
    restored = tmp_path / "restored"
    restore_directory(tmp_path / "backup", restored)
    write(restored, 200, 250)
    spark_sink.ingest(spark, restored, tables, request_cut=False)
    keys = [row["id"] for row in rows_of(tables / "orders")]
    assert len(keys) == 250
    assert set(keys) == set(range(250))
    assert verify_directory(restored, tables=tables).findings == []


def test_a_restored_node_keeps_its_cuts_for_tables_that_came_back_older(
    fed: Path, tables: Path, spark: SparkSession, tmp_path: Path
) -> None:
    shutil.copytree(tables, tmp_path / "older")
    write(fed, 200, 250)
    spark_sink.ingest(spark, fed, tables, request_cut=False)
    backup_directory(fed, tmp_path / "backup")
    shutil.rmtree(tables)
    (tmp_path / "older").rename(tables)
    restored = tmp_path / "restored"
    restore_directory(tmp_path / "backup", restored)

    async def cut() -> None:
        ages: dict[str, Any] = {"retention_s": 0, "flush.retention.taken_cuts_s": 0}
        async with sn.open_node(restored, **SETTINGS, **ages) as node:
            await node.insert("orders", [{"id": 250, "item": "after the backup"}])
            await node.flush()
            await parts_of(node).flusher.enforce_retention()

    anyio.run(cut)
    spark_sink.ingest(spark, restored, tables, request_cut=False)
    keys = [row["id"] for row in rows_of(tables / "orders")]
    assert len(keys) == 251
    assert set(keys) == set(range(251))


def lose_file(table: Path) -> None:
    next(table.rglob("*.parquet")).unlink()


def cut_file(table: Path) -> None:
    file = next(table.rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-1])


def swap_rows(table: Path) -> None:
    file = next(table.rglob("*.parquet"))
    size = file.stat().st_size
    rows = pq.ParquetFile(file).read()
    pq.write_table(rows.slice(1), file)
    content = file.read_bytes()
    # Same length, so that only what is inside tells.
    file.write_bytes(
        content[:size] if len(content) > size else content + b"\0" * (size - len(content))
    )


def repeat_rows(table: Path) -> None:
    rows = DeltaTable(str(table)).to_pyarrow_table()
    write_deltalake(str(table), rows.slice(0, 3), mode="append")


def swap_files(table: Path) -> None:
    swap(*list(table.rglob("*.parquet"))[:2])


TABLE_DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "file missing": (lose_file, ("is missing from its table",)),
    "file cut short": (cut_file, ("bytes, its table says",)),
    "file of other rows": (swap_rows, ("cannot be read", "rows, its table says")),
    "files swapped": (
        swap_files,
        ("bytes, its table says", "rows, its table says", "more than once"),
    ),
    "rows twice": (repeat_rows, ("more than once", "which brought")),
}


@pytest.mark.parametrize("damage, texts", TABLE_DAMAGE.values(), ids=TABLE_DAMAGE.keys())
def test_damage_of_a_table_is_named(
    fed: Path, tables: Path, damage: Callable[[Path], None], texts: tuple[str, ...]
) -> None:
    damage(tables / "orders")
    report = verify_directory(fed, tables=tables)
    assert says(report, *texts)
    assert all(str(tables / "orders") in finding.place for finding in report.findings)


def test_tables_of_others_are_warnings(
    fed: Path, tables: Path, spark: SparkSession, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write(other, 0, 10)
    spark_sink.ingest(spark, other, tmp_path / "others", request_cut=False)
    shutil.move(tmp_path / "others" / "orders", tables / "orders-of-another")
    (tables / "notes").mkdir()
    report = verify_directory(fed, tables=tables)
    assert (len(report.findings), report.damages) == (2, [])


def test_a_directory_of_tables_that_is_not_there_is_named(fed: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="nowhere"):
        verify_directory(fed, tables=tmp_path / "nowhere")


def test_a_leased_table_that_is_gone_is_named(fed: Path, tables: Path) -> None:
    tables.joinpath("orders").rename(tables.parent / "elsewhere")
    [finding] = verify_directory(fed, tables=tables).findings
    assert finding.severity is Severity.DAMAGE
    assert finding.place == f"table {tables / 'orders'}"
    assert "lease of it, at cut 2" in finding.detail
    assert "leases/orders-" in finding.next_step


def test_the_old_place_of_a_table_that_was_moved_is_named(fed: Path, tables: Path) -> None:
    moved = tables.rename(tables.parent / "moved")
    [finding] = verify_directory(fed, tables=moved).findings
    assert finding.place == f"table {tables / 'orders'}"
    assert "if it was moved" in finding.next_step


def test_an_older_copy_of_a_table_whose_cuts_were_given_up_is_named(
    fed: Path, tables: Path, spark: SparkSession, tmp_path: Path
) -> None:
    shutil.copytree(tables / "orders", tmp_path / "older")
    for first in (200, 300):
        write(fed, first, first + 10)
    spark_sink.ingest(spark, fed, tables, request_cut=False)
    shutil.rmtree(tables / "orders")
    shutil.copytree(tmp_path / "older", tables / "orders")
    assert verify_directory(fed, tables=tables).findings == [], (
        "the next ingest takes what it lacks"
    )
    for number in (1, 2, 3):  # as retention does: every table had taken them
        (fed / "cuts" / f"{number:016d}.json").unlink()
    found = [
        each
        for each in verify_directory(fed, tables=tables).findings
        if each.place == f"table {tables / 'orders'}"
    ]
    assert len(found) == 1
    assert "cuts 3 to 3 were deleted since" in found[0].detail
    with pytest.raises(Truncated):
        spark_sink.ingest(spark, fed, tables, request_cut=False)


def test_tables_that_were_swapped_are_named(fed: Path, tables: Path, spark: SparkSession) -> None:
    async def make_another() -> None:
        async with sn.open_node(fed, **SETTINGS) as node:
            await node.create_collection("stock", SCHEMA, primary_key="id")
            await node.insert("stock", [{"id": 1, "item": "x"}])
            await node.flush()

    anyio.run(make_another)
    spark_sink.ingest(spark, fed, tables, request_cut=False)
    assert verify_directory(fed, tables=tables).findings == []
    swap(tables / "orders", tables / "stock")
    assert {
        each.detail.partition(":")[0] for each in verify_directory(fed, tables=tables).findings
    } == {
        "holds the collection 'stock'",
        "holds the collection 'orders'",
    }
    with pytest.raises(AlreadyExists, match="stock"):
        spark_sink.ingest(spark, fed, tables, request_cut=False)


def test_a_missing_file_of_a_cut_is_named_by_ingest_and_no_row_is_taken(
    fed: Path, tables: Path, spark: SparkSession
) -> None:
    before = rows_of(tables / "orders")
    write(fed, 200, 250)
    newest = max((fed / "segments").rglob("*.parquet"), key=lambda path: int(path.stem))
    newest.unlink()
    with pytest.raises(Corrupt, match=f"{newest.name} is missing, and cut 3 names it"):
        spark_sink.ingest(spark, fed, tables, request_cut=False)
    assert rows_of(tables / "orders") == before
