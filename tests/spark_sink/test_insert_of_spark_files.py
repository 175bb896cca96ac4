"""Parquet as Spark writes it by default goes into a collection: times of INT96, and Spark's footer."""

import datetime as dt
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from streamingnode.cli.rows_in import open_rows
from streamingnode.rows import row_shape, to_batches

pytestmark = pytest.mark.spark

ROWS = """
    SELECT id, timestamp '9999-12-31 23:59:59.999999' AS last, timestamp '1600-01-01 01:02:03.456789' AS early,
    array(timestamp '0001-01-02 00:00:00', null) AS list, timestamp_ntz '2026-01-01 00:00:00.5' AS naive,
    named_struct('at', timestamp '2026-01-01 00:00:00.000001', 'word', concat('word ', id)) AS struct
    FROM range(3)
"""


def test_times_that_spark_writes_by_default_are_the_instants_that_they_were(
    spark: SparkSession, tmp_path: Path
) -> None:
    spark.sql(ROWS).coalesce(1).write.parquet(str(tmp_path / "written"))
    [file] = (tmp_path / "written").glob("*.parquet")
    with open_rows(str(file), None) as source:
        aware = pa.timestamp("us", "UTC")
        inferred = source.infer_schema()
        assert [inferred.field(name).type for name in ("last", "early", "naive")] == [aware, aware, pa.timestamp("us")]
        schema = pa.schema(
            [
                ("id", pa.int64()),
                ("last", aware),
                ("early", pa.timestamp("us", "Asia/Tokyo")),
                ("list", pa.list_(aware)),
                ("naive", pa.timestamp("us")),
                ("struct", pa.struct([("at", aware), ("word", pa.string())])),
            ]
        )
        [batch] = source.batches(schema)
        [rows] = to_batches(batch.rows, row_shape(schema, primary_key="id"))
    assert rows.to_pylist()[1] == {
        "id": 1,
        "last": dt.datetime(9999, 12, 31, 23, 59, 59, 999999, dt.UTC),
        "early": dt.datetime(1600, 1, 1, 1, 2, 3, 456789, dt.UTC),
        "list": [dt.datetime(1, 1, 2, tzinfo=dt.UTC), None],
        "naive": dt.datetime(2026, 1, 1, 0, 0, 0, 500000),  # noqa: DTZ001
        "struct": {"at": dt.datetime(2026, 1, 1, 0, 0, 0, 1, dt.UTC), "word": "word 1"},
    }
