"""Numbers of terms: above every one that anything was acknowledged in, and not used up by attempts
that came to nothing.
"""

from pathlib import Path

import pytest

from tests.failing_disk import FailingDisk, Fault
from tests.wal.log_contract import append, stamped_pack
from tests.wal.rocks.test_reopening import OPTIONS, disk, poison, store
from wal.errors import Indeterminate, StorageFailed
from wal.rocks.layout import RocksOptions
from wal.rocks.store import RocksStore, open_rocks_store

__all__ = ["disk", "store"]  # fixtures

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
async def test_term_in_which_nothing_was_acknowledged_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    disk = FailingDisk(monkeypatch, fault)
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    log = await store.open_log("p0")
    first_term = store.term
    await append(log, b"before")
    for _ in range(3):
        await poison(store, disk)
        await store.reopen()
        assert store.term == first_term + 1
    await append(log, b"after")
    await poison(store, disk)
    await store.reopen()
    assert store.term == first_term + 2
    await store.close()
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    assert store.term == first_term + 3, "another opening may not know what this one did"
    await store.close()


async def test_term_of_attempts_that_could_not_open_the_database_is_used_again(
    store: RocksStore, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise StorageFailed("the term cannot be written")

    term = store.term
    await append(await store.open_log("p0"), b"before")
    await poison(store, disk)
    monkeypatch.setattr("wal.rocks.opening._take_term", broken)
    for _ in range(3):
        with pytest.raises(StorageFailed):
            await store.reopen()
    monkeypatch.undo()
    await store.reopen()
    assert store.term == term + 1


async def test_term_in_which_the_operating_system_took_a_write_is_not_used_again(
    tmp_path: Path, disk: FailingDisk
) -> None:
    options = RocksOptions(free_bytes_min=0, durability="os", sync_interval_ms=3_600_000)
    store = await open_rocks_store(tmp_path / "node", options=options)
    log = await store.open_log("p0")
    for round_ in (1, 2):
        await log.append(stamped_pack(b"acknowledged", tick=log.last_tick + 1)).written
        disk.fail_at(1)
        with pytest.raises(Indeterminate):
            await store.state.put({"k": b"v"})
        await store.reopen()
        assert store.term == 1 + round_
    await store.close()
