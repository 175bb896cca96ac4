"""A feed killed between the log's yes and its answer, over and over: every offset is there once,
with one tick for ever.
"""

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import streamingnode as sn
from wal.failpoint import ENVIRONMENT_VARIABLE

ROOT = Path(__file__).parents[1]
OFFSETS = 300
PLACES = (
    "append.queued",
    "append.written",
    "append.synced",
    "append.landed",
    "append.published",
    "flush.checkpoint_saved",
)


def feed(directory: Path, failpoints: str) -> tuple[list[str], bool]:
    """Run a feed until it is killed or done; return the lines it printed, and whether it was
    killed.
    """
    environment = {**os.environ, ENVIRONMENT_VARIABLE: failpoints}
    command = [sys.executable, "-m", "tests.killed_feed", str(directory), str(OFFSETS)]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode in (0, -9), ran.stderr
    whole, _, _ = ran.stdout.rpartition("\n")  # the last line may be cut short by the kill
    return whole.splitlines(), ran.returncode < 0


@pytest.mark.anyio
@pytest.mark.may_block
async def test_killed_feed_has_every_offset_once_and_one_answer_for_each(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)  # shown when the test fails
    choose = random.Random(seed)
    ticks: dict[str, set[str]] = {}
    killed = 0
    for place in (*choose.sample(PLACES, len(PLACES)), ""):
        failpoints = (
            place and f"{place}=kill@{choose.randint(1, 3 if place.startswith('flush') else 30)}"
        )
        lines, was_killed = feed(tmp_path / "node", failpoints)
        killed += was_killed
        for line in lines:
            offset, _, tick = line.partition(" ")
            ticks.setdefault(offset, set()).add(tick)
    assert killed == len(PLACES), "every feed but the last was killed"
    assert ticks.pop("end") == {""}
    assert {offset: seen for offset, seen in ticks.items() if len(seen) > 1} == {}
    async with sn.open_node(tmp_path / "node", cut_interval_s=None) as node:
        numbers: list[int] = (await node.snapshot("copy"))["n"].to_numpy().tolist()
        assert Counter(numbers) == Counter(range(1, OFFSETS + 1))
