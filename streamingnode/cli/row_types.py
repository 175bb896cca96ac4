"""Which types columns get when a collection is made from data, and how JSON writes what it has no type for. Pure.

JSON has text, numbers, lists and objects. Dates are read from ISO text, bytes from base64 as `tail` writes them, and every
kind of list from a list. What a file holds and a collection cannot keep exactly becomes the next wider type it can.
"""

import base64
import binascii
from collections.abc import Callable

import pyarrow as pa
import pyarrow.types as pt

from streamingnode.rows.arrow_types import AnyArray

SYSTEM_COLUMNS = frozenset({"_tick", "_offset", "_vchannel", "_partition"})
"""What a node and its tables add to a row, and what is not part of it when it is inserted again."""

_WIDER: dict[pa.DataType, pa.DataType] = {
    pa.null(): pa.string(),
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
}


def without_system_columns(schema: pa.Schema) -> pa.Schema:
    """Return the columns that are rows' own."""
    return pa.schema([field for field in schema if field.name not in SYSTEM_COLUMNS])


def kept_schema(schema: pa.Schema) -> pa.Schema:
    """Return columns a collection can have for data of `schema`; one that has no kept type stays, for the node to refuse."""
    return pa.schema([pa.field(field.name, kept_type(field.type), nullable=field.nullable) for field in schema])


def kept_type(given: pa.DataType) -> pa.DataType:
    """Return the type in which a collection keeps values of `given`."""
    if pt.is_timestamp(given):
        return pa.timestamp("us", given.tz)
    if pt.is_dictionary(given):
        value_type: pa.DataType = given.value_type
        return kept_type(value_type)
    if pt.is_fixed_size_binary(given):
        return pa.binary()
    return _WIDER.get(given) or _rebuilt(given, kept_type)


def json_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns as a JSON reader is asked for them, every one nullable: the node says which nulls it refuses."""
    return pa.schema([pa.field(field.name, _json_type(field.type)) for field in schema])


def from_json(column: AnyArray, kind: pa.DataType) -> AnyArray:
    """Return a column read by `json_schema` as its own type. Raises `pa.ArrowException` for text that is none."""
    if not (pt.is_binary(kind) or pt.is_large_binary(kind)):
        return column.cast(kind)
    try:
        decoded = [None if text is None else base64.b64decode(text, validate=True) for text in column.to_pylist()]
    except binascii.Error as error:
        raise pa.ArrowInvalid(f"text is no base64: {error}") from error
    return pa.array(decoded, kind)


def _json_type(kind: pa.DataType) -> pa.DataType:
    if pt.is_date32(kind) or pt.is_binary(kind) or pt.is_large_binary(kind):
        return pa.string()
    if pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return pa.list_(_json_type(kind.value_type))
    return _rebuilt(kind, _json_type)


def _rebuilt(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a list or struct with the types inside changed; anything else as it is."""
    if isinstance(kind, pa.StructType):
        return pa.struct([pa.field(field.name, change(field.type)) for field in kind])
    if not (pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)):
        return kind
    inside = change(kind.value_type)
    if pt.is_large_list(kind):
        return pa.large_list(inside)
    return pa.list_(inside, kind.list_size if pt.is_fixed_size_list(kind) else -1)
