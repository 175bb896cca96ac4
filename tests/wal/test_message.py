"""Messages keep what was stamped on them, once where once is the rule."""

import pytest

from tests.wal.entries import into_entry
from tests.wal.entries import stamped as stamped_pack
from wal.append import AppendGroup, Pack
from wal.entry import assemble_transaction
from wal.headers import (
    BodyAssignment,
    CommitTxnHeader,
    DeleteHeader,
    InsertHeader,
    MessageType,
)
from wal.message import Message, MutableMessage
from wal.position import MemoryMessageId


def insert(vchannel: str = "p0_1v0", payload: bytes = b"rows", txn_id: int = 0) -> MutableMessage:
    return MutableMessage(MessageType.INSERT, InsertHeader(1, 2, 1, 3), vchannel, payload, txn_id)


def stamped(messages: list[MutableMessage], tick: int, position: int) -> tuple[Message, ...]:
    stamped_pack(Pack([AppendGroup(messages)]), tick=tick)
    return into_entry(
        messages, wal_name="memory", first_position=position, crc32c=0, size_bytes=0
    ).messages


def test_term_of_a_pack_never_goes_down_and_a_later_one_may_take_over() -> None:
    pack = Pack([AppendGroup([insert()])])
    for term in (4, 4, 6):
        pack.stamp_wal_term(term)
    assert pack.messages[0].wal_term == 6
    with pytest.raises(AssertionError):
        pack.stamp_wal_term(5)


def test_a_pack_may_be_stamped_with_a_new_tick_when_it_is_redone() -> None:
    pack = Pack([AppendGroup([insert()])])
    for tick in (5, 6):
        pack.stamp(tick, None)
    assert pack.messages[0].time_tick == 6


def test_without_a_last_confirmed_position_a_message_confirms_its_own_entry() -> None:
    first, second = stamped([insert(), insert()], tick=9, position=7)
    assert (first.message_id, second.message_id) == (MemoryMessageId(7), MemoryMessageId(8))
    assert first.last_confirmed == second.last_confirmed == MemoryMessageId(7)


def test_a_frozen_message_does_not_see_later_changes_of_the_mutable_one() -> None:
    mutable = insert()
    (frozen,) = stamped([mutable], tick=9, position=7)
    mutable.time_tick = 10
    assert frozen.time_tick == 9


def test_a_transaction_gives_its_bodies_the_tick_and_the_assignments_of_its_commit() -> None:
    delete = MutableMessage(MessageType.DELETE, DeleteHeader(1, 1), "p0_1v0", b"keys", 5)
    bodies = stamped([delete, insert(txn_id=5)], 6, 2)
    assigned = (BodyAssignment(0, 40), BodyAssignment(11, 40))
    header = CommitTxnHeader(("p0_1v0",), assigned)
    (commit,) = stamped([MutableMessage(MessageType.COMMIT_TXN, header, txn_id=5)], 8, 4)

    transaction = assemble_transaction(bodies, commit)

    assert transaction.message_id == MemoryMessageId(4)
    assert [body.time_tick for body in transaction.bodies] == [8, 8]
    assert [body.header for body in transaction.bodies] == [
        DeleteHeader(1, 1, 40),
        InsertHeader(1, 2, 1, 3, 11, 40),
    ]
    assert {body.vchannel for body in transaction.bodies} == {"p0_1v0"}
