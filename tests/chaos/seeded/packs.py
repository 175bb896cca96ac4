"""Bugs of writes that go together: whose rows, ticks, offsets, stamps and errors are whose."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

import interceptors.shard.interceptor
import wal.codec
from interceptors.errors import ProducerFenced, SequenceTooOld
from interceptors.idempotency import IdempotencyInterceptor
from scanner.reorder import ScanFilter
from streamingnode.read_message import ReadRows
from tests.chaos.seeded.bug import Right, SeededBug
from tests.chaos.simulation.clients import SCHEMA
from tests.chaos.simulation.disk import EntryWritten
from tests.chaos.simulation.store import WAL_NAME, SimulatedStore
from wal.append import AppendGroup, AppendResult, Pack
from wal.codec import CHECKSUM_END, decode_entry, encode_entry
from wal.entry import U4, PackedRows, RowBatch
from wal.headers import MessageType
from wal.packer import Packer
from wal.rows import LaidOut, row_offsets

# --- rows -----------------------------------------------------------------------------------------


def _boundary_off_by_one(right: Right) -> Right:
    """The last row of a write is the next one's."""

    def lay_out(*arguments: Any, **options: Any) -> LaidOut:
        laid: LaidOut = right(*arguments, **options)
        return laid._replace(batches=[_with_counts_moved(batch) for batch in laid.batches])

    return lay_out


def _with_counts_moved(batch: RowBatch) -> RowBatch:
    counts = batch.counts.copy()
    if len(counts) < 2 or counts[0] < 2:
        return batch
    counts[0] -= 1
    counts[1] += 1
    return replace(batch, counts=counts, starts=(np.cumsum(counts) - counts).astype(U4))


def _stored_boundary_off_by_one(right: Right) -> Right:
    """Writes that are read from the log begin where the one before them does."""

    def decode(*arguments: Any, **options: bool) -> PackedRows:
        rows: PackedRows = right(*arguments, **options)
        shifted = [
            replace(batch, starts=np.concatenate((batch.starts[:1], batch.starts[:-1])))
            for batch in rows.batches
        ]
        return replace(rows, batches=tuple(shifted))

    return decode


def _offsets_by_batch(right: Right) -> Right:
    """A delete has the offset before or behind all rows of its shard, and not that of its place
    among them.
    """
    return _with_offsets_in(right, lambda number, _group, place: (number, place))


def _offsets_turned_round(right: Right) -> Right:
    """Of two writes, the later one has the rows in front."""
    return _with_offsets_in(right, lambda _number, group, place: (-group, place))


def _with_offsets_in(right: Right, order: Callable[[int, int, int], tuple[int, int]]) -> Right:
    """Count rows in the order of the numbers of their batches, groups and boundaries."""

    def lay_out(
        groups: Any, *arguments: Any, next_offsets: Mapping[str, int], **options: Any
    ) -> LaidOut:
        laid: LaidOut = right(groups, *arguments, next_offsets=next_offsets, **options)
        given = [np.zeros_like(batch.offsets) for batch in laid.batches]
        boundaries = [
            (order(number, group, at), number, at)
            for number, batch in enumerate(laid.batches)
            for at, group in enumerate(batch.groups.tolist())
        ]
        offsets = dict(next_offsets)
        for _, number, at in sorted(boundaries):
            batch = laid.batches[number]
            given[number][at] = offsets[batch.vchannel]
            offsets[batch.vchannel] += (
                int(batch.counts[at]) if batch.type is MessageType.INSERT else 0
            )
        batches = [
            replace(batch, offsets=each) for batch, each in zip(laid.batches, given, strict=True)
        ]
        return laid._replace(batches=batches, row_offsets=row_offsets(batches, len(groups)))

    return lay_out


def _delivered_by_batch(right: Right) -> Right:
    """Readers get the messages of an entry batch by batch."""

    def bodies(rows: PackedRows) -> Iterator[Any]:
        for batch in rows.batches:
            yield from right(replace(rows, batches=(batch,)))

    return bodies


def _half_a_packed_transaction(right: Right) -> Right:
    def whole(rows: PackedRows, group: int, bodies: list[Any]) -> Any:
        return right(
            rows, group, bodies[1:] if rows.transactions[group] and len(bodies) > 1 else bodies
        )

    return whole


# --- what callers are told ------------------------------------------------------------------------


def _result_of_the_next(right: Right) -> Right:
    def results(pack: Pack, *arguments: Any) -> list[AppendResult]:
        found: list[AppendResult] = right(pack, *arguments)
        return found[1:] + found[:1]

    return results


def _offsets_of_the_next(right: Right) -> Right:
    def lay_out(*arguments: Any, **options: Any) -> LaidOut:
        laid: LaidOut = right(*arguments, **options)
        return laid._replace(row_offsets=laid.row_offsets[1:] + laid.row_offsets[:1])

    return lay_out


def _error_for_the_others_too(right: Right) -> Right:
    def leave(pack: Pack, group: AppendGroup, outcome: Any = None) -> None:
        right(pack, group, outcome)
        if isinstance(outcome, Exception) and pack.groups:
            pack.groups[0].settle(outcome)

    return leave


def _error_of_the_neighbour(right: Right) -> Right:
    """The one who is refused is not the one who is told."""

    def refuse(manager: Any, pack: Pack) -> None:
        before = list(pack.groups)
        right(manager, pack)
        for group, following in pairwise(before):
            if isinstance(group.outcome, Exception) and following.pack is pack:
                pack.leave(following, group.outcome)

    return refuse


# --- stamps ---------------------------------------------------------------------------------------


def _window_of_another(right: Right) -> Right:
    """Of the writes of two producers, the second is looked for among those of the first."""

    def look(interceptor: IdempotencyInterceptor, pack: Pack, tries: Any) -> Any:
        named = [
            group for group in pack.groups if group.producer is not None and group.producer.sequence
        ]
        for one, other in pairwise(named):
            assert one.producer is not None, "only those are looked at"
            assert other.producer is not None, "only those are looked at"
            try:
                known = interceptor.window.find(
                    replace(one.producer, sequence=other.producer.sequence)
                )
            except (ProducerFenced, SequenceTooOld):
                continue
            if (
                known is not None
                and one.producer.producer_id != other.producer.producer_id
                and other.pack is pack
            ):
                pack.leave(other, known)
        return right(interceptor, pack, tries)

    return look


def _stamps_of_the_next(right: Right) -> Right:
    def encode(rows: PackedRows, **options: bool) -> Any:
        return right(replace(rows, producers=rows.producers[1:] + rows.producers[:1]), **options)

    return encode


def _stamps_of_the_entry_only(right: Right) -> Right:
    """What is read from the log knows which write the entry is, not which ones are in it."""

    def decode(*arguments: Any, **options: bool) -> PackedRows:
        rows: PackedRows = right(*arguments, **options)
        return replace(rows, producers=())

    return decode


# --- the queue ------------------------------------------------------------------------------------


def _cancelled_and_written(right: Right) -> Right:
    """A caller who gives up while its write waits is heard by nobody."""

    def append(packer: Packer, group: AppendGroup, *send: Any) -> Any:
        return asyncio.shield(right(packer, group, *send))

    return append


def _comes_again_twice(right: Right) -> Right:
    def come_again(packer: Packer, group: AppendGroup) -> None:
        right(packer, group)
        twice = copy(group)
        twice.memory = None
        right(packer, twice)

    return come_again


def _torn_entry(right: Right) -> Right:
    """A write that fails may leave an entry without the first of its writes."""

    def fail(store: SimulatedStore) -> None:
        before = list(store.disk.writes)
        right(store)
        lost = before[len(store.disk.writes) :]
        for number, written in enumerate(lost):
            if isinstance(written, EntryWritten) and (torn := _torn(written)):
                store.disk.writes += [*lost[:number], *torn]
                break

    return fail


def _torn(written: EntryWritten) -> list[EntryWritten]:
    entry = decode_entry(written.data, wal_name=WAL_NAME, previous_crc32c=None)
    if entry.rows is None or len(entry.rows.ticks) < 2:
        return []
    whole = entry.rows
    left = whole.only(np.arange(len(whole.ticks)) > 0)
    assert left is not None, "each write has rows"
    columns = {
        name: getattr(whole, name)[1:] for name in ("ticks", "counts", "transactions", "producers")
    }
    positions = whole.positions[1:] - whole.counts[0]
    last = whole.position - int(whole.counts[0])
    left = replace(
        left,
        positions=positions,
        position=last,
        batches=tuple(map(_of_later, left.batches)),
        **columns,
    )
    previous = int.from_bytes(written.data[CHECKSUM_END : CHECKSUM_END + 4], "little")
    data = encode_entry(
        replace(entry, rows=left, first_position=int(positions[0])), previous_crc32c=previous
    )
    return [EntryWritten(written.log, written.first_position, left.position, left.time_tick, data)]


def _of_later(batch: RowBatch) -> RowBatch:
    """Return a batch of which the first write is gone, as if that had never been there."""
    schema = SCHEMA if batch.type is MessageType.INSERT else pa.schema([SCHEMA.field("key")])
    rows = pa.ipc.read_record_batch(pa.py_buffer(batch.payload), schema).slice(int(batch.starts[0]))
    return replace(batch, payload=rows.serialize().to_pybytes(), groups=batch.groups - U4.type(1))


# --- readers --------------------------------------------------------------------------------------


def _rest_of_an_entry_skipped(_right: Right) -> Right:
    """Who resumes within an entry goes on behind it."""

    def within(rows: PackedRows, *, above: int = 0, upto: int | None = None) -> PackedRows | None:
        if rows.ticks[0] <= above:
            return None
        return rows if upto is None else rows.only(rows.ticks <= upto)

    return within


def _entry_again_from_its_begin(right: Right) -> Right:
    """Who resumes within an entry gets all of it again."""

    def select(chosen: ScanFilter, rows: PackedRows) -> Any:
        after_tick = chosen.after_tick
        chosen.after_tick = 0
        try:
            return right(chosen, rows)
        finally:
            chosen.after_tick = after_tick

    return select


def _lost_at_a_split(right: Right) -> Right:
    """Of what does not fit a reader's batch, the first message is gone."""

    def split(rows: ReadRows, rows_max: int) -> Any:
        fitting, rest = right(rows, rows_max)
        return fitting, rest and (right(rest, 1)[1] or rest)

    return split


BOUNDARY_OFF_BY_ONE = SeededBug(
    "boundaries off by one", interceptors.shard.interceptor, "lay_out", _boundary_off_by_one
)
RESULT_OF_ANOTHER = SeededBug(
    "one caller's result given to another", Pack, "results", _result_of_the_next
)
CANCELLED_AND_WRITTEN = SeededBug(
    "a cancelled caller's rows are written", Packer, "append", _cancelled_and_written
)
TORN_ENTRY = SeededBug(
    "a torn entry loses only some of its writes", SimulatedStore, "_fail", _torn_entry
)
OTHERS = (
    SeededBug(
        "stored boundaries off by one", wal.codec, "decode_rows", _stored_boundary_off_by_one
    ),
    SeededBug(
        "a delete among others has no place",
        interceptors.shard.interceptor,
        "lay_out",
        _offsets_by_batch,
    ),
    SeededBug(
        "two writes of one entry turned round",
        interceptors.shard.interceptor,
        "lay_out",
        _offsets_turned_round,
    ),
    SeededBug("an entry is delivered batch by batch", PackedRows, "_bodies", _delivered_by_batch),
    SeededBug("half a packed transaction", PackedRows, "_whole", _half_a_packed_transaction),
    SeededBug(
        "one caller's offsets given to another",
        interceptors.shard.interceptor,
        "lay_out",
        _offsets_of_the_next,
    ),
    SeededBug("one caller's error given to another too", Pack, "leave", _error_for_the_others_too),
    SeededBug(
        "a neighbour refused with whom nothing fits",
        interceptors.shard.interceptor.ShardManager,
        "_refuse_misfits",
        _error_of_the_neighbour,
    ),
    SeededBug(
        "a stamp checked against another's window",
        IdempotencyInterceptor,
        "_look",
        _window_of_another,
    ),
    SeededBug(
        "stamps of an entry given to the next write", wal.codec, "_encode_rows", _stamps_of_the_next
    ),
    SeededBug("stamps in an entry forgotten", wal.codec, "decode_rows", _stamps_of_the_entry_only),
    SeededBug("what comes again comes twice", Packer, "come_again", _comes_again_twice),
    SeededBug("the rest of an entry is skipped", PackedRows, "within", _rest_of_an_entry_skipped),
    SeededBug(
        "an entry comes again from its begin",
        ScanFilter,
        "_select_rows",
        _entry_again_from_its_begin,
    ),
    SeededBug("lost where a reader's batch ends", ReadRows, "split", _lost_at_a_split),
)
