"""Arrow input made to fit a schema: columns found by name, exact conversions applied, bad cells named.

In: a `RecordBatch` from a caller. Out: a batch of exactly the collection's schema, whose buffers are sound, or
`SchemaMismatch`. Conversions are only those that cannot change a value. No I/O; everything is columnar.
"""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from streamingnode.rows.arrow_types import AnyArray, AnyField, child_fields
from streamingnode.rows.python_values import null_mismatch
from streamingnode.rows.schema import is_bytes, is_list, is_text
from wal.errors import SchemaMismatch, brief, shown


def conform(batch: pa.RecordBatch, schema: pa.Schema, required: Sequence[int], *, first_row: int = 0) -> pa.RecordBatch:
    """Return `batch` in exactly `schema`; `required` are the indexes of columns without nulls.

    `first_row` is added to the rows that errors name. Costs no copy when the schema is already the same.
    """
    _check_sound(batch)
    if not batch.schema.equals(schema):
        batch = _rearrange(batch, schema, first_row)
    for index in required:
        check_nulls(batch.column(index), schema.field(index), first_row=first_row, required=True)
    return batch


def check_nulls(array: AnyArray, field: AnyField, *, first_row: int, required: bool) -> None:
    """Raise `SchemaMismatch` for a null in a required column, or inside it where its type allows none."""
    if required and array.null_count and not (field.nullable and has_required_inside(field.type)):
        row = pc.index(array.is_null(), True).as_py()
        raise null_mismatch(field.name, first_row + row)
    if has_required_inside(field.type):
        _check_nulls_inside(array, field, field.name)


def has_required_inside(kind: pa.DataType) -> bool:
    """Whether some nested field of the type takes no nulls."""
    return any(not child.nullable or has_required_inside(child.type) for child in child_fields(kind))


def _check_sound(batch: pa.RecordBatch) -> None:
    """Refuse buffers that lie about their lengths, and text that is not UTF-8, before anything reads them."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise SchemaMismatch(
            f"the record batch is not valid Arrow data: {brief(str(error))} — build it again"
        ) from None


def _rearrange(batch: pa.RecordBatch, schema: pa.Schema, first_row: int) -> pa.RecordBatch:
    check_column_names(batch.schema.names, schema)
    columns = [_convert(batch.column(field.name), field, first_row) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def check_column_names(names: Sequence[str], schema: pa.Schema, *, row: int | None = None) -> None:
    """Raise `SchemaMismatch` unless `names` are the schema's columns, each once, in any order."""
    place = "" if row is None else f", row {row}"
    expected = ", ".join(schema.names[:20])
    for name in schema.names:
        if name not in names:
            raise SchemaMismatch(
                f"column {name!r}{place} is missing — give every column, None for null ({expected})",
                column=name,
                row=row,
            )
    for index, name in enumerate(names):
        if name not in schema.names or name in names[:index]:
            reason = "is not in the schema" if name not in schema.names else "appears twice"
            raise SchemaMismatch(
                f"column {shown(str(name))}{place} {reason} — the columns are {expected}", column=str(name), row=row
            )


def _convert(array: AnyArray, field: AnyField, first_row: int) -> AnyArray:
    if array.type == field.type:
        return array
    if not _converts_exactly(array.type, field.type):
        raise SchemaMismatch(
            f"column {field.name!r} is {array.type}, the schema has {field.type} — cast it before the insert",
            column=field.name,
        )
    try:
        return array.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        row = first_row + _first_failing(array, field.type)
        raise SchemaMismatch(
            f"column {field.name!r}, row {row}: {brief(str(error))} — give a value that {field.type} holds",
            column=field.name,
            row=row,
        ) from None  # Arrow quotes the value, whole


def _converts_exactly(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether Arrow's checked cast from `source` to `target` keeps every value or fails."""
    if isinstance(source, pa.DictionaryType):
        return _converts_exactly(source.value_type, target)
    if is_list(target):
        return is_list(source) and _converts_exactly(source.field(0).type, target.field(0).type)
    if pt.is_struct(target):
        return pt.is_struct(source) and _same_fields(source, target)
    return source == target or pt.is_null(source) or _is_widening(source, target)


def _is_widening(source: pa.DataType, target: pa.DataType) -> bool:
    if pt.is_integer(source):
        return pt.is_integer(target) or pt.is_float64(target)
    if pt.is_timestamp(source):
        return pt.is_timestamp(target) and (source.tz is None) == (target.tz is None)
    return (
        ((is_text(source) or pt.is_string_view(source)) and is_text(target))
        or ((is_bytes(source) or pt.is_binary_view(source) or pt.is_fixed_size_binary(source)) and is_bytes(target))
        or (pt.is_floating(source) and pt.is_floating(target) and source.bit_width <= target.bit_width)
        or (pt.is_decimal(source) and pt.is_decimal(target))
    )


def _same_fields(source: pa.DataType, target: pa.DataType) -> bool:
    if source.num_fields != target.num_fields:
        return False
    pairs = zip(child_fields(source), child_fields(target), strict=True)
    return all(ours.name == theirs.name and _converts_exactly(ours.type, theirs.type) for ours, theirs in pairs)


def _first_failing(array: AnyArray, target: pa.DataType) -> int:
    """Return the first row that does not cast, by halving: the left half is tried, and left out when it does cast."""
    first = 0
    while len(array) > 1:
        half = len(array) // 2
        try:
            array[:half].cast(target)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            array = array[:half]
        else:
            array, first = array[half:], first + half
    return first


def _check_nulls_inside(array: AnyArray, field: AnyField, column: str) -> None:
    kind = field.type
    if is_list(kind):
        _check_child(pc.list_flatten(array), kind.field(0), column)
    elif pt.is_struct(kind):
        present = array.filter(array.is_valid())
        for index, child in enumerate(child_fields(kind)):
            _check_child(pc.struct_field(present, index), child, column)


def _check_child(values: AnyArray, child: AnyField, column: str) -> None:
    if not child.nullable and values.null_count:
        raise SchemaMismatch(
            f"column {column!r}: null in {child.name!r}, which takes none — give a value", column=column
        )
    if has_required_inside(child.type):
        _check_nulls_inside(values, child, f"{column}.{child.name}")
