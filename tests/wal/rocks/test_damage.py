import shutil
from pathlib import Path

import anyio.to_thread
import pytest

from tests.wal.log_contract import fill, read_all
from tests.wal.rocks.damaged_directory import (
    ENTRIES,
    ENTRY_PAYLOAD,
    NO_LOW_WATER,
    count_entries,
    database_log,
    flip_bit,
    flipped,
    make_node,
)
from wal.errors import Corrupt, UnsupportedFormat
from wal.rocks.floor import FLOOR_BYTES, FLOOR_NAME, read_floor
from wal.rocks.layout import FORMAT_KEY, encode_number, entry_key
from wal.rocks.opening import create_database
from wal.rocks.store import open_rocks_store

pytestmark = pytest.mark.anyio


@pytest.fixture
async def node(tmp_path: Path) -> Path:
    await make_node(tmp_path / "node")
    return tmp_path / "node"


async def test_an_undamaged_node_opens_with_everything(node: Path) -> None:
    assert await count_entries(node) == ENTRIES


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
async def test_a_flipped_bit_in_the_database_log_is_corrupt_and_names_the_place(
    node: Path, part: float
) -> None:
    log = database_log(node)
    with flipped(log, int(log.stat().st_size * part)):
        for _ in range(2):  # a refused start changes nothing: the second one refuses as well
            with pytest.raises(Corrupt, match=f"{node}/log") as corrupt:
                await open_rocks_store(node, options=NO_LOW_WATER)
            assert "'p0'" in str(corrupt.value) or "state map" in str(corrupt.value)
    assert await count_entries(node) == ENTRIES


async def test_damage_in_a_record_of_several_blocks_names_log_though_rocksdb_refuses_the_database(
    tmp_path: Path,
) -> None:
    node = tmp_path / "node"
    await make_node(
        node, entries=12, records_in_tables=True, payload=ENTRY_PAYLOAD * 125
    )  # 64,000 bytes, two blocks of RocksDB's log
    log = database_log(node)
    for part in (0.3, 0.5, 0.7):
        with flipped(log, int(log.stat().st_size * part)):
            with pytest.raises(Corrupt, match="log 'p0' ends at") as corrupt:
                await open_rocks_store(node, options=NO_LOW_WATER)
            assert "Write batch content corrupted" in str(corrupt.value.__context__)
    assert await count_entries(node) == 12


async def test_rot_in_the_middle_is_told_from_a_torn_tail_without_the_floors_help(
    tmp_path: Path,
) -> None:
    node = tmp_path / "node"
    await make_node(node, floor_after=1)
    log = database_log(node)
    flip_bit(log, log.stat().st_size // 2)
    with pytest.raises(Corrupt, match=f"is damaged after .* reach {ENTRIES}"):
        await open_rocks_store(node, options=NO_LOW_WATER)


@pytest.mark.parametrize("torn_bytes, lost", [(1, 1), (300, 1), (3000, 5)])
async def test_a_torn_tail_past_the_floor_is_discarded(
    tmp_path: Path, torn_bytes: int, lost: int
) -> None:
    node = tmp_path / "node"
    await make_node(node, entries=20, floor_after=5)
    log = database_log(node)
    with log.open("r+b") as opened:
        opened.truncate(log.stat().st_size - torn_bytes)
    for _ in range(2):
        assert await count_entries(node) == 20 - lost


@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut short"])
async def test_a_database_log_that_is_missing_or_short_is_corrupt(node: Path, damage: str) -> None:
    log = database_log(node)
    match damage:
        case "deleted":
            log.unlink()
        case "emptied":
            log.write_bytes(b"")
        case _:
            log.write_bytes(log.read_bytes()[: log.stat().st_size - 700])
    with pytest.raises(Corrupt, match="was acknowledged"):
        await open_rocks_store(node, options=NO_LOW_WATER)


@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut short"])
async def test_entries_that_are_gone_are_missed_by_the_floors_positions_alone(
    tmp_path: Path, damage: str
) -> None:
    """The state map is whole, and nothing lies behind the damage: no other trace is left of
    them.
    """
    node = tmp_path / "node"
    entries = 20
    await make_node(node, entries=entries, records_in_tables=True)
    log = database_log(node)
    match damage:
        case "deleted":
            log.unlink()
        case "emptied":
            log.write_bytes(b"")
        case _:
            log.write_bytes(log.read_bytes()[: log.stat().st_size - 10])
    found = entries - 1 if damage == "cut short" else 0
    with pytest.raises(Corrupt, match=f"log 'p0' ends at {found} and {entries} was acknowledged"):
        await open_rocks_store(node, options=NO_LOW_WATER)


async def test_what_an_opening_found_past_the_floor_has_to_be_there_from_then_on(
    tmp_path: Path,
) -> None:
    """A killed owner acknowledged none of it, but whoever reads after the opening is told of it."""
    node = tmp_path / "node"
    entries = 20
    await make_node(node, entries=entries, floor_after=5)
    assert await count_entries(node) == entries
    floor = await anyio.to_thread.run_sync(read_floor, node)
    assert floor is not None
    assert floor.positions == {1: entries}


async def test_a_lost_change_of_the_state_map_is_corrupt(node: Path) -> None:
    log = database_log(node)
    log.write_bytes(log.read_bytes()[: log.stat().st_size - 10])
    with pytest.raises(Corrupt, match="the state map ends at 1 and 2 was acknowledged"):
        await open_rocks_store(node, options=NO_LOW_WATER)


async def test_a_flipped_bit_in_a_table_makes_reads_corrupt_and_never_short(node: Path) -> None:
    await count_entries(node)  # opening moves the entries from RocksDB's log into a table
    table = max((node / "log").glob("*.sst"), key=lambda file: file.stat().st_size)
    for offset in range(100, 60_000, 6_007):
        with flipped(table, offset), pytest.raises(Corrupt):
            assert await count_entries(node) == ENTRIES
    assert await count_entries(node) == ENTRIES


async def test_damage_in_one_log_leaves_the_others_readable(tmp_path: Path) -> None:
    store = await open_rocks_store(tmp_path / "node", options=NO_LOW_WATER)
    sick = await store.open_log("sick")
    well = await store.open_log("well")
    await fill(sick, 50, payload=bytes(5000))
    await fill(well, 50, payload=bytes(5000))
    engine = store._engine
    engine.entries.delete(next(iter(engine.entries.keys())))
    with pytest.raises(Corrupt, match=r"log 'sick'.*positions 1 to 1"):
        await sick.read(1, bytes_max=1)
    with pytest.raises(Corrupt, match="positions 1 to 1"):
        await read_all(sick)
    assert len(await read_all(well)) == 50
    await store.close()


@pytest.mark.parametrize("position", [1, 25, 50], ids=["first", "middle", "last"])
async def test_an_entry_that_vanished_is_corrupt_wherever_it_was(
    tmp_path: Path, position: int
) -> None:
    store = await open_rocks_store(tmp_path / "node", options=NO_LOW_WATER)
    log = await store.open_log("p0")
    await fill(log, 50)
    store._engine.entries.delete(entry_key(1, position))
    for start in range(max(1, position - 1), min(51, position + 2)):
        with pytest.raises(
            Corrupt, match=rf"positions {position} to|position {position + 1} does not follow"
        ):
            await read_all(log, position=start)
    await store.close()


@pytest.mark.parametrize("is_replaced", [False, True], ids=["vanished", "of another log"])
async def test_a_wrong_entry_behind_what_was_just_read_is_corrupt(
    tmp_path: Path, *, is_replaced: bool
) -> None:
    """Reading on does not look at the entry before again: what is remembered of it says as much."""
    store = await open_rocks_store(tmp_path / "node", options=NO_LOW_WATER)
    log = await store.open_log("p0")
    other = await store.open_log("p1")
    await fill(log, 5)
    await fill(other, 5, payload=b"another")
    entries = store._engine.entries
    assert [entry.last_position for entry in await log.read(1, bytes_max=1)] == [1]
    wrong = entries[entry_key(2, 2)]
    entries.delete(entry_key(1, 2))
    if is_replaced:
        entries[entry_key(1, 2)] = wrong
    with pytest.raises(Corrupt, match=f"position {2 if is_replaced else 3} does not follow"):
        await log.read(2, bytes_max=1)
    await store.close()


async def test_a_database_without_its_floor_is_corrupt(node: Path) -> None:
    (node / FLOOR_NAME).unlink()
    with pytest.raises(Corrupt, match="no floor file"):
        await open_rocks_store(node)


async def test_a_floor_without_its_database_is_corrupt(node: Path) -> None:
    shutil.rmtree(node / "log")
    with pytest.raises(Corrupt, match="no database"):
        await open_rocks_store(node)


async def test_a_database_of_another_node_is_corrupt(node: Path, tmp_path: Path) -> None:
    await make_node(tmp_path / "other")
    shutil.rmtree(node / "log")
    shutil.copytree(tmp_path / "other" / "log", node / "log")
    with pytest.raises(Corrupt, match="belongs to node"):
        await open_rocks_store(node)


async def test_a_newer_format_is_refused(node: Path) -> None:
    store = await open_rocks_store(node)
    store._engine.database.put(FORMAT_KEY, encode_number(2))
    await store.close()
    with pytest.raises(UnsupportedFormat, match="format 2"):
        await open_rocks_store(node)


async def test_a_directory_with_a_log_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "server.txt").write_text("mine")
    with pytest.raises(UnsupportedFormat, match="not a node's"):
        await open_rocks_store(tmp_path)
    assert (tmp_path / "log" / "server.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "step",
    ["lock", "lock of zeros", "empty floor", "torn floor", "temporary floor", "floor", "database"],
)
async def test_a_creation_that_was_cut_short_starts_again(tmp_path: Path, step: str) -> None:
    node = tmp_path
    await anyio.to_thread.run_sync(create_database, node, NO_LOW_WATER, "n")
    (node / "log").rename(node / "log.tmp")
    (node / "log.tmp" / "CURRENT").write_bytes(b"")
    (node / "node.lock").write_text("4711\n")
    if step != "database":
        shutil.rmtree(node / "log.tmp")
    match step:
        case "lock" | "lock of zeros":
            (node / FLOOR_NAME).unlink()
            if step == "lock of zeros":  # its length was synced, its content was not
                (node / "node.lock").write_bytes(bytes(5))
        case "empty floor" | "torn floor" | "temporary floor":
            (node / FLOOR_NAME).rename(node / "floor.tmp")
            length = {"empty floor": 0, "torn floor": 100}.get(step, FLOOR_BYTES)
            (node / "floor.tmp").write_bytes((node / "floor.tmp").read_bytes()[:length])
        case _:
            assert step in {"floor", "database"}
    assert await count_entries(node) == 0
    assert not list(node.glob("*.tmp"))
