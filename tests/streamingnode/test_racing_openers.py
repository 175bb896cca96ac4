"""Several processes open one directory in the same moment: one has it, the others are told
which.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.streamingnode.sample_node import Sample, copy_of, rows_of

ROOT = Path(__file__).resolve().parents[2]
OPENERS = 3

_OPEN = """
import sys, anyio
from streamingnode.opening import open_node
from wal.errors import AlreadyOwned

async def main():
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        async with open_node(sys.argv[1], free_bytes_min=0):
            print("open", flush=True)
            sys.stdin.readline()
    except AlreadyOwned as refused:
        print("refused", refused.pid, flush=True)
        sys.stdin.readline()

anyio.run(main)
"""


def start(path: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _OPEN, str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize("there", [True, False], ids=["a node", "a new directory"])
def test_of_racing_openers_one_wins_and_the_others_name_its_process(
    sample: Sample, tmp_path: Path, *, there: bool
) -> None:
    path = tmp_path / "node"
    if there:
        copy_of(sample.killed, path)
    openers = [start(path) for _ in range(OPENERS)]
    try:
        assert [line_of(opener) for opener in openers] == ["ready"] * OPENERS
        for opener in openers:
            go_on(opener)
        outcomes = [line_of(opener) for opener in openers]
        [winner] = [
            opener for opener, outcome in zip(openers, outcomes, strict=True) if outcome == "open"
        ]
        refused = [outcome for outcome in outcomes if outcome != "open"]
        # One that asks in the moment between the lock and the pid in it is told of the last owner,
        # or of none.
        assert set(refused) <= {f"refused {winner.pid}", f"refused {os.getpid()}", "refused None"}
        for opener in openers:
            go_on(opener)
        assert [opener.wait(30) for opener in openers] == [0] * OPENERS
    finally:
        for opener in openers:
            opener.kill()
            opener.communicate()
    if there:
        assert rows_of(path) == sample.rows
