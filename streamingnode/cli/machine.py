"""What a node is like on this machine: `bench`, how fast, and `config show`, with which settings."""

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import argument, command
from streamingnode.cli.output import Output
from wal.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

    from streamingnode.node import Node

WARM_UP_S = 0.2
SECONDS_MAX, CALLERS_MAX = 600.0, 10_000
BYTES_MAX = 256 << 20
"""Of the rows of all callers together, which are in memory at a time."""


@dataclass(frozen=True, slots=True)
class _Measured:
    rows_per_s: float
    p50_ms: float
    p99_ms: float

    def __str__(self) -> str:
        return f"{self.rows_per_s:,.0f} rows/s, p50 {self.p50_ms:.2f} ms, p99 {self.p99_ms:.2f} ms"


@command(
    argument(
        "--dir",
        dest="directory",
        metavar="DIR",
        type=Path,
        default=".",
        help="a directory on the disk to measure (default: here)",
    ),
    argument("--seconds", type=float, default=3.0, help="how long the node is measured (default: 3)"),
    argument("--callers", type=int, default=64, metavar="N", help="inserts outstanding (default: 64)"),
    argument("--rows", type=int, default=1, metavar="N", help="rows in each insert (default: 1)"),
    argument("--row-bytes", type=int, default=1024, metavar="N", help="bytes of a row (default: 1024)"),
    examples=("streamingnode bench", "streamingnode bench --callers 16 --rows 100 --seconds 10 --dir /tmp --json"),
)
def bench(output: Output, *, directory: Path, seconds: float, callers: int, rows: int, row_bytes: int) -> None:
    """Measure durable inserts against a file that is written and synced.

    Inserts into a temporary node under --dir. The file gets in one write and fsync what all callers insert at once.
    Compare ratios between runs, not rows per second.
    """
    if not directory.is_dir():
        raise InvalidArgument(f"{directory} is no directory — make it, or name another with --dir")
    if not (0 < seconds <= SECONDS_MAX and 1 <= callers <= CALLERS_MAX and rows >= 1):
        raise InvalidArgument(
            f"--seconds goes to {SECONDS_MAX:g}, --callers from 1 to {CALLERS_MAX}, --rows from 1 — choose"
        )
    if row_bytes < 1 or callers * rows * row_bytes > BYTES_MAX:
        raise InvalidArgument(f"--row-bytes goes from 1 to {BYTES_MAX >> 20} MiB for all callers — choose within")
    from streamingnode.opening import run_async

    with tempfile.TemporaryDirectory(dir=directory, prefix="bench-") as scratch:
        file, content = Path(scratch) / "file", os.urandom(callers * rows * row_bytes)
        took = _write_and_sync(file, content, seconds / 2)
        durability, node = run_async(partial(_measure_node, Path(scratch) / "node", seconds, callers, rows, row_bytes))
        took += _write_and_sync(file, content, seconds / 2)  # machines get busy meanwhile
    measured = _summary(took, sum(took), callers * rows)
    document = {
        "callers": callers,
        "rows": rows,
        "row_bytes": row_bytes,
        "durability": durability,
        "node": node,
        "file": measured,
        "ratio": round(node.rows_per_s / measured.rows_per_s, 4),
    }
    output.fields(document)
    output.document(document)


async def _measure_node(path: Path, seconds: float, callers: int, rows: int, row_bytes: int) -> tuple[str, _Measured]:
    import pyarrow as pa

    from streamingnode.opening import open_node

    columns: dict[str, pa.DataType] = {"id": pa.int64(), "value": pa.binary()}
    values = [{"id": key, "value": os.urandom(row_bytes)} for key in range(rows)]
    # One row is given as a dict, as small inserts are mostly written.
    given = values if rows == 1 else pa.RecordBatch.from_pylist(values, schema=pa.schema(columns))
    async with open_node(path) as node:
        await node.create_collection("rows", pa.schema(columns), primary_key="id")
        await _insert_for(WARM_UP_S, node, given, callers)
        began = time.perf_counter()
        took = await _insert_for(seconds, node, given, callers)
        return node.durability, _summary(took, time.perf_counter() - began, rows)


async def _insert_for(
    seconds: float, node: "Node", rows: "list[dict[str, object]] | pa.RecordBatch", callers: int
) -> list[float]:
    """Insert until the time is over, each caller once at least; return what each insert took."""
    import anyio

    took, until = list[float](), time.perf_counter() + seconds

    async def insert() -> None:
        ended = 0.0
        while ended < until:
            began = time.perf_counter()
            await node.insert("rows", rows)
            ended = time.perf_counter()
            took.append(ended - began)

    async with anyio.create_task_group() as tasks:
        for _ in range(callers):
            tasks.start_soon(insert)
    return took


def _write_and_sync(path: Path, content: bytes, seconds: float) -> list[float]:
    """Append what all callers insert at a time, and sync it, until the time is over; return what each took."""
    took: list[float] = []
    with path.open("wb", buffering=0) as file:
        while not took or sum(took) < seconds:
            began = time.perf_counter()
            file.write(content)
            os.fsync(file.fileno())
            took.append(time.perf_counter() - began)
    return took


def _summary(took: list[float], seconds: float, rows: int) -> _Measured:
    p99 = sorted(took)[min(len(took) - 1, int(len(took) * 0.99))]
    return _Measured(len(took) * rows / seconds, statistics.median(took) * 1000, p99 * 1000)


@command(
    argument("action", choices=["show"], help="show: print the settings a node would be opened with here"),
    argument("--file", type=Path, help="a TOML file of settings (default: what STREAMINGNODE_CONFIG names)"),
    argument("--changed", action="store_true", help="only what is not a default"),
    examples=(
        "streamingnode config show",
        "streamingnode config show --changed --file node.toml",
        "streamingnode config show --json",
    ),
)
def config(output: Output, *, action: str, file: Path | None, changed: bool) -> None:
    """Show every setting, its value, and where that comes from.

    Settings come from defaults, then a TOML file, then STREAMINGNODE_* environment variables, then the arguments of
    open_node; later ones win. A variable is the setting's name in capitals with `_` for `.`.
    """
    from streamingnode.config import DEFAULT_ORIGIN, load_config

    assert action == "show", "the only choice"
    settings = load_config(file=file, environment=os.environ).origins()
    shown = [each for each in settings if not changed or each.origin != DEFAULT_ORIGIN]
    output.table(
        ("setting", "value", "from"),
        [(s.key, str(s.value).lower() if isinstance(s.value, bool | None) else s.value, s.origin) for s in shown],
    )
    output.document([{"setting": s.key, "value": s.value, "origin": s.origin} for s in shown])
