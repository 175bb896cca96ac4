"""Encodes and decodes log entries: `docs/format.md`, section "Log entry", has the byte layout and
an example. No I/O.

The checksum covers everything after it, including the positions and the previous entry's checksum.
So it detects a moved, repeated or missing entry as reliably as a flipped bit.
"""

import struct
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import repeat
from typing import Any, TypeVar

import msgspec
import numpy as np
from google_crc32c import extend
from msgspec.structs import force_setattr

from wal.entry import U2, U4, U8, LogEntry, Numbers, PackedRows, RowBatch
from wal.errors import Corrupt, UnsupportedFormat
from wal.headers import DML, HEADERS, MESSAGE_VERSION
from wal.message import Message
from wal.position import ProducerStamp

T = TypeVar("T")

ENTRY_MAGIC = 0x4E53
"""`SN` on disk."""
ENTRY_FORMAT = 2

CHECKSUM_END = 8
_UNCHECKED = struct.Struct("<HHI")
_CHECKED = struct.Struct("<IIQQQQQQQII")
"""`_UNCHECKED`: magic, format, checksum. `_CHECKED`, which the checksum covers: previous checksum,
message count, first position, first and last tick, last confirmed, term, producer id, sequence,
epoch, group count with the flags in its highest byte.
"""
_RANGE = struct.Struct("<IIQ")
"""The start of the checksummed bytes, in topics' entries, too: previous checksum, message count,
first position.
"""
_MESSAGE = struct.Struct("<HBxHHIIQ")
"""Type, version, lengths of vchannel, properties (always 0), header and payload, transaction id."""
_BATCH = struct.Struct("<III")
"""Lengths of header and payload, boundary count."""
_PACKED = 1
_STAMPED = 2
"""Flags: `_PACKED`, the entry has rows instead of messages; `_STAMPED`, some of its groups have
their own stamps.
"""
_FLAGS_SHIFT = 24
_GROUPS_MASK = (1 << 24) - 1
_NO_STAMP = (0, 0, 0)

ENTRY_HEADER_BYTES = _UNCHECKED.size + _CHECKED.size
MESSAGE_HEADER_BYTES = _MESSAGE.size
MESSAGES_PER_ENTRY_MAX = 65_536
"""The limit of messages in one entry. The writer never exceeds it; the reader checks it before it
allocates anything.
"""

_encode = msgspec.msgpack.Encoder().encode
_layouts = {
    (int(kind), version): (kind, msgspec.msgpack.Decoder(header).decode)
    for (kind, version), header in HEADERS.items()
}
DAMAGED = (Corrupt, msgspec.DecodeError, struct.error, KeyError, ValueError, IndexError)
"""The errors of decoding damaged bytes; the caller converts them into an error that names the
entry.
"""
COPIED_BYTES_MAX = 4096
"""Up to this size copying a view is faster than wrapping it."""
_GROUP: tuple[np.dtype[Any], ...] = (U4, U4, np.dtype(np.uint8))
"""Columns of groups, an array of each: tick relative to the first, message count, whether it is a
transaction.
"""
_STAMPS: tuple[np.dtype[Any], ...] = (U8, U8, U4)
"""Columns of stamps, an array of each: producer id, sequence, epoch."""
_BOUNDARY: tuple[np.dtype[Any], ...] = (U4, U4, U2, U4, U8)
"""Columns of boundaries, consecutive arrays: group, place, part, rows, offset."""


class BatchHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The properties that all rows of a batch share. New fields are only ever appended."""

    type: int
    version: int
    vchannel: str
    collection_id: int
    partition_id: int
    schema_version: int
    segment_id: int


@lru_cache(maxsize=1024)
def _batch_header(kind: int, vchannel: str, *place: int) -> bytes:
    return _encode(BatchHeader(kind, MESSAGE_VERSION, vchannel, *place))


_decode_batch_header = msgspec.msgpack.Decoder(BatchHeader).decode


def crc32c(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """Return the CRC32C of `data` that follows bytes with checksum `before`. Releases the
    interpreter lock for large data.
    """
    if type(data) is bytes:
        return int(extend(before, data))
    # The library takes no memoryview, but other objects with a buffer.
    return int(
        extend(
            before, bytes(data) if len(data) < COPIED_BYTES_MAX else np.frombuffer(data, np.uint8)
        )
    )


def encode_entry(entry: LogEntry, *, previous_crc32c: int) -> bytes:
    """Return the bytes of an entry; sets the checksum and size of the entry."""
    checksum = 0
    parts = entry_parts(entry, previous_crc32c=previous_crc32c)
    for part in parts:
        checksum = crc32c(part, checksum)
    data = b"".join((_UNCHECKED.pack(ENTRY_MAGIC, ENTRY_FORMAT, checksum), *parts))  # the only copy
    force_setattr(entry, "crc32c", checksum)
    force_setattr(entry, "size_bytes", len(data))
    return data


def entry_parts(
    entry: LogEntry, *, previous_crc32c: int = 0, is_whole: bool = True
) -> list[bytes | memoryview]:
    """Return the checksummed bytes of an entry in parts. An entry that is not `is_whole` also
    stores where the rows of each boundary begin.
    """
    rows = entry.rows
    count = entry.count
    stamp = entry.producer
    assert entry.first_tick > 0, "messages are stamped with a tick before they are encoded"
    assert count <= MESSAGES_PER_ENTRY_MAX, "an entry has a bounded number of messages"
    flags, groups = (
        (0, 1) if rows is None else (_PACKED | (_STAMPED if rows.producers else 0), len(rows.ticks))
    )
    fixed = _CHECKED.pack(
        previous_crc32c,
        count,
        entry.first_position,
        entry.first_tick,
        entry.time_tick,
        entry.last_confirmed_position,
        entry.wal_term,
        *(_NO_STAMP if stamp is None else (stamp.producer_id, stamp.sequence, stamp.epoch)),
        groups | flags << _FLAGS_SHIFT,
    )
    return [
        fixed,
        *(
            encode_messages(entry.messages)
            if rows is None
            else _encode_rows(rows, is_whole=is_whole)
        ),
    ]


def encode_messages(messages: Iterable[Message]) -> list[bytes | memoryview]:
    """Return messages in the entry's format, in parts, without positions and ticks."""
    parts: list[bytes | memoryview] = []
    for message in messages:
        vchannel = message.vchannel.encode()
        header = _encode(message.header)
        payload = message.payload
        fixed = _MESSAGE.pack(
            message.type,
            MESSAGE_VERSION,
            len(vchannel),
            0,
            len(header),
            len(payload),
            message.txn_id,
        )
        parts += b"".join((fixed, vchannel, header)), payload
    return parts


def _encode_rows(rows: PackedRows, *, is_whole: bool) -> list[bytes | memoryview]:
    deltas = (rows.ticks - rows.ticks[0]).astype(U4)
    small = [deltas.tobytes(), rows.counts.tobytes(), rows.transactions.tobytes()]
    if rows.producers:
        stamps = [
            _NO_STAMP if each is None else (each.producer_id, each.sequence, each.epoch)
            for each in rows.producers
        ]
        small += (
            np.array(column, kind).tobytes()
            for column, kind in zip(zip(*stamps, strict=True), _STAMPS, strict=True)
        )
    parts: list[bytes | memoryview] = []
    for batch in rows.batches:
        place = batch.collection_id, batch.partition_id, batch.schema_version, batch.segment_id
        header = _batch_header(batch.type, batch.vchannel, *place)
        starts = () if is_whole else (batch.starts,)
        boundaries = batch.groups, batch.places, batch.parts, batch.counts, batch.offsets, *starts
        small += _BATCH.pack(len(header), len(batch.payload), len(batch.groups)), header
        small += [column.tobytes() for column in boundaries]
        parts += b"".join(small), batch.payload
        small = []
    return parts


def entry_crc32c(data: bytes) -> int:
    """Return the checksum an encoded entry carries, unchecked."""
    return int.from_bytes(data[4:8], "little")


def entry_range(data: bytes) -> tuple[int, int]:
    """Return the first and the last position in an encoded entry, unchecked."""
    _, count, first_position = _RANGE.unpack_from(data, CHECKSUM_END)
    return first_position, first_position + count - 1


def decode_entry(data: bytes, *, wal_name: str, previous_crc32c: int | None) -> LogEntry:
    """Return the entry in `data`; its payloads are views into `data`.

    `previous_crc32c` is the checksum of the entry before it, or None when unknown (the first entry
    of a range). Raises `Corrupt` when any check fails and `UnsupportedFormat` for an entry of a
    newer release.
    """
    (
        _,
        count,
        position,
        first_tick,
        tick,
        last_confirmed,
        term,
        producer_id,
        sequence,
        epoch,
        last,
    ) = check_head(
        data, _CHECKED, magic=ENTRY_MAGIC, version=ENTRY_FORMAT, previous_crc32c=previous_crc32c
    )
    groups = last & _GROUPS_MASK
    rows = None
    messages = tuple[Message, ...]()
    if not 0 < groups <= count or not first_tick <= tick:
        raise Corrupt(
            f"entry at position {position} has {count} messages of {groups} groups, ticks "
            f"{first_tick} to {tick}"
        )
    try:
        if last >> _FLAGS_SHIFT & _PACKED:
            rows = decode_rows(data, wal_name)
        else:
            places = zip(
                range(position, position + count),
                repeat(last_confirmed),
                repeat(tick),
                repeat(term),
            )
            messages = decode_messages(data, ENTRY_HEADER_BYTES, wal_name, places)
    except DAMAGED as error:
        raise Corrupt(
            f"entry at position {position} passes its checksum but does not decode: {error}"
        ) from error
    return LogEntry(
        first_position=position,
        last_position=position + count - 1,
        first_tick=first_tick,
        time_tick=tick,
        last_confirmed_position=last_confirmed,
        wal_term=term,
        crc32c=entry_crc32c(data),
        size_bytes=len(data),
        messages=messages,
        rows=rows,
        producer=ProducerStamp(producer_id, epoch, sequence) if producer_id else None,
    )


def decode_messages(
    data: bytes | memoryview, at: int, wal_name: str, places: Iterable[Any]
) -> tuple[Message, ...]:
    """Return the messages from byte `at` on; `places` yields position, last-confirmed position,
    tick and term of each. Raises `DAMAGED`.
    """
    view = memoryview(data)
    messages: list[Message] = []
    for position, last_confirmed, tick, term in places:
        number, version, vchannel_len, ignored_len, header_len, payload_len, txn_id = (
            _MESSAGE.unpack_from(view, at)
        )
        vchannel_end = at + MESSAGE_HEADER_BYTES + vchannel_len
        header_at = vchannel_end + ignored_len
        payload_at = header_at + header_len
        at = payload_at + payload_len
        kind, decode_header = _layouts[number, version]
        messages.append(
            Message(
                type=kind,
                header=decode_header(view[header_at:payload_at]),
                vchannel=str(view[vchannel_end - vchannel_len : vchannel_end], "utf-8"),
                payload=view[payload_at:at],
                txn_id=txn_id,
                wal_name=wal_name,
                position=position,
                last_confirmed_position=last_confirmed,
                time_tick=tick,
                wal_term=term,
            )
        )
    _check_end(at, data)
    return tuple(messages)


def decode_rows(data: bytes | memoryview, wal_name: str, *, is_whole: bool = True) -> PackedRows:
    """Return the rows of an entry after all checks except the checksum; see `entry_parts`. Raises
    `DAMAGED`.
    """
    _, count, position, first_tick, tick, last_confirmed, term, *_, last = _CHECKED.unpack_from(
        data, CHECKSUM_END
    )
    group_count = last & _GROUPS_MASK
    flags = last >> _FLAGS_SHIFT
    view = memoryview(data)
    at = ENTRY_HEADER_BYTES

    def columns(length: int, *kinds: np.dtype[Any]) -> list[Numbers]:
        nonlocal at
        # a copy, because views would keep the whole entry alive
        part = data[at : at + length * sum([kind.itemsize for kind in kinds])]
        at += len(part)
        found = []
        start = 0
        for kind in kinds:
            found.append(np.frombuffer(part, kind, length, start))
            start += length * kind.itemsize
        return found

    since_first, counts, transactions = columns(group_count, *_GROUP)
    producers: tuple[ProducerStamp | None, ...] = ()
    if flags & _STAMPED:
        producers = tuple(
            ProducerStamp(of, epoch, sequence) if of else None
            for of, sequence, epoch in zip(
                *[each.tolist() for each in columns(group_count, *_STAMPS)], strict=True
            )
        )
    ends = np.add.accumulate(counts, dtype=U8)
    if (
        ends.item(-1) != count
        or since_first.item(-1) != tick - first_tick
        or not _ascend(since_first)
    ):
        raise Corrupt(f"the groups of the entry at position {position} do not add up")
    starts = (ends - counts).astype(U4)
    batches = list[RowBatch]()
    messages = 0
    while at < len(data):
        header_len, payload_len, boundaries = _BATCH.unpack_from(data, at)
        at += _BATCH.size + header_len
        header = _decode_batch_header(view[at - header_len : at])
        groups, places, parts, rows, offsets, *given = columns(
            boundaries, *_BOUNDARY, *(() if is_whole else (U4,))
        )
        payload = view[at : at + payload_len]
        at += payload_len
        kind, _ = _layouts[header.type, header.version]
        if (
            not boundaries
            or kind not in DML
            or groups.item(-1) >= group_count
            or np.count_nonzero(places >= counts[groups])
            or not _ascend(starts[groups] + places)
        ):
            raise Corrupt(
                f"a batch of the entry at position {position} has rows outside its groups"
            )
        (row_starts,) = given or (np.add.accumulate(rows, dtype=U4) - rows,)
        messages += boundaries
        batches.append(
            RowBatch(
                type=kind,
                vchannel=header.vchannel,
                collection_id=header.collection_id,
                partition_id=header.partition_id,
                schema_version=header.schema_version,
                segment_id=header.segment_id,
                payload=payload,
                groups=groups,
                places=places,
                parts=parts,
                starts=row_starts,
                counts=rows,
                offsets=offsets,
                rows=sum(rows.tolist()),
            )
        )
    _check_end(at, data)
    if is_whole and messages != count - 2 * np.count_nonzero(transactions):
        raise Corrupt(f"the entry at position {position} has messages without rows")
    return PackedRows(
        ticks=np.add(since_first, first_tick, dtype=U8),
        positions=np.add(starts, position, dtype=U8),
        counts=counts,
        transactions=transactions.astype(bool),
        batches=tuple(batches),
        producers=producers,
        wal_name=wal_name,
        wal_term=term,
        last_confirmed_position=last_confirmed,
        time_tick=tick,
        position=position + count - 1,
    )


def _ascend(numbers: Numbers) -> bool:
    return not np.count_nonzero(numbers[1:] <= numbers[:-1])


def _check_end(at: int, data: bytes | memoryview) -> None:
    if at != len(data):
        raise Corrupt(f"the content of an entry of {len(data)} bytes ends at byte {at}")


def check_head(
    data: bytes, layout: struct.Struct, *, magic: int, version: int, previous_crc32c: int | None
) -> tuple[Any, ...]:
    """Return the fields of an entry's head after its checksum: previous checksum, message count,
    first position, then the rest of `layout`.

    Raises `Corrupt` when any check fails and `UnsupportedFormat` for an entry of a newer release.
    """
    if len(data) < CHECKSUM_END + layout.size:
        raise Corrupt(f"an entry of {len(data)} bytes is shorter than its header")
    found_magic, found_version, checksum = _UNCHECKED.unpack_from(data)
    previous, count, position, *_ = fields = layout.unpack_from(data, CHECKSUM_END)
    if found_magic != magic:
        raise Corrupt("stored bytes are not an entry: wrong magic number")
    if found_version != version:
        raise UnsupportedFormat(
            f"entry at position {position} has format {found_version}, this release reads {version}"
        )
    if crc32c(memoryview(data)[CHECKSUM_END:]) != checksum:
        raise Corrupt(f"entry at position {position} fails its checksum")
    if previous_crc32c is not None and previous != previous_crc32c:
        raise Corrupt(f"entry at position {position} does not follow the entry before it")
    if not 0 < count <= MESSAGES_PER_ENTRY_MAX:
        raise Corrupt(f"entry at position {position} has {count} messages")
    return fields


class _Versioned(msgspec.Struct):
    format: int


def decode_versioned(
    content: bytes,
    kind: type[T],
    version: int,
    name: str,
    *,
    decode: Callable[..., Any] = msgspec.msgpack.decode,
) -> T:
    """Return the small record in `content`; its field `format` is its version. `name` is only for
    errors.

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
