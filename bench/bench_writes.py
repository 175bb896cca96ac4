"""Small writes of many callers through the public interface, each kind against a bare group commit,
sqlite3 and Redis.

Rows of 1 KiB, each call one row, acknowledged after fsync on all sides, in turn on the same disk.
The limit is a group commit on rocksdict of values of the same size, with the same number
outstanding; a transaction, which has two rows, is compared with one value of one row, and told in
transactions. sqlite3 has one connection in one thread (WAL, `synchronous=FULL`), which is how a
service has it; Redis one pipelined connection (`appendfsync always`). As a service should
(docs/guide.md), the process has told the garbage collector that what is loaded stays, for all
sides. Behind it the log that upserting tasks wrote is scanned and flushed.
"""

import asyncio
import gc
import itertools
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa

from bench.baseline import (
    Load,
    Measured,
    measure_bare_appends,
    measure_plain_scan,
    measure_warm,
    scratch,
)
from bench.measurement import Measurement, median
from bench.redis_streams import connected, lacking, serving, words
from bench.report import Settings, main, note
from bench.rows import PRIMARY_KEY, SCHEMA, VALUE_BYTES
from streamingnode.node import Node
from streamingnode.opening import open_node, run_async

OUTSTANDING = (1, 64, 1000)
AIMS: dict[str, tuple[float, float, float]] = {
    "insert of a dict": (0.0, 0.6, 0.6),
    "insert of a record batch": (0.0, 0.45, 0.4),
    "upsert": (0.0, 0.45, 0.4),
    "delete": (0.0, 0.45, 0.4),
    "transaction over two collections": (0.0, 0.3, 0.2),
    "named producer": (0.0, 0.4, 0.3),
    "named producer, sequence given": (0.0, 0.4, 0.3),
}
"""By kind: the part of the limit to reach with 1, 64 and 1000 outstanding; none for a write
alone.
"""
SCAN_AIM = 0.5
FLUSH_AIM = 0.3
SCANNED_ROWS = 200_000
_VALUES = [os.urandom(VALUE_BYTES) for _ in range(997)]

Append = Callable[[], Awaitable[object]]


def run(settings: Settings) -> list[Measurement]:
    """Return writes per second for each kind and number outstanding, and what scan and flush make
    of them.
    """
    gc.collect()
    gc.freeze()
    return run_async(partial(_measure, settings))


async def _measure(settings: Settings) -> list[Measurement]:
    found = []
    for outstanding in OUTSTANDING:
        load = Load(outstanding=outstanding, batch=1, seconds=settings.seconds)
        bare: list[Measured] = []
        ours: dict[str, list[tuple[Measured, float]]] = {kind: [] for kind in AIMS}
        theirs: dict[str, list[Measured]] = {}
        for _ in range(settings.repeats):
            note(f"writes, {outstanding} outstanding")
            bare.append(await measure_bare_appends(load, settings.directory))
            for kind in AIMS:
                ours[kind].append(await measure_node(kind, load, settings.directory))
            for kind, measured in (await _measure_peers(load, settings.directory)).items():
                theirs.setdefault(kind, []).append(measured)
        limit = median([each.rows_per_s for each in bare])
        place = OUTSTANDING.index(outstanding)
        for kind, of_kind in ours.items():
            found.append(_summary(f"{outstanding} x {kind}", of_kind, limit, AIMS[kind][place]))
        for kind, runs in theirs.items():
            rate = median([each.rows_per_s for each in runs])
            found.append(
                Measurement(
                    name="writes",
                    case=f"{outstanding} x {kind}",
                    value=rate,
                    unit="writes/s",
                    baseline=limit,
                )
            )
    found += await _measure_behind(settings)
    return found


def _summary(
    case: str, runs: list[tuple[Measured, float]], limit: float, aim: float
) -> Measurement:
    p50_ms = median([measured.p50_s for measured, _ in runs]) * 1000
    loop_us = median([loop_s for _, loop_s in runs]) * 1e6
    return Measurement(
        name="writes",
        case=case,
        value=median([measured.rows_per_s for measured, _ in runs]),
        unit="writes/s",
        baseline=limit,
        aim=aim,
        note=f"p50 {p50_ms:.2f} ms, {loop_us:.0f} us of the event loop's thread each",
    )


# --- ours -----------------------------------------------------------------------------------------


async def measure_node(kind: str, load: Load, directory: Path) -> tuple[Measured, float]:
    """Return what a new node does under `load`, and the processor time of its event loop for each
    write.
    """
    with scratch(directory) as path:
        async with open_node(path) as node:
            append = await writes_of(node, kind)
            count = 0

            async def counted() -> None:
                nonlocal count
                count += 1
                await append()

            await measure_warm(load, counted)
            count = 0
            began = time.thread_time()
            measured = await measure_warm(load, counted)
            return measured, (time.thread_time() - began) / count


async def writes_of(node: Node, kind: str) -> Append:
    """Return what makes the next write of a kind each time it is called; keys of upserts come
    again.
    """
    for name in ("orders", "stock"):
        await node.create_collection(name, SCHEMA, primary_key=PRIMARY_KEY)
    feed = await node.producer("feed")
    numbers = itertools.count(1)

    def row(key: int, number: int) -> dict[str, object]:
        return {"id": key, "value": _VALUES[number % len(_VALUES)]}

    async def transaction() -> None:
        number = next(numbers)
        async with node.transaction() as txn:
            await txn.insert("orders", [row(number, number)])
            await txn.upsert("stock", [row(number % 1000, number)])

    def numbered(write: Callable[[int], Awaitable[object]]) -> Append:
        return lambda: write(next(numbers))

    batches = itertools.cycle(
        [pa.RecordBatch.from_pylist([row(each, each)], schema=SCHEMA) for each in range(997)]
    )
    kinds: dict[str, Append] = {
        "insert of a dict": numbered(lambda number: node.insert("orders", [row(number, number)])),
        "insert of a record batch": lambda: node.insert("orders", next(batches)),
        "upsert": numbered(lambda number: node.upsert("orders", [row(number % 1000, number)])),
        "delete": numbered(lambda number: node.delete("orders", [number])),
        "transaction over two collections": transaction,
        "named producer": numbered(lambda number: feed.insert("orders", [row(number, number)])),
        "named producer, sequence given": numbered(
            lambda number: feed.insert("orders", [row(number, number)], sequence=number)
        ),
    }
    return kinds[kind]


async def _measure_behind(settings: Settings) -> list[Measurement]:
    """Scan and flush what 64 upserting tasks wrote."""
    count = max(1_000, int(SCANNED_ROWS * settings.scale))
    scanned = []
    plain = []
    flushed = []
    written = []
    for _ in range(settings.repeats):
        note("scan and flush of upserts")
        with scratch(settings.directory) as path:
            async with open_node(path, cut_interval_s=3600) as node:
                append = await writes_of(node, "upsert")
                left = itertools.repeat(None, count)

                async def upserting(
                    append: Append = append, left: "itertools.repeat[None]" = left
                ) -> None:
                    for _ in left:
                        await append()

                await asyncio.gather(*(upserting() for _ in range(64)))
                until = await node.consistent_tick()
            async with open_node(path, cut_interval_s=3600) as node:
                began = time.perf_counter()
                rows = 0
                await node.flush()
                flushed.append(count / (time.perf_counter() - began))
                # now, because the flusher reads the log as soon as there is one
                began = time.perf_counter()
                async with node.read("orders", until=until) as reader:
                    async for batch in reader.batches():
                        rows += batch.num_rows
                scanned.append(rows / 2 / (time.perf_counter() - began))
                assert rows == 2 * count, "each upsert is a delete and an insert"
        plain.append(await asyncio.to_thread(measure_plain_scan, settings.directory, rows=count))
        written.append(await asyncio.to_thread(_write_table, settings.directory, count))
    return [
        Measurement(
            name="writes",
            case="scan of upserts in batches",
            value=median(scanned),
            unit="rows/s",
            baseline=median(plain),
            aim=SCAN_AIM,
        ),
        Measurement(
            name="writes",
            case="flush of upserts",
            value=median(flushed),
            unit="rows/s",
            baseline=median(written),
            aim=FLUSH_AIM,
        ),
    ]


def _write_table(directory: Path, count: int) -> float:
    """Return how many rows per second `write_table` writes."""
    from pyarrow import parquet

    values = pa.array([_VALUES[number % len(_VALUES)] for number in range(count)], pa.binary())
    table = pa.table([pa.array(range(count), pa.int64()), values], schema=SCHEMA)
    with tempfile.TemporaryDirectory(dir=directory, prefix="bench-") as path:
        began = time.perf_counter()
        parquet.write_table(
            table, Path(path) / "rows.parquet", compression="zstd", use_dictionary=False
        )
        return count / (time.perf_counter() - began)


# --- theirs ---------------------------------------------------------------------------------------


async def _measure_peers(load: Load, directory: Path) -> dict[str, Measured]:
    found = {}
    for kind, statements in _SQL.items():
        async with _sqlite(directory) as execute:
            found[f"sqlite3, {kind}"] = await measure_warm(
                load, partial(_next_statement, execute, statements)
            )
    if lack := lacking():
        note(f"Redis is left out: {lack}")
        return found
    for kind, make in _REDIS.items():
        with (
            tempfile.TemporaryDirectory(dir=directory, prefix="bench-") as place,
            serving(Path(place)) as socket,
        ):
            async with connected(socket) as connection:
                numbers = itertools.count(1)

                async def command(
                    make: Callable[[int], tuple[bytes, int]] = make,
                    numbers: "itertools.count[int]" = numbers,
                ) -> None:
                    data, lines = make(next(numbers))
                    await connection.send(data, lines)

                found[f"Redis, {kind}"] = await measure_warm(load, command)
    return found


_INSERT = "INSERT INTO orders VALUES (?, ?)"
_UPSERT = "INSERT INTO stock VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET value = excluded.value"
_SQL: dict[str, tuple[str, ...]] = {
    "insert": (_INSERT,),
    "upsert": (_UPSERT,),
    "delete": ("DELETE FROM orders WHERE id = ?",),
    "transaction": (_INSERT, _UPSERT),
}
_number = itertools.count(1)
Execute = Callable[[tuple[str, ...], int], Awaitable[None]]


async def _next_statement(execute: Execute, statements: tuple[str, ...]) -> None:
    await execute(statements, next(_number))


@asynccontextmanager
async def _sqlite(directory: Path) -> AsyncIterator[Execute]:
    """Yield what runs statements as one transaction, in the one thread of the one connection."""
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="bench-") as place,
        ThreadPoolExecutor(1) as thread,
    ):
        connection = thread.submit(_connect, Path(place) / "rows.db").result()
        loop = asyncio.get_running_loop()

        def transact(statements: tuple[str, ...], number: int) -> None:
            with connection:
                for statement in statements:
                    if statement.startswith("DELETE"):
                        connection.execute(statement, (number,))
                    else:
                        key = number % 1000 if statement is _UPSERT else number
                        connection.execute(statement, (key, _VALUES[number % len(_VALUES)]))

        yield lambda statements, number: loop.run_in_executor(thread, transact, statements, number)
        thread.submit(connection.close).result()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, value BLOB)")
    connection.execute("CREATE TABLE stock (id INTEGER PRIMARY KEY, value BLOB)")
    connection.commit()
    return connection


def _xadd(number: int) -> bytes:
    return words(
        b"XADD",
        b"orders",
        b"*",
        b"id",
        str(number).encode(),
        b"value",
        _VALUES[number % len(_VALUES)],
    )


def _hset(number: int) -> bytes:
    return words(b"HSET", b"stock", str(number % 1000).encode(), _VALUES[number % len(_VALUES)])


_REDIS: dict[str, Callable[[int], tuple[bytes, int]]] = {
    "XADD": lambda number: (_xadd(number), 2),
    "HSET": lambda number: (_hset(number), 1),
    "DEL": lambda number: (words(b"DEL", str(number).encode()), 1),
    "MULTI XADD HSET EXEC": lambda number: (
        words(b"MULTI") + _xadd(number) + _hset(number) + words(b"EXEC"),
        7,
    ),
}
"""What is sent, and how many lines the answer has."""


if __name__ == "__main__":
    sys.exit(main("small writes of many callers", run))
