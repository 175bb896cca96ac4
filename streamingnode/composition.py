"""The composition root: builds a node out of its parts and takes it apart again, in reverse order.

No other module chooses an implementation.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flusher.directory import CUTS, NodeDirectory, refuse_mixed
from flusher.flusher import Flusher
from flusher.manifest import DELETES, SEGMENTS, checkpoint_key, decode_checkpoint
from flusher.run import FlushContext
from scanner.named_reader import NamedReaders
from streamingnode.channel import Channel
from streamingnode.config import NodeConfig
from streamingnode.embedded import EmbeddedBackend
from streamingnode.listening import Listener
from streamingnode.node import Node
from streamingnode.ownership import assert_sole_owner
from streamingnode.statistics import AppendMeter, node_statistics
from wal.append import AppendObserver
from wal.failpoint import failpoint
from wal.log import Log, LogStore
from wal.memory_store import MemoryLogStore
from wal.rocks.store import open_rocks_store
from wal.rocksmq.queue import RocksMQ
from wal.rocksmq.topic import PREFIX
from wal.runtime import Holding, Supervisor, elapsed_ms, event_log, in_thread, unix_ms
from wal.timetick import AHEAD_MS_MAX, TickAllocator, tick_to_time

if TYPE_CHECKING:
    from streamingnode.http import Monitor
    from streamingnode.traces import Traces

_log = event_log(__name__)

PCHANNEL = "p0"
"""The one log of an embedded node."""


async def compose(
    path: Path | None,
    config: NodeConfig,
    supervisor: Supervisor,
    closing: AsyncExitStack,
    *,
    now_ms: Callable[[], int] = unix_ms,
    elapsed_ms: Callable[[], int] = elapsed_ms,
    observer: AppendObserver | None = None,
    brief: bool = False,
) -> Node:
    """Open the node at `path` (None: in memory); `closing` closes everything opened, also when this
    raises.

    `elapsed_ms` distinguishes a jump of the clock `now_ms` from time that passed. `brief` means
    that a command opens the node for a short time.

    Closing refuses appends first. Then appends in flight end, readers end, and the flusher stops
    (its work is repeated from the log). Last, the directory is synced and released.
    """
    store = await _open_store(path, config, brief=brief)
    closing.push_async_callback(store.close)
    monitor = await _open_monitor(config, supervisor, closing, brief=brief)
    directory = await _files_directory(path, config, closing)
    closing.push_async_callback(supervisor.stop)
    log = await store.open_log(PCHANNEL)
    ticks = _tick_allocator(store, log, now_ms, elapsed_ms)
    failpoint("recovery.store_opened")
    # a log beside cuts that are not its own is refused before anything is appended to it
    if path is not None:
        checkpoint = decode_checkpoint(await store.state.get(checkpoint_key(PCHANNEL)))
        await in_thread(refuse_mixed, path, checkpoint, store.node_id, log.last_tick)
    traces = await _load_traces(config, store.node_id, brief=brief)
    appends = AppendMeter(*[each for each in (traces, observer) if each is not None])
    channel = Channel(
        store,
        log,
        config=config,
        ticks=ticks,
        observer=appends,
        time_interceptors=config.statistics.time_interceptors or observer is not None,
        explain=supervisor.explain,
        recovered=traces.recovered if traces else None,
    )
    await channel.open()
    closing.push_async_callback(channel.close)
    readers = NamedReaders(channel.state, channel.live)
    await readers.load()
    failpoint("recovery.readers_loaded")
    await readers.forget_dropped()
    closing.push_async_callback(readers.close)
    context = FlushContext(
        directory=directory,
        store=store,
        log=log,
        tail=channel.tail,
        options=config.flush,
        now_ms=ticks.now_ms,  # the clock of ticks: a jump of the system clock must not age cuts
        elapsed_ms=elapsed_ms,
        reader_floor=lambda: readers.lease(PCHANNEL),
        # a lambda, so that it uses the term at the time of the call
        on_kept_tick=lambda tick: channel.term.shards.state.forget_below(tick),  # noqa: PLW0108
        save_producers=channel.save_producers,
        log_is_back=channel.wal.wait_back,
        next_id=lambda: channel.term.shards.next_id,
        cut_made=traces.cut_made if traces else None,
    )
    flusher = Flusher(context, channel.term.checkpoint)
    closing.callback(channel.wal.stop_waiting)
    topics = list[RocksMQ]()  # created at their first use, or now if the directory has some

    def make_topics() -> RocksMQ | None:
        if store.topic_store is not None:
            mq = RocksMQ(
                store.topic_store,
                config.mq,
                now_ms=now_ms,
                elapsed_ms=elapsed_ms,
                in_term=channel.wal.in_term,
            )
            closing.push_async_callback(mq.close)
            topics.append(mq)
            supervisor.spawn(mq.keep())
        return topics[0] if topics else None

    statistics = partial(
        node_statistics, channel, flusher, appends, topics, now_ms=now_ms, opened_s=time.monotonic()
    )
    backend = EmbeddedBackend(path, channel, flusher, readers, statistics, make_topics)
    if await store.state.scan(PREFIX):
        _ = backend.mq  # so that retention runs even if no caller uses them
    if path is not None and config.serve.listen:
        backend.listener = listener = Listener(backend)
        closing.push_async_callback(listener.close)  # also if the node fails to open
        await listener.open(path)
    # Start it last, so that opening does not wait for the work it finds.
    supervisor.spawn(flusher.run())
    supervisor.spawn(flusher.schedule.run(channel.request_cut))
    supervisor.spawn(flusher.reclaim_space(channel.request_cut))
    supervisor.spawn(channel.wal.keep())
    node = Node(backend, supervisor, closing)
    if monitor is not None:
        backend.http = monitor.address
        monitor.watch(node, backend, appends)
    return node


async def _open_monitor(
    config: NodeConfig, supervisor: Supervisor, closing: AsyncExitStack, *, brief: bool
) -> "Monitor | None":
    """Open the monitor if it is configured. Call it once this node owns the directory: the previous
    owner had the same port.
    """
    if not config.serve.http or brief:
        return None

    def load() -> "Monitor":
        from streamingnode.http import Monitor

        return Monitor(config.serve, supervisor)

    monitor = await in_thread(load)
    closing.push_async_callback(monitor.close)
    await monitor.open()
    return monitor


async def _load_traces(config: NodeConfig, node_id: str, *, brief: bool) -> "Traces | None":
    if not config.serve.traces or brief:
        return None

    def load() -> "Traces":
        from streamingnode.traces import Traces

        return Traces(node_id, PCHANNEL)

    return await in_thread(load)


async def _open_store(path: Path | None, config: NodeConfig, *, brief: bool) -> LogStore:
    if path is None:
        return MemoryLogStore(config.memory)
    await in_thread(assert_sole_owner)
    return await open_rocks_store(path, options=config.log, brief=brief)


async def _files_directory(
    path: Path | None, config: NodeConfig, closing: AsyncExitStack
) -> NodeDirectory:
    """The directory of segments and cuts: the node's own, or a temporary one for a node in
    memory.
    """
    if path is None:
        root = Path(await in_thread(partial(tempfile.mkdtemp, prefix="streamingnode-")))
        remove = partial(shutil.rmtree, root, ignore_errors=True)
        held = Holding(remove, in_child=lambda: None)
        closing.callback(held.end)
        closing.push_async_callback(in_thread, remove)
        return NodeDirectory(root)
    directory = NodeDirectory(path, for_group=config.flush.group_may_read)
    await in_thread(directory.set_access, (SEGMENTS, DELETES, CUTS))
    return directory


def _tick_allocator(
    store: LogStore, log: Log, now_ms: Callable[[], int], elapsed_ms: Callable[[], int]
) -> TickAllocator:
    """Return an allocator above every tick that an earlier term wrote or gave to a reader."""

    def tell_leap(ahead_ms: int) -> None:
        _log.warning("clock_leap_not_followed", ahead_s=ahead_ms // 1000)

    above = max(store.promised_tick, log.last_tick)
    ticks = TickAllocator(now_ms, elapsed_ms, above=above, on_leap=tell_leap)
    if ticks.ahead_ms > AHEAD_MS_MAX:
        until = tick_to_time(ticks.last).isoformat(timespec="seconds")
        _log.warning("ticks_ahead_of_clock", ahead_s=ticks.ahead_ms // 1000, until=until)
    return ticks
