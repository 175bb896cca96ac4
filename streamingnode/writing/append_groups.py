"""Batches of rows and keys made into messages, and cut so that each append group fits the log.

In: checked batches. Out: messages of at most the bytes of one group, the group's size known before anything is appended:
a row that can never fit is refused while nothing has happened yet. Who is next: the WAL. No I/O.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamingnode.rows.arrow_types import AnyArray
from streamingnode.rows.routing import Routed, route
from streamingnode.writing.write_target import WriteTarget
from wal.errors import TooLarge
from wal.headers import BeginTxnHeader, CommitTxnHeader, DeleteHeader, InsertHeader
from wal.message import MESSAGE_OVERHEAD_BYTES, MutableMessage
from wal.message_type import MessageType

TRANSACTION_OVERHEAD_BYTES = 2 * MESSAGE_OVERHEAD_BYTES
"""What `as_transaction` adds to its bodies."""

_PAYLOAD_POOL = pa.system_memory_pool()
"""Arrow's own pool gives pages back to the system that the next payload needs again: up to 100 us of page faults for
100 KiB, on the event loop."""

_FILL = 0.9
"""How full groups are planned: shards, and an upsert's keys, add a little to the rows themselves."""


@dataclass(frozen=True, slots=True)
class Write:
    """How one kind of write turns a batch that is not empty into messages, and how large they are on one shard."""

    build: Callable[[pa.RecordBatch], list[MutableMessage]]
    size_bytes: Callable[[pa.RecordBatch], int]


def insert_messages(target: WriteTarget, partition_id: int, routed: Routed, *, txn_id: int = 0) -> list[MutableMessage]:
    """Return one insert message for each shard that gets rows."""
    info = target.info
    return [
        MutableMessage(
            MessageType.INSERT,
            InsertHeader(info.id, partition_id, info.schema_version, rows.num_rows, part=part),
            info.vchannels[shard],
            _encoded(rows),
            txn_id,
        )
        for part, (shard, rows) in enumerate(routed.parts)
    ]


def delete_messages(target: WriteTarget, keys: pa.RecordBatch, *, txn_id: int = 0) -> list[MutableMessage]:
    """Return one delete message for each shard of a one-column batch of keys."""
    info = target.info
    return [
        MutableMessage(
            MessageType.DELETE,
            DeleteHeader(info.id, rows.num_rows, part=part),
            info.vchannels[shard],
            _encoded(rows),
            txn_id,
        )
        for part, (shard, rows) in enumerate(route(keys, key_index=0, shards=len(info.vchannels)).parts)
    ]


def insert_of(target: WriteTarget, partition_id: int, *, txn_id: int = 0) -> Write:
    """Return what an insert does with a batch of rows."""

    def build(batch: pa.RecordBatch) -> list[MutableMessage]:
        routed = route(batch, key_index=target.key_index, shards=len(target.info.vchannels))
        return insert_messages(target, partition_id, routed, txn_id=txn_id)

    return Write(build, _message_bytes)


def delete_of(target: WriteTarget, *, txn_id: int = 0) -> Write:
    """Return what a delete does with a one-column batch of keys."""
    return Write(lambda keys: delete_messages(target, keys, txn_id=txn_id), _message_bytes)


def upsert_of(target: WriteTarget, partition_id: int, *, txn_id: int = 0) -> Write:
    """Return what an upsert does with a batch of rows of distinct keys: deletes, then inserts."""
    insert = insert_of(target, partition_id, txn_id=txn_id)

    def keys_of(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([batch.column(target.key_index)], schema=target.keys.schema)

    def build(batch: pa.RecordBatch) -> list[MutableMessage]:
        return delete_messages(target, keys_of(batch), txn_id=txn_id) + insert.build(batch)

    return Write(build, lambda batch: _message_bytes(keys_of(batch)) + _message_bytes(batch))


def as_transaction(bodies: list[MutableMessage]) -> list[MutableMessage]:
    """Return bodies as a whole transaction in one group."""
    begin = MutableMessage(MessageType.BEGIN_TXN, BeginTxnHeader(keepalive_ms=0))
    commit = MutableMessage(MessageType.COMMIT_TXN, CommitTxnHeader())
    return [begin, *bodies, commit]


def plan_slices(batches: Sequence[pa.RecordBatch], write: Write, bytes_max: int) -> list[pa.RecordBatch]:
    """Return views of batches, in order, whose messages take well under `bytes_max`; those of a row alone just fit.

    Raises `TooLarge` for a row whose messages do not, so call it before the first append.
    """
    slices: list[pa.RecordBatch] = []
    for batch in batches:
        _plan(batch, write, bytes_max, slices)
    return slices


def check_rows_fit(batches: Sequence[pa.RecordBatch], bytes_max: int) -> None:
    """Raise `TooLarge` for a row that no insert could write, before there is a collection to insert into."""
    plan_slices(batches, Write(lambda _: [], _message_bytes), bytes_max)


def fitting_messages(batch: pa.RecordBatch, write: Write, bytes_max: int) -> Iterator[list[MutableMessage]]:
    """Yield the messages of a planned slice, halved while its shards together take more than `bytes_max`."""
    messages = write.build(batch)
    if batch.num_rows == 1 or sum(message.size_bytes for message in messages) <= bytes_max:
        yield messages
        return
    half = batch.num_rows // 2
    yield from fitting_messages(batch.slice(0, half), write, bytes_max)
    yield from fitting_messages(batch.slice(half), write, bytes_max)


def last_of_each_key(batches: Sequence[pa.RecordBatch], key_index: int) -> list[pa.RecordBatch]:
    """Return the batches without rows whose key comes again later: what upserting the rows one by one would leave."""
    keys: AnyArray = pa.chunked_array([batch.column(key_index) for batch in batches]).combine_chunks()
    if isinstance(keys, pa.ChunkedArray):
        raise TooLarge("over 2 GiB of keys in one upsert — upsert fewer rows at a time")
    if len(keys) == 1 or pc.count_distinct(keys).as_py() == len(keys):
        return list(batches)
    codes = keys.dictionary_encode().indices.to_numpy()
    _, last_from_end = np.unique(codes[::-1], return_index=True)
    keep = np.zeros(len(codes), bool)
    keep[len(codes) - 1 - last_from_end] = True
    ends = np.cumsum([batch.num_rows for batch in batches])
    masks = np.split(keep, ends[:-1])
    kept = [batch.filter(pa.array(mask)) for batch, mask in zip(batches, masks, strict=True)]
    return [batch for batch in kept if batch.num_rows]


def _encoded(batch: pa.RecordBatch) -> memoryview:
    return memoryview(batch.serialize(memory_pool=_PAYLOAD_POOL))


def _plan(batch: pa.RecordBatch, write: Write, bytes_max: int, slices: list[pa.RecordBatch]) -> None:
    size_bytes = write.size_bytes(batch)
    rows = batch.num_rows
    if size_bytes <= (bytes_max if rows == 1 else bytes_max * _FILL):
        slices.append(batch)
    elif rows == 1:
        raise TooLarge(
            f"one row takes {size_bytes} bytes, a write {bytes_max} — keep large values elsewhere, by reference"
        )
    else:
        step = min(-(-rows // 2), max(1, int(rows * bytes_max * _FILL / size_bytes)))
        for start in range(0, rows, step):
            _plan(batch.slice(start, step), write, bytes_max, slices)


def _message_bytes(batch: pa.RecordBatch) -> int:
    return pa.ipc.get_record_batch_size(batch) + MESSAGE_OVERHEAD_BYTES
