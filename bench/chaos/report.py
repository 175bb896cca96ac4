"""What was tried and what was found: one line of JSON for each run of a gate, added up into docs/reliability.md.

In: a `GateReport` from a gate. Out: a line in `docs/reliability.jsonl` for a run worth keeping, and the page rendered from
all lines. Counts are sums of what really ran; nothing is rounded up, and a target that was not reached says so.
"""

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
LEDGER = ROOT / "docs" / "reliability.jsonl"
PAGE = ROOT / "docs" / "reliability.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """One run of one gate.

    `tried` counts in the gate's own unit, `failed` those that broke a promise, `target` is how many the long runs should add
    up to. `seed` starts the run again; `notes` are findings, figures and how to reproduce a failure, one sentence each.
    """

    gate: str
    tried: int
    failed: int
    seed: int
    target: int
    unit: str = "tries"
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    at: str = ""
    commit: str = ""

    @property
    def passed(self) -> bool:
        """Whether something was tried and nothing broke a promise."""
        return self.tried > 0 and self.failed == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateTotal:
    """All runs of one gate."""

    gate: str
    runs: int
    tried: int
    failed: int
    target: int
    unit: str
    seconds: float
    last: GateReport


def stamped(report: GateReport) -> GateReport:
    """Return the report with the time and the commit it ran at."""
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return dataclasses.replace(report, at=at, commit=_commit())


def append_report(report: GateReport, ledger: Path = LEDGER) -> None:
    """Add a run to the ledger and render the page again."""
    with ledger.open("ab") as file:
        file.write(msgspec.json.encode(stamped(report)) + b"\n")
    if ledger == LEDGER:
        PAGE.write_text(render(read_reports()), "utf-8")


def read_reports(ledger: Path = LEDGER) -> list[GateReport]:
    """Return all runs kept, oldest first."""
    if not ledger.exists():
        return []
    return [msgspec.json.decode(line, type=GateReport) for line in ledger.read_bytes().splitlines()]


def totals(reports: Iterable[GateReport]) -> list[GateTotal]:
    """Return the sums by gate, gates in order of their name; the target is the newest run's."""
    by_gate: dict[str, list[GateReport]] = {}
    for report in reports:
        by_gate.setdefault(report.gate, []).append(report)
    return [_total(runs) for _, runs in sorted(by_gate.items())]


def print_report(report: GateReport) -> None:
    """Say what a run tried and found."""
    verdict = "passed" if report.passed else "FAILED"
    print(f"{report.gate}: {verdict}: {report.tried} {report.unit} tried, {report.failed} failed, seed {report.seed}")
    for note in report.notes:
        print(f"  {note}")


def render(reports: Sequence[GateReport]) -> str:
    """Return the page."""
    rows = [
        f"| {each.gate} | {each.tried:,} {each.unit} | {each.failed:,} | {each.target:,} | {_reached(each)} "
        f"| {each.runs} | {each.seconds / 60:.1f} | {each.last.at}, {each.last.commit} |"
        for each in totals(reports)
    ]
    notes = [f"### {each.gate}\n\n{_notes(each.last)}\n" for each in totals(reports) if each.last.notes]
    return "\n".join([_HEAD, *rows, "", "## What the newest run of each gate said", "", *notes]).rstrip() + "\n"


_HEAD = """# Reliability: what was tried, and what was found

Rendered by `python -m bench.chaos.report` from `docs/reliability.jsonl`, to which every `make test-long GATE=...
MINUTES=...` adds a line. Counts are what really ran, added up over all kept runs, failures of earlier commits included.
"Failed" counts lives that broke a promise of [guarantees.md](guarantees.md); a target that is not reached yet says how far
it is.

| gate | tried | failed | target | reached | runs | minutes | last run |
|---|---|---|---|---|---|---|---|"""


def _reached(total: GateTotal) -> str:
    """Return the share of the target, rounded down."""
    if total.tried >= total.target:
        return "yes"
    return f"{1000 * total.tried // total.target / 10:.1f} %"


def _notes(report: GateReport) -> str:
    return "\n".join(f"- {note}" for note in report.notes)


def _total(runs: Sequence[GateReport]) -> GateTotal:
    return GateTotal(
        gate=runs[-1].gate,
        runs=len(runs),
        tried=sum(run.tried for run in runs),
        failed=sum(run.failed for run in runs),
        target=runs[-1].target,
        unit=runs[-1].unit,
        seconds=sum(run.seconds for run in runs),
        last=runs[-1],
    )


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    return asked.stdout.decode().strip() or "no commit"


def main() -> int:
    """Render the page again, or with `--check` say whether it is what the ledger says."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    page = render(read_reports())
    if parser.parse_args().check:
        return 0 if PAGE.exists() and PAGE.read_text("utf-8") == page else 1
    PAGE.write_text(page, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
