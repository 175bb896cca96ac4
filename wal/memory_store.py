"""The in-memory log store, for temporary nodes and tests: appended entries count as synced, and
closing deletes them.
"""

import asyncio
import uuid
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Generic

from wal.append import AppendTicket, Pack
from wal.codec import decode_entry, entry_crc32c
from wal.entry import LogEntry
from wal.entry_log import Batch, Decode, E, OwnedLog
from wal.errors import OnShutdown, StorageFull, Truncated
from wal.log import is_needed
from wal.position import FIRST_POSITION, MemoryMessageId
from wal.queue import SyncedPosition

SHORT_SHARE = 0.75
"""From this share of the bound on, the log should be truncated."""
ENTRIES_PER_READ_MAX = 2048
"""Entries are decoded on the event loop; this many take about 10 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Limits of an in-memory store. `bytes_max` bounds the entries of all its logs together."""

    bytes_max: int = 1 << 30


class MemoryEntryLog(Generic[E]):
    """One log of entries in memory; see `wal.entry_log.EntryLog`.

    `as_id` converts a position into its form in errors.
    """

    def __init__(
        self,
        store: "MemoryLogStore",
        decode: Decode[E],
        *,
        log_id: int = 0,
        as_id: Callable[[int], object] = int,
        first_position: int = FIRST_POSITION,
    ) -> None:
        self.log_id = log_id
        self.first_position = first_position
        self.next_position = first_position
        self._store = store
        self._decode = decode
        self._as_id = as_id
        self._entries: list[tuple[int, bytes]] = []
        """Encoded entries by last position: reads decode them, so readers share no objects with the
        appender.
        """
        self._synced = SyncedPosition(first_position - 1)
        self.wait_beyond = self._synced.wait_beyond

    @property
    def durable_position(self) -> int:
        """Position of the last message; `first_position - 1` when there is none."""
        return self._synced.value

    async def read(self, position: int, *, bytes_max: int) -> list[E]:
        """Return consecutive entries from the one that holds `position`."""
        self._store.check_open()
        if position < self.first_position:
            raise Truncated(self._as_id(position), self._as_id(self.first_position))
        entries: list[E] = []
        size = 0
        previous = None
        at = self._index_of(position)
        for _, data in self._entries[at : at + ENTRIES_PER_READ_MAX]:
            entry = self._decode(data, previous)
            entries.append(entry)
            previous = entry.crc32c
            size += entry.size_bytes
            if size >= bytes_max:
                break
        return entries

    async def go_on(self, first_position: int, last_position: int, crc32c: int) -> None:
        """Do nothing: the owner's records do not outlive a log in memory."""

    def keep(self, last_position: int, data: bytes) -> None:
        """Add an entry."""
        self._entries.append((last_position, data))
        self._store.used_bytes += len(data)
        self.next_position = last_position + 1
        self._synced.advance(last_position)

    def drop_before(self, position: int) -> None:
        """Delete entries that end before a position."""
        count = self._index_of(position)
        self._store.used_bytes -= sum(len(data) for _, data in self._entries[:count])
        self.first_position = position
        del self._entries[:count]

    def end(self, error: Exception) -> None:
        """End the waits of readers with an error, and delete the entries."""
        self._synced.end(error)
        self._entries.clear()

    def _index_of(self, position: int) -> int:
        return bisect_left(self._entries, position, key=itemgetter(0))


class MemoryLog(MemoryEntryLog[LogEntry]):
    """One log of packs in memory; see `wal.log.Log` for the contract."""

    wal_name = MemoryMessageId.wal_name

    def __init__(self, store: "MemoryLogStore", name: str) -> None:
        super().__init__(store, partial(_decode_entry, self.wal_name), as_id=MemoryMessageId)
        self.name = name
        self.last_tick = 0
        self._crc32c = 0

    async def admit(self, size_bytes: int, *, makes_room: bool = False) -> None:
        """Return at once. Raises `StorageFull` when the store's bound leaves too little space,
        `OnShutdown` when closed.
        """
        self._store.check_admitted(makes_room=makes_room, size_bytes=size_bytes)

    def append(self, pack: Pack) -> AppendTicket:
        """Store a stamped pack; the futures of its ticket are already complete."""
        self._store.check_open()
        pack.require_tick_above(self.last_tick)
        first_position = self.next_position
        data = pack.encode(
            self.wal_name, first_position=first_position, previous_crc32c=self._crc32c
        )
        self.last_tick = pack.time_tick
        self._crc32c = entry_crc32c(data)
        self.keep(first_position + pack.message_count - 1, data)
        done = self._store.done
        return AppendTicket(first_position, written=done, durable=done)

    async def truncate(
        self, position: int, *, needed: Callable[[], int | None] | None = None
    ) -> None:
        """Delete everything before the entry that holds `position`; the last entry always stays."""
        self._store.check_open()
        count = min(self._index_of(position), len(self._entries) - 1)
        if count <= 0:
            return
        kept = self._entries[count - 1][0] + 1
        if not is_needed(kept, needed):
            self.drop_before(kept)


def _decode_entry(wal_name: str, data: bytes, previous_crc32c: int | None) -> LogEntry:
    return decode_entry(data, wal_name=wal_name, previous_crc32c=previous_crc32c)


class MemoryStateMap:
    """A state map in memory; see `wal.log.BatchMap` for the contract."""

    def __init__(self, store: "MemoryLogStore") -> None:
        self._store = store
        self._records: dict[str, bytes] = {}
        self._logs: dict[int, MemoryEntryLog[Any]] = {}
        """Logs that are not released, by id."""

    async def get(self, key: str) -> bytes | None:
        """Return the value of `key`, None if it has none."""
        self._store.check_open()
        return self._records.get(key)

    async def scan(self, prefix: str) -> dict[str, bytes]:
        """Return all keys that start with `prefix`, and their values, in key order."""
        self._store.check_open()
        found = sorted(self._records.items())
        return {key: value for key, value in found if key.startswith(prefix)}

    async def put(self, changes: Mapping[str, bytes | None]) -> None:
        """Set keys (None removes a key) atomically."""
        self.write(Batch(changes))

    def owned_log(
        self,
        log_id: int,
        decode: Decode[E],
        *,
        first_position: int,
        last_position: int,
        title: str,
    ) -> MemoryEntryLog[E]:
        """Return a new, empty log; see `wal.log.BatchMap`."""
        assert last_position < first_position, (
            f"{title}: no record describes a log in memory before it is opened"
        )
        log = MemoryEntryLog(self._store, decode, log_id=log_id, first_position=first_position)
        self._logs[log_id] = log
        return log

    def release(self, log: OwnedLog[Any]) -> None:
        """Release a log; see `wal.log.BatchMap`."""
        self._logs.pop(log.log_id, None)

    def write(self, batch: Batch) -> asyncio.Future[None]:
        """Apply the changes of a batch; see `wal.log.BatchMap`."""
        self._store.check_open()
        for key, value in batch.records.items():
            if value is None:
                self._records.pop(key, None)
            else:
                self._records[key] = value
        for log, position, data in batch.entries:
            self._logs[log.log_id].keep(position, data)
        for log, position in batch.kept.items():
            self._logs[log.log_id].drop_before(position)
        for log in batch.removed:
            self._logs[log.log_id].drop_before(log.next_position)
        return self._store.done

    async def reclaim(self, batch: Batch) -> None:
        """Do nothing: memory is freed at once."""

    def end(self, error: Exception) -> None:
        """End the waits of readers of its logs, and delete everything."""
        for log in self._logs.values():
            log.end(error)
        self._logs.clear()
        self._records.clear()


class MemoryLogStore:
    """The logs and the state map of a node in memory; see `wal.log.LogStore` for the contract. The
    term is always 1.
    """

    term = 1
    promised_tick = 0
    openings = 1
    queued_bytes = 0
    space = None
    link_copy = None

    def __init__(self, options: MemoryOptions | None = None) -> None:
        self.node_id = uuid.uuid4().hex
        self.used_bytes = 0
        self.bytes_max = (options or MemoryOptions()).bytes_max
        self.done = asyncio.get_running_loop().create_future()
        self.done.set_result(None)
        self._logs: dict[str, MemoryLog] = {}
        self.state = MemoryStateMap(self)
        self.condition = "open"
        self.taking_writes = True

    def check_open(self) -> None:
        """Raise `OnShutdown` when the store is closed."""
        if not self.taking_writes:
            raise OnShutdown("the in-memory store is closed")

    def check_admitted(self, *, makes_room: bool, size_bytes: int = 1) -> None:
        """Raise `OnShutdown` when the store is closed, `StorageFull` when so many bytes do not
        fit.
        """
        self.check_open()
        free_bytes = self.bytes_max - self.used_bytes
        if not makes_room and size_bytes > free_bytes:
            raise StorageFull("memory", free_bytes, size_bytes)

    @property
    def short_of_space(self) -> bool:
        """Whether the log should be truncated, before appends must be refused."""
        return self.used_bytes > SHORT_SHARE * self.bytes_max

    @property
    def topic_store(self) -> "MemoryLogStore":
        """This store, which has topics."""
        return self

    async def promise_tick(self, tick: int) -> None:
        """Record nothing: no data outlives this term."""
        self.check_open()

    async def open_log(self, name: str) -> MemoryLog:
        """Return the log of pchannel `name`; creates it if it is new."""
        self.check_open()
        return self._logs.setdefault(name, MemoryLog(self, name))

    async def wait_failed(self) -> None:
        """Wait for ever: a write to memory cannot fail midway."""
        await asyncio.get_running_loop().create_future()

    async def reopen(self) -> None:
        """Return at once. Raises `OnShutdown` when closed."""
        self.check_open()

    async def close(self) -> None:
        """Delete everything; idempotent."""
        self.condition = "closed"
        self.taking_writes = False
        ended = OnShutdown("the in-memory store is closed")
        for log in self._logs.values():
            log.end(ended)
        self._logs.clear()
        self.state.end(ended)
