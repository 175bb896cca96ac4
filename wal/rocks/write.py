"""What goes through the writer thread: a log entry, or a change of the small records beside the logs.

Built on the event loop, staged on the writer thread, settled on the event loop again; nothing else is shared in between.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rocksdict import ColumnFamily, WriteBatch

from wal.queue import SyncedPosition

Outcome = asyncio.Future[None]


@dataclass(slots=True, eq=False)
class EntryWrite:
    """One log entry, staged into the batch's default column family."""

    log_id: int
    position: int
    tick: int
    key: bytes
    value: bytes
    written: Outcome
    durable: Outcome
    synced: SyncedPosition

    urgent = False
    meta_version = 0

    @property
    def size_bytes(self) -> int:
        """What it adds to a batch."""
        return len(self.value)

    def stage(self, batch: WriteBatch) -> None:
        """Put it into a batch. Writer thread."""
        batch.put(self.key, self.value)


@dataclass(frozen=True, slots=True)
class DroppedRange:
    """Entries to give up: those with a key from `begin` up to, not including, `end`."""

    family: ColumnFamily
    begin: bytes
    end: bytes


@dataclass(slots=True, eq=False)
class RecordWrite:
    """Changes of small records (None removes), and entries to give up with them; always synced at once.

    `meta_version` is 0 for changes that leave the state map alone.
    """

    family: ColumnFamily
    changes: Mapping[bytes, bytes | None]
    written: Outcome
    durable: Outcome
    meta_version: int = 0
    dropped: DroppedRange | None = None

    urgent = True
    log_id = 0
    position = 0
    tick = 0

    @property
    def size_bytes(self) -> int:
        """What it adds to a batch."""
        return sum(len(key) + len(value or b"") for key, value in self.changes.items())

    def stage(self, batch: WriteBatch) -> None:
        """Put it into a batch. Writer thread."""
        for key, value in self.changes.items():
            if value is None:
                batch.delete(key, self.family)
            else:
                batch.put(key, value, self.family)
        if self.dropped is not None:
            # The family has to be named: a range deletion does not go to the batch's default one.
            batch.delete_range(self.dropped.begin, self.dropped.end, self.dropped.family)


Write = EntryWrite | RecordWrite


def settle(writes: Iterable[Write]) -> None:
    """Show synced entries to readers, and tell who waits for `writes`. Event loop."""
    ends = {write.synced: write.position for write in writes if isinstance(write, EntryWrite)}
    for synced, position in ends.items():
        synced.advance(position)
    for write in writes:
        if not write.durable.done():
            write.durable.set_result(None)
        if not write.written.done():
            write.written.set_result(None)


def acknowledge(writes: Iterable[Write]) -> None:
    """Tell who waits for `writes` that the operating system has them. Event loop."""
    for write in writes:
        if not write.written.done():
            write.written.set_result(None)


def fail(writes: Iterable[Write], error: Exception) -> None:
    """Tell who waits for `writes` that their outcome is open; nobody has to listen. Event loop."""
    for write in writes:
        for outcome in (write.written, write.durable):
            if not outcome.done():
                outcome.set_exception(error)
                outcome.exception()  # counts as heard, or an abandoned append would log a traceback
