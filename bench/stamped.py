"""Entries of a log as a node writes them, stamped by hand: for benchmarks of what reads a log."""

from collections.abc import Sequence

from wal.append import AppendGroup, AppendTicket, Pack
from wal.headers import MessageType
from wal.log import Log
from wal.message import MutableMessage
from wal.rows import Encoded, Piece, ShardRows, lay_out


class OneShard:
    """Where rows of one segment go, which are encoded already."""

    def __init__(self, collection_id: int, partition_id: int, vchannel: str) -> None:
        self.type = MessageType.INSERT
        self.collection_id = collection_id
        self.partition_id = partition_id
        self.schema_version = 1
        self.vchannels: tuple[str, ...] = (vchannel,)

    def encode(self, pieces: Sequence[tuple[bytes, int]]) -> Sequence[ShardRows]:
        """Return the payload and the number of its rows, which are one piece."""
        ((payload, rows),) = pieces
        return [ShardRows(0, payload, [0], [rows])]


def append_messages(log: Log, messages: list[MutableMessage], *, tick: int) -> AppendTicket:
    """Append messages at a tick."""
    return _append(log, Pack([AppendGroup(messages)]), tick)


def append_rows(
    log: Log,
    target: OneShard,
    payload: bytes,
    *,
    rows: int,
    segment_id: int,
    offset: int,
    tick: int,
) -> AppendTicket:
    """Append the encoded rows of one insert at a tick, with their place."""
    pieces = [Piece(target, (payload, rows), len(payload))]
    encoded = [Encoded(target, target.vchannels[0], payload, [0], [rows])]
    pack = Pack([AppendGroup(pieces=pieces, rows_bytes=len(payload))])
    laid_out = lay_out(
        [pieces],
        [False],
        encoded,
        next_offsets={target.vchannels[0]: offset},
        segments=[segment_id],
    )
    pack.take_rows(laid_out)
    return _append(log, pack, tick)


def _append(log: Log, pack: Pack, tick: int) -> AppendTicket:
    pack.stamp(tick, None)
    pack.stamp_wal_term(1)
    return log.append(pack)
