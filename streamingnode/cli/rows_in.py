"""Rows from a file or a pipe as record batches of bounded size, JSON lines or Parquet. Everything here blocks."""

import hashlib
import io
import re
import select
import shutil
import tempfile
import time
from base64 import b64decode
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO, BinaryIO, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from streamingnode.columns import check_column_names, exact_cast, holds_infinity
from streamingnode.schema import AnyArray, AnyField, child_fields, has_leaf, is_bytes, is_list, with_leaves
from wal.errors import InvalidArgument, StorageFailed, TooLarge, brief

ROWS_MAX = 10_000
"""Rows in a batch: enough that an fsync each costs nothing, few enough that a bad line gives up little."""
BYTES_MAX = 1 << 20
"""Bytes of input in a batch, so that it stays well below one append group of 4 MiB."""
ROW_BYTES_MAX = 4 << 20
"""No row over the size of an append group can be inserted, so no longer line or row is read."""

PARQUET_MAGIC = b"PAR1"
SYSTEM_COLUMNS = frozenset({"_tick", "_offset", "_vchannel", "_partition"})
"""What a node and its tables add to a row, and what is not part of it when it is inserted again."""

READ_BYTES = 8 << 20
"""About as much of a Parquet file is decoded at a time."""
EXPANDED_BYTES_MAX, EXPANSION_MAX = 256 << 20, 100
"""A column of a row group that takes more bytes than this, and more times what it takes in the file, is not read: what
has to be decoded together cannot be told before, and a file of kilobytes can hold gigabytes of one value."""

DEPTH_MAX = 100
"""Lists and objects of JSON inside each other: parsers recurse, and a collection's columns end long before."""
BATCH_S = 0.2
"""How long a line that came through a pipe waits for others to go with."""
_BLOCK_BYTES = 1 << 18
"""More than a buffered reader holds, so that nothing stays in it that `select` does not see."""

_COLUMN, _ROW = re.compile(r"^Column\(/(.+?)\)"), re.compile(r"(?<= in )row (\d+)$")
"""How Arrow begins and ends what it says about a value of another kind than its column."""
_OBJECT = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{")
"""How a line begins: a file may with a byte order mark."""
_HUGE = re.compile(rb"(?<![\d.])\d{309}")
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows, and the number of the line or row (`unit`) that each was in the input, from 1.

    `digest` is one of the input up to and with the last of them: another input has another one.
    """

    rows: pa.RecordBatch
    unit: str
    numbers: Sequence[int]
    digest: bytes

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Raise the `SchemaMismatch` of one row of this batch with its place in the input instead of in the batch."""
        try:
            yield
        except SchemaMismatch as error:
            if error.row is None or error.row >= len(self.numbers):
                raise
            number = self.numbers[error.row]
            text = str(error).replace(f"row {error.row}", f"{self.unit} {number}", 1)
            raise SchemaMismatch(text, column=error.column, row=number) from error


@contextmanager
def open_rows(name: str, stdin: BinaryIO) -> "Iterator[JsonLines | ParquetRows]":
    """Yield the rows of the file `name`, `-` for `stdin`. Raises `InvalidArgument` when it cannot be read."""
    with ExitStack() as opened:
        stream = stdin if name == "-" else opened.enter_context(_open_file(name))
        head = b""
        # A pipe may give less at a time than was written to it.
        while len(head) < len(PARQUET_MAGIC) and PARQUET_MAGIC.startswith(head) and (block := _read_block(stream)):
            head += block
        if not head.startswith(PARQUET_MAGIC):
            yield JsonLines(stream, head)
            return
        if not stream.seekable():
            spooled = opened.enter_context(tempfile.TemporaryFile())
            spooled.write(head)
            shutil.copyfileobj(stream, spooled)
            stream = spooled
        yield ParquetRows(stream)


def _open_file(name: str) -> BinaryIO:
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise InvalidArgument(f"cannot read {name}: {error.strerror} — name a file of JSON lines or Parquet") from error


def _read_block(stream: BinaryIO) -> bytes:
    """Return what there is next, waiting for it; nothing at the end."""
    try:
        block: bytes = stream.read1(_BLOCK_BYTES)  # type: ignore[attr-defined]  # every buffered reader has it
    except OSError as error:
        raise StorageFailed(f"the input cannot be read: {error.strerror} — read it from elsewhere") from error
    return block


# --- JSON lines ---------------------------------------------------------------------------------------------------------


class JsonLines:
    """The rows of a stream of JSON objects, one on each line; `head` was read from it already."""

    unit = "line"

    def __init__(self, stream: BinaryIO, head: bytes = b"") -> None:
        self._lines = _Lines(stream, head)
        self._line = 0
        self._ahead: tuple[list[bytes], list[int]] | None = None
        self._digest = hashlib.sha256()

    def infer_schema(self) -> pa.Schema:
        """Return columns that hold the first batch. Raises `InvalidArgument` when there is no row, or a line is none."""
        self._ahead = lines, numbers = self._read_lines()
        if not lines:
            raise InvalidArgument("there are no rows to take columns from — give at least one line")
        with _refused(numbers):
            return pa.schema([_with_times(lines, field) for field in _read_json(lines, None).schema])

    def pass_over(self, last: int) -> bytes | None:
        """Go on behind line `last`, and return the digest up to there; None when there are fewer lines."""
        while self._line < last:
            lines, _ = self._read_lines(last)
            if not lines and self._line < last:
                return None
            self._digest.update(b"".join(lines))
        return self._digest.digest()

    def batches(self, schema: pa.Schema) -> Iterator[RowBatch]:
        """Yield all rows. Raises `SchemaMismatch` naming the lines of a batch, nothing of which came out then."""
        (lines, numbers), self._ahead = self._ahead or self._read_lines(), None
        while lines:
            with _refused(numbers):
                rows = _parse(lines, schema)
            self._digest.update(b"".join(lines))
            yield RowBatch(rows, unit=self.unit, numbers=numbers, digest=self._digest.digest())
            lines, numbers = self._read_lines()

    def _read_lines(self, last: int | None = None) -> tuple[list[bytes], list[int]]:
        """Return lines that are not empty and their numbers, none of them only at the end, or behind line `last`."""
        lines: list[bytes] = []
        numbers: list[int] = []
        size, ends_at = 0, None
        while size < BYTES_MAX and len(lines) < ROWS_MAX and (last is None or self._line < last):
            line = self._lines.next(ends_at)
            if line is None:
                break
            self._line += 1
            if len(line) > ROW_BYTES_MAX:
                raise TooLarge(f"line {self._line} is over {ROW_BYTES_MAX >> 20} MiB — split the row")
            if line.count(b"[") + line.count(b"{") > DEPTH_MAX and _depth(line) > DEPTH_MAX:
                raise InvalidArgument(f"line {self._line} is nested over {DEPTH_MAX} deep — flatten it")
            if line.strip():
                lines.append(line)
                numbers.append(self._line)
                size += len(line)
                ends_at = ends_at or time.monotonic() + BATCH_S
        return lines, numbers


class _Lines:
    """The lines of a stream, each with its end; a live one, a pipe or a terminal, need not be waited for."""

    def __init__(self, stream: BinaryIO, head: bytes) -> None:
        self._stream = stream
        self._is_live = not stream.seekable()
        self._whole: deque[bytes] = deque()
        self._begun = b""
        self._ended = False
        self._add(head)

    def next(self, ends_at: float | None) -> bytes | None:
        """Return the next line; None at the end, or when a live stream has none by `ends_at` (monotonic, in seconds)."""
        while not self._whole:
            if self._ended or (self._is_live and not self._wait(ends_at)):
                return None
            if block := _read_block(self._stream):
                self._add(block)
            else:
                self._ended = True
                self._whole.extend([self._begun + b"\n"] if self._begun else [])
        return self._whole.popleft()

    def _wait(self, ends_at: float | None) -> bool:
        # Not in a read: an interrupted program leaves the thread behind, and must not find its input locked.
        left_s = None if ends_at is None else ends_at - time.monotonic()
        return (left_s is None or left_s > 0) and bool(select.select([self._stream], [], [], left_s)[0])

    def _add(self, block: bytes) -> None:
        *whole, self._begun = (self._begun + block).split(b"\n")
        self._whole.extend([line + b"\n" for line in whole])
        if len(self._begun) > ROW_BYTES_MAX:  # it is refused for its length, and the rest is not read
            self._whole.append(self._begun)


def _depth(line: bytes) -> int:
    """Return how deep lists and objects are inside each other; of what is no JSON, a depth it could have."""
    brackets = re.findall(rb"[\[{\]}]", _TEXT.sub(b"", line))
    return max(accumulate(1 if each in b"[{" else -1 for each in brackets), default=0)


@contextmanager
def _refused(numbers: Sequence[int]) -> Iterator[None]:
    """Raise what Arrow says about rows of a batch as `SchemaMismatch`, with their lines."""

    def line_of(row: re.Match[str]) -> str:
        return f"line {numbers[int(row[1])]}" if int(row[1]) < len(numbers) else row[0]

    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:
        said = _COLUMN.sub(r"column '\1'", _ROW.sub(line_of, str(error).removeprefix("JSON parse error: ")))
        lines = f"line {numbers[0]}" if len(numbers) == 1 else f"lines {numbers[0]} to {numbers[-1]}"
        text = f"{lines}: {brief(said)} — correct it; nothing of these lines is inserted"
        raise SchemaMismatch(text) from None


def _parse(
    lines: Sequence[bytes], schema: pa.Schema, *, others: Literal["error", "ignore"] = "error"
) -> pa.RecordBatch:
    """Return one row for each line; `others` are fields without a column. Raises `pa.ArrowException`."""
    # Every column may be null: the node says which nulls it refuses.
    asked = pa.schema([pa.field(field.name, _json_type(field.type)) for field in schema])
    table = _read_json(lines, asked, others=others)
    columns = []
    for field in schema:
        try:
            columns.append(_from_json(table[field.name].combine_chunks(), field.type))
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise pa.ArrowInvalid(f"column {field.name!r}: {error}") from None
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def _read_json(
    lines: Sequence[bytes], schema: pa.Schema | None, *, others: Literal["error", "ignore", "infer"] = "infer"
) -> pa.Table:
    # Arrow takes null for a row, and a batch that begins with one kills the process.
    for row, line in enumerate(lines):
        if _OBJECT.match(line) is None:
            raise pa.ArrowInvalid(f"no JSON object in row {row}")
    text = b"".join(lines)
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others)
    reading = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
    table = pj.read_json(io.BytesIO(text), read_options=reading, parse_options=options)
    if table.num_rows != len(lines):
        raise pa.ArrowInvalid("a line holds more than one value, or a part of one")
    if any(holds_infinity(column.combine_chunks()) for column in table.columns) and any(
        _HUGE.search(_TEXT.sub(b"", line)) for line in lines
    ):
        raise pa.ArrowInvalid("a number has over 308 digits")  # Arrow makes an infinity of an integer of so many
    return table


def _with_times(lines: Sequence[bytes], field: AnyField) -> AnyField:
    """Return a guessed field with times only where all of them are aware, or all naive: Arrow guesses without the zones."""
    for times in (pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.string()):
        tried = field.with_type(with_leaves(field.type, partial(_kept, times)))
        if not has_leaf(field.type, pt.is_timestamp):
            return tried
        with suppress(pa.ArrowException):
            _parse(lines, pa.schema([tried]), others="ignore")
            return tried
    raise AssertionError("text holds every text")


def _kept(times: pa.DataType, kind: pa.DataType) -> pa.DataType:
    return times if pt.is_timestamp(kind) else pa.string() if pt.is_null(kind) else kind


def _json_type(kind: pa.DataType) -> pa.DataType:
    """Return the type as a JSON reader is asked for it: only what JSON has, so that `_from_json` alone converts."""
    if is_list(kind):
        return pa.list_(_json_type(kind.field(0).type))
    if pt.is_struct(kind):
        return pa.struct([pa.field(field.name, _json_type(field.type)) for field in child_fields(kind)])
    if is_bytes(kind) or pt.is_date32(kind) or pt.is_timestamp(kind):
        return pa.string()
    return pa.float64() if pt.is_float32(kind) else kind


def _from_json(column: AnyArray, kind: pa.DataType) -> AnyArray:
    """Return a column read as `_json_type` as its own type. Raises `pa.ArrowException` for what it does not hold."""
    if isinstance(column, pa.StructArray):
        # Under an object that is null lies empty text, which is no time; `flatten` makes it null.
        fields = child_fields(kind)
        inside = [_from_json(each, field.type) for each, field in zip(column.flatten(), fields, strict=True)]
        return pa.StructArray.from_arrays(inside, fields=fields, mask=column.is_null())
    if isinstance(column, pa.ListArray):
        items = _from_json(column.values, kind.field(0).type)
        read = pa.ListArray.from_arrays(column.offsets, items, type=pa.list_(kind.field(0)), mask=column.is_null())
        return read if read.type == kind else exact_cast(read, kind)
    if is_bytes(kind):
        try:
            texts = column.to_pylist()
            return pa.array([None if text is None else b64decode(text, validate=True) for text in texts], kind)
        except ValueError as error:
            raise pa.ArrowInvalid(f"text is no base64: {error}") from error
    return exact_cast(column, kind)


# --- Parquet ------------------------------------------------------------------------------------------------------------


class ParquetRows:
    """The rows of one Parquet file; the system columns of a node's own files are left out. Used as `JsonLines`."""

    unit = "row"

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._passed_over = 0

    def infer_schema(self) -> pa.Schema:
        """Return the file's own columns."""
        with _damage():
            return _own_columns(pq.read_schema(self._stream))

    def pass_over(self, last: int) -> bytes | None:
        """Go on behind row `last`, and return the digest; None when there are fewer rows."""
        self._passed_over = last
        with _damage():
            return self._digest() if pq.read_metadata(self._stream).num_rows >= last else None

    def batches(self, schema: pa.Schema) -> Iterator[RowBatch]:
        """Yield all rows, in order; once. Raises `SchemaMismatch`, `TooLarge`, or `StorageFailed`."""
        with _damage():
            metadata = pq.read_metadata(self._stream)
            given = _own_columns(metadata.schema.to_arrow_schema())
            check_column_names(given.names, schema)
            digest, rows = self._digest(), _rows_at_a_time(metadata)
            # Texts and bytes are read as they lie in the file: each once, however many rows have them.
            columns = [metadata.schema.column(i) for i in range(metadata.num_columns)]
            texts = [c.path for c in columns if c.physical_type == "BYTE_ARRAY" and c.logical_type.type != "DECIMAL"]
            file = pq.ParquetFile(self._stream, metadata=metadata, read_dictionary=texts, buffer_size=1 << 20)
            reads = file.iter_batches(batch_size=rows, columns=given.names)
        first = 1
        while True:
            with _damage():
                if (read := next(reads, None)) is None:
                    return
                read.validate(full=True)
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


@contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise StorageFailed(f"the input is no whole Parquet file: {brief(str(error))} — write it again") from None


def _own_columns(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field for field in schema if field.name not in SYSTEM_COLUMNS])


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
