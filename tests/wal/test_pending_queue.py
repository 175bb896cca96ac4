"""Snapshots of the newest entries: what is there, what is not yet there, what is gone."""

import pytest

from tests.scanner.journal import Clock, frozen, insert
from wal.live_tail import Evicted, PendingQueue
from wal.message import LogEntry


def entry(tick: int, size_bytes: int, position: int) -> LogEntry:
    return frozen([insert()], tick, position, size_bytes=size_bytes)


def ticks(entries: list[LogEntry]) -> list[int]:
    return [each.time_tick for each in entries]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> PendingQueue:
    """Return a queue of 100 bytes at its bound: opened at tick 99, then ticks 100, 101, 103 and 104."""
    queue = PendingQueue(capacity_bytes=100, age_s=30, clock=clock)
    queue.restart(next_position=1, confirmed_tick=99)
    for position, (tick, size_bytes) in enumerate([(100, 10), (101, 20), (103, 30), (104, 40)], 1):
        queue.push(entry(tick, size_bytes, position))
    return queue


@pytest.mark.parametrize("position,expected", [(1, 4), (3, 2), (4, 1), (5, 0), (9, 0)])
def test_a_snapshot_from_a_position_has_it_and_all_after(queue: PendingQueue, position: int, expected: int) -> None:
    assert len(queue.snapshot_from(position)) == expected


def test_the_oldest_entries_go_when_the_capacity_is_passed(queue: PendingQueue) -> None:
    before = queue.snapshot_from(1)
    queue.push(entry(105, 60, 5))
    assert len(queue) == 2
    assert ticks(queue.snapshot_from(4)) == [104, 105]
    with pytest.raises(Evicted):
        queue.snapshot_from(3)
    assert ticks(before) == [100, 101, 103, 104], "an old snapshot changes nothing"


def test_old_entries_go_but_the_last_one_stays(queue: PendingQueue, clock: Clock) -> None:
    clock.now_s = 31
    queue.advance(110)
    assert ticks(queue.snapshot_from(4)) == [104]
    assert queue.size_bytes == 40


def test_an_entry_over_the_capacity_is_kept_while_it_is_the_last(queue: PendingQueue) -> None:
    queue.push(entry(105, 1000, 5))
    assert ticks(queue.snapshot_from(5)) == [105]


def test_an_entry_at_or_below_the_last_tick_is_refused(queue: PendingQueue) -> None:
    with pytest.raises(AssertionError):
        queue.push(entry(104, 1, 5))


def test_an_entry_at_or_below_an_idle_tick_is_refused(queue: PendingQueue) -> None:
    queue.advance(110)
    with pytest.raises(AssertionError):
        queue.push(entry(110, 1, 5))


def test_a_gap_in_the_positions_is_refused(queue: PendingQueue) -> None:
    with pytest.raises(AssertionError):
        queue.push(entry(105, 1, 6))


def test_idle_ticks_take_no_space(queue: PendingQueue) -> None:
    for tick in range(105, 1000):
        queue.advance(tick)
    assert (queue.confirmed_tick, queue.size_bytes, len(queue)) == (999, 100, 4)


def test_an_idle_tick_that_an_entry_has_overtaken_changes_nothing(queue: PendingQueue) -> None:
    queue.advance(50)
    assert queue.confirmed_tick == 104


def test_a_position_inside_an_entry_finds_that_entry() -> None:
    queue = PendingQueue(capacity_bytes=1000, age_s=30, clock=Clock())
    queue.push(frozen([insert(), insert(), insert()], 5, 11))
    queue.push(frozen([insert()], 6, 14))
    assert ticks(queue.snapshot_from(12)) == [5, 6]
    assert ticks(queue.snapshot_from(14)) == [6]


def test_a_bounded_snapshot_ends_with_the_entry_that_reaches_the_bound(queue: PendingQueue) -> None:
    assert ticks(queue.snapshot_from(1, bytes_max=11)) == [100, 101]
    assert ticks(queue.snapshot_from(1, bytes_max=1)) == [100]


def test_before_its_first_entry_a_queue_covers_nothing() -> None:
    queue = PendingQueue(capacity_bytes=100, age_s=30, clock=Clock())
    with pytest.raises(Evicted):
        queue.snapshot_from(1)


def test_a_restart_sends_everyone_below_the_new_position_away(queue: PendingQueue) -> None:
    queue.restart(next_position=7, confirmed_tick=200)
    with pytest.raises(Evicted):
        queue.snapshot_from(5)
    assert queue.snapshot_from(7) == []
    queue.push(entry(201, 5, 7))
    assert ticks(queue.snapshot_from(7)) == [201]
