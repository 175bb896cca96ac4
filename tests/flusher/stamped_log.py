"""A log written the way a node writes it, and the model of what the cuts of it must hold.

`StampedLog` gives ticks, segments and offsets by the simplest rules; `rows` and `deletes` are
written down as they are appended, without any of the code under test.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flusher.data_file import Rows
from flusher.directory import NodeDirectory
from flusher.flusher import Flusher
from flusher.manifest import NO_CHECKPOINT
from flusher.run import FlushContext, FlushOptions
from interceptors.txn import steady_ms
from tests.wal.packed import pack_of, rows_group
from wal.append import AppendGroup, Pack
from wal.entry import U4, U8, RowBatch
from wal.headers import (
    BeginTxnHeader,
    BodyAssignment,
    CommitTxnHeader,
    CreateCollectionHeader,
    CreateSegmentHeader,
    CutHeader,
    DropCollectionHeader,
    DropPartitionHeader,
    FlushHeader,
    InsertHeader,
    MessageType,
)
from wal.log import Log, LogStore
from wal.message import MutableMessage
from wal.rows import Piece, ShardRows, encode_pieces, lay_out
from wal.timetick import compose_tick

START_MS = 1_700_000_000_000
MS_PER_APPEND = 7
COLUMNS: dict[str, pa.DataType] = {"id": pa.int64(), "item": pa.string()}
SCHEMA = pa.schema(COLUMNS)
KEY_SCHEMA = pa.schema([("id", pa.int64())])
DEFAULT = 0


class Row(NamedTuple):
    """A row or a delete (then `item` is None and `offset` the bound), with everything the system
    says about it.
    """

    collection_id: int
    partition_id: int
    vchannel: str
    tick: int
    offset: int
    key: int
    item: str | None


class Item(NamedTuple):
    """What is written of a row, or of a delete."""

    key: int
    item: str = ""


class Cut(NamedTuple):
    number: int
    tick: int
    previous_tick: int


@dataclass
class Table:
    id: int
    vchannels: tuple[str, ...]
    partitions: tuple[int, ...]

    def __post_init__(self) -> None:
        self.renew_targets()

    def renew_targets(self) -> None:
        """Make the objects anew by which writes go together, as after each change of the
        catalog.
        """
        self.inserts = {
            each: TableTarget(MessageType.INSERT, self, each) for each in self.partitions
        }
        self.deletes = TableTarget(MessageType.DELETE, self, 0)


class TableTarget:
    """Takes keys, or keys and items; a key's shard is what is left when it is divided."""

    def __init__(self, kind: MessageType, table: Table, partition_id: int) -> None:
        self.type = kind
        self.collection_id = table.id
        self.partition_id = partition_id
        self.schema_version = 1
        self.vchannels = table.vchannels

    def bodies(self, rows: Sequence[Item]) -> list["Body"]:
        """Return the messages that these rows are, in order."""
        shards = sorted({row.key % len(self.vchannels) for row in rows})
        return [
            Body(self, shard, [row for row in rows if row.key % len(self.vchannels) == shard])
            for shard in shards
        ]

    def encode(self, pieces: Sequence[Sequence[Item]]) -> Sequence[ShardRows]:
        """Return the rows of each shard that gets some."""
        found = []
        for body in self.bodies([row for rows in pieces for row in rows]):
            counts = [
                sum(row.key % len(self.vchannels) == body.shard for row in rows) for rows in pieces
            ]
            numbers = [number for number, count in enumerate(counts) if count]
            found.append(
                ShardRows(body.shard, body.payload, numbers, [counts[number] for number in numbers])
            )
        return found


@dataclass
class Body:
    """Rows or keys of one vchannel: what is a message of its own, or would be one."""

    target: TableTarget
    shard: int
    rows: Sequence[Item]

    @property
    def is_insert(self) -> bool:
        return self.target.type is MessageType.INSERT

    @property
    def vchannel(self) -> str:
        return self.target.vchannels[self.shard]

    @property
    def payload(self) -> bytes:
        keys = pa.array([row.key for row in self.rows], pa.int64())
        if not self.is_insert:
            return pa.record_batch([keys], schema=KEY_SCHEMA).serialize().to_pybytes()
        items = pa.array([row.item for row in self.rows])
        return pa.record_batch([keys, items], schema=SCHEMA).serialize().to_pybytes()


class Write(NamedTuple):
    """One write: rows of tables, all at one tick."""

    pieces: Sequence[tuple[TableTarget, Sequence[Item]]]
    is_transaction: bool = False

    @property
    def bodies(self) -> list[Body]:
        return [body for target, rows in self.pieces for body in target.bodies(rows)]


@dataclass
class StampedLog:
    log: Log
    tick: int = compose_tick(START_MS)
    ms_per_append: int = MS_PER_APPEND
    rows: list[Row] = field(default_factory=list)
    deletes: list[Row] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    drops: dict[tuple[int, int], int] = field(default_factory=dict)
    next_offsets: dict[str, int] = field(default_factory=dict)
    next_id: int = 1
    tables: dict[int, Table] = field(default_factory=dict)
    segments: dict[tuple[str, int], int] = field(default_factory=dict)
    streamed: dict[int, tuple[int, list[Body]]] = field(default_factory=dict)
    waiting: list[Write] | None = None
    """The writes of the entry in the making, inside `together`."""

    # --- appends ----------------------------------------------------------------------------------

    def create(self, *, shards: int = 1, partitions: int = 1, schema: pa.Schema = SCHEMA) -> Table:
        collection_id = self._id()
        ids = tuple(self._id() for _ in range(partitions))
        table = Table(
            collection_id, tuple(f"p0_{collection_id}v{shard}" for shard in range(shards)), ids
        )
        names = ["_default", *(f"part{number}" for number in range(1, partitions))]
        header = CreateCollectionHeader(
            collection_id=collection_id,
            name=f"table{collection_id}",
            schema=schema.serialize().to_pybytes(),
            schema_version=1,
            primary_key="id",
            vchannels=table.vchannels,
            partitions=tuple(zip(ids, names, strict=True)),
        )
        self._append(
            [
                MutableMessage(MessageType.CREATE_COLLECTION, header, name)
                for name in table.vchannels
            ]
        )
        self.tables[collection_id] = table
        self.next_offsets |= dict.fromkeys(table.vchannels, 0)
        return table

    def insert(
        self, table: Table, keys: Sequence[int], *, partition: int = DEFAULT, item: str = "tea"
    ) -> None:
        self._write(Write([self._inserts(table, keys, partition, item)]))

    def delete(self, table: Table, keys: Sequence[int]) -> None:
        self._write(Write([(table.deletes, [Item(key) for key in keys])]))

    def upsert(self, table: Table, keys: Sequence[int], *, item: str) -> None:
        """A buffered transaction: deletes, then inserts."""
        deletes = (table.deletes, [Item(key) for key in keys])
        self._write(
            Write([deletes, self._inserts(table, keys, DEFAULT, item)], is_transaction=True)
        )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make the inserts, deletes and upserts inside one entry, each at a tick of its own."""
        self.waiting = []
        yield
        writes = self.waiting
        self.waiting = None
        if writes:
            self._append_rows(writes)

    def begin(self) -> int:
        """Start a streamed transaction and return its id."""
        txn_id = self.tick + 1
        position = self.log.next_position
        self._append([MutableMessage(MessageType.BEGIN_TXN, BeginTxnHeader(1000), txn_id=txn_id)])
        self.streamed[txn_id] = (position, [])
        return txn_id

    def stream(self, txn_id: int, table: Table, keys: Sequence[int], *, item: str) -> None:
        """Append rows of a streamed transaction."""
        target, rows = self._inserts(table, keys, DEFAULT, item)
        messages = []
        for body in target.bodies(rows):
            self._ensure_segment(body)
            header = InsertHeader(table.id, target.partition_id, 1, len(body.rows))
            messages.append(
                MutableMessage(MessageType.INSERT, header, body.vchannel, body.payload, txn_id)
            )
            self.streamed[txn_id][1].append(body)
        self._append(messages)

    def commit(self, txn_id: int) -> None:
        """Commit a streamed transaction; its rows get their segments and offsets now."""
        bodies = self.streamed[txn_id][1]
        for body in bodies:
            self._ensure_segment(body)
        vchannels = tuple(sorted({body.vchannel for body in bodies}))
        header = CommitTxnHeader(vchannels, tuple(self._assign(body) for body in bodies))
        self._append([MutableMessage(MessageType.COMMIT_TXN, header, txn_id=txn_id)])
        del self.streamed[txn_id]
        for body, assignment in zip(bodies, header.assignments, strict=True):
            self._write_down(body, assignment, self.tick)

    def seal(self, table: Table, *, partition: int = DEFAULT) -> None:
        for vchannel in table.vchannels:
            segment_id = self.segments.pop((vchannel, table.partitions[partition]), None)
            if segment_id is not None:
                header = FlushHeader(table.id, table.partitions[partition], segment_id, "rows")
                self._append([MutableMessage(MessageType.FLUSH, header, vchannel)])

    def cut(self) -> Cut:
        number = len(self.cuts) + 1
        header = CutHeader(number, tuple(sorted(self.segments.values())))
        self.segments.clear()
        self._append([MutableMessage(MessageType.CUT, header)])
        self.cuts.append(Cut(number, self.tick, self.cuts[-1].tick if self.cuts else 0))
        return self.cuts[-1]

    def drop_partition(self, table: Table, partition: int) -> None:
        partition_id = table.partitions[partition]
        header = DropPartitionHeader(table.id, partition_id)
        self._append(
            [MutableMessage(MessageType.DROP_PARTITION, header, name) for name in table.vchannels]
        )
        self._forget(table, {partition_id})

    def drop_collection(self, table: Table) -> None:
        header = DropCollectionHeader(table.id)
        self._append(
            [MutableMessage(MessageType.DROP_COLLECTION, header, name) for name in table.vchannels]
        )
        self._forget(table, set(table.partitions))
        self.drops[table.id, -1] = self.tick
        for vchannel in table.vchannels:
            del self.next_offsets[vchannel]
        del self.tables[table.id]

    # --- the model --------------------------------------------------------------------------------

    def rows_of(self, cut: Cut) -> list[Row]:
        """The rows that the files of a cut must hold."""
        return sorted(
            row
            for row in self.rows
            if cut.previous_tick < row.tick <= cut.tick
            and not row.tick < self.drops.get((row.collection_id, row.partition_id), 0) <= cut.tick
        )

    def deletes_of(self, cut: Cut) -> list[Row]:
        """The deletes that the files of a cut must hold."""
        return sorted(
            row
            for row in self.deletes
            if cut.previous_tick < row.tick <= cut.tick
            and not row.tick < self.drops.get((row.collection_id, -1), 0) <= cut.tick
        )

    def state(self, table: Table, *, as_of: int) -> list[tuple[int, str | None]]:
        """The keys and items of a table that live at a tick."""
        found: Mapping[tuple[str, int], list[int]] = {}
        found = {}
        for row in self.deletes:
            if row.collection_id == table.id and row.tick <= as_of:
                found.setdefault((row.vchannel, row.key), []).append(row.offset)
        return sorted(
            (row.key, row.item)
            for row in self.rows
            if row.collection_id == table.id
            and row.tick <= as_of
            and (row.collection_id, row.partition_id) not in self.drops
            and row.offset >= max(found.get((row.vchannel, row.key), [0]))
        )

    # --- stamping ---------------------------------------------------------------------------------

    def _inserts(
        self, table: Table, keys: Sequence[int], partition: int, item: str
    ) -> tuple[TableTarget, Sequence[Item]]:
        return table.inserts[table.partitions[partition]], [
            Item(key, f"{item}{key}") for key in keys
        ]

    def _write(self, write: Write) -> None:
        for body in write.bodies:
            self._ensure_segment(body)
        if self.waiting is None:
            self._append_rows([write])
        else:
            self.waiting.append(write)

    def _append_rows(self, writes: Sequence[Write]) -> None:
        groups = []
        for write in writes:
            pieces = [Piece(target, rows, len(rows)) for target, rows in write.pieces]
            groups.append(rows_group(*pieces, is_transaction=write.is_transaction))
        written = [group.pieces for group in groups]
        encoded = encode_pieces(written)
        laid_out = lay_out(
            written,
            [group.is_transaction for group in groups],
            encoded,
            next_offsets=self.next_offsets,
            segments=[
                self.segments.get((batch.vchannel, batch.target.partition_id), 0)
                for batch in encoded
            ],
        )
        assigned: dict[tuple[int, int], tuple[Body, BodyAssignment]] = {}
        tick = self._next_tick()
        for group, write in enumerate(writes):
            for place, body in enumerate(write.bodies, 1 if write.is_transaction else 0):
                assigned[group, place] = body, self._assign(body)
                self._write_down(*assigned[group, place], tick + group)
        self.tick = tick + len(writes) - 1
        _check_places(laid_out.batches, assigned)
        pack = pack_of(*groups)
        pack.take_rows(laid_out)
        self._append_pack(pack)

    def _assign(self, body: Body) -> BodyAssignment:
        offset = self.next_offsets[body.vchannel]
        if not body.is_insert:
            return BodyAssignment(0, offset)
        self.next_offsets[body.vchannel] += len(body.rows)
        return BodyAssignment(self.segments[body.vchannel, body.target.partition_id], offset)

    def _write_down(self, body: Body, assignment: BodyAssignment, tick: int) -> None:
        target = body.target
        first = assignment.offset
        if body.is_insert:
            self.rows += (
                Row(
                    target.collection_id,
                    target.partition_id,
                    body.vchannel,
                    tick,
                    first + i,
                    row.key,
                    row.item,
                )
                for i, row in enumerate(body.rows)
            )
        else:
            self.deletes += (
                Row(target.collection_id, -1, body.vchannel, tick, first, row.key, None)
                for row in body.rows
            )

    def _ensure_segment(self, body: Body) -> None:
        place = body.vchannel, body.target.partition_id
        if body.is_insert and place not in self.segments:
            segment_id = self._id()
            header = CreateSegmentHeader(
                body.target.collection_id, body.target.partition_id, segment_id, 1, 1 << 30, 1 << 30
            )
            self._append([MutableMessage(MessageType.CREATE_SEGMENT, header, body.vchannel)])
            self.segments[place] = segment_id

    def _forget(self, table: Table, partition_ids: set[int]) -> None:
        for partition_id in partition_ids:
            self.drops.setdefault((table.id, partition_id), self.tick)
        for key in [
            key for key in self.segments if key[0] in table.vchannels and key[1] in partition_ids
        ]:
            del self.segments[key]

    def _append(self, messages: list[MutableMessage]) -> None:
        self.tick = self._next_tick()
        self._append_pack(pack_of(AppendGroup(messages)))

    def _append_pack(self, pack: Pack) -> None:
        oldest = min((position for position, _ in self.streamed.values()), default=None)
        pack.stamp(self.tick, oldest)
        pack.stamp_wal_term(1)
        self.log.append(pack)

    def _next_tick(self) -> int:
        return self.tick + (self.ms_per_append << 18 | 1)

    def _id(self) -> int:
        self.next_id += 1
        return self.next_id - 1


def context_of(
    directory: NodeDirectory,
    store: LogStore,
    log: Log,
    *,
    options: FlushOptions | None = None,
    now_ms: Callable[[], int] = lambda: START_MS,
    elapsed_ms: Callable[[], int] = steady_ms,
    reader_floor: Callable[[], int | None] = lambda: None,
) -> FlushContext:
    """Return what a flusher of a log without a tail works with: nobody else is there."""

    async def nothing(*_arguments: object) -> None:
        """There are no producers, and the log is never reopened."""

    return FlushContext(
        directory=directory,
        store=store,
        log=log,
        tail=None,
        options=options or FlushOptions(),
        now_ms=now_ms,
        elapsed_ms=elapsed_ms,
        reader_floor=reader_floor,
        on_kept_tick=lambda _tick: None,
        save_producers=nothing,
        log_is_back=nothing,
        next_id=lambda: sys.maxsize,
    )


def flusher_of(directory: NodeDirectory, store: LogStore, log: Log, **context: Any) -> Flusher:
    """Return a flusher of a new node."""
    return Flusher(context_of(directory, store, log, **context), NO_CHECKPOINT)


def packed_rows(payload: bytes, counts: list[int], ticks: list[int], offsets: list[int]) -> Rows:
    """Return rows with a boundary for each count, one after the other, each of a group of its
    own.
    """
    groups = np.arange(len(counts), dtype=U4)
    starts = np.cumsum(counts) - counts
    batch = RowBatch(
        type=MessageType.INSERT,
        vchannel="p0_1v0",
        collection_id=1,
        partition_id=2,
        schema_version=1,
        segment_id=3,
        payload=payload,
        groups=groups,
        places=groups * 0,
        parts=groups * 0,
        starts=starts.astype(U4),
        counts=np.array(counts, U4),
        offsets=np.array(offsets, U8),
        rows=sum(counts),
    )
    return Rows(batch, np.array(ticks, U8))


def message_rows(payload: bytes, count: int, tick: int, offset: int) -> Rows:
    """Return the rows of one message, which are all that is in its payload."""
    return packed_rows(payload, [count], [tick], [offset])


def _check_places(
    batches: Sequence[RowBatch], assigned: Mapping[tuple[int, int], tuple[Body, BodyAssignment]]
) -> None:
    """Check that batches have the rows of these messages, each with its segment and offset."""
    places = 0
    for batch in batches:
        found = [
            assigned[place]
            for place in zip(batch.groups.tolist(), batch.places.tolist(), strict=True)
        ]
        assert {(body.vchannel, each.segment_id) for body, each in found} == {
            (batch.vchannel, batch.segment_id)
        }
        assert [len(body.rows) for body, _ in found] == batch.counts.tolist()
        assert [each.offset for _, each in found] == batch.offsets.tolist()
        places += len(found)
    assert places == len(assigned)
