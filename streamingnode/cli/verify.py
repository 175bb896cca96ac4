"""`streamingnode verify`: reads every byte of a node directory and says what is not as it was written. Changes nothing."""

import argparse
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import SPARK, Command, require, take
from streamingnode.cli.output import Output, format_bytes, format_count
from streamingnode.progress import Progress, show_progress
from wal.errors import InvalidArgument, shown

if TYPE_CHECKING:
    from streamingnode.verification.finding import Report


@dataclass(frozen=True, slots=True)
class _Arguments:
    directory: Path
    tables: Path | None
    pace: str | None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="the node's directory, or a backup of one")
    parser.add_argument("--tables", type=Path, help="also check the tables in this directory against the node's cuts")
    parser.add_argument("--pace", metavar="RATE", help="read at most this much each second, such as 10MiB")


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    if arguments.tables is not None:
        require(SPARK)
    bytes_per_s = None if arguments.pace is None else parse_pace(arguments.pace)
    from streamingnode.verification.finding import EXIT_CODES
    from streamingnode.verification.walk import verify_directory

    with show_progress(output.stderr) as progress:
        on_step = show_steps(progress, arguments.directory)
        if bytes_per_s is not None:
            on_step = paced(on_step, bytes_per_s)
        report = verify_directory(arguments.directory, tables=arguments.tables, on_step=on_step)
    print_report(report, output)
    output.document(describe(report))
    return EXIT_CODES[report.worst]


def parse_pace(text: str) -> float:
    """Return the bytes per second that `--pace` names. Raises `InvalidArgument`."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(|KiB|MiB|GiB)", text)
    rate = float(found[1]) * 1024 ** ("", "KiB", "MiB", "GiB").index(found[2]) if found else 0.0
    if rate < 1:
        raise InvalidArgument(f"--pace {shown(text)} is no bytes per second — give a rate such as 10MiB")
    return rate


def paced(
    on_step: Callable[[str, int], None],
    bytes_per_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Callable[[str, int], None]:
    """Return `on_step` so that it sleeps until as much may have been read as was."""
    due = clock()

    def paced_step(part: str, read_bytes: int) -> None:
        nonlocal due
        on_step(part, read_bytes)
        due += read_bytes / bytes_per_s
        now = clock()
        if due > now:
            sleep(due - now)
        else:
            due = now  # a slow disk, or a machine that slept, is not made up for by reading faster

    return paced_step


def show_steps(progress: Progress, directory: Path) -> Callable[[str, int], None]:
    """Return what tells `progress` how many bytes of each part of a node are read."""
    from streamingnode.verification.part_sizes import part_bytes

    reached: dict[str, int] = {}

    def on_step(part: str, read_bytes: int) -> None:
        if part not in reached:
            reached[part] = 0
            progress.stage(part, part_bytes(directory, part))
        reached[part] += read_bytes
        progress.advance(reached[part], format_bytes(reached[part]))

    return on_step


def describe(report: "Report") -> dict[str, object]:
    """Return a report as machines read it."""
    worst = report.worst
    return {
        "verdict": "sound" if worst is None else worst.value,
        "bytes": report.bytes,
        "checked": report.counts,
        "findings": [
            {
                "severity": finding.severity.value,
                "kind": finding.kind.value,
                "place": finding.place,
                "detail": finding.detail,
                "next_step": finding.next_step,
            }
            for finding in report.findings
        ],
    }


def print_report(report: "Report", output: Output) -> None:
    """Print what was found for people, the worst of it last, where eyes rest."""
    for finding in sorted(report.findings, key=lambda finding: finding.severity.value, reverse=True):
        output.line(f"{finding.severity.value}: {finding.place}: {finding.kind.value}: {finding.detail}")
        output.line(f"        {finding.next_step}")
    checked = ", ".join(f"{number} {what}" for what, number in report.counts.items())
    output.line(f"checked {format_bytes(report.bytes)}: {checked or 'nothing'}")
    damage = sum(finding.severity.value == "damage" for finding in report.findings)
    warnings = format_count(len(report.findings) - damage, "warning")
    verdict = "all is as it was written" if not damage else f"{format_count(damage, 'place')} damaged"
    output.line(f"{verdict}, {warnings}")


COMMAND = Command(
    name="verify",
    summary="read everything a node has and check it against every checksum, count and order",
    details=(
        "Looks at the floor file, every entry of the log, the state map, every cut and file, leases and left-overs; with\n"
        "--tables also at the tables: each cut taken once, none the node never made, as many rows as the cuts brought.\n"
        "Changes nothing. A running node checks itself: `await node.verify()`. With --pace other programs keep most of the\n"
        "disk, as for cron.\n"
        "Exit code 0 when all is sound, 1 for warnings by which nothing is lost, 3 for damage."
    ),
    examples=(
        "streamingnode verify data",
        "streamingnode verify data --tables tables",
        "streamingnode verify data --pace 10MiB",
        "streamingnode verify backup --json",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
