"""The service of the page on web services, run as it stands there, by real workers that are killed one after the other."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import streamingnode as sn
from streamingnode.care.inspect import holder

PAGE = Path(__file__).parents[1] / "docs" / "service.md"
WORKERS, CLIENTS, ORDERS, KILLS = 3, 6, 60, 2


def post(port: int, number: int) -> bool:
    """Send an order; return whether it was acknowledged. A connection that breaks leaves it open."""
    order = {"id": number, "item": f"item {number % 7}", "amount": 1.5, "left": number}
    url, headers = f"http://127.0.0.1:{port}/orders", {"content-type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(order).encode(), headers), timeout=60
        ) as got:
            return bool(got.status == 200)
    except urllib.error.HTTPError:
        raise
    except OSError:  # the worker that had it was killed
        return False


def test_service_whose_workers_are_killed_keeps_every_order_that_it_acknowledged(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (tmp_path / "service.py").write_text(source, "utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--workers", str(WORKERS), "--port", str(port), "--log-level", "error"]
    command = [sys.executable, "-m", "uvicorn", "service:app", *options]
    with subprocess.Popen(command, cwd=tmp_path) as service:
        try:
            while not post(port, 0):
                assert service.poll() is None
            acknowledged = {0}
            with ThreadPoolExecutor(CLIENTS) as clients:
                for kill in range(KILLS + 1):
                    numbers = range(1 + kill * ORDERS, 1 + (kill + 1) * ORDERS)
                    answers = [(number, clients.submit(post, port, number)) for number in numbers]
                    if kill < KILLS:
                        while not (owner := holder(tmp_path / "data")):
                            assert service.poll() is None
                        os.kill(owner, signal.SIGKILL)
                    acknowledged |= {number for number, answer in answers if answer.result()}
        finally:
            service.terminate()
    with sn.sync.open_node(tmp_path / "data") as node:
        ids = Counter(node.snapshot("orders")["id"].to_pylist())
        items = Counter(node.snapshot("stock")["item"].to_pylist())
    assert len(acknowledged) > ORDERS
    assert acknowledged <= ids.keys()
    assert set(ids.values()) == {1}
    assert set(items.values()) == {1}
