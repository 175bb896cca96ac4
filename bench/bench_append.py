"""Durable appends through the public interface, against a bare group commit on the same disk, in
turn.
"""

import sys
from functools import partial
from pathlib import Path

from bench.baseline import Load, Measured, measure_bare_appends, measure_warm, scratch
from bench.measurement import Measurement, median
from bench.report import Settings, main, note
from bench.rows import create, inserts_of
from streamingnode.opening import open_node, run_async

GRID: tuple[tuple[int, int, float], ...] = (
    (1, 1, 0.5),
    (64, 1, 0.45),
    (1000, 1, 0.45),
    (1, 100, 0.7),
    (16, 100, 0.7),
)
"""Outstanding inserts, rows in each, and the part of the limit to reach."""


def run(settings: Settings) -> list[Measurement]:
    """Return rows per second for each cell of the grid; product and limit take turns on one
    disk.
    """
    return run_async(partial(_measure_grid, settings))


async def _measure_grid(settings: Settings) -> list[Measurement]:
    found = []
    for outstanding, batch, aim in GRID:
        load = Load(outstanding=outstanding, batch=batch, seconds=settings.seconds)
        case = f"{outstanding} x {batch}"
        note(f"append {case}")
        bare: list[Measured] = []
        ours: list[Measured] = []
        for _ in range(settings.repeats):
            bare.append(await measure_bare_appends(load, settings.directory))
            ours.append(await measure_node_appends(load, settings.directory))
        found.append(_summary(case, bare, ours, aim))
    return found


async def measure_node_appends(load: Load, directory: Path) -> Measured:
    """Return what a new node does under `load`, on the disk of `directory`, once it is warm."""
    with scratch(directory) as path:
        async with open_node(path) as node:
            collection = await create(node, "rows")
            return await measure_warm(load, inserts_of(node, collection, load.batch))


def _summary(case: str, bare: list[Measured], ours: list[Measured], aim: float) -> Measurement:
    p50_ms = median([measured.p50_s for measured in ours]) * 1000
    p99_ms = median([measured.p99_s for measured in ours]) * 1000
    return Measurement(
        name="append",
        case=case,
        value=median([measured.rows_per_s for measured in ours]),
        unit="rows/s",
        baseline=median([measured.rows_per_s for measured in bare]),
        aim=aim,
        note=f"p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms",
    )


if __name__ == "__main__":
    sys.exit(main("durable appends against a bare group commit", run))
