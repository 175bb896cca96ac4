"""A real process, really killed: what it had acknowledged is there once, transactions whole, cuts
and log agreeing.
"""

import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

import streamingnode as sn

ROOT = Path(__file__).parents[1]
ROUNDS = 3
"""Kills of one directory, each by a process that recovers what the one before left."""


def write_until_killed(directory: Path, first: int, lines_before: int) -> list[str]:
    """Return the lines a writer printed; it is killed after `lines_before` of them, at whatever it
    is doing then.
    """
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.killed_writer", str(directory), str(first)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(300, writer.kill)
    watchdog.start()
    assert writer.stdout is not None
    lines: list[str] = []
    with writer:
        for line in writer.stdout:
            if line.endswith("\n"):  # the last one may be cut short by the kill
                lines.append(line.strip())
            if len(lines) == lines_before:
                writer.send_signal(signal.SIGKILL)
    watchdog.cancel()
    assert writer.returncode == -signal.SIGKILL
    assert len(lines) >= lines_before, "the writer was killed by the test, not before"
    return lines


def numbers(lines: list[str], kind: str) -> set[int]:
    return {int(line.split()[1]) for line in lines if line.startswith(kind)}


async def rows_of(node: sn.Node, name: str) -> Counter[int]:
    numbers = (await node.snapshot(name))["n"].to_numpy()
    return Counter(numbers.tolist())


@pytest.mark.anyio
@pytest.mark.may_block
async def test_what_killed_writers_acknowledged_is_there_once_and_transactions_are_whole(
    tmp_path: Path,
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)  # shown when the test fails
    choose = random.Random(seed)
    rows: set[int] = set()
    pairs: set[int] = set()
    for attempt in range(ROUNDS):
        lines = write_until_killed(tmp_path / "node", 1_000_000 * attempt, choose.randint(2, 400))
        rows |= numbers(lines, "row")
        pairs |= numbers(lines, "pair")

        async with sn.open_node(tmp_path / "node", cut_interval_s=None) as node:
            log, left, right = [await rows_of(node, name) for name in ("log", "left", "right")]
            assert rows <= log.keys()
            assert pairs <= left.keys()
            assert left == right
            assert {*log.values(), *left.values()} <= {1}
            # The same again from files alone: the cut takes what only the log had.
            await node.flush()
            assert [await rows_of(node, name) for name in ("log", "left", "right")] == [
                log,
                left,
                right,
            ]
