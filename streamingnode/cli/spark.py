"""What needs Spark, on the command line: `ingest` and `demo`."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import DEMO, NODE, SPARK, argument, command, require
from streamingnode.cli.output import EXIT_FAILED, EXIT_OK, Output, format_bytes, format_tick
from wal.errors import InvalidArgument

if TYPE_CHECKING:
    from spark_sink import IngestReport
    from streamingnode.demo import DemoResult

SECONDS_MAX = 3_600.0
ROUNDS_PER_S_MAX = 100.0


@command(
    NODE,
    argument("--tables", type=Path, required=True, help="where the tables are, one for each collection"),
    argument("--no-cut", action="store_false", dest="cut", help="take the cuts that are there, ask for none"),
    argument(
        "--every-cut", action="store_true", help="make each cut a version of its own: slower, and no state is hidden"
    ),
    examples=(
        "streamingnode ingest data --tables tables",
        "streamingnode ingest data --tables tables --no-cut",
        "streamingnode ingest data --tables tables --every-cut",
        "streamingnode ingest data --tables tables --json",
    ),
)
def ingest(output: Output, *, directory: Path, tables: Path, cut: bool, every_cut: bool) -> None:
    """Bring a node's cuts into Spark tables, each exactly once.

    Asks the node for a cut first; when another process has the node open, takes the cuts that are there.
    Can be interrupted and run again at any moment, also twice at once. Tables are Delta tables.
    """
    require(SPARK)
    import spark_sink
    from spark_sink.ingestion import check_place
    from streamingnode.care.inspect import check_node
    from streamingnode.progress import show_progress

    check_place(check_node(directory), tables)
    with show_progress(output.stderr) as progress:
        progress.stage("starting Spark")
        spark = spark_sink.session()
        try:
            progress.stage("ingesting cuts")
            report = spark_sink.ingest(
                spark,
                node=directory,
                tables=tables,
                progress=lambda stage, done, total: progress.advance(done, stage, total=total),
                request_cut=cut,
                every_cut=every_cut,
            )
        finally:
            spark.stop()
    _print(report, output)
    output.document(report)


def _print(report: "IngestReport", output: Output) -> None:
    if report.node_was_running:
        output.line("a running process owns the node: took the cuts it has made")
    if not report.cut:
        output.line("the node has no cut yet: nothing to ingest")
        return
    output.table(
        ("table", "version", "cuts taken", "rows added", "rows deleted", "files", "path"),
        [
            (
                f"{table.table} (dropped)" if table.dropped else table.table,
                table.version,
                f"{table.first_cut}..{table.last_cut}" if table.first_cut else "none new",
                table.rows_added,
                table.rows_deleted,
                f"+{table.files_added} -{table.files_removed}",
                table.path,
            )
            for table in report.tables
        ],
    )
    output.line(f"at cut {report.cut}, tick {report.tick} ({format_tick(report.tick)}), in {report.seconds:.1f} s")


@command(
    argument(
        "--dir",
        dest="directory",
        metavar="DIR",
        type=Path,
        default="demo-data",
        help="where to work (default: demo-data)",
    ),
    argument("--seconds", type=float, default=20.0, help="how long to sample (default: 20)"),
    argument("--rounds-per-second", type=float, default=10.0, help="how often to look at all processes (default: 10)"),
    examples=(
        "streamingnode demo",
        "streamingnode demo --dir /tmp/demo --seconds 5 --rounds-per-second 20",
        "streamingnode demo --json",
    ),
)
def demo(output: Output, *, directory: Path, seconds: float, rounds_per_second: float) -> int:
    """This machine's processes, through a node, into checked tables.

    Shows everything on real input: samples every process into a node (each round is one transaction over the
    collections `samples` and `live`), cuts, lets Spark ingest the cuts, checks that the tables hold exactly what
    was acknowledged, prints the top processes from Spark SQL and draws report.png. Replaces a directory that an
    earlier demo made, and nothing else. Exit code 1 when a check fails.
    """
    limits = (("--seconds", seconds, SECONDS_MAX), ("--rounds-per-second", rounds_per_second, ROUNDS_PER_S_MAX))
    for name, value, most in limits:
        if not 0 < value <= most:
            raise InvalidArgument(f"{name} is {value:g} — give more than 0 and at most {most:g}")
    require(DEMO)
    from streamingnode.demo import PICTURE, run_demo
    from streamingnode.progress import show_progress

    with show_progress(output.stderr) as progress:
        result = run_demo(directory, seconds, rounds_per_second, progress)
    picture, commands = str(directory / PICTURE), next_commands(directory)
    _print_result(result, output)
    output.line(f"picture: {picture}")
    output.line("next:")
    for each in commands:
        output.line(f"  {each}")
    told = {**vars(result), "directory": str(directory), "passed": result.passed, "picture": picture, "next": commands}
    output.document(told)
    return EXIT_OK if result.passed else EXIT_FAILED


def _print_result(result: "DemoResult", output: Output) -> None:
    versions = ", ".join(f"{name} {count}" for name, count in result.versions.items())
    output.line()
    output.line(
        f"{result.rounds} rounds and {result.samples} samples acknowledged, {result.commit_ms_median:.1f} ms each round to "
        "be durable (median);"
    )
    output.line(f"{result.cuts} cuts ingested in {result.ingest_seconds:.1f} s; table versions: {versions}")
    output.line()
    output.table(
        ("process", "pid", "memory", "cpu seconds", "rounds"),
        [
            (p["name"], p["pid"], format_bytes(p["memory_bytes"]), f"{p['cpu_seconds']:.2f}", p["rounds"])
            for p in result.top
        ],
    )
    output.line()
    for check in result.checks:
        output.line(f"{'ok  ' if check.passed else 'FAIL'}  {check.what} ({check.rows} rows)")
        for difference in check.differences:
            output.line(f"      {difference}")
    output.line()


def next_commands(directory: Path) -> list[str]:
    """Return command lines that work on what a demo leaves, in this shell and directory."""
    from streamingnode.demo import NODE, TABLES

    beside = Path(sys.executable).parent / "streamingnode"
    python = min(os.path.relpath(sys.executable), sys.executable, key=len)
    program = (
        "streamingnode" if shutil.which("streamingnode") == str(beside) else f"{shlex.quote(python)} -m streamingnode"
    )
    node, tables = shlex.quote(str(directory / NODE)), shlex.quote(str(directory / TABLES))
    return [
        f"{program} ls {node}",
        f"{program} info {node}",
        f"{program} tail {node} live --types txn --limit 1",
        f"""echo '{{"pid": 0, "name": "me"}}' | {program} insert {node} live --upsert""",
        f"{program} ingest {node} --tables {tables}",
    ]
