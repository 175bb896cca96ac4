"""Writes on their way to the log: rows and keys made into append groups, and appended in order within a time.

In: rows or keys as callers have them. Out: append groups, in row order, each appended before the next is built, so that
memory holds one. All rows are checked, and all sizes known, before the first append: a bad row changes nothing.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import anyio
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from anyio import to_thread

from interceptors.errors import PartitionNotFound
from interceptors.shard.catalog import DEFAULT_PARTITION, CollectionInfo
from streamingnode.errors import DeadlineExceeded
from streamingnode.rows import Keys, Routed, Rows, RowShape, key_shape, keys_to_batches, route, row_shape, to_batches
from streamingnode.schema import AnyArray, decode_schema
from streamingnode.writing.result import WriteResult, combined, nothing_at, result_of
from wal.adaptor import WalLimits
from wal.errors import InvalidArgument, Overloaded, TooLarge
from wal.headers import BeginTxnHeader, CommitTxnHeader, DeleteHeader, InsertHeader, MessageType
from wal.log import Append, AppendGroup
from wal.message import MESSAGE_OVERHEAD_BYTES, MutableMessage
from wal.queue import PendingBytes

T = TypeVar("T")

TARGETS_MAX = 1_024
"""Collections whose shape is kept; it is worked out again in about 50 us."""
TRANSACTION_OVERHEAD_BYTES = 2 * MESSAGE_OVERHEAD_BYTES
"""What `as_transaction` adds to its bodies."""
INLINE_ROWS_MAX = 4_096
"""More dicts than this are converted in a thread: about 2 ms of the event loop."""
INLINE_BYTES_MAX = 4 << 20
"""More Arrow data than this is checked in a thread."""


@dataclass(frozen=True, slots=True, eq=False)
class WriteTarget:
    """One collection as writes see it: what they must know, worked out once and kept until the collection changes."""

    info: CollectionInfo
    rows: RowShape
    keys: RowShape
    key_index: int
    partitions: Mapping[str, int]

    @classmethod
    def of(cls, info: CollectionInfo) -> "WriteTarget":
        """Return the target of a live collection."""
        shape = row_shape(decode_schema(info.schema), primary_key=info.primary_key)
        return cls(
            info=info,
            rows=shape,
            keys=key_shape(shape),
            key_index=shape.schema.get_field_index(info.primary_key),
            partitions={each.name: each.id for each in info.partitions if not each.dropped_tick},
        )

    def partition_id(self, partition: str | None) -> int:
        """Return the id of a live partition, the default one for None. Raises `PartitionNotFound` or `InvalidArgument`."""
        if partition is not None and not isinstance(partition, str):
            raise InvalidArgument(f"a partition name is text, not {type(partition).__name__} — pass a str")
        found = self.partitions.get(DEFAULT_PARTITION if partition is None else partition)
        if found is None:
            raise PartitionNotFound(
                f"collection {self.info.name!r} has no partition {partition!r}, only "
                f"{', '.join(sorted(self.partitions)[:20])} — create it first, or choose one that is there"
            )
        return found


class Writes:
    """What all writes of a node share: its log, their bounds, and the collections written lately. On the event loop."""

    def __init__(
        self,
        append: Append,
        consistent_tick: Callable[[], Awaitable[int]],
        find: Callable[[str], CollectionInfo],
        *,
        limits: WalLimits,
        pending: PendingBytes,
    ) -> None:
        self.append, self.consistent_tick = append, consistent_tick
        self.limits, self.pending = limits, pending
        self._find = find
        self._targets: dict[str, WriteTarget] = {}

    def target(self, collection: str) -> WriteTarget:
        """Return the target of a live collection. Raises `CollectionNotFound`, or `OnShutdown` when the node is closed."""
        info = self._find(collection)
        target = self._targets.get(collection)
        if target is None or target.info is not info:
            if len(self._targets) >= TARGETS_MAX:
                self._targets.clear()
            target = self._targets[collection] = WriteTarget.of(info)
        return target


# --- from batches to messages -------------------------------------------------------------------------------------------

_PAYLOAD_POOL = pa.system_memory_pool()
"""Arrow's own pool gives pages back to the system that the next payload needs again: up to 100 us of page faults for
100 KiB, on the event loop."""

_FILL = 0.9
"""How full groups are planned: shards, and an upsert's keys, add a little to the rows themselves."""


@dataclass(frozen=True, slots=True)
class Write:
    """One kind of write on one collection: how rows or keys become batches, and a batch that is not empty messages."""

    what: str
    check: Callable[[Any], list[pa.RecordBatch]]
    build: Callable[[pa.RecordBatch], list[MutableMessage]]
    size_bytes: Callable[[pa.RecordBatch], int]
    """What the messages of a batch take on one shard."""
    whole: bool = False
    """Whether each group is a transaction of its own."""


def insert_of(target: WriteTarget, partition_id: int, *, txn_id: int = 0) -> Write:
    """Return an insert of rows."""

    def build(batch: pa.RecordBatch) -> list[MutableMessage]:
        routed = route(batch, key_index=target.key_index, shards=len(target.info.vchannels))
        return insert_messages(target, partition_id, routed, txn_id=txn_id)

    return Write("the insert", lambda rows: to_batches(rows, target.rows), build, _message_bytes)


def delete_of(target: WriteTarget, *, txn_id: int = 0) -> Write:
    """Return a delete of keys, which lie in one-column batches."""
    return Write(
        "the delete",
        lambda keys: keys_to_batches(keys, target.keys),
        lambda keys: _delete_messages(target, keys, txn_id),
        _message_bytes,
    )


def upsert_of(target: WriteTarget, partition_id: int, *, txn_id: int = 0) -> Write:
    """Return an upsert: of each key the last row, deletes before inserts; a transaction unless it is in one."""
    insert = insert_of(target, partition_id, txn_id=txn_id)

    def check(rows: Rows) -> list[pa.RecordBatch]:
        batches = insert.check(rows)
        return last_of_each_key(batches, target.key_index) if batches else []

    def keys_of(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([batch.column(target.key_index)], schema=target.keys.schema)

    def build(batch: pa.RecordBatch) -> list[MutableMessage]:
        return _delete_messages(target, keys_of(batch), txn_id) + insert.build(batch)

    def size_bytes(batch: pa.RecordBatch) -> int:
        return _message_bytes(keys_of(batch)) + _message_bytes(batch)

    return Write("the upsert", check, build, size_bytes, whole=not txn_id)


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


def _delete_messages(target: WriteTarget, keys: pa.RecordBatch, txn_id: int) -> list[MutableMessage]:
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


def as_transaction(bodies: list[MutableMessage]) -> list[MutableMessage]:
    """Return bodies as a whole transaction in one group."""
    begin = MutableMessage(MessageType.BEGIN_TXN, BeginTxnHeader(keepalive_ms=0))
    commit = MutableMessage(MessageType.COMMIT_TXN, CommitTxnHeader())
    return [begin, *bodies, commit]


def _encoded(batch: pa.RecordBatch) -> memoryview:
    return memoryview(batch.serialize(memory_pool=_PAYLOAD_POOL))


def _message_bytes(batch: pa.RecordBatch) -> int:
    return pa.ipc.get_record_batch_size(batch) + MESSAGE_OVERHEAD_BYTES


# --- what fits into one group -------------------------------------------------------------------------------------------


def groups_of(write: Write, batches: Sequence[pa.RecordBatch], bytes_max: int) -> Iterator[list[MutableMessage]]:
    """Return the messages of each append group of at most `bytes_max`, built as they are asked for; see `bodies_of`."""
    if not write.whole:
        return bodies_of(write, batches, bytes_max)
    return map(as_transaction, bodies_of(write, batches, bytes_max - TRANSACTION_OVERHEAD_BYTES))


def bodies_of(write: Write, batches: Sequence[pa.RecordBatch], bytes_max: int) -> Iterator[list[MutableMessage]]:
    """Return messages, in row order, at most `bytes_max` at a time. Raises `TooLarge` at once for a row that never fits."""
    slices = plan_slices(batches, write, bytes_max)
    return (messages for batch in slices for messages in _halved(batch, write, bytes_max))


def plan_slices(batches: Sequence[pa.RecordBatch], write: Write, bytes_max: int) -> list[pa.RecordBatch]:
    """Return views of batches, in order, whose messages take well under `bytes_max`; those of a row alone just fit.

    Raises `TooLarge` for a row whose messages do not, so call it before the first append.
    """
    slices: list[pa.RecordBatch] = []
    for batch in batches:
        rows, size_bytes = batch.num_rows, write.size_bytes(batch)
        if size_bytes <= (bytes_max if rows == 1 else bytes_max * _FILL):
            slices.append(batch)
        elif rows == 1:
            raise TooLarge(
                f"one row takes {size_bytes} bytes, a write {bytes_max} — keep large values elsewhere, by reference"
            )
        else:
            step = min(-(-rows // 2), max(1, int(rows * bytes_max * _FILL / size_bytes)))
            slices += plan_slices([batch.slice(start, step) for start in range(0, rows, step)], write, bytes_max)
    return slices


def check_rows_fit(batches: Sequence[pa.RecordBatch], bytes_max: int) -> None:
    """Raise `TooLarge` for a row that no insert could write, before there is a collection to insert into."""
    plan_slices(batches, Write("", lambda _: [], lambda _: [], _message_bytes), bytes_max)


def _halved(batch: pa.RecordBatch, write: Write, bytes_max: int) -> Iterator[list[MutableMessage]]:
    """Yield the messages of a planned slice, halved while its shards together take more than `bytes_max`."""
    messages = write.build(batch)
    if batch.num_rows == 1 or sum(message.size_bytes for message in messages) <= bytes_max:
        yield messages
        return
    half = batch.num_rows // 2
    yield from _halved(batch.slice(0, half), write, bytes_max)
    yield from _halved(batch.slice(half), write, bytes_max)


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


# --- one call -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Progress:
    """How far a write has come, for whoever stops waiting for it."""

    group: AppendGroup | None = None
    groups_done: int = 0

    @property
    def begun(self) -> bool:
        """Whether something of the write is, or may be, in the log."""
        return self.groups_done > 0 or (self.group is not None and self.group.begun)


def append_rows(writes: Writes, write: Write, rows: Rows | Keys, *, timeout: float | None) -> Awaitable[WriteResult]:
    """Write rows or keys as callers have them, within `timeout` seconds; to be awaited at once. Raises as `Node.insert`."""
    progress = Progress()

    async def run() -> WriteResult:
        return await append_batches(writes, write, await checked(write, rows), progress)

    return within(timeout, run, write.what, begun=lambda: progress.begun)


async def append_batches(
    writes: Writes, write: Write, batches: Sequence[pa.RecordBatch], progress: Progress
) -> WriteResult:
    """Write batches that were checked."""
    if not batches:
        return nothing_at(await writes.consistent_tick())
    results = []
    for messages in groups_of(write, batches, writes.limits.group_bytes_max):
        progress.group = AppendGroup(messages)
        results.append(result_of(await writes.append(progress.group)))
        progress.groups_done += 1
    return combined(results)


async def checked(write: Write, rows: Rows | Keys) -> list[pa.RecordBatch]:
    """Return rows or keys as batches that fit the collection; many are looked at in a thread. Raises `SchemaMismatch`."""
    return write.check(rows) if _is_small(rows) else await to_thread.run_sync(write.check, rows)


def _is_small(rows: Rows | Keys) -> bool:
    if isinstance(rows, (pa.RecordBatch, pa.Table, pa.Array, pa.ChunkedArray)):
        return rows.get_total_buffer_size() <= INLINE_BYTES_MAX or rows.nbytes <= INLINE_BYTES_MAX
    return not isinstance(rows, Sequence) or len(rows) <= INLINE_ROWS_MAX


def check_txn_id(txn_id: int) -> int:
    """Return the id of a transaction, 0 for none. Raises `InvalidArgument`."""
    if isinstance(txn_id, bool) or not isinstance(txn_id, int):
        raise InvalidArgument(f"txn_id={txn_id!r} is no transaction — pass what begin_transaction() returned")
    return txn_id


# --- deadlines: `timeout=` in seconds, and what is known about a call that ran into it ----------------------------------


def within(
    timeout: float | None,
    call: Callable[[], Awaitable[T]],
    what: str,
    *,
    changes: bool = True,
    begun: Callable[[], bool] = lambda: True,
) -> Awaitable[T]:
    """Return, to be awaited at once, what `call` returns, if it does within `timeout` seconds; None waits for ever.

    Raises:
        Overloaded: the time is up and `begun` says that nothing was done.
        DeadlineExceeded: the time is up and the call, if it `changes` something, may or may not take effect; it is also a
            `TimeoutError`.
    """
    return call() if timeout is None else _within(timeout, call, what, changes=changes, begun=begun)


async def _within(
    timeout: float, call: Callable[[], Awaitable[T]], what: str, *, changes: bool, begun: Callable[[], bool]
) -> T:
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout > 0:
        raise InvalidArgument(f"timeout={timeout!r} — pass a number of seconds above 0, or None to wait for ever")
    with anyio.move_on_after(timeout):
        return await call()
    if not changes:
        raise DeadlineExceeded(f"{what} took longer than {timeout:g} s and changed nothing — give it more time")
    if begun():
        raise DeadlineExceeded(
            f"{what} was not acknowledged within {timeout:g} s and may still take effect — "
            "read back, or repeat it if doing it twice is harmless"
        )
    raise Overloaded(f"{what} did not reach the log within {timeout:g} s and did nothing — try again later")
