"""Rows from a file or a pipe in batches of bounded size, JSON lines or Parquet. Everything here
blocks.
"""

import codecs
import gzip
import hashlib
import select
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from streamingnode.casting import exact_cast
from streamingnode.cli.kept_columns import has_nanoseconds, kept_columns
from streamingnode.cli.parquet_in import READ_BYTES, ParquetInput
from streamingnode.json_mistake import Mistake, json_kind, mistake_in
from streamingnode.rows import PANDAS_INDEX, by_row
from streamingnode.schema import (
    FINER_TIME,
    AnyArray,
    AnyField,
    Row,
    child_fields,
    is_list,
    json_type,
    row_decoder,
    with_leaves,
)
from streamingnode.writing.write import slices_within
from wal.errors import InvalidArgument, StorageFailed, TooLarge, brief, shown

ROWS_MAX = 10_000
"""Rows in a batch: enough that an fsync for each batch costs nothing, few enough that a bad line
rejects little.
"""
BYTES_MAX = 1 << 20
"""Bytes of input in a batch, which keep it well below one append group of 4 MiB."""
ROW_BYTES_MAX = 4 << 20
"""Maximum bytes of a line: a row above the size of an append group cannot be inserted."""
BATCH_S = 0.2
"""How many seconds a line from a pipe waits for others to join its batch."""

PARQUET_MAGIC = b"PAR1"
GZIP_MAGIC = b"\x1f\x8b"
_UNPACK = "unpack it first, with {} -d, or in a pipe with {} -dc"
_NO_ROWS: dict[bytes, tuple[str, str]] = {
    b"\x28\xb5\x2f\xfd": ("packed with zstd", _UNPACK.format("zstd", "zstd")),
    b"\xfd7zXZ": ("packed with xz", _UNPACK.format("xz", "xz")),
    b"BZh": ("packed with bzip2", _UNPACK.format("bzip2", "bzip2")),
    b"\x04\x22\x4d\x18": ("packed with lz4", _UNPACK.format("lz4", "lz4")),
    b"PK\x03\x04": ("a ZIP archive", "unpack it first, or in a pipe with unzip -p"),
    b"ARROW1": ("an Arrow file", "write it as Parquet"),
    b"\xff\xff\xff\xff": ("an Arrow stream", "write it as Parquet"),
    b"ORC": ("an ORC file", "write it as Parquet"),
    b"Obj\x01": ("an Avro file", "write it as Parquet"),
    b"\xff\xfe": ("text in UTF-16", "write it in UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "write it in UTF-8"),
}
"""First bytes of inputs that are neither JSON nor Parquet, with the kind of input and the next
step.
"""
SYSTEM_COLUMNS = frozenset({"_tick", "_offset", "_vchannel", "_partition"})
"""The columns that a node and its tables add to rows; they are dropped when the rows are inserted
again.
"""

_BLOCK_BYTES = 1 << 18
"""More than a buffered reader holds, so that it keeps no data that `select` does not see."""

Line = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows, and the number of each row's line or row (`unit`) in the input, from 1.

    `digest` is a digest of the input up to and including the last of them, which identifies the
    input.
    """

    rows: list[Row] | pa.RecordBatch
    unit: str
    numbers: Sequence[int]
    digest: bytes

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Convert the `SchemaMismatch` of a row in the block from its place in the batch to its
        place in the input.
        """
        try:
            yield
        except SchemaMismatch as error:
            if error.row is None:
                raise
            number = self.numbers[error.row]
            text = str(error).replace(f"row {error.row}", f"{self.unit} {number}", 1)
            raise SchemaMismatch(text, column=error.column, row=number) from error


@contextmanager
def open_rows(name: str, stdin: BinaryIO | None) -> "Iterator[JsonLines | ParquetRows]":
    """Yield the rows of the file `name`, `-` for `stdin`. Raises `InvalidArgument` when it cannot
    be read.
    """
    if name == "-" and stdin is None:
        raise InvalidArgument("stdin is closed — name a file, or send one through a pipe")
    shown_name = "the input" if name == "-" else name
    with ExitStack() as opened:
        try:
            stream: Any = stdin if name == "-" else opened.enter_context(Path(name).open("rb"))
            # Close stdin too: after an interrupt a thread may still wait for lines, and the program
            # for the thread.
            opened.callback(stream.close)
            head = stream.peek(1)
        except OSError as error:
            step = "name a file of JSON lines or Parquet"
            raise InvalidArgument(f"cannot read {name}: {error.strerror} — {step}") from error
        if head.startswith(GZIP_MAGIC):
            if not stream.seekable():
                what = "compressed with gzip, which can only be read from a file"
                step = "unpack it in the pipe, with gunzip -c, or name the file"
                raise InvalidArgument(f"the input is {what} — {step}")
            begin = stream.tell()
            _check_gzip(stream)
            stream.seek(begin)
            stream = opened.enter_context(gzip.open(stream))
            with _readable():
                head = stream.peek(1)
            if head.startswith((PARQUET_MAGIC, GZIP_MAGIC)):
                what = "gzip around compressed data"
                raise InvalidArgument(f"{shown_name} is {what} — unpack it first, with gunzip")
        for magic, (what, step) in _NO_ROWS.items():
            if head.startswith(magic):
                raise InvalidArgument(f"{shown_name} is {what} — {step}")
        is_parquet = head.startswith(PARQUET_MAGIC)
        if is_parquet and not stream.seekable():
            raise InvalidArgument(
                "Parquet is read from its end, which a pipe cannot provide — name the file"
            )
        yield ParquetRows(stream) if is_parquet else JsonLines(stream)


def _check_gzip(stream: BinaryIO) -> None:
    """Decompress all of a gzip file once. Raises `StorageFailed` when any of it is damaged.

    A member's checksum is at its end, so no row may be inserted before all of it has been checked.
    """
    with _readable(), gzip.open(stream) as unpacked:
        try:
            while unpacked.read(READ_BYTES):
                pass
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            what = f"the gzip file is damaged: {brief(str(error))}; nothing of it is inserted"
            raise StorageFailed(f"{what} — compress it again") from None


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, EOFError, zlib.error) as error:
        raise StorageFailed(
            f"the input cannot be read completely: {brief(str(error))} — write it again"
        ) from None


class JsonLines:
    """The rows of a buffered stream of JSON objects, one on each line."""

    unit = "line"
    left_out = ()

    def __init__(self, stream: IO[bytes]) -> None:
        self._is_live = not stream.seekable()
        self._lines = self._numbered(stream)
        self._ahead: list[Line] = []
        self._digest = hashlib.sha256()

    def infer_schema(self) -> pa.Schema:
        """Return columns that hold the values of the first batch. Raises `InvalidArgument` when
        there is no row, `SchemaMismatch`.
        """
        self._ahead = self._read()
        rows = _decoded(self._ahead, msgspec.json.Decoder(Row).decode, None)
        if not rows:
            raise InvalidArgument("there are no rows to take columns from — give at least one line")
        names = dict.fromkeys(chain.from_iterable(rows))
        numbers = [number for number, _ in self._ahead]
        columns = {name: [row.get(name) for row in rows] for name in names}
        return pa.schema([_inferred(name, values, numbers) for name, values in columns.items()])

    def pass_over(self, last: int) -> bytes | None:
        """Skip the input up to line `last`, and return its digest; None when there is no such
        line.
        """
        for number, line in filter(None, self._lines):
            self._digest.update(line)
            if number >= last:
                return self._digest.digest() if number == last else None
        return None

    def batches(self, schema: pa.Schema) -> Iterator[RowBatch]:
        """Yield all rows. Raises `SchemaMismatch` naming a line, before any row of its batch is
        yielded.
        """
        decode = row_decoder(schema)
        while read := self._ahead or self._read():
            self._ahead = []
            rows = _decoded(read, decode, schema)
            self._digest.update(b"".join(line for _, line in read))
            yield RowBatch(rows, self.unit, [number for number, _ in read], self._digest.digest())

    def _read(self) -> list[Line]:
        """Return the lines of the next batch; empty only at the end of the input."""
        read: list[Line] = []
        size = 0
        due = 0.0
        for each in self._lines:
            if each is not None:
                due = due or time.monotonic() + BATCH_S
                read.append(each)
                size += len(each[1])
            is_due = self._is_live and read and time.monotonic() > due
            if is_due or size >= BYTES_MAX or len(read) >= ROWS_MAX:
                break
        return read

    def _numbered(self, stream: Any) -> Iterator[Line | None]:
        """Yield each non-empty line with its number, and None each time that a pipe had no line for
        `BATCH_S`.
        """
        number = 0
        begun = b""
        block = b"\n"
        while block:
            with _readable():
                block = stream.read1(_BLOCK_BYTES)
            *whole, begun = (begun + (block or b"\n")).split(b"\n")
            # Refuse a line that is already too long, without reading the rest.
            for line in [*whole, begun] if len(begun) > ROW_BYTES_MAX else whole:
                number += 1
                if len(line) >= ROW_BYTES_MAX:
                    raise TooLarge(
                        f"line {number} is over {ROW_BYTES_MAX >> 20} MiB — split the row"
                    )
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield number, text + b"\n"
            # Wait here and not in a read: an interrupted program abandons this thread, which must
            # not keep the input locked.
            while self._is_live and block and not select.select([stream], [], [], BATCH_S)[0]:
                yield None


def _decoded(
    read: Sequence[Line], decode: Callable[[bytes], Row], schema: pa.Schema | None
) -> list[Row]:
    """Return the result of `decode` for each line. Raises `SchemaMismatch` for the first line that
    it refuses.
    """
    rows = []
    for number, line in read:
        try:
            rows.append(decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            mistake = mistake_in(line, schema)
            if mistake is None:
                step = "each line must be one JSON object with the collection's columns"
                mistake = Mistake(None, brief(str(error)), step)
            place = f"line {number}"
            if mistake.column is not None:
                place = f"column {mistake.column!r}, {place}"
            step = f"{mistake.next_step}; nothing of its batch is inserted"
            text = f"{place}: {mistake.found} — {step}"
            raise SchemaMismatch(text, column=mistake.column, row=number) from None
    return rows


def _inferred(name: str, values: list[Any], numbers: Sequence[int]) -> AnyField:
    """Return a column that holds the values; text becomes times, with or without a zone, if every
    value is one.
    """
    try:
        kind = pa.array(values).type
        found = with_leaves(kind, lambda leaf: pa.string() if pt.is_null(leaf) else leaf)
    except (pa.ArrowException, OverflowError, RecursionError) as error:
        said = _clash(values, numbers) or brief(str(error))
        text = f"column {name!r} of the first lines: {said} — give it values of one kind"
        raise SchemaMismatch(text, column=name) from None
    if pt.is_string(kind) and not any(
        FINER_TIME.search(value.encode()) for value in values if value
    ):
        for times in (pa.timestamp("us", "UTC"), pa.timestamp("us")):
            with suppress(msgspec.ValidationError):
                # created from a column's type
                msgspec.convert(values, list[json_type(times)])  # type: ignore[misc]
                found = times
    return pa.field(name, found)


def _clash(values: list[Any], numbers: Sequence[int]) -> str:
    """Return a text that names two lines with values of two kinds; empty when all are of one
    kind.
    """
    lines = zip(numbers, values, strict=True)
    present = [(number, value) for number, value in lines if value is not None]
    for number, value in present:
        first_number, first = present[0]
        if json_kind(value) != json_kind(first):
            return (
                f"line {first_number} has {json_kind(first)}, {shown(first)}, "
                f"and line {number} {json_kind(value)}, {shown(value)}"
            )
    return ""


class ParquetRows:
    """The rows of one Parquet file, without the system columns of a node's own files. Used as
    `JsonLines`.
    """

    unit = "row"
    left_out: tuple[str, ...]
    """The unnamed levels of a pandas index, which only number the rows."""

    def __init__(self, stream: IO[bytes]) -> None:
        # The digest is that of the whole file at every row: a Parquet file is never extended, only
        # rewritten. it only reads
        self._digest = hashlib.file_digest(stream, "sha256").digest()  # type: ignore[arg-type]
        with _readable():
            self._file = ParquetInput(stream)
            names = self._file.schema.names
        self.left_out = tuple(filter(PANDAS_INDEX.fullmatch, names))
        self._names = [name for name in names if name not in SYSTEM_COLUMNS.union(self.left_out)]
        self._passed_over = 0

    def infer_schema(self) -> pa.Schema:
        """Return columns that hold the values of the file's columns.

        Raises `SchemaMismatch` for a column with no kept type, or with more than one possible.
        """
        with _readable():
            self._file.check_times()
        given = pa.schema([field for field in self._file.schema if field.name in self._names])
        kept = kept_columns(given)
        fine = [field.name for field in given if has_nanoseconds(field.type)]
        self._check_microseconds(fine, kept)
        return kept

    def _check_microseconds(self, names: list[str], kept: pa.Schema) -> None:
        """Raise `SchemaMismatch` for a time in these columns that is finer than microseconds.

        The whole file is checked before the collection is created.
        """
        first_row = 1
        for read in self._read(names) if names else ():
            for name in names:
                kind = kept.field(name).type
                cast = partial(exact_cast, target=kind)
                try:
                    by_row(cast, read.column(name), name, kind, first_row)
                except SchemaMismatch as error:
                    place = f"column {name!r}, row {error.row}"
                    reason = "a time is finer than microseconds"
                    step = "round the column before, as pandas does by dt.floor"
                    text = f"{place}: {reason} — {step}"
                    raise SchemaMismatch(text, column=name, row=error.row) from None
            first_row += read.num_rows

    def _read(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield the named columns of all rows, in order, in bounded batches. Raises
        `StorageFailed`.
        """
        metadata = self._file.metadata
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        size = sum(group.total_byte_size for group in groups)
        at_once = max(1, min(ROWS_MAX, READ_BYTES * metadata.num_rows // max(1, size)))
        with _readable():
            for read in self._file.iter_batches(at_once, columns=names):
                read.validate(full=True)
                yield read

    def pass_over(self, last: int) -> bytes | None:
        """Skip the rows up to `last`, and return the digest; None when there are fewer rows."""
        self._passed_over = last
        return self._digest if self._file.metadata.num_rows >= last else None

    def batches(self, schema: pa.Schema) -> Iterator[RowBatch]:
        """Yield all rows, in order. Raises `StorageFailed`."""
        before = 0
        with _readable():
            self._file.check_times()
        for stored in self._read(self._names):
            read = self._file.placed_in_utc(stored, schema)
            passed_over = min(read.num_rows, max(0, self._passed_over - before))
            before += passed_over
            new = [read.slice(passed_over)] if passed_over < read.num_rows else []
            # More than one append group would not be atomic.
            for rows in slices_within(new, BYTES_MAX, _plain_bytes_of_several):
                numbers = range(before + 1, before + 1 + rows.num_rows)
                before += rows.num_rows
                yield RowBatch(rows, self.unit, numbers, self._digest)


def _plain_bytes_of_several(batch: pa.RecordBatch) -> int:
    """Return the bytes of the rows with their texts expanded; 0 for a single row, which cannot be
    split.
    """
    return 0 if batch.num_rows == 1 else sum(map(_plain_bytes, batch.columns))


def _plain_bytes(array: AnyArray) -> int:
    """Return the bytes of the array with its texts expanded."""
    if isinstance(array, pa.DictionaryArray):
        # of texts or bytes
        lengths: AnyArray = pc.binary_length(array.dictionary)  # type: ignore[call-overload]
        return 4 * len(array) + (pc.sum(lengths.take(array.indices)).as_py() or 0)
    if is_list(array.type):
        return 4 * len(array) + _plain_bytes(pc.list_flatten(array))
    if pt.is_struct(array.type):
        return sum(
            _plain_bytes(pc.struct_field(array, index))
            for index in range(len(child_fields(array.type)))
        )
    return array.nbytes
