"""Writes of many callers in one entry: each is told its own part of it, and none is held up by
another's trouble.
"""

import asyncio
from collections.abc import Sequence

import pytest

from tests.wal.entries import comparable
from tests.wal.manual_log import A, B, insert, settle
from tests.wal.packed import (
    FakeTarget,
    delete_group,
    insert_group,
    piece,
    rows_group,
    transaction_group,
)
from tests.wal.steered_wal import SteeredWal, drop, start
from wal.append import AppendGroup, AppendResult, Pack
from wal.codec import decode_entry
from wal.entry import LogEntry
from wal.errors import InvalidArgument, OnShutdown, StorageFull
from wal.headers import MessageType
from wal.lifecycle import LogState

pytestmark = pytest.mark.anyio


async def together(
    steered: SteeredWal, *groups: AppendGroup
) -> Sequence["asyncio.Future[AppendResult]"]:
    """Begin to append groups in one pack, behind a write that went alone and has ended."""
    lone, *appends = [
        asyncio.ensure_future(steered.wal.append(group)) for group in (insert(), *groups)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    steered.log.write(1)
    await lone
    await settle()
    return appends


def last_entry(steered: SteeredWal) -> LogEntry:
    return decode_entry(steered.log.entries[-1], wal_name="memory", previous_crc32c=None)


async def test_writes_that_come_together_are_one_entry_and_each_hears_its_own_part_of_it() -> None:
    steered = await SteeredWal().open()
    target = FakeTarget(vchannels=(A, B))
    deletes = FakeTarget(MessageType.DELETE, vchannels=(A, B))
    groups = [
        insert_group(target, rows=2),
        transaction_group(piece(deletes, (1, b"key")), piece(target, (1, b"row"))),
        rows_group(piece(target, (0, b"row"), (1, b"row"))),
        delete_group(deletes),
    ]
    appends = await together(steered, *groups)
    steered.log.write()
    results = [await append for append in appends]
    entry = last_entry(steered)
    assert steered.log.queue == []
    assert (entry.first_position, entry.last_position, len(steered.log.entries)) == (3, 10, 3)
    assert [result.first_position for result in results] == [3, 4, 8, 10]
    assert [result.count for result in results] == [1, 4, 2, 1]
    assert [result.time_tick for result in results] == list(
        range(entry.first_tick, entry.first_tick + 4)
    )
    assert [result.txn_id for result in results] == [0, results[1].time_tick, 0, 0]
    assert [result.row_offsets for result in results] == [
        {A: (0, 2)},
        {B: (0, 1)},
        {A: (2, 1), B: (1, 1)},
        {},
    ]
    assert {result.last_confirmed.position for result in results} == {3}
    assert [comparable(each) for each in steered.tail.read(3, bytes_max=1)] == [comparable(entry)]
    assert steered.tail.confirmed_tick == results[-1].time_tick
    assert steered.settled


async def test_refused_write_is_told_alone_and_the_others_are_in_the_log() -> None:
    steered = await SteeredWal().open()
    groups = [insert() for _ in range(3)]
    refusal = InvalidArgument("no such partition")
    steered.gatekeeper.refused[groups[1]] = refusal
    appends = await together(steered, *groups)
    steered.log.write()
    with pytest.raises(InvalidArgument) as caught:
        await appends[1]
    assert caught.value is refusal
    first = await appends[0]
    third = await appends[2]
    assert (first.first_position, third.first_position) == (3, 4)
    assert third.time_tick == first.time_tick + 1 == steered.tail.confirmed_tick
    assert not groups[1].begun
    assert last_entry(steered).count == 2
    assert steered.settled


async def test_pack_of_refused_writes_only_is_not_in_the_log() -> None:
    steered = await SteeredWal().open()
    groups = [insert(), insert()]
    steered.gatekeeper.refused.update(dict.fromkeys(groups, InvalidArgument("no")))
    for append in await together(steered, *groups):
        with pytest.raises(InvalidArgument):
            await append
    assert len(steered.log.entries) == 2
    assert steered.settled


async def test_writes_that_have_to_wait_leave_their_pack_and_come_again_in_their_order() -> None:
    steered = await SteeredWal().open()
    groups = [insert() for _ in range(5)]
    steered.gatekeeper.until = asyncio.get_running_loop().create_future()
    steered.gatekeeper.waiting = [groups[1], groups[3]]
    appends = await together(steered, *groups)
    steered.log.write()
    assert [(await appends[number]).first_position for number in (0, 2, 4)] == [3, 4, 5]
    assert not any(appends[number].done() or groups[number].begun for number in (1, 3))
    steered.gatekeeper.until.set_result(None)
    await settle()
    steered.log.write()
    assert [(await appends[number]).first_position for number in (1, 3)] == [6, 7]
    assert last_entry(steered).count == 2
    assert steered.settled


async def test_writes_to_a_locked_collection_wait_and_those_to_others_go_on() -> None:
    steered = await SteeredWal().open()
    elsewhere = FakeTarget(collection_id=2, vchannels=(B,))
    lone = await start(steered.wal, insert_group(elsewhere))
    holder = await start(steered.wal, drop(A))
    here, there = [
        asyncio.ensure_future(steered.wal.append(each))
        for each in (insert(A), insert_group(elsewhere))
    ]
    await settle()
    steered.log.write(1)
    await lone
    steered.log.write()
    await holder
    await there
    await settle()
    steered.log.write()
    assert (await here).time_tick > (await there).time_tick
    assert steered.settled


@pytest.mark.parametrize("waits_for", ["room", "redo"])
async def test_write_cancelled_in_a_pack_before_the_log_never_happened_and_its_neighbours_did(
    waits_for: str,
) -> None:
    steered = await SteeredWal().open()
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    groups = [insert() for _ in range(3)]
    lone, *appends = [
        asyncio.ensure_future(steered.wal.append(group)) for group in (insert(), *groups)
    ]
    if waits_for == "room":
        steered.log.admission = gate
    else:
        steered.gatekeeper.until = gate
    await settle()
    appends[1].cancel()
    await settle()
    gate.set_result(None)
    await settle()
    steered.log.write()
    results = [await each for each in (lone, appends[0], appends[2])]
    assert [result.first_position for result in results] == [2, 3, 4]
    assert last_entry(steered).count == 2
    assert not groups[1].begun
    assert steered.settled


async def test_write_cancelled_in_the_log_is_there_and_its_neighbours_hear_of_theirs() -> None:
    steered = await SteeredWal().open()
    groups = [insert() for _ in range(3)]
    appends = await together(steered, *groups)
    appends[1].cancel()
    await settle()
    steered.log.write()
    assert [(await appends[number]).first_position for number in (0, 2)] == [3, 5]
    assert groups[1].begun
    assert steered.tail.next_position == 6
    assert steered.settled


async def test_pack_that_nobody_waits_for_any_more_is_decided_by_the_log() -> None:
    steered = await SteeredWal().open()
    appends = await together(steered, insert(), insert())
    for append in appends:
        append.cancel()
    await settle()
    assert sum(len(pack.groups) for pack in steered.wal.in_flight) == 2
    steered.log.write()
    await settle()
    assert steered.tail.next_position == 5
    assert steered.settled


async def test_error_of_the_log_is_that_of_every_write_in_the_pack() -> None:
    steered = await SteeredWal().open()
    steered.gatekeeper.until = asyncio.get_running_loop().create_future()
    appends = [asyncio.ensure_future(steered.wal.append(insert())) for _ in range(3)]
    await settle()
    steered.log.refusal = StorageFull("data", 0, 1)
    steered.gatekeeper.until.set_result(None)
    for append in appends:
        with pytest.raises(StorageFull):
            await append
    assert steered.settled


async def test_pack_with_a_place_is_indeterminate_and_one_without_goes_on_in_the_next_term() -> (
    None
):
    steered = await SteeredWal().open()
    keeping = asyncio.ensure_future(steered.wal.keep())
    in_log = await together(steered, insert(), insert())
    steered.log.admission = asyncio.get_running_loop().create_future()
    in_queue = [asyncio.ensure_future(steered.wal.append(insert())) for _ in range(3)]
    await settle()
    steered.log.break_down()
    steered.store.fail()
    steered.log.admission.set_result(None)
    assert not any(append.done() for append in in_log)
    late = await start(steered.wal, insert())
    assert not any(append.done() for append in in_queue)
    steered.log.mend()
    steered.store.may_reopen.set()
    results = [await append for append in in_queue]
    for append in (*in_log, late):
        await append
    assert [result.time_tick for result in results] == sorted(
        result.time_tick for result in results
    )
    assert (steered.wal.state, steered.wal.term) == (LogState.OPEN, 8)
    entry = last_entry(steered)
    assert entry.wal_term == 8
    assert steered.settled
    await steered.wal.close()
    await keeping


async def test_observer_hears_of_a_pack_once_and_every_write_counts_as_in_flight() -> None:
    ended: list[tuple[int, str]] = []

    class Observer:
        def interceptor_timed(
            self, name: str, before_s: float, after_s: float, *, failed_before: bool
        ) -> None: ...

        def append_ended(self, pack: Pack, seconds: float, status: str) -> None:
            ended.append((len(pack.groups), status))

    steered = await SteeredWal(observer=Observer()).open()
    appends = await together(steered, insert(), insert(), insert())
    assert sum(len(pack.groups) for pack in steered.wal.in_flight) == 3
    steered.log.write()
    await asyncio.gather(*appends)
    await settle()
    assert ended == [(1, "ok"), (3, "ok")]
    assert not steered.wal.in_flight


# --- closing --------------------------------------------------------------------------------------


async def test_close_waits_for_packs_in_log_and_sends_those_away_that_wait_for_their_turn() -> None:
    steered = await SteeredWal().open()
    in_log = await together(steered, insert(), insert())
    steered.log.admission = asyncio.get_running_loop().create_future()
    waiting = [asyncio.ensure_future(steered.wal.append(insert())) for _ in range(3)]
    await settle()
    closing = asyncio.ensure_future(steered.wal.close())
    await settle()
    steered.log.admission.set_result(None)
    for append in waiting:
        with pytest.raises(OnShutdown):
            await append
    assert not closing.done()
    steered.log.write()
    assert [(await append).first_position for append in in_log] == [3, 4]
    await closing
    assert steered.settled


async def test_close_sends_writes_away_that_left_their_pack() -> None:
    steered = await SteeredWal().open()
    groups = [insert(), insert()]
    steered.gatekeeper.until = asyncio.get_running_loop().create_future()
    steered.gatekeeper.waiting = [groups[1]]
    appends = await together(steered, *groups)
    steered.log.write()
    await appends[0]
    await steered.wal.close()
    with pytest.raises(OnShutdown):
        await appends[1]
    assert not groups[1].begun
    assert steered.settled


async def test_writes_that_wait_for_a_log_that_does_not_come_back_are_sent_away_by_close() -> None:
    steered = await SteeredWal().open()
    keeping = asyncio.ensure_future(steered.wal.keep())
    steered.log.break_down()
    steered.store.fail()
    waiting = [asyncio.ensure_future(steered.wal.append(insert())) for _ in range(6)]
    await settle()
    closing = asyncio.ensure_future(steered.wal.close())
    steered.log.mend()
    steered.store.may_reopen.set()
    for append in waiting:
        with pytest.raises(OnShutdown):
            await append
    await closing
    await keeping
    assert steered.settled


async def test_drain_returns_when_lone_writes_packs_and_those_that_left_theirs_have_ended() -> None:
    steered = await SteeredWal().open()
    groups = [insert(), insert()]
    steered.gatekeeper.until = asyncio.get_running_loop().create_future()
    steered.gatekeeper.waiting = [groups[1]]
    await together(steered, *groups)
    draining = asyncio.ensure_future(steered.wal.drain())
    await settle()
    steered.log.write()
    await settle()
    assert not draining.done()
    steered.gatekeeper.until.set_result(None)
    await settle()
    assert not draining.done()
    steered.log.write()
    await draining
    assert steered.settled
