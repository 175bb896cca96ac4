from collections.abc import AsyncIterator

import pytest

from tests.wal.log_contract import LogContract, fill
from tests.wal.owned_log_contract import OwnedLogContract
from tests.wal.state_map_contract import StateMapContract
from wal.errors import StorageFull
from wal.memory_store import MemoryLogStore, MemoryOptions

pytestmark = pytest.mark.anyio


class TestMemoryStore(LogContract, StateMapContract, OwnedLogContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[MemoryLogStore]:
        store = MemoryLogStore()
        yield store
        await store.close()


async def test_a_full_store_refuses_before_the_append_and_truncation_makes_room() -> None:
    store = MemoryLogStore(MemoryOptions(bytes_max=3000))
    log = await store.open_log("p0")
    await fill(log, 2, payload=bytes(1000))
    with pytest.raises(StorageFull) as full:
        await log.admit(1000)
    assert (full.value.path, full.value.needed_bytes) == ("memory", 1000)
    await log.truncate(2)
    await log.admit(1000)


async def test_what_is_read_shares_nothing_with_what_was_appended() -> None:
    payload = bytearray(b"before")
    log = await MemoryLogStore().open_log("p0")
    await fill(log, 1, payload=memoryview(payload))  # type: ignore[arg-type]
    payload[:] = b"after!"
    [entry] = await log.read(1, bytes_max=1)
    assert bytes(entry.messages[0].payload) == b"before"


async def test_no_two_stores_have_the_same_node_id() -> None:
    assert MemoryLogStore().node_id != MemoryLogStore().node_id
