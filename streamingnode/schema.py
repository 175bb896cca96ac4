"""Schemas of collections: which Arrow types a column and a primary key may have, their stored
bytes, and JSON rows. No I/O.

The types are those that Parquet, Spark and the open table formats all keep exactly. Unsigned
integers, nanoseconds and times of day are refused, because they would come back as other types.
"""

import datetime as dt
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import pyarrow as pa
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from wal.errors import Corrupt, InvalidArgument, shown

if TYPE_CHECKING:
    AnyArray = pa.Array[Any]
    AnyChunkedArray = pa.ChunkedArray[Any]
    AnyField = pa.Field[Any]
else:
    AnyArray = pa.Array
    AnyChunkedArray = pa.ChunkedArray
    AnyField = pa.Field


SUPPORTED_TYPES = (
    "bool, int8, int16, int32, int64, float32, float64, decimal128 (scale from 0 to its "
    "precision), string, large_string, "
    "binary, large_binary, date32, timestamp[ms], timestamp[us] (with no time zone, or one that "
    "this machine knows), and "
    "list, large_list, fixed_size_list and struct of these, not empty"
)
KEY_TYPES = (
    "int8, int16, int32, int64, string, large_string, binary, large_binary, date32, "
    "timestamp[ms], timestamp[us]"
)

COLUMNS_MAX = 2_000
"""The most columns of a row, nested fields included: every column adds metadata to each message."""
SCHEMAS_MAX = 256
"""Cached decoded schemas: each reader, and each call that describes a collection, needs one."""
NESTING_MAX = 16
"""The deepest nesting of lists and structs; readers of Parquet recurse."""

_FORBIDDEN_CHARACTERS = frozenset(" ,;{}()=")
"""Characters that Parquet readers and table formats refuse in a column name; Spark reads a column
whose name has a control character as null.
"""
_TIMESTAMP_UNITS = ("ms", "us")


def is_text(kind: pa.DataType) -> bool:
    """Whether values are Unicode text."""
    return pt.is_string(kind) or pt.is_large_string(kind)


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values are byte strings."""
    return pt.is_binary(kind) or pt.is_large_binary(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists, of fixed size or not."""
    return pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)


_PYTHON_TYPES: tuple[tuple[Callable[[pa.DataType], bool], type], ...] = (
    (pt.is_boolean, bool),
    (pt.is_integer, int),
    (pt.is_floating, float),
    (pt.is_decimal, Decimal),
    (is_text, str),
    (is_bytes, bytes),
    (pt.is_date32, dt.date),
    (pt.is_timestamp, dt.datetime),
    (is_list, list),
    (pt.is_struct, dict),
)


def python_type(kind: pa.DataType) -> type:
    """Return the Python type of a column's values."""
    return next(python for matches, python in _PYTHON_TYPES if matches(kind))


def child_fields(kind: pa.DataType) -> list[AnyField]:
    """Return the fields directly inside a list or struct type; none for any other."""
    return (
        [kind.field(i) for i in range(kind.num_fields)]
        if is_list(kind) or pt.is_struct(kind)
        else []
    )


def has_leaf(kind: pa.DataType, matches: Callable[[pa.DataType], bool]) -> bool:
    """Whether the type, or a type inside it, matches."""
    return matches(kind) or any(has_leaf(child.type, matches) for child in child_fields(kind))


def with_leaves(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return the type with `change` applied to its leaf types, inside lists and structs too; fields
    lose their metadata.
    """
    inside = [
        field.with_type(with_leaves(field.type, change)).remove_metadata()
        for field in child_fields(kind)
    ]
    return with_children(kind, inside) if inside else change(kind)


def with_children(kind: pa.DataType, inside: list[AnyField]) -> pa.DataType:
    """Return a list or struct type of the same kind with other fields directly inside it."""
    if pt.is_struct(kind):
        return pa.struct(inside)
    if pt.is_large_list(kind):
        return pa.large_list(inside[0])
    return pa.list_(inside[0], kind.list_size if isinstance(kind, pa.FixedSizeListType) else -1)


def encode_schema(schema: pa.Schema) -> bytes:
    """Return the schema as the Arrow IPC schema message that the log keeps."""
    return schema.serialize().to_pybytes()


@lru_cache(SCHEMAS_MAX)
def decode_schema(data: bytes) -> pa.Schema:
    """Return the schema `encode_schema` wrote. Raises `Corrupt` for other bytes."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(f"a stored schema does not decode: {error}") from error


def check_schema(schema: pa.Schema, *, primary_key: str) -> pa.Schema:
    """Return the schema of a new collection, after checking every column; metadata of the schema
    and its fields is removed.

    Metadata may name an extension type: a program that has the extension would read the column back
    as an unsupported type. Raises `InvalidArgument` unless it is a schema with 1 to `COLUMNS_MAX`
    columns that has `primary_key`, and `SchemaMismatch` naming a column whose name or type is
    unsupported.
    """
    if not isinstance(schema, pa.Schema):
        raise InvalidArgument(
            f"the schema is a {type(schema).__name__} — pass a pyarrow.Schema, pa.schema([...])"
        )
    columns = sum(1 for _ in _walk(schema))
    if not 0 < columns <= COLUMNS_MAX:
        raise InvalidArgument(
            f"the schema has {columns} columns — give it 1 to {COLUMNS_MAX}, nested fields included"
        )
    for path, field, depth in _walk(schema):
        _check_field(path, field, depth)
    _check_unique(schema.names)
    if primary_key not in schema.names:
        raise InvalidArgument(
            f"primary key {shown(primary_key)} is no column — choose one of "
            f"{', '.join(schema.names[:20])}"
        )
    kind = schema.field(primary_key).type
    if not _is_key_type(kind):
        raise _refused(
            primary_key, f"of type {kind} cannot be the primary key — use one of {KEY_TYPES}"
        )
    return pa.schema(child_fields(with_leaves(pa.struct(list(schema)), lambda kind: kind)))


def _is_key_type(kind: pa.DataType) -> bool:
    return (
        pt.is_signed_integer(kind)
        or is_text(kind)
        or is_bytes(kind)
        or pt.is_date32(kind)
        or _is_timestamp(kind)
    )


def _is_supported(kind: pa.DataType) -> bool:
    if is_list(kind):  # Parquet reads a list of fixed size 0 back as a list of one null
        return not (isinstance(kind, pa.FixedSizeListType) and kind.list_size == 0)
    # Parquet has no other scales: such a column could be inserted but never flushed
    if isinstance(kind, pa.Decimal128Type):
        return bool(0 <= kind.scale <= kind.precision)
    if pt.is_struct(kind):
        return kind.num_fields > 0
    return _is_key_type(kind) or pt.is_boolean(kind) or pt.is_float32(kind) or pt.is_float64(kind)


def _is_timestamp(kind: pa.DataType) -> bool:
    """Whether the type is a supported timestamp, without a zone or in one that this machine knows.

    Rows with an unknown zone could not be converted back to Python values.
    """
    if not pt.is_timestamp(kind) or kind.unit not in _TIMESTAMP_UNITS:
        return False
    try:
        pa.scalar(0, kind).as_py()
    except (KeyError, ValueError):
        return False
    return True


def _walk(
    fields: Iterable[AnyField], path: str = "", depth: int = 1
) -> Iterator[tuple[str, AnyField, int]]:
    """Yield every field, nested ones too, with its dotted path; stops below the deepest allowed
    level.
    """
    for field in fields:
        name = f"{path}{field.name}"
        yield name, field, depth
        if depth <= NESTING_MAX:
            yield from _walk(child_fields(field.type), f"{name}.", depth + 1)


def _check_field(path: str, field: AnyField, depth: int) -> None:
    if depth > NESTING_MAX:
        raise _refused(path[:64], f"is nested over {NESTING_MAX} deep — flatten it")
    if not field.name or not field.name.isprintable() or _FORBIDDEN_CHARACTERS & set(field.name):
        allowed = "no blank, no control character and none of ',;{}()='"
        raise _refused(path, f"is not allowed — rename it: {allowed}", what="column name")
    if field.name.startswith("_") and depth == 1:
        reason = "is reserved: columns that start with '_' are the node's — rename it"
        raise _refused(path, reason, what="column name")
    if not _is_supported(field.type):
        raise _refused(
            path, f"has type {field.type}, which is not kept exactly — use one of {SUPPORTED_TYPES}"
        )
    if depth > 1 and not field.nullable:
        raise _refused(path, "is inside another column and takes no null — declare it nullable")
    if pt.is_struct(field.type):
        _check_unique([child.name for child in child_fields(field.type)])


def _refused(column: str, reason: str, *, what: str = "column") -> SchemaMismatch:
    return SchemaMismatch(f"{what} {column!r} {reason}", column=column)


def _check_unique(names: Iterable[str]) -> None:
    """Raise `SchemaMismatch` for names that differ only in case: Spark ignores case."""
    for name, count in Counter(name.lower() for name in names).items():
        if count > 1:
            raise _refused(
                name, f"appears {count} times (Spark ignores case) — rename one", what="column name"
            )


# --- JSON objects as rows -------------------------------------------------------------------------

FINER_TIME = re.compile(rb":\d\d\.\d{6}\d*[1-9]")
_EXACT_TIME = Annotated[str, msgspec.Meta(pattern=r"^[^.]*(\.\d{1,6}0*(\D.*)?)?$")]

Row = dict[str, Any]


def row_decoder(schema: pa.Schema) -> Callable[[bytes], Row]:
    """Return a function that decodes a JSON line to a row of `schema`.

    It checks only the kinds of values; the node checks their ranges at the insert.
    """
    decoder = msgspec.json.Decoder(_object_type(schema))
    exact = msgspec.json.Decoder(_object_type(schema, time=_EXACT_TIME))
    has_times = any(has_leaf(field.type, pt.is_timestamp) for field in schema)

    def decode(line: bytes) -> Row:
        row = decoder.decode(line)
        if has_times and (b"\\" in line or FINER_TIME.search(line)):  # a `datetime` is rounded
            try:
                exact.decode(line)
            except msgspec.ValidationError:
                raise msgspec.ValidationError("a time is finer than microseconds") from None
        made: Row = msgspec.to_builtins(row, builtin_types=(bytes, dt.date, dt.datetime, Decimal))
        return made

    return decode


def _object_type(fields: Iterable[AnyField], time: Any = None) -> Any:
    """Return the type of an object with these optional fields and no others."""
    # generated names, since a column may be called `class`
    names = {f"field_{number}": field for number, field in enumerate(fields)}
    return msgspec.defstruct(
        "Row",
        [(name, json_type(field.type, time), None) for name, field in names.items()],
        rename={name: field.name for name, field in names.items()},
        forbid_unknown_fields=True,
    )


def json_type(kind: pa.DataType, time: Any = None) -> Any:
    """Return the type of a column's values in JSON, including null; `time` is the type of times, by
    default `datetime`.
    """
    if is_list(kind):
        # made from a column's type
        return list[json_type(kind.field(0).type, time)] | None  # type: ignore[misc]
    if pt.is_struct(kind):
        return _object_type(child_fields(kind), time) | None
    if isinstance(kind, pa.TimestampType):
        return (time or Annotated[dt.datetime, msgspec.Meta(tz=kind.tz is not None)]) | None
    return python_type(kind) | None
