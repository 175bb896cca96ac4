"""Arrow data made to fit a schema: columns found by name, exact conversions applied, bad cells named.

In: a `RecordBatch` from a caller, or what Arrow made of Python values. Out: exactly the collection's types, in sound
buffers, or `SchemaMismatch`. A conversion keeps every value or fails; only floats may round to the nearest, and never to
an infinity. So an integer goes into a float column only where every integer is a float. No I/O; everything is columnar.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from streamingnode.rows.python_values import null_mismatch
from streamingnode.rows.schema import (
    AnyArray,
    AnyField,
    child_fields,
    has_leaf,
    is_bytes,
    is_list,
    is_text,
    with_leaves,
)
from wal.errors import brief, shown


def conform(batch: pa.RecordBatch, schema: pa.Schema, required: Sequence[int], *, first_row: int = 0) -> pa.RecordBatch:
    """Return `batch` in exactly `schema`; `required` are the indexes of columns without nulls.

    `first_row` is added to the rows that errors name. Costs no copy when the schema is already the same.
    """
    if batch.schema.equals(schema):
        _check_sound(batch)
    else:
        batch = _rearrange(batch, schema, first_row)
    for index in required:
        field, column = schema.field(index), batch.column(index)
        check_nulls(column, field, first_row=first_row, required=True)
        if _hides_null(column, field.type):
            batch = batch.set_column(index, field, _filled(column.take(pa.array(range(len(column)))), field))
    return batch


def check_nulls(array: AnyArray, field: AnyField, *, first_row: int, required: bool) -> None:
    """Raise `SchemaMismatch` for a null in a required column, or inside it where its type allows none."""
    if required and array.null_count and not (field.nullable and has_required_inside(field.type)):
        row = pc.index(array.is_null(), True).as_py()
        raise null_mismatch(field.name, first_row + row)
    if has_required_inside(field.type) and (inside := _null_inside(array, field, field.name)) is not None:
        row = first_row + _first_row(array, lambda part: _null_inside(part, field, field.name) is not None)
        raise SchemaMismatch(
            f"column {field.name!r}, row {row}: null in {inside!r}, which takes none — give a value",
            column=field.name,
            row=row,
        )


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
    for field in schema:
        _check_type(batch.schema.field(field.name).type, field)
    _check_sound(batch)  # after the types: how deep they are nested is known to be harmless now
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


def exact_cast(array: AnyArray, target: pa.DataType) -> AnyArray:
    """Return the array in another type, every value as it was, or a float next to it.

    Raises `pa.ArrowInvalid` for a value that the type does not hold.
    """
    if has_leaf(target, pt.is_decimal):  # Arrow refuses to make decimals of integers unless any integer would fit
        array = array.cast(with_leaves(target, _widest_decimal))
    cast = array.cast(target)
    if has_leaf(target, pt.is_float32):
        for given, made in zip(_leaves(array), _leaves(cast), strict=True):
            if (
                pt.is_floating(given.type)
                and (at := pc.index(pc.less(pc.is_inf(given), pc.is_inf(made)), True).as_py()) >= 0
            ):
                raise pa.ArrowInvalid(f"{given[at]} is out of range of a 32-bit float")
    return cast


def holds_infinity(array: AnyArray) -> bool:
    """Whether some float in an array of floats, or of lists and structs of them, is infinite."""
    return any(
        np.isinf(leaf.to_numpy(zero_copy_only=False)).any() for leaf in _leaves(array) if pt.is_floating(leaf.type)
    )


def _check_type(given: pa.DataType, field: AnyField) -> None:
    if not _converts_exactly(given, field.type):
        raise SchemaMismatch(
            f"column {field.name!r} is {given}, the schema has {field.type} — cast it before the insert",
            column=field.name,
        )


def _convert(array: AnyArray, field: AnyField, first_row: int) -> AnyArray:
    if array.type == field.type:
        return array
    try:
        return exact_cast(array, field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        row = first_row + _first_row(array, lambda part: not _casts(part, field.type))
        raise SchemaMismatch(
            f"column {field.name!r}, row {row}: {brief(str(error))} — give a value that {field.type} holds",
            column=field.name,
            row=row,
        ) from None  # Arrow quotes the value, whole


def _converts_exactly(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether `exact_cast` from `source` to `target` keeps every value or fails."""
    if isinstance(source, pa.DictionaryType):
        return _converts_exactly(source.value_type, target)
    if is_list(target):
        return pt.is_null(source) or (is_list(source) and _converts_exactly(source.field(0).type, target.field(0).type))
    if pt.is_struct(target):
        return pt.is_null(source) or (pt.is_struct(source) and _same_fields(source, target))
    return source == target or pt.is_null(source) or _is_exact(source, target)


def _is_exact(source: pa.DataType, target: pa.DataType) -> bool:
    if pt.is_integer(source):
        return pt.is_integer(target) or pt.is_floating(target) or pt.is_decimal(target)
    if pt.is_timestamp(source):
        return pt.is_timestamp(target) and (source.tz is None) == (target.tz is None)
    return (
        ((is_text(source) or pt.is_string_view(source)) and is_text(target))
        or ((is_bytes(source) or pt.is_binary_view(source) or pt.is_fixed_size_binary(source)) and is_bytes(target))
        or (pt.is_floating(source) and pt.is_floating(target))
        or (pt.is_decimal(source) and pt.is_decimal(target))
        or (pt.is_date64(source) and pt.is_date32(target))
    )


def _same_fields(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether a struct has the fields of another, each once, in any order; Arrow's cast finds them by name."""
    given = {field.name: field.type for field in child_fields(source)}
    wanted = {field.name: field.type for field in child_fields(target)}
    if source.num_fields != len(given) or given.keys() != wanted.keys():
        return False
    return all(_converts_exactly(given[name], kind) for name, kind in wanted.items())


def _casts(array: AnyArray, target: pa.DataType) -> bool:
    try:
        exact_cast(array, target)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


def _first_row(array: AnyArray, fails: Callable[[AnyArray], bool]) -> int:
    """Return the first row to blame, by halving: the left half is tried, and left out when it is not to blame."""
    first = 0
    while len(array) > 1:
        half = len(array) // 2
        if fails(array[:half]):
            array = array[:half]
        else:
            array, first = array[half:], first + half
    return first


def _leaves(array: AnyArray) -> Iterator[AnyArray]:
    """Yield the arrays of values that hold no others, in the order of their names, without what is under a null."""
    if is_list(array.type):
        yield from _leaves(pc.list_flatten(array))
    elif pt.is_struct(array.type):
        present = array.filter(array.is_valid())
        for name in sorted(field.name for field in child_fields(array.type)):
            yield from _leaves(pc.struct_field(present, name))
    elif isinstance(array, pa.DictionaryArray):
        yield array.dictionary_decode()
    else:
        yield array


def _hides_null(array: AnyArray, kind: pa.DataType) -> bool:
    """Whether a field that takes no nulls has one, which lies under a null. Parquet cannot be written of that."""
    return any(
        (not child.nullable and part.null_count > 0) or _hides_null(part, child.type)
        for part, child in zip(_parts(array), child_fields(kind), strict=True)
    )


def _filled(array: AnyArray, field: AnyField) -> AnyArray:
    """Return an array that was not sliced with some value for each null that `_hides_null` finds."""
    kind, nulls = field.type, array.is_null()
    parts = [_filled(part, child) for part, child in zip(_parts(array), child_fields(kind), strict=True)]
    filled: AnyArray = array
    if isinstance(array, pa.StructArray):
        filled = pa.StructArray.from_arrays(parts, fields=child_fields(kind), mask=nulls)
    elif isinstance(array, pa.FixedSizeListArray):
        filled = pa.FixedSizeListArray.from_arrays(parts[0], type=kind, mask=nulls)
    elif isinstance(array, (pa.ListArray, pa.LargeListArray)):
        filled = type(array).from_arrays(array.offsets, parts[0], type=kind, mask=nulls)  # type: ignore[arg-type]  # offsets of its kind
    if field.nullable or not filled.null_count:
        return filled
    return pc.coalesce(filled, pa.array([_some(kind)], kind)[0])


def _parts(array: AnyArray) -> list[AnyArray]:
    """Return the arrays directly inside an array, also what is under nulls."""
    if isinstance(array, pa.StructArray):
        return [array.field(index) for index in range(array.type.num_fields)]
    return [array.values] if is_list(array.type) else []  # type: ignore[attr-defined]  # every list has them


def _some(kind: pa.DataType) -> object:
    """Return a value of the type, for where nobody sees it."""
    if pt.is_struct(kind):
        return {field.name: _some(field.type) for field in child_fields(kind)}
    if isinstance(kind, pa.FixedSizeListType):
        return [_some(kind.field(0).type)] * kind.list_size
    if is_list(kind):
        return []
    return "" if is_text(kind) else b"" if is_bytes(kind) else False if pt.is_boolean(kind) else 0


def _widest_decimal(kind: pa.DataType) -> pa.DataType:
    return pa.decimal256(76, kind.scale) if isinstance(kind, pa.Decimal128Type) else kind


def _null_inside(array: AnyArray, field: AnyField, path: str) -> str | None:
    """Return the path of the first nested field that has a null and takes none."""
    kind = field.type
    if is_list(kind):
        inside = [(pc.list_flatten(array), kind.field(0))]
    elif pt.is_struct(kind):
        present = array.filter(array.is_valid())
        inside = [(pc.struct_field(present, index), child) for index, child in enumerate(child_fields(kind))]
    else:
        inside = []
    for values, child in inside:
        name = f"{path}.{child.name}"
        if not child.nullable and values.null_count:
            return name
        if has_required_inside(child.type) and (found := _null_inside(values, child, name)) is not None:
            return found
    return None
