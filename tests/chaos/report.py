"""What was tried and what was found: one line of JSON for each run of a gate, and the sums of all
lines.

In: a `GateReport` from a gate. Out: a line in `docs/reliability.jsonl` for a run worth keeping, and
totals. Counts are sums of what really ran. `tests.chaos.documents` renders them.
"""

import dataclasses
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
LEDGER = ROOT / "docs" / "reliability.jsonl"
RENDERED = (LEDGER, ROOT / "docs" / "reliability.md", ROOT / "docs" / "guarantees.md")
"""What keeping a run changes: the next run is of the same code."""
ALSO_TARGETS = {"history-checked operations": 100_000_000, "simulated power cuts": 1_000_000}
"""What gates count beside their own unit, several of them together, and how much the long runs
should add up to.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """One run of one gate.

    `tried` counts in the gate's own unit, `failed` those that broke a promise, `target` is how many
    the long runs should add up to. `seed` starts the run again; `notes` are findings, figures and
    how to reproduce a failure, one sentence each. `outcome` is what became of its failures, added
    to the ledger by hand once it is known. `covered` is how often each place was tried, where each
    has to be: by `kind: name`, what was not tried with 0. `also` is what was tried on the way of
    what `ALSO_TARGETS` names. `padding` is how many of `tried` could show nothing, `distinct` that
    only different places of `covered` are added up, `undecided` the questions that the run was too
    short to answer.
    """

    gate: str
    tried: int
    failed: int
    seed: int
    target: int
    unit: str = "tries"
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    covered: dict[str, int] = field(default_factory=dict)
    also: dict[str, int] = field(default_factory=dict)
    padding: int = 0
    distinct: bool = False
    undecided: tuple[str, ...] = ()
    at: str = ""
    commit: str = ""
    outcome: str = ""

    @property
    def passed(self) -> bool:
        """Whether something was tried and nothing broke a promise."""
        return self.tried > 0 and self.failed == 0

    @property
    def clean(self) -> bool:
        """Whether it ran on a commit, and not on something nobody can look at any more."""
        return not self.commit.endswith("-dirty")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateTotal:
    """All runs of one gate; `undecided` is what no run of it was long enough for."""

    gate: str
    runs: int
    tried: int
    failed: int
    target: int
    unit: str
    seconds: float
    covered: dict[str, int]
    undecided: tuple[str, ...]
    last: GateReport


def stamped(report: GateReport, commit: str) -> GateReport:
    """Return the report with the time and the commit it ran at, paths of this checkout as seen from
    its root.
    """
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    notes = tuple(_portable(note) for note in report.notes)
    return dataclasses.replace(report, at=at, commit=commit, notes=notes)


def append_report(report: GateReport, commit: str, ledger: Path = LEDGER) -> None:
    """Add a run of a commit to the ledger."""
    with ledger.open("ab") as file:
        file.write(msgspec.json.encode(stamped(report, commit)) + b"\n")


def read_reports(ledger: Path = LEDGER) -> list[GateReport]:
    """Return all runs kept, oldest first."""
    if not ledger.exists():
        return []
    return [msgspec.json.decode(line, type=GateReport) for line in ledger.read_bytes().splitlines()]


def totals(reports: Iterable[GateReport]) -> list[GateTotal]:
    """Return the sums by gate, gates in order of their name; the target is the newest run's.

    A run of an unclean tree is not added up: nobody can say what it was a run of. Its failures are
    listed all the same.
    """
    by_gate: dict[str, list[GateReport]] = {}
    for report in filter(lambda each: each.clean, reports):
        by_gate.setdefault(report.gate, []).append(report)
    return [_total(runs) for _, runs in sorted(by_gate.items())]


def also_totals(reports: Sequence[GateReport]) -> list[GateTotal]:
    """Return the sums of what gates count beside their own unit, over all that count it."""
    return [
        dataclasses.replace(_total(runs), gate="of these", unit=what, target=target, tried=tried)
        for what, target in ALSO_TARGETS.items()
        if (runs := [report for report in reports if what in report.also and report.clean])
        and (tried := sum(run.also[what] for run in runs))
    ]


def print_report(report: GateReport) -> None:
    """Say what a run tried and found."""
    verdict = ("passed" if report.passed else "FAILED") + "".join(
        f", no verdict on {each}" for each in report.undecided
    )
    print(
        f"{report.gate}: {verdict}: {report.tried} {report.unit} tried, {report.failed} failed, "
        f"seed {report.seed}"
    )
    for what, count in report.also.items():
        print(f"  {count:,} {what}")
    for note in report.notes:
        print(f"  {note}")


def _total(runs: Sequence[GateReport]) -> GateTotal:
    places = {place for run in runs for place, count in run.covered.items() if count}
    return GateTotal(
        gate=runs[-1].gate,
        runs=len(runs),
        tried=len(places) if runs[-1].distinct else sum(run.tried - run.padding for run in runs),
        failed=sum(run.failed for run in runs),
        target=runs[-1].target,
        unit=runs[-1].unit,
        seconds=sum(run.seconds for run in runs),
        covered={
            place: sum(run.covered.get(place, 0) for run in runs) for place in runs[-1].covered
        },
        undecided=tuple(
            each for each in runs[-1].undecided if all(each in run.undecided for run in runs)
        ),
        last=runs[-1],
    )


def _portable(note: str) -> str:
    """Return a note as one line that says the same wherever the checkout is: a traceback in it
    names files of it.
    """
    relative = note.replace(sysconfig.get_path("purelib") + "/", "").replace(f"{ROOT}/", "")
    return " | ".join(line for line in relative.splitlines() if line.strip())


def clean_commit(root: Path = ROOT, ignored: Sequence[Path] = RENDERED) -> str | None:
    """Return the commit of a checkout without changes, new files included; None for any other, or
    for none.
    """
    outside = [f":(exclude){path.relative_to(root).as_posix()}" for path in ignored]
    changes = _git(root, "status", "--porcelain", "--", ".", *outside)
    return None if changes is None or changes else _git(root, "rev-parse", "--short", "HEAD")


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", *arguments]
    asked = subprocess.run(command, cwd=root, capture_output=True, check=False)
    return None if asked.returncode else asked.stdout.decode().strip()
