"""How long a killed node takes to open again: 64 MiB of log within 2 s, 1 GiB within 10 s, on two cores.

Nothing is cut and the log is kept whole, so everything has to be recovered. A try is one open of a directory whose
process was killed after its last acknowledgement; several of one directory, as each is killed again.
"""

import shutil
import tempfile
import time
from pathlib import Path

from bench.chaos.gate import Gate, LifeResult, Settings, make_report
from bench.chaos.nursery import Nursery
from bench.chaos.report import GateReport
from bench.chaos.worker import FILLED, READ_BACK, Job, load_read_back

SIZES = ((64 << 20, 2.0), (1 << 30, 10.0))
"""Bytes of log, and the seconds allowed."""
OPENS = 3
DONE_S_MAX = 300.0
POLL_S = 0.05
SETTINGS: dict[str, object] = {"cut_interval_s": None, "cut_bytes_max": 1 << 40, "log.free_bytes_min": 1 << 20}
"""No cut, so no checkpoint: the whole log is read again."""


def run(gate: Gate, settings: Settings) -> GateReport:
    """Measure the small log on each commit, both when there are minutes for it."""
    begun_s, result, failed = time.monotonic(), LifeResult(), 0
    sizes = SIZES if settings.minutes is not None else SIZES[:1]
    with Nursery() as nursery:
        for size_bytes, allowed_s in sizes:
            root = Path(tempfile.mkdtemp(prefix="chaos-recovery-", dir=settings.scratch))
            took_s = sorted(opened_s(nursery, root, size_bytes))
            shutil.rmtree(root)
            result.tried += len(took_s)
            failed += sum(each > allowed_s for each in took_s)
            figures = ", ".join(f"{each:.2f}" for each in took_s)
            result.findings.append(f"{size_bytes >> 20} MiB of log: opened in {figures} s, allowed {allowed_s:g} s")
    return make_report(gate, settings, result, failed=failed, seconds=time.monotonic() - begun_s)


def opened_s(nursery: Nursery, root: Path, size_bytes: int) -> list[float]:
    """Return how many seconds each open took of a log of that size; every process is killed, so none leaves it tidier."""
    node = str(root / "node")
    filling = Job(do="fill", directory=node, out=str(root / "fill"), fill_bytes=size_bytes, settings=SETTINGS)
    _run_until_killed(nursery, filling, root / "fill" / FILLED)
    return [_open_once(nursery, node, root / f"open-{number}") for number in range(OPENS)]


def _open_once(nursery: Nursery, node: str, out: Path) -> float:
    _run_until_killed(nursery, Job(do="open", directory=node, out=str(out), settings=SETTINGS), out / READ_BACK)
    seen = load_read_back(out)
    assert seen is not None
    return seen.opened_s


def _run_until_killed(nursery: Nursery, job: Job, done: Path) -> None:
    """Run a job until a file says that it is done, then kill it."""
    pid, end_s = nursery.start(job), time.monotonic() + DONE_S_MAX
    while not done.exists():
        assert time.monotonic() < end_s, f"{job.do} takes too long"
        assert nursery.wait(pid, POLL_S) is None, f"{job.do} ended by itself; what it printed is in {job.out}"
    nursery.kill(pid)
