"""A process that produces to topics, consumes from them, acknowledges and gives up pages, and what
may befall it.

A life is ten ends of one directory: by kill -9; or by power cuts on a disk that forgets what was
not synced; or its small disk is filled to the last block, and freed, or the process is killed on
it. Kept: every message that was produced is delivered to every group that did not begin to
acknowledge it, what a group acknowledged never comes again, no id is given twice, and the directory
verifies.
"""

import asyncio
import random
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from streamingnode.care.verify import verify_directory
from tests.chaos.forgetful.disk import Loss
from tests.chaos.forgetful.power import ForgetfulMount
from tests.chaos.forgetful.power import lacking as lacking_for_power
from tests.chaos.gate import Gate, LifeResult, Settings, run_lives
from tests.chaos.nursery import Nursery
from tests.chaos.report import GateReport
from tests.chaos.small_disk import lacking as lacking_for_full
from tests.chaos.small_disk import small_disk
from tests.chaos.topic_life import Told

ENDS_IN_A_LIFE = 10
WORKING_S_MAX = 0.35
DISK_BYTES = 24 << 20
CHANGES_MAX = 600
"""Of the disk, until power goes: some while it is opened, most while it works."""
RUNNING_S_MAX = 3.0
RESUMING = 0.5
RESUMED_LINES = 50
"""How often space is freed before the kill, and what the process must say after that to have
resumed.
"""


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate."""
    return run_lives(gate, settings, live, tries_in_a_life=ENDS_IN_A_LIFE)


def live(_nursery: Nursery, root: Path, seed: int, ends: int) -> LifeResult:
    """End one directory's processes so many times, and look at what is left after each."""
    choose = random.Random(seed)
    result = LifeResult()
    kinds = (
        [_Kill]
        + [_PowerCut] * (lacking_for_power() is None)
        + [_FullDisk] * (lacking_for_full() is None)
    )
    with ExitStack() as stack:
        end = choose.choice(kinds)(root, choose, stack)
        while result.tried < ends and not end.told.findings:
            end.arm()
            end.told.run_until_killed(choose.getrandbits(32), end)
            result.tried += 1
            asyncio.run(end.told.look())
            end.told.findings += [
                f"{each.place} {each.detail}" for each in verify_directory(end.directory).damages
            ]
    result.findings = end.told.findings
    result.counts[f"ends by {end.name}"] = result.tried
    result.counts["messages produced"] = sum(map(len, end.told.produced.values()))
    result.counts["messages acknowledged"] = sum(map(len, end.told.acked.values()))
    return result


class _Kill:
    """Ends a process by a signal, some time after its first word."""

    name = "kill"

    def __init__(self, root: Path, choose: random.Random, stack: ExitStack) -> None:
        self.choose = choose
        self.directory, durability = self.prepared(root, stack)
        self.told = Told(self.directory, durability)

    def prepared(self, root: Path, _: ExitStack) -> tuple[Path, str]:
        """Return where the directory goes, and how its messages are synced."""
        return root / "node", self.choose.choice(["fsync", "os"])

    def arm(self) -> None:
        """Prepare for the next end."""

    def __call__(self, process: "subprocess.Popen[str]", wait_lines: Callable[[int], None]) -> None:
        wait_lines(1)
        time.sleep(self.choose.uniform(0, WORKING_S_MAX))
        process.kill()


class _PowerCut(_Kill):
    name = "power"

    def prepared(self, root: Path, stack: ExitStack) -> tuple[Path, str]:
        self._disk = stack.enter_context(ForgetfulMount(root / "disk"))
        return self._disk.path / "node", "fsync"

    def arm(self) -> None:
        self._disk.arm(self.choose.randint(1, CHANGES_MAX))

    def __call__(self, process: "subprocess.Popen[str]", _: Callable[[int], None]) -> None:
        if not self._disk.went_off(RUNNING_S_MAX):
            self._disk.off()
        process.kill()
        loss: Loss = self.choose.choice(["all", "some"])
        # ends the waits of the killed process
        self._disk.on(seed=self.choose.getrandbits(32), loss=loss)


class _FullDisk(_Kill):
    name = "full"

    def prepared(self, root: Path, stack: ExitStack) -> tuple[Path, str]:
        self._disk = stack.enter_context(small_disk(root, DISK_BYTES))
        return self._disk.path / "node", self.choose.choice(["fsync", "os"])

    def __call__(self, process: "subprocess.Popen[str]", wait_lines: Callable[[int], None]) -> None:
        wait_lines(1)
        self._disk.fill()
        time.sleep(self.choose.uniform(0, WORKING_S_MAX))
        if self.choose.random() < RESUMING:
            self._disk.free()
            enough = self.told.lines + RESUMED_LINES
            wait_lines(enough)
            if self.told.lines < enough:
                self.told.findings.append("no call succeeds after space was freed")
        process.kill()
        self._disk.free()
