from interceptors.timetick import MvccManager
from tests.wal.entries import into_entry, packed_entry
from tests.wal.manual_log import A, B, begin, commit, insert
from tests.wal.packed import transaction_group
from wal.append import AppendGroup
from wal.entry import LogEntry
from wal.headers import DropCollectionHeader, MessageType
from wal.message import MutableMessage


def entry(group: AppendGroup, tick: int) -> LogEntry:
    if group.pieces:
        return packed_entry(group, tick=tick, first_position=tick)
    for message in group.messages:
        message.time_tick = tick
    return into_entry(group.messages, first_position=tick)


def test_unchanged_vchannel_is_complete_at_the_first_tick() -> None:
    assert MvccManager(10).of(A) == (A, 10, True)


def test_change_is_confirmed_with_its_tick() -> None:
    mvcc = MvccManager(10)
    mvcc.update(entry(insert(A, B), 12))
    mvcc.update(entry(insert(B), 14))
    assert mvcc.all_vchannels() == [(A, 12, False), (B, 14, False)]
    mvcc.confirmed_tick = 13
    assert mvcc.all_vchannels() == [(A, 12, True), (B, 14, False)]


def test_entries_out_of_order_do_not_move_a_vchannel_back() -> None:
    mvcc = MvccManager(10)
    mvcc.update(entry(insert(A), 14))
    mvcc.update(entry(insert(A), 12))
    assert mvcc.of(A).time_tick == 14


def test_vchannel_of_a_pack_changes_at_the_last_group_that_writes_to_it() -> None:
    mvcc = MvccManager(10)
    mvcc.update(
        packed_entry(
            insert(A), insert(A, B), insert(A), insert(B), insert(A), tick=12, first_position=1
        )
    )
    assert mvcc.all_vchannels() == [(A, 16, False), (B, 15, False)]


def test_streamed_transaction_changes_its_vchannels_at_its_commit_only() -> None:
    mvcc = MvccManager(10)
    mvcc.update(entry(begin(), 12))
    mvcc.update(entry(insert(A, txn_id=12), 13))
    assert mvcc.all_vchannels() == []
    mvcc.update(entry(commit(A, B, txn_id=12), 15))
    assert mvcc.all_vchannels() == [(A, 15, False), (B, 15, False)]


def test_buffered_transaction_changes_its_vchannels_at_its_tick() -> None:
    mvcc = MvccManager(10)
    mvcc.update(
        packed_entry(
            transaction_group(*insert(A).pieces, *insert(B).pieces), tick=12, first_position=1
        )
    )
    assert mvcc.all_vchannels() == [(A, 12, False), (B, 12, False)]


def test_dropped_vchannel_is_forgotten() -> None:
    mvcc = MvccManager(10)
    mvcc.update(entry(insert(A), 12))
    drop = MutableMessage(MessageType.DROP_COLLECTION, DropCollectionHeader(1), vchannel=A)
    mvcc.update(entry(AppendGroup([drop]), 13))
    assert mvcc.all_vchannels() == []
