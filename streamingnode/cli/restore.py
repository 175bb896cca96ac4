"""`streamingnode restore`: a node directory out of a backup, or one file of it back into the node."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from streamingnode.cli.command import Command, take
from streamingnode.cli.output import EXIT_OK, Output, format_bytes, format_count, format_tick
from streamingnode.cli.verify import show_steps
from streamingnode.progress import show_progress


@dataclass(frozen=True, slots=True)
class _Arguments:
    backup: Path
    target: Path
    file: str | None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backup", type=Path, help="a directory that `backup` made")
    parser.add_argument("target", type=Path, help="a new directory, or an empty one; with --file the node's")
    parser.add_argument("--file", metavar="PATH", help="put back this segment, delete file or manifest only")


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    if arguments.file is not None:
        return _restore_file(arguments.backup, arguments.target, arguments.file, output)
    from streamingnode.backup.closed_node import restore_directory

    with show_progress(output.stderr) as progress:
        made = restore_directory(arguments.backup, arguments.target, on_step=show_steps(progress, arguments.backup))
    output.line(
        f"node {made.node_id} as of tick {made.tick} ({format_tick(made.tick)}), cut {made.cut}: "
        f"{format_count(made.files, 'file')}, {format_bytes(made.bytes)}, verified, in {made.path}"
    )
    output.document(made)
    return EXIT_OK


def _restore_file(backup: Path, directory: Path, path: str, output: Output) -> int:
    from streamingnode.backup.one_file import restore_file

    restored = restore_file(backup, directory, path)
    output.line(f"{restored.path} of cut {restored.cut}: {format_bytes(restored.bytes)}, as the node wrote it")
    output.document(restored)
    return EXIT_OK


COMMAND = Command(
    name="restore",
    summary="make a node directory out of a backup and verify it",
    details=(
        "Every file is compared with what the backup says, and the node is read to its end, before it gets its name.\n"
        "It keeps the node's id and begins a new row of terms. A table that took cuts made after the backup is refused\n"
        "by `ingest` (TABLE_AHEAD) and named by `verify --tables`. Exit code 3 when the backup is damaged.\n"
        "With --file one file of a cut comes back into a closed node, when its checksum is the one that the node knows:\n"
        "from the manifest, or for a manifest from the one after it or the log. Of several manifests the newest first."
    ),
    examples=(
        "streamingnode restore backups/monday data",
        "streamingnode restore backups/monday data --json",
        "streamingnode restore backups/monday data --file segments/1/3.parquet",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
