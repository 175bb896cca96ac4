"""The data files of one commit: rows that cuts add to a table, and what deletes leave of the files they touch.

In: a loaded table and the changes to make. Out: files on disk that nothing refers to yet, inside an attempt of their own;
the commit is `ingest_job`'s. Rows are read, joined and written by Spark alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from flusher.manifest import SegmentFile
from spark_sink.cuts.changes import Changes, reachable, split_by_delete
from spark_sink.cuts.integrity import verify_files
from spark_sink.ingestion.attempt import Attempt
from spark_sink.ingestion.step import OnStep, Step
from spark_sink.table.frames import paths_with_deleted, read_deletes, read_rows, without_deleted, write_rows
from spark_sink.table.open_table import OpenTable
from spark_sink.table.table_model import NewFile, TableFile

FILE_BYTES_TARGET = 64 << 20
"""Size of a written file that readers split well and the log lists cheaply."""


@dataclass(frozen=True, slots=True)
class Written:
    """The files of one commit and what they mean in rows; `attempt` is None when there was nothing to write."""

    adds: Sequence[NewFile]
    removes: Sequence[TableFile]
    rows_in: int
    attempt: Attempt | None

    @property
    def rows_deleted(self) -> int:
        """Rows that deletes and dropped partitions removed, new ones and old ones."""
        before = self.rows_in + sum(file.rows or 0 for file in self.removes)
        return before - sum(file.rows for file in self.adds)


class CommitWriter:
    """Writes the files of one commit after another, for the tables of one node."""

    def __init__(self, spark: SparkSession, node: Path, on_step: OnStep) -> None:
        self._spark = spark
        self._node = node
        self._step = on_step

    def write(self, table: OpenTable, changes: Changes) -> Written:
        """Write the files that bring a table to the last cut of `changes`.

        Raises `Corrupt` or `Truncated` naming a file of the node that is not what its cut says, or not there; nothing is
        written then.
        """
        files = table.files(key=changes.entry.primary_key)
        dropped = [file for file in files if file.partition in changes.dropped_names]
        kept = [file for file in files if file.partition not in changes.dropped_names]
        rows_in = sum(segment.rows for segment in changes.segments)
        verify_files(self._node, changes.files)
        touched = self._touched(table, changes, reachable(kept, changes.deletes))
        if not changes.segments and not touched:
            return Written((), dropped, rows_in, None)
        attempt = Attempt.begin(table.path, changes.last.number)
        self._step(Step.INTENDED)
        size = sum(file.bytes for file in changes.segments) + sum(file.bytes for file in touched)
        write_rows(
            self._rows(table, changes, touched), attempt.directory, files_max=max(1, ceil(size / FILE_BYTES_TARGET))
        )
        self._step(Step.WRITTEN)
        adds = attempt.seal()
        self._step(Step.SEALED)
        return Written(adds, [*dropped, *touched], rows_in, attempt)

    def _touched(self, table: OpenTable, changes: Changes, candidates: Sequence[TableFile]) -> list[TableFile]:
        """Return the files of the table that hold a row to remove."""
        if not candidates:
            return []
        paths = {str(table.path.resolve() / file.path): file for file in candidates}
        schema, key = table.spark_schema, changes.entry.primary_key
        hit = paths_with_deleted(self._spark, schema, key, list(paths), self._deletes(table, changes))
        return [file for path, file in paths.items() if path in hit]

    def _rows(self, table: OpenTable, changes: Changes, touched: Sequence[TableFile]) -> DataFrame:
        schema = table.spark_schema
        reached, others = split_by_delete(changes.segments, changes.deletes)
        untouched_rows = read_rows(self._spark, schema, self._segment_paths(changes, others))
        if not reached and not touched:
            return untouched_rows
        paths = self._segment_paths(changes, reached)
        for file in touched:
            paths.setdefault(file.partition, []).append(str(table.path.resolve() / file.path))
        left = without_deleted(
            read_rows(self._spark, schema, paths), self._deletes(table, changes), changes.entry.primary_key
        )
        return left.unionAll(untouched_rows) if others else left

    def _deletes(self, table: OpenTable, changes: Changes) -> DataFrame:
        paths = [str(self._node.resolve() / file.path) for file in changes.deletes]
        rows = sum(file.rows for file in changes.deletes)
        return read_deletes(self._spark, table.spark_schema, changes.entry.primary_key, paths, rows=rows)

    def _segment_paths(self, changes: Changes, segments: Sequence[SegmentFile]) -> dict[str, list[str]]:
        root = self._node.resolve()
        return {
            name: [str(root / segment.path) for segment in found]
            for name, found in changes.of_partition(segments).items()
        }
