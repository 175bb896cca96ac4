"""The gates of real faults as each commit runs them: kills, power cuts, failing calls, full disks,
flipped bits.
"""

import random

import pytest

from tests.chaos.gate import SEEDS, Settings
from tests.chaos.registry import GATES
from tests.chaos.report import print_report

GATES_OF_A_COMMIT = (
    "kill",
    "failpoints",
    "takeover",
    "ingest",
    "power",
    "syscalls",
    "full",
    "rot",
    "bytes",
    "recovery",
    "steps",
    "network",
    "rocksmq",
)


@pytest.mark.crash
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", GATES_OF_A_COMMIT)
def test_gate_finds_no_broken_promise(name: str) -> None:
    gate = GATES[name]
    if lack := gate.lacking():
        pytest.skip(lack)
    seed = random.randrange(SEEDS)
    print(f"{name}: seed {seed}")
    report = gate.run(gate, Settings(seed=seed))
    print_report(report)
    assert report.passed, report.notes
    assert report.tried >= gate.each_commit
