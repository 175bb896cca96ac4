"""One log in RocksDB: its first and last position, appending, reading and truncating.

The event loop keeps both ends of the log in memory. The writer thread writes the bytes; reader
threads read them and check every entry.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, NamedTuple

from rocksdict import Rdict, RdictIter

from wal.append import AppendTicket, Pack
from wal.codec import decode_entry, entry_crc32c, entry_range
from wal.entry import LogEntry
from wal.entry_log import Decode, E
from wal.errors import Corrupt, Truncated
from wal.failpoint import failpoint
from wal.log import is_needed
from wal.position import FIRST_POSITION, POSITION_MAX, RocksMessageId
from wal.queue import SyncedPosition
from wal.rocks.database import Engine
from wal.rocks.group_commit import BatchWrite, EntryWrite, GroupCommit
from wal.rocks.layout import (
    decode_number,
    encode_number,
    entry_key,
    first_position_key,
    split_entry_key,
)
from wal.runtime import Acknowledgement

WAL_NAME = RocksMessageId.wal_name

READ_ENDS_MAX = 256
"""Number of ends of reads to remember: a few for each reader that catches up."""


def decode_rocks_entry(data: bytes, previous_crc32c: int | None) -> LogEntry:
    """Return an entry of a log on RocksDB; see `decode_entry`."""
    return decode_entry(data, wal_name=WAL_NAME, previous_crc32c=previous_crc32c)


class LogEnds(NamedTuple):
    """Both ends of a log. The defaults are those of an empty log."""

    first_position: int = FIRST_POSITION
    last_position: int = 0
    last_tick: int = 0
    last_crc32c: int = 0


def load_ends(engine: Engine, log_id: int, name: str, end_position: int = POSITION_MAX) -> LogEnds:
    """Return both ends of a log, ignoring entries after `end_position`; the time does not depend on
    its length. Reader thread. Raises `Corrupt` when the ends do not fit.
    """
    begin = first_kept(engine.database, log_id)
    iterator = engine.entries.iter()
    iterator.seek(entry_key(log_id, 0))
    first = current_entry(iterator, log_id)
    last = last_entry(engine.entries, log_id, end_position)
    if first is None or last is None:
        if begin > FIRST_POSITION:
            raise Corrupt(f"log {name!r} begins at position {begin} and has no entries")
        return LogEnds()
    earliest = decode_rocks_entry(first[1], None)
    if earliest.first_position != begin:
        raise Corrupt(
            f"log {name!r}: positions {begin} to {earliest.first_position - 1} are missing"
        )
    latest = decode_rocks_entry(last[1], None)
    return LogEnds(begin, latest.last_position, latest.time_tick, latest.crc32c)


class RocksEntryLog(Generic[E]):
    """One log of entries in RocksDB, as its readers see it; see `wal.entry_log.EntryLog`.

    `decode` checks an entry. `as_id` converts a position to the id that errors name. `title` begins
    the text of errors and precedes the position.
    """

    def __init__(
        self,
        engine: Engine,
        commit: GroupCommit,
        *,
        log_id: int,
        title: str,
        decode: Decode[E],
        as_id: Callable[[int], object] = int,
        first_position: int = FIRST_POSITION,
        last_position: int = 0,
    ) -> None:
        self.log_id = log_id
        self.first_position = first_position
        self.next_position = last_position + 1
        self.synced = SyncedPosition(last_position)
        self.wait_beyond = self.synced.wait_beyond
        self.end = self.synced.end
        self._engine = engine
        self._commit = commit
        self._title = title
        self._decode = decode
        self._as_id = as_id
        self._read_ends: dict[int, int] = {}
        """Checksums of the last entries of reads, by last position: a reader that continues there
        need not read that entry again.
        """

    @property
    def durable_position(self) -> int:
        """Position of the last synced message; one below the first kept position when the log is
        empty.
        """
        return self.synced.value

    async def read(self, position: int, *, bytes_max: int) -> list[E]:
        """Return checked, synced entries from the one that holds `position`."""
        self._commit.check_readable()
        if position < self.first_position:
            raise Truncated(self._as_id(position), self._as_id(self.first_position))
        if position > self.durable_position:
            return []
        first_position = self.first_position
        try:
            entries = await self._engine.read(self._read_range, position, first_position, bytes_max)
        except Corrupt as error:
            # a truncation during this read looks like a gap
            if self.first_position > first_position:
                return await self.read(position, bytes_max=bytes_max)
            raise Corrupt(f"{self._title} {position}: {error}") from error
        self._read_ends[entries[-1].last_position] = entries[-1].crc32c
        if len(self._read_ends) > READ_ENDS_MAX:
            del self._read_ends[next(iter(self._read_ends))]
        return entries

    async def go_on(self, first_position: int, last_position: int, crc32c: int) -> None:
        """Continue from the ends that the owner has recorded; see `wal.entry_log.OwnedLog`."""
        found = await self._engine.read(lambda: last_entry(self._engine.entries, self.log_id))
        reached = (0, 0) if found is None else (found[0], entry_crc32c(found[1]))
        if first_position <= last_position and reached != (last_position, crc32c):
            raise Corrupt(f"reaches id {reached[0]}, and {last_position} was acknowledged")
        self._read_ends.clear()
        self.first_position = first_position
        self.next_position = last_position + 1
        self.synced.advance(last_position)

    def _read_range(self, position: int, first_position: int, bytes_max: int) -> list[E]:
        """Return entries from the one that holds `position` up to the last synced entry. Reader
        thread.
        """
        before = self._read_ends.get(position - 1)
        kept = first_position, self.durable_position
        entries = self._engine.entries
        return read_range(entries, self.log_id, self._decode, position, kept, bytes_max, before)


class RocksLog(RocksEntryLog[LogEntry]):
    """One log of packs, created by its `RocksStore`; see `wal.log.Log`."""

    wal_name = WAL_NAME

    def __init__(
        self, engine: Engine, commit: GroupCommit, *, name: str, log_id: int, ends: LogEnds
    ) -> None:
        title = f"log {name!r}, read from position"
        super().__init__(
            engine,
            commit,
            log_id=log_id,
            title=title,
            decode=decode_rocks_entry,
            as_id=RocksMessageId,
        )
        self.name = name
        self.admit = commit.admit
        self._truncating = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self.restart(ends)

    def restart(self, ends: LogEnds) -> None:
        """Continue from the ends found when the database was opened again; new entries become
        visible to readers.
        """
        self.first_position = ends.first_position
        self.next_position = ends.last_position + 1
        self.last_tick = ends.last_tick
        self._crc32c = ends.last_crc32c
        self._read_ends.clear()
        self.synced.advance(ends.last_position)

    def append(self, pack: Pack) -> AppendTicket:
        """Queue a stamped pack; see `wal.log.Log.append`. An admitted pack is queued even when the
        disk is full by then.
        """
        pack.require_tick_above(self.last_tick)
        first_position = self.next_position
        tick = pack.time_tick
        data = pack.encode(WAL_NAME, first_position=first_position, previous_crc32c=self._crc32c)
        position = first_position + pack.message_count - 1
        written = Acknowledgement(self._loop)
        durable = self._loop.create_future()
        self._commit.submit(
            EntryWrite(self.log_id, position, tick, data, len(data), written, durable, self.synced)
        )
        self.next_position = position + 1
        self.last_tick = tick
        self._crc32c = entry_crc32c(data)
        return AppendTicket(first_position, written, durable)

    async def truncate(
        self, position: int, *, needed: Callable[[], int | None] | None = None
    ) -> None:
        """Delete all entries before the one that holds `position` and reclaim their space. After a
        cancellation a later call may have to reclaim the space.
        """
        async with self._truncating:
            self._commit.check_readable()
            position = min(position, self.durable_position)
            if position <= self.first_position:
                return
            [entry] = await self._engine.read(self._read_range, position, self.first_position, 1)
            kept = entry.first_position
            if kept <= self.first_position or is_needed(kept, needed):
                return
            begin = entry_key(self.log_id, self.first_position)
            end = entry_key(self.log_id, kept)
            record = {first_position_key(self.log_id): encode_number(kept)}
            dropped = self._commit.submit(BatchWrite(record, dropped=[(begin, end)]))
            # from here on reads below are refused, so no read finds the gap
            self.first_position = kept
            failpoint("flush.drop_queued")
            await asyncio.shield(dropped)
            failpoint("flush.log_dropped")
            await self._engine.compact(begin, end)
            failpoint("flush.log_compacted")

    def _read_range(self, position: int, first_position: int, bytes_max: int) -> list[LogEntry]:
        found = super()._read_range(position, first_position, bytes_max)
        if found and found[0].first_position < first_position:
            raise _missing(first_position, position)
        return found


def read_range(
    entries: Rdict,
    log_id: int,
    decode: Decode[E],
    position: int,
    kept: tuple[int, int],
    bytes_max: int,
    previous_crc32c: int | None = None,
) -> list[E]:
    """Return entries from the one that holds `position`, until their size reaches `bytes_max`.
    Reader thread.

    `kept` is the first and the last position that must exist; the first entry may begin before the
    first. `decode` gets an entry's bytes and the checksum of the entry before it, None when that is
    not kept. A caller that has read up to `position` passes the checksum of the last entry as
    `previous_crc32c`. Raises `Corrupt` for damage, a gap or an early end.
    """
    iterator = entries.iter()
    (first_position, end_position) = kept
    # Check the previous entry too: so the chain holds across batches, and no entry can be missing
    # between them.
    if previous_crc32c is not None:  # the previous read checked it
        iterator.seek(entry_key(log_id, position))
        expected = position
    else:
        iterator.seek_for_prev(entry_key(log_id, position - 1))
        before = current_entry(iterator, log_id)
        if before is None:
            iterator.seek(entry_key(log_id, first_position))
            expected = first_position
        else:
            iterator.next()
            previous_crc32c = entry_crc32c(before[1])
            expected = before[0] + 1
    found: list[E] = []
    size = 0
    while size < bytes_max and expected <= end_position:
        if found:  # not after the last entry: each step reads an entry from the disk
            iterator.next()
        current = current_entry(iterator, log_id)
        if current is None:
            raise _missing(expected, end_position)
        last_position, data = current
        found.append(decode(data, previous_crc32c))
        first, last = entry_range(data)
        if (
            first > expected
            or (first < expected and previous_crc32c is not None)
            or last != last_position
        ):
            raise _missing(expected, first - 1)
        previous_crc32c = entry_crc32c(data)
        expected = last + 1
        size += len(data)
    return found


def first_kept(database: Rdict, log_id: int) -> int:
    """Return the first kept position of a log. Takes the whole database: the record is in the
    default family.
    """
    recorded = database.get(first_position_key(log_id))
    return decode_number(recorded) if isinstance(recorded, bytes) else FIRST_POSITION


def last_position(entries: Rdict, log_id: int) -> int:
    """Return the last position of a log, 0 when it has no entry. Does not decode the entry."""
    last = last_entry(entries, log_id)
    return 0 if last is None else last[0]


def last_entry(
    entries: Rdict, log_id: int, end_position: int = POSITION_MAX
) -> tuple[int, bytes] | None:
    """Return the last position of the last entry of a log up to `end_position`, and its bytes; None
    when there is no such entry.
    """
    iterator = entries.iter()
    iterator.seek_for_prev(entry_key(log_id, end_position))
    return current_entry(iterator, log_id)


def current_entry(iterator: RdictIter, log_id: int) -> tuple[int, bytes] | None:
    """Return the last position and the bytes of an iterator's current entry, None when the iterator
    is outside of the log.

    Raises when damage ended the iteration.
    """
    # RocksDB's iteration bounds would make the comparison of each key needless, but rocksdict does
    # not encode them in raw mode.
    if not iterator.valid():
        # raises if damage ended the iteration early: only the status shows it
        iterator.status()
        return None
    found_id, position = split_entry_key(iterator.key())
    return (position, iterator.value()) if found_id == log_id else None


def _missing(first: int, last: int) -> Corrupt:
    return Corrupt(f"positions {first} to {last} are missing or unreadable")
