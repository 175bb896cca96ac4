"""The main job on real input: this machine's processes, through a node, into checked Spark tables and a picture."""

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import psutil
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

import spark_sink
from flusher.directory import CutLog
from spark_sink.table import OpenTable
from streamingnode.care.inspect import check_free
from streamingnode.node import Node
from streamingnode.opening import open_node, run_async
from streamingnode.progress import Progress
from wal.errors import InvalidArgument
from wal.timetick import physical_ms

NODE, TABLES, PICTURE, MARKER = "node", "tables", "report.png", ".streamingnode-demo"
"""What a demo makes in its directory."""

CUT_INTERVAL_S = 5.0  # half the default, so that a short run has several cuts and its tables several versions
PROCESSES_MAX = 6  # more lines than this cannot be told apart in a picture

_COLUMNS: dict[str, pa.DataType] = {
    "pid": pa.int64(),
    "name": pa.string(),
    "status": pa.string(),
    "threads": pa.int32(),
    "cpu_seconds": pa.float64(),
    "rss_bytes": pa.int64(),
    "round": pa.int64(),
}
SCHEMA = pa.schema(_COLUMNS)
"""One row for each running process: `live` is upserted by `pid`, and `samples` gets the rows of each round once more."""

_TOP_PROCESSES = """
    SELECT name, pid, ROUND(MAX(rss_bytes) / 1048576, 1) AS memory_mib, COUNT(*) AS rounds,
           ROUND(MAX(cpu_seconds) - MIN(cpu_seconds), 2) AS cpu_seconds
    FROM samples GROUP BY name, pid ORDER BY memory_mib DESC, pid LIMIT {count}
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of a table with what was acknowledged: whether they are the same, and the rows of the table."""

    what: str
    passed: bool
    rows: int


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What a demo did; `top` is what Spark SQL says of the processes with the most memory."""

    rounds: int
    samples: int
    cuts: int
    checks: tuple[Check, ...]
    top: Sequence[Mapping[str, Any]]


def run_demo(directory: Path, seconds: float, rounds_per_s: float, progress: Progress) -> DemoResult:
    """Run the demo and return what it found; a failed check is in the result, anything else that fails is raised."""
    prepare(directory)
    progress.stage("sampling processes", seconds)
    recording = run_async(partial(_fill_node, directory / NODE, seconds, rounds_per_s, progress))
    progress.stage("starting Spark")
    spark = spark_sink.session()
    try:
        progress.stage("ingesting cuts")
        spark_sink.ingest(
            spark,
            directory / NODE,
            directory / TABLES,
            progress=lambda stage, done, total: progress.advance(done, f"{stage}, cut {done} of {total}", total=total),
            request_cut=False,  # the node was closed after its last cut
            every_cut=True,
        )
        progress.stage("checking tables")
        checks = tuple(_check(spark, directory / TABLES, recording))
        progress.stage("asking Spark SQL")
        spark_sink.read_table(spark, directory / TABLES / "samples").createOrReplaceTempView("samples")
        top = spark.sql(_TOP_PROCESSES, count=PROCESSES_MAX).toArrow().to_pylist()
    finally:
        spark.stop()
    progress.stage(f"drawing {PICTURE}")
    cuts = CutLog(directory / NODE)
    lanes = {
        "rounds": [each.time_tick for each in recording],
        "cuts": [cuts.read(number).tick for number in cuts.numbers],
        **{f"table {name}": _version_ticks(directory / TABLES / name) for name in ("samples", "live")},
    }
    _draw(directory / PICTURE, recording, top, lanes)
    samples = recording.samples().num_rows
    return DemoResult(rounds=len(recording), samples=samples, cuts=len(lanes["cuts"]), checks=checks, top=top)


def prepare(directory: Path) -> None:
    """Make a directory that holds nothing but what is not a demo's; one that no demo made has to be empty.

    Raises `InvalidArgument` when it holds anything else, `AlreadyOwned` while a process has the old node open, `OSError`
    when it cannot be written.
    """
    if (directory / MARKER).is_file():
        check_free(directory / NODE)
        for part in (NODE, TABLES):
            if (directory / part).exists():
                shutil.rmtree(directory / part)
        (directory / PICTURE).unlink(missing_ok=True)
    elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidArgument(f"{directory} is there and no demo made it — move it, or choose another with --dir")
    directory.mkdir(parents=True, exist_ok=True)
    note = f"`streamingnode demo` replaces {NODE}, {TABLES} and {PICTURE} at its next run.\n"
    (directory / MARKER).write_text(note)


@dataclass(frozen=True, slots=True)
class Round:
    """One acknowledged sampling round: when, at which tick, and which rows of `live`."""

    at_s: float
    time_tick: int
    processes: pa.RecordBatch


class Recording(list[Round]):
    """Everything the node acknowledged: what the tables are checked against. Rounds are in order, from number 1."""

    def live_at(self, tick: int) -> pa.Table:
        """Return what `live` is at a tick: the processes of the last round at or before it."""
        return pa.Table.from_batches([each.processes for each in self if each.time_tick <= tick][-1:], schema=SCHEMA)

    def samples(self) -> pa.Table:
        """Return every row that was appended to `samples`, in order."""
        return pa.Table.from_batches([each.processes for each in self], schema=SCHEMA)


async def _fill_node(path: Path, seconds: float, rounds_per_s: float, progress: Progress) -> Recording:
    recording = Recording()
    async with open_node(path, cut_interval_s=CUT_INTERVAL_S) as node:
        await record(node, recording, seconds, rounds_per_s, progress)
        progress.stage("cutting")
        await node.flush()
    return recording


async def record(node: Node, recording: Recording, seconds: float, rounds_per_s: float, progress: Progress) -> None:
    """Sample for `seconds`, `rounds_per_s` times a second, and record what was acknowledged.

    A round that takes longer than its share delays the next one; it is never skipped.
    """
    for name in ("samples", "live"):
        await node.create_collection(name, SCHEMA, primary_key="pid")
    started, before = time.monotonic(), SCHEMA.empty_table()["pid"].combine_chunks()
    while (at_s := time.monotonic() - started) < seconds:
        number = len(recording) + 1
        processes = await anyio.to_thread.run_sync(sample_processes, number)
        ended = pc.filter(before, pc.invert(pc.is_in(before, value_set=processes["pid"])))
        async with node.transaction() as txn:
            await txn.delete("live", ended)
            await txn.upsert("live", processes)
            await txn.insert("samples", processes)
        assert txn.result is not None, "a transaction that left its block has a result"
        recording.append(Round(at_s, txn.result.time_tick, processes))
        before = processes["pid"]
        progress.advance(at_s, f"{number} rounds")
        await anyio.sleep(max(0.0, started + number / rounds_per_s - time.monotonic()))


def sample_processes(round_number: int) -> pa.RecordBatch:
    """Return a row for every process that can be looked at now; one that ends while being looked at is left out."""
    names = ("pid", "name", "status", "num_threads", "cpu_times", "memory_info")
    looks = [process.info for process in psutil.process_iter(names, ad_value=None)]
    rows: list[dict[str, object]] = [
        {
            "pid": info["pid"],
            # A process may call itself anything, also what UTF-8 cannot hold.
            "name": (info["name"] or "?").encode("utf-8", "replace").decode(),
            "status": info["status"] or "?",
            "threads": info["num_threads"] or 0,
            "cpu_seconds": info["cpu_times"].user + info["cpu_times"].system,
            "rss_bytes": info["memory_info"].rss,
            "round": round_number,
        }
        for info in looks
        if info["memory_info"] is not None and info["cpu_times"] is not None
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def _check(spark: SparkSession, tables: Path, recording: Recording) -> Iterator[Check]:
    found = spark_sink.read_table(spark, tables / "samples").toArrow()
    yield check_rows("samples", recording.samples(), found)
    # Each version of `live` is the one sampling round that was complete at its tick.
    for tick in _version_ticks(tables / "live"):
        expected = recording.live_at(tick)
        found = spark_sink.read_table(spark, tables / "live", as_of_tick=tick).toArrow()
        number = expected["round"][0].as_py() if expected.num_rows else 0
        yield check_rows(f"live at tick {tick}, round {number}", expected, found)


def check_rows(what: str, acknowledged: pa.Table, found: pa.Table) -> Check:
    """Compare all columns of all rows, in whatever order they are; a table has more columns."""
    order: list[tuple[str, Literal["ascending", "descending"]]] = [("round", "ascending"), ("pid", "ascending")]
    have = found.select(SCHEMA.names).cast(SCHEMA).sort_by(order)
    return Check(what, have == acknowledged.sort_by(order), have.num_rows)


def _version_ticks(path: Path) -> list[int]:
    """Return the ticks of a table's versions that took a cut, oldest first."""
    table = OpenTable.load(path)
    assert table is not None, "the ingest made a table for each collection"
    return sorted(version.note.tick for version in table.history() if version.note.cut)


def _draw(
    path: Path, recording: Recording, top: Sequence[Mapping[str, Any]], lanes: Mapping[str, Sequence[int]]
) -> None:
    """Draw memory of the top processes, and how the ticks of cuts and table versions follow those of the rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    memory, ticks = figure.subplots(2, 1, height_ratios=[3, 2])
    samples = recording.samples()
    for process in top:
        own = (pc.field("pid") == process["pid"]) & (pc.field("name") == process["name"])
        rows = samples.filter(own).to_pylist()
        seconds = [recording[row["round"] - 1].at_s for row in rows]
        memory.plot(seconds, [row["rss_bytes"] / 2**20 for row in rows], label=f"{process['name']} ({process['pid']})")
    memory.set(title="Resident memory of the top processes", ylabel="MiB", xlabel="seconds", ylim=(0, None))
    memory.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    start = physical_ms(recording[0].time_tick)
    for lane, marks in enumerate(lanes.values()):
        ticks.plot([(physical_ms(tick) - start) / 1000 for tick in marks], [lane] * len(marks), "|", markersize=9)
    ticks.set_yticks(range(len(lanes)), list(lanes))
    ticks.set(title="Ticks of rounds, cuts, and the table versions made from them", xlabel="seconds (by tick)")
    figure.suptitle("From this machine's processes to tables", fontweight="bold")
    figure.savefig(path, dpi=110)
