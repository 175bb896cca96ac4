"""`streamingnode backup`: a verified copy of a node directory that no process has open."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from streamingnode.cli.command import Command, take
from streamingnode.cli.output import EXIT_OK, Output, format_bytes, format_count, format_tick
from streamingnode.cli.verify import show_steps
from streamingnode.progress import show_progress


@dataclass(frozen=True, slots=True)
class _Arguments:
    directory: Path
    target: Path


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="the node's directory")
    parser.add_argument("target", type=Path, help="a new directory, or an empty one")


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    from streamingnode.backup.closed_node import backup_directory

    with show_progress(output.stderr) as progress:
        made = backup_directory(
            arguments.directory, arguments.target, on_step=show_steps(progress, arguments.directory)
        )
    output.line(
        f"backup of node {made.node_id} up to tick {made.tick} ({format_tick(made.tick)}), cut {made.cut}: "
        f"{format_count(made.files, 'file')}, {format_bytes(made.bytes)}, verified, in {made.path}"
    )
    output.document(made)
    return EXIT_OK


COMMAND = Command(
    name="backup",
    summary="copy a node into a new directory and verify the copy",
    details=(
        "For a node that no process has open; a running one backs itself up: `await node.backup(path)`.\n"
        "The copy is read back and checked as `verify` does before it gets its name. A backup is not opened as a node:\n"
        "`restore` makes one of it. Exit code 3 when the node is damaged, 4 when a process has it open."
    ),
    examples=("streamingnode backup data backups/monday", "streamingnode backup data backups/monday --json"),
    add_arguments=_add_arguments,
    run=_run,
)
