"""Reads that outlast a passing fault of the storage, a bounded number of times."""

from dataclasses import dataclass

from scanner.scan_meter import ScanMeter
from scanner.surroundings import Sleep
from wal.errors import StorageFailed
from wal.log import Log
from wal.message import LogEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Pauses between tries double from `pause_first_s` to `pause_max_s`; after `tries_max` the failure is the caller's."""

    tries_max: int = 8
    pause_first_s: float = 0.1
    pause_max_s: float = 5.0


class PatientLog:
    """The read side of a log, tried again where the storage failed without saying anything about the data.

    `Corrupt` and `Truncated` are facts and come through at once.
    """

    def __init__(self, log: Log, retry: Retry, meter: ScanMeter, *, sleep: Sleep) -> None:
        self._log = log
        self._meter = meter
        self._retry = retry
        self._sleep = sleep
        self.retries = 0

    async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        """Read as `Log.read` does; raises what the last try raised."""
        pause_s = self._retry.pause_first_s
        for _ in range(self._retry.tries_max - 1):
            try:
                return await self._read(position, bytes_max)
            except (StorageFailed, OSError):
                self.retries += 1
                await self._sleep(pause_s)
                pause_s = min(2 * pause_s, self._retry.pause_max_s)
        return await self._read(position, bytes_max)

    async def entry_at(self, position: int) -> LogEntry | None:
        """Return the synced entry that holds `position`, None past the end. Raises as `read` does."""
        entries = await self.read(position, bytes_max=1)
        return entries[0] if entries else None

    async def _read(self, position: int, bytes_max: int) -> list[LogEntry]:
        started = self._meter.clock()
        entries = await self._log.read(position, bytes_max=bytes_max)
        self._meter.read(started)
        return entries
