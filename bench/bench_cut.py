"""From many rows in memory to rows in files, through log and cut, against writing the same rows
with `write_table` once.
"""

import sys
import time
from functools import partial
from pathlib import Path

import anyio.to_thread
import pyarrow as pa
import pyarrow.parquet as pq

from bench.baseline import scratch
from bench.measurement import Measurement, median
from bench.report import Settings, main, note
from bench.rows import create, record_batch
from streamingnode.opening import open_node, run_async

ROWS = 100_000


def run(settings: Settings) -> list[Measurement]:
    """Return rows per second from the begin of one large insert to the end of the cut that has it
    in files.

    The node writes every row twice, to the log and to the file, and syncs both, so no ratio is
    aimed at; what the flusher alone costs is measured by `bench_flush`.
    """
    return run_async(partial(_measure_cut, settings))


async def _measure_cut(settings: Settings) -> list[Measurement]:
    note("cut")
    bare = []
    ours = []
    table = pa.Table.from_batches([record_batch(0, ROWS)])
    for _ in range(settings.repeats):
        bare.append(ROWS / await anyio.to_thread.run_sync(_write_table, settings.directory, table))
        ours.append(ROWS / await _insert_and_cut(settings.directory, table))
    return [
        Measurement(
            name="cut",
            case=f"insert and cut of {ROWS} rows",
            value=median(ours),
            unit="rows/s",
            baseline=median(bare),
        )
    ]


async def _insert_and_cut(directory: Path, table: pa.Table) -> float:
    with scratch(directory) as path:
        async with open_node(path) as node:
            collection = await create(node, "rows")
            began = time.perf_counter()
            await node.insert(collection, table)
            await node.flush()
            return time.perf_counter() - began


def _write_table(directory: Path, table: pa.Table) -> float:
    with scratch(directory) as path:
        began = time.perf_counter()
        pq.write_table(
            table, path, compression="zstd", use_dictionary=False, write_page_checksum=True
        )
        return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main("one large insert and its cut", run))
