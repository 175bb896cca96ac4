"""Rows from a file or a pipe as record batches of bounded size: JSON lines or Parquet, told apart by the first bytes.

In: bytes. Out: `RowBatch`es, each of which knows the line or row it began at. A batch comes out whole or not at all, so that
a bad line never leaves half of its batch behind. Columns and types of a Parquet file are the node's to judge, as those of
every other batch; here only names are looked at, for all rows at once. Everything here blocks.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from streamingnode.cli.json_lines import JsonLines
from streamingnode.cli.row_batch import (
    BYTES_MAX,
    ROW_BYTES_MAX,
    ROWS_MAX,
    RowBatch,
    without_system_columns,
)
from streamingnode.rows.schema import AnyArray, child_fields, is_list
from wal.errors import InvalidArgument, StorageFailed, TooLarge, brief

PARQUET_MAGIC = b"PAR1"

READ_BYTES = 8 << 20
"""About as much of a Parquet file is decoded at a time."""
EXPANDED_BYTES_MAX, EXPANSION_MAX = 256 << 20, 100
"""A column of a row group that takes more bytes than this, and more times what it takes in the file, is not read: what
has to be decoded together cannot be told before, and a file of kilobytes can hold gigabytes of one value."""

_DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError)
"""What reading a damaged Parquet file raises."""


@contextmanager
def open_rows(name: str, stdin: BinaryIO) -> "Iterator[RowSource]":
    """Yield the rows of the file `name`, `-` for `stdin`. Raises `InvalidArgument` when it cannot be read."""
    if name == "-":
        with _open_stream(stdin) as source:
            yield source
        return
    with _open_file(Path(name)) as file, _open_stream(file) as source:
        yield source


def _open_file(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror} — name a file of JSON lines or Parquet") from error


@contextmanager
def _open_stream(stream: BinaryIO) -> "Iterator[RowSource]":
    head = _read_head(stream)
    if head != PARQUET_MAGIC:
        yield JsonLines(stream, head)
    elif stream.seekable():
        yield ParquetRows(stream)
    else:
        with tempfile.TemporaryFile() as spooled:
            spooled.write(head)
            shutil.copyfileobj(stream, spooled)
            yield ParquetRows(spooled)


def _read_head(stream: BinaryIO) -> bytes:
    """Return as much as tells the formats apart; a pipe may give less at a time than was written to it."""
    head = b""
    try:
        while PARQUET_MAGIC.startswith(head) and (more := stream.read(1)):
            head += more
            if head == PARQUET_MAGIC:
                break
    except OSError as error:
        raise StorageFailed(f"the input cannot be read: {error.strerror} — read it from elsewhere") from error
    return head


class ParquetRows:
    """The rows of one Parquet file; the system columns of a node's own files are left out. Used as `JsonLines`."""

    unit = "row"

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._passed_over = 0

    def infer_schema(self) -> pa.Schema:
        """Return the file's own columns."""
        with _damage():
            return without_system_columns(self._open().schema_arrow)

    def pass_over(self, last: int) -> bytes | None:
        """Go on behind row `last`, and return the digest; None when there are fewer rows."""
        self._passed_over = last
        with _damage():
            return self._digest() if self._open().metadata.num_rows >= last else None

    def batches(self, schema: pa.Schema) -> Iterator[RowBatch]:
        """Yield all rows, in order; once. Raises `SchemaMismatch`, `TooLarge`, or `StorageFailed`."""
        with _damage():
            file = self._open()
            given = without_system_columns(file.schema_arrow)
            _check_names(given.names, schema.names)
            digest, rows = self._digest(), _rows_at_a_time(file.metadata)
            reads = self._open(file.metadata).iter_batches(batch_size=rows, columns=given.names)
        first = 1
        while (read := _next(reads)) is not None:
            for batch in _slices(read, given, first):
                passed_over = min(batch.num_rows, max(0, self._passed_over + 1 - first))
                numbers = range(first + passed_over, first + batch.num_rows)
                first += batch.num_rows
                if numbers:
                    yield RowBatch(batch.slice(passed_over), unit=self.unit, numbers=numbers, digest=digest)

    def _digest(self) -> bytes:
        """Return the digest of the whole file at any row: it is written whole, or anew."""
        self._stream.seek(0)
        return hashlib.file_digest(self._stream, "sha256").digest()  # type: ignore[arg-type]  # it only reads

    def _open(self, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
        """Open the file; with its metadata, to be read with text and bytes each once, however many rows have them."""
        texts: list[str] = []
        if metadata is not None:
            columns = [metadata.schema.column(i) for i in range(metadata.num_columns)]
            texts = [each.path for each in columns if _is_text(each)]
        return pq.ParquetFile(
            self._stream, metadata=metadata, read_dictionary=texts, buffer_size=1 << 20, pre_buffer=False
        )


RowSource = JsonLines | ParquetRows


@contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise StorageFailed(f"the input is no whole Parquet file: {brief(str(error))} — write it again") from None


def _next(reads: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    with _damage():
        read = next(reads, None)
        if read is not None:
            read.validate(full=True)
        return read


def _check_names(given: list[str], wanted: list[str]) -> None:
    if missing := [name for name in wanted if name not in given]:
        raise SchemaMismatch(
            f"the file has no {', '.join(map(repr, missing))} — add what is missing, as null where there is no value",
            column=missing[0],
        )
    if extra := [name for name in given if name not in wanted]:
        raise SchemaMismatch(
            f"column {extra[0]!r} of the file is not in the collection — remove it, or insert into another",
            column=extra[0],
        )


def _is_text(column: pq.ColumnSchema) -> bool:
    return column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "DECIMAL"


def _rows_at_a_time(metadata: pq.FileMetaData) -> int:
    """Return how many rows are read together. Raises `TooLarge` for what cannot be read in bounded memory."""
    widest = 1.0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        width = 0.0
        for index in range(metadata.num_columns):
            kind, column = metadata.schema.column(index), group.column(index)
            decoded = column.num_values * max(8, kind.length or 0)
            width += decoded / max(1, group.num_rows)
            expanded = max(column.total_uncompressed_size, decoded if kind.max_repetition_level else 0)
            if expanded > max(EXPANDED_BYTES_MAX, EXPANSION_MAX * column.total_compressed_size):
                raise TooLarge(
                    f"column {kind.path!r} takes {expanded >> 20} MiB in memory for "
                    f"{column.total_compressed_size} bytes in the file — write the file with smaller row groups"
                )
        widest = max(widest, width)
    return max(1, min(ROWS_MAX, int(READ_BYTES / widest)))


def _slices(batch: pa.RecordBatch, schema: pa.Schema, first: int) -> Iterator[pa.RecordBatch]:
    """Yield the batch in pieces of at most `BYTES_MAX`: one that exceeds an append group would not be applied as one.

    Only then are texts and bytes written out for each row. Raises `TooLarge` for row `first` of the file when it is.
    """
    size_bytes = sum(map(_plain_bytes, batch.columns))
    if size_bytes <= BYTES_MAX or (batch.num_rows == 1 and size_bytes <= ROW_BYTES_MAX):
        if any(field.type.num_fields for field in schema):
            batch = batch.take(pa.array(range(batch.num_rows)))  # a cast would write out what other slices' lists hold
        yield pa.RecordBatch.from_arrays(
            [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)], schema=schema
        )
    elif batch.num_rows == 1:
        raise TooLarge(f"row {first} is over {ROW_BYTES_MAX >> 20} MiB — keep large values elsewhere, by reference")
    else:
        half = batch.num_rows // 2
        yield from _slices(batch.slice(0, half), schema, first)
        yield from _slices(batch.slice(half), schema, first + half)


def _plain_bytes(array: AnyArray) -> int:
    """Return the bytes of the array with its texts written out."""
    if isinstance(array, pa.DictionaryArray):
        lengths: AnyArray = pc.binary_length(array.dictionary)  # type: ignore[call-overload]  # of texts or bytes
        return 4 * len(array) + (pc.sum(lengths.take(array.indices)).as_py() or 0)
    if is_list(array.type):
        return 4 * len(array) + _plain_bytes(pc.list_flatten(array))
    if pt.is_struct(array.type):
        return sum(_plain_bytes(pc.struct_field(array, index)) for index in range(len(child_fields(array.type))))
    return array.nbytes
