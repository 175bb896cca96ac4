"""How old a table is beside an ingest that stays: from when a row is acknowledged until its table
has it. Long.

A node in this process takes 1,000 rows of 1 KiB a second, in writes of ten; `ingest --every 2s`
runs beside it. The log of the table is looked at twenty times a second, and each write is seen with
the first version whose tick is not below its own. Rows of the first seconds, while Spark starts, do
not count.

    python -m bench.bench_freshness --seconds 3600
"""

import asyncio
import random
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.baseline import scratch
from bench.measurement import Measurement
from bench.report import Settings, main, note
from bench.rows import create, record_batch
from spark_sink.table import OpenTable
from streamingnode.node import Node
from streamingnode.opening import open_node, run_async

ROWS_PER_S = 1_000
ROWS_A_WRITE = 10
UPSERTED = 2
"""Of the rows of a write of the second case, so many are upserts of keys that were written in the
last minute.
"""
EVERY = "2s"
LOOK_S = 0.05
WARM_UP_S = 40.0
PATIENCE_S = 120.0
P50_AIMS_S = {False: 3.0, True: 5.0}
P99_AIM_S = 10.0
TABLE = "rows"


@dataclass
class Seen:
    """Writes by their tick and when they were acknowledged, and how long after that the table had
    each.
    """

    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    ages_s: list[float] = field(default_factory=list)

    def table_at(self, tick: int, now: float, *, counting: bool) -> None:
        """Note that the table has everything up to a tick."""
        while self.waiting and self.waiting[0][0] <= tick:
            acknowledged = self.waiting.popleft()[1]
            if counting:
                self.ages_s.append(now - acknowledged)


def run(settings: Settings) -> list[Measurement]:
    """Return median and 99th percentile of the age, for inserts alone and with upserts among
    them.
    """
    return [
        each
        for upserts in (False, True)
        for each in run_async(partial(_measure, settings, upserts=upserts))
    ]


async def _measure(settings: Settings, *, upserts: bool) -> list[Measurement]:
    case = "with upserts of the last minute" if upserts else "inserts only"
    note(f"freshness, {case}, {settings.seconds:g} s")
    with scratch(settings.directory) as path:
        async with open_node(path / "data") as node:
            await create(node, TABLE)
            with (path / "rounds.jsonl").open("wb") as told:
                places = [str(path / "data"), "--tables", str(path / "tables")]
                command = ["-m", "streamingnode", "ingest", *places, "--every", EVERY, "--json"]
                ingest = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=told)
                try:
                    seen = await _write_and_look(
                        node, path / "tables" / TABLE, settings.seconds, upserts=upserts
                    )
                finally:
                    ingest.terminate()
                    ended = await ingest.wait()
            assert ended == 0, f"the ingest ended with {ended}"
            files = sum(1 for _ in (path / "tables" / TABLE).rglob("*.parquet"))
    ages = sorted(seen.ages_s)
    said = f"{len(ages):,} writes, the oldest {ages[-1]:.1f} s, {files} files at the end"
    made = partial(Measurement, name="freshness", unit="s")
    return [
        made(case=f"{case}, p50", value=ages[len(ages) // 2], aim=P50_AIMS_S[upserts], note=said),
        made(case=f"{case}, p99", value=ages[len(ages) * 99 // 100], aim=P99_AIM_S),
    ]


async def _write_and_look(node: Node, table: Path, seconds: float, *, upserts: bool) -> Seen:
    seen = Seen()
    began = time.monotonic()
    until = began + WARM_UP_S + seconds
    looking = asyncio.ensure_future(_look(seen, table, began + WARM_UP_S, until))
    chance = random.Random(1)
    batches = [record_batch(0, ROWS_A_WRITE) for _ in range(64)]
    pause_s = ROWS_A_WRITE / ROWS_PER_S
    for number in range(int((WARM_UP_S + seconds) / pause_s)):
        await asyncio.sleep(max(0.0, began + number * pause_s - time.monotonic()))
        first = number * ROWS_A_WRITE
        values = batches[number % len(batches)]["value"]
        rows = [{"id": first + at, "value": value} for at, value in enumerate(values.to_pylist())]
        fresh, again = (rows[UPSERTED:], rows[:UPSERTED]) if upserts and number else (rows, [])
        for row in again:
            row["id"] = chance.randrange(max(0, first - 60 * ROWS_PER_S), first)
        async with node.transaction() as txn:
            await txn.insert(TABLE, fresh)
            if again:
                await txn.upsert(TABLE, again)
        assert txn.result is not None, "it was committed"
        seen.waiting.append((txn.result.time_tick, time.monotonic()))
    await looking
    return seen


async def _look(seen: Seen, path: Path, count_from: float, until: float) -> None:
    """Look at the table until it has all that was written, which it has to have in time."""
    table = None
    while (now := time.monotonic()) < until or seen.waiting:
        assert now < until + PATIENCE_S, f"the table lacks {len(seen.waiting)} writes"
        if table is None:
            table = await asyncio.to_thread(OpenTable.load, path)
        else:
            await asyncio.to_thread(table.refresh)
            seen.table_at(table.watermark.tick, time.monotonic(), counting=now > count_from)
        await asyncio.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main("how old tables are beside an ingest that stays", run))
