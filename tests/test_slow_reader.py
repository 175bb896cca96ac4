"""Readers that do not keep up cost nobody else anything: neither rows nor memory."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pyarrow as pa
import pytest

import streamingnode as sn
from tests.streamingnode.append_double import schema_of
from wal.errors import StorageFull

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

MIB = 1 << 20
SCHEMA = schema_of(id=pa.int64(), item=pa.string())
SMALL: dict[str, Any] = {
    "cut_interval_s": None,
    "tail.capacity_bytes": MIB,
    "log.memtable_bytes": MIB,
    # the flusher's rows in memory come and go with each row group
    "flush.row_group_bytes": 2 * MIB,
}
ROWS_PER_BATCH = 256
LATEST = sn.DeliverPolicy.latest()
READERS = 20
GROWTH_BYTES_MAX = 48 * MIB
"""It is 15 to 24 MiB, and was 33 MiB where the flusher lagged on a busy machine. One reader that
kept its rows would add 64 MiB.
"""


def rows(start: int) -> pa.Table:
    """A quarter of a MiB."""
    return pa.table(
        {"id": range(start, start + ROWS_PER_BATCH), "item": ["x" * 1024] * ROWS_PER_BATCH},
        schema=SCHEMA,
    )


def resident_bytes() -> int:
    """Return how much memory this process has; Linux only."""
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


async def inserting(node: sn.Node, start: int, batches: int) -> None:
    for number in range(batches):
        await node.insert("orders", rows(start + number * ROWS_PER_BATCH))


async def measure(path: str) -> None:
    """Run in a process of its own: how much memory 64 MiB of rows take that twenty readers do not
    read.
    """
    async with sn.open_node(path, **SMALL) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await inserting(node, 0, 128)
        readers = [node.read("orders", LATEST) for _ in range(READERS)]
        for reader in readers:
            await reader.__aenter__()
        await inserting(node, 2_000_000, 32)
        before = resident_bytes()
        await inserting(node, 3_000_000, 256)
        print(resident_bytes() - before, flush=True)
        for reader in readers:
            read = sum(
                [message.num_rows async for message in _some(reader, (32 + 256) * ROWS_PER_BATCH)]
            )
            assert read == (32 + 256) * ROWS_PER_BATCH, read
            await reader.__aexit__(None, None, None)


async def _some(reader, rows_max: int):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    seen = 0
    async for message in reader:
        yield message
        seen += message.num_rows
        if seen >= rows_max:
            return


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read off /proc")
def test_readers_that_do_not_read_cost_no_memory_and_miss_nothing_when_they_do(
    tmp_path: Path,
) -> None:
    program = (
        "import anyio; from tests.test_slow_reader import measure; anyio.run(measure, "
        f"{str(tmp_path / 'n')!r})"
    )
    root = Path(__file__).parent.parent
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    growth = int(ran.stdout)
    print(f"{READERS} readers that do not read: {growth / MIB:.1f} MiB more for 64 MiB of rows")
    assert growth < GROWTH_BYTES_MAX


async def test_a_slow_reader_gets_every_row_after_it_fell_behind(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path, **SMALL) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        async with node.read("orders", LATEST) as slow, node.read("orders", LATEST) as quick:
            for number in range(64):
                await node.insert("orders", rows(number * ROWS_PER_BATCH))
                with anyio.fail_after(60):
                    assert (await anext(quick)).num_rows == ROWS_PER_BATCH
            found: list[int] = []
            async for message in slow:
                batch = message.to_arrow()
                assert batch is not None
                found += [each for each in batch["id"].to_pylist() if each is not None]
                if len(found) == 64 * ROWS_PER_BATCH:
                    break
            assert found == list(range(64 * ROWS_PER_BATCH))


async def test_a_node_in_memory_gives_up_what_is_in_files_before_it_refuses(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"memory.bytes_max": 8 * MIB}
    async with sn.open_node(None, cut_interval_s=None, **settings) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        acknowledged = 0
        with anyio.fail_after(60):
            while acknowledged < 128 * ROWS_PER_BATCH:
                try:
                    await node.insert("orders", rows(acknowledged))
                    acknowledged += ROWS_PER_BATCH
                except StorageFull:  # leave the processor to the flusher
                    await anyio.to_thread.run_sync(threading.Event().wait, 0.02)
        assert (await node.snapshot("orders")).num_rows == acknowledged
