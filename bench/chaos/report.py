"""What was tried and what was found: one line of JSON for each run of a gate, added up into docs/reliability.md.

In: a `GateReport` from a gate. Out: a line in `docs/reliability.jsonl` for a run worth keeping, the page rendered from all
lines, and the figures in docs/guarantees.md. Counts are sums of what really ran; nothing is rounded up, and a target that
was not reached says so.
"""

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
LEDGER = ROOT / "docs" / "reliability.jsonl"
PAGE = ROOT / "docs" / "reliability.md"
ALSO_TARGETS = {"history-checked operations": 100_000_000, "simulated power cuts": 1_000_000}
"""What gates count beside their own unit, several of them together, and how much the long runs should add up to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """One run of one gate.

    `tried` counts in the gate's own unit, `failed` those that broke a promise, `target` is how many the long runs should add
    up to. `seed` starts the run again; `notes` are findings, figures and how to reproduce a failure, one sentence each.
    `covered` is how often each place was tried, where each has to be: by `kind: name`, what was not tried with 0. `also` is
    what was tried on the way of what `ALSO_TARGETS` names.
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
    covered: dict[str, int]
    last: GateReport


def stamped(report: GateReport) -> GateReport:
    """Return the report with the time and the commit it ran at."""
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return dataclasses.replace(report, at=at, commit=_commit())


def append_report(report: GateReport, ledger: Path = LEDGER) -> None:
    """Add a run to the ledger and render the documents again."""
    with ledger.open("ab") as file:
        file.write(msgspec.json.encode(stamped(report)) + b"\n")
    if ledger == LEDGER:
        _write_documents()


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


def also_totals(reports: Sequence[GateReport]) -> list[GateTotal]:
    """Return the sums of what gates count beside their own unit, over all that count it."""
    return [
        dataclasses.replace(_total(runs), gate="of these", unit=what, target=target, tried=tried)
        for what, target in ALSO_TARGETS.items()
        if (runs := [report for report in reports if what in report.also])
        and (tried := sum(run.also[what] for run in runs))
    ]


def print_report(report: GateReport) -> None:
    """Say what a run tried and found."""
    verdict = "passed" if report.passed else "FAILED"
    print(f"{report.gate}: {verdict}: {report.tried} {report.unit} tried, {report.failed} failed, seed {report.seed}")
    for what, count in report.also.items():
        print(f"  {count:,} {what}")
    for note in report.notes:
        print(f"  {note}")


def render(reports: Sequence[GateReport], untried: Sequence[GateReport] = ()) -> str:
    """Return the page; `untried` are gates without a kept run, with what they should try."""
    rows = [
        f"| {each.gate} | {each.tried:,} {each.unit} | {each.failed:,} | {each.target:,} | {_reached(each)} "
        f"| {each.runs} | {each.seconds / 60:.1f} | {each.last.at}, {each.last.commit} |"
        for each in [*totals(reports), *also_totals(reports)]
    ]
    rows += [f"| {each.gate} | 0 {each.unit} | 0 | {each.target:,} | 0.0 % | 0 | 0.0 | never |" for each in untried]
    notes = [f"### {each.gate}\n\n{_notes(each)}\n" for each in totals(reports) if each.last.notes]
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


def _notes(total: GateTotal) -> str:
    return "\n".join(f"- {note}" for note in (*total.last.notes, *_coverage(total.covered)))


def _coverage(covered: Mapping[str, int]) -> Iterator[str]:
    """Yield, for each kind of place, how often the least tried one was tried in all runs."""
    for kind in sorted({place.partition(": ")[0] for place in covered}):
        of_kind = {place: count for place, count in covered.items() if place.partition(": ")[0] == kind}
        least = min(of_kind, key=lambda place: (of_kind[place], place))
        yield (
            f"All runs, {kind}: {len(of_kind)} places, {sum(of_kind.values()):,} tries; "
            f"the least tried, `{least.partition(': ')[2]}`, {of_kind[least]:,} times"
        )


def _total(runs: Sequence[GateReport]) -> GateTotal:
    return GateTotal(
        gate=runs[-1].gate,
        runs=len(runs),
        tried=sum(run.tried for run in runs),
        failed=sum(run.failed for run in runs),
        target=runs[-1].target,
        unit=runs[-1].unit,
        seconds=sum(run.seconds for run in runs),
        covered={place: sum(run.covered.get(place, 0) for run in runs) for place in runs[-1].covered},
        last=runs[-1],
    )


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    return asked.stdout.decode().strip() or "no commit"


def _write_documents() -> None:
    """Write the page, and the figures in the table of faults."""
    from bench.chaos.fault_table import write_document

    reports = read_reports()
    PAGE.write_text(rendered_page(reports), "utf-8")
    write_document(reports)


def rendered_page(reports: Sequence[GateReport]) -> str:
    """Return the page with every gate there is."""
    from bench.chaos.registry import GATES

    kept = {each.gate for each in reports}
    untried = [
        GateReport(gate=gate.name, tried=0, failed=0, seed=0, target=gate.target, unit=gate.unit)
        for gate in GATES.values()
        if gate.name not in kept
    ]
    return render(reports, untried)


def main() -> int:
    """Render the documents again."""
    argparse.ArgumentParser(prog="python -m bench.chaos.report", description=__doc__).parse_args()
    _write_documents()
    return 0


if __name__ == "__main__":
    sys.exit(main())
