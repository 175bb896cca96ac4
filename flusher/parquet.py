"""One Parquet file from its first row group to its name on disk.

In: tables of `rows.written_schema`, each becoming one or more row groups. Out: a file under its temporary name, synced, and
a `WrittenFile` that says what is in it; `cut_writer` renames it. Plain Parquet: zstd, a checksum on every page, statistics,
read as it is by pandas, DuckDB and Spark.

Encodings were measured on rows of three columns: `_vchannel` as a dictionary of one value and delta encoding for `_tick` and
`_offset` together cost 4 % over the user's columns alone, where plain columns cost 58 %. `docs/format.md`, section
"Segment file", is the reference.
"""

import base64
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flusher.directory import TEMPORARY_SUFFIX, NodeDirectory
from flusher.rows import OFFSET, TICK, VCHANNEL, stored_schema, written_schema
from wal.codec import crc32c
from wal.failpoint import failpoint

# --- checksummed file ---
#
# A file whose length and CRC32C are those of what was handed to it, not of what the disk made of that.
#
# Parquet's writer sees an ordinary file object. The checksum ends up in the cut's manifest, so a reader finds every byte
# that changed after it left this process. The file has a descriptor only from a write to the next `rest`: a node may have
# thousands of growing segments, and a process may open 1,024 files by default.


class ChecksummedFile:
    """A new file at `path` for one writer, front to back; `length` and `crc32c` are of everything written so far.

    Whatever touches the disk raises `OSError`; the file is then of no use but to be removed.
    """

    def __init__(self, directory: NodeDirectory, path: str) -> None:
        self._directory = directory
        self._path = path
        self._file: BinaryIO | None = directory.create(path)
        self._abandoned = False
        self.closed = False
        self.length = 0
        self.crc32c = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`."""
        if not self._abandoned:
            if self._file is None:
                self._file = self._directory.append(self._path)
            self._file.write(data)
        self.crc32c = crc32c(data, self.crc32c)
        self.length += len(data)
        return len(data)

    def tell(self) -> int:
        """Return the position, which is the length."""
        return self.length

    def flush(self) -> None:
        """Do nothing: `rest` is what hands bytes over."""

    def rest(self) -> None:
        """Sync what was written and give the descriptor back; the next write opens the file again."""
        if self._file is None:
            return
        # Not without a sync: Linux reports an error of its own writing only to who has the file open, or opens it while the
        # inode is still in memory. Evicted meanwhile, the file would have a hole that no later sync tells of.
        self._directory.sync(self._file)
        self._file.close()
        self._file = None

    def abandon(self) -> None:
        """Let everything written from now on go nowhere: Parquet's writer insists on a footer even for a file given up."""
        self._abandoned = True

    def close(self) -> None:
        """Close the file, as it is."""
        self.closed = True
        if self._file is not None:
            self._file.close()


FILE_FORMAT = "1"
"""Value of the metadata key `streamingnode.format` of files this release writes."""

ROW_GROUP_ROWS_MAX = 1 << 20
"""Keeps what a reader must hold at once small, whatever the width of a row."""

ZSTD_LEVEL = 1
"""Higher levels take a third more time for a few per cent of space on rows that Spark rewrites anyway."""

DICTIONARY_SAMPLE_ROWS = 8192
DICTIONARY_DISTINCT_MAX = 0.25
"""A text column whose first rows repeat this much gets a dictionary, smaller and faster to read; others would only pay."""


DESCENTS_MAX = 0.05
"""Whole numbers and times of which no more of the first go down are stored as differences: a third of the time to write, and
a hundredth of the space, for keys and times that count up; a little larger when what follows does not."""


class WrittenFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished file holds; ranges are inclusive, key bounds None where the key has no JSON form."""

    bytes: int
    crc32c: int
    rows: int
    tick_min: int
    tick_max: int
    offset_min: int
    offset_max: int
    key_min: int | str | None
    key_max: int | str | None


class ParquetFile:
    """A file that will be `path`, written by one thread at a time; nothing is on disk before the first rows.

    It has a descriptor only while a call runs, so no more files are open than threads write. `schema` is that of the
    messages, `key` its key column, `metadata` goes into the footer.
    """

    def __init__(
        self, directory: NodeDirectory, path: str, schema: pa.Schema, *, key: str, metadata: Mapping[str, str]
    ) -> None:
        self._directory = directory
        self._schema = schema
        self._key = key
        self._metadata = metadata
        self._written: list[pq.FileMetaData] = []
        self._writer: pq.ParquetWriter | None = None
        self._sink: ChecksummedFile | None = None
        self.path = path

    @property
    def temporary_path(self) -> str:
        """The file's name until it is published."""
        return self.path + TEMPORARY_SUFFIX

    def write(self, table: pa.Table) -> None:
        """Append and sync the rows of `table`. Blocks. Raises `OSError`; the file is then of no use but to be discarded."""
        self._add(table)
        assert self._sink is not None
        self._sink.rest()

    def finish(self, last: pa.Table | None = None) -> WrittenFile:
        """Append the `last` rows and the footer, and sync; at least one row was written. Blocks. Raises as `write` does."""
        if last is not None:
            self._add(last)
        assert self._writer is not None
        assert self._sink is not None
        self._writer.add_key_value_metadata(self._footer())
        self._close_writer()
        failpoint("flush.footer_written")
        self._sink.rest()
        failpoint("flush.file_synced")
        self._sink.close()
        return _describe(self._written[0], self._sink, key=self._key)

    def discard(self) -> None:
        """Close and remove what was written, finished or not; idempotent. Blocks.

        A disk that refuses even this is no error: a start removes temporary files too.
        """
        if self._sink is None:
            return
        self._sink.abandon()
        for step in (self._close_writer, self._sink.close, self._remove):
            with suppress(OSError, RuntimeError):  # RuntimeError: closing a writer after a failed write has no footer
                step()

    def _add(self, table: pa.Table) -> None:
        if self._writer is None:
            self._writer = self._open(table)
        self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS_MAX)
        failpoint("flush.rows_written")

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _remove(self) -> None:
        self._directory.remove(self.temporary_path)

    def _open(self, first: pa.Table) -> pq.ParquetWriter:
        self._sink = ChecksummedFile(self._directory, self.temporary_path)
        failpoint("flush.file_created")
        return pq.ParquetWriter(
            self._sink,  # type: ignore[arg-type]  # it needs no more of a file than this has
            written_schema(self._schema),
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            use_dictionary=[VCHANNEL, *repetitive_columns(first)],  # type: ignore[arg-type]  # a list is fine
            column_encoding=dict.fromkeys([TICK, OFFSET, *ascending_columns(first)], "DELTA_BINARY_PACKED"),
            write_page_checksum=True,
            store_schema=False,
            metadata_collector=self._written,
        )

    def _footer(self) -> dict[str, str]:
        # The writer would store the schema it was given, and readers would find a dictionary in `_vchannel`.
        arrow_schema = base64.b64encode(stored_schema(self._schema).serialize().to_pybytes()).decode()
        return {**self._metadata, "streamingnode.format": FILE_FORMAT, "ARROW:schema": arrow_schema}


def repetitive_columns(table: pa.Table) -> list[str]:
    """Return the text and binary columns that repeat themselves enough for a dictionary, judged by the first rows."""
    sample = table.slice(0, DICTIONARY_SAMPLE_ROWS)
    return [
        field.name
        for field, column in zip(sample.schema, sample.columns, strict=True)
        if _is_text(field.type) and pc.count_distinct(column).as_py() <= DICTIONARY_DISTINCT_MAX * sample.num_rows
    ]


def ascending_columns(table: pa.Table) -> list[str]:
    """Return the columns of whole numbers or times that ascend, or nearly, judged by the first rows.

    Never one with a dot in its name: the writer would take it for a field of a struct, too, which may be of any type.
    """
    sample = table.slice(0, DICTIONARY_SAMPLE_ROWS)
    return [
        field.name
        for field, column in zip(sample.schema, sample.columns, strict=True)
        if field.name not in {TICK, OFFSET} and "." not in field.name and _is_whole(field.type) and _ascends(column)
    ]


def _is_whole(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind)


def _ascends(column: "pa.ChunkedArray[Any]") -> bool:
    values = _as_integers(pa.concat_arrays(column.drop_null().chunks))
    return len(values) > 1 and int(np.count_nonzero(values[1:] < values[:-1])) <= DESCENTS_MAX * len(values)


def _as_integers(array: "pa.Array[Any]") -> npt.NDArray[np.int64] | npt.NDArray[np.int32]:
    """Return whole numbers, or what times are stored as, without nulls."""
    match array.type.bit_width:
        case 64:
            return array.view(pa.int64()).to_numpy()
        case 32:
            return array.view(pa.int32()).to_numpy()
        case _:
            return array.cast(pa.int32()).to_numpy()


def _is_text(kind: pa.DataType) -> bool:
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _describe(footer: pq.FileMetaData, sink: ChecksummedFile, *, key: str) -> WrittenFile:
    key_min, key_max = _bounds(footer, key)
    tick_min, tick_max = _integer_bounds(footer, TICK)
    offset_min, offset_max = _integer_bounds(footer, OFFSET)
    return WrittenFile(
        bytes=sink.length,
        crc32c=sink.crc32c,
        rows=footer.num_rows,
        tick_min=tick_min,
        tick_max=tick_max,
        offset_min=offset_min,
        offset_max=offset_max,
        key_min=key_min,
        key_max=key_max,
    )


def _integer_bounds(footer: pq.FileMetaData, column: str) -> tuple[int, int]:
    low, high = _bounds(footer, column)
    assert isinstance(low, int)
    assert isinstance(high, int)
    return low, high


def _bounds(footer: pq.FileMetaData, column: str) -> tuple[int, int] | tuple[str, str] | tuple[None, None]:
    """Return the least and greatest value of a column from the statistics of its row groups; they are exact, or absent."""
    leaves = [footer.schema.column(index) for index in range(footer.num_columns)]
    # The field `b` of a struct `a` has the path of a column `a.b`, and another name.
    index = next(index for index, leaf in enumerate(leaves) if leaf.path == leaf.name == column)
    found = [footer.row_group(i).column(index).statistics for i in range(footer.num_row_groups)]
    bounds = [value for entry in found if entry and entry.has_min_max for value in (entry.min, entry.max)]
    if len(bounds) < 2 * len(found):
        return None, None
    integers = [value for value in bounds if type(value) is int]
    texts = [value for value in bounds if type(value) is str]
    if len(integers) == len(bounds):
        return min(integers), max(integers)
    if len(texts) == len(bounds):
        return min(texts), max(texts)
    return None, None
