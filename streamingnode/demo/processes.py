"""One look at every process of this machine, as rows. Blocking: call it from a thread."""

from collections.abc import Iterator
from typing import TypedDict

import psutil
import pyarrow as pa

_LIVE_COLUMNS: dict[str, pa.DataType] = {
    "pid": pa.int64(),
    "name": pa.string(),
    "status": pa.string(),
    "threads": pa.int32(),
    "cpu_seconds": pa.float64(),
    "rss_bytes": pa.int64(),
    "round": pa.int64(),
}
LIVE_SCHEMA = pa.schema(_LIVE_COLUMNS)
"""One row for each running process, keyed by `pid`."""

SAMPLES_SCHEMA = pa.schema([pa.field("sample", pa.int64()), *LIVE_SCHEMA])
"""One row for each process in each round, keyed by a running number."""

_ATTRIBUTES = ("pid", "name", "status", "num_threads", "cpu_times", "memory_info")


class ProcessRow(TypedDict):
    """A row of `live`."""

    pid: int
    name: str
    status: str
    threads: int
    cpu_seconds: float
    rss_bytes: int
    round: int


def sample_processes(round_number: int) -> pa.RecordBatch:
    """Return a row for every process that can be looked at now; one that ends while being looked at is left out."""
    return pa.RecordBatch.from_pylist(list(_rows(round_number)), schema=LIVE_SCHEMA)


def _rows(round_number: int) -> Iterator[ProcessRow]:
    for process in psutil.process_iter(_ATTRIBUTES, ad_value=None):
        info = process.info
        if info["memory_info"] is None or info["cpu_times"] is None:
            continue
        yield ProcessRow(
            pid=info["pid"],
            name=_text(info["name"]),
            status=_text(info["status"]),
            threads=info["num_threads"] or 0,
            cpu_seconds=info["cpu_times"].user + info["cpu_times"].system,
            rss_bytes=info["memory_info"].rss,
            round=round_number,
        )


def _text(given: str | None) -> str:
    """Return text that UTF-8 can hold: a process may call itself anything."""
    return (given or "?").encode("utf-8", "replace").decode()
