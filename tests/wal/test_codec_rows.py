"""Packed rows as bytes: what was packed comes back, and nothing that is damaged or cannot be is
taken for rows.
"""

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wal.entries import comparable, comparable_rows, stamped
from tests.wal.packed import (
    FakeTarget,
    delete_group,
    insert_group,
    pack_of,
    piece,
    transaction_group,
)
from tests.wal.random_packs import groups_that_pack, producers
from wal.append import AppendGroup, Pack
from wal.codec import ENTRY_HEADER_BYTES, crc32c, decode_entry, encode_entry
from wal.entry import U8, LogEntry, PackedRows
from wal.errors import Corrupt, UnsupportedFormat
from wal.headers import MessageType
from wal.position import ProducerStamp

WAL_NAME = "rocks"


def encode(pack: Pack, *, first_position: int = 5, previous_crc32c: int = 7) -> bytes:
    """Return a stamped pack as an entry."""
    return pack.encode(WAL_NAME, first_position=first_position, previous_crc32c=previous_crc32c)


def encode_rows(rows: PackedRows) -> bytes:
    """Return rows as an entry."""
    entry = LogEntry(
        first_position=int(rows.positions[0]),
        last_position=rows.position,
        first_tick=int(rows.ticks[0]),
        time_tick=rows.time_tick,
        last_confirmed_position=rows.last_confirmed_position,
        wal_term=rows.wal_term,
        rows=rows,
    )
    return encode_entry(entry, previous_crc32c=0)


def a_pack() -> Pack:
    """Return two inserts of one target, the second of a producer, then a transaction of a delete
    and an insert.
    """
    target = FakeTarget(vchannels=("p0_1v0", "p0_1v1"))
    deletes = FakeTarget(MessageType.DELETE, vchannels=target.vchannels)
    plain = insert_group(target, data=b"one")
    stamped_one = insert_group(target, rows=2, data=b"two")
    stamped_one.producer = ProducerStamp(9, 1, 4)
    return pack_of(
        plain,
        stamped_one,
        transaction_group(piece(deletes, (1, b"key")), piece(target, (1, b"new"))),
    )


def rows_of(pack: Pack) -> PackedRows:
    encode(stamped(pack, tick=100))
    assert pack.entry is not None
    assert pack.entry.rows is not None
    return pack.entry.rows


@given(
    groups=groups_that_pack(),
    tick=st.integers(1, 2**62),
    first_position=st.integers(1, 2**62),
    last_confirmed=st.none() | st.integers(1, 2**62),
    term=st.integers(1, 2**63 - 1),
    previous=st.integers(0, 2**32 - 1),
    producer=producers,
)
def test_a_pack_decodes_to_what_was_encoded(
    groups: list[AppendGroup],
    tick: int,
    first_position: int,
    last_confirmed: int | None,
    term: int,
    previous: int,
    producer: ProducerStamp | None,
) -> None:
    groups[0].producer = producer
    pack = stamped(pack_of(*groups), tick=tick, last_confirmed=last_confirmed, term=term)
    data = encode(pack, first_position=first_position, previous_crc32c=previous)
    entry = decode_entry(data, wal_name=WAL_NAME, previous_crc32c=previous)
    assert pack.entry is not None
    assert comparable(entry) == comparable(pack.entry)
    assert (entry.producer, entry.wal_term, entry.count) == (None, term, pack.message_count)
    assert entry.last_confirmed_position == (last_confirmed or first_position)
    assert entry.rows is not None
    assert entry.rows.producers == (
        tuple(each.producer for each in groups) if any(g.producer for g in groups) else ()
    )


@given(groups=groups_that_pack(), gaps=st.lists(st.integers(1, 2**28), min_size=8, max_size=8))
def test_ticks_need_not_follow_one_another(groups: list[AppendGroup], gaps: list[int]) -> None:
    ticks = 2**50 + np.cumsum(np.array(gaps[: len(groups)], U8))
    rows = msgspec.structs.replace(rows_of(pack_of(*groups)), ticks=ticks, time_tick=int(ticks[-1]))
    entry = decode_entry(encode_rows(rows), wal_name=WAL_NAME, previous_crc32c=0)
    assert entry.rows is not None
    assert comparable_rows(entry.rows) == comparable_rows(rows)
    assert (entry.first_tick, entry.time_tick) == (int(rows.ticks[0]), int(rows.ticks[-1]))


def test_decoded_payloads_are_views_of_what_was_read_and_boundaries_are_not() -> None:
    """Whoever keeps a small batch of a large entry copies its payload, and has then let go of the
    entry.
    """
    data = encode(stamped(pack_of(insert_group(data=bytes(10_000)), delete_group()), tick=5))
    entry = decode_entry(data, wal_name=WAL_NAME, previous_crc32c=None)
    assert entry.rows is not None
    batch, _ = entry.rows.batches
    assert isinstance(batch.payload, memoryview)
    assert batch.payload.obj is data
    for column in (
        batch.groups,
        batch.places,
        batch.parts,
        batch.starts,
        batch.counts,
        batch.offsets,
    ):
        assert column.base is None or len(column.base) < 100


def test_every_single_bit_flip_of_a_pack_is_caught() -> None:
    data = encode(stamped(a_pack(), tick=100))
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((Corrupt, UnsupportedFormat)):
            decode_entry(bytes(flipped), wal_name=WAL_NAME, previous_crc32c=7)


def test_every_other_byte_at_every_place_of_a_pack_is_caught() -> None:
    data = encode(stamped(pack_of(insert_group(), insert_group()), tick=100))
    for at in range(len(data)):
        for value in set(range(256)) - {data[at]}:
            with pytest.raises((Corrupt, UnsupportedFormat)):
                decode_entry(
                    data[:at] + bytes([value]) + data[at + 1 :],
                    wal_name=WAL_NAME,
                    previous_crc32c=None,
                )


@pytest.mark.parametrize("signed", [False, True], ids=["as it is", "with a checksum that fits"])
def test_every_shortened_pack_is_caught(signed: bool) -> None:
    data = encode(stamped(a_pack(), tick=100))
    for end in range(len(data)):
        cut = sign(data[:end]) if signed and end > ENTRY_HEADER_BYTES else data[:end]
        with pytest.raises(Corrupt):
            decode_entry(cut, wal_name=WAL_NAME, previous_crc32c=None)


@given(end=st.binary(min_size=1, max_size=40))
def test_bytes_after_the_last_batch_are_caught(end: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_entry(
            sign(encode(stamped(a_pack(), tick=100)) + end), wal_name=WAL_NAME, previous_crc32c=None
        )


def test_a_pack_out_of_its_place_is_caught() -> None:
    data = encode(stamped(a_pack(), tick=100), previous_crc32c=7)
    with pytest.raises(Corrupt, match="does not follow"):
        decode_entry(data, wal_name=WAL_NAME, previous_crc32c=8)


def test_a_pack_of_a_newer_format_is_not_guessed_at() -> None:
    newer = bytearray(encode(stamped(a_pack(), tick=100)))
    newer[2] = 3
    with pytest.raises(UnsupportedFormat, match="format 3, this release reads 2"):
        decode_entry(bytes(newer), wal_name=WAL_NAME, previous_crc32c=None)


# --- a checksum that fits over what nobody wrote --------------------------------------------------


def sign(data: bytes) -> bytes:
    """Return the bytes of an entry with a checksum that fits them."""
    return data[:4] + struct.pack("<I", crc32c(data[8:])) + data[8:]


def forged(**changes: Any) -> bytes:
    """Return `a_pack` with other columns of its rows, of which the header still says what they
    were.
    """
    rows = rows_of(a_pack())
    true = encode_rows(rows)
    false = encode_rows(msgspec.structs.replace(rows, **changes))
    return sign(true[:ENTRY_HEADER_BYTES] + false[ENTRY_HEADER_BYTES:])


def other_batch(number: int = 0, **changes: Any) -> bytes:
    """Return `a_pack` with other columns of one of its batches."""
    batches = list(rows_of(a_pack()).batches)
    batches[number] = msgspec.structs.replace(batches[number], **changes)
    return forged(batches=tuple(batches))


def u4(*values: int) -> Any:
    return np.array(values, np.uint32)


def test_forging_without_a_change_gives_what_is_read() -> None:
    assert decode_entry(forged(), wal_name=WAL_NAME, previous_crc32c=None).count == 6


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(lambda: forged(counts=u4(1, 1, 5)), id="more messages than the entry has"),
        pytest.param(lambda: forged(counts=u4(1, 1, 3)), id="fewer messages than the entry has"),
        pytest.param(
            lambda: forged(counts=u4(2**32 - 1, 3, 4)), id="counts that only add up modulo 2^32"
        ),
        pytest.param(lambda: forged(ticks=np.array([100, 100, 102], U8)), id="a tick twice"),
        pytest.param(
            lambda: forged(ticks=np.array([100, 103, 102], U8)), id="ticks that do not ascend"
        ),
        pytest.param(lambda: forged(ticks=np.array([100, 101, 103], U8)), id="another last tick"),
    ],
)
def test_groups_that_do_not_add_up_are_corrupt(forge: Callable[[], bytes]) -> None:
    with pytest.raises(Corrupt, match="do not add up"):
        decode_entry(forge(), wal_name=WAL_NAME, previous_crc32c=None)


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(lambda: other_batch(groups=u4(0, 3)), id="of a group behind the last one"),
        pytest.param(
            lambda: other_batch(groups=u4(0, 2**32 - 1)), id="of a group far behind the last one"
        ),
        pytest.param(lambda: other_batch(places=u4(0, 1)), id="of a place behind its group"),
        pytest.param(
            lambda: other_batch(places=u4(0, 2**32 - 1)), id="of a place far behind its group"
        ),
        pytest.param(lambda: other_batch(groups=u4(1, 0)), id="out of order"),
        pytest.param(lambda: other_batch(groups=u4(1, 1)), id="of one message twice"),
        pytest.param(lambda: other_batch(type=MessageType.CUT), id="of what is no kind of rows"),
        pytest.param(
            lambda: other_batch(groups=u4(), places=u4(), parts=u4(), counts=u4(), offsets=u4()),
            id="without any",
        ),
    ],
)
def test_boundaries_of_no_message_are_corrupt(forge: Callable[[], bytes]) -> None:
    with pytest.raises(Corrupt, match="rows outside its groups"):
        decode_entry(forge(), wal_name=WAL_NAME, previous_crc32c=None)


def test_a_message_without_rows_is_corrupt() -> None:
    rows = rows_of(a_pack())
    with pytest.raises(Corrupt, match="messages without rows"):
        decode_entry(forged(batches=rows.batches[:-1]), wal_name=WAL_NAME, previous_crc32c=None)


def test_a_batch_of_an_unknown_kind_is_corrupt() -> None:
    for kind in (0, 77, -1, "insert"):
        with pytest.raises(Corrupt, match="does not decode"):
            decode_entry(other_batch(type=kind), wal_name=WAL_NAME, previous_crc32c=None)


@pytest.mark.parametrize("at", [0, 4, 8], ids=["header", "payload", "boundaries"])
@pytest.mark.parametrize("length", [0, 1, 2**16, 2**31, 2**32 - 1], ids=str)
def test_a_hostile_length_of_a_batch_is_refused(at: int, length: int) -> None:
    rows = rows_of(pack_of(transaction_group(piece(FakeTarget(MessageType.DELETE), (0, b"key")))))
    data = encode_rows(rows)
    batch = ENTRY_HEADER_BYTES + 4 + 4 + 1
    (true,) = struct.unpack_from("<I", data, batch + at)
    if length != true:
        with pytest.raises(Corrupt):
            decode_entry(
                sign(data[: batch + at] + struct.pack("<I", length) + data[batch + at + 4 :]),
                wal_name=WAL_NAME,
                previous_crc32c=None,
            )


@given(change=st.binary(min_size=1, max_size=8), data=st.data())
def test_whatever_is_behind_a_checksum_that_fits_is_corrupt_or_an_entry(
    change: bytes, data: st.DataObject
) -> None:
    true = encode(stamped(a_pack(), tick=100))
    at = data.draw(st.integers(8, len(true) - 1))
    try:
        entry = decode_entry(
            sign(true[:at] + change + true[at + len(change) :]),
            wal_name=WAL_NAME,
            previous_crc32c=None,
        )
    except Corrupt:
        return
    assert entry.last_position == entry.first_position + entry.count - 1
    if entry.rows is not None:
        assert len(list(entry.rows.messages())) <= entry.count


@pytest.mark.parametrize("groups", [1, 2, 100])
def test_a_group_adds_little_to_an_entry_beside_its_rows(groups: int) -> None:
    target = FakeTarget(vchannels=("p0_1000v15",))
    pack = stamped(
        pack_of(*[insert_group(target, data=b"12345678") for _ in range(groups)]), tick=1 << 60
    )
    assert len(encode(pack, first_position=1 << 40)) <= ENTRY_HEADER_BYTES + 40 + groups * (
        8 + 9 + 22
    )
