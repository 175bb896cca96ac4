"""JSON lines: every value comes back as it was, or its line is named while nothing of its batch
comes out.
"""

import datetime as dt
import io
import json
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.errors import SchemaMismatch
from streamingnode.cli.output import to_json
from streamingnode.cli.rows_in import ROW_BYTES_MAX, ROWS_MAX, JsonLines, RowBatch, open_rows
from streamingnode.rows import row_shape, to_batches
from wal.errors import TooLarge

COLUMNS: dict[str, pa.DataType] = {"id": pa.int64(), "name": pa.string()}
SCHEMA = pa.schema(COLUMNS)


def _source(text: str | bytes) -> JsonLines:
    return JsonLines(io.BytesIO(text.encode() if isinstance(text, str) else text))


def _read(text: str | bytes, schema: pa.Schema = SCHEMA) -> list[RowBatch]:
    return list(_source(text).batches(schema))


def _rows(text: str | bytes, schema: pa.Schema = SCHEMA) -> list[dict[str, object]]:
    """Return the rows as a node takes them, which has the last word on what fits."""
    rows = []
    for batch in _read(text, schema):
        with batch.placed():
            made = to_batches(batch.rows, row_shape(schema, primary_key=""))
        rows += [row for each in made for row in each.to_pylist()]
    return rows


def test_empty_input_has_no_rows() -> None:
    assert _read("") == []
    assert _read("\n  \n") == []


def test_left_out_field_is_null_and_last_line_needs_no_end() -> None:
    assert _rows('{"id": 1}\n\n{"name": "b", "id": 2}') == [
        {"id": 1, "name": None},
        {"id": 2, "name": "b"},
    ]


@pytest.mark.parametrize(
    "kind, value, said",
    [
        (pa.int64(), '"5"', "the text '5' where int64 belongs is a number in quotes"),
        (pa.int64(), '"\\"5\\""', "is a number quoted twice"),
        (pa.bool_(), '"true"', "is a truth value in quotes"),
        (pa.decimal128(5, 2), '"\\"1.25\\""', "is a text quoted twice"),
        (pa.date32(), '"\\"2026-01-02\\""', "is a text quoted twice"),
        (pa.timestamp("us", "UTC"), '"\\"2026-01-02T03:04:05Z\\""', "is a text quoted twice"),
        (pa.struct([("x", pa.int64())]), '"{\\"x\\": 1}"', "belongs is a JSON object in quotes"),
        (pa.list_(pa.int64()), '"[1]"', "belongs is a JSON array in quotes"),
        (
            pa.timestamp("us", "UTC"),
            '"2026-01-02T03:04:05"',
            "has no zone, the column has one — add Z",
        ),
        (pa.timestamp("ms"), '"2026-01-02T03:04:05Z"', "has a zone, the column has none"),
        (pa.string(), '"a\\ud800"', "is half of a surrogate pair, which is no character"),
    ],
    ids=str,
)
@pytest.mark.parametrize("inside", [None, "struct", "list"])
def test_what_a_program_wrote_wrong_is_named_by_column_and_line(
    kind: pa.DataType, value: str, said: str, inside: str | None
) -> None:
    column = "v"
    if inside == "struct":
        kind = pa.struct([("x", pa.int64()), ("w", kind)])
        value = f'{{"w": {value}}}'
        column = "v.w"
    elif inside == "list":
        kind = pa.list_(kind)
        value = f"[null, {value}]"
    with pytest.raises(SchemaMismatch) as caught:
        _rows(f'{{"v": null}}\n{{"n": 1, "v": {value}}}\n', pa.schema({"n": pa.int64(), "v": kind}))
    assert (caught.value.column, caught.value.row) == (column, 2)
    assert str(caught.value).startswith(f"column '{column}', line 2: ")
    assert said in str(caught.value)
    assert str(caught.value).endswith("; nothing of its batch is inserted")


def test_a_text_that_is_json_is_text_in_a_column_of_texts() -> None:
    row = {"id": 1, "name": '{"x": 1}'}
    assert _rows(f"{json.dumps(row)}\n") == [row]


def test_byte_order_mark_is_passed_over() -> None:
    assert _rows(b'\xef\xbb\xbf{"id": 1}\n{"id": 2}\n') == [
        {"id": 1, "name": None},
        {"id": 2, "name": None},
    ]


def test_time_finer_than_its_column_is_refused_however_it_is_written() -> None:
    schema = pa.schema({"at": pa.timestamp("us", "UTC")})
    for time in ("2020-01-01T00:00:00.1234567Z", "2020-01-01T00:00:00.123456\\u0037Z"):
        with pytest.raises(SchemaMismatch):
            _rows(f'{{"at": "{time}"}}', schema)


def test_batches_are_bounded_and_know_their_lines() -> None:
    first, second = _read("\n" + '{"id": 1}\n' * (ROWS_MAX + 1))
    assert len(first.rows) == ROWS_MAX
    assert (first.numbers[0], second.numbers[0]) == (2, ROWS_MAX + 2)


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "Input data was truncated"),
        ("[1]", "Expected `object`, got `array`"),
        ("null", "Expected `object`, got `null`"),
        ('{"id":\n1}', "Input data was truncated"),
        ('{"id": 1}{"id": 2}', "trailing characters"),
        ('{"id": "x"}', "Expected `int | null`, got `str` - at `$.id`"),
        ('{"id": [1]}', "Expected `int | null`, got `array` - at `$.id`"),
        ('{"id": true}', "Expected `int | null`, got `bool` - at `$.id`"),
        ('{"id": 1.5}', "Expected `int | null`, got `float` - at `$.id`"),
        ('{"id": NaN}', "malformed"),
        ('{"id": 1, "extra": 2}', "unknown field `extra`"),
        ('{"id": 1, "name": "\\ud800"}', "half of a surrogate pair"),
        ('{"id": 1, "name": "a\\udc00\\ud800"}', "half of a surrogate pair"),
        ('{"id": "1"}', "column 'id', "),
        ('"{\\"id\\": 1}"', "it is a text with a JSON object in it — write the object itself"),
        ('"\\"tea\\""', "Expected `object`, got `str`"),
        ('{"id": 99999999999999999999}', "too large"),
    ],
)
@pytest.mark.parametrize("before", [0, 1, 1_000])
def test_line_that_does_not_fit_is_named(line: str, said: str, before: int) -> None:
    text = "\n" + '{"id": 1}\n' * before + "\n" + line + "\n" + '{"id": 1}\n' * 700
    with pytest.raises(SchemaMismatch, match=re.escape(said)) as caught:
        _rows(text)
    assert caught.value.row == before + 3
    assert f"line {before + 3}" in str(caught.value)


def test_line_that_is_no_text_is_named() -> None:
    with pytest.raises(SchemaMismatch, match=r"^line 2: .* — "):
        _read(b'{"id": 1}\n{"name": "\xff"}\n')


def test_long_value_is_not_repeated_whole() -> None:
    with pytest.raises(SchemaMismatch) as caught:
        _read('{"id": "' + "x" * 100_000 + '"}\n')
    assert len(str(caught.value)) < 500


def test_batch_before_a_bad_line_comes_out_first() -> None:
    batches = _source(b'{"id": 1}\n' * ROWS_MAX + b"no\n").batches(SCHEMA)
    assert len(next(batches).rows) == ROWS_MAX
    with pytest.raises(SchemaMismatch, match=f"^line {ROWS_MAX + 1}: "):
        next(batches)


def test_endless_line_is_refused_before_it_is_read() -> None:
    with pytest.raises(TooLarge, match="line 1 "):
        _read(b'{"name": "' + b"x" * ROW_BYTES_MAX)


def test_columns_are_inferred_as_types_a_collection_keeps() -> None:
    line = (
        '{"i":1,"f":1.5,"b":true,"s":"x","n":null,'
        '"t":"2026-01-02T03:04:05Z","l":[1],"o":{"x":null}}\n'
    )
    inferred = _source(line.encode()).infer_schema()
    assert {field.name: str(field.type) for field in inferred} == {
        "i": "int64", "f": "double", "b": "bool", "s": "string", "n": "string",
        "t": "timestamp[us, tz=UTC]", "l": "list<item: int64>", "o": "struct<x: string>",
    }  # fmt: skip


@pytest.mark.parametrize(
    "texts, expected",
    [
        (("2026-01-02T03:04:05", "2026-01-02T03:04:05.25"), "timestamp[us]"),
        (("2026-01-02T03:04:05+02:00", "2026-01-02T03:04:05Z"), "timestamp[us, tz=UTC]"),
        (("2026-01-02T03:04:05+02:00", "2026-01-02T03:04:05"), "string"),
        (("2026-01-02T03:04:05.123456789", "2026-01-02T03:04:05"), "string"),
        (("2026-01-02", "2026-01-02"), "string"),
    ],
)
def test_times_are_inferred_with_the_zone_that_all_of_them_have(
    texts: tuple[str, ...], expected: str
) -> None:
    lines = "".join(f'{{"t": "{text}", "o": null}}\n' for text in texts) + "{}\n"
    source = _source(lines)
    schema = source.infer_schema()
    assert str(schema.field("t").type) == expected
    assert sum(len(batch.rows) for batch in source.batches(schema)) == len(texts) + 1


def test_columns_are_inferred_in_the_order_in_which_they_come() -> None:
    assert _source('{"z": 1, "a": 2}\n{"m": 1, "a": 2}\n').infer_schema().names == ["z", "a", "m"]


@pytest.mark.parametrize(
    "lines, said",
    [
        (
            '\n{"v": 1}\n{"v": null}\n{"v": "x"}\n',
            "^column 'v' of the first lines: line 2 has a number, 1, and line 4 a text, 'x' — ",
        ),
        (f'{{"v": {10**30}}}\n', "column 'v' of the first lines: "),
        ('{"v": 1}\n[]\n', "^line 2: Expected `object`, got `array`"),
        (f'{{"v": 1}}\n{{"v": {"1" * 400}.5}}\n', "^line 2: Number out of range"),
    ],
)
def test_lines_of_several_kinds_are_refused_when_columns_are_inferred(
    lines: str, said: str
) -> None:
    with pytest.raises(SchemaMismatch, match=said):
        _source(lines).infer_schema()


@pytest.mark.parametrize(
    "kind, value",
    [
        (pa.timestamp("us"), '"2026-01-02T03:04:05Z"'),
        (pa.timestamp("us", "UTC"), '"2026-01-02T03:04:05"'),
        (pa.timestamp("ms"), '"2026-01-02T03:04:05.0001"'),
        (pa.float32(), "1e300"),
        (pa.timestamp("us"), '"2026-01-02T03:04:05.1234567"'),
        (pa.list_(pa.timestamp("us", "UTC")), '["2026-01-02T03:04:05.0000001Z"]'),
        (pa.float64(), "9" * 309),
        (pa.list_(pa.float64()), f"[0.5, -{'9' * 400}]"),
        (pa.list_(pa.float32()), "[0.5, -1e300]"),
        (pa.decimal128(5, 2), "1.255"),
        (pa.list_(pa.int64(), 2), "[1]"),
        (pa.binary(), '"no base64"'),
        (pa.list_(pa.binary()), '["AA==", "\u00e9"]'),
    ],
    ids=str,
)
def test_value_that_would_change_is_refused_with_its_batch(kind: pa.DataType, value: str) -> None:
    with pytest.raises(SchemaMismatch, match="line 2: ") as caught:
        _rows(f'{{"v": null}}\n{{"v": {value}}}\n', pa.schema({"v": kind}))
    assert caught.value.row == 2


def test_time_in_text_may_be_finer_than_one_in_a_column_of_times() -> None:
    row: dict[str, object] = {
        "t": "2026-01-02T03:04:05.123456000Z",
        "s": "2026-01-02T03:04:05.123456789Z",
        "f": 0.123456789,
    }
    kinds: dict[str, pa.DataType] = {
        "t": pa.timestamp("us", "UTC"),
        "s": pa.string(),
        "f": pa.float64(),
    }
    (read,) = _rows(json.dumps(row), pa.schema(kinds))
    assert read == row | {"t": dt.datetime(2026, 1, 2, 3, 4, 5, 123456, tzinfo=dt.UTC)}


@pytest.mark.parametrize(
    "deep", ["[" * 20_000 + "]" * 20_000, '{"v":' * 20_000 + "1" + "}" * 20_000, "[" * 200_000]
)
@pytest.mark.parametrize(
    "read",
    [lambda source: list(source.batches(SCHEMA)), JsonLines.infer_schema],
    ids=["insert", "infer"],
)
def test_line_nested_without_end_is_refused_by_its_number(
    deep: str, read: Callable[[JsonLines], object]
) -> None:
    for column in ("id", "other"):
        with pytest.raises(SchemaMismatch, match=r"^line 2: "):
            read(_source(f'{{"id": 1}}\n{{"{column}": {deep}}}\n'))


def test_columns_nested_deeply_are_inferred_or_refused() -> None:
    for depth in range(10, 1_000, 90):
        with suppress(SchemaMismatch):
            _source(f'{{"v": {"[" * depth + "]" * depth}}}\n').infer_schema()


def test_brackets_in_text_and_beside_each_other_are_not_nested() -> None:
    text = '[{"\\' * 1_000
    assert _rows(f"{json.dumps({'id': 1, 'name': text})}\n") == [{"id": 1, "name": text}]
    wide = pa.schema({"v": pa.list_(pa.list_(pa.int64()))})
    assert _rows(f"{json.dumps({'v': [[1]] * 1_000})}\n", wide) == [{"v": [[1]] * 1_000}]


def test_columns_may_be_called_anything() -> None:
    schema = pa.schema({"class": pa.int64(), "1-b": pa.struct([("self", pa.int64())])})
    assert _rows('{"class": 1, "1-b": {"self": 2}}\n', schema) == [{"class": 1, "1-b": {"self": 2}}]


def test_line_from_a_pipe_is_handed_on_while_the_pipe_stays_open() -> None:
    got: list[RowBatch] = []
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as pipe, os.fdopen(write_end, "wb", buffering=0) as writer:
        batches = JsonLines(pipe).batches(SCHEMA)
        for written in (b'{"id": 1}\n{"id": 2}\n{"id', b'": 3}\n'):
            writer.write(written)
            reading = threading.Thread(target=lambda: got.append(next(batches)), daemon=True)
            reading.start()
            reading.join(timeout=20)
            assert not reading.is_alive(), "it waits for more lines"
    assert [list(batch.numbers) for batch in got] == [[1, 2], [3]]
    assert got[1].rows == [{"id": 3, "name": None}]


def test_first_line_of_a_pipe_does_not_wait_for_the_second() -> None:
    got: list[RowBatch] = []
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as pipe, os.fdopen(write_end, "wb", buffering=0) as writer:
        writer.write(b'{"id": 1}\n')
        with open_rows("-", pipe) as rows:
            reading = threading.Thread(
                target=lambda: got.append(next(rows.batches(SCHEMA))), daemon=True
            )
            reading.start()
            reading.join(timeout=20)
            assert not reading.is_alive(), "it waits for more lines"
    assert list(got[0].numbers) == [1]


def test_digest_is_that_of_the_lines_before_whatever_batches_they_came_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = b'{"id": 1}\n\n{"id": 2}\n{"id": 3}'
    (whole,) = _read(text)
    monkeypatch.setattr("streamingnode.cli.rows_in.ROWS_MAX", 1)
    assert [batch.numbers[-1] for batch in _read(text)] == [1, 3, 4]
    assert _read(text)[-1].digest == whole.digest
    source = _source(text + b'\n{"id": 4}\n')
    assert source.pass_over(4) == whole.digest
    assert [batch.numbers[-1] for batch in source.batches(SCHEMA)] == [5]
    assert _source(text.replace(b"2", b"7")).pass_over(4) != whole.digest
    assert _source(b"\n" + text).pass_over(4) != whole.digest
    assert _source(text).pass_over(5) is None


def test_rows_used_to_infer_are_not_lost() -> None:
    source = _source(b'{"id": 1}\n{"id": 2}\n')
    schema = source.infer_schema()
    assert [batch.rows for batch in source.batches(schema)] == [[{"id": 1}, {"id": 2}]]


KEPT: dict[str, tuple[pa.DataType, st.SearchStrategy[object]]] = {
    "integer": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "small": (pa.int8(), st.integers(-128, 127)),
    "float": (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    "text": (pa.string(), st.text(st.characters(exclude_categories=["Cs"]))),
    "bytes": (pa.binary(), st.binary()),
    "flag": (pa.bool_(), st.booleans()),
    "day": (pa.date32(), st.dates()),
    "time": (pa.timestamp("us"), st.datetimes()),
    "short time": (
        pa.timestamp("ms"),
        st.datetimes().map(lambda time: time.replace(microsecond=0)),
    ),
    "instant": (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(dt.UTC))),
    "decimal": (pa.decimal128(9, 2), st.decimals(-1000, 1000, places=2)),
    "short float": (pa.float32(), st.floats(width=32, allow_nan=False, allow_infinity=False)),
    "list of bytes": (pa.list_(pa.binary()), st.lists(st.none() | st.binary(), max_size=3)),
    "struct": (
        pa.struct(
            [("day", pa.date32()), ("time", pa.timestamp("us")), ("bytes", pa.large_binary())]
        ),
        st.fixed_dictionaries(
            {"day": st.dates(), "time": st.datetimes(), "bytes": st.none() | st.binary()}
        ),
    ),
    "list": (pa.list_(pa.int64()), st.lists(st.integers(0, 9))),
    "fixed": (pa.list_(pa.int64(), 2), st.lists(st.integers(0, 9), min_size=2, max_size=2)),
}


@pytest.mark.parametrize("kind, values", KEPT.values(), ids=KEPT)
@given(data=st.data())
def test_what_tail_prints_is_what_insert_reads(
    kind: pa.DataType, values: st.SearchStrategy[object], data: st.DataObject
) -> None:
    schema = pa.schema({"v": kind})
    written = data.draw(st.lists(st.one_of(st.none(), values), min_size=1, max_size=5))
    text = "".join(f"{to_json({'v': value})}\n" for value in written)
    assert [row["v"] for row in _rows(text, schema)] == written
