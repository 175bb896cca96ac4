"""The service of the page on web services, run as it stands there, under load.

Clients send each request until it is answered, some at once to two workers, some once more long
after. Workers are killed meanwhile. What the node has in the end is compared with a ledger.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import streamingnode as sn
from streamingnode.care.inspect import holder

PAGE = Path(__file__).parents[1] / "docs" / "service.md"
WORKERS = 2
CLIENTS = 6
ITEMS = 5
ANSWER_S_MAX = 60
HANGS_S = 120
"""A request that was sent for so long is never answered."""


@dataclass(frozen=True)
class Order:
    """A request, and the key that its client made up for it."""

    key: str
    item: str
    amount: float
    count: int


@dataclass
class Service:
    """The service of the page, and what was answered."""

    port: int
    directory: Path
    process: "subprocess.Popen[bytes]"
    ledger: dict[str, Order] = field(default_factory=dict)
    """The requests that were answered with 200, by key."""

    def send(self, order: Order) -> bool:
        """Send a request once; return whether it was answered with 200."""
        body = {"item": order.item, "amount": order.amount, "count": order.count}
        headers = {"content-type": "application/json", "idempotency-key": order.key}
        url = f"http://127.0.0.1:{self.port}/orders"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S_MAX) as answer:
                assert answer.status == 200
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return False
        except OSError:  # the worker that had it was killed
            return False
        self.ledger[order.key] = order
        return True

    def send_until_answered(self, order: Order) -> None:
        until = time.monotonic() + HANGS_S
        while not self.send(order):
            assert self.process.poll() is None
            assert time.monotonic() < until, f"{order} is not answered"

    def kill_owner(self) -> None:
        """Kill the worker that has the node, whichever that is."""
        while not (owner := holder(self.directory / "data")):
            assert self.process.poll() is None
        os.kill(owner, signal.SIGKILL)


@contextmanager
def serving(directory: Path) -> Iterator[Service]:
    """Run the service of the page with its workers until the block ends."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (directory / "service.py").write_text(source, "utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--workers", str(WORKERS), "--port", str(port), "--log-level", "error"]
    command = [sys.executable, "-m", "uvicorn", "service:app", *options]
    with subprocess.Popen(command, cwd=directory) as process:
        try:
            yield Service(port, directory, process)
        finally:
            process.terminate()


@pytest.mark.parametrize("rounds, orders", [(3, 40), pytest.param(40, 400, marks=pytest.mark.long)])
def test_retries_with_a_key_are_one_order_each_however_workers_are_killed(
    tmp_path: Path, rounds: int, orders: int
) -> None:
    draw = random.Random(7)
    with serving(tmp_path) as service, ThreadPoolExecutor(CLIENTS) as clients:
        sent = [Order("first", "item 0", 1.5, 1)]
        service.send_until_answered(sent[0])  # alone: until then nobody listens at the port
        for number in range(rounds):
            asked = [
                Order(f"{number}-{each}", f"item {draw.randrange(ITEMS)}", 1.5, draw.randint(1, 9))
                for each in range(orders)
            ]
            at_once = draw.sample(asked, orders // 5)  # in two connections, mostly of two workers
            long_after = draw.sample(sent, min(len(sent), orders // 5))
            work = [*asked, *at_once, *long_after]
            draw.shuffle(work)
            answers = [clients.submit(service.send_until_answered, order) for order in work]
            if number:
                service.kill_owner()
            for answer in answers:
                answer.result()
            sent += asked
    with sn.sync.open_node(tmp_path / "data") as node:
        bought = node.snapshot("orders").to_pylist()
        moved = node.snapshot("moves").to_pylist()
        writes = rows_written(node, "orders")
    ledger = service.ledger
    assert ledger.keys() == {order.key for order in sent}
    assert writes > len(sent), "some were repeated"
    assert sorted(row["request"] for row in bought) == sorted(ledger)
    assert sorted(row["request"] for row in moved) == sorted(ledger)
    for row in bought:
        order = ledger[row["request"]]
        assert (row["item"], row["amount"]) == (order.item, order.amount)
    left = Counter[str]()
    expected = Counter[str]()
    for row in moved:
        left[row["item"]] += row["change"]
    for order in ledger.values():
        expected[order.item] -= order.count
    assert left == expected


def rows_written(node: sn.sync.SyncNode, collection: str) -> int:
    """Return how many rows were inserted into a collection, those that were replaced included."""
    count = 0
    with node.read(collection, until=node.consistent_tick()) as messages:
        for message in messages:
            for body in message.bodies or (message,):
                if body.type is sn.MessageType.INSERT:
                    count += body.num_rows
    return count
