"""Rows as Spark frames: read natively from Parquet files, and without those that deletes removed.

In: paths grouped by partition, and a schema; never a guess from the first file. Out: frames with the table's columns.
A delete removes every row of its key with a smaller offset, so only the largest offset per key matters.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.types import LongType, StructField, StructType

from spark_sink.columns import OFFSET, PARTITION

DELETED_BELOW = "_deleted_below"

BROADCAST_ROWS_MAX = 1_000_000
"""Deletes up to this many are sent to every task (about 100 bytes each in the JVM); beyond, Spark sorts and merges."""


def column(name: str) -> Column:
    """Return the column of exactly this name, whatever characters it has."""
    return F.col("`" + name.replace("`", "``") + "`")


def read_rows(spark: SparkSession, schema: StructType, paths: Mapping[str, Sequence[str]]) -> DataFrame:
    """Return the rows of Parquet files given by partition name, with the columns of `schema` (the table's)."""
    in_file = StructType([field for field in schema.fields if field.name != PARTITION])
    frames = [
        spark.read.schema(in_file)
        .option("recursiveFileLookup", "true")
        .parquet(*files)
        .withColumn(PARTITION, F.lit(name))
        for name, files in paths.items()
        if files
    ]
    if not frames:
        return spark.createDataFrame([], schema)
    return reduce(DataFrame.unionAll, frames).select([column(field.name) for field in schema.fields])


def read_deletes(spark: SparkSession, schema: StructType, key: str, paths: Iterable[str], *, rows: int) -> DataFrame:
    """Return each deleted key with the offset below which its rows are gone; `rows` is how many rows the files hold.

    Few of them are gathered in one task, without a shuffle, and marked to be sent to every task that joins them.
    """
    in_file = StructType([schema[key], StructField(OFFSET, LongType())])
    few = rows <= BROADCAST_ROWS_MAX
    deletes = spark.read.schema(in_file).parquet(*paths)
    largest = (deletes.coalesce(1) if few else deletes).groupBy(column(key)).agg(F.max(OFFSET).alias(DELETED_BELOW))
    return F.broadcast(largest) if few else largest


def without_deleted(rows: DataFrame, deletes: DataFrame, key: str) -> DataFrame:
    """Return the rows that no delete removes."""
    return rows.join(deletes, _removed(rows, deletes, key), "left_anti")


def paths_with_deleted(
    spark: SparkSession, schema: StructType, key: str, paths: Sequence[str], deletes: DataFrame
) -> set[str]:
    """Return those of `paths` that hold at least one row some delete removes; reads two columns."""
    in_file = StructType([schema[key], StructField(OFFSET, LongType())])
    rows = spark.read.schema(in_file).parquet(*paths).withColumn("_path", F.col("_metadata.file_path"))
    hit = rows.join(deletes, _removed(rows, deletes, key), "left_semi").select("_path").distinct()
    return {unquote(urlsplit(row["_path"]).path) for row in hit.collect()}


def write_rows(rows: DataFrame, directory: Path, *, files_max: int) -> None:
    """Write rows as Parquet, one folder for each partition and at most `files_max` files in each; natively, in parallel."""
    writer = rows.coalesce(files_max).write.partitionBy(PARTITION).option("compression", "zstd")
    writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(str(directory), mode="error")


def _removed(rows: DataFrame, deletes: DataFrame, key: str) -> Column:
    quoted = "`" + key.replace("`", "``") + "`"
    return (rows[quoted] == deletes[quoted]) & (rows[OFFSET] < deletes[DELETED_BELOW])
