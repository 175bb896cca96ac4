"""Reads a log's entries from the disk, in batches, one batch ahead of whoever processes them."""

import asyncio

from scanner.closing import Closing
from scanner.patient_read import PatientLog
from wal.log import Log
from wal.message import LogEntry


class CatchUp:
    """Consecutive synced entries of a log from `position` on; used by one task at a time.

    At most one batch of about `read_bytes` is read ahead.
    """

    __slots__ = ("_closing", "_log", "_read_bytes", "_reader", "_reading", "position")

    def __init__(self, log: Log, reader: PatientLog, position: int, *, read_bytes: int, closing: Closing) -> None:
        self._log = log
        self._reader = reader
        self._read_bytes = read_bytes
        self._closing = closing
        self._reading: asyncio.Task[list[LogEntry]] | None = None
        self.position = position

    async def next(self) -> list[LogEntry]:
        """Return the next entries, none at the end of the log. Cancelling loses nothing. Raises as `PatientLog.read`."""
        reading = self._reading = self._reading or self._read_ahead()
        await self._closing.wait(reading)
        self._reading = None
        entries = reading.result()
        if entries:
            self.position = entries[-1].last_position + 1
            if self.position <= self._log.durable_position:
                self._reading = self._read_ahead()
        return entries

    def close(self) -> None:
        """Give up the batch read ahead."""
        self._closing.abandon(self._reading)
        self._reading = None

    def _read_ahead(self) -> asyncio.Task[list[LogEntry]]:
        read = self._reader.read(self.position, bytes_max=self._read_bytes)
        return asyncio.get_running_loop().create_task(read)
