"""A finished file: its bytes are what its description says, and it is what its columns call for."""

import os
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flusher.data_file import ParquetFile, decode_rows, encodings
from flusher.directory import NodeDirectory
from flusher.manifest import OFFSET, TICK, VCHANNEL, SegmentFile
from tests.flusher.faulty_disk import FaultyDirectory, Fuse
from tests.flusher.stamped_log import message_rows
from wal.codec import crc32c

KEYS: dict[str, tuple[pa.DataType, list[object]]] = {
    "integers": (pa.int64(), [5, -3, 2**62]),
    "text": (pa.string(), ["b", "a", "ü"]),
    "long text": (pa.large_string(), ["b", "a", "ü"]),
    "bytes": (pa.binary(), [b"b", b"a", b"c"]),
    "floats": (pa.float64(), [1.0, 0.5, 2.0]),
    "days beyond Python's": (pa.date32(), [0, 10_000_000, -1_000_000]),
    "times beyond Python's": (pa.timestamp("us"), [0, 1 << 61, -(1 << 61)]),
}
BOUNDS: dict[str, tuple[int, int] | tuple[str, str]] = {
    "integers": (-3, 2**62),
    "text": ("a", "ü"),
    "long text": ("a", "ü"),
}


def write(
    root: Path, kind: pa.DataType, keys: list[object]
) -> tuple[ParquetFile, dict[str, object]]:
    schema = pa.schema([pa.field("id", kind)], metadata={"mine": "kept"})
    file = ParquetFile(
        NodeDirectory(root),
        "segments/1/2.parquet",
        schema,
        key="id",
        metadata={"streamingnode.x": "y"},
    )
    for number in range(2):
        payload = pa.record_batch([pa.array(keys, kind)], schema=schema).serialize().to_pybytes()
        rows = [message_rows(payload, len(keys), 7 + number, 100 + number * len(keys))]
        file.write(decode_rows(rows, schema, vchannel="p0_1v0", kind=SegmentFile))
    return file, file.finish()


@pytest.mark.parametrize("case", KEYS)
def test_the_description_is_of_the_bytes_on_disk(tmp_path: Path, case: str) -> None:
    file, written = write(tmp_path, *KEYS[case])
    content = (tmp_path / file.temporary_path).read_bytes()
    low, high = BOUNDS.get(case, (None, None))
    assert written == {
        "bytes": len(content),
        "crc32c": crc32c(content),
        "rows": 6,
        "tick_min": 7,
        "tick_max": 8,
        "offset_min": 100,
        "offset_max": 105,
        "key_min": low,
        "key_max": high,
    }


def test_arrow_reads_back_the_declared_types_and_the_footer_says_where_it_belongs(
    tmp_path: Path,
) -> None:
    file, _ = write(tmp_path, pa.large_string(), ["a", "b"])
    schema = pq.read_schema(tmp_path / file.temporary_path)
    assert [(field.name, field.type) for field in schema] == [
        ("id", pa.large_string()),
        ("_tick", pa.int64()),
        ("_offset", pa.int64()),
        ("_vchannel", pa.string()),
    ]
    footer = pq.read_metadata(tmp_path / file.temporary_path).metadata
    assert footer is not None
    assert footer[b"streamingnode.format"] == b"1"
    assert footer[b"streamingnode.x"] == b"y"


def test_every_bit_flipped_in_a_page_is_found_by_the_page_checksums(tmp_path: Path) -> None:
    file, _ = write(tmp_path, pa.int64(), list(range(64)))
    path = tmp_path / file.temporary_path
    content = path.read_bytes()
    good = pq.read_table(path)
    chunk = pq.read_metadata(path).row_group(0).column(0)
    start = chunk.data_page_offset
    end = chunk.data_page_offset + chunk.total_compressed_size
    silent = 0
    for position in range(start, end):
        flipped = bytearray(content)
        flipped[position] ^= 4
        try:
            table = pq.read_table(pa.BufferReader(bytes(flipped)), page_checksum_verification=True)
        except (OSError, pa.ArrowException):
            continue
        silent += not table.equals(good)
    assert silent == 0


def test_between_row_groups_a_file_is_synced_and_has_no_descriptor(tmp_path: Path) -> None:
    directory = FaultyDirectory(tmp_path, Fuse())
    schema = pa.schema([pa.field("id", pa.int64())])
    file = ParquetFile(directory, "segments/1/2.parquet", schema, key="id", metadata={})
    for tick in (7, 8, 9):
        payload = pa.record_batch([pa.array([tick])], schema=schema).serialize().to_pybytes()
        file.write(
            decode_rows(
                [message_rows(payload, 1, tick, tick)], schema, vchannel="p0_1v0", kind=SegmentFile
            )
        )
        assert directory.unsynced == set(), (
            "an error of the kernel's own writing could go unnoticed"
        )
        assert [path for path in open_files() if path.is_relative_to(tmp_path)] == []
    assert file.finish()["rows"] == 3
    assert directory.unsynced == set()
    assert pq.read_table(tmp_path / file.temporary_path)["id"].to_pylist() == [7, 8, 9]


def test_a_file_that_vanished_between_row_groups_is_not_begun_anew(tmp_path: Path) -> None:
    directory = NodeDirectory(tmp_path)
    directory.create("segments/1/2.parquet.tmp").close()
    directory.remove("segments/1/2.parquet.tmp")
    with pytest.raises(FileNotFoundError):
        directory.append("segments/1/2.parquet.tmp")


def open_files() -> list[Path]:
    """Return what the descriptors of this process stand for; Linux only."""
    return [Path(os.path.realpath(entry)) for entry in Path("/proc/self/fd").iterdir()]


def test_a_discarded_file_leaves_nothing_and_may_be_discarded_twice(tmp_path: Path) -> None:
    file, _ = write(tmp_path, pa.int64(), [1])
    file.discard()
    file.discard()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_only_text_that_repeats_itself_gets_a_dictionary() -> None:
    table = pa.table(
        {
            "number": [1] * 1000,
            "unique": [f"text {number}" for number in range(1000)],
            "repeated": [f"text {number % 10}" for number in range(1000)],
            "raw": pa.array([b"x"] * 1000),
        }
    )
    assert encodings(table)[0] == [VCHANNEL, "repeated", "raw"]


def test_whole_numbers_and_times_that_ascend_are_stored_as_differences() -> None:
    up = list(range(100))
    zigzag = [number % 2 for number in range(100)]
    table = pa.table(
        {
            "ids": up,
            "small": pa.array(up, pa.uint8()),
            "dates": pa.array(up, pa.date32()),
            "times": pa.array([None, *up[1:]], pa.timestamp("us", "UTC")),
            "zigzag": zigzag,
            "floats": pa.array(up, pa.float64()),
            "text": [f"{number:03}" for number in up],
            "nulls": pa.nulls(100, pa.int64()),
            "single": pa.array([1, *[None] * 99]),
        }
    )
    assert encodings(table)[1] == [TICK, OFFSET, "ids", "small", "dates", "times"]


def test_a_column_is_not_taken_for_the_field_of_a_struct_whose_path_is_its_name(
    tmp_path: Path,
) -> None:
    structs = [{"b": "x", "c": 100}, {"b": "y", "c": 200}]
    table = pa.record_batch({"a": structs, "a.b": [1, 2], "a.c": [1, 2], "e": [1, 2]})
    file = ParquetFile(
        NodeDirectory(tmp_path), "segments/1/2.parquet", table.schema, key="a.c", metadata={}
    )
    rows = [message_rows(table.serialize().to_pybytes(), 2, 7, 100)]
    file.write(decode_rows(rows, table.schema, vchannel="p0_1v0", kind=SegmentFile))
    written = file.finish()
    assert (written["key_min"], written["key_max"]) == (1, 2)
    found = pq.ParquetFile(tmp_path / file.temporary_path).read(["a", "e"])
    assert found["a"].to_pylist() == structs
    assert found["e"].to_pylist() == [1, 2]


@pytest.mark.parametrize(
    "keys",
    [[1, 2, 3, 2**63 - 1], [-(2**63), 0, 5, 2**63 - 1], [*range(8192), -(2**63), 0, 2**63 - 1]],
)
def test_differences_give_back_every_number(tmp_path: Path, keys: list[object]) -> None:
    file, _ = write(tmp_path, pa.int64(), keys)
    path = tmp_path / file.temporary_path
    assert "DELTA_BINARY_PACKED" in pq.read_metadata(path).row_group(0).column(0).encodings
    assert pq.read_table(path)["id"].to_pylist() == keys * 2
    with duckdb.connect() as connection:
        found = connection.execute("select id from read_parquet(?)", [str(path)]).fetchall()
    assert [key for (key,) in found] == keys * 2


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_readers_that_order_not_a_number_above_all_find_it(
    tmp_path: Path, kind: pa.DataType
) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("amount", kind)])
    file = ParquetFile(
        NodeDirectory(tmp_path), "segments/1/2.parquet", schema, key="id", metadata={}
    )
    batch = pa.record_batch([pa.array([1, 2]), pa.array([float("nan"), 1.0], kind)], schema=schema)
    rows = [message_rows(batch.serialize().to_pybytes(), 2, 7, 100)]
    file.write(decode_rows(rows, schema, vchannel="p0_1v0", kind=SegmentFile))
    file.finish()
    read = duckdb.read_parquet(str(tmp_path / file.temporary_path))
    assert read.filter("amount > 5").project("id").fetchall() == [(1,)]
