"""Export of the readable rows of a node: one Parquet file for each collection, without opening the
node. Blocks.

In: a directory that no process has open, sound or damaged; it is not changed. Out: the rows of each
live collection at the newest tick: the files of the cuts and the log after the newest cut, with
deletes applied. Unreadable data is an error; with `salvage` it is listed and left out. A left-out
delete makes deleted rows reappear, so such an export may be a state that the node never had.
`export_node` exports an open node.

The log after the newest cut is read once for damage and schema changes, and once for each
collection. So memory holds one collection at a time: the rows of its files and of the log, and its
deletes.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from flusher.directory import CUTS, CutLog, NodeDirectory, cut_numbers, manifest_path, refuse_mixed
from flusher.manifest import NO_CHECKPOINT, Checkpoint, arrow_schema, collection_info
from flusher.snapshot import SnapshotSource
from interceptors.errors import CollectionNotFound
from interceptors.shard.catalog import Catalog, CollectionInfo
from interceptors.shard.state import ShardState
from scanner.reorder import ScanFilter
from streamingnode.care.backup import new_directory
from streamingnode.care.findings import RESTORE, Report
from streamingnode.care.inspect import check_node, kept_closed
from streamingnode.care.records import PCHANNEL
from streamingnode.care.salvage import (
    ClosedLog,
    good_entries,
    opened_past_damage,
    stored_entries,
)
from streamingnode.collections import check_name
from streamingnode.snapshot import read_rows
from wal.entry import TransactionBuffer, Visible, row_batches
from wal.errors import Corrupt, StorageFailed, StreamingNodeError
from wal.files import create_file, disk_errors_typed
from wal.headers import MessageType
from wal.message import Message
from wal.rocks.layout import DATABASE_NAME
from wal.runtime import in_thread

if TYPE_CHECKING:
    import streamingnode as sn

T = TypeVar("T")

_CHECKPOINT = f"{DATABASE_NAME}, checkpoint"


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Something unreadable: a file or a part of the log. `collection` is empty when it may concern
    any collection; `rows` is None when unknown.
    """

    place: str
    collection: str
    rows: int | None
    reason: str


class ExportedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One exported collection."""

    collection: str
    path: str
    rows: int


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """The files written, as of `tick`, and what is missing; `missing` is empty for a sound node."""

    path: str
    node_id: str
    tick: int
    files: tuple[ExportedFile, ...]
    missing: tuple[Missing, ...]


def export_directory(
    directory: Path,
    out: Path,
    *,
    salvage: bool = False,
    on_collection: Callable[[str], None] = lambda _name: None,
) -> ExportResult:
    """Write `<collection>.parquet` for each live collection of a node into the new directory `out`.

    `on_collection` is called with each name before the collection is read. Raises `InvalidArgument`
    when `directory` is not a node or contains `out`, `AlreadyOwned` while a process has it open,
    `AlreadyExists` for an `out` that is not empty, `StorageFailed`, and without `salvage`
    `Corrupt`, `Truncated`, `PackageMissing` or `TableAhead` for the first unreadable data. After an
    error nothing is at `out`.
    """
    with (
        disk_errors_typed(directory),
        kept_closed(check_node(directory)),
        new_directory(out, directory) as building,
    ):
        return _Export(directory, building, out.absolute(), on_collection, salvage=salvage).write()


async def export_node(
    node: "sn.Node",
    out: Path,
    building: Path,
    *,
    on_collection: Callable[[str], None] = lambda _name: None,
) -> ExportResult:
    """Export an open node into `building`, which later becomes `out`. Raises as `Node.snapshot`
    does.
    """
    tick = await node.consistent_tick()
    names = sorted(each.name for each in node.collections())
    files = []
    for name in names:
        on_collection(name)
        with suppress(CollectionNotFound):  # dropped meanwhile
            if node.collection(name).created_tick > tick:
                continue  # created meanwhile, perhaps replacing a dropped one
            rows = await node.snapshot(name, as_of=tick)
            files.append(await in_thread(_write_file, building, out, name, rows))
    return ExportResult(
        path=str(out), node_id=node.node_id, tick=tick, files=tuple(files), missing=()
    )


def _write_file(building: Path, out: Path, name: str, rows: pa.Table) -> ExportedFile:
    path = f"{check_name('collection', name)}.parquet"  # the name becomes a file name
    with create_file(building / path, exclusive=True) as file:
        pq.write_table(rows, file, compression="zstd", write_page_checksum=True)
        file.flush()
        os.fsync(file.fileno())
    return ExportedFile(collection=name, path=str(out / path), rows=rows.num_rows)


class _Export:
    """One export, and the list of missing data without repeats; without `salvage` the first missing
    data is an error.
    """

    def __init__(
        self,
        directory: Path,
        building: Path,
        out: Path,
        on_collection: Callable[[str], None],
        *,
        salvage: bool,
    ) -> None:
        self._directory = directory
        self._building = building
        self._out = out
        self._on_collection = on_collection
        self._salvage = salvage
        self._missing: dict[tuple[str, str], Missing] = {}
        self._log: ClosedLog | None = None
        self._tick = 0

    def write(self) -> ExportResult:
        report = Report()
        with opened_past_damage(self._directory, report) as (node_id, database):
            self._take(report)
            checkpoint = log = None
            if database is not None:
                checkpoint = self._tried(_CHECKPOINT, database.checkpoint)
                log = database.log(Report())
            if log is not None:  # after a kill a node may have no log
                start = log.first or 1 if checkpoint is None else checkpoint.start_position
                self._log = replace(log, first=start)
            cuts = CutLog(NodeDirectory(self._directory), node_id=node_id)
            base, state = self._base(cuts, checkpoint)
            self._catch_up(base, state)
            if log is not None and checkpoint is not None:
                last_tick = max(self._tick, checkpoint.tick)
                self._tried(
                    CUTS, partial(refuse_mixed, self._directory, checkpoint, node_id, last_tick)
                )
            # If two have the same name, the older one was dropped in a missing part of the log.
            live = {info.name: info for info in state.catalog.collections()}
            files = [self._write_one(live[name], cuts, base) for name in sorted(live)]
        return ExportResult(
            path=str(self._out),
            node_id=cuts.node_id,
            tick=max(base.tick, self._tick),
            files=tuple(file for file in files if file is not None),
            missing=tuple(self._missing.values()),
        )

    def _lose(
        self, collection: str, place: str, rows: int | None, reason: object, step: str = RESTORE
    ) -> None:
        if not self._salvage:
            raise (
                reason
                if isinstance(reason, StreamingNodeError)
                else Corrupt(f"{place}: {reason} — {step}")
            )
        missing = Missing(place=place, collection=collection, rows=rows, reason=str(reason))
        self._missing.setdefault((collection, place), missing)

    def _take(self, report: Report) -> None:
        for damage in report.damages:
            self._lose("", damage.place, None, damage.detail, damage.next_step)

    def _tried(self, place: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except (Corrupt, StorageFailed) as error:
            self._lose("", place, None, error)
            return None

    def _base(self, cuts: CutLog, checkpoint: Checkpoint | None) -> tuple[Checkpoint, ShardState]:
        """Return the checkpoint and catalog of the newest readable cut: the checkpoint's, or a
        newer one.
        """
        state = None if checkpoint is None else self._tried(_CHECKPOINT, checkpoint.state)
        known = NO_CHECKPOINT if checkpoint is None or state is None else checkpoint
        for number in reversed(cut_numbers(self._directory)):
            if number <= known.cut_number:
                break
            try:
                cut = cuts.read_alone(number)
            except (OSError, StreamingNodeError) as error:
                self._lose("", manifest_path(number), None, error)
                continue
            state = ShardState()
            state.catalog = Catalog(map(collection_info, cut.manifest.collections))
            return Checkpoint(cut_number=number, tick=cut.tick, manifest_crc32c=cut.crc32c), state
        return known, state or ShardState()

    def _messages(
        self, after_tick: int, info: CollectionInfo | None, report: Report
    ) -> Iterator[Visible]:
        """Yield the visible messages of a collection (None: of all) above a tick, continuing after
        damage, which goes into `report`.
        """
        if self._log is None:
            return
        wanted = ScanFilter(
            vchannels=None if info is None else frozenset(info.vchannels), after_tick=after_tick
        )

        def begin_missing(commit: Message) -> None:
            if info is not None and wanted.wants_commit(commit):
                place = f"log {PCHANNEL!r}, transaction {commit.txn_id}"
                self._lose(
                    info.name,
                    place,
                    None,
                    "its beginning is missing, so all of it is left out",
                )

        transactions = TransactionBuffer(begin_missing=begin_missing)
        expected = self._log.first
        for entry in good_entries(self._log, stored_entries(self._log), report):
            if entry.first_position > expected:
                # A transaction open at this gap may lack a part, and no later entry shows it.
                transactions = TransactionBuffer(begin_missing=begin_missing)
            expected = entry.last_position + 1
            self._tick = max(self._tick, entry.time_tick)
            try:
                visible = transactions.observe(entry)
            except Corrupt as error:
                self._lose("", f"log {PCHANNEL!r}, position {entry.last_position}", None, error)
                continue
            yield from wanted.select(visible, entry.time_tick)

    def _catch_up(self, base: Checkpoint, state: ShardState) -> None:
        """Apply the log to the catalog, and list the log's damage and the rows of unknown
        collections and partitions.
        """
        unknown = dict[str, int]()
        report = Report()
        for visible in self._messages(base.tick, None, report):
            state.observe(visible)
            for batch, _ in row_batches(visible):
                is_insert = batch.type is MessageType.INSERT
                if is_insert and not state.catalog.is_writable(batch.vchannel, batch.partition_id):
                    place = (
                        f"partition number {batch.partition_id} of collection number "
                        f"{batch.collection_id}"
                    )
                    unknown[place] = unknown.get(place, 0) + batch.rows
        self._take(report)
        for place, rows in unknown.items():
            self._lose("", place, rows, "the message that created it is missing")

    def _write_one(
        self, info: CollectionInfo, cuts: CutLog, base: Checkpoint
    ) -> ExportedFile | None:
        self._on_collection(info.name)
        try:
            source = SnapshotSource(
                cuts=cuts,
                collection=info,
                last_cut=base.cut_number,
                tail=list(self._messages(base.tick, info, Report())),
                on_loss=partial(self._lose, info.name) if self._salvage else None,
            )
            cuts.anchor(base.cut_number, crc32c=base.manifest_crc32c, tick=base.tick)
            rows = read_rows(source).cast(arrow_schema(info))
            return _write_file(self._building, self._out, info.name, rows)
        except StreamingNodeError as error:
            self._lose(info.name, "collection", None, error)
            return None
