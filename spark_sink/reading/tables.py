"""Reading tables in Spark: the active files of one version, natively; several tables at one cut.

Any Delta reader sees the same rows; Spark without Delta's jar gets the files by name from the table's log. A version is the
state at its cut, and stays it until the first cut that changes the table: that is what makes several tables meet.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from spark_sink.table.frames import read_rows
from spark_sink.table.open_table import OpenTable
from spark_sink.table.table_model import TableVersion
from wal.errors import InvalidArgument, Truncated


@dataclass(frozen=True, slots=True)
class TablesAt:
    """Several tables as they were at one cut."""

    cut: int
    tick: int
    tables: Mapping[str, DataFrame]

    def __getitem__(self, name: str) -> DataFrame:
        return self.tables[name]


def read_table(spark: SparkSession, path: str | Path, as_of_tick: int | None = None) -> DataFrame:
    """Return the rows of a table, now or as of the newest cut at or before a tick, with the system columns.

    The frame reads the files of the version chosen here; a later ingest does not change it.
    Raises `InvalidArgument` when there is no table, `Truncated` when its log no longer reaches back to the tick.
    """
    table = _load(Path(path))
    if as_of_tick is not None:
        table = _at_version(table, _version_at(table, as_of_tick).version)
    return _frame(spark, table)


def read_tables(
    spark: SparkSession, tables_dir: str | Path, names: Iterable[str], as_of_tick: int | None = None
) -> TablesAt:
    """Return several tables of one node, all at the newest cut that every one of them has, at or before `as_of_tick`.

    Raises `InvalidArgument` when a table is missing, when they are fed from several nodes, or when no cut is in all.
    """
    loaded = {name: _load(Path(tables_dir) / name) for name in names}
    if len({table.owner().node_id for table in loaded.values()}) != 1:
        raise InvalidArgument("tables of several nodes share no cut — read each with read_table(as_of_tick=...)")
    histories = {name: list(table.history()) for name, table in loaded.items()}
    meeting = newest_common(histories, as_of_tick)
    if meeting is None:
        raise InvalidArgument(f"no cut is in all of {', '.join(loaded)} — ingest again, or ask for a later tick")
    frames = {name: _frame(spark, _at_version(table, meeting.versions[name])) for name, table in loaded.items()}
    return TablesAt(meeting.cut, meeting.tick, frames)


@dataclass(frozen=True, slots=True)
class Meeting:
    """A cut that several tables have, and the version of each that is its state there."""

    cut: int
    tick: int
    versions: Mapping[str, int]


def newest_common(histories: Mapping[str, Sequence[TableVersion]], as_of_tick: int | None) -> Meeting | None:
    """Return the newest cut at or before a tick of which every table has its state; None when there is none. Pure."""
    marks = {found.note.cut: found.note.tick for history in histories.values() for found in history}
    for cut in sorted(marks, reverse=True):
        if as_of_tick is not None and marks[cut] > as_of_tick:
            continue
        states = {name: _state_at(history, cut) for name, history in histories.items()}
        versions = {name: state.version for name, state in states.items() if state is not None}
        if len(versions) == len(histories):
            return Meeting(cut, marks[cut], versions)
    return None


def _state_at(history: Sequence[TableVersion], cut: int) -> TableVersion | None:
    """Return the version that is a table's state at a cut; `history` is newest first.

    A commit over several cuts hides the states between its first change and its last cut.
    """
    hidden_from = None
    for found in history:
        if found.note.cut <= cut:
            unchanged = found.note.cut == cut or (hidden_from is not None and cut < hidden_from)
            return found if unchanged else None
        hidden_from = found.note.first_cut
    return None


def _version_at(table: OpenTable, tick: int) -> TableVersion:
    earliest = None
    for found in table.history():
        if found.note.tick <= tick:
            return found
        earliest = found.note.tick
    raise Truncated(f"tick {tick} of {table.path}", f"tick {earliest}", f"ask for tick {earliest} or later")


def _load(path: Path) -> OpenTable:
    table = OpenTable.load(path)
    if table is None:
        raise InvalidArgument(f"{path} is no table — run an ingest into it, or name another path")
    return table


def _at_version(table: OpenTable, version: int) -> OpenTable:
    loaded = OpenTable.load(table.path, version=version)
    assert loaded is not None
    return loaded


def _frame(spark: SparkSession, table: OpenTable) -> DataFrame:
    root = table.path.resolve()
    paths = {partition: [str(root / path) for path in files] for partition, files in table.paths_by_partition().items()}
    return read_rows(spark, table.spark_schema, paths)
