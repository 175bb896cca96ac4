"""Records of a spool come out as they went in; of a file that ends early what was whole; and damage is told from that."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamingnode.remote.spool_records import (
    HEAD_BYTES,
    START_BYTES,
    Record,
    decode_start,
    encode_record,
    encode_start,
    scan,
)
from wal.codec import crc32c
from wal.errors import Corrupt, UnsupportedFormat

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"

whole_numbers = st.integers(0, 2**32 - 1)
records = st.builds(Record, st.integers(1, 2**62), whole_numbers, st.integers(0, 2**63), st.binary(max_size=60))


def kept(found: list[Record], next_sequence: int = 1) -> bytes:
    data, checksum = encode_start(next_sequence)
    for record in found:
        more, checksum = encode_record(record, checksum)
        data += more
    return data


def scanned(data: bytes) -> list[Record]:
    """Return the records in a file, as an opening reads them."""
    _, checksum = decode_start(data[:START_BYTES])
    return [each for each, _ in scan(lambda at, size: data[at : at + size], START_BYTES, len(data), checksum)]


def ends_of(found: list[Record]) -> list[int]:
    return [len(kept(found[:count])) for count in range(len(found) + 1)]


@given(found=st.lists(records, max_size=5), next_sequence=st.integers(1, 2**63))
def test_records_are_read_as_they_were_kept(found: list[Record], next_sequence: int) -> None:
    data = kept(found, next_sequence)
    assert decode_start(data[:START_BYTES])[0] == next_sequence
    assert scanned(data) == found


@given(found=st.lists(records, min_size=1, max_size=3))
def test_of_a_file_that_is_cut_anywhere_the_whole_records_are_read(found: list[Record]) -> None:
    data, ends = kept(found), ends_of(found)
    for cut in range(START_BYTES, len(data)):
        assert scanned(data[:cut]) == found[: sum(end <= cut for end in ends) - 1]


@given(found=st.lists(records, min_size=1, max_size=3))
def test_of_a_file_that_ends_in_zeros_anywhere_in_its_last_record_those_before_it_are_read(found: list[Record]) -> None:
    data, ends = kept(found), ends_of(found)
    for cut in range(ends[-2], ends[-1]):
        assert scanned(data[:cut] + bytes(len(data) - cut)) == found[:-1]


@given(found=st.lists(records, min_size=1, max_size=2))
def test_each_flipped_bit_is_damage(found: list[Record]) -> None:
    data = kept(found)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            scanned(bytes(flipped))


@given(found=st.lists(records, min_size=2, max_size=4, unique=True), data=st.data())
def test_records_that_are_left_out_repeated_or_in_another_order_are_damage(
    found: list[Record], data: st.DataObject
) -> None:
    whole, ends = kept(found), ends_of(found)
    parts = [whole[start:end] for start, end in pairwise(ends)]
    order = data.draw(st.lists(st.integers(0, len(parts) - 1), min_size=1, max_size=5))
    if order == list(range(len(order))):  # the beginning of what was kept
        assert scanned(whole[:START_BYTES] + b"".join(parts[: len(order)])) == found[: len(order)]
    else:
        with pytest.raises(Corrupt):
            scanned(whole[:START_BYTES] + b"".join([parts[each] for each in order]))


def test_a_damaged_record_before_a_torn_one_is_damage_and_no_end() -> None:
    first, second = Record(1, 1, 0, b"first"), Record(2, 1, 0, b"second")
    data = bytearray(kept([first, second])[:-3])
    data[START_BYTES + HEAD_BYTES] ^= 1
    with pytest.raises(Corrupt, match=f"byte {START_BYTES} "):
        scanned(bytes(data))


def test_a_file_of_a_newer_release_is_told_from_a_damaged_one() -> None:
    start = encode_start(1)[0].replace(b"SNSP\1\0", b"SNSP\2\0")
    with pytest.raises(Corrupt):
        decode_start(start)
    with pytest.raises(UnsupportedFormat, match="format 2"):
        decode_start(start[:-4] + crc32c(start[:-4]).to_bytes(4, "little"))


def test_the_documented_spool_is_byte_for_byte_what_is_kept() -> None:
    (block,) = re.findall(r"test_spool_records.py -->\n```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line.split("  ") for line in block.splitlines()]
    documented = b"".join(bytes.fromhex(found) for _, found, *_ in lines)
    assert documented == kept([Record(9, 2, 1_700_000_000_000, b"tea")], next_sequence=9)
    at = 0
    for offset, found, *_ in lines:
        assert int(offset) == at
        at += len(bytes.fromhex(found))
