"""Writes on their way to the log: rows and keys made into append groups, and appended in order
within a time.

In: rows or keys as callers have them. Out: append groups, in row order, each appended before the
next is built, so that memory holds one. All rows are checked, and all sizes known, before the first
append: a bad row changes nothing.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from operator import itemgetter
from typing import Any, TypeVar

import anyio
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from interceptors.shard.catalog import CollectionInfo
from streamingnode.backend import Backend
from streamingnode.errors import DeadlineExceeded
from streamingnode.rows import Keys, Rows, keys_to_batches, to_batches
from streamingnode.writing.target import (
    PLAIN_ROWS_MAX,
    BatchTarget,
    Kind,
    WriteTarget,
    batch_bytes,
    messages_of,
)
from wal.append import AppendGroup, AppendResult
from wal.errors import (
    Indeterminate,
    InvalidArgument,
    Overloaded,
    StreamingNodeError,
    TooLarge,
    shown,
)
from wal.message import MESSAGE_OVERHEAD_BYTES, TRANSACTION_OVERHEAD_BYTES, MutableMessage
from wal.position import MessageId
from wal.rows import Piece
from wal.runtime import in_thread
from wal.timetick import TICK_MAX

T = TypeVar("T")
WriteResult = AppendResult

NO_TXN = 0
TARGETS_MAX = 4_096
"""Most write targets that are kept; making one again takes about 50 us."""
INLINE_ROWS_MAX = 4_096
"""More dicts than this are converted in a thread: about 2 ms of the event loop."""
INLINE_BYTES_MAX = 4 << 20
"""More Arrow data than this is checked in a thread."""

_FILL = 0.9
"""How full slices are planned: rows differ in size."""


class Write(msgspec.Struct, frozen=True, eq=False, gc=False):
    """An insert, an upsert or a delete on one collection: how rows or keys become append groups.

    An upsert takes of each key the last row, and deletes before it inserts; each of its groups is a
    transaction, unless `txn_id` says that it is in one.
    """

    kind: Kind
    into: tuple[BatchTarget, ...]
    """Where its deletes go, and its rows."""
    txn_id: int = 0

    def plain(self, rows: Rows | Keys, bytes_max: int) -> tuple[Piece, ...] | None:
        """Return a few plain rows or keys, checked and copied, if they certainly fit one group of
        `bytes_max`.

        Returns None for values that need Arrow.
        """
        if not isinstance(rows, (list, tuple)) or not 0 < len(rows) <= PLAIN_ROWS_MAX:
            return None
        kind = self.kind
        into = self.into[-1]
        taken = into.plain.take(rows, are_keys=kind == "delete")
        if taken is None:
            return None
        cells, size_bytes = taken
        # Whether they fit for sure, as a message on each shard, and twice for an upsert with begin
        # and commit.
        if 2 * (size_bytes + into.plain_overhead_bytes) > bytes_max:
            return None
        piece = Piece(into, cells, size_bytes + MESSAGE_OVERHEAD_BYTES)
        if kind != "upsert":
            return (piece,)
        key_index = into.shape.key_index
        keys = tuple(zip(map(itemgetter(key_index), cells)))
        if len(keys) > 1 and len(set(keys)) < len(keys):
            return None  # Arrow finds the last row of each key
        return Piece(self.into[0], keys, size_bytes + MESSAGE_OVERHEAD_BYTES), piece

    def at_once(self, rows: Rows | Keys, bytes_max: int) -> AppendGroup | None:
        """Return the one group, of at most `bytes_max`, that writes a few plain values or a small
        batch; the batch is not copied.

        Returns None for values that may need several groups or a thread. Raises `SchemaMismatch`.
        """
        if type(rows) is not pa.RecordBatch:
            plain = self.plain(rows, bytes_max)
            return None if plain is None else self.group(plain)
        if (
            not rows.num_rows
            or (self.kind == "upsert" and rows.num_rows > 1)
            or not _is_small(rows)
        ):
            return None
        group = self.group(self.pieces(self._batches(rows)[0]))
        return group if group.size_bytes <= bytes_max else None

    async def check(self, rows: Rows | Keys) -> list[pa.RecordBatch]:
        """Return rows or keys as batches that fit the schema; many are converted in a thread.
        Raises `SchemaMismatch`.
        """
        return self._batches(rows) if _is_small(rows) else await in_thread(self._batches, rows)

    def _batches(self, rows: Any) -> list[pa.RecordBatch]:
        shape = self.into[-1].shape
        if self.kind == "delete":
            return keys_to_batches(rows, shape)
        batches = to_batches(rows, shape)
        return (
            last_of_each_key(batches, shape.key_index)
            if self.kind == "upsert" and batches
            else batches
        )

    def slices(self, batches: Sequence[pa.RecordBatch], bytes_max: int) -> list[pa.RecordBatch]:
        """Return views of batches, in row order, of which each is a group of at most `bytes_max`.
        Raises `TooLarge`.
        """
        overhead_bytes = (
            TRANSACTION_OVERHEAD_BYTES if self.kind == "upsert" and not self.txn_id else 0
        )
        return slices_within(batches, bytes_max - overhead_bytes, self.size_bytes)

    def whole(self, slices: Sequence[pa.RecordBatch], bytes_max: int) -> pa.RecordBatch:
        """Return slices as the rows of one group of at most `bytes_max`. Raises `TooLarge`."""
        if sum(map(self.size_bytes, slices)) <= bytes_max:  # else it is not worth a copy
            # stubs lack it
            whole: pa.RecordBatch = pa.concat_batches(slices)  # type: ignore[attr-defined]
            if self.size_bytes(whole) <= bytes_max:
                return whole
        raise TooLarge(
            f"the {self.kind} takes more than {bytes_max} bytes, and a write with txn_id= is one "
            "append group — write it in a block, which streams: async with node.transaction()"
        )

    def pieces(self, rows: pa.RecordBatch) -> list[Piece]:
        """Return the pieces that write these rows or keys."""
        parts = [(into, into.part_of(rows)) for into in self.into]
        return [Piece(into, part, into.size_bytes(part)) for into, part in parts]

    def group(self, pieces: Sequence[Piece]) -> AppendGroup:
        """Return the group that writes pieces."""
        if self.txn_id:
            return AppendGroup([*messages_of(pieces, self.txn_id)])
        is_transaction = self.kind == "upsert"
        size_bytes = TRANSACTION_OVERHEAD_BYTES * is_transaction + sum(
            [piece.size for piece in pieces]
        )
        return AppendGroup(pieces=pieces, is_transaction=is_transaction, rows_bytes=size_bytes)

    def size_bytes(self, rows: pa.RecordBatch) -> int:
        """Return what the messages of these rows take at most; of one row, exactly that."""
        return sum([piece.size for piece in self.pieces(rows)])


def messages_within(
    messages: Iterable[MutableMessage], bytes_max: int
) -> Iterator[list[MutableMessage]]:
    """Yield messages, in order, in groups of at most `bytes_max`. Rows take more in messages of
    their own than they were planned to take together.
    """
    group: list[MutableMessage] = []
    size_bytes = 0
    for message in messages:
        if group and size_bytes + message.size_bytes > bytes_max:
            yield group
            group = []
            size_bytes = 0
        group.append(message)
        size_bytes += message.size_bytes
    yield group


def slices_within(
    batches: Sequence[pa.RecordBatch], bytes_max: int, size_bytes: Callable[[pa.RecordBatch], int]
) -> list[pa.RecordBatch]:
    """Return views of batches, in order, of at most `bytes_max` each. Raises `TooLarge` for a row
    that alone has more.
    """
    slices: list[pa.RecordBatch] = []
    for batch in batches:
        rows = batch.num_rows
        size = size_bytes(batch)
        if size <= bytes_max:
            slices.append(batch)
        elif rows == 1:
            raise TooLarge(
                f"one row takes {size} bytes, a write {bytes_max} — keep large values elsewhere, "
                "by reference"
            )
        else:
            step = min(-(-rows // 2), max(1, int(rows * bytes_max * _FILL / size)))
            slices += slices_within(
                [batch.slice(start, step) for start in range(0, rows, step)], bytes_max, size_bytes
            )
    return slices


def check_rows_fit(batches: Sequence[pa.RecordBatch], bytes_max: int) -> None:
    """Raise `TooLarge` for a row that no insert could write, before there is a collection to insert
    into.
    """
    slices_within(batches, bytes_max, batch_bytes)


def _is_small(rows: Rows | Keys) -> bool:
    if isinstance(rows, (pa.RecordBatch, pa.Table, pa.Array, pa.ChunkedArray)):
        return rows.get_total_buffer_size() <= INLINE_BYTES_MAX or rows.nbytes <= INLINE_BYTES_MAX
    return not isinstance(rows, Sequence) or len(rows) <= INLINE_ROWS_MAX


def last_of_each_key(batches: Sequence[pa.RecordBatch], key_index: int) -> list[pa.RecordBatch]:
    """Return the batches without rows whose key comes again later: what upserting the rows one by
    one would leave.
    """
    rows = pa.Table.from_batches(batches)
    keys = rows.column(key_index)
    if len(keys) == 1 or pc.count_distinct(keys).as_py() == len(keys):
        return list(batches)
    last = (
        pa.table({"key": keys, "row": np.arange(len(keys))})
        .group_by("key", use_threads=False)
        .aggregate([("row", "max")])
    )
    keep = np.zeros(len(keys), bool)
    keep[last.column("row_max").to_numpy()] = True
    return [batch for batch in rows.filter(pa.array(keep)).to_batches() if batch.num_rows]


@dataclass(slots=True, eq=False)
class Writes:
    """What all writes of a node share: its backend, and the targets of collections written lately.
    Used on the event loop.
    """

    backend: Backend
    find: Callable[[str], CollectionInfo]
    _targets: dict[str, WriteTarget] = field(default_factory=dict)
    """By collection."""

    @property
    def group_bytes_max(self) -> int:
        """How large a group may be; a node that was opened again may have another bound."""
        return self.backend.config.wal.group_bytes_max

    def write(
        self, kind: Kind, collection: str, partition: str | None = None, *, txn_id: int = 0
    ) -> Write:
        """Return a write on a live collection. Raises what `find` does, `PartitionNotFound` and
        `InvalidArgument`.
        """
        info = self.find(collection)
        target = self._targets.get(collection)
        if target is None or target.info is not info:
            if len(self._targets) >= TARGETS_MAX:
                self._targets.clear()
            target = self._targets[collection] = WriteTarget(info)
        into = target.usual[kind] if partition is None else target.into(kind, partition)
        return Write(kind, into, NO_TXN if txn_id is NO_TXN else check_txn_id(txn_id))


def append_rows(
    writes: Writes, write: Write, rows: Rows | Keys, *, timeout: float | None
) -> Awaitable[WriteResult]:
    """Write rows or keys as callers have them, within `timeout` seconds; to be awaited at once.
    Raises as `Node.insert`.
    """
    group = write.at_once(rows, writes.group_bytes_max)
    if group is not None:
        if timeout is None:
            return writes.backend.append(group)
        return within(
            timeout,
            partial(writes.backend.append, group),
            f"the {write.kind}",
            begun=lambda: group.begun,
        )
    results: list[WriteResult] = []
    last: list[AppendGroup] = []

    async def run() -> WriteResult:
        batches = await write.check(rows)
        if not batches:
            return nothing_at(await writes.backend.consistent_tick())
        slices = write.slices(batches, writes.group_bytes_max)
        if write.txn_id and len(slices) > 1:
            slices = [write.whole(slices, writes.group_bytes_max)]
        for batch in slices:
            last[:] = [write.group(write.pieces(batch))]
            try:
                results.append(await writes.backend.append(last[0]))
            except StreamingNodeError as error:
                if not results or error.retryable == "indeterminate":
                    raise
                raise Indeterminate(
                    f"{len(results)} groups of the {write.kind} are in the log, those after them "
                    f"are not, {error.happened} — read back which rows are missing"
                ) from error
        return combined(results)

    def begun() -> bool:
        return bool(results) or any(group.begun for group in last)

    return within(timeout, run, f"the {write.kind}", begun=begun)


def nothing_at(tick: int) -> WriteResult:
    """Return the result of a write without rows, as of a consistent tick: whoever reads on from
    there misses nothing.
    """
    return WriteResult(
        kind=MessageId, first_position=0, count=0, time_tick=tick, last_confirmed_position=0
    )


def combined(results: Sequence[WriteResult]) -> WriteResult:
    """Return the result of a write that took these groups, at least one, in order."""
    if len(results) == 1 or results[0].spooled:
        return results[0]
    row_offsets: dict[str, tuple[int, int]] = {}
    for result in results:
        for vchannel, (first, count) in result.row_offsets.items():
            known_first, known_count = row_offsets.get(vchannel, (first, 0))
            row_offsets[vchannel] = known_first, known_count + count
    return replace(
        results[-1],
        row_offsets=row_offsets,
        durable=all(result.durable for result in results),
        groups=tuple(results),
    )


def check_txn_id(txn_id: int) -> int:
    """Return the id of a transaction, 0 for none. Raises `InvalidArgument`."""
    if isinstance(txn_id, bool) or not isinstance(txn_id, int) or not 0 <= txn_id <= TICK_MAX:
        raise InvalidArgument(
            f"txn_id={shown(txn_id)} is no transaction — pass what begin_transaction() returned"
        )
    return txn_id


def check_seconds(name: str, seconds: float, *, longest: float = math.inf) -> float:
    """Return a number above 0 and at most `longest`. Raises `InvalidArgument` for anything else."""
    with suppress(OverflowError):  # of a whole number that no float holds
        if isinstance(seconds, Real) and not isinstance(seconds, bool) and 0 < seconds <= longest:
            return float(seconds)
    raise InvalidArgument(
        f"{name}={shown(seconds)} — pass a number of seconds above 0, up to {longest:g}, or None"
    )


class Deadline:
    """When a caller's time is over: so many seconds after this was made, on the event loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = check_seconds("timeout", seconds)
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time() + self.seconds

    @property
    def left_s(self) -> float:
        """How many seconds are left, 0 once the time is over."""
        return max(0.0, self._at - self._loop.time())


async def within(
    timeout: float | None,
    call: Callable[[], Awaitable[T]],
    what: str,
    *,
    changes: bool = True,
    begun: Callable[[], bool] = lambda: True,
) -> T:
    """Return what `call` returns, if it does within `timeout` seconds; None waits for ever.

    Raises as `by_deadline` does.
    """
    if timeout is None:
        return await call()
    return await by_deadline(Deadline(timeout), call, what, changes=changes, begun=begun)


async def by_deadline(
    deadline: Deadline,
    call: Callable[[], Awaitable[T]],
    what: str,
    *,
    changes: bool = True,
    begun: Callable[[], bool] = lambda: True,
) -> T:
    """Return what `call` returns before a deadline; the call does not begin after it.

    Raises `Overloaded` when `begun` says that nothing was done by then, else `DeadlineExceeded`,
    which is a `TimeoutError`: the call, if it `changes` something, may or may not take effect.
    """
    if left_s := deadline.left_s:
        with anyio.move_on_after(left_s):
            return await call()
    time = f"{deadline.seconds:g} s"
    if not changes:
        raise DeadlineExceeded(
            f"{what} took longer than {time} and changed nothing — give it more time"
        )
    if begun():
        raise DeadlineExceeded(
            f"{what} was not acknowledged within {time} and may still take effect — read back, "
            "or repeat it under the sequence of a named producer"
        )
    raise Overloaded(
        f"{what} did not reach the log within {time} and did nothing — try again later"
    )
