"""A store whose database cannot be brought into tables for want of room: it is read as it is, if all of it is synced."""

import sys
from pathlib import Path

import anyio
import pytest

from tests.wal.log_contract import payloads_of, read_all, stamped_group
from wal.errors import OnShutdown, StorageFull
from wal.rocks import possession
from wal.rocks.directory import open_database
from wal.rocks.group_commit import CommitState
from wal.rocks.options import RocksOptions
from wal.rocks.store import RocksStore, open_rocks_store

pytestmark = pytest.mark.anyio

OPTIONS = RocksOptions(free_bytes_min=0)
ROOT = Path(__file__).parents[3]


class FullDisk:
    """Lets nothing be opened for writing until `free`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(possession, "open_database", self._refuse)

    def _refuse(self, *_: object) -> None:
        raise StorageFull("disk", 0, 5)

    def free(self) -> None:
        self._monkeypatch.setattr(possession, "open_database", open_database)


KILLED = """
import os, sys, anyio
from pathlib import Path
from tests.wal.log_contract import append
from wal.rocks.options import RocksOptions
from wal.rocks.store import open_rocks_store
async def main(directory, acknowledged):
    store = await open_rocks_store(directory, options=RocksOptions(free_bytes_min=0))
    log = await store.open_log("p0")
    await store.put_meta({"k": b"v"})
    await append(log, b"first")
    floor = (directory / "floor").read_bytes()
    await append(log, b"second")
    if not acknowledged:
        (directory / "floor").write_bytes(floor)
    os.kill(os.getpid(), 9)
anyio.run(main, Path(sys.argv[1]), sys.argv[2] == "True")
"""


async def leave_killed(directory: Path, *, acknowledged: bool) -> None:
    """Leave a log with two entries and a record in no table, the last entry known to be synced or not."""
    command = [sys.executable, "-c", KILLED, str(directory), str(acknowledged)]
    killed = await anyio.run_process(command, check=False, stderr=None, cwd=ROOT)
    assert killed.returncode == -9


async def test_everything_can_be_read_and_nothing_written_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leave_killed(tmp_path / "node", acknowledged=True)
    disk = FullDisk(monkeypatch)
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    log = await store.open_log("p0")
    for _ in range(2):
        assert (store.state, store.taking_writes) == (CommitState.POISONED, False)
        assert payloads_of(await read_all(log)) == [[b"first"], [b"second"]]
        assert await store.get_meta("k") == b"v"
        assert await store.scan_meta("") == {"k": b"v"}
        with pytest.raises(StorageFull):
            await log.admit(1)
        with pytest.raises(StorageFull):
            log.append(stamped_group(b"third", tick=log.last_tick + 1))
        with pytest.raises(StorageFull):
            await store.put_meta({"k": b"w"})
        with pytest.raises(StorageFull):
            await store.open_log("p1")
        with pytest.raises(StorageFull):
            await store.reopen()
    await store.wait_failed()
    disk.free()
    await store.reopen()
    await log.append(stamped_group(b"third", tick=log.last_tick + 1)).durable
    await store.put_meta({"k": b"w"})
    await check(store, [[b"first"], [b"second"], [b"third"]])
    assert await store.get_meta("k") == b"w"
    await store.close()


async def test_what_may_not_be_synced_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await leave_killed(tmp_path / "node", acknowledged=False)
    disk = FullDisk(monkeypatch)
    with pytest.raises(StorageFull):
        await open_rocks_store(tmp_path / "node", options=OPTIONS)
    disk.free()
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    await check(store, [[b"first"], [b"second"]])
    await store.close()


async def test_a_store_that_is_read_only_closes_and_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leave_killed(tmp_path / "node", acknowledged=True)
    disk = FullDisk(monkeypatch)
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    log = await store.open_log("p0")
    await store.close()
    with pytest.raises(OnShutdown):
        await read_all(log)
    with pytest.raises(OnShutdown):
        await store.get_meta("k")
    disk.free()
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    await check(store, [[b"first"], [b"second"]])
    await store.close()


async def check(store: RocksStore, payloads: list[list[bytes]]) -> None:
    assert payloads_of(await read_all(await store.open_log("p0"))) == payloads
