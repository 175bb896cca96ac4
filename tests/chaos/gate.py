"""What every gate shares: how much to try, where, from which seed, and how results of several lanes
become one report.

A gate runs lives: a life is one node directory with the faults it goes through, made by one seed.
Life i of a run with seed s has seed s + i, so that a failing one is started alone by its own seed.
No fault of a real machine repeats to the microsecond; a seed repeats the choices, and the directory
of a failing life is kept.
"""

import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.nursery import Nursery
from tests.chaos.report import GateReport

LANES = 2
"""As many lives at a time; a machine of two cores is busy with them."""
NOTES_MAX = 40
SEEDS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much to try: `count` tries, or until `minutes` are over; directories are made below
    `scratch`.
    """

    seed: int
    count: int | None = None
    minutes: float | None = None
    scratch: Path | None = None
    lanes: int = LANES


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One gate: `each_commit` tries on each commit, `target` in long runs added up; `lacking` is
    why it cannot run.

    `first_seed` is where a run without a seed begins: by chance, but where each place has to be
    tried once.
    """

    name: str
    run: Callable[["Gate", Settings], GateReport]
    each_commit: int
    target: int
    unit: str
    lacking: Callable[[], str | None] = lambda: None
    first_seed: Callable[[], int] = lambda: random.randrange(SEEDS)


@dataclass(slots=True)
class LifeResult:
    """What one life tried and found; `counts` are added up into the notes.

    `covered` says how often each of several named things was tried, where a target is one for each
    of them; `also` counts what `report.ALSO_TARGETS` names. `padding` and `undecided` are those of
    the report.
    """

    tried: int = 0
    padding: int = 0
    findings: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    covered: Counter[str] = field(default_factory=Counter)
    also: Counter[str] = field(default_factory=Counter)
    undecided: tuple[str, ...] = ()


Live = Callable[[Nursery, Path, int, int], LifeResult]
"""Run one life: fork server, an empty directory, seed, at most so many tries."""


class _Tally:
    """Results of all lanes so far, and what is left to do."""

    def __init__(self, settings: Settings, count: int) -> None:
        self._lock = threading.Lock()
        self._count = settings.count or (count if settings.minutes is None else None)
        self._end_s = None if settings.minutes is None else time.monotonic() + 60 * settings.minutes
        self._next = 0
        self._given = 0
        self.result = LifeResult()
        self.failed = 0

    def take(self, most: int) -> tuple[int, int] | None:
        """Return the index of the next life and how much it may try, None when enough was tried."""
        with self._lock:
            if self._end_s is not None and time.monotonic() >= self._end_s:
                return None
            share = most if self._count is None else min(most, self._count - self._given)
            if share <= 0:
                return None
            self._given += share
            self._next += 1
            return self._next - 1, share

    def add(self, result: LifeResult, kept: str) -> None:
        """Add the result of a life; `kept` says how to look at it again if it failed."""
        with self._lock:
            self.result.tried += result.tried
            self.result.padding += result.padding
            self.result.counts += result.counts
            self.result.covered += result.covered
            self.result.also += result.also
            if result.findings:
                self.failed += 1
                self.result.findings += [kept, *result.findings]


def run_lives(gate: Gate, settings: Settings, live: Live, *, tries_in_a_life: int) -> GateReport:
    """Run lives in all lanes until enough was tried, and report."""
    begun_s = time.monotonic()
    tally = _Tally(settings, gate.each_commit)
    scratch = Path(tempfile.mkdtemp(prefix=f"chaos-{gate.name}-", dir=settings.scratch))

    def lane() -> None:
        with Nursery() as nursery:
            while (taken := tally.take(tries_in_a_life)) is not None:
                index, most = taken
                root = scratch / str(index)
                seed = settings.seed + index
                root.mkdir()
                result = live(nursery, root, seed, most)
                again = f"python -m tests.chaos {gate.name} --seed {seed} --count {most}"
                tally.add(result, f"life of seed {seed}, kept in {root}; again: {again}")
                if not result.findings:
                    shutil.rmtree(root, ignore_errors=True)

    with ThreadPoolExecutor(settings.lanes) as lanes:
        for done in [lanes.submit(lane) for _ in range(settings.lanes)]:
            done.result()
    if not tally.failed:
        shutil.rmtree(scratch, ignore_errors=True)
    return make_report(
        gate, settings, tally.result, failed=tally.failed, seconds=time.monotonic() - begun_s
    )


def make_report(
    gate: Gate, settings: Settings, result: LifeResult, *, failed: int, seconds: float
) -> GateReport:
    """Return the report of a run: counts first, then what was found."""
    counted = ", ".join(f"{count:,} {what}" for what, count in sorted(result.counts.items()))
    notes: Sequence[str] = [counted, *result.findings] if counted else result.findings
    return GateReport(
        gate=gate.name,
        tried=result.tried,
        failed=failed,
        seed=settings.seed,
        target=gate.target,
        unit=gate.unit,
        seconds=seconds,
        notes=tuple(notes[:NOTES_MAX]),
        covered=dict(sorted(result.covered.items())),
        also=dict(sorted(result.also.items())),
        padding=result.padding,
        undecided=result.undecided,
    )
