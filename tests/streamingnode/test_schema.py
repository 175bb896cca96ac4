"""Which schemas a collection may have."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from interceptors.errors import SchemaMismatch
from streamingnode.schema import COLUMNS_MAX, check_schema, decode_schema, encode_schema
from wal.errors import Corrupt, InvalidArgument

SUPPORTED = [
    *(
        pa.bool_(),
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.decimal128(10, 2),
    ),
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.date32()),
    *(pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("us", tz="UTC")),
    *(pa.list_(pa.int64()), pa.large_list(pa.string()), pa.list_(pa.float32(), 128)),
    pa.struct([("a", pa.int64()), ("b", pa.list_(pa.struct([("c", pa.string())])))]),
]
UNSUPPORTED = [
    *(
        pa.uint8(),
        pa.uint64(),
        pa.float16(),
        pa.timestamp("ns"),
        pa.timestamp("s"),
        pa.date64(),
        pa.time64("us"),
    ),
    *(
        pa.duration("us"),
        pa.null(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.map_(pa.string(), pa.int64()),
    ),
    *(
        pa.struct([]),
        pa.list_(pa.uint8()),
        pa.struct([("a", pa.timestamp("ns"))]),
        pa.decimal256(40, 2),
    ),
]


def schema_with(kind: pa.DataType, name: str = "value") -> pa.Schema:
    return pa.schema([("id", pa.int64()), (name, kind)])


@pytest.mark.parametrize("kind", SUPPORTED, ids=str)
def test_schema_of_a_supported_type_survives_being_stored(kind: pa.DataType) -> None:
    schema = check_schema(schema_with(kind), primary_key="id")
    assert decode_schema(encode_schema(schema)).equals(schema_with(kind))


@pytest.mark.parametrize("kind", UNSUPPORTED, ids=str)
def test_column_of_an_unsupported_type_is_named_with_a_next_step(kind: pa.DataType) -> None:
    with pytest.raises(SchemaMismatch, match="— use") as caught:
        check_schema(schema_with(kind), primary_key="id")
    assert caught.value.column is not None
    assert caught.value.column.startswith("value")


def test_times_as_pandas_has_them_are_refused_with_the_type_to_use() -> None:
    with pytest.raises(SchemaMismatch, match=r"column 'value'.* use .*timestamp\[us\]"):
        check_schema(
            pa.Schema.from_pandas(
                pd.DataFrame({"id": [1], "value": pd.to_datetime(["2026-01-02"])})
            ),
            primary_key="id",
        )


@pytest.mark.parametrize(
    "outer", [lambda field: pa.struct([field]), pa.list_], ids=["struct", "list"]
)
def test_field_inside_a_column_takes_nulls(outer: Callable[[Any], pa.DataType]) -> None:
    required = pa.field("inside", pa.int64(), nullable=False)
    with pytest.raises(SchemaMismatch, match=r"column 'value.inside' .* declare it nullable"):
        check_schema(schema_with(outer(required)), primary_key="id")


@pytest.mark.parametrize(
    "kind", [pa.float64(), pa.bool_(), pa.decimal128(5, 2), pa.list_(pa.int64())], ids=str
)
def test_primary_key_of_another_type_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(SchemaMismatch, match="cannot be the primary key"):
        check_schema(pa.schema([("id", kind)]), primary_key="id")


@pytest.mark.parametrize("name", ["_tick", "_", "a b", "a,b", "", "a=b", "a\tb"])
def test_column_name_that_is_reserved_or_unsafe_is_refused(name: str) -> None:
    with pytest.raises(SchemaMismatch, match="rename it"):
        check_schema(schema_with(pa.int64(), name), primary_key="id")


@pytest.mark.parametrize("names", [("value", "value"), ("value", "Value")])
def test_column_names_that_spark_cannot_tell_apart_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(SchemaMismatch, match="Spark ignores case"):
        check_schema(
            pa.schema([("id", pa.int64()), *((name, pa.int64()) for name in names)]),
            primary_key="id",
        )


def test_nested_field_names_that_spark_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(SchemaMismatch, match="Spark ignores case"):
        check_schema(
            schema_with(pa.struct([("a", pa.int64()), ("A", pa.int64())])), primary_key="id"
        )


def test_primary_key_that_is_no_column_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="choose one of id"):
        check_schema(pa.schema([("id", pa.int64())]), primary_key="key")


@pytest.mark.parametrize("schema", [pa.schema([]), None, {"id": "int64"}])
def test_schema_without_columns_or_of_another_kind_is_refused(schema: object) -> None:
    with pytest.raises(InvalidArgument, match="schema"):
        check_schema(schema, primary_key="id")  # type: ignore[arg-type]


def test_schema_of_too_many_columns_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=f"1 to {COLUMNS_MAX}"):
        check_schema(
            pa.schema([(f"c{i}", pa.int64()) for i in range(COLUMNS_MAX + 1)]), primary_key="c0"
        )


def test_schema_nested_without_end_is_refused() -> None:
    kind: pa.DataType = pa.int64()
    for _ in range(100):
        kind = pa.list_(kind)
    with pytest.raises(SchemaMismatch, match="flatten"):
        check_schema(schema_with(kind), primary_key="id")


def test_metadata_is_left_out_so_that_equal_schemas_stay_equal() -> None:
    schema = pa.schema([("id", pa.int64())], metadata={"pandas": "{}"})
    assert check_schema(schema, primary_key="id").metadata is None


@pytest.mark.parametrize(
    "outer", [lambda field: field.type, pa.list_, lambda field: pa.struct([field])]
)
def test_field_that_names_an_extension_is_read_back_as_what_it_is_stored_as(
    outer: Callable[["pa.Field[Any]"], pa.DataType],
) -> None:
    field = pa.field("item", pa.string(), metadata={"ARROW:extension:name": "arrow.json"})
    value = pa.field("value", outer(field), metadata=field.metadata)
    schema = pa.schema([pa.field("id", pa.int64()), value])
    checked = check_schema(schema, primary_key="id")
    assert decode_schema(encode_schema(checked)).equals(checked, check_metadata=True)
    assert checked.types == schema.types


def test_stored_bytes_that_are_no_schema_are_corrupt() -> None:
    with pytest.raises(Corrupt):
        decode_schema(b"not a schema")
