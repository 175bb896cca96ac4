import asyncio
from random import Random

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wal.errors import StorageFull, TooLarge
from wal.queue import Budget, Signal

pytestmark = pytest.mark.anyio


def taking(budget: Budget, *sizes: int) -> list[asyncio.Task[None]]:
    return [asyncio.ensure_future(budget.take(size)) for size in sizes]


async def steps() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_there_is_room_up_to_the_bound_and_not_beyond() -> None:
    budget = Budget(100)
    budget.keep(60)
    fits, exceeds = taking(budget, 40, 1)
    await steps()
    assert (fits.done(), exceeds.done()) == (True, False)
    budget.give_back(60)
    await exceeds
    assert budget.held_bytes == 41


async def test_a_small_size_does_not_overtake_a_large_one() -> None:
    budget = Budget(100)
    budget.keep(90)
    large, small = taking(budget, 50, 1)
    await steps()
    assert (large.done(), small.done(), budget.has_room(1)) == (False, False, False)
    budget.give_back(10)
    await steps()
    assert (large.done(), small.done(), budget.has_room(1)) == (False, False, False)
    budget.give_back(80)
    await asyncio.gather(large, small)
    assert budget.has_room(49)


async def test_those_let_in_at_once_fit_together() -> None:
    budget = Budget(100)
    budget.keep(100)
    tasks = taking(budget, 40, 40, 40)
    await steps()
    budget.give_back(90)
    await steps()
    assert [task.done() for task in tasks] == [True, True, False]
    budget.give_back(40)
    await tasks[2]


async def test_a_cancelled_wait_lets_the_next_one_in() -> None:
    budget = Budget(100)
    budget.keep(50)
    large, small = taking(budget, 90, 10)
    await steps()
    large.cancel()
    await small
    assert budget.held_bytes == 60


async def test_a_turn_that_was_given_and_cancelled_in_one_step_goes_to_the_next() -> None:
    budget = Budget(100)
    budget.keep(100)
    first, second = taking(budget, 90, 90)
    await steps()
    budget.give_back(100)
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert budget.held_bytes == 90


async def test_nobody_waits_for_ever_behind_one_that_was_let_in_and_never_appended() -> None:
    budget = Budget(100)
    budget.keep(100)
    tasks = [asyncio.ensure_future(budget.wait(size)) for size in (90, 90, 100, 90)]
    await steps()
    budget.give_back(100)
    await asyncio.gather(*tasks)
    assert budget.held_bytes == 0


async def test_a_check_that_fails_ends_waits_it_is_for_and_leaves_the_others_in_their_order() -> (
    None
):
    full = False

    def check() -> None:
        if full:
            raise StorageFull("disk", 0, 1)

    budget = Budget(100)
    budget.keep(50)
    rows = asyncio.ensure_future(budget.wait(90, check=check))
    drop = asyncio.ensure_future(budget.wait(60))
    more = asyncio.ensure_future(budget.wait(10, check=check))
    cut = asyncio.ensure_future(budget.wait(10))
    await steps()
    full = True
    budget.changed.wake()
    with pytest.raises(StorageFull):
        await rows
    await steps()
    assert (drop.done(), more.done(), cut.done()) == (False, False, False)
    budget.give_back(10)
    await asyncio.gather(drop, cut)
    with pytest.raises(StorageFull):
        await more


@given(
    st.lists(st.tuples(st.integers(1, 10), st.integers(0, 5), st.booleans()), max_size=30),
    st.integers(0, 1 << 32).map(Random),
)
def test_budget_is_never_exceeded_and_whoever_waits_gets_a_turn_in_order(
    takers: list[tuple[int, int, bool]], random: Random
) -> None:
    """Each taker holds its bytes for some steps and then ends; some are cancelled while they
    wait.
    """

    async def run() -> None:
        budget = Budget(10)
        turns = list[int]()
        gone = set[int]()

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


async def test_ending_the_waits_of_one_wakes_nobody_else_even_as_one_is_cancelled() -> None:
    signal = Signal()
    own, other = (asyncio.ensure_future(signal.wait(whose)) for whose in ("own", "other"))
    await anyio.wait_all_tasks_blocked()
    own.cancel()
    signal.end("own")
    await anyio.wait_all_tasks_blocked()
    assert own.cancelled()
    assert not other.done()
    signal.wake()
    await other
