"""The ledger of long runs: sums of what ran, nothing rounded up, failures kept."""

import dataclasses
from pathlib import Path

import pytest

from bench.chaos.documents import PAGE, UNKNOWN, render, rendered_page
from bench.chaos.registry import GATES
from bench.chaos.report import ROOT, GateReport, also_totals, append_report, read_reports, totals


def report(tried: int, *, failed: int = 0, gate: str = "kill", target: int = 10_000) -> GateReport:
    return GateReport(gate=gate, tried=tried, failed=failed, seed=7, target=target, unit="kills", seconds=60.0)


def test_runs_of_a_gate_are_added_up_with_their_failures() -> None:
    [total] = totals([report(100), report(50, failed=2)])
    assert (total.tried, total.failed, total.runs, total.seconds) == (150, 2, 2, 120.0)


@pytest.mark.parametrize(
    "tried, reached", [(9_999, "99.9 %"), (10_000, "yes"), (4, "0.0 %")], ids=["just short", "reached", "hardly begun"]
)
def test_share_of_the_target_is_never_rounded_up(tried: int, reached: str) -> None:
    assert f"| {reached} |" in render([report(tried)])


def test_run_that_tried_nothing_has_not_passed() -> None:
    assert not report(0).passed
    assert not report(10, failed=1).passed
    assert report(10).passed


def test_ledger_returns_what_was_appended_with_time_and_commit(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    for tried in (3, 4):
        append_report(report(tried), ledger)
    kept = read_reports(ledger)
    assert [each.tried for each in kept] == [3, 4]
    assert all(each.at.endswith("UTC") and each.commit for each in kept)


def test_kept_note_is_one_line_and_names_no_path_of_the_machine_it_ran_on(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    traceback = f'  File "{ROOT}/wal/ids.py", line 1\n\n  File "{pytest.__file__}", line 2\nKeyError'
    append_report(dataclasses.replace(report(1), notes=(traceback,)), ledger)
    [note] = read_reports(ledger)[0].notes
    assert note == '  File "wal/ids.py", line 1 |   File "pytest/__init__.py", line 2 | KeyError'


def test_places_are_added_up_and_the_least_tried_one_is_named() -> None:
    first, second = ({"crash at: a": 3, "crash at: b": 0}, {"crash at: a": 1, "crash at: b": 2})
    page = render([dataclasses.replace(report(3), notes=("x",), covered=covered) for covered in (first, second)])
    assert "All runs, crash at: 2 places, 6 tries; the least tried, `b`, 2 times" in page


def test_what_gates_count_on_the_way_has_rows_of_its_own_over_all_gates() -> None:
    what = "history-checked operations"
    runs = [dataclasses.replace(report(3, gate=gate), also={what: 70_000}) for gate in ("kill", "simulation")]
    [total] = also_totals([*runs, report(9)])
    assert (total.tried, total.target, total.runs) == (140_000, 100_000_000, 2)
    assert f"| 140,000 {what} | 0 | 100,000,000 | 0.1 % |" in render(runs)


def test_page_says_what_became_of_each_failure_or_that_nobody_has_looked() -> None:
    page = render([dataclasses.replace(report(9, failed=2), outcome="mended"), report(8, failed=1), report(7)])
    assert [line.rpartition(": ")[2] for line in page.splitlines() if line.startswith("- kill")] == ["mended", UNKNOWN]


def test_every_kept_failure_was_looked_into() -> None:
    assert not [(each.gate, each.at) for each in read_reports() if each.failed and not each.outcome]


def test_the_page_is_what_the_kept_runs_say_and_names_every_gate() -> None:
    page = PAGE.read_text("utf-8")
    assert page == rendered_page(read_reports()), "run: python -m bench.chaos.documents"
    assert [name for name in GATES if f"\n| {name} |" not in page] == []
