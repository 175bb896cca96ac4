"""JSON objects as rows of a schema: typed as its columns are, and refused where a value would not stay what it is. Pure."""

import datetime as dt
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pyarrow as pa
import pyarrow.types as pt

from streamingnode.schema import AnyField, child_fields, has_leaf, is_list, python_type

FINER_TIME = re.compile(rb":\d\d\.\d{6}\d*[1-9]")
_EXACT_TIME = Annotated[str, msgspec.Meta(pattern=r"^[^.]*(\.\d{1,6}0*(\D.*)?)?$")]

Row = dict[str, Any]


def row_decoder(schema: pa.Schema) -> Callable[[bytes], Row]:
    """Return what makes a line a row of `schema`; what a column refuses of values of its kind, the node says."""
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
    """Return the type of an object with these fields, each of which may be left out, and no others."""
    names = {f"field_{number}": field for number, field in enumerate(fields)}  # a column may be called `class`
    return msgspec.defstruct(
        "Row",
        [(name, json_type(field.type, time), None) for name, field in names.items()],
        rename={name: field.name for name, field in names.items()},
        forbid_unknown_fields=True,
    )


def json_type(kind: pa.DataType, time: Any = None) -> Any:
    """Return the type of a column's values in JSON, null being one; `time` is that of times, if not `datetime`."""
    if is_list(kind):
        return list[json_type(kind.field(0).type, time)] | None  # type: ignore[misc]  # made from a column's type
    if pt.is_struct(kind):
        return _object_type(child_fields(kind), time) | None
    if isinstance(kind, pa.TimestampType):
        return (time or Annotated[dt.datetime, msgspec.Meta(tz=kind.tz is not None)]) | None
    return python_type(kind) | None
