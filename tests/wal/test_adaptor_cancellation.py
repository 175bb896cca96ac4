"""A cancelled append is in the log once or never, and leaves nothing behind."""

import asyncio

import anyio
import pytest

from tests.wal.manual_log import insert, settle
from tests.wal.steered_wal import SteeredWal, drop, start
from wal.append import AppendGroup

pytestmark = pytest.mark.anyio


def tick_of(group: AppendGroup) -> int:
    """Return the tick of a group that went alone, whoever listened."""
    return group.result().time_tick if group.pack is None else group.pack.time_tick


async def test_append_cancelled_in_the_log_is_decided_and_published_without_its_caller() -> None:
    steered = await SteeredWal().open()
    group = insert()
    append = await start(steered.wal, group)
    append.cancel()
    with pytest.raises(asyncio.CancelledError):
        await append
    steered.log.write()
    await settle()
    assert steered.tail.confirmed_tick == tick_of(group)
    assert steered.settled


async def test_append_whose_cancel_scope_ends_in_the_log_is_decided_once() -> None:
    steered = await SteeredWal().open()
    group = insert()
    scope = anyio.CancelScope()

    async def append_within_scope() -> None:
        with scope:
            await steered.wal.append(group)

    appending = asyncio.ensure_future(append_within_scope())
    await settle()
    scope.cancel()
    await appending
    assert scope.cancelled_caught
    assert sum(len(pack.groups) for pack in steered.wal.in_flight) == 1
    steered.log.write()
    await settle()
    assert steered.tail.confirmed_tick == tick_of(group)
    assert steered.settled


@pytest.mark.parametrize("waits_for", ["room", "lock", "redo"])
async def test_append_cancelled_before_the_log_never_happened(waits_for: str) -> None:
    steered = await SteeredWal().open()
    loop = asyncio.get_running_loop()
    holder = None
    if waits_for == "room":
        steered.log.admission = loop.create_future()
    elif waits_for == "lock":
        holder = await start(steered.wal, drop())
    else:
        steered.gatekeeper.until = loop.create_future()
    before = steered.log.next_position
    append = await start(steered.wal, insert())
    append.cancel()
    with pytest.raises(asyncio.CancelledError):
        await append
    await settle()
    if steered.log.admission is not None:
        steered.log.admission.set_result(None)
    if steered.gatekeeper.until is not None:
        steered.gatekeeper.until.set_result(None)
    if holder is not None:
        steered.log.write()
        await holder
    await settle()
    assert steered.log.next_position == before
    assert steered.settled


async def cancelled_after(steps: int) -> bool:
    """Cancel an append after so many steps of the loop, check that nothing is half done; whether it
    was cancelled.
    """
    steered = await SteeredWal().open()
    until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    exclusive = drop()
    group = insert()
    holder = await start(steered.wal, exclusive)
    steered.gatekeeper.until = until
    append = asyncio.ensure_future(steered.wal.append(group))
    script = {4: steered.log.write, 10: lambda: until.set_result(None), 18: steered.log.write}
    for step in range(30):
        if step == steps:
            append.cancel()
        if step in script:
            script[step]()
        await asyncio.sleep(0)
    await holder
    happened = group.begun
    assert steered.log.next_position == 3 + happened, "the append is in the log once or never"
    assert steered.tail.confirmed_tick == (tick_of(group) if happened else tick_of(exclusive))
    assert steered.settled
    assert append.done()
    assert append.cancelled() or happened
    return append.cancelled()


async def test_append_cancelled_at_any_step_is_there_once_or_never_and_leaves_nothing() -> None:
    outcomes = [await cancelled_after(step) for step in range(30)]
    assert outcomes[0]
    assert not outcomes[-1], "the script is long enough to reach the end"
    first_uncancelled = outcomes.index(False)
    assert first_uncancelled > 18, (
        "cancelled while it waited for the lock, for the redo, and for the log"
    )


async def cancelled_in_a_pack_after(steps: int) -> bool:
    """Cancel the second of three that go together after so many steps, as above; the other two are
    always written.
    """
    steered = await SteeredWal().open()
    until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    lone = await start(steered.wal, insert())
    steered.gatekeeper.until = until
    groups = [insert() for _ in range(3)]
    appends = [asyncio.ensure_future(steered.wal.append(group)) for group in groups]
    script = {4: steered.log.write, 10: lambda: until.set_result(None), 18: steered.log.write}
    for step in range(30):
        if step == steps:
            appends[1].cancel()
        if step in script:
            script[step]()
        await asyncio.sleep(0)
    await lone
    written = 2 + groups[1].begun
    assert steered.log.next_position == 3 + written, "the others are in the log once"
    assert [(await appends[number]).first_position for number in (0, 2)] == [3, 2 + written]
    assert steered.tail.confirmed_tick == groups[2].result().time_tick
    assert steered.settled
    assert appends[1].cancelled() or groups[1].begun
    return appends[1].cancelled()


async def test_append_cancelled_in_a_pack_is_there_once_or_never_and_the_others_are_there() -> None:
    outcomes = [await cancelled_in_a_pack_after(step) for step in range(30)]
    assert outcomes[0]
    assert not outcomes[-1], "the script is long enough to reach the end"
    assert outcomes.index(False) > 18, (
        "cancelled while its pack waited for the redo, and for the log"
    )


async def test_many_appends_cancelled_at_random_leave_an_unbroken_log() -> None:
    steered = await SteeredWal().open()
    appends = [
        await start(steered.wal, drop() if number % 7 == 0 else insert()) for number in range(60)
    ]
    for number, append in enumerate(appends):
        if number % 3 == 0:
            append.cancel()
        steered.log.write()
        await asyncio.sleep(0)
    while steered.wal.in_flight:
        steered.log.write()
        await asyncio.sleep(0)
    assert steered.settled
    assert steered.tail.next_position == steered.log.next_position
