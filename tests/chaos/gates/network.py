"""A network that cuts, stalls and damages connections, between clients and a node process that is
killed and comes back.

A life is one node, served by a process of its own, and clients in this one that write and read
through a proxy. Each fault comes while they do. Kept: every write that returned is there once, one
in doubt at most once, one that was refused not at all; transactions are whole; a reader hears of
every row once, in order; and when the last fault is over, everybody goes on.
"""

import asyncio
import logging
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa

import streamingnode as sn
from streamingnode.errors import Unreachable
from tests.chaos.gate import Gate, LifeResult, Settings, run_lives
from tests.chaos.nursery import Nursery
from tests.chaos.report import GateReport
from tests.streamingnode.remote.proxy import Proxy, Way, proxied
from wal.errors import Indeterminate, StreamingNodeError

FAULTS_IN_A_LIFE = 6
WRITERS = 6
BYTES_MAX = 20_000
GOES_ON_S_MAX = 60.0
"""How long after a fault every writer has written again: a node that was killed recovers first."""
BETWEEN_S = 0.15
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("mark", pa.int64())])


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate."""
    return run_lives(gate, settings, live, tries_in_a_life=FAULTS_IN_A_LIFE)


def live(_nursery: Nursery, root: Path, seed: int, faults: int) -> LifeResult:
    """Live through so many faults."""
    logging.getLogger("streamingnode").setLevel(logging.ERROR)  # each fault is a warning
    life = _Life(root, random.Random(seed))
    try:
        asyncio.run(life.run(faults))
    finally:
        life.end_server()
    return life.result


class _Life:
    def __init__(self, root: Path, choose: random.Random) -> None:
        self.result = LifeResult()
        self._directory = root / "node"
        self._choose = choose
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._server: subprocess.Popen[str] | None = None
        self._acknowledged: set[int] = set()
        self._in_doubt: set[int] = set()
        self._refused: set[int] = set()
        self._read: Counter[int] = Counter()
        self._written = [0] * WRITERS
        self._stop = asyncio.Event()

    async def run(self, faults: int) -> None:
        await asyncio.to_thread(self.start_server)
        async with proxied(self._port) as proxy:
            async with sn.connect(proxy.url, give_up_s=GOES_ON_S_MAX) as node:
                for name in ("rows", "pairs"):
                    await node.create_collection(
                        name, SCHEMA, primary_key="id", shards=2, if_not_exists=True
                    )
                tasks = [
                    asyncio.create_task(self._write(proxy, writer)) for writer in range(WRITERS)
                ]
                reading = asyncio.create_task(self._read_on(node))
                for _ in range(faults):
                    await self._fault(proxy)
                    self.result.tried += 1
                    await self._everybody_goes_on()
                self._stop.set()
                await asyncio.gather(*tasks)
                await self._judge(node, reading)

    async def _fault(self, proxy: Proxy) -> None:
        choose = self._choose
        await asyncio.sleep(choose.uniform(0, BETWEEN_S))
        way = choose.choice(list(Way))
        fault = choose.choice(
            ["cut", "cut at a byte", "stall", "damage", "half open", "refuse", "kill"]
        )
        self.result.counts[f"times: {fault}"] += 1
        match fault:
            case "cut":
                proxy.cut()
            case "cut at a byte":
                proxy.plan_cut(way, choose.randrange(1, BYTES_MAX))
                proxy.cut()
            case "stall":
                proxy.stop(way)
                await asyncio.sleep(choose.uniform(0, BETWEEN_S))
                proxy.cut()
                proxy.go_on()
            case "damage":
                proxy.plan_corruption(way, choose.randrange(1, BYTES_MAX))
                proxy.cut()
            case "half open":
                proxy.cut_clients()
            case "refuse":
                proxy.is_refusing = True
                proxy.cut()
                await asyncio.sleep(choose.uniform(0, BETWEEN_S))
                proxy.is_refusing = False
            case _:  # it is killed
                self.end_server()
                await asyncio.to_thread(self.start_server)

    async def _everybody_goes_on(self) -> None:
        before = list(self._written)
        try:
            async with asyncio.timeout(GOES_ON_S_MAX):
                while any(now <= then for now, then in zip(self._written, before, strict=True)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            self.result.findings.append(
                f"writers stand still: {before} writes then, {self._written} now"
            )

    async def _write(self, proxy: Proxy, writer: int) -> None:
        """Write rows that nobody else writes, each under keys of its own; every client has its own
        connection.
        """
        key = writer * 10**9
        while not self._stop.is_set():
            try:
                async with sn.connect(proxy.url, give_up_s=GOES_ON_S_MAX) as node:
                    producer = await node.producer(f"writer-{writer}")
                    first = producer.last_sequence + 1
                    for sequence in range(first, first + 200):
                        if self._stop.is_set():
                            return
                        key += 1
                        await self._write_one(node, producer, writer, key, sequence)
            except (Unreachable, StreamingNodeError) as error:
                self.result.counts[f"clients ended by {error.code}"] += 1

    async def _write_one(
        self, node: sn.Node, producer: sn.Producer, writer: int, key: int, sequence: int
    ) -> None:
        row = {"id": key, "mark": writer}
        try:
            match key % 5:
                case 0:
                    await node.insert("rows", [row])
                case 1:
                    await node.upsert("rows", [row])
                case 2:
                    async with node.transaction() as txn:
                        await txn.insert("rows", [row])
                        await txn.insert("pairs", [row])
                case 3:
                    await producer.insert("rows", [row], sequence=sequence)
                case _:
                    await node.insert("rows", pa.RecordBatch.from_pylist([row], schema=SCHEMA))
        except Indeterminate:
            self._in_doubt.add(key)
        except StreamingNodeError as error:
            self._refused.add(key)
            self.result.counts[f"refused with {error.code}"] += 1
        else:
            self._acknowledged.add(key)
            self._written[writer] += 1

    async def _read_on(self, node: sn.Node) -> None:
        last_tick = 0
        async with node.read("rows", types=[sn.MessageType.INSERT]) as messages:
            async for message in messages:
                if message.time_tick <= last_tick:
                    self.result.findings.append(
                        f"a reader heard of tick {message.time_tick} after {last_tick}"
                    )
                last_tick = message.time_tick
                for part in message.bodies or (message,):
                    rows = part.to_arrow()
                    self._read.update([] if rows is None else rows["id"].to_numpy().tolist())

    async def _judge(self, node: sn.Node, reading: "asyncio.Task[None]") -> None:
        rows = await _ids(node, "rows")
        pairs = await _ids(node, "pairs")
        try:
            async with asyncio.timeout(GOES_ON_S_MAX):
                while self._read.total() < rows.total() and not reading.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            self.result.findings.append(
                f"a reader stands still at {self._read.total()} of {rows.total()} rows"
            )
        reading.cancel()
        await asyncio.wait([reading])
        if not reading.cancelled() and reading.exception() is not None:
            self.result.findings.append(f"a reader ended with {reading.exception()!r}")
        found = {
            "acknowledged and lost": self._acknowledged - rows.keys(),
            "twice": {
                key
                for key, count in (rows + pairs).items()
                if count > 2 or rows[key] > 1 or pairs[key] > 1
            },
            "refused and there": self._refused & rows.keys(),
            "half a transaction": {key for key in rows if key % 5 == 2} ^ pairs.keys(),
            "of nobody": rows.keys() - self._acknowledged - self._in_doubt - self._refused,
            "read and not there, or other than once": {
                key for key in rows.keys() | self._read.keys() if self._read[key] != rows[key]
            },
        }
        self.result.findings += [
            f"{what}: {sorted(keys)[:10]}" for what, keys in found.items() if keys
        ]
        self.result.counts["acknowledged"] += len(self._acknowledged)
        self.result.counts["in doubt"] += len(self._in_doubt)

    def start_server(self) -> None:
        """Serve the node, and return when it is ready."""
        command = [sys.executable, "-m", "streamingnode", "serve", str(self._directory)]
        command += ["--listen", f"tcp://127.0.0.1:{self._port}"]
        self._server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._server.stdout is not None
        said = self._server.stdout.readline()
        if not said.startswith("ready"):
            self.result.findings.append(f"the server said {said!r} instead of being ready")

    def end_server(self) -> None:
        """Kill the server."""
        if self._server is not None:
            self._server.send_signal(signal.SIGKILL)
            self._server.communicate()
            self._server = None


async def _ids(node: sn.Node, collection: str) -> Counter[int]:
    return Counter((await node.snapshot(collection))["id"].to_numpy().tolist())
