import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.lock import Mode, RWLock

pytestmark = pytest.mark.anyio

SHARED, EXCLUSIVE = Mode.SHARED, Mode.EXCLUSIVE


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_free_lock_is_taken_without_suspending() -> None:
    for mode in Mode:
        with pytest.raises(StopIteration):
            RWLock().acquire(mode).send(None)


async def test_sharers_share_and_keep_an_exclusive_one_out() -> None:
    lock = RWLock()
    assert lock.try_acquire(SHARED)
    assert lock.try_acquire(SHARED)
    assert not lock.try_acquire(EXCLUSIVE)
    lock.release(SHARED)
    assert not lock.try_acquire(EXCLUSIVE)
    lock.release(SHARED)
    assert lock.try_acquire(EXCLUSIVE)
    assert not lock.try_acquire(SHARED)


async def test_sharer_does_not_overtake_a_waiting_exclusive_one() -> None:
    lock = RWLock()
    await lock.acquire(SHARED)
    writer = asyncio.ensure_future(lock.acquire(EXCLUSIVE))
    await settle()
    assert not lock.try_acquire(SHARED)
    lock.release(SHARED)
    await writer


async def test_lock_is_handed_over_at_release_so_that_nobody_slips_in_between() -> None:
    lock = RWLock()
    await lock.acquire(EXCLUSIVE)
    waiter = asyncio.ensure_future(lock.acquire(EXCLUSIVE))
    await settle()
    lock.release(EXCLUSIVE)
    assert not lock.try_acquire(SHARED), "the waiter has it already, though its task has not run"
    await waiter


async def test_cancelled_exclusive_waiter_lets_the_sharers_behind_it_in() -> None:
    lock = RWLock()
    await lock.acquire(SHARED)
    writer = asyncio.ensure_future(lock.acquire(EXCLUSIVE))
    await settle()
    reader = asyncio.ensure_future(lock.acquire(SHARED))
    await settle()
    writer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writer
    await asyncio.wait_for(reader, 5)


async def test_waiter_cancelled_after_the_hand_over_gives_the_lock_on() -> None:
    lock = RWLock()
    await lock.acquire(EXCLUSIVE)
    first = asyncio.ensure_future(lock.acquire(EXCLUSIVE))
    second = asyncio.ensure_future(lock.acquire(EXCLUSIVE))
    await settle()
    lock.release(EXCLUSIVE)  # handed to the first, which is cancelled before it runs
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.wait_for(second, 5)
    lock.release(EXCLUSIVE)
    assert lock.idle


async def test_release_of_what_nobody_holds_is_a_bug() -> None:
    for mode in Mode:
        with pytest.raises(AssertionError):
            RWLock().release(mode)


class Model:
    """Holders as the tasks see them; checks exclusion at every step and notes the order of arrivals and grants."""

    def __init__(self) -> None:
        self.lock = RWLock()
        self.sharers = 0
        self.exclusive = 0
        self.arrived: list[int] = []
        self.granted: list[int] = []
        self.cancelled: set[int] = set()

    async def holder(self, number: int, mode: Mode, steps_held: int) -> None:
        self.arrived.append(number)
        try:
            await self.lock.acquire(mode)
        except asyncio.CancelledError:
            self.cancelled.add(number)
            raise
        self.granted.append(number)
        self._enter(mode)
        try:
            for _ in range(steps_held):
                await asyncio.sleep(0)
        finally:
            self._leave(mode)
            self.lock.release(mode)

    def _enter(self, mode: Mode) -> None:
        if mode is EXCLUSIVE:
            assert self.exclusive + self.sharers == 0
            self.exclusive += 1
        else:
            assert not self.exclusive
            self.sharers += 1

    def _leave(self, mode: Mode) -> None:
        if mode is EXCLUSIVE:
            self.exclusive -= 1
        else:
            self.sharers -= 1


async def run_schedule(seed: int, modes: list[Mode]) -> Model:
    rng = random.Random(seed)
    model = Model()
    tasks: list[asyncio.Task[None]] = []
    for number, mode in enumerate(modes):
        tasks.append(asyncio.ensure_future(model.holder(number, mode, rng.randrange(4))))
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    bugs = [o for o in outcomes if isinstance(o, BaseException) and not isinstance(o, asyncio.CancelledError)]
    assert not bugs
    return model


@given(seed=st.integers(0, 2**32), modes=st.lists(st.sampled_from(Mode), min_size=1, max_size=30))
def test_random_schedules_exclude_keep_the_order_and_leave_nothing(seed: int, modes: list[Mode]) -> None:
    model = asyncio.run(run_schedule(seed, modes))
    for at, number in enumerate(model.granted):  # two sharers may start in any order: neither keeps the other waiting
        overtaken = [earlier for earlier in model.granted[at + 1 :] if earlier < number]
        assert all(modes[number] is modes[earlier] is SHARED for earlier in overtaken), "first come, first served"
    assert model.lock.idle
    assert set(model.granted).isdisjoint(model.cancelled)
