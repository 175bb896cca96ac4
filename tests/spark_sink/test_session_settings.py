"""Rows are those of the collection whatever a Spark session is set to, which may be for other
files.
"""

import datetime as dt
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

import spark_sink
from spark_sink.columns import table_schema
from spark_sink.ingestion import IngestJob
from streamingnode.schema import AnyField
from tests.spark_sink.node_builder import NodeBuilder, Value, extreme
from wal.errors import Corrupt, StorageFailed

pytestmark = pytest.mark.spark

_COLUMNS: list[AnyField] = [
    pa.field("id", pa.int64()),
    pa.field("day", pa.date32()),
    pa.field("at", pa.timestamp("us")),
    pa.field("zoned", pa.timestamp("us", "UTC")),
    pa.field("text", pa.string()),
    pa.field("blob", pa.binary()),
    pa.field("price", pa.decimal128(10, 2)),
    pa.field("tags", pa.list_(pa.string())),
    pa.field("point", pa.struct([pa.field("x", pa.float64()), pa.field("day", pa.date32())])),
]
SCHEMA = pa.schema(_COLUMNS)
DAYS = (dt.date(1, 1, 3), dt.date(1500, 3, 1), dt.date(1883, 11, 18), dt.date(2024, 2, 29))
"""Of the calendar that Spark 2 had until 1582, and of the time zones there were until 1900."""

READ: tuple[Mapping[str, str], ...] = (
    {},
    {"spark.sql.parquet.datetimeRebaseModeInRead": "LEGACY"},
    {"spark.sql.parquet.datetimeRebaseModeInRead": "EXCEPTION"},
    {"spark.sql.parquet.int96RebaseModeInRead": "LEGACY"},
    {
        "spark.sql.parquet.datetimeRebaseModeInRead": "LEGACY",
        "spark.sql.parquet.enableVectorizedReader": "false",
        "spark.sql.parquet.recordLevelFilter.enabled": "true",
    },
    {
        "spark.sql.parquet.datetimeRebaseModeInRead": "LEGACY",
        "spark.sql.sources.useV1SourceList": "",
        "spark.sql.parquet.aggregatePushdown": "true",
    },
    {"spark.sql.files.ignoredPathSegmentRegex": "parquet$"},
    {"fs.defaultFS": "hdfs://nowhere:1"},
    {
        "spark.sql.parquet.mergeSchema": "true",
        "spark.sql.parquet.respectSummaryFiles": "true",
        "spark.sql.files.archive.reader.enabled": "true",
    },
    {
        "spark.sql.parquet.binaryAsString": "true",
        "spark.sql.parquet.int96AsTimestamp": "false",
        "spark.sql.parquet.int96TimestampConversion": "true",
        "spark.sql.parquet.inferTimestampNTZ.enabled": "false",
        "spark.sql.parquet.fieldId.read.enabled": "true",
        "spark.sql.legacy.parquet.nanosAsLong": "true",
        "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    },
    {
        "spark.sql.caseSensitive": "true",
        "spark.sql.ansi.enabled": "false",
        "spark.sql.timestampType": "TIMESTAMP_NTZ",
        "spark.sql.parser.quotedRegexColumnNames": "true",
    },
    {"spark.sql.session.timeZone": "America/Los_Angeles"},
    {"spark.sql.session.timeZone": "Asia/Tokyo", "spark.sql.datetime.java8API.enabled": "true"},
    {"spark.sql.execution.arrow.useLargeVarTypes": "true"},
)

IGNORED = {
    "spark.sql.files.ignoreCorruptFiles": "true",
    "spark.sql.files.ignoreMissingFiles": "true",
    "parquet.page.verify-checksum.enabled": "false",
}

CONFIGURED: Mapping[str, Mapping[str, str]] = {
    "other calendars": {
        "spark.sql.parquet.datetimeRebaseModeInRead": "LEGACY",
        "spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY",
        "spark.sql.parquet.int96RebaseModeInWrite": "LEGACY",
        "spark.sql.session.timeZone": "America/Los_Angeles",
    },
    "other types": {
        "spark.sql.parquet.outputTimestampType": "INT96",
        "spark.sql.parquet.writeLegacyFormat": "true",
        "spark.sql.caseSensitive": "false",
    },
    "other files": {
        "spark.sql.files.maxRecordsPerFile": "1",
        "spark.sql.parquet.compression.codec": "gzip",
        "spark.sql.files.ignoredPathSegmentRegex": "parquet$",
        "spark.sql.sources.partitionOverwriteMode": "DYNAMIC",
        "parquet.writer.version": "v2",
        "parquet.enable.dictionary": "false",
        "parquet.page.write-checksum.enabled": "false",
        "fs.defaultFS": "hdfs://nowhere:1",
    },
}
"""What the configuration of a cluster may say."""


def row(number: int, day: dt.date) -> dict[str, Any]:
    # the column has no zone
    at = dt.datetime(day.year, day.month, day.day, 12, 30, 1, 5001)  # noqa: DTZ001
    return {
        "id": number,
        "day": day,
        "at": at,
        "zoned": at.replace(tzinfo=dt.UTC),
        "text": "naïve",
        "blob": b"\x00\xff",
        "price": 12,
        "tags": ["a", None],
        "point": {"x": None, "day": day},
    }


def two_cuts(path: Path) -> NodeBuilder:
    """Return a node whose first cut fills two partitions; its second changes rows of one of
    them.
    """
    node = NodeBuilder(path)
    node.create(schema=SCHEMA, shards=1)
    node.create_partition("orders", "eu")
    node.insert("orders", [row(number, day) for number, day in enumerate(DAYS)])
    node.insert("orders", [row(10 + number, day) for number, day in enumerate(DAYS)], "eu")
    node.cut()
    return node


def change(node: NodeBuilder) -> None:
    node.upsert("orders", [row(1, dt.date(1400, 5, 5))])
    node.delete("orders", [2])
    node.cut()


def as_expected(rows: list[dict[str, Value]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=table_schema(SCHEMA)).sort_by("_offset")


def read(frame: DataFrame, like: pa.Table) -> pa.Table:
    return (
        frame.toArrow()
        .select(like.column_names)
        .cast(like.schema)
        .combine_chunks()
        .sort_by("_offset")
    )


def with_settings(spark: SparkSession, settings: Mapping[str, str]) -> SparkSession:
    """Return a session of the caller's own."""
    of_caller = spark.newSession()
    for name, value in settings.items():
        of_caller.conf.set(name, value)
    return spark_sink.register(of_caller)


@pytest.fixture(scope="module")
def filled(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[NodeBuilder, Path]:
    """Return a node and its table, of whose files one is the node's and one Spark's."""
    where = tmp_path_factory.mktemp("settings")
    node = two_cuts(where / "data")
    assert IngestJob(spark, node.path, where / "tables").run().tables[0].road == "copy"
    change(node)
    assert IngestJob(spark, node.path, where / "tables").run().tables[0].road == "spark"
    return node, where / "tables" / "orders"


@pytest.mark.parametrize("settings", READ, ids=lambda settings: ", ".join(settings) or "none")
def test_rows_are_the_collections_whatever_the_session_of_the_reader_says(
    spark: SparkSession, filled: tuple[NodeBuilder, Path], settings: Mapping[str, str]
) -> None:
    node, table = filled
    expected = as_expected(node.expected("orders"))
    of_caller = with_settings(spark, settings)
    frame = spark_sink.read_table(of_caller, table)
    source = (
        of_caller.read.format("streamingnode")
        .options(node=str(node.path), subscribe="orders")
        .load()
    )
    assert read(frame, expected).equals(expected)
    assert read(source, expected).equals(expected)
    assert frame.where("day = date'1500-03-01'").count() == 1
    assert (frame.count(), frame.where("day < date'1582-10-15'").count()) == (expected.num_rows, 4)


def test_a_changed_or_emptied_or_missing_file_is_an_error_also_where_the_session_ignores_those(
    spark: SparkSession, tmp_path: Path
) -> None:
    node = two_cuts(tmp_path / "data")
    IngestJob(spark, node.path, tmp_path / "tables").run()
    table = tmp_path / "tables" / "orders"
    of_caller = with_settings(spark, IGNORED)
    file = next(table.rglob("_partition=eu/*.parquet"))
    whole = file.read_bytes()
    group = pq.read_metadata(file).row_group(0)
    changed = bytearray(whole)
    first = group.column(0)
    end = first.dictionary_page_offset or first.data_page_offset
    changed[end + first.total_compressed_size - 1] ^= 1  # the last byte of its pages
    file.write_bytes(changed)
    with pytest.raises(Exception, match="CRC checksum verification failed"):
        spark_sink.read_table(of_caller, table).toArrow()
    file.write_bytes(b"")
    with pytest.raises(Corrupt, match="has 0 bytes, its table says"):
        spark_sink.read_table(of_caller, table)
    file.write_bytes(whole)
    frame = spark_sink.read_table(of_caller, table)
    file.unlink()
    with pytest.raises(Exception, match=r"FILE_NOT_EXIST|does not exist"):
        frame.toArrow()
    with pytest.raises(StorageFailed, match="is missing from its table"):
        spark_sink.read_table(of_caller, table)


@contextmanager
def configured(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Give Spark a configuration as `spark-defaults.conf` does: new sessions begin with it."""
    context = spark.sparkContext._jsc.sc()
    of_spark = context.conf()
    of_hadoop = context.hadoopConfiguration()
    before = {name: of_hadoop.get(name) for name in settings if not name.startswith("spark.")}
    for name, value in settings.items():
        (of_hadoop if name in before else of_spark).set(name, value)
    try:
        yield
    finally:
        for name in settings:
            if name not in before:
                of_spark.remove(name)
            elif before[name] is None:
                of_hadoop.unset(name)
            else:
                of_hadoop.set(name, before[name])


def shapes(table: Path) -> list[object]:
    """Return how the files of a table are written, apart from their values."""
    found = []
    for uri in DeltaTable(str(table)).file_uris():
        path = uri.removeprefix("file://")
        footer = pq.read_metadata(path)
        first = pq.read_table(path)
        group = footer.row_group(0)
        columns = [group.column(index) for index in range(group.num_columns)]
        stored = [
            (each.path_in_schema, each.physical_type, each.compression, each.encodings)
            for each in columns
        ]
        found.append(
            (extreme(first, "id", min), footer.num_rows, sorted(footer.metadata or {}), stored)
        )
    return sorted(found, key=str)


@pytest.mark.parametrize("name", CONFIGURED)
def test_an_ingest_reads_and_writes_the_same_files_whatever_sparks_configuration_says(
    spark: SparkSession, filled: tuple[NodeBuilder, Path], tmp_path: Path, name: str
) -> None:
    node = two_cuts(tmp_path / "data")
    (_, usual) = filled
    IngestJob(spark, node.path, tmp_path / "tables").run()
    change(node)
    with configured(spark, CONFIGURED[name]):
        assert IngestJob(spark, node.path, tmp_path / "tables").run().tables[0].road == "spark"
    table = tmp_path / "tables" / "orders"
    expected = as_expected(node.expected("orders"))
    written = DeltaTable(str(table)).to_pyarrow_table()
    assert (
        written.select(expected.column_names)
        .cast(expected.schema)
        .sort_by("_offset")
        .equals(expected)
    )
    assert shapes(table) == shapes(usual)
