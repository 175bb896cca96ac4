"""`streamingnode bench`: how fast a node is on this machine, against baselines measured in the same run."""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from streamingnode.cli.command import Command, take
from streamingnode.cli.output import EXIT_OK, Output, format_fields
from wal.errors import InvalidArgument

NAMES = ("append", "delivery", "loop", "scan", "cut")
SECONDS_MAX, REPEATS_MAX = 600.0, 100


@dataclass(frozen=True, slots=True)
class _Arguments:
    names: list[str]
    dir: Path
    seconds: float
    repeats: int


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="name", help=f"which to run: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk to measure (default: here)")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each load runs (default: 1)")
    parser.add_argument("--repeats", type=int, default=3, help="runs a median is taken of (default: 3)")


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    _check(arguments)
    from streamingnode.benchmark.machine import describe_machine
    from streamingnode.benchmark.measurement import HEADINGS, as_document, table_row
    from streamingnode.benchmark.suite import SuiteOptions, run_suite
    from streamingnode.opening import run_async
    from streamingnode.progress import show_progress

    machine = describe_machine(arguments.dir)
    with show_progress(output.stderr) as progress:
        options = SuiteOptions(
            directory=arguments.dir, seconds=arguments.seconds, repeats=arguments.repeats, progress=progress.stage
        )
        measured = run_async(partial(run_suite, arguments.names or list(NAMES), options))
    for line in format_fields(machine):
        output.line(line)
    output.line()
    output.table(HEADINGS, [table_row(measurement) for measurement in measured])
    output.document({"machine": machine, "measurements": [as_document(m) for m in measured]})
    return EXIT_OK


def _check(arguments: _Arguments) -> None:
    if unknown := [name for name in arguments.names if name not in NAMES]:
        raise InvalidArgument(f"no benchmark is named {', '.join(unknown)} — choose from {', '.join(NAMES)}")
    if not arguments.dir.is_dir():
        raise InvalidArgument(f"{arguments.dir} is no directory — make it, or name another with --dir")
    if not 0 < arguments.seconds <= SECONDS_MAX or not 1 <= arguments.repeats <= REPEATS_MAX:
        raise InvalidArgument(
            f"--seconds goes from above 0 to {SECONDS_MAX:g}, --repeats from 1 to {REPEATS_MAX} — choose within"
        )


COMMAND = Command(
    name="bench",
    summary="measure appends, delivery, scans and cuts against baselines",
    details=(
        "Everything runs through the public interface on a temporary node under --dir; the baselines (a bare group commit,\n"
        "plain iteration, one write_table) take turns with it, so that a busy machine slows both. Compare ratios, not\n"
        "rows per second, between runs. Rows are of 1 KiB; `64 x 100` means 64 inserts outstanding of 100 rows each."
    ),
    examples=(
        "streamingnode bench",
        "streamingnode bench append --seconds 3 --repeats 5",
        "streamingnode bench scan cut --dir /tmp --json",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
