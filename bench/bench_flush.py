"""Flush speed: from a log full of encoded rows to a cut on disk, against
`pyarrow.parquet.write_table` in the same run.

What is measured is all the flusher does: read and check the log, decode, add the system columns,
encode, checksum, sync, rename, manifest, checkpoint. The baseline has the rows in memory as a table
and writes one file, with the same compression, page checksums and dictionaries, and no sync. Rounds
alternate, so that both meet the same machine; medians count.

    python -m bench.bench_flush [--rounds 5] [--scale 1.0] [--json results.json]
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.stamped import OneShard, append_messages, append_rows
from flusher.data_file import ROW_GROUP_ROWS_MAX, ZSTD_LEVEL, encodings
from flusher.directory import NodeDirectory
from flusher.flusher import Flusher
from flusher.manifest import NO_CHECKPOINT, OFFSET, TICK, VCHANNEL
from flusher.run import FlushContext, FlushOptions
from wal.headers import CreateCollectionHeader, CreateSegmentHeader, CutHeader, MessageType
from wal.log import Log
from wal.memory_store import MemoryLogStore, MemoryOptions
from wal.message import MutableMessage

LOG_BYTES_MAX = 4 << 30
COLLECTION = 1
PARTITION = 2
FIRST_TICK = 1_700_000_000_000 << 18


class Case(msgspec.Struct, frozen=True):
    """Rows of one table in messages of `batch_rows`, spread over `shards` segments."""

    table: str
    rows: int
    batch_rows: int
    shards: int


class Spent(msgspec.Struct, frozen=True):
    """Seconds of wall clock, and of all threads of this process."""

    wall_s: float
    cpu_s: float


class Result(msgspec.Struct, frozen=True):
    """Medians of one case.

    `ratio` is over `write_table` of the rows alone, the others over rows that have the system
    columns already; `ratio_cpu` compares processor time, which other programs on the machine
    disturb less.
    """

    case: Case
    flush: Spent
    write_table: Spent
    write_table_all_columns: Spent
    rows_per_s: float
    mb_per_s: float
    ratio: float
    ratio_all_columns: float
    ratio_cpu: float


CASES = (
    Case("vectors", 300_000, 1000, 1),
    Case("vectors", 300_000, 1000, 2),
    Case("numbers", 3_000_000, 1000, 1),
    Case("numbers", 3_000_000, 1000, 2),
    Case("numbers", 300_000, 1, 1),
)


def make_table(name: str, rows: int) -> pa.Table:
    """Return one of the two tables: 128 floats, text and a time; or two numbers and a text."""
    randomness = np.random.default_rng(7)
    ids = pa.array(np.arange(rows))
    if name == "numbers":
        items = pa.array([f"item-{number}" for number in range(5000)])
        return pa.table(
            {
                "id": ids,
                "amount": randomness.random(rows),
                "item": items.take(randomness.integers(0, 5000, rows)),
            }
        )
    values = pa.array(randomness.random(rows * 128, dtype=np.float32))
    vectors = pa.FixedSizeListArray.from_arrays(values, 128).cast(pa.list_(pa.float32()))
    texts = pa.array([f"document number {number}" for number in range(rows)])
    times = pa.array(np.arange(rows) * 1000 + 1_700_000_000_000_000, pa.timestamp("us"))
    return pa.table({"id": ids, "vector": vectors, "text": texts, "at": times})


async def measure(case: Case, rounds: int) -> Result:
    """Return the medians of `rounds` alternating rounds."""
    table = make_table(case.table, case.rows)
    store = MemoryLogStore(MemoryOptions(bytes_max=LOG_BYTES_MAX))
    log = await store.open_log("p0")
    fill(log, table, case)
    alone: list[Spent] = []
    full: list[Spent] = []
    flushed: list[Spent] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="bench-flush-") as directory:
            root = Path(directory)
            alone.append(await anyio.to_thread.run_sync(write_table, table, root / "alone.parquet"))
            complete = add_system_columns(table, case)
            full.append(
                await anyio.to_thread.run_sync(write_table, complete, root / "full.parquet")
            )
            flushed.append(await flush(store, log, root))
        await store.state.put({"checkpoint/p0": None})
    flush_s = _median(flushed).wall_s
    return Result(
        case=case,
        flush=_median(flushed),
        write_table=_median(alone),
        write_table_all_columns=_median(full),
        rows_per_s=case.rows / flush_s,
        mb_per_s=table.nbytes / flush_s / 1e6,
        ratio=_median(alone).wall_s / flush_s,
        ratio_all_columns=_median(full).wall_s / flush_s,
        ratio_cpu=_median(full).cpu_s / _median(flushed).cpu_s,
    )


def _median(times: Sequence[Spent]) -> Spent:
    return Spent(
        statistics.median(each.wall_s for each in times),
        statistics.median(each.cpu_s for each in times),
    )


def fill(log: Log, table: pa.Table, case: Case) -> None:
    """Append the whole table and a cut, stamped as the node stamps them."""
    names = tuple(f"p0_{COLLECTION}v{shard}" for shard in range(case.shards))
    create = CreateCollectionHeader(
        collection_id=COLLECTION,
        name="bench",
        schema=table.schema.serialize().to_pybytes(),
        schema_version=1,
        primary_key="id",
        vchannels=names,
        partitions=((PARTITION, "_default"),),
    )
    append(log, [MutableMessage(MessageType.CREATE_COLLECTION, create, name) for name in names])
    for shard, name in enumerate(names):
        segment = CreateSegmentHeader(COLLECTION, PARTITION, 10 + shard, 1, 1 << 40, 1 << 40)
        append(log, [MutableMessage(MessageType.CREATE_SEGMENT, segment, name)])
    offsets = [0] * case.shards
    targets = [OneShard(COLLECTION, PARTITION, name) for name in names]
    for number, batch in enumerate(table.to_batches(max_chunksize=case.batch_rows)):
        shard = number % case.shards
        append_rows(
            log,
            targets[shard],
            batch.serialize().to_pybytes(),
            rows=batch.num_rows,
            segment_id=10 + shard,
            offset=offsets[shard],
            tick=FIRST_TICK + log.next_position,
        )
        offsets[shard] += batch.num_rows
    append(
        log,
        [
            MutableMessage(
                MessageType.CUT, CutHeader(1, tuple(10 + shard for shard in range(case.shards)))
            )
        ],
    )


def append(log: Log, messages: list[MutableMessage]) -> None:
    """Append one group at the next tick."""
    append_messages(log, messages, tick=FIRST_TICK + log.next_position)


async def flush(store: MemoryLogStore, log: Log, root: Path) -> Spent:
    """Return what it takes from a flusher's start to its first durable cut."""

    async def nothing(*_arguments: object) -> None:
        """There are no producers, and the log is never reopened."""

    context = FlushContext(
        directory=NodeDirectory(root),
        store=store,
        log=log,
        tail=None,
        options=FlushOptions(),
        now_ms=lambda: time.time_ns() // 1_000_000,
        elapsed_ms=lambda: time.monotonic_ns() // 1_000_000,
        reader_floor=lambda: None,
        on_kept_tick=lambda _tick: None,
        save_producers=nothing,
        log_is_back=nothing,
        next_id=lambda: sys.maxsize,
    )
    flusher = Flusher(context, NO_CHECKPOINT)
    stop = stopwatch()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(flusher.run)
        await flusher.wait_for_cut(1)
        spent = stop()
        tasks.cancel_scope.cancel()
    return spent


def add_system_columns(table: pa.Table, case: Case) -> pa.Table:
    """Return the table as the flusher stores it, for the second baseline."""
    ticks = np.repeat(FIRST_TICK + np.arange(1 + case.rows // case.batch_rows), case.batch_rows)[
        : case.rows
    ]
    names = pa.DictionaryArray.from_arrays(np.zeros(case.rows, np.int32), [f"p0_{COLLECTION}v0"])
    columns = [*table.columns, pa.array(ticks), pa.array(np.arange(case.rows)), names]
    return pa.table(columns, names=[*table.column_names, TICK, OFFSET, VCHANNEL])


def write_table(table: pa.Table, path: Path) -> Spent:
    """Return what it takes to write the baseline's file with the flusher's settings."""
    system = VCHANNEL in table.column_names
    stop = stopwatch()
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=ZSTD_LEVEL,
        write_page_checksum=True,
        row_group_size=ROW_GROUP_ROWS_MAX,
        use_dictionary=[name for name in encodings(table)[0] if name in table.column_names],  # type: ignore[arg-type]
        column_encoding={TICK: "DELTA_BINARY_PACKED", OFFSET: "DELTA_BINARY_PACKED"}
        if system
        else None,
    )
    return stop()


def stopwatch() -> Callable[[], Spent]:
    """Return a function that tells what was spent since this call."""
    wall = time.perf_counter()
    cpu = time.process_time()
    return lambda: Spent(time.perf_counter() - wall, time.process_time() - cpu)


def machine() -> dict[str, str | int]:
    """Return what the numbers depend on."""
    return {
        "cpus": os.cpu_count() or 0,
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "pyarrow": pa.__version__,
    }


def print_results(results: Sequence[Result]) -> None:
    """Print the table."""
    columns = ("table", "rows", "batch", "shards", "rows/s", "MB/s", "ratio", "all columns", "cpu")
    print("{:8} {:>9} {:>6} {:>6} {:>12} {:>7} {:>6} {:>12} {:>6}".format(*columns))
    for result in results:
        case = result.case
        print(
            f"{case.table:8} {case.rows:9,} {case.batch_rows:6,} {case.shards:6} "
            f"{result.rows_per_s:12,.0f} "
            f"{result.mb_per_s:7.0f} {result.ratio:6.2f} {result.ratio_all_columns:12.2f} "
            f"{result.ratio_cpu:6.2f}"
        )
    print(
        "ratio: write_table of the rows alone to flush, aim 0.85; all columns, cpu: with the "
        "system columns in both"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the grid and print it."""
    parser = argparse.ArgumentParser(description="Flush speed against pyarrow.parquet.write_table.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of rows")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    cases = [
        msgspec.structs.replace(case, rows=max(1000, int(case.rows * options.scale)))
        for case in CASES
    ]
    results = [anyio.run(measure, case, options.rounds) for case in cases]
    print_results(results)
    if options.json:
        report = {"machine": machine(), "results": msgspec.to_builtins(results)}
        options.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
