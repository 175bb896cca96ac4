"""Several workers of one service among the packages that users have, and what runs beside them."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from deltalake import DeltaTable

import streamingnode as sn
from tests.crowded.surroundings import BESIDE, environment, python_blocks, run

pytestmark = pytest.mark.crowded

(SERVICE,) = python_blocks("docs/service.md")
ORDERS = 40
START_S_MAX = 300.0

UVICORN = ["-m", "uvicorn", "--workers", "2", "--log-level", "error"]
GUNICORN = [
    "-m",
    "gunicorn",
    "--preload",
    "--workers",
    "2",
    "--worker-class",
    "uvicorn_worker.UvicornWorker",
]

MAKES_COLLECTIONS = """
with sn.sync.open_node("data") as node:  # before the fork, where no node may be opened
    node.create_collection("orders", ORDERS, primary_key="request", if_not_exists=True)
"""


def order(port: int, number: int) -> int:
    """Order something and return the status; 0 while nobody listens."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/orders",
        json.dumps({"item": f"item {number}", "amount": 1.5, "count": 1}).encode(),
        {"content-type": "application/json", "idempotency-key": f"{number:03}"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, ConnectionError):
        return 0


@contextmanager
def serving(server: list[str], tmp_path: Path) -> Iterator[int]:
    """Run the service of the page with a server until the block ends; yields its port."""
    (tmp_path / "service.py").write_text(BESIDE + SERVICE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    at = ["--bind", f"127.0.0.1:{port}"] if "gunicorn" in server else ["--port", str(port)]
    command = [sys.executable, *server, *at, "service:app"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment()) as service:
        try:
            until = time.monotonic() + START_S_MAX
            while not order(port, 0):
                assert service.poll() is None, "the service has ended"
                assert time.monotonic() < until, "the service does not answer"
            yield port
        finally:
            service.terminate()
            assert service.wait(START_S_MAX) == 0


@pytest.mark.parametrize("server", [UVICORN, GUNICORN], ids=["uvicorn", "gunicorn --preload"])
def test_two_workers_share_a_node_that_commands_and_an_ingest_reach(
    tmp_path: Path, server: list[str]
) -> None:
    with serving(server, tmp_path) as port:
        assert {order(port, number) for number in range(1, ORDERS)} == {200}
        assert (
            len(
                run(
                    "-m", "streamingnode", "collection", "ls", "data", "--json", cwd=tmp_path
                ).splitlines()
            )
            >= 1
        )
        run("-m", "streamingnode", "ingest", "data", "--tables", "tables", cwd=tmp_path)
        assert DeltaTable(tmp_path / "tables" / "orders").to_pyarrow_table().num_rows == ORDERS
        assert {order(port, number) for number in range(ORDERS, 2 * ORDERS)} == {200}
        run("-m", "streamingnode", "ingest", "data", "--tables", "tables", cwd=tmp_path)
        assert DeltaTable(tmp_path / "tables" / "orders").to_pyarrow_table().num_rows == 2 * ORDERS
    with sn.sync.open_node(tmp_path / "data") as node:
        requests = node.snapshot("orders").sort_by("request")["request"].to_pylist()
    assert requests == [f"{number:03}" for number in range(2 * ORDERS)]


def test_workers_whose_parent_had_opened_a_node_end_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(BESIDE + SERVICE + MAKES_COLLECTIONS)
    command = [sys.executable, *GUNICORN, "--bind", "127.0.0.1:0", "service:app"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=START_S_MAX,
        check=False,
    )
    assert done.returncode, "gunicorn ends when its workers do not start"
    assert re.search(
        r"forked from one that had opened a node.*open nodes after the fork only", done.stderr
    )
    with sn.sync.open_node(tmp_path / "data") as node:
        assert [each.name for each in node.collections()] == ["orders"]


CELERY = """
from pathlib import Path
import celery, pyarrow as pa
from celery.signals import worker_process_init
import streamingnode as sn

for folder in ("queue", "results"):
    Path(folder).mkdir(exist_ok=True)
results = Path("results").absolute()
app = celery.Celery("tasks", broker="filesystem://", backend=f"file://{results}")
app.conf.broker_transport_options = dict.fromkeys(
    ["data_folder_in", "data_folder_out", "control_folder"], str(Path("queue").absolute()))
app.conf.worker_hijack_root_logger = False
SCHEMA = pa.schema([("key", pa.int64())])

@app.task
def write(key):
    try:
        with sn.sync.open_node("data") as node:
            node.create_collection("c", SCHEMA, primary_key="key", if_not_exists=True)
            node.insert("c", [{"key": key}])
            return "written"
    except sn.StreamingNodeError as error:
        return error.code
"""
ASKS = """
from tasks import write
print(write.delay(1).get(timeout=60, interval=0.1))
"""


@pytest.mark.parametrize(
    "first, says",
    [("", "written"), ("sn.sync.open_node('data').close()\n", "STORAGE_FAILED")],
    ids=["after", "before"],
)
def test_a_task_of_a_forked_pool_writes_unless_the_pool_opened_a_node_first(
    tmp_path: Path, first: str, says: str
) -> None:
    (tmp_path / "tasks.py").write_text(CELERY)
    (tmp_path / "pool.py").write_text(f"{BESIDE}from tasks import app, sn\n{first}")
    command = [
        "-m",
        "celery",
        "-A",
        "pool",
        "worker",
        "--pool",
        "prefork",
        "--concurrency",
        "1",
        "-l",
        "ERROR",
    ]
    with subprocess.Popen([sys.executable, *command], cwd=tmp_path, env=environment()) as worker:
        try:
            assert run("-c", ASKS, cwd=tmp_path) == f"{says}\n"
        finally:
            worker.terminate()
            worker.wait(START_S_MAX)
