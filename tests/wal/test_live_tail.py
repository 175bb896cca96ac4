"""The live tail wakes its readers, never waits for them, and tells them when they were too slow."""

import asyncio
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scanner.source import Closing, EntrySource, LogReads, Read
from tests.scanner.journal import frozen, insert
from tests.wal.entries import packed_entry
from tests.wal.packed import insert_group
from wal.entry import LogEntry
from wal.errors import OnShutdown
from wal.live_tail import LiveTail
from wal.log import Log

pytestmark = pytest.mark.anyio

PLENTY = 1 << 20


class BackToLog(Exception):
    """What the reader wants is not in the tail; carries the position."""


class OtherLog:
    first_position = 1
    durable_position = 1 << 60

    async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        raise BackToLog(position)


def entry(position: int, *, size_bytes: int = 10) -> LogEntry:
    """Return the entry at `position`, with the tick 100 times that."""
    return frozen([insert()], 100 * position, position, size_bytes=size_bytes)


def reader_at(
    tail: LiveTail, position: int, *, read_bytes: int = PLENTY, closing: Closing | None = None
) -> EntrySource:
    reads = LogReads(cast("Log", OtherLog()))
    return EntrySource(
        reads, tail, position, read_bytes=read_bytes, closing=closing or Closing("reader")
    )


def positions(read: Read) -> list[int]:
    return [each.first_position for each in read.entries]


async def asleep(task: "asyncio.Task[Read]") -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def test_a_reader_gets_what_is_there_without_waiting() -> None:
    tail = LiveTail()
    tail.append(entry(1))
    tail.append(entry(2))
    read = await reader_at(tail, 1).next()
    assert (positions(read), read.confirmed_tick) == ([1, 2], 200)


async def test_a_sleeping_reader_is_woken_by_an_append() -> None:
    tail = LiveTail()
    task = asyncio.create_task(reader_at(tail, 1).next())
    assert await asleep(task)
    tail.append(entry(1))
    assert positions(await task) == [1]


async def test_a_reader_of_an_idle_tail_gets_the_newest_tick_only() -> None:
    tail = LiveTail()
    reader = reader_at(tail, 1)
    for tick in (10, 20, 30):
        tail.advance(tick)
    assert await reader.next() == ([], 30)
    task = asyncio.create_task(reader.next())
    assert await asleep(task)
    tail.advance(40)
    assert await task == ([], 40)


async def test_an_idle_tick_rides_on_the_last_entries() -> None:
    tail = LiveTail()
    tail.append(entry(1))
    tail.advance(150)
    reader = reader_at(tail, 1)
    assert (await reader.next()).confirmed_tick == 150


async def test_a_read_that_stops_at_its_bound_confirms_only_what_it_has() -> None:
    tail = LiveTail()
    tail.append(entry(1))
    tail.append(entry(2))
    tail.advance(999)
    reader = reader_at(tail, 1, read_bytes=1)
    first = await reader.next()
    second = await reader.next()
    assert (positions(first), first.confirmed_tick) == ([1], 100)
    assert (positions(second), second.confirmed_tick) == ([2], 999)


async def test_entries_of_several_messages_are_handed_out_once() -> None:
    tail = LiveTail()
    for position in (1, 4, 7):
        tail.append(frozen([insert(), insert(), insert()], 100 * position, position))
    reader = reader_at(tail, 1, read_bytes=1)
    assert [positions(await reader.next()) for _ in range(3)] == [[1], [4], [7]]
    reading = asyncio.create_task(reader.next())
    assert await asleep(reading)
    reading.cancel()


async def test_a_pack_is_handed_out_once_with_the_last_of_its_ticks() -> None:
    tail = LiveTail()
    tail.append(entry(1))
    tail.append(packed_entry(*[insert_group() for _ in range(3)], tick=200, first_position=2))
    reader = reader_at(tail, 1, read_bytes=1)
    first = await reader.next()
    second = await reader.next()
    assert (positions(first), first.confirmed_tick) == ([1], 100)
    assert (positions(second), second.confirmed_tick) == ([2], 202)
    reading = asyncio.create_task(reader.next())
    assert await asleep(reading)
    tail.append(entry(5))
    assert positions(await reading) == [5]


async def test_a_reader_that_was_too_slow_is_evicted() -> None:
    tail = LiveTail(capacity_bytes=25)
    reader = reader_at(tail, 1)
    for position in range(1, 6):
        tail.append(entry(position))
    with pytest.raises(BackToLog, match="1"):
        await reader.next()


async def test_a_reader_past_the_end_sleeps_until_the_tail_gets_there() -> None:
    tail = LiveTail()
    reader = reader_at(tail, 3)
    tail.append(entry(1))
    assert await reader.next() == ([], 100)
    tail.append(entry(2))
    assert await reader.next() == ([], 200)
    tail.append(entry(3))
    assert positions(await reader.next()) == [3]


async def test_a_cancelled_wait_loses_nothing() -> None:
    tail = LiveTail()
    reader = reader_at(tail, 1)
    task = asyncio.create_task(reader.next())
    assert await asleep(task)
    tail.append(entry(1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert positions(await reader.next()) == [1]


async def test_cancelling_one_reader_leaves_the_others_asleep() -> None:
    tail = LiveTail()
    first, second = (asyncio.create_task(reader_at(tail, 1).next()) for _ in range(2))
    assert await asleep(first)
    first.cancel()
    assert await asleep(second)
    tail.append(entry(1))
    assert positions(await second) == [1]


async def test_closing_the_tail_releases_everyone() -> None:
    tail = LiveTail()
    reading = asyncio.create_task(reader_at(tail, 1).next())
    assert await asleep(reading)
    tail.close()
    tail.close()
    with pytest.raises(OnShutdown):
        await reading


async def test_what_was_published_before_the_close_can_still_be_read() -> None:
    tail = LiveTail()
    tail.append(entry(1))
    tail.close()
    reader = reader_at(tail, 1)
    assert positions(await reader.next()) == [1]
    with pytest.raises(OnShutdown):
        await reader.next()


async def test_closing_a_reader_ends_its_wait_only() -> None:
    tail = LiveTail()
    closing = Closing("mine")
    mine = reader_at(tail, 1, closing=closing)
    other = reader_at(tail, 1)
    reading = asyncio.create_task(mine.next())
    others = asyncio.create_task(other.next())
    assert await asleep(reading)
    mine.close()
    await closing.close()
    with pytest.raises(OnShutdown):
        await reading
    assert await asleep(others)
    tail.append(entry(1))
    assert positions(await others) == [1]


async def test_a_restarted_tail_sends_its_readers_back_to_the_log() -> None:
    tail = LiveTail()
    reader = reader_at(tail, 1)
    tail.start(next_position=4, confirmed_tick=350)
    with pytest.raises(BackToLog, match="1"):
        await reader.next()
    assert await reader_at(tail, 4).next() == ([], 350)


STEPS = st.sampled_from(["append", "append", "advance", "read", "turn"])


@given(
    st.integers(0, 60).flatmap(lambda count: st.lists(STEPS, min_size=count, max_size=count)),
    st.integers(10, 60),
)
async def test_a_reader_sees_every_entry_in_order_or_is_evicted(
    steps: list[str], capacity_bytes: int
) -> None:
    tail = LiveTail(capacity_bytes=capacity_bytes)
    reader = reader_at(tail, 1, read_bytes=20)
    got: list[int] = []
    ticks = [0]
    for step in steps:
        match step:
            case "append":
                position = tail.next_position
                tick = tail.confirmed_tick + 1
                tail.append(frozen([insert()], tick, position, size_bytes=10))
            case "advance":
                tail.advance(tail.confirmed_tick + 1)
            case "read" if tail.confirmed_tick > ticks[-1]:
                try:
                    read = await reader.next()
                except BackToLog:
                    assert len(got) + 1 < tail.first_position
                    reader = reader_at(tail, tail.first_position, read_bytes=20)
                    got = list(range(1, tail.first_position))
                    continue
                got += positions(read)
                ticks.append(read.confirmed_tick)
            case _:
                await asyncio.sleep(0)
    assert got == list(range(1, len(got) + 1))
    assert ticks == sorted(ticks)
