"""What a checkpoint keeps of producers, as docs/format.md has it."""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.window import KnownProducer, KnownWindow, StoredWindow, decode_window, encode_window
from wal.errors import Corrupt, UnsupportedFormat
from wal.log import AppendResult
from wal.position import SEQUENCE_MAX, RocksMessageId

FORMAT = Path(__file__).parents[3] / "docs" / "format.md"
TICK = 469_762_048_000_000
EXAMPLE = KnownWindow(
    TICK + 4,
    (
        KnownProducer(
            1,
            2,
            3,
            {7: AppendResult(RocksMessageId(4), 1, TICK + 3, RocksMessageId(4), row_offsets={"p0_1v0": (0, 2)})},
        ),
    ),
)
numbers = st.integers(0, SEQUENCE_MAX)
results = st.builds(
    AppendResult,
    st.builds(RocksMessageId, numbers),
    st.integers(1, 65_536),
    numbers,
    st.builds(RocksMessageId, numbers),
    numbers,
    st.dictionaries(st.text(max_size=9), st.tuples(numbers, numbers), max_size=3),
)
windows = st.builds(
    KnownWindow,
    numbers,
    st.lists(
        st.builds(KnownProducer, numbers, numbers, numbers, st.dictionaries(numbers, results, max_size=3)), max_size=3
    ).map(tuple),
)


@given(windows)
def test_a_window_decodes_to_what_was_encoded(window: KnownWindow) -> None:
    assert decode_window(encode_window(window), RocksMessageId) == window


def test_the_documented_producers_are_byte_for_byte_what_is_written() -> None:
    (block,) = re.findall(r"idempotency/test_snapshot.py -->\n```\n(.*?)```", FORMAT.read_text(), re.DOTALL)
    documented = bytes.fromhex("".join(line.partition("  ")[0] for line in block.splitlines()))
    assert documented == encode_window(EXAMPLE)
    assert decode_window(documented, RocksMessageId) == EXAMPLE


def test_producers_of_a_newer_release_are_not_guessed_at() -> None:
    with pytest.raises(UnsupportedFormat, match="format 2"):
        decode_window(msgspec.msgpack.encode(StoredWindow(format=2, tick=1, producers=())), RocksMessageId)


@pytest.mark.parametrize("end", range(len(encode_window(EXAMPLE))))
def test_shortened_producers_are_corrupt_and_nothing_else(end: int) -> None:
    with pytest.raises(Corrupt):
        decode_window(encode_window(EXAMPLE)[:end], RocksMessageId)
