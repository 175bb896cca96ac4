"""Simulated schedules: whole nodes in virtual time, one seed each, in as many processes as there
are lanes.

A seed is everything: `python -m tests.chaos simulation --seed S --count 1` does the same again, to
the last turn.
"""

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from tests.chaos.gate import Gate, LifeResult, Settings, make_report
from tests.chaos.report import GateReport

SEEDS_IN_A_TASK = 20
AGAIN = "again: python -m tests.chaos simulation --count 1 --seed"


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate."""
    begun_s = time.monotonic()
    result = LifeResult()
    failed = 0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.simulation.scenario"])
    with ProcessPoolExecutor(settings.lanes, mp_context=context) as processes:
        waiting: set[Future[LifeResult]] = set()
        for first, count in _shares(gate, settings, begun_s):
            waiting.add(processes.submit(run_seeds, first, count))
            if len(waiting) > settings.lanes:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                failed += sum(_add(result, each.result()) for each in done)
        failed += sum(_add(result, each.result()) for each in waiting)
    return make_report(gate, settings, result, failed=failed, seconds=time.monotonic() - begun_s)


def run_seeds(first: int, count: int) -> LifeResult:
    """Run so many seeds from `first` on, in this process."""
    from tests.chaos.simulation.scenario import run_seed
    from tests.chaos.simulation.virtual_loop import VirtualLoop

    VirtualLoop.silence_the_dead()
    result = LifeResult()
    for seed in range(first, first + count):
        report = run_seed(seed)
        result.tried += 1
        result.counts += Counter({"lives": report.lives, "turns": report.turns})
        result.also += Counter(
            {
                "history-checked operations": report.operations,
                "simulated power cuts": report.power_cuts,
            }
        )
        result.counts += Counter(
            {
                "entries of several writes": report.packs,
                "writes in them": report.packed,
                "lost with a power cut": report.packs_lost,
            }
        )
        if report.problems:
            result.findings.append(f"seed {seed}: {report.problems[0]}; {AGAIN} {seed}")
    return result


def _shares(gate: Gate, settings: Settings, begun_s: float) -> Iterator[tuple[int, int]]:
    """Yield first seeds and counts until enough was tried."""
    first = settings.seed
    if settings.minutes is not None:
        while time.monotonic() - begun_s < 60 * settings.minutes:
            yield first, SEEDS_IN_A_TASK
            first += SEEDS_IN_A_TASK
        return
    end = first + (settings.count or gate.each_commit)
    for start in range(first, end, SEEDS_IN_A_TASK):
        yield start, min(SEEDS_IN_A_TASK, end - start)


def _add(total: LifeResult, part: LifeResult) -> int:
    total.tried += part.tried
    total.findings += part.findings
    total.counts += part.counts
    total.also += part.also
    return len(part.findings)
