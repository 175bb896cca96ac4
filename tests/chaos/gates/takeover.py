"""Two owners: the first is stopped where it stands, another takes the directory that no lock
guards, then the first goes on.

As on a file system without locks: `flock` does nothing, and RocksDB's own lock file is unlinked. A
life hands one directory on some times. Kept: the new owner has everything that was acknowledged
before, and the old one acknowledges nothing more once it goes on. The fencing token promises no
more than that, so nobody makes a cut or fills a table of RocksDB meanwhile.
"""

import random
import signal
import time
from pathlib import Path

from tests.chaos.events import Allowed
from tests.chaos.gate import Gate, LifeResult, Settings, run_lives
from tests.chaos.life import Life
from tests.chaos.nursery import Nursery
from tests.chaos.report import GateReport
from tests.chaos.worker import JOURNAL
from tests.chaos.workload import Load
from wal.files import LOCK_NAME
from wal.rocks.layout import DATABASE_NAME

TAKEOVERS_IN_A_LIFE = 4
WORKING_S_MAX = 0.4
BESIDE_S = 0.4
"""So long the old owner and the new one are both alive."""
STARTED_S_MAX = 20.0
POLL_S = 0.002
FENCED = frozenset({"CHANNEL_FENCED", "ON_SHUTDOWN", "INDETERMINATE"})
"""What an old owner may give up with; the second where a caller meets a node that has ended for the
first, the third where it was stopped in its first write."""


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate."""
    return run_lives(gate, settings, live, tries_in_a_life=TAKEOVERS_IN_A_LIFE)


def live(nursery: Nursery, root: Path, seed: int, takeovers: int) -> LifeResult:
    """Hand one directory on so many times."""
    choose = random.Random(seed)
    node_settings: dict[str, object] = {
        "cut_interval_s": None,
        "log.memtable_bytes": 64 << 20,
        "log.free_bytes_min": 1 << 20,
    }
    life = Life(nursery, root, seed=seed, settings=node_settings, allowed=Allowed(gaps=True))
    owner = _start(life)
    while life.result.tried < takeovers and not life.result.findings:
        owner = _take_over(life, owner, choose)
        life.result.tried += 1
    life.ended(nursery.kill(owner))
    return life.result if life.result.findings else life.finish()


def _start(life: Life) -> int:
    """Start a process and return its id once it works."""
    pid = life.start(Load(producers=1, cut_pause_s=None), lockless=True)
    end_s = time.monotonic() + STARTED_S_MAX
    while not (life.out / JOURNAL).exists() and time.monotonic() < end_s:
        if life.nursery.wait(pid, POLL_S) is not None:
            break
    return pid


def _take_over(life: Life, old: int, choose: random.Random) -> int:
    """Stop an owner, give its directory to another, and let it go on beside that one for a
    while.
    """
    life.nursery.wait(old, choose.uniform(0, WORKING_S_MAX))
    life.nursery.signal(old, signal.SIGSTOP)
    (life.directory / LOCK_NAME).unlink(missing_ok=True)
    # an owner that refused to open has none
    (life.directory / DATABASE_NAME / "LOCK").unlink(missing_ok=True)
    out_of_old = life.out
    new = _start(life)
    life.nursery.wait(new, choose.uniform(0, WORKING_S_MAX))
    life.nursery.signal(old, signal.SIGCONT)
    code = life.nursery.wait(old, BESIDE_S)
    if code is None:
        code = life.nursery.kill(old)
        life.result.counts["old owners that stayed, refusing"] += 1
    life.ended(code, may_refuse=FENCED, out=out_of_old)
    return new
