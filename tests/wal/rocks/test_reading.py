"""A node directory that is opened for reading shows what its owner would, and stays as it is."""

import shutil
from pathlib import Path

import pytest

from tests.wal.log_contract import WHOLE_LOG, append, fill, payloads_of, read_all, stamped_pack
from wal.errors import Corrupt, OnShutdown, StorageFailed
from wal.rocks.floor import Floor, read_floor
from wal.rocks.layout import DATABASE_NAME, RocksOptions, entry_key
from wal.rocks.store import RocksReader, open_rocks_store

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]


def floor_of(directory: Path) -> Floor:
    floor = read_floor(directory)
    assert floor is not None
    return floor


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture
async def directory(tmp_path: Path) -> Path:
    """Return a directory whose owner was killed: the end of the log is in no table yet."""
    store = await open_rocks_store(tmp_path / "alive")
    log = await store.open_log("p0")
    await fill(log, 20, messages=2)
    await log.truncate(9)
    await store.state.put({"a": b"1", "b": b"2"})
    await append(log, b"last")
    shutil.copytree(tmp_path / "alive", tmp_path / "node")
    await store.close()
    return tmp_path / "node"


async def test_it_shows_what_was_written_and_changes_nothing(directory: Path) -> None:
    before = files(directory)
    for _ in range(2):
        reader = RocksReader(directory, floor_of(directory))
        log = await reader.open_log("p0")
        assert (log.first_position, log.next_position, log.durable_position) == (9, 42, 41)
        assert payloads_of(await read_all(log))[-2:] == [[b"row", b"row"], [b"last"]]
        assert await reader.state.scan("") == {"a": b"1", "b": b"2"}
        assert await reader.state.get("b") == b"2"
        await reader.close()
        await reader.close()
        with pytest.raises(OnShutdown):
            await log.read(9, bytes_max=1)
    assert files(directory) == before


async def test_a_log_that_was_never_made_is_empty(directory: Path) -> None:
    reader = RocksReader(directory, floor_of(directory))
    log = await reader.open_log("p1")
    assert (log.first_position, log.next_position, log.durable_position) == (1, 1, 0)
    assert await log.read(1, bytes_max=WHOLE_LOG) == []
    await reader.close()
    assert "p1" not in reader.found.log_ids


async def test_what_would_change_it_is_refused(directory: Path) -> None:
    reader = RocksReader(directory, floor_of(directory))
    log = await reader.open_log("p0")
    with pytest.raises(StorageFailed, match="for reading only"):
        log.append(stamped_pack(b"late"))
    for refused in (log.admit(1), log.truncate(20), reader.state.put({"a": None})):
        with pytest.raises(StorageFailed, match="for reading only"):
            await refused
    assert log.first_position == 9
    await reader.close()


async def test_what_its_floor_misses_is_damage_and_without_a_floor_nothing_is_missed(
    directory: Path,
) -> None:
    floor = floor_of(directory)
    for log in (directory / DATABASE_NAME).glob("*.log"):
        log.write_bytes(b"")
    with pytest.raises(Corrupt, match="was acknowledged"):
        RocksReader(directory, floor)
    reader = RocksReader(directory, None)
    assert await reader.state.scan("") == {}
    await reader.close()


async def test_a_directory_without_a_database_is_damage_and_none_is_made(tmp_path: Path) -> None:
    with pytest.raises(Corrupt, match="holds no database"):
        RocksReader(tmp_path, None)
    assert files(tmp_path) == {}


async def test_a_log_ends_where_the_next_owner_lets_it_end(tmp_path: Path) -> None:
    """A hole in the unsynced part: entries lie behind it, and nobody will see them."""
    options = RocksOptions(durability="os", sync_interval_ms=60_000)
    store = await open_rocks_store(tmp_path / "alive", options=options)
    log = await store.open_log("p0")
    await store.state.put({"a": b"1"})
    for payload in (b"1", b"2", b"3"):
        await log.append(stamped_pack(payload)).written
    engine = store._engine
    await engine.read(lambda: engine.entries.delete(entry_key(log.log_id, 2)))
    await engine.read(lambda: engine.database.flush_wal(sync=True))
    shutil.copytree(tmp_path / "alive", tmp_path / "node")
    await store.close()
    reader = RocksReader(tmp_path / "node", floor_of(tmp_path / "node"))
    assert reader.torn == {"p0": 1}
    assert payloads_of(await read_all(await reader.open_log("p0"))) == [[b"1"]]
    await reader.close()
    again = await open_rocks_store(tmp_path / "node", options=options)
    assert payloads_of(await read_all(await again.open_log("p0"))) == [[b"1"]]
    await again.close()
