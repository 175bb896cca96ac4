from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.wal.log_contract import append, fill, read_all
from wal.errors import Truncated
from wal.rocks.database import Engine
from wal.rocks.layout import RocksOptions
from wal.rocks.store import RocksStore, open_rocks_store

pytestmark = pytest.mark.anyio

MIB = 1 << 20
SMALL_MEMTABLES = RocksOptions(memtable_bytes=MIB, free_bytes_min=0)


def some_payload(size: int) -> bytes:
    return bytes(range(256)) * (size // 256)


def directory_bytes(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        with suppress(FileNotFoundError):  # RocksDB removes files beside the test
            total += file.stat().st_size
    return total


async def refilled(path: Path, *, payload: bytes, entries: int) -> RocksStore:
    store = await open_rocks_store(path, options=SMALL_MEMTABLES)
    log = await store.open_log("p0")
    for _ in range(entries // 16):
        await fill(log, 16, payload=payload)
    return store


@pytest.mark.parametrize("size", [1024, 65_536], ids=["small entries", "large entries"])
async def test_truncation_gives_disk_space_back(tmp_path: Path, size: int) -> None:
    store = await refilled(tmp_path / "node", payload=some_payload(size), entries=32 * MIB // size)
    database = tmp_path / "node" / "log"
    # A count misses what moves from one file to another meanwhile; of several in a row not each
    # does.
    full = max(directory_bytes(database) for _ in range(5))
    assert full >= 32 * MIB
    log = await store.open_log("p0")
    await log.truncate(log.next_position * 3 // 4)
    assert directory_bytes(database) < full / 2
    await log.truncate(log.next_position)
    assert directory_bytes(database) < full / 8
    await store.close()


async def test_a_truncated_log_stays_truncated_after_opening_again(tmp_path: Path) -> None:
    for kept in (10, 20, 30):
        store = await open_rocks_store(tmp_path / "node", options=SMALL_MEMTABLES)
        log = await store.open_log("p0")
        if kept == 10:
            await fill(log, 40, messages=2)
        await log.truncate(2 * kept)
        await store.close()
        store = await open_rocks_store(tmp_path / "node", options=SMALL_MEMTABLES)
        log = await store.open_log("p0")
        assert (log.first_position, log.next_position) == (2 * kept - 1, 81)
        with pytest.raises(Truncated):
            await log.read(2 * kept - 2, bytes_max=1)
        assert len(await read_all(log)) == 41 - kept
        await store.close()


async def test_readers_behind_a_truncation_get_all_they_asked_for_or_truncated(
    tmp_path: Path,
) -> None:
    store = await open_rocks_store(tmp_path / "node", options=SMALL_MEMTABLES)
    log = await store.open_log("p0")
    await fill(log, 2000, payload=some_payload(512))

    async def read_behind() -> None:
        while log.first_position < 1900:
            start = log.first_position
            try:
                entries = await log.read(start, bytes_max=64 * 1024)
            except Truncated:
                continue
            positions = [entry.first_position for entry in entries]
            assert positions == list(range(start, start + len(positions)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read_behind)
        for position in range(100, 2001, 100):
            await log.truncate(position)
    await store.close()


async def test_read_that_a_truncation_to_its_own_position_overtakes_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_rocks_store(tmp_path / "node", options=SMALL_MEMTABLES)
    log = await store.open_log("p0")
    await fill(log, 10)
    run = Engine.read

    async def truncate_first(engine: Engine, call: Any, *arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(Engine, "read", run)
        await log.truncate(7)
        return await run(engine, call, *arguments, **options)

    monkeypatch.setattr(Engine, "read", truncate_first)
    entries = await log.read(7, bytes_max=MIB)
    assert [entry.first_position for entry in entries] == [7, 8, 9, 10]
    await store.close()


async def test_appends_go_on_while_space_is_given_back(tmp_path: Path) -> None:
    store = await refilled(tmp_path / "node", payload=some_payload(65_536), entries=256)
    log = await store.open_log("p0")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.truncate, 250)
        for _ in range(50):
            await append(log, b"x")
    assert len(await read_all(log)) == 256 + 50 - 249
    await store.close()
