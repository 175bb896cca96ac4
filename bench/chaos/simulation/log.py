"""One log of a simulated store: positions, entries as the disk has them, and what of it is synced."""

import asyncio
from bisect import bisect_left
from typing import TYPE_CHECKING

from bench.chaos.simulation.disk import EntryWritten, RangeDropped, StoredLog, Written, drop_before
from wal.append import AppendGroup, AppendTicket
from wal.codec import decode_entry, encode_entry, entry_crc32c
from wal.errors import Truncated
from wal.message import LogEntry
from wal.message_id import RocksMessageId
from wal.synced_position import SyncedPosition

if TYPE_CHECKING:
    from bench.chaos.simulation.store import SimulatedStore

WAL_NAME = RocksMessageId.wal_name


class SimulatedLog:
    """One log; see `wal.log.Log`."""

    wal_name = WAL_NAME

    def __init__(self, store: "SimulatedStore", name: str, stored: StoredLog) -> None:
        self.name = name
        self._store = store
        self._synced = SyncedPosition(0)
        self.load(stored)

    def load(self, stored: StoredLog) -> None:
        """Start from what is on disk; all of it is synced."""
        self.stored = stored
        entries = stored.entries
        self.next_position = entries[-1].last_position + 1 if entries else 1
        self.last_tick = entries[-1].tick if entries else 0
        self._crc32c = entry_crc32c(entries[-1].data) if entries else 0
        if self.next_position - 1 > self._synced.value:
            self._synced.advance(self.next_position - 1)

    @property
    def first_position(self) -> int:
        """Position of the earliest message kept."""
        return self.stored.first_position

    @property
    def durable_position(self) -> int:
        """Position of the last synced message."""
        return self._synced.value

    async def admit(self, size_bytes: int, *, makes_room: bool = False) -> None:
        """Wait a moment now and then, as behind a full queue."""
        self._store.check_writable()
        if self._store.choose.random() < 0.1:
            await asyncio.sleep(self._store.choose.random() * 0.01)
            self._store.check_writable()

    def append(self, group: AppendGroup) -> AppendTicket:
        """Queue a group."""
        self._store.check_writable()
        messages, first = group.messages, self.next_position
        tick = messages[0].time_tick
        self._store.on_append(tick, self.last_tick)
        group.require_tick_above(self.last_tick)
        data = encode_entry(messages, first_position=first, previous_crc32c=self._crc32c, producer=group.producer)
        self._crc32c = entry_crc32c(data)
        self.next_position, self.last_tick = first + len(messages), tick
        entry = EntryWritten(self.name, first, self.next_position - 1, tick, data)
        queued = self._store.submit(entry, log=self)
        return AppendTicket(first, self._crc32c, len(data), written=queued.written, durable=queued.durable)

    async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        """Return checked, synced entries; the look at the disk takes a moment."""
        await self._store.until_readable()
        if position < self.first_position:
            raise Truncated(RocksMessageId(position), RocksMessageId(self.first_position))
        end = self.durable_position
        if position > end:
            return []
        await self._store.hop()
        self._store.check_open()
        if position < self.first_position:
            raise Truncated(RocksMessageId(position), RocksMessageId(self.first_position))
        entries: list[LogEntry] = []
        size, previous = 0, None
        for written in self.stored.entries[bisect_left(self.stored.last_positions, position) :]:
            if written.last_position > end or size >= bytes_max:
                break
            entry = decode_entry(written.data, wal_name=WAL_NAME, previous_crc32c=previous)
            entries.append(entry)
            previous, size = entry.crc32c, size + entry.size_bytes
        return entries

    async def wait_beyond(self, position: int) -> None:
        """Wait for a synced message after `position`."""
        await self._synced.wait_beyond(position)

    async def truncate(self, position: int) -> None:
        """Give up everything before the entry that holds `position`."""
        self._store.check_writable()
        position = min(position, self.durable_position)
        self._store.on_truncate(position)
        await asyncio.shield(self._store.submit(RangeDropped(self.name, position), log=self).durable)

    def settle(self, written: Written) -> None:
        """Take over what is synced."""
        match written:
            case EntryWritten():
                self._synced.advance(written.last_position)
            case RangeDropped(position=position):
                drop_before(self.stored, position)
            case _:
                pass

    def hold(self, written: EntryWritten) -> None:
        """Keep an entry that the operating system has."""
        self.stored.entries.append(written)
        self.stored.last_positions.append(written.last_position)

    def end(self, error: Exception) -> None:
        """End the waits of readers."""
        self._synced.end(error)
