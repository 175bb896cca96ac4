import asyncio
from random import Random

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wal.errors import OnShutdown, StorageFull, TooLarge
from wal.queue import Admission, Budget

pytestmark = pytest.mark.anyio


async def waiters(admission: Admission, *sizes: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.ensure_future(admission.wait(size)) for size in sizes]
    await asyncio.sleep(0)
    return tasks


async def test_there_is_room_up_to_the_bound_and_not_beyond() -> None:
    admission = Admission(100)
    admission.take(60)
    [fits, exceeds] = await waiters(admission, 40, 41)
    assert (fits.done(), exceeds.done()) == (True, False)
    admission.give_back(60)
    await exceeds


async def test_a_size_over_the_bound_passes_when_nothing_is_queued() -> None:
    admission = Admission(100)
    await admission.wait(1000)
    admission.take(1000)
    [waiting] = await waiters(admission, 1)
    assert not waiting.done()
    admission.give_back(1000)
    await waiting


async def test_a_small_size_does_not_overtake_a_large_one() -> None:
    admission = Admission(100)
    admission.take(90)
    large, small = await waiters(admission, 50, 1)
    assert (large.done(), small.done()) == (False, False)
    admission.give_back(10)
    await asyncio.sleep(0)
    assert (large.done(), small.done()) == (False, False)
    admission.give_back(80)
    await asyncio.gather(large, small)


async def test_those_let_in_at_once_fit_together() -> None:
    admission = Admission(100)
    admission.take(100)
    tasks = await waiters(admission, 40, 40, 40)
    admission.give_back(70)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, False, False]
    admission.refuse(OnShutdown("end"))
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_nobody_waits_for_ever_behind_one_that_was_let_in_and_never_appended() -> None:
    admission = Admission(100)
    admission.take(100)
    tasks = await waiters(admission, 90, 90, 1000, 90)
    admission.give_back(100)
    await asyncio.gather(*tasks)


async def test_a_cancelled_wait_lets_the_next_one_in() -> None:
    admission = Admission(100)
    admission.take(50)
    large, small = await waiters(admission, 90, 10)
    large.cancel()
    await small
    assert len(admission._waiters) == 0


async def test_a_turn_that_was_given_and_cancelled_in_one_step_goes_to_the_next() -> None:
    admission = Admission(100)
    admission.take(100)
    first, second = await waiters(admission, 90, 90)
    admission.give_back(90)
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_refusing_ends_every_wait() -> None:
    admission = Admission(1)
    admission.take(1)
    tasks = await waiters(admission, 1, 1)
    admission.refuse(OnShutdown("closed"))
    for task in tasks:
        with pytest.raises(OnShutdown):
            await task


async def test_refusing_on_a_full_disk_leaves_those_in_their_order_that_make_room() -> None:
    admission = Admission(100)
    admission.take(100)
    rows, drop, cut = (
        asyncio.ensure_future(admission.wait(90)),
        asyncio.ensure_future(admission.wait(90, makes_room=True)),
        asyncio.ensure_future(admission.wait(90, makes_room=True)),
    )
    await asyncio.sleep(0)
    admission.refuse(StorageFull("disk", 0, 1), but_what_makes_room=True)
    with pytest.raises(StorageFull):
        await rows
    assert len(admission._waiters) == 2
    admission.give_back(20)
    await asyncio.sleep(0)
    assert (drop.done(), cut.done()) == (False, False)
    admission.give_back(80)
    await drop
    assert not cut.done()
    admission.take(90)
    admission.give_back(90)
    await cut


async def test_what_makes_room_passes_when_larger_ones_before_it_are_refused() -> None:
    admission = Admission(100)
    admission.take(50)
    rows = asyncio.ensure_future(admission.wait(90))
    drop = asyncio.ensure_future(admission.wait(10, makes_room=True))
    await asyncio.sleep(0)
    admission.refuse(StorageFull("disk", 0, 1), but_what_makes_room=True)
    await drop
    with pytest.raises(StorageFull):
        await rows


# --- bytes in memory ---------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 10), st.integers(0, 5), st.booleans()), max_size=30),
    st.randoms(use_true_random=False),
)
def test_budget_is_never_exceeded_and_whoever_waits_gets_a_turn_in_order(
    takers: list[tuple[int, int, bool]], random: Random
) -> None:
    """Each taker holds its bytes for some steps and then ends; some are cancelled while they wait."""

    async def run() -> None:
        budget, turns, gone = Budget(10), list[int](), set[int]()

        async def take(number: int, size_bytes: int, steps: int) -> None:
            await budget.take(size_bytes)
            turns.append(number)
            for _ in range(steps):
                assert 0 <= budget.held_bytes <= budget.bytes_max
                await asyncio.sleep(0)
            budget.give_back(size_bytes)

        tasks = [
            asyncio.get_running_loop().create_task(take(number, size_bytes, steps))
            for number, (size_bytes, steps, _) in enumerate(takers)
        ]
        for _ in range(random.randrange(10)):
            await asyncio.sleep(0)
        for number, (_, _, cancelled) in enumerate(takers):
            if cancelled and number not in turns:
                gone.add(number)
                tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert turns == sorted(turns)
        assert set(turns) | gone == set(range(len(takers))), "nobody waits for ever"
        assert budget.held_bytes == 0

    asyncio.run(run())


def test_more_than_a_budget_has_is_refused_at_once() -> None:
    with pytest.raises(TooLarge, match="pending_bytes_max"):
        Budget(10).try_take(11)


async def test_what_another_thread_gives_back_counts_from_the_next_look_on() -> None:
    budget = Budget(10)
    assert budget.try_take(10)
    assert not budget.try_take(1)
    await anyio.to_thread.run_sync(budget.give_back_later, 10)
    assert budget.try_take(10)
