"""JSON lines packed with gzip: nothing of a damaged file goes in, wherever the damage is."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pyarrow as pa
import pytest

from streamingnode.cli.rows_in import ROWS_MAX, JsonLines, open_rows
from streamingnode.opening import open_node
from tests.streamingnode.cli.conftest import COLUMNS

if TYPE_CHECKING:
    from tests.streamingnode.cli.conftest import Printed

    Run = Callable[..., Printed]

IDS = range(10, 3 * ROWS_MAX)
LINES = b"".join(b'{"id": %d, "item": "tea"}\n' % number for number in IDS)
PACKED = gzip.compress(LINES, mtime=0)
STORED = gzip.compress(LINES, 0, mtime=0)
"""Its data is as it was, so that a changed bit unpacks as well as before."""
WITHIN_A_LINE = LINES.index(b"tea", len(LINES) // 2)
FIRST = gzip.compress(LINES[:WITHIN_A_LINE], mtime=0)
LAST = gzip.compress(LINES[WITHIN_A_LINE:], mtime=0)
TRAILER_BYTES = 8
"""A checksum and a length, of 4 bytes each."""


def _flipped(packed: bytes, at: int) -> bytes:
    at %= len(packed)
    return packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :]


def _ids(path: Path, collection: str = "orders") -> list[int]:
    async def read() -> list[int]:
        async with open_node(path) as node:
            rows = await node.snapshot(collection)
            return [row["id"] for row in rows.sort_by("id").to_pylist()]

    return anyio.run(read)


IS_CUT = "Compressed file ended before the end-of-stream marker was reached"
DAMAGED = {
    "a bit of a value": (_flipped(STORED, STORED.rindex(b"tea")), "CRC check failed"),
    "a bit of packed data": (_flipped(PACKED, len(PACKED) * 9 // 10), ""),
    "cut in the data": (PACKED[: len(PACKED) * 9 // 10], IS_CUT),
    "cut in the checksum": (PACKED[: 3 - TRAILER_BYTES], IS_CUT),
    "cut in the length": (PACKED[:-1], IS_CUT),
    "the checksum": (_flipped(PACKED, -TRAILER_BYTES), "CRC check failed"),
    "the length": (_flipped(PACKED, -4), "Incorrect length of data produced"),
    "the last member's checksum": (_flipped(FIRST + LAST, -TRAILER_BYTES), "CRC check failed"),
    "the last member's length": (_flipped(FIRST + LAST, -4), "Incorrect length"),
    "the last member's data": (FIRST + LAST[: len(LAST) // 2], IS_CUT),
    "the last member's head": (FIRST + _flipped(LAST, 0), "Not a gzipped file"),
    "cut in the last member's head": (FIRST + LAST[:5], IS_CUT),
    "something behind the end": (PACKED + b"oops", "Not a gzipped file"),
}


def test_nothing_of_a_damaged_gzip_file_goes_in_and_it_says_why(data: Path, run: "Run") -> None:
    packed = data.parent / "more.jsonl.gz"
    for damage, (content, said) in DAMAGED.items():
        packed.write_bytes(content)
        refused = run("insert", data, "orders", packed)
        told = f"STORAGE_FAILED: the gzip file is damaged: {said}"
        assert refused.err.startswith(told), damage
        assert refused.err.endswith("; nothing of it is inserted — compress it again\n"), damage
        assert _ids(data) == [1, 2, 3], damage


def test_no_collection_is_made_for_a_damaged_gzip_file(data: Path, run: "Run") -> None:
    packed = data.parent / "more.jsonl.gz"
    packed.write_bytes(_flipped(PACKED, -TRAILER_BYTES))
    refused = run("insert", data, "others", packed, "--create", "--primary-key", "id")
    assert "the gzip file is damaged" in refused.err
    plain = data.parent / "orders.jsonl"
    assert "COLLECTION_NOT_FOUND" in run("insert", data, "others", plain).err


@pytest.mark.parametrize("content", [STORED, FIRST + LAST, FIRST + bytes(512) + LAST + bytes(512)])
def test_all_members_of_a_gzip_file_are_inserted_and_padding_is_passed_over(
    data: Path, run: "Run", content: bytes
) -> None:
    packed = data.parent / "more.jsonl.gz"
    packed.write_bytes(content)
    assert run("insert", data, "orders", packed, "--json").document["rows"] == len(IDS)
    assert _ids(data) == [1, 2, 3, *IDS]


def test_gzip_on_stdin_is_read_from_where_stdin_is(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(FIRST + LAST)
    with (tmp_path / "packed").open("rb") as stdin:
        stdin.seek(len(FIRST))
        with open_rows("-", stdin) as source:
            assert isinstance(source, JsonLines)
            source.pass_over(2)
            [batch, *_] = source.batches(pa.schema(COLUMNS))
    start = LINES[:WITHIN_A_LINE].count(b"\n")
    assert isinstance(batch.rows, list)
    assert batch.rows[0]["id"] == IDS[start + 2]
