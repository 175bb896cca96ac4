"""A queue whose process is killed loses nothing it told of, and delivers nothing again that was acknowledged."""

import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.wal.rocksmq.killed_queue import GROUPS, TOPICS
from tests.wal.rocksmq.queues import opened

ROOT = Path(__file__).parents[3]
KILLS = 3

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("durability", ["fsync", "os"])
async def test_sigkill_loses_no_message_and_no_acknowledgement(tmp_path: Path, durability: str) -> None:
    chance = random.Random(5)
    produced: dict[str, dict[int, bytes]] = {topic: {} for topic in TOPICS}
    begun, acked = defaultdict[tuple[str, str], set[int]](set), defaultdict[tuple[str, str], set[int]](set)
    for kill in range(KILLS):
        for what, topic, *about in said_until_killed(tmp_path / "node", kill, durability, chance.randint(100, 1500)):
            if what == "produced":
                first, last, payload = about
                produced[topic] |= dict.fromkeys(range(int(first), int(last) + 1), payload.encode())
                continue
            group, ids = (topic, about[0]), set(map(int, about[1:]))
            if what == "consumed":
                assert not ids & acked[group]
            else:
                (begun if what == "acking" else acked)[group] |= ids
    async with opened(tmp_path / "node") as mq:
        for group in begun:
            left = {message.message_id: message.payload for message in await mq.consume(*group, 10**6)}
            assert not left.keys() & acked[group]
            assert produced[group[0]].keys() - left.keys() <= begun[group]
            assert all(left[each] == payload for each, payload in produced[group[0]].items() if each in left)
    assert len(begun) == len(TOPICS) * len(GROUPS)
    assert sum(map(len, acked.values())) > 100


def said_until_killed(path: Path, seed: int, durability: str, lines: int) -> list[list[str]]:
    """Run the process, kill it after so many lines, and return what it said."""
    command = [sys.executable, "-m", "tests.wal.rocksmq.killed_queue", str(path), str(seed), durability]
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout):  # to the end: what was said just before the kill counts too
            if number == lines:
                process.kill()
            if line.endswith("\n"):
                said.append(line.split())
    return said
