"""Scans of a log store through `Scanner.next_batch`, against plain `iter()` on rocksdict in the
same run.

Prints one line for each batch size and the cost of one publish to the live tail;
`python -m bench.bench_scan [directory]`.
"""

import asyncio
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.baseline import measure_plain_scan, scratch
from bench.stamped import OneShard, append_rows
from scanner.deliver_policy import DeliverPolicy
from scanner.scanner import Scanner
from wal.entry import LogEntry
from wal.live_tail import LiveTail
from wal.log import Log
from wal.rocks.layout import RocksOptions
from wal.rocks.store import open_rocks_store

ROW_BYTES = 1024
ROUNDS = 3
TAIL_ENTRIES = 20_000
PAYLOADS = 64
"""Payloads used in turn, of bytes that do not compress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanMeasured:
    """Medians of one batch size: rows per second, their ratio, and what an entry costs us."""

    batch_rows: int
    plain_rows_per_s: float
    log_rows_per_s: float
    tail_rows_per_s: float
    log_ratio: float
    entry_us: float


async def measure_scan(directory: Path, *, batch_rows: int, rows: int) -> ScanMeasured:
    """Return how fast `rows` rows of 1 KiB, `batch_rows` in an entry, are scanned on the disk of
    `directory`.
    """
    plain = []
    logged = []
    tailed = []
    with scratch(directory) as path:
        async with _log_at(path) as log:
            await _fill(
                log,
                rows // batch_rows,
                [os.urandom(ROW_BYTES * batch_rows) for _ in range(PAYLOADS)],
            )
            tail = await _tail_of(log)
        for _ in range(ROUNDS):
            plain.append(
                await asyncio.to_thread(
                    measure_plain_scan, directory, rows=rows, row_bytes=ROW_BYTES, batch=batch_rows
                )
            )
            async with _log_at(path) as log:  # opened anew, as the database it is compared with
                logged.append(
                    rows / await _seconds(Scanner(log, None, DeliverPolicy.all()), log.last_tick)
                )
                tailed.append(
                    rows / await _seconds(Scanner(log, tail, DeliverPolicy.all()), log.last_tick)
                )
    log_rows_per_s = statistics.median(logged)
    return ScanMeasured(
        batch_rows=batch_rows,
        plain_rows_per_s=statistics.median(plain),
        log_rows_per_s=log_rows_per_s,
        tail_rows_per_s=statistics.median(tailed),
        log_ratio=log_rows_per_s / statistics.median(plain),
        entry_us=1e6 * batch_rows / log_rows_per_s,
    )


async def measure_publish(directory: Path) -> float:
    """Return what publishing one entry to the live tail takes without a reader that waits, in
    microseconds.
    """
    with scratch(directory) as path:
        async with _log_at(path) as log:
            await _fill(log, TAIL_ENTRIES, [b"row"])
            entries = await _entries_of(log)
    rounds = []
    for _ in range(ROUNDS):
        tail = LiveTail()
        started = time.perf_counter()
        for entry in entries:
            tail.append(entry)
        rounds.append(time.perf_counter() - started)
    return 1e6 * statistics.median(rounds) / len(entries)


@asynccontextmanager
async def _log_at(path: Path) -> AsyncIterator[Log]:
    store = await open_rocks_store(path, options=RocksOptions(durability="os"))
    try:
        yield await store.open_log("p0")
    finally:
        await store.close()


async def _fill(log: Log, count: int, payloads: Sequence[bytes]) -> None:
    target = OneShard(1, 1, "p0_1v0")
    durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    for tick, payload in zip(range(1, count + 1), itertools.cycle(payloads), strict=False):
        await log.admit(len(payload))
        durable = append_rows(
            log, target, payload, rows=1, segment_id=1, offset=tick - 1, tick=tick
        ).durable
    await durable


async def _entries_of(log: Log) -> list[LogEntry]:
    entries: list[LogEntry] = []
    while batch := await log.read(len(entries) + 1, bytes_max=1 << 20):
        entries += batch
    return entries


async def _tail_of(log: Log) -> LiveTail:
    tail = LiveTail(capacity_bytes=1 << 40)
    for entry in await _entries_of(log):
        tail.append(entry)
    return tail


async def _seconds(scanner: Scanner, end_tick: int) -> float:
    started = time.perf_counter()
    confirmed = 0
    while confirmed < end_tick:
        confirmed = (await scanner.next_batch()).confirmed_tick
    seconds = time.perf_counter() - started
    await scanner.close()
    return seconds


async def run(directory: Path) -> list[ScanMeasured]:
    """Measure and print the grid."""
    results = [
        await measure_scan(directory, batch_rows=100, rows=100_000),
        await measure_scan(directory, batch_rows=1, rows=50_000),
    ]
    print(
        f"{'rows/entry':>10} {'plain rows/s':>13} {'log rows/s':>12} {'tail rows/s':>13} "
        f"{'ratio':>6} {'us/entry':>9}"
    )
    for each in results:
        print(
            f"{each.batch_rows:>10} {each.plain_rows_per_s:>13,.0f} {each.log_rows_per_s:>12,.0f} "
            f"{each.tail_rows_per_s:>13,.0f} {each.log_ratio:>6.2f} {each.entry_us:>9.1f}"
        )
    publish_us = await measure_publish(directory)
    print(f"publish to the live tail: {publish_us:.2f} us")
    measured = {"scans": [asdict(each) for each in results], "publish_us": publish_us}
    print(
        json.dumps(
            {
                "machine": platform.processor() or platform.machine(),
                "python": platform.python_version(),
            }
            | measured
        )
    )
    return results


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())))
