"""A node directory with a known log in it, and ways to damage it as disks and people do."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.wal.log_contract import append, fill, read_all
from wal.rocks.floor import FLOOR_NAME
from wal.rocks.layout import RocksOptions
from wal.rocks.store import open_rocks_store

ENTRIES = 200
ENTRY_PAYLOAD = bytes(range(256)) * 2
NO_LOW_WATER = RocksOptions(free_bytes_min=0)


async def make_node(
    path: Path,
    *,
    entries: int = ENTRIES,
    floor_after: int | None = None,
    records_in_tables: bool = False,
    payload: bytes = ENTRY_PAYLOAD,
) -> None:
    """Leave a node as a kill leaves it: `entries` entries in log `p0`, all still in RocksDB's own
    log.

    With `floor_after` the floor is the one of so many entries, as after a power cut in between.
    With `records_in_tables` nothing else is in RocksDB's log: the entries are written one by one,
    and no record after them.
    """
    alive = path.with_name(path.name + "-alive")
    store = await open_rocks_store(alive, options=NO_LOW_WATER)
    await store.state.put({"k": b"v"})
    log = await store.open_log("p0")
    if records_in_tables:
        await store.close()
        store = await open_rocks_store(alive, options=NO_LOW_WATER)
        log = await store.open_log("p0")
        floor_after = 0
    await fill(log, entries if floor_after is None else floor_after, payload=payload)
    floor = (alive / FLOOR_NAME).read_bytes()
    if floor_after is None:
        await store.state.put({"k": b"w"})
        floor = (alive / FLOOR_NAME).read_bytes()
    else:
        # one by one: what is committed together is torn together
        for _ in range(entries - floor_after):
            await append(log, payload)
    if records_in_tables:
        floor = (alive / FLOOR_NAME).read_bytes()
    shutil.copytree(alive, path)
    (path / FLOOR_NAME).write_bytes(floor)
    await store.close()
    shutil.rmtree(alive)


async def count_entries(path: Path) -> int:
    """Open a node, read its log to the end, close it, and return how many entries there were."""
    store = await open_rocks_store(path, options=NO_LOW_WATER)
    try:
        return len(await read_all(await store.open_log("p0")))
    finally:
        await store.close()


def database_log(path: Path) -> Path:
    """Return RocksDB's own log file, the newest with something in it."""
    return max(
        (file for file in (path / "log").glob("*.log") if file.stat().st_size),
        key=lambda file: file.name,
    )


def flip_bit(file: Path, offset: int, bit: int = 3) -> None:
    """Flip one bit of a file."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        [byte] = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte ^ 1 << bit]))


@contextmanager
def flipped(file: Path, offset: int, bit: int = 3) -> Iterator[None]:
    """Flip one bit for a while."""
    flip_bit(file, offset, bit)
    try:
        yield
    finally:
        flip_bit(file, offset, bit)
