import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.wal.log_contract import read_all
from tests.wal.rocks.killed_appender import LOGS
from wal.rocks.layout import RocksOptions
from wal.rocks.store import open_rocks_store

ROOT = Path(__file__).parents[3]
KILLS = 5

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("durability", ["fsync", "os"])
async def test_sigkill_loses_nothing_acknowledged(tmp_path: Path, durability: str) -> None:
    chance = random.Random(7)
    terms = []
    for kill in range(KILLS):
        said = run_until_killed(
            tmp_path / "node", seed=kill, durability=durability, lines=chance.randint(1, 1000)
        )
        terms.append(int(said["open"][0][0]))
        await check_kept(tmp_path / "node", said)
    assert terms == sorted(set(terms))


def run_until_killed(
    path: Path, *, seed: int, durability: str, lines: int
) -> dict[str, list[list[str]]]:
    """Run the appender, kill it after so many lines, and return what it said."""
    command = [
        sys.executable,
        "-m",
        "tests.wal.rocks.killed_appender",
        str(path),
        str(seed),
        durability,
    ]
    said: dict[str, list[list[str]]] = defaultdict(list)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as appender:
        assert appender.stdout is not None
        # to the end: what was said just before the kill counts too
        for number, line in enumerate(appender.stdout):
            if number == lines:
                appender.kill()
            what, *about = line.split()
            if line.endswith("\n"):
                said[what].append(about)
    return said


async def check_kept(path: Path, said: dict[str, list[list[str]]]) -> None:
    """Open the directory again and compare it with what was said."""
    store = await open_rocks_store(path, options=RocksOptions(free_bytes_min=0))
    for name in LOGS:
        log = await store.open_log(name)
        entries = await read_all(log, bytes_max=1 << 20)
        positions = [message.position for entry in entries for message in entry.messages]
        assert positions == list(range(log.first_position, log.next_position))
        ticks = [entry.time_tick for entry in entries]
        assert ticks == sorted(set(ticks))
        for entry in entries:
            for message in entry.messages:
                assert bytes(message.payload).startswith(f"{name}:{entry.first_position}:".encode())
        acknowledged = [
            int(position) for log_name, position, _ in said["appended"] if log_name == name
        ]
        assert max(acknowledged, default=0) <= log.durable_position
        truncated = [int(position) for log_name, position in said["truncated"] if log_name == name]
        assert log.first_position >= max(truncated, default=1)
    assert int(await store.state.get("k") or b"0") >= max(
        (int(tick) for [tick] in said["set"]), default=0
    )
    assert store.promised_tick >= max((int(tick) for [tick] in said["promised"]), default=0)
    await store.close()
