"""Decoding of encoded batches, and the system columns, against a row-by-row model."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flusher import data_file
from flusher.data_file import OffsetRule, Rows, decode_rows, split_rows
from flusher.manifest import stored_schema
from wal.errors import Corrupt

COLUMNS: dict[str, pa.DataType] = {"id": pa.int64(), "item": pa.string()}
SCHEMA = pa.schema(COLUMNS)


def encode(first: int, count: int) -> bytes:
    ids = list(range(first, first + count))
    return pa.record_batch([ids, [f"item {number}" for number in ids]], schema=SCHEMA).serialize().to_pybytes()


@given(
    counts=st.lists(st.integers(1, 2000), max_size=12), rule=st.sampled_from(OffsetRule), gap=st.sampled_from([0, 9])
)
def test_rows_come_back_in_order_with_their_ticks_and_offsets(counts: list[int], rule: OffsetRule, gap: int) -> None:
    messages, expected = [], []
    for number, count in enumerate(counts):
        tick, offset = 100 + number, 7 + gap * number + sum(counts[:number])
        messages.append(Rows(encode(offset, count), count, tick, offset))
        expected += [
            (offset + i, f"item {offset + i}", tick, offset + (i if rule is OffsetRule.FIRST else 0), "p0_1v0")
            for i in range(count)
        ]
    table = decode_rows(messages, SCHEMA, vchannel="p0_1v0", rule=rule)
    found = table.cast(stored_schema(SCHEMA)).to_pylist()
    assert [tuple(row.values()) for row in found] == expected


def test_large_payloads_decode_one_by_one_to_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "JOINED_PAYLOAD_BYTES_MAX", 100)
    messages = [Rows(encode(start, 50), 50, start + 1, start) for start in range(0, 500, 50)]
    table = decode_rows(messages, SCHEMA, vchannel="p0_1v0", rule=OffsetRule.FIRST)
    assert table["id"].to_pylist() == list(range(500))
    assert table["_offset"].to_pylist() == list(range(500))


@pytest.mark.parametrize("claimed", [4, 6])
def test_a_payload_with_other_rows_than_its_header_says_is_corrupt(claimed: int) -> None:
    messages = [Rows(encode(0, 5), claimed, 1, 0), Rows(encode(5, 10 - claimed), 10 - claimed, 2, 5)]
    with pytest.raises(Corrupt, match="headers say"):
        decode_rows(messages, SCHEMA, vchannel="p0_1v0", rule=OffsetRule.FIRST)


@pytest.mark.parametrize("count", [1, 2])
def test_a_payload_that_is_no_record_batch_is_corrupt(count: int) -> None:
    with pytest.raises(Corrupt, match="do not decode"):
        decode_rows([Rows(b"no batch" * 8, 1, 1, 0)] * count, SCHEMA, vchannel="p0_1v0", rule=OffsetRule.FIRST)


@given(sizes=st.lists(st.integers(1, 50), max_size=20), bytes_max=st.integers(1, 120))
def test_parts_are_bounded_and_together_are_everything(sizes: list[int], bytes_max: int) -> None:
    messages = [Rows(bytes(size), 1, tick, 0) for tick, size in enumerate(sizes)]
    parts = list(split_rows(messages, bytes_max))
    assert [message for part in parts for message in part] == messages
    assert all(part for part in parts)
    totals = [sum(len(message.payload) for message in part) for part in parts]
    assert all(total <= bytes_max or len(part) == 1 for total, part in zip(totals, parts, strict=True))
