"""The owner that the guide shows decides on each request once, however its workers are killed."""

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.sync import SyncNode

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"
STOCK = 40
"""As the guide has it."""
WORKERS = 2
CLIENTS = 4
WORKER = """
import time
import streamingnode as sn

{own}

with sn.sync.open_node("data", share=True) as node:
    print("open", flush=True)
    while True:
        try:
            own(node)
        except sn.StreamingNodeError:
            time.sleep(0.05)  # another one has the name
"""


@contextmanager
def worker(directory: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a worker that tries to be the owner, until the block ends or it is killed."""
    command = [sys.executable, "worker.py"]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"open\n"
            yield process
        finally:
            process.kill()


def wait_for_decisions(node: SyncNode, requests: set[str]) -> None:
    """Return once there is a decision for each of these requests."""
    missing = set(requests)
    with node.read("decisions", types=[sn.MessageType.INSERT]) as messages:
        for message in messages:
            missing -= {row["request"] for row in rows_of(message)}
            if not missing:
                return


def rows_of(message: sn.ReadMessage) -> list[dict[str, Any]]:
    rows = message.to_arrow()
    assert rows is not None
    return rows.to_pylist()


@pytest.mark.parametrize("rounds, count", [(4, 25), pytest.param(25, 200, marks=pytest.mark.long)])
def test_each_request_gets_one_decision_however_owners_are_killed(
    tmp_path: Path, rounds: int, count: int
) -> None:
    (own,) = re.findall(r"(def own\(.*?)\nfor request", GUIDE.read_text("utf-8"), re.DOTALL)
    (tmp_path / "worker.py").write_text(WORKER.format(own=own), "utf-8")
    requests: dict[str, pa.DataType] = {"request": pa.string(), "count": pa.int64()}
    decisions = requests | {"is_accepted": pa.bool_()}
    with sn.sync.open_node(tmp_path / "data") as node:
        node.create_collection("requests", pa.schema(requests), primary_key="request")
        node.create_collection("decisions", pa.schema(decisions), primary_key="request")
    draw = random.Random(11)
    asked: dict[str, int] = {}
    with ExitStack() as running:
        workers = [running.enter_context(worker(tmp_path)) for _ in range(WORKERS)]
        node = running.enter_context(sn.sync.connect(f"unix:{tmp_path}/data/node.sock"))
        clients = running.enter_context(ThreadPoolExecutor(CLIENTS))

        def ask(request: str) -> None:
            node.upsert("requests", [{"request": request, "count": asked[request]}])

        for number in range(rounds):
            new = [f"{number}-{each}" for each in range(count)]
            asked.update({request: draw.randint(1, 2) for request in new})
            again = draw.sample(sorted(asked), len(asked) // 3)
            sending = [clients.submit(ask, request) for request in (*new, *again)]
            if number:
                killed = workers.pop(draw.randrange(WORKERS))
                killed.kill()
                killed.wait()
                workers.append(running.enter_context(worker(tmp_path)))
            for each in sending:
                each.result()
            wait_for_decisions(node, set(asked))
    with sn.sync.open_node(tmp_path / "data") as node:
        kinds = [sn.MessageType.INSERT]
        with node.read("decisions", until=node.consistent_tick(), types=kinds) as messages:
            made = [row for message in messages for row in rows_of(message)]
    assert sorted(row["request"] for row in made) == sorted(asked)
    left = STOCK
    for row in made:
        assert row["count"] == asked[row["request"]]
        assert row["is_accepted"] is (row["count"] <= left)
        if row["is_accepted"]:
            left -= row["count"]
    assert left == 0
