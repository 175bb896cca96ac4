"""`streamingnode repair`: puts back what can be proven, moves aside what is in the way, and names all the rest."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import Command, take
from streamingnode.cli.output import Output, format_count
from streamingnode.cli.verify import describe, print_report, show_steps
from streamingnode.progress import show_progress
from wal.errors import InvalidArgument

if TYPE_CHECKING:
    from streamingnode.repair.plan import RepairPlan
    from streamingnode.repair.repairing import RepairResult


@dataclass(frozen=True, slots=True)
class _Arguments:
    directory: Path
    dry_run: bool
    accept_loss: bool
    backup: Path | None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="the node's directory")
    parser.add_argument("--dry-run", action="store_true", help="only print the plan; run this first")
    parser.add_argument(
        "--backup", type=Path, help="a backup to take whole files from, where the node knows their checksum"
    )
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="also do what gives up acknowledged rows, or what named readers have not read; the plan names them",
    )


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    from streamingnode.repair.repairing import repair_directory
    from streamingnode.verification.finding import EXIT_CODES

    _check_backup(arguments.backup)
    with show_progress(output.stderr) as progress:
        result = repair_directory(
            arguments.directory,
            dry_run=arguments.dry_run,
            accept_loss=arguments.accept_loss,
            backup=arguments.backup,
            now_ms=lambda: time.time_ns() // 1_000_000,
            on_step=show_steps(progress, arguments.directory),
        )
    _print_plan(result.plan, output)
    _print_outcome(result, output, dry_run=arguments.dry_run)
    output.document(
        {
            "done": result.done,
            "actions": result.plan.actions,
            "left": result.plan.left,
            "quarantine": result.quarantine,
            "after": describe(result.after),
        }
    )
    return EXIT_CODES[result.after.worst]


def _check_backup(backup: Path | None) -> None:
    """A name mistyped must not look like a backup that has nothing of use."""
    from wal.rocks.opening import BACKUP_RECORD_NAME

    if backup is not None and not (backup / BACKUP_RECORD_NAME).is_file():
        raise InvalidArgument(f"{backup} is no finished backup — name a directory that `backup` made")


def _print_plan(plan: "RepairPlan", output: Output) -> None:
    for action in plan.actions:
        output.line(f"{action.kind.value}: {action.place}: {action.reason}")
        for lost in action.gives_up:
            output.line(f"        gives up {lost}")
    for left in plan.left:
        output.line(f"stays as it is: {left.place}: {left.reason}")
        output.line(f"        {left.next_step}")


def _print_outcome(result: "RepairResult", output: Output, *, dry_run: bool) -> None:
    plan = result.plan
    if result.done:
        output.line(f"done; what was moved, and why, is in {result.quarantine}")
        print_report(result.after, output)
    elif not plan.actions:
        output.line("nothing to do" if not plan.left else "nothing that a repair can do")
    elif dry_run:
        output.line(f"{format_count(len(plan.actions), 'action')} planned; nothing was changed")
    else:
        output.line("nothing was changed: the plan gives up what it names — add --accept-loss if that shall be")


COMMAND = Command(
    name="repair",
    summary="put back what can be proven, move aside what is in the way, name the rest",
    details=(
        "Verifies the node, plans, and carries the plan out. Damaged parts go to `quarantine/<time>/` in the directory,\n"
        "with `repair.json` that says what and why; nothing is removed. Whole files come from a backup only where the\n"
        "node knows their checksum; a log is cut where it breaks, and positions given up are never used again.\n"
        "A plan that gives up acknowledged rows, or what readers have not read, is carried out only with --accept-loss.\n"
        "Exit code as `verify`, of the state afterwards: 0 sound, 1 warnings, 3 damage."
    ),
    examples=(
        "streamingnode repair data --dry-run",
        "streamingnode repair data --backup backups/monday",
        "streamingnode repair data --accept-loss --json",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
