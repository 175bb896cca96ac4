"""Arrow data made to fit a schema: columns found by name, exact conversions applied, bad cells named. No I/O.

A conversion keeps every value or fails; only floats may round to the nearest, and never to an infinity. So an integer goes
into a float column only where every integer is a float. Everything is columnar.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from streamingnode.schema import AnyArray, child_fields, has_leaf, is_bytes, is_list, is_text, with_leaves
from wal.errors import brief, shown

ValuesT = TypeVar("ValuesT", Sequence[object], AnyArray)


def conform(batch: pa.RecordBatch, schema: pa.Schema, required: Sequence[int], *, first_row: int = 0) -> pa.RecordBatch:
    """Return `batch` in exactly `schema`, in sound buffers; `required` are the indexes of columns that take no null.

    `first_row` is added to the rows that errors name. Costs no copy when the schema is already the same.
    """
    if batch.schema.equals(schema):
        _check_sound(batch)
    else:
        check_column_names(batch.schema.names, schema)
        for field in schema:
            given = batch.schema.field(field.name).type
            if not _converts_exactly(given, field.type):
                reason = f"is {given}, the schema has {field.type} — cast it before the insert"
                raise SchemaMismatch(f"column {field.name!r} {reason}", column=field.name)
        _check_sound(batch)  # after the types: how deep they are nested is known to be harmless now
        columns = [
            by_row(partial(exact_cast, target=field.type), batch.column(field.name), field.name, field.type, first_row)
            for field in schema
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    for index in required:
        if (column := batch.column(index)).null_count:
            check_nulls(column, schema.names[index], first_row)
    return batch


def check_column_names(names: Sequence[str], schema: pa.Schema, *, row: int | None = None) -> None:
    """Raise `SchemaMismatch` unless `names` are the schema's columns, each once, in any order."""
    known = schema.names
    if len(names) == len(known) and set(names) == set(known):
        return
    name = next(name for name in (*known, *names) if name not in known or names.count(name) != 1)
    if name not in names:
        reason = "is missing"
    elif name in known:
        reason = "appears twice"
    else:
        reason = "is not in the schema"
    advice = f"give every column once, as null where there is no value ({', '.join(known[:20])})"
    place = "" if row is None else f", row {row}"
    raise SchemaMismatch(f"column {shown(str(name))}{place} {reason} — {advice}", column=str(name), row=row)


def check_nulls(array: AnyArray, column: str, first_row: int) -> None:
    """Raise `SchemaMismatch` for a null in a column that takes none."""
    if array.null_count:
        row = first_row + pc.index(array.is_null(), True).as_py()
        raise _misfit(column, row, "null where the primary key or a required column needs a value — give one")


def by_row(
    convert: Callable[[ValuesT], AnyArray], values: ValuesT, column: str, kind: pa.DataType, first_row: int
) -> AnyArray:
    """Return a column's values, converted; when they are refused, halving finds the first row to blame.

    `convert` raises what Arrow does, or a `SchemaMismatch` that tells no row.
    """
    try:
        array = convert(values)
        if isinstance(array, pa.ChunkedArray):
            raise OverflowError("it has more than one array holds")
        return array
    except (SchemaMismatch, pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        if len(values) > 1:
            half = len(values) // 2
            by_row(convert, values[:half], column, kind, first_row)
            by_row(convert, values[half:], column, kind, first_row + half)
            reason = f"holds over 2 GiB in {len(values)} rows — insert fewer rows at a time"  # each half of it fits
            raise SchemaMismatch(f"column {column!r} {reason}", column=column) from None
        if isinstance(error, SchemaMismatch):
            raise _misfit(error.column or column, first_row, str(error)) from None
        said = brief(str(error))  # Arrow quotes the value, whole
        raise _misfit(column, first_row, f"{said} — give a value that {kind} holds") from None


def _misfit(column: str, row: int, reason: str) -> SchemaMismatch:
    return SchemaMismatch(f"column {column!r}, row {row}: {reason}", column=column, row=row)


def exact_cast(array: AnyArray, target: pa.DataType) -> AnyArray:
    """Return the array in another type, every value as it was, or a float next to it.

    Raises `pa.ArrowInvalid` for a value that the type does not hold.
    """
    if array.type == target:
        return array
    if has_leaf(target, pt.is_decimal):  # Arrow refuses to make decimals of integers unless any integer would fit
        array = array.cast(with_leaves(target, _widest_decimal))
    cast = array.cast(target)
    if has_leaf(target, pt.is_float32):
        for given, made in zip(_leaves(array), _leaves(cast), strict=True):
            if pt.is_floating(given.type):
                at = pc.index(pc.less(pc.is_inf(given), pc.is_inf(made)), True).as_py()
                if at >= 0:
                    raise pa.ArrowInvalid(f"{given[at]} is out of range of a 32-bit float")
    return cast


def holds_infinity(array: AnyArray) -> bool:
    """Whether some float in an array of floats, or of lists and structs of them, is infinite."""
    return any(
        np.isinf(leaf.to_numpy(zero_copy_only=False)).any() for leaf in _leaves(array) if pt.is_floating(leaf.type)
    )


def _converts_exactly(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether `exact_cast` from `source` to `target` keeps every value or fails."""
    if isinstance(source, pa.DictionaryType):
        return _converts_exactly(source.value_type, target)
    if pt.is_null(source) or source == target:
        return True
    if is_list(target):
        return is_list(source) and _converts_exactly(source.field(0).type, target.field(0).type)
    if pt.is_struct(target):  # Arrow's cast finds fields by name; each has to be there once, in any order
        given = {field.name: field.type for field in child_fields(source)} if pt.is_struct(source) else {}
        wanted = {field.name: field.type for field in child_fields(target)}
        same = given.keys() == wanted.keys() and source.num_fields == len(given)
        return same and all(_converts_exactly(given[name], kind) for name, kind in wanted.items())
    if pt.is_timestamp(source):
        return pt.is_timestamp(target) and (source.tz is None) == (target.tz is None)
    return any(given(source) and wanted(target) for given, wanted in _EXACT)


_EXACT: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], bool]], ...] = (
    (pt.is_integer, lambda kind: pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind)),
    (pt.is_floating, pt.is_floating),
    (pt.is_decimal, pt.is_decimal),
    (lambda kind: is_text(kind) or pt.is_string_view(kind), is_text),
    (lambda kind: is_bytes(kind) or pt.is_binary_view(kind) or pt.is_fixed_size_binary(kind), is_bytes),
    (pt.is_date64, pt.is_date32),
)


def _check_sound(batch: pa.RecordBatch) -> None:
    """Refuse buffers that lie about their lengths, and text that is not UTF-8, before anything reads them."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise SchemaMismatch(
            f"the record batch is not valid Arrow data: {brief(str(error))} — build it again"
        ) from None


def _widest_decimal(kind: pa.DataType) -> pa.DataType:
    return pa.decimal256(76, kind.scale) if isinstance(kind, pa.Decimal128Type) else kind


def _leaves(array: AnyArray) -> Iterator[AnyArray]:
    """Yield the arrays of values that hold no others, in the order of their names, without what is under a null."""
    if is_list(array.type):
        yield from _leaves(pc.list_flatten(array))
    elif pt.is_struct(array.type):
        present, names = array.filter(array.is_valid()), [field.name for field in child_fields(array.type)]
        for index in sorted(range(len(names)), key=names.__getitem__):
            yield from _leaves(pc.struct_field(present, index))
    else:
        yield array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array
