"""Packs the rows of many writes into one entry: which rows share a batch, and the layout of the
writes. No I/O, no Arrow.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from wal.entry import U2, U4, U8, Numbers, RowBatch, numbers
from wal.headers import MessageType


class ShardRows(NamedTuple):
    """Encoded rows of one shard: the next `counts[i]` rows belong to the piece with index
    `pieces[i]`; indices ascend.
    """

    shard: int
    payload: bytes | memoryview
    pieces: Sequence[int]
    counts: Sequence[int]


class RowTarget(Protocol):
    """The destination and the encoding of rows or keys; writes that may share a batch share one
    object.
    """

    type: MessageType
    """`INSERT` or `DELETE`."""
    collection_id: int
    partition_id: int
    """The partition of inserts; 0 for deletes."""
    schema_version: int
    """The schema version of the rows."""
    vchannels: tuple[str, ...]
    """The vchannels of the collection, by shard."""

    def encode(self, pieces: Sequence[Any]) -> Sequence[ShardRows]:
        """Return the encoded rows of these pieces, in order, for each shard that has some."""


class Piece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Checked rows or keys of one write: `rows` has the form that the target encodes, `size` is
    their size against limits, in bytes.

    It is excluded from garbage collection, as it has no reference cycles and a busy node has
    thousands waiting.
    """

    target: RowTarget
    rows: Any
    size: int


class Encoded(msgspec.Struct, frozen=True, eq=False, gc=False):
    """An encoded batch: its next `counts[i]` rows belong to piece `pieces[i]`. All pieces of a pack
    are numbered in order.
    """

    target: RowTarget
    vchannel: str
    payload: bytes | memoryview
    pieces: Sequence[int]
    counts: Sequence[int]


def encode_pieces(groups: Iterable[Sequence[Piece]]) -> list[Encoded]:
    """Return the encoded rows of groups: one batch for each kind, partition and shard that has
    rows.
    """
    lanes: dict[RowTarget, tuple[RowTarget, list[Any], list[int]]] = {}
    places: dict[tuple[int, ...], tuple[RowTarget, list[Any], list[int]]] = {}
    number = 0
    for pieces in groups:
        for piece in pieces:
            lane = lanes.get(piece.target)
            if lane is None:
                # Targets of the same place made before and after a change of the catalog share one
                # batch, so that their rows keep their order.
                target = piece.target
                place = (
                    target.type,
                    target.collection_id,
                    target.partition_id,
                    target.schema_version,
                )
                lane = lanes[target] = places.setdefault(place, (target, [], []))
            lane[1].append(piece.rows)
            lane[2].append(number)
            number += 1
    return [
        Encoded(
            target, target.vchannels[shard], payload, [numbers[index] for index in pieces], counts
        )
        for target, rows, numbers in places.values()
        for shard, payload, pieces, counts in target.encode(rows)
    ]


class LaidOut(NamedTuple):
    """Groups in the layout of an entry: the number of messages of each group, the batches, and the
    row offsets of each group.
    """

    counts: list[int]
    batches: list[RowBatch]
    row_offsets: list[dict[str, tuple[int, int]]]


def lay_out(
    groups: Sequence[Sequence[Piece]],
    transactions: Sequence[bool],
    encoded: Sequence[Encoded],
    *,
    next_offsets: Mapping[str, int],
    segments: Sequence[int] | None = None,
) -> LaidOut:
    """Return encoded groups with their places in the entry and their row offsets; `segments` has
    the segment id of each batch.

    A piece becomes one message for each shard with rows of it. Its messages are consecutive and
    follow those of earlier pieces; a transaction has a begin before and a commit after them. Row
    offsets of a vchannel ascend in that order from its next offset. A delete gets the offset that
    the next row would have, so it also removes earlier rows of the same entry.
    """
    if (
        len(encoded) == 1
        and len(encoded[0].pieces) == len(groups) == sum(map(len, groups))
        and not any(transactions)
    ):
        return _lay_out_one_each(
            encoded[0], next_offsets[encoded[0].vchannel], segments[0] if segments else 0
        )
    boundaries: list[tuple[int, int, int]] = []
    columns: list[tuple[list[int], ...]] = []
    offsets: dict[str, int] = {}
    for number, batch in enumerate(encoded):
        boundaries += zip(batch.pieces, repeat(number), batch.counts)
        columns.append(([], [], [], []))
        offsets[batch.vchannel] = next_offsets[batch.vchannel]
    if len(encoded) > 1:
        boundaries.sort()
    group_of: list[int] = []
    counts: list[int] = []
    row_offsets: list[dict[str, tuple[int, int]]] = []
    for group, pieces in enumerate(groups):
        group_of += [group] * len(pieces)
        counts.append(2 * transactions[group])
        row_offsets.append({})
    last = -1
    part = 0
    for piece, number, count in boundaries:
        group = group_of[piece]
        target = encoded[number].target
        vchannel = encoded[number].vchannel
        last, part = piece, part + 1 if piece == last else 0
        offset = offsets[vchannel]
        of_groups, places, parts, first_offsets = columns[number]
        of_groups.append(group)
        places.append(counts[group] - transactions[group])
        parts.append(part)
        first_offsets.append(offset)
        counts[group] += 1
        if target.type is MessageType.INSERT:
            offsets[vchannel] = offset + count
            of_group = row_offsets[group]
            first, before = of_group.get(vchannel, (offset, 0))
            of_group[vchannel] = first, before + count
    batches = [
        _placed(batch, segment_id, *column)
        for batch, column, segment_id in zip(
            encoded, columns, segments or [0] * len(encoded), strict=True
        )
    ]
    return LaidOut(counts, batches, row_offsets)


def _lay_out_one_each(batch: Encoded, next_offset: int, segment_id: int) -> LaidOut:
    """Lay out the usual case, where each group is one message of one batch, without a loop over
    boundaries.
    """
    counts = batch.counts
    groups = len(batch.counts)
    vchannel = batch.vchannel
    offsets = [next_offset] * groups
    row_offsets: list[dict[str, tuple[int, int]]] = [{} for _ in counts]
    if batch.target.type is MessageType.INSERT:
        offsets = [*accumulate(counts[:-1], initial=next_offset)]
        row_offsets = [{vchannel: of_group} for of_group in zip(offsets, counts, strict=True)]
    # Arrays of one number are cached: to make one takes as long as to make a long one.
    nought: Sequence[int] | Numbers = (0,) if groups == 1 else np.zeros(groups, U4)
    places = nought if groups == 1 else np.arange(groups)
    placed = _placed(batch, segment_id, places, nought, nought, offsets)
    return LaidOut([1] * groups, [placed], row_offsets)


def _placed(
    batch: Encoded,
    segment_id: int,
    groups: Sequence[int] | Numbers,
    places: Sequence[int] | Numbers,
    parts: Sequence[int] | Numbers,
    offsets: Sequence[int],
) -> RowBatch:
    target = batch.target
    counts = batch.counts
    return RowBatch(
        type=target.type,
        vchannel=batch.vchannel,
        collection_id=target.collection_id,
        partition_id=target.partition_id,
        schema_version=target.schema_version,
        segment_id=segment_id,
        payload=batch.payload,
        groups=numbers(groups, U4),
        places=numbers(places, U4),
        parts=numbers(parts, U2),
        starts=numbers([*accumulate(counts[:-1], initial=0)], U4),
        counts=numbers(counts, U4),
        offsets=np.array(offsets, U8),
        rows=sum(counts),
    )


def row_offsets(batches: Iterable[RowBatch], groups: int) -> list[dict[str, tuple[int, int]]]:
    """Return for each group the first offset and the count of its rows on each vchannel."""
    found: list[dict[str, tuple[int, int]]] = [{} for _ in range(groups)]
    for batch in batches:
        if batch.type is MessageType.INSERT:
            vchannel = batch.vchannel
            for group, offset, count in zip(
                batch.groups.tolist(), batch.offsets.tolist(), batch.counts.tolist(), strict=True
            ):
                first, before = found[group].get(vchannel, (offset, 0))
                # offsets need not ascend within a group
                found[group][vchannel] = min(first, offset), before + count
    return found
