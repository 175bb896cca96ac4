"""The worked examples of docs/format.md are what the codec writes."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.wal.entries import entry_of, into_entry, stamped
from tests.wal.packed import FakeTarget, insert_group, pack_of, piece, transaction_group
from wal.append import Pack
from wal.codec import (
    ENTRY_HEADER_BYTES,
    MESSAGE_HEADER_BYTES,
    decode_entry,
    encode_entry,
    entry_crc32c,
)
from wal.entry import LogEntry
from wal.headers import BeginTxnHeader, DeleteHeader, InsertHeader, MessageType
from wal.message import MutableMessage
from wal.position import ProducerStamp

FORMAT = Path(__file__).parents[2] / "docs" / "format.md"
TICK = 469_762_048_000_000
KINDS = ["messages", "rows"]


def documented_lines(kind: str) -> list[tuple[int, bytes]]:
    """Return the offset that each line of an example names, and its bytes."""
    (block,) = re.findall(
        rf"test_codec_example.py: {kind} -->\n```\n(.*?)```", FORMAT.read_text(), re.DOTALL
    )
    lines = [line.split("  ") for line in block.splitlines()]
    return [(int(offset), bytes.fromhex(found)) for offset, found, *_ in lines]


def documented_bytes(kind: str) -> bytes:
    return b"".join(found for _, found in documented_lines(kind))


def decoded(kind: str) -> LogEntry:
    previous = 0 if kind == "messages" else entry_crc32c(documented_bytes("messages"))
    return decode_entry(documented_bytes(kind), wal_name="rocks", previous_crc32c=previous)


def example_of_messages() -> bytes:
    header = BeginTxnHeader(keepalive_ms=10_000)
    message = MutableMessage(MessageType.BEGIN_TXN, header, txn_id=TICK, time_tick=TICK, wal_term=2)
    return encode_entry(
        into_entry([message], first_position=1, producer=ProducerStamp(1, 2, 7)), previous_crc32c=0
    )


def example_of_rows() -> bytes:
    target = FakeTarget(vchannels=("p0_1v0",))
    deletes = FakeTarget(MessageType.DELETE, vchannels=("p0_1v0",))
    insert = insert_group(target, data=b"r1")
    insert.producer = ProducerStamp(9, 1, 4)
    transaction = transaction_group(piece(deletes, (0, b"k1")), piece(target, (0, b"r2")))
    pack: Pack = stamped(pack_of(insert, transaction), tick=TICK + 1, last_confirmed=1, term=2)
    previous = entry_crc32c(example_of_messages())
    return pack.encode("rocks", first_position=2, previous_crc32c=previous)


def test_the_documented_examples_are_byte_for_byte_what_is_written() -> None:
    assert documented_bytes("messages") == example_of_messages()
    assert documented_bytes("rows") == example_of_rows()


@pytest.mark.parametrize("kind", KINDS)
def test_each_line_of_an_example_begins_where_it_says(kind: str) -> None:
    at = 0
    for offset, found in documented_lines(kind):
        assert offset == at
        at += len(found)


def test_the_documented_messages_read_back_as_described() -> None:
    entry = decoded("messages")
    assert (entry.first_position, entry.time_tick, entry.wal_term) == (1, TICK, 2)
    assert entry.messages[0].header == BeginTxnHeader(keepalive_ms=10_000)
    assert entry.producer == ProducerStamp(producer_id=1, epoch=2, sequence=7)


def test_the_documented_rows_read_back_as_described() -> None:
    entry = decoded("rows")
    assert (entry.first_position, entry.last_position, entry.last_confirmed_position) == (2, 6, 1)
    assert (entry.first_tick, entry.time_tick, entry.wal_term) == (TICK + 1, TICK + 2, 2)
    assert entry.producer is None
    assert entry.rows is not None
    assert entry.rows.producers == (ProducerStamp(producer_id=9, epoch=1, sequence=4), None)
    insert, transaction = entry.rows.messages()
    (body,) = insert.bodies
    assert (body.position, body.header) == (2, InsertHeader(1, 2, 1, 1, 7, 0))
    assert (transaction.position, transaction.txn_id) == (6, TICK + 2)
    assert [(each.position, each.header) for each in transaction.bodies] == [
        (4, DeleteHeader(1, 1, 1)),
        (5, InsertHeader(1, 2, 1, 1, 7, 1)),
    ]


def test_the_documented_header_sizes_are_the_real_ones() -> None:
    text = FORMAT.read_text()
    assert f"An entry begins with {ENTRY_HEADER_BYTES} bytes of header" in text
    assert f"Each message is {MESSAGE_HEADER_BYTES} bytes" in text


@pytest.mark.parametrize("groups", [2, 5])
@pytest.mark.parametrize("has_stamps", [False, True])
def test_the_documented_sizes_of_a_group_and_a_boundary_are_the_real_ones(
    groups: int, has_stamps: bool
) -> None:
    text = FORMAT.read_text()
    (group_bytes, stamp_bytes) = re.findall(
        r"A group takes (\d+) bytes, (\d+) more with stamps", text
    )[0]
    (boundary_bytes,) = re.findall(r"A boundary takes (\d+) bytes", text)
    grown = _size_bytes(groups + 1, has_stamps=has_stamps) - _size_bytes(
        groups, has_stamps=has_stamps
    )
    assert grown == int(group_bytes) + int(boundary_bytes) + has_stamps * int(stamp_bytes) + len(
        b"row"
    )


def _size_bytes(groups: int, *, has_stamps: bool) -> int:
    target = FakeTarget()
    pack = stamped(pack_of(*[insert_group(target) for _ in range(groups)]), tick=TICK)
    for group in pack.groups:
        group.producer = ProducerStamp(9, 1, 4) if has_stamps else None
    rows = entry_of(pack, 1).rows
    assert rows is not None
    assert np.all(rows.counts == 1)
    return entry_of(pack, 1).size_bytes
