"""The demo's own check: it must see every way in which a table can differ."""

import pyarrow as pa
import pytest

from streamingnode.demo.check import DIFFERENCES_MAX, check_count, check_rows

COLUMNS: dict[str, pa.DataType] = {"pid": pa.int64(), "name": pa.string()}
SCHEMA = pa.schema(COLUMNS)
TWO: list[dict[str, object]] = [{"pid": 1, "name": "init"}, {"pid": 2, "name": "sh"}]


def _table(rows: list[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def test_same_rows_in_another_order_with_more_columns_pass() -> None:
    found = _table(TWO[::-1]).append_column("_tick", pa.array([1, 1]))
    check = check_rows("live", acknowledged=_table(TWO), found=found, key="pid")
    assert check.passed
    assert check.rows == 2


@pytest.mark.parametrize(
    "found, said",
    [
        (TWO[:1], "pid 2: acknowledged {'pid': 2, 'name': 'sh'}, the table has nothing"),
        ([*TWO, {"pid": 3, "name": "x"}], "pid 3: acknowledged nothing, the table has {'pid': 3, 'name': 'x'}"),
        ([TWO[0], {"pid": 2, "name": "bash"}], "pid 2: "),
        ([*TWO, TWO[1]], "pid 2: "),
        ([TWO[0], {"pid": 2, "name": None}], "None"),
    ],
    ids=["missing", "extra", "changed", "twice", "null"],
)
def test_every_kind_of_difference_is_seen(found: list[dict[str, object]], said: str) -> None:
    check = check_rows("live", acknowledged=_table(TWO), found=_table(found), key="pid")
    assert not check.passed
    assert len(check.differences) == 1
    assert said in check.differences[0]


def test_many_differences_are_cut_short() -> None:
    rows: list[dict[str, object]] = [{"pid": i, "name": "x"} for i in range(100)]
    check = check_rows("live", acknowledged=_table(rows), found=_table([]), key="pid")
    assert len(check.differences) == DIFFERENCES_MAX


def test_counts_that_differ_are_a_difference() -> None:
    assert check_count("samples", acknowledged=5, found=5).passed
    assert check_count("samples", acknowledged=5, found=4).differences == ("5 rows were acknowledged, the table has 4",)
