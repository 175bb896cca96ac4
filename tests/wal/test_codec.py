import random
import struct

import google_crc32c
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.wal.entries import comparable, into_entry, stamped
from wal.append import AppendGroup, Pack
from wal.codec import (
    COPIED_BYTES_MAX,
    ENTRY_HEADER_BYTES,
    MESSAGE_HEADER_BYTES,
    crc32c,
    decode_entry,
    encode_entry,
    entry_crc32c,
)
from wal.errors import Corrupt, UnsupportedFormat
from wal.headers import (
    BodyAssignment,
    CommitTxnHeader,
    CutHeader,
    DeleteHeader,
    Header,
    InsertHeader,
    MessageType,
    TimeTickHeader,
)
from wal.message import MutableMessage
from wal.position import SEQUENCE_MAX, ProducerStamp

WAL_NAME = "rocks"
ids = st.integers(0, 2**63 - 1)
small = st.integers(0, 2**31)

headers: st.SearchStrategy[tuple[MessageType, Header]] = st.one_of(
    st.tuples(
        st.just(MessageType.INSERT),
        st.builds(InsertHeader, ids, ids, small, small, ids, ids, small),
    ),
    st.tuples(st.just(MessageType.DELETE), st.builds(DeleteHeader, ids, small, ids, small)),
    st.tuples(st.just(MessageType.TIME_TICK), st.builds(TimeTickHeader, st.text(max_size=20))),
    st.tuples(
        st.just(MessageType.CUT), st.builds(CutHeader, ids, st.lists(ids, max_size=3).map(tuple))
    ),
    st.tuples(
        st.just(MessageType.COMMIT_TXN),
        st.builds(
            CommitTxnHeader,
            st.lists(st.text(max_size=8), max_size=3).map(tuple),
            st.lists(st.builds(BodyAssignment, ids, ids), max_size=3).map(tuple),
        ),
    ),
)


@st.composite
def stamped_messages(draw: st.DrawFn) -> list[MutableMessage]:
    tick = draw(st.integers(1, 2**63 - 1))
    term = draw(st.integers(1, 2**63 - 1))
    last_confirmed = draw(st.none() | ids)
    messages = [
        MutableMessage(
            type=kind,
            header=header,
            vchannel=draw(st.text(max_size=30)),
            payload=draw(st.binary(max_size=200)),
            txn_id=draw(ids),
        )
        for kind, header in draw(st.lists(headers, min_size=1, max_size=6))
    ]
    return [
        replace(message, time_tick=tick, last_confirmed=last_confirmed, wal_term=term)
        for message in messages
    ]


producers = st.none() | st.builds(
    ProducerStamp,
    st.integers(1, 2**63 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(1, SEQUENCE_MAX),
)


def entry_head(
    count: int, groups: int = 1, ticks: tuple[int, int] = (1, 1), flags: int = 0
) -> bytes:
    """Return the checked part of an entry's header, as of an entry that nobody may write."""
    return struct.pack("<IIQQQQQQQII", 0, count, 1, *ticks, 1, 1, 0, 0, 0, groups | flags << 24)


def one_entry(payload: bytes = b"payload", previous_crc32c: int = 7) -> bytes:
    header = InsertHeader(1, 2, 3, 4)
    message = MutableMessage(
        MessageType.INSERT, header, "p0_1v0", payload, time_tick=99, wal_term=1
    )
    return encode_entry(
        into_entry([message] * 2, first_position=5), previous_crc32c=previous_crc32c
    )


@given(
    messages=stamped_messages(),
    first_position=st.integers(1, 2**62),
    previous=st.integers(0, 2**32 - 1),
    producer=producers,
)
def test_an_entry_decodes_to_what_was_encoded(
    messages: list[MutableMessage],
    first_position: int,
    previous: int,
    producer: ProducerStamp | None,
) -> None:
    expected = into_entry(
        messages, wal_name=WAL_NAME, first_position=first_position, producer=producer
    )
    data = encode_entry(expected, previous_crc32c=previous)
    assert (expected.crc32c, expected.size_bytes) == (entry_crc32c(data), len(data))
    assert comparable(
        decode_entry(data, wal_name=WAL_NAME, previous_crc32c=previous)
    ) == comparable(expected)


def test_every_single_bit_flip_is_caught() -> None:
    data = one_entry()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((Corrupt, UnsupportedFormat)):
            decode_entry(bytes(flipped), wal_name=WAL_NAME, previous_crc32c=7)


@given(end=st.integers(0, len(one_entry()) - 1))
def test_every_shortened_entry_is_caught(end: int) -> None:
    with pytest.raises(Corrupt):
        decode_entry(one_entry()[:end], wal_name=WAL_NAME, previous_crc32c=None)


@given(data=st.binary(max_size=400))
def test_arbitrary_bytes_are_corrupt_and_nothing_else(data: bytes) -> None:
    with pytest.raises((Corrupt, UnsupportedFormat)):
        decode_entry(data, wal_name=WAL_NAME, previous_crc32c=None)


@given(
    data=st.binary(max_size=300),
    count=st.integers(0, 3) | st.integers(0, 2**32 - 1),
    groups=st.integers(0, 3) | st.integers(0, 2**24 - 1),
    flags=st.integers(0, 255),
)
def test_a_valid_checksum_over_nonsense_is_still_corrupt_or_an_entry(
    data: bytes, count: int, groups: int, flags: int
) -> None:
    forged = _with_checksum(entry_head(count, groups, (1, 2), flags) + data)
    try:
        entry = decode_entry(forged, wal_name=WAL_NAME, previous_crc32c=None)
    except Corrupt:
        return
    assert entry.count == count


@pytest.mark.parametrize("count", [0, 65_537, 2**32 - 1], ids=str)
def test_a_hostile_message_count_is_refused_before_anything_is_allocated(count: int) -> None:
    for flags in range(4):
        forged = _with_checksum(entry_head(count, flags=flags))
        with pytest.raises(Corrupt, match=f"has {count} messages"):
            decode_entry(forged, wal_name=WAL_NAME, previous_crc32c=None)


@pytest.mark.parametrize("groups", [0, 3, 2**24 - 1], ids=str)
def test_a_hostile_group_count_is_refused_before_anything_is_allocated(groups: int) -> None:
    for flags in range(4):
        with pytest.raises(Corrupt, match=f"2 messages of {groups} groups"):
            decode_entry(
                _with_checksum(entry_head(2, groups, flags=flags)),
                wal_name=WAL_NAME,
                previous_crc32c=None,
            )


def test_an_entry_whose_last_tick_is_below_its_first_one_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="ticks 5 to 4"):
        decode_entry(
            _with_checksum(entry_head(1, 1, (5, 4))), wal_name=WAL_NAME, previous_crc32c=None
        )


@pytest.mark.parametrize("field", ["vchannel", "properties", "header", "payload"])
def test_a_hostile_length_is_refused(field: str) -> None:
    lengths = dict.fromkeys(("vchannel", "properties", "header", "payload"), 0)
    lengths[field] = 2**16 - 1 if field in ("vchannel", "properties") else 2**32 - 1
    message = struct.pack("<HBxHHIIQ", MessageType.INSERT, 2, *lengths.values(), 0)
    assert len(message) == MESSAGE_HEADER_BYTES
    with pytest.raises(Corrupt):
        decode_entry(
            _with_checksum(entry_head(1) + message), wal_name=WAL_NAME, previous_crc32c=None
        )


def test_properties_are_passed_over() -> None:
    data = one_entry()[8:]
    at = ENTRY_HEADER_BYTES - 8
    vchannel_end = at + MESSAGE_HEADER_BYTES + len("p0_1v0")
    (length,) = struct.unpack_from("<H", data, at + 4)
    assert length == len("p0_1v0")
    forged = (
        data[: at + 6]
        + struct.pack("<H", 5)
        + data[at + 8 : vchannel_end]
        + b"\x81\xa1k\xa1v"
        + data[vchannel_end:]
    )
    entry = decode_entry(_with_checksum(forged), wal_name=WAL_NAME, previous_crc32c=None)
    assert (
        entry.messages
        == decode_entry(one_entry(), wal_name=WAL_NAME, previous_crc32c=None).messages
    )


def test_an_entry_out_of_its_place_is_caught() -> None:
    with pytest.raises(Corrupt, match="does not follow"):
        decode_entry(one_entry(previous_crc32c=7), wal_name=WAL_NAME, previous_crc32c=8)


def test_bytes_after_the_last_message_are_caught() -> None:
    with pytest.raises(Corrupt, match="of 173 bytes ends at byte 170"):
        decode_entry(
            _with_checksum(one_entry()[8:] + b"???"), wal_name=WAL_NAME, previous_crc32c=None
        )


@pytest.mark.parametrize("version", [1, 3, 255])
def test_an_entry_of_another_format_is_not_guessed_at(version: int) -> None:
    other = bytearray(one_entry())
    other[2] = version
    with pytest.raises(UnsupportedFormat, match=f"format {version}, this release reads 2"):
        decode_entry(bytes(other), wal_name=WAL_NAME, previous_crc32c=None)


def test_a_header_of_an_unknown_version_is_corrupt() -> None:
    data = bytearray(one_entry()[8:])
    data[ENTRY_HEADER_BYTES - 8 + 2] = 77
    with pytest.raises(Corrupt, match="does not decode"):
        decode_entry(_with_checksum(bytes(data)), wal_name=WAL_NAME, previous_crc32c=None)


def _with_checksum(checked: bytes) -> bytes:
    return struct.pack("<HHI", 0x4E53, 2, crc32c(checked)) + checked


@pytest.mark.parametrize("count", [1, 2, 100])
def test_entry_of_messages_is_at_most_one_entry_header_larger_than_what_its_group_counts_for(
    count: int,
) -> None:
    header = InsertHeader(10**9, 10**9, 10**3, 10**6, 10**9, 10**12)
    group = AppendGroup(
        [MutableMessage(MessageType.INSERT, header, "p0_1000v15", b"rows") for _ in range(count)]
    )
    stamped(Pack([group]), tick=1 << 60)
    entry = into_entry(group.messages, first_position=1 << 40, producer=ProducerStamp(1, 1, 1))
    data = encode_entry(entry, previous_crc32c=0)
    assert len(data) <= group.size_bytes + ENTRY_HEADER_BYTES + 8 * count


def test_checksums_are_those_of_the_published_vectors() -> None:
    vectors = {  # RFC 3720, appendix B.4, and the check value of the polynomial
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        bytes(range(31, -1, -1)): 0x113FDB5C,
        b"123456789": 0xE3069283,
        b"": 0,
    }
    assert {data: crc32c(data) for data in vectors} == vectors


@pytest.mark.parametrize("size", [0, 1, COPIED_BYTES_MAX - 1, COPIED_BYTES_MAX, 1 << 20])
def test_a_checksum_is_the_same_of_bytes_views_and_parts(size: int) -> None:
    data = random.Random(size).randbytes(size + 8)
    whole = crc32c(data)
    assert crc32c(memoryview(data)) == crc32c(bytearray(data)) == whole
    assert crc32c(memoryview(data)[8:], crc32c(data[:8])) == whole
    assert crc32c(memoryview(pa.py_buffer(data))) == whole


def test_checksums_come_from_the_library_that_was_compiled() -> None:
    assert google_crc32c.implementation == "c"
