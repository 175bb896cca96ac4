"""What becomes of packed writes: each hears its own end, once, and nobody is forgotten on the
way.
"""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wal.manual_log import settle
from tests.wal.packs_under_way import Log, queued, write
from wal import packer as packing
from wal.append import AppendGroup, AppendResult, Pack
from wal.errors import Indeterminate, StorageFull
from wal.packer import PACKS_IN_FLIGHT_MAX

pytestmark = pytest.mark.anyio


# --- errors ---------------------------------------------------------------------------------------


async def test_error_of_a_pack_reaches_each_of_its_writes_and_those_behind_it_go_on() -> None:
    log = Log()
    (lone,) = await log.start(write())
    pair = await log.start(write(), write())
    (behind,) = await log.start(write())
    error = StorageFull("disk", 0, 1)
    await log.end(1, error)
    for append in pair:
        with pytest.raises(StorageFull) as caught:
            await append
        assert caught.value is error
    await log.end_all()
    assert (await lone).first_position == 1
    assert (await behind).first_position == 2
    assert log.memory.held_bytes == 0


async def test_error_of_one_write_is_its_own() -> None:
    log = Log()
    groups = [write() for _ in range(3)]
    await log.start(write())
    appends = await log.start(*groups)
    pack, _ = log.under_way[1]
    pack.leave(groups[1], StorageFull("disk", 0, 1))
    await log.end(1, Indeterminate("the write failed"))
    with pytest.raises(StorageFull):
        await appends[1]
    for append in (appends[0], appends[2]):
        with pytest.raises(Indeterminate):
            await append
    await log.end_all()
    assert log.memory.held_bytes == 0


async def test_bug_behind_a_pack_reaches_its_callers_and_nobody_waits_behind_it() -> None:
    log = Log()
    await log.start(write())
    pair = await log.start(write(), write())
    await log.end(1, ZeroDivisionError())
    for append in pair:
        with pytest.raises(ZeroDivisionError):
            await append
    await log.end_all()
    (after,) = await log.start(write())
    await log.end_all()
    assert (await after).count == 1
    assert log.memory.held_bytes == 0


async def test_bug_behind_a_lone_write_is_its_callers_and_the_road_is_free() -> None:
    log = Log()
    (lone,) = await log.start(write())
    await log.end(0, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await lone
    await log.start(write())
    assert log.tasks[-1] is not None
    await log.end_all()
    assert log.memory.held_bytes == 0


# --- again ----------------------------------------------------------------------------------------


async def test_write_that_comes_again_goes_before_all_that_wait_and_in_its_order() -> None:
    log = Log()
    groups = [write() for _ in range(4)]
    await log.start(write())
    appends = await log.start(*groups)
    pack, _ = log.under_way[1]
    for group in groups[1:3]:
        pack.leave(group)
    for _ in range(PACKS_IN_FLIGHT_MAX - 2):
        await log.start(write())
    waiting = write()
    appends += await log.start(waiting)
    assert pack.come_again is not None
    for group in reversed(groups[1:3]):
        pack.come_again(group)
    await log.end(1)
    assert log.packs[-1] == [*groups[1:3], waiting]
    await log.end_all()
    assert [(await append).count for append in appends] == [1] * 5
    assert log.memory.held_bytes == 0


async def test_write_that_left_its_pack_does_not_hear_of_its_end_even_in_another() -> None:
    log = Log()
    groups = [write() for _ in range(2)]
    await log.start(write())
    appends = await log.start(*groups)
    pack, _ = log.under_way[1]
    pack.leave(groups[1])
    assert pack.come_again is not None
    pack.come_again(groups[1])
    await settle()
    assert log.packs[-1] == [groups[1]]
    await log.end(1, Indeterminate("the write failed"))
    with pytest.raises(Indeterminate):
        await appends[0]
    assert not appends[1].done()
    await log.end_all()
    assert (await appends[1]).count == 1
    assert log.memory.held_bytes == 0


async def test_write_cancelled_after_it_left_its_pack_does_not_come_again() -> None:
    log = Log()
    groups = [write() for _ in range(2)]
    await log.start(write())
    appends = await log.start(*groups)
    pack, _ = log.under_way[1]
    pack.leave(groups[1])
    appends[1].cancel()
    assert pack.come_again is not None
    pack.come_again(groups[1])
    await log.end_all()
    assert log.sent.count(groups[1]) == 1
    assert not groups[1].begun
    assert log.memory.held_bytes == 0


# --- the end --------------------------------------------------------------------------------------


async def draining(log: Log) -> "asyncio.Task[None]":
    task = asyncio.ensure_future(log.packer.drain())
    await settle()
    return task


async def test_drain_returns_at_once_when_nothing_is_under_way() -> None:
    await Log().packer.drain()


async def test_drain_waits_for_a_lone_write_and_for_packs() -> None:
    log = Log()
    await log.start(write())
    drained = await draining(log)
    assert not drained.done()
    await log.end()
    await drained
    await log.start(write(), write(), write())
    drained = await draining(log)
    await log.end()
    assert not drained.done()
    await log.end()
    await drained


async def test_drain_waits_for_what_left_its_pack_to_come_again() -> None:
    log = Log()
    groups = [write() for _ in range(2)]
    await log.start(write())
    await log.start(*groups)
    pack, _ = log.under_way[1]
    pack.leave(groups[1])
    await log.end_all()
    drained = await draining(log)
    assert not drained.done()
    assert pack.come_again is not None
    pack.come_again(groups[1])
    await settle()
    await log.end_all()
    await drained


async def test_drain_waits_for_a_pack_whose_callers_are_gone() -> None:
    log = Log()
    await log.start(write())
    appends = await log.start(write(), write())
    log.under_way[1][0].ticket = queued()
    for append in appends:
        append.cancel()
    await log.end(0)
    drained = await draining(log)
    assert not drained.done()
    await log.end()
    await drained


# --- all of it ------------------------------------------------------------------------------------


ACTIONS = ["append", "append", "append", "cancel", "end", "fail", "leave", "come again"]


class Callers:
    """Writes, and what becomes of them on the way, step by step."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.groups: list[AppendGroup] = []
        self.appends: list[asyncio.Future[AppendResult]] = []
        self.left: list[AppendGroup] = []
        self.ever_left: Counter[AppendGroup] = Counter()

    async def step(self, action: str, number: int) -> None:
        log = self.log
        match action:
            case "append":
                self.groups.append(write(100 + 60 * number))
                self.appends.append(asyncio.ensure_future(self.call(self.groups[-1])))
            case "cancel" if self.appends:
                self.appends[number % len(self.appends)].cancel()
            case "end" | "fail" if log.under_way:
                await log.end(
                    number % len(log.under_way), Indeterminate("no") if action == "fail" else None
                )
            case "leave" if log.under_way:
                self.leave(log.under_way[number % len(log.under_way)][0], number)
            case "come again" if self.left:
                log.packer.come_again(self.left.pop(number % len(self.left)))
            case _:
                pass

    async def call(self, group: AppendGroup) -> AppendResult:
        return await self.log.packer.append(group)

    def leave(self, pack: Pack, number: int) -> None:
        if pack.come_again is not None and len(pack.groups) > 1:
            group = pack.groups[number % len(pack.groups)]
            self.left.append(group)
            self.ever_left[group] += 1
            pack.leave(group)

    async def end(self) -> None:
        for group in self.left:
            self.log.packer.come_again(group)
        await settle()
        await self.log.end_all()
        await self.log.packer.drain()
        await asyncio.gather(*self.appends, return_exceptions=True)

    def check(self) -> None:
        """Check what became of each, once all have ended."""
        sent = self.log.sent
        for group, append in zip(self.groups, self.appends, strict=True):
            times = sent.count(group)
            assert times <= 1 + self.ever_left[group]
            assert append.cancelled() or times
        order = {group: number for number, group in enumerate(self.groups)}
        straight = [order[group] for group in sent if group not in self.ever_left]
        assert straight == sorted(straight), "in the order of the calls"
        for groups in self.log.packs:
            assert len(groups) == 1 or sum(group.size_bytes for group in groups) <= 500
        assert self.log.memory.held_bytes == 0


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.booleans()), max_size=40
    ),
    memory=st.integers(400, 2000),
)
def test_whatever_happens_each_write_is_sent_in_order_told_once_and_forgotten(
    steps: list[tuple[str, int, bool]], memory: int
) -> None:
    async def run() -> None:
        callers = Callers(log := Log(memory=memory))
        for action, number, rests in steps:
            await callers.step(action, number)
            if rests:
                await settle()
            assert len(log.under_way) <= PACKS_IN_FLIGHT_MAX
            assert log.memory.held_bytes <= memory
        await callers.end()
        callers.check()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packing, "PACK_BYTES_MAX", 500)
        asyncio.run(run())
