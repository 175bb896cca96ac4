import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.chain import RWLock

pytestmark = pytest.mark.anyio


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_free_lock_is_taken_without_suspending() -> None:
    for exclusive in (False, True):
        with pytest.raises(StopIteration):
            RWLock().acquire(exclusive=exclusive).send(None)


async def test_sharers_share_and_keep_an_exclusive_one_out() -> None:
    lock = RWLock()
    assert lock.try_acquire(exclusive=False)
    assert lock.try_acquire(exclusive=False)
    assert not lock.try_acquire(exclusive=True)
    lock.release()
    assert not lock.try_acquire(exclusive=True)
    lock.release()
    assert lock.try_acquire(exclusive=True)
    assert not lock.try_acquire(exclusive=False)


async def test_sharer_does_not_overtake_a_waiting_exclusive_one() -> None:
    lock = RWLock()
    await lock.acquire(exclusive=False)
    writer = asyncio.ensure_future(lock.acquire(exclusive=True))
    await settle()
    assert not lock.try_acquire(exclusive=False)
    lock.release()
    await writer


async def test_lock_is_handed_over_at_release_so_that_nobody_slips_in_between() -> None:
    lock = RWLock()
    await lock.acquire(exclusive=True)
    waiter = asyncio.ensure_future(lock.acquire(exclusive=True))
    await settle()
    lock.release()
    assert not lock.try_acquire(exclusive=False), (
        "the waiter has it already, though its task has not run"
    )
    await waiter


async def test_cancelled_exclusive_waiter_lets_the_sharers_behind_it_in() -> None:
    lock = RWLock()
    await lock.acquire(exclusive=False)
    writer = asyncio.ensure_future(lock.acquire(exclusive=True))
    await settle()
    reader = asyncio.ensure_future(lock.acquire(exclusive=False))
    await settle()
    writer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writer
    await asyncio.wait_for(reader, 60)


async def test_waiter_cancelled_after_the_hand_over_gives_the_lock_on() -> None:
    lock = RWLock()
    await lock.acquire(exclusive=True)
    first = asyncio.ensure_future(lock.acquire(exclusive=True))
    second = asyncio.ensure_future(lock.acquire(exclusive=True))
    await settle()
    lock.release()  # handed to the first, which is cancelled before it runs
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.wait_for(second, 60)
    lock.release()
    assert lock.idle


async def test_release_of_what_nobody_holds_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        RWLock().release()


class Model:
    """Holders as the tasks see them; checks exclusion at every step and notes the order of arrivals
    and grants.
    """

    def __init__(self) -> None:
        self.lock = RWLock()
        self.sharers = 0
        self.exclusive = 0
        self.arrived: list[int] = []
        self.granted: list[int] = []
        self.cancelled: set[int] = set()

    async def holder(self, number: int, exclusive: bool, steps_held: int) -> None:
        self.arrived.append(number)
        try:
            await self.lock.acquire(exclusive=exclusive)
        except asyncio.CancelledError:
            self.cancelled.add(number)
            raise
        self.granted.append(number)
        self._enter(exclusive)
        try:
            for _ in range(steps_held):
                await asyncio.sleep(0)
        finally:
            self._leave(exclusive)
            self.lock.release()

    def _enter(self, exclusive: bool) -> None:
        if exclusive:
            assert self.exclusive + self.sharers == 0
            self.exclusive += 1
        else:
            assert not self.exclusive
            self.sharers += 1

    def _leave(self, exclusive: bool) -> None:
        if exclusive:
            self.exclusive -= 1
        else:
            self.sharers -= 1


async def run_schedule(seed: int, kinds: list[bool]) -> Model:
    rng = random.Random(seed)
    model = Model()
    tasks: list[asyncio.Task[None]] = []
    for number, exclusive in enumerate(kinds):
        tasks.append(asyncio.ensure_future(model.holder(number, exclusive, rng.randrange(4))))
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    bugs = [
        o
        for o in outcomes
        if isinstance(o, BaseException) and not isinstance(o, asyncio.CancelledError)
    ]
    assert not bugs
    return model


@given(seed=st.integers(0, 2**32), kinds=st.lists(st.booleans(), min_size=1, max_size=30))
def test_random_schedules_exclude_keep_the_order_and_leave_nothing(
    seed: int, kinds: list[bool]
) -> None:
    model = asyncio.run(run_schedule(seed, kinds))
    # two sharers may start in any order: neither keeps the other waiting
    for at, number in enumerate(model.granted):
        overtaken = [earlier for earlier in model.granted[at + 1 :] if earlier < number]
        assert all(not kinds[number] and not kinds[earlier] for earlier in overtaken), (
            "first come, first served"
        )
    assert model.lock.idle
    assert set(model.granted).isdisjoint(model.cancelled)
