"""A node served to another process over a Unix socket, against Redis Streams over one, and against
the node embedded. Long.

Rows of 1 KiB, acknowledged after fsync on all sides, in turn on the same disk; server and client
are two processes of one machine. The peer (`appendfsync always`) is asked by two clients: the
pipelined one of `redis_streams`, which knows how long each reply will be and looks at none of it,
and redis-py, which programs use, where it is installed. As a service should (docs/guide.md), server
and client have told the garbage collector that what is loaded stays.
"""

import asyncio
import dataclasses
import gc
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.baseline import WARM_UP_S, Load, Measured, measure_appends, measure_warm, scratch
from bench.bench_peers import measure_redis
from bench.measurement import Measurement, median
from bench.redis_exchange import (
    READ_COUNT,
    VALUES,
    deliver_redis,
    fill_redis,
    lacking_redis_py,
    measure_redis_py,
    read_redis,
    read_redis_py,
)
from bench.redis_streams import lacking, serving
from bench.remote_server import READY, allow_files
from bench.report import Settings, main, note
from bench.rows import PRIMARY_KEY, SCHEMA, create, inserts_of, record_batch, rows_of
from scanner.deliver_policy import DeliverPolicy
from streamingnode.node import Node
from streamingnode.opening import connect, open_node, run_async
from wal.address import SOCKET_NAME

INSERTS: tuple[tuple[int, int, float, float], ...] = (
    (1, 1, 0.25, 0.7),
    (64, 1, 0.8, 1.6),
    (1000, 1, 1.8, 4.0),
    (1, 100, 1.2, 0.0),
    (8, 100, 2.0, 0.0),
)
"""Outstanding inserts, rows in each, and the parts of what the peer does to reach: through the lean
client, and redis-py.
"""
CHANGES = ("upsert", "transaction over two collections")
CHANGES_OUTSTANDING = 64
CHANGES_CONNECTIONS = 8
CHANGES_AIM = 0.7
"""Of the node embedded."""
CHANGED_KEYS = 1_000

READ_ROWS = 50_000
READ_BATCHES = (100, 1)
"""Rows in each insert of the log that is read."""
READ_AIM = 1.5

DELIVERIES = 300
READY_AIM_S = 1.0
IDLE_CONNECTIONS = 1_000
IDLE_AIM_MIB = 100.0
CONNECTING = 50
"""So many connections are made at a time."""
READERS = 200
READERS_ROWS = 4_000
READERS_AIM = 2.0
FOLLOWED_BATCHES = 50

SECONDS_PART = 0.5
"""Of the time that each load is given elsewhere: here are many of them, each with a server of its
own.
"""
KNOWN_S = 10.0
STOP_S = 60.0
"""How long a connection may take to hear of a collection, and a server to end."""

Append = Callable[[], Awaitable[object]]


def run(settings: Settings) -> list[Measurement]:
    """Return what was measured; nothing of the peer on a machine without it, which is said."""
    if lack := lacking():
        note(f"Redis is left out: {lack}")
    elif lack := lacking_redis_py():
        note(f"redis-py is left out: {lack}")
    allow_files()
    gc.collect()
    gc.freeze()
    return run_async(partial(_measure, settings))


async def _measure(settings: Settings) -> list[Measurement]:
    return [
        *await _measure_inserts(settings),
        *await _measure_changes(settings),
        *await _measure_reading(settings),
        *await _measure_delivery(settings),
        *await _measure_idle(settings),
        *await _measure_readers(settings),
    ]


# --- a server, and who connects to it -------------------------------------------------------------


class Served(NamedTuple):
    """A node that another process has open: where, how long that took from its start, and of this
    after its imports.
    """

    url: str
    pid: int
    start_s: float
    open_s: float


@contextmanager
def serving_node(directory: Path) -> Iterator[Served]:
    """Yield a node of a new process, which has ended afterwards. Raises `ConnectionError` when it
    does not start.
    """
    command = [sys.executable, "-m", "bench.remote_server", str(directory)]
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None, "asked for"  # noqa: PT018
        try:
            said = server.stdout.readline().split()
            start_s = time.perf_counter() - began
            path = directory / SOCKET_NAME
            if said[:1] != [READY] or not path.exists():
                raise ConnectionError(f"no node listens at {path}: its process says why above")
            yield Served(f"unix:{path}", server.pid, start_s, float(said[1]))
        finally:
            server.stdin.close()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


@asynccontextmanager
async def connections(url: str, count: int) -> AsyncIterator[list[Node]]:
    """Yield so many connections to a node."""
    async with AsyncExitStack() as stack:
        made: list[Node] = []
        while len(made) < count:
            some = range(min(CONNECTING, count - len(made)))
            made += await asyncio.gather(*[stack.enter_async_context(connect(url)) for _ in some])
        yield made


class Cost(NamedTuple):
    """What was measured over a connection, and the processor time for each row at both ends, in
    seconds.
    """

    measured: Measured
    server_s: float
    client_s: float


async def measure_served(served: Served, load: Load, append: Append) -> Cost:
    """Return what `measure_warm` measures, with its cost."""
    await measure_appends(dataclasses.replace(load, seconds=WARM_UP_S), append)
    server = psutil.Process(served.pid)
    began = time.perf_counter()
    server_s = _cpu_s(server)
    client_s = time.process_time()
    measured = await measure_appends(load, append)
    rows = measured.rows_per_s * (time.perf_counter() - began)
    return Cost(
        measured, (_cpu_s(server) - server_s) / rows, (time.process_time() - client_s) / rows
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# --- writes ---------------------------------------------------------------------------------------


async def _measure_inserts(settings: Settings) -> list[Measurement]:
    found = []
    for outstanding, batch, lean_aim, redis_py_aim in INSERTS:
        load = Load(outstanding=outstanding, batch=batch, seconds=settings.seconds * SECONDS_PART)
        case = f"{outstanding} x insert of {_rows(batch)}"
        lean = list[Measured]()
        redis_py = list[Measured]()
        ours = list[Cost]()
        for _ in range(settings.repeats):
            note(f"remote, {case}")
            if not lacking():
                lean.append(await measure_redis(load, settings.directory))
            if redis_py_aim and not (lacking() or lacking_redis_py()):
                redis_py.append(await measure_redis_py(load, settings.directory))
            ours.append(await measure_inserts(load, settings.directory))
        found.append(_compared(case, ours, lean, lean_aim, "the lean client"))
        if redis_py:
            found.append(
                _compared(f"{case}, against redis-py", ours, redis_py, redis_py_aim, "redis-py")
            )
    return found


async def measure_inserts(load: Load, directory: Path) -> Cost:
    """Return what one connection to a new node does under `load`."""
    with scratch(directory) as path, serving_node(path) as served:
        async with connect(served.url) as node:
            return await measure_served(
                served, load, inserts_of(node, await create(node, "rows"), load.batch)
            )


async def _measure_changes(settings: Settings) -> list[Measurement]:
    found = []
    load = Load(outstanding=CHANGES_OUTSTANDING, batch=1, seconds=settings.seconds * SECONDS_PART)
    for kind in CHANGES:
        embedded = list[Measured]()
        ours = list[Cost]()
        for _ in range(settings.repeats):
            note(f"remote, {kind}")
            with scratch(settings.directory) as path:
                async with open_node(path) as node:
                    embedded.append(await measure_warm(load, await changes_of([node], kind)))
            with scratch(settings.directory) as path, serving_node(path) as served:
                async with connections(served.url, CHANGES_CONNECTIONS) as nodes:
                    ours.append(await measure_served(served, load, await changes_of(nodes, kind)))
        case = f"{load.outstanding} x {kind}, {CHANGES_CONNECTIONS} connections"
        found.append(_compared(case, ours, embedded, CHANGES_AIM, "embedded", unit="writes/s"))
    return found


async def changes_of(nodes: Sequence[Node], kind: str) -> Append:
    """Return what makes the next change of a kind, over these connections in turn; keys of upserts
    come again.
    """
    for name in ("orders", "stock"):
        await nodes[0].create_collection(name, SCHEMA, primary_key=PRIMARY_KEY)
    numbers = itertools.count(1)
    turns = itertools.cycle(nodes)
    for node in nodes:
        await _wait_known(node, "stock")

    def row(key: int, number: int) -> dict[str, object]:
        return {"id": key, "value": VALUES[number % len(VALUES)]}

    async def upsert() -> None:
        number = next(numbers)
        await next(turns).upsert("stock", [row(number % CHANGED_KEYS, number)])

    async def transaction() -> None:
        number = next(numbers)
        async with next(turns).transaction() as txn:
            await txn.insert("orders", [row(number, number)])
            await txn.upsert("stock", [row(number % CHANGED_KEYS, number)])

    return upsert if kind == "upsert" else transaction


async def _wait_known(node: Node, collection: str) -> None:
    """Return when a connection was told of a collection that another one made."""
    async with asyncio.timeout(KNOWN_S):
        # nobody tells
        while all(each.name != collection for each in node.collections()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# --- reading --------------------------------------------------------------------------------------


async def _measure_reading(settings: Settings) -> list[Measurement]:
    count = max(READ_COUNT, int(READ_ROWS * settings.scale) // READ_COUNT * READ_COUNT)
    lean = list[float]()
    redis_py = list[float]()
    found = []
    if not lacking():
        with tempfile.TemporaryDirectory(dir=settings.directory, prefix="bench-") as place:
            with serving(Path(place)) as socket:
                note("remote, read of Redis")
                await fill_redis(socket, count)
                lean = await _after_one(settings.repeats, partial(read_redis, socket, count))
                if not lacking_redis_py():
                    redis_py = await _after_one(
                        settings.repeats, partial(read_redis_py, socket, count)
                    )
    for batch in READ_BATCHES:
        note(f"remote, read of inserts of {_rows(batch)}")
        ours = await _read_node(settings, count, batch)
        case = f"read in batches, inserts of {_rows(batch)}"
        found.append(_against(case, ours, median(lean), READ_AIM, f"XREAD COUNT {READ_COUNT}"))
        if redis_py:
            found.append(
                _against(
                    f"{case}, against redis-py",
                    ours,
                    median(redis_py),
                    0.0,
                    f"XREAD COUNT {READ_COUNT}",
                )
            )
    return found


async def _read_node(settings: Settings, count: int, batch: int) -> float:
    with scratch(settings.directory) as path:
        with serving_node(path) as served:
            await _fill_node(served, count, batch)
        # Served anew, so that the rows come from the log and not from the memory of their insert.
        with serving_node(path) as served:
            async with connect(served.url) as node:
                until = await node.consistent_tick()

                async def read() -> float:
                    began = time.perf_counter()
                    rows = await _read_all(node, until)
                    assert rows == count, f"{rows} rows were read, {count} inserted"
                    return rows / (time.perf_counter() - began)

                return median(await _after_one(settings.repeats, read))


async def _after_one(repeats: int, read: Callable[[], Awaitable[float]]) -> list[float]:
    """Return what the reads after the first one are."""
    return [await read() for _ in range(1 + repeats)][1:]


async def _fill_node(served: Served, count: int, batch: int) -> None:
    async with connect(served.url) as node:
        insert = inserts_of(node, await create(node, "rows"), batch)
        left = itertools.repeat(None, count // batch)

        async def inserting() -> None:
            for _ in left:
                await insert()

        await asyncio.gather(*[inserting() for _ in range(8 if batch > 1 else 500)])


async def _read_all(node: Node, until: int) -> int:
    rows = 0
    async with node.read("rows", DeliverPolicy.all(), until=until) as reader:
        async for batch in reader.batches():
            rows += batch.num_rows
    return rows


# --- append to delivery ---------------------------------------------------------------------------


async def _measure_delivery(settings: Settings) -> list[Measurement]:
    """Return the way of a row from one connection to another, and how long the servers of it took
    to start.
    """
    count = max(10, int(DELIVERIES * settings.scale))
    ours = list[float]()
    theirs = list[float]()
    starts = list[Served]()
    for _ in range(settings.repeats):
        note("remote, delivery")
        with scratch(settings.directory) as path, serving_node(path) as served:
            starts.append(served)
            async with connections(served.url, 2) as (writer, reader):
                ours.append(median(await _deliver(writer, reader, count)) * 1000)
        if not lacking():
            with tempfile.TemporaryDirectory(dir=settings.directory, prefix="bench-") as place:
                with serving(Path(place)) as socket:
                    theirs.append(median(await deliver_redis(socket, count)) * 1000)
    return [
        _at_most(
            "append to delivery on another connection, p50", ours, theirs, 1.0, "XREAD BLOCK", "ms"
        ),
        Measurement(
            name="remote",
            case="ready after start, empty directory",
            value=median([each.start_s for each in starts]),
            unit="s",
            aim=READY_AIM_S,
            note=f"{median([each.open_s for each in starts]):.3f} s of it after the imports",
        ),
    ]


async def _deliver(writer: Node, reader: Node, count: int) -> list[float]:
    """Return how long rows are on their way from one connection to another."""
    collection = await create(writer, "rows")
    next_row = rows_of(1)
    delays = list[float]()
    await _wait_known(reader, collection)
    async with reader.read(collection, DeliverPolicy.latest()) as messages:
        stream = aiter(messages)
        await writer.insert(collection, next_row())
        await anext(stream)
        for _ in range(count):
            delivered = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            began = time.perf_counter()
            inserted = asyncio.ensure_future(writer.insert(collection, next_row()))
            await delivered
            delays.append(time.perf_counter() - began)
            await inserted
    return delays


# --- the server by itself -------------------------------------------------------------------------


async def _measure_idle(settings: Settings) -> list[Measurement]:
    note("remote, idle connections")
    count = max(10, int(IDLE_CONNECTIONS * settings.scale))
    with scratch(settings.directory) as path, serving_node(path) as served:
        server = psutil.Process(served.pid)
        async with connect(served.url) as node:
            await node.insert(await create(node, "rows"), record_batch(0, 1))
            before = server.memory_info().rss
            async with connections(served.url, count):
                after = server.memory_info().rss
    growth = after - before
    return [
        Measurement(
            name="remote",
            case=f"growth of the server, {count} idle connections",
            value=growth / 2**20,
            unit="MiB",
            aim=IDLE_AIM_MIB,
            note=f"{growth / count / 1024:.0f} KiB each, from {before >> 20} MiB",
        )
    ]


async def _measure_readers(settings: Settings) -> list[Measurement]:
    """Compare the reads of the log of many readers with those of one: of what was there before, and
    of what comes.
    """
    rows = max(100, int(READERS_ROWS * settings.scale))
    many = max(2, int(READERS * settings.scale))
    with scratch(settings.directory) as path:
        with serving_node(path) as served:
            await _fill_node(served, rows, 100)
        found = []
        for what, read in (("catch up", _log_reads_catching_up), ("follow", _log_reads_following)):
            note(f"remote, {many} readers that {what}")
            reads = list[int]()
            for count in (1, many):
                with serving_node(path) as served:  # anew: what the one has read is still in memory
                    async with connections(served.url, CHANGES_CONNECTIONS) as nodes:
                        reads.append(await read([*itertools.islice(itertools.cycle(nodes), count)]))
            case = f"log reads of {many} readers that {what}"
            found.append(
                _at_most(case, reads[1:], [max(reads[0], 1)], READERS_AIM, "one reader", "reads")
            )
    return found


async def _log_reads_catching_up(nodes: Sequence[Node]) -> int:
    """Return how often the log is read for readers over these connections, from its start to its
    end.
    """
    before = await _log_reads(nodes[0])
    until = await nodes[0].consistent_tick()
    async with AsyncExitStack() as stack:

        async def read(node: Node) -> None:
            reader = await stack.enter_async_context(
                node.read("rows", DeliverPolicy.all(), until=until)
            )
            async for _ in reader.batches():
                pass

        await asyncio.gather(*[read(node) for node in nodes])
        return await _log_reads(nodes[0]) - before


async def _log_reads_following(nodes: Sequence[Node]) -> int:
    """Return how often the log is read for readers that are open, while rows come."""
    async with AsyncExitStack() as stack:
        readers = [
            # one after the other
            await stack.enter_async_context(node.read("rows", DeliverPolicy.latest()))
            for node in nodes
        ]

        async def read(messages: AsyncIterator[object]) -> None:
            for _ in range(FOLLOWED_BATCHES):
                await anext(messages)

        before = await _log_reads(nodes[0])
        reading = asyncio.gather(*[read(aiter(reader)) for reader in readers])
        insert = inserts_of(nodes[0], "rows", 10)
        for _ in range(FOLLOWED_BATCHES):
            await insert()
        await reading
        return await _log_reads(nodes[0]) - before


async def _log_reads(node: Node) -> int:
    return sum(reader.read_s.count for reader in (await node.statistics()).readers)


# --- what is told ---------------------------------------------------------------------------------


def _rows(batch: int) -> str:
    return "one row" if batch == 1 else f"{batch} rows"


def _compared(
    case: str,
    ours: Sequence[Cost],
    theirs: Sequence[Measured],
    aim: float,
    whose: str,
    *,
    unit: str = "rows/s",
) -> Measurement:
    p50_ms = median([each.measured.p50_s for each in ours]) * 1000
    server_us = median([each.server_s for each in ours]) * 1e6
    client_us = median([each.client_s for each in ours]) * 1e6
    said = (
        f"p50 {p50_ms:.2f} ms, {server_us:.0f} us of the server and {client_us:.0f} us of the "
        "client each"
    )
    if theirs:
        said += f"; {whose} p50 {median([each.p50_s for each in theirs]) * 1000:.2f} ms"
    rate = median([each.measured.rows_per_s for each in ours])
    return _against(case, rate, median([each.rows_per_s for each in theirs]), aim, said, unit=unit)


def _against(
    case: str, value: float, baseline: float, aim: float, said: str, *, unit: str = "rows/s"
) -> Measurement:
    """Return a rate with the aim to reach, none without a baseline."""
    return Measurement(
        name="remote",
        case=case,
        value=value,
        unit=unit,
        baseline=baseline,
        aim=aim if baseline else 0.0,
        note=said,
    )


def _at_most(
    case: str, ours: Sequence[float], theirs: Sequence[float], aim: float, whose: str, unit: str
) -> Measurement:
    """Return what should not exceed so many times the baseline, as that multiple; by itself without
    a baseline.
    """
    value = median(ours)
    baseline = median(theirs)
    if not baseline:
        return Measurement(name="remote", case=case, value=value, unit=unit)
    return Measurement(
        name="remote",
        case=case,
        value=value / baseline,
        unit="times",
        aim=aim,
        note=f"{value:.3g} {unit}, {whose} {baseline:.3g} {unit}",
    )


if __name__ == "__main__":
    sys.exit(main("a node over a connection", run))
