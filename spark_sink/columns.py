"""The columns of a collection's table: from the Arrow schema a collection was created with to what tables and Spark hold.

Two differences only. Types that Spark does not have become the next wider one it has (unsigned integers, fixed-size binary,
dictionaries, nanoseconds), and four system columns follow the user's. `table_schema` is the one mapping: the open table, its
readers and the data source all start from it, so they cannot disagree.
"""

import base64
import binascii
import functools
import math
from collections.abc import Callable
from datetime import date
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from interceptors.errors import SchemaMismatch
from wal.errors import Corrupt

# --- arrow types ---
#
# Names for Arrow's classes that are generic to a type checker and plain at run time.


if TYPE_CHECKING:
    AnyArray = pa.Array[Any]
    AnyChunkedArray = pa.ChunkedArray[Any]
    AnyField = pa.Field[Any]
else:
    AnyArray = pa.Array
    AnyChunkedArray = pa.ChunkedArray
    AnyField = pa.Field


TICK, OFFSET, VCHANNEL, PARTITION = "_tick", "_offset", "_vchannel", "_partition"

ROW_SYSTEM_COLUMNS: tuple[AnyField, ...] = (
    pa.field(TICK, pa.int64()),
    pa.field(OFFSET, pa.int64()),
    pa.field(VCHANNEL, pa.string()),
)
"""What each row of a segment file carries behind the user's columns; ticks stay below 2^63."""

_WIDER: dict[pa.DataType, pa.DataType] = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}

_SAME: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_boolean,
    pa.types.is_signed_integer,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_date32,
    pa.types.is_decimal128,
)


@functools.lru_cache(maxsize=1024)
def decode_schema(encoded: str) -> pa.Schema:
    """Return the Arrow schema in a collection entry of a manifest (IPC in base64)."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded, validate=True)))
    except (binascii.Error, pa.ArrowException, OSError) as error:
        raise Corrupt(f"a collection's schema in a cut manifest is no Arrow schema: {error}") from error


def row_schema(collection: pa.Schema) -> pa.Schema:
    """Return the columns of one data file of the table: the user's and the system's, without the partition.

    Raises `SchemaMismatch` naming the column whose type no table format can hold.
    """
    user = [pa.field(field.name, stored_type(field.type, column=field.name)) for field in collection]
    return pa.schema([*user, *ROW_SYSTEM_COLUMNS])


def table_schema(collection: pa.Schema) -> pa.Schema:
    """Return the columns of the table: those of its files, then `_partition`."""
    return row_schema(collection).append(pa.field(PARTITION, pa.string()))


def as_given(rows: pa.Table, collection: pa.Schema) -> pa.Table:
    """Return rows of a table's files with the types of the collection they came from, in its columns' order.

    The columns are those of the collection, then `_tick`, `_offset` and `_vchannel`; one that the rows lack holds null.
    Raises `Corrupt` when a value is none of the collection's type: no ingest wrote it.
    """
    wanted = pa.schema([*collection, *ROW_SYSTEM_COLUMNS])
    columns: list[AnyChunkedArray] = []
    for field in wanted:
        if field.name not in rows.column_names:
            columns.append(pa.chunked_array([pa.nulls(rows.num_rows, field.type)]))
            continue
        try:
            columns.append(rows[field.name].cast(field.type))
        except pa.ArrowException as error:
            raise Corrupt(f"column {field.name} of a table does not hold {field.type}: {error}") from error
    return pa.Table.from_arrays(columns, schema=wanted)


def stored_type(given: pa.DataType, *, column: str) -> pa.DataType:
    """Return the type in which tables and Spark hold values of `given`."""
    nested = functools.partial(stored_type, column=column)
    if given in _WIDER:
        return _WIDER[given]
    if any(holds(given) for holds in _SAME):
        return given
    match given:
        case pa.DictionaryType():
            return nested(given.value_type)
        case pa.FixedSizeBinaryType():
            return pa.binary()
        case pa.TimestampType():
            return pa.timestamp("us", tz="UTC" if given.tz else None)
        case pa.ListType() | pa.LargeListType() | pa.FixedSizeListType():
            return pa.list_(nested(given.value_type))
        case pa.MapType():
            return pa.map_(nested(given.key_type), nested(given.item_type))
        case pa.StructType():
            return pa.struct([pa.field(field.name, nested(field.type)) for field in given])
        case _:
            raise SchemaMismatch(
                f"column {column} has type {given}, which no table can hold — use another type in a new collection",
                column=column,
            )


# --- file stats ---
#
# What a Delta log says about a Parquet file so that readers can skip it: row count, smallest and largest value per column.
#
# Pure: from a Parquet footer to the JSON text Delta stores. A column gets a range only where JSON can hold it exactly and
# the file recorded it for every row group; leaving one out costs a reader time, a wrong one costs it rows.


TEXT_BYTES_MAX = 128
"""A longer text is left out: the log is read by every reader at every open."""

Bound = int | float | str


def stats_json(footer: pq.FileMetaData) -> str:
    """Return the `stats` of a file: `numRecords`, `minValues`, `maxValues`, `nullCount` of its flat columns."""
    lows: dict[str, Bound] = {}
    highs: dict[str, Bound] = {}
    nulls: dict[str, int] = {}
    for index in range(footer.num_columns):
        column = footer.schema.column(index)
        if column.path != column.name or column.max_repetition_level or "." in column.path:
            continue  # inside a list, map or struct
        groups = [footer.row_group(group).column(index).statistics for group in range(footer.num_row_groups)]
        counted = [found.null_count for found in groups if found is not None and found.null_count is not None]
        if len(counted) < len(groups):
            continue
        nulls[column.name] = sum(counted)
        bounds = _range([found for found in groups if found is not None])
        if bounds is not None:
            lows[column.name], highs[column.name] = bounds
    stats = {"numRecords": footer.num_rows, "minValues": lows, "maxValues": highs, "nullCount": nulls}
    return msgspec.json.encode(stats).decode()


def _range(groups: list[pq.Statistics]) -> tuple[Bound, Bound] | None:
    """Return the smallest and largest value over row groups, None where one of them does not say."""
    filled = [found for found in groups if found.has_min_max]
    if not filled or any(found.num_values for found in groups if not found.has_min_max):
        return None
    ends = [_exact(end) for found in filled for end in (found.min, found.max)]
    numbers = [end for end in ends if isinstance(end, int | float)]
    texts = [end for end in ends if isinstance(end, str)]
    if len(numbers) == len(ends):
        return min(numbers), max(numbers)
    if len(texts) == len(ends):
        return min(texts), max(texts)
    return None


def _exact(value: object) -> Bound | None:
    """Return the JSON form of a value that JSON holds exactly; None for the others (decimals, bytes, timestamps)."""
    match value:
        case bool():
            return None
        case int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case str():
            return value if len(value.encode()) <= TEXT_BYTES_MAX else None
        case date() if type(value) is date:
            return value.isoformat()
        case _:
            return None
