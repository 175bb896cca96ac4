"""Bugs of the disk and of what is written to it."""

from typing import Any

from tests.chaos.seeded.bug import Right, SeededBug, nothing
from tests.chaos.simulation.disk import EntryWritten
from tests.chaos.simulation.node_files import SimulatedFiles
from tests.chaos.simulation.store import SYNC_S, SimulatedLog, SimulatedStore


def _acknowledge_before_sync(_right: Right) -> Right:
    def write(store: SimulatedStore) -> None:
        batch = store._queue
        store._queue = []
        store._unsynced += batch
        store._keep(batch)
        _tell_written(batch)
        store._later(SYNC_S, store._sync)

    return write


def _acknowledge_before_write(right: Right) -> Right:
    def submit(store: SimulatedStore, *arguments: Any, **options: Any) -> Any:
        queued = right(store, *arguments, **options)
        _tell_written([queued])
        return queued

    return submit


def _tell_written(batch: list[Any]) -> None:
    for item in batch:
        if not item.written.done():
            item.written.set_result(None)


def _lose_a_write(right: Right) -> Right:
    def keep(store: SimulatedStore, batch: list[Any]) -> None:
        right(store, batch)
        if len(batch) > 1:
            store.disk.writes.pop()

    return keep


def _readable_when_written(right: Right) -> Right:
    def acknowledge(store: SimulatedStore, batch: list[Any]) -> None:
        for item in batch:
            if isinstance(item.write, EntryWritten):
                item.log.settle(item.write)
                item.log = None  # it has settled
                item.durable.set_result(None)
        right(store, batch)

    return acknowledge


def _one_entry_more_dropped(right: Right) -> Right:
    async def truncate(log: SimulatedLog, position: int, **needed: Any) -> None:
        await right(log, position + 1, **needed)

    return truncate


ACKNOWLEDGE_BEFORE_SYNC = SeededBug(
    "acknowledge before sync", SimulatedStore, "_write", _acknowledge_before_sync
)
NO_DIRECTORY_FSYNC = SeededBug("no directory fsync", SimulatedFiles, "sync_parents", nothing)
OTHERS = (
    SeededBug("acknowledge before write", SimulatedStore, "submit", _acknowledge_before_write),
    SeededBug("no file fsync", SimulatedFiles, "sync", nothing),
    SeededBug("last write of a batch lost", SimulatedStore, "_keep", _lose_a_write),
    SeededBug(
        "synced when written, under durability os",
        SimulatedStore,
        "_acknowledge",
        _readable_when_written,
    ),
    SeededBug("truncation off by one", SimulatedLog, "truncate", _one_entry_more_dropped),
)
