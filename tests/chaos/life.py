"""The life of one node directory: process after process opens it, reads it back, works and is cut
off; each is judged.

In: how each process ended. Out: findings. What a process read back is judged against all operations
of the processes before it, then its own operations join them.
"""

import time
from pathlib import Path

from tests.chaos.events import STRICT, Allowed, below_of, calls_of, findings_of, reads_of
from tests.chaos.gate import LifeResult
from tests.chaos.journal import Died, Event
from tests.chaos.judge.verdict import Verdict, judged
from tests.chaos.nursery import KILLED, PRINTED, Nursery
from tests.chaos.operations import Operation, read_operations
from tests.chaos.produced import joined_tries
from tests.chaos.read_back import ReadBack
from tests.chaos.worker import EXIT_REFUSED, JOURNAL, REFUSED, Job, load_audit, load_read_back
from tests.chaos.workload import Load

NUMBERS_OF_A_PROCESS = 10_000_000
PRINTED_LINES_MAX = 12


class Life:
    """One directory; `root` holds it and what its processes write beside it, unless `directory` is
    elsewhere.
    """

    def __init__(
        self,
        nursery: Nursery,
        root: Path,
        *,
        seed: int,
        directory: Path | None = None,
        settings: dict[str, object] | None = None,
        allowed: Allowed = STRICT,
    ) -> None:
        self.nursery = nursery
        self.root = root
        self.directory = directory or root / "node"
        self.result = LifeResult()
        self.lost = 0
        self.acknowledged = 0
        self._seed = seed
        self._settings = settings or {}
        self._allowed = allowed
        self._operations: list[Operation] = []
        self._events: list[Event] = []
        """Beside the operations: what was read back, and when processes died."""
        self._processes = 0

    @property
    def out(self) -> Path:
        """Where the newest process writes its journal and read-back."""
        return self.root / f"process-{self._processes}"

    def job(self, load: Load, *, lockless: bool = False) -> Job:
        """Return the work of the next process."""
        self._processes += 1
        return Job(
            do="work",
            directory=str(self.directory),
            out=str(self.out),
            first=self._processes * NUMBERS_OF_A_PROCESS,
            seed=self._seed + self._processes,
            settings=self._settings,
            load=load,
            lockless=lockless,
        )

    def start(self, load: Load, *, lockless: bool = False) -> int:
        """Start a process that works on the directory, and return its id."""
        return self.nursery.start(self.job(load, lockless=lockless))

    def ended(
        self,
        exit_code: int | None,
        *,
        may_refuse: frozenset[str] = frozenset(),
        out: Path | None = None,
    ) -> None:
        """Judge what the newest process, or the one of `out`, read back, and take its operations
        in.

        `may_refuse` are codes with which it may have refused to open or have given up, because its
        disk failed.
        """
        out = out or self.out
        seen = load_read_back(out)
        if exit_code == EXIT_REFUSED and (code := _refusal_code(out)) in may_refuse:
            self.result.counts[f"gave up with {code}"] += 1
        else:
            self._complain_of_exit(exit_code, out)
        if seen is None or seen.code not in may_refuse:
            self._judge(out)
        self._events.append(Died(time.monotonic_ns(), suffix_lost=self._allowed.suffix_lost))
        done = read_operations(out / JOURNAL)
        self._operations += done
        self.acknowledged += sum(each.outcome == "ok" for each in done)
        self.result.counts["operations"] += len(done)
        self.result.counts["acknowledged"] += sum(each.outcome == "ok" for each in done)

    def finish(self) -> LifeResult:
        """Open the directory a last time, judge it, close it and look below."""
        self._processes += 1
        read = Job(
            do="read", directory=str(self.directory), out=str(self.out), settings=self._settings
        )
        self._complain_of_exit(self.nursery.run(read), self.out)
        seen = self._judge(self.out)
        if seen is not None and not seen.error:
            below = Job(do="audit", directory=str(self.directory), out=str(self.out))
            if self.nursery.run(below) is None:
                self._find("the audit hangs")
            else:
                self._events.append(below_of(load_audit(self.out)))
        tries = joined_tries(self._operations)
        self.result.findings += tries.findings
        self.result.counts["answers to retries compared"] += tries.compared
        self.result.also["history-checked operations"] += self._judge_history().operations
        return self.result

    def _judge_history(self) -> Verdict:
        """Judge everything that was told and read so far as one history."""
        verdict = judged([*calls_of(self._operations), *self._events], gaps=self._allowed.gaps)
        self.lost = verdict.lost
        for finding in findings_of(verdict):
            self._find(finding)
        return verdict

    def _judge(self, out: Path) -> ReadBack | None:
        seen = load_read_back(out)
        if seen is not None and seen.error:
            self._find(f"the node refused: {seen.code}: {seen.error}")
        elif seen is not None:
            self.result.counts["read-backs judged"] += 1
            reader = f"open {self.result.counts['read-backs judged']}"
            self._events += reads_of(seen, reader, self._allowed)
            self._judge_history()
        return seen

    def _complain_of_exit(self, exit_code: int | None, out: Path) -> None:
        if exit_code is None:
            self._find("the process hangs")
        elif exit_code not in (0, KILLED):
            printed = out / PRINTED
            lines = printed.read_text("utf-8").splitlines() if printed.exists() else []
            self._find(
                f"the process ended with {exit_code}: {' | '.join(lines[-PRINTED_LINES_MAX:])}"
            )

    def _find(self, finding: str) -> None:
        self.result.findings.append(f"process {self._processes}: {finding}")


def _refusal_code(out: Path) -> str:
    path = out / REFUSED
    return path.read_text("utf-8").partition(":")[0] if path.exists() else ""
