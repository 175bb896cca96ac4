"""`streamingnode doctor`: whether this machine, this installation and a node directory are fit for use."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from streamingnode.cli.command import Command, take
from streamingnode.cli.output import EXIT_FAILED, EXIT_OK, Output


@dataclass(frozen=True, slots=True)
class _Arguments:
    directory: Path | None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", nargs="?", type=Path, help="a node's directory, or where one shall be (default: only the machine)"
    )


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    from streamingnode.inspection.health import Status, examine

    findings = []
    for finding in examine(arguments.directory):
        findings.append(finding)
        output.line(f"{finding.status.value.ljust(4)}  {finding.subject}: {finding.detail}")
        if finding.next_step:
            output.line(f"      {finding.next_step}")
    healthy = all(finding.status is not Status.FAIL for finding in findings)
    output.document({"healthy": healthy, "findings": findings})
    return EXIT_OK if healthy else EXIT_FAILED


COMMAND = Command(
    name="doctor",
    summary="check machine, installation and directory; say what to do",
    details=(
        "Looks at Python, packages, Java, disk space, the time an fsync takes (measured), the clock and file limits,\n"
        "and at the directory if one is given. Writes one temporary file and removes it.\n"
        "Exit code 1 when something fails; a warning (`warn`) is no failure."
    ),
    examples=("streamingnode doctor", "streamingnode doctor data", "streamingnode doctor data --json"),
    add_arguments=_add_arguments,
    run=_run,
)
