"""Arrow data and keys become batches of exactly the schema, or are refused by column and row."""

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
import pytest

from interceptors.errors import SchemaMismatch
from streamingnode import rows as rows_module
from streamingnode.rows import keys_to_batches, to_batches
from tests.streamingnode.row_cases import KEYS, SCHEMA, SHAPE, refusal, shape_of
from wal.errors import InvalidArgument


def batch_of(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"id": [1, 2], "item": ["a", "b"], "amount": [1.0, 2.0], **columns}
    )


@pytest.mark.parametrize(
    "columns, column, row",
    [
        ({"id": pa.array([1, None])}, "id", 1),
        ({"id": pa.array(["1", "2"])}, "id", None),
        ({"id": pa.array([1.0, 2.0])}, "id", None),
        ({"id": pa.array([1, 1 << 63], pa.uint64())}, "id", 1),
        ({"amount": pa.array([1, (1 << 60) + 1])}, "amount", 1),
        ({"amount": pa.array([Decimal(1), Decimal(2)])}, "amount", None),
        ({"item": pa.array([b"a", b"b"])}, "item", None),
        ({"extra": pa.array([1, 2])}, "extra", None),
    ],
)
def test_batch_that_does_not_fit_is_refused_by_column(
    columns: dict[str, object], column: str, row: int | None
) -> None:
    error = refusal(batch_of(**columns))
    assert (error.column, error.row) == (column, row)


@pytest.mark.parametrize(
    "given, kind, step",
    [
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), "give its times their zone"),
        (pa.timestamp("ns", "UTC"), pa.timestamp("us"), "give the times of one zone without it"),
    ],
    ids=str,
)
def test_arrow_times_whose_zone_is_not_that_of_the_column_are_refused_with_what_to_do(
    given: pa.DataType, kind: pa.DataType, step: str
) -> None:
    error = refusal(pa.table({"id": [0], "value": pa.array([0], given)}), shape_of(kind))
    assert error.column == "value"
    assert f"is {given}, the schema has {kind} — {step}" in str(error)


def test_batch_with_a_column_twice_or_missing_is_refused() -> None:
    batch = batch_of()
    assert "appears twice" in str(
        refusal(
            pa.RecordBatch.from_arrays([*batch.columns, batch.column(0)], [*SCHEMA.names, "id"])
        )
    )
    assert refusal(batch.select(["id", "item"])).column == "amount"


def test_batch_of_narrower_types_is_widened_exactly() -> None:
    batch = batch_of(
        id=pa.array([1, 2], pa.int16()),
        item=pa.array(["a", None]).dictionary_encode(),
        amount=pa.array([1, 2], pa.int32()),
    )
    (fitted,) = to_batches(batch, SHAPE)
    assert fitted.schema.equals(SCHEMA)
    assert fitted.to_pylist() == [
        {"id": 1, "item": "a", "amount": 1.0},
        {"id": 2, "item": None, "amount": 2.0},
    ]


@pytest.mark.parametrize(
    "kind", [pa.float32(), pa.list_(pa.float32()), pa.struct([("x", pa.float32())])], ids=str
)
def test_float_that_overflows_is_refused_in_a_dictionary_as_well(kind: pa.DataType) -> None:
    encoded = pa.array([1.5, 1e300]).dictionary_encode()
    wrapped: Any = encoded
    if pt.is_list(kind):
        wrapped = pa.ListArray.from_arrays([0, 1, 2], encoded)
    elif pt.is_struct(kind):
        wrapped = pa.StructArray.from_arrays([encoded], ["x"])
    error = refusal(pa.RecordBatch.from_pydict({"id": [0, 1], "value": wrapped}), shape_of(kind))
    assert (error.column, error.row) == ("value", 1)


@pytest.mark.parametrize("kind", [pa.timestamp("ms"), pa.list_(pa.timestamp("ms", "UTC"))], ids=str)
@pytest.mark.parametrize("given_as", [pa.timestamp("ms"), pa.timestamp("s")], ids=str)
def test_a_time_beyond_the_microseconds_of_tables_is_refused(
    kind: pa.DataType, given_as: pa.TimestampType
) -> None:
    last = ((1 << 63) - 1) // 1000 // (1 if given_as.unit == "ms" else 1000)

    def times(*numbers: int) -> pa.Table:
        cells = pa.array([[number] for number in numbers] if pt.is_list(kind) else numbers)
        zoned = pa.timestamp(
            given_as.unit, kind.value_type.tz if isinstance(kind, pa.ListType) else None
        )
        values = cells.cast(pa.list_(zoned) if pt.is_list(kind) else zoned)
        return pa.table({"id": pa.array(range(len(numbers))), "value": values})

    (kept,) = to_batches(times(last, -last), shape_of(kind))
    assert kept.num_rows == 2
    rows = times(0, last, last + 1, 1)
    wrong = refusal(rows, shape_of(kind))
    assert (wrong.column, wrong.row) == ("value", 2)
    assert [part.num_rows for part in to_batches(rows.slice(0, 2), shape_of(kind))] == [2]


def test_row_of_a_table_is_named_by_its_place_in_the_table() -> None:
    table = pa.concat_tables(
        [
            pa.Table.from_batches([batch_of()]),
            pa.Table.from_batches([batch_of(id=pa.array([3, None]))]),
        ]
    )
    error = refusal(table)
    assert (error.column, error.row) == ("id", 3)


def test_text_that_is_not_utf8_is_refused_before_it_can_reach_a_file() -> None:
    item = pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff", b"b"]).buffers())
    assert "not valid" in str(refusal(batch_of(item=item)))


def test_offsets_that_point_outside_their_buffer_are_refused() -> None:
    offsets = pa.py_buffer(np.array([0, 1 << 20, 2], np.int32).tobytes())
    item = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ab")])
    assert "not valid" in str(refusal(batch_of(item=item)))


def test_null_in_a_required_column_is_refused_in_dicts_and_batches() -> None:
    shape = shape_of(pa.string(), nullable=False)
    rows: list[dict[str, object]] = [{"id": 1, "value": "a"}, {"id": 2, "value": None}]
    assert refusal(rows, shape).row == 1
    assert refusal(pa.RecordBatch.from_pylist(rows), shape).row == 1


@pytest.mark.parametrize(
    "keys",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        pa.array([1, 2]),
        pa.chunked_array([[1], [2]]),
        pa.table({"id": [1, 2]}),
    ],
    ids=lambda keys: type(keys).__name__,
)
def test_keys_of_any_form_become_the_key_column(keys: Any) -> None:
    assert [row for batch in keys_to_batches(keys, KEYS) for row in batch.to_pylist()] == [
        {"id": 1},
        {"id": 2},
    ]


@pytest.mark.parametrize("keys", [[1, None], [1, "2"], pa.array([1, None]), pa.table({"key": [1]})])
def test_keys_that_do_not_fit_are_refused(keys: Any) -> None:
    with pytest.raises(SchemaMismatch):
        keys_to_batches(keys, KEYS)


@pytest.mark.parametrize(
    "keys", [5, "key", b"key", bytearray(b"key"), memoryview(b"key"), None, {1}, iter([1])]
)
def test_single_key_outside_a_list_is_an_invalid_argument(keys: Any) -> None:
    with pytest.raises(InvalidArgument, match="list of key values"):
        keys_to_batches(keys, KEYS)


def test_empty_list_of_keys_becomes_no_batches() -> None:
    assert keys_to_batches([], KEYS) == []


def test_a_column_of_which_only_the_halves_fit_is_refused_without_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Arrow does with more than 2 GiB of text."""

    def cast(array: Any, *, target: pa.DataType) -> Any:
        if len(array) > 2:
            raise pa.ArrowInvalid("input array too large")
        return array

    monkeypatch.setattr(rows_module, "exact_cast", cast)
    error = refusal(
        pa.table({"id": pa.array([1, 2, 3], pa.int32()), "item": ["a"] * 3, "amount": [1.0] * 3})
    )
    assert (error.column, error.row) == ("id", None)
    assert "insert fewer rows" in str(error)
