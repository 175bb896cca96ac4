"""Packed rows as readers see them, against the same groups written down message by message."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wal.entries import packed_entry
from tests.wal.packed import FakeTarget, delete_group, insert_group, piece, transaction_group
from tests.wal.random_packs import (
    ONE,
    THREE,
    Group,
    groups_that_pack,
    is_whole,
    model_of,
    said,
    said_by,
    said_in,
)
from wal.append import AppendGroup
from wal.entry import (
    U4,
    LogEntry,
    PackedRows,
    TransactionBuffer,
    messages_of,
    numbers,
    row_batches,
    up_to,
)
from wal.headers import CommitTxnHeader, InsertHeader, MessageType
from wal.message import MESSAGE_OVERHEAD_BYTES, TransactionMessage
from wal.position import MemoryMessageId

TICK = 100
POSITION = 40


def packed(groups: Sequence[AppendGroup]) -> tuple[LogEntry, PackedRows, list[Group]]:
    entry = packed_entry(*groups, tick=TICK, first_position=POSITION, last_confirmed=17, term=3)
    assert entry.rows is not None
    return entry, entry.rows, model_of(groups, first_tick=TICK, first_position=POSITION)


@given(groups=groups_that_pack())
def test_messages_are_those_of_the_writes_in_their_order(groups: list[AppendGroup]) -> None:
    _, rows, model = packed(groups)
    assert said_by(rows) == said_in(model)
    assert rows.count == sum(len(group.messages) for group in model)


@given(groups=groups_that_pack())
def test_a_transaction_is_seen_once_at_the_place_of_its_commit(groups: list[AppendGroup]) -> None:
    _, rows, model = packed(groups)
    seen = [message for message in rows.messages() if isinstance(message, TransactionMessage)]
    for message, group in zip(
        seen, [group for group in model if group.is_transaction], strict=True
    ):
        assert is_whole(message, group)
        assert {body.txn_id for body in message.bodies} == {group.tick}
        header = message.commit.header
        commit = message.commit
        assert isinstance(header, CommitTxnHeader)
        assert (commit.position, commit.time_tick, commit.wal_term) == (
            message.position,
            group.tick,
            3,
        )
        assert header.vchannels == tuple(sorted({each.vchannel for each in group.messages}))
        offsets = [
            each.header.first_offset
            if isinstance(each.header, InsertHeader)
            else each.header.next_offset
            for each in group.messages
        ]
        assert [assigned.offset for assigned in header.assignments] == offsets


@given(
    groups=groups_that_pack(),
    above=st.integers(TICK - 2, TICK + 10),
    upto=st.none() | st.integers(TICK - 2, TICK + 10),
)
def test_a_range_of_ticks_has_the_groups_in_it_and_no_other(
    groups: list[AppendGroup], above: int, upto: int | None
) -> None:
    _, rows, model = packed(groups)
    inside = [
        group for group in model if above < group.tick and (upto is None or group.tick <= upto)
    ]
    found = rows.within(above=above, upto=upto)
    assert said_by(found) == said_in(inside)
    assert (found is None) == (not inside)
    assert (found is rows) == (len(inside) == len(model)), "what is whole is not copied"
    if upto is not None:
        below = up_to(rows, upto)
        assert below is None or isinstance(below, PackedRows)
        assert said_by(below) == said_in([group for group in model if group.tick <= upto])


@given(groups=groups_that_pack(), bits=st.integers(0, 255))
def test_chosen_groups_are_kept_whole_and_the_others_are_gone(
    groups: list[AppendGroup], bits: int
) -> None:
    _, rows, model = packed(groups)
    chosen = np.array([bool(bits >> at & 1) for at in range(len(groups))])
    kept = rows.only(chosen)
    assert said_by(kept) == said_in(
        [group for group, stays in zip(model, chosen, strict=True) if stays]
    )
    assert kept is None or (kept.time_tick, kept.position) == (rows.time_tick, rows.position), (
        "places stay"
    )


@given(groups=groups_that_pack(), vchannel=st.sampled_from(ONE + THREE))
def test_groups_are_found_by_the_batches_they_have_rows_in(
    groups: list[AppendGroup], vchannel: str
) -> None:
    _, rows, model = packed(groups)
    found = rows.groups_where(lambda batch: batch.vchannel == vchannel)
    assert found.tolist() == [
        any(each.vchannel == vchannel for each in group.messages) for group in model
    ]


@given(groups=groups_that_pack())
def test_each_position_has_the_tick_of_the_group_that_holds_it(groups: list[AppendGroup]) -> None:
    entry, _, model = packed(groups)
    for group in model:
        for position in range(group.first_position, group.first_position + group.length):
            assert entry.tick_at(position) == group.tick
    last = model[-1]
    assert (entry.first_position, entry.last_position) == (
        POSITION,
        last.first_position + last.length - 1,
    )
    assert (entry.first_tick, entry.time_tick, entry.count) == (
        TICK,
        last.tick,
        sum(group.length for group in model),
    )
    assert not entry.messages


@given(groups=groups_that_pack())
def test_batches_have_every_row_once_with_the_tick_of_its_group(groups: list[AppendGroup]) -> None:
    _, rows, model = packed(groups)
    found = []
    for batch, ticks in row_batches(rows):
        of_rows = ticks[batch.groups].tolist()
        for tick, count, offset in zip(
            of_rows, batch.counts.tolist(), batch.offsets.tolist(), strict=True
        ):
            found.append((tick, batch.type, batch.vchannel, count, offset))
    expected = []
    for group in model:
        for message in group.messages:
            header = message.header
            offset = header.first_offset if isinstance(header, InsertHeader) else header.next_offset
            expected.append((group.tick, message.type, message.vchannel, header.rows, offset))
    assert sorted(found) == sorted(expected)


@given(groups=groups_that_pack())
def test_batches_of_single_messages_say_what_packed_ones_do(groups: list[AppendGroup]) -> None:
    _, rows, _ = packed(groups)
    alone = [
        (
            batch.vchannel,
            batch.type,
            batch.segment_id,
            batch.partition_id,
            int(count),
            int(offset),
            int(tick),
            int(part),
        )
        for message in rows.messages()
        for batch, ticks in row_batches(message)
        for count, offset, tick, part in zip(
            batch.counts, batch.offsets, ticks[batch.groups], batch.parts, strict=True
        )
    ]
    together = [
        (
            batch.vchannel,
            batch.type,
            batch.segment_id,
            batch.partition_id,
            int(count),
            int(offset),
            int(tick),
            int(part),
        )
        for batch, ticks in row_batches(rows)
        for count, offset, tick, part in zip(
            batch.counts, batch.offsets, ticks[batch.groups], batch.parts, strict=True
        )
    ]
    assert sorted(alone) == sorted(together)


def test_a_single_message_of_a_pack_points_at_its_own_rows_in_the_shared_payload() -> None:
    target = FakeTarget()
    groups = [insert_group(target, data=b"aa", rows=2), insert_group(target, data=b"bb", rows=3)]
    _, rows, _ = packed(groups)
    first, second = messages_of([rows])
    (body,) = second.bodies
    ((batch, _),) = row_batches(second)
    assert (batch.starts.tolist(), batch.counts.tolist()) == ([2], [3])
    assert batch.payload is body.payload is first.bodies[0].payload
    assert said(body).rows == (b"bb",) * 3


def test_every_message_of_a_pack_resumes_where_the_entry_does() -> None:
    _, rows, _ = packed([insert_group(), transaction_group(piece(FakeTarget(), (0, b"aa")))])
    assert rows.last_confirmed == MemoryMessageId(17)
    assert {message.last_confirmed for message in rows.messages()} == {MemoryMessageId(17)}


def test_rows_count_for_their_payloads_and_what_each_batch_takes() -> None:
    target = FakeTarget()
    _, rows, _ = packed(
        [insert_group(target, data=b"12345") for _ in range(10)] + [delete_group(data=b"123")]
    )
    assert [batch.size_bytes for batch in rows.batches] == [
        50 + MESSAGE_OVERHEAD_BYTES,
        3 + MESSAGE_OVERHEAD_BYTES,
    ]
    assert rows.size_bytes == 53 + 2 * MESSAGE_OVERHEAD_BYTES


def test_packed_rows_pass_transaction_buffer_as_they_are_and_show_what_begins_must_be_seen() -> (
    None
):
    entry, rows, _ = packed([insert_group(), delete_group()])
    buffer = TransactionBuffer()
    assert list(buffer.observe(entry)) == [rows]
    assert (buffer.open_transactions, buffer.size_bytes) == ((), 0)


@pytest.mark.parametrize("kind", [MessageType.INSERT, MessageType.DELETE], ids=str)
def test_a_batch_without_chosen_groups_is_left_out(kind: MessageType) -> None:
    group = insert_group() if kind is MessageType.INSERT else delete_group()
    _, rows, _ = packed(
        [group, transaction_group(piece(FakeTarget(collection_id=2, vchannels=THREE), (1, b"aa")))]
    )
    kept = rows.only(np.array([True, False]))
    assert kept is not None
    assert [batch.type for batch in kept.batches] == [kind]


def test_array_of_one_that_is_kept_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        numbers([1], U4)[0] = 9
    assert numbers([1], U4).tolist() == [1]
