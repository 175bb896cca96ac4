"""How much a node grows between the first and the fourth GiB inserted, with the flusher cutting all
the while. Long.

What counts is the largest resident size in the last half GiB before each mark, so that a cut that
happens to run at one mark does not decide. Needs about 9 GiB of disk.
"""

import asyncio
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from bench.baseline import scratch
from bench.measurement import Measurement
from bench.report import Settings, main, note
from bench.rows import ROW_BYTES, create, rows_of
from streamingnode.node import Node
from streamingnode.opening import open_node, run_async

FIRST_BYTES = 1 << 30
LAST_BYTES = 4 << 30
WINDOW_BYTES = 1 << 29
BATCH = 1_000
OUTSTANDING = 4
GROWTH_AIM_MIB = 64.0
CUT_INTERVAL_S = 5.0


@dataclass(slots=True)
class Watch:
    """The largest resident size seen in each window."""

    first: int = 0
    last: int = 0

    def look(self, inserted: int, *, first_at: int, last_at: int, window: int) -> None:
        """Take in the resident size now, after `inserted` bytes."""
        resident = psutil.Process().memory_info().rss
        if first_at - window < inserted <= first_at:
            self.first = max(self.first, resident)
        if last_at - window < inserted <= last_at:
            self.last = max(self.last, resident)


def run(settings: Settings) -> list[Measurement]:
    """Return the growth in MiB; `scale` below 1 makes a shorter run that proves less."""
    note("memory")
    watch = run_async(partial(_insert_all, settings.directory, settings.scale))
    growth = (watch.last - watch.first) / 2**20
    return [
        Measurement(
            name="memory",
            case=f"growth from {settings.scale:g} to {4 * settings.scale:g} GiB inserted",
            value=growth,
            unit="MiB",
            aim=GROWTH_AIM_MIB,
            note=f"resident {watch.first >> 20} MiB, then {watch.last >> 20} MiB",
        )
    ]


async def _insert_all(directory: Path, scale: float) -> Watch:
    watch = Watch()
    first_at, last_at, window = (
        int(size * scale) for size in (FIRST_BYTES, LAST_BYTES, WINDOW_BYTES)
    )
    with scratch(directory) as path:
        async with open_node(path, cut_interval_s=CUT_INTERVAL_S) as node:
            collection = await create(node, "rows")
            inserted = 0
            while inserted < last_at:
                inserted += await _insert_some(node, collection)
                watch.look(inserted, first_at=first_at, last_at=last_at, window=window)
            await node.flush()
    return watch


async def _insert_some(node: Node, collection: str) -> int:
    next_rows = rows_of(BATCH)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(OUTSTANDING):
            tasks.create_task(node.insert(collection, next_rows()))
    return OUTSTANDING * BATCH * ROW_BYTES


if __name__ == "__main__":
    sys.exit(main("memory growth of a node that inserts and cuts", run))
