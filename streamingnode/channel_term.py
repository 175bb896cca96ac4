"""One term of a pchannel put together: its WAL with the interceptors around it, and the workers that append to it.

In: what outlives terms (store, log, live tail, scanners, producers, ticks). Out: a `ChannelTerm` that takes appends. Opening
goes: first tick of the term durable, state rebuilt from the checkpoint and the log, chain built on it, appends pass. A term
ends once and is thrown away; `streamingnode.channel` opens the next one.
"""

from dataclasses import dataclass
from typing import Protocol

from flusher.checkpoint import Checkpoint, checkpoint_key, decode_checkpoint
from interceptors.chain import Chain, LockInterceptor, RedoInterceptor, RoomInterceptor
from interceptors.idempotency import IdempotencyInterceptor, Producers
from interceptors.recovery import RecoveredChannel, recover
from interceptors.shard.interceptor import SealWorker, SegmentAllocator, ShardManager
from interceptors.shard.state import SegmentLimits
from interceptors.timetick import (
    AckManager,
    MvccManager,
    TimeTickInspector,
    TimeTickInterceptor,
    TimeTickSyncOperator,
)
from interceptors.txn import RollbackWorker, TxnInterceptor
from interceptors.txn_session import TxnLimits
from interceptors.window import ProducerLimits
from scanner.deliver_policy import DeliverPolicy
from scanner.scanner import Scanner, ScannerRegistry
from streamingnode.log_state import ReopenOptions
from wal.adaptor import Wal, WalLimits
from wal.failpoint import failpoint
from wal.live_tail import LiveTail
from wal.log import Append, AppendGroup, AppendObserver, Interceptor, Log, LogStore
from wal.message import LogEntry
from wal.position import message_id_kind
from wal.queue import PendingBytes
from wal.timetick import TickAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """Limits of one channel's parts; each part says what its own mean. Seconds, bytes."""

    wal: WalLimits
    txn: TxnLimits
    producers: ProducerLimits
    segments: SegmentLimits
    tail_capacity_bytes: int
    tick_interval_s: float
    time_interceptors: bool = False
    reopen: ReopenOptions


class Worker(Protocol):
    """Background work of a term; ends by itself when the log takes no more appends."""

    async def run(self, append: Append) -> None:
        """Work until cancelled or until the log is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelParts:
    """What a channel keeps over its terms: readers hold on to these and so go on by themselves."""

    store: LogStore
    log: Log
    tail: LiveTail
    scanners: ScannerRegistry
    producers: Producers
    ticks: TickAllocator
    options: ChannelOptions
    pending: PendingBytes
    observer: AppendObserver | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelTerm:
    """What a channel has in one term only. `workers` append to `wal`; `checkpoint` is what the term was rebuilt from."""

    wal: Wal[DeliverPolicy, Scanner]
    shards: ShardManager
    transactions: TxnInterceptor
    idempotency: IdempotencyInterceptor
    acks: AckManager
    mvcc: MvccManager
    ticks: TimeTickSyncOperator
    workers: tuple[Worker, ...]
    checkpoint: Checkpoint

    async def cut(self, cut: AppendGroup) -> int:
        """Append a cut if there is something to cut, and return the number of the last cut."""
        if self.shards.something_to_cut:
            failpoint("flush.cut_requested")
            await self.wal.append(cut)
            failpoint("flush.cut_logged")
        else:
            await self.ticks.sync()
        return self.shards.state.cut_number

    async def end(self) -> None:
        """Drain the appends, then let nobody wait for a tick of this term, nor give one out; idempotent."""
        await self.wal.close()
        self.acks.end()
        self.transactions.end()


async def open_term(parts: ChannelParts) -> ChannelTerm:
    """Open the store's present term of the log. Raises what recovery and the log raise; nothing is left open then."""
    checkpoint = decode_checkpoint(await parts.store.get_meta(checkpoint_key(parts.log.name)))
    builder = _TermBuilder(parts)

    async def recover_log(log: Log, _first_tick: LogEntry) -> RecoveredChannel:
        return await recover(
            log,
            position=checkpoint.start_position,
            tick=checkpoint.tick,
            shard_state=checkpoint.shard_state,
            producers=checkpoint.producers,
            producer_limits=parts.options.producers,
            held=parts.producers.places.writes(),
        )

    wal: Wal[DeliverPolicy, Scanner] = await Wal.open(
        parts.store,
        parts.log.name,
        ticks=parts.ticks,
        recover=recover_log,
        build_chain=builder.build,
        read=parts.scanners.open,
        limits=parts.options.wal,
        observer=parts.observer,
    )
    return builder.term(wal, checkpoint)


class _TermBuilder:
    """The parts of a term in the order in which they can be made: most need what recovery found."""

    def __init__(self, parts: ChannelParts) -> None:
        self._parts = parts

    def build(self, recovered: RecoveredChannel, log: Log, first_tick: LogEntry, end: Append) -> Chain:
        """Return the chain, outermost interceptor first; ADR 0003 gives the reasons for the order."""
        parts, options, confirmed_tick = self._parts, self._parts.options, first_tick.time_tick
        self.transactions = TxnInterceptor(
            options.txn,
            parts.pending.transactions,
            at_tick=confirmed_tick,
            open_transactions=recovered.open_transactions,
            fences=recovered.fences,
            commits=recovered.commits,
        )
        self.shards = ShardManager(
            recovered.shard_state, bodies_of=self.transactions.bodies_of, limits=options.segments
        )
        self.idempotency = IdempotencyInterceptor(
            recovered.window, parts.producers.places, message_id_kind(log.wal_name)
        )
        parts.producers.bind(self.idempotency)
        parts.tail.start(next_position=first_tick.last_position + 1, confirmed_tick=confirmed_tick)
        self.mvcc = MvccManager(confirmed_tick)
        self.acks = AckManager(parts.ticks, confirmed_tick=confirmed_tick, tail=parts.tail, mvcc=self.mvcc)
        self.sync_operator = TimeTickSyncOperator(self.acks, promise_tick=parts.store.promise_tick)
        self._make_workers()
        return Chain(self._interceptors(log), end, observer=parts.observer if options.time_interceptors else None)

    def _make_workers(self) -> None:
        self.workers: tuple[Worker, ...] = (
            SegmentAllocator(self.shards),
            SealWorker(self.shards, last_tick=lambda: self._parts.ticks.last),
            RollbackWorker(self.transactions),
            TimeTickInspector(self.sync_operator, interval_s=self._parts.options.tick_interval_s),
        )

    def _interceptors(self, log: Log) -> tuple[Interceptor, ...]:
        return (
            self.idempotency,
            RoomInterceptor(log.admit, self._parts.pending.appends),
            RedoInterceptor(),
            LockInterceptor(self.transactions.scope_of, self.transactions.overtake),
            TimeTickInterceptor(
                wal_name=log.wal_name, acks=self.acks, oldest_open_begin=self.transactions.oldest_open_begin
            ),
            self.transactions,
            self.shards,
        )

    def term(self, wal: Wal[DeliverPolicy, Scanner], checkpoint: Checkpoint) -> ChannelTerm:
        """Return the finished term."""
        return ChannelTerm(
            wal=wal,
            shards=self.shards,
            transactions=self.transactions,
            idempotency=self.idempotency,
            acks=self.acks,
            mvcc=self.mvcc,
            ticks=self.sync_operator,
            workers=self.workers,
            checkpoint=checkpoint,
        )
