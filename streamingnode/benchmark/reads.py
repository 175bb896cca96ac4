"""Reading a whole collection through the public interface, against plain iteration over as many packed values."""

import time
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread

from scanner.deliver_policy import DeliverPolicy
from streamingnode.benchmark.baseline import measure_plain_scan, scratch
from streamingnode.benchmark.measurement import Measurement, median
from streamingnode.benchmark.rows import ROW_BYTES, create, rows_of
from streamingnode.node import Node
from streamingnode.opening import open_node

ROWS = 100_000
BATCH = 100
SCAN_AIM = 0.5


async def measure_scan(directory: Path, *, repeats: int, progress: Callable[[str], None]) -> list[Measurement]:
    """Return rows per second of `read` from the start, each message decoded to Arrow."""
    progress("scan")
    bare, ours = [], []
    with scratch(directory) as path:
        async with open_node(path) as node:
            collection = await create(node, "rows")
            next_rows = rows_of(BATCH)
            for _ in range(ROWS // BATCH):
                await node.insert(collection, next_rows())
        for _ in range(repeats):
            # Opened anew, so that the rows come from the log and not from the memory of their insert.
            async with open_node(path) as node:
                ours.append(await _scan(node, collection))
            bare.append(await anyio.to_thread.run_sync(_plain_scan, directory))
    return [
        Measurement(
            name="scan",
            case=f"{ROWS} rows, {BATCH} in a message",
            value=median(ours),
            unit="rows/s",
            baseline=median(bare),
            aim=SCAN_AIM,
        )
    ]


async def _scan(node: Node, collection: str) -> float:
    began, rows = time.perf_counter(), 0
    async with node.read(collection, DeliverPolicy.all(), until=await node.consistent_tick()) as messages:
        async for message in messages:
            decoded = message.to_arrow()
            rows += decoded.num_rows if decoded is not None else 0
    assert rows == ROWS, f"{rows} rows were read, {ROWS} inserted"
    return rows / (time.perf_counter() - began)


def _plain_scan(directory: Path) -> float:
    return measure_plain_scan(directory, rows=ROWS, row_bytes=ROW_BYTES, batch=BATCH)
