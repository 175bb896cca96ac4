"""Writes that go to the log on their own: large inserts, Arrow data, upserts, deletes, and bodies of open transactions.

In: rows or keys as callers have them. Out: append groups, in row order, each appended before the next is built, so that
memory holds one. All rows are checked, and all sizes known, before the first append: a bad row changes nothing. Converting
many rows happens in a thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa
from anyio import to_thread

from streamingnode.rows.row_shape import Keys, Rows, keys_to_batches, to_batches
from streamingnode.writing.append_groups import (
    TRANSACTION_OVERHEAD_BYTES,
    Write,
    as_transaction,
    delete_of,
    fitting_messages,
    insert_of,
    last_of_each_key,
    plan_slices,
    upsert_of,
)
from streamingnode.writing.deadline import within
from streamingnode.writing.results import WriteResult, combined, nothing_at, result_of
from streamingnode.writing.write_target import WriteTarget
from wal.append import AppendGroup

INLINE_ROWS_MAX = 4_096
"""More dicts than this are converted in a thread: about 2 ms of the event loop."""
INLINE_BYTES_MAX = 4 << 20
"""More Arrow data than this is checked in a thread."""

T = TypeVar("T")


@dataclass(slots=True)
class Progress:
    """How far a write has come, for whoever stops waiting for it."""

    group: AppendGroup | None = None
    groups_done: int = 0

    @property
    def begun(self) -> bool:
        """Whether something of the write is, or may be, in the log."""
        return self.groups_done > 0 or (self.group is not None and self.group.begun)


async def insert_rows(
    target: WriteTarget, partition_id: int, rows: Rows, *, bytes_max: int, txn_id: int, timeout: float | None
) -> WriteResult:
    """Insert rows as callers have them, within `timeout` seconds; raises as `Node.insert` does."""
    progress = Progress()

    async def write() -> WriteResult:
        batches = await checked_rows(target, rows)
        return await insert_batches(
            target, partition_id, batches, bytes_max=bytes_max, progress=progress, txn_id=txn_id
        )

    return await within(timeout, write, "the insert", begun=lambda: progress.begun)


async def upsert_rows(
    target: WriteTarget, partition_id: int, rows: Rows, *, bytes_max: int, txn_id: int, timeout: float | None
) -> WriteResult:
    """Upsert rows as callers have them, within `timeout` seconds; raises as `Node.upsert` does."""
    progress = Progress()

    async def write() -> WriteResult:
        batches = await checked_upsert_rows(target, rows)
        return await upsert_batches(
            target, partition_id, batches, bytes_max=bytes_max, progress=progress, txn_id=txn_id
        )

    return await within(timeout, write, "the upsert", begun=lambda: progress.begun)


async def delete_keys(
    target: WriteTarget, keys: Keys, *, bytes_max: int, txn_id: int, timeout: float | None
) -> WriteResult:
    """Delete keys as callers have them, within `timeout` seconds; raises as `Node.delete` does."""
    progress = Progress()

    async def write() -> WriteResult:
        batches = await checked_keys(target, keys)
        return await delete_batches(target, batches, bytes_max=bytes_max, progress=progress, txn_id=txn_id)

    return await within(timeout, write, "the delete", begun=lambda: progress.begun)


async def checked_rows(target: WriteTarget, rows: Rows) -> list[pa.RecordBatch]:
    """Return rows as batches that fit the collection. Raises `SchemaMismatch` or `InvalidArgument`."""
    return await _converted(rows, lambda: to_batches(rows, target.rows))


async def checked_upsert_rows(target: WriteTarget, rows: Rows) -> list[pa.RecordBatch]:
    """Return rows as batches that fit the collection, of each key only the last row."""

    def convert() -> list[pa.RecordBatch]:
        batches = to_batches(rows, target.rows)
        return last_of_each_key(batches, target.key_index) if batches else []

    return await _converted(rows, convert)


async def checked_keys(target: WriteTarget, keys: Keys) -> list[pa.RecordBatch]:
    """Return keys as one-column batches of the primary key's type. Raises as `checked_rows` does."""
    return await _converted(keys, lambda: keys_to_batches(keys, target.keys))


async def insert_batches(
    target: WriteTarget,
    partition_id: int,
    batches: Sequence[pa.RecordBatch],
    *,
    bytes_max: int,
    progress: Progress | None = None,
    txn_id: int = 0,
) -> WriteResult:
    """Append checked rows as inserts."""
    write = insert_of(target, partition_id, txn_id=txn_id)
    return await _append_all(target, write, batches, bytes_max, progress or Progress())


async def upsert_batches(
    target: WriteTarget,
    partition_id: int,
    batches: Sequence[pa.RecordBatch],
    *,
    bytes_max: int,
    progress: Progress,
    txn_id: int = 0,
) -> WriteResult:
    """Append checked rows of distinct keys as upserts: transactions of their own, or bodies of an open one."""
    write = upsert_of(target, partition_id, txn_id=txn_id)
    if txn_id:
        return await _append_all(target, write, batches, bytes_max, progress)
    bytes_max -= TRANSACTION_OVERHEAD_BYTES
    return await _append_all(target, write, batches, bytes_max, progress, whole=True)


async def delete_batches(
    target: WriteTarget,
    batches: Sequence[pa.RecordBatch],
    *,
    bytes_max: int,
    progress: Progress,
    txn_id: int = 0,
) -> WriteResult:
    """Append checked keys as deletes."""
    return await _append_all(target, delete_of(target, txn_id=txn_id), batches, bytes_max, progress)


async def _append_all(
    target: WriteTarget,
    write: Write,
    batches: Sequence[pa.RecordBatch],
    bytes_max: int,
    progress: Progress,
    *,
    whole: bool = False,
) -> WriteResult:
    if not batches:
        return nothing_at(await target.consistent_tick())
    results = []
    for batch in plan_slices(batches, write, bytes_max):
        for messages in fitting_messages(batch, write, bytes_max):
            group = progress.group = AppendGroup(as_transaction(messages) if whole else messages)
            results.append(result_of(await target.append(group)))
            progress.groups_done += 1
    return combined(results)


async def _converted(rows: Rows | Keys, convert: Callable[[], T]) -> T:
    if _is_small(rows):
        return convert()
    return await to_thread.run_sync(convert)


def _is_small(rows: Rows | Keys) -> bool:
    if isinstance(rows, (pa.RecordBatch, pa.Table, pa.Array, pa.ChunkedArray)):
        return rows.get_total_buffer_size() <= INLINE_BYTES_MAX or rows.nbytes <= INLINE_BYTES_MAX
    return not isinstance(rows, Sequence) or len(rows) <= INLINE_ROWS_MAX
