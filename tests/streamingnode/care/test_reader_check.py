"""Named readers whose log begins behind their place: `verify` names who is stuck, and the reader is told so."""

from pathlib import Path

import anyio
import pytest

import streamingnode as sn
from streamingnode.care.database import read_node_records
from streamingnode.care.findings import Kind, Severity
from streamingnode.care.verify import verify_directory
from streamingnode.node import Node
from tests.streamingnode.sample_node import SCHEMA, SETTINGS, Sample, copy_of, rows_of
from wal.errors import Truncated
from wal.rocks.layout import RocksOptions
from wal.rocks.store import open_rocks_store


async def read_some(node: Node, collection: str, name: str, *, messages: int | None) -> int:
    """Acknowledge so many messages with rows, None for all; return how many there were."""
    seen = 0
    async with node.read(collection, name=name, until=await node.consistent_tick()) as reader:
        async for message in reader:
            seen += 1
            await reader.ack(message)
            if seen == messages:
                break
    return seen


def shorten_log(path: Path) -> int:
    """Take the log before the checkpoint, as retention never does while somebody reads it; return where it begins."""
    [checkpoint] = read_node_records(path)[1].checkpoints.values()

    async def truncate() -> int:
        store = await open_rocks_store(path, options=RocksOptions(free_bytes_min=0))
        try:
            log = await store.open_log("p0")
            await log.truncate(checkpoint.position)
            return log.first_position
        finally:
            await store.close()

    return anyio.run(truncate)


def test_reader_that_lost_its_place_is_told_so_and_reads_on_when_it_is_opened_anew(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")

    async def read() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await read_some(node, "orders", "billing", messages=3)

    anyio.run(read)
    begins = shorten_log(path)
    [finding] = verify_directory(path).findings
    assert (finding.kind, finding.severity) == (Kind.BEHIND, Severity.WARNING)
    assert finding.place == "log, named reader 'billing' of collection 'orders'"
    assert f"the log begins at {begins}:" in finding.detail

    async def open_it() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            assert (await node.verify()).findings == [finding]
            with pytest.raises(Truncated, match="no longer kept"):
                await read_some(node, "orders", "billing", messages=None)
            await node.delete_reader("orders", "billing")
            assert await read_some(node, "orders", "billing", messages=None) > 0
            assert (await node.verify()).findings == []

    anyio.run(open_it)
    assert verify_directory(path).findings == []
    assert rows_of(path) == sample.rows


@pytest.mark.parametrize("drop", ["never", "before the cut", "after the cut"])
def test_reader_of_a_dropped_collection_lost_nothing(sample: Sample, tmp_path: Path, drop: str) -> None:
    path = copy_of(sample.closed, tmp_path / "node")

    async def work() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await node.create_collection("brief", SCHEMA, primary_key="id")
            await node.insert("brief", [{"id": 1, "item": None}])
            assert await read_some(node, "brief", "idle", messages=1) == 1
            for key in range(1, 100):
                await node.insert("orders", [{"id": -key, "item": "later"}])
            if drop == "before the cut":
                await node.drop_collection("brief")
            await node.flush()
            if drop == "after the cut":
                await node.drop_collection("brief")

    anyio.run(work)
    assert [key for key in read_node_records(path)[1].readers if key.endswith("/idle")], "its record is still there"
    shorten_log(path)
    assert len(verify_directory(path).findings) == (drop == "never")
