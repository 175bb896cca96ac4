"""Seeded bugs: the judge is judged by what it finds. Each bug is tried with seed after seed until
one shows it.

A bug that no seed of `SEEDS_MAX` shows is a failure of the harness, not of the node; so is one that
is "found" where it is not, which is why the seed that shows it is run once more without the bug.
"""

import dataclasses
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tests.chaos.gate import Gate, LifeResult, Settings, make_report
from tests.chaos.report import GateReport
from tests.chaos.seeded.bug import SeededBug, seeded
from tests.chaos.seeded.catalogue import BUGS, EACH_COMMIT
from tests.chaos.simulation.scenario import run_seed
from tests.chaos.simulation.virtual_loop import VirtualLoop

SEEDS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Finding:
    """The first seed that shows a bug, and how: the first thing that is wrong with it, and without
    the bug ("": nothing).
    """

    seed: int
    shown_by: str
    without: str


def run(gate: Gate, settings: Settings) -> GateReport:
    """Try each bug once; with `minutes`, all of them, otherwise the first few."""
    begun_s = time.monotonic()
    count = len(BUGS) if settings.minutes is not None else settings.count or len(EACH_COMMIT)
    result = LifeResult()
    seeds = dict[str, int]()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.chaos.seeded.catalogue", "tests.chaos.simulation.scenario"]
    )
    with ProcessPoolExecutor(settings.lanes, mp_context=context) as processes:
        found = processes.map(_find, range(count), [settings.seed] * count)
        for bug, finding in zip(BUGS[:count], found, strict=True):
            result.tried += 1
            result.covered[f"bug: {bug.name}"] += 1
            if finding is None:
                result.findings.append(
                    f"{bug.name}: not found in {SEEDS_MAX} seeds from {settings.seed} on"
                )
            elif finding.without:
                result.findings.append(
                    f"{bug.name}: seed {finding.seed} fails without it too: {finding.without}"
                )
            else:
                seeds[bug.name] = finding.seed - settings.seed + 1
    failed = len(result.findings)
    if seeds:
        most = max(seeds, key=lambda name: seeds[name])
        result.counts["found"] = len(seeds)
        result.counts[f"seeds for the one that took most, {most!r}"] = seeds[most]
        result.counts["seeds for the median one"] = sorted(seeds.values())[len(seeds) // 2]
    report = make_report(gate, settings, result, failed=failed, seconds=time.monotonic() - begun_s)
    return dataclasses.replace(report, distinct=True)


def first_seed(bug: SeededBug, *, start: int = 0, seeds_max: int = SEEDS_MAX) -> Finding | None:
    """Return what the first seed that shows the bug has to say, None if none of so many does."""
    for seed in range(start, start + seeds_max):
        with seeded(bug):
            problems = run_seed(seed).problems
        if problems:
            return Finding(seed, problems[0], next(iter(run_seed(seed).problems), ""))
    return None


def _find(number: int, start: int) -> Finding | None:
    VirtualLoop.silence_the_dead()
    return first_seed(BUGS[number], start=start)
