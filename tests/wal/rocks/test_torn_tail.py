"""What a power cut leaves of a log that is synced in the background: pages of the unsynced end in
any order.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from rocksdict import DBRecoveryMode, Rdict

from tests.wal.log_contract import read_all, stamped_pack
from tests.wal.rocks.damaged_directory import ENTRY_PAYLOAD, count_entries, database_log, flip_bit
from wal.errors import Corrupt, StorageFailed
from wal.log import Log
from wal.rocks.layout import (
    DURABILITY_KEY,
    ENTRY_FAMILY,
    RocksOptions,
    database_options,
    entry_key,
    families,
)
from wal.rocks.log import RocksLog
from wal.rocks.recovery import BLOCK_BYTES
from wal.rocks.store import RocksStore, open_rocks_store

pytestmark = pytest.mark.anyio

SYNCED = 100
UNSYNCED = 200
"""Each more than one block of RocksDB's log (32 KiB), which gives up the rest of a damaged
block.
"""
BEFORE_THE_HOLE = 3
BEHIND_THE_HOLE = 5
NEVER_BY_ITSELF = RocksOptions(durability="os", sync_interval_ms=3_600_000, free_bytes_min=0)
SMALL_FILES = replace(NEVER_BY_ITSELF, memtable_bytes=1 << 16)


@contextmanager
def open_read_write(node: Path) -> Iterator[Rdict]:
    """Open the database of a closed node."""
    options = database_options(SMALL_FILES, recovery=DBRecoveryMode.point_in_time())
    database = Rdict(str(node / "log"), options, column_families=families(SMALL_FILES))
    try:
        yield database
    finally:
        database.close()


async def write(log: Log, entries: int) -> None:
    """Append entries one by one, each acknowledged and none synced."""
    for _ in range(entries):
        await log.append(stamped_pack(ENTRY_PAYLOAD)).written


async def open_synced(path: Path, options: RocksOptions) -> tuple[RocksStore, RocksLog]:
    """Return a new store and its log, with some entries that are synced."""
    store = await open_rocks_store(path, options=options)
    log = await store.open_log("p0")
    await write(log, SYNCED)
    await store.state.put({"k": b"v"})  # syncs what came before
    return store, log


@pytest.fixture
async def node(tmp_path: Path) -> Path:
    """Return a copy of a running node with some entries synced and more not; as after a kill, all
    are still there.
    """
    alive = tmp_path / "alive"
    copy = tmp_path / "node"
    store, log = await open_synced(alive, NEVER_BY_ITSELF)
    await write(log, UNSYNCED)
    shutil.copytree(alive, copy)
    await store.close()
    return copy


@pytest.fixture
async def torn(tmp_path: Path) -> Path:
    """Return a directory of which a power cut took a page in the middle of an entry, and not the
    next entry.
    """
    alive = tmp_path / "alive"
    copy = tmp_path / "torn"
    store, log = await open_synced(alive, NEVER_BY_ITSELF)
    synced_bytes = database_log(alive).stat().st_size
    for _ in range(2):
        await log.append(stamped_pack(b"x" * (5 * BLOCK_BYTES))).written
    shutil.copytree(alive, copy)
    await store.close()
    with database_log(copy).open("r+b") as file:
        file.seek(synced_bytes + 2 * BLOCK_BYTES)
        file.write(bytes(4096))
    return copy


async def test_entry_of_several_blocks_that_lost_a_page_is_dropped_with_what_is_behind_it(
    torn: Path,
) -> None:
    assert await count_entries(torn) == SYNCED


@pytest.fixture
async def holed(tmp_path: Path) -> Path:
    """Return a directory as a power cut leaves it that took the end of one log file and kept the
    beginning of the next.
    """
    alive = tmp_path / "alive"
    copy = tmp_path / "holed"
    store, log = await open_synced(alive, SMALL_FILES)
    first = database_log(alive)
    await write(log, BEFORE_THE_HOLE)
    shutil.copytree(alive, copy)
    while database_log(alive) == first:
        await write(log, 1)
    await write(log, BEHIND_THE_HOLE)
    shutil.copy(database_log(alive), copy / "log")
    await store.close()
    return copy


async def test_a_hole_between_two_log_files_drops_what_is_behind_it(
    holed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await count_entries(holed) == SYNCED + BEFORE_THE_HOLE
    assert "torn_tail_dropped" in caplog.text
    store = await open_rocks_store(holed, options=SMALL_FILES)
    await write(await store.open_log("p0"), 1)
    await store.close()
    assert await count_entries(holed) == SYNCED + BEFORE_THE_HOLE + 1


async def test_a_hole_between_two_log_files_is_found_again_after_a_crash_that_left_it(
    holed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise OSError("no power")

    monkeypatch.setattr("wal.rocks.recovery.WriteBatch", crash)
    with pytest.raises(StorageFailed):
        await count_entries(holed)
    monkeypatch.undo()
    assert await count_entries(holed) == SYNCED + BEFORE_THE_HOLE


async def test_a_hole_between_two_log_files_of_a_log_synced_each_time_is_corrupt(
    holed: Path,
) -> None:
    with open_read_write(holed) as database:
        database.delete(DURABILITY_KEY)
    with pytest.raises(Corrupt):
        await count_entries(holed)


async def test_a_hole_in_the_unsynced_end_drops_what_is_behind_it(
    node: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = database_log(node)
    flip_bit(log, log.stat().st_size // 2)
    kept = await count_entries(node)
    assert SYNCED <= kept < SYNCED + UNSYNCED - 1
    assert "torn_tail_dropped" in caplog.text
    assert await count_entries(node) == kept


async def test_a_hole_in_the_synced_part_is_corrupt_although_more_is_behind_it(node: Path) -> None:
    log = database_log(node)
    flip_bit(log, log.stat().st_size // 100)
    for _ in range(2):
        with pytest.raises(Corrupt, match="was acknowledged"):
            await count_entries(node)


async def test_damage_in_the_last_synced_entry_gives_up_nothing_behind_it(node: Path) -> None:
    with open_read_write(node) as database:
        entries = database.get_column_family(ENTRY_FAMILY)
        entries.put(entry_key(1, SYNCED), b"damaged")
        entries.close()
    store = await open_rocks_store(node, options=NEVER_BY_ITSELF)
    log = await store.open_log("p0")
    assert log.durable_position == SYNCED + UNSYNCED
    with pytest.raises(Corrupt):
        await read_all(log)
    await store.close()


async def test_log_goes_on_after_a_dropped_end_without_a_gap(node: Path) -> None:
    log = database_log(node)
    flip_bit(log, log.stat().st_size // 2)
    kept = await count_entries(node)
    store = await open_rocks_store(node, options=NEVER_BY_ITSELF)
    await write(await store.open_log("p0"), 1)
    await store.close()
    assert await count_entries(node) == kept + 1
    store = await open_rocks_store(node, options=NEVER_BY_ITSELF)
    entries = await read_all(await store.open_log("p0"))
    assert [entry.first_position for entry in entries] == list(range(1, kept + 2))
    await store.close()
