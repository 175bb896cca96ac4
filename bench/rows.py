"""Rows to measure with: 1 KiB each, of bytes that do not compress, the same in every run."""

import itertools
from collections.abc import Awaitable, Callable

import numpy as np
import pyarrow as pa

from streamingnode.node import Node

ROW_BYTES = 1024
VALUE_BYTES = ROW_BYTES - 8
"""What is left beside the key."""

_COLUMNS: dict[str, pa.DataType] = {"id": pa.int64(), "value": pa.binary()}
SCHEMA = pa.schema(_COLUMNS)
PRIMARY_KEY = "id"
_BATCHES = 64
"""Batches made before the clock starts and used in turn."""

Rows = pa.RecordBatch | list[dict[str, object]]


def rows_of(batch: int) -> Callable[[], Rows]:
    """Return what gives the next `batch` rows: a dict when it is one, as small inserts are written,
    else a record batch.
    """
    if batch > 1:
        batches = itertools.cycle([record_batch(start * batch, batch) for start in range(_BATCHES)])
        return lambda: next(batches)
    values = record_batch(0, _BATCHES)["value"].to_pylist()
    numbers = itertools.count()

    def next_row() -> Rows:
        number = next(numbers)
        return [{"id": number, "value": values[number % _BATCHES]}]

    return next_row


def record_batch(first: int, count: int) -> pa.RecordBatch:
    """Return `count` rows with keys from `first`."""
    bytes_of_all = np.random.default_rng(first).bytes(count * VALUE_BYTES)
    offsets = np.arange(count + 1, dtype=np.int32) * VALUE_BYTES
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(bytes_of_all)]
    values = pa.Array.from_buffers(pa.binary(), count, buffers)
    return pa.RecordBatch.from_arrays(
        [pa.array(np.arange(first, first + count)), values], schema=SCHEMA
    )


def inserts_of(node: Node, collection: str, batch: int) -> Callable[[], Awaitable[object]]:
    """Return what inserts the next `batch` rows each time it is called."""
    next_rows = rows_of(batch)
    return lambda: node.insert(collection, next_rows())


async def create(node: Node, name: str) -> str:
    """Create a collection for these rows and return its name."""
    await node.create_collection(name, SCHEMA, primary_key=PRIMARY_KEY)
    return name
