"""What a reader gets, as it crosses a connection: a scan's batch, its rows still packed. Pure."""

from typing import Any

import msgspec
import numpy as np

from scanner.scanner import ScanBatch
from wal.entry import BOOL, U2, U4, U8, PackedRows, RowBatch, Visible
from wal.errors import ProtocolError
from wal.headers import HEADERS, MESSAGE_VERSION, MessageType
from wal.message import Message, TransactionMessage

_encode = msgspec.msgpack.Encoder().encode
_headers = {
    int(kind): msgspec.msgpack.Decoder(header)
    for (kind, version), header in HEADERS.items()
    if version == MESSAGE_VERSION
}


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=0):
    kind: int
    header: bytes
    vchannel: str
    payload_bytes: int
    position: int
    last_confirmed: int
    time_tick: int
    txn_id: int
    wal_term: int
    first_row: int


class _Transaction(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    bodies: tuple[_Message, ...]
    commit: _Message


class _Rows(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    kind: int
    vchannel: str
    place: tuple[int, int, int, int]
    """Collection, partition, schema version, segment."""
    payload_bytes: int
    groups: bytes
    places: bytes
    parts: bytes
    starts: bytes
    counts: bytes
    offsets: bytes


class _Packed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    wal_term: int
    last_confirmed: int
    ticks: bytes
    positions: bytes
    counts: bytes
    transactions: bytes
    position: int
    batches: tuple[_Rows, ...]


class _Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    confirmed_tick: int
    resume_position: int
    visible: tuple[_Message | _Transaction | _Packed, ...]


_decode_batch = msgspec.msgpack.Decoder(_Batch).decode


def encode_batch(batch: ScanBatch) -> list[bytes | memoryview]:
    """Return a batch in parts: the length of what describes it and that, and the payloads in order, which are not copied."""
    payloads: list[bytes | memoryview] = []
    visible = tuple([_described(each, payloads) for each in batch.visible])
    head = _encode(_Batch(batch.confirmed_tick, batch.resume_position, visible))
    return [len(head).to_bytes(4, "little") + head, *payloads]


def decode_batch(data: memoryview, wal_name: str) -> ScanBatch:
    """Return what was encoded, its payloads as views into it. Raises `ProtocolError`."""
    try:
        payloads = 4 + int.from_bytes(data[:4], "little")
        batch = _decode_batch(data[4:payloads])
        made = _Maker(data, payloads, wal_name)
        return ScanBatch([made.visible(each) for each in batch.visible], batch.confirmed_tick, batch.resume_position)
    except (msgspec.DecodeError, ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"a batch of messages does not decode: {error}") from error


def _described(visible: Visible, payloads: list[bytes | memoryview]) -> _Message | _Transaction | _Packed:
    if isinstance(visible, Message):
        return _message(visible, payloads)
    if isinstance(visible, TransactionMessage):
        bodies = tuple([_message(body, payloads) for body in visible.bodies])
        return _Transaction(bodies, _message(visible.commit, payloads))
    batches = []
    for batch in visible.batches:
        payloads.append(batch.payload)
        place = batch.collection_id, batch.partition_id, batch.schema_version, batch.segment_id
        arrays = batch.groups, batch.places, batch.parts, batch.starts, batch.counts, batch.offsets
        columns = [array.tobytes() for array in arrays]
        batches.append(_Rows(batch.type, batch.vchannel, place, len(batch.payload), *columns))
    return _Packed(
        visible.wal_term,
        visible.last_confirmed_position,
        visible.ticks.tobytes(),
        visible.positions.tobytes(),
        visible.counts.tobytes(),
        visible.transactions.tobytes(),
        visible.position,
        tuple(batches),
    )


def _message(message: Message, payloads: list[bytes | memoryview]) -> _Message:
    payloads.append(message.payload)
    return _Message(
        message.type,
        _encode(message.header),
        message.vchannel,
        len(message.payload),
        message.position,
        message.last_confirmed_position,
        message.time_tick,
        message.txn_id,
        message.wal_term,
        message.first_row,
    )


class _Maker:
    """Makes what was described, taking payloads one after the other."""

    def __init__(self, data: memoryview, at: int, wal_name: str) -> None:
        self._data, self._at, self._wal_name = data, at, wal_name

    def visible(self, each: _Message | _Transaction | _Packed) -> Visible:
        """Return one message, transaction or packed rows."""
        if isinstance(each, _Message):
            return self._message(each)
        if isinstance(each, _Transaction):
            bodies, commit = tuple([self._message(body) for body in each.bodies]), self._message(each.commit)
            return TransactionMessage(
                wal_name=self._wal_name,
                position=commit.position,
                last_confirmed_position=commit.last_confirmed_position,
                time_tick=commit.time_tick,
                txn_id=commit.txn_id,
                bodies=bodies,
                commit=commit,
            )
        ticks = np.frombuffer(each.ticks, U8)
        return PackedRows(
            wal_name=self._wal_name,
            wal_term=each.wal_term,
            last_confirmed_position=each.last_confirmed,
            ticks=ticks,
            positions=np.frombuffer(each.positions, U8),
            counts=np.frombuffer(each.counts, U4),
            transactions=np.frombuffer(each.transactions, BOOL),
            batches=tuple([self._rows(rows) for rows in each.batches]),
            time_tick=int(ticks[-1]),
            position=each.position,
        )

    def _rows(self, rows: _Rows) -> RowBatch:
        collection_id, partition_id, schema_version, segment_id = rows.place
        return RowBatch(
            type=MessageType(rows.kind),
            vchannel=rows.vchannel,
            collection_id=collection_id,
            partition_id=partition_id,
            schema_version=schema_version,
            segment_id=segment_id,
            payload=self._payload(rows.payload_bytes),
            groups=np.frombuffer(rows.groups, U4),
            places=np.frombuffer(rows.places, U4),
            parts=np.frombuffer(rows.parts, U2),
            starts=np.frombuffer(rows.starts, U4),
            counts=np.frombuffer(rows.counts, U4),
            offsets=np.frombuffer(rows.offsets, U8),
        )

    def _message(self, message: _Message) -> Message:
        header: Any = _headers[message.kind].decode(message.header)
        return Message(
            type=MessageType(message.kind),
            header=header,
            vchannel=message.vchannel,
            payload=self._payload(message.payload_bytes),
            wal_term=message.wal_term,
            first_row=message.first_row,
            wal_name=self._wal_name,
            position=message.position,
            last_confirmed_position=message.last_confirmed,
            time_tick=message.time_tick,
            txn_id=message.txn_id,
        )

    def _payload(self, size_bytes: int) -> memoryview:
        start, self._at = self._at, self._at + size_bytes
        if size_bytes < 0 or self._at > len(self._data):
            raise ValueError("payloads end early")
        return self._data[start : self._at]
