"""Snapshots after many small cuts against those of the same rows after one: of tables that took
them, and of files. Long.

Both nodes are ingested in one Spark session and then read in turn, each open, in this process. With
a table a snapshot goes by its newest version and by what followed it, so the number of cuts before
that should not matter.
"""

import sys
import time
from functools import partial
from pathlib import Path

import pyarrow as pa

from bench.baseline import scratch
from bench.measurement import Measurement, median
from bench.report import Settings, main, note
from streamingnode.node import Node
from streamingnode.opening import open_node, run_async

CUTS = 1_000
CUT_ROWS = 5
KEYS = 3_000
ROUNDS = 20
"""Snapshots of each node in a run, in turn."""
MANY_CUTS_AIM = 0.5
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)]).append(
    pa.field("item", pa.string())
)


def run(settings: Settings) -> list[Measurement]:
    """Return snapshots per second after `CUTS` cuts; the baseline is that of one cut with the same
    rows.
    """
    cuts = max(10, int(CUTS * settings.scale))
    with scratch(settings.directory) as path:
        many = path / "many"
        one = path / "one"
        note(f"snapshot: {cuts} cuts of {CUT_ROWS} rows")
        run_async(partial(_fill, many, cuts, CUT_ROWS))
        run_async(partial(_fill, one, 1, min(KEYS, cuts * CUT_ROWS)))
        files = run_async(partial(_measure, many, one, settings.repeats))
        note("snapshot: ingest")
        import spark_sink  # the other benchmarks run without Spark

        spark = spark_sink.session()
        try:
            for node in (many, one):
                spark_sink.ingest(spark, node, node.with_name(f"{node.name}-tables"))
        finally:
            spark.stop()
        tables = run_async(partial(_measure, many, one, settings.repeats))
    return [
        _measurement(f"{cuts} cuts in a table", tables, aim=MANY_CUTS_AIM),
        _measurement(f"{cuts} cuts in files alone", files, aim=0.0),
    ]


async def _fill(path: Path, cuts: int, rows: int) -> None:
    """Make cuts of rows that replace earlier ones once there are `KEYS`."""
    async with open_node(path, cut_interval_s=None) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        for number in range(cuts):
            keys = range(number * rows, (number + 1) * rows)
            await node.upsert("orders", [{"id": key % KEYS, "item": f"item {key}"} for key in keys])
            await node.flush()


async def _measure(many: Path, one: Path, repeats: int) -> tuple[float, float]:
    """Return the median of snapshots per second of both nodes."""
    async with (
        open_node(many, cut_interval_s=None) as first,
        open_node(one, cut_interval_s=None) as second,
    ):
        for node in (first, second):
            await _snapshot(node)  # imports, and manifests that are read once
        taken = [(await _snapshot(first), await _snapshot(second)) for _ in range(repeats * ROUNDS)]
    return 1 / median([each for each, _ in taken]), 1 / median([each for _, each in taken])


async def _snapshot(node: Node) -> float:
    began = time.perf_counter()
    await node.snapshot("orders")
    return time.perf_counter() - began


def _measurement(case: str, rates: tuple[float, float], *, aim: float) -> Measurement:
    return Measurement(
        name="snapshot", case=case, value=rates[0], unit="snapshots/s", baseline=rates[1], aim=aim
    )


if __name__ == "__main__":
    sys.exit(main("snapshots after many cuts", run))
