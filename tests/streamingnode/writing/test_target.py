"""Rows of plain values become what they would be through Arrow, or are left to it; and rows go to
the shard of their key.
"""

import datetime as dt
from collections import UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from streamingnode.rows import dicts_to_batch, key_shape, keys_to_batches, row_shape, to_batches
from streamingnode.writing.target import PLAIN_TEXT_BYTES_MAX, BatchTarget, PlainRows, copied
from tests.streamingnode.append_double import collection_info, schema_of, write_target
from wal.errors import StreamingNodeError
from wal.headers import MessageType
from wal.rows import ShardRows
from wal.shard_hash import hash_integers, shards_of

SHAPE = row_shape(schema_of(id=pa.int64(), item=pa.string(), amount=pa.float64()), primary_key="id")
NAIVE = dt.datetime(2024, 2, 29, 1)  # noqa: DTZ001 - a date column must not take it for a date
LONG = "x" * (PLAIN_TEXT_BYTES_MAX + 1)


class Number(int):
    """A whole number that is none of the plain ones."""


class Text(str):
    """A text that may print as another."""

    __slots__ = ()


def integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


PLAIN: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): integers(8),
    pa.int16(): integers(16),
    pa.int32(): integers(32),
    pa.int64(): integers(64),
    pa.float64(): st.floats(),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=20),
    pa.large_string(): st.text(max_size=20),
    pa.binary(): st.binary(max_size=20),
    pa.large_binary(): st.binary(max_size=20),
    pa.date32(): st.dates(),
}
OTHERS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.float32(): st.floats(width=32),
    pa.timestamp("us"): st.datetimes(),
    pa.decimal128(5, 2): st.just(Decimal("1.25")),
    pa.list_(pa.int64()): st.lists(integers(64), max_size=3),
}
KEY_TYPES = [kind for kind in PLAIN if kind not in (pa.float64(), pa.bool_())]
ODD = st.sampled_from(
    [
        *(
            None,
            True,
            0,
            1 << 7,
            1 << 15,
            1 << 31,
            -(1 << 63) - 1,
            1 << 63,
            1 << 70,
            1.5,
            float("nan"),
        ),
        *(
            "",
            "\ud800",
            "a\udfff",
            "é",
            LONG,
            "é" * (PLAIN_TEXT_BYTES_MAX // 2 + 1),
            b"",
            b"\xff",
            LONG.encode(),
        ),
        *(dt.date(2024, 2, 29), NAIVE, dt.datetime(1, 1, 1, tzinfo=dt.UTC)),
        *(
            np.int64(3),
            np.float64(1.0),
            np.bool_(True),
            np.str_("a"),
            Number(1),
            Text("t"),
            Decimal(1),
            bytearray(b"a"),
        ),
    ]
)


@st.composite
def fields(draw: st.DrawFn) -> pa.Schema:
    kinds = draw(st.lists(st.sampled_from([*PLAIN, *PLAIN, *OTHERS]), max_size=5))
    key = pa.field("id", draw(st.sampled_from(KEY_TYPES)))
    return pa.schema(
        [pa.field(f"c{i}", kind, nullable=draw(st.booleans())) for i, kind in enumerate(kinds)]
        + [key]
    )


@st.composite
def rows_of(draw: st.DrawFn, schema: pa.Schema) -> list[dict[str, Any]]:
    """Return rows of which most fit."""
    values = {
        field.name: st.one_of(usual, usual, usual, st.none(), ODD)
        for field in schema
        for usual in [{**PLAIN, **OTHERS}[field.type]]
    }
    odd = draw(st.booleans())
    usual_only = {field.name: {**PLAIN, **OTHERS}[field.type] for field in schema}
    return draw(
        st.lists(st.fixed_dictionaries(values if odd else usual_only), min_size=1, max_size=6)
    )


def target_of(schema: pa.Schema, *, shards: int = 1) -> BatchTarget:
    return write_target(schema, shards=shards).inserts(8)


def rows_in(
    target: BatchTarget, encoded: Sequence[ShardRows]
) -> list[tuple[int, list[int], list[int], str]]:
    """Return all of what was encoded: shard, pieces and counts, and the rows, printed because NaN
    is not itself.
    """
    return [
        (
            part.shard,
            list(map(int, part.pieces)),
            list(map(int, part.counts)),
            repr(
                pa.ipc.read_record_batch(
                    pa.py_buffer(part.payload), target.shape.schema
                ).to_pylist()
            ),
        )
        for part in encoded
    ]


@given(st.data())
def test_rows_taken_as_plain_values_are_those_that_arrow_takes_and_the_same_rows(
    data: st.DataObject,
) -> None:
    schema = data.draw(fields())
    rows = data.draw(rows_of(schema))
    target = target_of(schema, shards=data.draw(st.sampled_from([1, 3])))
    taken = target.plain.take(rows)
    try:
        batch = dicts_to_batch(rows, target.shape)
    except StreamingNodeError:
        assert taken is None
        return
    assume(taken is not None)
    assert taken is not None
    assert rows_in(target, target.encode([taken[0]])) == rows_in(target, target.encode([batch]))


@given(st.data())
def test_plain_rows_and_arrow_rows_that_go_together_are_as_if_all_were_arrow(
    data: st.DataObject,
) -> None:
    schema = data.draw(fields().filter(lambda schema: all(kind in PLAIN for kind in schema.types)))
    target = target_of(schema, shards=data.draw(st.sampled_from([1, 4])))
    one_row = st.fixed_dictionaries({field.name: PLAIN[field.type] for field in schema})
    calls = data.draw(st.lists(st.lists(one_row, min_size=1, max_size=4), min_size=1, max_size=8))
    batches = [dicts_to_batch(rows, target.shape) for rows in calls]
    cells = [target.plain.take(rows) for rows in calls]
    as_arrow = data.draw(st.lists(st.booleans(), min_size=len(calls), max_size=len(calls)))
    mixed = [
        batch if arrow or taken is None else taken[0]
        for batch, taken, arrow in zip(batches, cells, as_arrow, strict=True)
    ]
    assert all(taken is not None for taken in cells)
    assert rows_in(target, target.encode(mixed)) == rows_in(target, target.encode(batches))


@given(st.data(), st.sampled_from(KEY_TYPES))
def test_keys_taken_as_plain_values_are_those_that_arrow_takes(
    data: st.DataObject, kind: pa.DataType
) -> None:
    values = data.draw(st.lists(st.one_of(PLAIN[kind], PLAIN[kind], ODD), min_size=1, max_size=6))
    target = write_target(schema_of(id=kind, other=pa.int8()), shards=2).deletes
    taken = target.plain.take(values, are_keys=True)
    try:
        (batch,) = keys_to_batches(values, target.shape)
    except StreamingNodeError:
        assert taken is None
        return
    assume(taken is not None)
    assert taken is not None
    assert rows_in(target, target.encode([taken[0]])) == rows_in(target, target.encode([batch]))


COUNTED = schema_of(
    id=pa.int64(), day=pa.date32(), flag=pa.bool_(), text=pa.string(), at=pa.float64()
)
FITS = {"id": 1, "day": dt.date(2024, 1, 1), "flag": True, "text": "a", "at": 0.5}


def test_rows_of_usual_values_are_plain() -> None:
    plain = PlainRows(row_shape(COUNTED, primary_key="id"))
    assert plain.take([FITS, dict.fromkeys(FITS) | {"id": -(1 << 63)}]) is not None


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"id": 1 << 63},
            {"id": True},
            {"id": None},
            {"id": 1.0},
            {"id": np.int64(1)},
            {"id": Number(1)},
        ),
        *({"flag": 1}, {"flag": np.bool_(True)}, {"at": 1}, {"at": Decimal(1)}, {"day": NAIVE}),
        *({"text": "\ud800"}, {"text": Text("a")}, {"text": b"a"}, {"text": LONG}, {"other": 1}),
    ],
    ids=repr,
)
def test_values_that_arrow_has_to_look_at_are_not_plain(change: dict[str, object]) -> None:
    plain = PlainRows(row_shape(COUNTED, primary_key="id"))
    assert plain.take([FITS, FITS | change]) is None


@pytest.mark.parametrize(
    "row", [{}, {"id": 1}, [1, 2, 3, 4, 5], "texts", None, 5, dict.fromkeys("abcde")], ids=repr
)
def test_what_is_no_row_is_not_plain(row: object) -> None:
    assert PlainRows(row_shape(COUNTED, primary_key="id")).take([FITS, row]) is None


def test_rows_of_a_schema_with_other_columns_are_not_plain() -> None:
    schema = schema_of(id=pa.int64(), tags=pa.list_(pa.string()))
    assert PlainRows(row_shape(schema, primary_key="id")).take([{"id": 1, "tags": None}]) is None


def test_copied_batch_does_not_change_with_the_buffers_it_came_from() -> None:
    numbers = np.arange(10)
    batch = pa.record_batch({"id": pa.array(numbers)}).slice(2, 3)
    copy = copied(batch)
    numbers[:] = 77
    assert (copy.column(0).to_pylist(), batch.column(0).to_pylist()) == ([2, 3, 4], [77, 77, 77])
    assert copy.schema.equals(batch.schema)


@given(
    st.lists(st.lists(integers(64), min_size=1, max_size=9), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_every_row_is_in_its_shard_once_and_in_order(calls: list[list[int]], shards: int) -> None:
    info = collection_info(schema_of(id=pa.int64(), row=pa.int64()), shards=shards)
    target = BatchTarget(
        info,
        row_shape(schema_of(id=pa.int64(), row=pa.int64()), primary_key="id"),
        MessageType.INSERT,
    )
    keys = [key for call in calls for key in call]
    number = iter(range(len(keys)))
    pieces = []
    for call in calls:
        rows = [next(number) for _ in call]
        pieces.append(
            pa.record_batch({"id": pa.array(call, pa.int64()), "row": pa.array(rows, pa.int64())})
        )
    expected = shards_of(hash_integers(np.array(keys, np.int64)), shards).tolist()
    found: dict[int, tuple[int, int]] = {}
    encoded = target.encode(pieces)
    assert [part.shard for part in encoded] == sorted(set(expected))
    for part in encoded:
        batch = pa.ipc.read_record_batch(pa.py_buffer(part.payload), target.shape.schema)
        rows = [int(row) for row in batch.column("row").to_numpy()]
        assert rows == sorted(rows)
        assert len(rows) == sum(part.counts)
        of = [int(piece) for piece in np.repeat(part.pieces, part.counts)]
        found |= {row: (part.shard, piece) for row, piece in zip(rows, of, strict=True)}
    piece_of = [number for number, call in enumerate(calls) for _ in call]
    assert [found[row] for row in range(len(keys))] == list(zip(expected, piece_of, strict=True))


ONE_OF_EACH: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int8": (pa.int8(), [-128, 0, 127]),
    "int16": (pa.int16(), [-(1 << 15), (1 << 15) - 1]),
    "int32": (pa.int32(), [-(1 << 31), (1 << 31) - 1]),
    "int64": (pa.int64(), [-(1 << 63), (1 << 63) - 1]),
    "float64": (pa.float64(), [-0.0, 1.5, float("inf")]),
    "bool": (pa.bool_(), [False, True]),
    "string": (pa.string(), ["", "a", "ä€𝄞", "x" * 1000]),
    "binary": (pa.binary(), [b"", b"\0", bytes(1000)]),
    "date32": (pa.date32(), [dt.date(1, 1, 1), dt.date(2024, 2, 29)]),
}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_row_that_goes_alone_is_the_batch_that_arrow_makes_of_it(name: str) -> None:
    kind, values = ONE_OF_EACH[name]
    schema = schema_of(id=pa.int64(), cell=kind)
    target = target_of(schema)
    for value in [*values, None]:
        expected = pa.RecordBatch.from_pylist([{"id": 7, "cell": value}], schema=schema)
        found = target.joined([((7, value),)])
        found.validate(full=True)
        assert found.equals(expected, check_metadata=True)
        read = pa.ipc.read_record_batch(found.serialize(), schema)
        read.validate(full=True)
        assert read.equals(expected)
        assert found.serialize().size == expected.serialize().size


def test_rows_of_a_shard_keep_their_order_in_a_large_batch() -> None:
    rows = np.arange(20_000)
    schema = schema_of(id=pa.int64(), row=pa.int64())
    target = target_of(schema, shards=3)
    for part in target.encode(
        [pa.RecordBatch.from_pydict({"id": rows % 97, "row": rows}, schema=schema)]
    ):
        found = (
            pa.ipc.read_record_batch(pa.py_buffer(part.payload), schema).column("row").to_numpy()
        )
        assert (np.diff(found) > 0).all()


@pytest.mark.parametrize("many", [tuple, deque, UserList])
def test_any_sequence_of_rows_or_keys_will_do(many: Callable[[list[Any]], Any]) -> None:
    rows = [UserDict({"id": key, "item": "tea", "amount": 1.0}) for key in range(3)]
    (batch,) = to_batches(many(rows), SHAPE)
    assert batch.column("id").to_pylist() == [0, 1, 2]
    (batch,) = keys_to_batches(many([0, 1]), key_shape(SHAPE))
    assert batch.column("id").to_pylist() == [0, 1]


def test_a_dictionary_of_text_views_goes_in_as_its_texts() -> None:
    views = pa.array(["tea", "milk"]).cast(pa.string_view())
    items = pa.DictionaryArray.from_arrays(pa.array([1, 0, None]), views)
    (batch,) = to_batches(pa.table({"id": [1, 2, 3], "item": items, "amount": [1.0] * 3}), SHAPE)
    assert batch.column("item").to_pylist() == ["milk", "tea", None]


def test_a_mapping_that_makes_what_it_lacks_is_not_plain() -> None:
    misspelt = defaultdict(float, {"id": 1, "item": "tea", "amuont": 1.0})
    assert PlainRows(SHAPE).take([misspelt]) is None
    assert "amount" not in misspelt
