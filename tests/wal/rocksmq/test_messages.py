"""Bytes of topic entries: the documented example is what is written, and nothing else is taken for
an entry.
"""

import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wal.codec import entry_crc32c
from wal.errors import Corrupt, UnsupportedFormat
from wal.rocksmq.messages import (
    CACHE_BYTES_MAX,
    ConsumerMessage,
    EntryCache,
    ProducerMessage,
    TopicEntry,
    bodies_of,
    decode_entry,
    encode_entry,
)

FORMAT = Path(__file__).parents[3] / "docs" / "format.md"
FIRST = 446_676_598_784_000_001


def example() -> bytes:
    bodies, _ = bodies_of([b"tea", ProducerMessage(b"milk", {"k": "v"})])
    return encode_entry(bodies, first_id=FIRST, previous_crc32c=0)


def test_the_documented_example_is_byte_for_byte_what_is_written() -> None:
    (block,) = re.findall(
        r"rocksmq/test_messages.py -->\n```\n(.*?)```", FORMAT.read_text(), re.DOTALL
    )
    lines = [line.split("  ") for line in block.splitlines()]
    found = b""
    for offset, data, *_ in lines:
        assert int(offset) == len(found)
        found += bytes.fromhex(data)
    assert found == example()


def test_the_example_is_read_back_as_its_messages() -> None:
    entry = decode_entry(example(), 0)
    assert entry.messages == [
        ConsumerMessage(FIRST, b"tea", {}),
        ConsumerMessage(FIRST + 1, b"milk", {"k": "v"}),
    ]
    assert (entry.first_position, entry.last_position, entry.crc32c) == (
        FIRST,
        FIRST + 1,
        entry_crc32c(example()),
    )


@given(
    st.lists(
        st.tuples(
            st.binary(max_size=50), st.dictionaries(st.text(max_size=9), st.text(max_size=9))
        ),
        min_size=1,
    )
)
def test_messages_come_back_as_they_were_produced(
    messages: list[tuple[bytes, dict[str, str]]],
) -> None:
    bodies, size_bytes = bodies_of([ProducerMessage(*message) for message in messages])
    found = decode_entry(encode_entry(bodies, first_id=7, previous_crc32c=3), 3).messages
    assert [(message.payload, message.properties) for message in found] == messages
    assert [message.message_id for message in found] == list(range(7, 7 + len(messages)))
    assert size_bytes >= sum(len(payload) for payload, _ in messages)


@pytest.mark.parametrize("bit", range(8 * len(example())))
def test_a_flipped_bit_anywhere_is_found(bit: int) -> None:
    data = bytearray(example())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises((Corrupt, UnsupportedFormat)):
        decode_entry(bytes(data), 0)


def test_an_entry_that_is_cut_short_or_follows_another_one_is_refused() -> None:
    for end in range(len(example())):
        with pytest.raises(Corrupt):
            decode_entry(example()[:end], None)
    with pytest.raises(Corrupt, match="follow"):
        decode_entry(example(), 1)


def test_lengths_that_pass_the_checksum_and_lead_elsewhere_are_refused() -> None:
    bodies = [b"ab", b"", b"", b"\xc1"]
    for entry in (
        encode_entry(bodies, first_id=1, previous_crc32c=0),
        encode_entry([], first_id=1, previous_crc32c=0),
    ):
        with pytest.raises(Corrupt):
            decode_entry(entry, 0)


def test_the_cache_forgets_what_came_first_and_stays_below_its_bound() -> None:
    cache = EntryCache()
    size_bytes = CACHE_BYTES_MAX // 4 - 1000
    entries = [TopicEntry([b"", b""], bytes(size_bytes), at) for at in range(5)]
    for at in (2, 0, 1, 3):  # as reads do, not in the order of ids
        cache.put(1, entries[at])
    assert cache.find(1, 2) is entries[2]
    cache.put(1, entries[0])
    cache.put(1, entries[4])
    assert [at for at in range(6) if cache.find(1, at)] == [0, 1, 3, 4]
    assert cache.find(2, 0) is None
    assert cache.find(0, 0) is None


def test_cache_counts_what_messages_take_in_memory_and_keeps_newest_entry_whatever_that_is() -> (
    None
):
    cache = EntryCache()
    tiny = [TopicEntry([b""] * 20_000, bytes(80_000), at) for at in range(0, 400_000, 10_000)]
    for entry in tiny:
        cache.put(1, entry)
    kept = [entry for entry in tiny if cache.find(1, entry.first_position)]
    assert 200 * 10_000 * len(kept) < CACHE_BYTES_MAX
    assert kept[-1] is tiny[-1]
    large = TopicEntry([b"", b""], bytes(CACHE_BYTES_MAX + 1), 500_000)
    cache.put(1, large)
    assert [cache.find(1, 500_000), cache.find(1, tiny[-1].first_position)] == [large, None]


def test_the_cache_counts_all_that_entries_of_one_small_message_take_in_memory() -> None:
    cache = EntryCache()
    count = 2_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for at in range(1 << 40, (1 << 40) + count):
            bodies = [b"%020d" % at, b""]
            entry = TopicEntry(bodies, encode_entry(bodies, first_id=at, previous_crc32c=0), at)
            assert entry.messages
            cache.put(1, entry)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < cache._bytes
