"""Sends the rows of a batch to the shards their primary keys hash to.

In: a batch and the number of shards. Out: one batch per shard that gets rows, shards ascending, rows of one shard in their
old order. A collection of one shard costs nothing. The hash is `wal.shard_hash`; here is only how Arrow stores keys.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from streamingnode.rows.arrow_types import AnyArray
from wal.shard_hash import Hashes, hash_bytes, hash_integers, shards_of

SHARDS_MAX = 256
"""Shards of one collection; each costs every insert a message, and every cut a file."""

_NO_BYTES: NDArray[np.uint8] = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Routed:
    """A batch by shard; `shard_of_row` is None when every row goes to the first of `parts`."""

    parts: tuple[tuple[int, pa.RecordBatch], ...]
    shard_of_row: NDArray[np.int64] | None = None


def route(batch: pa.RecordBatch, *, key_index: int, shards: int) -> Routed:
    """Return the rows of a batch that is not empty by shard; `key_index` is the primary key's column."""
    if shards == 1:
        return Routed(((0, batch),))
    targets = shards_of(key_hashes(batch.column(key_index)), shards)
    counts = np.bincount(targets, minlength=shards)
    used = np.flatnonzero(counts)
    if len(used) == 1:
        return Routed(((int(used[0]), batch),))
    # A stable sort keeps rows of a shard in order; 16-bit numbers are sorted by radix, in linear time.
    by_shard = batch.take(np.argsort(targets.astype(np.uint16), kind="stable"))
    ends = np.cumsum(counts)
    parts = tuple((int(s), by_shard.slice(int(ends[s] - counts[s]), int(counts[s]))) for s in used)
    return Routed(parts, targets)


def key_hashes(keys: AnyArray) -> Hashes:
    """Return the hash of each primary key; none of them is null."""
    if pt.is_string(keys.type) or pt.is_binary(keys.type):
        return _hash_variable(keys, np.int32)
    if pt.is_large_string(keys.type) or pt.is_large_binary(keys.type):
        return _hash_variable(keys, np.int64)
    if pt.is_date32(keys.type):
        keys = keys.cast(pa.int32())
    return hash_integers(keys.cast(pa.int64()).to_numpy())


def _hash_variable(keys: AnyArray, offset_type: type[np.int32] | type[np.int64]) -> Hashes:
    _, offset_buffer, data_buffer = keys.buffers()
    if not len(keys) or offset_buffer is None:
        return np.empty(0, np.uint64)
    offsets = np.frombuffer(memoryview(offset_buffer), offset_type)[keys.offset : keys.offset + len(keys) + 1]
    data = _NO_BYTES if data_buffer is None else np.frombuffer(memoryview(data_buffer), np.uint8)
    return hash_bytes(data, offsets.astype(np.int64))
