"""What a reader gets, as it crosses a connection: entries as the log has them, without what is not for this reader. Pure."""

import struct
from collections.abc import Collection, Iterator

from msgspec.structs import replace

from scanner.scanner import ScanBatch
from wal.codec import CHECKSUM_END, decode_checked, entry_parts
from wal.entry import LogEntry, PackedRows, Visible, transaction_of
from wal.errors import Corrupt, ProtocolError
from wal.headers import CommitTxnHeader, MessageType
from wal.message import Message, TransactionMessage

_HEAD = struct.Struct("<QQI")
"""confirmed tick, position to go on from, how many messages, transactions and packed rows there are."""
_LENGTH = struct.Struct("<Q")
"""In place of what an entry's checksum does not cover: a frame has one of its own."""
assert _LENGTH.size == CHECKSUM_END, "so an entry is where it is in the log"


def encode_batch(batch: ScanBatch, vchannels: Collection[str]) -> list[bytes | memoryview]:
    """Return a batch in parts, of which payloads are not copied; of other vchannels no row is in it."""
    parts: list[bytes | memoryview] = [_HEAD.pack(batch.confirmed_tick, batch.resume_position, len(batch.visible))]
    for visible in batch.visible:
        for entry in _entries(visible, vchannels):
            of_entry = entry_parts(entry, is_whole=False)
            parts += _LENGTH.pack(sum(map(len, of_entry))), *of_entry
    return parts


def decode_batch(data: memoryview, wal_name: str) -> ScanBatch:
    """Return what was encoded, its payloads as views into it. Raises `ProtocolError`."""
    visible, bodies = list[Visible](), list[Message]()
    try:
        tick, position, count = _HEAD.unpack_from(data)
        data = data[_HEAD.size :]
        while data:
            end = CHECKSUM_END + _LENGTH.unpack_from(data)[0]
            entry = decode_checked(data[:end], wal_name=wal_name, is_whole=False)
            data = data[end:]
            if entry.rows is not None:
                visible.append(entry.rows)
            for message in entry.messages:
                if message.type is MessageType.COMMIT_TXN:
                    visible.append(transaction_of(bodies, message))
                    bodies = []
                else:
                    (bodies if message.txn_id else visible).append(message)
        if bodies or len(visible) != count:
            raise Corrupt(f"{len(visible)} of {count} things")
    except (struct.error, Corrupt) as error:
        raise ProtocolError(f"a batch of messages does not decode: {error}") from error
    return ScanBatch(visible, tick, position)


def _entries(visible: Visible, vchannels: Collection[str]) -> Iterator[LogEntry]:
    """Yield what is visible as entries; of a transaction that was several, its bodies and a commit of these."""
    if isinstance(visible, PackedRows):
        batches = tuple([batch for batch in visible.batches if batch.vchannel in vchannels])
        rows = replace(visible, batches=batches, producers=())
        yield LogEntry(
            first_position=rows.positions.item(0),
            last_position=rows.position,
            first_tick=rows.ticks.item(0),
            time_tick=rows.time_tick,
            last_confirmed_position=rows.last_confirmed_position,
            wal_term=rows.wal_term,
            rows=rows,
        )
        return
    messages: tuple[Message, ...] = visible.bodies
    if isinstance(visible, TransactionMessage):
        bodies = [body for body in messages if body.vchannel in vchannels]
        header = CommitTxnHeader.of([(body.vchannel, body.header) for body in bodies])
        messages = (*bodies, replace(visible.commit, header=header))
    for message in messages:
        yield LogEntry(
            first_position=message.position,
            last_position=message.position,
            first_tick=message.time_tick,
            time_tick=message.time_tick,
            last_confirmed_position=message.last_confirmed_position,
            wal_term=message.wal_term,
            messages=(message,),
        )
