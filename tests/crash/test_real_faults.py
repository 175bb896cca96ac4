"""The real-fault gates as each commit runs them: kills, power cuts, failing calls, full disks, flipped bits, recovery."""

import random

import pytest

from bench.chaos.gate import Settings
from bench.chaos.registry import GATES
from bench.chaos.report import print_report


@pytest.mark.crash
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["kill", "power", "syscalls", "full", "rot", "recovery"])
def test_gate_finds_no_broken_promise(name: str) -> None:
    gate = GATES[name]
    if lack := gate.lacking():
        pytest.skip(lack)
    seed = random.randrange(2**31)
    print(f"{name}: seed {seed}")
    report = gate.run(gate, Settings(seed=seed))
    print_report(report)
    assert report.passed, report.notes
    assert report.tried >= gate.each_commit
