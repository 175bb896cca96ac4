from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wal.codec import crc32c
from wal.errors import Corrupt, UnsupportedFormat
from wal.rocks.floor import (
    FLOOR_BYTES,
    FLOOR_NAME,
    LOGS_MAX,
    PROMISE_OFFSET,
    SLOT_BYTES,
    TOKEN_BYTES,
    Floor,
    FloorFile,
    decode_floor,
    decode_promise,
    decode_slot,
    decode_token_term,
    encode_promise,
    encode_slot,
    encode_token,
    read_floor,
    write_floor,
)

NODE = "0123456789abcdef0123456789abcdef"
numbers = st.integers(0, 2**64 - 1)
floors = st.builds(
    Floor,
    node_id=st.text("0123456789abcdef", min_size=1, max_size=32),
    generation=numbers,
    term=numbers,
    tick=numbers,
    meta_version=numbers,
    positions=st.dictionaries(st.integers(1, 2**32 - 1), numbers, max_size=LOGS_MAX),
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_floor(tmp_path, Floor(node_id=NODE))
    return tmp_path


def opened(directory: Path) -> FloorFile:
    return FloorFile(directory)


@given(floor=floors)
def test_a_slot_decodes_to_what_was_encoded(floor: Floor) -> None:
    data = encode_slot(floor)
    assert len(data) <= SLOT_BYTES
    assert decode_slot(data.ljust(SLOT_BYTES, b"\xff")) == floor


@given(floor=floors.filter(lambda floor: len(floor.positions) < 4))
def test_a_slot_with_any_flipped_bit_does_not_count(floor: Floor) -> None:
    data = encode_slot(floor)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert decode_slot(bytes(flipped)) is None


@given(floor=floors, end=st.integers(0, SLOT_BYTES))
def test_a_torn_slot_does_not_count(floor: Floor, end: int) -> None:
    data = encode_slot(floor)
    torn = data[: min(end, len(data) - 1)]
    assert decode_slot(torn.ljust(SLOT_BYTES, b"\xa5")) is None


@given(tick=numbers)
def test_a_promise_decodes_to_what_was_encoded_and_a_flipped_one_to_nothing(tick: int) -> None:
    data = encode_promise(tick)
    assert decode_promise(data) == tick
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert decode_promise(bytes(flipped)) == 0


@given(term=numbers, nonce=st.binary(min_size=16, max_size=16))
def test_a_claim_decodes_to_its_term_and_a_flipped_one_to_none(term: int, nonce: bytes) -> None:
    data = encode_token(term, nonce)
    assert (len(data), decode_token_term(data)) == (TOKEN_BYTES, term)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert decode_token_term(bytes(flipped)) == 0


def test_a_newer_format_of_the_floor_is_refused() -> None:
    body = bytearray(encode_slot(Floor(node_id=NODE)))[4:]
    body[4] = 2
    with pytest.raises(UnsupportedFormat, match="format 2"):
        decode_slot(crc32c(bytes(body)).to_bytes(4, "little") + bytes(body))


def test_a_directory_without_a_floor_file_has_no_floor(tmp_path: Path) -> None:
    assert read_floor(tmp_path) is None


def test_a_new_floor_file_is_whole_and_has_seen_nothing(directory: Path) -> None:
    assert (directory / FLOOR_NAME).stat().st_size == FLOOR_BYTES
    assert read_floor(directory) == Floor(node_id=NODE)


def test_what_is_recorded_survives_without_a_sync(directory: Path) -> None:
    file = opened(directory)
    file.record({1: 10, 2: 20}, tick=5, term=3, meta=7)
    file.record({1: 11}, tick=6)
    floor = read_floor(directory)
    assert floor is not None
    assert (floor.positions, floor.tick, floor.term, floor.meta_version) == (
        {1: 11, 2: 20},
        6,
        3,
        7,
    )


def test_the_floor_never_sinks(directory: Path) -> None:
    file = opened(directory)
    file.record({}, tick=9, term=9, meta=9)
    file.record({}, tick=1, term=1, meta=1)
    floor = read_floor(directory)
    assert floor is not None
    assert (floor.tick, floor.term, floor.meta_version) == (9, 9, 9)


def test_a_promised_tick_counts_when_it_is_the_highest(directory: Path) -> None:
    file = opened(directory)
    file.record({1: 1}, tick=50)
    for promised, tick in ((40, 50), (60, 60)):
        file.promise(promised)
        floor = read_floor(directory)
        assert floor is not None
        assert floor.tick == tick


def test_between_two_syncs_only_one_slot_is_written(directory: Path) -> None:
    file = opened(directory)
    file.record({1: 1})
    file.sync()
    synced = (directory / FLOOR_NAME).read_bytes()
    for position in range(2, 9):
        file.record({1: position})
    written = (directory / FLOOR_NAME).read_bytes()
    changed = [slot for slot in (0, 1) if _slot(synced, slot) != _slot(written, slot)]
    assert len(changed) == 1
    assert decode_slot(_slot(written, 1 - changed[0])) == decode_slot(_slot(synced, 1 - changed[0]))


def test_when_the_newest_slot_is_torn_the_last_synced_one_counts(directory: Path) -> None:
    file = opened(directory)
    for position in range(1, 6):
        file.record({1: position})
        file.sync()
        file.record({1: position + 100})
        data = bytearray((directory / FLOOR_NAME).read_bytes())
        newest = max((0, 1), key=lambda slot: decode_slot(_slot(data, slot)).generation)  # type: ignore[union-attr]
        data[newest * SLOT_BYTES + 20] ^= 0xFF
        assert decode_floor(bytes(data)).positions == {1: position}


def test_a_reopened_floor_goes_on_in_the_other_slot(directory: Path) -> None:
    for position in range(1, 5):
        file = opened(directory)
        file.record({1: position})
        file.close()
        floor = read_floor(directory)
        assert floor is not None
        assert (floor.positions, floor.generation) == ({1: position}, position)


def test_a_floor_file_with_two_bad_slots_is_corrupt(directory: Path) -> None:
    path = directory / FLOOR_NAME
    path.write_bytes(bytes(PROMISE_OFFSET) + encode_promise(7))
    with pytest.raises(Corrupt, match="neither slot"):
        read_floor(directory)


@pytest.mark.parametrize("size", [0, 1, 70])
def test_a_floor_file_that_is_too_short_is_corrupt(directory: Path, size: int) -> None:
    path = directory / FLOOR_NAME
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(Corrupt, match="neither slot"):
        read_floor(directory)


def _slot(data: bytes | bytearray, slot: int) -> bytes:
    return bytes(data[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES])
