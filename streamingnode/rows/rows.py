"""Rows as callers have them, made into record batches of a collection's schema, or refused before anything happens.

In: dicts, a `RecordBatch` or a `Table`. Out: batches of exactly the schema, in row order, none empty; or `SchemaMismatch`
naming column and row. Per row, Python runs only inside one comprehension per column, and not at all for Arrow input. No
I/O.

Then the rows of a batch go to the shards that their primary keys hash to: one batch per shard that gets rows, shards
ascending, rows of one shard in their old order. A collection of one shard costs nothing. The hash is `wal.shard_hash`; here
is only how Arrow stores keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from interceptors.errors import SchemaMismatch
from streamingnode.rows.arrow_columns import (
    check_column_names,
    check_nulls,
    conform,
    exact_cast,
    has_required_inside,
    holds_infinity,
)
from streamingnode.rows.python_values import ColumnValues, column_values, shown
from streamingnode.rows.schema import AnyArray, AnyChunkedArray
from wal.errors import InvalidArgument, brief
from wal.shard_hash import Hashes, hash_bytes, hash_integers, shards_of

DictRows = Sequence[Mapping[str, object]]
Rows = DictRows | pa.RecordBatch | pa.Table
"""What `insert` and `upsert` take."""
Keys = Sequence[object] | AnyArray | AnyChunkedArray | pa.RecordBatch | pa.Table
"""What `delete` takes: key values, or Arrow data with one column of them."""

DICTS_PER_BATCH = 4_096
"""Dicts converted in one go: about 2 ms of work, after which a thread gives way."""

# pyarrow looks for pandas when it makes its first array and imports it: half a second that must not fall into an event loop.
pa.array([0])

_CONVERSIONS = {
    "dict": "one in a list: [...]",
    "generator": "list(...)",
    "set": "list(...)",
    "ndarray": "its tolist()",
    "Series": "its tolist()",
    "DataFrame": "pa.Table.from_pandas(..., preserve_index=False)",
    "RecordBatchReader": "its read_all()",
}
"""How what people pass instead becomes rows or keys, by the name of its type: it need not be imported here."""

_CONVERSION_ERRORS = (pa.ArrowException, ValueError, TypeError, OverflowError)


@dataclass(frozen=True, slots=True)
class RowShape:
    """What rows of one schema version must look like; build it once with `row_shape`."""

    schema: pa.Schema
    primary_key: str
    columns: tuple[ColumnValues, ...]
    required: tuple[int, ...]
    """Indexes of the columns to look into for nulls: the primary key, required ones, and those with required fields."""
    nested_required: tuple[int, ...]


def row_shape(schema: pa.Schema, *, primary_key: str) -> RowShape:
    """Return the shape of a checked schema's rows."""
    nullable = [field.nullable and field.name != primary_key for field in schema]
    nested = tuple(i for i, field in enumerate(schema) if has_required_inside(field.type))
    return RowShape(
        schema=schema,
        primary_key=primary_key,
        columns=tuple(column_values(field, nullable=may) for field, may in zip(schema, nullable, strict=True)),
        required=tuple(i for i, may in enumerate(nullable) if not may or i in nested),
        nested_required=nested,
    )


def key_shape(shape: RowShape) -> RowShape:
    """Return the shape of a delete's rows: the primary key alone."""
    return row_shape(pa.schema([shape.schema.field(shape.primary_key)]), primary_key=shape.primary_key)


def to_batches(rows: Rows, shape: RowShape) -> list[pa.RecordBatch]:
    """Return `rows` as batches of the shape's schema, all of them checked; an empty list when there are none.

    Raises:
        SchemaMismatch: rows do not fit; names the column, and the row where one is to blame.
        InvalidArgument: `rows` is nothing that holds rows.
    """
    if isinstance(rows, pa.RecordBatch):
        if rows.num_rows:
            return [conform(rows, shape.schema, shape.required)]
        check_column_names(rows.schema.names, shape.schema)
        return []
    if isinstance(rows, pa.Table):
        return _table_to_batches(rows, shape)
    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):
        raise _not_sequence("rows", rows, "a list of dicts, a RecordBatch or a Table")
    return _dicts_to_batches(rows, shape)


def keys_to_batches(keys: Keys, shape: RowShape) -> list[pa.RecordBatch]:
    """Return a delete's keys as batches of the one-column `key_shape`. Raises as `to_batches` does."""
    if isinstance(keys, (pa.RecordBatch, pa.Table)):
        return to_batches(keys, shape)
    if isinstance(keys, (pa.Array, pa.ChunkedArray)):
        return to_batches(pa.table({shape.primary_key: keys}), shape)
    if not isinstance(keys, Sequence) or isinstance(keys, (str, bytes)):
        raise _not_sequence("keys", keys, "a list of key values, or Arrow data")
    return [pa.RecordBatch.from_arrays([_array(shape.columns[0], keys, 0)], schema=shape.schema)] if len(keys) else []


def dicts_to_batch(rows: DictRows, shape: RowShape, *, first_row: int = 0) -> pa.RecordBatch:
    """Return at least one dict as one batch; `first_row` is added to the row an error names."""
    columns = shape.columns
    try:
        fits = max(map(len, rows)) == len(columns)
        values = [[row[column.column] for row in rows] for column in columns] if fits else None
    except (KeyError, TypeError, AttributeError, IndexError):
        values = None
    if values is None:
        raise _row_mismatch(rows, shape, first_row)
    arrays = [_array(column, cells, first_row) for column, cells in zip(columns, values, strict=True)]
    for index in shape.nested_required:
        check_nulls(arrays[index], shape.schema.field(index), first_row=first_row, required=False)
    return pa.RecordBatch.from_arrays(arrays, schema=shape.schema)


def _not_sequence(what: str, given: object, expected: str) -> InvalidArgument:
    kind = type(given).__name__
    conversion = "its to_arrow()" if type(given).__module__.startswith("polars") else _CONVERSIONS.get(kind)
    advice = expected if conversion is None else f"{expected}, here {conversion}"
    return InvalidArgument(f"{what} cannot be a {kind} — pass {advice}")


def _dicts_to_batches(rows: DictRows, shape: RowShape) -> list[pa.RecordBatch]:
    if 0 < len(rows) <= DICTS_PER_BATCH:
        return [dicts_to_batch(rows, shape)]
    starts = range(0, len(rows), DICTS_PER_BATCH)
    return [dicts_to_batch(rows[start : start + DICTS_PER_BATCH], shape, first_row=start) for start in starts]


def _table_to_batches(table: pa.Table, shape: RowShape) -> list[pa.RecordBatch]:
    batches, first_row = [], 0
    for batch in table.to_batches():
        if batch.num_rows:
            batches.append(conform(batch, shape.schema, shape.required, first_row=first_row))
        first_row += batch.num_rows
    if not batches:
        check_column_names(table.schema.names, shape.schema)
    return batches


def _array(column: ColumnValues, values: Sequence[object], first_row: int) -> AnyArray:
    try:
        column.check(values)
        array = _built(column, values)
    except SchemaMismatch as error:
        raise _moved(error, first_row) if first_row else error from None
    except _CONVERSION_ERRORS:
        raise _value_mismatch(column, values, first_row) from None  # Arrow quotes the value, whole
    if isinstance(array, pa.ChunkedArray):
        raise SchemaMismatch(
            f"column {column.column!r} holds over 2 GiB in {len(values)} rows — insert fewer rows at a time",
            column=column.column,
        )
    return array


def _built(column: ColumnValues, values: Sequence[object]) -> AnyArray:
    """Return checked values as Arrow data. Raises one of `_CONVERSION_ERRORS` where Arrow alone would alter one."""
    if not column.always_wide:
        array = pa.array(values, type=column.arrow_type)
        if not column.may_overflow or isinstance(array, pa.ChunkedArray) or not holds_infinity(array):
            return array
    return exact_cast(pa.array(values, type=column.wide_type), column.arrow_type)


def _moved(error: SchemaMismatch, first_row: int) -> SchemaMismatch:
    assert error.row is not None
    text = str(error).replace(f"row {error.row}:", f"row {first_row + error.row}:", 1)
    return SchemaMismatch(text, column=error.column, row=first_row + error.row)


def _value_mismatch(column: ColumnValues, values: Sequence[object], first_row: int) -> SchemaMismatch:
    for row, value in enumerate(values, first_row):
        try:
            _built(column, [value])
        except _CONVERSION_ERRORS as error:
            return SchemaMismatch(
                f"column {column.column!r}, row {row}: {shown(value)} does not fit {column.arrow_type}: "
                f"{brief(str(error))} — give one that does",
                column=column.column,
                row=row,
            )
    raise AssertionError("a column fails as a whole but no value of it does")


def _row_mismatch(rows: DictRows, shape: RowShape, first_row: int) -> SchemaMismatch | InvalidArgument:
    for row, cells in enumerate(rows, first_row):
        if not isinstance(cells, Mapping):
            return InvalidArgument(
                f"row {row} is a {type(cells).__name__} — each row is a dict of column name to value"
            )
        try:
            check_column_names(list(cells), shape.schema, row=row)
        except SchemaMismatch as error:
            return error
    raise AssertionError("rows fail together but none of them does")


SHARDS_MAX = 256
"""Shards of one collection; each costs every insert a message, and every cut a file."""

_NO_BYTES: NDArray[np.uint8] = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Routed:
    """A batch by shard; `shard_of_row` is None when every row goes to the first of `parts`."""

    parts: tuple[tuple[int, pa.RecordBatch], ...]
    shard_of_row: NDArray[np.int64] | None = None


def route(batch: pa.RecordBatch, *, key_index: int, shards: int) -> Routed:
    """Return the rows of a batch that is not empty by shard; `key_index` is the primary key's column."""
    if shards == 1:
        return Routed(((0, batch),))
    targets = shards_of(key_hashes(batch.column(key_index)), shards)
    counts = np.bincount(targets, minlength=shards)
    used = np.flatnonzero(counts)
    if len(used) == 1:
        return Routed(((int(used[0]), batch),))
    # A stable sort keeps rows of a shard in order; 16-bit numbers are sorted by radix, in linear time.
    by_shard = batch.take(np.argsort(targets.astype(np.uint16), kind="stable"))
    ends = np.cumsum(counts)
    parts = tuple((int(s), by_shard.slice(int(ends[s] - counts[s]), int(counts[s]))) for s in used)
    return Routed(parts, targets)


def key_hashes(keys: AnyArray) -> Hashes:
    """Return the hash of each primary key; none of them is null."""
    if pt.is_string(keys.type) or pt.is_binary(keys.type):
        return _hash_variable(keys, np.int32)
    if pt.is_large_string(keys.type) or pt.is_large_binary(keys.type):
        return _hash_variable(keys, np.int64)
    if pt.is_date32(keys.type):
        keys = keys.cast(pa.int32())
    return hash_integers(keys.cast(pa.int64()).to_numpy())


def _hash_variable(keys: AnyArray, offset_type: type[np.int32] | type[np.int64]) -> Hashes:
    _, offset_buffer, data_buffer = keys.buffers()
    if not len(keys) or offset_buffer is None:
        return np.empty(0, np.uint64)
    offsets = np.frombuffer(memoryview(offset_buffer), offset_type)[keys.offset : keys.offset + len(keys) + 1]
    data = _NO_BYTES if data_buffer is None else np.frombuffer(memoryview(data_buffer), np.uint8)
    return hash_bytes(data, offsets.astype(np.int64))
