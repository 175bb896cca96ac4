"""The demo from end to end: processes into a node, cuts, Spark tables, checks, a picture.

In: a directory and how long to sample. Out: a `DemoResult`, and in the directory a closed node and its tables. Every step
goes through what users call; nothing is known here that a user could not know.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import spark_sink
from flusher.cut_log import CutLog
from spark_sink.table import OpenTable
from streamingnode.demo.check import Check, check_count, check_rows
from streamingnode.demo.place import Place, claim
from streamingnode.demo.recorder import Recording, create_demo_collections, record
from streamingnode.demo.report import PROCESSES_MAX, ReportData, draw_report
from streamingnode.opening import open_node, run_async
from streamingnode.progress import Progress

CUT_INTERVAL_S = 5.0
"""Half the default, so that a short run has several cuts and its tables several versions."""

_TOP_PROCESSES = """
    SELECT name, pid, MAX(rss_bytes) AS memory_bytes, MAX(cpu_seconds) - MIN(cpu_seconds) AS cpu_seconds, COUNT(*) AS rounds
    FROM samples GROUP BY name, pid ORDER BY memory_bytes DESC, pid LIMIT {count}
"""
_MEMORY = """
    SELECT samples.name, samples.pid, samples.round, samples.rss_bytes
    FROM samples JOIN top_processes ON samples.pid = top_processes.pid AND samples.name = top_processes.name
    ORDER BY top_processes.memory_bytes DESC, samples.pid, samples.round
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Where the demo works, for how many seconds it samples and how often."""

    directory: Path
    seconds: float
    rounds_per_s: float


@dataclass(frozen=True, slots=True)
class TopProcess:
    """One line of what Spark SQL says: the most memory a process had, and the CPU it used while sampled."""

    name: str
    pid: int
    memory_bytes: int
    cpu_seconds: float
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What a demo did; it passed when every check did. Times are in seconds."""

    place: Place
    rounds: int
    samples: int
    cuts: int
    versions: dict[str, int]
    commit_ms_median: float
    ingest_s: float
    checks: tuple[Check, ...]
    top: tuple[TopProcess, ...]

    @property
    def passed(self) -> bool:
        """Whether the tables hold exactly what was acknowledged."""
        return all(check.passed for check in self.checks)


def run_demo(options: DemoOptions, progress: Progress) -> DemoResult:
    """Run the demo and return what it found; a failed check is in the result, anything else that fails is raised."""
    place = claim(options.directory)
    progress.stage("sampling processes", options.seconds)
    recording = run_async(partial(_fill_node, place, options, progress))
    progress.stage("starting Spark")
    spark = spark_sink.session()
    try:
        began = time.monotonic()
        _ingest(spark, place, progress)
        ingest_s = time.monotonic() - began
        progress.stage("checking tables")
        checks = _check(spark, place, recording)
        progress.stage("asking Spark SQL")
        samples = spark_sink.read_table(spark, place.tables / "samples")
        data, top = _explore(spark, samples, place, recording)
    finally:
        spark.stop()
    progress.stage("drawing report.png")
    draw_report(data, place.picture)
    return DemoResult(
        place=place,
        rounds=len(recording.rounds),
        samples=recording.samples,
        cuts=len(data.cut_ticks),
        versions={name: len(ticks) for name, ticks in data.version_ticks.items()},
        commit_ms_median=_median([recorded.commit_s * 1000 for recorded in recording.rounds]),
        ingest_s=ingest_s,
        checks=checks,
        top=top,
    )


async def _fill_node(place: Place, options: DemoOptions, progress: Progress) -> Recording:
    def show(at_s: float, recording: Recording) -> None:
        progress.advance(at_s, f"{len(recording.rounds)} rounds, {recording.samples} samples")

    async with open_node(place.node, cut_interval_s=CUT_INTERVAL_S) as node:
        await create_demo_collections(node)
        recording = await record(node, seconds=options.seconds, rounds_per_s=options.rounds_per_s, progress=show)
        progress.stage("cutting")
        await node.flush()
    return recording


def _ingest(spark: SparkSession, place: Place, progress: Progress) -> None:
    progress.stage("ingesting cuts")

    def show(stage: str, done: int, total: int) -> None:
        progress.grow(total)
        progress.advance(done, f"{stage}, cut {done} of {total}")

    # The node was closed after its last cut: there is none to ask for.
    spark_sink.ingest(spark, place.node, place.tables, progress=show, request_cut=False, every_cut=True)


def _check(spark: SparkSession, place: Place, recording: Recording) -> tuple[Check, ...]:
    samples = spark_sink.read_table(spark, place.tables / "samples").toArrow()
    last = recording.live_at(recording.rounds[-1].time_tick)
    live = spark_sink.read_table(spark, place.tables / "live").toArrow()
    return (
        check_count("samples: rows", acknowledged=recording.samples, found=samples.num_rows),
        check_count("live: rows", acknowledged=last.num_rows, found=live.num_rows),
        check_rows("samples: every column", acknowledged=recording.all_samples(), found=samples, key="sample"),
        check_rows(f"live: round {len(recording.rounds)}", acknowledged=last, found=live, key="pid"),
        *_check_versions(spark, place, recording),
    )


def _check_versions(spark: SparkSession, place: Place, recording: Recording) -> list[Check]:
    """Compare each version of `live` with the one sampling round that was complete at its tick."""
    checks = []
    for tick in _version_ticks(place, "live"):
        expected = recording.live_at(tick)
        found = spark_sink.read_table(spark, place.tables / "live", as_of_tick=tick).toArrow()
        number = expected["round"][0].as_py() if expected.num_rows else 0
        checks.append(check_rows(f"live at tick {tick}: round {number}", acknowledged=expected, found=found, key="pid"))
    return checks


def _explore(
    spark: SparkSession, samples: DataFrame, place: Place, recording: Recording
) -> tuple[ReportData, tuple[TopProcess, ...]]:
    samples.createOrReplaceTempView("samples")
    top = spark.sql(_TOP_PROCESSES, count=PROCESSES_MAX)
    top.createOrReplaceTempView("top_processes")
    processes = tuple(TopProcess(**row) for row in top.toArrow().to_pylist())
    at_s = {recorded.number: recorded.at_s for recorded in recording.rounds}
    memory: dict[str, list[tuple[float, int]]] = {}
    for row in spark.sql(_MEMORY).toArrow().to_pylist():
        memory.setdefault(f"{row['name']} ({row['pid']})", []).append((at_s[row["round"]], row["rss_bytes"]))
    cuts = CutLog(place.node)
    data = ReportData(
        rounds=recording.rounds,
        memory=memory,
        cut_ticks=[cuts.read(number).tick for number in cuts.numbers],
        version_ticks={name: _version_ticks(place, name) for name in ("samples", "live")},
    )
    return data, processes


def _version_ticks(place: Place, name: str) -> list[int]:
    """Return the ticks of a table's versions that took a cut, oldest first."""
    table = OpenTable.load(place.tables / name)
    assert table is not None, "the ingest made a table for each collection"
    return sorted(version.note.tick for version in table.history() if version.note.cut)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
