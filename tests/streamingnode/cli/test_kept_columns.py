"""`insert --create` of a Parquet file: each type with one obvious answer becomes a kept one."""

import datetime as dt
import io
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interceptors.errors import SchemaMismatch
from streamingnode.cli.kept_columns import kept_columns
from streamingnode.cli.rows_in import ParquetRows
from streamingnode.rows import row_shape, to_batches

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.streamingnode.cli.conftest import Place, Printed

    Run = Callable[..., Printed]

WORDS = pa.array(["tea", "milk", None])
ONE = Decimal("1.25")
TYPES: dict[str, tuple[Any, str]] = {
    "uint8": (pa.array([0, 255, None], pa.uint8()), "int16"),
    "uint16": (pa.array([0, (1 << 16) - 1, None], pa.uint16()), "int32"),
    "uint32": (pa.array([0, (1 << 32) - 1, None], pa.uint32()), "int64"),
    "half float": (pa.array(np.array([0.5, 1, 2], np.float16)), "float"),
    "string_view": (WORDS.cast(pa.string_view()), "string"),
    "binary_view": (WORDS.cast(pa.binary()).cast(pa.binary_view()), "binary"),
    "large_string": (WORDS.cast(pa.large_string()), "large_string"),
    "large_binary": (WORDS.cast(pa.large_binary()), "large_binary"),
    "large_list": (
        pa.array([[1], [], None], pa.large_list(pa.int64())), "large_list<element: int64>"
    ),
    "bytes of one length": (pa.array([b"ab", b"cd", None], pa.binary(2)), "binary"),
    "category": (WORDS.dictionary_encode(), "string"),
    "category of numbers": (pa.array([7, 7, None]).dictionary_encode(), "int64"),
    "list of categories": (
        pa.ListArray.from_arrays([0, 1, 2, 3], WORDS.dictionary_encode()), "list<element: string>"
    ),
    "decimal32": (pa.array([ONE, None, ONE], pa.decimal32(5, 2)), "decimal128(5, 2)"),
    "decimal256": (pa.array([ONE, None, ONE], pa.decimal256(38, 2)), "decimal128(38, 2)"),
    "date64": (pa.array([dt.date(2026, 1, 2)] * 3, pa.date64()), "date32[day]"),
    "seconds": (pa.array([1, 2, None], pa.timestamp("s")), "timestamp[ms]"),
    "nanoseconds": (pa.array([1000, 2000, None], pa.timestamp("ns")), "timestamp[us]"),
    "in a zone": (pa.array([1000, 2000, None], pa.timestamp("ns", "UTC")), "timestamp[us, tz=UTC]"),
    "nanoseconds in a list": (
        pa.array([[1000], [], None], pa.list_(pa.timestamp("ns"))), "list<element: timestamp[us]>"
    ),
    "nothing but nulls": (pa.nulls(3), "string"),
    "not null in a list": (
        pa.array([[1], [], None], pa.list_(pa.field("element", pa.int64(), nullable=False))),
        "list<element: int64>",
    ),
    "not null in a struct": (
        pa.array(
            [{"x": 1}, {"x": 2}, None], pa.struct([pa.field("x", pa.uint32(), nullable=False)])
        ),
        "struct<x: int64>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("given, kept", TYPES.values(), ids=TYPES)
def test_a_type_with_one_answer_becomes_it_and_no_value_changes(given: Any, kept: str) -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": [1, 2, 3], "v": given}), file)
    file.seek(0)
    source = ParquetRows(file)
    schema = source.infer_schema()
    assert str(schema.field("v").type) == kept
    shape = row_shape(schema, primary_key="id")
    made = [each for read in source.batches(schema) for each in to_batches(read.rows, shape)]
    assert [value for each in made for value in each.column("v").to_pylist()] == given.to_pylist()


def test_a_required_column_stays_required() -> None:
    schema = pa.schema([pa.field("id", pa.uint32(), nullable=False)])
    assert kept_columns(schema) == pa.schema([pa.field("id", pa.int64(), nullable=False)])


@pytest.mark.parametrize("kind", [pa.uint64(), pa.list_(pa.uint64())], ids=str)
def test_uint64_has_no_one_answer_and_is_refused_with_the_two(kind: pa.DataType) -> None:
    both = r"collection create.* int64 .* or a decimal of 20 digits"
    with pytest.raises(SchemaMismatch, match=both) as caught:
        kept_columns(pa.schema([("id", pa.int64()), ("v", kind)]))
    assert caught.value.column == "v"


def test_a_file_as_pandas_writes_it_is_inserted_wherever_the_node_is(
    place: "Place", tmp_path: Path, run: "Run"
) -> None:
    at = pd.date_range("2026-01-01 10:00", periods=3, freq="h").astype("datetime64[ns]")
    frame = pd.DataFrame(
        {
            "id": np.array([1, 2, 3], np.uint32),
            "item": pd.Categorical(["tea", "milk", "tea"]),
            "at": at,
        }
    ).iloc[[0, 2]]
    file = tmp_path / "frame.parquet"
    frame.to_parquet(file)
    name = f"frames-{place.way}"
    made = run("insert", *place.arguments, name, file, "--create", "--primary-key", "id", "--json")
    assert made.code == 0, made.err
    assert made.document["rows"] == 2
    assert "__index_level_0__ is left out: it is the index of a pandas frame — " in made.err
    # Without --create the same types go in.
    assert run("insert", *place.arguments, name, file, "--upsert").code == 0
    with place.open() as node:
        assert [str(field.type) for field in node.collection(name).schema] == [
            "int64",
            "string",
            "timestamp[us]",
        ]
        rows = node.snapshot(name).sort_by("id").select(["id", "item", "at"]).to_pylist()
    assert rows == cast("list[dict[str, object]]", frame.to_dict("records"))


def test_a_time_finer_than_microseconds_anywhere_in_a_file_is_named_and_nothing_is_created(
    tmp_path: Path, run: "Run"
) -> None:
    times = [1000] * 30_000 + [1001]
    file = tmp_path / "rows.parquet"
    at = pa.array(times, pa.timestamp("ns"))
    pq.write_table(pa.table({"id": range(len(times)), "at": at}), file)
    refused = run("insert", tmp_path / "data", "c", file, "--create", "--primary-key", "id")
    assert refused.code == 2
    assert "column 'at', row 30001: a time is finer than microseconds" in refused.err
    assert not (tmp_path / "data").exists()


def test_a_dict_without_a_column_is_null_there_as_a_line_is(
    place: "Place", tmp_path: Path, run: "Run"
) -> None:
    with place.open() as node:
        orders = place.orders
        node.insert(orders, [{"id": 1}, {"id": 2, "item": "tea"}])
        node.upsert(orders, [{"id": 3}])
        with node.transaction() as txn:
            txn.insert(orders, [{"id": 4}])
        with pytest.raises(SchemaMismatch, match="column 'id', row 1 is missing") as caught:
            node.insert(orders, [{"id": 5}, {"item": "tea"}])
        assert (caught.value.column, caught.value.row) == ("id", 1)
    lines = tmp_path / "lines"
    lines.write_text('{"id": 6}\n')
    assert run("insert", *place.arguments, orders, lines).code == 0
    with place.open() as node:
        rows = node.snapshot(orders).sort_by("id").select(["id", "item"]).to_pylist()
    assert rows == [{"id": key, "item": "tea" if key == 2 else None} for key in (1, 2, 3, 4, 6)]
