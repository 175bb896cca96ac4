"""A table after a day of small cuts, one every two seconds, taken by an ingest that stays. Long.

Each of 43,200 rounds takes a real cut into a real table, one after the other without a pause, so
the day passes in an hour or two, and what goes by age (old versions, files that none needs, cuts
that are taken) has ages that are as much shorter. In the end all rows are written once more, in
files as large as the ingest makes them, and both are scanned by Spark in turn.

    python -m bench.bench_day --scale 1
"""

import json
import shutil
import sys
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from unittest.mock import patch

from pyspark.sql import DataFrame, SparkSession

import spark_sink
from bench.baseline import scratch
from bench.bench_ingest import NodeDirectory, medians_s
from bench.measurement import Measurement
from bench.report import Settings, main, note
from flusher.directory import cut_numbers, manifest_path
from spark_sink import resident
from spark_sink.commit import FILE_BYTES_TARGET
from spark_sink.table import OpenTable
from spark_sink.upkeep import NEWEST_FILES, SMALL_FILE_BYTES, SMALL_FILES_MAX

DAY_S = 86_400
EVERY_S = 2.0
ROWS_A_CUT = 1_000
CUTS_KEPT = 1_800
"""An hour's, as a node keeps them that every table has taken."""
KEEP_S = resident.KEEP_S_MIN
"""Instead of the hour of versions that an ingest keeps by default: the day is that much shorter
here, about.
"""
LOG_AIM = 2 * CUTS_KEPT + 1_000
SCAN_AIM = 1 / 1.3
"""Files of the table's log, and the scan's share of that of the rows written once."""
SMALL_AIM = SMALL_FILES_MAX + NEWEST_FILES + 24
"""Small files of the newest version: as many as wait to become one. Larger ones are as many as
there are rows for.
"""


def run(settings: Settings) -> list[Measurement]:
    """Return how many files a table of a day has, in its newest version and in its log, and how
    fast it is scanned.
    """
    cuts = max(2, int(DAY_S / EVERY_S * settings.scale))
    note(f"day, {cuts:,} cuts")
    with scratch(settings.directory) as path:
        node = NodeDirectory(path / "node")
        began = time.monotonic()
        slowest_s, most = _take_day(node, path / "tables", cuts)
        took_s = time.monotonic() - began
        table = OpenTable.load(path / "tables" / "orders")
        assert table is not None
        rows = cuts * ROWS_A_CUT
        files = table.files()
        small = sum(file.bytes < SMALL_FILE_BYTES for file in files)
        log = sum(1 for _ in (table.path / "_delta_log").iterdir())
        on_disk = sum(1 for _ in table.path.rglob("*.parquet"))
        note(f"{len(files)} files, {on_disk} on disk, {log} in the log; now Spark")
        spark = spark_sink.session()
        try:
            scans = _scans(spark, table, path / "once", rows, settings.repeats)
        finally:
            spark.stop()
    said = f"{cuts:,} cuts in {took_s:,.0f} s, the slowest round {slowest_s:.2f} s"
    return [
        Measurement(
            name="day", case="files of the table", value=len(files), unit="files", note=said
        ),
        Measurement(
            name="day", case="small ones of them", value=small, unit="files", aim=SMALL_AIM
        ),
        Measurement(name="day", case="most of them on disk at a time", value=most, unit="files"),
        Measurement(name="day", case="files of its log", value=log, unit="files", aim=LOG_AIM),
        Measurement(
            name="day",
            case="full scan beside the same rows written once",
            value=rows / scans["day"],
            unit="rows/s",
            baseline=rows / scans["once"],
            aim=SCAN_AIM,
        ),
    ]


def _take_day(node: NodeDirectory, tables: Path, cuts: int) -> tuple[float, int]:
    """Make the cuts, each taken before the next; return the seconds of the slowest round and the
    most files at a time.
    """
    slowest_s = 0.0
    most = 0
    node.cut(segments=1, rows=ROWS_A_CUT)
    rounds = spark_sink.ingest_every(
        node.path, tables, every_s=1e-6, request_cut=False, keep_s=KEEP_S
    )
    with patch.object(resident, "UNUSED_EVERY_S", KEEP_S / 6):  # as ten minutes are to an hour
        for number, done in enumerate(rounds, start=1):
            assert not done.failures, done.failures
            assert done.lag_cuts == 0
            slowest_s = max(slowest_s, done.seconds)
            if number % 500 == 0:
                most = max(most, sum(1 for _ in (tables / "orders").rglob("*.parquet")))
                _give_up(node.path, number - CUTS_KEPT)
                note(json.dumps({"cut": number, "round_s": round(done.seconds, 3), "files": most}))
            if number == cuts:
                break
            node.cut(segments=1, rows=ROWS_A_CUT)
    rounds.close()  # type: ignore[attr-defined]  # it is a generator, and ends its session
    return slowest_s, most


def _give_up(node: Path, below: int) -> None:
    """Remove the cuts that a node's retention would have, with their files."""
    for number in cut_numbers(node):
        if number < below:
            (node / manifest_path(number)).unlink()
            for path in (node / "segments").glob(f"*/{1000 * number}.parquet"):
                path.unlink()


def _scans(
    spark: SparkSession, table: OpenTable, once: Path, rows: int, repeats: int
) -> dict[str, float]:
    files_max = ceil(sum(file.bytes for file in table.files()) / FILE_BYTES_TARGET)
    day: Callable[[], DataFrame] = lambda: spark_sink.read_table(spark, table.path)  # noqa: E731
    assert day().count() == rows, "every row of every cut is there, once"
    day().coalesce(files_max).write.option("compression", "zstd").parquet(str(once))
    try:
        return medians_s(
            repeats,
            {
                "day": lambda _: day().write.format("noop").mode("overwrite").save(),
                "once": lambda _: (
                    spark.read.parquet(str(once)).write.format("noop").mode("overwrite").save()
                ),
            },
        )
    finally:
        shutil.rmtree(once)


if __name__ == "__main__":
    sys.exit(main("what a table is after a day of small cuts", run))
