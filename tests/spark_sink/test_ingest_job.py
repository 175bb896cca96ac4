"""Tables equal the model after every ingest, and stay whole whatever is dropped, restored, broken or raced."""

import random
import shutil
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import spark_sink
from spark_sink.cuts import CutLog
from spark_sink.lease import Lease, lease_path
from spark_sink.step import Step
from spark_sink.table_lock import LOCKS
from tests.spark_sink.conftest import Ingest
from tests.spark_sink.node_builder import ORDERS, NodeBuilder, Value, ordered
from wal.errors import AlreadyExists, Corrupt, TableAhead, Truncated

pytestmark = pytest.mark.spark


def order(number: int, amount: float = 1.0) -> dict[str, Value]:
    return {"id": number, "item": f"item-{number}", "amount": amount}


def orders(*numbers: int, amount: float = 1.0) -> list[dict[str, Value]]:
    return [order(number, amount) for number in numbers]


def rows_of(path: Path, version: int | None = None) -> list[dict[str, Value]]:
    """Read a table as another Delta reader does."""
    return ordered(DeltaTable(str(path), version=version).to_pyarrow_table().to_pylist())


def lease_of(node: NodeBuilder, table: Path) -> Lease:
    return msgspec.json.decode(lease_path(node.path, table).read_bytes(), type=Lease)


@pytest.mark.parametrize("seed", range(2))
def test_every_version_of_every_table_is_the_model_at_its_cut(
    seed: int, spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    chance = random.Random(seed)
    for name in ("orders", "stock"):
        node.create(name, shards=chance.randint(1, 3))
    for _ in range(3):
        for _ in range(chance.randint(1, 3)):
            for _ in range(chance.randint(0, 8)):
                act_at_random(node, chance)
            node.cut()
        ingest(commit_bytes_max=chance.choice([8_000, 1 << 30]))
        for name in node.collections:
            assert rows_of(tables / name) == node.expected(name)
    for name, collection in node.collections.items():
        for entry in DeltaTable(str(tables / name)).history():
            if entry["streamingnode"]["tick"] > collection.created_tick:
                expected = node.history[entry["streamingnode"]["cut"]].get(name, [])
                assert rows_of(tables / name, entry["version"]) == ordered(expected)
        frame = spark_sink.read_table(spark, tables / name)
        assert ordered(row.asDict() for row in frame.collect()) == node.expected(name)
        source = spark.read.format("streamingnode").option("node", str(node.path)).option("subscribe", name).load()
        assert source.schema.simpleString() == frame.schema.simpleString()
        assert ordered(row.asDict() for row in source.collect()) == node.expected(name)


def act_at_random(node: NodeBuilder, chance: random.Random) -> None:
    name = chance.choice(sorted(node.collections))
    collection = node.collections[name]
    numbers = [chance.randrange(40) for _ in range(chance.randint(1, 12))]
    partition = chance.choice(sorted(collection.partitions))
    match chance.choices(range(7), weights=[8, 5, 5, 2, 2, 1, 1])[0]:
        case 0:
            node.insert(name, orders(*numbers, amount=chance.random()), partition)
        case 1:
            node.upsert(name, orders(*set(numbers), amount=chance.random()), partition)
        case 2:
            node.delete(name, numbers)
        case 3:
            node.seal()
        case 4 if len(collection.partitions) < 3:
            node.create_partition(name, "eu" if "eu" not in collection.partitions else "us")
        case 5 if partition != "_default":
            node.drop_partition(name, partition)
            if chance.random() < 0.7:
                node.create_partition(name, partition)
        case 6:
            node.drop(name)
            node.create(name)
        case _:
            node.insert(name, orders(*numbers), partition)


def test_a_second_ingest_takes_nothing(node: NodeBuilder, tables: Path, ingest: Ingest) -> None:
    node.create()
    node.insert("orders", orders(1, 2))
    node.cut()
    ingest()
    version = DeltaTable(str(tables / "orders")).version()
    again = ingest()
    assert (again.rows_added, again.tables[0].first_cut) == (0, 0)
    assert DeltaTable(str(tables / "orders")).version() == version


def test_report_counts_rows_files_and_cuts(node: NodeBuilder, ingest: Ingest) -> None:
    node.create(shards=1)
    node.insert("orders", orders(1, 2, 3))
    node.delete("orders", [2])
    node.cut()
    first = ingest().tables[0]
    assert (first.first_cut, first.last_cut, first.rows_added, first.rows_deleted) == (1, 1, 3, 1)
    assert (first.files_added, first.files_removed) == (1, 0)
    node.delete("orders", [1])
    node.cut()
    node.cut()
    second = ingest().tables[0]
    assert (second.first_cut, second.last_cut, second.rows_added, second.rows_deleted) == (2, 3, 0, 1)
    assert (second.files_added, second.files_removed) == (1, 1)
    assert second.tick == node.cut_tick


def test_only_files_that_hold_a_deleted_row_are_rewritten(node: NodeBuilder, tables: Path, ingest: Ingest) -> None:
    node.create(shards=1)
    for numbers in ([1, 9], [2, 8], [3, 7]):
        node.insert("orders", orders(*numbers))
        node.cut()
        ingest()
    before = set(DeltaTable(str(tables / "orders")).file_uris())
    node.delete("orders", [8, 5])  # 5 lies within the key range of all three files and in none of them
    node.cut()
    assert ingest().tables[0].files_removed == 1
    after = set(DeltaTable(str(tables / "orders")).file_uris())
    assert len(before & after) == 2
    assert rows_of(tables / "orders") == node.expected("orders")


def test_a_recreated_partition_keeps_only_its_new_rows(node: NodeBuilder, tables: Path, ingest: Ingest) -> None:
    node.create()
    node.create_partition("orders", "eu")
    node.insert("orders", orders(1, 2), "eu")
    node.insert("orders", orders(3))
    node.cut()
    ingest()
    node.insert("orders", orders(4), "eu")
    node.cut()
    node.drop_partition("orders", "eu")
    node.create_partition("orders", "eu")
    node.insert("orders", orders(5), "eu")
    node.cut()
    report = ingest()
    assert [row["id"] for row in rows_of(tables / "orders") if row["_partition"] == "eu"] == [5]
    assert rows_of(tables / "orders") == node.expected("orders")
    assert report.rows_deleted == 2


def test_a_recreated_collection_gets_a_table_of_its_own(node: NodeBuilder, tables: Path, ingest: Ingest) -> None:
    old = node.create()
    node.insert("orders", orders(1, 2))
    node.cut()
    ingest()
    last = node.expected("orders")
    node.drop("orders")
    node.create(schema=pa.schema([("id", pa.string())]))
    node.insert("orders", [{"id": "a"}])
    node.cut()
    report = ingest()
    assert rows_of(tables / f"orders@{old.id}") == last
    assert rows_of(tables / "orders") == node.expected("orders")
    assert [(table.path, table.dropped) for table in report.tables] == [
        (str(tables / f"orders@{old.id}"), True),
        (str(tables / "orders"), False),
    ]


def test_a_dropped_collection_gives_up_its_lease(node: NodeBuilder, tables: Path, ingest: Ingest) -> None:
    node.create()
    node.cut()
    ingest()
    assert lease_of(node, tables / "orders").cut == 1
    node.drop("orders")
    node.cut()
    ingest()
    assert not lease_path(node.path, tables / "orders").exists()


def test_a_collection_born_and_dropped_between_ingests_leaves_no_table(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.insert("orders", orders(1))
    node.cut()
    node.drop("orders")
    node.cut()
    assert ingest().tables == ()
    assert not (tables / "orders").exists()


def test_lease_says_what_the_table_has_taken(node: NodeBuilder, tables: Path, ingest: Ingest) -> None:
    collection = node.create()
    node.cut()
    node.cut()
    ingest()
    assert lease_of(node, tables / "orders") == Lease(
        table=str(tables / "orders"), node_id="node-1", collection_id=collection.id, cut=2, tick=node.cut_tick
    )


def test_two_table_directories_have_a_lease_each(
    node: NodeBuilder, tables: Path, tmp_path: Path, ingest: Ingest
) -> None:
    node.create()
    node.cut()
    ingest()
    node.cut()
    ingest(into=tmp_path / "other")
    assert lease_of(node, tables / "orders").cut == 1
    assert lease_of(node, tmp_path / "other" / "orders").cut == 2


def test_a_node_older_than_its_table_is_refused(
    node: NodeBuilder, tmp_path: Path, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.cut()
    node.copy(tmp_path / "backup")
    node.insert("orders", orders(1))
    node.cut()
    ingest()
    shutil.rmtree(node.path)
    shutil.copytree(tmp_path / "backup", node.path)
    with pytest.raises(TableAhead, match="newest is 1"):
        ingest()
    assert len(rows_of(tables / "orders")) == 1


def test_a_restored_node_that_went_on_is_refused(node: NodeBuilder, tmp_path: Path, ingest: Ingest) -> None:
    node.create()
    node.cut()
    other = tmp_path / "other"
    node.copy(other)
    node.insert("orders", orders(1))
    node.cut()
    ingest()
    shutil.rmtree(node.path)
    shutil.copytree(other, node.path)
    node.number, node.crc = 1, CutLog(node.path).read(1).crc32c
    node.insert("orders", orders(2))
    node.cut()
    node.cut()
    with pytest.raises(TableAhead, match="another cut 2"):
        ingest()


def test_a_table_of_another_node_is_refused(
    node: NodeBuilder, tables: Path, tmp_path: Path, spark: SparkSession
) -> None:
    for number in (1, 2):
        builder = NodeBuilder(tmp_path / f"node-{number}", f"node-{number}")
        builder.create()
        builder.cut()
    spark_sink.ingest(spark, tmp_path / "node-1", tables, request_cut=False)
    with pytest.raises(AlreadyExists, match="node-1"):
        spark_sink.ingest(spark, tmp_path / "node-2", tables, request_cut=False)


def test_a_directory_that_is_no_table_is_refused(node: NodeBuilder, tables: Path, ingest: Ingest) -> None:
    node.create()
    node.cut()
    (tables / "orders").mkdir(parents=True)
    (tables / "orders" / "precious.txt").write_text("mine")
    with pytest.raises(AlreadyExists, match="is no table"):
        ingest()


@pytest.mark.parametrize("damage", ["flip", "cut short"])
def test_a_damaged_file_is_named_and_nothing_is_committed(
    damage: str, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create(shards=1)
    node.insert("orders", orders(1))
    node.cut()
    [path] = (node.path / "segments").rglob("*.parquet")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[10] ^= 1
    else:
        del content[-1]
    path.write_bytes(content)
    with pytest.raises(Corrupt, match=path.name):
        ingest()
    assert rows_of(tables / "orders") == []


def test_a_missing_cut_is_refused(node: NodeBuilder, ingest: Ingest) -> None:
    node.create()
    for _ in range(3):
        node.cut()
    (node.path / "cuts" / f"{2:016d}.json").unlink()
    with pytest.raises(Corrupt, match="cut 2 is missing"):
        ingest()


def test_cuts_that_retention_took_too_early_are_refused(node: NodeBuilder, ingest: Ingest) -> None:
    node.create()
    node.cut()
    ingest()
    for _ in range(3):
        node.cut()
    for number in (1, 2):
        (node.path / "cuts" / f"{number:016d}.json").unlink()
    with pytest.raises(Truncated, match="cut 2"):
        ingest()


def test_taken_cuts_may_be_deleted(node: NodeBuilder, tables: Path, ingest: Ingest) -> None:
    node.create()
    node.insert("orders", orders(1))
    node.cut()
    node.cut()
    ingest()
    node.insert("orders", orders(2))
    node.cut()
    for number in (1, 2):
        (node.path / "cuts" / f"{number:016d}.json").unlink()
    ingest()
    assert rows_of(tables / "orders") == node.expected("orders")


def test_a_job_that_loses_the_commit_finds_its_cuts_taken(node: NodeBuilder, tables: Path, ingest: Ingest) -> None:
    node.create()
    node.insert("orders", orders(1, 2, 3))
    node.cut()
    raced: list[Step] = []

    def another_job_is_faster(step: Step) -> None:
        if step is Step.SEALED and not raced:
            raced.append(step)
            shutil.rmtree(tables / LOCKS)  # as on a machine whose locks we do not see
            assert ingest().rows_added == 3

    report = ingest(on_step=another_job_is_faster)
    assert raced
    assert report.rows_added == 0
    assert rows_of(tables / "orders") == node.expected("orders")
    assert len(list((tables / "orders").glob("cut-*"))) == 1
    assert not list((tables / "orders" / "_attempts").iterdir())


def test_a_cut_taken_by_a_faster_job_after_the_listing_is_no_restored_node(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.insert("orders", orders(1))
    node.cut()

    def another_cut_is_made_and_taken(step: Step) -> None:
        if step is Step.SEALED and node.number == 1:
            shutil.rmtree(tables / LOCKS)
            node.insert("orders", orders(2))
            node.cut()
            ingest()

    ingest(on_step=another_cut_is_made_and_taken)
    assert rows_of(tables / "orders") == node.expected("orders")


def test_what_a_failed_attempt_left_goes_once_it_is_old(node: NodeBuilder, tables: Path, ingest: Ingest) -> None:
    node.create()
    node.insert("orders", orders(1))
    node.cut()

    def fail(step: Step) -> None:
        if step is Step.SEALED:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(on_step=fail)
    [left] = (tables / "orders").glob("cut-*")
    ingest()
    assert left.exists()
    ingest(now_s=left.stat().st_mtime + 7_200)
    assert not left.exists()
    assert rows_of(tables / "orders") == node.expected("orders")


def test_duckdb_reads_the_active_files_as_they_are(node: NodeBuilder, tables: Path, ingest: Ingest) -> None:
    node.create()
    node.create_partition("orders", "eu")
    node.insert("orders", orders(*range(50)))
    node.upsert("orders", orders(3, 4, amount=9.5), "eu")
    node.cut()
    ingest()
    files = DeltaTable(str(tables / "orders")).file_uris()
    found = duckdb.read_parquet(files, hive_partitioning=True).to_arrow_table().to_pylist()
    assert ordered(found) == node.expected("orders")


TYPES: Mapping[str, tuple[pa.DataType, Any]] = {
    "flag": (pa.bool_(), True),
    "tiny": (pa.int8(), -5),
    "short": (pa.int16(), -500),
    "whole": (pa.int32(), 1 << 20),
    "byte": (pa.uint8(), 200),
    "port": (pa.uint16(), 60_000),
    "count": (pa.uint32(), 4_000_000_000),
    "huge": (pa.uint64(), (1 << 64) - 1),
    "ratio": (pa.float32(), 0.5),
    "price": (pa.decimal128(10, 2), Decimal("12.34")),
    "day": (pa.date32(), date(2024, 2, 29)),
    "seen": (pa.timestamp("ms"), datetime(2024, 2, 29, 12, 30, 1, 5000)),  # noqa: DTZ001 - the column has no zone
    "text": (pa.large_string(), "naïve"),
    "blob": (pa.binary(), b"\x00\xff"),
    "digest": (pa.binary(4), b"abcd"),
    "tags": (pa.list_(pa.string()), ["a", "b"]),
    "point": (pa.struct([("x", pa.float64()), ("y", pa.float64())]), {"x": 1.0, "y": 2.0}),
    "kind": (pa.dictionary(pa.int32(), pa.string()), "k"),
}


def test_every_supported_type_survives_table_and_data_source(
    spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create(schema=pa.schema([ORDERS.field("id"), *(pa.field(name, kind) for name, (kind, _) in TYPES.items())]))
    row: dict[str, Any] = {"id": 1, **{name: value for name, (_, value) in TYPES.items()}}
    node.insert("orders", [row, {"id": 2, **dict.fromkeys(TYPES)}])
    node.delete("orders", [7])
    node.cut()
    ingest()
    frame = spark_sink.read_table(spark, tables / "orders")
    source = spark.read.format("streamingnode").option("node", str(node.path)).option("subscribe", "orders").load()
    assert source.schema.simpleString() == frame.schema.simpleString()
    for found in (frame, source):
        first, second = (each.asDict(recursive=True) for each in found.orderBy("id").collect())
        assert {name: first[name] for name in row} == row
        assert all(second[name] is None for name in TYPES)
