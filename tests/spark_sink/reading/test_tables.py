"""Tables as of a tick, several at one cut, and the data source's options."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, DataFrameReader, SparkSession

import spark_sink
from spark_sink.reading.tables import newest_common
from spark_sink.table.table_model import CommitNote, TableVersion
from tests.spark_sink.conftest import Ingest
from tests.spark_sink.node_builder import NodeBuilder, Value, ordered, orders
from wal.errors import InvalidArgument, Truncated


def version(number: int, first_cut: int, cut: int) -> TableVersion:
    note = CommitNote(node_id="n", collection_id=1, first_cut=first_cut, cut=cut, tick=cut * 10, crc32c=0)
    return TableVersion(number, note)


ORDERS = [version(2, 3, 5), version(1, 1, 2), version(0, 0, 0)]
"""Took 1..2, then 3..5 in one commit; newest first."""

STOCK = [version(3, 5, 5), version(2, 4, 4), version(1, 3, 3), version(0, 0, 0)]
"""Took cut after cut; unchanged by 1 and 2."""


@pytest.mark.parametrize(
    "tick, cut, versions",
    [
        (None, 5, {"orders": 2, "stock": 3}),
        (50, 5, {"orders": 2, "stock": 3}),
        (49, 2, {"orders": 1, "stock": 0}),  # 3 and 4 are hidden inside one commit of orders
        (9, 0, {"orders": 0, "stock": 0}),
    ],
)
def test_tables_meet_at_the_newest_cut_all_have(tick: int | None, cut: int, versions: dict[str, int]) -> None:
    meeting = newest_common({"orders": ORDERS, "stock": STOCK}, tick)
    assert meeting is not None
    assert (meeting.cut, meeting.tick, meeting.versions) == (cut, cut * 10, versions)


def test_tables_that_share_no_cut_do_not_meet() -> None:
    assert newest_common({"orders": [version(0, 1, 2)], "stock": [version(0, 3, 4)]}, None) is None


def test_a_table_that_lags_holds_the_others_back() -> None:
    meeting = newest_common({"orders": ORDERS[1:], "stock": STOCK}, None)
    assert meeting is not None
    assert meeting.cut == 2


def found(frame: DataFrame) -> list[dict[str, Value]]:
    return ordered(row.asDict() for row in frame.collect())


@pytest.fixture
def three_cuts(node: NodeBuilder, ingest: Ingest) -> list[int]:
    """Return the ticks of three cuts that insert, delete and upsert, each ingested by itself."""
    node.create(shards=2)
    node.create("stock")
    node.insert("orders", orders(*range(20)))
    ticks = []
    changes: list[Callable[[], None]] = [
        lambda: None,
        lambda: node.delete("orders", [3, 4]),
        lambda: node.upsert("orders", orders(5, 30)),
    ]
    for change in changes:
        change()
        node.cut()
        ingest()
        ticks.append(node.cut_tick)
    return ticks


@pytest.mark.spark
def test_tables_and_source_show_the_state_at_a_tick(
    spark: SparkSession, node: NodeBuilder, tables: Path, three_cuts: list[int]
) -> None:
    expected = ordered(node.history[2]["orders"])
    assert found(spark_sink.read_table(spark, tables / "orders", as_of_tick=three_cuts[1])) == expected
    together = spark_sink.read_tables(spark, tables, ["orders", "stock"], as_of_tick=three_cuts[2] - 1)
    assert (together.cut, together.tick, found(together["orders"])) == (2, three_cuts[1], expected)
    for option, value in (("asOfCut", 2), ("asOfTick", three_cuts[1])):
        assert found(source(spark, node).option(option, value).load()) == expected
    assert spark_sink.read_table(spark, tables / "orders", as_of_tick=three_cuts[0] - 1).count() == 0
    with pytest.raises(Truncated):
        spark_sink.read_table(spark, tables / "orders", as_of_tick=-1)
    with pytest.raises(InvalidArgument, match="is no table"):
        spark_sink.read_table(spark, tables / "nothing")


@pytest.mark.spark
def test_source_reads_only_the_columns_asked_for(spark: SparkSession, node: NodeBuilder, three_cuts: list[int]) -> None:
    narrow = source(spark, node).option("columns", "amount, _offset").load()
    assert narrow.columns == ["amount", "_offset"]
    assert narrow.count() == len(node.expected("orders"))


@pytest.mark.spark
def test_a_filtered_query_does_not_narrow_the_next(
    spark: SparkSession, node: NodeBuilder, three_cuts: list[int]
) -> None:
    frame = source(spark, node).load()
    assert frame.where("id = 30").count() == 1
    assert frame.count() == len(node.expected("orders"))


@pytest.mark.spark
def test_a_segment_that_is_gone_or_damaged_fails_the_read(
    spark: SparkSession, node: NodeBuilder, three_cuts: list[int]
) -> None:
    frame = source(spark, node).load()
    path = next((node.path / "segments").rglob("*.parquet"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PythonException, match=f"{path.name} has .* bytes, its cut says"):
        frame.count()
    path.unlink()
    with pytest.raises(PythonException, match=f"{path.name} is missing, and cut . names it"):
        frame.count()
    for manifest in sorted((node.path / "cuts").iterdir()):  # as retention does: oldest first, manifests before files
        named = path.name in manifest.read_text("utf-8")
        manifest.unlink()
        if named:
            break
    with pytest.raises(PythonException, match="no longer kept"):
        frame.count()


@pytest.mark.spark
def test_source_names_what_is_wrong(spark: SparkSession, node: NodeBuilder, three_cuts: list[int]) -> None:
    for bad, message in (
        (source(spark, node).option("subscribe", "nothing"), "no collection 'nothing'"),
        (source(spark, node).option("columns", "price"), "no column price"),
        (source(spark, node).option("asOfCut", "two"), "whole number"),
        (source(spark, node).option("node", str(node.path / "none")), "no node directory"),
    ):
        with pytest.raises(AnalysisException, match=message):
            bad.load()


def source(spark: SparkSession, node: NodeBuilder) -> DataFrameReader:
    return spark.read.format("streamingnode").option("node", str(node.path)).option("subscribe", "orders")
