"""Whole nodes on a real disk that fills up: what is refused, what goes on, what is left, and how
soon it is over.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.node import Node
from streamingnode.opening import OpenNode
from tests.chaos.small_disk import SmallDisk, lacking, small_disk
from tests.streamingnode.append_double import schema_of
from wal.errors import StorageFull, StreamingNodeError

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

MIB = 1 << 20
SCHEMA = schema_of(id=pa.int64(), item=pa.string())
ROW = {"id": -1, "item": "tea"}
ROWS_PER_BATCH = 256
RESUMES_S = 5.0
HANGS_S = 60


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if lack := lacking():
        pytest.skip(lack)
    with small_disk(tmp_path, 64 * MIB) as disk:
        yield disk


def batch(start: int, *, compressible: bool = False) -> pa.Table:
    """A quarter of a MiB, and in a file either as much or next to nothing."""
    texts = ["tea" * 341 if compressible else os.urandom(512).hex() for _ in range(ROWS_PER_BATCH)]
    return pa.table({"id": range(start, start + ROWS_PER_BATCH), "item": texts}, schema=SCHEMA)


def opened(
    disk: SmallDisk, *, free_bytes_min: int = 4 * MIB, min_age_short_s: float = 3600
) -> OpenNode:
    """Open a node whose log, unless said otherwise, is kept for readers however short the disk
    is.
    """
    settings: dict[str, Any] = {"flush.retention.min_age_short_s": min_age_short_s}
    return sn.open_node(
        disk.path / "node", free_bytes_min=free_bytes_min, cut_interval_s=None, **settings
    )


async def a_moment() -> None:
    """Leave the processor to the node."""
    await anyio.to_thread.run_sync(threading.Event().wait, 0.02)


async def fill(node: Node, acknowledged: int = 0) -> int:
    """Insert until it is refused; return how many rows have been acknowledged by then."""
    with anyio.fail_after(HANGS_S):
        while True:
            try:
                await node.insert("orders", batch(acknowledged))
            except StorageFull:
                return acknowledged
            acknowledged += ROWS_PER_BATCH


async def until_it_appends(node: Node) -> float:
    """Insert one row as soon as that is possible; return after how many seconds it was."""
    began = time.monotonic()
    with anyio.fail_after(HANGS_S):
        while True:
            try:
                await node.insert("orders", [ROW])
            except StreamingNodeError:
                await a_moment()
            else:
                return time.monotonic() - began


async def read_back(node: Node) -> int:
    """Return how many rows readers and the snapshot see, which is the same."""
    async with node.read("orders", until=await node.consistent_tick()) as messages:
        read = sum([message.num_rows async for message in messages])
    assert (await node.snapshot("orders")).num_rows == read
    return read


async def test_a_full_disk_refuses_appends_serves_readers_and_takes_appends_again_by_itself(
    disk: SmallDisk,
) -> None:
    async with opened(disk) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await node.insert("orders", batch(0))
        disk.fill()
        acknowledged = await fill(node, ROWS_PER_BATCH)
        assert await read_back(node) == acknowledged
        with pytest.raises(StorageFull, match="free space on that disk"):
            async with node.transaction() as txn:
                await txn.insert("orders", [ROW])
        disk.free()
        resumed_s = await until_it_appends(node)
        print(f"appends resumed {resumed_s:.3f} s after space was freed")
        assert resumed_s < RESUMES_S
        assert await read_back(node) == acknowledged + 1
    async with opened(disk) as node:
        assert await read_back(node) == acknowledged + 1


async def test_a_disk_that_log_itself_fills_loses_nothing_and_is_never_written_to_the_last_block(
    disk: SmallDisk,
) -> None:
    async with opened(disk) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        acknowledged = await fill(node)
        assert disk.free_bytes >= MIB
        assert (disk.path / "node" / "reserve").stat().st_size > 0
        assert await read_back(node) == acknowledged
    async with opened(disk) as node:
        assert await read_back(node) == acknowledged


async def test_a_node_takes_far_more_than_its_disk_when_what_is_in_files_is_small(
    disk: SmallDisk,
) -> None:
    async with opened(disk, min_age_short_s=0) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        acknowledged = 0
        refused = 0
        with anyio.fail_after(HANGS_S):
            while acknowledged < 320 * ROWS_PER_BATCH:
                try:
                    await node.insert("orders", batch(acknowledged, compressible=True))
                    acknowledged += ROWS_PER_BATCH
                except StorageFull:
                    refused += 1
                    await a_moment()
        print(f"{acknowledged >> 10} MiB on a disk of 64 MiB, {refused} appends refused on the way")
        rows = await node.snapshot("orders")
        assert rows.num_rows == acknowledged
        assert set(rows["id"].to_pylist()) == set(range(acknowledged))


async def test_a_write_that_finds_no_room_is_open_until_the_log_is_reopened_by_itself(
    disk: SmallDisk,
) -> None:
    disk.leave(24 * MIB)
    # without a mark nothing is refused before RocksDB fails
    async with opened(disk, free_bytes_min=0) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        acknowledged: list[int] = []
        errors: list[StreamingNodeError] = []
        with anyio.fail_after(HANGS_S):
            while len(errors) < 5:
                start = ROWS_PER_BATCH * (len(acknowledged) + len(errors))
                try:
                    await node.insert("orders", batch(start), timeout=1)
                    acknowledged.append(start)
                except StreamingNodeError as error:
                    errors.append(error)
        print("refused:", [f"{type(error).__name__}: {error}" for error in errors])
        assert not [error for error in errors if error.retryable == "no"]
        disk.free()
        resumed_s = await until_it_appends(node)
        print(f"appends resumed {resumed_s:.3f} s after space was freed")
        assert resumed_s < RESUMES_S
        rows = [
            each for each in (await node.snapshot("orders"))["id"].to_pylist() if each is not None
        ]
        assert len(rows) == len(set(rows))
        assert {start for start in rows if start % ROWS_PER_BATCH == 0} >= set(acknowledged)


async def test_a_named_reader_keeps_its_log_on_a_disk_short_of_space(disk: SmallDisk) -> None:
    async with opened(disk, min_age_short_s=0) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        async with node.read("orders", sn.DeliverPolicy.all(), name="billing"):
            pass
        with anyio.fail_after(HANGS_S):
            acknowledged = 0
            while True:
                try:
                    await node.insert("orders", batch(acknowledged, compressible=True))
                except StorageFull:
                    break
                acknowledged += ROWS_PER_BATCH
        until = await node.consistent_tick()
        async with node.read("orders", name="billing", until=until) as messages:
            assert sum([message.num_rows async for message in messages]) == acknowledged


async def test_a_cut_without_room_says_so_and_is_made_when_there_is_room(disk: SmallDisk) -> None:
    async with opened(disk, free_bytes_min=0) as node:  # no mark, so no cut but the one asked for
        await node.create_collection("orders", SCHEMA, primary_key="id")
        for start in range(0, 40 * ROWS_PER_BATCH, ROWS_PER_BATCH):
            await node.insert("orders", batch(start))
        acknowledged = 40 * ROWS_PER_BATCH
        disk.leave(3 * MIB)
        for timeout in (None, 30, 1):
            with pytest.raises(StorageFull, match="free space on that disk"):
                await node.flush(timeout=timeout)
        assert not list((disk.path / "node" / "cuts").glob("*"))
        assert await read_back(node) == acknowledged, "the log is kept while no file has its rows"
        began = time.monotonic()
        disk.free()
        cut = await node.flush(timeout=30)
        print(f"the cut was in files {time.monotonic() - began:.3f} s after space was freed")
        assert cut.number == 1
        assert await read_back(node) == acknowledged
    async with opened(disk) as node:
        assert (await node.snapshot("orders")).num_rows == acknowledged


async def test_a_node_opens_on_a_full_disk_for_reading_and_refuses_appends_until_there_is_room(
    disk: SmallDisk,
) -> None:
    async with opened(disk) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await node.insert("orders", batch(0))
    disk.fill()
    async with opened(disk) as node:
        assert await read_back(node) == ROWS_PER_BATCH
        with pytest.raises(StorageFull):
            await node.insert("orders", [ROW])
        assert (await node.flush(timeout=30)).number == 1, (
            "the reserve has room for what makes room"
        )
        disk.free()
        assert await until_it_appends(node) < RESUMES_S


async def test_a_node_that_closes_on_a_full_disk_has_lost_nothing_at_the_next_open(
    disk: SmallDisk,
) -> None:
    async with opened(disk) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        for start in range(0, 8 * ROWS_PER_BATCH, ROWS_PER_BATCH):
            await node.insert("orders", batch(start))
        disk.fill()
    async with opened(disk) as node:
        assert await read_back(node) == 8 * ROWS_PER_BATCH


KILLED = """
import os, sys
from pathlib import Path
import anyio
from tests.chaos.small_disk import SmallDisk
from tests.test_full_disk import SCHEMA, batch, fill, opened

async def main():
    async with opened(SmallDisk(Path(sys.argv[1]))) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        print(await fill(node), flush=True)
        os.kill(os.getpid(), 9)

anyio.run(main)
"""


async def fill_and_be_killed(disk: SmallDisk) -> int:
    """Fill the disk from another process, which is killed then; return how many rows were
    acknowledged.
    """
    command = [sys.executable, "-c", KILLED, str(disk.path)]
    killed = await anyio.run_process(
        command, check=False, stderr=None, cwd=Path(__file__).parent.parent
    )
    assert killed.returncode == -9
    return int(killed.stdout)


async def test_a_killed_node_opens_again_on_a_full_disk_because_of_its_reserve(
    disk: SmallDisk,
) -> None:
    acknowledged = await fill_and_be_killed(disk)
    disk.fill()
    async with opened(disk) as node:
        assert await read_back(node) == acknowledged


async def test_a_killed_node_without_its_reserve_says_what_it_needs_and_opens_when_there_is_room(
    disk: SmallDisk,
) -> None:
    acknowledged = await fill_and_be_killed(disk)
    (disk.path / "node" / "reserve").unlink()
    disk.fill()
    for _ in range(2):
        with pytest.raises(StorageFull, match="free space on that disk") as full:
            await opened(disk)
        assert full.value.needed_bytes > MIB
    disk.free()
    async with opened(disk) as node:
        assert await read_back(node) == acknowledged
        await node.insert("orders", [ROW])
        assert await read_back(node) == acknowledged + 1


async def test_a_node_without_room_for_its_first_tick_says_so_and_opens_when_there_is_room(
    disk: SmallDisk,
) -> None:
    async with opened(disk) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        for start in range(0, 40 * ROWS_PER_BATCH, ROWS_PER_BATCH):
            await node.insert("orders", batch(start, compressible=True))
        await node.flush()
        tick = await node.consistent_tick()
    (disk.path / "node" / "reserve").unlink()
    disk.leave(MIB // 2)
    with pytest.raises(StorageFull, match="free space on that disk"):
        await opened(disk)
    disk.free()
    async with opened(disk) as node:
        assert await node.consistent_tick() > tick
        assert await read_back(node) == 40 * ROWS_PER_BATCH
        await node.insert("orders", [ROW])
