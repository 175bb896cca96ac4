"""What a reader gets, as it crosses a connection: a scan's batch, its rows still packed. Pure."""

from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from scanner.scanner import ScanBatch
from wal.entry import BOOL, U2, U4, U8, PackedRows, RowBatch, Visible, transaction_of
from wal.errors import ProtocolError
from wal.headers import HEADERS, MESSAGE_VERSION, MessageType
from wal.message import Message, TransactionMessage

_encode = msgspec.msgpack.Encoder().encode
_headers = {
    int(kind): msgspec.msgpack.Decoder(header)
    for (kind, version), header in HEADERS.items()
    if version == MESSAGE_VERSION
}
_FACTS = ("vchannel", "position", "last_confirmed_position", "time_tick", "txn_id", "wal_term", "first_row")
_PLACE = ("collection_id", "partition_id", "schema_version", "segment_id")
_ARRAYS: dict[str, np.dtype[Any]] = {"groups": U4, "places": U4, "parts": U2, "starts": U4, "counts": U4, "offsets": U8}


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=0):
    kind: int
    header: bytes
    payload_bytes: int
    facts: tuple[str, int, int, int, int, int, int]
    """As `_FACTS` names them."""


class _Transaction(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    bodies: tuple[_Message, ...]
    commit: _Message


class _Rows(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    kind: int
    vchannel: str
    place: tuple[int, int, int, int]
    """As `_PLACE` names it."""
    payload_bytes: int
    arrays: tuple[bytes, ...]
    """As `_ARRAYS` names them."""


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
    ticks, positions = visible.ticks.tobytes(), visible.positions.tobytes()
    counts, transactions = visible.counts.tobytes(), visible.transactions.tobytes()
    confirmed, batches = visible.last_confirmed_position, tuple([_rows(batch, payloads) for batch in visible.batches])
    return _Packed(visible.wal_term, confirmed, ticks, positions, counts, transactions, visible.position, batches)


def _rows(batch: RowBatch, payloads: list[bytes | memoryview]) -> _Rows:
    payloads.append(batch.payload)
    place, arrays = attrgetter(*_PLACE)(batch), tuple([getattr(batch, name).tobytes() for name in _ARRAYS])
    return _Rows(batch.type, batch.vchannel, place, len(batch.payload), arrays)


def _message(message: Message, payloads: list[bytes | memoryview]) -> _Message:
    payloads.append(message.payload)
    return _Message(message.type, _encode(message.header), len(message.payload), attrgetter(*_FACTS)(message))


class _Maker:
    """Makes what was described, taking payloads one after the other."""

    def __init__(self, data: memoryview, at: int, wal_name: str) -> None:
        self._data, self._at, self._wal_name = data, at, wal_name

    def visible(self, each: _Message | _Transaction | _Packed) -> Visible:
        """Return one message, transaction or packed rows."""
        if isinstance(each, _Message):
            return self._message(each)
        if isinstance(each, _Transaction):
            return transaction_of([self._message(body) for body in each.bodies], self._message(each.commit))
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
        named: dict[str, Any] = dict(zip(_PLACE, rows.place, strict=True))
        for (name, kind), array in zip(_ARRAYS.items(), rows.arrays, strict=True):
            named[name] = np.frombuffer(array, kind)
        payload = self._payload(rows.payload_bytes)
        count = int(named["counts"].sum())
        return RowBatch(type=MessageType(rows.kind), vchannel=rows.vchannel, payload=payload, rows=count, **named)

    def _message(self, message: _Message) -> Message:
        facts: dict[str, Any] = dict(zip(_FACTS, message.facts, strict=True))
        header: Any = _headers[message.kind].decode(message.header)
        payload = self._payload(message.payload_bytes)
        return Message(type=MessageType(message.kind), header=header, payload=payload, wal_name=self._wal_name, **facts)

    def _payload(self, size_bytes: int) -> memoryview:
        start, self._at = self._at, self._at + size_bytes
        if size_bytes < 0 or self._at > len(self._data):
            raise ValueError("payloads end early")
        return self._data[start : self._at]
