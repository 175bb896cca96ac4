"""What a node counts and measures: as `Node.statistics` returns it, who measures it, and the file beside the data.

Counts go from the opening of the node on and never back; rates are those of the last ten seconds; levels are of now. Times
are seconds, sizes bytes, unless a name says otherwise.
"""

import io
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import anyio
import msgspec
from anyio import to_thread

from flusher.flusher import Flusher, FlusherStatistics
from scanner.scanner import ScanStatistics
from streamingnode.channel import Channel
from wal.errors import Corrupt
from wal.files import create_file, read_regular
from wal.lifecycle import LogStatus
from wal.log import AppendGroup, AppendObserver
from wal.measure import Distribution, Histogram, Rate
from wal.rocks.store import RocksStore
from wal.runtime import event_log
from wal.timetick import physical_ms


class InterceptorStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One interceptor's share of the appends, waits and refusals included: before and after it called the next one."""

    name: str
    before_s: Distribution
    after_s: Distribution


class AppendStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The append groups of the node, those of its own background work included.

    Small inserts are put together before they are appended: one group may be many calls. `seconds` goes from the arrival at
    the log's front to the acknowledgement, `message_bytes` are sizes with overhead, both of appends that succeeded.
    `interceptors` is empty unless `statistics.time_interceptors` is set or an observer was given.
    """

    succeeded: int
    failed: int
    cancelled: int
    in_flight: int
    messages: int
    messages_per_s: float
    bytes: int
    bytes_per_s: float
    seconds: Distribution
    message_bytes: Distribution
    interceptors: tuple[InterceptorStatistics, ...] = ()


class TickStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How far readers may know the log.

    `lag_s` is how far the confirmed tick lies behind the machine's clock: under the tick interval when all is well;
    `ahead_s` how far the last tick is ahead of it: 0, unless a clock was ahead once. `unconfirmed` are ticks of appends on
    their way; `mvcc_updates` counts how often a vchannel's newest tick moved in this term.
    """

    last: int
    confirmed: int
    lag_s: float
    ahead_s: float
    unconfirmed: int
    oldest_unconfirmed: int
    mvcc_updates: int


class WriteStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What is on its way into the log, or may still have to leave it.

    The `pending` bytes are held in memory: rows that wait to be put together, appends that the log has not acknowledged,
    open transactions. They are at most a quarter, a quarter and half of `pending_bytes_max`.
    """

    open_transactions: int
    open_transaction_bytes: int
    pending_bytes_max: int
    pending_row_bytes: int
    pending_append_bytes: int
    pending_transaction_bytes: int
    growing_segments: int
    growing_segment_bytes: int


class TailStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The newest entries, kept in memory for readers."""

    entries: int
    bytes: int


class SpaceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How near the disk is to full: as of the last look, which is when something was written last, or 100 ms ago.

    `level` is ample, short, full or exhausted, `needed_bytes` the low-water mark, `log_bytes` the size of RocksDB's own log,
    `queued_bytes` what waits for the disk.
    """

    level: str
    free_bytes: int
    needed_bytes: int
    log_bytes: int
    reserve_bytes: int
    queued_bytes: int


class NodeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one node tells about itself at one moment; `at_ms` is Unix time.

    `readers` are the open scanners: those of `read`, and of snapshots while they are made. `space` is null for a node in
    memory.
    """

    at_ms: int
    uptime_s: float
    log: LogStatus
    appends: AppendStatistics
    ticks: TickStatistics
    writes: WriteStatistics
    tail: TailStatistics
    space: SpaceStatistics | None
    readers: tuple[ScanStatistics, ...]
    flusher: FlusherStatistics


# --- who measures it --------------------------------------------------------------------------------------------------


class AppendMeter:
    """Counts and times the appends of a node, over all terms of its log: about 2 us for each group of one message.

    A user's own observer hears everything too, after it was counted here.
    """

    def __init__(self, forward_to: AppendObserver | None = None) -> None:
        self._forward_to = forward_to
        self._ended = {"ok": 0, "error": 0, "cancel": 0}
        self._seconds, self._message_bytes = Histogram(), Histogram()
        self._messages, self._bytes = Rate(time.monotonic), Rate(time.monotonic)
        self._interceptors: dict[str, tuple[Histogram, Histogram]] = {}

    def append_ended(self, group: AppendGroup, seconds: float, status: str) -> None:
        """Count an append; only those that succeeded are timed and sized."""
        self._ended[status] += 1
        if status == "ok":
            self._seconds.record(seconds)
            self._messages.add(len(group.messages))
            group_bytes = 0
            for message in group.messages:
                size_bytes = message.size_bytes
                group_bytes += size_bytes
                self._message_bytes.record(size_bytes)
            self._bytes.add(group_bytes)
        if self._forward_to is not None:
            self._forward_to.append_ended(group, seconds, status)

    def interceptor_timed(self, name: str, before_s: float, after_s: float, *, failed_before: bool) -> None:
        """Time one interceptor of one append."""
        if name not in self._interceptors:
            self._interceptors[name] = Histogram(), Histogram()
        before, after = self._interceptors[name]
        before.record(before_s)
        if not failed_before:
            after.record(after_s)
        if self._forward_to is not None:
            self._forward_to.interceptor_timed(name, before_s, after_s, failed_before=failed_before)

    def statistics(self, *, in_flight: int) -> AppendStatistics:
        """Return what was measured so far."""
        return AppendStatistics(
            succeeded=self._ended["ok"],
            failed=self._ended["error"],
            cancelled=self._ended["cancel"],
            in_flight=in_flight,
            messages=self._messages.total,
            messages_per_s=self._messages.per_second,
            bytes=self._bytes.total,
            bytes_per_s=self._bytes.per_second,
            seconds=self._seconds.distribution(),
            message_bytes=self._message_bytes.distribution(),
            interceptors=tuple(
                InterceptorStatistics(name=name, before_s=before.distribution(), after_s=after.distribution())
                for name, (before, after) in self._interceptors.items()
            ),
        )


class NodeMeter:
    """Asks the parts of a node, on their event loop, and makes one picture of it; `now_ms` is the clock ticks follow."""

    def __init__(self, channel: Channel, flusher: Flusher, appends: AppendMeter, now_ms: Callable[[], int]) -> None:
        self._channel, self._flusher, self._appends, self._now_ms = channel, flusher, appends, now_ms
        self._opened_s = time.monotonic()

    def statistics(self) -> NodeStatistics:
        """Return the node's statistics as of now."""
        channel, term, now_ms, store = self._channel, self._channel.term, self._now_ms(), self._channel.store
        confirmed_tick, pending, shards = term.acks.confirmed_tick, channel.pending, term.shards.state
        return NodeStatistics(
            at_ms=now_ms,
            uptime_s=time.monotonic() - self._opened_s,
            log=channel.wal.status,
            appends=self._appends.statistics(in_flight=channel.wal.in_flight),
            ticks=TickStatistics(
                last=channel.ticks.last,
                confirmed=confirmed_tick,
                lag_s=max(0, now_ms - physical_ms(confirmed_tick)) / 1000,
                ahead_s=channel.ticks.ahead_ms / 1000,
                unconfirmed=term.acks.pending,
                oldest_unconfirmed=term.acks.oldest_pending_tick or 0,
                mvcc_updates=term.mvcc.updates,
            ),
            writes=WriteStatistics(
                open_transactions=term.transactions.live,
                open_transaction_bytes=term.transactions.size_bytes,
                pending_bytes_max=pending.bytes_max,
                pending_row_bytes=pending.rows.held_bytes,
                pending_append_bytes=pending.appends.held_bytes,
                pending_transaction_bytes=pending.transactions.held_bytes,
                growing_segments=len(shards.segments),
                growing_segment_bytes=shards.growing_bytes,
            ),
            tail=TailStatistics(entries=channel.tail.entry_count, bytes=channel.tail.size_bytes),
            space=SpaceStatistics(
                level=store.space.level.name.lower(),
                free_bytes=store.space.free_bytes,
                needed_bytes=store.space.needed_bytes,
                log_bytes=store.space.log_bytes,
                reserve_bytes=store.space.reserve_bytes,
                queued_bytes=store.queued_bytes,
            )
            if isinstance(store, RocksStore)
            else None,
            readers=channel.scanners.statistics(),
            flusher=self._flusher.statistics(),
        )


# --- the file beside the data -----------------------------------------------------------------------------------------

STATISTICS_NAME = "node.statistics"
STATISTICS_BYTES_MAX = 1 << 20

_log = event_log(__name__)


class StatisticsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds: the statistics of process `pid`."""

    pid: int
    statistics: NodeStatistics


class StatisticsFile:
    """Replaces the file in `directory` every `interval_s` seconds; lives on the event loop, writes in a thread.

    It is not synced, and after the owner's end it says what was last.
    """

    def __init__(
        self,
        directory: Path,
        statistics: Callable[[], NodeStatistics],
        *,
        interval_s: float,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._path, self._statistics = directory / STATISTICS_NAME, statistics
        self._interval_s, self._sleep = interval_s, sleep
        self._spare: IO[bytes] = io.BytesIO()

    async def run(self) -> None:
        """Write until cancelled; a disk that refuses is told of once, and tried again."""
        refused = False
        try:
            while True:
                record = StatisticsRecord(pid=os.getpid(), statistics=self._statistics())
                try:
                    await to_thread.run_sync(self._write, msgspec.json.encode(record))
                    refused = False
                except OSError as error:
                    if not refused:
                        _log.warning("statistics_not_written", error=str(error))
                    refused = True
                await self._sleep(self._interval_s)
        finally:
            self._spare.close()

    def _write(self, content: bytes) -> None:
        # A process without descriptors has something to say: the one kept for it is free for as long as it says so.
        self._spare.close()
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        try:
            with create_file(temporary) as file:
                file.write(content)
            temporary.replace(self._path)
        finally:
            with suppress(OSError):
                self._spare = Path(os.devnull).open("rb")  # noqa: SIM115  (kept open on purpose)


def read_statistics(directory: Path, *, pid: int | None) -> NodeStatistics | None:
    """Return what process `pid` wrote last, None if it wrote nothing that can be read; blocks.

    Believe it only while that process owns the node.
    """
    try:
        content = read_regular(directory / STATISTICS_NAME, bytes_max=STATISTICS_BYTES_MAX)
        record = msgspec.json.decode(content, type=StatisticsRecord)
    except (OSError, Corrupt, msgspec.DecodeError, UnicodeDecodeError):  # another release's perhaps
        return None
    return record.statistics if record.pid == pid else None
