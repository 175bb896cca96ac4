"""Exact casts of Arrow arrays, and arrays without hidden slots. No I/O.

Arrow's casts and checks look at every slot of an array, also under a null list or struct and beyond
the end of a slice. They do not decode dictionaries inside other arrays. The functions here give
them only the values.
"""

from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from streamingnode.schema import (
    AnyArray,
    child_fields,
    has_leaf,
    is_bytes,
    is_list,
    is_text,
    with_children,
    with_leaves,
)


def exact_cast(array: AnyArray, target: pa.DataType) -> AnyArray:
    """Return the array in another type with every value unchanged; only floats may round to the
    nearest.

    Slots under a null are ignored. Raises `pa.ArrowInvalid` for a value that `target` cannot hold.
    """
    if array.type == target:
        return array
    array = bare(array, _decoded)
    # Arrow casts integers to a decimal only if every integer fits, so it goes by the widest decimal
    if has_leaf(target, pt.is_decimal):
        array = array.cast(with_leaves(target, _widest_decimal))
    cast = array.cast(target)
    if has_leaf(target, pt.is_float32):
        for given, made in zip(leaves(array), leaves(cast), strict=True):
            if pt.is_floating(given.type):
                at = pc.index(pc.less(pc.is_inf(given), pc.is_inf(made)), True).as_py()
                if at >= 0:
                    raise pa.ArrowInvalid(f"{given[at]} is out of range of a 32-bit float")
    return cast


def bare(array: Any, change: Callable[[AnyArray], AnyArray] = lambda values: values) -> AnyArray:
    """Return the array without hidden slots, and with `change` applied to its leaf arrays.

    Slots under a null list or struct, and beyond a slice of lists, may hold anything. In the result
    they are null or removed. An array without hidden slots is returned as it is. The bytes of
    values are not read, so they need not be validated before.

    Raises `pa.ArrowInvalid` for invalid offsets of lists.
    """
    if pt.is_struct(array.type):
        return _bare_struct(array, change)
    if is_list(array.type):
        return _bare_list(array, change)
    return change(array)


def _bare_struct(array: Any, change: Callable[[AnyArray], AnyArray]) -> AnyArray:
    hidden = array.is_null() if array.null_count else None
    given = [_without(array.field(index), hidden) for index in range(array.type.num_fields)]
    made = [bare(child, change) for child in given]
    if hidden is None and all(map(is_, given, made)):
        return array  # type: ignore[no-any-return]  # it came as one
    fields = [
        field.with_type(child.type).with_nullable(True)
        for field, child in zip(child_fields(array.type), made, strict=True)
    ]
    return pa.StructArray.from_arrays(made, fields=fields, mask=hidden)


def _bare_list(array: Any, change: Callable[[AnyArray], AnyArray]) -> AnyArray:
    hidden = array.is_null() if array.null_count else None
    offsets = None
    if isinstance(array.type, pa.FixedSizeListType):
        size = array.type.list_size
        lengths = np.full(len(array), size)
        given = array.values.slice(array.offset * size, len(array) * size)
    else:
        offsets = array.offsets.to_numpy()
        lengths = np.diff(offsets)
        if offsets[0] < 0 or offsets[-1] > len(array.values) or (lengths < 0).any():
            raise pa.ArrowInvalid("offsets of lists do not ascend, or are beyond the values")
        given = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    if hidden is not None:
        given = _without(given, pa.array(np.repeat(hidden.to_numpy(zero_copy_only=False), lengths)))
    made = bare(given, change)
    if hidden is None and made is given and len(given) == len(array.values):
        return array  # type: ignore[no-any-return]  # it came as one
    item = child_fields(array.type)[0].with_type(made.type).with_nullable(True)
    kind: Any = with_children(array.type, [item])
    if offsets is None:
        return pa.FixedSizeListArray.from_arrays(made, type=kind, mask=hidden)
    of = pa.LargeListArray if pt.is_large_list(kind) else pa.ListArray
    return of.from_arrays(pa.array(offsets - offsets[0]), made, type=kind, mask=hidden)


def _without(values: AnyArray, hidden: AnyArray | None) -> AnyArray:
    """Return the values with null where they are hidden, without reading them."""
    if hidden is None:
        return values
    if isinstance(values, pa.RunEndEncodedArray):  # it has no validity bitmap
        values.validate(full=True)
        values = pc.run_end_decode(values)  # type: ignore[attr-defined]  # stubs lack it
    return pa.StructArray.from_arrays([values], ["hidden"], mask=hidden).flatten()[0]


def _decoded(array: AnyArray) -> AnyArray:
    """Return the values of an encoded array as a plain array."""
    if isinstance(array, pa.RunEndEncodedArray):
        runs = pc.run_end_decode(array)  # type: ignore[attr-defined]  # stubs lack it
        return bare(runs, _decoded)
    if not isinstance(array, pa.DictionaryArray):
        return array
    kind = array.type.value_type
    # Polars makes dictionaries of views, which Arrow cannot decode
    if pt.is_string_view(kind) or pt.is_binary_view(kind):
        plain = array.dictionary.cast(pa.string() if pt.is_string_view(kind) else pa.binary())
        array = pa.DictionaryArray.from_arrays(array.indices, plain)
    return bare(array.dictionary_decode(), _decoded)


def holds_infinity(array: AnyArray) -> bool:
    """Whether some float in an array of floats, or of lists and structs of them, is infinite."""
    return any(
        np.isinf(leaf.to_numpy(zero_copy_only=False)).any()
        for leaf in leaves(array)
        if pt.is_floating(leaf.type)
    )


def converts_exactly(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether `exact_cast` from `source` to `target` keeps every value or fails."""
    if isinstance(source, (pa.DictionaryType, pa.RunEndEncodedType)):
        return converts_exactly(source.value_type, target)
    if pt.is_null(source) or source == target:
        return True
    if is_list(target):
        return is_list(source) and converts_exactly(source.field(0).type, target.field(0).type)
    # Arrow's cast finds fields by name; each must exist exactly once, in any order
    if pt.is_struct(target):
        given = (
            {field.name: field.type for field in child_fields(source)}
            if pt.is_struct(source)
            else {}
        )
        wanted = {field.name: field.type for field in child_fields(target)}
        same = given.keys() == wanted.keys() and source.num_fields == len(given)
        return same and all(converts_exactly(given[name], kind) for name, kind in wanted.items())
    if pt.is_timestamp(source):
        return pt.is_timestamp(target) and (source.tz is None) == (target.tz is None)
    return any(given(source) and wanted(target) for given, wanted in _EXACT)


_EXACT: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], bool]], ...] = (
    (
        pt.is_integer,
        lambda kind: pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind),
    ),
    (pt.is_floating, pt.is_floating),
    (pt.is_decimal, pt.is_decimal),
    (lambda kind: is_text(kind) or pt.is_string_view(kind), is_text),
    (
        lambda kind: is_bytes(kind) or pt.is_binary_view(kind) or pt.is_fixed_size_binary(kind),
        is_bytes,
    ),
    (pt.is_date64, pt.is_date32),
)


def _widest_decimal(kind: pa.DataType) -> pa.DataType:
    return pa.decimal256(76, kind.scale) if isinstance(kind, pa.Decimal128Type) else kind


def leaves(array: AnyArray) -> Iterator[AnyArray]:
    """Yield the leaf arrays in the order of their names, without the slots under a null."""
    if is_list(array.type):
        yield from leaves(pc.list_flatten(array))
    elif pt.is_struct(array.type):
        present = array.filter(array.is_valid())
        names = [field.name for field in child_fields(array.type)]
        for index in sorted(range(len(names)), key=names.__getitem__):
            yield from leaves(pc.struct_field(present, index))
    else:
        yield array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array
