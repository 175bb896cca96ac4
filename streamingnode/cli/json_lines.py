"""JSON lines as record batches: parsed by Arrow a batch at a time, and refused so, with the lines and what Arrow says.

JSON has text, numbers, lists and objects. Times and dates are read from ISO text, bytes from base64 as `tail` writes them,
and every kind of list from a list; a value is kept or refused by the rule for every row. A field that a line leaves out is
null. Empty lines are skipped and counted. What comes through a pipe is handed on within `BATCH_S`.
"""

import hashlib
import io
import os
import re
import select
import stat
import time
from base64 import b64decode
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import BinaryIO, Literal

import pyarrow as pa
import pyarrow.json as pj
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from streamingnode.cli.row_batch import BYTES_MAX, ROW_BYTES_MAX, ROWS_MAX, RowBatch
from streamingnode.rows.arrow_columns import exact_cast, holds_infinity
from streamingnode.rows.schema import AnyArray, AnyField, child_fields, has_leaf, is_bytes, is_list, with_leaves
from wal.errors import InvalidArgument, StorageFailed, TooLarge, brief

DEPTH_MAX = 100
"""Lists and objects inside each other: parsers recurse, and a collection's columns end long before."""

BATCH_S = 0.2
"""How long a line that came through a pipe waits for others to go with."""

_BLOCK_BYTES = 1 << 18
"""More than a buffered reader holds, so that nothing stays in it that `poll` does not see."""
_COLUMN, _ROW = re.compile(r"^Column\(/(.+?)\)"), re.compile(r"(?<= in )row (\d+)$")
"""How Arrow begins and ends what it says about a value of another kind than its column."""
_OBJECT = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{")
"""How a line begins: a file may with a byte order mark."""
_HUGE = re.compile(rb"(?<![\d.])\d{309}")
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_READ_ERRORS = (pa.ArrowException, UnicodeDecodeError)

_Chunk = tuple[list[bytes], list[int]]
_Others = Literal["error", "ignore", "infer"]
"""What becomes of fields that no column is asked for."""


class JsonLines:
    """The rows of a stream of JSON objects, one on each line; `head` was read from it already."""

    unit = "line"

    def __init__(self, stream: BinaryIO, head: bytes = b"") -> None:
        self._lines = _Lines(stream, head)
        self._line = 0
        self._ahead: _Chunk | None = None
        self._digest = hashlib.sha256()

    def infer_schema(self) -> pa.Schema:
        """Return columns that hold the first batch. Raises `InvalidArgument` when there is no row, or a line is none."""
        self._ahead = lines, numbers = self._read_chunk()
        if not lines:
            raise InvalidArgument("there are no rows to take columns from — give at least one line")
        try:
            return _inferred(lines)
        except _READ_ERRORS as error:
            raise _refused(numbers, error) from None

    def pass_over(self, last: int) -> bytes | None:
        """Go on behind line `last`, and return the digest up to there; None when there are fewer lines."""
        while self._line < last:
            lines, _ = self._read_chunk(last)
            if not lines and self._line < last:
                return None
            self._digest.update(b"".join(lines))
        return self._digest.digest()

    def batches(self, schema: pa.Schema) -> Iterator[RowBatch]:
        """Yield all rows. Raises `SchemaMismatch` naming the lines of a batch, nothing of which came out then."""
        while (chunk := self._take_chunk())[0]:
            lines, numbers = chunk
            try:
                rows = _parse(lines, schema)
            except _READ_ERRORS as error:
                raise _refused(numbers, error) from None
            self._digest.update(b"".join(lines))
            yield RowBatch(rows, unit=self.unit, numbers=numbers, digest=self._digest.digest())

    def _take_chunk(self) -> _Chunk:
        ahead, self._ahead = self._ahead, None
        return ahead or self._read_chunk()

    def _read_chunk(self, last: int | None = None) -> _Chunk:
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
        self._whole: deque[bytes] = deque()
        self._begun = b""
        self._ended = False
        self._poll = _poll_of(stream)
        self._add(head)

    def next(self, ends_at: float | None) -> bytes | None:
        """Return the next line; None at the end, or when a live stream has none by `ends_at` (monotonic, in seconds)."""
        while not self._whole:
            if self._ended or not self._await(ends_at):
                return None
            try:
                block = self._stream.read1(_BLOCK_BYTES)  # type: ignore[attr-defined]  # every buffered reader has it
            except OSError as error:
                raise StorageFailed(
                    f"the input cannot be read on: {error.strerror} — read it from elsewhere"
                ) from error
            if block:
                self._add(block)
            else:
                self._ended = True
                self._whole.extend([self._begun + b"\n"] if self._begun else [])
        return self._whole.popleft()

    def _add(self, block: bytes) -> None:
        *whole, self._begun = (self._begun + block).split(b"\n")
        self._whole.extend([line + b"\n" for line in whole])
        if len(self._begun) > ROW_BYTES_MAX:  # it is refused for its length, and the rest is not read
            self._whole.append(self._begun)

    def _await(self, ends_at: float | None) -> bool:
        """Return whether reading is due: there is something, or only something new can help."""
        if self._poll is None:
            return True
        if ends_at is None:
            self._poll.poll()
            return True
        left_s = ends_at - time.monotonic()
        return left_s > 0 and bool(self._poll.poll(left_s * 1000))


def _poll_of(stream: BinaryIO) -> "select.poll | None":
    """Return what waits for a live stream; None for a file, which always has its next line or its end."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return None
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return poll


def _depth(line: bytes) -> int:
    """Return how deep lists and objects are inside each other; of what is no JSON, a depth it could have."""
    brackets = re.findall(rb"[\[{\]}]", _TEXT.sub(b"", line))
    return max(accumulate(1 if each in b"[{" else -1 for each in brackets), default=0)


# --- values -------------------------------------------------------------------------------------------------------------


def _parse(lines: Sequence[bytes], schema: pa.Schema, *, others: _Others = "error") -> pa.RecordBatch:
    """Return one row for each line. Raises `pa.ArrowException`."""
    # Every column may be null: the node says which nulls it refuses.
    table = _read(lines, pa.schema([pa.field(field.name, _json_type(field.type)) for field in schema]), others=others)
    columns = []
    for field in schema:
        try:
            columns.append(_from_json(table[field.name].combine_chunks(), field.type))
        except _READ_ERRORS as error:
            raise pa.ArrowInvalid(f"column {field.name!r}: {error}") from None
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def _read(lines: Sequence[bytes], schema: pa.Schema | None, *, others: _Others = "infer") -> pa.Table:
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
    if any(holds_infinity(column.combine_chunks()) for column in table.columns) and any(map(_has_huge, lines)):
        raise pa.ArrowInvalid("a number has over 308 digits")  # Arrow makes an infinity of an integer of so many
    return table


def _has_huge(line: bytes) -> bool:
    return _HUGE.search(_TEXT.sub(b"", line)) is not None


def _inferred(lines: Sequence[bytes]) -> pa.Schema:
    """Return types for the lines. Raises `pa.ArrowException`."""
    return pa.schema([_with_times(lines, field) for field in _read(lines, None).schema])


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
    return exact_cast(_from_base64(column, kind) if is_bytes(kind) else column, kind)


def _from_base64(texts: AnyArray, kind: pa.DataType) -> AnyArray:
    try:
        return pa.array([None if text is None else b64decode(text, validate=True) for text in texts.to_pylist()], kind)
    except ValueError as error:
        raise pa.ArrowInvalid(f"text is no base64: {error}") from error


def _refused(numbers: Sequence[int], error: Exception) -> SchemaMismatch:
    def line_of(row: re.Match[str]) -> str:
        return f"line {numbers[int(row[1])]}" if int(row[1]) < len(numbers) else row[0]

    said = _COLUMN.sub(r"column '\1'", _ROW.sub(line_of, str(error).removeprefix("JSON parse error: ")))
    lines = f"line {numbers[0]}" if len(numbers) == 1 else f"lines {numbers[0]} to {numbers[-1]}"
    return SchemaMismatch(f"{lines}: {brief(said)} — correct it; nothing of these lines is inserted")
