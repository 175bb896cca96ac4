"""The Spark data source `streamingnode`: a collection straight from its node's cuts, deletes applied. Batch only.

It takes no filters from Spark on purpose. Spark 4.3 keeps what one query pushed for the next query of the same frame: after
`frame.where("id = 30").count()`, `frame.count()` returned the rows of one segment out of two. Without pushing, Spark filters
the rows we hand it, and is right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from flusher.directory import CutLog
from flusher.manifest import OFFSET, DeleteFile, SegmentFile, arrow_schema
from flusher.selection import deleted_in, without
from spark_sink.changes import Changes, batches, changes_of, first_with, live_collection, split_by_delete, verify_file
from spark_sink.columns import PARTITION, shaped, table_schema
from wal.errors import InvalidArgument
from wal.files import check_path

BATCH_ROWS = 65_536
"""Rows handed to Spark at a time; larger brought nothing, a tenth of it cost a fifth of the speed."""

DELETE_SETS_KEPT = 8
"""Sets of deletes a worker process keeps between tasks; the tasks of one vchannel mostly share one."""

GROUP_BYTES_TARGET = 32 << 20
"""Segments read by one task: a task costs milliseconds, and a laptop's cuts make many small segments."""

OPTIONS = ("node", "subscribe")


class StreamingNodeSource(DataSource):
    """`spark.read.format("streamingnode").option("node", "data").option("subscribe", "orders").load()`.

    Rows have `_tick`, `_offset`, `_vchannel` and `_partition` behind the user's columns. Options:

    * `node`: the node directory, as the driver and every executor see it; `data` if left out
    * `subscribe`: the collection

    Spark prunes nothing in a Python source: `.schema("id bigint, amount double")` reads these columns only.

    Raises `InvalidArgument` for another option. There are no streams: a reader of the node follows what is to come.
    """

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        if wrong := [option for option in options if option.lower() not in OPTIONS]:
            known = ", ".join(OPTIONS)
            raise InvalidArgument(f"the source streamingnode has no option {wrong[0]!r} — there are: {known}")

    @classmethod
    def name(cls) -> str:
        """Return the name to pass to `format`."""
        return "streamingnode"

    def schema(self) -> StructType:
        """Return the collection's columns."""
        return from_arrow_schema(table_schema(arrow_schema(self._changes.entry)))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of the columns in `schema`. Raises `InvalidArgument` for one that the collection has not."""
        own = [column.simpleString() for column in self.schema()]
        asked = [column.simpleString() for column in schema]
        if wrong := [column for column in asked if column not in own]:
            raise InvalidArgument(f"there is no column {wrong[0]!r} — choose of {', '.join(own)}")
        return CutReader(self._node, replace(self._changes, cuts=()), schema)  # every task gets it

    @property
    def _node(self) -> Path:
        return check_path("node directory", self.options.get("node", "data")).resolve()

    @cached_property
    def _changes(self) -> Changes:
        """Everything the cuts say about the collection, from its creation to the newest."""
        name, cuts = self.options.get("subscribe"), CutLog(self._node)
        if not name:
            raise InvalidArgument('no collection named — add .option("subscribe", "<collection>")')
        if not cuts.numbers:
            raise InvalidArgument(f"{self._node} has no cut yet — run: streamingnode flush {self._node}")
        entry = live_collection(cuts.read(cuts.newest), name)
        span = cuts.span(first_with(cuts, entry.created_tick), cuts.newest)
        return changes_of(entry, span, after_tick=entry.created_tick - 1)


@dataclass(frozen=True)
class SegmentGroup(InputPartition):
    """Segments of one vchannel and one partition, and the deletes that can reach them."""

    partition: str
    key: str
    segments: tuple[SegmentFile, ...]
    deletes: tuple[DeleteFile, ...]


class CutReader(DataSourceReader):
    """Reads every segment of the collection."""

    def __init__(self, node: Path, changes: Changes, schema: StructType) -> None:
        self._node, self._changes, self._schema = node, changes, schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks: segments of one vchannel with the deletes that can reach them."""
        vchannel = attrgetter("vchannel")
        return [
            self._group(partition, bundle)
            for partition, segments in self._changes.of_partition(self._changes.segments).items()
            for _, found in groupby(sorted(segments, key=vchannel), key=vchannel)
            for bundle in batches(found, lambda each: each.bytes, bytes_max=GROUP_BYTES_TARGET)
        ]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task; nothing for the empty task that Spark makes up when there is none."""
        if isinstance(partition, SegmentGroup):
            yield from rows_of(self._node, partition, to_arrow_schema(self._schema, timezone="UTC"))

    def _group(self, partition: str, segments: Sequence[SegmentFile]) -> SegmentGroup:
        reaching = tuple(each for each in self._changes.deletes if split_by_delete(segments, [each])[0])
        return SegmentGroup(partition, self._changes.entry.primary_key, tuple(segments), reaching)


def rows_of(node: Path, group: SegmentGroup, target: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a group with exactly the columns and types of `target`.

    Raises `Corrupt` naming a file that is not what its cut says, `Truncated` when one is gone.
    """
    deleted = _deleted(node, group.key, group.deletes) if group.deletes else None
    wanted = {*target.names, OFFSET} - {PARTITION} | ({group.key} if group.deletes else set())
    for segment in group.segments:
        verify_file(node, segment)
        with pq.ParquetFile(node / segment.path) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=sorted(wanted)):
                rows = pa.Table.from_batches([batch])
                if deleted is not None:
                    rows = without(rows, deleted, key=group.key)
                if rows.num_rows:
                    yield from shaped(rows, target, partition=group.partition).to_batches()


@lru_cache(maxsize=DELETE_SETS_KEPT)
def _deleted(node: Path, key: str, files: Sequence[DeleteFile]) -> pa.Table:
    for file in files:
        verify_file(node, file)
    return deleted_in([pq.read_table(node / file.path, columns=[key, OFFSET]) for file in files], key=key)
