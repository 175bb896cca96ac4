"""The documents that say what is tried: docs/reliability.md, and the tables of faults and
failpoints in docs/guarantees.md.

In: the kept runs. Out: all of them, rendered again; `python -m tests.chaos.documents` does it by
hand. Nothing is rounded up, and a target that was not reached says so.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from tests.chaos.failpoint_table import write_failpoint_table
from tests.chaos.fault_table import write_fault_table
from tests.chaos.registry import GATES
from tests.chaos.report import ROOT, GateReport, GateTotal, also_totals, read_reports, totals

UNKNOWN = "not looked into yet"
WIDTH = 100
PAGE = ROOT / "docs" / "reliability.md"


def write_documents() -> None:
    """Write the page, the figures in the table of faults, and the table of failpoints."""
    reports = read_reports()
    PAGE.write_text(rendered_page(reports), "utf-8")
    write_fault_table(reports)
    write_failpoint_table()


def rendered_page(reports: Sequence[GateReport]) -> str:
    """Return the page with every gate there is."""
    kept = {each.gate for each in reports if each.clean}
    untried = [
        GateReport(gate=gate.name, tried=0, failed=0, seed=0, target=gate.target, unit=gate.unit)
        for gate in GATES.values()
        if gate.name not in kept
    ]
    return render(reports, untried)


def render(reports: Sequence[GateReport], untried: Sequence[GateReport] = ()) -> str:
    """Return the page; `untried` are gates without a kept run, with what they should try."""
    rows = [
        f"| {each.gate} | {each.tried:,} {each.unit} | {each.failed:,} | {each.target:,} | "
        f"{_reached(each)} "
        f"| {each.runs} | {each.seconds / 60:.1f} | {each.last.at}, {each.last.commit} |"
        for each in [*totals(reports), *also_totals(reports)]
    ]
    rows += [
        f"| {each.gate} | 0 {each.unit} | 0 | {each.target:,} | 0.0 % | 0 | 0.0 | never |"
        for each in untried
    ]
    notes = [f"### {each.gate}\n\n{_notes(each)}\n" for each in totals(reports) if each.last.notes]
    failures = ["", "## What failed, and what became of it", "", *_failures(reports)]
    return (
        "\n".join(
            [_HEAD, *rows, *failures, "", "## What the newest run of each gate said", "", *notes]
        ).rstrip()
        + "\n"
    )


_HEAD = """# Reliability: what was tried, and what was found

`python -m tests.chaos.documents` renders this page from `docs/reliability.jsonl`. Every
`make test-long GATE=... MINUTES=...` of a clean checkout adds a line to that file.

* Counts are tries that really ran, added up over all kept runs, failures of earlier commits
  included. They leave out tries that could show nothing, and a second try of a place that has to
  be tried once.
* "Failed" counts lives that broke a promise of [guarantees.md](guarantees.md).
* A target that is not reached yet has its share so far.
* Runs of an unclean checkout are not in the table, because their code is unknown. Only their
  failures are kept.

| gate | tried | failed | target | reached | runs | minutes | last run |
|---|---|---|---|---|---|---|---|"""


def _reached(total: GateTotal) -> str:
    """Return the share of the target, rounded down, and what no run was long enough to answer."""
    share = (
        "yes" if total.tried >= total.target else f"{1000 * total.tried // total.target / 10:.1f} %"
    )
    return ", ".join([share, *(f"no verdict on {what}" for what in total.undecided)])


def _failures(reports: Sequence[GateReport]) -> Iterator[str]:
    """Yield a line for each run in which something failed, oldest first."""
    failed = [each for each in reports if each.failed]
    for each in failed:
        what = f"{each.gate}, {each.at}, {each.failed} of {each.tried:,} {each.unit}"
        yield _item(f"{what}: {each.outcome or UNKNOWN}")
    if not failed:
        yield "Nothing, in the runs that were kept."


def _notes(total: GateTotal) -> str:
    return "\n".join(_item(note) for note in (*total.last.notes, *_coverage(total.covered)))


def _item(text: str) -> str:
    """Return an item of a list, in lines of at most 100 columns."""
    return textwrap.fill(
        f"- {text}",
        WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _coverage(covered: Mapping[str, int]) -> Iterator[str]:
    """Yield, for each kind of place, how often the least tried one was tried in all runs."""
    for kind in sorted({place.partition(": ")[0] for place in covered}):
        of_kind = {
            place: count for place, count in covered.items() if place.partition(": ")[0] == kind
        }
        least = min(of_kind, key=lambda place: (of_kind[place], place))
        yield (
            f"All runs, {kind}: {len(of_kind)} places, {sum(of_kind.values()):,} tries; "
            f"the least tried, `{least.partition(': ')[2]}`, {of_kind[least]:,} times"
        )


def main() -> int:
    """Render the documents again."""
    argparse.ArgumentParser(
        prog="python -m tests.chaos.documents", description=__doc__
    ).parse_args()
    write_documents()
    return 0


if __name__ == "__main__":
    sys.exit(main())
