"""What a checkpoint keeps of producers, as docs/format.md has it."""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.window import StoredWindow, Window, decode_window, encode_window
from wal.append import AppendResult
from wal.errors import Corrupt, UnsupportedFormat
from wal.position import SEQUENCE_MAX, ProducerStamp, RocksMessageId

FORMAT = Path(__file__).parents[3] / "docs" / "format.md"
TICK = 469_762_048_000_000
EXAMPLE = Window(tick=TICK + 4)
EXAMPLE.add(
    ProducerStamp(1, 2, 7),
    AppendResult(
        kind=RocksMessageId,
        first_position=4,
        count=1,
        time_tick=TICK + 3,
        last_confirmed_position=4,
        row_offsets={"p0_1v0": (0, 2)},
    ),
)
EXAMPLE.producers[1].floor = 3
numbers = st.integers(0, SEQUENCE_MAX)
results = st.builds(
    AppendResult,
    kind=st.just(RocksMessageId),
    first_position=numbers,
    count=st.integers(1, 65_536),
    time_tick=numbers,
    last_confirmed_position=numbers,
    txn_id=numbers,
    row_offsets=st.dictionaries(st.text(max_size=9), st.tuples(numbers, numbers), max_size=3),
)
producers = st.tuples(
    numbers, numbers, numbers, st.dictionaries(st.integers(1, SEQUENCE_MAX), results, max_size=3)
)


@given(tick=numbers, known=st.lists(producers, max_size=3))
def test_a_window_decodes_to_what_was_encoded(
    tick: int, known: list[tuple[int, int, int, dict[int, AppendResult]]]
) -> None:
    window = Window(tick=tick)
    for producer_id, epoch, floor, by_sequence in known:
        window.fence(producer_id, epoch)
        for sequence, result in by_sequence.items():
            window.add(ProducerStamp(producer_id, epoch, sequence), result)
        window.producers[producer_id].floor = floor
    decoded = decode_window(encode_window(window.freeze(SEQUENCE_MAX, now_ms=0)), RocksMessageId)
    assert (decoded.producers, decoded.results) == (window.producers, window.results)
    assert encode_window(decoded) == encode_window(window.freeze(SEQUENCE_MAX, now_ms=0))


def test_the_documented_producers_are_byte_for_byte_what_is_written() -> None:
    (block,) = re.findall(
        r"idempotency/test_snapshot.py -->\n```\n(.*?)```", FORMAT.read_text(), re.DOTALL
    )
    documented = bytes.fromhex("".join(line.partition("  ")[0] for line in block.splitlines()))
    assert documented == encode_window(EXAMPLE)
    decoded = decode_window(documented, RocksMessageId)
    assert (decoded.tick, decoded.producers) == (EXAMPLE.tick, EXAMPLE.producers)


def test_producers_of_a_newer_release_are_not_guessed_at() -> None:
    with pytest.raises(UnsupportedFormat, match="format 2"):
        decode_window(
            msgspec.msgpack.encode(StoredWindow(format=2, tick=1, producers=())), RocksMessageId
        )


@pytest.mark.parametrize("end", range(len(encode_window(EXAMPLE))))
def test_shortened_producers_are_corrupt_and_nothing_else(end: int) -> None:
    with pytest.raises(Corrupt):
        decode_window(encode_window(EXAMPLE)[:end], RocksMessageId)
