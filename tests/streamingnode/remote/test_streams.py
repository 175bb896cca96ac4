"""What a reader gets crosses a connection unchanged; bytes that were damaged are refused, or are a
batch after all.
"""

from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamingnode as sn
from scanner.deliver_policy import DeliverPolicy
from scanner.scanner import ScanBatch
from streamingnode.remote import streams
from streamingnode.remote.streams import decode_batch
from tests.parts_of import parts_of
from tests.scanner.journal import messages_in
from tests.streamingnode.remote.nodes import SCHEMA, SETTINGS, SHARDS, rows
from wal.entry import PackedRows, RowBatch, row_batches
from wal.errors import ProtocolError
from wal.message import Message, TransactionMessage

WAL_NAME = "rocks"


def encode_batch(batch: ScanBatch) -> bytes:
    """Return a batch as it is on the wire."""
    return b"".join(streams.encode_batch(batch, channels_of(batch)))


def channels_of(batch: ScanBatch) -> set[str]:
    """Return the vchannels that a batch has rows of."""
    return {rows.vchannel for each in batch.visible for rows, _ in row_batches(each)}


async def scanned() -> list[ScanBatch]:
    """Return what a scanner delivers of all kinds that there are."""
    with TemporaryDirectory() as place:  # on disk, where writes wait for each other
        return await _scanned(Path(place))


async def _scanned(place: Path) -> list[ScanBatch]:
    async with sn.open_node(place, **SETTINGS) as node:
        await node.create_collection("c", SCHEMA, primary_key="id", shards=SHARDS)
        await node.create_partition("c", "eu")
        await node.insert("c", rows(1))
        await node.insert("c", rows(*range(2, 30)))
        await node.delete("c", [1, 2])
        async with anyio.create_task_group() as tasks:  # they go together
            for key in range(100, 140):
                tasks.start_soon(node.insert, "c", rows(key))
                tasks.start_soon(node.upsert, "c", rows(key + 100))
                tasks.start_soon(node.delete, "c", [key - 100])
        async with node.transaction() as txn:
            await txn.insert("c", rows(*range(300, 310)))
            await txn.delete("c", [300])
        async with node.transaction() as txn:
            for key in range(6):
                await txn.insert("c", [{"id": 400 + key, "item": "x" * 900_000}])
        await node.drop_partition("c", "eu")
        until = await node.consistent_tick()
        return [batch async for batch in _batches(node, until)]


async def _batches(node: Any, until: int) -> AsyncIterator[ScanBatch]:
    async with parts_of(node).channel.read(DeliverPolicy.all()) as scanner:
        while True:
            batch = await scanner.next_batch()
            yield batch
            if batch.confirmed_tick >= until:
                return


@cache
def batches() -> list[ScanBatch]:
    return anyio.run(scanned)


@cache
def small() -> list[bytes]:
    """Return what was encoded, without the long transaction and as single batches: to be
    damaged.
    """
    parts = [
        ScanBatch([each], batch.confirmed_tick, batch.resume_position)
        for batch in batches()
        for each in batch.visible
    ]
    found = [encoded for each in parts if len(encoded := encode_batch(each)) < 40_000]
    idle = ScanBatch([], 7, 8)
    return [encode_batch(idle), *found]


def fields_of(value: object) -> list[str]:
    return [*getattr(value, "__struct_fields__", ()), *getattr(value, "__dataclass_fields__", ())]


def same(one: object, other: object) -> bool:
    """Whether two parts of a batch are the same, to the last array."""
    if isinstance(one, PackedRows | RowBatch):
        assert type(one) is type(other)
        names = fields_of(one)
        return all(
            same(getattr(one, name), getattr(other, name)) for name in names if name != "producers"
        )
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and one.tolist() == other.tolist()
        )
    if isinstance(one, bytes | memoryview):
        return isinstance(other, bytes | memoryview) and bytes(one) == bytes(other)
    if isinstance(one, Message):
        return all(same(getattr(one, name), getattr(other, name)) for name in fields_of(one))
    if isinstance(one, tuple | list):
        return isinstance(other, tuple | list) and all(
            same(a, b) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, TransactionMessage):
        assert isinstance(other, TransactionMessage)
        return (
            same(one.bodies, other.bodies)
            and same(one.commit, other.commit)
            and one.time_tick == other.time_tick
        )
    return one == other


def test_the_batches_are_of_all_kinds() -> None:
    visible = [each for batch in batches() for each in batch.visible]
    packed = [each for each in visible if isinstance(each, PackedRows)]
    assert {type(each) for each in visible} == {Message, TransactionMessage, PackedRows}
    assert any(len(each.ticks) > 1 for each in packed)
    assert any(len({batch.vchannel for batch in each.batches}) == SHARDS for each in packed)
    assert len(small()) > 10


def test_what_a_scanner_delivers_is_the_same_after_a_connection() -> None:
    for batch in batches():
        found = decode_batch(memoryview(encode_batch(batch)), WAL_NAME)
        assert (found.confirmed_tick, found.resume_position) == (
            batch.confirmed_tick,
            batch.resume_position,
        )
        assert same(found.visible, batch.visible)


def test_rows_that_crossed_a_connection_are_read_as_those_that_did_not() -> None:
    for batch in batches():
        found = decode_batch(memoryview(encode_batch(batch)), WAL_NAME)
        for ours, theirs in zip(messages_in(batch), messages_in(found), strict=True):
            assert repr(ours)[:200] == repr(theirs)[:200]
            if isinstance(ours, Message):
                assert same(ours, theirs)


@given(data=st.data())
def test_a_batch_that_was_cut_is_refused(data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from(small()))
    at = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProtocolError):
        decode_batch(memoryview(whole[:at]), WAL_NAME)


@given(data=st.data())
def test_a_batch_with_flipped_bits_is_refused_or_a_batch(data: st.DataObject) -> None:
    damaged = bytearray(data.draw(st.sampled_from(small())))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, min(400, len(damaged)) - 1))] ^= 1 << data.draw(
            st.integers(0, 7)
        )
    _decodes_or_is_refused(bytes(damaged))


@given(garbage=st.binary(max_size=200), length=st.integers(0, 2**64 - 1))
def test_garbage_is_refused_or_a_batch(garbage: bytes, length: int) -> None:
    head = b"".join(streams.encode_batch(ScanBatch([], 7, 8), ()))[:-4] + b"\1\0\0\0"
    _decodes_or_is_refused(garbage)
    _decodes_or_is_refused(head + length.to_bytes(8, "little") + garbage)
    _decodes_or_is_refused(head + len(garbage).to_bytes(8, "little") + garbage)


def test_every_single_flipped_bit_is_refused_or_a_batch() -> None:
    """Hypothesis draws few of them; of one batch of each kind these are all that there are."""
    failed: dict[str, int] = {}
    for whole in small()[:6]:
        for bit in range(min(8 * len(whole), 6_000)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            try:
                _decodes_or_is_refused(bytes(damaged))
            except Exception as error:
                failed[type(error).__name__] = failed.get(type(error).__name__, 0) + 1
    assert failed == {}


def _decodes_or_is_refused(data: bytes) -> None:
    try:
        found = decode_batch(memoryview(data), WAL_NAME)
    except ProtocolError:
        return
    assert isinstance(found.visible, list)
    assert {type(each) for each in found.visible} <= {Message, TransactionMessage, PackedRows}


def test_arrow_of_a_batch_is_read_without_a_copy_of_its_payload() -> None:
    batch = next(
        batch for batch in batches() if any(isinstance(each, PackedRows) for each in batch.visible)
    )
    data = encode_batch(batch)
    found = decode_batch(memoryview(data), WAL_NAME)
    (rows_of, *_) = [each for each in found.visible if isinstance(each, PackedRows)]
    payload = rows_of.batches[0].payload
    assert isinstance(payload, memoryview)
    assert payload.obj is data
    assert (
        pa.ipc.read_record_batch(pa.py_buffer(payload), SCHEMA).num_rows == rows_of.batches[0].rows
    )
