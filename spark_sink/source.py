"""The Spark data source `streamingnode`: a collection as of its node's newest cut. Batch only.

The rows are read from the node's cuts. Once the node has removed the first of these, the rows are
those of the collection's table and the cuts after it, as in a snapshot of the node.

It deliberately takes no filters from Spark. Spark 4.3 keeps the filters that one query pushed for
the next query of the same frame: after `frame.where("id = 30").count()`, `frame.count()` returned
the rows of one segment out of two. Without pushing, Spark filters the rows it gets, correctly.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from flusher.cuts import Lease
from flusher.directory import CutLog
from flusher.manifest import OFFSET, CollectionEntry, DeleteFile, SegmentFile, arrow_schema
from flusher.selection import deleted_in, without
from spark_sink.changes import (
    F,
    batches,
    changes_of,
    first_with,
    live_collection,
    split_by_delete,
    verify_file,
)
from spark_sink.columns import PARTITION, TableFile, opened_file, shaped, table_schema
from spark_sink.errors import TableAhead
from spark_sink.leased import check_own, leases_of, open_leased, put_back
from wal.errors import InvalidArgument, StreamingNodeError, Truncated
from wal.files import check_path

BATCH_ROWS = 65_536
"""Rows passed to Spark at a time; larger batches were not faster, and batches of a tenth were a
fifth slower.
"""

DELETE_SETS_KEPT = 8
"""Sets of deletes that a worker process caches between tasks; most tasks of one vchannel share one.
"""

GROUP_BYTES_TARGET = 32 << 20
"""Segments read by one task: a task costs milliseconds, and a laptop's cuts make many small
segments.
"""

OPTIONS = ("node", "subscribe")


class StreamingNodeSource(DataSource):
    """`spark.read.format("streamingnode").option("node", "data").option("subscribe",
    "orders").load()`.

    Rows have `_tick`, `_offset`, `_vchannel` and `_partition` after the user's columns. Options:

    * `node`: the node directory, by a path valid on the driver and every executor; default `data`.
      Once the node has removed cuts, they read the collection's table, too, at its ingest's path
    * `subscribe`: the collection

    Spark prunes no columns of a Python source: `.schema("id bigint, amount double")` reads only
    these columns.

    Raises `InvalidArgument` for another option. There are no streams: use a reader of the node for
    new messages.
    """

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        if wrong := [option for option in options if option.lower() not in OPTIONS]:
            known = ", ".join(OPTIONS)
            raise InvalidArgument(
                f"the source streamingnode has no option {wrong[0]!r} — there are: {known}"
            )

    @classmethod
    def name(cls) -> str:
        """Return the name to pass to `format`."""
        return "streamingnode"

    def schema(self) -> StructType:
        """Return the collection's columns."""
        return from_arrow_schema(table_schema(arrow_schema(self._content.entry)))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of the columns in `schema`. Raises `InvalidArgument` for one that the
        collection lacks.
        """
        own = [column.simpleString() for column in self.schema()]
        asked = [column.simpleString() for column in schema]
        if wrong := [column for column in asked if column not in own]:
            raise InvalidArgument(f"there is no column {wrong[0]!r} — choose of {', '.join(own)}")
        return CollectionReader(self._node, self._content, schema)

    @property
    def _node(self) -> Path:
        return check_path("node directory", self.options.get("node", "data")).resolve()

    @cached_property
    def _content(self) -> "Content":
        name = self.options.get("subscribe")
        if not name:
            raise InvalidArgument('no collection named — add .option("subscribe", "<collection>")')
        cuts = CutLog(self._node)
        if not cuts.numbers:
            raise InvalidArgument(
                f"{self._node} has no cut yet — run: streamingnode flush {self._node}"
            )
        return content_of(cuts, name)


@dataclass(frozen=True)
class Content:
    """The files that make up a collection at one cut.

    Its rows are those of the segments, and of the table's files, that no delete removes. `table` is
    the table's directory, None without a table. Files are grouped by partition name.
    """

    entry: CollectionEntry
    segments: Mapping[str, Sequence[SegmentFile]] = field(default_factory=dict)
    deletes: Sequence[DeleteFile] = ()
    table: Path | None = None
    table_files: Mapping[str, Sequence[TableFile]] = field(default_factory=dict)


def content_of(cuts: CutLog, name: str) -> Content:
    """Return the files of a collection at the newest cut: of cuts alone, or of a table and cuts.

    Raises `CollectionNotFound`. When the first cuts are gone, raises the first table's problem if
    no table is usable, or `Truncated` without a table.
    """
    entry = live_collection(cuts.read(cuts.newest), name)
    try:
        found = cuts.span(first_with(cuts, entry.created_tick), cuts.newest)
    except Truncated as error:
        gone: StreamingNodeError = error
    else:
        changes = changes_of(entry, found, after_tick=entry.created_tick - 1)
        return Content(entry, changes.of_partition(changes.segments), changes.deletes)
    problem: StreamingNodeError | None = None
    for lease in leases_of(cuts, entry.collection_id):
        try:
            return _content_with_table(cuts, name, lease)
        except StreamingNodeError as error:
            problem = problem or error
    raise problem or gone


def _content_with_table(cuts: CutLog, name: str, lease: Lease) -> Content:
    table = open_leased(lease)
    note = next(table.history()).note
    cuts.look()  # the table may have taken a cut that is newer than this listing
    if note.cut > cuts.newest:
        raise TableAhead(f"table {table.path} is ahead of this node — {put_back(lease)}")
    check_own(cuts, lease, note)
    entry = live_collection(cuts.read(cuts.newest), name)
    if entry.collection_id != lease.collection_id:
        raise Truncated(
            f"collection {name!r}, which was dropped,", f"cut {cuts.newest}", "read again"
        )
    files: dict[str, list[TableFile]] = {}
    for file in table.files(key=entry.primary_key):
        files.setdefault(file.partition, []).append(file)
    if note.cut == cuts.newest:
        return Content(entry, table=table.path, table_files=files)
    changes = changes_of(entry, cuts.span(note.cut + 1, cuts.newest), after_tick=note.tick)
    for dropped in changes.dropped_names & files.keys():
        del files[dropped]
    segments = changes.of_partition(changes.segments)
    return Content(entry, segments, changes.deletes, table.path, files)


@dataclass(frozen=True)
class SegmentGroup(InputPartition):
    """Segments of one vchannel and one partition, and the deletes that can affect them."""

    partition: str
    key: str
    deletes: tuple[DeleteFile, ...]
    segments: tuple[SegmentFile, ...]


@dataclass(frozen=True)
class TableGroup(InputPartition):
    """Files of one partition of a table, and the deletes that can affect them."""

    partition: str
    key: str
    deletes: tuple[DeleteFile, ...]
    table: Path
    files: tuple[TableFile, ...]


class CollectionReader(DataSourceReader):
    """Reads every row of the collection."""

    def __init__(self, node: Path, content: Content, schema: StructType) -> None:
        self._node = node
        self._content = content
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks: files to read together, and the deletes that can affect them."""
        content = self._content
        key = content.entry.primary_key
        vchannel = attrgetter("vchannel")
        tasks: list[InputPartition] = []
        for partition, segments in content.segments.items():
            for _, found in groupby(sorted(segments, key=vchannel), key=vchannel):
                for bundle in batches(found, _bytes_of, bytes_max=GROUP_BYTES_TARGET):
                    reaching = _reaching(bundle, content.deletes)
                    tasks.append(SegmentGroup(partition, key, reaching, tuple(bundle)))
        if content.table is None:
            return tasks
        for partition, files in content.table_files.items():
            for some in batches(files, _bytes_of, bytes_max=GROUP_BYTES_TARGET):
                reaching = _reaching(some, content.deletes)
                tasks.append(TableGroup(partition, key, reaching, content.table, tuple(some)))
        return tasks

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task; none for the empty task that Spark creates when there is no
        task.
        """
        if isinstance(partition, SegmentGroup | TableGroup):
            yield from rows_of(self._node, partition, to_arrow_schema(self._schema, timezone="UTC"))


def _bytes_of(file: SegmentFile | TableFile) -> int:
    return file.bytes


def _reaching(files: Sequence[F], deletes: Sequence[DeleteFile]) -> tuple[DeleteFile, ...]:
    return tuple(each for each in deletes if split_by_delete(files, [each])[0])


def rows_of(
    node: Path, group: SegmentGroup | TableGroup, target: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a group with exactly the columns and types of `target`.

    Raises `Corrupt` for a file that does not match its cut or table, `Truncated` when retention
    removed one, `StorageFailed` when a file of the table is missing.
    """
    deleted = _deleted(node, group.key, group.deletes) if group.deletes else None
    wanted = {*target.names, OFFSET} - {PARTITION}
    if deleted is not None:
        wanted.add(group.key)
    for batch in _batches_of(node, group, sorted(wanted)):
        rows = pa.Table.from_batches([batch])
        if deleted is not None:
            rows = _without(rows, deleted, key=group.key)
        if rows.num_rows:
            yield from shaped(rows, target, partition=group.partition).to_batches()


def _batches_of(
    node: Path, group: SegmentGroup | TableGroup, columns: list[str]
) -> Iterator[pa.RecordBatch]:
    if isinstance(group, TableGroup):
        for file in group.files:
            with opened_file(group.table, file) as content:
                yield from content.iter_batches(BATCH_ROWS, columns=columns)
        return
    for segment in group.segments:
        verify_file(node, segment)
        with pq.ParquetFile(node / segment.path, page_checksum_verification=True) as content:
            yield from content.iter_batches(BATCH_ROWS, columns=columns)


def _without(rows: pa.Table, deleted: pa.Table, *, key: str) -> pa.Table:
    """Return the rows that are not deleted; converts the key when the table has another type for
    it.
    """
    kind = deleted.schema.field("key").type
    if rows.schema.field(key).type != kind:
        own = rows.schema.get_field_index(key)
        rows = rows.set_column(own, key, rows[key].cast(kind))
    return without(rows, deleted, key=key)


@lru_cache(maxsize=DELETE_SETS_KEPT)
def _deleted(node: Path, key: str, files: Sequence[DeleteFile]) -> pa.Table:
    deletes = []
    for file in files:
        verify_file(node, file)
        with pq.ParquetFile(node / file.path, page_checksum_verification=True) as content:
            deletes.append(content.read([key, OFFSET]))
    return deleted_in(deletes, key=key)
