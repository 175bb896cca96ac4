"""The statistics of a running node, in a file beside its data, for `streamingnode info` and whoever else may read it.

The owner replaces the file every few seconds; it is not synced, and after the owner's end it says what was last. Whoever
reads it believes it only while the process it names owns the node.
"""

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
from anyio import to_thread

from streamingnode.statistics import NodeStatistics
from wal.errors import Corrupt
from wal.event_log import event_log
from wal.files import create_file, read_regular

STATISTICS_NAME = "node.statistics"
STATISTICS_BYTES_MAX = 1 << 20

_log = event_log(__name__)


class StatisticsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds: the statistics of process `pid`."""

    pid: int
    statistics: NodeStatistics


class StatisticsFile:
    """Writes `statistics()` into `directory` every `interval_s` seconds; lives on the event loop, writes in a thread."""

    def __init__(
        self,
        directory: Path,
        statistics: Callable[[], NodeStatistics],
        *,
        interval_s: float,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._path = directory / STATISTICS_NAME
        self._statistics = statistics
        self._interval_s = interval_s
        self._sleep = sleep
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
            self._give_back()

    def _write(self, content: bytes) -> None:
        # A process without descriptors has something to say: the one kept for it is free for as long as it says so.
        self._give_back()
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        try:
            with create_file(temporary) as file:
                file.write(content)
            temporary.replace(self._path)
        finally:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _give_back(self) -> None:
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)


def read_statistics(directory: Path, *, pid: int | None) -> NodeStatistics | None:
    """Return what process `pid` wrote last, None if it wrote nothing that can be read; blocks."""
    try:
        record = msgspec.json.decode(
            read_regular(directory / STATISTICS_NAME, bytes_max=STATISTICS_BYTES_MAX), type=StatisticsRecord
        )
    except (OSError, Corrupt, msgspec.DecodeError, UnicodeDecodeError):  # another release's perhaps
        return None
    return record.statistics if record.pid == pid else None
