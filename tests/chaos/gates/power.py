"""Power cuts on a disk that forgets: whatever was not synced is gone, or some of it, torn, with a
part of the changed names.

A life is several cuts of one directory, each before a random change of the disk, so also while the
node is made, opened and recovered. Synced appends survive all of them; with durability `os` a
suffix may be lost, never a hole. Before anything else the negative control: on a disk whose syncs
keep nothing, the same checks must find loss, or they prove nothing.
"""

import math
import random
import time
from pathlib import Path

from tests.chaos.events import Allowed
from tests.chaos.forgetful.disk import Loss
from tests.chaos.forgetful.power import ForgetfulMount
from tests.chaos.gate import Gate, LifeResult, Settings, run_lives
from tests.chaos.life import Life
from tests.chaos.nursery import WAIT_S_MAX, Nursery
from tests.chaos.report import GateReport
from tests.chaos.workload import Load

CUTS_IN_A_LIFE = 5
OPENING_CHANGES_MAX = 300
"""About what a node changes while it is made, opened and recovered."""
WORKING_CHANGES_MAX = 2_000
RUNNING_S_MAX = 3.0
CONTROL_CHANGES = 400
"""Enough for a new node to be made and to acknowledge something."""
CONTROL_TRIES_MAX = 5


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the negative control, then the gate."""
    return run_lives(gate, settings, live, tries_in_a_life=CUTS_IN_A_LIFE)


def live(nursery: Nursery, root: Path, seed: int, cuts: int) -> LifeResult:
    """Cut the power of one directory so many times; the first life of a lane also runs the negative
    control.
    """
    choose = random.Random(seed)
    with ForgetfulMount(root / "disk") as disk:
        node_settings, allowed = _node_settings_of(choose)
        life = Life(
            nursery,
            root,
            seed=seed,
            directory=disk.path / "node",
            settings=node_settings,
            allowed=allowed,
        )
        while life.result.tried < cuts and not life.result.findings:
            changes = _changes_until_cut(choose)
            loss: Loss = choose.choice(["all", "some"])
            cut_power(
                life,
                disk,
                Load(cut_pause_s=choose.choice([0.0, 0.02, 0.2, None])),
                changes=changes,
                loss=loss,
            )
            life.result.tried += 1
        result = life.finish()
        result.counts["acknowledged and lost, as durability os may"] += life.lost
        if not result.findings:
            _control(nursery, root / "control", disk, seed, result)
    return result


def cut_power(
    life: Life,
    disk: ForgetfulMount,
    load: Load,
    *,
    changes: int,
    loss: Loss,
    running_s: float = RUNNING_S_MAX,
) -> None:
    """Let a process work until power goes, kill it where it stands, and bring power back."""
    disk.arm(changes)
    pid = life.start(load)
    end_s = time.monotonic() + running_s
    went_off = disk.went_off(running_s)
    code = None if went_off else life.nursery.wait(pid, max(0.0, end_s - time.monotonic()))
    if not went_off:
        disk.off()
    life.nursery.signal(pid)
    disk.on(seed=changes, loss=loss)  # ends the waits of the killed process
    life.ended(life.nursery.wait(pid, WAIT_S_MAX) if code is None else code)


def _changes_until_cut(choose: random.Random) -> int:
    """Choose when power goes: one in three while the node opens, and then rather early."""
    if choose.random() < 1 / 3:
        return int(math.exp(choose.uniform(0, math.log(OPENING_CHANGES_MAX))))
    return choose.randint(OPENING_CHANGES_MAX, WORKING_CHANGES_MAX)


def _node_settings_of(choose: random.Random) -> tuple[dict[str, object], Allowed]:
    truncated = choose.random() < 0.3
    durability = choose.choice(["fsync", "fsync", "os"])
    node_settings: dict[str, object] = {
        "cut_interval_s": None,
        "durability": durability,
        "log.memtable_bytes": choose.choice([1 << 16, 1 << 18, 1 << 20]),
        "log.free_bytes_min": 1 << 20,
        "retention_s": 0 if truncated else 86_400,
    }
    return node_settings, Allowed(truncated=truncated, suffix_lost=durability == "os")


def _control(
    nursery: Nursery, root: Path, disk: ForgetfulMount, seed: int, result: LifeResult
) -> None:
    """Require that loss is found on a disk that keeps nothing of a sync."""
    settings: dict[str, object] = {"cut_interval_s": None, "log.free_bytes_min": 1 << 20}
    for attempt in range(1, CONTROL_TRIES_MAX + 1):
        disk.fresh(keeps_fsync=False)
        life = Life(
            nursery, root / str(attempt), seed=seed, directory=disk.path / "node", settings=settings
        )
        # Something must be acknowledged before: on a busy machine opening alone takes seconds.
        cut_power(
            life,
            disk,
            Load(),
            changes=CONTROL_CHANGES * attempt,
            loss="all",
            running_s=RUNNING_S_MAX * attempt,
        )
        if life.acknowledged and life.finish().findings:
            result.counts["negative controls that found the loss"] += 1
            return
    result.findings.append(
        "the negative control found no loss on a disk that keeps nothing of a sync"
    )
