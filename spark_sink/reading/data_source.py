"""The Spark data source `streamingnode`: a collection straight from its node's cuts, deletes applied. Batch only.

    spark.read.format("streamingnode").option("node", "data").option("subscribe", "orders").load()

| option        | meaning                                                                            |
|---------------|------------------------------------------------------------------------------------|
| `node`        | the node directory, as the driver and every executor see it; `data` if left out    |
| `subscribe`   | the collection                                                                     |
| `columns`     | only these columns, separated by commas; Spark prunes nothing in a Python source   |
| `asOfCut`     | the state at this cut, or the newest before it                                     |
| `asOfTick`    | the state at the newest cut at or before this tick                                 |

Rows come as Arrow batches with `_tick`, `_offset`, `_vchannel` and `_partition` behind the user's columns.

The source takes no filters from Spark on purpose. Spark 4.3 keeps what one query pushed for the next query of the same
frame: after `frame.where("id = 30").count()`, `frame.count()` returned the rows of one segment out of two. Without
pushing, Spark filters the rows we hand it, and is right.

The executor's half is in `segment_rows`.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from flusher.cuts.cut_log import CutLog, cut_at, live_collection
from flusher.manifest import DeleteFile, SegmentFile
from spark_sink.cuts.changes import Changes, changes_of, split_by_delete
from spark_sink.reading.segment_rows import SegmentGroup, rows_of
from spark_sink.table.columns import decode_schema, table_schema
from wal.errors import InvalidArgument

GROUP_BYTES_TARGET = 32 << 20
"""Segments read by one task: a task costs milliseconds, and a laptop's cuts make many small segments."""


class StreamingNodeSource(DataSource):
    """The source behind `format("streamingnode")`."""

    @classmethod
    def name(cls) -> str:
        """Return the name to pass to `format`."""
        return "streamingnode"

    def schema(self) -> StructType:
        """Return the collection's columns at the cut that will be read."""
        full = table_schema(decode_schema(self._changes.entry.schema))
        wanted = [name.strip() for name in self.options.get("columns", "").split(",") if name.strip()]
        unknown = sorted(set(wanted) - set(full.names))
        if unknown:
            raise InvalidArgument(f"no column {unknown[0]} in {self._collection} — there are: {', '.join(full.names)}")
        return from_arrow_schema(pa.schema([full.field(name) for name in wanted]) if wanted else full)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of the columns in `schema`, a subset of the collection's."""
        return CutReader(self._node, self._changes, schema)

    @property
    def _node(self) -> Path:
        return Path(self.options.get("node", "data")).resolve()

    @property
    def _collection(self) -> str:
        name = self.options.get("subscribe")
        if not name:
            raise InvalidArgument('no collection named — add .option("subscribe", "<collection>")')
        return name

    @cached_property
    def _changes(self) -> Changes:
        """Everything the cuts say about the collection, from its creation to the cut asked for."""
        cuts = CutLog(self._node)
        newest = cut_at(cuts, number=self._number("asOfCut"), tick=self._number("asOfTick"))
        entry = live_collection(cuts.read(newest), self._collection)
        span = cuts.span(cuts.first_with(entry.created_tick), newest)
        return changes_of(entry, span, after_tick=entry.created_tick - 1)

    def _number(self, option: str) -> int | None:
        given = self.options.get(option)
        if given is None:
            return None
        try:
            return int(given)
        except ValueError:
            raise InvalidArgument(f"option {option} is {given!r} — give a whole number") from None


class SegmentPartition(InputPartition):
    """What one task reads."""

    def __init__(self, group: SegmentGroup) -> None:
        super().__init__(group)
        self.group = group


class CutReader(DataSourceReader):
    """Reads every segment of the collection."""

    def __init__(self, node: Path, changes: Changes, schema: StructType) -> None:
        self._node = node
        self._changes = changes
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks: segments of one vchannel with the deletes that can reach them."""
        groups: list[InputPartition] = []
        for partition, segments in self._changes.of_partition(self._changes.segments).items():
            for vchannel in sorted({segment.vchannel for segment in segments}):
                wanted = [found for found in segments if found.vchannel == vchannel]
                groups += [SegmentPartition(self._group(partition, part)) for part in _bundles(wanted)]
        return groups

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task; nothing for the empty task that Spark makes up when there is none."""
        if isinstance(partition, SegmentPartition):
            target = to_arrow_schema(self._schema, timezone="UTC")
            yield from rows_of(self._node, partition.group, target)

    def _group(self, partition: str, segments: Sequence[SegmentFile]) -> SegmentGroup:
        reaching = tuple(delete for delete in self._changes.deletes if _reaches_any(delete, segments))
        return SegmentGroup(partition, self._changes.entry.primary_key, tuple(segments), reaching)


def _bundles(segments: Sequence[SegmentFile]) -> Iterator[list[SegmentFile]]:
    bundle: list[SegmentFile] = []
    for segment in segments:
        if bundle and sum(file.bytes for file in bundle) + segment.bytes > GROUP_BYTES_TARGET:
            yield bundle
            bundle = []
        bundle.append(segment)
    if bundle:
        yield bundle


def _reaches_any(delete: DeleteFile, segments: Sequence[SegmentFile]) -> bool:
    reached, _ = split_by_delete(segments, [delete])
    return bool(reached)
