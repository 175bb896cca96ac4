"""JSON lines as record batches: parsed by Arrow a batch at a time; only a batch that fails is looked at line by line.

A field that a line leaves out is null. Empty lines are skipped and counted.
"""

import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import pyarrow as pa
import pyarrow.json as pj

from streamingnode.cli.row_batch import BYTES_MAX, ROWS_MAX, RowBatch, said
from streamingnode.cli.row_types import from_json, json_schema, kept_schema
from wal.errors import SHOWN_MAX, InvalidArgument, SchemaMismatch, TooLarge, brief

LINE_BYTES_MAX = 4 << 20
"""No row over the size of an append group can be inserted, so no longer line is read."""

_COLUMN = re.compile(r"Column\(/(.+?)\) ")
"""How Arrow begins what it says about a value of another kind than its column."""
_READ_ERRORS = (pa.ArrowException, UnicodeDecodeError)

_Chunk = tuple[list[bytes], list[int]]


class JsonLines:
    """The rows of a stream of JSON objects, one on each line. See `RowSource`."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._line = 0
        self._ahead: _Chunk | None = None

    def infer_schema(self) -> pa.Schema:
        """Return columns that hold the first batch. Raises `InvalidArgument` when there is no row, or a line is none."""
        self._ahead = chunk = self._read_chunk()
        lines, numbers = chunk
        if not lines:
            raise InvalidArgument("there are no rows to take columns from — give at least one line")
        try:
            return kept_schema(_parse(lines, None).schema)
        except _READ_ERRORS as error:
            raise _blame(lines, numbers, None, error) from None

    def batches(self, schema: pa.Schema) -> Iterator[RowBatch]:
        """Yield all rows. Raises `InvalidArgument` or `SchemaMismatch` naming the line; nothing of its batch came out."""
        while (chunk := self._take_chunk())[0]:
            lines, numbers = chunk
            try:
                rows = _parse(lines, schema)
            except _READ_ERRORS as error:
                raise _blame(lines, numbers, schema, error) from None
            yield RowBatch(rows, unit="line", numbers=numbers)

    def _take_chunk(self) -> _Chunk:
        ahead, self._ahead = self._ahead, None
        return ahead or self._read_chunk()

    def _read_chunk(self) -> _Chunk:
        lines: list[bytes] = []
        numbers: list[int] = []
        size = 0
        while size < BYTES_MAX and len(lines) < ROWS_MAX and (line := self._stream.readline(LINE_BYTES_MAX + 1)):
            self._line += 1
            if len(line) > LINE_BYTES_MAX:
                raise TooLarge(f"line {self._line} is over {LINE_BYTES_MAX >> 20} MiB — split the row")
            if line.strip():
                lines.append(line if line.endswith(b"\n") else line + b"\n")
                numbers.append(self._line)
                size += len(line)
        return lines, numbers


def _parse(lines: Sequence[bytes], schema: pa.Schema | None) -> pa.RecordBatch:
    """Return one row for each line. Raises `pa.ArrowException`."""
    text = b"".join(lines)
    options = pj.ParseOptions(
        explicit_schema=None if schema is None else json_schema(schema),
        unexpected_field_behavior="infer" if schema is None else "error",
    )
    reading = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
    table = pj.read_json(io.BytesIO(text), read_options=reading, parse_options=options)
    if table.num_rows != len(lines):
        raise pa.ArrowInvalid("a line holds more than one value, or a part of one")
    if schema is None:
        return table.combine_chunks().to_batches()[0]
    columns = [from_json(table[field.name].combine_chunks(), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def _blame(
    lines: Sequence[bytes], numbers: Sequence[int], schema: pa.Schema | None, error: Exception
) -> InvalidArgument:
    """Return the error of the first line that does not parse: found by halving, since parsing a prefix is cheap."""
    low, high = 0, len(lines)  # `lines[:low]` parses, `lines[:high]` does not
    while high - low > 1:
        middle = (low + high) // 2
        if _fails(lines[:middle], schema) is None:
            low = middle
        else:
            high = middle
    line, number = lines[high - 1], numbers[high - 1]
    return _describe(line, number, schema, _fails([line], schema) or error)


def _fails(lines: Sequence[bytes], schema: pa.Schema | None) -> Exception | None:
    try:
        _parse(lines, schema)
    except _READ_ERRORS as error:
        return error
    return None


def _describe(line: bytes, number: int, schema: pa.Schema | None, error: Exception) -> InvalidArgument:
    shown = line.decode("utf-8", "replace").strip()[:SHOWN_MAX]
    try:
        value = json.loads(line)
    except ValueError as problem:
        return InvalidArgument(f"line {number} is no JSON: {problem} — correct it: {shown}")
    if not isinstance(value, dict):
        return InvalidArgument(f"line {number} is no JSON object — write one object on each line: {shown}")
    extra = sorted(value.keys() - set(schema.names)) if schema is not None else []
    if extra:
        return SchemaMismatch(
            f"line {number}: column {brief(extra[0])!r} is not in the collection — remove it: {shown}",
            column=extra[0],
            row=number,
        )
    text = said(error)
    if named := _COLUMN.match(text):
        column, text = named[1].replace("/", "."), text[named.end() :]
        return SchemaMismatch(
            f"line {number}: column {column!r} {text} — correct it: {shown}", column=column, row=number
        )
    for name in value if schema is not None else ():
        assert schema is not None
        if wrong := _fails([json.dumps({name: value[name]}).encode() + b"\n"], pa.schema([schema.field(name)])):
            return SchemaMismatch(
                f"line {number}: column {name!r}: {said(wrong)} — correct it: {shown}", column=name, row=number
            )
    return SchemaMismatch(f"line {number} does not fit the columns: {text} — correct it: {shown}", row=number)
