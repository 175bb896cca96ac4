import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.timetick import Acker, AckManager, MvccManager
from tests.wal.manual_log import allocator
from wal.entry import LogEntry
from wal.errors import OnShutdown
from wal.live_tail import LiveTail
from wal.timetick import TICK_MAX, TickAllocator

pytestmark = pytest.mark.anyio


class Readers(LiveTail):
    """What readers are told: ticks of entries, and of marks."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, int]] = []

    def append(self, entry: LogEntry) -> None:
        self.told.append(("entry", entry.time_tick))

    def advance(self, tick: int) -> None:
        self.told.append(("mark", tick))

    def take(self) -> list[int]:
        ticks = [tick for _, tick in self.told]
        self.told.clear()
        return ticks


class Bench:
    def __init__(self, ticks: TickAllocator | None = None) -> None:
        self.ticks = ticks or allocator()
        self.readers = Readers()
        self.first = self.ticks.allocate()
        self.acks = AckManager(
            self.ticks, confirmed_tick=self.first, tail=self.readers, mvcc=MvccManager(self.first)
        )
        self.acks.promised_tick = TICK_MAX

    def mark(self) -> Acker:
        mark = self.acks.mark()
        assert mark is not None
        return mark

    def allocate(self, count: int) -> list[Acker]:
        return [self.acks.allocate() for _ in range(count)]

    def confirm(self, *ackers: Acker) -> None:
        for acker in ackers:
            self.acks.confirm(acker, entry(acker.tick))


def entry(tick: int) -> LogEntry:
    return LogEntry(
        first_position=tick,
        last_position=tick,
        first_tick=tick,
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
    assert bench.readers.take() == []
    bench.confirm(one)
    assert bench.readers.take() == [one.tick, two.tick]
    bench.confirm(*rest)
    assert bench.readers.take() == []
    bench.confirm(three)
    assert bench.readers.take() == [three.tick, four.tick, *(acker.tick for acker in rest)]
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
    assert bench.readers.told == [("entry", two.tick)]
    assert bench.acks.confirmed_tick == two.tick


async def test_ticks_of_one_append_follow_each_other_and_end_together() -> None:
    bench = Bench()
    (one,), pack = bench.allocate(1), bench.acks.allocate(3)
    (after,) = bench.allocate(1)
    assert [one.tick + 1, pack.first + 2, pack.tick + 1] == [pack.first, pack.tick, after.first]
    bench.confirm(one, after)
    assert (bench.acks.confirmed_tick, bench.acks.oldest_pending_tick) == (one.tick, pack.first)
    bench.confirm(pack)
    assert bench.readers.take() == [one.tick, pack.tick, after.tick]
    assert bench.acks.confirmed_tick == after.tick


async def test_nothing_is_confirmed_from_the_first_tick_of_an_indeterminate_append_on() -> None:
    bench = Bench()
    (one,), pack = bench.allocate(1), bench.acks.allocate(3)
    bench.acks.abandon(pack)
    bench.confirm(one)
    assert (bench.acks.confirmed_tick, bench.acks._indeterminate_tick) == (one.tick, pack.first)


async def test_append_that_ends_twice_is_a_bug() -> None:
    bench = Bench()
    one, _ = bench.allocate(2)
    bench.confirm(one)
    for end in (bench.acks.fail, bench.acks.abandon):
        with pytest.raises(AssertionError):
            end(one)


async def test_mark_of_an_idle_log_is_confirmed_at_once() -> None:
    bench = Bench()
    tick = bench.mark().tick
    assert tick > bench.first
    assert bench.acks.confirmed_tick == tick
    assert bench.readers.told == [("mark", tick)]
    assert bench.mark().tick > tick, "an idle log advances with the clock"


async def test_mark_waits_for_everything_below_it() -> None:
    bench = Bench()
    one, two = bench.allocate(2)
    tick = bench.mark().tick
    assert tick > two.tick
    bench.confirm(two)
    assert bench.acks.confirmed_tick == bench.first
    bench.confirm(one)
    assert bench.acks.confirmed_tick == tick


async def test_marks_with_no_append_between_them_are_one() -> None:
    bench = Bench()
    bench.allocate(1)
    marks = {bench.mark() for _ in range(100)}
    assert len(marks) == 1
    assert bench.acks.pending == 2
    bench.allocate(1)
    assert bench.mark() not in marks


async def test_nothing_at_or_above_an_indeterminate_tick_is_confirmed() -> None:
    bench = Bench()
    one, two, three = bench.allocate(3)
    bench.acks.abandon(two)
    bench.confirm(three)
    assert bench.readers.take() == []
    bench.confirm(one)
    assert bench.readers.take() == [one.tick]
    assert bench.acks.confirmed_tick == one.tick
    assert bench.acks._indeterminate_tick == two.tick
    with pytest.raises(OnShutdown, match="the term ended"):
        bench.mark()


async def test_marks_above_an_indeterminate_tick_fail_and_those_below_are_served() -> None:
    bench = Bench()
    (one,), below = bench.allocate(1), bench.mark()
    (two,), above = bench.allocate(1), bench.mark()
    bench.acks.abandon(two)
    assert above.confirmed is not None
    with pytest.raises(OnShutdown):
        await above.confirmed
    assert below.confirmed is not None
    assert not below.confirmed.done()
    bench.confirm(one)
    await below.confirmed


async def test_smallest_of_several_indeterminate_ticks_counts() -> None:
    bench = Bench()
    one, two = bench.allocate(2)
    bench.acks.abandon(two)
    bench.acks.abandon(one)
    assert bench.acks._indeterminate_tick == one.tick


async def test_mark_is_confirmed_when_everything_below_it_has_ended_and_not_early() -> None:
    bench = Bench()
    one, two = bench.allocate(2)
    mark = bench.mark()
    assert mark.confirmed is not None
    for acker in (two, one):
        assert not mark.confirmed.done()
        bench.confirm(acker)
    assert mark.confirmed.done()


@given(seed=st.integers(0, 2**32), count=st.integers(1, 40))
def test_release_is_gapless_ascending_and_never_ahead_of_an_unacknowledged_tick(
    seed: int, count: int
) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        bench = Bench()
        open_ackers: list[Acker] = []
        allocated: list[int] = []
        released: list[int] = []
        for _ in range(count):
            for _ in range(rng.randrange(3)):
                acker = bench.acks.allocate(rng.randint(1, 4))
                assert acker.first > bench.acks.confirmed_tick
                assert not allocated or acker.first > allocated[-1]
                open_ackers.append(acker)
                allocated.append(acker.tick)
            if rng.random() < 0.3 and (mark := bench.mark().tick) not in allocated:
                allocated.append(mark)
            if open_ackers and rng.random() < 0.7:
                acker = open_ackers.pop(rng.randrange(len(open_ackers)))
                if rng.random() < 0.5:
                    bench.confirm(acker)
                else:
                    bench.acks.fail(acker)
                    allocated.remove(acker.tick)
            released += bench.readers.take()
            assert released == allocated[: len(released)]
            assert all(acker.first > bench.acks.confirmed_tick for acker in open_ackers)
        bench.confirm(*open_ackers)
        assert released + bench.readers.take() == allocated
        assert bench.acks.pending == 0

    asyncio.run(scenario())


async def test_ended_term_gives_readers_no_further_tick_and_lets_nobody_wait() -> None:
    bench = Bench()
    first, _ = bench.allocate(2)
    bench.confirm(first)
    waiting = bench.mark().confirmed
    assert waiting is not None
    bench.acks.end()
    bench.acks.end()
    with pytest.raises(OnShutdown):
        await waiting
    with pytest.raises(OnShutdown):
        bench.mark()
    assert bench.readers.take() == [first.tick]


async def test_mark_beyond_what_is_promised_is_told_to_nobody() -> None:
    bench = Bench()
    bench.acks.promised_tick = bench.ticks.last
    assert bench.acks.mark() is None
    assert bench.readers.told == []
    assert (bench.acks.pending, bench.acks.confirmed_tick) == (0, bench.first)
    bench.acks.promised_tick = bench.ticks.last
    assert bench.acks.mark() is None
    bench.acks.promised_tick = TICK_MAX
    assert bench.mark().tick > bench.first
