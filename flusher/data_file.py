"""One file of a cut, from its first row until it is synced: rows wait in memory, worker threads
decode and write them.

`cuts.publish_cut` then gives the file its final name. The format is plain Parquet, as described in
section "Segment file" of `docs/format.md`. An `OSError` makes the file unusable: the flusher then
abandons everything since its checkpoint and reads it again, which is also the path after a crash.
"""

import asyncio
import base64
import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Self

import anyio
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from anyio import CapacityLimiter
from msgspec.structs import replace

from flusher.directory import TEMPORARY_SUFFIX, NodeDirectory
from flusher.manifest import (
    OFFSET,
    TICK,
    VCHANNEL,
    DataFile,
    DeleteFile,
    SegmentFile,
    stored_schema,
)
from wal.codec import crc32c
from wal.entry import U4, Numbers, RowBatch
from wal.errors import Corrupt
from wal.failpoint import failpoint
from wal.runtime import in_thread

FILE_FORMAT = "1"
"""The value of the metadata key `streamingnode.format` in files that this release writes."""

ROW_GROUP_ROWS_MAX = 1 << 20
"""Bounds the memory a reader needs for one row group, whatever the width of a row."""

ZSTD_LEVEL = 1
"""Higher levels take a third more time to save a few per cent of space, and Spark rewrites these
rows anyway.
"""

DICTIONARY_SAMPLE_ROWS = 8192
DICTIONARY_DISTINCT_MAX = 0.25
"""A text column gets a dictionary when at most this share of its first rows is distinct.

A dictionary is smaller and faster to read for such columns; for other columns it only costs.
"""

DESCENTS_MAX = 0.05
"""Integer and time columns are delta encoded when at most this share of their first values
descends.

For ascending keys and times this takes a third of the time to write and a hundredth of the space.
The column becomes a little larger when later values do not ascend.
"""

JOIN_BYTES = 4 << 20
"""Payloads are joined in parts of this many bytes: `bytes.join` holds the interpreter lock, for
about 1 ms at this size.
"""

JOINED_PAYLOAD_BYTES_MAX = 8 << 10
"""Payloads with a larger mean size are decoded one by one, which takes 7 us each and copies
nothing.
"""

CHUNK_BYTES_MIN = 32 << 10
"""Smaller chunks are joined before Parquet writes them: Parquet takes 2 to 3 us for each chunk.

Joining 32 KiB takes 2 us, and up to 50 us in memory that is new to the process. All rows are in
memory twice meanwhile.
"""

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_IS_TEXT = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
)
_IS_WHOLE = (pa.types.is_integer, pa.types.is_timestamp, pa.types.is_date, pa.types.is_time)


class Rows(msgspec.Struct, frozen=True, gc=False):
    """A batch of rows from the log, and the ticks of all groups of its entry; `batch.groups`
    indexes them.
    """

    batch: RowBatch
    ticks: Numbers

    @classmethod
    def of(cls, batch: RowBatch, ticks: Numbers) -> Self:
        """Return the rows; copy them out of their entry if they use less than half of it.

        A view keeps the whole entry in memory, even for a few deleted keys.
        """
        payload = batch.payload
        count = len(batch.groups)
        if isinstance(payload, memoryview) and 2 * len(payload) < len(payload.obj):  # type: ignore[arg-type]
            batch = replace(batch, payload=bytes(payload))
        if 2 * count < len(ticks):
            ticks = ticks.take(batch.groups)
            batch = replace(batch, groups=np.arange(count, dtype=U4))
        return cls(batch, ticks)


def encoded_bytes(rows: Iterable[Rows]) -> int:
    """Return the size of rows in their encoded form, as in the log."""
    return sum([len(each.batch.payload) for each in rows])


class FileInProgress:
    """One file between its first row and its cut. Lives on the event loop; threads of `limiter` do
    its work.

    Rows pass two steps, each in a thread: decoding, then writing. One thread at a time works at
    each step, and rows keep their order, so the next row group is decoded while the previous one is
    written. `place` has the fields of the file's manifest entry that do not depend on its content.
    """

    def __init__(
        self,
        directory: NodeDirectory,
        kind: type[SegmentFile | DeleteFile],
        place: Mapping[str, Any],
        *,
        schema: pa.Schema,
        key: str,
        node_id: str,
        row_group_bytes: int,
        limiter: CapacityLimiter,
    ) -> None:
        owner = {
            f"streamingnode.{name}": str(place[name])
            for name in ("collection_id", "segment_id")
            if name in place
        }
        metadata = {**owner, "streamingnode.node_id": node_id}
        self._file = ParquetFile(directory, place["path"], schema, key=key, metadata=metadata)
        self._kind = kind
        self._row_group_bytes = row_group_bytes
        self._limiter = limiter
        self.place = place
        self.rows = self.taken_bytes = 0  # added so far; sizes are encoded bytes
        self.pending_bytes = 0  # not yet taken by a thread
        self.writing_bytes = 0  # taken by threads and not yet written
        self.at_work = 0  # running tasks that spill or finish the file; their starter counts them
        # the manifest entry, once the file is finished
        self.described: SegmentFile | DeleteFile | None = None
        self._pending: list[Rows] = []
        self._decoding = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._discarded = False
        # A failure lost rows that were taken: the file can no longer be finished.
        self._broken = False

    @property
    def held_bytes(self) -> int:
        """Encoded size of the rows that are in memory."""
        return self.pending_bytes + self.writing_bytes

    def add(self, rows: Rows) -> None:
        """Append rows."""
        self._pending.append(rows)
        self.rows += rows.batch.rows
        self.taken_bytes += len(rows.batch.payload)
        self.pending_bytes += len(rows.batch.payload)

    def take(self, bytes_max: int | None = None) -> Sequence[Rows]:
        """Remove the oldest pending rows and return them: whole batches of up to `bytes_max`, at
        least one batch.
        """
        taken = (
            self._pending if bytes_max is None else next(split_rows(self._pending, bytes_max), [])
        )
        self._pending = self._pending[len(taken) :]
        self.pending_bytes -= encoded_bytes(taken)
        return taken

    async def finish(self) -> None:
        """Write the pending rows and the footer, and sync. Does nothing if the file is finished or
        discarded.
        """
        while self.pending_bytes > self._row_group_bytes:
            await self.spill()
        await self.spill(last=True)

    async def discard(self) -> None:
        """Close and remove the file and its rows. Cancellation does not interrupt this clean-up."""
        self._discarded = True
        self.take()
        with anyio.CancelScope(shield=True):
            async with self._decoding, self._writing:
                await in_thread(self._file.discard, limiter=self._limiter)

    async def spill(self, *, last: bool = False) -> None:
        """Write the oldest pending rows as a row group, after the spills under way. Raises
        `OSError`, `Corrupt`.

        With `last` it takes all pending rows and writes the footer after them.
        """
        async with self._decoding:
            self._check_whole()
            rows = self.take(None if last else self._row_group_bytes)
            size_bytes = encoded_bytes(rows)
            self.writing_bytes += size_bytes
            try:
                table = await in_thread(self._decode, rows, limiter=self._limiter) if rows else None
                # Acquired before the next rows can be decoded: that keeps the order.
                await self._writing.acquire()
            except BaseException:
                self.writing_bytes -= size_bytes
                self._broken = True
                raise
        try:
            self._check_whole()
            if self._discarded or self.described is not None:
                pass
            elif last:
                # One call, so that the file is open only while one of the threads works on it.
                written = await in_thread(self._file.finish, table, limiter=self._limiter)
                self.described = self._kind(**self.place, **written)
            elif table is not None:
                await in_thread(self._file.write, table, limiter=self._limiter)
        except BaseException:
            self._broken = True
            raise
        finally:
            self.writing_bytes -= size_bytes
            self._writing.release()

    def _check_whole(self) -> None:
        # Two tasks may finish one file, one for its seal and one for its cut. The second must not
        # finish a file that lost rows in the first.
        if self._broken and not self._discarded:
            raise OSError(errno.EIO, "an earlier write of the file failed", self.place["path"])

    def _decode(self, rows: Sequence[Rows]) -> pa.Table:
        return decode_rows(
            rows, self._file.schema, vchannel=self.place["vchannel"], kind=self._kind, whole=True
        )


class ParquetFile:
    """A Parquet file that gets the name `path` when it is published; one thread at a time writes
    it.

    The file is created with its first rows. `schema` is that of the messages, `key` is its key
    column, and `metadata` goes into the footer.
    """

    def __init__(
        self,
        directory: NodeDirectory,
        path: str,
        schema: pa.Schema,
        *,
        key: str,
        metadata: Mapping[str, str],
    ) -> None:
        self._directory = directory
        self._key = key
        self._metadata = metadata
        self._written: list[pq.FileMetaData] = []
        self._writer: pq.ParquetWriter | None = None
        self._sink: _ChecksummedFile | None = None
        self.schema = schema
        self.temporary_path = path + TEMPORARY_SUFFIX

    def write(self, table: pa.Table) -> None:
        """Append the rows of `table` and sync them. Blocks. After an `OSError` the file can only be
        discarded.
        """
        self._add(table)
        assert self._sink is not None
        self._sink.rest()

    def finish(self, last: pa.Table | None = None) -> dict[str, Any]:
        """Append the `last` rows and the footer, and sync; return the manifest fields that describe
        the content.
        """
        if last is not None:
            self._add(last)
        assert self._writer is not None
        assert self._sink is not None
        # The writer would store the schema it was opened with, and readers would find `_vchannel`
        # as a dictionary.
        arrow_schema = base64.b64encode(
            stored_schema(self.schema).serialize().to_pybytes()
        ).decode()
        self._writer.add_key_value_metadata(
            {**self._metadata, "streamingnode.format": FILE_FORMAT, "ARROW:schema": arrow_schema}
        )
        self._writer.close()
        failpoint("flush.footer_written")
        self._sink.rest()
        failpoint("flush.file_synced")
        self._sink.close()
        described = {
            "bytes": self._sink.length,
            "crc32c": self._sink.crc32c,
            "rows": self._written[0].num_rows,
        }
        for name, column in (("tick", TICK), ("offset", OFFSET), ("key", self._key)):
            described[f"{name}_min"], described[f"{name}_max"] = _bounds(self._written[0], column)
        return described

    def discard(self) -> None:
        """Close and remove the file, finished or not. Idempotent. Ignores errors of the disk: the
        next start removes what is left.
        """
        if self._sink is None:
            return
        self._sink.abandoned = True
        if self._writer is not None:
            with suppress(OSError, RuntimeError):  # after a failed write there is no footer
                self._writer.close()
        with suppress(OSError):
            self._sink.close()
        with suppress(OSError):
            self._directory.remove(self.temporary_path)

    def _add(self, table: pa.Table) -> None:
        if self._writer is None:
            self._writer = self._open(table)
        self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS_MAX)
        failpoint("flush.rows_written")

    def _open(self, first: pa.Table) -> pq.ParquetWriter:
        self._sink = _ChecksummedFile(self._directory, self.temporary_path)
        failpoint("flush.file_created")
        # Measured on rows of three columns: a dictionary of one value for `_vchannel` and delta
        # encoding for `_tick` and `_offset` cost 4 % over the user's columns alone; plain columns
        # cost 58 %.
        repetitive, ascending = encodings(first)
        return pq.ParquetWriter(
            self._sink,  # type: ignore[arg-type]  # it needs no more of a file than this has
            written_schema(self.schema),
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            use_dictionary=repetitive,  # type: ignore[arg-type]  # a list is fine
            column_encoding=dict.fromkeys(ascending, "DELTA_BINARY_PACKED"),
            # statistics of floating-point columns leave out NaN
            write_statistics=[
                each.name for each in first.schema if not pa.types.is_floating(each.type)
            ],
            write_page_checksum=True,
            store_schema=False,
            metadata_collector=self._written,
        )


class _ChecksummedFile:
    """A new file with one writer, written front to back. Counts the length and CRC32C of the bytes
    written.

    It holds a descriptor only from a write to the next `rest`: a node may have thousands of growing
    segments, and a process may open 1,024 files by default.
    """

    def __init__(self, directory: NodeDirectory, path: str) -> None:
        self._directory = directory
        self._path = path
        self._file: BinaryIO | None = directory.create(path)
        # Drops writes once set: Parquet's writer writes a footer even when it is closed after a
        # failure.
        self.abandoned = False
        self.closed = False
        self.length = 0
        self.crc32c = 0

    def write(self, data: bytes | memoryview) -> int:
        if not self.abandoned:
            if self._file is None:
                self._file = self._directory.append(self._path)
            self._file.write(data)
        self.crc32c = crc32c(data, self.crc32c)
        self.length += len(data)
        return len(data)

    def tell(self) -> int:
        return self.length

    def flush(self) -> None:
        """Do nothing: `rest` flushes and syncs."""

    def rest(self) -> None:
        """Sync the written bytes and close the descriptor; the next write opens the file again."""
        if self._file is None:
            return
        # Sync before closing. Linux reports a write-back error only to processes that have the file
        # open, or that open it while the inode is still in memory. If the inode were evicted, the
        # file would have a hole that no later sync reports.
        self._directory.sync(self._file)
        self._file.close()
        self._file = None

    def close(self) -> None:
        self.closed = True
        if self._file is not None:
            self._file.close()


def encodings(table: pa.Table) -> tuple[list[str], list[str]]:
    """Return the columns to store with a dictionary (texts that repeat) and with delta encoding
    (numbers that ascend).
    """
    sample = table.slice(0, DICTIONARY_SAMPLE_ROWS)
    repetitive = [VCHANNEL]
    ascending = [TICK, OFFSET]
    # the user's columns may have these names, too
    for name, column in zip(sample.column_names, sample.columns, strict=True):
        if any(is_text(column.type) for is_text in _IS_TEXT):
            if pc.count_distinct(column).as_py() <= DICTIONARY_DISTINCT_MAX * sample.num_rows:
                repetitive.append(name)
        # The writer would also apply a name with a dot to a field of a struct, which may have any
        # type.
        elif (
            "." not in name
            and any(is_whole(column.type) for is_whole in _IS_WHOLE)
            and _ascends(column)
        ):
            ascending.append(name)
    return repetitive, ascending


def _ascends(column: "pa.ChunkedArray[Any]") -> bool:
    values = column.drop_null()
    descents = int(np.count_nonzero(pc.less(values[1:], values[:-1]).to_numpy()))
    return len(values) > 1 and descents <= DESCENTS_MAX * len(values)


def _bounds(footer: pq.FileMetaData, column: str) -> tuple[Any, Any]:
    """Return the least and greatest value of an integer or text column.

    Returns None for both with other types, or when a row group lacks statistics.
    """
    leaves = [footer.schema.column(index) for index in range(footer.num_columns)]
    # The field `b` of a struct `a` has the same path as a column `a.b`, but another name.
    index = next(index for index, leaf in enumerate(leaves) if leaf.path == leaf.name == column)
    # Python cannot represent every date and time of Arrow.
    is_time = leaves[index].logical_type.type in {"DATE", "TIMESTAMP"}
    found = [
        footer.row_group(i).column(index).statistics
        for i in range(0 if is_time else footer.num_row_groups)
    ]
    bounds: list[Any] = [
        value for entry in found if entry and entry.has_min_max for value in (entry.min, entry.max)
    ]
    if len(bounds) < 2 * len(found) or {type(value) for value in bounds} not in ({int}, {str}):
        return None, None
    return min(bounds), max(bounds)


# --- rows of the log as columns -------------------------------------------------------------------
#
# Each payload is an encapsulated Arrow IPC record batch without its schema. Many of them after one
# schema message form an IPC stream, so one call decodes thousands of small messages. No work is
# done for single rows.


def written_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns for the writer: as stored, except that `_vchannel` is a dictionary of one
    value.
    """
    stored = stored_schema(schema)
    return stored.set(len(stored) - 1, pa.field(VCHANNEL, pa.dictionary(pa.int32(), pa.string())))


def decode_rows(
    rows: Sequence[Rows],
    schema: pa.Schema,
    *,
    vchannel: str,
    kind: type[DataFile],
    whole: bool = False,
) -> pa.Table:
    """Return messages of one vchannel as a table of `written_schema(schema)`, in order.

    Raises `Corrupt` when payloads do not decode or do not match their boundaries. `whole` says that
    `rows` has every message of each payload; a row outside of all boundaries is then `Corrupt`,
    too.
    """
    decoded = zip(_decode_payloads(rows, schema), rows, strict=True)
    batches = [_chosen(batch, each.batch, vchannel, whole=whole) for batch, each in decoded]
    counts = np.concatenate([each.batch.counts for each in rows]).astype(np.int64)
    ticks = np.concatenate([each.ticks.take(each.batch.groups) for each in rows]).astype(np.int64)
    table = pa.Table.from_batches(batches, schema=schema)
    if encoded_bytes(rows) < CHUNK_BYTES_MIN * len(batches):
        table = table.combine_chunks()
    names = pa.DictionaryArray.from_arrays(np.zeros(len(table), np.int32), [vchannel])
    columns = [*table.columns, np.repeat(ticks, counts), _offsets(rows, counts, kind), names]
    return pa.table(columns, schema=written_schema(schema))


def _chosen(batch: pa.RecordBatch, rows: RowBatch, vchannel: str, *, whole: bool) -> pa.RecordBatch:
    """Return the rows of a decoded payload that are within its boundaries: usually all of them."""
    first = rows.starts.item(0)
    count = rows.rows
    held = batch.num_rows
    end = rows.starts.item(-1) + rows.counts.item(-1)
    if end > held or (whole and count < held):
        raise Corrupt(
            f"a batch of {vchannel} holds {held} rows where its boundaries say {max(end, count)}"
        )
    if end - first == count:  # contiguous
        return batch if count == held else batch.slice(first, count)
    starts = np.repeat(rows.starts - (np.cumsum(rows.counts) - rows.counts), rows.counts)
    return batch.take(pa.array(starts.astype(np.int64) + np.arange(count)))


def split_rows(rows: Sequence[Rows], bytes_max: int) -> Iterator[Sequence[Rows]]:
    """Yield consecutive batches whose payloads add up to at most `bytes_max`; a larger batch comes
    alone.
    """
    start = 0
    total = 0
    for index, each in enumerate(rows):
        size_bytes = len(each.batch.payload)
        if index > start and total + size_bytes > bytes_max:
            yield rows[start:index]
            start = index
            total = 0
        total += size_bytes
    if start < len(rows):
        yield rows[start:]


def _decode_payloads(rows: Sequence[Rows], schema: pa.Schema) -> list[pa.RecordBatch]:
    prefix = schema.serialize().to_pybytes()
    batches: list[pa.RecordBatch] = []
    try:
        for part in split_rows(rows, JOIN_BYTES):
            payloads = [each.batch.payload for each in part]
            if encoded_bytes(part) < JOINED_PAYLOAD_BYTES_MAX * len(payloads):
                batches += pa.ipc.open_stream(b"".join((prefix, *payloads, _END_OF_STREAM)))
            else:
                batches += (
                    pa.ipc.read_record_batch(pa.py_buffer(payload), schema) for payload in payloads
                )
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(
            f"an entry passes its checksum but its rows do not decode: {error}"
        ) from error
    return batches


def _offsets(
    rows: Sequence[Rows], counts: npt.NDArray[np.int64], kind: type[DataFile]
) -> npt.NDArray[np.int64]:
    given = np.concatenate([each.batch.offsets for each in rows]).astype(np.int64)
    if kind is DeleteFile:
        # all deletes of one boundary have its offset; the offsets of rows count up from it
        return np.repeat(given, counts)
    return np.repeat(given - (np.cumsum(counts) - counts), counts) + np.arange(
        counts.sum(), dtype=np.int64
    )
