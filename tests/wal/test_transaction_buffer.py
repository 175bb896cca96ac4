"""Transactions come out whole at their commit, or not at all, and nothing expires on the way."""

import pytest

from tests.scanner.journal import begin, commit, drop, frozen, insert, rollback, seen
from tests.wal.entries import packed_entry
from tests.wal.packed import FakeTarget, insert_group, piece, transaction_group
from wal.entry import LogEntry, TransactionBuffer, messages_of
from wal.errors import Corrupt
from wal.headers import InsertHeader
from wal.message import AnyMessage, Message, MutableMessage, TransactionMessage


def entries(*groups: list[MutableMessage], first_tick: int = 10) -> list[LogEntry]:
    """Return groups as entries at ticks `first_tick`, `first_tick` + 1, and so on."""
    made: list[LogEntry] = []
    position = 1
    for tick, group in enumerate(groups, first_tick):
        made.append(frozen(group, tick, position))
        position += len(group)
    return made


def visible(buffer: TransactionBuffer, made: list[LogEntry]) -> list[AnyMessage]:
    return [message for entry in made for message in messages_of(buffer.observe(entry))]


def test_plain_messages_pass_as_they_are() -> None:
    made = entries([insert(b"a")], [insert(b"b"), insert(b"c")])
    assert visible(TransactionBuffer(), made) == [
        message for entry in made for message in entry.messages
    ]


def test_pieces_of_transactions_from_before_the_scan_are_dropped() -> None:
    buffer = TransactionBuffer()
    made = entries(
        [insert(b"plain")],
        [insert(b"body", txn_id=3)],
        [insert(b"plain")],
        [rollback(4)],
        [commit(5, [])],
    )
    assert [
        message.payload for message in visible(buffer, made) if isinstance(message, Message)
    ] == [b"plain"] * 2


def test_a_transaction_appears_at_its_commit_with_what_was_interleaved_before_it() -> None:
    bodies = [insert(b"one", txn_id=10), insert(b"two", txn_id=10)]
    made = entries([begin(10)], bodies[:1], [insert(b"plain")], bodies[1:], [commit(10, bodies)])
    buffer = TransactionBuffer()
    assert visible(buffer, made[:2]) == []
    assert seen(visible(buffer, made[2:4])) == [(12, (b"plain",))]
    (transaction,) = visible(buffer, made[4:])
    assert isinstance(transaction, TransactionMessage)
    assert seen([transaction]) == [(14, (b"one", b"two"))]
    assert {body.time_tick for body in transaction.bodies} == {14}
    headers = [body.header for body in transaction.bodies]
    assert all(isinstance(header, InsertHeader) for header in headers)
    assert [header.first_offset for header in headers if isinstance(header, InsertHeader)] == [
        10,
        11,
    ]
    assert (buffer.open_transactions, buffer.size_bytes) == ((), 0)


def test_a_transaction_in_one_entry_equals_the_same_one_in_pieces() -> None:
    bodies = [insert(b"one", txn_id=10), insert(b"two", txn_id=10)]
    (whole,) = visible(TransactionBuffer(), entries([begin(10), *bodies, commit(10, bodies)]))
    bodies = [insert(b"one", txn_id=10), insert(b"two", txn_id=10)]
    (pieces,) = visible(TransactionBuffer(), entries([begin(10)], [*bodies, commit(10, bodies)]))
    assert [each.payload for each in _bodies(whole)] == [each.payload for each in _bodies(pieces)]
    assert [each.header for each in _bodies(whole)] == [each.header for each in _bodies(pieces)]


def test_a_rolled_back_transaction_never_appears() -> None:
    made = entries([begin(10)], [insert(b"body", txn_id=10)], [rollback(10)], [insert(b"plain")])
    buffer = TransactionBuffer()
    assert seen(visible(buffer, made)) == [(13, (b"plain",))]
    assert buffer.size_bytes == 0


def test_a_second_begin_of_a_transaction_is_ignored() -> None:
    body = insert(b"body", txn_id=10)
    made = entries([begin(10)], [body], [begin(10)], [commit(10, [body])])
    assert seen(visible(TransactionBuffer(), made)) == [(13, (b"body",))]


def test_a_transaction_without_bodies_is_delivered_empty() -> None:
    assert seen(visible(TransactionBuffer(), entries([begin(10)], [commit(10, [])]))) == [(11, ())]


def test_transactions_never_expire_however_far_ticks_move() -> None:
    body = insert(b"body", txn_id=10)
    buffer = TransactionBuffer()
    for entry in entries([begin(10)], [body]):
        buffer.observe(entry)
    late = frozen([commit(10, [body])], 1 << 60, 3)
    assert seen(list(messages_of(buffer.observe(late)))) == [(1 << 60, (b"body",))]


def test_a_commit_whose_begin_must_have_been_seen_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="without its begin"):
        visible(TransactionBuffer(), entries([insert()], [insert()], [commit(11, [])]))


def test_the_first_entry_of_a_scan_is_where_begins_must_be_seen() -> None:
    with pytest.raises(Corrupt):
        visible(TransactionBuffer(), entries([drop()], [commit(10, [])]))


def test_a_second_commit_of_a_transaction_is_corrupt() -> None:
    with pytest.raises(Corrupt):
        visible(TransactionBuffer(), entries([begin(10)], [commit(10, [])], [commit(10, [])]))


def test_a_commit_that_assigns_another_number_of_bodies_is_corrupt() -> None:
    body = insert(b"body", txn_id=10)
    with pytest.raises(Corrupt, match="bodies"):
        visible(TransactionBuffer(), entries([begin(10)], [body], [commit(10, [body, body])]))


def test_whoever_asks_is_told_of_a_commit_from_before_the_scan() -> None:
    missed: list[int] = []
    buffer = TransactionBuffer(begin_missing=lambda message: missed.append(message.txn_id))
    visible(buffer, entries([insert()], [commit(3, [])]))
    assert missed == [3]


def test_open_transactions_are_listed_in_the_order_they_began() -> None:
    buffer = TransactionBuffer()
    visible(
        buffer,
        entries(
            [begin(10)], [begin(11)], [insert(b"body", txn_id=11)], [begin(13)], [rollback(13)]
        ),
    )
    assert [(each.begin.txn_id, len(each.bodies)) for each in buffer.open_transactions] == [
        (10, 0),
        (11, 1),
    ]
    assert buffer.size_bytes > 0


def _bodies(message: AnyMessage) -> tuple[Message, ...]:
    assert isinstance(message, TransactionMessage)
    return message.bodies


def packed(tick: int, position: int) -> LogEntry:
    """Return a plain insert and a whole transaction of two, packed, at a tick and the next one."""
    target = FakeTarget()
    transaction = transaction_group(piece(target, (0, b"x")), piece(target, (0, b"y")))
    return packed_entry(
        insert_group(target, data=b"p"), transaction, tick=tick, first_position=position
    )


def test_packed_rows_come_out_at_their_place_between_the_pieces_of_a_transaction() -> None:
    bodies = [insert(b"one", txn_id=10)]
    before = entries([begin(10)], bodies)
    after = entries([commit(10, bodies)], first_tick=20)
    buffer = TransactionBuffer()
    assert visible(buffer, before) == []
    plain, whole = visible(buffer, [packed(14, 3)])
    assert (plain.time_tick, plain.position, whole.time_tick, whole.position) == (14, 3, 15, 7)
    assert len(_bodies(whole)) == 2
    assert [each.begin.txn_id for each in buffer.open_transactions] == [10], (
        "packed transactions are never open"
    )
    assert seen(visible(buffer, after)) == [(20, (b"one",))]


def test_transaction_packed_at_first_entry_needs_no_begin_and_those_before_it_are_dropped() -> None:
    missed: list[int] = []
    buffer = TransactionBuffer(begin_missing=lambda commit: missed.append(commit.txn_id))
    assert len(visible(buffer, [packed(14, 3)])) == 2
    assert visible(buffer, entries([commit(13, [])], first_tick=20)) == []
    assert missed == [13], "its begin lies before the first tick of the first entry"
    with pytest.raises(Corrupt, match="without its begin"):
        visible(buffer, entries([commit(14, [])], first_tick=21))


def test_packed_transaction_equals_the_same_one_in_pieces() -> None:
    (_, whole) = visible(TransactionBuffer(), [packed(14, 3)])
    bodies = [insert(b"x", txn_id=10), insert(b"y", txn_id=10)]
    (pieces,) = visible(TransactionBuffer(), entries([begin(10)], [*bodies, commit(10, bodies)]))
    assert [(body.type, body.vchannel) for body in _bodies(whole)] == [
        (body.type, body.vchannel) for body in _bodies(pieces)
    ]
    assert [body.position - whole.position for body in _bodies(whole)] == [-2, -1]
    assert {body.time_tick for body in _bodies(whole)} == {whole.time_tick}
    assert {body.txn_id for body in _bodies(whole)} == {whole.txn_id} == {15}
