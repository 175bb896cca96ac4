"""`streamingnode bench`: how fast a node takes rows on this disk, beside a file that is synced in the same run."""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import Command, take
from streamingnode.cli.output import EXIT_OK, Output, format_fields
from wal.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

    from streamingnode.node import Node

WARM_UP_S = 0.2
SECONDS_MAX, CALLERS_MAX = 600.0, 10_000
BYTES_MAX = 256 << 20
"""Of the rows of all callers together, which are in memory at a time."""


@dataclass(frozen=True, slots=True)
class _Arguments:
    dir: Path
    seconds: float
    callers: int
    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class _Measured:
    rows_per_s: float
    p50_ms: float
    p99_ms: float

    def __str__(self) -> str:
        return f"{self.rows_per_s:,.0f} rows/s, p50 {self.p50_ms:.2f} ms, p99 {self.p99_ms:.2f} ms"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk to measure (default: here)")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long the node is measured (default: 3)")
    parser.add_argument("--callers", type=int, default=64, metavar="N", help="inserts outstanding (default: 64)")
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="rows in each insert (default: 1)")
    parser.add_argument("--row-bytes", type=int, default=1024, metavar="N", help="bytes of a row (default: 1024)")


def _run(namespace: argparse.Namespace, output: Output) -> int:
    arguments = take(_Arguments, namespace)
    _check(arguments)
    from streamingnode.opening import run_async

    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="bench-") as scratch:
        before = _write_and_sync(arguments, Path(scratch) / "file")
        durability, node = run_async(partial(_measure_node, arguments, Path(scratch) / "node"))
        took = [*before, *_write_and_sync(arguments, Path(scratch) / "file")]  # machines get busy meanwhile
    file = _summary(took, sum(took), arguments.callers * arguments.rows)
    ratio = round(node.rows_per_s / file.rows_per_s, 4)
    load = {"callers": arguments.callers, "rows": arguments.rows, "row_bytes": arguments.row_bytes}
    document = {**load, "durability": durability, "node": node, "file": file, "ratio": ratio}
    for line in format_fields(document):
        output.line(line)
    output.document(document)
    return EXIT_OK


def _check(arguments: _Arguments) -> None:
    if not arguments.dir.is_dir():
        raise InvalidArgument(f"{arguments.dir} is no directory — make it, or name another with --dir")
    if not (0 < arguments.seconds <= SECONDS_MAX and 1 <= arguments.callers <= CALLERS_MAX and arguments.rows >= 1):
        raise InvalidArgument(
            f"--seconds goes to {SECONDS_MAX:g}, --callers from 1 to {CALLERS_MAX}, --rows from 1 — choose"
        )
    if arguments.row_bytes < 1 or arguments.callers * arguments.rows * arguments.row_bytes > BYTES_MAX:
        raise InvalidArgument(f"--row-bytes goes from 1 to {BYTES_MAX >> 20} MiB for all callers — choose within")


async def _measure_node(arguments: _Arguments, path: Path) -> tuple[str, _Measured]:
    import pyarrow as pa

    from streamingnode.opening import open_node

    columns: dict[str, pa.DataType] = {"id": pa.int64(), "value": pa.binary()}
    async with open_node(path) as node:
        await node.create_collection("rows", pa.schema(columns), primary_key="id")
        values = [{"id": key, "value": os.urandom(arguments.row_bytes)} for key in range(arguments.rows)]
        rows = pa.RecordBatch.from_pylist(values, schema=pa.schema(columns))
        await _insert_for(WARM_UP_S, node, rows, arguments.callers)
        began = time.perf_counter()
        took = await _insert_for(arguments.seconds, node, rows, arguments.callers)
        return node.durability, _summary(took, time.perf_counter() - began, arguments.rows)


async def _insert_for(seconds: float, node: "Node", rows: "pa.RecordBatch", callers: int) -> list[float]:
    """Insert until the time is over, each caller once at least; return what each insert took."""
    import anyio

    took, until = list[float](), time.perf_counter() + seconds
    given = rows.to_pylist() if rows.num_rows == 1 else rows  # as small inserts are mostly written

    async def insert() -> None:
        ended = 0.0
        while ended < until:
            began = time.perf_counter()
            await node.insert("rows", given)
            ended = time.perf_counter()
            took.append(ended - began)

    async with anyio.create_task_group() as tasks:
        for _ in range(callers):
            tasks.start_soon(insert)
    return took


def _write_and_sync(arguments: _Arguments, path: Path) -> list[float]:
    """Append what all callers insert at a time, and sync it, for half the time; return what each took."""
    content = os.urandom(arguments.callers * arguments.rows * arguments.row_bytes)
    took: list[float] = []
    with path.open("wb", buffering=0) as file:
        while not took or sum(took) < arguments.seconds / 2:
            began = time.perf_counter()
            file.write(content)
            os.fsync(file.fileno())
            took.append(time.perf_counter() - began)
    return took


def _summary(took: list[float], seconds: float, rows: int) -> _Measured:
    p99 = sorted(took)[min(len(took) - 1, int(len(took) * 0.99))]
    return _Measured(len(took) * rows / seconds, statistics.median(took) * 1000, p99 * 1000)


COMMAND = Command(
    name="bench",
    summary="measure durable inserts against a file that is written and synced",
    details=(
        "Inserts into a temporary node under --dir. The file gets in one write and fsync what all callers insert at once.\n"
        "Compare ratios between runs, not rows per second."
    ),
    examples=("streamingnode bench", "streamingnode bench --callers 16 --rows 100 --seconds 10 --dir /tmp --json"),
    add_arguments=_add_arguments,
    run=_run,
)
