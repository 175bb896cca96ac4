"""A full disk, for real: ext4 of 48 MiB in a file, filled to the last block while a node works on
it.

A life fills the disk some times. Each time writes stop, with a typed error or standing still; then
space is freed, and they resume by themselves within 5 seconds, or the process is killed on the full
disk and the directory opens and reads there, or says how many bytes that needs. Kept: everything
that was acknowledged.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.events import Allowed
from tests.chaos.gate import Gate, LifeResult, Settings, run_lives
from tests.chaos.life import Life
from tests.chaos.nursery import Nursery
from tests.chaos.operations import Operation, read_operations
from tests.chaos.report import GateReport
from tests.chaos.small_disk import SmallDisk, small_disk
from tests.chaos.worker import JOURNAL, Job, load_read_back
from tests.chaos.workload import Load

DISK_BYTES = 48 << 20
FILLS_IN_A_LIFE = 2
RESUMED_S_MAX = 5.0
"""The figure promised: from space being freed to the first acknowledged append."""
STOPPED_S_MAX = 4.0
STARTED_S_MAX = 20.0
POLL_S = 0.02
SETTINGS: dict[str, object] = {
    "cut_interval_s": None,
    "log.memtable_bytes": 1 << 18,
    "log.free_bytes_min": 2 << 20,
    "retention_s": 0,
    # a call that waits for the log to come back is refused before patience ends
    "reopen.wait_s": 2.0,
}
KINDS = frozenset({"insert", "upsert", "transaction"})


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate."""
    return run_lives(gate, settings, live, tries_in_a_life=FILLS_IN_A_LIFE)


def live(nursery: Nursery, root: Path, seed: int, fills: int) -> LifeResult:
    """Fill one small disk so many times."""
    choose = random.Random(seed)
    with small_disk(root, DISK_BYTES) as disk:
        life = Life(
            nursery,
            root,
            seed=seed,
            directory=disk.path / "node",
            settings=SETTINGS,
            allowed=Allowed(truncated=True, gaps=True),
        )
        while life.result.tried < fills and not life.result.findings:
            _fill_once(life, disk, choose)
            life.result.tried += 1
        return life.finish()


def _fill_once(life: Life, disk: SmallDisk, choose: random.Random) -> None:
    pid = life.start(
        Load(inserters=2, upserters=1, buffered=1, cut_pause_s=choose.choice([0.05, 0.5]))
    )
    journal = life.out / JOURNAL
    if not _wait(STARTED_S_MAX, lambda: any(each.outcome == "ok" for each in _writes(journal))):
        life.result.findings.append("a node on an empty small disk does not start to work")
    time.sleep(choose.uniform(0, 0.5))
    disk.fill()
    full_ns = time.monotonic_ns()
    if not _wait(
        STOPPED_S_MAX, lambda: any(_failed_after(each, full_ns) for each in _writes(journal))
    ):
        # a call without a timeout is tried for ever
        life.result.counts["stood still until there was room"] += 1
    if choose.random() < 0.5:
        life.ended(life.nursery.kill(pid))
        _opens_while_full(life)
        disk.free()
    else:
        disk.free()
        freed_ns = time.monotonic_ns()
        if _wait(
            RESUMED_S_MAX,
            lambda: any(each.started_ns > freed_ns and each.tick for each in _writes(journal)),
        ):
            life.result.counts["resumed within 5 s"] += 1
        else:
            life.result.findings.append(
                f"no write succeeded within {RESUMED_S_MAX:g} s after space was freed; "
                f"{disk.free_bytes} bytes are free"
            )
        life.ended(life.nursery.kill(pid))


def _opens_while_full(life: Life) -> None:
    out = life.out / "while-full"
    code = life.nursery.run(
        Job(do="read", directory=str(life.directory), out=str(out), settings=SETTINGS)
    )
    seen = load_read_back(out)
    if code == 0:
        life.result.counts["opened on a full disk"] += 1
    elif seen is not None and seen.code == "STORAGE_FULL":  # even the reserve was used up
        life.result.counts["refused to open, with the bytes it needs"] += 1
    else:
        reason = "" if seen is None else seen.error
        life.result.findings.append(
            f"the directory does not open for reading on a full disk: exit {code} {reason}"
        )


def _failed_after(write: Operation, full_ns: int) -> bool:
    return bool(write.error) and (write.ended_ns or 0) > full_ns


def _writes(journal: Path) -> list[Operation]:
    return [each for each in read_operations(journal) if each.kind in KINDS]


def _wait(seconds: float, holds: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(POLL_S)
    return True
