"""Reads a log's entries from the live tail, leaving the event loop its turns."""

import asyncio

from wal.live_tail import TailRead, TailReader


class Tailing:
    """The entries published from a reader's position on; used by one task at a time."""

    __slots__ = ("_read_bytes", "_reader")

    def __init__(self, reader: TailReader, *, read_bytes: int) -> None:
        self._reader = reader
        self._read_bytes = read_bytes

    @property
    def position(self) -> int:
        """Position of the next message."""
        return self._reader.position

    async def next(self) -> TailRead:
        """Wait for the next entries or an idle tick. Cancelling loses nothing. Raises as `TailReader.next`."""
        if self._reader.ready:
            # A reader that always finds something would keep the loop from the writer and from everyone else.
            await asyncio.sleep(0)
        return await self._reader.next(bytes_max=self._read_bytes)

    def close(self) -> None:
        """End a wait in `next`."""
        self._reader.close()
