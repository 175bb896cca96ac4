"""The life of one node directory: process after process opens it, reads it back, works and is cut off; each is judged.

In: how each process ended. Out: findings. What a process read back is judged against all operations of the processes before
it, then its own operations join them.
"""

from pathlib import Path

from bench.chaos import history
from bench.chaos.checker import FINDINGS_MAX, STRICT, Allowed, check, check_audit
from bench.chaos.events import events_of
from bench.chaos.gate import LifeResult
from bench.chaos.nursery import KILLED, PRINTED, Nursery
from bench.chaos.operations import Operation, read_operations
from bench.chaos.read_back import ReadBack
from bench.chaos.worker import EXIT_REFUSED, JOURNAL, REFUSED, Job, load_audit, load_read_back
from bench.chaos.workload import Load

NUMBERS_OF_A_PROCESS = 10_000_000
PRINTED_LINES_MAX = 12


class Life:
    """One directory; `root` holds it and what its processes write beside it, unless `directory` is elsewhere."""

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
        self.nursery, self.root = nursery, root
        self.directory = directory or root / "node"
        self.result = LifeResult()
        self.lost = 0
        self.acknowledged = 0
        self._seed, self._settings, self._allowed = seed, settings or {}, allowed
        self._operations: list[Operation] = []
        self._before: ReadBack | None = None
        self._told: list[Operation] = []
        self._read_backs: list[ReadBack] = []
        self._processes = 0

    @property
    def out(self) -> Path:
        """Where the newest process writes its journal and read-back."""
        return self.root / f"process-{self._processes}"

    def job(self, load: Load) -> Job:
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
        )

    def start(self, load: Load) -> int:
        """Start a process that works on the directory, and return its id."""
        return self.nursery.start(self.job(load))

    def ended(self, exit_code: int | None, *, may_refuse: frozenset[str] = frozenset()) -> None:
        """Judge what the newest process read back, and take its operations in.

        `may_refuse` are codes with which it may have refused to open or have given up, because its disk failed.
        """
        seen = load_read_back(self.out)
        if exit_code == EXIT_REFUSED and self._refusal_code() in may_refuse:
            self.result.counts["refused by a failing disk"] += 1
        else:
            self._complain_of_exit(exit_code)
        if seen is None or seen.code not in may_refuse:
            self._judge()
        done = read_operations(self.out / JOURNAL)
        self._operations += done
        self._told += done
        self.acknowledged += sum(each.outcome == "ok" for each in done)
        self.result.counts["operations"] += len(done)
        self.result.counts["acknowledged"] += sum(each.outcome == "ok" for each in done)

    def finish(self) -> LifeResult:
        """Open the directory a last time, judge it, close it and look below."""
        self._processes += 1
        read = Job(do="read", directory=str(self.directory), out=str(self.out), settings=self._settings)
        self._complain_of_exit(self.nursery.run(read))
        seen = self._judge()
        if seen is not None and not seen.error:
            below = Job(do="audit", directory=str(self.directory), out=str(self.out))
            if self.nursery.run(below) is None:
                self._find("the audit hangs")
            else:
                self.result.findings += check_audit(seen, load_audit(self.out))
        self._judge_history()
        return self.result

    def _judge_history(self) -> None:
        """Judge all processes as one history, where nothing may be gone."""
        if not (self._allowed.truncated or self._allowed.suffix_lost):
            found = history.check(events_of(self._told, self._read_backs))
            self.result.findings += [f"{each.kind.value}: {each.text}" for each in found[:FINDINGS_MAX]]
            self.result.counts["operations in whole histories"] += len(self._told)

    def _judge(self) -> ReadBack | None:
        seen = load_read_back(self.out)
        if seen is not None:
            verdict = check(self._operations, seen, before=self._before, allowed=self._allowed)
            self._operations = list(verdict.operations)
            if not seen.error:
                self._before = seen
                self._read_backs.append(seen)
            self.lost += verdict.lost
            self.result.counts["read-backs judged"] += 1
            for finding in verdict.findings:
                self._find(finding)
        return seen

    def _refusal_code(self) -> str:
        path = self.out / REFUSED
        return path.read_text("utf-8").partition(":")[0] if path.exists() else ""

    def _complain_of_exit(self, exit_code: int | None) -> None:
        if exit_code is None:
            self._find("the process hangs")
        elif exit_code not in (0, KILLED):
            printed = self.out / PRINTED
            lines = printed.read_text("utf-8").splitlines() if printed.exists() else []
            self._find(f"the process ended with {exit_code}: {' | '.join(lines[-PRINTED_LINES_MAX:])}")

    def _find(self, finding: str) -> None:
        self.result.findings.append(f"process {self._processes}: {finding}")
