"""Rows from a file or a pipe as record batches of bounded size: JSON lines or Parquet, told apart by the first bytes.

In: bytes. Out: `RowBatch`es of a collection's columns, each of which knows the line or row it began at. A batch comes out
whole or not at all, so that a bad line never leaves half of its batch behind. Everything here blocks.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

from streamingnode.cli.json_lines import JsonLines
from streamingnode.cli.row_batch import BYTES_MAX, ROWS_MAX, RowBatch, said
from streamingnode.cli.row_types import kept_schema, without_system_columns
from wal.errors import InvalidArgument, SchemaMismatch

PARQUET_MAGIC = b"PAR1"


class RowSource(Protocol):
    """Where rows come from."""

    def infer_schema(self) -> pa.Schema:
        """Return columns that can hold the rows, as far as the first of them tell."""

    def batches(self, schema: pa.Schema) -> Iterator[RowBatch]:
        """Yield all rows with the columns of `schema`, in order; once. Raises `SchemaMismatch` or `InvalidArgument`."""


@contextmanager
def open_rows(name: str, stdin: BinaryIO) -> Iterator[RowSource]:
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
def _open_stream(stream: BinaryIO) -> Iterator[RowSource]:
    # A buffered reader of a file, a pipe or a terminal has `peek`; typing calls them all BinaryIO.
    start = cast("_Peekable", stream).peek(len(PARQUET_MAGIC))[: len(PARQUET_MAGIC)]
    if start != PARQUET_MAGIC:
        yield JsonLines(stream)
    elif stream.seekable():
        yield ParquetRows(stream)
    else:
        with tempfile.TemporaryFile() as spooled:
            shutil.copyfileobj(stream, spooled)
            yield ParquetRows(spooled)


class _Peekable(Protocol):
    def peek(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ParquetRows:
    """The rows of one Parquet file; the system columns of a node's own files are left out."""

    stream: IO[bytes]

    def infer_schema(self) -> pa.Schema:
        """See `RowSource`."""
        return kept_schema(without_system_columns(self._open().schema_arrow))

    def batches(self, schema: pa.Schema) -> Iterator[RowBatch]:
        """See `RowSource`."""
        file = self._open()
        given = without_system_columns(file.schema_arrow)
        if extra := [name for name in given.names if name not in schema.names]:
            raise SchemaMismatch(
                f"column {extra[0]!r} of the file is not in the collection — remove it, or insert into another",
                column=extra[0],
            )
        first = 1
        for read in file.iter_batches(batch_size=ROWS_MAX, columns=given.names):
            for batch in _slices(read):
                numbers = range(first, first + batch.num_rows)
                yield RowBatch(_conform(batch, schema, first), unit="row", numbers=numbers)
                first += batch.num_rows

    def _open(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.stream)
        except pa.ArrowException as error:
            raise InvalidArgument(f"the input is no whole Parquet file: {error} — write it again") from error


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the batch in pieces of about `BYTES_MAX`: one that exceeds an append group would not be applied as one."""
    rows = max(1, batch.num_rows * BYTES_MAX // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _conform(batch: pa.RecordBatch, schema: pa.Schema, first: int) -> pa.RecordBatch:
    """Return the batch with the columns of `schema`; one that is missing is null."""
    columns = []
    for field in schema:
        if field.name not in batch.schema.names:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        try:
            columns.append(batch[field.name].cast(field.type))
        except pa.ArrowException as error:
            rows = f"rows {first} to {first + batch.num_rows - 1}"
            raise SchemaMismatch(
                f"column {field.name!r}, {rows}: {said(error)} — change the column's type in the file",
                column=field.name,
            ) from None  # Arrow quotes the value, whole
    return pa.RecordBatch.from_arrays(columns, names=schema.names)
