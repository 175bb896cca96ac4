"""Taking out of a node what can be read of it: one Parquet file for each collection, without opening the node. Blocks.

In: a directory that nobody has open, sound or damaged. Out: a new directory with the rows of each live collection at the
newest tick there is: the files of the cuts, then the log behind the newest cut, deletes applied. The node's directory stays
as it is to the byte. What cannot be read is an error, or with `salvage` named and left out; a delete that is left out brings
the rows it removed back, so what comes out of a damaged node is not a state that the node ever had.

The log behind the newest cut is read once for its damage, once for its schema changes, and once for each collection, so that
memory holds one collection at a time: the rows of its files and of the log, and its deletes.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from rocksdict import Rdict

from flusher.checkpoint import Checkpoint, checkpoint_key, decode_checkpoint
from flusher.cut_log import Cut, CutLog, cut_numbers, manifest_path
from flusher.directory import NodeDirectory
from flusher.manifest import arrow_schema, collection_info
from flusher.snapshot import SnapshotSource
from interceptors.shard.catalog import Catalog, CollectionInfo, check_name
from interceptors.shard.state import ShardState
from scanner.reorder import ScanFilter
from streamingnode.backup.target import Target
from streamingnode.inspection.node_files import check_node, kept_closed
from streamingnode.inspection.read_only import open_past_damage, open_read_only
from streamingnode.snapshot import read_rows
from streamingnode.verification.creation_check import is_unfinished_creation
from streamingnode.verification.database_walk import (
    compare_with_floor,
    end_kept,
    first_position,
    floor_reaches,
    readable_survey,
)
from streamingnode.verification.entry_scan import Unreadable, scan_entries
from streamingnode.verification.finding import RESTORE, Report, Severity
from streamingnode.verification.log_check import LogCheck, LogExpectation
from streamingnode.verification.opening_check import refuse_mixed
from streamingnode.verification.walk import PCHANNEL
from wal.errors import Corrupt, InvalidArgument, StreamingNodeError
from wal.files import create_file, disk_errors_typed
from wal.headers import InsertHeader
from wal.message import AnyMessage, Message, TransactionBuffer, TransactionMessage
from wal.rocks.floor import FLOOR_NAME, Floor, read_floor
from wal.rocks.layout import DATABASE_NAME, ENTRY_FAMILY, meta_key
from wal.rocks.recovery import has_torn_end


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """What could not be read: a file, or a part of the log; `collection` is empty for any, `rows` None when unknown."""

    place: str
    collection: str
    rows: int | None
    reason: str


class ExportedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One collection that was written."""

    collection: str
    path: str
    rows: int


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was written, as of `tick`, and what was not; `missing` is empty for a sound node."""

    path: str
    node_id: str
    tick: int
    files: tuple[ExportedFile, ...]
    missing: tuple[Missing, ...]


OnCollection = Callable[[str], None]
"""Told the name of each collection before it is read."""


def _told_nobody(_name: str) -> None:
    """Take no note of a collection."""


def export_directory(
    directory: Path, out: Path, *, salvage: bool = False, on_collection: OnCollection = _told_nobody
) -> ExportResult:
    """Write `<collection>.parquet` for each live collection of a node into the new directory `out`.

    Raises `InvalidArgument` when it is no node or `out` lies in it, `AlreadyOwned` while a process has it open,
    `AlreadyExists` for an `out` that is not empty, `StorageFailed`, and without `salvage` `Corrupt`, `Truncated`,
    `PackageMissing` or `TableAhead` for the first thing that cannot be read. Nothing is at `out` then.
    """
    with disk_errors_typed(directory), kept_closed(check_node(directory)):
        if is_unfinished_creation(directory):
            raise InvalidArgument(
                f"the node at {directory} was never made to its end and holds nothing — open it first"
            )
        target = Target(out, directory)
        try:
            result = _Export(directory, _Losses(salvage=salvage), on_collection).write(target)
            target.publish()
            return result
        finally:
            target.discard()


class _Losses:
    """What could not be read, each thing once. Without `salvage` the first is an error."""

    def __init__(self, *, salvage: bool) -> None:
        self.salvage = salvage
        self._found: dict[tuple[str, str], Missing] = {}

    @property
    def found(self) -> tuple[Missing, ...]:
        return tuple(self._found.values())

    def add(self, collection: str, place: str, rows: int | None, reason: object) -> None:
        if not self.salvage:
            raise reason if isinstance(reason, StreamingNodeError) else Corrupt(f"{place}: {reason} — {RESTORE}")
        self._found.setdefault(
            (collection, place), Missing(place=place, collection=collection, rows=rows, reason=str(reason))
        )

    def take(self, report: Report) -> bool:
        """Add the damage among the findings; return whether there was some."""
        damage = [finding for finding in report.findings if finding.severity is Severity.DAMAGE]
        for finding in damage:
            self.add("", finding.place, None, finding.detail)
        return bool(damage)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """The log from `start` on, acknowledged up to `end`; what is behind that in a torn one, an owner would drop."""

    entries: Rdict
    log_id: int
    start: int
    end: int
    is_torn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """What is in files: everything up to `tick`, in the cuts up to `cut`, which has this checksum; and the catalog then."""

    cut: int
    crc32c: int
    tick: int
    state: ShardState


class _Export:
    def __init__(self, directory: Path, losses: _Losses, on_collection: OnCollection) -> None:
        self._directory = directory
        self._losses = losses
        self._on_collection = on_collection
        self._tick = 0

    def write(self, target: Target) -> ExportResult:
        floor = self._floor()
        report = Report()
        database = self._open(floor, report)
        try:
            node_id = "" if floor is None else floor.node_id
            log, checkpoint = None, None
            if database is not None:
                node_id, checkpoint, log = self._read_database(database, floor, report)
            cuts = CutLog(NodeDirectory(self._directory), node_id=node_id)
            for _ in self._messages(log, report=report):
                pass
            if checkpoint is not None and log is not None:
                self._check_together(checkpoint, cuts.node_id)
            base = self._base(cuts, checkpoint, is_damaged=self._losses.take(report) or bool(self._losses.found))
            self._catch_up(base, log)
            files = [self._write_one(info, cuts, base, log, target) for info in self._live(base.state.catalog)]
        finally:
            if database is not None:
                database.close()
        return ExportResult(
            path=str(target.path),
            node_id=cuts.node_id,
            tick=max(base.tick, self._tick),
            files=tuple(file for file in files if file is not None),
            missing=self._losses.found,
        )

    # --- the database -----------------------------------------------------------------------------------------------------

    def _floor(self) -> Floor | None:
        try:
            floor = read_floor(self._directory)
        except Corrupt as error:
            self._losses.add("", FLOOR_NAME, None, error)
            return None
        if floor is None:
            self._losses.add("", FLOOR_NAME, None, "it is not there, so nobody knows how far the log had come")
        return floor

    def _open(self, floor: Floor | None, report: Report) -> Rdict | None:
        """Open what an owner would, and what is behind damage; None when nothing of the log can be read."""
        path = self._directory / DATABASE_NAME
        try:
            compared = compare_with_floor(path, floor, report)
            self._losses.take(report)
            return open_read_only(path, compared.recovery)
        except StreamingNodeError as error:
            torn = Corrupt(f"{path} ends with what a power cut tore — open the node, which drops that, and close it")
            self._losses.add("", DATABASE_NAME, None, torn if has_torn_end(path) else error)
        with suppress(StreamingNodeError):
            return open_past_damage(path)
        return None

    def _read_database(
        self, database: Rdict, floor: Floor | None, report: Report
    ) -> tuple[str, Checkpoint | None, _Log | None]:
        """Return whose it is, its checkpoint, and the log behind that; None for what cannot be read."""
        try:
            found = readable_survey(database)
        except Corrupt as error:
            self._losses.add("", DATABASE_NAME, None, error)
            return "" if floor is None else floor.node_id, None, None
        if floor is not None and floor.node_id != found.node_id:
            floor = None
        checkpoint = self._checkpoint(database)
        log_id = found.log_ids.get(PCHANNEL)
        if log_id is None:  # a kill may leave a node without its log, which the next opening makes
            return found.node_id, checkpoint, None
        last = found.last_positions[log_id]
        kept = last if floor is None else end_kept(database, found, log_id, floor, report)
        start = first_position(database, log_id) or 1 if checkpoint is None else checkpoint.start_position
        return (
            found.node_id,
            checkpoint,
            _Log(
                entries=database.get_column_family(ENTRY_FAMILY),
                log_id=log_id,
                start=start,
                end=max(floor_reaches(floor, log_id), kept),
                is_torn=kept < last,
            ),
        )

    def _checkpoint(self, database: Rdict) -> Checkpoint | None:
        place = f"{DATABASE_NAME}, checkpoint"
        try:
            found = database.get(meta_key(checkpoint_key(PCHANNEL)))
            return decode_checkpoint(found if isinstance(found, bytes) else None)
        except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more exact
            self._losses.add("", place, None, f"it cannot be read: {error}")
            return None

    def _check_together(self, checkpoint: Checkpoint, node_id: str) -> None:
        try:
            refuse_mixed(self._directory, checkpoint, node_id, max(self._tick, checkpoint.tick))
        except Corrupt as error:
            self._losses.add("", "cuts", None, error)

    # --- the log ----------------------------------------------------------------------------------------------------------

    def _messages(
        self,
        log: _Log | None,
        *,
        after_tick: int = 0,
        vchannels: frozenset[str] | None = None,
        collection: str = "",
        report: Report | None = None,
    ) -> Iterator[AnyMessage]:
        """Yield what readers of these vchannels would see above a tick, past damage, which is in `report`."""
        if log is None:
            return
        wanted = ScanFilter(vchannels=vchannels, after_tick=after_tick)

        def begin_missing(commit: Message) -> None:
            if collection and wanted.wants_commit(commit):
                place = f"log {PCHANNEL!r}, transaction {commit.txn_id}"
                self._losses.add(collection, place, None, "what it began with is missing, so all of it is left out")

        expected = LogExpectation(name=PCHANNEL, first_position=log.start, floor_position=log.end)
        check = LogCheck(expected, Report() if report is None else report)
        transactions = TransactionBuffer(begin_missing=begin_missing)
        for found in scan_entries(log.entries, log.log_id, start_position=log.start, end_position=log.end):
            if isinstance(found, Unreadable):
                check.failed(found)
                continue
            position, data = found
            if log.is_torn and position > log.end:
                break
            follows = check.next_position
            entry = check.take(position, data)
            if entry is None or entry.first_position < follows:
                continue
            if entry.first_position > follows:
                # A transaction that was open here may lack a part, and nothing that comes later tells.
                transactions = TransactionBuffer(begin_missing=begin_missing)
            self._tick = max(self._tick, entry.time_tick)
            try:
                visible = transactions.observe(entry)
            except Corrupt as error:
                self._losses.add("", f"log {PCHANNEL!r}, position {position}", None, error)
                continue
            yield from wanted.select(visible, entry.time_tick)
        check.finish()

    def _catch_up(self, base: _Base, log: _Log | None) -> None:
        """Bring the catalog up to the end of the log, and name the rows of what it does not know."""
        unknown: dict[str, int] = {}
        for message in self._messages(log, after_tick=base.tick):
            base.state.observe(message)
            for body in message.bodies if isinstance(message, TransactionMessage) else (message,):
                header = body.header
                if isinstance(header, InsertHeader) and (place := _unknown(base.state.catalog, header)):
                    unknown[place] = unknown.get(place, 0) + header.rows
        for place, rows in unknown.items():
            self._losses.add("", place, rows, "what created it is missing")

    # --- the files --------------------------------------------------------------------------------------------------------

    def _base(self, cuts: CutLog, checkpoint: Checkpoint | None, *, is_damaged: bool) -> _Base:
        """Return what the checkpoint knows to be in files; without one, or on damage, what a newer cut says."""
        base = None if checkpoint is None else self._base_of_checkpoint(checkpoint)
        if base is None or is_damaged:
            for number in reversed(cut_numbers(self._directory)):
                if base is not None and number <= base.cut:
                    break
                try:
                    return _base_of_cut(cuts.read_alone(number))
                except (OSError, StreamingNodeError) as error:
                    self._losses.add("", manifest_path(number), None, error)
        return base or _Base(cut=0, crc32c=0, tick=0, state=ShardState())

    def _base_of_checkpoint(self, checkpoint: Checkpoint) -> _Base | None:
        stored = checkpoint.shard_state
        try:
            state = ShardState() if stored is None else ShardState.restore(stored)
        except Corrupt as error:
            self._losses.add("", f"{DATABASE_NAME}, checkpoint", None, error)
            return None
        return _Base(cut=checkpoint.cut_number, crc32c=checkpoint.manifest_crc32c, tick=checkpoint.tick, state=state)

    def _live(self, catalog: Catalog) -> list[CollectionInfo]:
        """Return the live collections, one of each name: of two the older was dropped where the log is missing."""
        return sorted({info.name: info for info in catalog.collections()}.values(), key=lambda info: info.name)

    def _write_one(
        self, info: CollectionInfo, cuts: CutLog, base: _Base, log: _Log | None, target: Target
    ) -> ExportedFile | None:
        self._on_collection(info.name)
        try:
            check_name(info.name)  # it becomes a file's
            rows = self._rows(info, cuts, base, log)
        except StreamingNodeError as error:
            self._losses.add(info.name, "collection", None, error)
            return None
        name = f"{info.name}.parquet"
        with create_file(target.building / name, exclusive=True) as file:
            pq.write_table(rows, file, compression="zstd", write_page_checksum=True)
            file.flush()
            os.fsync(file.fileno())
        return ExportedFile(collection=info.name, path=str(target.path / name), rows=rows.num_rows)

    def _rows(self, info: CollectionInfo, cuts: CutLog, base: _Base, log: _Log | None) -> pa.Table:
        vchannels = frozenset(info.vchannels)
        source = SnapshotSource(
            cuts=cuts,
            collection=info,
            last_cut=base.cut,
            tail=list(self._messages(log, after_tick=base.tick, vchannels=vchannels, collection=info.name)),
            on_loss=partial(self._losses.add, info.name) if self._losses.salvage else None,
        )
        cuts.anchor(base.cut, crc32c=base.crc32c, tick=base.tick)
        known = Checkpoint(cut_number=base.cut, tick=base.tick, manifest_crc32c=base.crc32c)
        return read_rows(source, known).cast(arrow_schema(info))


def _unknown(catalog: Catalog, header: InsertHeader) -> str:
    """Return which of collection and partition nobody knows, nothing when both are known."""
    if not catalog.knows(header.collection_id):
        return f"collection number {header.collection_id}"
    partitions = catalog.collection(header.collection_id).partitions
    known = any(each.id == header.partition_id for each in partitions)
    return "" if known else f"partition number {header.partition_id} of collection number {header.collection_id}"


def _base_of_cut(cut: Cut) -> _Base:
    state = ShardState()
    state.catalog = Catalog(map(collection_info, cut.manifest.collections))
    return _Base(cut=cut.number, crc32c=cut.crc32c, tick=cut.tick, state=state)
