"""`streamingnode export`: the rows of a node that nobody has open as Parquet files, past damage when asked."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from streamingnode.cli.command import Command, take
from streamingnode.cli.output import EXIT_FAILED, EXIT_OK, Output, format_count, format_tick
from streamingnode.progress import show_progress


@dataclass(frozen=True, slots=True)
class _Arguments:
    directory: Path
    out: Path
    salvage: bool


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="the node's directory, or a backup of one")
    parser.add_argument("out", type=Path, help="a new directory, or an empty one")
    parser.add_argument("--salvage", action="store_true", help="go on past damage, and name what is missing")


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    from streamingnode.export import export_directory

    with show_progress(output.stderr) as progress:
        result = export_directory(
            arguments.directory,
            arguments.out,
            salvage=arguments.salvage,
            on_collection=lambda name: progress.stage(f"collection {name}"),
        )
    output.table(["collection", "rows", "file"], [[file.collection, file.rows, file.path] for file in result.files])
    for each in result.missing:
        rows = "" if each.rows is None else f", {format_count(each.rows, 'row')}"
        of = f" of collection {each.collection}" if each.collection else ""
        output.line(f"missing: {each.place}{of}{rows}: {each.reason}")
    output.line(f"node {result.node_id} as of tick {result.tick} ({format_tick(result.tick)})")
    output.document(result)
    return EXIT_FAILED if result.missing else EXIT_OK


COMMAND = Command(
    name="export",
    summary="write the rows of each collection as Parquet, of a damaged node what can be read",
    details=(
        "The state at the newest tick there is: the files of the cuts, then the log behind the newest, deletes applied.\n"
        "Dropped collections are left out. The node must be closed, and its directory stays as it is. Without --salvage\n"
        "the first damage is the error and nothing is written; with it, the rest is written and what is missing is named,\n"
        "by file or positions of the log: rows whose delete is missing come back. Exit code 1 when something is missing."
    ),
    examples=(
        "streamingnode export data rows",
        "streamingnode export data rows --salvage",
        "streamingnode export backups/monday rows --json",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
