"""The Spark data source `streamingnode`: a collection straight from its node's cuts, deletes applied. Batch only.

    spark.read.format("streamingnode").option("node", "data").option("subscribe", "orders").load()

| option        | meaning                                                                            |
|---------------|------------------------------------------------------------------------------------|
| `node`        | the node directory, as the driver and every executor see it; `data` if left out    |
| `subscribe`   | the collection                                                                     |
| `columns`     | only these columns, separated by commas; Spark prunes nothing in a Python source   |
| `asOfCut`     | the state at this cut, or the newest before it                                     |
| `asOfTick`    | the state at this tick, or at a time as `2026-11-22T12:00:00+00:00`                |

An option it does not know is refused, and so is a stream: a reader of the node follows what is to come.

Rows come as Arrow batches with `_tick`, `_offset`, `_vchannel` and `_partition` behind the user's columns.

The source takes no filters from Spark on purpose. Spark 4.3 keeps what one query pushed for the next query of the same
frame: after `frame.where("id = 30").count()`, `frame.count()` returned the rows of one segment out of two. Without
pushing, Spark filters the rows we hand it, and is right.

The executor's half is in `segment_rows`.
"""

import difflib
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from flusher.cuts.cut_log import CutLog, cut_at, cut_covering, live_collection
from flusher.manifest import DeleteFile, SegmentFile
from spark_sink.cuts.changes import Changes, changes_of, split_by_delete
from spark_sink.reading.segment_rows import SegmentGroup, rows_of
from spark_sink.table.columns import decode_schema, table_schema
from wal.errors import InvalidArgument
from wal.timetick import tick_given

GROUP_BYTES_TARGET = 32 << 20
"""Segments read by one task: a task costs milliseconds, and a laptop's cuts make many small segments."""


OPTIONS = ("node", "subscribe", "columns", "asOfCut", "asOfTick")


class StreamingNodeSource(DataSource):
    """The source behind `format("streamingnode")`. Raises `InvalidArgument` for an option that is none of `OPTIONS`."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        known = {option.lower(): option for option in OPTIONS}
        for option in options:
            if option.lower() not in known:
                near = difflib.get_close_matches(option.lower(), known, n=1, cutoff=0.5)
                advice = f"did you mean {known[near[0]]!r}?" if near else f"there are: {', '.join(OPTIONS)}"
                raise InvalidArgument(f"the source streamingnode has no option {option!r} — {advice}")

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
        return CutReader(self._node, self._changes, schema, self._tick)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return one that refuses: Spark hides what this method itself raises behind a fault of its own."""
        return NoStream()

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
        tick = self._tick
        newest = cut_at(cuts, number=self._cut) if tick is None else cut_covering(cuts, tick)
        entry = live_collection(cuts.read(newest), self._collection, tick=tick)
        span = cuts.span(cuts.first_with(entry.created_tick), newest)
        return changes_of(entry, span, after_tick=entry.created_tick - 1, until_tick=tick)

    @cached_property
    def _cut(self) -> int | None:
        given = self.options.get("asOfCut")
        try:
            return None if given is None else int(given)
        except ValueError:
            raise InvalidArgument(f"option asOfCut is {given!r} — give a whole number") from None

    @cached_property
    def _tick(self) -> int | None:
        given = self.options.get("asOfTick")
        if given is None:
            return None
        if self._cut is not None:
            raise InvalidArgument("asOfCut and asOfTick are both given — give one of them")
        try:
            return tick_given("asOfTick", int(given) if given.isdecimal() else datetime.fromisoformat(given))
        except ValueError:
            raise InvalidArgument(f"option asOfTick is {given!r} — give a tick or a time in ISO 8601") from None


class SegmentPartition(InputPartition):
    """What one task reads."""

    def __init__(self, group: SegmentGroup) -> None:
        super().__init__(group)
        self.group = group


class CutReader(DataSourceReader):
    """Reads every segment of the collection."""

    def __init__(self, node: Path, changes: Changes, schema: StructType, until_tick: int | None) -> None:
        self._node = node
        self._until_tick = until_tick
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
        return SegmentGroup(partition, self._changes.entry.primary_key, tuple(segments), reaching, self._until_tick)


class NoStream(DataSourceStreamReader):
    """What a stream gets: cuts are read in batches. Raises `InvalidArgument` when the stream starts."""

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Refuse: it is what a stream asks for first."""
        raise InvalidArgument(
            "the source streamingnode reads batches, not streams — use spark.read, or node.read() for what is to come"
        )

    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:
        """Give nothing; no stream gets here."""
        return iter(())


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
