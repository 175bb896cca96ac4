"""The ledger of long runs: sums of what ran, nothing rounded up, failures kept."""

import dataclasses
import subprocess
from pathlib import Path

import pytest

from tests.chaos.documents import PAGE, UNKNOWN, render, rendered_page
from tests.chaos.registry import GATES
from tests.chaos.report import (
    ROOT,
    GateReport,
    also_totals,
    append_report,
    clean_commit,
    read_reports,
    totals,
)


def report(tried: int, *, failed: int = 0, gate: str = "kill", target: int = 10_000) -> GateReport:
    return GateReport(
        gate=gate, tried=tried, failed=failed, seed=7, target=target, unit="kills", seconds=60.0
    )


def test_runs_of_a_gate_are_added_up_with_their_failures() -> None:
    [total] = totals([report(100), report(50, failed=2)])
    assert (total.tried, total.failed, total.runs, total.seconds) == (150, 2, 2, 120.0)


@pytest.mark.parametrize(
    "tried, reached",
    [(9_999, "99.9 %"), (10_000, "yes"), (4, "0.0 %")],
    ids=["just short", "reached", "hardly begun"],
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
        append_report(report(tried), "abc1234", ledger)
    kept = read_reports(ledger)
    assert [each.tried for each in kept] == [3, 4]
    assert all(each.at.endswith("UTC") and each.commit == "abc1234" for each in kept)


def test_kept_note_is_one_line_and_names_no_path_of_the_machine_it_ran_on(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    traceback = (
        f'  File "{ROOT}/wal/ids.py", line 1\n\n  File "{pytest.__file__}", line 2\nKeyError'
    )
    append_report(dataclasses.replace(report(1), notes=(traceback,)), "abc1234", ledger)
    [note] = read_reports(ledger)[0].notes
    assert note == '  File "wal/ids.py", line 1 |   File "pytest/__init__.py", line 2 | KeyError'


def test_places_are_added_up_and_the_least_tried_one_is_named() -> None:
    first = {"crash at: a": 3, "crash at: b": 0}
    second = {"crash at: a": 1, "crash at: b": 2}
    page = render(
        [
            dataclasses.replace(report(3), notes=("x",), covered=covered)
            for covered in (first, second)
        ]
    )
    assert "All runs, crash at: 2 places, 6 tries; the least tried, `b`, 2 times" in page


def test_what_gates_count_on_the_way_has_rows_of_its_own_over_all_gates() -> None:
    what = "history-checked operations"
    runs = [
        dataclasses.replace(report(3, gate=gate), also={what: 70_000})
        for gate in ("kill", "simulation")
    ]
    [total] = also_totals([*runs, report(9)])
    assert (total.tried, total.target, total.runs) == (140_000, 100_000_000, 2)
    assert f"| 140,000 {what} | 0 | 100,000,000 | 0.1 % |" in render(runs)


def test_padding_and_second_tries_of_one_place_are_not_added_up() -> None:
    [flipped] = totals([dataclasses.replace(report(128), padding=100), report(128)])
    assert flipped.tried == 156
    first = {"bug: a": 1, "bug: b": 1}
    second = {"bug: b": 1, "bug: c": 0}
    [found] = totals(
        [
            dataclasses.replace(report(2), distinct=True, covered=places)
            for places in (first, second)
        ]
    )
    assert found.tried == 2


def test_a_row_says_what_no_run_was_long_enough_for() -> None:
    short = dataclasses.replace(report(60), undecided=("memory", "the time of an insert"))
    longer = dataclasses.replace(report(3_600), undecided=("memory",))
    assert "| 0.6 %, no verdict on memory, no verdict on the time of an insert |" in render([short])
    assert "| 36.6 %, no verdict on memory |" in render([short, longer])
    assert "no verdict" not in render([short, report(14_400)])


def test_runs_of_an_unclean_tree_are_not_added_up_and_their_failures_are_told() -> None:
    dirty = dataclasses.replace(report(50, failed=1), commit="abc1234-dirty", outcome="mended")
    [total] = totals([dirty, report(8)])
    assert (total.tried, total.failed) == (8, 0)
    assert ": mended" in render([dirty, report(8)])


def test_only_a_checkout_without_changes_has_a_commit_to_name(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    ledger = tmp_path / "ledger.jsonl"
    code = tmp_path / "code.py"
    assert clean_commit(tmp_path, [ledger]) is None
    git("init")
    ledger.write_text("")
    code.write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    commit = clean_commit(tmp_path, [ledger])
    assert commit
    ledger.write_text("a run")
    assert clean_commit(tmp_path, [ledger]) == commit
    code.write_text("2")
    assert clean_commit(tmp_path, [ledger]) is None
    git("checkout", "code.py")
    (tmp_path / "new.py").write_text("")
    assert clean_commit(tmp_path, [ledger]) is None


def test_no_run_that_passed_on_an_unclean_tree_is_kept() -> None:
    assert not [
        (each.gate, each.at) for each in read_reports() if not each.clean and not each.failed
    ]


def test_page_says_what_became_of_each_failure_or_that_nobody_has_looked() -> None:
    page = render(
        [dataclasses.replace(report(9, failed=2), outcome="mended"), report(8, failed=1), report(7)]
    )
    assert [
        line.rpartition(": ")[2] for line in page.splitlines() if line.startswith("- kill")
    ] == ["mended", UNKNOWN]


def test_every_kept_failure_was_looked_into() -> None:
    assert not [(each.gate, each.at) for each in read_reports() if each.failed and not each.outcome]


def test_the_page_is_what_the_kept_runs_say_and_names_every_gate() -> None:
    page = PAGE.read_text("utf-8")
    assert page == rendered_page(read_reports()), "run: python -m tests.chaos.documents"
    assert [name for name in GATES if f"\n| {name} |" not in page] == []
