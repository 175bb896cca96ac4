import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.acks import AckDetail, Acker, AckKind, AckManager, Unpromised
from tests.wal.manual_log import allocator
from wal.errors import Indeterminate
from wal.message import LogEntry
from wal.timetick import TICK_MAX, TickAllocator

pytestmark = pytest.mark.anyio


class Released:
    def __init__(self) -> None:
        self.details: list[AckDetail] = []

    def __call__(self, details: Sequence[AckDetail]) -> None:
        assert details
        self.details += details

    def take(self) -> list[int]:
        ticks = [detail.tick for detail in self.details]
        self.details.clear()
        return ticks


class Bench:
    def __init__(self, ticks: TickAllocator | None = None) -> None:
        self.ticks = ticks or allocator()
        self.released = Released()
        self.first = self.ticks.allocate()
        self.acks = AckManager(self.ticks, confirmed_tick=self.first, release=self.released)
        self.acks.promised_tick = TICK_MAX

    def allocate(self, count: int) -> list[Acker]:
        return [self.acks.allocate() for _ in range(count)]

    def confirm(self, *ackers: Acker) -> None:
        for acker in ackers:
            self.acks.confirm(acker, entry(acker.tick))


def entry(tick: int) -> LogEntry:
    return LogEntry(
        first_position=tick,
        time_tick=tick,
        last_confirmed_position=tick,
        wal_term=1,
        crc32c=0,
        size_bytes=1,
        messages=(),
    )


async def test_reference_vector_of_acknowledgements_out_of_order() -> None:
    bench = Bench()
    one, two, three, four, *rest = bench.allocate(10)
    bench.confirm(two, four)
    assert bench.released.take() == []
    bench.confirm(one)
    assert bench.released.take() == [one.tick, two.tick]
    bench.confirm(*rest)
    assert bench.released.take() == []
    bench.confirm(three)
    assert bench.released.take() == [three.tick, four.tick, *(acker.tick for acker in rest)]
    assert bench.acks.pending == 0
    assert bench.acks.confirmed_tick == rest[-1].tick


async def test_oldest_pending_tick_is_the_smallest_without_an_outcome() -> None:
    bench = Bench()
    assert bench.acks.oldest_pending_tick is None
    one, two = bench.allocate(2)
    bench.confirm(two)
    assert bench.acks.oldest_pending_tick == one.tick
    bench.acks.fail(one)
    assert bench.acks.oldest_pending_tick is None


async def test_failed_append_confirms_its_tick_and_lets_the_next_ones_through() -> None:
    bench = Bench()
    one, two = bench.allocate(2)
    bench.confirm(two)
    bench.acks.fail(one)
    assert [detail.kind for detail in bench.released.details] == [AckKind.FAILED, AckKind.ENTRY]


async def test_append_that_ends_twice_is_a_bug() -> None:
    bench = Bench()
    one, _ = bench.allocate(2)
    bench.confirm(one)
    for end in (bench.acks.fail, bench.acks.abandon):
        with pytest.raises(AssertionError):
            end(one)


async def test_mark_of_an_idle_log_is_confirmed_at_once() -> None:
    bench = Bench()
    tick = bench.acks.mark()
    assert tick > bench.first
    assert bench.acks.confirmed_tick == tick
    assert [detail.kind for detail in bench.released.details] == [AckKind.SYNC]
    assert bench.acks.mark() > tick, "an idle log advances with the clock"


async def test_mark_waits_for_everything_below_it() -> None:
    bench = Bench()
    one, two = bench.allocate(2)
    tick = bench.acks.mark()
    assert tick > two.tick
    bench.confirm(two)
    assert bench.acks.confirmed_tick == bench.first
    bench.confirm(one)
    assert bench.acks.confirmed_tick == tick


async def test_marks_with_no_append_between_them_are_one() -> None:
    bench = Bench()
    bench.allocate(1)
    marks = {bench.acks.mark() for _ in range(100)}
    assert len(marks) == 1
    assert bench.acks.pending == 2
    bench.allocate(1)
    assert bench.acks.mark() not in marks


async def test_nothing_at_or_above_an_indeterminate_tick_is_confirmed() -> None:
    bench = Bench()
    one, two, three = bench.allocate(3)
    bench.acks.abandon(two)
    bench.confirm(three)
    assert bench.released.take() == []
    bench.confirm(one)
    assert bench.released.take() == [one.tick]
    assert bench.acks.confirmed_tick == one.tick
    assert bench.acks._indeterminate_tick == two.tick
    with pytest.raises(Indeterminate, match="ask for a new tick"):
        bench.acks.mark()


async def test_waiters_at_or_above_an_indeterminate_tick_fail_and_those_below_are_served() -> None:
    bench = Bench()
    one, two, three = bench.allocate(3)
    below, at, above = (bench.acks.confirmed(acker.tick) for acker in (one, two, three))
    bench.acks.abandon(two)
    later = bench.acks.confirmed(three.tick)
    for waiter in (at, above, later):
        with pytest.raises(Indeterminate):
            await waiter
    assert not below.done()
    bench.confirm(one)
    await below


async def test_smallest_of_several_indeterminate_ticks_counts() -> None:
    bench = Bench()
    one, two = bench.allocate(2)
    bench.acks.abandon(two)
    bench.acks.abandon(one)
    assert bench.acks._indeterminate_tick == one.tick


async def test_waiters_are_woken_in_the_order_of_their_ticks_and_not_early() -> None:
    bench = Bench()
    ackers = bench.allocate(3)
    waiters = [bench.acks.confirmed(acker.tick) for acker in reversed(ackers)][::-1]
    for number, acker in enumerate(ackers, 1):
        bench.confirm(acker)
        assert [waiter.done() for waiter in waiters] == [at < number for at in range(3)]
    assert bench.acks.confirmed(ackers[0].tick).done()


async def test_cancelled_waiter_disturbs_nobody() -> None:
    bench = Bench()
    (one,) = bench.allocate(1)
    gone, stays = bench.acks.confirmed(one.tick), bench.acks.confirmed(one.tick)
    gone.cancel()
    bench.confirm(one)
    await stays


@given(seed=st.integers(0, 2**32), count=st.integers(1, 40))
def test_release_is_gapless_ascending_and_never_ahead_of_an_unacknowledged_tick(seed: int, count: int) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        bench = Bench()
        open_ackers: list[Acker] = []
        allocated: list[int] = []
        released: list[int] = []
        for _ in range(count):
            for _ in range(rng.randrange(3)):
                acker = bench.acks.allocate()
                open_ackers.append(acker)
                allocated.append(acker.tick)
            if rng.random() < 0.3 and (mark := bench.acks.mark()) not in allocated:
                allocated.append(mark)
            if open_ackers and rng.random() < 0.7:
                acker = open_ackers.pop(rng.randrange(len(open_ackers)))
                if rng.random() < 0.5:
                    bench.confirm(acker)
                else:
                    bench.acks.fail(acker)
            released += bench.released.take()
            assert released == allocated[: len(released)]
            assert all(acker.tick > bench.acks.confirmed_tick for acker in open_ackers)
        bench.confirm(*open_ackers)
        assert released + bench.released.take() == allocated
        assert bench.acks.pending == 0

    asyncio.run(scenario())


async def test_ended_term_gives_readers_no_further_tick_and_lets_nobody_wait() -> None:
    bench = Bench()
    first, second = bench.allocate(2)
    bench.confirm(first)
    waiting = bench.acks.confirmed(second.tick)
    bench.acks.end()
    bench.acks.end()
    with pytest.raises(Indeterminate):
        await waiting
    with pytest.raises(Indeterminate):
        bench.acks.mark()
    with pytest.raises(Indeterminate):
        await bench.acks.confirmed(bench.ticks.last + 1)
    await bench.acks.confirmed(first.tick)
    assert bench.released.take() == [first.tick]


async def test_mark_beyond_what_is_promised_is_told_to_nobody() -> None:
    bench = Bench()
    bench.acks.promised_tick = bench.ticks.last
    with pytest.raises(Unpromised) as unpromised:
        bench.acks.mark()
    assert bench.released.details == []
    assert (bench.acks.pending, bench.acks.confirmed_tick) == (0, bench.first)
    bench.acks.promised_tick = unpromised.value.tick
    with pytest.raises(Unpromised):
        bench.acks.mark()
    bench.acks.promised_tick = TICK_MAX
    assert bench.acks.mark() > unpromised.value.tick
