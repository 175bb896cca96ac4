"""Encodes and decodes writes for a connection: writes that wait together share one Arrow batch for
each target. No I/O.

Consecutive inserts without a named producer become one write of the log: they share its tick, its
stamp and its outcome, and each caller gets the offsets of its own rows. Every other write stays
separate.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, repeat
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from interceptors.errors import ProducerFenced, SchemaMismatch
from interceptors.shard.catalog import Catalog
from streamingnode.rows import conform
from streamingnode.writing.target import BatchSlice, BatchTarget, WriteTarget, batch_bytes, encoded
from wal.adaptor import WalLimits
from wal.append import AppendGroup, AppendResult
from wal.errors import ProtocolError, StreamingNodeError, TooLarge
from wal.frames import FrameKind, encode_frame
from wal.headers import MessageType
from wal.message import MESSAGE_OVERHEAD_BYTES, TRANSACTION_OVERHEAD_BYTES
from wal.position import ProducerStamp
from wal.rows import Piece

_encode_plain = msgspec.msgpack.Encoder().encode

FIRST_EPOCH = 1
"""The epoch of a client without a named producer; it never changes."""
EXACT_FROM_BYTES = 1 << 20
"""In batches larger than this the rows of each write are measured: the whole batch may exceed the
limit of one write, so an average per row is too coarse.
"""
PLAIN_ROWS_MAX = 64
"""The rows of one target in one frame that go as plain values; more rows are cheaper as Arrow data
for both sides.
"""
GROUPS_MAX = 4_096
PIECES_MAX = 1 << 16
"""Limits for the writes of one frame, of which a client sends at most 512, and for its batches and
the pieces of a write. Each takes 7 bytes in the frame and 200 in memory.
"""
TARGETS_MAX = 4_096
"""The number of targets that a server caches; it takes about 50 us to build one again."""


class WireTarget(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows or keys for one partition from several writes: one Arrow batch, or a few plain values as
    MessagePack.
    """

    type: int
    collection_id: int
    partition_id: int
    schema_version: int
    payload_bytes: Annotated[int, msgspec.Meta(ge=0)]
    is_plain: bool = False


class WireGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One write: `pieces` lists, in order, the index of a target and how many of its next rows the
    write takes. `producer_id` 0 is the client itself. All writes of the named producer with
    sequences below `settled` have ended.
    """

    sequence: int
    is_transaction: bool
    pieces: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=PIECES_MAX)]
    producer_id: int = 0
    epoch: int = FIRST_EPOCH
    settled: int = 0


class WireWrites(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The writes of a frame; the client has the outcomes of all its writes with sequences below
    `settled`.
    """

    settled: int
    targets: Annotated[tuple[WireTarget, ...], msgspec.Meta(max_length=PIECES_MAX)]
    groups: Annotated[tuple[WireGroup, ...], msgspec.Meta(max_length=GROUPS_MAX)]


# --- the client's side ----------------------------------------------------------------------------


class Unit(NamedTuple):
    """One write of the log: a group, or inserts that became one write. `shards` has the shard of
    each row of several inserts, None when there is one shard.
    """

    groups: Sequence[AppendGroup]
    shards: Any = None

    def settle(self, outcome: AppendResult | Exception) -> None:
        """Settle each group that has no outcome yet."""
        outcomes: Iterable[AppendResult | Exception] = repeat(outcome)
        if len(self.groups) > 1 and isinstance(outcome, AppendResult):
            outcomes = [
                replace(outcome, row_offsets=offsets) for offsets in self._row_offsets(outcome)
            ]
        for group, each in zip(self.groups, outcomes, strict=False):
            if group.outcome is None:
                group.settle(each)

    def _row_offsets(self, outcome: AppendResult) -> list[dict[str, tuple[int, int]]]:
        """Return the row offsets of each group. In each shard the rows are consecutive, in the
        order of the groups.
        """
        vchannels = self.groups[0].pieces[0].target.vchannels
        counts = [len(each.pieces[0].rows) for each in self.groups]
        on_shards = {0: counts}
        if self.shards is not None:
            of = np.repeat(np.arange(len(counts)), counts)
            on_shards = {
                shard: np.bincount(of[self.shards == shard], minlength=len(counts)).tolist()
                for shard in np.unique(self.shards).tolist()
            }
        offsets: list[dict[str, tuple[int, int]]] = [{} for _ in counts]
        for shard, on_shard in on_shards.items():
            vchannel = vchannels[shard]
            first, _ = outcome.row_offsets[vchannel]
            for each, at, count in zip(
                offsets, accumulate(on_shard, initial=first), on_shard, strict=False
            ):
                if count:
                    each[vchannel] = (at, count)
        return offsets


class FrameOfWrites(NamedTuple):
    """An encoded frame; its results are for `units`, in order."""

    units: list[Unit]
    parts: list[bytes | memoryview]
    size_bytes: int


def frame_of(
    number: int,
    groups: Sequence[AppendGroup],
    stamp_of: Callable[[AppendGroup | None], ProducerStamp],
    *,
    settled: int,
    unit_bytes_max: int,
) -> FrameOfWrites:
    """Return the frame of groups of rows. `stamp_of` returns the stamp of a named producer's write,
    and for None the client's next stamp.

    The rows of a target are one batch, in the order of the groups.
    """
    lanes: dict[Any, tuple[int, list[Any]]] = {}
    units = list[Unit]()
    wired = list[tuple[object, ...]]()
    for run in _runs(groups, unit_bytes_max):
        head = run[0]
        pieces = []
        for piece in head.pieces if len(run) == 1 else [group.pieces[0] for group in run]:
            lane = lanes.get(piece.target)
            if lane is None:
                lane = lanes[piece.target] = (len(lanes), [])
            lane[1].append(piece.rows)
            pieces.append((lane[0], len(piece.rows)))
        if len(run) > 1:
            pieces = [(pieces[0][0], sum([count for _, count in pieces]))]
        units.append(Unit(run, _shards(run) if len(run) > 1 else None))
        if head.producer is None:
            wired.append((stamp_of(None).sequence, head.is_transaction, pieces))
        else:
            stamp = stamp_of(head)
            write = stamp.sequence, head.is_transaction, pieces
            wired.append((*write, stamp.producer_id, stamp.epoch, head.settled))
    targets = []
    payloads = []
    for target, (_, rows) in lanes.items():
        is_plain = set(map(type, rows)) == {tuple} and sum(map(len, rows)) <= PLAIN_ROWS_MAX
        payload = (
            _encode_plain([*chain.from_iterable(rows)])
            if is_plain
            else encoded(target.joined(rows))
        )
        place = target.collection_id, target.partition_id, target.schema_version
        targets.append(WireTarget(target.type, *place, len(payload), is_plain))
        payloads.append(payload)
    # the same layout as `WireWrites`, without an object for each write
    meta = (settled, targets, wired)
    whole = payloads[0] if len(payloads) == 1 else memoryview(b"".join(payloads))
    parts = encode_frame(FrameKind.WRITES, number, meta, whole)
    return FrameOfWrites(units, parts, sum(map(len, parts)))


def _shards(run: Sequence[AppendGroup]) -> Any:
    """Return the shard of each row of several inserts; None when the collection has one shard."""
    target = run[0].pieces[0].target
    if len(target.vchannels) == 1:
        return None
    assert isinstance(target, BatchTarget), "targets of this process"
    return target.shards(target.joined([each.pieces[0].rows for each in run]))


def _runs(groups: Sequence[AppendGroup], unit_bytes_max: int) -> list[list[AppendGroup]]:
    """Return runs of groups that each become one write: consecutive inserts into one partition
    without a named producer form one run.
    """
    runs: list[list[AppendGroup]] = []
    target = None
    size_bytes = 0
    for group in groups:
        alone = group.producer is not None or group.is_transaction or len(group.pieces) > 1
        into = (
            None
            if alone or group.pieces[0].target.type is not MessageType.INSERT
            else group.pieces[0].target
        )
        size_bytes += group.rows_bytes
        if into is not None and into is target and size_bytes <= unit_bytes_max:
            runs[-1].append(group)
            continue
        runs.append([group])
        target = into
        size_bytes = group.rows_bytes
    return runs


# --- the server's side ----------------------------------------------------------------------------


class Targets:
    """Finds and caches the targets of clients' rows until a collection changes. Lives on the event
    loop.
    """

    def __init__(self, catalog: Callable[[], Catalog]) -> None:
        self._catalog = catalog
        self._targets: dict[int, WriteTarget] = {}

    def find(self, wire: WireTarget) -> BatchTarget:
        """Return the target of rows. Raises `CollectionNotFound`, `PartitionNotFound`,
        `SchemaMismatch` or `ProtocolError`.
        """
        info = self._catalog().live(wire.collection_id)
        target = self._targets.get(info.id)
        if target is None or target.info is not info:
            if len(self._targets) >= TARGETS_MAX:
                self._targets.clear()
            target = self._targets[info.id] = WriteTarget(info)
        if wire.schema_version != info.schema_version:
            raise SchemaMismatch(
                f"rows of schema version {wire.schema_version} do not fit {info.name!r} — read its "
                "schema again"
            )
        if wire.type == MessageType.DELETE:
            return target.deletes
        if wire.type != MessageType.INSERT:
            raise ProtocolError(f"rows of type {wire.type}")
        info.partition(wire.partition_id)
        return target.inserts(wire.partition_id)


class Lane:
    """The rows of a frame for one target; its writes take them in order."""

    __slots__ = (
        "_at",
        "_count",
        "_is_plain",
        "_is_uneven",
        "_row_bytes",
        "rows",
        "shards",
        "target",
    )

    def __init__(self, target: BatchTarget, data: memoryview, *, is_plain: bool) -> None:
        self.target = target
        self.shards = len(target.vchannels)
        self._at = 0
        self._is_plain = is_plain
        self.rows: Any
        """All rows, in the form that the target's batches take."""
        self.rows, size_bytes = (
            target.plain.decode(data) if is_plain else (checked_rows(data, target), len(data))
        )
        self._count = len(self.rows)
        self._row_bytes = (size_bytes + MESSAGE_OVERHEAD_BYTES) / max(self._count, 1)
        self._is_uneven = size_bytes > EXACT_FROM_BYTES

    def take(self, count: int) -> Piece:
        """Return the next `count` rows. Raises `ProtocolError` when fewer are left."""
        rows = self.rows
        start = self._at
        end = self._at + count
        if not start < end <= self._count:
            raise ProtocolError("writes of more rows than their batch has")
        self._at = end
        size_bytes = int(self._row_bytes * count) + MESSAGE_OVERHEAD_BYTES
        size_bytes += (min(count, self.shards) - 1) * self.target.message_bytes
        if count < self._count:
            taken = rows[start:end] if self._is_plain else BatchSlice(rows, start, count)
            if self._is_uneven:
                exact = (
                    len(_encode_plain(taken))
                    if self._is_plain
                    else batch_bytes(rows.slice(start, count))
                )
                size_bytes += exact - int(self._row_bytes * count)
            rows = taken
        return Piece(self.target, rows, size_bytes)


def groups_of(
    writes: WireWrites,
    payload: memoryview,
    find: Callable[[WireTarget], BatchTarget],
    stamp: Callable[[WireGroup], ProducerStamp],
    limits: WalLimits,
) -> list[AppendGroup | StreamingNodeError]:
    """Return the writes of a frame, with an error in place of each refused one. A bad batch refuses
    only the writes that use it.

    Raises `ProtocolError` for a frame that no correct client sends.
    """
    if not writes.groups:
        raise ProtocolError("a frame without writes")
    lanes = list[Lane | StreamingNodeError]()
    at = 0
    for wire in writes.targets:
        data = payload[at : at + wire.payload_bytes]
        at = at + wire.payload_bytes
        try:
            lanes.append(Lane(find(wire), data, is_plain=wire.is_plain))
        except ProtocolError:
            raise
        except StreamingNodeError as refusal:
            lanes.append(refusal)
    if at != len(payload):
        raise ProtocolError(
            f"the batches of a frame of writes take {at} bytes, its payload has {len(payload)}"
        )
    return [_group(each, lanes, stamp, limits) for each in writes.groups]


def _group(
    group: WireGroup,
    lanes: Sequence[Lane | StreamingNodeError],
    stamp: Callable[[WireGroup], ProducerStamp],
    limits: WalLimits,
) -> AppendGroup | StreamingNodeError:
    if not group.pieces or (len(group.pieces) > 1 and not group.is_transaction):
        raise ProtocolError("a write without rows, or one of several pieces outside a transaction")
    pieces = []
    refusal = None
    messages = 0
    size_bytes = TRANSACTION_OVERHEAD_BYTES * group.is_transaction
    for index, count in group.pieces:
        if not 0 <= index < len(lanes):
            raise ProtocolError("a write with rows of an unknown batch")
        lane = lanes[index]
        if isinstance(lane, StreamingNodeError):
            refusal = lane
            continue
        piece = lane.take(count)
        pieces.append(piece)
        size_bytes += piece.size
        messages += min(lane.shards, count)
    if refusal is not None:
        return refusal
    if messages + 2 > limits.group_messages_max or size_bytes > limits.group_bytes_max:
        return TooLarge(
            f"{messages} messages of {size_bytes} bytes in one write exceed "
            f"{limits.group_messages_max} messages or {limits.group_bytes_max} bytes — split it"
        )
    try:
        producer = stamp(group)
    except ProducerFenced as fenced:
        return fenced
    return AppendGroup(
        pieces=pieces,
        is_transaction=group.is_transaction,
        rows_bytes=size_bytes,
        producer=producer,
        settled=group.settled,
    )


def checked_rows(data: bytes | memoryview, target: BatchTarget) -> pa.RecordBatch:
    """Return rows from another process after checking them fully. Raises `ProtocolError`,
    `SchemaMismatch`.
    """
    try:
        message = pa.ipc.read_message(pa.py_buffer(data))
        if message.type != "record batch" or is_compressed(message.metadata):
            # 16 KiB may decompress to 512 MiB
            raise ProtocolError("rows that are compressed or not a record batch")
        batch = pa.ipc.read_record_batch(message, target.shape.schema)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ProtocolError(f"rows do not decode: {error}") from error
    return conform(batch, target.shape)


def is_compressed(metadata: pa.Buffer) -> bool:
    """Return whether a record batch message has compressed buffers: field 3 of the RecordBatch in
    field 2 of the Message.

    Arrow has checked the FlatBuffer; its tables are defined in Arrow's format/Message.fbs.
    """
    data = bytes(metadata)

    def number(at: int, size_bytes: int) -> int:
        return int.from_bytes(data[at : at + size_bytes], "little", signed=size_bytes == 4)

    def field(table: int, index: int) -> int:
        """Return the offset of a field in its table; 0 for an absent field."""
        fields = table - number(table, 4)
        at = 4 + 2 * index
        return number(fields + at, 2) if at < number(fields, 2) else 0

    message = number(0, 4)
    header = message + field(message, 2)
    return field(header + number(header, 4), 3) > 0
