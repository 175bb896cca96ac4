"""Writes on their way to the log: rows and keys made into append groups, and appended in order within a time.

In: rows or keys as callers have them, and a `WriteTarget`: what a write must know about a collection, worked out once and
kept until the collection changes. Out: append groups, in row order, each appended before the next is built, so that memory
holds one. All rows are checked, and all sizes known, before the first append: a bad row changes nothing. Converting many
rows happens in a thread.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeVar

import anyio
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from anyio import to_thread

from interceptors.errors import PartitionNotFound
from interceptors.shard.catalog import CollectionInfo
from streamingnode.errors import DeadlineExceeded
from streamingnode.names import DEFAULT_PARTITION, not_text
from streamingnode.rows.rows import (
    Keys,
    Routed,
    Rows,
    RowShape,
    key_shape,
    keys_to_batches,
    route,
    row_shape,
    to_batches,
)
from streamingnode.rows.schema import AnyArray, decode_schema
from streamingnode.writing.result import WriteResult, combined, nothing_at, result_of
from wal.errors import InvalidArgument, Overloaded, TooLarge
from wal.headers import BeginTxnHeader, CommitTxnHeader, DeleteHeader, InsertHeader, MessageType
from wal.log import Append, AppendGroup
from wal.message import MESSAGE_OVERHEAD_BYTES, MutableMessage

T = TypeVar("T")

CACHED_MAX = 1_024
"""Targets kept; one is rebuilt in about 50 us."""


@dataclass(frozen=True, slots=True, eq=False)
class WriteTarget:
    """One collection as writes see it; `append` is that of its pchannel, `consistent_tick` that of the node."""

    info: CollectionInfo
    pchannel: str
    append: Append
    consistent_tick: Callable[[], Awaitable[int]]
    rows: RowShape
    keys: RowShape
    key_index: int
    partitions: Mapping[str, int]

    def partition_id(self, partition: str | None) -> int:
        """Return the id of a live partition, the default one for None. Raises `PartitionNotFound` or `InvalidArgument`."""
        if partition is not None and not isinstance(partition, str):
            raise not_text("partition", partition)
        found = self.partitions.get(DEFAULT_PARTITION if partition is None else partition)
        if found is None:
            raise PartitionNotFound(
                f"collection {self.info.name!r} has no partition {partition!r}, only "
                f"{', '.join(sorted(self.partitions)[:20])} — create it first, or choose one that is there"
            )
        return found


class WriteTargets:
    """The targets of the collections written lately; lives on the event loop."""

    def __init__(self, appends: Mapping[str, Append], consistent_tick: Callable[[], Awaitable[int]]) -> None:
        self._appends = appends
        self._consistent_tick = consistent_tick
        self._targets: dict[str, WriteTarget] = {}

    def target(self, info: CollectionInfo) -> WriteTarget:
        """Return the target of a live collection."""
        target = self._targets.get(info.name)
        if target is not None and target.info is info:
            return target
        if len(self._targets) >= CACHED_MAX:
            self._targets.clear()
        target = self._targets[info.name] = _target_of(info, self._appends, self._consistent_tick)
        return target


def pchannel_of(vchannel: str) -> str:
    """Return the pchannel that a vchannel, `<pchannel>_<collection id>v<shard>`, lives on."""
    return vchannel.rpartition("_")[0]


def _target_of(
    info: CollectionInfo, appends: Mapping[str, Append], consistent_tick: Callable[[], Awaitable[int]]
) -> WriteTarget:
    shape = row_shape(decode_schema(info.schema), primary_key=info.primary_key)
    pchannel = pchannel_of(info.vchannels[0])
    return WriteTarget(
        info=info,
        pchannel=pchannel,
        append=appends[pchannel],
        consistent_tick=consistent_tick,
        rows=shape,
        keys=key_shape(shape),
        key_index=shape.schema.get_field_index(info.primary_key),
        partitions={each.name: each.id for each in info.partitions if not each.dropped_tick},
    )


# --- append groups ------------------------------------------------------------------------------------------------------

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


# --- writes of one call -------------------------------------------------------------------------------------------------

INLINE_ROWS_MAX = 4_096
"""More dicts than this are converted in a thread: about 2 ms of the event loop."""
INLINE_BYTES_MAX = 4 << 20
"""More Arrow data than this is checked in a thread."""


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


# --- deadlines: `timeout=` in seconds, and what is known about a call that ran into it ----------------------------------


async def within(
    timeout: float | None, call: Callable[[], Awaitable[T]], what: str, *, begun: Callable[[], bool] = lambda: True
) -> T:
    """Return what `call` returns, if it does within `timeout` seconds; None waits for ever.

    Raises:
        Overloaded: the time is up and `begun` says that nothing was done.
        DeadlineExceeded: the time is up and the call may or may not take effect; it is also a `TimeoutError`.
    """
    if timeout is None:
        return await call()
    with anyio.move_on_after(_checked(timeout)):
        return await call()
    raise expired(timeout, what, begun=begun())


async def read_within(timeout: float | None, call: Callable[[], Awaitable[T]], what: str) -> T:
    """Return what `call`, which changes nothing, returns within `timeout` seconds. Raises `DeadlineExceeded`."""
    if timeout is None:
        return await call()
    with anyio.move_on_after(_checked(timeout)):
        return await call()
    raise DeadlineExceeded(f"{what} took longer than {timeout:g} s and changed nothing — give it more time")


def _checked(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout > 0:
        raise InvalidArgument(f"timeout={timeout!r} — pass a number of seconds above 0, or None to wait for ever")
    return timeout


def expired(timeout: float, what: str, *, begun: bool) -> DeadlineExceeded | Overloaded:
    """Return the error of a call that took longer than `timeout` seconds."""
    if begun:
        return DeadlineExceeded(
            f"{what} was not acknowledged within {timeout:g} s and may still take effect — "
            "read back, or repeat it if doing it twice is harmless"
        )
    return Overloaded(f"{what} did not reach the log within {timeout:g} s and did nothing — try again later")
