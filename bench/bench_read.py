"""Reading a whole collection through the public interface, against plain iteration over as many
packed values.
"""

import sys
import time
from functools import partial
from pathlib import Path

import anyio.to_thread

from bench.baseline import measure_plain_scan, scratch
from bench.measurement import Measurement, median
from bench.report import Settings, main, note
from bench.rows import ROW_BYTES, create, rows_of
from scanner.deliver_policy import DeliverPolicy
from streamingnode.node import Node
from streamingnode.opening import open_node, run_async

ROWS = 100_000
BATCH = 100
READ_AIM = 0.5


def run(settings: Settings) -> list[Measurement]:
    """Return rows per second of `read` from the start, each message decoded to Arrow."""
    return run_async(partial(_measure_read, settings))


async def _measure_read(settings: Settings) -> list[Measurement]:
    note("read")
    bare = []
    ours = []
    with scratch(settings.directory) as path:
        async with open_node(path) as node:
            collection = await create(node, "rows")
            next_rows = rows_of(BATCH)
            for _ in range(ROWS // BATCH):
                await node.insert(collection, next_rows())
        for _ in range(settings.repeats):
            # Opened anew, so that the rows come from the log and not from the memory of their
            # insert.
            async with open_node(path) as node:
                ours.append(await _read(node, collection))
            bare.append(await anyio.to_thread.run_sync(_plain_scan, settings.directory))
    return [
        Measurement(
            name="read",
            case=f"{ROWS} rows, {BATCH} in a message",
            value=median(ours),
            unit="rows/s",
            baseline=median(bare),
            aim=READ_AIM,
        )
    ]


async def _read(node: Node, collection: str) -> float:
    began = time.perf_counter()
    rows = 0
    async with node.read(
        collection, DeliverPolicy.all(), until=await node.consistent_tick()
    ) as messages:
        async for message in messages:
            decoded = message.to_arrow()
            rows += decoded.num_rows if decoded is not None else 0
    assert rows == ROWS, f"{rows} rows were read, {ROWS} inserted"
    return rows / (time.perf_counter() - began)


def _plain_scan(directory: Path) -> float:
    return measure_plain_scan(directory, rows=ROWS, row_bytes=ROW_BYTES, batch=BATCH)


if __name__ == "__main__":
    sys.exit(main("reading a collection through the public interface", run))
