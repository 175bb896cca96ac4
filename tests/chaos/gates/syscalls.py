"""System calls that fail or stand still: strace answers one of the node's syncs or renames with an
error, or delays them.

A life is one process under strace, then a last one without. Kept: nothing acknowledged is lost
whatever call failed, a failed write is told as such, and once one has failed the node takes writes
again by itself.
"""

import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.chaos.events import Allowed
from tests.chaos.gate import Gate, LifeResult, Settings, run_lives
from tests.chaos.life import Life
from tests.chaos.nursery import PRINTED, Nursery
from tests.chaos.operations import Operation, read_operations
from tests.chaos.report import GateReport
from tests.chaos.worker import JOURNAL
from tests.chaos.workload import Load

ROOT = Path(__file__).resolve().parents[3]
LOAD_S = 2.5
PROCESS_S_MAX = 60.0
REFUSALS = frozenset({"STORAGE_FAILED", "STORAGE_FULL", "INDETERMINATE"})
"""What a node may refuse to open with, or give up with, while its disk fails."""
RESUMED_S_MIN = 1.5
"""A failure so long before the end of the load leaves time to go on; later ones prove nothing
either way.
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """System calls, and what strace does to them, with the number of the call (of its thread)
    chosen up to `calls_max`.
    """

    calls: str
    does: str
    calls_max: int = 0

    def injection(self, choose: random.Random) -> str:
        """Return strace's expression."""
        when = f":when={choose.randint(1, self.calls_max)}" if self.calls_max else ""
        return f"inject={self.calls}:{self.does}{when}"


FAULTS = (
    Fault("fdatasync", "error=EIO", 60),
    Fault("fdatasync", "error=ENOSPC", 60),
    Fault("fsync", "error=EIO", 25),
    Fault("rename,renameat,renameat2", "error=EIO", 40),
    Fault("pwrite64", "error=EIO", 60),
    Fault("fdatasync", "delay_enter=50000"),
    Fault("fdatasync", "error=EIO", 8),
    Fault("fsync,fdatasync", "delay_exit=30000"),
)


def lacking() -> str | None:
    """Return what this machine lacks for the gate."""
    return None if shutil.which("strace") else "needs strace, to make system calls fail"


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate; lives take the faults in turn."""
    return run_lives(gate, settings, live, tries_in_a_life=1)


def live(nursery: Nursery, root: Path, seed: int, tries: int) -> LifeResult:
    """Run one process with one fault, and see what is left."""
    choose = random.Random(seed)
    fault = FAULTS[seed % len(FAULTS)]
    node_settings: dict[str, object] = {
        "cut_interval_s": None,
        "log.memtable_bytes": 1 << 18,
        "log.free_bytes_min": 1 << 20,
    }
    life = Life(nursery, root, seed=seed, settings=node_settings, allowed=Allowed(gaps=True))
    injection = fault.injection(choose)
    job = life.job(Load(cut_pause_s=0.05, seconds=LOAD_S))
    code = _run_under_strace(msgspec.json.encode(job).decode(), life.out, injection)
    operations = read_operations(life.out / JOURNAL)
    life.result.tried = tries
    life.result.counts[f"{fault.calls} {fault.does}"] += 1
    life.ended(code, may_refuse=REFUSALS)
    if code == 0 and not _resumed(operations):
        life.result.findings.append(
            "no write succeeded after one had failed, though there was time"
        )
    result = life.finish()
    result.findings[:] = [f"{injection}: {finding}" for finding in result.findings]
    return result


def _run_under_strace(job: str, out: Path, injection: str) -> int | None:
    out.mkdir(parents=True)
    calls = injection.partition("=")[2].partition(":")[0]
    command = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-qqq",
        "-o",
        str(out / "strace"),
        "-e",
        f"trace={calls}",
        "-e",
        injection,
    ]
    with (out / PRINTED).open("wb") as printed:
        try:
            return subprocess.run(
                [*command, sys.executable, "-m", "tests.chaos.worker", job],
                cwd=ROOT,
                # Python renames what it compiles
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
                stdout=printed,
                stderr=printed,
                timeout=PROCESS_S_MAX,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def _resumed(operations: list[Operation]) -> bool:
    """Whether a write that began after the first indeterminate one was acknowledged, or there was
    no time for it.
    """
    writes = [each for each in operations if each.kind != "cut"]
    failed_ns = [
        each.ended_ns
        for each in writes
        if each.outcome == "indeterminate" and each.ended_ns is not None
    ]
    if not failed_ns:
        return True
    last_ns = max(each.started_ns for each in writes)
    after = [each for each in writes if each.started_ns > failed_ns[0] and each.outcome == "ok"]
    return bool(after) or last_ns - failed_ns[0] < RESUMED_S_MIN * 1e9
