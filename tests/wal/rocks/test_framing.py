"""RocksDB's own files: the flipped bits that would keep it reading for ever are named before it
reads.
"""

import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wal.log_contract import stamped_pack
from tests.wal.rocks.damaged_directory import database_log
from wal.errors import Corrupt
from wal.rocks.layout import DATABASE_NAME
from wal.rocks.recovery import (
    BLOCK_BYTES,
    RECYCLED_TYPES,
    check_framing,
    first_recycled,
    whole_bytes,
)
from wal.rocks.store import open_rocks_store

FULL = 1
MIDDLE = 3


def record(kind: int, length: int) -> bytes:
    return struct.pack("<IHB", 0, length, kind) + bytes(length)


def blocks(*records: bytes) -> bytes:
    return b"".join(each.ljust(BLOCK_BYTES, b"\0") for each in records)


@pytest.mark.parametrize("kind", sorted(RECYCLED_TYPES))
def test_record_of_a_recycled_file_is_found_wherever_it_is(kind: int) -> None:
    data = record(FULL, 100) + record(FULL, 0) + record(kind, 5)
    assert first_recycled(data) == 107 + 7
    assert first_recycled(blocks(record(FULL, 10), record(kind, 5), record(kind, 6))) == BLOCK_BYTES


@given(st.lists(st.integers(0, 300), max_size=300), st.integers(0, 400))
def test_file_cut_short_anywhere_is_no_recycled_one(lengths: list[int], cut: int) -> None:
    data = b"".join(record(FULL, length) for length in lengths)[:BLOCK_BYTES]
    assert first_recycled(data[: max(0, len(data) - cut)]) is None


@pytest.mark.anyio
@pytest.mark.may_block
@pytest.mark.parametrize("pattern", ["MANIFEST-*", "*.log"])
async def test_store_with_a_record_of_a_recycled_file_is_corrupt_and_not_read_for_ever(
    tmp_path: Path, pattern: str
) -> None:
    store = await open_rocks_store(tmp_path / "node")
    log = await store.open_log("p0")
    await log.append(stamped_pack(b"row")).durable
    # as a crash leaves it: closing empties the log
    copy = shutil.copytree(tmp_path / "node", tmp_path / "copy")
    await store.close()
    database = copy / DATABASE_NAME
    damaged = next(path for path in sorted(database.glob(pattern)) if path.stat().st_size)
    data = bytearray(damaged.read_bytes())
    data[6] ^= 4  # the type of the first record
    damaged.write_bytes(data)
    with pytest.raises(Corrupt, match="byte 0"):
        check_framing(database)
    with pytest.raises(Corrupt, match="byte 0"):
        await open_rocks_store(copy)


@pytest.mark.anyio
async def test_file_of_rocksdb_is_whole_and_is_torn_where_it_is_cut_or_flipped(
    tmp_path: Path,
) -> None:
    store = await open_rocks_store(tmp_path / "node")
    log = await store.open_log("p0")
    for size in (100, 50_000, 100):  # the second is in fragments, over two blocks
        await log.append(stamped_pack(b"x" * size)).durable
    data = database_log(tmp_path / "node").read_bytes().rstrip(b"\0")
    await store.close()
    assert whole_bytes(data) == whole_bytes(data + bytes(BLOCK_BYTES)) == len(data)
    before_last = whole_bytes(data[:-1])
    assert len(data) - 400 < before_last < len(data) - 100
    before_long = whole_bytes(data[: before_last - 1])
    assert before_last - before_long > 50_000, (
        "a record of which a fragment is missing is not whole"
    )
    assert whole_bytes(data[: before_last - 20_000]) == before_long
    flipped = bytearray(data)
    flipped[before_long + 40_000] ^= 1
    assert whole_bytes(bytes(flipped)) == before_long
