"""What needs Spark, on the command line: `ingest` and `demo`."""

import math
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import DEMO, NODE, SPARK, command, option, require, with_node
from streamingnode.cli.output import EXIT_FAILED, EXIT_OK, Output, format_count, format_tick
from wal.errors import AlreadyOwned, InvalidArgument, escaped

if TYPE_CHECKING:
    from spark_sink import IngestReport, IngestRound
    from streamingnode.node import Node

CLOSED_NODE_CUT_S = 30.0
"""Pause between two cuts of a node that nobody has open: each opens it, and only other commands can have written to it."""

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration_s(text: str) -> float:
    """Return the seconds of a duration such as `2s`, `500ms`, `5m` or `1h`; a number alone is seconds."""
    number = text.rstrip("hms")
    return float(number) * _UNITS_S[text[len(number) :] or "s"]


def duration(text: str) -> float:
    """Return the seconds of a duration on the command line. Raises `InvalidArgument`."""
    with suppress(ValueError, KeyError):
        if 0 < (seconds := duration_s(text)) < math.inf:
            return seconds
    raise InvalidArgument(f"{text!r} is no duration — give one such as 500ms, 2s or 1h")


@command(
    "streamingnode ingest data --tables tables",
    "streamingnode ingest data --tables tables --no-cut",
    "streamingnode ingest data --tables tables --every-cut --json",
    "streamingnode ingest data --tables tables --every 2s",
    "streamingnode ingest data --tables tables --every 500ms --keep 24h --json",
)
def ingest(
    output: Output,
    *,
    directory: Path = NODE,
    tables: Path = option("where the tables are, one for each collection", required=True),
    cut: bool = option("take the cuts that are there, ask for none", "--no-cut", action="store_false"),
    every_cut: bool = option("make each cut a version of its own: slower, and no state is hidden"),
    every: str | None = option("stay, and ingest this often, as 2s; also keeps the tables small", metavar="DURATION"),
    keep: str = option("with --every: how long versions can be read (default: 1h)", default="1h", metavar="DURATION"),
    link: bool = option(
        "link the files of inserts instead of copying them: half the disk, "
        "but what rots, and who may read, are the same for node and table"
    ),
) -> None:
    """Bring a node's cuts into Spark tables, each exactly once.

    Asks the node for a cut first; when another process has the node open, takes the cuts that are there.
    Can be interrupted and run again at any moment, also twice at once. Tables are Delta tables. Cuts that only insert are
    copied; Spark is started for others.

    With --every it stays, prints a line for each round, and goes on whatever fails: each table for itself, also without the
    node. SIGTERM and SIGINT end it after the commit it is in, with exit code 0; a second one ends it at once.
    """
    require(SPARK)
    from spark_sink.ingestion import check_place
    from streamingnode.care.inspect import check_node

    check_place(check_node(directory), tables)
    if every is None:
        _ingest_once(output, directory, tables, cut=cut, every_cut=every_cut, link=link)
    else:
        import spark_sink

        stop = _stop_on_signals()
        rounds = spark_sink.ingest_every(
            _Asked(directory),
            tables,
            every_s=duration(every),
            stop=stop,
            request_cut=cut,
            every_cut=every_cut,
            link=link,
            keep_s=math.ceil(duration(keep)),
        )
        for each in rounds:
            _show_round(output, each)


def _ingest_once(output: Output, directory: Path, tables: Path, *, cut: bool, every_cut: bool, link: bool) -> None:
    import spark_sink
    from streamingnode.progress import Progress

    with Progress(output.stderr) as progress:
        progress.stage("ingesting cuts")
        report = spark_sink.ingest(
            None,
            node=directory,
            tables=tables,
            progress=lambda stage, done, total: progress.advance(done, stage, total=total),
            request_cut=cut,
            every_cut=every_cut,
            link=link,
        )
    _show_report(output, report)


def _show_report(output: Output, report: "IngestReport") -> None:
    if report.node_was_running:
        output.line("a running process owns the node: took the cuts it has made")
    output.table(
        ("table", "version", "cuts taken", "rows added", "rows deleted", "path"),
        [
            (
                f"{table.table} (dropped)" if table.dropped else table.table,
                table.version,
                f"{table.first_cut}..{table.last_cut}" if table.first_cut else "none new",
                table.rows_added,
                table.rows_deleted,
                table.path,
            )
            for table in report.tables
        ],
    )
    output.line(f"at cut {report.cut}, tick {report.tick} ({format_tick(report.tick)}), in {report.seconds:.1f} s")
    output.document(report)


class _Asked:
    """A node that is asked for a cut by its directory: the process that has it open, or the node opened for the moment."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory)
        self._open_again = 0.0

    def flush(self) -> object:
        """Return the newest cut, None when nobody is to be asked now."""
        from streamingnode.care.inspect import check_free

        async def cut_it(node: "Node") -> object:
            return await node.flush()

        try:
            check_free(Path(self.path))
            if time.monotonic() < self._open_again:
                return None
        except AlreadyOwned:
            self._open_again = 0.0  # once it is closed, its last rows are to be cut
        else:
            self._open_again = time.monotonic() + CLOSED_NODE_CUT_S
        with suppress(AlreadyOwned):  # its process takes no clients, and makes cuts by itself
            return with_node(Path(self.path), cut_it)
        return None


def _stop_on_signals() -> threading.Event:
    """Return what the first signal sets; the second one ends the process where it is, as a crash would."""
    stop = threading.Event()

    def came(_number: int, _frame: object) -> None:
        if stop.is_set():
            os._exit(EXIT_FAILED)
        stop.set()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, came)
    return stop


def _show_round(output: Output, told: "IngestRound") -> None:
    lag = "nothing yet" if told.lag_s is None else f"lag {told.lag_s:.1f} s, {format_count(told.lag_cuts, 'cut')}"
    roads = {road: sum(table.road == road for table in told.tables) for road in ("copy", "spark")}
    did = [
        f"{format_count(told.rows_added, 'row')} added" if told.rows_added else "",
        f"{format_count(told.rows_deleted, 'row')} deleted" if told.rows_deleted else "",
        f"{format_count(roads['copy'], 'table')} by copying" if roads["copy"] else "",
        f"{format_count(roads['spark'], 'table')} by Spark" if roads["spark"] else "",
        f"{told.compacted} files less" if told.compacted else "",
    ]
    done = ", ".join(filter(None, did)) or "nothing new"
    output.line(f"cut {told.cut}: {done}; {lag}; {1000 * told.seconds:.0f} ms")
    for each in told.failures:
        output.line(escaped(f"  {each.table or 'node'}: {each.code}: {each.message}"))
    output.document(told)
    output.flush()


@command("streamingnode demo", "streamingnode demo --dir /tmp/demo --seconds 5 --json")
def demo(
    output: Output,
    *,
    directory: Path = option("(default: demo-data)", "--dir", metavar="DIR", default="demo-data"),
    seconds: float = option("how long to sample (default: 20)", default=20.0),
    rounds_per_second: float = option("how often to look at all processes (default: 10)", default=10.0),
) -> int:
    """This machine's processes, through a node, into checked tables.

    Shows everything on real input: samples every process into a node (each round is one transaction over the
    collections `samples` and `live`), cuts, lets Spark ingest the cuts, checks that the tables hold exactly what
    was acknowledged, prints the top processes from Spark SQL and draws report.png. Replaces a directory that an
    earlier demo made, and nothing else. Exit code 1 when a check fails.
    """
    if not (0 < seconds < math.inf and 0 < rounds_per_second < math.inf):
        raise InvalidArgument("--seconds or --rounds-per-second is out of range — give more than 0")
    require(DEMO)
    from streamingnode import demo as job
    from streamingnode.progress import Progress

    with Progress(output.stderr) as progress:
        result = job.run_demo(directory, seconds, rounds_per_second, progress)
    output.line(
        f"{result.rounds} rounds with {result.samples} samples acknowledged, and ingested in {result.cuts} cuts"
    )
    output.line()
    output.records(result.top)
    output.line()
    for check in result.checks:
        output.line(f"{'ok  ' if check.passed else 'FAIL'}  {check.what} ({format_count(check.rows, 'row')})")
    picture = directory / job.PICTURE
    output.line(f"picture: {picture}")
    passed = all(check.passed for check in result.checks)
    output.document({**vars(result), "directory": directory, "passed": passed, "picture": picture})
    return EXIT_OK if passed else EXIT_FAILED
