"""A closing WAL: appends in flight end first, later ones are refused, and nothing holds it up for ever."""

import asyncio

import anyio
import pytest

from tests.wal.manual_log import insert, settle
from tests.wal.steered_wal import SteeredWal, start
from wal import adaptor
from wal.errors import (
    ChannelFenced,
    Indeterminate,
    OnShutdown,
    StorageFailed,
)
from wal.lifecycle import WalState

pytestmark = pytest.mark.anyio


async def test_close_waits_for_appends_in_flight_and_no_append_succeeds_after_it() -> None:
    steered = await SteeredWal().open()
    append = await start(steered.wal, insert())
    closing = asyncio.ensure_future(steered.wal.close())
    await settle()
    assert steered.wal.state is WalState.CLOSING
    assert not closing.done()
    with pytest.raises(OnShutdown):
        await steered.wal.append(insert())
    steered.log.write()
    assert (await append).first_message_id.position == 2
    await closing
    assert steered.wal.state is WalState.CLOSED
    assert steered.gatekeeper.closed == ["graceful", "close"]
    with pytest.raises(OnShutdown):
        await steered.wal.append(insert())
    assert steered.log.next_position == 3


async def test_close_waits_for_appends_nobody_waits_for() -> None:
    steered = await SteeredWal().open()
    append = await start(steered.wal, insert())
    append.cancel()
    closing = asyncio.ensure_future(steered.wal.close())
    await settle()
    assert not closing.done()
    steered.log.queue[0].durable.set_result(None)
    await closing


async def test_close_sends_appends_away_that_wait_for_a_redo() -> None:
    steered = await SteeredWal().open()
    steered.gatekeeper.until = asyncio.get_running_loop().create_future()
    append = await start(steered.wal, insert())
    await steered.wal.close()
    with pytest.raises(OnShutdown, match="the gate"):
        await append


async def test_append_admitted_after_the_close_began_is_refused() -> None:
    steered = await SteeredWal().open()
    steered.log.admission = asyncio.get_running_loop().create_future()
    append = await start(steered.wal, insert())
    closing = asyncio.ensure_future(steered.wal.close())
    await settle()
    steered.log.admission.set_result(None)
    with pytest.raises(OnShutdown):
        await append
    await closing
    assert steered.log.next_position == 2


async def test_close_is_idempotent_and_a_second_call_waits_for_the_first() -> None:
    steered = await SteeredWal().open()
    append = await start(steered.wal, insert())
    closings = [asyncio.ensure_future(steered.wal.close()) for _ in range(3)]
    await settle()
    assert not any(closing.done() for closing in closings)
    steered.log.write()
    await append
    await asyncio.gather(*closings)
    await steered.wal.close()
    assert steered.gatekeeper.closed.count("close") == 1


async def test_cancelled_close_is_finished_by_the_next_one() -> None:
    steered = await SteeredWal().open()
    append = await start(steered.wal, insert())
    closing = asyncio.ensure_future(steered.wal.close())
    await settle()
    closing.cancel()
    await asyncio.wait([closing])
    assert steered.wal.state is WalState.CLOSING
    steered.log.write()
    await append
    await steered.wal.close()
    assert steered.wal.state is WalState.CLOSED


async def test_interceptor_that_never_ends_by_itself_holds_the_close_up_for_its_grace_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adaptor, "GRACE_S", 0.01)
    steered = await SteeredWal().open()
    steered.gatekeeper.hangs = True
    with anyio.fail_after(2):
        await steered.wal.close()
    assert steered.wal.state is WalState.CLOSED


@pytest.mark.parametrize("error", [ChannelFenced("x"), Indeterminate("x")], ids=["fenced", "poisoned"])
async def test_wal_that_takes_no_appends_still_closes(error: Exception) -> None:
    steered = await SteeredWal().open()
    steered.gatekeeper.refusal = error
    with pytest.raises((ChannelFenced, StorageFailed)):
        await steered.wal.append(insert())
    await steered.wal.close()
    assert steered.wal.state is WalState.CLOSED
