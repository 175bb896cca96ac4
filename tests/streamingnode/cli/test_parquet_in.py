"""Parquet as other programs write it: delta encodings, times of INT96, the hybrid calendar."""

import datetime as dt
import io
from collections.abc import Callable
from itertools import product
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interceptors.errors import SchemaMismatch
from streamingnode.cli.old_calendar import SPARK_COLUMNS, SPARK_VERSION
from streamingnode.cli.parquet_in import READ_BYTES, ParquetInput
from streamingnode.cli.rows_in import ParquetRows
from streamingnode.rows import row_shape, to_batches

TEXTS = [f"text {n % 7}" if n % 5 else None for n in range(1_000)]
LISTS = [None if n % 7 == 0 else [f"item {n}", None][: n % 3] for n in range(1_000)]
STRUCTS = [None if n % 11 == 0 else {"x": f"field {n}", "y": [f"deep {n}"]} for n in range(1_000)]


def _file(table: pa.Table, **options: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, **options)
    buffer.seek(0)
    return buffer


def _rows(file: io.BytesIO, schema: pa.Schema | None = None) -> list[dict[str, Any]]:
    source = ParquetRows(file)
    schema = schema or source.infer_schema()
    shape = row_shape(schema, primary_key="id")
    batches = [each for read in source.batches(schema) for each in to_batches(read.rows, shape)]
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_texts_in_delta_encodings_are_those_that_were_written_wherever_they_are(
    encoding: str, version: str
) -> None:
    columns = {
        "id": pa.array(range(1_000)),
        "text": pa.array(TEXTS),
        "large": pa.array(TEXTS, pa.large_string()),
        "bytes": pa.array([None if text is None else text.encode() for text in TEXTS]),
        "list": pa.array(LISTS),
        "struct": pa.array(STRUCTS),
        "plain": pa.array(TEXTS),
    }
    table = pa.table(columns)
    deltas = ["text", "large", "bytes", "list.list.element", "struct.x", "struct.y.list.element"]
    encodings = {"id": "DELTA_BINARY_PACKED", **dict.fromkeys(deltas, encoding)}
    file = _file(
        table,
        use_dictionary=["plain"],
        column_encoding=encodings,
        data_page_version=version,
        row_group_size=300,
    )
    assert _rows(file) == table.to_pylist()


def test_a_file_with_one_row_group_of_each_encoding_is_read_whole() -> None:
    groups = [pa.table({"id": [n], "text": ["x" * n]}) for n in range(4)]
    file = _file(pa.concat_tables(groups), row_group_size=1, use_dictionary=False, column_encoding={
        "id": "PLAIN", "text": "DELTA_BYTE_ARRAY"
    })  # fmt: skip
    assert [row["text"] for row in _rows(file)] == ["", "x", "xx", "xxx"]


def test_a_text_that_delta_encoding_has_once_is_decoded_for_few_rows_at_a_time() -> None:
    table = pa.table(
        {"id": range(2_000), "text": ["x" * 100_000] * 2_000, "few": ["a", "b"] * 1_000}
    )
    encodings = {"id": "PLAIN", "text": "DELTA_BYTE_ARRAY"}
    file = _file(table, use_dictionary=["few"], column_encoding=encodings)
    assert len(file.getvalue()) < 1 << 20
    source = ParquetInput(file)
    before = pa.total_allocated_bytes()
    rows = 0
    most = 0
    for batch in source.iter_batches(10_000, columns=["id", "text", "few"]):
        most = max(most, pa.total_allocated_bytes() - before)
        assert batch.column("id").to_pylist() == list(range(rows, rows + batch.num_rows))
        rows += batch.num_rows
    assert rows == 2_000
    assert most < 10 * READ_BYTES, f"{most >> 20} MiB for 190 MiB of rows"


def test_short_texts_in_delta_encoding_go_in_batches_as_large_as_others() -> None:
    table = pa.table({"id": range(25_000), "text": TEXTS * 25, "few": ["a", "b"] * 12_500})
    encodings = {"id": "PLAIN", "text": "DELTA_BYTE_ARRAY"}
    source = ParquetRows(_file(table, use_dictionary=["few"], column_encoding=encodings))
    batches = list(source.batches(source.infer_schema()))
    assert len(batches) < 6
    assert [number for batch in batches for number in batch.numbers] == list(range(1, 25_001))


# --- INT96

MOMENTS = [
    dt.datetime(1, 1, 1),  # noqa: DTZ001
    dt.datetime(1600, 2, 29, 1, 2, 3, 456789),  # noqa: DTZ001
    dt.datetime(1677, 9, 21, 0, 12, 43, 145224),  # noqa: DTZ001  # before nanoseconds begin
    None,
    dt.datetime(1969, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001
    dt.datetime(2026, 12, 31, 1, 2, 3, 456789),  # noqa: DTZ001
    dt.datetime(2262, 4, 11, 23, 47, 16, 854776),  # noqa: DTZ001
    dt.datetime(9999, 12, 30, 1, 2, 3, 456789),  # noqa: DTZ001
]
IN_UTC = [moment and moment.replace(tzinfo=dt.UTC) for moment in MOMENTS]
NAIVE = pa.timestamp("us")
AWARE = pa.timestamp("us", "UTC")


def _int96(values: Any, kind: pa.DataType = NAIVE, **options: Any) -> io.BytesIO:
    table = pa.table({"id": range(len(values)), "at": values}, schema=_types(kind))
    return _file(table, use_deprecated_int96_timestamps=True, **options)


def _types(kind: pa.DataType) -> pa.Schema:
    return pa.schema([("id", pa.int64()), ("at", kind)])


def test_int96_times_of_any_year_go_in_with_and_without_a_zone() -> None:
    file = _int96(MOMENTS, row_group_size=3)
    assert ParquetRows(file).infer_schema() == _types(NAIVE)
    for kind, expected in (
        (NAIVE, MOMENTS),
        (AWARE, IN_UTC),
        (pa.timestamp("us", "Asia/Tokyo"), IN_UTC),
        (pa.timestamp("us", "+05:30"), IN_UTC),
    ):
        file.seek(0)
        assert [row["at"] for row in _rows(file, _types(kind))] == expected


def test_int96_times_go_in_at_any_depth() -> None:
    def nested(kind: pa.DataType) -> pa.DataType:
        return pa.struct(
            [("l", pa.list_(pa.struct([("t", kind), ("n", pa.int64())]))), ("u", kind)]
        )

    def value(at: Any, utc: Any) -> Any:
        return {"l": [{"t": utc, "n": 1}, None, {"t": None, "n": None}], "u": at}

    file = _int96([value(at, at) for at in MOMENTS], nested(NAIVE))
    for kind in (NAIVE, AWARE):
        file.seek(0)
        moments = MOMENTS if kind == NAIVE else IN_UTC
        expected = [value(at, at) for at in moments]
        assert [row["at"] for row in _rows(file, _types(nested(kind)))] == expected
    file.seek(0)
    mixed = pa.struct([("u", NAIVE), ("l", pa.list_(pa.struct([("n", pa.int64()), ("t", AWARE)])))])
    expected = [value(at, utc) for at, utc in zip(MOMENTS, IN_UTC, strict=True)]
    assert [row["at"] for row in _rows(file, _types(mixed))] == expected


def test_int96_times_are_instants_where_the_file_says_so() -> None:
    by_spark = io.BytesIO()
    schema = _types(NAIVE)
    options: dict[str, Any] = {"store_schema": False, "use_deprecated_int96_timestamps": True}
    with pq.ParquetWriter(by_spark, schema, **options) as writer:
        writer.write_table(pa.table({"id": range(len(MOMENTS)), "at": MOMENTS}, schema=schema))
        writer.add_key_value_metadata({SPARK_VERSION.decode(): "4.3.0"})
    by_arrow = _int96(IN_UTC, pa.timestamp("us", "Asia/Tokyo"))
    for file in (by_spark, by_arrow):
        file.seek(0)
        assert ParquetRows(file).infer_schema() == _types(AWARE)
        file.seek(0)
        assert [row["at"] for row in _rows(file)] == IN_UTC
    by_spark.seek(0)
    assert [row["at"] for row in _rows(by_spark, _types(NAIVE))] == MOMENTS


@pytest.mark.parametrize("year", [1600, 2026, 9999])
@pytest.mark.parametrize("is_nested", [False, True])
def test_an_int96_time_that_no_column_holds_is_refused_by_row_before_any_goes_in(
    year: int, is_nested: bool
) -> None:
    given = dt.datetime(year, 12, 31, 1, 2, 3, 456789)  # noqa: DTZ001
    values: list[Any] = (
        [[MOMENTS[4]], None, [None, given]] if is_nested else [MOMENTS[4], None, given]
    )
    kind = pa.list_(NAIVE) if is_nested else NAIVE
    content = _int96(values, kind, use_dictionary=False, compression="none").getvalue()
    nanos = (
        (given - given.replace(hour=0, minute=0, second=0, microsecond=0))
        // dt.timedelta(microseconds=1)
        * 1000
    )
    assert content.count(nanos.to_bytes(8, "little")) == 1
    at = content.index(nanos.to_bytes(8, "little"))
    finer = content[:at] + (nanos + 1).to_bytes(8, "little") + content[at + 8 :]
    later = content[: at + 8] + (1 << 31).to_bytes(4, "little") + content[at + 12 :]
    uses: list[Callable[[ParquetRows], object]] = [
        lambda source: source.infer_schema(),
        lambda source: next(source.batches(_types(kind))),
    ]
    for changed, use in product((finer, later), uses):
        with pytest.raises(
            SchemaMismatch, match="column 'at', row 3: a time is finer than micro"
        ) as caught:
            use(ParquetRows(io.BytesIO(changed)))
        assert (caught.value.column, caught.value.row) == ("at", 3)


def test_a_column_without_a_zone_that_is_no_int96_is_not_taken_for_one() -> None:
    table = pa.table({"id": [1], "at": pa.array([MOMENTS[1]], NAIVE)})
    with pytest.raises(
        SchemaMismatch, match=r"is timestamp\[us\], the schema has timestamp\[us, tz=UTC\]"
    ):
        _rows(_file(table), _types(AWARE))


# --- the hybrid calendar

LEGACY_DATETIME = {SPARK_VERSION: b"3.5.1", b"org.apache.spark.legacyDateTime": b""}
LEGACY_INT96 = {SPARK_VERSION: b"3.5.1", b"org.apache.spark.legacyINT96": b""}
ZONE_IS_UTC = {b"org.apache.spark.timeZone": b"UTC"}
SPARK_2 = {SPARK_VERSION: b"2.4.8"}
OLDER_SPARK_2 = {SPARK_COLUMNS: b"{}"}
HIVE = {b"writer.date.proleptic": b"false"}

LAST_OLD_DAY = dt.date(1582, 10, 14)
FIRST_DAY = dt.date(1582, 10, 15)
LAST_OLD_TIME = dt.datetime(1899, 12, 31, 23, 59, 59, 999999)  # noqa: DTZ001
FIRST_TIME = dt.datetime(1900, 1, 1)  # noqa: DTZ001
FIRST_TIME_IN_UTC = dt.datetime(1582, 10, 15)  # noqa: DTZ001
LAST_OLD_TIME_IN_UTC = FIRST_TIME_IN_UTC - dt.timedelta(microseconds=1)
DAY = pa.date32()


def _of_spark(
    values: list[Any], kind: pa.DataType, footer: dict[bytes, bytes], *, is_int96: bool = False
) -> io.BytesIO:
    """Return a file as Spark writes it: with its footer, and without Arrow's schema."""
    buffer = io.BytesIO()
    options: dict[str, Any] = {"store_schema": False, "use_deprecated_int96_timestamps": is_int96}
    with pq.ParquetWriter(buffer, _types(kind), **options) as writer:
        ids = range(len(values))
        writer.write_table(pa.table({"id": ids, "at": values}, schema=_types(kind)))
        writer.add_key_value_metadata({key.decode(): footer[key].decode() for key in footer})
    buffer.seek(0)
    return buffer


def _refused(file: io.BytesIO) -> SchemaMismatch:
    """Return the error by which a file is refused, with `--create` and without."""
    schema = ParquetInput(file).schema
    file.seek(0)
    with pytest.raises(SchemaMismatch) as caught:
        ParquetRows(file).infer_schema()
    file.seek(0)
    with pytest.raises(SchemaMismatch) as again:
        next(ParquetRows(file).batches(schema))
    assert str(again.value) == str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    "footer, kind, is_int96, last_old, first_sure",
    [
        (LEGACY_DATETIME, DAY, False, LAST_OLD_DAY, FIRST_DAY),
        (LEGACY_DATETIME, AWARE, False, LAST_OLD_TIME, FIRST_TIME),
        (LEGACY_DATETIME | ZONE_IS_UTC, AWARE, False, LAST_OLD_TIME_IN_UTC, FIRST_TIME_IN_UTC),
        (LEGACY_INT96, NAIVE, True, LAST_OLD_TIME, FIRST_TIME),
        (LEGACY_INT96 | ZONE_IS_UTC, NAIVE, True, LAST_OLD_TIME_IN_UTC, FIRST_TIME_IN_UTC),
        (SPARK_2, DAY, False, LAST_OLD_DAY, FIRST_DAY),
        (SPARK_2, AWARE, False, LAST_OLD_TIME, FIRST_TIME),
        (SPARK_2, NAIVE, True, LAST_OLD_TIME, FIRST_TIME),
        ({SPARK_VERSION: b"3.0.3"}, NAIVE, True, LAST_OLD_TIME, FIRST_TIME),
        (OLDER_SPARK_2, DAY, False, LAST_OLD_DAY, FIRST_DAY),
        (OLDER_SPARK_2, NAIVE, True, LAST_OLD_TIME, FIRST_TIME),
        (HIVE, DAY, False, LAST_OLD_DAY, FIRST_DAY),
    ],
)
def test_what_was_another_day_in_the_hybrid_calendar_is_refused_by_row_and_all_later_goes_in(
    footer: dict[bytes, bytes], kind: pa.DataType, is_int96: bool, last_old: Any, first_sure: Any
) -> None:
    error = _refused(_of_spark([first_sure, None, last_old], kind, footer, is_int96=is_int96))
    assert (error.column, error.row) == ("at", 3)
    assert str(error).startswith("column 'at', row 3: a ")
    if footer is HIVE:
        assert "rewrite the file in Hive" in str(error)
    else:
        mode = "int96" if is_int96 else "datetime"
        assert f"spark.sql.parquet.{mode}RebaseModeInWrite=CORRECTED" in str(error)
        assert ("RebaseModeInRead=LEGACY" in str(error)) == (footer is OLDER_SPARK_2)

    file = _of_spark([first_sure, None], kind, footer, is_int96=is_int96)
    times = [row["at"] for row in _rows(file)]
    if kind != DAY:
        first_sure = first_sure.replace(tzinfo=dt.UTC)
    assert times == [first_sure, None]


def test_an_old_day_or_time_is_refused_at_any_depth() -> None:
    days = pa.struct([("n", pa.int64()), ("l", pa.list_(pa.struct([("d", DAY), ("e", DAY)])))])
    new = {"n": 1, "l": [{"d": FIRST_DAY, "e": None}, None]}
    old = {"n": 1, "l": [None, {"d": None, "e": LAST_OLD_DAY}]}
    many = [new] * 10_000
    error = _refused(_of_spark([*many, None, old], days, SPARK_2))
    assert (error.column, error.row) == ("at", 10_002)
    times = pa.list_(pa.struct([("t", NAIVE)]))
    values = [[{"t": FIRST_TIME}], [None, {"t": MOMENTS[0]}]]
    assert _refused(_of_spark(values, times, LEGACY_INT96, is_int96=True)).row == 2


@pytest.mark.parametrize(
    "footer, kind, is_int96, value",
    [
        ({SPARK_VERSION: b"3.0.0"}, DAY, False, LAST_OLD_DAY),
        ({SPARK_VERSION: b"3.0.0"}, AWARE, False, IN_UTC[0]),
        ({SPARK_VERSION: b"3.1.0"}, NAIVE, True, IN_UTC[0]),
        ({SPARK_VERSION: b"10.0.0"}, DAY, False, LAST_OLD_DAY),
        (LEGACY_INT96, DAY, False, LAST_OLD_DAY),
        (LEGACY_INT96, AWARE, False, IN_UTC[0]),
        (LEGACY_DATETIME, NAIVE, True, IN_UTC[0]),
        # Spark has these in the Gregorian calendar always.
        (LEGACY_DATETIME, NAIVE, False, MOMENTS[0]),
        ({b"writer.date.proleptic": b"true"}, DAY, False, LAST_OLD_DAY),
        ({}, DAY, False, LAST_OLD_DAY),
        ({}, NAIVE, True, MOMENTS[0]),
    ],
)
def test_an_old_day_or_time_in_the_gregorian_calendar_goes_in(
    footer: dict[bytes, bytes], kind: pa.DataType, is_int96: bool, value: Any
) -> None:
    file = _of_spark([value, None], kind, footer, is_int96=is_int96)
    assert [row["at"] for row in _rows(file)] == [value, None]


def test_what_arrow_copied_from_a_file_in_the_hybrid_calendar_stays_refused() -> None:
    for values, kind, is_int96, footer in (
        ([None, LAST_OLD_DAY], DAY, False, SPARK_2),
        ([None, LAST_OLD_TIME], NAIVE, True, LEGACY_INT96),
        ([None, LAST_OLD_TIME], AWARE, False, LEGACY_DATETIME),
    ):
        copied = _file(pq.read_table(_of_spark(values, kind, footer, is_int96=is_int96)))
        assert _refused(copied).row == 2
