"""Every named failpoint as a crash, alone and in pairs: a process dies there, and the next dies at
one of the recovery.

A life is one directory: perhaps a life before it, a process that is killed at the failpoint, one
that is killed while it recovers from that, one that reads everything. The seed names the failpoint,
so that lives take them all in turn from wherever a run begins, and the second one. Kept: what was
acknowledged is there once, whole and in order, and nothing else.
"""

import dataclasses
import random
from pathlib import Path
from typing import Literal

from tests.chaos.events import findings_of
from tests.chaos.failpoint_table import FAILPOINTS
from tests.chaos.gate import Gate, LifeResult, Settings, run_lives
from tests.chaos.journal import read_journal
from tests.chaos.judge.verdict import judged
from tests.chaos.nursery import KILLED, PRINTED, Nursery
from tests.chaos.report import GateReport
from tests.chaos.worker import PASSED, Job

BEFORE = {
    "recovery.cut_adopted": "flush.cut_published=kill",
    "recovery.orphan_removing": "flush.files_renamed=kill",
}
"""What has to happen in a life before, so that the next one comes past these."""

REOPENING = frozenset(
    {
        "recovery.write_failed",
        "recovery.term_ended",
        "recovery.database_released",
        "recovery.reopened",
    }
)
A_WRITE_FAILS = "append.written=error@5"
"""What makes a running node open its log again, and come past `REOPENING`."""

OUTSIDE_SPARK = tuple(name for name in FAILPOINTS if not name.startswith(("ingest.", "compact.")))
"""Those of a node; the ones of the ingest need Spark and have a gate of their own, and its tests
compact tables.
"""
RECOVERY = tuple(name for name in OUTSIDE_SPARK if name.startswith("recovery."))
FIRST = "crash at: {}"
SECOND = "then at: {}"
"""What a report calls a place, once for each of both crashes."""
HIT_MAX = 6
FIRST_HIT_SHARE = 0.6
PASS_S_MAX = 60.0


def arming(name: str, action: str, *, hit: int = 1) -> str:
    """Return what arms a failpoint, with what makes a node come past it."""
    armed = f"{name}={action}@{hit}"
    return f"{A_WRITE_FAILS},{armed}" if name in REOPENING else armed


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate; what was not tried is named too."""
    report = run_lives(gate, settings, live, tries_in_a_life=1)
    places = [*map(FIRST.format, OUTSIDE_SPARK), *map(SECOND.format, RECOVERY)]
    covered = {place: report.covered.get(place, 0) for place in places}
    least = min(covered[FIRST.format(name)] for name in OUTSIDE_SPARK)
    pairs = sum(covered[SECOND.format(name)] for name in RECOVERY)
    note = (
        f"of {len(OUTSIDE_SPARK)} places the least tried was tried {least} times; {pairs} "
        "second crashes in a recovery"
    )
    return dataclasses.replace(report, covered=covered, notes=(note, *report.notes))


def live(nursery: Nursery, root: Path, seed: int, crashes: int) -> LifeResult:
    """Crash at the seed's failpoint and then in the recovery, and judge what is left; one try,
    whatever `crashes` says.
    """
    choose = random.Random(seed)
    name = OUTSIDE_SPARK[seed % len(OUTSIDE_SPARK)]
    second = choose.choice(RECOVERY)
    hit = 1 if choose.random() < FIRST_HIT_SHARE else choose.randint(2, HIT_MAX)
    result = LifeResult(tried=crashes)
    passes = _Passes(nursery, root / f"hit-{hit}", result)
    # not every place is passed so often, or again at all
    if not passes.crash_at(name, hit) and hit > 1:
        passes.judge()
        passes = _Passes(nursery, root / "hit-1", result)
        result.counts["later hits not reached"] += 1
        hit = 1 if passes.crash_at(name, 1) else 0
    if hit and not result.findings:
        result.covered[FIRST.format(name)] += 1
        passes.crash_again(second)
    elif not hit:
        result.findings.append("a life that does everything does not come past it")
    passes.judge()
    result.findings[:] = [f"{name}, then {second}: {finding}" for finding in result.findings]
    return result


class _Passes:
    """Process after process in one directory, with one journal."""

    def __init__(self, nursery: Nursery, root: Path, result: LifeResult) -> None:
        root.mkdir()
        self._nursery = nursery
        self._root = root
        self._result = result
        self._processes = 0

    def crash_at(self, name: str, hit: int) -> bool:
        """Kill a process at the so manieth hit of a failpoint; say whether there were so many."""
        if name in BEFORE:
            self._pass(BEFORE[name])
        return self._pass(arming(name, "kill", hit=hit)) == KILLED

    def crash_again(self, name: str) -> None:
        """Kill the next process at a failpoint of the recovery, if it comes past."""
        if self._pass(arming(name, "kill")) == KILLED:
            self._result.covered[SECOND.format(name)] += 1
        else:
            self._result.counts["second failpoints not passed"] += 1

    def judge(self) -> None:
        """Read everything and look at the whole history."""
        self._run("look")
        verdict = judged(read_journal(self._root / PASSED))
        self._result.findings += findings_of(verdict)
        self._result.also["history-checked operations"] += verdict.operations

    def _pass(self, armed: str) -> int | None:
        """Live once past everything, with failpoints armed."""
        return self._run("pass", armed)

    def _run(self, do: Literal["pass", "look"], armed: str = "") -> int | None:
        self._processes += 1
        out = self._root / f"process-{self._processes}"
        job = Job(
            do=do,
            directory=str(self._root / "node"),
            out=str(out),
            first=self._processes,
            armed=armed,
        )
        code = self._nursery.run(job, PASS_S_MAX)
        if code not in (0, KILLED):
            lines = (out / PRINTED).read_text("utf-8").splitlines()
            ended = "hangs" if code is None else f"ended with {code}"
            self._result.findings.append(
                f"{out.name} ({armed or do}) {ended}: {' | '.join(lines[-4:])}"
            )
        return code
