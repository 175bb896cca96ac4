"""Durable appends against the best durable peer a Python process has without another machine: Redis
Streams.

Rows of 1 KiB, acknowledged after fsync on both sides, in turn on the same disk: ours through the
public interface and the full chain, the peer's with one entry for each row, a batch of them
pipelined.
"""

import itertools
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pyarrow as pa

from bench.baseline import Load, Measured, measure_warm
from bench.bench_append import GRID, measure_node_appends
from bench.measurement import Measurement, median
from bench.redis_streams import Connection, connected, entry_command, lacking, serving
from bench.report import Settings, main, note
from bench.rows import record_batch
from streamingnode.opening import run_async

_BATCHES = 64
"""Batches made before the clock starts and used in turn."""


def run(settings: Settings) -> list[Measurement]:
    """Return rows per second for each cell of the grid; nothing on a machine without the peer,
    which is said.
    """
    if lack := lacking():
        note(f"peers are left out: {lack}")
        return []
    return run_async(partial(measure_peers, settings))


async def measure_peers(settings: Settings) -> list[Measurement]:
    """Measure node and peer in turn."""
    found = []
    for outstanding, batch, _ in GRID:
        note(f"peers {outstanding} x {batch}")
        load = Load(outstanding=outstanding, batch=batch, seconds=settings.seconds)
        ours: list[Measured] = []
        theirs: list[Measured] = []
        for _ in range(settings.repeats):
            theirs.append(await measure_redis(load, settings.directory))
            ours.append(await measure_node_appends(load, settings.directory))
        found.append(_summary(f"{outstanding} x {batch}, Redis Streams", ours, theirs))
    return found


async def measure_redis(load: Load, directory: Path) -> Measured:
    """Return what the peer does under `load`, on the disk of `directory`."""
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="bench-") as scratch,
        serving(Path(scratch)) as socket,
    ):
        async with connected(socket) as connection:
            return await measure_warm(load, _appends(connection, load.batch))


def _appends(connection: Connection, batch: int) -> Callable[[], Awaitable[object]]:
    commands = itertools.cycle(
        [_commands(record_batch(number * batch, batch)) for number in range(_BATCHES)]
    )
    return lambda: connection.append(next(commands), batch)


def _commands(rows: pa.RecordBatch) -> bytes:
    return b"".join(
        entry_command(b"rows", str(row["id"]).encode(), row["value"]) for row in rows.to_pylist()
    )


def _summary(case: str, ours: list[Measured], theirs: list[Measured]) -> Measurement:
    def p50_ms(measured: list[Measured]) -> float:
        return median([each.p50_s for each in measured]) * 1000

    return Measurement(
        name="peers",
        case=case,
        value=median([measured.rows_per_s for measured in ours]),
        unit="rows/s",
        baseline=median([measured.rows_per_s for measured in theirs]),
        note=f"p50 {p50_ms(ours):.2f} ms, theirs {p50_ms(theirs):.2f} ms",
    )


if __name__ == "__main__":
    sys.exit(main("durable appends against Redis Streams", run))
