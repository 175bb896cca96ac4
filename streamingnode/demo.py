"""A demo on real input: samples of this machine's processes go to Spark tables, which are checked
and drawn.

The node runs in a process of its own, the sampler, which is killed in the middle and started again.
It writes each round to its standard output before the write, and again when it is acknowledged. The
tables are checked against that.
"""

import io
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import anyio
import anyio.to_thread
import msgspec
import psutil
import pyarrow as pa
import pyarrow.compute as pc

from flusher.directory import CutLog
from streamingnode.care.inspect import check_free
from streamingnode.node import Node
from streamingnode.opening import open_node, run_async
from streamingnode.progress import Progress
from wal.errors import InvalidArgument, StorageFailed
from wal.timetick import physical_ms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NODE = "node"
TABLES = "tables"
PICTURE = "report.png"
MARKER = ".streamingnode-demo"
"""What a demo creates in its directory."""

CUT_INTERVAL_S = 2.5  # a quarter of the default: a short run has several cuts and table versions
LOOK_INTERVAL_S = 0.2
"""How often the ingest checks for new cuts."""
SAMPLER = "sampler"
"""The named producer of the rounds: a round's number is its sequence, so it is written once."""
PROCESSES_MAX = 6  # more lines than this cannot be distinguished in a picture

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
"""One row for each running process: each round is upserted by `pid` to `live`, and appended to
`samples`.
"""

_TOP_PROCESSES = """
    SELECT name, pid, ROUND(MAX(rss_bytes) / 1048576, 1) AS memory_mib, COUNT(*) AS rounds,
           ROUND(MAX(cpu_seconds) - MIN(cpu_seconds), 2) AS cpu_seconds
    FROM samples GROUP BY name, pid ORDER BY memory_mib DESC, pid LIMIT {count}
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of a table with the acknowledged rows: whether they are equal, and the rows of
    the table.
    """

    what: str
    passed: bool
    rows: int


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The result of a demo; `top` are the processes with the most memory, by Spark SQL.

    `killed_round` is the number of the round under way when the sampler was killed. The next
    acknowledged row came `away_s` seconds after that.
    """

    rounds: int
    samples: int
    cuts: int
    checks: tuple[Check, ...]
    top: Sequence[Mapping[str, Any]]
    killed_round: int = 0
    away_s: float = 0.0


def run_demo(
    directory: Path, seconds: float, rounds_per_s: float, progress: Progress
) -> DemoResult:
    """Run the demo and return its result, with any failed checks; raises all other failures."""
    prepare(directory)
    progress.stage("starting Spark")
    import spark_sink

    with ExitStack() as ending:
        spark = spark_sink.session()
        ending.callback(spark.stop)
        # the first query takes seconds
        spark.range(9).join(spark.range(3), "id", "left_anti").count()
        following = Following(spark, directory.absolute())
        ending.callback(following.close)
        recording = _sample_over_a_kill(directory, seconds, rounds_per_s, progress)
        progress.stage("ingesting the last cuts")
        following.finish()
        progress.stage("checking tables")
        states = list(_states(spark, directory / TABLES))
        checks = tuple(_checks(recording, states))
        progress.stage("asking Spark SQL")
        spark_sink.read_table(spark, directory / TABLES / "samples").createOrReplaceTempView(
            "samples"
        )
        top = spark.sql(_TOP_PROCESSES, count=PROCESSES_MAX).toArrow().to_pylist()
    progress.stage(f"drawing {PICTURE}")
    _draw(directory / PICTURE, recording, states, top)
    return DemoResult(
        rounds=len(recording),
        samples=recording.samples().num_rows,
        cuts=len(CutLog(directory / NODE).numbers),
        checks=checks,
        top=top,
        killed_round=recording.killed_round,
        away_s=recording.away_s,
    )


def next_commands(directory: Path) -> list[str]:
    """Return three commands to try on a demo's data, with the program as this shell finds it."""
    own = Path(sys.executable).parent / "streamingnode"
    found = shutil.which("streamingnode")
    program = [sys.executable, "-m", "streamingnode"]
    if found and own.exists() and own.samefile(found):
        program = ["streamingnode"]
    elif own.exists():
        program = [os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own)]
    node = str(directory / NODE)
    tables = str(directory / TABLES)
    return [
        shlex.join([*program, *command])
        for command in (
            ["tail", node, "samples", "--from", "-2", "-o", "table"],
            ["info", "show", node],
            ["verify", node, "--tables", tables],
        )
    ]


def prepare(directory: Path) -> None:
    """Create the directory, or remove an earlier demo's data from it; a directory without a demo
    has to be empty.

    Raises `InvalidArgument` when it is neither, `AlreadyOwned` while a process has the old node
    open, and `OSError` when it cannot be written.
    """
    if (directory / MARKER).is_file():
        check_free(directory / NODE)
        for part in (NODE, TABLES):
            if (directory / part).exists():
                shutil.rmtree(directory / part)
        (directory / PICTURE).unlink(missing_ok=True)
    elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidArgument(
            f"{directory} exists and is not of a demo — move it, or choose another with --dir"
        )
    directory.mkdir(parents=True, exist_ok=True)
    note = f"`streamingnode demo` replaces {NODE}, {TABLES} and {PICTURE} at its next run.\n"
    (directory / MARKER).write_text(note)


# --- the acknowledged rows ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """One acknowledged sampling round: its time, its tick and its rows of `live`."""

    at_s: float
    time_tick: int
    processes: pa.RecordBatch


class Recording(list[Round]):
    """Everything the node acknowledged, to check the tables against. Rounds are in order, from
    number 1.
    """

    began_s: float = 0.0
    """The start of sampling, in Unix seconds; `at_s` of a round is relative to it."""
    killed_s: float = 0.0
    killed_round: int = 0
    away_s: float = 0.0

    def live_at(self, tick: int) -> pa.Table:
        """Return `live` at a tick: the processes of the last round at or below it."""
        return pa.Table.from_batches(
            [each.processes for each in self if each.time_tick <= tick][-1:], schema=SCHEMA
        )

    def samples(self) -> pa.Table:
        """Return every row that was appended to `samples`, in order."""
        return pa.Table.from_batches([each.processes for each in self], schema=SCHEMA)

    def samples_at(self, tick: int) -> pa.Table:
        """Return `samples` at a tick."""
        rounds = [each.processes for each in self if each.time_tick <= tick]
        return pa.Table.from_batches(rounds, schema=SCHEMA)


class Step(msgspec.Struct, frozen=True):
    """A message of the sampler: the round it will write next, or the tick that acknowledges it."""

    number: int
    time_tick: int = 0
    rows: bytes = b""
    """The rows of a round to be written, as an Arrow IPC stream."""


def _sample_over_a_kill(
    directory: Path,
    seconds: float,
    rounds_per_s: float,
    progress: Progress,
) -> Recording:
    """Run a sampler, kill it while it writes, and let another one go on."""
    recording = Recording()
    tried = Step(0)
    progress.stage("sampling processes", seconds)
    with Sampler(directory / NODE, math.inf, rounds_per_s) as sampler:
        for step in sampler.steps():
            recording.began_s = recording.began_s or time.time()
            tried = _note(recording, step, tried, progress)
            at_s = time.time() - recording.began_s
            is_last = at_s + 1 / rounds_per_s >= seconds
            is_time = is_last or at_s >= seconds / 2
            if tried.number and is_time and not recording.killed_round:
                recording.killed_s = at_s
                recording.killed_round = tried.number
                sampler.kill()  # its earlier messages are still read to the end
        if not recording.killed_round:
            sampler.check_ended()
    progress.stage(f"killed in round {recording.killed_round}, going on", seconds)
    left_s = seconds - recording.killed_s
    with Sampler(directory / NODE, left_s, rounds_per_s, again=tried) as sampler:
        for step in sampler.steps():
            tried = _note(recording, step, tried, progress)
            if step.time_tick and not recording.away_s:
                recording.away_s = recording[-1].at_s - recording.killed_s
        sampler.check_ended()
    return recording


def _note(recording: Recording, step: Step, tried: Step, progress: Progress) -> Step:
    """Record a step, and return the round that is being written."""
    if not step.time_tick:
        return step
    (processes,) = pa.ipc.open_stream(tried.rows)
    at_s = time.time() - recording.began_s
    recording.append(Round(at_s, step.time_tick, processes))
    progress.advance(at_s, f"{step.number} rounds")
    return Step(0)


# --- the sampler ----------------------------------------------------------------------------------


class Sampler:
    """A process that has the node open and samples into it; leaving the block ends it."""

    def __init__(
        self,
        path: Path,
        seconds: float,
        rounds_per_s: float,
        *,
        again: Step | None = None,
    ) -> None:
        command = [
            sys.executable,
            "-m",
            "streamingnode.demo",
            str(path),
            str(seconds),
            str(rounds_per_s),
        ]
        self._errors = TemporaryFile()  # noqa: SIM115 - `__exit__` closes it
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(BrokenPipeError), self._process.stdin as into:  # `check_ended` says why
            is_open = again is not None and again.number > 0
            into.write(msgspec.msgpack.encode(again if is_open else None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def kill(self) -> None:
        """Kill the process with SIGKILL, so that no clean-up runs."""
        self._process.send_signal(signal.SIGKILL)

    def steps(self) -> Iterator[Step]:
        """Yield the process's messages until it ends; one torn by a kill is ignored."""
        assert self._process.stdout is not None, "it is a pipe"
        said = self._process.stdout
        while len(length := said.read(4)) == 4:
            size_bytes = int.from_bytes(length, "little")
            if len(data := said.read(size_bytes)) == size_bytes:
                yield msgspec.msgpack.decode(data, type=Step)

    def check_ended(self) -> None:
        """Raise `StorageFailed` unless the process ended without an error."""
        if code := self._process.wait():
            self._errors.seek(0)
            output = self._errors.read().decode("utf-8", "replace").strip()
            last = output.splitlines()[-1] if output else "it wrote no error"
            ended = f"the sampling process ended with {code}: {last}"
            raise StorageFailed(f"{ended} — run the demo again")


def _sample_here() -> None:
    """Run as the sampler; the arguments are the node, seconds, and rounds a second."""
    path, seconds, rounds_per_s = sys.argv[1:]
    again = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Step | None)
    said = sys.stdout.buffer

    def say(step: Step) -> None:
        data = msgspec.msgpack.encode(step)
        said.write(len(data).to_bytes(4, "little") + data)
        said.flush()

    async def sample() -> None:
        async with open_node(path, cut_interval_s=CUT_INTERVAL_S) as node:
            silent = Progress(io.StringIO())
            limits = float(seconds), float(rounds_per_s)
            await record(node, Recording(), *limits, silent, again=again, say=say)
            await node.flush()

    run_async(sample)


def _say_nothing(_step: Step) -> None:
    """Drop a message."""


async def record(
    node: Node,
    recording: Recording,
    seconds: float,
    rounds_per_s: float,
    progress: Progress,
    *,
    again: Step | None = None,
    say: Callable[[Step], None] = _say_nothing,
) -> None:
    """Sample for `seconds`, `rounds_per_s` times a second, and record what was acknowledged.

    Each round is one transaction over both collections. `again` is a round whose outcome is
    unknown: it is written first, with its sequence, which writes nothing if it is in the log. A
    round that takes too long delays the next one; no round is skipped.
    """
    for name in ("samples", "live"):
        await node.create_collection(name, SCHEMA, primary_key="pid", if_not_exists=True)
    producer = await node.producer(SAMPLER)
    before = (await node.snapshot("live", columns=["pid"]))["pid"].combine_chunks()
    started = time.monotonic()
    done = 0
    while again is not None or time.monotonic() - started < seconds:
        if again is not None:
            number = again.number
            (processes,) = pa.ipc.open_stream(again.rows)
            again = None
        else:
            number = producer.last_sequence + 1
            processes = await anyio.to_thread.run_sync(sample_processes, number)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA) as stream:
            stream.write_batch(processes)
        say(Step(number, rows=sink.getvalue().to_pybytes()))
        ended = pc.filter(before, pc.invert(pc.is_in(before, value_set=processes["pid"])))
        async with producer.transaction(sequence=number) as txn:
            await txn.delete("live", ended)
            await txn.upsert("live", processes)
            await txn.insert("samples", processes)
        assert txn.result is not None, "a transaction that left its block has a result"
        say(Step(number, txn.result.time_tick))
        recording.append(Round(time.monotonic() - started, txn.result.time_tick, processes))
        before = processes["pid"]
        done = done + 1
        progress.advance(recording[-1].at_s, f"{number} rounds")
        await anyio.sleep(max(0.0, started + done / rounds_per_s - time.monotonic()))


def sample_processes(round_number: int) -> pa.RecordBatch:
    """Return a row for every readable process; one that ends while it is read is left out."""
    names = ("pid", "name", "status", "num_threads", "cpu_times", "memory_info")
    looks = [process.info for process in psutil.process_iter(names, ad_value=None)]
    rows: list[dict[str, object]] = [
        {
            "pid": info["pid"],
            # A process name may be any bytes, also invalid UTF-8.
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


# --- the tables -----------------------------------------------------------------------------------


class Following:
    """An ingest that takes cuts as they come, in a thread of its own."""

    def __init__(self, spark: "SparkSession", directory: Path) -> None:
        self._spark = spark
        self._node = directory / NODE
        self._tables = directory / TABLES
        self._is_last = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._done: Future[None] = self._thread.submit(self._follow)

    def finish(self) -> None:
        """Ingest the last cuts, and end; raises the error of any ingest."""
        self._is_last.set()
        self._done.result()

    def close(self) -> None:
        """End the ingest, also after an error."""
        self._is_last.set()
        self._thread.shutdown()

    def _follow(self) -> None:
        import spark_sink

        is_last = False
        taken = 0
        while not is_last:
            is_last = self._is_last.wait(LOOK_INTERVAL_S)
            if self._node.is_dir() and (cuts := CutLog(self._node).numbers) and cuts[-1] > taken:
                taken = cuts[-1]
                spark_sink.ingest(
                    self._spark,
                    self._node,
                    self._tables,
                    request_cut=False,  # the node makes its own
                    every_cut=True,
                )


class State(NamedTuple):
    """Both tables as of the tick of one cut, as Spark reads them."""

    tick: int
    at_s: float
    """The time when both tables had the cut, in Unix seconds."""
    samples: pa.Table
    live: pa.Table


def _states(spark: "SparkSession", tables: Path) -> Iterator[State]:
    """Yield both tables at each cut that they have taken, oldest first."""
    import spark_sink

    versions = {name: _versions(tables / name) for name in ("samples", "live")}
    for tick in sorted(versions["samples"].keys() & versions["live"].keys()):
        at_s = max(of[tick] for of in versions.values())
        samples = spark_sink.read_table(spark, tables / "samples", as_of_tick=tick)
        live = spark_sink.read_table(spark, tables / "live", as_of_tick=tick)
        yield State(tick, at_s, samples.toArrow(), live.toArrow())


def _versions(path: Path) -> dict[int, float]:
    """Return when a table took each cut, in Unix seconds, by the tick of the cut."""
    from spark_sink.table import OpenTable

    table = OpenTable.load(path)
    assert table is not None, "the ingest made a table for each collection"
    log = path / "_delta_log"
    return {
        each.note.tick: (log / f"{each.version:020}.json").stat().st_mtime  # when it was committed
        for each in table.history()
        if each.note.cut
    }


def _checks(recording: Recording, states: Sequence[State]) -> Iterator[Check]:
    """Compare each version with the acknowledged rows: whole rounds, the same in both tables."""
    for number, (tick, _, samples, live) in enumerate(states, 1):
        name = f"version {number} of {len(states)}"
        last = pc.max(live["round"]).as_py() if live.num_rows else 0
        upto = f"{name}: samples, all up to round {last}"
        yield check_rows(upto, recording.samples_at(tick), samples)
        yield check_rows(f"{name}: live, round {last}", recording.live_at(tick), live)
    in_table = states[-1].samples if states else SCHEMA.empty_table()
    yield check_rows("all that was acknowledged, over the kill", recording.samples(), in_table)
    killed = recording.killed_round
    of_killed = pc.field("round") == killed
    expected = recording.samples().filter(of_killed)
    yield check_rows(
        f"round {killed}, killed while it was written, is there once",
        expected,
        in_table.filter(of_killed),
    )


def check_rows(what: str, acknowledged: pa.Table, found: pa.Table) -> Check:
    """Compare all columns of all rows, in any order; extra columns of the table are ignored."""
    order: list[tuple[str, Literal["ascending", "descending"]]] = [
        ("round", "ascending"),
        ("pid", "ascending"),
    ]
    have = found.select(SCHEMA.names).cast(SCHEMA).sort_by(order)
    return Check(what, have == acknowledged.sort_by(order), have.num_rows)


# --- the picture ----------------------------------------------------------------------------------

_INK = "#1f2933"
_QUIET = "#9aa5b1"
_ROWS = "#1769aa"
_TABLE = "#e07a1f"
_KILL = "#c62828"


def _draw(
    path: Path,
    recording: Recording,
    states: Sequence[State],
    top: Sequence[Mapping[str, Any]],
) -> None:
    """Draw rows over the kill, the transaction in each version, and top processes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    look: dict[Any, Any] = {
        "font.size": 10.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _QUIET,
        "axes.labelcolor": _INK,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.grid": True,
        "grid.color": "#e4e7eb",
        "axes.axisbelow": True,
        "legend.edgecolor": "white",
        "legend.framealpha": 0.85,
    }
    with rc_context(look):
        figure = Figure(figsize=(12, 10.5), layout="constrained")
        rows, both, memory = figure.subplots(3, 1, height_ratios=[5, 3, 3])
        _draw_rows(rows, recording, states)
        _draw_transaction(both, recording, states)
        _draw_memory(memory, recording, top)
        end_s = max(recording[-1].at_s, states[-1].at_s - recording.began_s)
        for axes in (rows, both, memory):
            axes.axvspan(
                recording.killed_s,
                recording.killed_s + recording.away_s,
                color=_KILL,
                alpha=0.12,
                lw=0,
            )
            axes.axvline(recording.killed_s, color=_KILL, lw=1.2)
            axes.set_xlim(0, end_s * 1.02)
        memory.set_xlabel("seconds since the first round")
        figure.suptitle(
            "Killed in the middle, and nothing is missing",
            fontsize=17,
            fontweight="bold",
            x=0.01,
            ha="left",
        )
        figure.savefig(path, dpi=120)


def _draw_rows(axes: Any, recording: Recording, states: Sequence[State]) -> None:
    counts = [0]
    total = 0
    for each in recording:
        total += each.processes.num_rows
        counts.append(total)
    times = [0, *(each.at_s for each in recording)]
    axes.plot(times, counts, color=_ROWS, lw=2.4, drawstyle="steps-post", label="rows acknowledged")
    times = [0, *(each.at_s - recording.began_s for each in states)]
    in_table = [0, *(each.samples.num_rows for each in states)]
    steps = {"color": _TABLE, "lw": 2.2, "marker": "o", "ms": 5, "drawstyle": "steps-post"}
    axes.plot(times, in_table, label="rows in the table, as Spark reads it", **steps)
    axes.plot(times[-1], in_table[-1], "o", ms=14, mfc="none", mec=_INK, mew=1.5, clip_on=False)
    after = {"textcoords": "offset points", "ha": "left", "va": "bottom", "fontweight": "bold"}
    killed = f"SIGKILL in round {recording.killed_round},\n"
    killed += f"next row acknowledged {recording.away_s:.1f} s later"
    axes.annotate(killed, (recording.killed_s, 0), xytext=(8, 8), color=_KILL, **after)
    equal = f"{in_table[-1]:,} rows in the table of\n{total:,} acknowledged"
    axes.annotate(equal, (0.99, 0.03), xycoords="axes fraction", ha="right", fontweight="bold")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(title="Rows acknowledged, and rows in the table", ylim=(0, total * 1.06))
    axes.legend(loc="upper left")


def _draw_transaction(axes: Any, recording: Recording, states: Sequence[State]) -> None:
    start = physical_ms(recording[0].time_tick) - recording[0].at_s * 1000
    numbers = range(1, len(recording) + 1)
    axes.plot(
        [each.at_s for each in recording],
        numbers,
        color=_QUIET,
        lw=1.5,
        label="rounds acknowledged",
    )
    # A table that has a cut has everything up to the time of its tick.
    at = [(physical_ms(state.tick) - start) / 1000 for state in states]
    ring = {"ls": "none", "ms": 12, "mfc": "none", "mew": 2}
    in_samples = [pc.max(state.samples["round"]).as_py() or 0 for state in states]
    in_live = [pc.max(state.live["round"]).as_py() or 0 for state in states]
    axes.plot(at, in_samples, "o", mec=_TABLE, label="newest round in samples", **ring)
    axes.plot(at, in_live, "o", ls="none", ms=5, color=_ROWS, label="round in live")
    axes.set(
        title="One transaction over two tables: each version has the same rounds in both",
        ylabel="round",
    )
    axes.set_ylim(0, None)
    axes.legend(loc="lower right")


def _draw_memory(axes: Any, recording: Recording, top: Sequence[Mapping[str, Any]]) -> None:
    samples = recording.samples()
    for process in top:
        own = (pc.field("pid") == process["pid"]) & (pc.field("name") == process["name"])
        rows = samples.filter(own).to_pylist()
        seconds = [recording[row["round"] - 1].at_s for row in rows]
        label = f"{process['name']} ({process['pid']})"
        axes.plot(seconds, [row["rss_bytes"] / 2**20 for row in rows], lw=1.6, label=label)
    axes.set(title="What the rows say: memory of the top processes", ylabel="MiB")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)  # room for the names
    axes.legend(loc="upper left", ncols=3, fontsize=9)


if __name__ == "__main__":
    _sample_here()
