"""Parquet as rows: bounded in memory however much is in the file, and typed errors for what is
damaged.
"""

import gzip
import io
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamingnode.cli import rows_in
from streamingnode.cli.rows_in import BYTES_MAX, ROWS_MAX, ParquetRows, RowBatch, open_rows
from wal.errors import InvalidArgument, StorageFailed, StreamingNodeError


def _file(table: pa.Table, **options: object) -> io.BytesIO:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, store_schema=False, **options)  # type: ignore[arg-type]
    buffer.seek(0)
    return buffer


def _dicts(batch: RowBatch) -> list[dict[str, Any]]:
    return batch.rows.to_pylist() if isinstance(batch.rows, pa.RecordBatch) else batch.rows


def _written_out(batch: RowBatch) -> int:
    """Return the bytes of a batch whose texts all rows have for themselves."""
    assert isinstance(batch.rows, pa.RecordBatch)
    columns = [
        c.dictionary_decode() if isinstance(c, pa.DictionaryArray) else c
        for c in batch.rows.columns
    ]
    return sum(column.nbytes for column in columns)


def test_value_that_many_rows_share_is_written_out_for_few_at_a_time() -> None:
    file = _file(
        pa.table(
            {"id": range(1_000), "v": pa.DictionaryArray.from_arrays([0] * 1_000, ["x" * 100_000])}
        )
    )
    assert len(file.getvalue()) < 2 << 20
    source = ParquetRows(file)
    before = pa.total_allocated_bytes()
    rows = 0
    most = 0
    for batch in source.batches(source.infer_schema()):
        most = max(most, pa.total_allocated_bytes() - before)
        assert _written_out(batch) <= BYTES_MAX + (1 << 16)
        rows += len(batch.numbers)
    assert rows == 1_000
    assert most < 32 << 20, f"{most >> 20} MiB for 95 MiB of rows"


def test_large_rows_are_read_few_at_a_time() -> None:
    values = [os.urandom(100_000) for _ in range(1_000)]
    file = _file(pa.table({"id": range(1_000), "v": values}), row_group_size=100)
    del values
    source = ParquetRows(file)
    before = pa.total_allocated_bytes()
    rows = 0
    most = 0
    for batch in source.batches(source.infer_schema()):
        assert isinstance(batch.rows, pa.RecordBatch)
        most = max(most, pa.total_allocated_bytes() - before)
        assert _written_out(batch) <= BYTES_MAX + (1 << 16)
        assert batch.numbers[0] == rows + 1
        rows += batch.rows.num_rows
    assert rows == 1_000
    assert most < 64 << 20, f"{most >> 20} MiB for 95 MiB of rows"


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
    assert isinstance(batch.rows, pa.RecordBatch)
    assert batch.rows.to_pylist() == table.to_pylist()


def test_rows_passed_over_do_not_come_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_in, "ROWS_MAX", 4)
    file = _file(pa.table({"id": range(11)}))
    digests = set()
    for last in range(12):
        file.seek(0)
        source = ParquetRows(file)
        digests.add(source.pass_over(last))
        batches = list(source.batches(source.infer_schema()))
        assert [row["id"] for batch in batches for row in _dicts(batch)] == list(range(last, 11))
        assert [number for batch in batches for number in batch.numbers] == list(
            range(last + 1, 12)
        )
        digests |= {batch.digest for batch in batches}
    assert len(digests) == 1
    file.seek(0)
    assert ParquetRows(file).pass_over(12) is None


def test_damaged_parquet_is_a_typed_error_or_reads_on() -> None:
    table = pa.table(
        {
            "id": range(500),
            "text": [f"t{i % 7}" for i in range(500)],
            "list": [["a"] * (i % 3) for i in range(500)],
        }
    )
    sound = _file(table).getvalue()
    draw = random.Random(14)  # which bytes are damaged is no secret
    for _ in range(150):
        at = draw.randrange(4, len(sound))
        damaged = (
            sound[:at]
            if draw.random() < 0.2
            else sound[:at] + bytes([draw.randrange(256)]) + sound[at + 1 :]
        )
        errors: list[StreamingNodeError] = []
        rows: list[int] = []
        try:
            source = ParquetRows(io.BytesIO(damaged))
            rows = [len(batch.numbers) for batch in source.batches(source.infer_schema())]
        except StreamingNodeError as error:
            errors.append(error)
        assert all(error.exit_code in {1, 2} and "\n" not in str(error) for error in errors)
        assert errors or sum(rows) <= ROWS_MAX


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", None])
def test_every_bit_that_rots_in_a_page_with_a_checksum_is_refused(
    version: str, encoding: str | None
) -> None:
    table = pa.table({"id": range(500), "text": [f"text {i % 70:09}" for i in range(500)]})
    options: dict[str, object] = {"use_dictionary": encoding is None, "data_page_version": version}
    if encoding is not None:
        options["column_encoding"] = {"id": "PLAIN", "text": encoding}
    sound = _file(table, write_page_checksum=True, compression="none", **options).getvalue()
    footer = len(sound) - 8 - int.from_bytes(sound[-8:-4], "little")
    draw = random.Random(6)
    for _ in range(100):
        damaged = bytearray(sound)
        damaged[draw.randrange(4, footer)] ^= 1 << draw.randrange(8)
        try:
            source = ParquetRows(io.BytesIO(damaged))
            rows = [row for batch in source.batches(source.infer_schema()) for row in _dicts(batch)]
        except StorageFailed:
            continue
        assert rows == table.to_pylist(), "a bit of a page's header that nothing depends on"


@pytest.mark.parametrize(
    "head, said",
    [
        (b"\x28\xb5\x2f\xfd..", "packed with zstd — unpack it first, with zstd -d"),
        (b"\xfd7zXZ\0", "packed with xz"),
        (b"BZh91AY", "packed with bzip2"),
        (b"PK\x03\x04", "a ZIP archive — unpack it first"),
        (b"ARROW1\0\0", "an Arrow file — write it as Parquet"),
        (b"\xff\xff\xff\xff\0", "an Arrow stream — write it as Parquet"),
        ('{"id": 1}'.encode("utf-16"), "text in UTF-16 — write it in UTF-8"),
    ],
    ids=str,
)
def test_an_input_of_another_format_is_called_what_it_is(
    tmp_path: Path, head: bytes, said: str
) -> None:
    (tmp_path / "input").write_bytes(head)
    with pytest.raises(InvalidArgument, match=said), open_rows(str(tmp_path / "input"), None):
        pass


def test_lines_packed_with_gzip_are_read(tmp_path: Path) -> None:
    lines = "".join(f'{{"id": {number}}}\n' for number in range(ROWS_MAX + 3)).encode()
    (tmp_path / "packed").write_bytes(gzip.compress(lines[:50_000]) + gzip.compress(lines[50_000:]))
    (tmp_path / "plain").write_bytes(lines)
    schema = pa.schema({"id": pa.int64()})
    with (
        open_rows(str(tmp_path / "packed"), None) as packed,
        open_rows(str(tmp_path / "plain"), None) as plain,
    ):
        assert list(packed.batches(schema)) == list(plain.batches(schema))


def test_gzip_around_parquet_and_gzip_in_pipe_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(gzip.compress(_file(pa.table({"id": [1]})).getvalue()))
    with (
        pytest.raises(InvalidArgument, match="unpack it first"),
        open_rows(str(tmp_path / "packed"), None),
    ):
        pass
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as pipe, os.fdopen(write_end, "wb") as writer:
        writer.write(gzip.compress(b'{"id": 1}\n'))
        writer.close()
        with pytest.raises(InvalidArgument, match="gunzip -c"), open_rows("-", pipe):
            pass


def test_format_is_told_from_the_first_byte(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b'{"id": 7}\n')
    (tmp_path / "parquet").write_bytes(_file(pa.table({"id": [1, 2]})).getvalue())
    for name, expected in (("lines", [7]), ("parquet", [1, 2])):
        with (tmp_path / name).open("rb") as stdin, open_rows("-", stdin) as source:
            batches = list(source.batches(pa.schema({"id": pa.int64()})))
        assert [row["id"] for batch in batches for row in _dicts(batch)] == expected
