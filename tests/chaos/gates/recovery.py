"""How long a killed node takes to open again, and how long that holds the event loop of the program
that opens it.

Nothing is cut and the log is kept whole, so everything has to be recovered: 64 MiB of log within 2
s, 1 GiB within 10 s, on two cores. A try is one open of a directory whose process was killed right
after an acknowledgement; before each, another process adds to the log. A run that is kept also
judges how long the loop is held, in one piece, so it wants a quiet machine: on a busy one other
programs hold it too, which is why the few opens with each commit note it only.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.bench_latency import HOLD_AIM_MS
from bench.measurement import median
from tests.chaos.gate import Gate, LifeResult, Settings, make_report
from tests.chaos.nursery import Nursery
from tests.chaos.report import GateReport
from tests.chaos.worker import FILLED, READ_BACK, Job, load_read_back

SIZES = ((64 << 20, 2.0), (1 << 30, 10.0))
"""Bytes of log, and the seconds allowed."""
OPENS = 3
OPENS_LONG = 20
"""Opens of one directory."""
ADDED_MIB = (8, 13, 18, 23, 28, 9, 14, 19, 24, 29)
"""Before each open after the first, in turns: RocksDB's own log is then of any length."""
DONE_S_MAX = 300.0
POLL_S = 0.05
SETTINGS: dict[str, object] = {
    "cut_interval_s": None,
    "cut_bytes_max": 1 << 40,
    "log.free_bytes_min": 1 << 20,
}
"""No cut, so no checkpoint: the whole log is read again."""


@dataclass(slots=True)
class _Opened:
    """Seconds that opens of logs of one size took, and that they held the event loop."""

    size_bytes: int
    allowed_s: float
    took_s: list[float] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)

    @property
    def slow(self) -> int:
        return sum(each > self.allowed_s for each in self.took_s)

    @property
    def long_held(self) -> int:
        return sum(each > HOLD_AIM_MS / 1000 for each in self.held_s)

    @property
    def broken(self) -> int:
        """Opens that took too long, or held the loop for too long."""
        slow = [took > self.allowed_s for took in self.took_s]
        held = [each > HOLD_AIM_MS / 1000 for each in self.held_s]
        return sum(map(any, zip(slow, held, strict=True)))

    @property
    def notes(self) -> Iterator[str]:
        size = f"{self.size_bytes >> 20} MiB of log"
        took, held = (
            f"{median(each):.3f} s, at most {max(each):.3f} s"
            for each in (self.took_s, self.held_s)
        )
        yield f"{size}: opened {len(self.took_s)} times, in {took}; allowed {self.allowed_s:g} s"
        yield (
            f"{size}: the event loop held for {held}; "
            f"{self.long_held} times more than {HOLD_AIM_MS:g} ms"
        )


def run(gate: Gate, settings: Settings) -> GateReport:
    """Measure the small log on each commit; for some minutes both, in turns, the large one once at
    least.
    """
    begun_s = time.monotonic()
    result = LifeResult()
    end_s = None if settings.minutes is None else begun_s + 60 * settings.minutes
    sizes = [_Opened(*each) for each in (SIZES if end_s is not None else SIZES[:1])]
    opens = OPENS if end_s is None else OPENS_LONG

    def over() -> bool:
        return end_s is not None and time.monotonic() >= end_s

    with Nursery() as nursery:
        while True:
            for opened in sizes:
                root = Path(tempfile.mkdtemp(prefix="chaos-recovery-", dir=settings.scratch))
                _open_often(nursery, root, opened, opens, over)
                shutil.rmtree(root)
            if end_s is None or over():
                break
    result.tried = sum(len(each.took_s) for each in sizes)
    result.findings += [note for each in sizes for note in each.notes]
    failed = sum(each.slow if end_s is None else each.broken for each in sizes)
    return make_report(gate, settings, result, failed=failed, seconds=time.monotonic() - begun_s)


def _open_often(
    nursery: Nursery, root: Path, opened: _Opened, opens: int, over: Callable[[], bool]
) -> None:
    """Open a log of the size so often, or once when it is `over`; every process is killed, so none
    leaves it tidier.
    """
    rows = 0
    size_bytes = opened.size_bytes
    for number in range(opens):
        if number and over():
            return
        rows += _fill(nursery, root, number, size_bytes, first=rows)
        size_bytes = ADDED_MIB[number % len(ADDED_MIB)] << 20
        took_s, held_s = _open_once(nursery, root, number)
        opened.took_s.append(took_s)
        opened.held_s.append(held_s)


def _fill(nursery: Nursery, root: Path, number: int, size_bytes: int, *, first: int) -> int:
    out = root / f"fill-{number}"
    job = Job(
        do="fill",
        directory=str(root / "node"),
        out=str(out),
        first=first,
        fill_bytes=size_bytes,
        settings=SETTINGS,
    )
    _run_until_killed(nursery, job, out / FILLED)
    return int((out / FILLED).read_text("utf-8"))


def _open_once(nursery: Nursery, root: Path, number: int) -> tuple[float, float]:
    out = root / f"open-{number}"
    _run_until_killed(
        nursery,
        Job(do="open", directory=str(root / "node"), out=str(out), settings=SETTINGS),
        out / READ_BACK,
    )
    seen = load_read_back(out)
    assert seen is not None
    return seen.opened_s, seen.held_s


def _run_until_killed(nursery: Nursery, job: Job, done: Path) -> None:
    """Run a job until a file says that it is done, then kill it."""
    pid = nursery.start(job)
    end_s = time.monotonic() + DONE_S_MAX
    while not done.exists():
        assert time.monotonic() < end_s, f"{job.do} takes too long"
        assert nursery.wait(pid, POLL_S) is None, (
            f"{job.do} ended by itself; what it printed is in {job.out}"
        )
    nursery.kill(pid)
