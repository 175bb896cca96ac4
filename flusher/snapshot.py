"""The current state of one collection as an Arrow table, without Spark. Blocks, so it runs in a
worker thread.

The rows come from the collection's table (the base), the cuts after it, and the messages after
those (the tail); rows whose key was deleted later are left out. Every file is checked against its
manifest before its rows are used.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flusher.data_file import Rows, decode_rows
from flusher.directory import Cut, CutLog, check_file, cut_numbers, manifest_path
from flusher.manifest import (
    TICK,
    CutManifest,
    DataFile,
    DeleteFile,
    SegmentFile,
    arrow_schema,
    stored_schema,
)
from flusher.selection import Selection, apply_deletes
from interceptors.shard.catalog import CollectionInfo
from wal.codec import crc32c
from wal.entry import Visible, row_batches
from wal.errors import Corrupt, StreamingNodeError, Truncated
from wal.headers import CreatePartitionHeader, DropPartitionHeader, MessageType
from wal.message import Message
from wal.timetick import TICK_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBase:
    """The state of the collection's table at cut `cut`: `rows` have the columns of a file, then the
    partition's name.
    """

    cut: int
    tick: int
    rows: pa.Table


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSource:
    """The input of a snapshot: one collection, the cuts after `base` up to `last_cut`, and every
    message above the last cut's tick.

    Without a base, the cuts begin with the first one. `tail` may hold messages of other
    collections; it ends at or above `as_of`. `selection` limits the rows and columns, None selects
    all. An unreadable file raises, or with `on_loss` it is skipped and reported there: the file,
    its number of rows if known, the error.
    """

    cuts: CutLog
    collection: CollectionInfo
    last_cut: int
    tail: Sequence[Visible]
    as_of: int = TICK_MAX
    base: SnapshotBase | None = None
    selection: Selection | None = None
    on_loss: Callable[[str, int | None, Exception], None] | None = None

    @property
    def selected(self) -> Selection:
        """The selection, by default of everything."""
        return self.selection or Selection(self.collection)


def read_snapshot(source: SnapshotSource) -> pa.Table:
    """Return the selected rows that exist at tick `as_of`: the base's first, then in cut order.

    Raises `Truncated` when rows of the collection are in cuts that retention removed (every table
    has taken them), and when a partition was dropped after `as_of`: its rows are gone. Raises
    `Corrupt` when a file does not match its manifest.
    """
    info = source.collection
    manifests = _manifests(source)
    drops, names = _partitions(source, manifests)
    made = {each.id for each in info.partitions} | _made_in_tail(source).keys()
    # partitions may have been dropped after `collection` was looked up
    live = frozenset(made - drops.keys())
    selected = source.selected
    schema = stored_schema(selected.schema)
    rows, deletes = _tail(source, selected, live)
    own = [
        file for manifest in manifests for file in manifest.files if file.collection_id == info.id
    ]
    files = [
        file
        for file in own
        if file.tick_min <= source.as_of
        and selected.may_have((file.key_min, file.key_max), (file.vchannel,) * 2)
    ]
    segments = [
        file for file in files if isinstance(file, SegmentFile) and file.partition_id in live
    ]
    delete_files = [file for file in files if isinstance(file, DeleteFile)]
    keys = stored_schema(pa.schema([schema.field(selected.key)]))
    base = (
        _base_rows(source.base, drops, names).select(schema.names)
        if source.base
        else schema.empty_table()
    )
    table = _up_to(
        pa.concat_tables([base, *_read(source, selected, segments, schema), *rows]), source.as_of
    )
    deletes = [
        _up_to(each, source.as_of)
        for each in (*_read(source, selected, delete_files, keys), *deletes)
    ]
    return apply_deletes(selected.rows(table), deletes, key=selected.key).select(selected.columns)


def _manifests(source: SnapshotSource) -> list[CutManifest]:
    """Return the cuts that may have files of the collection, oldest first. Raises `Truncated` when
    some are gone.
    """
    earliest = 0 if source.base else min(cut_numbers(source.cuts.directory), default=0)
    first = 1 if source.base is None else source.base.cut + 1
    manifests: list[CutManifest] = []
    after: Cut | None = None
    number = source.last_cut
    created = source.collection.created_tick
    while number >= first and (
        source.base or not manifests or manifests[-1].previous_tick >= created
    ):
        if manifests and number < earliest and source.base is None:
            _check_begins(source, manifests[-1])
            break
        after = _cut(source, number, after)
        manifests += [] if after is None else [after.manifest]
        number -= 1
    return manifests[::-1]


def _cut(source: SnapshotSource, number: int, after: Cut | None) -> Cut | None:
    """Return a cut, None when it is lost; `after` is the next cut, None when that is lost."""
    try:
        return source.cuts.read(number)
    except (OSError, StreamingNodeError) as error:
        if source.on_loss is None:
            raise
        with suppress(OSError, StreamingNodeError):
            # If the next cut is lost, this one can only be checked by its own checksum.
            cut = source.cuts.read_alone(number) if number < source.last_cut else None
            if cut and (after is None or after.previous == cut.mark):
                return cut
        source.on_loss(manifest_path(number), None, error)
        return None


def _check_begins(source: SnapshotSource, earliest: CutManifest) -> None:
    """Check that the collection's first rows are in the earliest kept cut or later. Raises
    `Truncated`.
    """
    info = source.collection
    # Row offsets count from 0 on each vchannel, so the first file's offset is the number of rows
    # before it.
    begins = {
        each.name: each.next_offset for each in earliest.vchannels if each.name in info.vchannels
    }
    for file in earliest.segments:
        if file.vchannel in begins:
            begins[file.vchannel] = min(begins[file.vchannel], file.offset_min)
    if any(begins.values()):
        gone = Truncated(
            f"a part of collection {info.name!r}, in cuts before {earliest.number},",
            f"cut {earliest.number}",
            "every table has taken it: read the collection's table",
        )
        if source.on_loss is None:
            raise gone
        source.on_loss(f"cuts before {earliest.number}", sum(begins.values()), gone)
    # partitions may have been dropped since, in cuts that are gone
    if source.as_of < earliest.previous_tick:
        raise Truncated(
            f"the state at {source.as_of}",
            earliest.previous_tick,
            f"ask for {earliest.previous_tick} or later",
        )


def _partitions(
    source: SnapshotSource, manifests: Sequence[CutManifest]
) -> tuple[dict[int, int], dict[int, str]]:
    """Return the ticks at which partitions were dropped, and the names of all partitions. Raises
    `Truncated` for a drop after `as_of`.
    """
    info = source.collection
    names = {each.id: each.name for each in info.partitions} | _made_in_tail(source)
    drops = {each.id: each.dropped_tick for each in info.partitions if each.dropped_tick}
    # has the names of partitions that the tail may drop
    newest = [source.cuts.read(source.last_cut).manifest] if source.base else []
    for manifest in (*newest, *manifests):
        entries = (entry for entry in manifest.collections if entry.collection_id == info.id)
        for each in (partition for entry in entries for partition in entry.partitions):
            names[each.partition_id] = each.name
            drops |= {each.partition_id: each.dropped_tick} if each.dropped_tick else {}
    for message in source.tail:
        if isinstance(message, Message) and isinstance(message.header, DropPartitionHeader):
            drops[message.header.partition_id] = message.time_tick
    later = [tick for tick in drops.values() if tick > source.as_of]
    if later:
        raise Truncated(
            f"the state at {source.as_of}, before a partition was dropped,",
            max(later),
            f"ask for {max(later)} or later, or read the collection's table at that tick",
        )
    return drops, names


def _made_in_tail(source: SnapshotSource) -> dict[int, str]:
    """Return the names by id of partitions that the tail creates, as `collection` may be older than
    these.
    """
    headers = (message.header for message in source.tail if isinstance(message, Message))
    made = (header for header in headers if isinstance(header, CreatePartitionHeader))
    return {
        each.partition_id: each.name for each in made if each.collection_id == source.collection.id
    }


def _base_rows(base: SnapshotBase, drops: dict[int, int], names: dict[int, str]) -> pa.Table:
    """Return the base's rows of existing partitions.

    A name that was dropped since is filtered out even if a new partition has it: the base's rows
    are older than the drop.
    """
    gone = sorted(
        {names[number] for number, tick in drops.items() if tick > base.tick and number in names}
    )
    if not gone:
        return base.rows
    return base.rows.filter(
        pc.invert(pc.is_in(base.rows.column(-1), value_set=pa.array(gone, pa.string())))
    )


def _read(
    source: SnapshotSource, selected: Selection, files: Sequence[DataFile], schema: pa.Schema
) -> Iterator[pa.Table]:
    for file in files:
        try:
            try:
                content = source.cuts.directory.read(file.path, bytes_max=file.bytes)
            except FileNotFoundError as error:
                raise Corrupt(f"{file.path} is missing — restore it from a backup") from error
            check_file(file.path, file, len(content), crc32c(content))
        except (OSError, Corrupt) as error:
            if source.on_loss is None:
                raise
            source.on_loss(file.path, file.rows, error)
        else:
            buffer = pa.BufferReader(content)
            with pq.ParquetFile(buffer, page_checksum_verification=True) as opened:
                yield selected.read(opened, schema).select(schema.names)


def _up_to(table: pa.Table, tick: int) -> pa.Table:
    return (
        table
        if tick >= TICK_MAX
        else table.filter(pc.less_equal(table.column(TICK), pa.scalar(tick, pa.int64())))
    )


def _tail(
    source: SnapshotSource, selected: Selection, live: frozenset[int]
) -> tuple[list[pa.Table], list[pa.Table]]:
    """Return the rows and the deletes that are only in the log, one table for each vchannel."""
    info = source.collection
    rows: defaultdict[str, list[Rows]] = defaultdict(list)
    deletes: defaultdict[str, list[Rows]] = defaultdict(list)
    for batch, ticks in (each for visible in source.tail for each in row_batches(visible)):
        if batch.collection_id != info.id or not selected.may_have(
            None, (batch.vchannel, batch.vchannel)
        ):
            continue
        if batch.type is MessageType.DELETE:
            deletes[batch.vchannel].append(Rows(batch, ticks))
        elif batch.partition_id in live:
            rows[batch.vchannel].append(Rows(batch, ticks))
    schema = arrow_schema(info)
    wanted = stored_schema(selected.schema)
    keys = pa.schema([schema.field(info.primary_key)])
    inserted = (
        decode_rows(rows[name], schema, vchannel=name, kind=SegmentFile) for name in sorted(rows)
    )
    deleted = (
        decode_rows(deletes[name], keys, vchannel=name, kind=DeleteFile) for name in sorted(deletes)
    )
    return [table.select(wanted.names).cast(wanted) for table in inserted], list(deleted)
