"""A log store on a simulated disk: keeps the contract of `wal.log`, and fails and is slow as a real
one.

Writes wait in a queue, are written in batches, synced, recorded in the floor, and settled, each
step some virtual time after the one before. After a write or sync that fails the store takes none
until it is reopened; what it left is drawn. A store that `syncs_late` acknowledges what is written,
as durability `os` does, and syncs now and then.
"""

import asyncio
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.chaos.simulation.disk import (
    Disk,
    EntryWritten,
    RangeDropped,
    RecordsWritten,
    StoredLog,
    TermTaken,
    Written,
    apply_changes,
    drop_before,
)
from wal.append import AppendTicket, Pack
from wal.codec import decode_entry, entry_crc32c
from wal.entry import LogEntry
from wal.errors import Indeterminate, OnShutdown, Truncated
from wal.log import is_needed
from wal.position import RocksMessageId
from wal.queue import SyncedPosition

WAL_NAME = RocksMessageId.wal_name
WRITE_S = 0.0005
SYNC_S = 0.004
FLOOR_SYNC_S = 0.2
LATE_SYNC_S = 0.1


@dataclass(frozen=True, slots=True)
class StoreFaults:
    """Chances, from 0 to 1: of a batch whose write or sync fails, of an attempt to reopen that
    fails.
    """

    write: float = 0.0
    reopen: float = 0.0


@dataclass(slots=True, eq=False)
class _Queued:
    write: Written
    written: asyncio.Future[None]
    durable: asyncio.Future[None]
    log: "SimulatedLog | None" = None


class SimulatedStateMap:
    """The map of state of a `SimulatedStore`; see `wal.log.StateMap`."""

    def __init__(self, store: "SimulatedStore") -> None:
        self._store = store
        self.records: dict[str, bytes] = {}

    async def get(self, key: str) -> bytes | None:
        """Return a record."""
        await self._store.until_readable()
        await self._store.hop()
        return self.records.get(key)

    async def scan(self, prefix: str) -> dict[str, bytes]:
        """Return records by prefix."""
        await self._store.until_readable()
        await self._store.hop()
        found = sorted(self.records.items())
        return {key: value for key, value in found if key.startswith(prefix)}

    async def put(self, changes: Mapping[str, bytes | None]) -> None:
        """Set records; durable on return."""
        self._store.check_writable()
        self._store.on_put(changes)
        await asyncio.shield(self._store.submit(RecordsWritten(dict(changes))).durable)


class SimulatedStore:
    """The store of one process; see `wal.log.LogStore`. `await open()` comes first."""

    queued_bytes = 0
    short_of_space = False
    space = None
    link_copy = None

    def __init__(
        self,
        disk: Disk,
        choose: random.Random,
        *,
        faults: StoreFaults,
        node_id: str,
        syncs_late: bool,
    ) -> None:
        self.disk = disk
        self.choose = choose
        self.node_id = node_id
        self._faults = faults
        self._syncs_late = syncs_late
        self.term = self.promised_tick = 0
        self._logs: dict[str, SimulatedLog] = {}
        self.state = SimulatedStateMap(self)
        self._queue: list[_Queued] = []
        self._unsynced: list[_Queued] = []
        self._acknowledged = len(disk.writes)
        """How many writes of the disk a caller may have been told of."""
        self._busy = self._closed = False
        self._sync_is_coming = self._sync_due = False
        self._failure: Indeterminate | None = None
        self._failed = asyncio.Event()
        self._readable = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        disk.owner += 1
        self._owner = disk.owner

    async def open(self) -> None:
        """Read the disk, as a start does, and take the next term. Raises `Corrupt`."""
        await self.hop()
        logs, self.state.records, term = self.disk.read()
        self.term = term + 1
        self.promised_tick = self.disk.floor.tick
        self.disk.writes.append(TermTaken(self.term))
        self.disk.sync()
        self._acknowledged = self.disk.synced
        floor = self.disk.floor
        for name, stored in logs.items():
            floor.positions[name] = stored.last_positions[-1]
        floor.term = self.term
        self.disk.floor_synced = floor.copy()
        for name in {*logs, *self._logs}:
            stored = logs.get(name, StoredLog())
            if name in self._logs:
                self._logs[name].load(stored)
            else:
                self._logs[name] = SimulatedLog(self, name, stored)
        self._failure = None
        self._failed.clear()
        self._readable.set()
        self._sync_floor_later()

    # --- the contract -----------------------------------------------------------------------------

    @property
    def condition(self) -> str:
        """The state, for people."""
        return "closed" if self._closed else "failed" if self._failure else "open"

    @property
    def taking_writes(self) -> bool:
        """Whether writes are taken."""
        return not self._closed and self._failure is None

    async def promise_tick(self, tick: int) -> None:
        """Remember a tick in the floor file."""
        self.check_writable()
        await self.hop()
        self.check_open()
        self.disk.floor.tick = max(self.disk.floor.tick, tick)
        await self.hop()
        self.check_open()
        self.disk.floor_synced.tick = max(self.disk.floor_synced.tick, tick)

    async def open_log(self, name: str) -> "SimulatedLog":
        """Return a log."""
        self.check_open()
        await self.hop()
        if name not in self._logs:
            self._logs[name] = SimulatedLog(self, name, StoredLog())
        return self._logs[name]

    async def wait_failed(self) -> None:
        """Wait until a write fails."""
        await self._failed.wait()

    async def reopen(self) -> None:
        """Take writes again under the next term."""
        self.check_open()
        if self._failure is None:
            return
        self._readable.clear()
        await self.hop()
        if self.choose.random() < self._faults.reopen:
            raise OSError(5, "the disk does not answer")
        self.check_open()
        await self.open()

    async def close(self) -> None:
        """Write what is queued, and let go."""
        await self._idle.wait()  # what is queued is written, and then synced
        self._begin_late_sync()
        await self._idle.wait()
        if not self._closed:
            self._closed = True
            self._readable.set()
            for log in self._logs.values():
                log.end(OnShutdown("the simulated store is closed"))

    # --- for its logs -----------------------------------------------------------------------------

    def on_append(self, tick: int, last_tick: int) -> None:
        """Look at an append before it happens; for the world to check."""

    def on_truncate(self, position: int) -> None:
        """Look at a truncation before it happens; for the world to check."""

    def on_put(self, changes: Mapping[str, bytes | None]) -> None:
        """Look at a change of records before it happens; for the world to check."""

    async def hop(self) -> None:
        """Let the time of a look at the disk pass."""
        await asyncio.sleep(self.choose.random() * 0.002)

    async def until_readable(self) -> None:
        """Wait while the store is being reopened."""
        self.check_open()
        await self._readable.wait()
        self.check_open()

    def check_open(self) -> None:
        """Raise when closed."""
        if self._closed:
            raise OnShutdown("the simulated store is closed")

    def check_writable(self) -> None:
        """Raise unless writes are taken."""
        self.check_open()
        if self._failure is not None:
            raise self._failure

    def submit(self, write: Written, *, log: "SimulatedLog | None" = None) -> _Queued:
        """Queue a write and return it with its outcome to come."""
        make_outcome = asyncio.get_running_loop().create_future
        queued = _Queued(write, make_outcome(), make_outcome(), log)
        self._queue.append(queued)
        if not self._busy:
            self._begin()
        return queued

    # --- the writer -------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._busy = True
        self._idle.clear()
        self._later(WRITE_S, self._write)

    def _write(self) -> None:
        batch = self._queue
        self._queue = []
        self._unsynced += batch
        failing = self.choose.random() < self._faults.write
        if failing and self.choose.random() < 0.5:
            self._keep(batch[: self.choose.randint(0, len(batch))])
            self._fail()
            return
        self._keep(batch)
        if failing:
            self._later(SYNC_S, self._fail)
        elif (
            self._syncs_late
            and not self._sync_due
            and all(isinstance(item.write, EntryWritten) for item in batch)
        ):
            self._later(WRITE_S, self._acknowledge, batch)
        else:
            self._later(SYNC_S, self._sync)

    def _keep(self, batch: list[_Queued]) -> None:
        for item in batch:
            self.disk.writes.append(item.write)
            if isinstance(item.write, EntryWritten):
                assert item.log is not None
                item.log.hold(item.write)

    def _acknowledge(self, batch: list[_Queued]) -> None:
        """Answer for what the operating system has; it is synced later."""
        self._acknowledged = len(self.disk.writes)
        for item in batch:
            if not item.written.done():
                item.written.set_result(None)
        if not self._sync_is_coming:
            self._sync_is_coming = True
            asyncio.get_running_loop().call_later(LATE_SYNC_S, self._begin_late_sync)
        self._next()

    def _begin_late_sync(self) -> None:
        self._sync_is_coming = False
        if not self._unsynced:
            return
        self._sync_due = True  # with what is written next, or by itself
        if not self._busy:
            self._begin()

    def _sync(self) -> None:
        batch = self._unsynced
        self._unsynced = []
        self._sync_due = False
        self.disk.sync()
        floor = self.disk.floor
        for item in batch:
            if isinstance(item.write, EntryWritten):
                floor.positions[item.write.log] = item.write.last_position
                floor.tick = max(floor.tick, item.write.tick)
        self._later(WRITE_S, self._settle, batch)

    def _settle(self, batch: list[_Queued]) -> None:
        self._acknowledged = len(self.disk.writes)
        for item in batch:
            if item.log is not None:
                item.log.settle(item.write)
            if isinstance(item.write, RecordsWritten):
                apply_changes(self.state.records, item.write.changes)
        for item in batch:
            for outcome in (item.durable, item.written):
                if not outcome.done():
                    outcome.set_result(None)
        self._next()

    def _fail(self) -> None:
        """End everything in flight: nobody knows what of it is on disk, but what a caller was told
        of is.
        """
        self._failure = Indeterminate("a simulated write failed and may or may not be in the log")
        lost = self.choose.randint(
            0, len(self.disk.writes) - max(self.disk.synced, self._acknowledged)
        )
        if lost:
            del self.disk.writes[-lost:]
        failed = [*self._unsynced, *self._queue]
        self._unsynced = []
        self._queue = []
        self._sync_due = False
        for item in failed:
            for outcome in (item.durable, item.written):
                if not outcome.done():
                    outcome.set_exception(self._failure)
                    outcome.exception()
        self._failed.set()
        self._busy = False
        self._idle.set()

    def _next(self) -> None:
        if self._queue or self._sync_due:
            self._later(WRITE_S, self._write)
        else:
            self._busy = False
            self._idle.set()

    def _later(self, scale_s: float, step: object, *arguments: object) -> None:
        loop = asyncio.get_running_loop()
        slow = 50 if self.choose.random() < 0.01 else 1
        loop.call_later(self.choose.random() * scale_s * slow, step, *arguments)  # type: ignore[arg-type]

    def _sync_floor_later(self) -> None:
        def sync_floor() -> None:
            if not self._closed:
                self.disk.floor_synced = self.disk.floor.copy()
                self._sync_floor_later()

        asyncio.get_running_loop().call_later(FLOOR_SYNC_S, sync_floor)


class SimulatedLog:
    """One log: positions, entries as the disk has them, and what of it is synced; see
    `wal.log.Log`.
    """

    wal_name = WAL_NAME

    def __init__(self, store: SimulatedStore, name: str, stored: StoredLog) -> None:
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

    def append(self, pack: Pack) -> AppendTicket:
        """Queue a pack."""
        self._store.check_writable()
        first = self.next_position
        tick = pack.time_tick
        self._store.on_append(pack.first_tick, self.last_tick)
        pack.require_tick_above(self.last_tick)
        data = pack.encode(WAL_NAME, first_position=first, previous_crc32c=self._crc32c)
        self._crc32c = entry_crc32c(data)
        self.next_position = first + pack.message_count
        self.last_tick = tick
        entry = EntryWritten(self.name, first, self.next_position - 1, tick, data)
        queued = self._store.submit(entry, log=self)
        return AppendTicket(first, written=queued.written, durable=queued.durable)

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
        size = 0
        previous = None
        for written in self.stored.entries[bisect_left(self.stored.last_positions, position) :]:
            if written.last_position > end or size >= bytes_max:
                break
            entry = decode_entry(written.data, wal_name=WAL_NAME, previous_crc32c=previous)
            entries.append(entry)
            previous = entry.crc32c
            size = size + entry.size_bytes
        return entries

    async def wait_beyond(self, position: int) -> None:
        """Wait for a synced message after `position`."""
        await self._synced.wait_beyond(position)

    async def truncate(
        self, position: int, *, needed: Callable[[], int | None] | None = None
    ) -> None:
        """Give up everything before the entry that holds `position`."""
        self._store.check_writable()
        position = min(position, self.durable_position)
        if is_needed(position, needed):
            return
        self._store.on_truncate(position)
        await asyncio.shield(
            self._store.submit(RangeDropped(self.name, position), log=self).durable
        )

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
