"""Writes that come together go together, those that come alone go at once, and nobody is forgotten on the way."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wal.manual_log import settle
from tests.wal.packed import FakeTarget, insert_group
from wal import packer as packing
from wal.append import AppendGroup, AppendResult, Pack
from wal.errors import Indeterminate, StorageFull, TooLarge
from wal.message import MESSAGE_OVERHEAD_BYTES
from wal.packer import PACK_BYTES_MAX, PACK_GROUPS_MAX, PACKS_IN_FLIGHT_MAX, Packer
from wal.position import MemoryMessageId
from wal.queue import Budget

pytestmark = pytest.mark.anyio

TARGET = FakeTarget()


def write(size_bytes: int = 100) -> AppendGroup:
    """Return a group of a row that counts for so many bytes."""
    return insert_group(TARGET, data=bytes(size_bytes - MESSAGE_OVERHEAD_BYTES))


def result(number: int) -> AppendResult:
    return AppendResult(
        kind=MemoryMessageId, first_position=number, count=1, time_tick=number, last_confirmed_position=number
    )


class Log:
    """Where packs go: each ends when the test says so, unless it is not `held`; groups are numbered as they end."""

    def __init__(self, *, held: bool = True, memory: int = 1 << 30, repeats: bool = True) -> None:
        self.memory = Budget(memory)
        self.packer = Packer(self._send, self.memory, repeats=repeats)
        self.held = held
        self.packs: list[list[AppendGroup]] = []
        """What each pack was when it came."""
        self.tasks: list[object] = []
        self.under_way: list[tuple[Pack, asyncio.Future[None]]] = []
        self.ended = 0

    async def _send(self, pack: Pack) -> None:
        self.packs.append(list(pack.groups))
        self.tasks.append(asyncio.current_task())
        if self.held:
            under_way = pack, asyncio.get_running_loop().create_future()
            self.under_way.append(under_way)
            try:
                await under_way[1]
            finally:
                if under_way in self.under_way:
                    self.under_way.remove(under_way)
        for group in pack.groups:
            self.ended += 1
            group.settle(result(self.ended))

    async def end(self, at: int = 0, error: Exception | None = None) -> None:
        """End a pack under way."""
        _, ended = self.under_way.pop(at)
        if ended.done():  # its task is being cancelled
            pass
        elif error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)
        await settle()

    async def end_all(self) -> None:
        while self.under_way:
            await self.end()

    async def start(self, *groups: AppendGroup) -> list[asyncio.Future[AppendResult]]:
        """Append groups, one call after the other, and let all run as far as they get."""
        appends: list[asyncio.Future[AppendResult]] = [
            asyncio.ensure_future(self.packer.append(group)) for group in groups
        ]
        await settle()
        return appends

    @property
    def sent(self) -> list[AppendGroup]:
        return [group for groups in self.packs for group in groups]


# --- alone, and together ----------------------------------------------------------------------------------------------


async def test_write_that_comes_alone_goes_at_once_in_its_callers_own_task() -> None:
    log, turns = Log(held=False), list[int]()
    asyncio.get_running_loop().call_soon(turns.append, 1)
    for number in (1, 2, 3):
        assert await log.packer.append(write()) == result(number)
    assert log.tasks == [asyncio.current_task()] * 3
    assert not turns, "the event loop took no turn"
    assert [len(groups) for groups in log.packs] == [1, 1, 1]


async def test_writes_that_come_while_one_is_on_its_way_go_together_in_the_order_of_their_calls() -> None:
    log, first, groups = Log(), write(), [write() for _ in range(20)]
    (lone,) = await log.start(first)
    appends = await log.start(*groups)
    assert log.packs == [[first], groups]
    await log.end_all()
    assert [await append for append in (lone, *appends)] == [result(number) for number in range(1, 22)]
    assert len({id(task) for task in log.tasks}) == 2
    assert log.memory.held_bytes == 0


async def test_writes_of_one_turn_of_the_event_loop_are_two_packs_whoever_runs_them() -> None:
    log, groups = Log(), [write() for _ in range(20)]
    appends = await log.start(*groups)
    assert log.packs == [groups[:1], groups[1:]]
    await log.end_all()
    assert [each.first_position for each in await asyncio.gather(*appends)] == list(range(1, 21))


async def test_after_several_together_the_next_one_waits_a_turn_for_company_and_the_one_after_it_does_not() -> None:
    log = Log()
    await log.start(write(), write(), write())
    await log.end_all()
    log.held = False
    await asyncio.gather(*await log.start(write(), write()))
    for _ in range(2):
        await log.packer.append(write())
    assert [len(groups) for groups in log.packs] == [1, 2, 2, 1, 1]
    assert [task is asyncio.current_task() for task in log.tasks] == [False, False, False, False, True]


# --- bounds -----------------------------------------------------------------------------------------------------------


async def test_pack_ends_before_the_write_with_which_it_has_too_many_bytes() -> None:
    log, third = Log(), PACK_BYTES_MAX // 3
    await log.start(write())
    groups = [write(third), write(third), write(third), write(third), write(2 * third), write(100)]
    await log.start(*groups)
    assert log.packs[1:] == [groups[:3], groups[3:5], groups[5:]]
    await log.end_all()


async def test_write_larger_than_a_pack_goes_alone_and_keeps_its_place() -> None:
    log = Log()
    await log.start(write())
    groups = [write(), write(2 * PACK_BYTES_MAX), write(), write()]
    await log.start(*groups)
    assert log.packs[1:] == [groups[:1], groups[1:2], groups[2:]]
    await log.end_all()


async def test_pack_has_a_bounded_number_of_groups() -> None:
    log = Log()
    await log.start(write())
    groups = [write() for _ in range(PACK_GROUPS_MAX + 3)]
    await log.start(*groups)
    assert log.packs[1:] == [groups[:PACK_GROUPS_MAX], groups[PACK_GROUPS_MAX:]]
    await log.end_all()


async def test_packs_on_their_way_are_bounded_and_what_waits_meanwhile_goes_together() -> None:
    log = Log()
    for _ in range(PACKS_IN_FLIGHT_MAX):
        await log.start(write())
    waiting = [write() for _ in range(7)]
    for group in waiting:
        await log.start(group)
    assert len(log.packs) == len(log.under_way) == PACKS_IN_FLIGHT_MAX
    await log.end(2)
    assert log.packs[PACKS_IN_FLIGHT_MAX:] == [waiting]
    await log.end_all()
    assert log.memory.held_bytes == 0


async def test_bounds_are_as_they_were_once_everything_has_ended() -> None:
    log = Log()
    for _ in range(3 * PACKS_IN_FLIGHT_MAX):
        await log.start(write())
    await log.end_all()
    del log.packs[:]
    for _ in range(3 * PACKS_IN_FLIGHT_MAX):
        await log.start(write())
    assert len(log.packs) == len(log.under_way) == PACKS_IN_FLIGHT_MAX


async def test_callers_wait_for_memory_in_order_and_it_is_given_back_as_writes_end() -> None:
    log, groups = Log(memory=250), [write(100) for _ in range(4)]
    appends = await log.start(*groups)
    assert log.sent == groups[:2]
    assert log.memory.held_bytes == 200
    await log.end()
    assert log.sent == groups[:3]
    await log.end_all()
    assert [each.first_position for each in await asyncio.gather(*appends)] == [1, 2, 3, 4]
    assert log.memory.held_bytes == 0


async def test_write_larger_than_the_memory_is_refused_and_holds_nothing() -> None:
    log = Log(memory=250)
    await log.start(write())
    for _ in range(2):  # beside another one, and alone
        with pytest.raises(TooLarge, match="pending_bytes_max"):
            await log.packer.append(write(300))
        await log.end_all()
    assert log.memory.held_bytes == 0
    assert len(log.packs) == 1


# --- cancelled --------------------------------------------------------------------------------------------------------


async def test_write_cancelled_while_it_waits_is_never_sent_and_its_neighbours_are() -> None:
    log, groups = Log(), [write() for _ in range(3)]
    for _ in range(PACKS_IN_FLIGHT_MAX):
        await log.start(write())
    appends = await log.start(*groups)
    appends[1].cancel()
    await log.end_all()
    assert log.packs[PACKS_IN_FLIGHT_MAX:] == [[groups[0], groups[2]]]
    assert appends[1].cancelled()
    assert [(await append).first_position for append in (appends[0], appends[2])] == [5, 6]
    assert not groups[1].begun
    assert log.memory.held_bytes == 0


async def test_nothing_is_sent_when_nobody_who_waits_is_left() -> None:
    log = Log()
    for _ in range(PACKS_IN_FLIGHT_MAX):
        await log.start(write())
    for append in await log.start(write(), write()):
        append.cancel()
    await log.end_all()
    assert len(log.packs) == PACKS_IN_FLIGHT_MAX
    assert log.memory.held_bytes == 0
    later = await log.start(write())
    await log.end_all()
    assert later[0].done(), "the road is free"


async def test_write_cancelled_on_its_way_ends_with_its_pack_and_nobody_else_notices() -> None:
    log = Log()
    await log.start(write())
    appends = await log.start(write(), write())
    appends[0].cancel()
    await settle()
    assert log.memory.held_bytes == 300, "its rows are in memory for as long as it is on its way"
    await log.end_all()
    assert appends[0].cancelled()
    assert (await appends[1]).first_position == 3
    assert log.memory.held_bytes == 0


async def test_lone_write_that_is_cancelled_makes_way_and_gives_its_memory_back() -> None:
    log = Log()
    (lone,) = await log.start(write())
    lone.cancel()
    await asyncio.wait([lone])
    assert log.memory.held_bytes == 0
    (append,) = await log.start(write())
    await log.end()
    assert (await append).first_position == 1


async def test_write_cancelled_before_its_first_step_leaves_nothing_behind() -> None:
    log = Log()
    append = asyncio.ensure_future(log.packer.append(write()))
    append.cancel()
    await asyncio.wait([append])
    assert not log.packs
    assert log.memory.held_bytes == 0


async def test_write_cancelled_while_it_waits_for_memory_holds_none() -> None:
    log = Log(memory=150)
    first, second, third = await log.start(write(), write(), write())
    second.cancel()
    await log.end_all()
    assert (await third).first_position == 2
    assert first.done()
    assert len(log.packs) == 2
    assert log.memory.held_bytes == 0


# --- errors -----------------------------------------------------------------------------------------------------------


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
    log, groups = Log(), [write() for _ in range(3)]
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


# --- again ------------------------------------------------------------------------------------------------------------


async def test_write_that_comes_again_goes_before_all_that_wait_and_in_its_order() -> None:
    log, groups = Log(), [write() for _ in range(4)]
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


async def test_write_that_left_its_pack_does_not_hear_of_its_end_even_when_it_goes_in_another_meanwhile() -> None:
    log, groups = Log(), [write() for _ in range(2)]
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
    log, groups = Log(), [write() for _ in range(2)]
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


@pytest.mark.parametrize("repeats", [True, False])
async def test_write_in_doubt_comes_again_only_where_writes_are_repeated(repeats: bool) -> None:
    log, groups = Log(repeats=repeats), [write() for _ in range(2)]
    await log.start(write())
    appends = await log.start(*groups)
    pack, _ = log.under_way[1]
    pack.leave(groups[1])
    groups[1].doubt = Indeterminate("who knows")
    assert pack.come_again is not None
    pack.come_again(groups[1])
    await log.end_all()
    assert log.sent.count(groups[1]) == 1 + repeats
    if repeats:
        assert (await appends[1]).count == 1
    else:
        with pytest.raises(Indeterminate, match="who knows"):
            await appends[1]
    assert log.memory.held_bytes == 0


# --- the end ----------------------------------------------------------------------------------------------------------


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
    log, groups = Log(), [write() for _ in range(2)]
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
    for append in await log.start(write(), write()):
        append.cancel()
    await log.end(0)
    drained = await draining(log)
    assert not drained.done()
    await log.end()
    await drained


# --- all of it --------------------------------------------------------------------------------------------------------


ACTIONS = ["append", "append", "append", "cancel", "end", "fail", "leave", "come again"]


class Callers:
    """Writes, and what becomes of them on the way, step by step."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.groups: list[AppendGroup] = []
        self.appends: list[asyncio.Future[AppendResult]] = []
        self.left: list[AppendGroup] = []
        self.ever_left: set[AppendGroup] = set()

    async def step(self, action: str, number: int) -> None:
        log = self.log
        match action:
            case "append":
                self.groups.append(write(100 + 60 * number))
                self.appends.append(asyncio.ensure_future(self.call(self.groups[-1])))
            case "cancel" if self.appends:
                self.appends[number % len(self.appends)].cancel()
            case "end" | "fail" if log.under_way:
                await log.end(number % len(log.under_way), Indeterminate("no") if action == "fail" else None)
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
            self.ever_left.add(group)
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
            assert times <= 1 + (group in self.ever_left)
            assert append.cancelled() or times
        order = {group: number for number, group in enumerate(self.groups)}
        straight = [order[group] for group in sent if group not in self.ever_left]
        assert straight == sorted(straight), "in the order of the calls"
        for groups in self.log.packs:
            assert len(groups) == 1 or sum(group.size_bytes for group in groups) <= 500
        assert self.log.memory.held_bytes == 0


@given(
    steps=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.booleans()), max_size=40),
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
