"""Entries leave in the order of their ticks, when a tick says so."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scanner.reorder import ReorderBuffer
from tests.scanner.journal import frozen, insert, put, tailed_journal
from wal.entry import LogEntry


def entry(tick: int) -> LogEntry:
    return frozen([insert()], tick, tick)


def ticks(entries: list[LogEntry]) -> list[int]:
    return [each.time_tick for each in entries]


def test_entries_in_random_order_leave_ascending_up_to_each_tick() -> None:
    buffer = ReorderBuffer()
    shuffled = list(range(1, 26))
    random.Random(7).shuffle(shuffled)
    for tick in shuffled:
        buffer.push(entry(tick))
    popped = [ticks(buffer.pop_until(tick)) for tick in (0, 1, 10, 25)]
    assert popped == [[], [1], list(range(2, 11)), list(range(11, 26))]


def test_a_tick_at_or_below_the_last_one_is_ignored() -> None:
    buffer = ReorderBuffer()
    buffer.push(entry(5))
    assert ticks(buffer.pop_until(5)) == [5]
    buffer.push(entry(6))
    assert buffer.pop_until(5) == []
    assert buffer.pop_until(3) == []
    assert buffer.last_tick == 5
    assert ticks(buffer.pop_until(6)) == [6]


def test_an_entry_at_or_below_the_last_tick_is_refused() -> None:
    buffer = ReorderBuffer()
    buffer.pop_until(5)
    for tick in (5, 4, 6):
        buffer.push(entry(tick))
    assert ticks(buffer.pop_until(9)) == [6]


def test_the_same_entry_again_is_refused() -> None:
    buffer = ReorderBuffer()
    buffer.push(entry(5))
    buffer.push(entry(5))
    assert ticks(buffer.pop_until(9)) == [5]


@pytest.mark.anyio
async def test_a_pack_leaves_as_a_whole_once_the_tick_of_its_last_write_is_confirmed() -> None:
    journal = await tailed_journal()
    pack = journal.pack(put(b"a"), put(b"b"), put(b"c"))
    buffer = ReorderBuffer()
    buffer.push(pack)
    assert buffer.pop_until(2) == []
    assert buffer.pop_until(3) == [pack]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30))))
def test_what_leaves_is_strictly_ascending_whatever_comes(steps: list[tuple[bool, int]]) -> None:
    buffer = ReorderBuffer()
    out: list[int] = []
    pushed = 0
    for is_tick, tick in steps:
        if is_tick:
            out += ticks(buffer.pop_until(tick))
        else:
            pushed += tick > buffer.last_tick and tick not in buffer._entries
            buffer.push(entry(tick))
    assert out == sorted(set(out))
    assert len(out) + len(buffer._entries) == pushed
