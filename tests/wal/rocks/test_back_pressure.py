"""A RocksDB that makes tables slower than they fill: writes wait outside it, where they hold nobody
up.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from tests.wal.log_contract import SMALL, stamped_pack
from wal.errors import Indeterminate
from wal.rocks.layout import RocksOptions
from wal.rocks.store import RocksStore, open_rocks_store
from wal.rocks.writer import WRITE_BYTES_MAX, Writer

pytestmark = pytest.mark.anyio

HANGS_S = 60


class Tables:
    """How often the writer asked whether RocksDB is behind, and the answer until it has caught
    up.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = threading.Semaphore(0)
        self.caught_up = threading.Event()
        monkeypatch.setattr(Writer, "is_behind", self._is_behind)

    def _is_behind(self) -> bool:
        self.asked.release()
        return not self.caught_up.is_set()

    async def wait_asked(self) -> None:
        await anyio.to_thread.run_sync(
            lambda: [self.asked.acquire(timeout=HANGS_S) for _ in range(3)]
        )


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    return Tables(monkeypatch)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RocksStore]:
    store = await open_rocks_store(
        tmp_path / "node", options=RocksOptions(queue_bytes_max=2 * WRITE_BYTES_MAX)
    )
    yield store
    await store.close()


async def test_appends_are_held_back_until_rocksdb_has_caught_up(
    store: RocksStore, tables: Tables
) -> None:
    log = await store.open_log("p0")
    first = log.append(stamped_pack(bytes(WRITE_BYTES_MAX)))
    await tables.wait_asked()
    second = log.append(stamped_pack(bytes(WRITE_BYTES_MAX)))
    waiting = asyncio.ensure_future(log.admit(1))
    await asyncio.sleep(0)
    assert not first.written.done()
    assert not waiting.done()
    assert await log.read(1, bytes_max=SMALL) == []
    tables.caught_up.set()
    with anyio.fail_after(HANGS_S):
        await first.written
        await second.written
        await waiting


async def test_closing_writes_what_is_queued_and_does_not_wait_for_tables(
    tmp_path: Path, tables: Tables
) -> None:
    store = await open_rocks_store(tmp_path / "closed")
    log = await store.open_log("p0")
    ticket = log.append(stamped_pack(bytes(WRITE_BYTES_MAX)))
    await tables.wait_asked()
    with anyio.fail_after(HANGS_S):
        await store.close()
    assert ticket.durable.done()
    assert ticket.durable.exception() is None


@pytest.mark.usefixtures("tables")
async def test_table_that_could_not_be_written_fails_the_write_that_would_wait_for_it(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writer, "table_failures", lambda _: 1)
    log = await store.open_log("p0")
    with anyio.fail_after(HANGS_S):
        with pytest.raises(Indeterminate, match="could not write a table"):
            await log.append(stamped_pack(bytes(WRITE_BYTES_MAX))).written
        await store.wait_failed()


async def test_rocksdb_that_cannot_say_whether_it_is_behind_fails_the_write_and_not_the_writer(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_say(_writer: Writer) -> bool:
        raise RuntimeError("no such property")

    log = await store.open_log("p0")
    monkeypatch.setattr(Writer, "is_behind", cannot_say)
    with pytest.raises(Indeterminate, match="no such property"):
        await log.append(stamped_pack(bytes(WRITE_BYTES_MAX))).written
    await store.wait_failed()
