"""What every benchmark prints: the machine, a table of medians with their ratio to the baseline,
and the same as JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.machine import describe_machine
from bench.measurement import HEADINGS, Measurement, as_document, table_row
from streamingnode.cli.output import Output


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """On which disk, how long each load runs, how many runs a median is of, and a factor on numbers
    of rows.
    """

    directory: Path
    seconds: float
    repeats: int
    scale: float


Run = Callable[[Settings], Sequence[Measurement]]


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that become `Settings`."""
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(),
        help="a directory on the disk to measure (default: here)",
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="how long each load runs (default: 2)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs a median is taken of (default: 3)"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="multiplies numbers of rows (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON only")


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings somebody gave."""
    return Settings(
        directory=arguments.dir,
        seconds=arguments.seconds,
        repeats=arguments.repeats,
        scale=arguments.scale,
    )


def print_report(directory: Path, measured: Sequence[Measurement], *, json_only: bool) -> None:
    """Print the table, unless only JSON is wanted, and one line of JSON."""
    machine = describe_machine(directory)
    output = Output(as_json=json_only)
    output.fields(machine)
    output.line()
    output.table(HEADINGS, [table_row(each) for each in measured])
    output.line()
    print(
        json.dumps({"machine": machine, "measurements": [as_document(each) for each in measured]})
    )


def note(text: str) -> None:
    """Say on stderr what is being measured."""
    print(text, file=sys.stderr, flush=True)


def main(what: str, run: Run) -> int:
    """Run one benchmark as a program."""
    parser = argparse.ArgumentParser(description=what)
    add_settings(parser)
    arguments = parser.parse_args()
    print_report(arguments.dir, run(settings_of(arguments)), json_only=arguments.json)
    return 0
