"""Rows that fit become batches of exactly the schema; the others are refused by column and row."""

import datetime as dt
import math
from collections import defaultdict
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.errors import SchemaMismatch
from streamingnode import rows as rows_module
from streamingnode.rows import keys_to_batches, row_shape, to_batches
from tests.streamingnode.append_double import schema_of
from tests.streamingnode.row_cases import KEYS, NOW, SCHEMA, SHAPE, refusal, shape_of, values_back
from wal.errors import InvalidArgument

row_dicts = st.fixed_dictionaries(
    {
        "id": st.integers(-(1 << 63), (1 << 63) - 1),
        "item": st.none() | st.text(st.characters(codec="utf-8"), max_size=8),
        "amount": st.none() | st.floats(allow_nan=False),
    }
)


@given(st.lists(row_dicts, min_size=1))
def test_dicts_come_back_as_they_went_in(rows: list[dict[str, object]]) -> None:
    assert [row for batch in to_batches(rows, SHAPE) for row in batch.to_pylist()] == rows


@given(st.lists(row_dicts, max_size=20), st.randoms(use_true_random=False))
def test_dicts_batch_and_table_become_the_same_batches(
    rows: list[dict[str, object]], random: Any
) -> None:
    names = random.sample(SCHEMA.names, 3)
    table = pa.Table.from_pylist(rows, schema=SCHEMA).select(names)
    expected = pa.Table.from_batches(to_batches(rows, SHAPE), SCHEMA)
    assert pa.Table.from_batches(to_batches(table, SHAPE), SCHEMA).equals(expected)
    for batch in table.to_batches():
        assert pa.Table.from_batches(to_batches(batch, SHAPE), SCHEMA).equals(expected)


@pytest.mark.parametrize(
    "rows", [[], (), pa.table({}), SCHEMA.empty_table().to_batches(), SCHEMA.empty_table()]
)
def test_no_rows_become_no_batches(rows: Any) -> None:
    if isinstance(rows, pa.Table) and not rows.column_names:
        assert refusal(rows).column == "id"
    else:
        assert to_batches(rows, SHAPE) == []


@pytest.mark.parametrize(
    "kind, values",
    [
        (pa.int8(), [1, None, -128, np.int64(5)]),
        (pa.float32(), [1.5, 2, None, np.float32(0.5)]),
        (pa.bool_(), [True, None]),
        (pa.string(), ["", "é", None]),
        (pa.binary(), [b"", b"\xff", None]),
        (pa.date32(), [dt.date(2024, 2, 29), None]),
        (pa.timestamp("us"), [dt.datetime(2024, 2, 29, 1, 2, 3, 4), None]),  # noqa: DTZ001
        (pa.decimal128(5, 2), [Decimal("1.25"), None]),
        (pa.list_(pa.int64()), [[1, None], [], None]),
        (pa.list_(pa.float32(), 2), [[1.0, 2.0], None]),
        (pa.struct([("x", pa.int64()), ("y", pa.string())]), [{"x": 1, "y": None}, None]),
    ],
    ids=str,
)
def test_value_of_the_column_type_is_kept(kind: pa.DataType, values: list[object]) -> None:
    assert values_back(kind, values) == values


@pytest.mark.parametrize(
    "kind, value",
    [
        (pa.int64(), 1.5),
        (pa.int64(), 1.0),
        (pa.int64(), "1"),
        (pa.int64(), True),
        (pa.int64(), 1 << 63),
        (pa.int8(), 128),
        (pa.float64(), True),
        (pa.float64(), "1.5"),
        (pa.float64(), (1 << 60) + 1),
        (pa.bool_(), 1),
        (pa.string(), b"bytes"),
        (pa.string(), 5),
        (pa.string(), "\ud800"),
        (pa.binary(), "text"),
        (pa.date32(), dt.datetime(2024, 1, 1)),  # noqa: DTZ001
        (pa.date32(), 1.5),
        (pa.list_(pa.string()), [b"bytes"]),
        (pa.list_(pa.float64()), [True]),
        (pa.list_(pa.float64()), np.array([True])),
        (pa.list_(pa.int64()), np.array([1.5])),
        (pa.int64(), np.timedelta64(5)),
        (pa.float32(), 1e300),
        (pa.float32(), -3.5e38),
        (pa.float32(), (1 << 24) + 1),
        (pa.float64(), np.longdouble("1e400")),
        (pa.float64(), np.uint64((1 << 64) - 1)),
        (pa.float32(), np.ulonglong((1 << 64) - 1)),
        (pa.list_(pa.float64()), np.array([(1 << 64) - 1], np.uint64)),
        (pa.list_(pa.float32()), [1e300]),
        (pa.list_(pa.float32()), np.array([1e300])),
        (pa.struct([("x", pa.float32())]), {"x": 1e300}),
        (pa.timestamp("ms"), NOW.replace(microsecond=1)),
        (pa.list_(pa.timestamp("ms")), [NOW.replace(microsecond=1)]),
        (pa.timestamp("us"), 5),
        (pa.timestamp("us"), NOW.replace(tzinfo=dt.UTC)),
        (pa.timestamp("us"), pd.Timestamp(1)),
        (pa.timestamp("us"), pd.NaT),
        (pa.timestamp("us"), np.datetime64("NaT", "us")),
        (pa.timestamp("us", "UTC"), NOW),
        (pa.timestamp("us", "UTC"), np.datetime64(NOW)),
        (pa.timestamp("us", "UTC"), NOW.replace(tzinfo=dt.timezone(dt.timedelta(microseconds=1)))),
        (pa.struct([("t", pa.timestamp("us", "UTC"))]), {"t": NOW}),
        (pa.decimal128(5, 2), Decimal("NaN")),
        (pa.decimal128(5, 2), 1000),
        (pa.timestamp("us"), 1.5),
        (pa.timestamp("us"), "2024-01-01"),
        (pa.decimal128(5, 2), 1.5),
        (pa.decimal128(5, 2), Decimal("1.255")),
        (pa.list_(pa.int64()), [1.5]),
        (pa.list_(pa.string()), "ab"),
        (pa.list_(pa.int64(), 2), [1]),
        (pa.struct([("x", pa.int64())]), {"x": 1, "z": 2}),
        (pa.struct([("x", pa.int64())]), {"x": 1.5}),
        (pa.struct([("x", pa.int64())]), (1,)),
        (pa.list_(pa.struct([("x", pa.int64())])), [{"x": 1, "z": 2}]),
        (pa.timestamp("us"), np.datetime64(NOW)),
        (pa.binary(), bytearray(b"a")),
    ],
    ids=str,
)
def test_value_that_would_change_or_does_not_fit_is_named_by_column_and_row(
    kind: pa.DataType, value: object
) -> None:
    filler: object = None
    error = refusal(
        [{"id": 0, "value": filler}, {"id": 1, "value": value}, {"id": 2, "value": filler}],
        shape_of(kind),
    )
    assert error.column is not None
    assert error.column.startswith("value")
    assert error.row == 1
    assert "row 1" in str(error)


# --- one rule for dicts and Arrow data ------------------------------------------------------------

zones = st.sampled_from([dt.UTC, dt.timezone(dt.timedelta(hours=2)), ZoneInfo("Asia/Tokyo")])


def whole(time: dt.datetime) -> dt.datetime:
    return time.replace(microsecond=time.microsecond // 1000 * 1000)


times = st.datetimes(dt.datetime(2, 1, 1), dt.datetime(9998, 1, 1))  # noqa: DTZ001
naive = times | times.map(whole)
aware = st.builds(lambda time, zone: time.replace(tzinfo=zone), naive, zones)
decimals = st.decimals(-2000, 2000, places=3) | st.decimals(-9, 9, places=1)
LEAVES: dict[str, tuple[list[pa.DataType], st.SearchStrategy[Any]]] = {
    "flag": ([pa.bool_()], st.booleans()),
    "integer": (
        [pa.int8(), pa.int32(), pa.int64()],
        st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-200, 200),
    ),
    "float": ([pa.float32(), pa.float64()], st.floats() | st.floats(width=32)),
    "decimal": ([pa.decimal128(5, 2), pa.decimal128(38, 10)], decimals),
    "text": ([pa.string(), pa.large_string()], st.text(max_size=3)),
    "bytes": ([pa.binary(), pa.large_binary()], st.binary(max_size=3)),
    "date": ([pa.date32()], st.dates()),
    "time": ([pa.timestamp("ms"), pa.timestamp("us")], naive),
    "instant": ([pa.timestamp("ms", "UTC"), pa.timestamp("us", "Europe/Berlin")], aware),
}  # fmt: skip
LEAF_TYPES = [kind for kinds, _ in LEAVES.values() for kind in kinds]


@st.composite
def column_and_value(draw: st.DrawFn) -> tuple[pa.DataType, object]:
    """A column's type, and a value that may be for it or for another one; nested or not."""
    kinds, values = LEAVES[draw(st.sampled_from(sorted(LEAVES)))]
    kind = draw(st.sampled_from(kinds) if draw(st.integers(0, 3)) else st.sampled_from(LEAF_TYPES))
    drawn: tuple[pa.DataType, object] = draw(
        st.sampled_from(
            [
                (kind, draw(values)),
                (pa.list_(kind), draw(st.lists(values, max_size=3))),
                (pa.list_(kind, 2), draw(st.lists(values, min_size=1, max_size=3))),
                (pa.struct([("x", kind), ("y", pa.int8())]), {"y": 1, "x": draw(values)}),
                (pa.list_(pa.struct([("x", kind)])), [{"x": draw(values)}]),
            ]
        )
    )
    return drawn


def same(got: Any, given: Any, kind: pa.DataType) -> bool:
    """Whether a value came back: equal, the same instant, or the nearest float."""
    if isinstance(given, list):
        return len(got) == len(given) and all(
            same(*pair, kind.field(0).type) for pair in zip(got, given, strict=True)
        )
    if isinstance(given, dict):
        return got.keys() == given.keys() and all(
            same(got[x], given[x], kind.field(x).type) for x in given
        )
    if isinstance(given, float):
        nearest = float(np.float32(given)) if pa.types.is_float32(kind) else given
        return got == nearest or (math.isnan(got) and math.isnan(given))
    if isinstance(given, dt.datetime) and given.tzinfo:
        return got.tzinfo is not None and got.astimezone(dt.UTC) == given.astimezone(dt.UTC)
    return got == given and isinstance(got, bool) is isinstance(given, bool)


@given(column_and_value())
def test_dict_and_table_keep_a_value_or_both_refuse_it(drawn: tuple[pa.DataType, object]) -> None:
    kind, value = drawn
    shape = shape_of(kind)
    try:
        (by_dict,) = to_batches([{"id": 0, "value": value}], shape)
    except SchemaMismatch:
        by_dict = None
    try:
        (by_table,) = to_batches(pa.table({"id": [0], "value": [value]}), shape)
    except (SchemaMismatch, pa.ArrowException, OverflowError, UnicodeEncodeError):
        by_table = None  # Arrow alone may have no type for it
    assert (by_dict is None) == (by_table is None)
    if by_dict is not None and by_table is not None:
        assert same(by_dict.column("value")[0].as_py(), value, kind)
        assert same(by_table.column("value")[0].as_py(), value, kind)


@pytest.mark.parametrize(
    "kind, value",
    [
        (pa.float32(), math.inf),
        (pa.float32(), math.nan),
        (pa.list_(pa.float32()), [-math.inf, 1.5]),
        (pa.float64(), 1 << 53),
        (pa.timestamp("us"), pd.Timestamp(NOW)),
        (pa.float32(), np.float32(0.1)),
        (pa.float64(), np.int32(5)),
        (pa.int8(), np.uint64(5)),
        (pa.timestamp("us", "UTC"), pd.Timestamp(NOW, tz="Europe/Berlin")),
        (pa.timestamp("us", "UTC"), dt.datetime(1800, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))),
        (pa.decimal128(5, 2), Decimal("1.250")),
        (pa.list_(pa.float32()), np.array([0.5, 1.5])),
    ],
    ids=str,
)
def test_unusual_value_that_fits_is_kept(kind: pa.DataType, value: Any) -> None:
    (kept,) = values_back(kind, [value])
    assert np.array_equal(np.array(kept), np.array(value), equal_nan=isinstance(value, float))


FIRST = dt.datetime(1, 1, 1)  # noqa: DTZ001
LAST = dt.datetime(9999, 12, 31, 23, 59, 59)  # noqa: DTZ001
AHEAD = dt.timezone(dt.timedelta(hours=5))
BEHIND = dt.timezone(dt.timedelta(hours=-5))
ENDS_OF_TIME = [
    end.replace(tzinfo=zone) for end in (FIRST, LAST) for zone in (dt.UTC, AHEAD, BEHIND)
]


@pytest.mark.parametrize("unit", ["ms", "us"])
@pytest.mark.parametrize(
    "zone",
    ["UTC", "Asia/Tokyo", "America/New_York", "Pacific/Kiritimati", "+05:30", "-12:00", "+23:59"],
)
def test_a_time_near_the_ends_of_years_comes_back_or_is_refused_by_row(
    zone: str, unit: Any
) -> None:
    time_type = pa.timestamp(unit, zone)
    local = pa.lib.string_to_tzinfo(zone)
    for time in ENDS_OF_TIME:
        for kind, value in (
            (time_type, time),
            (pa.list_(time_type), [None, time]),
            (pa.struct([("t", time_type)]), {"t": time}),
        ):
            try:
                found: Any = values_back(kind, [None, value])
            except SchemaMismatch as error:
                found = error
            if isinstance(found, SchemaMismatch):
                assert found.row == 1, found
                assert "not within Python's years 1 to 9999 in UTC" in str(found)
                with pytest.raises(OverflowError):
                    time.astimezone(dt.UTC).astimezone(local)
            else:
                assert found == [None, value]


@pytest.mark.parametrize(
    "kind, values",
    [
        (pa.date32(), [dt.date.min, dt.date.max]),
        (pa.timestamp("us"), [FIRST, LAST.replace(microsecond=999_999)]),
        (pa.decimal128(38), [Decimal("9" * 38), Decimal("-" + "9" * 38), Decimal("-0")]),
        (pa.decimal128(38, 38), [Decimal("1e-38"), Decimal("-0." + "9" * 38)]),
    ],
    ids=str,
)
def test_the_first_and_the_last_value_of_python_come_back(
    kind: pa.DataType, values: list[object]
) -> None:
    assert values_back(kind, values) == values


class OddZone(dt.tzinfo):
    """A zone as some libraries make them: without a hash; and false, as it has a length."""

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return 0

    def utcoffset(self, _: dt.datetime | None) -> dt.timedelta:
        return dt.timedelta(hours=2)

    def dst(self, _: dt.datetime | None) -> dt.timedelta | None:
        return None

    def tzname(self, _: dt.datetime | None) -> str:
        return "odd"


def test_a_time_of_a_zone_without_a_hash_is_taken_as_any_other() -> None:
    time = NOW.replace(tzinfo=OddZone())
    aware = pa.timestamp("us", "UTC")
    for kind, value in (
        (aware, time),
        (pa.list_(aware), [time]),
        (pa.struct([("t", aware)]), {"t": time}),
    ):
        assert values_back(kind, [value, None, value]) == [value, None, value]
    assert refusal([{"id": 0, "value": time}], shape_of(pa.timestamp("us"))).row == 0


class Numeral(int):
    def __str__(self) -> str:
        return "7"


@pytest.mark.parametrize("number", ["1e-41", "1e-77", "1e-999999999"])
def test_a_decimal_of_digits_that_arrow_cannot_count_is_refused_and_is_no_zero(number: str) -> None:
    for kind, value in (
        (pa.decimal128(5, 2), Decimal(number)),
        (pa.list_(pa.decimal128(5, 2)), [Decimal(number)]),
    ):
        with pytest.raises(SchemaMismatch, match="digits behind its point"):
            values_back(kind, [value])


def test_whole_number_that_reads_otherwise_is_no_decimal() -> None:
    with pytest.raises(SchemaMismatch):
        values_back(pa.decimal128(5, 1), [Numeral(3)])
    assert values_back(pa.decimal128(5, 1), [3]) == [Decimal("3.0")]


def test_list_nested_deeper_than_python_prints_is_refused_by_row() -> None:
    deep: object = 1
    for _ in range(20_000):
        deep = [deep]
    for kind in (pa.int64(), pa.list_(pa.int64()), pa.struct([("x", pa.int64())])):
        assert (
            refusal([{"id": 0, "value": None}, {"id": 1, "value": deep}], shape_of(kind)).row == 1
        )
    with pytest.raises(SchemaMismatch):
        keys_to_batches([deep], KEYS)


def test_megabytes_of_a_refused_value_are_not_repeated() -> None:
    assert len(str(refusal([{"id": 1, "item": "a", "amount": "x" * (1 << 20)}]))) < 300
    assert len(str(refusal([{"id": 1, "item": "a", "amount": 10 ** (1 << 12)}]))) < 600


@pytest.mark.parametrize(
    "row, column, text",
    [
        ({"item": "tea", "amount": 1.0}, "id", "is missing"),
        ({"id": 2, "item": "tea", "amount": 1.0, "extra": 1}, "extra", "is not in the schema"),
        ({"id": 2, "item": "tea", "total": 1.0}, "total", "is not in the schema"),
        ({"id": None, "item": "tea", "amount": 1.0}, "id", "null"),
        ({"id": "2", "item": "tea", "amount": 1.0}, "id", "is no int64"),
    ],
)
def test_row_that_does_not_fit_is_named(row: dict[str, object], column: str, text: str) -> None:
    good = {"id": 1, "item": "tea", "amount": 1.0}
    error = refusal([good, row, good])
    assert (error.column, error.row) == (column, 1)
    assert text in str(error)


@pytest.mark.parametrize(
    "row, column",
    [({"id": 1, "item": "a\ud800"}, "item"), ({"id": 1, "item": "\udc00\ud800"}, "item")],
)
def test_half_a_surrogate_pair_is_named_as_what_it_is(row: dict[str, object], column: str) -> None:
    error = refusal([{"id": 0, "item": "tea"}] * 3 + [row])
    assert (error.column, error.row) == (column, 3)
    assert "is half of a surrogate pair, which is no character — give the whole" in str(error)
    nested = shape_of(pa.list_(pa.struct([("x", pa.string())])))
    error = refusal([{"id": 0, "value": []}, {"id": 1, "value": [{"x": "\udfff"}]}], nested)
    assert (error.column, error.row) == ("value", 1)
    assert "surrogate pair" in str(error)
    with pytest.raises(SchemaMismatch, match="surrogate pair"):
        keys_to_batches(["a", "\ud800"], row_shape(schema_of(id=pa.string()), primary_key="id"))


def test_a_column_that_a_dict_lacks_is_null() -> None:
    given: list[dict[str, object]] = [
        {"id": 1},
        {"id": 2, "item": "tea", "amount": 1.0},
        {"amount": 2.0, "id": 3},
    ]
    for rows in (given, given[:1], given * 2_000):
        whole = [{name: row.get(name) for name in SCHEMA.names} for row in rows]
        assert [row for batch in to_batches(rows, SHAPE) for row in batch.to_pylist()] == whole


def test_a_required_column_that_a_dict_lacks_is_named_with_its_row() -> None:
    shape = shape_of(pa.int64(), nullable=False)
    error = refusal([{"id": 1, "value": 1}] * 5_000 + [{"id": 2}], shape)
    assert (error.column, error.row) == ("value", 5_000)
    assert "column 'value', row 5000 is missing — give it" in str(error)


def test_a_field_that_a_struct_lacks_is_null() -> None:
    kind = pa.struct([("x", pa.int64()), ("y", pa.struct([("z", pa.float32())]))])
    assert values_back(kind, [{}, {"x": 1}, {"y": {}}, None]) == [
        {"x": None, "y": None}, {"x": 1, "y": None}, {"x": None, "y": {"z": None}}, None
    ]  # fmt: skip
    listed = values_back(pa.list_(kind), [[{"x": 1}, {}]])
    assert listed == [[{"x": 1, "y": None}, {"x": None, "y": None}]]


def test_a_dict_that_makes_what_it_lacks_is_taken_as_it_is() -> None:
    row = defaultdict(float, {"id": 1, "item": "tea"})
    assert [made for batch in to_batches([row], SHAPE) for made in batch.to_pylist()] == [
        {"id": 1, "item": "tea", "amount": None}
    ]
    assert dict(row) == {"id": 1, "item": "tea"}
    misspelt = defaultdict(float, {"id": 1, "item": "tea", "amuont": 1.0})
    assert refusal([misspelt]).column == "amuont"
    assert "amount" not in misspelt


def test_the_index_of_a_pandas_frame_is_refused_by_what_it_is() -> None:
    frame = pd.DataFrame([{"id": 1, "item": "tea", "amount": 1.0}] * 3).iloc[[0, 2]]
    error = refusal(pa.Table.from_pandas(frame))
    assert error.column == "__index_level_0__"
    assert "preserve_index=False" in str(error)


def test_a_field_with_a_dot_in_its_name_is_that_field() -> None:
    kind = pa.struct([("a.b", pa.int64()), ("b", pa.string())])
    values = [{"a.b": 1, "b": "x"}, None]
    assert values_back(kind, values) == values
    assert "a.b, b" in str(refusal([{"id": 1, "value": {"a": {"b": 1}}}], shape_of(kind)))


def test_row_behind_the_first_batch_is_named_by_its_place_in_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_module, "DICTS_PER_BATCH", 4)
    rows: list[dict[str, object]] = [{"id": i, "item": "tea", "amount": 1.0} for i in range(10)]
    assert [batch.num_rows for batch in to_batches(rows, SHAPE)] == [4, 4, 2]
    rows[9] = {"id": 9, "item": 9, "amount": 1.0}
    error = refusal(rows)
    assert error.row == 9
    assert "row 9" in str(error)


@pytest.mark.parametrize("rows", [{"id": 1}, "rows", b"rows", None, 5, {1, 2}])
def test_what_holds_no_rows_is_an_invalid_argument(rows: Any) -> None:
    with pytest.raises(InvalidArgument, match="list of dicts"):
        to_batches(rows, SHAPE)


@pytest.mark.parametrize("row", [(1, "tea", 2.0), None, "abc", 5])
def test_row_that_is_no_dict_is_an_invalid_argument(row: Any) -> None:
    with pytest.raises(InvalidArgument, match="each row is a dict"):
        to_batches([row], SHAPE)
