"""What a selection reads of files: no rows that are asked for are ruled out, and of the others what
ranges can tell.
"""

import io
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flusher.selection import Selection
from interceptors.shard.catalog import CollectionInfo

VCHANNELS = ("p0_1v0", "p0_1v1", "p0_1v2")


def collection(kind: pa.DataType) -> CollectionInfo:
    columns: dict[str, pa.DataType] = {
        "a.key": kind,
        "a": pa.struct([("key", kind)]),
        "item": pa.string(),
    }
    return CollectionInfo(
        id=1,
        name="orders",
        schema=pa.schema(columns).serialize().to_pybytes(),
        schema_version=1,
        primary_key="a.key",
        vchannels=VCHANNELS,
        partitions=(),
        created_tick=1,
    )


def selection(kind: pa.DataType, *keys: Any) -> Selection:
    return Selection(
        collection(kind),
        columns=["item"],
        keys=pa.array(keys, kind),
        vchannels=frozenset(VCHANNELS[:1]),
    )


@pytest.mark.parametrize(
    "kind, keys, misses, hits",
    [
        (
            pa.int64(),
            [3, 9],
            [(0, 2), (4, 8), (10, 99)],
            [(0, 3), (3, 3), (4, 9), (9, 99), (None, 0)],
        ),
        (
            pa.string(),
            ["b", "é"],
            [("", "a"), ("c", "z"), ("ê", "ü")],
            [("a", "b"), ("é", "é"), ("z", "ü"), (1, 2)],
        ),
        (pa.binary(), [b"\xf0"], [(b"", b"\x7f")], [(b"\x7f", b"\xff"), (None, None)]),
        (
            pa.date32(),
            [date(2024, 1, 1)],
            [],
            [(date(2024, 1, 2), date(2025, 1, 1)), ("2030-01-01", "2031-01-01")],
        ),
    ],
    ids=str,
)
def test_a_range_rules_out_only_keys_that_are_not_in_it(
    kind: Any, keys: Any, misses: Any, hits: Any
) -> None:
    selected = selection(kind, *keys)
    assert [selected.may_have(ends, None) for ends in misses] == [False] * len(misses)
    assert [selected.may_have(ends, None) for ends in hits] == [True] * len(hits)
    assert selected.may_have(None, None)


def test_a_shard_without_the_keys_is_ruled_out() -> None:
    selected = selection(pa.int64(), 3)
    assert selected.may_have(None, (VCHANNELS[0], VCHANNELS[0]))
    assert selected.may_have(None, (VCHANNELS[0], VCHANNELS[2]))
    assert not selected.may_have(None, (VCHANNELS[1], VCHANNELS[2]))


def test_everything_is_selected_where_nothing_is_said() -> None:
    whole = Selection(collection(pa.int64()))
    assert whole.may_have((5, 6), (VCHANNELS[1], VCHANNELS[1]))
    assert whole.columns == whole.schema.names == ["a.key", "a", "item"]
    rows = pa.table({"a.key": [1, 2]})
    assert whole.rows(rows) is rows


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.string(), pa.binary(), pa.decimal128(9, 2)], ids=str
)
def test_of_a_file_the_row_groups_that_may_have_the_keys_are_read_in_the_columns_asked_for(
    kind: pa.DataType,
) -> None:
    keys = pa.array([Decimal(n) for n in range(90)], pa.decimal128(9, 2))
    named = pa.array([f"{n:02}".encode() for n in range(90)], pa.binary())
    column: Any = (
        keys
        if pa.types.is_decimal(kind)
        else named.cast(kind)
        if pa.types.is_binary(kind) or pa.types.is_string(kind)
        else pa.array(range(90), pa.int32()).cast(kind)
    )
    # a field of the same path, in the opposite order
    inner = pa.StructArray.from_arrays([column[::-1]], ["key"])
    table = pa.table({"a": inner, "a.key": column, "item": [f"{n}" for n in range(90)]})
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=30)
    wanted = [column[3].as_py(), column[35].as_py()]
    selected = selection(kind, *wanted)
    with pq.ParquetFile(file) as opened:
        read = selected.read(opened, selected.schema).select(selected.schema.names)
    assert read.num_rows == (90 if pa.types.is_decimal(kind) else 60)
    assert read.column_names == ["a.key", "item"]
    assert selected.rows(read)["item"].to_pylist() == ["3", "35"]


@pytest.mark.parametrize(
    "kind", [pa.date32(), pa.timestamp("us"), pa.timestamp("ms", "Asia/Kolkata")], ids=str
)
def test_days_and_times_that_python_does_not_have_are_found_by_their_key(kind: pa.DataType) -> None:
    counted: Any = (
        pa.array([0, 2**31 - 1], pa.int32())
        if pa.types.is_date(kind)
        else pa.array([0, 9 * 10**15])
    )
    days = counted.cast(kind)
    file = io.BytesIO()
    pq.write_table(pa.table({"a.key": days, "item": ["0", "1"]}), file, row_group_size=1)
    for number, key in enumerate(("0", "1")):
        selected = Selection(collection(kind), columns=["item"], keys=days[number : number + 1])
        with pq.ParquetFile(file) as opened:
            assert selected.rows(selected.read(opened, selected.schema))["item"].to_pylist() == [
                key
            ]
