"""Parquet as rows: bounded in memory however much is in the file, and typed errors for what is damaged."""

import io
import os
import random
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamingnode.cli import rows_in
from streamingnode.cli.rows_in import BYTES_MAX, ROW_BYTES_MAX, ROWS_MAX, ParquetRows, open_rows
from streamingnode.schema import AnyArray
from wal.errors import StreamingNodeError, TooLarge

ROWS = 2_000


def _file(table: pa.Table, **options: object) -> io.BytesIO:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, store_schema=False, **options)  # type: ignore[arg-type]
    return buffer


def _repeated(value: str, count: int) -> AnyArray:
    return pa.DictionaryArray.from_arrays(np.zeros(count, "i4"), pa.array([value]))


def _one_text(size: int) -> AnyArray:
    return _repeated("x" * size, ROWS)


def _text_in_lists(size: int) -> AnyArray:
    offsets = pa.array(range(0, ROWS * 10 + 1, 10), pa.int32())
    return pa.ListArray.from_arrays(offsets, _repeated("x" * (size // 10), ROWS * 10))


@pytest.mark.parametrize("make", [_one_text, _text_in_lists])
def test_value_that_many_rows_share_is_written_out_for_few_at_a_time(make: Callable[[int], AnyArray]) -> None:
    file = _file(pa.table({"id": range(ROWS), "v": make(100_000)}))
    assert len(file.getvalue()) < 2 << 20
    source = ParquetRows(file)
    before, rows, most = pa.total_allocated_bytes(), 0, 0
    for batch in source.batches(source.infer_schema()):
        most = max(most, pa.total_allocated_bytes() - before)
        assert batch.rows.nbytes <= BYTES_MAX + (1 << 16)
        assert batch.numbers[0] == rows + 1
        rows += batch.rows.num_rows
    assert rows == ROWS
    assert most < 32 << 20, f"{most >> 20} MiB for 190 MiB of rows"


def test_lists_that_expand_a_thousandfold_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_in, "EXPANDED_BYTES_MAX", 1 << 20)
    offsets = pa.array([0, *[1_000_000] * ROWS], pa.int32())
    file = _file(pa.table({"id": range(ROWS), "v": pa.ListArray.from_arrays(offsets, pa.array(np.zeros(1_000_000)))}))
    source = ParquetRows(file)
    with pytest.raises(TooLarge, match=r"column 'v.list.element' takes 7 MiB in memory for \d+ bytes in"):
        list(source.batches(source.infer_schema()))


def test_row_over_the_limit_is_refused_by_its_number() -> None:
    texts = ["a"] * 5 + ["x" * (ROW_BYTES_MAX + 1)] + ["b"]
    source = ParquetRows(_file(pa.table({"v": texts})))
    with pytest.raises(TooLarge, match=r"^row 6 is over 4 MiB"):
        list(source.batches(source.infer_schema()))


def test_rows_of_every_type_come_out_as_they_are() -> None:
    table = pa.table(
        {
            "text": ["a", None, "c"],
            "bytes": pa.array([b"", None, b"\xff"], pa.large_binary()),
            "list": pa.array([["a", "b"], None, []]),
            "fixed": pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2)),
            "struct": pa.array([{"x": "a", "y": [b"b"]}, None, {"x": None, "y": None}]),
            "decimal": pa.array([1, None, 2], pa.int64()).cast(pa.decimal128(21, 2)),
        }
    )
    source = ParquetRows(_file(table))
    (batch,) = source.batches(source.infer_schema())
    assert batch.rows.to_pylist() == table.to_pylist()


def test_rows_passed_over_do_not_come_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_in, "ROWS_MAX", 4)
    file = _file(pa.table({"id": range(11)}))
    digests = set()
    for last in range(12):
        source = ParquetRows(file)
        digests.add(source.pass_over(last))
        batches = list(source.batches(source.infer_schema()))
        assert [row["id"] for batch in batches for row in batch.rows.to_pylist()] == list(range(last, 11))
        assert [number for batch in batches for number in batch.numbers] == list(range(last + 1, 12))
        digests |= {batch.digest for batch in batches}
    assert len(digests) == 1
    assert ParquetRows(file).pass_over(12) is None


def test_damaged_parquet_is_a_typed_error_or_reads_on() -> None:
    table = pa.table(
        {"id": range(500), "text": [f"t{i % 7}" for i in range(500)], "list": [["a"] * (i % 3) for i in range(500)]}
    )
    sound = _file(table).getvalue()
    draw = random.Random(14)  # which bytes are damaged is no secret
    for _ in range(150):
        at = draw.randrange(4, len(sound))
        damaged = sound[:at] if draw.random() < 0.2 else sound[:at] + bytes([draw.randrange(256)]) + sound[at + 1 :]
        source = ParquetRows(io.BytesIO(damaged))
        errors: list[StreamingNodeError] = []
        rows: list[int] = []
        try:
            rows = [batch.rows.num_rows for batch in source.batches(source.infer_schema())]
        except StreamingNodeError as error:
            errors.append(error)
        assert all(error.exit_code in {1, 2} and "\n" not in str(error) for error in errors)
        assert errors or sum(rows) <= ROWS_MAX


def test_format_is_told_from_a_pipe_that_gives_one_byte_at_a_time() -> None:
    content = _file(pa.table({"id": [1, 2]})).getvalue()
    for start, expected in ((b"", [1, 2]), (b'{"id": 7}\n', [7])):
        read_end, write_end = os.pipe()
        with os.fdopen(read_end, "rb") as pipe, os.fdopen(write_end, "wb", buffering=0) as writer:
            for byte in start or content:
                writer.write(bytes([byte]))
            writer.close()
            with open_rows("-", pipe) as source:
                batches = list(source.batches(pa.schema({"id": pa.int64()})))
        assert [row["id"] for batch in batches for row in batch.rows.to_pylist()] == expected
