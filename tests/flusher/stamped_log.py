"""A log written the way a node writes it, and the model of what the cuts of it must hold.

`StampedLog` gives ticks, segments and offsets by the simplest rules; `rows` and `deletes` are written down as they are
appended, without any of the code under test.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from flusher.directory import NodeDirectory
from flusher.flusher import Flusher
from flusher.manifest import NO_CHECKPOINT
from flusher.run import FlushContext, FlushOptions
from interceptors.txn import steady_ms
from wal.append import AppendGroup
from wal.headers import (
    BeginTxnHeader,
    BodyAssignment,
    CommitTxnHeader,
    CreateCollectionHeader,
    CreateSegmentHeader,
    CutHeader,
    DeleteHeader,
    DropCollectionHeader,
    DropPartitionHeader,
    FlushHeader,
    Header,
    InsertHeader,
    MessageType,
)
from wal.log import Log, LogStore
from wal.message import MutableMessage
from wal.timetick import compose_tick

START_MS = 1_700_000_000_000
MS_PER_APPEND = 7
COLUMNS: dict[str, pa.DataType] = {"id": pa.int64(), "item": pa.string()}
SCHEMA = pa.schema(COLUMNS)
KEY_SCHEMA = pa.schema([("id", pa.int64())])
DEFAULT = 0


class Row(NamedTuple):
    """A row or a delete (then `item` is None and `offset` the bound), with everything the system says about it."""

    collection_id: int
    partition_id: int
    vchannel: str
    tick: int
    offset: int
    key: int
    item: str | None


class Cut(NamedTuple):
    number: int
    tick: int
    previous_tick: int


@dataclass
class Table:
    id: int
    vchannels: tuple[str, ...]
    partitions: tuple[int, ...]


@dataclass
class Body:
    """Keys of one vchannel to insert or delete inside a transaction."""

    message: MutableMessage
    keys: Sequence[int]
    items: Sequence[str] | None


@dataclass
class StampedLog:
    log: Log
    tick: int = compose_tick(START_MS)
    rows: list[Row] = field(default_factory=list)
    deletes: list[Row] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    drops: dict[tuple[int, int], int] = field(default_factory=dict)
    next_offsets: dict[str, int] = field(default_factory=dict)
    next_id: int = 1
    tables: dict[int, Table] = field(default_factory=dict)
    segments: dict[tuple[str, int], int] = field(default_factory=dict)
    streamed: dict[int, tuple[int, list[Body]]] = field(default_factory=dict)

    # --- appends ----------------------------------------------------------------------------------------------------------

    def create(self, *, shards: int = 1, partitions: int = 1, schema: pa.Schema = SCHEMA) -> Table:
        collection_id = self._id()
        ids = tuple(self._id() for _ in range(partitions))
        table = Table(collection_id, tuple(f"p0_{collection_id}v{shard}" for shard in range(shards)), ids)
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
        self._append([MutableMessage(MessageType.CREATE_COLLECTION, header, name) for name in table.vchannels])
        self.tables[collection_id] = table
        self.next_offsets |= dict.fromkeys(table.vchannels, 0)
        return table

    def insert(self, table: Table, keys: Sequence[int], *, partition: int = DEFAULT, item: str = "tea") -> None:
        bodies = self._inserts(table, keys, partition, item)
        for assignment, body in zip([self._assign(body) for body in bodies], bodies, strict=True):
            header = body.message.header
            assert isinstance(header, InsertHeader)
            body.message.header = InsertHeader(
                header.collection_id, header.partition_id, 1, header.rows, assignment.segment_id, assignment.offset
            )
        self._append([body.message for body in bodies])
        self._write_down(bodies)

    def delete(self, table: Table, keys: Sequence[int]) -> None:
        bodies = self._deletes(table, keys)
        for assignment, body in zip([self._assign(body) for body in bodies], bodies, strict=True):
            body.message.header = DeleteHeader(table.id, len(body.keys), assignment.offset)
        self._append([body.message for body in bodies])
        self._write_down(bodies)

    def upsert(self, table: Table, keys: Sequence[int], *, item: str) -> None:
        """A buffered transaction: deletes, then inserts, in one entry."""
        bodies = [*self._deletes(table, keys), *self._inserts(table, keys, DEFAULT, item)]
        txn_id = self.tick + 1
        commit = self._commit_header(bodies)
        begin = MutableMessage(MessageType.BEGIN_TXN, BeginTxnHeader(1000), txn_id=txn_id)
        end = MutableMessage(MessageType.COMMIT_TXN, commit, txn_id=txn_id)
        for body in bodies:
            body.message.txn_id = txn_id
        self._append([begin, *(body.message for body in bodies), end])
        self._write_down(bodies)

    def begin(self) -> int:
        """Start a streamed transaction and return its id."""
        txn_id = self.tick + 1
        position = self.log.next_position
        self._append([MutableMessage(MessageType.BEGIN_TXN, BeginTxnHeader(1000), txn_id=txn_id)])
        self.streamed[txn_id] = (position, [])
        return txn_id

    def stream(self, txn_id: int, table: Table, keys: Sequence[int], *, item: str) -> None:
        """Append rows of a streamed transaction."""
        bodies = self._inserts(table, keys, DEFAULT, item)
        for body in bodies:
            body.message.txn_id = txn_id
        self._append([body.message for body in bodies])
        self.streamed[txn_id][1].extend(bodies)

    def commit(self, txn_id: int) -> None:
        """Commit a streamed transaction; its rows get their segments and offsets now."""
        bodies = self.streamed[txn_id][1]
        header = self._commit_header(bodies)
        self._append([MutableMessage(MessageType.COMMIT_TXN, header, txn_id=txn_id)])
        del self.streamed[txn_id]
        self._write_down(bodies)

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
        self._append([MutableMessage(MessageType.DROP_PARTITION, header, name) for name in table.vchannels])
        self._forget(table, {partition_id})

    def drop_collection(self, table: Table) -> None:
        header = DropCollectionHeader(table.id)
        self._append([MutableMessage(MessageType.DROP_COLLECTION, header, name) for name in table.vchannels])
        self._forget(table, set(table.partitions))
        self.drops[table.id, -1] = self.tick
        for vchannel in table.vchannels:
            del self.next_offsets[vchannel]
        del self.tables[table.id]

    # --- the model --------------------------------------------------------------------------------------------------------

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

    # --- stamping ---------------------------------------------------------------------------------------------------------

    def _inserts(self, table: Table, keys: Sequence[int], partition: int, item: str) -> list[Body]:
        bodies = []
        for vchannel, part in _by_vchannel(table, keys).items():
            self._ensure_segment(table, vchannel, table.partitions[partition])
            items = [f"{item}{key}" for key in part]
            payload = pa.record_batch([pa.array(part, pa.int64()), pa.array(items)], schema=SCHEMA).serialize()
            header = InsertHeader(table.id, table.partitions[partition], 1, len(part))
            message = MutableMessage(MessageType.INSERT, header, vchannel, payload.to_pybytes())
            bodies.append(Body(message, part, items))
        return bodies

    def _deletes(self, table: Table, keys: Sequence[int]) -> list[Body]:
        bodies = []
        for vchannel, part in _by_vchannel(table, keys).items():
            payload = pa.record_batch([pa.array(part, pa.int64())], schema=KEY_SCHEMA).serialize().to_pybytes()
            message = MutableMessage(MessageType.DELETE, DeleteHeader(table.id, len(part)), vchannel, payload)
            bodies.append(Body(message, part, None))
        return bodies

    def _commit_header(self, bodies: Sequence[Body]) -> CommitTxnHeader:
        for body in bodies:
            header: Header = body.message.header
            if isinstance(header, InsertHeader):
                table = self.tables[header.collection_id]
                self._ensure_segment(table, body.message.vchannel, header.partition_id)
        vchannels = tuple(sorted({body.message.vchannel for body in bodies}))
        return CommitTxnHeader(vchannels, tuple(self._assign(body) for body in bodies))

    def _assign(self, body: Body) -> BodyAssignment:
        vchannel, header = body.message.vchannel, body.message.header
        offset = self.next_offsets[vchannel]
        if isinstance(header, InsertHeader):
            self.next_offsets[vchannel] += len(body.keys)
            return BodyAssignment(self.segments[vchannel, header.partition_id], offset)
        return BodyAssignment(0, offset)

    def _write_down(self, bodies: Sequence[Body]) -> None:
        """Offsets are what they were assigned: the last ones of each vchannel, in the order of the bodies."""
        offsets = dict(self.next_offsets)
        for body in reversed(bodies):
            header, vchannel = body.message.header, body.message.vchannel
            if isinstance(header, InsertHeader):
                assert body.items is not None
                offsets[vchannel] -= len(body.keys)
                self.rows += (
                    Row(
                        header.collection_id, header.partition_id, vchannel, self.tick, offsets[vchannel] + i, key, item
                    )
                    for i, (key, item) in enumerate(zip(body.keys, body.items, strict=True))
                )
            elif isinstance(header, DeleteHeader):
                self.deletes += (
                    Row(header.collection_id, -1, vchannel, self.tick, offsets[vchannel], key, None)
                    for key in body.keys
                )

    def _ensure_segment(self, table: Table, vchannel: str, partition_id: int) -> None:
        if (vchannel, partition_id) not in self.segments:
            segment_id = self._id()
            header = CreateSegmentHeader(table.id, partition_id, segment_id, 1, 1 << 30, 1 << 30)
            self._append([MutableMessage(MessageType.CREATE_SEGMENT, header, vchannel)])
            self.segments[vchannel, partition_id] = segment_id

    def _forget(self, table: Table, partition_ids: set[int]) -> None:
        for partition_id in partition_ids:
            self.drops.setdefault((table.id, partition_id), self.tick)
        for key in [key for key in self.segments if key[0] in table.vchannels and key[1] in partition_ids]:
            del self.segments[key]

    def _append(self, messages: list[MutableMessage]) -> None:
        self.tick += MS_PER_APPEND << 18 | 1
        group = AppendGroup(messages)
        oldest = min((position for position, _ in self.streamed.values()), default=None)
        group.stamp_time_tick(self.tick, oldest)
        group.stamp_wal_term(1)
        self.log.append(group)

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


def _by_vchannel(table: Table, keys: Sequence[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for key in keys:
        found.setdefault(table.vchannels[key % len(table.vchannels)], []).append(key)
    return found
