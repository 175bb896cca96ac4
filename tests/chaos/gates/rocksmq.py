"""kill -9 at random of a process that produces to topics, consumes from them, acknowledges and gives up pages.

A life is ten kills of one directory. Kept: every message that was produced is delivered to every group that did not begin to
acknowledge it, what a group acknowledged never comes again, no id is given twice, and the directory verifies.
"""

import asyncio
import random
from pathlib import Path

from streamingnode.care.verify import verify_directory
from tests.chaos.gate import Gate, LifeResult, Settings, run_lives
from tests.chaos.nursery import Nursery
from tests.chaos.report import GateReport
from tests.wal.rocksmq.killed_queue import Told

KILLS_IN_A_LIFE = 10
WORKING_S_MAX = 0.35


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate."""
    return run_lives(gate, settings, live, tries_in_a_life=KILLS_IN_A_LIFE)


def live(_nursery: Nursery, root: Path, seed: int, kills: int) -> LifeResult:
    """Kill one directory's processes so many times, and look at what is left after each."""
    choose, result = random.Random(seed), LifeResult()
    told = Told(root / "node", choose.choice(["fsync", "os"]))
    while result.tried < kills and not told.findings:
        told.run_until_killed(choose.getrandbits(32), seconds=choose.uniform(0, WORKING_S_MAX))
        result.tried += 1
        asyncio.run(told.look())
        told.findings += [f"{each.place} {each.detail}" for each in verify_directory(root / "node").damages]
    result.findings = told.findings
    result.counts["messages produced"] = sum(map(len, told.produced.values()))
    result.counts["messages acknowledged"] = sum(map(len, told.acked.values()))
    return result
