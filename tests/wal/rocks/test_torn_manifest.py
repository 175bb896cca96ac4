"""A manifest whose last record a power cut tore is one without it; whatever else is wrong with a
manifest is damage.
"""

import shutil
import struct
from pathlib import Path

import pytest

from tests.wal.log_contract import fill, read_all
from tests.wal.rocks.damaged_directory import ENTRIES, NO_LOW_WATER, count_entries, make_node
from wal.codec import crc32c
from wal.errors import Corrupt
from wal.rocks.layout import DATABASE_NAME
from wal.rocks.recovery import BLOCK_BYTES, manifest_of, torn_end, torn_manifest, whole_bytes
from wal.rocks.store import open_rocks_store

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

FULL = 1
FIRST = 2
A_LOST_PAGE = (
    struct.pack("<IHB", 0x12345678, 300, FULL) + bytes(293) + b"\x01\x02\x03\x04\x05\x06\x07"
)
"""A record in its full length, in which only the first and the last bytes came to the disk."""


@pytest.fixture
async def node(tmp_path: Path) -> Path:
    await make_node(tmp_path / "node")
    return tmp_path / "node"


def files_of(path: Path) -> dict[str, bytes]:
    return {
        each.name: each.read_bytes() for each in path.iterdir() if not each.name.startswith("LOG")
    }


def left_overs(path: Path) -> list[Path]:
    return list(path.glob("*.tmp"))


async def test_record_of_which_a_page_is_lost_is_dropped_and_nothing_else(node: Path) -> None:
    manifest = manifest_of(node / DATABASE_NAME)
    with manifest.open("ab") as file:
        file.write(A_LOST_PAGE)
    assert torn_manifest(node / DATABASE_NAME)
    for _ in range(2):
        assert await count_entries(node) == ENTRIES
    assert not torn_manifest(node / DATABASE_NAME)
    assert not left_overs(node)


async def test_record_in_fragments_of_which_the_first_is_lost_is_dropped(node: Path) -> None:
    manifest = manifest_of(node / DATABASE_NAME)
    size = manifest.stat().st_size
    with manifest.open("ab") as file:
        file.write(bytes(64 << 10))  # two lost blocks
        file.write(A_LOST_PAGE)
    assert torn_end(manifest) == size
    assert await count_entries(node) == ENTRIES


async def test_look_at_a_torn_manifest_that_was_killed_is_taken_up_again(node: Path) -> None:
    with manifest_of(node / DATABASE_NAME).open("ab") as file:
        file.write(A_LOST_PAGE)
    left = node / f"{DATABASE_NAME}.look.tmp"
    left.mkdir()
    (left / "CURRENT").write_text("MANIFEST-000001\n", "utf-8")
    assert await count_entries(node) == ENTRIES
    assert not left.exists()


async def test_last_record_that_was_gone_by_is_damage_and_nothing_is_touched(
    tmp_path: Path,
) -> None:
    store = await open_rocks_store(tmp_path / "alive", options=NO_LOW_WATER)
    await fill(await store.open_log("p0"), ENTRIES)
    await store.state.put({"k": b"v"})
    engine = store._engine
    await engine.read(engine.entries.flush)
    await engine.read(engine.database.flush)  # everything is in tables now, and the log is removed
    copy = shutil.copytree(tmp_path / "alive", tmp_path / "node")
    await store.close()
    database = copy / DATABASE_NAME
    manifest = manifest_of(database)
    data = manifest.read_bytes()
    # one more record says which log is needed no more
    flushed = bytearray(data[: whole_bytes(data[:-1])])
    flushed[-3] ^= 1
    manifest.write_bytes(flushed)
    assert torn_manifest(database), "so it looks: only the floor knows more"
    before = files_of(database)
    with pytest.raises(Corrupt, match=manifest.name):
        await open_rocks_store(copy, options=NO_LOW_WATER)
    assert files_of(database) == before
    assert not left_overs(copy)


async def test_damage_with_a_whole_record_behind_it_is_no_torn_end(node: Path) -> None:
    manifest = manifest_of(node / DATABASE_NAME)
    data = bytearray(manifest.read_bytes())
    assert whole_bytes(bytes(data)) == len(data)
    data[10] ^= 1  # in the first record of several
    manifest.write_bytes(data)
    assert not torn_manifest(node / DATABASE_NAME)
    with pytest.raises(Corrupt, match=manifest.name):
        await open_rocks_store(node, options=NO_LOW_WATER)


def sound(kind: int, content: bytes) -> bytes:
    """Return a fragment with its checksum, as RocksDB stores that."""
    plain = crc32c(bytes([kind]) + content)
    checksum = ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return struct.pack("<IHB", checksum, len(content), kind) + content


def test_record_that_begins_with_a_block_and_does_not_end_is_a_torn_end(tmp_path: Path) -> None:
    # five bytes are left of its block, too few for a fragment
    filled = sound(FULL, bytes(BLOCK_BYTES - 12))
    first = sound(FIRST, bytes(BLOCK_BYTES - 7))
    file = tmp_path / "MANIFEST-000001"
    file.write_bytes(filled + bytes(5) + first + b"\x01")
    assert torn_end(file) == len(filled)
    file.write_bytes(filled + bytes(5) + first)
    assert torn_end(file) == len(filled)
    file.write_bytes(filled + bytes(5) + bytes(BLOCK_BYTES) + first)
    assert torn_end(file) is None, "a record begins behind what is damaged"


async def test_sound_manifest_has_no_torn_end(node: Path) -> None:
    database = node / DATABASE_NAME
    assert not torn_manifest(database)
    with manifest_of(database).open("ab") as file:
        file.write(bytes(5_000))  # room that was made ahead
    assert not torn_manifest(database)
    store = await open_rocks_store(node, options=NO_LOW_WATER)
    assert len(await read_all(await store.open_log("p0"))) == ENTRIES
    await store.close()


@pytest.mark.parametrize(
    "current", [b"MANIFEST-\x8a\n", b"MANIFEST-\0\n", b"MANIFEST-999999\n", b"", None]
)
async def test_current_that_names_no_manifest_is_damage(node: Path, current: bytes | None) -> None:
    file = node / DATABASE_NAME / "CURRENT"
    if current is None:
        file.unlink()
    else:
        file.write_bytes(current)
    assert not torn_manifest(node / DATABASE_NAME)
    with pytest.raises(Corrupt):
        await open_rocks_store(node, options=NO_LOW_WATER)
