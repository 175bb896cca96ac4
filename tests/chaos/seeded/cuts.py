"""Bugs of cuts, of states, and of what is given up behind cuts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

import flusher.cuts
import flusher.run
import flusher.snapshot
import streamingnode.snapshot
from flusher.data_file import ParquetFile, Rows
from flusher.directory import TEMPORARY_SUFFIX, file_paths
from flusher.retention import Retention
from flusher.run import FlushRun, OpenCut
from interceptors.shard.state import ShardState
from scanner.named_reader import NamedReaders
from tests.chaos.seeded.bug import Right, SeededBug
from wal.message import TransactionMessage

OFFSET = "_offset"


def _body_lost(right: Right) -> Right:
    async def take_in(run: FlushRun, message: Any, writers: Any) -> None:
        if isinstance(message, TransactionMessage) and len(message.bodies) > 1:
            message = msgspec.structs.replace(message, bodies=message.bodies[1:])
        await right(run, message, writers)

    return take_in


def _row_dropped(right: Right) -> Right:
    def insert(cut: OpenCut, rows: Rows) -> None:
        if rows.batch.rows > 1 or rows.batch.offsets[0] % 5 != 4:
            right(cut, rows)

    return insert


def _delete_dropped(right: Right) -> Right:
    def delete(cut: OpenCut, rows: Rows) -> None:
        if len(cut.files) < 3:
            right(cut, rows)

    return delete


def _rows_twice(right: Right) -> Right:
    def insert(cut: OpenCut, rows: Rows) -> None:
        right(cut, rows)
        if rows.batch.offsets[0] % 5 == 4:
            right(cut, rows)

    return insert


def _row_group_lost(right: Right) -> Right:
    begun: WeakSet[ParquetFile] = WeakSet()

    def write(file: ParquetFile, table: Any) -> None:
        if file not in begun:
            right(file, table)
        begun.add(file)

    return write


def _checkpoint_too_far(right: Right) -> Right:
    async def advance(run: FlushRun, message: Any, published: Any) -> None:
        await right(
            run,
            msgspec.structs.replace(message, last_confirmed_position=message.position),
            published,
        )

    return advance


def _manifest_first(right: Right) -> Right:
    def publish_cut(directory: Any, manifest: Any) -> Any:
        files = file_paths(manifest)
        with patch.object(flusher.cuts, "file_paths", lambda _manifest: []):
            published = right(directory, manifest)
        for path in files:
            directory.rename(path + TEMPORARY_SUFFIX, path)
        directory.sync_parents(files)
        return published

    return publish_cut


def _border_read_twice(right: Right) -> Right:
    async def read_tail(channel: Any, info: Any, checkpoint: Any, *, until: int) -> Any:
        return await right(
            channel, info, msgspec.structs.replace(checkpoint, tick=0, position=0), until=until
        )

    return read_tail


def _delete_takes_its_own(right: Right) -> Right:
    return _with_deletes_later(right, 1)


def _delete_takes_later_rows(right: Right) -> Right:
    return _with_deletes_later(right, 1 << 40)


def _with_deletes_later(right: Right, offsets: int) -> Right:
    def apply_deletes(rows: pa.Table, deletes: Sequence[pa.Table], *, key: str) -> pa.Table:
        left: pa.Table = right(rows, [_moved(table, offsets) for table in deletes], key=key)
        return left

    return apply_deletes


def _moved(table: pa.Table, offsets: int) -> pa.Table:
    index = table.schema.get_field_index(OFFSET)
    moved = pc.add(table.column(index), offsets).cast(pa.int64())
    higher: pa.Table = table.set_column(index, table.schema.field(index), moved)
    return higher


def _later_than_asked(_right: Right) -> Right:
    return lambda table, _tick: table


def _partitions_live_for_ever(right: Right) -> Right:
    return lambda source, manifests: ({}, right(source, manifests)[1])


def _drops_not_saved(right: Right) -> Right:
    def snapshot(state: ShardState) -> bytes:
        live = state.catalog
        catalog = state.catalog
        undropped = [
            msgspec.structs.replace(each, dropped_tick=0)
            for each in catalog.collections(dropped=True)
        ]
        state.catalog = type(catalog)(undropped)
        try:
            saved: bytes = right(state)
            return saved
        finally:
            state.catalog = live

    return snapshot


def _earlier_cuts_orphaned(right: Right) -> Right:
    def is_of_cut(path: str, number: int, segment_ids: range) -> bool:
        found: bool = right(path, number, range(1, segment_ids.stop))
        return found

    return is_of_cut


def _truncation_forgets_readers(right: Right) -> Right:
    async def enforce(retention: Retention, *arguments: Any, **options: Any) -> Any:
        context = retention._context
        retention._context = replace(context, reader_floor=lambda: None)
        try:
            return await right(retention, *arguments, **options)
        finally:
            retention._context = context

    return enforce


def _furthest_reader(_right: Right) -> Right:
    def lease(readers: NamedReaders, _pchannel: str, **_live: Any) -> int | None:
        return max((each.position for each in readers._positions.values()), default=None)

    return lease


COMMIT_WITHOUT_BODY = SeededBug("commit without body", FlushRun, "_take_in", _body_lost)
CUT_DROPS_A_ROW = SeededBug("cut drops a row", OpenCut, "insert", _row_dropped)
CHECKPOINT_TOO_FAR = SeededBug(
    "checkpoint ahead of open transactions", FlushRun, "_advance", _checkpoint_too_far
)
OTHERS = (
    SeededBug("delete lost in a cut", OpenCut, "delete", _delete_dropped),
    SeededBug("rows twice in a cut", OpenCut, "insert", _rows_twice),
    SeededBug("a row group lost", ParquetFile, "write", _row_group_lost),
    SeededBug("manifest before its files", flusher.run, "publish_cut", _manifest_first),
    SeededBug(
        "rows at the border of a cut twice",
        streamingnode.snapshot,
        "_read_tail",
        _border_read_twice,
    ),
    SeededBug(
        "an upsert deletes its own row", flusher.snapshot, "apply_deletes", _delete_takes_its_own
    ),
    SeededBug(
        "a delete takes later rows", flusher.snapshot, "apply_deletes", _delete_takes_later_rows
    ),
    SeededBug("a state later than asked for", flusher.snapshot, "_up_to", _later_than_asked),
    SeededBug(
        "a dropped partition keeps its rows",
        flusher.snapshot,
        "_partitions",
        _partitions_live_for_ever,
    ),
    SeededBug("a dropped collection comes back", ShardState, "snapshot", _drops_not_saved),
    SeededBug(
        "files of earlier cuts collected", flusher.cuts, "_is_of_cut", _earlier_cuts_orphaned
    ),
    SeededBug("truncation forgets readers", Retention, "enforce", _truncation_forgets_readers),
    SeededBug("truncation follows the furthest reader", NamedReaders, "lease", _furthest_reader),
)
