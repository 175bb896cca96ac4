"""JSON lines: every value comes back as it was, and a bad line is named while nothing of its batch comes out."""

import io

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamingnode.cli.json_lines import LINE_BYTES_MAX, JsonLines
from streamingnode.cli.output import to_json
from streamingnode.cli.row_batch import ROWS_MAX, RowBatch
from wal.errors import InvalidArgument, SchemaMismatch, TooLarge

COLUMNS: dict[str, pa.DataType] = {"id": pa.int64(), "name": pa.string()}
SCHEMA = pa.schema(COLUMNS)


def _read(text: str | bytes, schema: pa.Schema = SCHEMA) -> list[RowBatch]:
    return list(JsonLines(io.BytesIO(text.encode() if isinstance(text, str) else text)).batches(schema))


def _rows(text: str | bytes, schema: pa.Schema = SCHEMA) -> list[dict[str, object]]:
    return [row for batch in _read(text, schema) for row in batch.rows.to_pylist()]


def test_empty_input_has_no_rows() -> None:
    assert _read("") == []
    assert _read("\n  \n") == []


def test_left_out_field_is_null_and_last_line_needs_no_end() -> None:
    assert _rows('{"id": 1}\n\n{"name": "b", "id": 2}') == [{"id": 1, "name": None}, {"id": 2, "name": "b"}]


def test_batches_are_bounded_and_know_their_lines() -> None:
    first, second = _read("\n" + '{"id": 1}\n' * (ROWS_MAX + 1))
    assert first.rows.num_rows == ROWS_MAX
    assert (first.numbers[0], second.numbers[0]) == (2, ROWS_MAX + 2)


@pytest.mark.parametrize(
    "line, error, words",
    [
        ("{", InvalidArgument, "no JSON"),
        ("[1]", InvalidArgument, "no JSON object"),
        ('{"id": 1}{"id": 2}', InvalidArgument, "no JSON"),
        ('{"id": "x"}', SchemaMismatch, "changed from number to string"),
        ('{"id": 1.5}', SchemaMismatch, "1.5"),
        ('{"id": 1, "extra": 2}', SchemaMismatch, "column 'extra'"),
    ],
)
@pytest.mark.parametrize("before", [0, 1, 1_000])
def test_bad_line_is_named_by_its_number(line: str, error: type[Exception], words: str, before: int) -> None:
    text = '{"id": 1}\n' * before + line + "\n" + '{"id": 1}\n' * 700
    with pytest.raises(error, match=f"line {before + 1}[ :].*{words}"):
        _read(text)


@pytest.mark.parametrize("value", ["1.5", "99999999999999999999", '"two"', "[1]", "true"])
def test_value_of_another_kind_names_line_and_column(value: str) -> None:
    with pytest.raises(SchemaMismatch, match=r"^line 2: column 'id'") as caught:
        _read(f'{{"name": "a", "id": 1}}\n{{"name": "b", "id": {value}}}\n')
    assert (caught.value.column, caught.value.row) == ("id", 2)


def test_long_value_is_not_repeated_whole() -> None:
    with pytest.raises(SchemaMismatch) as caught:
        _read('{"id": "' + "x" * 100_000 + '"}\n')
    assert len(str(caught.value)) < 500


def test_value_over_two_lines_names_the_first() -> None:
    with pytest.raises(InvalidArgument, match="line 1 "):
        _read('{"id":\n1}\n')


def test_batch_before_a_bad_line_comes_out_first() -> None:
    batches = JsonLines(io.BytesIO(b'{"id": 1}\n' * ROWS_MAX + b"no\n")).batches(SCHEMA)
    assert next(batches).rows.num_rows == ROWS_MAX
    with pytest.raises(InvalidArgument, match=f"line {ROWS_MAX + 1} "):
        next(batches)


def test_endless_line_is_refused_before_it_is_read() -> None:
    with pytest.raises(TooLarge, match="line 1 "):
        _read(b'{"name": "' + b"x" * LINE_BYTES_MAX)


def test_columns_are_inferred_as_types_a_collection_keeps() -> None:
    line = '{"i":1,"f":1.5,"b":true,"s":"x","n":null,"t":"2026-01-02T03:04:05Z","l":[1],"o":{"x":null}}\n'
    inferred = JsonLines(io.BytesIO(line.encode())).infer_schema()
    assert {field.name: str(field.type) for field in inferred} == {
        "i": "int64", "f": "double", "b": "bool", "s": "string", "n": "string", "t": "timestamp[us]",
        "l": "list<item: int64>", "o": "struct<x: string>",
    }  # fmt: skip


def test_rows_used_to_infer_are_not_lost() -> None:
    source = JsonLines(io.BytesIO(b'{"id": 1}\n{"id": 2}\n'))
    schema = source.infer_schema()
    assert [row for batch in source.batches(schema) for row in batch.rows.to_pylist()] == [{"id": 1}, {"id": 2}]


KEPT: dict[str, tuple[pa.DataType, st.SearchStrategy[object]]] = {
    "integer": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "small": (pa.int8(), st.integers(-128, 127)),
    "float": (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    "text": (pa.string(), st.text(st.characters(exclude_categories=["Cs"]))),
    "bytes": (pa.binary(), st.binary()),
    "flag": (pa.bool_(), st.booleans()),
    "day": (pa.date32(), st.dates()),
    "time": (pa.timestamp("us"), st.datetimes()),
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
