"""One file of a cut, from its first row to its name on disk: rows wait in memory, worker threads
decode and write them.

Plain Parquet, as `docs/format.md` has it in section "Segment file". After an `OSError` the file is
of no use: the flusher gives up everything since its checkpoint and reads it again, which is also
what a crash makes it do.
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
"""Value of the metadata key `streamingnode.format` of files this release writes."""

ROW_GROUP_ROWS_MAX = 1 << 20
"""Keeps what a reader must hold at once small, whatever the width of a row."""

ZSTD_LEVEL = 1
"""Higher levels take a third more time for a few per cent of space on rows that Spark rewrites
anyway.
"""

DICTIONARY_SAMPLE_ROWS = 8192
DICTIONARY_DISTINCT_MAX = 0.25
"""A text column whose first rows repeat this much gets a dictionary, smaller and faster to read;
others would only pay.
"""

DESCENTS_MAX = 0.05
"""Whole numbers and times of which no more of the first go down are stored as differences: a third
of the time to write, and a hundredth of the space, for keys and times that count up; a little
larger when what follows does not."""

JOIN_BYTES = 4 << 20
"""Payloads are copied together this many bytes at a time: `bytes.join` holds the interpreter, for
about 1 ms then.
"""

JOINED_PAYLOAD_BYTES_MAX = 8 << 10
"""Payloads larger than this on average are decoded one by one: that takes 7 us each, and copies
nothing.
"""

CHUNK_BYTES_MIN = 32 << 10
"""Smaller chunks are joined before Parquet sees them, which takes 2 to 3 us for each. Joining 32
KiB takes 2 us, and up to 50 us where memory is new to the process: all rows are there twice then.
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
    """A batch of the log, and the tick of each group of its entry."""

    batch: RowBatch
    ticks: Numbers

    @classmethod
    def of(cls, batch: RowBatch, ticks: Numbers) -> Self:
        """Return rows that keep no more than twice their bytes of an entry in memory: keys deleted
        would keep all of it.
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
    """Return what rows take as the log holds them."""
    return sum([len(each.batch.payload) for each in rows])


class FileInProgress:
    """One file between its first row and its cut; lives on the event loop, works in threads of
    `limiter`.

    Rows take two steps, each a thread's: decoded, then written. One thread at a time works at each,
    and rows pass from the first to the second in order, so the next row group is decoded while the
    last is written. `place` is what the manifest says of the file besides what is written.
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
        self.rows = self.taken_bytes = 0  # ever added; sizes are those of encoded rows
        self.pending_bytes = 0  # that no thread has taken yet
        self.writing_bytes = 0  # that threads are working on
        self.at_work = 0  # tasks that spill or finish the file; kept by who starts them
        # what the manifest says of it, once it is finished
        self.described: SegmentFile | DeleteFile | None = None
        self._pending: list[Rows] = []
        self._decoding = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._discarded = False
        # rows were taken and did not get into the file: it is never finished without them
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
        """Return the oldest rows not taken yet, and forget them: whole batches of up to
        `bytes_max`, one at least.
        """
        taken = (
            self._pending if bytes_max is None else next(split_rows(self._pending, bytes_max), [])
        )
        self._pending = self._pending[len(taken) :]
        self.pending_bytes -= encoded_bytes(taken)
        return taken

    async def finish(self) -> None:
        """Write what is pending and the footer, and sync, unless that was done or the file
        discarded meanwhile.
        """
        while self.pending_bytes > self._row_group_bytes:
            await self.spill()
        await self.spill(last=True)

    async def discard(self) -> None:
        """Close and remove the file, and forget its rows; a clean-up, so it is not cancelled half
        way.
        """
        self._discarded = True
        self.take()
        with anyio.CancelScope(shield=True):
            async with self._decoding, self._writing:
                await in_thread(self._file.discard, limiter=self._limiter)

    async def spill(self, *, last: bool = False) -> None:
        """Write the oldest pending rows as a row group, or wait for those under way. Raises
        `OSError`, `Corrupt`.

        With `last` all rows are taken, and the footer is written behind them.
        """
        async with self._decoding:
            self._check_whole()
            rows = self.take(None if last else self._row_group_bytes)
            size_bytes = encoded_bytes(rows)
            self.writing_bytes += size_bytes
            try:
                table = await in_thread(self._decode, rows, limiter=self._limiter) if rows else None
                # before the next rows may be decoded: that keeps the order
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
                # In one call, so that the file is open for no longer than one of the threads works
                # on it.
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
        # Two tasks may finish one file, for its seal and for its cut: the second must not take over
        # what the first lost.
        if self._broken and not self._discarded:
            raise OSError(errno.EIO, "an earlier write of the file failed", self.place["path"])

    def _decode(self, rows: Sequence[Rows]) -> pa.Table:
        return decode_rows(
            rows, self._file.schema, vchannel=self.place["vchannel"], kind=self._kind, whole=True
        )


class ParquetFile:
    """A file that will be `path` when it is published, written by one thread at a time; nothing is
    on disk before its rows.

    `schema` is that of the messages, `key` its key column, `metadata` goes into the footer.
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
        """Append and sync the rows of `table`. Blocks. Raises `OSError`; the file is then of no use
        but to be discarded.
        """
        self._add(table)
        assert self._sink is not None
        self._sink.rest()

    def finish(self, last: pa.Table | None = None) -> dict[str, Any]:
        """Append the `last` rows and the footer, and sync; return what the manifest says of the
        rows and bytes.
        """
        if last is not None:
            self._add(last)
        assert self._writer is not None
        assert self._sink is not None
        # The writer would store the schema it was given, and readers would find a dictionary in
        # `_vchannel`.
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
        """Close and remove what was written, finished or not; idempotent. What the disk refuses,
        the next start does.
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
        # Encodings were measured on rows of three columns: a dictionary of one value for
        # `_vchannel` and delta encoding for `_tick` and `_offset` together cost 4 % over the user's
        # columns alone, where plain columns cost 58 %.
        repetitive, ascending = encodings(first)
        return pq.ParquetWriter(
            self._sink,  # type: ignore[arg-type]  # it needs no more of a file than this has
            written_schema(self.schema),
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            use_dictionary=repetitive,  # type: ignore[arg-type]  # a list is fine
            column_encoding=dict.fromkeys(ascending, "DELTA_BINARY_PACKED"),
            # the statistics of floating columns would leave out NaN
            write_statistics=[
                each.name for each in first.schema if not pa.types.is_floating(each.type)
            ],
            write_page_checksum=True,
            store_schema=False,
            metadata_collector=self._written,
        )


class _ChecksummedFile:
    """A new file for one writer, front to back, whose length and CRC32C are those of what was
    handed to it.

    It has a descriptor only from a write to the next `rest`: a node may have thousands of growing
    segments, and a process may open 1,024 files by default.
    """

    def __init__(self, directory: NodeDirectory, path: str) -> None:
        self._directory = directory
        self._path = path
        self._file: BinaryIO | None = directory.create(path)
        # once it is, writes go nowhere: Parquet's writer insists on a footer even so
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
        """`rest` is what hands bytes over."""

    def rest(self) -> None:
        """Sync what was written and give the descriptor back; the next write opens the file
        again.
        """
        if self._file is None:
            return
        # Not without a sync: Linux reports an error of its own writing only to who has the file
        # open, or opens it while the inode is still in memory. Evicted meanwhile, the file would
        # have a hole that no later sync tells of.
        self._directory.sync(self._file)
        self._file.close()
        self._file = None

    def close(self) -> None:
        self.closed = True
        if self._file is not None:
            self._file.close()


def encodings(table: pa.Table) -> tuple[list[str], list[str]]:
    """Return the columns to store with a dictionary (texts that repeat) and as differences (numbers
    that ascend).
    """
    sample = table.slice(0, DICTIONARY_SAMPLE_ROWS)
    repetitive = [VCHANNEL]
    ascending = [TICK, OFFSET]
    # the columns named above may come again here
    for name, column in zip(sample.column_names, sample.columns, strict=True):
        if any(is_text(column.type) for is_text in _IS_TEXT):
            if pc.count_distinct(column).as_py() <= DICTIONARY_DISTINCT_MAX * sample.num_rows:
                repetitive.append(name)
        # The writer would take a name with a dot for a field of a struct, too, which may be of any
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
    """Return the least and greatest value of a column of whole numbers or text; None for others, or
    where one is unknown.
    """
    leaves = [footer.schema.column(index) for index in range(footer.num_columns)]
    # The field `b` of a struct `a` has the path of a column `a.b`, and another name.
    index = next(index for index, leaf in enumerate(leaves) if leaf.path == leaf.name == column)
    # Python does not have all that Arrow has
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
# schema message are an IPC stream, so one call decodes thousands of small messages; nothing is done
# once per row.


def written_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns as the writer is given them: as stored, but `_vchannel` as a dictionary of
    one value.
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

    Raises `Corrupt`, also for rows without a boundary where the messages are all of those in the
    log: the `whole` of them.
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
    """Return the rows of a decoded payload that belong to its boundaries: mostly all."""
    first = rows.starts.item(0)
    count = rows.rows
    held = batch.num_rows
    end = rows.starts.item(-1) + rows.counts.item(-1)
    if end > held or (whole and count < held):
        raise Corrupt(
            f"a batch of {vchannel} holds {held} rows where its boundaries say {max(end, count)}"
        )
    if end - first == count:  # one after the other
        return batch if count == held else batch.slice(first, count)
    starts = np.repeat(rows.starts - (np.cumsum(rows.counts) - rows.counts), rows.counts)
    return batch.take(pa.array(starts.astype(np.int64) + np.arange(count)))


def split_rows(rows: Sequence[Rows], bytes_max: int) -> Iterator[Sequence[Rows]]:
    """Yield consecutive batches whose payloads add up to at most `bytes_max`, or single ones that
    are larger alone.
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
        # deletes of one boundary all have its offset, rows count up from it
        return np.repeat(given, counts)
    return np.repeat(given - (np.cumsum(counts) - counts), counts) + np.arange(
        counts.sum(), dtype=np.int64
    )
