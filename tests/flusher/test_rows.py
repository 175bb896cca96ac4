"""Decoding of encoded batches, and the system columns, against a row-by-row model."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from flusher import data_file
from flusher.data_file import Rows, decode_rows, split_rows
from flusher.manifest import DataFile, DeleteFile, SegmentFile, stored_schema
from tests.flusher.stamped_log import message_rows, packed_rows
from wal.entry import U4, U8
from wal.errors import Corrupt

COLUMNS: dict[str, pa.DataType] = {"id": pa.int64(), "item": pa.string()}
SCHEMA = pa.schema(COLUMNS)


def encode(first: int, count: int) -> bytes:
    ids = list(range(first, first + count))
    return (
        pa.record_batch([ids, [f"item {number}" for number in ids]], schema=SCHEMA)
        .serialize()
        .to_pybytes()
    )


def as_rows(table: pa.Table) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in table.cast(stored_schema(SCHEMA)).to_pylist()]


@given(
    counts=st.lists(st.lists(st.integers(1, 700), min_size=1, max_size=5), max_size=8),
    kind=st.sampled_from([SegmentFile, DeleteFile]),
    gap=st.sampled_from([0, 9]),
)
def test_rows_come_back_in_order_with_their_ticks_and_offsets(
    counts: list[list[int]], kind: type[DataFile], gap: int
) -> None:
    batches = []
    expected = []
    tick = 100
    offset = 7
    for boundaries in counts:
        first = offset
        ticks = []
        offsets = []
        for count in boundaries:
            ticks.append(tick)
            offsets.append(offset)
            expected += [
                (
                    first + i,
                    f"item {first + i}",
                    tick,
                    offset + (i if kind is SegmentFile else 0),
                    "p0_1v0",
                )
                for i in range(count)
            ]
            first = first + count
            tick = tick + 1
            offset = offset + count + gap
        total = sum(boundaries)
        batches.append(packed_rows(encode(first - total, total), boundaries, ticks, offsets))
    table = (
        decode_rows(batches, SCHEMA, vchannel="p0_1v0", kind=kind, whole=True) if batches else None
    )
    assert table is None or as_rows(table) == expected


@given(
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    chosen=st.lists(st.booleans(), min_size=20, max_size=20),
    others=st.booleans(),
)
def test_boundaries_that_are_left_of_a_batch_give_exactly_their_rows(
    counts: list[int], chosen: list[bool], others: bool
) -> None:
    """As a reader that starts, ends or filters within an entry leaves them."""
    starts = np.cumsum(counts) - counts
    ticks = np.arange(len(counts)) + 5
    batch = packed_rows(
        encode(0, sum(counts)), counts, ticks.tolist(), (starts + 1000).tolist()
    ).batch
    kept = batch.of_groups(np.array(chosen[: len(counts)]))
    expected = [
        (first + i, f"item {first + i}", tick, 1000 + first + i, "p0_1v0")
        for first, count, tick, is_chosen in zip(
            starts.tolist(), counts, ticks.tolist(), chosen, strict=False
        )
        for i in range(count)
        if is_chosen
    ]
    if kept is None:
        assert expected == []
        return
    before = [message_rows(encode(900, 2), 2, 1, 900)] if others else []
    rows = [*before, Rows(kept, ticks)]
    table = decode_rows(rows, SCHEMA, vchannel="p0_1v0", kind=SegmentFile)
    assert as_rows(table)[2 * others :] == expected


@pytest.mark.parametrize("entry_bytes, is_kept", [(100, True), (200, True), (201, False)])
def test_rows_keep_no_more_of_their_entry_than_twice_their_bytes(
    entry_bytes: int, is_kept: bool
) -> None:
    entry = bytes(range(100)) + bytes(entry_bytes - 100)
    batch, ticks = astuple(message_rows(b"", 1, 1, 0))
    payload = Rows.of(replace(batch, payload=memoryview(entry)[:100]), ticks).batch.payload
    assert bytes(payload) == entry[:100]
    assert (isinstance(payload, memoryview) and payload.obj is entry) == is_kept


def test_rows_of_one_write_of_many_keep_its_tick_alone() -> None:
    batch = replace(packed_rows(encode(0, 3), [3], [0], [7]).batch, groups=np.array([400], U4))
    rows = Rows.of(batch, np.arange(1_000, 1_512, dtype=U8))
    assert rows.ticks.nbytes == U8.itemsize
    table = decode_rows([rows], SCHEMA, vchannel="p0_1v0", kind=SegmentFile, whole=True)
    assert as_rows(table) == [
        (each, f"item {each}", 1_400, 7 + each, "p0_1v0") for each in range(3)
    ]


@pytest.mark.parametrize(
    "chunk_bytes_min, chunks", [(100, 10), (1 << 20, 1)], ids=["chunks", "joined"]
)
def test_large_payloads_decode_one_by_one_to_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes_min: int, chunks: int
) -> None:
    monkeypatch.setattr(data_file, "JOINED_PAYLOAD_BYTES_MAX", 100)
    monkeypatch.setattr(data_file, "CHUNK_BYTES_MIN", chunk_bytes_min)
    messages = [
        message_rows(encode(start, 50), 50, start + 1, start) for start in range(0, 500, 50)
    ]
    table = decode_rows(messages, SCHEMA, vchannel="p0_1v0", kind=SegmentFile)
    assert table["id"].num_chunks == chunks
    assert table["id"].to_pylist() == list(range(500))
    assert table["_offset"].to_pylist() == list(range(500))


@pytest.mark.parametrize("claimed", [4, 6])
def test_a_payload_with_other_rows_than_its_header_says_is_corrupt(claimed: int) -> None:
    rest = 10 - claimed
    messages = [
        message_rows(encode(0, 5), claimed, 1, 0),
        message_rows(encode(5, rest), rest, 2, 5),
    ]
    with pytest.raises(Corrupt, match="boundaries say"):
        decode_rows(messages, SCHEMA, vchannel="p0_1v0", kind=SegmentFile, whole=True)


def test_payload_that_ends_before_its_last_boundary_is_corrupt_for_who_wants_a_part() -> None:
    for boundaries in ([2, 2], [5]):
        rows = packed_rows(encode(0, 3), boundaries, [1] * len(boundaries), [0] * len(boundaries))
        with pytest.raises(Corrupt, match="boundaries say"):
            decode_rows([rows], SCHEMA, vchannel="p0_1v0", kind=SegmentFile)


@pytest.mark.parametrize("count", [1, 2])
def test_a_payload_that_is_no_record_batch_is_corrupt(count: int) -> None:
    with pytest.raises(Corrupt, match="do not decode"):
        decode_rows(
            [message_rows(b"no batch" * 8, 1, 1, 0)] * count,
            SCHEMA,
            vchannel="p0_1v0",
            kind=SegmentFile,
        )


@given(sizes=st.lists(st.integers(1, 50), max_size=20), bytes_max=st.integers(1, 120))
def test_parts_are_bounded_and_together_are_everything(sizes: list[int], bytes_max: int) -> None:
    messages = [message_rows(bytes(size), 1, tick, 0) for tick, size in enumerate(sizes)]
    parts = list(split_rows(messages, bytes_max))
    assert [message for part in parts for message in part] == messages
    assert all(part for part in parts)
    totals = [sum(len(message.batch.payload) for message in part) for part in parts]
    assert all(
        total <= bytes_max or len(part) == 1 for total, part in zip(totals, parts, strict=True)
    )
