"""What lies under a null is no value, at any depth: no cast, range or check of Arrow data sees
it.
"""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from interceptors.errors import SchemaMismatch
from streamingnode.rows import row_shape, to_batches

GOOD = [0, 2]
MASK = pa.array([False, True, False, True])


def _unsound(kind: pa.DataType, values: Any) -> Any:
    """Return values of a type that does not hold them, as foreign memory may have them."""
    return pa.Array.from_buffers(kind, len(values), values.buffers())


TEXTS = [b"a", b"\xff", b"c", b"\xfe"]
LEAVES: dict[str, tuple[Any, pa.DataType]] = {
    "int8": (pa.array([1, 1000, -5, -1000]), pa.int8()),
    "uint64": (pa.array([1, 1 << 63, 5, 1 << 63], pa.uint64()), pa.int64()),
    "double": (pa.array([1, (1 << 53) + 1, 5, (1 << 53) + 1]), pa.float64()),
    "float": (pa.array([1.5, 1e300, 2.5, -1e300]), pa.float32()),
    "microseconds": (pa.array([1000, 1, 2000, 2], pa.timestamp("ns")), pa.timestamp("us")),
    "milliseconds": (pa.array([1000, 1, 2000, 2], pa.timestamp("us")), pa.timestamp("ms")),
    "beyond tables": (
        pa.array([1, 1 << 62, 2, -1 << 62], pa.timestamp("ms", "UTC")), pa.timestamp("ms", "UTC")
    ),
    "decimal": (pa.array([1, 10_000, 2, -10_000]), pa.decimal128(4, 2)),
    "rescaled": (pa.array([Decimal("1.250"), Decimal("1.255")] * 2), pa.decimal128(4, 2)),
    "unsound decimal": (
        _unsound(
            pa.decimal128(4, 2),
            pa.array([Decimal("1.25"), Decimal("12345.67")] * 2, pa.decimal128(38, 2)),
        ),
        pa.decimal128(4, 2),
    ),
    "day": (_unsound(pa.date64(), pa.array([0, 1, 86_400_000, 7])), pa.date32()),
    "no text": (pa.array(TEXTS).cast(pa.string(), safe=False), pa.string()),
    "no large text": (pa.array(TEXTS).cast(pa.string(), safe=False), pa.large_string()),
    "no text in a view": (
        pa.array(TEXTS).cast(pa.binary_view()).cast(pa.string_view(), safe=False), pa.string()
    ),
    "bytes in a view": (pa.array(TEXTS, pa.binary_view()), pa.binary()),
    "no text in a dictionary": (
        pa.DictionaryArray.from_arrays([0, 1, 0, 9], pa.array(["a", "b"]), safe=False), pa.string()
    ),
    "unused in a dictionary": (
        pa.DictionaryArray.from_arrays([0, 1, 0, 1], [1, 1000, 1 << 60]), pa.int8()
    ),
    "view in a dictionary": (
        pa.DictionaryArray.from_arrays(
            [0, 1, 0, 9], pa.array(["a", "b"], pa.string_view()), safe=False
        ),
        pa.string(),
    ),
    "runs": (
        pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3, 4]), pa.array([1, 1000, 1, -1000])),
        pa.int8(),
    ),
}  # fmt: skip

Wrap = Callable[[Any, Any], Any]
OFFSETS = pa.array([0, 1, 2, 3, 4], pa.int32())
LARGE_OFFSETS: Any = pa.array([0, 1, 2, 3, 4], pa.int64())
WRAPS: dict[str, tuple[Wrap, Callable[[pa.DataType], pa.DataType]]] = {
    "struct": (
        lambda values, mask: pa.StructArray.from_arrays([values], ["x"], mask=mask),
        lambda kind: pa.struct([("x", kind)]),
    ),
    "list": (lambda values, mask: pa.ListArray.from_arrays(OFFSETS, values, mask=mask), pa.list_),
    "large_list": (
        lambda values, mask: pa.LargeListArray.from_arrays(LARGE_OFFSETS, values, mask=mask),
        pa.large_list,
    ),
    "fixed": (
        lambda values, mask: pa.FixedSizeListArray.from_arrays(values, 1, mask=mask),
        lambda kind: pa.list_(kind, 1),
    ),
    "list for a large one": (
        lambda values, mask: pa.ListArray.from_arrays(OFFSETS, values, mask=mask), pa.large_list
    ),
    "fixed for a list": (
        lambda values, mask: pa.FixedSizeListArray.from_arrays(values, 1, mask=mask), pa.list_
    ),
}  # fmt: skip


def to_rows(given: Any, kind: pa.DataType, nullable: bool = True) -> list[Any]:
    table = pa.table({"id": range(len(given)), "v": given})
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("v", kind, nullable=nullable)])
    (batch,) = to_batches(table, row_shape(schema, primary_key="id"))
    assert batch.schema == schema
    batch.validate(full=True)
    return [row["v"] for row in batch.to_pylist()]


@pytest.mark.parametrize("outer", WRAPS)
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_null_is_taken_whatever_lies_under_it(leaf: str, outer: str) -> None:
    values, kind = LEAVES[leaf]
    for inner in (None, *WRAPS):
        wraps = [WRAPS[each] for each in (inner, outer) if each is not None]
        for masked in range(len(wraps)):  # the null is at this depth, counted from within
            given = values
            wanted = kind
            good: list[Any] = [values[at].as_py() for at in GOOD]
            hidden: Any = None
            for depth, (wrap, kind_of) in enumerate(wraps):
                given = wrap(given, MASK if depth == masked else None)
                wanted = kind_of(wanted)
                good = [_wrapped(each, wanted) for each in good]
                if depth > masked:
                    hidden = _wrapped(hidden, wanted)
            rows = [good[0], hidden, good[1], hidden]
            assert to_rows(given, wanted) == rows
            for start, end in ((1, 3), (2, 4), (3, 4)):
                assert to_rows(given.slice(start, end - start), wanted) == rows[start:end]
            if hidden is not None:
                assert to_rows(given, wanted, nullable=False) == rows


def _wrapped(value: Any, kind: pa.DataType) -> Any:
    return {"x": value} if pa.types.is_struct(kind) else [value]


def test_what_no_list_has_is_no_value_either() -> None:
    values = pa.array([1000, 1, 2, 1000, 1000])
    lists = pa.ListArray.from_arrays(pa.array([1, 2, 3, 3], pa.int32()), values)
    assert to_rows(lists, pa.list_(pa.int8())) == [[1], [2], []]
    assert to_rows(lists.slice(1), pa.list_(pa.int8())) == [[2], []]
    fixed = pa.FixedSizeListArray.from_arrays(pa.array([1000, 1000, 1, 2, 1000, 3]), 2)
    assert to_rows(fixed.slice(1, 1), pa.list_(pa.int8(), 2)) == [[1, 2]]


def test_a_value_that_does_not_fit_is_refused_beside_hidden_ones() -> None:
    values = pa.array([1, 1000, 1000, 2])
    for wrap, kind_of in WRAPS.values():
        given = wrap(values, pa.array([False, True, False, False]))
        with pytest.raises(SchemaMismatch, match=r"row 2: .*1000 not in range"):
            to_rows(given, kind_of(pa.int8()))


def test_data_without_anything_hidden_is_not_copied() -> None:
    vectors: Any = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8, dtype=np.float32)), 4)
    structs: Any = pa.array(
        [{"t": 1_767_225_600_000_000, "l": [1]}, None],
        pa.struct([("t", pa.timestamp("us")), ("l", pa.list_(pa.int64()))]),
    )
    schema = pa.schema([("id", pa.int64()), ("v", vectors.type), ("s", structs.type)])
    given = pa.record_batch([pa.array([1, 2]), vectors, structs], schema=schema)
    (kept,) = to_batches(given, row_shape(schema, primary_key="id"))
    columns: list[Any] = kept.columns
    assert columns[1].values.buffers()[1].address == vectors.values.buffers()[1].address
    assert columns[2].field("t").buffers()[1].address == structs.field("t").buffers()[1].address
    assert kept.to_pylist() == given.to_pylist()
