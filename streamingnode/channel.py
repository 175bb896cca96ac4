"""One pchannel put together: its WAL with the interceptors around it, the live tail, the scanners and the background work.

In: an open store and the node's tick allocator. Out: a `Channel` that takes appends and gives out readers. This and
`composition` are the only places where parts meet. Opening goes: first tick of the term durable, state rebuilt from the
checkpoint and the log, chain built on it, appends pass.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from flusher.checkpoint import Checkpoint, checkpoint_key, decode_checkpoint
from interceptors.chain import Chain
from interceptors.lock import LockInterceptor
from interceptors.recovery import RecoveredChannel, recover
from interceptors.redo import RedoInterceptor, RedoLimits
from interceptors.shard.allocator import SegmentAllocator
from interceptors.shard.interceptor import ShardInterceptor
from interceptors.shard.manager import ShardManager
from interceptors.shard.seal_policy import SegmentLimits
from interceptors.shard.seal_worker import SealWorker
from interceptors.timetick.ack_manager import AckManager
from interceptors.timetick.inspector import TimeTickInspector
from interceptors.timetick.interceptor import TimeTickInterceptor
from interceptors.timetick.mvcc import MvccManager
from interceptors.timetick.release import ReaderRelease
from interceptors.timetick.sync_operator import TimeTickSyncOperator
from interceptors.txn.interceptor import TxnInterceptor
from interceptors.txn.manager import TxnManager
from interceptors.txn.rollback_worker import RollbackWorker
from interceptors.txn.session import TxnLimits
from scanner.deliver_policy import DeliverPolicy
from scanner.registry import ScannerRegistry
from scanner.scanner import ScanLimits, Scanner
from wal.adaptor import Wal, WalLimits
from wal.append import Append, AppendGroup, AppendObserver, AppendResult
from wal.headers import CutHeader
from wal.live_tail import LiveTail
from wal.log import Log, LogStore
from wal.message import LogEntry, MutableMessage
from wal.message_type import MessageType
from wal.timetick import TickAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """Limits of one channel's parts; each part says what its own mean."""

    wal: WalLimits
    redo: RedoLimits
    txn: TxnLimits
    segments: SegmentLimits
    scan: ScanLimits
    tail_capacity_bytes: int
    tail_age_s: float
    tick_interval_s: float


class Worker(Protocol):
    """Background work of a channel; ends by itself when the log takes no more appends."""

    async def run(self, append: Append) -> None:
        """Work until cancelled or until the log is closed."""


@dataclass(slots=True)
class Channel:
    """An open pchannel; `workers` are for the node to run, with `append`. `checkpoint` is what it was opened from."""

    wal: Wal[DeliverPolicy, Scanner]
    log: Log
    tail: LiveTail
    scanners: ScannerRegistry
    shards: ShardManager
    transactions: TxnManager
    mvcc: MvccManager
    ticks: TimeTickSyncOperator
    workers: tuple[Worker, ...]
    checkpoint: Checkpoint
    _cutting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def append(self, group: AppendGroup) -> AppendResult:
        """Append a group through the chain; see `Wal.append`."""
        return await self.wal.append(group)

    async def request_cut(self) -> int:
        """Cut if there is something to cut, and return the number of the cut that covers everything before the call.

        That is 0 when there has never been anything to cut. Requests that come together share one cut. Raises as an append,
        also when the newest cut is in the log's queue and its write fails.
        """
        async with self._cutting:
            if self.shards.something_to_cut:
                await self.append(AppendGroup([MutableMessage(MessageType.CUT, CutHeader())]))
            else:
                await self.ticks.sync()
            return self.shards.state.cut_number

    async def close(self) -> None:
        """Drain appends, then end the readers; the log stays the store's."""
        await self.wal.close()
        await self.scanners.close()
        self.tail.close()


@asynccontextmanager
async def open_channel(
    store: LogStore,
    pchannel: str,
    *,
    ticks: TickAllocator,
    options: ChannelOptions,
    observer: AppendObserver | None = None,
) -> AsyncIterator[Channel]:
    """Open a pchannel of `store` and close it on the way out. Raises what recovery and the log raise."""
    checkpoint = decode_checkpoint(await store.get_meta(checkpoint_key(pchannel)))
    builder = _ChannelBuilder(store, pchannel, ticks, options)

    async def recover_log(log: Log, _first_tick: LogEntry) -> RecoveredChannel:
        return await recover(
            log, position=checkpoint.position, tick=checkpoint.tick, shard_state=checkpoint.shard_state
        )

    wal: Wal[DeliverPolicy, Scanner] = await Wal.open(
        store,
        pchannel,
        ticks=ticks,
        recover=recover_log,
        build_chain=lambda recovered, log, first_tick, end: builder.build(recovered, log, first_tick, end, observer),
        read=lambda policy: builder.scanners.open(policy),  # noqa: PLW0108  (made when the chain is built)
        limits=options.wal,
        observer=observer,
    )
    channel = builder.channel(wal, checkpoint)
    try:
        yield channel
    finally:
        await channel.close()


class _ChannelBuilder:
    """The parts of a channel in the order in which they can be made: most need what recovery found."""

    def __init__(self, store: LogStore, pchannel: str, ticks: TickAllocator, options: ChannelOptions) -> None:
        self._store = store
        self._pchannel = pchannel
        self._ticks = ticks
        self._options = options
        self.tail = LiveTail(capacity_bytes=options.tail_capacity_bytes, age_s=options.tail_age_s)

    def build(
        self,
        recovered: RecoveredChannel,
        log: Log,
        first_tick: LogEntry,
        end: Append,
        observer: AppendObserver | None,
    ) -> Chain:
        """Return the chain, outermost interceptor first; ADR 0003 gives the reasons for the order."""
        self.log = log
        self.scanners = ScannerRegistry(log, self.tail, limits=self._options.scan)
        self.transactions = TxnManager.recovered(
            recovered.open_transactions, fences=recovered.fences, limits=self._options.txn
        )
        self.shards = ShardManager(
            recovered.shard_state, bodies_of=self.transactions.bodies_of, limits=self._options.segments
        )
        self.tail.start(next_position=first_tick.last_position + 1, confirmed_tick=first_tick.time_tick)
        self.mvcc = MvccManager(first_tick.time_tick)
        self._acks = AckManager(
            self._ticks,
            confirmed_tick=first_tick.time_tick,
            release=ReaderRelease(self.tail, self.mvcc, self._store.promise_tick),
        )
        self.sync_operator = TimeTickSyncOperator(self._acks, source_id=self._store.node_id)
        self._make_workers()
        return Chain.of(self._interceptors(log), end, observer=observer)

    def _make_workers(self) -> None:
        self._allocator = SegmentAllocator(self.shards)
        self._sealer = SealWorker(self.shards, last_tick=self._last_tick)
        self.workers: tuple[Worker, ...] = (
            self._allocator,
            self._sealer,
            RollbackWorker(self.transactions, last_tick=self._last_tick),
            TimeTickInspector(self.sync_operator, interval_s=self._options.tick_interval_s),
        )

    def _last_tick(self) -> int:
        return self._ticks.last

    def _interceptors(
        self, log: Log
    ) -> tuple[RedoInterceptor, LockInterceptor, TimeTickInterceptor, TxnInterceptor, ShardInterceptor]:
        return (
            RedoInterceptor(self._options.redo),
            LockInterceptor(fail_transactions=self.transactions.fail_at, scope_of=self.transactions.scope_of),
            TimeTickInterceptor(
                wal_name=log.wal_name,
                ticks=self._ticks,
                acks=self._acks,
                oldest_open_begin=self.transactions.oldest_open_begin,
                mvcc=self.mvcc,
            ),
            TxnInterceptor(self.transactions),
            ShardInterceptor(self.shards, self._allocator, self._sealer),
        )

    def channel(self, wal: Wal[DeliverPolicy, Scanner], checkpoint: Checkpoint) -> Channel:
        """Return the finished channel."""
        return Channel(
            wal=wal,
            log=self.log,
            tail=self.tail,
            scanners=self.scanners,
            shards=self.shards,
            transactions=self.transactions,
            mvcc=self.mvcc,
            ticks=self.sync_operator,
            workers=self.workers,
            checkpoint=checkpoint,
        )
