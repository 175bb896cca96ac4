"""Schemas of collections: which Arrow types a column and a primary key may have, and their stored bytes.

In: the `pyarrow.Schema` of `create_collection`. Out: the same schema without pandas' metadata, or `SchemaMismatch` that
names the column. The types are those that Parquet, Spark and the open table formats all keep exactly as they are:
unsigned integers, nanoseconds and times of day are not among them, and a column that came back different would be a
silent lie. No I/O.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from wal.errors import Corrupt, InvalidArgument

if TYPE_CHECKING:
    AnyArray = pa.Array[Any]
    AnyChunkedArray = pa.ChunkedArray[Any]
    AnyField = pa.Field[Any]
else:
    AnyArray = pa.Array
    AnyChunkedArray = pa.ChunkedArray
    AnyField = pa.Field


def child_fields(kind: pa.DataType) -> list[AnyField]:
    """Return the fields directly inside a list or struct type; none for any other."""
    return [kind.field(i) for i in range(kind.num_fields)]


def has_leaf(kind: pa.DataType, matches: Callable[[pa.DataType], bool]) -> bool:
    """Whether the type, or one inside it, is such a one."""
    return matches(kind) or any(has_leaf(child.type, matches) for child in child_fields(kind))


def with_leaves(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return the type with those that hold no others changed, inside lists and structs too."""
    if isinstance(kind, pa.StructType):
        return pa.struct([field.with_type(with_leaves(field.type, change)) for field in kind])
    if not (pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)):
        return change(kind)
    item = kind.field(0).with_type(with_leaves(kind.field(0).type, change))
    if pt.is_large_list(kind):
        return pa.large_list(item)
    return pa.list_(item, kind.list_size if pt.is_fixed_size_list(kind) else -1)


SUPPORTED_TYPES = (
    "bool, int8, int16, int32, int64, float32, float64, decimal128, string, large_string, binary, large_binary, date32, "
    "timestamp[ms], timestamp[us] (with or without time zone), and list, large_list, fixed_size_list and struct of these"
)
KEY_TYPES = (
    "int8, int16, int32, int64, string, large_string, binary, large_binary, date32, timestamp[ms], timestamp[us]"
)

COLUMNS_MAX = 2_000
"""Columns a row may have, nested fields included: every column costs each message metadata."""
NESTING_MAX = 16
"""Lists and structs inside each other; readers of Parquet recurse."""

_FORBIDDEN_CHARACTERS = frozenset(" ,;{}()=")
"""What Parquet readers and table formats refuse in a column name; a name with a control character reads as null in Spark."""
_TIMESTAMP_UNITS = ("ms", "us")


def check_schema(schema: pa.Schema, *, primary_key: str) -> pa.Schema:
    """Return the schema a new collection gets: `schema` without its metadata, once every column is supported.

    Raises:
        InvalidArgument: not a schema, no columns, too many, or `primary_key` is not one of them.
        SchemaMismatch: a column's name or type cannot be kept; `column` says which.
    """
    if not isinstance(schema, pa.Schema):
        raise InvalidArgument(f"the schema is a {type(schema).__name__} — pass a pyarrow.Schema, pa.schema([...])")
    columns = sum(1 for _ in _walk(schema))
    if not 0 < columns <= COLUMNS_MAX:
        raise InvalidArgument(f"the schema has {columns} columns — give it 1 to {COLUMNS_MAX}, nested fields included")
    for path, field, depth in _walk(schema):
        _check_field(path, field, depth)
    _check_unique(schema.names)
    check_primary_key(schema, primary_key)
    return schema.remove_metadata()


def check_primary_key(schema: pa.Schema, primary_key: str) -> pa.DataType:
    """Return the type of the primary key. Raises `InvalidArgument` or `SchemaMismatch` when there is none such."""
    if primary_key not in schema.names:
        raise InvalidArgument(
            f"primary key {primary_key!r} is no column — choose one of {', '.join(schema.names[:20])}"
        )
    kind: pa.DataType = schema.field(primary_key).type
    if not is_key_type(kind):
        raise SchemaMismatch(
            f"column {primary_key!r} of type {kind} cannot be the primary key — use one of {KEY_TYPES}",
            column=primary_key,
        )
    return kind


def is_key_type(kind: pa.DataType) -> bool:
    """Whether a column of this type can be a primary key."""
    return pt.is_signed_integer(kind) or is_text(kind) or is_bytes(kind) or pt.is_date32(kind) or _is_timestamp(kind)


def is_supported_type(kind: pa.DataType) -> bool:
    """Whether a column that holds no others can be of this type."""
    return is_key_type(kind) or pt.is_boolean(kind) or pt.is_float32(kind) or pt.is_float64(kind) or _is_decimal(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether values are Unicode text."""
    return pt.is_string(kind) or pt.is_large_string(kind)


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values are byte strings."""
    return pt.is_binary(kind) or pt.is_large_binary(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists, of fixed size or not."""
    return pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)


def encode_schema(schema: pa.Schema) -> bytes:
    """Return the schema as the Arrow IPC schema message that the log keeps."""
    return schema.serialize().to_pybytes()


def decode_schema(data: bytes) -> pa.Schema:
    """Return the schema `encode_schema` wrote. Raises `Corrupt` for other bytes."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(f"a stored schema does not decode: {error}") from error


def _is_decimal(kind: pa.DataType) -> bool:
    """Parquet has neither a negative scale nor one over the precision: such a column could be inserted and never flushed."""
    return pt.is_decimal128(kind) and 0 <= kind.scale <= kind.precision


def _is_timestamp(kind: pa.DataType) -> bool:
    return pt.is_timestamp(kind) and kind.unit in _TIMESTAMP_UNITS and (kind.tz is None or _is_time_zone(kind))


def _is_time_zone(kind: pa.TimestampType) -> bool:
    """Whether this machine knows the zone: with another one rows could be inserted and never be Python values again."""
    try:
        pa.scalar(0, kind).as_py()
    except (KeyError, ValueError):
        return False
    return True


def _walk(fields: Iterable[AnyField], path: str = "", depth: int = 1) -> Iterator[tuple[str, AnyField, int]]:
    """Yield every field, nested ones too, with its dotted path; stops below the deepest allowed level."""
    for field in fields:
        name = f"{path}{field.name}"
        yield name, field, depth
        if depth <= NESTING_MAX:
            yield from _walk(_children(field.type), f"{name}.", depth + 1)


def _children(kind: pa.DataType) -> list[AnyField]:
    return child_fields(kind) if is_list(kind) or pt.is_struct(kind) else []


def _check_field(path: str, field: AnyField, depth: int) -> None:
    if depth > NESTING_MAX:
        raise SchemaMismatch(f"column {path[:64]!r} is nested over {NESTING_MAX} deep — flatten it", column=path)
    if not field.name or not field.name.isprintable() or _FORBIDDEN_CHARACTERS & set(field.name):
        raise SchemaMismatch(
            f"column name {path!r} is not allowed — rename it: no blank, no control character and none of ',;{{}}()='",
            column=path,
        )
    if field.name.startswith("_") and depth == 1:
        raise SchemaMismatch(
            f"column name {path!r} is reserved: columns that start with '_' are the node's — rename it", column=path
        )
    if pt.is_struct(field.type) and field.type.num_fields:
        _check_unique([child.name for child in _children(field.type)])
        for child in _children(field.type):
            # Under a struct that is null Parquet has no elements of it, and readers ask for as many as there always are.
            if pt.is_fixed_size_list(child.type) and not child.nullable:
                raise SchemaMismatch(
                    f"column {path!r} has a list of fixed size that takes no null, {child.name!r} — use one that does",
                    column=path,
                )
    elif not _is_filled_list(field.type) and not is_supported_type(field.type):
        raise SchemaMismatch(
            f"column {path!r} has type {field.type}, which is not kept exactly — use {_instead(field.type)}",
            column=path,
        )


def _is_filled_list(kind: pa.DataType) -> bool:
    """Parquet reads a list of fixed size 0 back as a list of one null."""
    return is_list(kind) and not (pt.is_fixed_size_list(kind) and kind.list_size == 0)


def _check_unique(names: Iterable[str]) -> None:
    """Spark does not tell `Id` from `id`, so a table could not have both."""
    for name, count in Counter(name.lower() for name in names).items():
        if count > 1:
            raise SchemaMismatch(
                f"column name {name!r} appears {count} times (Spark ignores case) — rename one", column=name
            )


def _instead(kind: pa.DataType) -> str:
    if pt.is_unsigned_integer(kind):
        return "a signed integer, int64 for example"
    if pt.is_timestamp(kind) and kind.unit in _TIMESTAMP_UNITS:
        return "a time zone this machine knows, Europe/Berlin or +02:00 for example"
    if pt.is_timestamp(kind):
        return 'pa.timestamp("us"), which also takes nanoseconds, as pandas has them, that are whole microseconds'
    if pt.is_date64(kind):
        return "date32, or timestamp[us]"
    if pt.is_decimal128(kind):
        return "a decimal128 whose scale is within 0 and its precision"
    if pt.is_dictionary(kind):
        return f"{kind.value_type}"
    return f"one of {SUPPORTED_TYPES}"
