"""The composition root: builds a node out of its parts and takes it apart again, in reverse order.

In: a directory (None: a node in memory), a configuration, and somebody who owns background tasks. Out: the services that
`Node` uses. No other module chooses an implementation.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio

from flusher.checkpoint import checkpoint_key, decode_checkpoint
from flusher.cuts.cut_log import CUTS
from flusher.cuts.cut_schedule import CutSchedule
from flusher.cuts.cut_writer import CutResult
from flusher.files.node_directory import NodeDirectory
from flusher.flusher import Flusher, FlushHooks
from flusher.manifest import DELETES, SEGMENTS
from flusher.relief import SpaceRelief
from interceptors.idempotency.snapshot import encode_window
from interceptors.shard.catalog import CollectionInfo
from scanner.deliver_policy import DeliverPolicy
from scanner.named_reader import NamedReaders, ReaderPosition
from scanner.scanner import Scanner
from streamingnode.append_meter import AppendMeter
from streamingnode.channel import Channel, open_channel
from streamingnode.channel_term import ChannelOptions
from streamingnode.config import NodeConfig
from streamingnode.node_meter import NodeMeter
from streamingnode.ownership import assert_sole_owner
from streamingnode.services import FlushedSegment, FlushResult, NodeServices
from streamingnode.snapshot import take_snapshot
from streamingnode.supervisor import Supervisor
from streamingnode.upkeep import Upkeep
from streamingnode.verification.opening_check import refuse_mixed
from streamingnode.verification.running import RunningParts
from streamingnode.writing.retry import Retry
from wal.admission import PendingBytes
from wal.append import AppendObserver
from wal.errors import StorageFailed
from wal.event_log import event_log
from wal.failpoint import failpoint
from wal.log import LogStore
from wal.memory_store import MemoryLogStore
from wal.message_type import MessageType
from wal.rocks.failures import disk_errors_typed
from wal.rocks.store import RocksStore, open_rocks_store
from wal.timetick import AHEAD_MS_MAX, TickAllocator, tick_to_time

_ELAPSED_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""On Linux the monotonic clock stands still while the machine sleeps; a laptop that wakes up has not seen a leap."""
_log = event_log(__name__)

PCHANNEL = "p0"
"""The one log of an embedded node."""


def unix_ms() -> int:
    """Return the time of the machine's clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def elapsed_ms() -> int:
    """Return milliseconds from an arbitrary start, those the machine slept included, by a clock that nobody sets."""
    return time.clock_gettime_ns(_ELAPSED_CLOCK) // 1_000_000


async def compose(
    path: Path | None,
    config: NodeConfig,
    supervisor: Supervisor,
    closing: AsyncExitStack,
    *,
    now_ms: Callable[[], int] = unix_ms,
    elapsed_ms: Callable[[], int] | None = elapsed_ms,
    observer: AppendObserver | None = None,
) -> NodeServices:
    """Open the node at `path` (None: in memory); `closing` closes what is open, also when this raises.

    `elapsed_ms` tells a leap of the clock `now_ms` from time that passed; None: every leap is followed.

    On the way out appends are refused first, those in flight end, readers end, the flusher stops where it is (its work is
    done again from the log), and the directory is synced and let go last.
    """
    if path is not None:
        await anyio.to_thread.run_sync(assert_sole_owner)
    store = await _open_store(path, config)
    closing.push_async_callback(store.close)
    directory = await _files_directory(path, config, closing)
    closing.push_async_callback(supervisor.stop)
    appends = AppendMeter(observer)
    ticks = await _tick_allocator(store, now_ms, elapsed_ms)
    failpoint("recovery.store_opened")
    if path is not None:
        await _refuse_mixed(path, store)
    pending = PendingBytes(config.writes.pending_bytes_max)
    options = _channel_options(config, observer)
    channel = await open_channel(store, PCHANNEL, ticks=ticks, options=options, pending=pending, observer=appends)
    closing.push_async_callback(channel.close)
    readers = NamedReaders(channel)
    await readers.load()
    failpoint("recovery.readers_loaded")
    await readers.keep_only(_live_ids(channel))
    closing.push_async_callback(readers.close)
    flusher = _start_flusher(directory, store, channel, readers, config, supervisor, ticks, elapsed_ms or now_ms)
    supervisor.spawn(channel.keep())
    closing.callback(channel.stop_waiting)
    meter = NodeMeter(
        channel=channel,
        flusher=flusher,
        appends=appends,
        ticks=ticks,
        store=store,
        pending=pending,
        now_ms=now_ms,
    )
    return _services(path, config, store, channel, ticks, readers, flusher, meter)


def _channel_options(config: NodeConfig, observer: AppendObserver | None) -> ChannelOptions:
    return ChannelOptions(
        wal=config.wal,
        txn=config.txn,
        producers=config.producers,
        segments=config.segments,
        tail_capacity_bytes=config.tail.capacity_bytes,
        tick_interval_s=config.ticks.interval_s,
        reopen=config.reopen,
        time_interceptors=config.statistics.time_interceptors or observer is not None,
    )


async def _open_store(path: Path | None, config: NodeConfig) -> LogStore:
    if path is None:
        return MemoryLogStore(config.memory)
    return await open_rocks_store(path, options=config.log)


async def _files_directory(path: Path | None, config: NodeConfig, closing: AsyncExitStack) -> NodeDirectory:
    """The directory of segments and cuts: the node's own, or a throw-away one for a node in memory."""
    if path is None:
        root = Path(await anyio.to_thread.run_sync(partial(tempfile.mkdtemp, prefix="streamingnode-")))
        closing.push_async_callback(anyio.to_thread.run_sync, partial(shutil.rmtree, root, ignore_errors=True))
        return NodeDirectory(root)
    directory = NodeDirectory(path, for_group=config.flush.group_may_read)
    try:
        await anyio.to_thread.run_sync(directory.set_access, (SEGMENTS, DELETES, CUTS))
    except OSError as error:
        raise StorageFailed(
            f"cannot set who may read {error.filename}: {error.strerror} — open the node as the owner of its files"
        ) from error
    return directory


async def _refuse_mixed(path: Path, store: LogStore) -> None:
    """Refuse a log beside cuts that are not its own, before anything is appended to it."""
    checkpoint = decode_checkpoint(await store.get_meta(checkpoint_key(PCHANNEL)))
    log = await store.open_log(PCHANNEL)
    await anyio.to_thread.run_sync(refuse_mixed, path, checkpoint, store.node_id, log.last_tick)


async def _tick_allocator(
    store: LogStore, now_ms: Callable[[], int], elapsed_ms: Callable[[], int] | None
) -> TickAllocator:
    """Return an allocator above everything an earlier term wrote or gave to a reader."""
    log = await store.open_log(PCHANNEL)
    ticks = TickAllocator(
        now_ms, above=max(store.promised_tick, log.last_tick), elapsed_ms=elapsed_ms, on_leap=_tell_leap
    )
    if ticks.ahead_ms > AHEAD_MS_MAX:
        until = tick_to_time(ticks.last).isoformat(timespec="seconds")
        _log.warning("ticks_ahead_of_clock", ahead_s=ticks.ahead_ms // 1000, until=until)
    return ticks


def _tell_leap(ahead_ms: int) -> None:
    _log.warning("clock_leap_not_followed", ahead_s=ahead_ms // 1000)


def _start_flusher(
    directory: NodeDirectory,
    store: LogStore,
    channel: Channel,
    readers: NamedReaders,
    config: NodeConfig,
    supervisor: Supervisor,
    ticks: TickAllocator,
    elapsed_ms: Callable[[], int],
) -> Flusher:
    schedule = CutSchedule(config.flush.schedule, now_ms=ticks.now_ms)
    flusher = Flusher(
        directory,
        store,
        channel.log,
        channel.tail,
        options=config.flush,
        now_ms=ticks.now_ms,  # a leap that ticks do not follow does not make cuts old either
        hooks=FlushHooks(
            reader_floor=partial(_reader_floor, channel, readers),
            on_progress=schedule.report,
            on_kept_tick=lambda tick: channel.shards.forget_below(tick),  # noqa: PLW0108  (of the term there is then)
            save_producers=partial(_save_producers, channel),
            log_is_back=channel.live_term,
            next_id=lambda: channel.shards.next_id,
            elapsed_ms=elapsed_ms,
        ),
        checkpoint=channel.checkpoint,
    )
    supervisor.spawn(flusher.run())
    supervisor.spawn(schedule.run(channel.request_cut))

    async def cut() -> None:
        await flusher.wait_for_cut(await channel.request_cut())

    relief = SpaceRelief(
        lambda: store.short_of_space, give_up_log=partial(flusher.enforce_retention, short_of_space=True), cut=cut
    )
    supervisor.spawn(relief.run())
    return flusher


def _reader_floor(channel: Channel, readers: NamedReaders) -> int | None:
    """Return the lowest position that a named reader of a live collection still needs."""
    return readers.lease(PCHANNEL, live=_live_ids(channel))


async def _save_producers(channel: Channel, tick: int) -> bytes:
    """Return the window as of a cut; encoded in a thread, because a full one takes longer than the loop may be held."""
    window = (await channel.live_term()).idempotency.window
    return await anyio.to_thread.run_sync(encode_window, window.freeze(tick))


def _live_ids(channel: Channel) -> frozenset[int]:
    return frozenset(info.id for info in channel.shards.catalog.collections())


def _services(
    path: Path | None,
    config: NodeConfig,
    store: LogStore,
    channel: Channel,
    ticks: TickAllocator,
    readers: NamedReaders,
    flusher: Flusher,
    meter: NodeMeter,
) -> NodeServices:
    async def flush() -> FlushResult:
        number = await channel.request_cut()
        if not number:
            return FlushResult(number=0, tick=0)
        with disk_errors_typed(flusher.cuts.node):
            return _flush_result(await flusher.wait_for_cut(number))

    async def consistent_tick(_pchannels: Sequence[str]) -> int:
        return await channel.consistent_tick()

    retry = Retry(channel.append, config.retry, epoch=store.term)

    def stop_waiting() -> None:
        retry.close()
        channel.stop_waiting()

    return NodeServices(
        statistics=meter.statistics,
        pending=meter.pending,
        path=None if path is None else str(path),
        node_id=store.node_id,
        wal_name=channel.log.wal_name,
        durability=config.log.durability,
        catalog=_LiveCatalog(channel),
        appends={PCHANNEL: retry.append},
        allocate_id=lambda _pchannel: channel.shards.allocate_id(),
        open_scanner=partial(_open_scanner, channel),
        named_readers=readers,
        find_position=partial(_find_position, channel),
        flush=flush,
        snapshot=partial(take_snapshot, channel, flusher),
        consistent_tick=consistent_tick,
        newest_tick=ticks.allocate,
        producers=channel,
        stop_waiting=stop_waiting,
        stop_appends=channel.stop_appends,
        upkeep=Upkeep(
            parts=None if path is None else _running_parts(path, store, channel, flusher),
            link_copy=store.link_copy if isinstance(store, RocksStore) else None,
            flush=flush,
            hold_cuts=flusher.retention.hold_cuts,
            now_ms=meter.now_ms,
        ),
    )


def _running_parts(path: Path, store: LogStore, channel: Channel, flusher: Flusher) -> RunningParts:
    return RunningParts(directory=path, store=store, log=lambda: channel.log, checkpoint=lambda: flusher.checkpoint)


class _LiveCatalog:
    """The catalog as of the last group in the log's queue."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def collections(self) -> Sequence[CollectionInfo]:
        """Return the live collections by id."""
        return self._channel.shards.catalog.collections()

    def collection_by_name(self, name: str) -> CollectionInfo:
        """Return the live collection of this name. Raises `CollectionNotFound`."""
        return self._channel.shards.catalog.collection_by_name(name)


def _open_scanner(
    channel: Channel,
    _pchannel: str,
    policy: DeliverPolicy,
    *,
    vchannels: frozenset[str],
    types: frozenset[MessageType],
    after_tick: int,
) -> Scanner:
    return channel.scanners.open(policy, vchannels=vchannels, types=types, after_tick=after_tick)


async def _find_position(channel: Channel, pchannel: str, policy: DeliverPolicy) -> ReaderPosition:
    async with channel.scanners.open(policy) as scanner:
        place = scanner.place
        return ReaderPosition(pchannel, channel.log.wal_name, place.position, place.after_tick)


def _flush_result(cut: CutResult) -> FlushResult:
    segments = tuple(
        FlushedSegment(
            segment_id=segment.segment_id,
            collection_id=segment.collection_id,
            partition_id=segment.partition_id,
            rows=segment.rows,
            bytes=segment.bytes,
            path=segment.path,
        )
        for segment in cut.segments
    )
    return FlushResult(number=cut.number, tick=cut.tick, crc32c=cut.crc32c, segments=segments)
