"""What a power cut leaves of the files that the store syncs itself: the floor, its token, and names
in the directory.
"""

import threading
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tests.synced_disk import PowerCut, SyncedDisk, synced_disk
from tests.wal.log_contract import append, stamped_pack
from tests.wal.rocks.damaged_directory import NO_LOW_WATER
from wal.rocks.floor import (
    FLOOR_NAME,
    SLOT_BYTES,
    Floor,
    FloorFile,
    decode_slot,
    read_floor,
    write_floor,
)
from wal.rocks.layout import Durability, RocksOptions
from wal.rocks.opening import take_directory
from wal.rocks.store import open_rocks_store

pytestmark = pytest.mark.anyio

HANGS_S = 60
NODE = "0123456789abcdef0123456789abcdef"


def floor_left(disk: SyncedDisk, target: Path) -> Floor:
    """Return the floor that a power cut leaves of the node at `disk.root / "node"`."""
    floor = read_floor(disk.lose_power(target) / "node")
    assert floor is not None
    return floor


def test_a_synced_floor_survives_a_power_cut_and_a_recorded_one_only_a_kill(tmp_path: Path) -> None:
    (tmp_path / "disk" / "node").mkdir(parents=True)
    write_floor(tmp_path / "disk" / "node", Floor(node_id=NODE))
    with synced_disk(tmp_path / "disk") as disk:
        file = FloorFile(disk.root / "node")
        file.record({1: 5}, tick=7, term=2, meta=3)
        assert floor_left(disk, tmp_path / "recorded").positions == {}
        file.sync()
        file.record({1: 6})
        left = floor_left(disk, tmp_path / "synced")
        assert (left.positions, left.tick, left.term, left.meta_version) == ({1: 5}, 7, 2, 3)
        file.close()


async def test_a_promised_tick_survives_a_power_cut(tmp_path: Path) -> None:
    """Ticks run ahead of the clock by what was promised, so a clock that goes on does not keep them
    ascending.
    """
    (tmp_path / "disk").mkdir()
    with synced_disk(tmp_path / "disk") as disk:
        store = await open_rocks_store(disk.root / "node", options=NO_LOW_WATER)
        await store.promise_tick(1 << 50)
        assert (await anyio.to_thread.run_sync(floor_left, disk, tmp_path / "left")).tick == 1 << 50
        await store.close()


async def test_the_floor_of_an_append_is_synced_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    sync = FloorFile.sync
    synced = threading.Event()

    def sync_and_tell(floor: FloorFile) -> None:
        sync(floor)
        synced.set()

    with synced_disk(tmp_path / "disk") as disk:
        store = await open_rocks_store(disk.root / "node", options=NO_LOW_WATER)
        log = await store.open_log("p0")
        monkeypatch.setattr(FloorFile, "sync", sync_and_tell)
        await append(log, b"row")
        assert await anyio.to_thread.run_sync(synced.wait, HANGS_S), (
            "by itself: nothing else is written"
        )
        assert (await anyio.to_thread.run_sync(floor_left, disk, tmp_path / "left")).positions == {
            1: 1
        }
        await store.close()


@pytest.mark.parametrize("durability", ["fsync", "os"])
async def test_closing_leaves_a_floor_that_survives_a_power_cut(
    tmp_path: Path, durability: Durability
) -> None:
    (tmp_path / "disk").mkdir()
    options = RocksOptions(free_bytes_min=0, durability=durability, sync_interval_ms=1_000_000)
    pack = stamped_pack(b"row")
    with synced_disk(tmp_path / "disk") as disk:
        store = await open_rocks_store(disk.root / "node", options=options)
        await (await store.open_log("p0")).append(pack).written
        await store.close()
        left = await anyio.to_thread.run_sync(floor_left, disk, tmp_path / "left")
    assert (left.positions, left.tick) == ({1: 1}, pack.time_tick)


async def test_with_os_durability_the_floor_is_synced_before_a_sync_of_the_log_is_told(
    tmp_path: Path,
) -> None:
    """Of a torn tail nothing else can tell how much of it was synced."""
    (tmp_path / "disk").mkdir()
    options = RocksOptions(free_bytes_min=0, durability="os", sync_interval_ms=1_000_000)
    with synced_disk(tmp_path / "disk") as disk:
        store = await open_rocks_store(disk.root / "node", options=options)
        ticket = (await store.open_log("p0")).append(stamped_pack(b"row"))
        await store.state.put({"k": b"v"})
        await ticket.durable
        left = await anyio.to_thread.run_sync(floor_left, disk, tmp_path / "left")
        assert (left.positions, left.meta_version) == ({1: 1}, 1)
        await store.close()


def test_an_owner_that_takes_a_directory_leaves_its_term_in_the_floor(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with synced_disk(tmp_path / "disk") as disk:
        for term in (1, 2):
            assert take(disk.root / "node")[1] == term
            left = disk.lose_power(tmp_path / f"{term}")
            assert newest_slot(left / "node" / FLOOR_NAME).term == term, (
                "in its slot, not only in the token"
            )


def newest_slot(path: Path) -> Floor:
    """Return the newest slot of a floor file, without the token and the promise beside it."""
    data = path.read_bytes()
    slots = [slot for at in (0, SLOT_BYTES) if (slot := decode_slot(data[at : at + SLOT_BYTES]))]
    return max(slots, key=lambda slot: slot.generation)


def test_a_token_survives_a_power_cut_before_anything_is_done_under_it(tmp_path: Path) -> None:
    (tmp_path / "disk" / "node").mkdir(parents=True)
    write_floor(tmp_path / "disk" / "node", Floor(node_id=NODE))
    with synced_disk(tmp_path / "disk") as disk:
        token = FloorFile(disk.root / "node")
        token.take_token(4)
        assert floor_left(disk, tmp_path / "left").term == 4
        token.close()


def take(directory: Path) -> tuple[str, int]:
    """Own a directory, let go of it, and return its node's id and the term."""
    owned, database, found = take_directory(directory, NO_LOW_WATER)
    try:
        return found.node_id, owned.floor.token_term
    finally:
        database.close()
        owned.release()


def test_a_power_cut_at_any_sync_of_the_first_opening_leaves_what_opens(tmp_path: Path) -> None:
    """Each name that was not synced yet may be on the disk, alone or with others."""
    number = reached = 0
    while number == reached:
        number += 1
        root = tmp_path / f"{number}"
        root.mkdir()
        with synced_disk(root, cut_at=number) as disk:
            with suppress(PowerCut):
                take(root / "node")
            reached = disk.syncs
            unsynced = disk.unsynced_names() if reached == number else []
            lefts = [disk.lose_power(tmp_path / f"{number}-")]
            for survivor in unsynced:
                lefts.append(
                    disk.lose_power(tmp_path / f"{number}-{len(lefts)}", lucky=survivor.__eq__)
                )
        for left in lefts:
            assert take(left / "node")[1] >= 1
    assert number > 6


def test_a_node_that_was_opened_once_keeps_its_name_and_its_terms_over_a_power_cut(
    tmp_path: Path,
) -> None:
    (tmp_path / "disk").mkdir()
    with synced_disk(tmp_path / "disk") as disk:
        node_id, term = take(disk.root / "node")
        left = disk.lose_power(tmp_path / "left")
    assert take(left / "node") == (node_id, term + 1)
