"""One pchannel of an open node: its WAL, its readers' parts, and the interceptors of each term.

The parts of a term are discarded together and built again by the code that opens a node. The log,
the live tail and the scanners stay: a scanner at the tail finds it restarted, returns to the log at
its own position, and misses and repeats nothing.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

import anyio
import msgspec

from flusher.flusher import Flusher
from flusher.manifest import Checkpoint, SegmentFile, checkpoint_key, decode_checkpoint
from interceptors.chain import Chain, LockInterceptor, RedoInterceptor, RoomInterceptor
from interceptors.errors import CollectionNotFound, ProducerFenced
from interceptors.idempotency import IdempotencyInterceptor, Producers
from interceptors.recovery import RecoveredChannel, recover
from interceptors.shard.catalog import Catalog, CollectionInfo
from interceptors.shard.interceptor import SealWorker, SegmentAllocator, ShardManager
from interceptors.timetick import (
    AckManager,
    MvccManager,
    TimeTickInspector,
    TimeTickInterceptor,
    TimeTickSyncOperator,
)
from interceptors.txn import TxnInterceptor
from interceptors.window import encode_window
from scanner.deliver_policy import DeliverPolicy
from scanner.named_reader import ReaderPosition
from scanner.scanner import ScannerRegistry
from streamingnode.config import NodeConfig
from wal.adaptor import Wal
from wal.append import Append, AppendGroup, AppendObserver, AppendPack, AppendResult
from wal.entry import LogEntry
from wal.errors import InvalidArgument, StreamingNodeError
from wal.failpoint import failpoint
from wal.files import disk_errors_typed
from wal.headers import CutHeader, MessageType
from wal.live_tail import LiveTail
from wal.log import Log, LogStore, StateMap
from wal.message import MutableMessage
from wal.position import ProducerStamp
from wal.queue import PendingBytes
from wal.runtime import Supervisor, in_thread
from wal.timetick import TickAllocator


class ChannelTerm:
    """The parts of a channel for one term: the interceptors around its log and the workers that
    append to it.
    """

    def __init__(
        self,
        channel: "Channel",
        checkpoint: Checkpoint,
        found: RecoveredChannel,
        first_tick: LogEntry,
        end: AppendPack,
    ) -> None:
        config = channel.config
        pending = channel.pending
        confirmed_tick = first_tick.time_tick
        self.checkpoint = checkpoint
        """The checkpoint that the term was rebuilt from."""
        self.transactions = TxnInterceptor(
            config.txn,
            pending.transactions,
            at_tick=confirmed_tick,
            open_transactions=found.open_transactions,
            fences=found.fences,
            commits=found.commits,
            asked_ms=channel.wal.asked_ms,
        )
        self.shards = ShardManager(
            found.shard_state, bodies_of=self.transactions.bodies_of, limits=config.segments
        )
        self.idempotency = IdempotencyInterceptor(found.window, channel.producers.sequences)
        channel.producers.bind(self.idempotency)
        channel.tail.start(
            next_position=first_tick.last_position + 1, confirmed_tick=confirmed_tick
        )
        self.mvcc = MvccManager(confirmed_tick)
        self.acks = AckManager(
            channel.ticks, confirmed_tick=confirmed_tick, tail=channel.tail, mvcc=self.mvcc
        )
        self.ticks = TimeTickSyncOperator(self.acks, promise_tick=channel.store.promise_tick)
        self._workers = (
            SegmentAllocator(self.shards),
            SealWorker(self.shards, last_tick=lambda: channel.ticks.last),
            self.transactions,
            TimeTickInspector(self.ticks, interval_s=config.ticks.interval_s),
        )
        chain = Chain(
            (  # outermost first; ADR 0003 gives the reasons for the order
                self.idempotency,
                RoomInterceptor(channel.log.admit, pending.appends),
                RedoInterceptor(),
                LockInterceptor(self.transactions.scope_of, self.transactions.overtake),
                TimeTickInterceptor(
                    acks=self.acks, oldest_open_begin=self.transactions.oldest_open_begin
                ),
                self.transactions,
                self.shards,
            ),
            end,
            observer=channel.observer if channel.time_interceptors else None,
        )
        self.append = chain.append
        self.ready = chain.ready
        self.close = chain.close

    async def work(self, append: Append, failed: Callable[[], Awaitable[None]]) -> None:
        """Run the workers until the store has failed; raises a worker's error unchanged."""
        over = asyncio.Event()
        workers = Supervisor(lambda _: over.set())

        async def watch() -> None:
            await failed()
            over.set()

        try:
            for work in (watch(), *(worker.run(append) for worker in self._workers)):
                workers.spawn(work)
            await over.wait()
            if workers.failure is not None:
                raise workers.failure
        finally:
            with anyio.CancelScope(shield=True):
                await workers.stop()

    def end(self) -> None:
        """Fail all waits for a tick of this term, and allocate no more; idempotent."""
        self.acks.end()
        self.transactions.end()


class StateInTerm:
    """The state map of a store whose log is reopened after a failed write.

    If a failed write leaves a change open, the next term makes it again.
    """

    def __init__(self, state: StateMap, wal: Wal) -> None:
        self._state = state
        self._wal = wal
        self.get = state.get
        self.scan = state.scan

    async def put(self, changes: Mapping[str, bytes | None]) -> None:
        """Set keys as `wal.log.StateMap.put`. Raises as `Wal.in_term`."""
        await self._wal.in_term(partial(self._state.put, changes))


class Channel:
    """An open pchannel; `open` comes first. Lives on the event loop."""

    def __init__(
        self,
        store: LogStore,
        log: Log,
        *,
        config: NodeConfig,
        ticks: TickAllocator,
        observer: AppendObserver,
        time_interceptors: bool,
        explain: Callable[[StreamingNodeError], None],
        recovered: Callable[[int, int, float], None] | None = None,
    ) -> None:
        self.store = store
        self.log = log
        self.config = config
        self.ticks = ticks
        self.observer = observer
        self.time_interceptors = time_interceptors
        self._recovered = recovered
        self.pending = PendingBytes(config.writes.pending_bytes_max)
        self.tail = LiveTail(capacity_bytes=config.tail.capacity_bytes)
        self.scanners = ScannerRegistry(log, self.tail)
        self.producers = Producers(store.state, log.name, config.producers)
        self.wal = Wal(
            store,
            log,
            self._open_term,
            ticks=ticks,
            memory=self.pending.rows,
            limits=config.wal,
            reopen=config.reopen,
            observer=observer,
            explain=explain,
        )
        self.append = self.wal.append
        self.read = self.scanners.open
        self.state = StateInTerm(store.state, self.wal)
        self.term: ChannelTerm
        """The current term, or the last one."""
        self._cutting = asyncio.Lock()

    async def open(self) -> None:
        """Open the first term. Raises the errors of recovery and of the log; nothing is left open
        then.
        """
        await self.producers.load()
        await self.wal.open()

    async def _open_term(self, first_tick: LogEntry, end: AppendPack) -> ChannelTerm:
        started = time.perf_counter()
        checkpoint = decode_checkpoint(await self.store.state.get(checkpoint_key(self.log.name)))
        outstanding = self.term.idempotency.window.outstanding() if hasattr(self, "term") else None
        found = await recover(
            self.log,
            position=checkpoint.start_position,
            tick=checkpoint.tick,
            shard_state=checkpoint.shard_state,
            producers=checkpoint.producers,
            producer_limits=self.config.producers,
            outstanding=outstanding,
        )
        failpoint("recovery.state_rebuilt")
        term = ChannelTerm(self, checkpoint, found, first_tick, end)
        if hasattr(self, "term"):
            # an append that still waits may have an id of the previous term
            term.shards.skip_ids_below(self.term.shards.next_id)
            term.transactions.go_on_from(self.term.transactions)
        self.term = term
        if self._recovered is not None:
            self._recovered(self.store.term, found.entries, time.perf_counter() - started)
        return term

    @property
    def catalog(self) -> Catalog:
        """The collections as of the last group in the log's queue."""
        return self.term.shards.catalog

    def live(self) -> dict[int, str]:
        """Return the names of the live collections, by id."""
        return {info.id: info.name for info in self.catalog.collections()}

    def check_live(self, info: CollectionInfo) -> CollectionInfo:
        """Return the current state of a collection. Raises `CollectionNotFound` when it was dropped
        since `info` was read.
        """
        try:
            return self.catalog.live(info.id)
        except CollectionNotFound:
            step = "create it again, or read another"
            raise CollectionNotFound(
                f"collection {info.name!r} was dropped meanwhile — {step}"
            ) from None

    async def consistent_tick(self, collections: Iterable[str] = ()) -> int:
        """Return a tick at or above every append acknowledged before the call; readers reach it
        without new writes.

        With `collections`, it is the tick of their last change, which may be long ago.
        """
        # a client may name one any number of times
        infos = map(self.catalog.collection_by_name, dict.fromkeys(collections))
        vchannels = [vchannel for info in infos for vchannel in info.vchannels]

        async def ask() -> int:
            tick = await self.term.ticks.sync()
            return max(
                (self.term.mvcc.of(vchannel).time_tick for vchannel in vchannels), default=tick
            )

        return await self.wal.in_term(ask)

    async def find_position(self, policy: DeliverPolicy) -> ReaderPosition:
        """Return the start of a policy. Raises `Truncated`, and `InvalidArgument` for a tick in the
        future.
        """
        self.check_passed(policy.at)
        async with self.read(policy) as scanner:
            return ReaderPosition(
                self.log.name, self.log.wal_name, scanner.place.position, scanner.place.after_tick
            )

    def check_passed(self, *bounds: object) -> None:
        """Raise `InvalidArgument` when a tick to start after, or to end with, is in the future."""
        newest = self.ticks.allocate()  # above all allocated ticks
        latest = max((bound for bound in bounds if isinstance(bound, int)), default=0)
        if latest > newest:
            advice = "give one that has passed, or start at the end (latest) for messages to come"
            raise InvalidArgument(f"tick {latest} is yet to come, it is {newest} now — {advice}")

    async def request_cut(self) -> int:
        """Make a cut if anything changed; return the number of the cut that covers everything
        before the call, 0 while there is none.

        Concurrent requests share one cut. After a failed write the cut is looked up when the log is
        back, and appended again if the log lacks it. Raises as an append does.
        """
        # Wait outside the lock: inside it, the waits of several callers would add up.
        await self.wal.wait_back()
        async with self._cutting:
            return await self.wal.in_term(self._cut)

    async def _cut(self) -> int:
        term = self.term
        if term.shards.state.changes_since_cut:
            failpoint("flush.cut_requested")
            await self.wal.append_once(AppendGroup([MutableMessage(MessageType.CUT, CutHeader())]))
            failpoint("flush.cut_logged")
        else:
            await term.ticks.sync()
        return term.shards.state.cut_number

    async def save_producers(self, tick: int) -> bytes:
        """Return the encoded window as of a cut.

        A thread encodes it, because a full window takes longer than the loop may be blocked.
        """
        await self.wal.wait_back()
        window = self.term.idempotency.window
        return await in_thread(
            encode_window, window.freeze(tick, now_ms=self.term.transactions.now_ms())
        )

    async def outcome(self, stamp: ProducerStamp) -> AppendResult | None:
        """Return the result of a write whose first attempt may be under way; None if it is not in
        the log.
        """
        return await self.wal.in_term(lambda: self.term.idempotency.outcome(stamp))

    def check_producer(self, producer_id: int, epoch: int) -> None:
        """Raise `ProducerFenced` unless this is the last acknowledged opening of a producer."""
        known = self.term.idempotency.window.producers.get(producer_id)
        if known is None or known.epoch != epoch:
            raise ProducerFenced(epoch, None if known is None else known.epoch)

    def settle_client(self, client_id: int, sequence: int) -> None:
        """Remove a client's results below `sequence`: it never repeats those writes."""
        self.term.idempotency.window.settle(client_id, sequence)

    async def close(self) -> None:
        """Drain appends, then end the readers; the store closes the log. Idempotent."""
        await self.wal.close()
        await self.scanners.close()
        self.tail.close()


class FlushResult(msgspec.Struct, frozen=True, kw_only=True):
    """A cut: everything up to `tick` is in files. `segments` are those sealed since the previous
    cut.

    They are as in its manifest, with paths relative to the node directory. `crc32c` is the
    manifest's checksum; tables keep it, to distinguish the cut from a cut of another history.
    """

    number: int
    tick: int
    crc32c: int = 0
    segments: tuple[SegmentFile, ...] = ()


async def flush(channel: Channel, flusher: Flusher) -> FlushResult:
    """Make a cut, or take the newest one when nothing changed, and return once it is in files."""
    number = await channel.request_cut()
    if not number:
        return FlushResult(number=0, tick=0)
    with disk_errors_typed(flusher.cuts.directory.root):
        cut = await flusher.wait_for_cut(number)
    return FlushResult(
        number=cut.number, tick=cut.tick, crc32c=cut.crc32c, segments=cut.manifest.segments
    )
