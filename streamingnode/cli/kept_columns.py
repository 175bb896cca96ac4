"""Derives the columns of a new collection from those of a Parquet file. No I/O.

A file may have types that a collection does not keep. Most are mapped to the narrowest kept type
that holds each of their values unchanged, which is also the type that Spark reads them as. The
others are refused.
"""

import pyarrow as pa
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from streamingnode.schema import AnyField, child_fields, has_leaf, is_list

_DECIMAL_DIGITS_MAX = 38
_SAME: dict[pa.DataType, pa.DataType] = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
    pa.null(): pa.string(),  # as for a JSON key that is null in each line
}


def kept_columns(schema: pa.Schema) -> pa.Schema:
    """Return the columns that hold every row of a file, except times finer than microseconds.

    A type that cannot be mapped stays unchanged, and the schema check refuses it. `not null` inside
    a column is dropped. Raises `SchemaMismatch` for uint64, which could be mapped to more than one
    type.
    """
    for field in schema:
        if has_leaf(field.type, pt.is_uint64):
            what = f"is {field.type}, and no kept integer type holds all of uint64"
            step = (
                "create the collection with `streamingnode collection create`, with int64 (to "
                "2^63 - "
                "1) "
                "or a decimal of 20 digits there, and insert without --create"
            )
            text = f"column {field.name!r} {what} — {step}"
            raise SchemaMismatch(text, column=field.name)
    return pa.schema([field.with_type(kept_type(field.type)) for field in schema])


def kept_type(kind: pa.DataType) -> pa.DataType:
    """Return the kept type for a type of a file."""
    if isinstance(kind, pa.DictionaryType):
        return kept_type(kind.value_type)
    if pt.is_struct(kind):
        return pa.struct([_inside(field) for field in child_fields(kind)])
    if is_list(kind):
        item = _inside(kind.field(0))
        if pt.is_large_list(kind):
            return pa.large_list(item)
        return pa.list_(item, kind.list_size if isinstance(kind, pa.FixedSizeListType) else -1)
    if pt.is_fixed_size_binary(kind):
        return pa.binary()
    if pt.is_decimal(kind) and kind.precision <= _DECIMAL_DIGITS_MAX:
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, pa.TimestampType) and kind.unit in {"s", "ns"}:
        return pa.timestamp("ms" if kind.unit == "s" else "us", kind.tz)
    return _SAME.get(kind, kind)


def has_nanoseconds(kind: pa.DataType) -> bool:
    """Whether values of the type may be finer than the kept type stores."""
    return has_leaf(kind, lambda leaf: isinstance(leaf, pa.TimestampType) and leaf.unit == "ns")


def _inside(field: AnyField) -> AnyField:
    return field.with_type(kept_type(field.type)).with_nullable(True)
