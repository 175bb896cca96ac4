"""Encodes and decodes the batches of readers for a connection: messages and packed rows in the form
of the log's entries. Pure.
"""

import struct
from collections.abc import Collection, Iterable
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from scanner.scanner import ScanBatch
from wal.codec import (
    CHECKSUM_END,
    DAMAGED,
    decode_messages,
    decode_rows,
    encode_messages,
    entry_parts,
)
from wal.entry import LogEntry, PackedRows, Visible, transaction_of
from wal.errors import Corrupt, ProtocolError
from wal.headers import CommitTxnHeader, MessageType
from wal.message import AnyMessage, Message, TransactionMessage

_HEAD = struct.Struct("<QQI")
"""Confirmed tick, position to resume from, number of messages, transactions and packed rows."""
_ITEM = struct.Struct("<II")
"""Number of bytes that follow, and number of messages in them; 0 messages for packed rows, which
are an entry.
"""
_PLACE = struct.Struct("<QQQQ")
"""Position, last-confirmed position, tick and term of a message."""
assert _ITEM.size == CHECKSUM_END, (
    "it replaces the bytes that an entry's checksum does not cover: a frame has its own checksum"
)


def encode_batch(batch: ScanBatch, vchannels: Collection[str]) -> list[bytes | memoryview]:
    """Return a batch as parts, without copying payloads; rows of other vchannels are left out."""
    parts: list[bytes | memoryview] = [
        _HEAD.pack(batch.confirmed_tick, batch.resume_position, len(batch.visible))
    ]
    run: Any
    for kind, run in groupby(batch.visible, type):
        if kind is PackedRows:
            items = [(0, entry_parts(_entry(rows, vchannels), is_whole=False)) for rows in run]
        else:
            messages = [message for each in run for message in _messages(each, vchannels)]
            items = [(len(messages), [b"".join(map(_place, messages)), *encode_messages(messages)])]
        for count, item in items:
            parts += _ITEM.pack(sum(map(len, item)), count), *item
    return parts


def decode_batch(data: memoryview, wal_name: str) -> ScanBatch:
    """Return the decoded batch; its payloads are views into `data`. Raises `ProtocolError`."""
    visible = list[Visible]()
    bodies = list[Message]()
    try:
        tick, position, things = _HEAD.unpack_from(data)
        data = data[_HEAD.size :]
        while data:
            size_bytes, count = _ITEM.unpack_from(data)
            item = data[: _ITEM.size + size_bytes]
            data = data[_ITEM.size + size_bytes :]
            if not count:
                visible.append(decode_rows(item, wal_name, is_whole=False))
                continue
            at = _ITEM.size + count * _PLACE.size
            for message in decode_messages(
                item, at, wal_name, _PLACE.iter_unpack(item[_ITEM.size : at])
            ):
                if message.type is MessageType.COMMIT_TXN:
                    visible.append(transaction_of(bodies, message))
                    bodies = []
                else:
                    (bodies if message.txn_id else visible).append(message)
        if bodies or len(visible) != things:
            raise Corrupt(f"{len(visible)} of {things} items")
    except DAMAGED as error:
        raise ProtocolError(f"a batch of messages does not decode: {error}") from error
    return ScanBatch(visible, tick, position)


def _entry(rows: PackedRows, vchannels: Collection[str]) -> LogEntry:
    return LogEntry(
        first_position=rows.positions.item(0),
        last_position=rows.position,
        first_tick=rows.ticks.item(0),
        time_tick=rows.time_tick,
        last_confirmed_position=rows.last_confirmed_position,
        wal_term=rows.wal_term,
        rows=replace(
            rows,
            batches=tuple([each for each in rows.batches if each.vchannel in vchannels]),
            producers=(),
        ),
    )


def _messages(visible: AnyMessage, vchannels: Collection[str]) -> Iterable[Message]:
    """Return a message, or those bodies of a transaction that are in these vchannels and a commit
    for them.
    """
    if not isinstance(visible, TransactionMessage):
        return visible.bodies
    bodies = [body for body in visible.bodies if body.vchannel in vchannels]
    header = CommitTxnHeader.of([(body.vchannel, body.header) for body in bodies])
    return (*bodies, replace(visible.commit, header=header))


def _place(of: Message) -> bytes:
    return _PLACE.pack(of.position, of.last_confirmed_position, of.time_tick, of.wal_term)
