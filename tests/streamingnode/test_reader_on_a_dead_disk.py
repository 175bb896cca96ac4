"""A new named reader whose first position may or may not be stored holds the log, as it will after
a restart.
"""

from pathlib import Path

import anyio
import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.config import load_config
from tests.failing_disk import FailingDisk, Fault
from wal.errors import Indeterminate
from wal.lifecycle import ReopenOptions

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SCHEMA = pa.schema([pa.field("key", pa.int64(), nullable=False)])
CONFIG = load_config(
    arguments={"cut_interval_s": None, "reopen": ReopenOptions(wait_s=0.1, first_pause_s=0.01)}
)


async def test_position_that_may_be_stored_is_indeterminate_also_when_the_log_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch, Fault.SYNC_DONE)
    with anyio.fail_after(60):
        async with sn.open_node(tmp_path, config=CONFIG) as node:
            await node.create_collection("a", SCHEMA, primary_key="key")
            disk.fail_at(1, times=1 << 30)
            with pytest.raises(Indeterminate):
                async with node.read("a", name="reader"):
                    pass
