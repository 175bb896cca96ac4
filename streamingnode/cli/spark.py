"""What needs Spark, on the command line: `ingest` and `demo`."""

import math
from pathlib import Path

from streamingnode.cli.command import DEMO, NODE, SPARK, argument, command, require
from streamingnode.cli.output import EXIT_FAILED, EXIT_OK, Output, format_count, format_tick
from wal.errors import InvalidArgument


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
        "streamingnode ingest data --tables tables --every-cut --json",
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
    from streamingnode.progress import Progress

    check_place(check_node(directory), tables)
    with Progress(output.stderr) as progress:
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


@command(
    argument("--dir", dest="directory", metavar="DIR", type=Path, default="demo-data", help="(default: demo-data)"),
    argument("--seconds", type=float, default=20.0, help="how long to sample (default: 20)"),
    argument("--rounds-per-second", type=float, default=10.0, help="how often to look at all processes (default: 10)"),
    examples=("streamingnode demo", "streamingnode demo --dir /tmp/demo --seconds 5 --json"),
)
def demo(output: Output, *, directory: Path, seconds: float, rounds_per_second: float) -> int:
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
