"""A log that is only its append: it numbers what it is given, can be held, and can be made to
fail.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pyarrow as pa

from interceptors.errors import CollectionNotFound
from interceptors.shard.catalog import CollectionInfo, PartitionInfo
from streamingnode.backend import Backend
from streamingnode.config import NodeConfig
from streamingnode.schema import encode_schema
from streamingnode.writing.target import WriteTarget
from streamingnode.writing.write import Writes
from wal.adaptor import WalLimits
from wal.append import AppendGroup, AppendResult
from wal.entry import U4, U8, PackedRows
from wal.headers import BeginTxnHeader, CommitTxnHeader, DeleteHeader, InsertHeader, MessageType
from wal.message import Message, MutableMessage
from wal.position import MemoryMessageId
from wal.queue import PendingBytes
from wal.rows import encode_pieces, lay_out

PCHANNEL = "p0"
COLLECTION_ID = 7
DEFAULT_PARTITION_ID = 8
EU_PARTITION_ID = 9
Logged = MutableMessage | Message
"""What an append double has of a group: its messages, or those that its rows are in an entry."""


class AppendDouble:
    """Ticks and positions from 1; row offsets for each vchannel. `hold` makes appends wait until
    `let_go`.
    """

    def __init__(self) -> None:
        self.groups: list[AppendGroup] = []
        self.error: Exception | None = None
        self.refuse: Callable[[AppendGroup], Exception | None] = lambda _: None
        self.in_flight = 0
        self._next_position = 1
        self._tick = 0
        self._offsets: dict[str, int] = defaultdict(int)
        self._arrived = asyncio.Event()
        self._gate = asyncio.Event()
        self._gate.set()
        self.config = NodeConfig()
        self.pending = PendingBytes(1 << 30)

    async def append(self, group: AppendGroup) -> AppendResult:
        error = self.error or self.refuse(group)
        if error is not None:
            raise error
        self.in_flight += 1
        self._arrived.set()
        try:
            await self._gate.wait()
        finally:
            self.in_flight -= 1
        return self._take(group)

    async def consistent_tick(self) -> int:
        return self._tick

    def hold(self) -> None:
        self._gate.clear()

    def let_go(self) -> None:
        self._gate.set()

    async def arrival(self) -> None:
        """Return once an append was ever begun."""
        await self._arrived.wait()

    @property
    def messages(self) -> list[Logged]:
        return [message for group in self.groups for message in messages_in(group)]

    def rows(self, schema: pa.Schema, *, vchannel: str | None = None) -> list[dict[str, object]]:
        """Return the inserted rows, in log order."""
        return [
            row
            for message in self.messages
            if message.type is MessageType.INSERT and vchannel in (None, message.vchannel)
            for row in decoded(message, schema)
        ]

    def _take(self, group: AppendGroup) -> AppendResult:
        self.groups.append(group)
        self._tick += 1
        messages = messages_in(group, self._tick)
        first = self._next_position
        self._next_position = self._next_position + len(messages)
        offsets: dict[str, tuple[int, int]] = {}
        for message in messages:
            if isinstance(message.header, InsertHeader):
                known, count = offsets.get(message.vchannel, (self._offsets[message.vchannel], 0))
                offsets[message.vchannel] = known, count + message.header.rows
                self._offsets[message.vchannel] += message.header.rows
        head = messages[0]
        return AppendResult(
            kind=MemoryMessageId,
            first_position=first,
            count=len(messages),
            time_tick=self._tick,
            last_confirmed_position=first,
            txn_id=head.txn_id or (self._tick if head.type is MessageType.BEGIN_TXN else 0),
            row_offsets=offsets,
        )


def messages_in(group: AppendGroup, tick: int = 1) -> list[Logged]:
    """Return the messages of a group, rows encoded as in a log entry; a transaction has begin and
    commit.
    """
    if group.messages:
        return list(group.messages)
    no_rows = dict.fromkeys(
        [vchannel for piece in group.pieces for vchannel in piece.target.vchannels], 0
    )
    laid_out = lay_out(
        [group.pieces], [group.is_transaction], encode_pieces([group.pieces]), next_offsets=no_rows
    )
    rows = PackedRows(
        wal_name=MemoryMessageId.wal_name,
        wal_term=1,
        last_confirmed_position=0,
        ticks=np.array([tick], U8),
        positions=np.zeros(1, U8),
        counts=np.array(laid_out.counts, U4),
        transactions=np.array([group.is_transaction]),
        batches=tuple(laid_out.batches),
        time_tick=tick,
        position=laid_out.counts[0] - 1,
    )
    bodies = [body for message in rows.messages() for body in message.bodies]
    if not group.is_transaction:
        assert len(bodies) == laid_out.counts[0]
        return [*bodies]
    assert len(bodies) + 2 == laid_out.counts[0]
    begin = MutableMessage(MessageType.BEGIN_TXN, BeginTxnHeader(0))
    return [begin, *bodies, MutableMessage(MessageType.COMMIT_TXN, CommitTxnHeader())]


def schema_of(**columns: pa.DataType) -> pa.Schema:
    """Return a schema of nullable columns."""
    return pa.schema(list(columns.items()))


def decoded(message: Logged, schema: pa.Schema) -> list[dict[str, object]]:
    """Return the rows or keys a message carries."""
    header = message.header
    assert isinstance(header, (InsertHeader, DeleteHeader))
    batch = pa.ipc.read_record_batch(pa.py_buffer(message.payload), schema)
    first_row = message.first_row if isinstance(message, Message) else 0
    return batch.slice(first_row, header.rows).to_pylist()


def collection_info(
    schema: pa.Schema, *, primary_key: str = "id", shards: int = 1, name: str = "orders"
) -> CollectionInfo:
    """Return a collection as the catalog would have it, with the partitions `_default` and `eu`."""
    return CollectionInfo(
        id=COLLECTION_ID,
        name=name,
        schema=encode_schema(schema),
        schema_version=1,
        primary_key=primary_key,
        vchannels=tuple(f"{PCHANNEL}_{COLLECTION_ID}v{shard}" for shard in range(shards)),
        partitions=(
            PartitionInfo(DEFAULT_PARTITION_ID, "_default", 1),
            PartitionInfo(EU_PARTITION_ID, "eu", 1),
        ),
        created_tick=1,
    )


def write_target(schema: pa.Schema, *, primary_key: str = "id", shards: int = 1) -> WriteTarget:
    """Return the target of such a collection."""
    return WriteTarget(collection_info(schema, primary_key=primary_key, shards=shards))


def writes_on(
    log: AppendDouble,
    *infos: CollectionInfo,
    group_bytes_max: int = 4 << 20,
    group_messages_max: int = 1_000,
    pending: PendingBytes | None = None,
) -> Writes:
    """Return what writes to these collections on `log` share."""
    known = {info.name: info for info in infos}

    def find(name: str) -> CollectionInfo:
        if name not in known:
            raise CollectionNotFound(name)
        return known[name]

    limits = WalLimits(group_bytes_max=group_bytes_max, group_messages_max=group_messages_max)
    log.config = NodeConfig(wal=limits)
    log.pending = pending or PendingBytes(1 << 30)
    return Writes(cast(Backend, log), find)


def types_of(group: AppendGroup) -> Sequence[str]:
    return [message.type.name for message in messages_in(group)]
