"""`streamingnode demo`: the main job on real input, from this machine's processes to checked Spark tables."""

import argparse
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import Command, take
from streamingnode.cli.extras import DEMO, require
from streamingnode.cli.output import EXIT_FAILED, EXIT_OK, Output, format_bytes
from wal.errors import InvalidArgument

if TYPE_CHECKING:
    from streamingnode.demo.run import DemoResult

SECONDS_MAX = 3_600.0
ROUNDS_PER_S_MAX = 100.0
PROGRAM = "streamingnode"


@dataclass(frozen=True, slots=True)
class _Arguments:
    dir: Path
    seconds: float
    rounds_per_second: float


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path("demo-data"), help="where to work (default: demo-data)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to sample (default: 20)")
    parser.add_argument(
        "--rounds-per-second", type=float, default=10.0, help="how often to look at all processes (default: 10)"
    )


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    _check_range("--seconds", arguments.seconds, SECONDS_MAX)
    _check_range("--rounds-per-second", arguments.rounds_per_second, ROUNDS_PER_S_MAX)
    require(DEMO)
    from streamingnode.demo.run import DemoOptions, run_demo
    from streamingnode.progress import show_progress

    options = DemoOptions(directory=arguments.dir, seconds=arguments.seconds, rounds_per_s=arguments.rounds_per_second)
    with show_progress(output.stderr) as progress:
        result = run_demo(options, progress)
    _print(result, output)
    output.document(_document(result))
    return EXIT_OK if result.passed else EXIT_FAILED


def _check_range(name: str, value: float, largest: float) -> None:
    if not 0 < value <= largest:
        raise InvalidArgument(f"{name} is {value:g} — give more than 0 and at most {largest:g}")


def _print(result: "DemoResult", output: Output) -> None:
    versions = ", ".join(f"{name} {count}" for name, count in result.versions.items())
    output.line()
    output.line(
        f"{result.rounds} rounds and {result.samples} samples acknowledged, {result.commit_ms_median:.1f} ms each round to "
        f"be durable (median);\n{result.cuts} cuts ingested in {result.ingest_s:.1f} s; table versions: {versions}"
    )
    output.line()
    output.table(
        ("process", "pid", "memory", "cpu seconds", "rounds"),
        [(p.name, p.pid, format_bytes(p.memory_bytes), f"{p.cpu_seconds:.2f}", p.rounds) for p in result.top],
    )
    output.line()
    for check in result.checks:
        output.line(f"{'ok  ' if check.passed else 'FAIL'}  {check.what} ({check.rows} rows)")
        for difference in check.differences:
            output.line(f"      {difference}")
    output.line()
    output.line(f"picture: {result.place.picture}")
    output.line("next:")
    for command in next_commands(result.place.node, result.place.tables):
        output.line(f"  {command}")


def _document(result: "DemoResult") -> dict[str, object]:
    return {
        "passed": result.passed,
        "directory": str(result.place.directory),
        "rounds": result.rounds,
        "samples": result.samples,
        "cuts": result.cuts,
        "versions": result.versions,
        "commit_ms_median": result.commit_ms_median,
        "ingest_seconds": result.ingest_s,
        "checks": [
            {"what": check.what, "passed": check.passed, "rows": check.rows, "differences": check.differences}
            for check in result.checks
        ],
        "top": result.top,
        "picture": str(result.place.picture),
        "next": next_commands(result.place.node, result.place.tables),
    }


def next_commands(node: Path, tables: Path) -> list[str]:
    """Return command lines that work on what a demo leaves, in this shell and directory."""
    program = _program()
    at_node, at_tables = shlex.quote(str(node)), shlex.quote(str(tables))
    return [
        f"{program} ls {at_node}",
        f"{program} info {at_node}",
        f"{program} tail {at_node} live --types txn --limit 1",
        f"""echo '{{"pid": 0, "name": "me"}}' | {program} insert {at_node} live --upsert""",
        f"{program} ingest {at_node} --tables {at_tables}",
    ]


def _program() -> str:
    """Return how this shell reaches the program: by name when it is on PATH, else as it was called."""
    called = Path(sys.argv[0])
    found = shutil.which(PROGRAM)
    if called.name != PROGRAM:
        return f"{shlex.quote(_short(Path(sys.executable)))} -m {PROGRAM}"
    if found is not None and Path(found).resolve() == called.resolve():
        return PROGRAM
    return shlex.quote(_short(called))


def _short(path: Path) -> str:
    """Return a path as it is short to type: from here, or from the root."""
    return min(os.path.relpath(path), str(path.absolute()), key=len)


COMMAND = Command(
    name="demo",
    summary="this machine's processes, through a node, into checked tables",
    details=(
        "Shows everything on real input: samples every process into a node (each round is one transaction over the\n"
        "collections `samples` and `live`), cuts, lets Spark ingest the cuts, checks that the tables hold exactly what\n"
        "was acknowledged, prints the top processes from Spark SQL and draws report.png. Replaces a directory that an\n"
        "earlier demo made, and nothing else. Exit code 1 when a check fails."
    ),
    examples=(
        "streamingnode demo",
        "streamingnode demo --dir /tmp/demo --seconds 5 --rounds-per-second 20",
        "streamingnode demo --json",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
