"""Entries that are in no log, and what two entries are compared by."""

from collections.abc import Sequence

from msgspec.structs import replace

from tests.wal.packed import lay_out
from wal.append import AppendGroup, Pack
from wal.entry import LogEntry, PackedRows, RowBatch
from wal.message import MutableMessage
from wal.position import ProducerStamp


def into_entry(
    messages: Sequence[MutableMessage],
    *,
    wal_name: str = "memory",
    first_position: int,
    crc32c: int = 0,
    size_bytes: int = 0,
    producer: ProducerStamp | None = None,
) -> LogEntry:
    """Return the entry that stamped messages would be at this position."""
    pack = Pack([AppendGroup(list(messages), producer=producer)])
    head = messages[0]
    pack.time_tick = head.time_tick
    pack.last_confirmed = head.last_confirmed
    pack.wal_term = head.wal_term
    return replace(
        entry_of(pack, first_position, wal_name=wal_name), crc32c=crc32c, size_bytes=size_bytes
    )


def entry_of(
    pack: Pack, first_position: int, *, wal_name: str = "memory", previous_crc32c: int = 0
) -> LogEntry:
    """Return the entry that a stamped pack would be at this position."""
    pack.encode(wal_name, first_position=first_position, previous_crc32c=previous_crc32c)
    assert pack.entry is not None
    return pack.entry


def packed_entry(
    *groups: AppendGroup,
    tick: int,
    first_position: int,
    last_confirmed: int | None = None,
    term: int = 1,
    wal_name: str = "memory",
    size_bytes: int | None = None,
) -> LogEntry:
    """Return the entry that groups of rows would be at this position; `tick` is the first one's,
    the others follow.
    """
    pack = stamped(Pack(list(groups)), tick=tick, last_confirmed=last_confirmed, term=term)
    entry = entry_of(pack, first_position, wal_name=wal_name)
    return entry if size_bytes is None else replace(entry, size_bytes=size_bytes)


def stamped(pack: Pack, *, tick: int, last_confirmed: int | None = None, term: int = 1) -> Pack:
    """Return a pack as the chain gives it to the log: laid out and stamped, the first group with
    `tick`.
    """
    if not pack.messages:
        lay_out(pack)
    pack.stamp(tick + len(pack.groups) - 1, last_confirmed)
    pack.stamp_wal_term(term)
    return pack


def comparable(entry: LogEntry) -> tuple[object, ...]:
    """Return all that an entry says, so that two of them can be compared."""
    rows = entry.rows
    return (
        entry.first_position,
        entry.last_position,
        entry.first_tick,
        entry.time_tick,
        entry.last_confirmed_position,
        entry.wal_term,
        entry.crc32c,
        entry.size_bytes,
        entry.messages,
        None if rows is None else comparable_rows(rows),
        entry.producer,
    )


def comparable_rows(rows: PackedRows) -> tuple[object, ...]:
    """Return all that packed rows say."""
    columns = (rows.ticks, rows.positions, rows.counts, rows.transactions)
    return (
        rows.wal_name,
        rows.wal_term,
        rows.last_confirmed_position,
        tuple(tuple(column.tolist()) for column in columns),
        tuple(map(comparable_batch, rows.batches)),
        rows.producers,
    )


def comparable_batch(batch: RowBatch) -> tuple[object, ...]:
    """Return all that a batch says."""
    columns = (batch.groups, batch.places, batch.parts, batch.starts, batch.counts, batch.offsets)
    return (
        batch.type,
        batch.vchannel,
        batch.collection_id,
        batch.partition_id,
        batch.schema_version,
        batch.segment_id,
        bytes(batch.payload),
        tuple(tuple(column.tolist()) for column in columns),
    )
