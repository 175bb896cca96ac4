"""Arrow's types: names for what is generic to a type checker and plain at run time, and types with others inside. No I/O."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as pt

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
