"""What an ingest finds where it is sent: tables of others, links, what is left of a dropped
collection, a backup.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession

import spark_sink
from spark_sink.errors import TableAhead
from spark_sink.ingestion import IngestReport
from spark_sink.source import StreamingNodeSource
from tests.spark_sink.node_builder import NodeBuilder, orders
from tests.spark_sink.table_reading import lease_of
from wal.errors import InvalidArgument

pytestmark = pytest.mark.spark


@pytest.fixture
def one_row(node: NodeBuilder) -> NodeBuilder:
    node.create()
    node.insert("orders", orders(1))
    node.cut()
    return node


def ingest(node: Path, tables: Path) -> IngestReport:
    return spark_sink.ingest(None, node, tables, request_cut=False)


def test_a_table_of_somebody_else_holds_no_ingest_up_whatever_features_it_has(
    one_row: NodeBuilder, tables: Path
) -> None:
    features = {"delta.enableDeletionVectors": "true"}
    write_deltalake(str(tables / "mine"), pa.table({"a": [1]}), configuration=features)
    assert ingest(one_row.path, tables).rows_added == 1


def test_the_lease_of_a_table_behind_a_link_goes_with_its_collection(
    one_row: NodeBuilder, tables: Path
) -> None:
    large = tables.with_name("large")
    large.mkdir()
    tables.mkdir()
    (tables / "orders").symlink_to(large)
    ingest(one_row.path, tables)
    assert lease_of(one_row, large).cut == 1
    one_row.drop("orders")
    one_row.cut()
    ingest(one_row.path, tables)
    assert not list((one_row.path / "leases").iterdir())


def test_a_collection_that_a_restored_node_has_again_is_told_when_its_table_was_retired(
    one_row: NodeBuilder, tables: Path, tmp_path: Path
) -> None:
    """It had no table from then on, and nobody heard of it."""
    ingest(one_row.path, tables)
    one_row.copy(tmp_path / "restored")
    one_row.drop("orders")
    one_row.cut()
    [retired] = ingest(one_row.path, tables).tables
    with pytest.raises(TableAhead, match="has taken cut 2, the node's newest is 1"):
        ingest(tmp_path / "restored", tables)
    Path(retired.path).rename(tmp_path / "away")
    assert ingest(tmp_path / "restored", tables).rows_added == 1


TAKES_A_PLACE: Mapping[str, Callable[[SparkSession, NodeBuilder, str], object]] = {
    "tables of ingest": lambda spark, node, place: spark_sink.ingest(spark, node.path, place),
    "node of ingest": lambda spark, _, place: spark_sink.ingest(spark, place),
    "tables of ingest_every": lambda _, node, place: spark_sink.ingest_every(node.path, place),
    "node of ingest_every": lambda _, __, place: spark_sink.ingest_every(place),
    "read_table": lambda spark, _, place: spark_sink.read_table(spark, place),
    "read_tables": lambda spark, _, place: spark_sink.read_tables(spark, place, ["orders"]),
    "data source": lambda _, __, place: StreamingNodeSource(
        {"node": place, "subscribe": "orders"}
    ).schema(),
}


@pytest.mark.parametrize("place", ["s3a://bucket/tables", "file:///srv/tables", "hdfs:/tables", ""])
@pytest.mark.parametrize("name", TAKES_A_PLACE)
def test_what_is_no_path_is_refused_and_nothing_is_made_of_its_name(
    spark: SparkSession,
    one_row: NodeBuilder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    place: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidArgument, match=r"is an address|names no .* — give a path"):
        TAKES_A_PLACE[name](spark, one_row, place)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["of%20monday", "a\\b", "a\tb"])
def test_a_path_that_delta_takes_for_another_is_refused_at_once(
    one_row: NodeBuilder, tables: Path, name: str
) -> None:
    with pytest.raises(InvalidArgument, match="in a path — name another directory"):
        ingest(one_row.path, tables / name)
    assert not tables.exists()


def test_a_backup_is_refused_because_a_lease_would_change_it(
    one_row: NodeBuilder, tables: Path
) -> None:
    (one_row.path / "backup.json").touch()
    with pytest.raises(
        InvalidArgument, match="is a backup, which stays as it was made — restore it"
    ):
        ingest(one_row.path, tables)
    assert not (one_row.path / "leases").exists()
