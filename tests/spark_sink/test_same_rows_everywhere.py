"""Table, data source and other engines show the same rows, of every type."""

from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import spark_sink
from tests.spark_sink.conftest import Ingest
from tests.spark_sink.node_builder import ORDERS, NodeBuilder, ordered, orders

pytestmark = pytest.mark.spark


def test_duckdb_reads_the_active_files_as_they_are(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
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
    "ratio": (pa.float32(), 0.5),
    "price": (pa.decimal128(10, 2), Decimal("12.34")),
    "day": (pa.date32(), date(2024, 2, 29)),
    # the column has no zone
    "seen": (pa.timestamp("ms"), datetime(2024, 2, 29, 12, 30, 1, 5000)),  # noqa: DTZ001
    "text": (pa.large_string(), "naïve"),
    "blob": (pa.binary(), b"\x00\xff"),
    "digest": (pa.large_binary(), b"abcd"),
    "tags": (pa.list_(pa.string()), ["a", "b"]),
    "point": (pa.struct([("x", pa.float64()), ("y", pa.float64())]), {"x": 1.0, "y": 2.0}),
    "heard": (pa.large_list(pa.timestamp("us")), [datetime(2024, 2, 29, 12, 30, 1, 5001)]),  # noqa: DTZ001
}


def test_every_supported_type_survives_table_and_data_source(
    spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create(
        schema=pa.schema(
            [ORDERS.field("id"), *(pa.field(name, kind) for name, (kind, _) in TYPES.items())]
        )
    )
    row: dict[str, Any] = {"id": 1, **{name: value for name, (_, value) in TYPES.items()}}
    node.insert("orders", [row, {"id": 2, **dict.fromkeys(TYPES)}])
    node.delete("orders", [7])
    node.cut()
    ingest()
    frame = spark_sink.read_table(spark, tables / "orders")
    source = (
        spark.read.format("streamingnode")
        .option("node", str(node.path))
        .option("subscribe", "orders")
        .load()
    )
    assert source.schema.simpleString() == frame.schema.simpleString()
    for found in (frame, source):
        first, second = (each.asDict(recursive=True) for each in found.orderBy("id").collect())
        assert {name: first[name] for name in row} == row
        assert all(second[name] is None for name in TYPES)
