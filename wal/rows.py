"""Rows of writes on their way into one entry: what may share a batch, and how many writes are laid
out. No I/O, no Arrow.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from wal.entry import U2, U4, U8, Numbers, RowBatch, numbers
from wal.headers import MessageType


class ShardRows(NamedTuple):
    """Rows of one shard, encoded: `counts[i]` rows in a row are of the piece with index
    `pieces[i]`, ascending.
    """

    shard: int
    payload: bytes | memoryview
    pieces: Sequence[int]
    counts: Sequence[int]


class RowTarget(Protocol):
    """Where rows or keys go, and how they are encoded; one object for all writes that may share a
    batch.
    """

    type: MessageType
    """`INSERT` or `DELETE`."""
    collection_id: int
    partition_id: int
    """Of inserts; 0 for deletes."""
    schema_version: int
    """Of the collection's schema that the rows are of."""
    vchannels: tuple[str, ...]
    """Those of the collection, by shard."""

    def encode(self, pieces: Sequence[Any]) -> Sequence[ShardRows]:
        """Return the rows of these pieces, in order, for each shard that gets some."""


class Piece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Rows or keys of one write, checked: `rows` is what its target encodes, `size` what they count
    for in bytes.

    It holds no cycles and is left out of garbage collection: a busy node has thousands waiting.
    """

    target: RowTarget
    rows: Any
    size: int


class Encoded(msgspec.Struct, frozen=True, eq=False, gc=False):
    """An encoded batch: `counts[i]` of its rows are of piece `pieces[i]`, as all pieces of a pack
    are numbered in order.
    """

    target: RowTarget
    vchannel: str
    payload: bytes | memoryview
    pieces: Sequence[int]
    counts: Sequence[int]


def encode_pieces(groups: Iterable[Sequence[Piece]]) -> list[Encoded]:
    """Return the rows of groups, encoded: a batch for each kind, partition and shard that gets
    rows.
    """
    lanes: dict[RowTarget, tuple[RowTarget, list[Any], list[int]]] = {}
    places: dict[tuple[int, ...], tuple[RowTarget, list[Any], list[int]]] = {}
    number = 0
    for pieces in groups:
        for piece in pieces:
            lane = lanes.get(piece.target)
            if lane is None:
                # Targets of one place, made before and after the catalog changed: their rows keep
                # their order in one batch.
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
    """Groups as an entry has them: how many messages each is, the batches, and the offsets of each
    group's rows.
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
    """Return encoded groups with their places in the entry and their offsets; `segments` are those
    of the batches.

    A piece is a message for each shard that gets rows of it, and its messages follow one another,
    after those of the pieces before it; a transaction has a begin in front and a commit behind.
    Rows of a vchannel count up in that order from its next offset; a delete gets the offset that
    the next row would have, so it removes what came before it in the same entry.
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
    """Do the same where each group is one message of one batch, as most are: without a look at each
    of them.
    """
    counts = batch.counts
    groups = len(batch.counts)
    vchannel = batch.vchannel
    offsets = [next_offset] * groups
    row_offsets: list[dict[str, tuple[int, int]]] = [{} for _ in counts]
    if batch.target.type is MessageType.INSERT:
        offsets = [*accumulate(counts[:-1], initial=next_offset)]
        row_offsets = [{vchannel: of_group} for of_group in zip(offsets, counts, strict=True)]
    # An array of one number is kept, and takes as long to make as one of many.
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
                # they need not ascend within a group
                found[group][vchannel] = min(first, offset), before + count
    return found
