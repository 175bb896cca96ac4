"""Seeded bugs: the simulation is judged by what it finds. Each bug is tried with seed after seed until one shows it.

A bug that no seed of `SEEDS_MAX` shows is a failure of the harness, not of the node.
"""

import time

from bench.chaos.gate import Gate, LifeResult, Settings, make_report
from bench.chaos.report import GateReport
from bench.chaos.seeded_bugs import BUGS, SeededBug, seeded
from bench.chaos.simulation.scenario import run_seed

SEEDS_MAX = 1_000


def run(gate: Gate, settings: Settings) -> GateReport:
    """Try each bug once; with `minutes`, all of them, otherwise the first few."""
    begun_s = time.monotonic()
    bugs = BUGS if settings.minutes is not None else BUGS[: settings.count or gate.each_commit]
    result = LifeResult()
    for bug in bugs:
        result.tried += 1
        seed = first_seed(bug, start=settings.seed)
        if seed is None:
            result.findings.append(f"{bug.name}: not found in {SEEDS_MAX} seeds from {settings.seed} on")
        else:
            result.counts[f"seeds until {bug.name!r} was found"] = seed - settings.seed + 1
    return make_report(gate, settings, result, failed=len(result.findings), seconds=time.monotonic() - begun_s)


def first_seed(bug: SeededBug, *, start: int = 0, seeds_max: int = SEEDS_MAX) -> int | None:
    """Return the first seed that shows the bug, None if none of so many does."""
    with seeded(bug):
        return next((seed for seed in range(start, start + seeds_max) if run_seed(seed).problems), None)
