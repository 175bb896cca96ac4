"""`streamingnode ingest`: every cut of a node into open tables, each exactly once."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import Command, take
from streamingnode.cli.extras import SPARK, require
from streamingnode.cli.output import EXIT_OK, Output, format_tick

if TYPE_CHECKING:
    from spark_sink import IngestReport


@dataclass(frozen=True, slots=True)
class _Arguments:
    directory: Path
    tables: Path
    cut: bool
    every_cut: bool


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="the node's directory")
    parser.add_argument("--tables", type=Path, required=True, help="where the tables are, one for each collection")
    parser.add_argument("--no-cut", action="store_false", dest="cut", help="take the cuts that are there, ask for none")
    parser.add_argument(
        "--every-cut", action="store_true", help="make each cut a version of its own: slower, and no state is hidden"
    )


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    require(SPARK)
    from spark_sink.ingestion import check_place
    from streamingnode.care.inspect import check_node

    check_place(check_node(arguments.directory), arguments.tables)
    report = _ingest(arguments, output)
    _print(report, output)
    output.document(report)
    return EXIT_OK


def _ingest(arguments: _Arguments, output: Output) -> "IngestReport":
    import spark_sink
    from streamingnode.progress import show_progress

    with show_progress(output.stderr) as progress:

        def show(stage: str, done: int, total: int) -> None:
            progress.grow(total)
            progress.advance(done, stage)

        progress.stage("starting Spark")
        spark = spark_sink.session()
        try:
            progress.stage("ingesting cuts")
            return spark_sink.ingest(
                spark,
                node=arguments.directory,
                tables=arguments.tables,
                progress=show,
                request_cut=arguments.cut,
                every_cut=arguments.every_cut,
            )
        finally:
            spark.stop()


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


COMMAND = Command(
    name="ingest",
    summary="bring a node's cuts into Spark tables, each exactly once",
    details=(
        "Asks the node for a cut first; when another process has the node open, takes the cuts that are there.\n"
        "Can be interrupted and run again at any moment, also twice at once. Tables are Delta tables."
    ),
    examples=(
        "streamingnode ingest data --tables tables",
        "streamingnode ingest data --tables tables --no-cut",
        "streamingnode ingest data --tables tables --every-cut",
        "streamingnode ingest data --tables tables --json",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
