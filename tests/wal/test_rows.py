"""How writes are laid out in an entry, against a model that does it message by message."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wal.packed import (
    FakeTarget,
    delete_group,
    insert_group,
    lay_out,
    pack_of,
    piece,
    rows_group,
)
from tests.wal.random_packs import (
    ROW_BYTES,
    THREE,
    Group,
    Said,
    groups_of_one_batch,
    model_of,
    random_groups,
)
from wal.append import AppendGroup, Pack
from wal.entry import RowBatch
from wal.headers import InsertHeader, MessageType
from wal.rows import ShardRows, encode_pieces, row_offsets


def laid_out(*groups: AppendGroup, first_offset: int = 0) -> Pack:
    pack = pack_of(*groups)
    lay_out(pack, first_offset=first_offset)
    return pack


def placed(batch: RowBatch) -> list[tuple[int, int, int, int, tuple[bytes, ...]]]:
    """Return group, place, part, offset and rows of each boundary."""
    payload = bytes(batch.payload)
    rows = [payload[at : at + ROW_BYTES] for at in range(0, len(payload), ROW_BYTES)]
    assert len(rows) == batch.rows
    columns = (batch.groups, batch.places, batch.parts, batch.starts, batch.counts, batch.offsets)
    return [
        (group, place, part, offset, tuple(rows[start : start + count]))
        for group, place, part, start, count, offset in zip(
            *(each.tolist() for each in columns), strict=True
        )
    ]


def in_order(model: list[Group]) -> dict[tuple[int, int], Said]:
    """Return the messages of the model by group and place."""
    return {
        (number, message.position - group.first_position): message
        for number, group in enumerate(model)
        for message in group.messages
    }


@given(groups=random_groups() | groups_of_one_batch(), first_offset=st.integers(0, 2**40))
def test_every_row_is_where_going_through_the_writes_one_by_one_puts_it(
    groups: list[AppendGroup], first_offset: int
) -> None:
    pack = laid_out(*groups, first_offset=first_offset)
    model = model_of(groups, first_offset=first_offset)
    assert list(pack.message_counts) == [group.length for group in model]
    assert pack.message_count == sum(group.length for group in model)
    left = in_order(model)
    for batch in pack.batches:
        for group, place, part, offset, rows in placed(batch):
            message = left.pop((group, place))
            header = message.header
            assert (batch.type, batch.vchannel, rows) == (
                message.type,
                message.vchannel,
                message.rows,
            )
            first = header.first_offset if isinstance(header, InsertHeader) else header.next_offset
            assert (batch.collection_id, part, offset) == (header.collection_id, header.part, first)
            if isinstance(header, InsertHeader):
                assert (batch.partition_id, batch.schema_version) == (
                    header.partition_id,
                    header.schema_version,
                )
    assert not left, "no message is without rows"


@given(groups=random_groups())
def test_a_batch_is_one_for_each_target_and_shard_and_its_boundaries_ascend(
    groups: list[AppendGroup],
) -> None:
    batches = laid_out(*groups).batches
    shards = {
        (each.target, shard) for group in groups for each in group.pieces for shard, _ in each.rows
    }
    assert len(batches) == len(shards)
    for batch in batches:
        places = [(group, place) for group, place, *_ in placed(batch)]
        assert places == sorted(set(places))
        assert batch.starts.tolist() == [
            sum(batch.counts.tolist()[:at]) for at in range(len(batch.counts))
        ]


@given(groups=random_groups() | groups_of_one_batch(), first_offset=st.integers(0, 2**40))
def test_a_group_is_told_the_offsets_of_its_own_inserts(
    groups: list[AppendGroup], first_offset: int
) -> None:
    offsets = laid_out(*groups, first_offset=first_offset).row_offsets
    for of_group, expected in zip(
        offsets, model_of(groups, first_offset=first_offset), strict=True
    ):
        told: dict[str, tuple[int, int]] = {}
        for message in expected.messages:
            if isinstance(header := message.header, InsertHeader):
                first, count = told.get(message.vchannel, (header.first_offset, 0))
                told[message.vchannel] = first, count + header.rows
        assert of_group == told


def test_rows_of_one_write_on_several_shards_are_parts_of_one_after_another() -> None:
    target = FakeTarget(vchannels=THREE)
    write = rows_group(piece(target, (2, b"aa"), (0, b"bb"), (2, b"cc")))
    first, second = laid_out(insert_group(target, shard=1, data=b"00"), write).batches[0::2]
    assert (first.vchannel, placed(first)) == (THREE[0], [(1, 0, 0, 0, (b"bb",))])
    assert (second.vchannel, placed(second)) == (THREE[2], [(1, 1, 1, 0, (b"aa", b"cc"))])


def test_a_transaction_keeps_the_places_of_its_begin_and_commit() -> None:
    group = rows_group(piece(FakeTarget(), (0, b"aa")), is_transaction=True)
    pack = laid_out(insert_group(data=b"00"), group, insert_group(data=b"00"))
    assert list(pack.message_counts) == [1, 3, 1]
    (batch,) = pack.batches
    assert [each[:2] for each in placed(batch)] == [(0, 0), (1, 1), (2, 0)]


def test_targets_of_one_place_share_a_batch_in_which_rows_keep_their_order() -> None:
    # as made before and after the catalog changed
    before = FakeTarget()
    after = FakeTarget()
    writes = (
        insert_group(before, data=b"aa"),
        insert_group(after, data=b"bb"),
        insert_group(before, data=b"cc"),
    )
    (batch,) = laid_out(*writes).batches
    assert [rows for *_, rows in placed(batch)] == [(b"aa",), (b"bb",), (b"cc",)]


@pytest.mark.parametrize(
    "other",
    [
        FakeTarget(MessageType.DELETE),
        FakeTarget(collection_id=2),
        FakeTarget(partition_id=3),
        FakeTarget(schema_version=2),
    ],
    ids=["kind", "collection", "partition", "schema version"],
)
def test_rows_of_another_place_have_a_batch_of_their_own(other: FakeTarget) -> None:
    assert len(laid_out(insert_group(data=b"aa"), insert_group(other, data=b"bb")).batches) == 2


def test_a_delete_has_the_offset_that_the_next_row_of_its_shard_gets() -> None:
    pack = laid_out(
        insert_group(rows=2), delete_group(keys=3), insert_group(), delete_group(), first_offset=40
    )
    assert [batch.offsets.tolist() for batch in pack.batches] == [[40, 42], [42, 43]]


def test_an_upsert_deletes_what_came_before_it_in_the_same_entry_and_not_its_own_row() -> None:
    target = FakeTarget()
    deletes = FakeTarget(MessageType.DELETE)
    upserts = [
        rows_group(piece(deletes, (0, b"kk")), piece(target, (0, b"kk")), is_transaction=True)
        for _ in range(3)
    ]
    deleted, inserted = laid_out(*upserts, first_offset=7).batches
    assert (deleted.type, deleted.offsets.tolist()) == (MessageType.DELETE, [7, 8, 9])
    assert (inserted.type, inserted.offsets.tolist()) == (MessageType.INSERT, [7, 8, 9])


def test_offsets_of_one_write_count_from_its_lowest_whatever_the_order_of_batches() -> None:
    target = FakeTarget()
    other = FakeTarget(partition_id=9)
    early = rows_group(piece(other, (0, b"aa")))
    both = rows_group(piece(target, (0, b"bb")), piece(other, (0, b"cc"), (0, b"dd")))
    pack = laid_out(early, both)
    backwards = list(reversed(pack.batches))
    assert (
        row_offsets(backwards, 2)
        == row_offsets(pack.batches, 2)
        == [{"p0_1v0": (0, 1)}, {"p0_1v0": (1, 3)}]
    )
    assert [batch.type for batch in backwards] == [MessageType.INSERT] * 2


@given(groups=random_groups())
def test_each_target_encodes_its_rows_of_all_groups_in_one_call(groups: list[AppendGroup]) -> None:
    calls: list[FakeTarget] = []
    encode = FakeTarget.encode

    def counted(target: FakeTarget, pieces: Sequence[Any]) -> Sequence[ShardRows]:
        calls.append(target)
        return encode(target, pieces)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FakeTarget, "encode", counted)
        encoded = encode_pieces([group.pieces for group in groups])
    assert len(calls) == len({each.target for group in groups for each in group.pieces}), (
        "what costs once is shared"
    )
    pieces = [each for group in groups for each in group.pieces]
    for batch in encoded:
        for number, count in zip(batch.pieces, batch.counts, strict=True):
            piece_of = pieces[number]
            assert piece_of.target is batch.target
            shards = [piece_of.target.vchannels[shard] for shard, _ in piece_of.rows]
            assert count == shards.count(batch.vchannel)
    assert sum(sum(batch.counts) for batch in encoded) == sum(len(each.rows) for each in pieces)
