"""Parquet as Spark writes it goes in: times of INT96, its footer, and what it marks as old."""

import datetime as dt
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from interceptors.errors import SchemaMismatch
from streamingnode.cli.rows_in import open_rows
from streamingnode.rows import row_shape, to_batches

pytestmark = pytest.mark.spark

ROWS = """
    SELECT id, timestamp '9999-12-31 23:59:59.999999' AS last,
    timestamp '1600-01-01 01:02:03.456789' AS early,
    array(timestamp '0001-01-02 00:00:00', null) AS list,
    timestamp_ntz '2026-01-01 00:00:00.5' AS naive,
    named_struct('at', timestamp '2026-01-01 00:00:00.000001', 'word', concat('word ', id))
    AS struct
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
        assert [inferred.field(name).type for name in ("last", "early", "naive")] == [
            aware,
            aware,
            pa.timestamp("us"),
        ]
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


OLD_ROWS = """
    SELECT id, named_struct('at', array(null, {time})) AS struct, {day} AS day,
    timestamp_ntz '1500-01-01 00:00:00' AS naive
    FROM range({first}, 4)
"""


@pytest.mark.parametrize("kind", ["INT96", "TIMESTAMP_MICROS"])
def test_what_spark_writes_in_the_hybrid_calendar_goes_in_since_both_are_the_same_and_else_not(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.parquet.outputTimestampType", kind)
    modern = ("timestamp '1900-01-01 00:00:00'", "date '1582-10-15'")
    cases = {
        "modern": modern,
        "day": (modern[0], "date '1582-10-04'"),
        "time": ("timestamp '1582-10-04 23:59:59'", modern[1]),
    }

    def written(mode: str, zone: str, name: str) -> str:
        session.conf.set("spark.sql.session.timeZone", zone)
        for setting in ("datetime", "int96"):
            session.conf.set(f"spark.sql.parquet.{setting}RebaseModeInWrite", mode)
        early = session.sql(OLD_ROWS.format(time=cases[name][0], day=cases[name][1], first=2))
        late = session.sql(OLD_ROWS.format(time=modern[0], day=modern[1], first=0)).limit(2)
        to = tmp_path / f"{mode} {zone} {name}".replace("/", " ")
        late.union(early).coalesce(1).write.parquet(str(to))
        [file] = to.glob("*.parquet")
        return str(file)

    for name in cases:
        with open_rows(written("CORRECTED", "Asia/Tokyo", name), None) as source:
            [batch] = source.batches(source.infer_schema())
            assert len(batch.rows) == 4
    for zone in ("UTC", "America/New_York"):
        with open_rows(written("LEGACY", zone, "modern"), None) as source:
            [batch] = source.batches(source.infer_schema())
            assert len(batch.rows) == 4
        for name, column in (("day", "day"), ("time", "struct")):
            with (
                open_rows(written("LEGACY", zone, name), None) as source,
                pytest.raises(SchemaMismatch, match="RebaseModeInWrite=CORRECTED") as caught,
            ):
                source.infer_schema()
            assert (caught.value.column, caught.value.row) == (column, 3)
