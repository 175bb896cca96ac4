"""A write that failed is in the log once, or not at all, and its caller hears which of the two."""

import asyncio
from collections.abc import Callable

import pytest

from tests.wal.manual_log import insert, settle
from tests.wal.steered_wal import SteeredWal, drop, start
from wal.append import AppendGroup
from wal.errors import Indeterminate, StorageFull
from wal.lifecycle import ReopenOptions
from wal.position import ProducerStamp

pytestmark = pytest.mark.anyio

NOT_FOR_LONG = ReopenOptions(wait_s=0.01, first_pause_s=0.0, longest_pause_s=0.0)


def lose(steered: SteeredWal) -> None:
    """Let the writes that the log's queue holds fail, and the store with them."""
    steered.log.break_down()
    steered.store.fail()


async def kept(steered: SteeredWal) -> "asyncio.Future[None]":
    keeping = asyncio.ensure_future(steered.wal.keep())
    await settle()
    return keeping


async def close(steered: SteeredWal, keeping: "asyncio.Future[None]") -> None:
    await steered.wal.close()
    await keeping
    assert not steered.wal.in_flight
    assert steered.memory.held_bytes == 0
    assert steered.room.held_bytes == 0


Make = Callable[[], AppendGroup]
a_write = pytest.mark.parametrize("make", [insert, drop], ids=["rows", "messages"])


@a_write
async def test_write_that_the_log_has_is_told_its_place_there_and_not_written_again(
    make: Make,
) -> None:
    steered = await SteeredWal().open()
    keeping = await kept(steered)
    append = await start(steered.wal, make())
    lose(steered)
    steered.log.mend(kept=1)
    steered.store.may_reopen.set()
    result = await append
    assert (result.first_position, result.durable) == (2, True)
    assert len(steered.log.entries) == 3, "two first ticks, and the write once"
    await close(steered, keeping)


@a_write
async def test_write_that_the_log_does_not_have_is_appended_in_the_next_term(
    make: Make,
) -> None:
    steered = await SteeredWal().open()
    keeping = await kept(steered)
    append = await start(steered.wal, make())
    lose(steered)
    steered.log.mend()
    steered.store.may_reopen.set()
    result = await append
    assert result.time_tick > steered.first_tick.time_tick
    assert len(steered.log.entries) == 4
    await close(steered, keeping)


async def test_of_several_failed_writes_those_before_the_loss_are_told_and_others_come_anew() -> (
    None
):
    steered = await SteeredWal().open()
    keeping = await kept(steered)
    appends = [await start(steered.wal, drop(f"p0_{number}v0")) for number in (1, 2, 3)]
    lose(steered)
    steered.log.mend(kept=2)
    steered.store.may_reopen.set()
    results = [await append for append in appends]
    assert [result.first_position for result in results[:2]] == [2, 3]
    assert results[2].time_tick > steered.first_tick.time_tick > results[1].time_tick
    await close(steered, keeping)


async def test_position_that_another_entry_took_is_not_taken_for_the_lost_write() -> None:
    """The first opening of the next term fails behind its first tick, which has the position."""
    steered = await SteeredWal(reopen=ReopenOptions(first_pause_s=0.0)).open()
    keeping = await kept(steered)
    append = await start(steered.wal, insert())
    lose(steered)
    open_term = steered._open_term
    opened = 0

    async def fail_once(*arguments: object) -> object:
        nonlocal opened
        opened += 1
        if opened == 1:
            raise StorageFull("data", 0, 1)
        return await open_term(*arguments)  # type: ignore[arg-type]

    steered.wal._make_term = fail_once  # type: ignore[assignment]
    steered.log.mend()
    steered.log.first_position = 1
    steered.store.may_reopen.set()
    result = await append
    assert opened == 2
    assert result.first_position == 4, "behind both first ticks of the next terms"
    await close(steered, keeping)


async def test_write_keeps_the_sequence_that_it_was_given_when_it_comes_anew() -> None:
    steered = await SteeredWal().open()
    keeping = await kept(steered)
    group = insert()
    group.producer = ProducerStamp(7, 1, 3)
    append = await start(steered.wal, group)
    lose(steered)
    steered.log.mend()
    steered.store.may_reopen.set()
    await append
    assert group.producer == ProducerStamp(7, 1, 3)
    await close(steered, keeping)


@a_write
async def test_write_whose_log_does_not_come_back_in_time_is_indeterminate(
    make: Make,
) -> None:
    steered = await SteeredWal(reopen=NOT_FOR_LONG).open()
    keeping = await kept(steered)
    group = make()
    append = await start(steered.wal, group)
    lose(steered)
    with pytest.raises(Indeterminate):
        await append
    assert group.begun
    await close(steered, keeping)


async def test_full_disk_that_keeps_the_log_away_leaves_the_write_in_doubt_until_it_has_room() -> (
    None
):
    steered = await SteeredWal(reopen=ReopenOptions(first_pause_s=0.0, longest_pause_s=0.0)).open()
    steered.store.refusals = [StorageFull("data", 0, 1)] * 5
    keeping = await kept(steered)
    append = await start(steered.wal, insert())
    lose(steered)
    steered.log.mend(kept=1)
    steered.store.may_reopen.set()
    assert (await append).first_position == 2
    assert not steered.store.refusals
    await close(steered, keeping)


@a_write
async def test_closing_ends_the_wait_for_a_log_that_is_lost(make: Make) -> None:
    steered = await SteeredWal().open()
    keeping = await kept(steered)
    append = await start(steered.wal, make())
    lose(steered)
    await settle()
    assert not append.done()
    steered.wal.stop_waiting()
    with pytest.raises(Indeterminate):
        await append
    await close(steered, keeping)


async def test_caller_that_gave_up_after_its_place_leaves_a_write_that_is_not_written_again() -> (
    None
):
    steered = await SteeredWal().open()
    keeping = await kept(steered)
    append = await start(steered.wal, insert())
    append.cancel()
    await settle()
    lose(steered)
    steered.log.mend()
    steered.store.may_reopen.set()
    await start(steered.wal, insert())
    await settle()
    assert len(steered.log.entries) == 4, "two first ticks, the lost write, and the one behind it"
    await close(steered, keeping)


async def test_workers_of_a_term_find_out_by_themselves_what_became_of_their_writes() -> None:
    steered = await SteeredWal().open()
    keeping = await kept(steered)
    append = asyncio.ensure_future(steered.wal.append_once(drop()))
    await settle()
    lose(steered)
    with pytest.raises(Indeterminate):
        await append
    steered.log.mend()
    steered.store.may_reopen.set()
    await settle()
    assert len(steered.log.entries) == 3
    await close(steered, keeping)
