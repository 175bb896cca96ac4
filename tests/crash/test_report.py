"""The ledger of long runs: sums of what ran, nothing rounded up, failures kept."""

from pathlib import Path

import pytest

from bench.chaos.report import GateReport, append_report, read_reports, render, totals


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
