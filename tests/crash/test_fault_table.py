"""The table of faults: as rendered from the kept runs, with gates and tests that exist."""

from pathlib import Path

import pytest

from tests.chaos.fault_table import DOCUMENT, FAULTS, Fault, rendered
from tests.chaos.registry import GATES
from tests.chaos.report import GateReport, read_reports

ROOT = Path(__file__).parents[2]


def test_the_document_has_the_table_of_the_kept_runs() -> None:
    assert rendered(read_reports()) in DOCUMENT.read_text("utf-8"), (
        "run: python -m tests.chaos.documents"
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.number)
def test_every_fault_is_tried_by_gates_and_tests_that_exist(fault: Fault) -> None:
    assert fault.gates or fault.tests
    assert set(fault.gates) <= set(GATES)
    assert [test for test in fault.tests if not (ROOT / test).exists()] == []


def test_figures_of_a_gate_are_all_its_runs_with_their_failures() -> None:
    runs = [
        GateReport(gate="kill", tried=tried, failed=failed, seed=1, target=9, unit="kills")
        for tried, failed in ((1_000, 0), (500, 2))
    ]
    [row] = [line for line in rendered(runs).splitlines() if line.startswith("| F1 ")]
    assert row.endswith("| 1,500 kills, 2 failed; failpoints: no long run kept |")
