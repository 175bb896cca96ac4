"""All benchmarks by name, each as a function from settings to measurements.

Those that measure one part alone (scan, flush, ingest) keep results of their own; what they say is
put into the common form here.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec

from bench import (
    bench_append,
    bench_checks,
    bench_cut,
    bench_day,
    bench_flush,
    bench_freshness,
    bench_ingest,
    bench_latency,
    bench_memory,
    bench_metrics,
    bench_peers,
    bench_read,
    bench_remote,
    bench_scan,
    bench_service,
    bench_snapshot,
    bench_streams,
    bench_topics,
    bench_writes,
)
from bench.measurement import Measurement
from bench.report import Run, Settings, note

SCAN_AIM = 0.5
FLUSH_AIM = 0.85
SCAN_CASES = ((100, 100_000), (1, 50_000))
INGEST_SEGMENTS = 10
INGEST_ROWS = 100_000


def scan(settings: Settings) -> list[Measurement]:
    """Measure scans of a log store."""
    note("scan")
    found = []
    for batch_rows, rows in SCAN_CASES:
        count = max(batch_rows, int(rows * settings.scale) // batch_rows * batch_rows)
        measured = asyncio.run(
            bench_scan.measure_scan(settings.directory, batch_rows=batch_rows, rows=count)
        )
        found.append(
            Measurement(
                name="scan",
                case=f"log, {batch_rows} in an entry",
                value=measured.log_rows_per_s,
                unit="rows/s",
                baseline=measured.plain_rows_per_s,
                aim=SCAN_AIM,
                note=f"live tail {measured.tail_rows_per_s:,.0f} rows/s",
            )
        )
    return found


def flush(settings: Settings) -> list[Measurement]:
    """Measure the flusher alone."""
    found = []
    for case in bench_flush.CASES:
        note(f"flush {case.table}, {case.shards} shards")
        scaled = msgspec.structs.replace(case, rows=max(1_000, int(case.rows * settings.scale)))
        result = anyio.run(bench_flush.measure, scaled, settings.repeats)
        found.append(
            Measurement(
                name="flush",
                case=f"{case.table}, {case.batch_rows} in a message, {case.shards} shards",
                value=result.rows_per_s,
                unit="rows/s",
                baseline=result.rows_per_s / result.ratio,
                aim=FLUSH_AIM,
                note=f"with the system columns in both {result.ratio_all_columns:.2f}",
            )
        )
    return found


def ingest(settings: Settings) -> list[Measurement]:
    """Measure Spark's side."""
    note("ingest")
    import spark_sink

    spark = spark_sink.session()
    root = Path(tempfile.mkdtemp(dir=settings.directory, prefix="bench-"))
    try:
        rows = max(1_000, int(INGEST_ROWS * settings.scale))
        results = bench_ingest.measure(
            spark, root, segments=INGEST_SEGMENTS, rows=rows, rounds=settings.repeats
        )
    finally:
        shutil.rmtree(root)
        spark.stop()
    return [_ingested(result) for result in results]


def _ingested(result: bench_ingest.Measured) -> Measurement:
    if result.rows_per_s is None:
        return Measurement(name="ingest", case=result.what, value=result.seconds, unit="s")
    baseline = result.rows_per_s / result.ratio if result.ratio else 0.0
    return Measurement(
        name="ingest", case=result.what, value=result.rows_per_s, unit="rows/s", baseline=baseline
    )


BENCHMARKS: dict[str, Run] = {
    "append": bench_append.run,
    "writes": bench_writes.run,
    "checks": bench_checks.run,
    "peers": bench_peers.run,
    "service": bench_service.run,
    "latency": bench_latency.run,
    "read": bench_read.run,
    "scan": scan,
    "cut": bench_cut.run,
    "flush": flush,
    "ingest": ingest,
    "freshness": bench_freshness.run,
    "day": bench_day.run,
    "remote": bench_remote.run,
    "topics": bench_topics.run,
    "streams": bench_streams.run,
    "metrics": bench_metrics.run,
    "snapshot": bench_snapshot.run,
    "memory": bench_memory.run,
}

LONG = frozenset({"day", "freshness", "memory", "remote", "snapshot", "topics"})
"""Only run when they are named."""


def run_all(names: Sequence[str], settings: Settings) -> list[Measurement]:
    """Run the named benchmarks one after the other."""
    return [measured for name in names for measured in BENCHMARKS[name](settings)]
