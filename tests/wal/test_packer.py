"""Writes that come together go together, those that come alone go at once, and both in their
order.
"""

import asyncio

import pytest

from tests.wal.manual_log import settle
from tests.wal.packs_under_way import Log, queued, result, write
from wal.append import AppendGroup
from wal.errors import TooLarge
from wal.packer import (
    ALONE_BYTES_MIN,
    JOINED_MIN,
    PACK_BYTES_MAX,
    PACK_GROUPS_MAX,
    PACKS_IN_FLIGHT_MAX,
)

pytestmark = pytest.mark.anyio


# --- alone, and together --------------------------------------------------------------------------


async def test_write_that_comes_alone_goes_at_once_in_its_callers_own_task() -> None:
    log = Log(held=False)
    turns = list[int]()
    asyncio.get_running_loop().call_soon(turns.append, 1)
    for number in (1, 2, 3):
        assert await log.packer.append(write()) == result(number)
    assert log.tasks == [asyncio.current_task()] * 3
    assert not turns, "the event loop took no turn"
    assert [len(groups) for groups in log.packs] == [1, 1, 1]


async def test_writes_that_come_while_one_is_on_its_way_go_together_in_order_of_their_calls() -> (
    None
):
    log = Log()
    first = write()
    groups = [write() for _ in range(20)]
    (lone,) = await log.start(first)
    appends = await log.start(*groups)
    assert log.packs == [[first], groups]
    await log.end_all()
    assert [await append for append in (lone, *appends)] == [
        result(number) for number in range(1, 22)
    ]
    assert len({id(task) for task in log.tasks}) == 2
    assert log.memory.held_bytes == 0


async def test_writes_of_one_turn_of_the_event_loop_are_two_packs_whoever_runs_them() -> None:
    log = Log()
    groups = [write() for _ in range(20)]
    appends = await log.start(*groups)
    assert log.packs == [groups[:1], groups[1:]]
    await log.end_all()
    assert [each.first_position for each in await asyncio.gather(*appends)] == list(range(1, 21))


async def test_after_several_together_the_next_one_waits_a_turn_and_the_one_after_it_does_not() -> (
    None
):
    log = Log()
    await log.start(write(), write(), write())
    await log.end_all()
    log.held = False
    await asyncio.gather(*await log.start(write(), write()))
    for _ in range(2):
        await log.packer.append(write())
    assert [len(groups) for groups in log.packs] == [1, 2, 2, 1, 1]
    assert [task is asyncio.current_task() for task in log.tasks] == [
        False,
        False,
        False,
        False,
        True,
    ]


# --- company --------------------------------------------------------------------------------------


async def test_fewer_writes_than_company_wait_for_the_pack_on_its_way_and_go_when_it_ends() -> None:
    log = Log(company=4)
    groups = [write() for _ in range(4)]
    await log.start(*groups)
    assert log.packs == [groups[:1]]
    await log.end()
    assert log.packs == [groups[:1], groups[1:]]
    await log.end_all()
    assert log.memory.held_bytes == 0


async def test_as_many_writes_as_the_company_do_not_wait_and_the_next_few_do() -> None:
    log = Log(company=4)
    groups = [write() for _ in range(8)]
    await log.start(*groups[:5])
    await log.start(*groups[5:])
    assert log.packs == [groups[:1], groups[1:5]]
    await log.end()
    assert len(log.packs) == 2, "one is still on its way"
    await log.end()
    assert log.packs[2:] == [groups[5:]]
    await log.end_all()


async def test_who_is_told_of_a_pack_writes_again_in_the_next_one_where_there_is_a_company() -> (
    None
):
    log = Log(company=4)
    waiting = write()

    async def write_twice() -> None:
        for _ in range(2):
            await log.packer.append(write())

    await log.start(write())
    writers = [asyncio.ensure_future(write_twice()) for _ in range(4)]
    await settle()
    await log.start(waiting)
    await log.end()
    await log.end()
    assert [len(groups) for groups in log.packs] == [1, 4, 5]
    assert log.packs[2][0] is waiting
    await log.end_all()
    await asyncio.gather(*writers)


async def test_a_large_write_waits_for_no_company() -> None:
    log = Log(company=4)
    groups = [write(), write(ALONE_BYTES_MIN)]
    await log.start(*groups)
    assert log.packs == [groups[:1], groups[1:]]
    await log.end_all()


async def joined(log: Log, *groups: AppendGroup) -> None:
    """Have writes of a connection wait."""
    for group in groups:
        group.waiter = asyncio.get_running_loop().create_future()
    assert log.packer.try_join(groups)
    await settle()


async def test_writes_of_connections_wait_for_a_pack_that_only_disk_keeps_and_for_no_other() -> (
    None
):
    log = Log()
    groups = [write() for _ in range(5)]
    # what has no place in the log may wait for a lock, and long
    for pack in (groups[:2], groups[2:3], groups[3:4]):
        await joined(log, *pack)
    assert log.packs == [groups[:2], groups[2:3], groups[3:4]]
    log.under_way[0][0].ticket = queued()
    await joined(log, groups[4])
    assert len(log.packs) == 3
    await log.end()
    assert log.packs[3:] == [groups[4:]]
    await log.end_all()


async def test_many_writes_of_connections_wait_for_none() -> None:
    log = Log()
    groups = [write() for _ in range(JOINED_MIN + 1)]
    await joined(log, groups[0])
    log.under_way[0][0].ticket = queued()
    await joined(log, *groups[1:])
    assert log.packs == [groups[:1], groups[1:]]
    await log.end_all()


async def test_writes_of_a_connection_join_all_or_none() -> None:
    log = Log(memory=250)
    groups = [write(100) for _ in range(3)]
    assert not log.packer.try_join(groups)
    assert (log.memory.held_bytes, log.packs) == (0, [])
    await joined(log, *groups[:2])
    assert log.packs == [groups[:2]]
    await log.end_all()
    assert log.memory.held_bytes == 0


# --- bounds ---------------------------------------------------------------------------------------


async def test_pack_ends_before_the_write_with_which_it_has_too_many_bytes() -> None:
    log = Log()
    third = PACK_BYTES_MAX // 3
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
    log = Log(memory=250)
    groups = [write(100) for _ in range(4)]
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


# --- cancelled ------------------------------------------------------------------------------------


async def test_write_cancelled_while_it_waits_is_never_sent_and_its_neighbours_are() -> None:
    log = Log()
    groups = [write() for _ in range(3)]
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


async def test_way_of_a_pack_without_a_place_ends_when_its_last_caller_is_gone() -> None:
    log = Log()
    await log.start(write())
    first, second = await log.start(write(), write())
    first.cancel()
    await settle()
    assert len(log.under_way) == 2
    second.cancel()
    await settle()
    assert len(log.under_way) == 1
    await log.end_all()
    assert log.memory.held_bytes == 0


async def test_pack_with_a_place_ends_with_its_write_whoever_is_gone() -> None:
    log = Log()
    (append,) = await log.start(write())
    log.under_way[0][0].ticket = queued()
    append.cancel()
    await settle()
    assert append.cancelled()
    assert len(log.under_way) == 1
    assert log.memory.held_bytes == 100
    await log.end()
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
