"""Rows for tests below Arrow: a target whose rows are bytes, and the groups and packs that are made
of them.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from wal.append import AppendGroup, Pack
from wal.headers import MessageType
from wal.message import MESSAGE_OVERHEAD_BYTES
from wal.rows import Piece, ShardRows, encode_pieces
from wal.rows import lay_out as lay_out_rows

Row = tuple[int, bytes]
"""The shard of a row, and what is in it."""


class FakeTarget:
    """Takes rows as (shard, bytes); a payload is the bytes of its rows, joined."""

    def __init__(
        self,
        kind: MessageType = MessageType.INSERT,
        collection_id: int = 1,
        *,
        partition_id: int = 2,
        schema_version: int = 1,
        vchannels: tuple[str, ...] = ("p0_1v0",),
    ) -> None:
        self.type = kind
        self.collection_id = collection_id
        self.schema_version = schema_version
        self.partition_id = partition_id if kind is MessageType.INSERT else 0
        self.vchannels = vchannels

    def encode(self, pieces: Sequence[Any]) -> Sequence[ShardRows]:
        """Return the rows of each shard that gets some."""
        found = []
        for shard in sorted({shard for rows in pieces for shard, _ in rows}):
            counts = [sum(at == shard for at, _ in rows) for rows in pieces]
            numbers = [number for number, count in enumerate(counts) if count]
            payload = b"".join(data for rows in pieces for at, data in rows if at == shard)
            found.append(ShardRows(shard, payload, numbers, [counts[number] for number in numbers]))
        return found


def piece(target: FakeTarget, *rows: Row) -> Piece:
    """Return rows as a piece."""
    return Piece(target, list(rows), sum(len(data) for _, data in rows) + MESSAGE_OVERHEAD_BYTES)


def rows_group(*pieces: Piece, is_transaction: bool = False) -> AppendGroup:
    """Return a group of rows."""
    return AppendGroup(
        pieces=pieces, is_transaction=is_transaction, rows_bytes=sum(each.size for each in pieces)
    )


def insert_group(
    target: FakeTarget | None = None, *, rows: int = 1, shard: int = 0, data: bytes = b"row"
) -> AppendGroup:
    """Return an insert of some rows of one shard."""
    return rows_group(piece(target or FakeTarget(), *[(shard, data)] * rows))


def delete_group(
    target: FakeTarget | None = None, *, keys: int = 1, shard: int = 0, data: bytes = b"key"
) -> AppendGroup:
    """Return a delete of some keys of one shard."""
    return rows_group(piece(target or FakeTarget(MessageType.DELETE), *[(shard, data)] * keys))


def transaction_group(*pieces: Piece) -> AppendGroup:
    """Return a transaction of these pieces."""
    return rows_group(*pieces, is_transaction=True)


def pack_of(*groups: AppendGroup, come_again: Callable[[AppendGroup], None] | None = None) -> Pack:
    """Return groups as a pack."""
    return Pack(list(groups), come_again)


def lay_out(pack: Pack, *, first_offset: int = 0, segment_id: int = 7) -> None:
    """Do what the shards do with a pack of rows: lay it out, with offsets from one on, inserts in
    one segment.
    """
    pieces = [group.pieces for group in pack.groups]
    encoded = encode_pieces(pieces)
    laid_out = lay_out_rows(
        pieces,
        [group.is_transaction for group in pack.groups],
        encoded,
        next_offsets=defaultdict(lambda: first_offset),
        segments=[
            segment_id if batch.target.type is MessageType.INSERT else 0 for batch in encoded
        ],
    )
    pack.take_rows(laid_out)
