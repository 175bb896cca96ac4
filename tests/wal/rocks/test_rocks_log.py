from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.wal.log_contract import LogContract
from tests.wal.owned_log_contract import OwnedLogContract
from tests.wal.state_map_contract import StateMapContract
from wal.rocks.layout import RocksOptions
from wal.rocks.store import RocksStore, open_rocks_store

pytestmark = pytest.mark.anyio


class TestRocksStore(LogContract, StateMapContract, OwnedLogContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[RocksStore]:
        store = await open_rocks_store(tmp_path / "node")
        yield store
        await store.close()


class TestRocksStoreSyncedInTheBackground(LogContract, StateMapContract, OwnedLogContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[RocksStore]:
        store = await open_rocks_store(
            tmp_path / "node", options=RocksOptions(durability="os", sync_interval_ms=5)
        )
        yield store
        await store.close()
