"""Writes that may be repeated stay within one window of each other."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamingnode.writing.retry_room import RetryRoom

pytestmark = pytest.mark.anyio


async def test_write_waits_while_the_oldest_open_one_is_a_window_behind() -> None:
    room = RetryRoom(3)
    places = [await room.enter() for _ in range(3)]
    waiting = asyncio.get_running_loop().create_task(room.enter())
    for place in (1, 2):
        room.leave(place)
        await asyncio.sleep(0)
    assert not waiting.done(), "the oldest one is still open"
    room.leave(0)
    assert (places, await waiting, room.open) == ([0, 1, 2], 3, 1)


async def test_cancelled_wait_takes_no_place() -> None:
    room = RetryRoom(1)
    await room.enter()
    first, second = [asyncio.get_running_loop().create_task(room.enter()) for _ in range(2)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    room.leave(0)
    assert await second == 1
    assert room.open == 1


@given(places=st.integers(1, 4), leaving=st.lists(st.integers(0, 10), max_size=30))
def test_open_writes_never_span_more_than_the_room(places: int, leaving: list[int]) -> None:
    async def run() -> None:
        room, held, waiting = RetryRoom(places), list[int](), list[asyncio.Task[int]]()
        for choice in leaving:
            waiting.append(asyncio.get_running_loop().create_task(room.enter()))
            for _ in range(4):
                await asyncio.sleep(0)
            held += [task.result() for task in waiting if task.done()]
            waiting = [task for task in waiting if not task.done()]
            assert not held or max(held) - min(held) < places
            if held:
                room.leave(held.pop(choice % len(held)))
        for task in waiting:
            task.cancel()

    asyncio.run(run())
