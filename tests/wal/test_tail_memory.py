"""Snapshots of the newest entries: what is there, what is not yet there, what is gone."""

import pytest

from tests.scanner.journal import frozen, insert
from tests.wal.entries import packed_entry
from tests.wal.packed import insert_group
from wal.entry import LogEntry
from wal.live_tail import LiveTail


def entry(tick: int, size_bytes: int, position: int) -> LogEntry:
    return frozen([insert()], tick, position, size_bytes=size_bytes)


def snapshot(tail: LiveTail, position: int, bytes_max: int = 1 << 20) -> list[LogEntry]:
    return tail.read(position, bytes_max=bytes_max)


def ticks(entries: list[LogEntry]) -> list[int]:
    return [each.time_tick for each in entries]


@pytest.fixture
def tail() -> LiveTail:
    """Return a tail of 100 bytes at its bound: opened at tick 99, then ticks 100, 101, 103 and
    104.
    """
    tail = LiveTail(capacity_bytes=100)
    tail.start(next_position=1, confirmed_tick=99)
    for position, (tick, size_bytes) in enumerate([(100, 10), (101, 20), (103, 30), (104, 40)], 1):
        tail.append(entry(tick, size_bytes, position))
    return tail


@pytest.mark.parametrize("position,expected", [(1, 4), (3, 2), (4, 1), (5, 0), (9, 0)])
def test_a_snapshot_from_a_position_has_it_and_all_after(
    tail: LiveTail, position: int, expected: int
) -> None:
    assert len(snapshot(tail, position)) == expected


def test_the_oldest_entries_go_when_the_capacity_is_passed(tail: LiveTail) -> None:
    before = snapshot(tail, 1)
    tail.append(entry(105, 60, 5))
    assert tail.entry_count == 2
    assert ticks(snapshot(tail, 4)) == [104, 105]
    with pytest.raises(AssertionError):
        snapshot(tail, 3)
    assert ticks(before) == [100, 101, 103, 104], "an old snapshot changes nothing"


def test_an_entry_over_the_capacity_is_kept_while_it_is_the_last(tail: LiveTail) -> None:
    tail.append(entry(105, 1000, 5))
    assert ticks(snapshot(tail, 5)) == [105]


def test_an_entry_at_or_below_the_last_tick_is_refused(tail: LiveTail) -> None:
    with pytest.raises(AssertionError):
        tail.append(entry(104, 1, 5))


def test_an_entry_at_or_below_an_idle_tick_is_refused(tail: LiveTail) -> None:
    tail.advance(110)
    with pytest.raises(AssertionError):
        tail.append(entry(110, 1, 5))


def test_a_gap_in_the_positions_is_refused(tail: LiveTail) -> None:
    with pytest.raises(AssertionError):
        tail.append(entry(105, 1, 6))


def test_idle_ticks_take_no_space(tail: LiveTail) -> None:
    for tick in range(105, 1000):
        tail.advance(tick)
    assert (tail.confirmed_tick, tail.size_bytes, tail.entry_count) == (999, 100, 4)


def test_an_idle_tick_that_an_entry_has_overtaken_changes_nothing(tail: LiveTail) -> None:
    tail.advance(50)
    assert tail.confirmed_tick == 104


def test_a_position_inside_an_entry_finds_that_entry() -> None:
    tail = LiveTail()
    tail.start(next_position=11, confirmed_tick=4)
    tail.append(frozen([insert(), insert(), insert()], 5, 11))
    tail.append(frozen([insert()], 6, 14))
    assert ticks(snapshot(tail, 12)) == [5, 6]
    assert ticks(snapshot(tail, 14)) == [6]


def test_a_bounded_snapshot_ends_with_the_entry_that_reaches_the_bound(tail: LiveTail) -> None:
    assert ticks(snapshot(tail, 1, 11)) == [100, 101]
    assert ticks(snapshot(tail, 1, 1)) == [100]


def test_a_restart_sends_everyone_below_the_new_position_away(tail: LiveTail) -> None:
    tail.start(next_position=7, confirmed_tick=200)
    with pytest.raises(AssertionError):
        snapshot(tail, 5)
    assert snapshot(tail, 7) == []
    tail.append(entry(201, 5, 7))
    assert ticks(snapshot(tail, 7)) == [201]


def pack(tick: int, position: int, groups: int = 3) -> LogEntry:
    return packed_entry(
        *[insert_group() for _ in range(groups)], tick=tick, first_position=position, size_bytes=50
    )


def test_a_pack_confirms_the_last_of_its_ticks_and_takes_the_positions_of_all_its_groups(
    tail: LiveTail,
) -> None:
    tail.append(pack(105, 5))
    assert (tail.confirmed_tick, tail.next_position) == (107, 8)
    for position in (5, 6, 7):
        assert ticks(snapshot(tail, position)) == [107]
    with pytest.raises(AssertionError):
        tail.append(entry(107, 1, 8))
    tail.append(entry(108, 1, 8))


def test_a_pack_of_which_any_tick_is_confirmed_already_is_refused(tail: LiveTail) -> None:
    tail.advance(105)
    with pytest.raises(AssertionError):
        tail.append(pack(105, 5))
    tail.append(pack(106, 5))


def test_a_pack_goes_as_a_whole_when_the_capacity_is_passed(tail: LiveTail) -> None:
    tail.append(pack(105, 5))
    tail.append(entry(108, 60, 8))
    assert tail.first_position == 8
    with pytest.raises(AssertionError):
        snapshot(tail, 7)
