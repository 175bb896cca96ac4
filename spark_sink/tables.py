"""Tables and the node's files as Spark frames, read natively: one table, several at one cut, and
rows after deletes.

Any Delta reader sees the same rows. Spark without Delta's jar gets the files by name from the
table's log. A version is the collection's state from its last change to the first change of the
next version, so several tables have a state at the same tick. A tick between the first and the last
change of one commit has no version. Schemas are always given, never inferred from a file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.types import LongType, StructField, StructType

from flusher.manifest import OFFSET
from interceptors.errors import before_creation
from spark_sink.columns import PARTITION
from spark_sink.runtime import refuse_after_fork
from spark_sink.table import OpenTable, TableVersion, nearest_states, state_at
from wal.errors import InvalidArgument, Truncated
from wal.files import check_path
from wal.timetick import tick_given, tick_shown

DELETED_BELOW = "_deleted_below"

READ_OPTIONS: Mapping[str, str] = {
    # Paths are literal file names, also below a directory called `a[b]` or `a=b`, and whatever
    # names a session skips.
    "__globPaths__": "false",
    "recursiveFileLookup": "true",
    "ignoredPathSegmentRegex": "",
    # Files of Arrow have no mark of Spark's calendar: without this option the session would decide.
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
    "mergeSchema": "false",
    # A damaged or missing file is an error, never fewer rows or other values.
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
    "parquet.page.verify-checksum.enabled": "true",
}
"""Options of every read of files. They take precedence over settings of the caller's session, which
may be meant for other files.
"""

WRITE_OPTIONS: Mapping[str, str] = {
    "compression": "zstd",
    "maxRecordsPerFile": "0",
    "parquet.writer.version": "v1",
    "parquet.enable.dictionary": "true",
    "parquet.page.write-checksum.enabled": "true",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}
"""Options of every write; they take precedence over the session's settings."""

BROADCAST_ROWS_MAX = 1_000_000
"""Up to this many deletes are sent to every task (about 100 bytes each in the JVM); with more,
Spark sorts and merges.
"""


@dataclass(frozen=True, slots=True)
class TablesAt:
    """Several tables as they were at one tick; `cut` is the newest cut in their histories at or
    before it.
    """

    cut: int
    tick: int
    tables: Mapping[str, DataFrame]

    def __getitem__(self, name: str) -> DataFrame:
        return self.tables[name]


def read_table(
    spark: SparkSession, path: str | Path, as_of_tick: int | datetime | None = None
) -> DataFrame:
    """Return the rows of a table, now or as of a tick or a time, with the system columns.

    The frame reads the files of the version chosen here; a later ingest does not change it. As of a
    tick it has exactly the collection's rows at that tick, as `Node.snapshot` returns them.

    Raises `InvalidArgument` for an address; when there is no table; when the tick is past what the
    table has taken; and, naming the nearest available ticks, when one commit took the state
    together with later changes. Raises `Truncated`, naming the earliest available tick, when the
    tick is before the collection's creation, when the table's log no longer reaches back to it, and
    when a vacuum removed a file of that version. Raises `StorageFailed` when a file is missing
    otherwise, and `Corrupt` when one has another length than the table says.
    """
    table = _load(check_path("table", path))
    if as_of_tick is not None:
        tick = tick_given("as_of_tick", as_of_tick)
        history: list[TableVersion] = []
        for found in table.history():
            history.append(found)
            if found.note.last_tick <= tick:
                break
        (version,) = _states_at({str(table.path): history}, tick).values()
        table = _kept(table.at_version(version), history)
    return _frame(spark, table)


def read_tables(
    spark: SparkSession,
    tables_dir: str | Path,
    names: Iterable[str],
    as_of_tick: int | datetime | None = None,
) -> TablesAt:
    """Return several tables of one node, all as of one tick or time; None means the newest cut that
    all of them have.

    Raises as `read_table` does, and `InvalidArgument` when they come from several nodes or have no
    common cut.
    """
    root = check_path("directory of tables", tables_dir)
    loaded = {name: _load(root / name) for name in names}
    if len({table.owner().node_id for table in loaded.values()}) != 1:
        raise InvalidArgument(
            "tables of several nodes share no cut — read each with read_table(as_of_tick=...)"
        )
    histories = {name: list(table.history()) for name, table in loaded.items()}
    tick = newest_common(histories) if as_of_tick is None else tick_given("as_of_tick", as_of_tick)
    if tick is None:
        raise InvalidArgument(
            f"no cut is in all of {', '.join(loaded)} — ingest again, with every_cut=True"
        )
    versions = _states_at(histories, tick)
    frames: dict[str, DataFrame] = {}
    for name, table in loaded.items():
        version = table.at_version(versions[name])
        frames[name] = _frame(spark, _kept(version, histories[name]))
    notes = [found.note for history in histories.values() for found in history]
    return TablesAt(max(note.cut for note in notes if note.tick <= tick), tick, frames)


def newest_common(histories: Mapping[str, Sequence[TableVersion]]) -> int | None:
    """Return the tick of the newest cut at which every table has a state; None without one."""
    of_all = histories.values()
    newest = min(history[0].note.tick if history else 0 for history in of_all)
    ticks = sorted({found.note.tick for history in of_all for found in history}, reverse=True)
    return next(
        (tick for tick in ticks if tick <= newest and all(state_at(each, tick) for each in of_all)),
        None,
    )


def _states_at(histories: Mapping[str, Sequence[TableVersion]], tick: int) -> dict[str, int]:
    """Return the version of each table that is its state at a tick; histories are newest first.
    Raises as `read_table`.
    """
    states = {name: state_at(history, tick) for name, history in histories.items()}
    versions = {name: state.version for name, state in states.items() if state is not None}
    if len(versions) == len(states):
        return versions
    missing = ", ".join(name for name in states if name not in versions)
    before, after = nearest_states(list(histories.values()), tick)
    created = {name: history[-1].created_tick for name, history in histories.items()}
    newest_name = max(created, key=lambda name: created[name])
    if tick < created[newest_name]:
        raise before_creation(Path(newest_name).name, tick, created[newest_name], first=after or 0)
    newest = min(history[0].note.tick for history in histories.values())
    if tick > newest:
        raise InvalidArgument(
            f"as_of_tick={tick_shown(tick)} is past what {missing} has taken, up to "
            f"{tick_shown(newest)} — "
            "ingest again, ask for an earlier one, or leave it out"
        )
    if before is None and after is not None:
        step = f"ask for {tick_shown(after)} or later"
        raise Truncated(f"the state of {missing} at {tick_shown(tick)}", after, step)
    nearest = (
        " or ".join(tick_shown(each) for each in (before, after) if each is not None)
        or "none; leave it out"
    )
    raise InvalidArgument(
        f"{missing} has no version of its own for the state at {tick_shown(tick)}: "
        "a commit took it together with later changes — "
        f"the nearest are {nearest}; an ingest with every_cut=True keeps each cut"
    )


def _load(path: Path) -> OpenTable:
    table = OpenTable.load(path)
    if table is None:
        raise InvalidArgument(f"{path} is no table — run an ingest into it, or name another path")
    return table


def _kept(table: OpenTable, history: Sequence[TableVersion]) -> OpenTable:
    """Return the given version after checking that all of its files exist; `history` has later
    versions, newest first.

    Raises `Truncated` when a vacuum has removed a file: Spark would fail on it later. The error
    names the earliest tick of a later version that has all of its files, None without one.
    """
    gone = _vacuumed(table)
    if gone is None:
        return table
    later = [found for found in reversed(history) if found.version > table.version]
    whole = (found for found in later if _vacuumed(table.at_version(found.version)) is None)
    first = next(whole, None)
    earliest = None if first is None else first.note.last_tick
    step = "leave out as_of_tick"
    if earliest is not None:
        step = f"ask for {tick_shown(earliest)} or later"
    requested = f"version {table.version} of {table.path}, whose file {gone} was vacuumed,"
    raise Truncated(requested, earliest, step)


def _vacuumed(table: OpenTable) -> str | None:
    """Return the path of the first missing file of a version, None when all exist."""
    missing = (file.path for file in table.files() if not (table.path / file.path).exists())
    return next(missing, None)


def _frame(spark: SparkSession, table: OpenTable) -> DataFrame:
    refuse_after_fork()
    paths: dict[str, list[Path]] = {}
    for file in table.files():
        paths.setdefault(file.partition, []).append(table.place_of(file))
    return read_rows(spark, table.spark_schema, paths)


def read_rows(
    spark: SparkSession, schema: StructType, paths: Mapping[str, Sequence[Path]]
) -> DataFrame:
    """Return the rows of Parquet files given by partition name, with the columns of `schema`, the
    table's.

    Paths are absolute. The session's settings do not affect the rows.
    """
    in_file = StructType([field for field in schema.fields if field.name != PARTITION])
    reader = spark.read.schema(in_file).options(**READ_OPTIONS)
    frames = [
        reader.parquet(*map(_local, files)).withColumn(PARTITION, F.lit(name))
        for name, files in paths.items()
        if files
    ]
    if not frames:
        return spark.createDataFrame([], schema)
    return reduce(DataFrame.unionAll, frames).select(
        [F.col(_quoted(field.name)) for field in schema.fields]
    )


def read_deletes(
    spark: SparkSession, schema: StructType, key: str, paths: Iterable[Path], *, rows: int
) -> DataFrame:
    """Return each deleted key with the largest offset of its deletes, the only one that matters;
    the files hold `rows` rows.

    Few deletes are gathered in one task, without a shuffle, and broadcast to every task that joins
    them.
    """
    in_file = StructType([schema[key], StructField(OFFSET, LongType())])
    few = rows <= BROADCAST_ROWS_MAX
    deletes = spark.read.schema(in_file).options(**READ_OPTIONS).parquet(*map(_local, paths))
    largest = (
        (deletes.coalesce(1) if few else deletes)
        .groupBy(_quoted(key))
        .agg(F.max(OFFSET).alias(DELETED_BELOW))
    )
    return F.broadcast(largest) if few else largest


def without_deleted(rows: DataFrame, deletes: DataFrame, key: str) -> DataFrame:
    """Return the rows that no delete removes; a delete removes rows of its key with a smaller
    offset.
    """
    removed = (rows[_quoted(key)] == deletes[_quoted(key)]) & (
        rows[OFFSET] < deletes[DELETED_BELOW]
    )
    return rows.join(deletes, removed, "left_anti")


def write_rows(parts: Iterable[tuple[DataFrame, int]], directory: Path) -> None:
    """Write rows as Parquet, in parallel, to one folder for each partition.

    Each part is a frame and the largest number of files that it makes in each folder.
    """
    rows = reduce(DataFrame.unionAll, [rows.coalesce(files_max) for rows, files_max in parts])
    writer = rows.write.partitionBy(PARTITION).options(**WRITE_OPTIONS)
    writer.parquet(_local(directory), mode="error")


def _local(path: Path) -> str:
    """Return an absolute path as a file URI, which Spark reads whatever the session's default file
    system is.
    """
    return f"file://{path}"


def _quoted(name: str) -> str:
    """Return a quoted column name, which Spark takes literally."""
    return "`" + name.replace("`", "``") + "`"
