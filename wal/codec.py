"""Bytes of a log entry: `docs/format.md`, section "Log entry", has the picture and a worked example. No I/O.

The checksum covers the whole entry after itself, its positions and the previous entry's checksum included, so an entry that
is moved, repeated or left out is found as surely as one with a flipped bit.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from google_crc32c import extend

from wal.errors import Corrupt, UnsupportedFormat
from wal.headers import HEADERS, MESSAGE_VERSION
from wal.message import LogEntry, Message, MutableMessage
from wal.position import ProducerStamp

T = TypeVar("T")

ENTRY_MAGIC = 0x4E53
"""`SN` on disk."""
ENTRY_FORMAT = 1

CHECKSUM_END = 8
_ENTRY = struct.Struct("<HHIIIQQQQQQI")
"""magic, format, checksum, previous checksum, message count, first position, tick, last confirmed, term, producer id,
sequence, epoch."""
_UNCHECKED, _CHECKED = struct.Struct("<HHI"), struct.Struct("<IIQQQQQQI")
"""The same in two parts: what the checksum leaves out, and what it covers."""
_MESSAGE = struct.Struct("<HBxHHIIQ")
"""type, version, lengths of vchannel, properties (nobody writes any), header and payload, transaction id."""

ENTRY_HEADER_BYTES = _ENTRY.size
MESSAGE_HEADER_BYTES = _MESSAGE.size
MESSAGES_PER_ENTRY_MAX = 65_536
"""More messages than this in one entry is never written, and refused before anything is allocated for them."""

_encode = msgspec.msgpack.Encoder().encode
_layouts = {
    (int(kind), version): (kind, msgspec.msgpack.Decoder(header).decode) for (kind, version), header in HEADERS.items()
}
COPIED_BYTES_MAX = 4096
"""Up to here copying a view takes less time than wrapping it."""


def crc32c(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """Return the CRC32C of `data` behind bytes of checksum `before`; of large data without the interpreter lock."""
    if type(data) is bytes:
        return int(extend(before, data))
    # The library takes no view, but anything else that has bytes.
    return int(extend(before, bytes(data) if len(data) < COPIED_BYTES_MAX else np.frombuffer(data, np.uint8)))


def encode_entry(
    messages: Sequence[MutableMessage],
    *,
    first_position: int,
    previous_crc32c: int,
    producer: ProducerStamp | None = None,
) -> bytes:
    """Return the bytes of stamped messages as one entry; its checksum is read back with `entry_crc32c`."""
    head = messages[0]
    assert head.time_tick > 0, "messages are stamped with a tick before they are encoded"
    assert len(messages) <= MESSAGES_PER_ENTRY_MAX, "an entry has a bounded number of messages"
    last_confirmed = first_position if head.last_confirmed is None else head.last_confirmed
    writer = (0, 0, 0) if producer is None else (producer.producer_id, producer.sequence, producer.epoch)
    checked = _CHECKED.pack(
        previous_crc32c, len(messages), first_position, head.time_tick, last_confirmed, head.wal_term, *writer
    )
    checksum = crc32c(checked)
    parts: list[bytes | memoryview] = [b"", checked]
    for message in messages:
        vchannel, header, payload = message.vchannel.encode(), _encode(message.header), message.payload
        fixed = _MESSAGE.pack(
            message.type, MESSAGE_VERSION, len(vchannel), 0, len(header), len(payload), message.txn_id
        )
        before_payload = b"".join((fixed, vchannel, header))
        checksum = crc32c(payload, crc32c(before_payload, checksum))
        parts += before_payload, payload
    parts[0] = _UNCHECKED.pack(ENTRY_MAGIC, ENTRY_FORMAT, checksum)
    return b"".join(parts)  # the only copy of the payloads


def entry_crc32c(data: bytes) -> int:
    """Return the checksum an encoded entry carries, unchecked."""
    return int.from_bytes(data[4:8], "little")


def decode_entry(data: bytes, *, wal_name: str, previous_crc32c: int | None) -> LogEntry:
    """Return the entry in `data`, its payloads as views into it.

    `previous_crc32c` is the checksum of the entry before it, or None where that one is not known (the first read of a
    range). Raises `Corrupt` when any check fails and `UnsupportedFormat` for an entry of a newer release.
    """
    count, first_position, time_tick, last_confirmed, term, producer = _check_entry(data, previous_crc32c)
    view, at = memoryview(data), ENTRY_HEADER_BYTES
    messages: list[Message] = []
    try:
        for position in range(first_position, first_position + count):
            number, version, vchannel_len, ignored_len, header_len, payload_len, txn_id = _MESSAGE.unpack_from(view, at)
            vchannel_at = at + MESSAGE_HEADER_BYTES
            vchannel_end = vchannel_at + vchannel_len
            header_at = vchannel_end + ignored_len
            payload_at = header_at + header_len
            at = payload_at + payload_len
            kind, decode_header = _layouts[number, version]
            messages.append(
                Message(
                    type=kind,
                    header=decode_header(view[header_at:payload_at]),
                    vchannel=str(view[vchannel_at:vchannel_end], "utf-8"),
                    payload=view[payload_at:at],
                    txn_id=txn_id,
                    wal_name=wal_name,
                    position=position,
                    last_confirmed_position=last_confirmed,
                    time_tick=time_tick,
                    wal_term=term,
                )
            )
    except (msgspec.DecodeError, UnicodeDecodeError, struct.error, KeyError) as error:
        raise Corrupt(f"entry at position {first_position} passes its checksum but does not decode: {error}") from error
    if at != len(view):
        raise Corrupt(f"the messages of an entry of {len(view)} bytes end at byte {at}")
    return LogEntry(
        first_position=first_position,
        time_tick=time_tick,
        last_confirmed_position=last_confirmed,
        wal_term=term,
        crc32c=entry_crc32c(data),
        size_bytes=len(data),
        messages=tuple(messages),
        producer=producer,
    )


def _check_entry(data: bytes, previous_crc32c: int | None) -> tuple[int, int, int, int, int, ProducerStamp | None]:
    if len(data) < ENTRY_HEADER_BYTES:
        raise Corrupt(f"an entry of {len(data)} bytes is shorter than its header")
    magic, version, checksum, previous, count, position, tick, last_confirmed, term, *writer = _ENTRY.unpack_from(data)
    if magic != ENTRY_MAGIC:
        raise Corrupt("stored bytes are no log entry: wrong magic number")
    if version != ENTRY_FORMAT:
        raise UnsupportedFormat(f"entry at position {position} has format {version}, this release reads {ENTRY_FORMAT}")
    if crc32c(memoryview(data)[CHECKSUM_END:]) != checksum:
        raise Corrupt(f"entry at position {position} fails its checksum")
    if previous_crc32c is not None and previous != previous_crc32c:
        raise Corrupt(f"entry at position {position} does not follow the entry before it")
    if not 0 < count <= MESSAGES_PER_ENTRY_MAX:
        raise Corrupt(f"entry at position {position} has {count} messages")
    producer_id, sequence, epoch = writer
    producer = ProducerStamp(producer_id, epoch, sequence) if producer_id else None
    return count, position, tick, last_confirmed, term, producer


class _Versioned(msgspec.Struct):
    format: int


def decode_versioned(
    content: bytes, kind: type[T], version: int, name: str, *, decode: Callable[..., Any] = msgspec.msgpack.decode
) -> T:
    """Return the small record in `content`, whose field `format` says its version; `name` is only for errors.

    Raises `UnsupportedFormat` for another version, `Corrupt` for anything else.
    """
    try:
        found = decode(content, type=_Versioned).format
        if found != version:
            raise UnsupportedFormat(f"{name} has format {found}, this release reads {version}")
        record: T = decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"{name} does not decode: {error}") from error
    return record
