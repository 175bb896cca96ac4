"""Reads a collection's rows at one tick: from its table, then from the node's cuts after that, then
from the log.

The table is found through its lease; that is the only path outside the node's directory that is
followed. A table counts only if its commit names this node, this collection and this node's own
cut. Without a usable table, the node's files alone are read, if they still go back to the
beginning.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from flusher.cuts import Lease
from flusher.directory import cut_numbers
from flusher.flusher import Flusher
from flusher.manifest import Checkpoint, arrow_schema
from flusher.selection import Selection
from flusher.snapshot import SnapshotBase, SnapshotSource, read_snapshot
from interceptors.errors import SchemaMismatch
from interceptors.shard.catalog import CollectionInfo
from scanner.deliver_policy import StartingPoint
from spark_sink.errors import TableAhead
from spark_sink.leased import check_own, leases_of, open_leased, put_back
from streamingnode.channel import Channel
from streamingnode.rows import key_hashes
from wal.entry import Visible, up_to
from wal.errors import Corrupt, InvalidArgument, StreamingNodeError, Truncated, shown
from wal.files import disk_errors_typed
from wal.runtime import in_thread
from wal.shard_hash import shards_of
from wal.timetick import tick_shown

if TYPE_CHECKING:
    from spark_sink.table import OpenTable, TableVersion


def select(info: CollectionInfo, columns: tuple[str, ...] | None, keys: bytes | None) -> Selection:
    """Return the selection of `Node.snapshot`; `keys` are encoded as in a delete. Raises
    `SchemaMismatch` for an unknown column.
    """
    schema = arrow_schema(info)
    chosen = schema.names if columns is None else columns
    wrong = next(
        (name for name in chosen if name not in schema.names or chosen.count(name) > 1), None
    )
    if wrong is not None or not chosen:
        reason = (
            "no column is chosen"
            if wrong is None
            else f"{shown(wrong)} is no column, or is chosen twice"
        )
        raise SchemaMismatch(
            f"{reason} — choose of {', '.join(schema.names[:20])}, each once", column=wrong
        )
    if keys is None:
        return Selection(info, columns=columns)
    of = pa.schema([schema.field(info.primary_key)])
    values = pa.ipc.read_record_batch(pa.py_buffer(keys), of).column(0)
    shards = shards_of(key_hashes(values), len(info.vchannels))
    vchannels = frozenset(info.vchannels[shard] for shard in set(shards.tolist()))
    return Selection(info, columns=columns, keys=values, vchannels=vchannels)


async def take_snapshot(
    channel: Channel,
    flusher: Flusher,
    info: CollectionInfo,
    as_of: int | None,
    selection: Selection | None = None,
) -> pa.Table:
    """Return a collection's rows as of a tick; None means now. Raises as `Node.snapshot` does."""
    if as_of is not None:
        info.check_created(as_of)
    with disk_errors_typed(flusher.cuts.directory.root):
        while True:
            # as of the checkpoint; partitions made after it are in the tail
            info = channel.check_live(info)
            checkpoint = flusher.checkpoint
            cuts = flusher.cuts
            # `now` is above the checkpoint, so everything in the checkpoint's cuts is below it
            now = await channel.consistent_tick()
            tick = now if as_of is None else as_of
            if tick > now:
                step = "leave it out for the state as of now"
                happened = f"as_of={tick_shown(tick)} is yet to come, it is {tick_shown(now)} now"
                raise InvalidArgument(f"{happened} — {step}")
            last_cut = checkpoint.cut_number
            try:
                tail = await _read_tail(channel, info, checkpoint, until=tick)
                source = SnapshotSource(
                    cuts=cuts,
                    collection=info,
                    last_cut=last_cut,
                    tail=tail,
                    as_of=tick,
                    selection=selection,
                )
                rows = await in_thread(read_rows, source)
            except StreamingNodeError as error:
                channel.check_live(info)  # its files may have been deleted meanwhile
                is_behind = isinstance(error, (Truncated, TableAhead))
                if is_behind and flusher.checkpoint is not checkpoint:
                    # A new cut came meanwhile, and log or files before it were deleted: read again.
                    continue
                if is_behind:
                    await flusher.check_cuts()
                raise
            channel.check_live(info)
            return rows


async def _read_tail(
    channel: Channel, info: CollectionInfo, checkpoint: Checkpoint, *, until: int
) -> list[Visible]:
    """Return the collection's messages above a checkpoint and up to a tick."""
    tail: list[Visible] = []
    # Use the position also before the first cut, not the earliest kept entry: by now there may be a
    # cut, and the log may be truncated behind it.
    start = StartingPoint(checkpoint.start_position, checkpoint.tick)
    confirmed_tick = checkpoint.tick
    async with channel.read(start, vchannels=frozenset(info.vchannels)) as scanner:
        while confirmed_tick < until:
            batch = await scanner.next_batch()
            tail += (kept for each in batch.visible if (kept := up_to(each, until)) is not None)
            confirmed_tick = batch.confirmed_tick
    return tail


def read_rows(source: SnapshotSource) -> pa.Table:
    """Return a collection's rows; the caller anchors its cuts. Blocks. Raises as `Node.snapshot`
    does.
    """
    # listing thousands of cuts takes longer than reading a table that has taken them
    earliest: int | None = None
    while True:
        try:
            return _read_once(source)
        except (Corrupt, Truncated):
            before = earliest
            earliest = min(cut_numbers(source.cuts.directory), default=0)
            if before == earliest:
                raise  # otherwise a table took cuts, and retention deleted them, during the read


def _read_once(source: SnapshotSource) -> pa.Table:
    """Return the rows from the first usable table and the node's files, or from the files alone."""
    problem: StreamingNodeError | None = None
    for lease in leases_of(source.cuts, source.collection.id):
        try:
            return _read_with_table(source, lease)
        except StreamingNodeError as error:
            problem = problem or error
    try:
        return read_snapshot(source)
    except Truncated as error:
        raise problem or error from error


def _read_with_table(source: SnapshotSource, lease: Lease) -> pa.Table:
    """Return the rows: the table's state at the tick if it has it, otherwise its newest earlier
    state with all later changes.

    Raises `Truncated` with the nearest ticks when neither the table nor the node's files have the
    state.
    """
    table = open_leased(lease)
    from spark_sink.table import nearest_states, state_at

    history: list[TableVersion] = []
    for found in table.history():
        # it may have taken a cut whose checkpoint is not written yet
        if found.note.cut <= source.last_cut:
            history.append(found)
            if found.note.last_tick <= source.as_of:
                break
    if not history:
        raise TableAhead(
            f"table {table.path} is ahead of this node, or has no history — {put_back(lease)}"
        )
    if source.as_of < history[0].note.tick and (state := state_at(history, source.as_of)):
        return source.selected.rows(_base(source, table, lease, state).rows).select(
            source.selected.columns
        )
    try:
        if history[-1].note.tick > source.as_of:
            raise Truncated(f"the state at {source.as_of}", history[-1].note.last_tick)
        return read_snapshot(replace(source, base=_base(source, table, lease, history[-1])))
    except Truncated as error:
        nearest = [
            str(tick) for tick in nearest_states([history], source.as_of) if tick is not None
        ]
        step = (
            f"ask for {' or '.join(nearest)}, the nearest that table {table.path} has"
            if nearest
            else put_back(lease)
        )
        raise Truncated(
            f"the state of {source.collection.name!r} at {source.as_of}", error.earliest, step
        ) from error


def _base(
    source: SnapshotSource, table: "OpenTable", lease: Lease, state: "TableVersion"
) -> SnapshotBase:
    """Return a version's rows. Raises `Corrupt` unless it is the state of this collection at this
    node's own cut.
    """
    note = state.note
    check_own(source.cuts, lease, note)
    rows = table.at_version(state.version).rows(source.selected.schema, source.selected)
    return SnapshotBase(cut=note.cut, tick=note.tick, rows=rows)
