"""kill -9 at random: while the node opens, while it recovers, while it works.

A life is ten kills of one directory: each process finds what the one before left. Kept: everything
that was acknowledged, in either durability, because what was written to the operating system
survives a process; and what named producers repeat over kills is there once, with one answer for
ever.
"""

import random
import time
from pathlib import Path

from tests.chaos.events import Allowed
from tests.chaos.gate import Gate, LifeResult, Settings, run_lives
from tests.chaos.life import Life
from tests.chaos.nursery import KILLED, Nursery
from tests.chaos.report import GateReport
from tests.chaos.worker import JOURNAL
from tests.chaos.workload import Load

KILLS_IN_A_LIFE = 10
PRODUCERS = 2
OPENING_S_MAX = 0.15
WORKING_S_MAX = 0.35
STARTED_S_MAX = 20.0
POLL_S = 0.002


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate."""
    return run_lives(gate, settings, live, tries_in_a_life=KILLS_IN_A_LIFE)


def live(nursery: Nursery, root: Path, seed: int, kills: int) -> LifeResult:
    """Kill one directory's processes so many times."""
    choose = random.Random(seed)
    node_settings, allowed = node_settings_of(choose)
    life = Life(nursery, root, seed=seed, settings=node_settings, allowed=allowed)
    while life.result.tried < kills:
        pid = life.start(
            Load(producers=PRODUCERS, cut_pause_s=choose.choice([0.0, 0.02, 0.2, None]))
        )
        code = nursery.kill(pid) if _time_to_kill(life, pid, choose) else nursery.wait(pid, 0)
        life.result.tried += code == KILLED
        life.ended(code)
        if life.result.findings:
            break
    return life.finish()


def node_settings_of(choose: random.Random) -> tuple[dict[str, object], Allowed]:
    """Choose how a node is set up: memtables small enough to be flushed on the way, log truncated
    or not, synced or not.
    """
    truncated = choose.random() < 0.4
    node_settings: dict[str, object] = {
        "cut_interval_s": None,
        "durability": choose.choice(["fsync", "fsync", "fsync", "os"]),
        "log.memtable_bytes": choose.choice([1 << 16, 1 << 18, 1 << 20, 64 << 20]),
        "log.free_bytes_min": 1 << 20,
        "retention_s": 0 if truncated else 86_400,
    }
    return node_settings, Allowed(truncated=truncated)


def _time_to_kill(life: Life, pid: int, choose: random.Random) -> bool:
    """Wait until it is time; False when the process ended by itself. Some kills come while it
    opens, most while it works.
    """
    if choose.random() < 0.3:
        return life.nursery.wait(pid, choose.uniform(0, OPENING_S_MAX)) is None
    end_s = time.monotonic() + STARTED_S_MAX
    while not (life.out / JOURNAL).exists() and time.monotonic() < end_s:
        time.sleep(POLL_S)
    life.result.counts["killed at work"] += 1
    return life.nursery.wait(pid, choose.uniform(0, WORKING_S_MAX)) is None
