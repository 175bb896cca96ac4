"""What tests of writes that wait share."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

import streamingnode as sn
from tests.failing_disk import FailingDisk
from tests.parts_of import parts_of
from tests.streamingnode.writing.held_node import HANGS_S, SCHEMA, SHARDS, Held, rows


@pytest.fixture
async def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Held]:
    disk = FailingDisk(monkeypatch)
    with anyio.fail_after(HANGS_S):
        async with sn.open_node(tmp_path / "node", cut_interval_s=None) as node:
            await node.create_collection("c", SCHEMA, primary_key="id", shards=SHARDS)
            await node.create_collection("other", SCHEMA, primary_key="id")
            await node.create_partition("c", "eu")
            for collection, partition in (("c", None), ("c", "eu"), ("other", None)):
                # makes the segments
                await node.insert(collection, rows(*range(-20, 0)), partition=partition)
                await node.delete(collection, list(range(-20, 0)))
            yield Held(node, disk, parts_of(node).channel.log.next_position)
            disk.gate.set()
