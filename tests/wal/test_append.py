"""Groups and packs on their way: what a caller is told, what may still happen, and what a pack is
to the chain.
"""

import asyncio
from typing import Any

import pytest
from hypothesis import given

from tests.wal.entries import comparable, entry_of, packed_entry, stamped
from tests.wal.manual_log import A, B, begin, commit, insert, time_tick
from tests.wal.packed import FakeTarget, insert_group, pack_of, piece, rows_group, transaction_group
from tests.wal.random_packs import go_alone, model_of, producers, random_groups, said, said_in
from tests.wal.steered_wal import drop
from wal.append import AppendGroup, AppendResult, AppendTicket, Pack
from wal.codec import decode_entry
from wal.errors import Indeterminate, InvalidArgument, OnShutdown, StorageFull
from wal.headers import DDL, DML, MAKES_ROOM, CutHeader, FlushHeader, InsertHeader, MessageType
from wal.message import MutableMessage
from wal.position import MemoryMessageId, ProducerStamp
from wal.queue import Budget

pytestmark = pytest.mark.anyio

RESULT = AppendResult(
    kind=MemoryMessageId, first_position=4, count=2, time_tick=7, last_confirmed_position=3
)
DOUBT = Indeterminate("who knows")


def a_ticket(pack: Pack, *, first_position: int = 5, synced: bool = True) -> AppendTicket:
    """Give a stamped pack its place."""
    loop = asyncio.get_running_loop()
    written = loop.create_future()
    durable = loop.create_future()
    if synced:
        durable.set_result(None)
    pack.encode("memory", first_position=first_position, previous_crc32c=0)
    pack.ticket = AppendTicket(first_position, written, durable)
    return pack.ticket


def of(kind: MessageType, header: Any = None) -> Pack:
    return Pack([AppendGroup([MutableMessage(kind, header, vchannel=A)])])


# --- a group --------------------------------------------------------------------------------------


def test_result_names_the_position_of_each_message() -> None:
    assert RESULT.message_ids == (MemoryMessageId(4), MemoryMessageId(5))
    assert (RESULT.first_position, RESULT.message_id) == (4, MemoryMessageId(5))
    assert RESULT.last_confirmed == MemoryMessageId(3)


async def test_first_outcome_stands_and_is_told_to_who_waits() -> None:
    group = insert_group()
    group.waiter = asyncio.get_running_loop().create_future()
    group.settle(RESULT)
    group.settle(StorageFull("disk", 0, 1))
    assert await group.waiter is RESULT
    assert group.result() is RESULT


async def test_who_has_gone_is_told_nothing_and_the_outcome_stands_all_the_same() -> None:
    group = insert_group()
    group.waiter = asyncio.get_running_loop().create_future()
    assert not group.cancelled
    group.waiter.cancel()
    assert group.cancelled
    group.settle(RESULT)
    assert group.result() is RESULT


async def test_memory_is_given_back_once_whichever_end_comes_first() -> None:
    memory = Budget(1000)
    group = insert_group()
    await memory.take(group.size_bytes)
    group.memory = memory
    pack = pack_of(group, insert_group())
    pack.leave(group, OnShutdown("closed"))
    group.release()
    group.settle(RESULT)
    assert memory.held_bytes == 0


def test_pack_that_comes_anew_has_what_the_write_came_with_and_the_sequence_it_was_given() -> None:
    message = MutableMessage(MessageType.INSERT, InsertHeader(1, 2, 1, 3), A, b"rows", 5)
    group = AppendGroup([message])
    pack = stamped(Pack([group]), tick=9)
    message.header = InsertHeader(1, 2, 1, 3, 7, 40)
    message.txn_id = 9
    group.producer = ProducerStamp(9, 1, 4)
    group.waits_until_s = 7.5
    first = entry_of(pack, 5)
    pack.come_anew()
    assert (message.header, message.txn_id, message.payload) == (
        InsertHeader(1, 2, 1, 3),
        5,
        b"rows",
    )
    assert (group.producer, group.waits_until_s) == (ProducerStamp(9, 1, 4), 0.0)
    assert (first.messages[0].header, first.messages[0].txn_id) == (
        InsertHeader(1, 2, 1, 3, 7, 40),
        9,
    ), "it is frozen"


@pytest.mark.parametrize(
    "error, told",
    [
        (OnShutdown("closed"), Indeterminate),
        (StorageFull("d", 0, 1), Indeterminate),
        (InvalidArgument("gone"), None),
    ],
    ids=["knows nothing", "may pass", "decides"],
)
def test_refusal_that_does_not_answer_for_the_try_it_joined_leaves_the_write_in_doubt(
    error: Exception, told: type[Exception] | None
) -> None:
    group = insert_group()
    group.doubt = DOUBT
    group.settle(error)
    with pytest.raises(told or type(error)) as caught:
        group.result()
    assert caught.value is (error if told is None else DOUBT)


async def test_write_has_begun_from_its_place_on_and_not_when_it_left_before() -> None:
    stays = insert_group()
    leaves = insert_group()
    pack = pack_of(stays, leaves)
    assert not stays.begun
    pack.leave(leaves)
    a_ticket(stamped(pack, tick=9))
    assert (stays.begun, leaves.begun) == (True, False)


async def test_write_whose_other_try_has_its_place_has_begun() -> None:
    group = insert_group()
    other = insert_group()
    a_ticket(stamped(pack_of(other), tick=9))
    group.other_try = other
    assert group.begun


# --- a pack ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pack, is_exclusive, has_bodies, makes_room",
    [
        pytest.param(pack_of(insert(A), insert(B)), False, False, False, id="rows"),
        pytest.param(
            pack_of(insert(A, txn_id=5)), False, True, False, id="body of an open transaction"
        ),
        pytest.param(pack_of(begin()), False, False, False, id="begin"),
        pytest.param(pack_of(commit(A)), False, False, False, id="commit"),
        pytest.param(pack_of(drop()), True, False, True, id="drop of a collection"),
        pytest.param(pack_of(time_tick()), False, False, True, id="time tick"),
        pytest.param(of(MessageType.CUT, CutHeader(1, ())), False, False, True, id="cut"),
        pytest.param(
            of(MessageType.FLUSH, FlushHeader(1, 2, 3, "full")), False, False, True, id="flush"
        ),
    ],
)
def test_chain_treats_a_pack_by_what_is_in_it(
    pack: Pack, is_exclusive: bool, has_bodies: bool, makes_room: bool
) -> None:
    kind = pack.first_type
    assert (kind in DDL, kind in DML, kind in MAKES_ROOM) == (is_exclusive, has_bodies, makes_room)
    assert pack.size_bytes == sum(group.size_bytes for group in pack.groups)


async def test_group_is_in_one_pack_at_a_time_and_never_in_another_once_it_has_its_place() -> None:
    group = insert_group()
    pack = pack_of(group, insert_group())
    pack.leave(group)
    assert group.pack is None
    later = stamped(pack_of(group), tick=9)
    a_ticket(later)
    with pytest.raises(AssertionError, match="appended once"):
        pack_of(group)
    with pytest.raises(AssertionError, match="stays"):
        later.leave(group)


async def test_groups_that_nobody_wants_leave_their_pack_and_give_their_memory_back() -> None:
    memory = Budget(1000)
    groups = [insert_group() for _ in range(3)]
    for group in groups:
        group.waiter = asyncio.get_running_loop().create_future()
        await memory.take(group.size_bytes)
        group.memory = memory
    pack = pack_of(*groups)
    pack.drop_cancelled()
    assert pack.groups == groups
    assert isinstance(groups[1].waiter, asyncio.Future)
    groups[1].waiter.cancel()
    pack.drop_cancelled()
    assert pack.groups == [groups[0], groups[2]]
    assert groups[1].pack is None
    assert memory.held_bytes == 2 * groups[0].size_bytes


def test_groups_get_ticks_one_after_the_other_and_may_get_others_when_it_is_redone() -> None:
    pack = pack_of(insert_group(), insert_group(), insert_group())
    for last in (10, 15):
        pack.stamp(last, None)
        assert (pack.first_tick, pack.time_tick) == (last - 2, last)
    pack.leave(pack.groups[1])
    pack.stamp(15, None)
    assert (pack.first_tick, pack.time_tick) == (14, 15)


def test_tick_that_is_not_above_the_last_one_is_refused_by_the_first_group() -> None:
    pack = stamped(pack_of(insert_group(), insert_group()), tick=10)
    pack.require_tick_above(9)
    with pytest.raises(InvalidArgument, match="tick 10 is not above 10"):
        pack.require_tick_above(10)


async def test_each_group_is_told_its_own_part_of_the_entry() -> None:
    target = FakeTarget(vchannels=(A, B))
    groups = [
        insert_group(target, rows=3),
        transaction_group(piece(target, (1, b"x"))),
        rows_group(piece(target, (0, b"y"), (1, b"z"))),
    ]
    pack = stamped(pack_of(*groups), tick=100, last_confirmed=2)
    a_ticket(pack, first_position=5, synced=False)
    first, second, third = pack.results()
    assert [
        (each.first_position, each.count, each.time_tick, each.txn_id)
        for each in (first, second, third)
    ] == [
        (5, 1, 100, 0),
        (6, 3, 101, 101),
        (9, 2, 102, 0),
    ]
    assert [each.row_offsets for each in (first, second, third)] == [
        {A: (0, 3)},
        {B: (0, 1)},
        {A: (3, 1), B: (1, 1)},
    ]
    assert {(each.last_confirmed_position, each.durable) for each in (first, second, third)} == {
        (2, False)
    }
    assert pack.message_count == 6


async def test_messages_are_told_as_one_group() -> None:
    pack = stamped(Pack([commit(A, txn_id=9)]), tick=100)
    a_ticket(pack)
    (result,) = pack.results()
    assert (result.first_position, result.count, result.txn_id, result.durable) == (5, 1, 9, True)
    assert result.last_confirmed_position == 5, "where it is itself"


@pytest.mark.parametrize("groups", [[insert(A), insert(B)], [begin()]], ids=["rows", "messages"])
async def test_entry_of_a_pack_is_what_its_bytes_decode_to(groups: list[AppendGroup]) -> None:
    pack = stamped(pack_of(*groups), tick=100, term=3)
    pack.groups[-1].producer = ProducerStamp(7, 3, 8)
    data = pack.encode("memory", first_position=5, previous_crc32c=0)
    expected = decode_entry(data, wal_name="memory", previous_crc32c=0)
    assert pack.entry is not None
    assert comparable(pack.entry) == comparable(expected)
    stamps = [expected.producer] if expected.rows is None else expected.rows.producers
    assert ProducerStamp(7, 3, 8) in stamps


@given(group=random_groups(groups_max=1), producer=producers)
def test_a_write_that_goes_alone_to_one_shard_is_a_message_and_says_what_the_packed_row_would(
    group: list[AppendGroup], producer: ProducerStamp | None
) -> None:
    group[0].producer = producer
    entry = packed_entry(*group, tick=100, first_position=40, last_confirmed=17, term=3)
    assert (entry.rows is None) == go_alone(group)
    if entry.rows is None:
        (expected,) = said_in(model_of(group, first_tick=100, first_position=40))
        assert tuple(map(said, entry.messages)) == expected
        assert (entry.producer, entry.last_confirmed_position, entry.wal_term) == (producer, 17, 3)
