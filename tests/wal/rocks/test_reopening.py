"""A store after a failed write: it comes back verified, under the next term, with the same logs and
all that was synced.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from rocksdict import Rdict

from tests.failing_disk import FailingDisk, Fault
from tests.wal.log_contract import append, payloads_of, read_all, stamped_pack
from wal.errors import (
    ChannelFenced,
    Corrupt,
    Indeterminate,
    LogReopening,
    OnShutdown,
    StorageFailed,
)
from wal.rocks.floor import SLOT_BYTES, FloorFile, read_floor
from wal.rocks.layout import DATABASE_NAME, ENTRY_FAMILY, RocksOptions
from wal.rocks.opening import open_owned
from wal.rocks.store import RocksStore, open_rocks_store
from wal.rocks.writer import OWNER_CHECK_S

pytestmark = pytest.mark.anyio

OPTIONS = RocksOptions(free_bytes_min=0)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    return FailingDisk(monkeypatch)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RocksStore]:
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    yield store
    await store.close()


async def poison(store: RocksStore, disk: FailingDisk) -> None:
    """Fail one write of a store, as a disk does."""
    log = await store.open_log("p0")
    disk.fail_at(1)
    with pytest.raises(Indeterminate):
        await log.append(stamped_pack(b"unknown")).written
    await store.wait_failed()


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
async def test_reopened_store_has_what_was_synced_and_goes_on_under_the_next_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    disk = FailingDisk(monkeypatch, fault)
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    log = await store.open_log("p0")
    await append(log, b"before")
    await store.state.put({"k": b"v"})
    term = store.term
    for round_ in range(1, 4):
        await poison(store, disk)
        await store.reopen()
        assert (store.condition, store.term, store.taking_writes) == ("open", term + round_, True)
        assert await store.open_log("p0") is log
        await append(log, b"after")
        assert await store.state.get("k") == b"v"
    entries = await read_all(log)
    found = [payload for [payload] in payloads_of(entries)]
    assert [payload for payload in found if payload != b"unknown"] == [
        b"before",
        b"after",
        b"after",
        b"after",
    ]
    assert found.count(b"unknown") == (0 if fault is Fault.WRITE_LOST else 3)
    assert [entry.first_position for entry in entries] == list(range(1, len(entries) + 1))
    await store.close()
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    assert payloads_of(await read_all(await store.open_log("p0"))) == [
        [payload] for payload in found
    ]
    await store.close()


async def test_reopening_a_store_that_takes_writes_changes_nothing(store: RocksStore) -> None:
    term = store.term
    await store.reopen()
    assert store.term == term


async def test_what_was_recovered_is_in_new_files_because_the_old_ones_may_only_look_written(
    store: RocksStore, disk: FailingDisk, tmp_path: Path
) -> None:
    database = tmp_path / "node" / DATABASE_NAME
    await poison(store, disk)
    failed_logs = set(database.glob("*.log"))
    await store.reopen()
    assert failed_logs.isdisjoint(database.glob("*.log"))
    assert payloads_of(await read_all(await store.open_log("p0"))) == [[b"unknown"]]


async def test_reads_wait_while_the_database_is_away_and_then_go_on(
    store: RocksStore, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await store.open_log("p0")
    await append(log, b"before")
    await poison(store, disk)
    disk.gate.clear()
    away = threading.Event()

    def slowly(*given: Any, **options: Any) -> object:
        away.set()
        disk.gate.wait(60)
        return open_owned(*given, **options)

    monkeypatch.setattr("wal.rocks.store.open_owned", slowly)
    reopening = asyncio.ensure_future(store.reopen())
    while not away.is_set():
        await anyio.lowlevel.checkpoint()
    reading = asyncio.ensure_future(log.read(1, bytes_max=1))
    growing = asyncio.ensure_future(log.wait_beyond(1))
    await asyncio.wait((reading, growing), timeout=0.05)
    assert not reading.done()
    assert not growing.done()
    disk.gate.set()
    await asyncio.gather(reopening, growing)
    assert payloads_of(await reading) == [[b"before"]]


async def test_reads_go_on_between_attempts_and_nothing_else_does(
    store: RocksStore, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await store.open_log("p0")
    await append(log, b"before")
    await poison(store, disk)

    def broken(*_: object, **__: object) -> None:
        raise StorageFailed("the disk does not let anything be opened for writing")

    monkeypatch.setattr("wal.rocks.store.open_owned", broken)
    for _ in range(2):
        with pytest.raises(StorageFailed):
            await store.reopen()
        assert store.condition == "failed"
        assert payloads_of(await read_all(log)) == [[b"before"]]
        with pytest.raises(LogReopening):
            await log.admit(1)
    monkeypatch.undo()
    await store.reopen()
    await append(log, b"after")


class Replaced:
    """Puts an older copy of the database in its place while it is closed, until `put_back`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.database = directory / DATABASE_NAME
        self.older = directory.parent / "older"
        self.newer = directory.parent / "newer"
        shutil.copytree(self.database, self.older)
        monkeypatch.setattr("wal.rocks.store.open_owned", self._replace_and_open)

    def _replace_and_open(self, *given: Any, **options: Any) -> object:
        if not self.newer.exists():
            self.database.rename(self.newer)
            shutil.copytree(self.older, self.database)
        return open_owned(*given, **options)

    def put_back(self) -> None:
        shutil.rmtree(self.database)
        self.newer.rename(self.database)


@pytest.mark.may_block
@pytest.mark.parametrize("floor_is_old", [False, True])
async def test_synced_records_that_are_gone_are_damage_and_not_healed(
    store: RocksStore,
    disk: FailingDisk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    floor_is_old: bool,
) -> None:
    log = await store.open_log("p0")
    replaced = Replaced(tmp_path / "node", monkeypatch)
    await append(log, b"before")
    if floor_is_old:  # its pages may look written too; what the process knows counts
        with (tmp_path / "node" / "floor").open("r+b") as file:
            file.write(bytes(SLOT_BYTES))
    await poison(store, disk)
    for _ in range(2):
        with pytest.raises(Corrupt, match="was acknowledged"):
            await store.reopen()
        assert store.condition == "failed"
    monkeypatch.undo()
    replaced.put_back()
    await store.reopen()
    assert payloads_of(await read_all(log))[0] == [b"before"]


async def test_error_of_an_attempt_that_somebody_keeps_does_not_keep_the_lock_of_the_database(
    store: RocksStore, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(database: Rdict, *_: object) -> None:
        iterator = database.get_column_family(ENTRY_FAMILY).iter()
        iterator.seek_to_first()
        raise OSError(5, "Input/output error")

    await append(await store.open_log("p0"), b"before")
    await poison(store, disk)
    with monkeypatch.context() as broken, pytest.raises(StorageFailed) as kept:
        broken.setattr("wal.rocks.recovery.drop_behind_holes", unreadable)
        await store.reopen()
    await store.reopen()
    assert store.taking_writes
    assert kept.tb is not None


async def test_store_that_is_closed_while_it_reopens_ends_closed(
    store: RocksStore, disk: FailingDisk
) -> None:
    await poison(store, disk)
    reopening = asyncio.ensure_future(store.reopen())
    while store.condition != "reopening":
        await anyio.lowlevel.checkpoint()
    await store.close()
    await asyncio.wait((reopening,))
    assert store.condition == "closed"
    with pytest.raises(OnShutdown):
        await store.reopen()


async def test_cancelled_reopening_ends_before_the_cancellation_does(
    store: RocksStore, disk: FailingDisk
) -> None:
    await poison(store, disk)
    reopening = asyncio.ensure_future(store.reopen())
    await anyio.lowlevel.checkpoint()
    reopening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reopening
    assert store.taking_writes
    await append(await store.open_log("p0"), b"after")


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_opening_that_is_cancelled_leaves_nothing_open(tmp_path: Path, turns: int) -> None:
    opening = asyncio.ensure_future(open_rocks_store(tmp_path / "node", options=OPTIONS))
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await (await open_rocks_store(tmp_path / "node", options=OPTIONS)).close()


async def test_closing_that_is_cancelled_still_lets_go(tmp_path: Path) -> None:
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    closing = asyncio.ensure_future(store.close())
    await anyio.lowlevel.checkpoint()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await (await open_rocks_store(tmp_path / "node", options=OPTIONS)).close()


# --- two owners -----------------------------------------------------------------------------------

USURPER = """
import fcntl, sys, anyio
from pathlib import Path
fcntl.flock = lambda *_: None  # a file system without locks
directory = Path(sys.argv[1])
(directory / "node.lock").unlink()
(directory / "log" / "LOCK").unlink()
from wal.rocks.layout import RocksOptions
from wal.rocks.store import open_rocks_store
async def main():
    store = await open_rocks_store(directory, options=RocksOptions(free_bytes_min=0))
    log = await store.open_log("p0")
    found = log.durable_position
    from tests.wal.log_contract import stamped_pack
    for number in range(10):
        await log.append(stamped_pack(b"new owner", tick=log.last_tick + 1)).durable
        if number == 5:
            log._engine.entries.flush()
    print(store.term, found, flush=True)
    await anyio.sleep_forever()
anyio.run(main)
"""


async def usurp(directory: Path) -> tuple[subprocess.Popen[str], int, int]:
    """Start another owner that no lock keeps out; return it, its term and the last position it
    found.
    """
    usurper = subprocess.Popen(  # noqa: ASYNC220 - read from in a thread
        [sys.executable, "-c", USURPER, str(directory)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert usurper.stdout is not None
    term, position = (await anyio.to_thread.run_sync(usurper.stdout.readline)).split()
    return usurper, int(term), int(position)


async def test_owner_whose_locks_were_unlinked_is_fenced_at_its_next_write(
    store: RocksStore, tmp_path: Path
) -> None:
    log = await store.open_log("p0")
    await append(log, b"before")
    usurper, term, position = await usurp(tmp_path / "node")
    try:
        assert (term, position) == (store.term + 1, 1), (
            "the new owner has everything that was acknowledged"
        )
        with pytest.raises(ChannelFenced, match=f"term {term}"):
            await log.append(stamped_pack(b"too late")).written
        assert store.condition == "fenced"
        for refused in (log.admit(1), store.state.put({"k": b"v"}), store.reopen()):
            with pytest.raises(ChannelFenced):
                await refused
        assert payloads_of(await read_all(log)) == [[b"before"]]
        files = {file.name for file in (tmp_path / "node" / DATABASE_NAME).iterdir()}
        await store.close()
        assert files == {file.name for file in (tmp_path / "node" / DATABASE_NAME).iterdir()}
    finally:
        usurper.send_signal(signal.SIGKILL)
        usurper.communicate()
    # RocksDB lets no process open a place twice that it has not closed, so the new owner's files go
    # elsewhere.
    (tmp_path / "node").rename(tmp_path / "moved")
    again = await open_rocks_store(tmp_path / "moved", options=OPTIONS)
    kept = payloads_of(await read_all(await again.open_log("p0")))
    assert kept == [[b"before"], *[[b"new owner"]] * 10], (
        "an owner that was fenced harms nothing when it closes"
    )
    await again.close()


async def test_write_that_another_owner_overtakes_is_indeterminate_and_later_ones_are_refused(
    store: RocksStore, disk: FailingDisk, tmp_path: Path
) -> None:
    log = await store.open_log("p0")
    disk.gate.clear()
    disk.fail_at(1 << 30)
    ticket = log.append(stamped_pack(b"overtaken"))
    while not disk.waiting:  # it is written, and waits for its sync
        await anyio.lowlevel.checkpoint()
    other = FloorFile(tmp_path / "node")
    await anyio.to_thread.run_sync(other.take_token, store.term + 1)
    disk.gate.set()
    with pytest.raises(Indeterminate, match="taken over"):
        await ticket.written
    with pytest.raises(ChannelFenced):
        await log.append(stamped_pack(b"later")).written
    other.close()


async def test_poisoned_owner_that_was_overtaken_does_not_reopen(
    store: RocksStore, disk: FailingDisk, tmp_path: Path
) -> None:
    await poison(store, disk)
    other = FloorFile(tmp_path / "node")
    await anyio.to_thread.run_sync(other.take_token, store.term + 1)
    with pytest.raises(ChannelFenced):
        await store.reopen()
    assert store.condition == "fenced"
    other.close()


@pytest.mark.parametrize("gone", ["replaced", "removed"])
async def test_owner_whose_directory_was_replaced_writes_no_more(
    store: RocksStore, tmp_path: Path, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await store.open_log("p0")
    floor = tmp_path / "node" / "floor"
    copy = floor.read_bytes()
    floor.unlink()
    if gone == "replaced":
        floor.write_bytes(copy)
    later = time.monotonic() + OWNER_CHECK_S
    monkeypatch.setattr("wal.rocks.writer.monotonic", lambda: later)
    with pytest.raises(ChannelFenced, match="replaced or removed"):
        await log.append(stamped_pack(b"into the wrong place")).written


async def test_next_term_is_above_every_claim_that_was_made(tmp_path: Path) -> None:
    store = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    await store.close()
    other = FloorFile(tmp_path / "node")
    await anyio.to_thread.run_sync(other.take_token, store.term + 5)
    other.close()
    floor = await anyio.to_thread.run_sync(read_floor, tmp_path / "node")
    assert floor is not None
    assert floor.term == store.term + 5
    again = await open_rocks_store(tmp_path / "node", options=OPTIONS)
    assert again.term == store.term + 6
    await again.close()


async def test_child_that_was_forked_while_the_store_is_poisoned_is_refused(
    store: RocksStore, disk: FailingDisk
) -> None:
    log = await store.open_log("p0")
    await poison(store, disk)
    pid = os.fork()
    if pid == 0:
        try:
            log.append(stamped_pack(b"child"))
        except StorageFailed:
            os._exit(7)
        os._exit(0)
    _, status = os.waitpid(pid, 0)  # noqa: ASYNC222 - the child exits at once
    assert os.waitstatus_to_exitcode(status) == 7
    await store.reopen()
    await append(log, b"after")
