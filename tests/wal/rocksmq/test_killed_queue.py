"""A queue whose process is killed loses nothing it told of, and delivers nothing again that was
acknowledged.
"""

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.topic_life import GROUPS, TOPICS, Told

KILLS = 3

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("durability", ["fsync", "os"])
async def test_sigkill_loses_no_message_and_no_acknowledgement(
    tmp_path: Path, durability: str
) -> None:
    chance = random.Random(5)
    told = Told(tmp_path / "node", durability)
    for seed in range(KILLS):
        lines = chance.randint(100, 1500)

        def kill(
            process: "subprocess.Popen[str]", wait_lines: Callable[[int], None], lines: int = lines
        ) -> None:
            wait_lines(lines)
            process.kill()

        told.run_until_killed(seed, kill)
    await told.look()
    assert told.findings == []
    assert len(told.begun) == len(TOPICS) * len(GROUPS)
    assert sum(map(len, told.acked.values())) > 100


def test_the_judge_of_kills_finds_what_it_looks_for(tmp_path: Path) -> None:
    told = Told(tmp_path, "fsync")
    for line in (
        "produced t0 1 2 x",
        "acking t0 g0 1",
        "acked t0 g0 1",
        "consumed t0 g0 1 2",
        "produced t0 2 3 y",
    ):
        told.hear(*line.split())
    assert [finding.split(":")[0] for finding in told.findings] == [
        "acknowledged and delivered again to ('t0', 'g0')",
        "ids given twice in t0",
    ]
