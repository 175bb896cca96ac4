"""The composition root: builds a node out of its parts and takes it apart again, in reverse order.

In: a directory (None: a node in memory), a configuration, and somebody who owns background tasks. Out: the services that
`Node` uses. No other module chooses an implementation.
"""

import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pyarrow as pa

from flusher.cuts.cut_schedule import CutSchedule
from flusher.cuts.cut_writer import CutResult
from flusher.files.node_directory import NodeDirectory
from flusher.flusher import Flusher, FlushHooks
from flusher.snapshot import SnapshotSource, read_snapshot
from interceptors.shard.catalog import CollectionInfo
from scanner.deliver_policy import DeliverPolicy
from scanner.named_reader import NamedReaders, ReaderPosition
from scanner.scanner import Scanner
from streamingnode.channel import Channel, ChannelOptions, open_channel
from streamingnode.config import NodeConfig
from streamingnode.ownership import assert_sole_owner
from streamingnode.services import FlushedSegment, FlushResult, NodeServices
from streamingnode.supervisor import Supervisor
from wal.append import AppendObserver
from wal.errors import CollectionNotFound, InvalidArgument, Truncated
from wal.log import LogStore
from wal.memory_store import MemoryLogStore
from wal.message import AnyMessage
from wal.message_id import message_id_kind
from wal.message_type import MessageType
from wal.rocks.store import open_rocks_store
from wal.timetick import TickAllocator

PCHANNEL = "p0"
"""The one log of an embedded node."""


def unix_ms() -> int:
    """Return the time of the machine's clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


@asynccontextmanager
async def compose(
    path: Path | None,
    config: NodeConfig,
    supervisor: Supervisor,
    *,
    now_ms: Callable[[], int] = unix_ms,
    observer: AppendObserver | None = None,
) -> AsyncIterator[NodeServices]:
    """Open the node at `path` (None: in memory) and close it on the way out.

    On the way out appends are refused first, those in flight end, readers end, the flusher stops where it is (its work is
    done again from the log), and the directory is synced and let go last.
    """
    closing = AsyncExitStack()
    try:
        if path is not None:
            await anyio.to_thread.run_sync(assert_sole_owner)
        store = await _open_store(path, config)
        closing.push_async_callback(store.close)
        directory = await closing.enter_async_context(_files_directory(path))
        closing.push_async_callback(supervisor.stop)
        ticks = await _tick_allocator(store, now_ms)
        channel = await closing.enter_async_context(
            open_channel(store, PCHANNEL, ticks=ticks, options=_channel_options(config), observer=observer)
        )
        readers = NamedReaders(store)
        await readers.load()
        await readers.keep_only(_live_ids(channel))
        closing.push_async_callback(readers.close)
        flusher = _start_flusher(directory, store, channel, readers, config, supervisor, now_ms)
        for worker in channel.workers:
            supervisor.spawn(worker.run(channel.append))
        yield _services(path, config, store, channel, readers, flusher, directory)
    finally:
        with anyio.CancelScope(shield=True):  # half opened and then cancelled is closed in order too
            await closing.aclose()


def _channel_options(config: NodeConfig) -> ChannelOptions:
    return ChannelOptions(
        wal=config.wal,
        redo=config.redo,
        txn=config.txn,
        segments=config.segments,
        scan=config.scan,
        tail_capacity_bytes=config.tail.capacity_bytes,
        tail_age_s=config.tail.age_s,
        tick_interval_s=config.ticks.interval_s,
    )


async def _open_store(path: Path | None, config: NodeConfig) -> LogStore:
    if path is None:
        return MemoryLogStore(config.memory)
    return await open_rocks_store(path, options=config.log)


@asynccontextmanager
async def _files_directory(path: Path | None) -> AsyncIterator[NodeDirectory]:
    """The directory of segments and cuts: the node's own, or a throw-away one for a node in memory."""
    if path is not None:
        yield NodeDirectory(path)
        return
    root = Path(await anyio.to_thread.run_sync(partial(tempfile.mkdtemp, prefix="streamingnode-")))
    try:
        yield NodeDirectory(root)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(partial(shutil.rmtree, root, ignore_errors=True))


async def _tick_allocator(store: LogStore, now_ms: Callable[[], int]) -> TickAllocator:
    """Return an allocator above everything an earlier term wrote or gave to a reader."""
    log = await store.open_log(PCHANNEL)
    return TickAllocator(now_ms, above=max(store.promised_tick, log.last_tick))


def _start_flusher(
    directory: NodeDirectory,
    store: LogStore,
    channel: Channel,
    readers: NamedReaders,
    config: NodeConfig,
    supervisor: Supervisor,
    now_ms: Callable[[], int],
) -> Flusher:
    schedule = CutSchedule(config.flush.schedule, now_ms=now_ms)
    flusher = Flusher(
        directory,
        store,
        channel.log,
        channel.tail,
        options=config.flush,
        now_ms=now_ms,
        hooks=FlushHooks(reader_floor=partial(_reader_floor, channel, readers), on_progress=schedule.report),
        checkpoint=channel.checkpoint,
    )
    supervisor.spawn(flusher.run())
    supervisor.spawn(schedule.run(channel.request_cut))
    return flusher


def _reader_floor(channel: Channel, readers: NamedReaders) -> int | None:
    """Return the lowest position that a named reader of a live collection still needs."""
    return readers.lease(PCHANNEL, live=_live_ids(channel))


def _live_ids(channel: Channel) -> frozenset[int]:
    return frozenset(info.id for info in channel.shards.catalog.collections())


def _services(
    path: Path | None,
    config: NodeConfig,
    store: LogStore,
    channel: Channel,
    readers: NamedReaders,
    flusher: Flusher,
    directory: NodeDirectory,
) -> NodeServices:
    async def flush() -> FlushResult:
        number = await channel.request_cut()
        return _flush_result(await flusher.wait_for_cut(number)) if number else FlushResult(number=0, tick=0)

    async def consistent_tick(_pchannels: Sequence[str]) -> int:
        return await channel.ticks.consistent_tick()

    return NodeServices(
        path=None if path is None else str(path),
        node_id=store.node_id,
        wal_name=channel.log.wal_name,
        durability=config.log.durability,
        catalog=_LiveCatalog(channel),
        appends={PCHANNEL: channel.append},
        allocate_id=lambda _pchannel: channel.shards.allocate_id(),
        open_scanner=partial(_open_scanner, channel),
        named_readers=readers,
        find_position=partial(_find_position, channel),
        flush=flush,
        snapshot=partial(_snapshot, channel, flusher, directory),
        consistent_tick=consistent_tick,
    )


class _LiveCatalog:
    """The catalog as of the last group in the log's queue."""

    def __init__(self, channel: Channel) -> None:
        self._shards = channel.shards

    def collections(self) -> Sequence[CollectionInfo]:
        """Return the live collections by id."""
        return self._shards.catalog.collections()

    def collection_by_name(self, name: str) -> CollectionInfo:
        """Return the live collection of this name. Raises `CollectionNotFound`."""
        return self._shards.catalog.collection_by_name(name)


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
    return FlushResult(number=cut.number, tick=cut.tick, segments=segments)


async def _snapshot(
    channel: Channel, flusher: Flusher, directory: NodeDirectory, info: CollectionInfo, as_of: int | None
) -> pa.Table:
    """Return a collection's rows from its cuts and, after the newest of them, from the log."""
    while True:
        checkpoint = flusher.checkpoint
        now = await channel.ticks.consistent_tick()  # above the checkpoint, so what its cuts know had happened by then
        if as_of is not None and as_of > now:
            raise InvalidArgument(
                f"as_of={as_of} is yet to come, it is {now} now — leave it out for the state as of now"
            )
        tick = now if as_of is None else as_of
        try:
            tail = await _read_tail(channel, info, after_tick=checkpoint.tick, position=checkpoint.position, until=tick)
        except Truncated:
            if flusher.checkpoint is checkpoint:
                raise
            continue  # a cut and the truncation behind it overtook this
        break
    if channel.shards.catalog.collection(info.id).dropped_tick:
        raise CollectionNotFound(f"collection {info.name!r} was dropped meanwhile — create it again, or read another")
    source = SnapshotSource(directory=directory, collection=info, last_cut=checkpoint.cut_number, tail=tail, as_of=tick)
    return await anyio.to_thread.run_sync(read_snapshot, source)


async def _read_tail(
    channel: Channel, info: CollectionInfo, *, after_tick: int, position: int, until: int
) -> list[AnyMessage]:
    """Return the collection's messages above a checkpoint and up to a tick."""
    messages: list[AnyMessage] = []
    policy = (
        DeliverPolicy.start_from(message_id_kind(channel.log.wal_name)(position)) if position else DeliverPolicy.all()
    )
    async with channel.scanners.open(policy, vchannels=frozenset(info.vchannels), after_tick=after_tick) as scanner:
        confirmed_tick = after_tick
        while confirmed_tick < until:
            batch = await scanner.next_batch()
            messages += (message for message in batch.messages if message.time_tick <= until)
            confirmed_tick = batch.confirmed_tick
    return messages
