"""Bugs put into the node on purpose, to see whether the simulation finds them. Never reachable from the product.

Each replaces one function by one that is wrong in the way a programmer could have been; `seeded` does so for a while.
The first twelve are tried at each commit, all of them in long runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import msgspec
import pyarrow as pa

import flusher.flush_run
import flusher.snapshot
import scanner.starting_point
import streamingnode.channel_term
import streamingnode.composition
from bench.chaos.simulation.node_files import SimulatedFiles
from bench.chaos.simulation.store import SYNC_S, SimulatedLog, SimulatedStore
from flusher.cuts.open_cut import OpenCut
from flusher.flush_run import FlushRun
from flusher.removal.retention import Retention
from interceptors.idempotency.window import Window
from interceptors.recovery import RecoveredChannel
from interceptors.timetick.interceptor import TimeTickInterceptor
from interceptors.timetick.sync_operator import TimeTickSyncOperator
from interceptors.txn.interceptor import TxnInterceptor
from interceptors.txn.manager import TxnManager
from scanner.catch_up import CatchUp
from scanner.named_reader import NamedReaders, ReaderPosition
from streamingnode.reading.collection_reader import CollectionReader
from wal.message import LogEntry, Message
from wal.message_type import MessageType
from wal.pending_queue import PendingQueue
from wal.timetick import TickAllocator, compose_tick
from wal.transaction_buffer import TransactionBuffer

Wrong = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes the right function and returns the wrong one."""


@dataclass(frozen=True, slots=True)
class SeededBug:
    """One bug: where it is, and what is wrong there."""

    name: str
    owner: object
    attribute: str
    wrong: Wrong


@contextmanager
def seeded(bug: SeededBug) -> Iterator[None]:
    """Have the bug while the block runs."""
    right = getattr(bug.owner, bug.attribute)
    with patch.object(bug.owner, bug.attribute, bug.wrong(right)):
        yield


# --- the disk ----------------------------------------------------------------------------------------------------------


def _acknowledge_before_sync(_right: Callable[..., Any]) -> Callable[..., Any]:
    def write(store: SimulatedStore) -> None:
        batch, store._queue = store._queue, []
        store._keep(batch)
        for item in batch:
            if not item.written.done():
                item.written.set_result(None)
        store._later(SYNC_S, store._sync, batch)

    return write


def _nothing(_right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *_arguments, **_options: None


def _lose_a_write(right: Callable[..., Any]) -> Callable[..., Any]:
    def keep(store: SimulatedStore, batch: list[Any]) -> None:
        right(store, batch)
        if len(batch) > 1:
            store.disk.writes.pop()

    return keep


# --- time --------------------------------------------------------------------------------------------------------------


def _tick_goes_back(_right: Callable[..., Any]) -> Callable[..., Any]:
    def allocate(ticks: TickAllocator) -> int:
        ticks._last = compose_tick(ticks._now_ms()) + (ticks._last & 0xFF) + 1
        return ticks._last

    return allocate


def _tick_forgotten(_right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _store: 0


def _stale_tick(_right: Callable[..., Any]) -> Callable[..., Any]:
    async def consistent_tick(operator: TimeTickSyncOperator, *, at_least: int = 0) -> int:
        return operator._acks.confirmed_tick

    return consistent_tick


def _confirmed_when_queued(_right: Callable[..., Any]) -> Callable[..., Any]:
    def decide(interceptor: TimeTickInterceptor, group: Any, acker: Any) -> None:
        if group.ticket is None:
            interceptor._acks.fail(acker)
        else:
            entry = interceptor._entry(group, group.ticket)
            interceptor._mvcc.update(entry)
            interceptor._acks.confirm(acker, entry)

    return decide


def _own_position_confirmed(_right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _manager: None


# --- readers -----------------------------------------------------------------------------------------------------------


def _entry_left_out(right: Callable[..., Any]) -> Callable[..., Any]:
    async def following(catch_up: CatchUp) -> list[LogEntry]:
        entries: list[LogEntry] = await right(catch_up)
        return entries[1:] if len(entries) > 2 else entries

    return following


def _starts_one_late(right: Callable[..., Any]) -> Callable[..., Any]:
    def start_with(log: Any, entry: LogEntry, *, after_tick: int) -> Any:
        start = right(log, entry, after_tick=after_tick)
        return start._replace(position=min(start.position + 1, entry.first_position))

    return start_with


def _starts_one_early(right: Callable[..., Any]) -> Callable[..., Any]:
    async def start_after_tick(*arguments: Any) -> Any:
        start = await right(*arguments)
        return start._replace(after_tick=start.after_tick - 1)

    return start_after_tick


def _all_with_a_hole(_right: Callable[..., Any]) -> Callable[..., Any]:
    async def start_at_earliest(log: Any, _reader: Any) -> Any:
        return scanner.starting_point.StartingPoint(log.first_position, 0)

    return start_at_earliest


def _tail_skips(right: Callable[..., Any]) -> Callable[..., Any]:
    def snapshot_from(queue: PendingQueue, position: int, *, bytes_max: int | None = None) -> list[LogEntry]:
        entries: list[LogEntry] = right(queue, position, bytes_max=bytes_max)
        return entries[:1] + entries[2:] if len(entries) > 2 else entries

    return snapshot_from


def _bodies_at_once(right: Callable[..., Any]) -> Callable[..., Any]:
    def observe_message(buffer: TransactionBuffer, message: Message) -> Any:
        outcome = right(buffer, message)
        is_body = message.txn_id and message.type in {MessageType.INSERT, MessageType.DELETE}
        return message if is_body and message.txn_id in buffer._open else outcome

    return observe_message


def _ends_early(right: Callable[..., Any]) -> Callable[..., Any]:
    def start(reader: CollectionReader, services: Any, info: Any, options: Any, **rest: Any) -> None:
        until = None if options.until is None else options.until - (1 << 20)
        right(reader, services, info, replace(options, until=until), **rest)

    return start


def _acknowledged_in_memory(_right: Callable[..., Any]) -> Callable[..., Any]:
    async def save(readers: NamedReaders, key: str, position: ReaderPosition) -> None:
        readers._positions[key] = position

    return save


def _acknowledged_too_far(right: Callable[..., Any]) -> Callable[..., Any]:
    async def save(readers: NamedReaders, key: str, position: ReaderPosition) -> None:
        await right(readers, key, msgspec.structs.replace(position, tick=position.tick + (1 << 22)))

    return save


# --- transactions ------------------------------------------------------------------------------------------------------


def _abort_lost(_right: Callable[..., Any]) -> Callable[..., Any]:
    """A rollback commits: nobody looked at what was appended."""

    async def rollback(interceptor: TxnInterceptor, group: Any, append: Any) -> Any:
        message = group.messages[0]
        message.type = MessageType.COMMIT_TXN
        from wal.headers import CommitTxnHeader

        message.header = CommitTxnHeader()
        return await interceptor._commit(group, append)

    return rollback


def _body_lost(right: Callable[..., Any]) -> Callable[..., Any]:
    async def take_in(run: FlushRun, message: Any, writers: Any) -> None:
        if not isinstance(message, Message) and len(message.bodies) > 1:
            message = (
                replace(message, bodies=message.bodies[1:])
                if hasattr(message, "__dataclass_fields__")
                else (msgspec.structs.replace(message, bodies=message.bodies[1:]))
            )
        await right(run, message, writers)

    return take_in


# --- cuts --------------------------------------------------------------------------------------------------------------


def _row_dropped(right: Callable[..., Any]) -> Callable[..., Any]:
    def insert(cut: OpenCut, message: Any, header: Any) -> None:
        if header.rows == 1 and header.first_offset % 5 == 4:
            return
        right(cut, message, header)

    return insert


def _delete_dropped(right: Callable[..., Any]) -> Callable[..., Any]:
    def delete(cut: OpenCut, message: Any, header: Any) -> None:
        if len(cut.segments) < 3:
            right(cut, message, header)

    return delete


def _rows_twice(right: Callable[..., Any]) -> Callable[..., Any]:
    async def take_in_one(run: FlushRun, message: Any, writers: Any) -> None:
        await right(run, message, writers)
        if message.type is MessageType.INSERT and message.header.first_offset % 5 == 4:
            await right(run, message, writers)

    return take_in_one


def _checkpoint_too_far(right: Callable[..., Any]) -> Callable[..., Any]:
    async def advance(run: FlushRun, message: Any, published: Any) -> None:
        await right(run, msgspec.structs.replace(message, last_confirmed_position=message.position), published)

    return advance


def _manifest_first(right: Callable[..., Any]) -> Callable[..., Any]:
    def publish_cut(directory: Any, manifest: Any, renames: Sequence[tuple[str, str]]) -> Any:
        published = right(directory, manifest, ())
        for temporary, path in renames:
            directory.rename(temporary, path)
        directory.sync_parents([path for _, path in renames])
        return published

    return publish_cut


def _delete_takes_its_own(right: Callable[..., Any]) -> Callable[..., Any]:
    def apply_deletes(rows: pa.Table, deletes: Sequence[pa.Table], *, key: str) -> pa.Table:
        if not sum(table.num_rows for table in deletes):
            return rows
        later = [_with_offset_one_higher(table) for table in deletes]
        left: pa.Table = right(rows, later, key=key)
        return left

    return apply_deletes


def _with_offset_one_higher(table: pa.Table) -> pa.Table:
    import pyarrow.compute as pc

    index = table.schema.get_field_index("_offset")
    higher: pa.Table = table.set_column(
        index, table.schema.field(index), pc.add(table.column(index), 1).cast(pa.int64())
    )
    return higher


def _truncation_forgets_readers(right: Callable[..., Any]) -> Callable[..., Any]:
    async def enforce(retention: Retention, *arguments: Any, **options: Any) -> Any:
        reader_floor, retention._reader_floor = retention._reader_floor, lambda: None
        try:
            return await right(retention, *arguments, **options)
        finally:
            retention._reader_floor = reader_floor

    return enforce


def _one_entry_more_dropped(right: Callable[..., Any]) -> Callable[..., Any]:
    async def truncate(log: SimulatedLog, position: int) -> None:
        await right(log, position + 1)

    return truncate


# --- recovery and retries ----------------------------------------------------------------------------------------------


def _recovery_ends_early(right: Callable[..., Any]) -> Callable[..., Any]:
    async def recover(log: Any, **options: Any) -> RecoveredChannel:
        class Short:
            def __getattr__(self, name: str) -> Any:
                return getattr(log, name)

            async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
                entries: list[LogEntry] = await log.read(position, bytes_max=1)
                return [] if entries and entries[-1].last_position + 3 > log.durable_position else entries

        return await right(Short(), **options)  # type: ignore[no-any-return]

    return recover


def _retry_not_recognised(_right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _window, _stamp: None


def _window_not_rebuilt(_right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _window, _entry, _visible: None


def _window_not_persisted(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda window: right(window._replace(producers=()))


def _result_of_another(right: Callable[..., Any]) -> Callable[..., Any]:
    def add(window: Window, stamp: Any, result: Any) -> None:
        right(window, stamp, replace(result, time_tick=result.time_tick + 1))

    return add


BUGS: tuple[SeededBug, ...] = (
    SeededBug("acknowledge before sync", SimulatedStore, "_write", _acknowledge_before_sync),
    SeededBug("no directory fsync", SimulatedFiles, "sync_parents", _nothing),
    SeededBug("window not persisted", streamingnode.composition, "encode_window", _window_not_persisted),
    SeededBug("abort lost", TxnInterceptor, "_rollback", _abort_lost),
    SeededBug("scan off by one", CatchUp, "next", _entry_left_out),
    SeededBug("tick goes back", TickAllocator, "allocate", _tick_goes_back),
    SeededBug("commit without body", FlushRun, "_take_in", _body_lost),
    SeededBug("cut drops a row", OpenCut, "insert", _row_dropped),
    SeededBug("retry not recognised", Window, "find", _retry_not_recognised),
    SeededBug("readers see what is not durable", TimeTickInterceptor, "_decide", _confirmed_when_queued),
    SeededBug("stale consistent tick", TimeTickSyncOperator, "consistent_tick", _stale_tick),
    SeededBug("checkpoint ahead of open transactions", FlushRun, "_advance", _checkpoint_too_far),
    # --- the rest, in long runs
    SeededBug("no file fsync", SimulatedFiles, "sync", _nothing),
    SeededBug("last write of a batch lost", SimulatedStore, "_keep", _lose_a_write),
    SeededBug(
        "readers resume at their own position",
        TxnManager,
        "oldest_open_begin",
        _own_position_confirmed,
    ),
    SeededBug("a reader starts one late", scanner.starting_point, "_start_with", _starts_one_late),
    SeededBug("a reader starts one early", scanner.starting_point, "_start_after_tick", _starts_one_early),
    SeededBug("a history with a hole", scanner.starting_point, "_start_at_earliest", _all_with_a_hole),
    SeededBug("the live tail skips", PendingQueue, "snapshot_from", _tail_skips),
    SeededBug("bodies before their commit", TransactionBuffer, "_observe_message", _bodies_at_once),
    SeededBug("a read ends early", CollectionReader, "__init__", _ends_early),
    SeededBug("acknowledged in memory only", NamedReaders, "save", _acknowledged_in_memory),
    SeededBug("acknowledged too far", NamedReaders, "save", _acknowledged_too_far),
    SeededBug("delete lost in a cut", OpenCut, "delete", _delete_dropped),
    SeededBug("rows twice in a cut", FlushRun, "_take_in_one", _rows_twice),
    SeededBug("manifest before its files", flusher.flush_run, "publish_cut", _manifest_first),
    SeededBug("an upsert deletes its own row", flusher.snapshot, "apply_deletes", _delete_takes_its_own),
    SeededBug("truncation forgets readers", Retention, "enforce", _truncation_forgets_readers),
    SeededBug("truncation off by one", SimulatedLog, "truncate", _one_entry_more_dropped),
    SeededBug("recovery ends early", streamingnode.channel_term, "recover", _recovery_ends_early),
    SeededBug("window not rebuilt", Window, "observe", _window_not_rebuilt),
    SeededBug("another result for a retry", Window, "add", _result_of_another),
)
EACH_COMMIT = 12
"""So many of the first are tried at each commit."""
