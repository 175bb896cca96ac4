"""A channel in memory for tests: the real interceptors but the time tick's, before a log that can
hold and refuse.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from typing import Self, cast

import anyio
import anyio.lowlevel
import msgspec

from interceptors.chain import Chain, Interceptor, LockInterceptor, RedoInterceptor
from interceptors.idempotency import IdempotencyInterceptor, Sequences
from interceptors.recovery import RecoveredChannel, recover
from interceptors.shard.catalog import CollectionInfo
from interceptors.shard.interceptor import SealWorker, SegmentAllocator, ShardManager
from interceptors.shard.state import SegmentLimits
from interceptors.txn import TxnInterceptor
from interceptors.txn_session import TxnLimits
from tests.wal.packed import FakeTarget, piece, rows_group
from wal.append import AppendGroup, AppendPack, AppendResult, AppendTicket, Pack
from wal.entry import LogEntry, TransactionBuffer, messages_of
from wal.errors import Indeterminate
from wal.headers import (
    BeginTxnHeader,
    CommitTxnHeader,
    CreateCollectionHeader,
    CreatePartitionHeader,
    CutHeader,
    DeleteHeader,
    DropCollectionHeader,
    DropPartitionHeader,
    Header,
    InsertHeader,
    MessageType,
    RollbackTxnHeader,
)
from wal.log import Log, log_end
from wal.memory_store import MemoryLog, MemoryLogStore
from wal.message import AnyMessage, Message, MutableMessage
from wal.packer import Packer
from wal.position import ProducerStamp
from wal.queue import Budget
from wal.rows import Piece
from wal.timetick import TickAllocator, physical_ms

START_MS = 1_000_000


class Fails(Enum):
    """What becomes of a write: whether it fails, and whether the log has it all the same."""

    NOT = auto()
    KEPT = auto()
    LOST = auto()


class SteerableLog:
    """A memory log whose acknowledgements can be held back, whose appends can be refused, and whose
    writes can fail.
    """

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._held: list[asyncio.Future[None]] | None = None
        self.refusal: Callable[[Pack], Exception | None] = lambda _: None
        self.fails: Callable[[Pack], Fails] = lambda _: Fails.NOT

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    def append(self, pack: Pack) -> AppendTicket:
        if error := self.refusal(pack):
            raise error
        if (fails := self.fails(pack)) is not Fails.NOT:
            return self._fail(pack, fails)
        ticket = self._log.append(pack)
        if self._held is None:
            return ticket
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held += [durable, written]
        return AppendTicket(ticket.first_position, written, durable)

    def _fail(self, pack: Pack, fails: "Fails") -> AppendTicket:
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.set_exception(Indeterminate("the write failed"))
        failed.exception()
        if fails is Fails.KEPT:
            ticket = self._log.append(pack)
            return AppendTicket(ticket.first_position, failed, failed)
        first = self._log.next_position
        pack.encode(self._log.wal_name, first_position=first, previous_crc32c=0)
        return AppendTicket(first, failed, failed)

    def hold(self) -> None:
        """Acknowledge nothing until `release`."""
        self._held = []

    def release(self) -> None:
        """Acknowledge everything, in order."""
        held = self._held or []
        self._held = None
        for outcome in held:
            if not outcome.done():  # its appender may have been cancelled
                outcome.set_result(None)


class Stamp(Interceptor):
    """Stands for the time tick interceptor: stamps the tick and the last-confirmed position,
    acknowledges nothing.
    """

    name = "stamp"

    def __init__(self, ticks: TickAllocator, oldest_open_begin: Callable[[], int | None]) -> None:
        self._ticks = ticks
        self._oldest_open_begin = oldest_open_begin

    async def do_append(self, pack: Pack, append: AppendPack) -> None:
        count = len(pack.groups)
        pack.stamp(self._ticks.allocate(count) + count - 1, self._oldest_open_begin())
        await append(pack)


@dataclass
class Limits:
    txn: TxnLimits = field(default_factory=TxnLimits)
    segment: SegmentLimits = field(default_factory=SegmentLimits)


class LiveChannel:
    """Everything between the WAL adaptor and the log, on one memory log."""

    def __init__(
        self,
        memory: MemoryLog,
        recovered: RecoveredChannel,
        now_ms: int,
        limits: Limits,
        *,
        log: SteerableLog | None = None,
        sequences: Sequences | None = None,
    ) -> None:
        self.memory = memory
        self.log = log or SteerableLog(memory)
        self.now_ms = now_ms
        """The machine's clock, which ticks follow; `pass_ms` moves both."""
        self.steady_ms = 0
        self.pauses: list[float] = []
        self.ticks = TickAllocator(lambda: self.now_ms, lambda: self.now_ms, above=memory.last_tick)
        self.txn = TxnInterceptor(
            limits.txn,
            Budget(1 << 40),
            at_tick=self.ticks.allocate(),
            open_transactions=recovered.open_transactions,
            fences=recovered.fences,
            now_ms=lambda: self.steady_ms,
        )
        self.shard = ShardManager(
            recovered.shard_state, bodies_of=self.txn.bodies_of, limits=limits.segment
        )
        self.allocator = SegmentAllocator(self.shard, sleep=self._pause)
        self.sealer = SealWorker(self.shard, last_tick=self.ticks.allocate)
        self.sequences = Sequences() if sequences is None else sequences
        self.idempotency = IdempotencyInterceptor(recovered.window, self.sequences)
        self.lock = LockInterceptor(self.txn.scope_of, self.txn.overtake)
        interceptors: list[Interceptor] = [
            self.idempotency,
            RedoInterceptor(),
            self.lock,
            Stamp(self.ticks, self.txn.oldest_open_begin),
            self.txn,
            self.shard,
        ]
        self.chain = Chain(interceptors, log_end(cast("Log", self.log)))
        self.append_pack = self.chain.append
        self.packer = Packer(self._send, Budget(1 << 40))

    async def _send(self, pack: Pack) -> None:
        await self.append_pack(pack)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, memory: MemoryLog | None = None, limits: Limits | None = None, *, later_ms: int = 1
    ) -> AsyncIterator[Self]:
        """Recover from the start of `memory` (an empty log if None), `later_ms` after its end, and
        run the allocator.
        """
        memory = memory or await MemoryLogStore().open_log("p0")
        now_ms = max(START_MS, physical_ms(memory.last_tick) + later_ms)
        channel = cls(memory, await recover(memory), now_ms, limits or Limits())
        # A task group may not span the yield of a fixture: a crash of the allocator would cancel
        # the test runner.
        allocating = asyncio.get_running_loop().create_task(
            channel.allocator.run(channel.append_group)
        )
        try:
            yield channel
        finally:
            allocating.cancel()
            with suppress(asyncio.CancelledError):
                await allocating

    def pass_ms(self, duration_ms: int) -> None:
        """Let time pass."""
        self.now_ms += duration_ms
        self.steady_ms += duration_ms

    @property
    def resume_position(self) -> int:
        """The last-confirmed position that the next message would carry."""
        oldest = self.txn.oldest_open_begin()
        return self.memory.next_position if oldest is None else oldest

    async def append_group(self, group: AppendGroup) -> AppendResult:
        """Append a group alone."""
        await self.append_pack(Pack([group]))
        return group.result()

    async def append(self, *what: Piece | MutableMessage) -> AppendResult:
        """Append rows, or messages, as one group."""
        return await self.append_group(group_of(*what))

    async def transact(self, *pieces: Piece) -> AppendResult:
        """Append a buffered transaction."""
        return await self.append_group(rows_group(*pieces, is_transaction=True))

    def start(self, *groups: AppendGroup) -> list[asyncio.Task[AppendResult]]:
        """Start the appends of groups that come in one turn of the loop, beside others: they are
        one pack at first.
        """
        self.packer._together = True

        async def append(group: AppendGroup) -> AppendResult:
            return await self.packer.append(group)

        return [asyncio.get_running_loop().create_task(append(group)) for group in groups]

    async def pack(self, *groups: AppendGroup) -> list[AppendResult | BaseException]:
        """Append groups that come together; return what each of them came to."""
        return await asyncio.gather(*self.start(*groups), return_exceptions=True)

    async def create_collection(self, name: str, *, shards: int = 1) -> CollectionInfo:
        """Create a collection as the node does."""
        number = self.shard.allocate_id()
        vchannels = tuple(f"p0_{number}v{shard}" for shard in range(shards))
        partitions = ((self.shard.allocate_id(), "_default"),)
        header = CreateCollectionHeader(number, name, b"schema", 1, "id", vchannels, partitions)
        await self.append(*parts(MessageType.CREATE_COLLECTION, header, vchannels))
        return self.shard.catalog.collection_by_name(name)

    async def drop_collection(self, info: CollectionInfo) -> None:
        """Drop a collection as the node does."""
        await self.append(
            *parts(MessageType.DROP_COLLECTION, DropCollectionHeader(info.id), info.vchannels)
        )

    async def create_partition(self, info: CollectionInfo, name: str) -> int:
        """Create a partition as the node does; return its id."""
        header = CreatePartitionHeader(info.id, self.shard.allocate_id(), name)
        await self.append(*parts(MessageType.CREATE_PARTITION, header, info.vchannels))
        return header.partition_id

    async def drop_partition(self, info: CollectionInfo, partition_id: int) -> None:
        """Drop a partition as the node does."""
        header = DropPartitionHeader(info.id, partition_id)
        await self.append(*parts(MessageType.DROP_PARTITION, header, info.vchannels))

    async def cut(self) -> AppendResult:
        """Make a cut."""
        return await self.append(MutableMessage(MessageType.CUT, CutHeader()))

    async def begin(self, keepalive_ms: int = 0) -> int:
        """Begin a streamed transaction; return its id."""
        return (await self.append(begin(keepalive_ms))).txn_id

    async def commit(self, txn_id: int) -> AppendResult:
        """Commit a streamed transaction."""
        return await self.append(commit(txn_id))

    async def rollback(self, txn_id: int) -> AppendResult:
        """Roll a streamed transaction back."""
        return await self.append(
            MutableMessage(MessageType.ROLLBACK_TXN, RollbackTxnHeader("asked"), txn_id=txn_id)
        )

    async def entries(self) -> list[LogEntry]:
        """Return all entries of the log."""
        return await self.memory.read(self.memory.first_position, bytes_max=1 << 40)

    async def visible(self) -> list[AnyMessage]:
        """Return what readers see of the log."""
        buffer = TransactionBuffer()
        return [
            message
            for entry in await self.entries()
            for message in messages_of(buffer.observe(entry))
        ]

    async def types(self) -> list[MessageType]:
        """Return the types of all messages in the log, without begins and commits around packed
        rows.
        """
        return [message.type for message in await self.messages()]

    async def messages(self) -> list[Message]:
        """Return all messages in the log, without begins and commits around packed rows."""
        return [message for entry in await self.entries() for message in messages_in(entry)]

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await anyio.lowlevel.checkpoint()


def parts(kind: MessageType, header: Header, vchannels: Iterable[str]) -> list[MutableMessage]:
    """Return one message for each vchannel, as DDL has them."""
    return [MutableMessage(kind, header, vchannel) for vchannel in vchannels]


@cache
def target_of(
    kind: MessageType,
    collection_id: int,
    partition_id: int,
    schema_version: int,
    vchannels: tuple[str, ...],
) -> FakeTarget:
    """Return the target of rows that may share a batch."""
    return FakeTarget(
        kind,
        collection_id,
        partition_id=partition_id,
        schema_version=schema_version,
        vchannels=vchannels,
    )


def insert(info: CollectionInfo, rows: int = 1, *, shard: int = 0, **fields: int) -> Piece:
    """Return an insert of `rows` rows of 10 bytes each into the default partition."""
    ids = {
        "collection_id": info.id,
        "partition_id": info.partitions[0].id,
        "schema_version": info.schema_version,
    }
    target = target_of(MessageType.INSERT, **(ids | fields), vchannels=info.vchannels)
    return piece(target, *[(shard, b"x" * 10)] * rows)


def delete(info: CollectionInfo, keys: int = 1, *, shard: int = 0) -> Piece:
    """Return a delete of `keys` keys."""
    return piece(
        target_of(MessageType.DELETE, info.id, 0, 0, info.vchannels), *[(shard, b"k")] * keys
    )


def insert_body(
    info: CollectionInfo, rows: int = 1, *, shard: int = 0, txn_id: int, **fields: int
) -> MutableMessage:
    """Return the same insert for a streamed transaction."""
    header = InsertHeader(info.id, info.partitions[0].id, info.schema_version, rows)
    header = msgspec.structs.replace(header, **fields)
    return MutableMessage(
        MessageType.INSERT, header, info.vchannels[shard], b"x" * 10 * rows, txn_id
    )


def delete_body(
    info: CollectionInfo, keys: int = 1, *, shard: int = 0, txn_id: int
) -> MutableMessage:
    """Return the same delete for a streamed transaction."""
    return MutableMessage(
        MessageType.DELETE, DeleteHeader(info.id, keys), info.vchannels[shard], b"k" * keys, txn_id
    )


def group_of(*what: Piece | MutableMessage, producer: ProducerStamp | None = None) -> AppendGroup:
    """Return a group of rows, or of messages, as a write of this stamp."""
    pieces = [each for each in what if isinstance(each, Piece)]
    messages = [each for each in what if isinstance(each, MutableMessage)]
    assert not (pieces and messages), "rows and messages share no group"
    group = rows_group(*pieces) if pieces else AppendGroup(messages)
    group.producer = producer
    return group


def messages_in(entry: LogEntry) -> list[Message]:
    """Return the messages of an entry, without begins and commits around packed rows."""
    if entry.rows is None:
        return list(entry.messages)
    return [body for message in entry.rows.messages() for body in message.bodies]


def begin(keepalive_ms: int = 0) -> MutableMessage:
    """Return the begin of a transaction."""
    return MutableMessage(MessageType.BEGIN_TXN, BeginTxnHeader(keepalive_ms))


def commit(txn_id: int) -> MutableMessage:
    """Return the commit of a transaction."""
    return MutableMessage(MessageType.COMMIT_TXN, CommitTxnHeader(), txn_id=txn_id)


async def settle_tasks() -> None:
    """Let every task run until it waits for something that only the test can bring about."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()
