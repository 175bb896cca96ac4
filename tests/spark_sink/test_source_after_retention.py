"""The data source goes on from the collection's table once retention has removed the first cuts."""

import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, SparkSession

import spark_sink
import streamingnode as sn
from flusher.directory import CutLog, cut_numbers, file_paths, manifest_path
from tests.spark_sink.conftest import Ingest
from tests.spark_sink.node_builder import NodeBuilder, ordered, orders
from tests.spark_sink.test_ingest_job import act_at_random
from tests.spark_sink.test_snapshot_of_table import KEEPING, given_up

pytestmark = pytest.mark.spark


def source(spark: SparkSession, node: Path, name: str = "orders") -> DataFrame:
    return (
        spark.read.format("streamingnode")
        .option("node", str(node))
        .option("subscribe", name)
        .load()
    )


def found(frame: DataFrame) -> list[dict[str, Any]]:
    return ordered(row.asDict() for row in frame.collect())


def give_up(node: Path, below: int) -> None:
    """Remove cuts as retention does, oldest first."""
    cuts = CutLog(node)
    for number in [each for each in cut_numbers(node) if each < below]:
        paths = file_paths(cuts.read(number).manifest)
        (node / manifest_path(number)).unlink()
        for path in paths:
            (node / path).unlink(missing_ok=True)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_was_given_up_the_rows_are_those_at_the_newest_cut(
    seed: int, spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    chance = random.Random(seed)
    for name in ("orders", "stock"):
        node.create(name, shards=chance.randint(1, 3))
    for _ in range(2):
        for _ in range(chance.randint(1, 2)):
            for _ in range(chance.randint(0, 8)):
                act_at_random(node, chance)
            node.cut()
        ingest()
        give_up(node.path, chance.randint(node.number - 1, node.number))
        for _ in range(chance.randint(0, 2)):  # cuts that no table has taken
            for _ in range(chance.randint(1, 8)):
                act_at_random(node, chance)
            node.cut()
        for name in node.collections:
            assert found(source(spark, node.path, name)) == node.expected(name)


def test_deletes_after_the_table_find_keys_that_the_table_holds_in_another_type(
    spark: SparkSession, tables: Path, tmp_path: Path
) -> None:
    place = tmp_path / "data"
    columns: dict[str, pa.DataType] = {"at": pa.timestamp("ms", "Europe/Berlin"), "n": pa.int64()}
    moments = [datetime(2024, 2, 29, 12, 30, second, tzinfo=UTC) for second in range(4)]
    with sn.sync.open_node(place, **KEEPING) as node:
        node.create_collection("orders", pa.schema(columns), primary_key="at", shards=2)
        node.insert("orders", [{"at": at, "n": 1} for at in moments])
        node.flush()
        spark_sink.ingest(spark, node, tables)
        node.upsert("orders", [{"at": moments[1], "n": 2}])
        node.delete("orders", [moments[2]])
        node.flush()
    given_up(place, 2)
    with sn.sync.open_node(place, **KEEPING) as node:
        expected = {(row["at"], row["n"]) for row in node.snapshot("orders").to_pylist()}
    assert expected == {(moments[0], 1), (moments[1], 2), (moments[3], 1)}
    frame = source(spark, place)
    at = frame.selectExpr("unix_seconds(at) as s", "n").collect()
    assert {(datetime.fromtimestamp(row.s, UTC), row.n) for row in at} == expected
    narrow = spark.read.format("streamingnode").option("node", str(place))
    assert narrow.option("subscribe", "orders").schema("n bigint").load().count() == len(expected)


def test_what_is_wrong_with_the_table_is_the_error(
    spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.insert("orders", orders(1, 2))
    node.cut()
    ingest()
    node.insert("orders", orders(3))
    node.cut()
    give_up(node.path, 2)
    frame = source(spark, node.path)
    assert found(frame) == node.expected("orders")
    elsewhere = tables.with_name("elsewhere")
    tables.rename(elsewhere)
    with pytest.raises(
        AnalysisException, match=r"which is not there — put it back, or run an ingest"
    ):
        source(spark, node.path)
    with pytest.raises(PythonException, match=r"is missing from its table — read again"):
        frame.count()
    elsewhere.rename(tables)
    for lease in (node.path / "leases").iterdir():
        lease.unlink()
    with pytest.raises(AnalysisException, match="cut 1 is no longer kept"):
        source(spark, node.path)
