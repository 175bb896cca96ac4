"""What a node counts and measures, as `Node.statistics` returns it, and the file beside its data that says the same.

Counts go from the opening of the node on and never back; rates are those of the last ten seconds; levels are of now. Times
are seconds, sizes bytes, unless a name says otherwise.
"""

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import anyio
import msgspec
from anyio import to_thread

from flusher.flusher import FlusherStatistics
from scanner.scanner import ScanStatistics
from wal.errors import Corrupt
from wal.files import create_file, read_regular
from wal.lifecycle import LogStatus
from wal.measure import Distribution
from wal.runtime import event_log


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

    waiting_rows: int
    coalesced_groups_in_flight: int
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


SpaceLevelName = Literal["ample", "short", "full", "exhausted"]


class SpaceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How near the disk is to full: as of the last look, which is when something was written last, or 100 ms ago.

    `needed_bytes` is the low-water mark, `log_bytes` the size of RocksDB's own log, `queued_bytes` what waits for the disk.
    """

    level: SpaceLevelName
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
        self._spare = -1

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
            self._free_spare()

    def _write(self, content: bytes) -> None:
        # A process without descriptors has something to say: the one kept for it is free for as long as it says so.
        self._free_spare()
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        try:
            with create_file(temporary) as file:
                file.write(content)
            temporary.replace(self._path)
        finally:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _free_spare(self) -> None:
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)


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
