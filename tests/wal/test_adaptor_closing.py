"""A closing WAL: appends in flight end first, later ones are refused, and nothing holds it up for
ever.
"""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wal.manual_log import begin, insert, settle, time_tick
from tests.wal.steered_wal import SteeredWal, drop, start
from wal.append import AppendGroup, AppendResult
from wal.errors import LogReopening, OnShutdown
from wal.lifecycle import LogState

pytestmark = pytest.mark.anyio


async def test_close_waits_for_appends_in_flight_and_no_append_succeeds_after_it() -> None:
    steered = await SteeredWal().open()
    append = await start(steered.wal, insert())
    closing = asyncio.ensure_future(steered.wal.close())
    await settle()
    assert steered.wal.state is LogState.CLOSED
    assert not closing.done()
    with pytest.raises(OnShutdown):
        await steered.wal.append(insert())
    steered.log.write()
    assert (await append).first_position == 2
    await closing
    assert steered.wal.state is LogState.CLOSED
    assert steered.gatekeeper.closed == 1
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
    steered.log.write()
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


async def test_append_that_waits_for_room_when_a_write_fails_behind_the_close_did_nothing() -> None:
    steered = await SteeredWal().open()
    steered.log.admission = asyncio.get_running_loop().create_future()
    group = insert()
    append = await start(steered.wal, group)
    closing = asyncio.ensure_future(steered.wal.close())
    await settle()
    steered.store.fail()
    steered.log.admission.set_exception(LogReopening("another write failed"))
    with pytest.raises(LogReopening):
        await append
    assert not group.begun
    await closing


async def test_close_waits_for_no_task_that_its_event_loop_cancelled() -> None:
    steered = await SteeredWal().open()
    others = asyncio.all_tasks()
    append = asyncio.ensure_future(steered.wal.append(begin()))
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - others:  # as an event loop does when its program ends
        task.cancel()
    await asyncio.wait([append])
    steered.log.write()
    async with asyncio.timeout(60):
        await steered.wal.close()


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


async def test_cancelled_close_is_finished_by_the_next_one() -> None:
    steered = await SteeredWal().open()
    append = await start(steered.wal, insert())
    closing = asyncio.ensure_future(steered.wal.close())
    await settle()
    closing.cancel()
    await asyncio.wait([closing])
    assert steered.wal.state is LogState.CLOSED
    steered.log.write()
    await append
    await steered.wal.close()
    assert steered.wal.state is LogState.CLOSED


class Callers:
    """Appends that run beside each other while a WAL closes."""

    def __init__(self, steered: SteeredWal) -> None:
        self.steered = steered
        self.appends: list[asyncio.Future[AppendResult]] = []
        self.late: list[asyncio.Future[AppendResult]] = []
        self.inserts: list[AppendGroup] = []
        self.closing: asyncio.Task[None] | None = None

    def step(self, action: str, number: int) -> None:  # one arm for each action
        log = self.steered.log
        gatekeeper = self.steered.gatekeeper
        match action:
            case "append":
                kinds = [insert, begin, drop, time_tick]
                group = kinds[number]()
                self.inserts += [group] * bool(group.pieces)
                append = asyncio.ensure_future(self.steered.wal.append(group))
                # until then it may go with what came before
                is_closed = self.steered.wal.state is LogState.CLOSED
                (self.late if is_closed else self.appends).append(append)
            case "cancel" if self.appends:
                self.appends[number % len(self.appends)].cancel()
            case "write":
                log.write(min(number, len(log.queue)))
            case "sync":
                log.sync()
            case "shut":
                log.admission = log.admission or asyncio.get_running_loop().create_future()
            case "open":
                self.let_in()
            case "send back":
                gatekeeper.until = asyncio.get_running_loop().create_future()
                gatekeeper.waiting = self.inserts[number : number + 2]  # none: whatever comes
            case "let pass":
                self.let_pass()
            case "close" if self.closing is None:
                self.closing = asyncio.ensure_future(self.steered.wal.close())
            case _:
                pass

    def let_in(self) -> None:
        if self.steered.log.admission is not None:
            self.steered.log.admission.set_result(None)
            self.steered.log.admission = None

    def let_pass(self) -> None:
        until = self.steered.gatekeeper.until
        self.steered.gatekeeper.until = None
        self.steered.gatekeeper.waiting = []
        if until is not None and not until.done():
            until.set_result(None)

    async def close(self) -> None:
        """Close, with a log that works again."""
        self.closing = self.closing or asyncio.ensure_future(self.steered.wal.close())
        self.let_in()
        while not self.closing.done():
            await asyncio.sleep(0)
            self.steered.log.write()
            self.steered.log.sync()
        await self.closing


ACTIONS = [
    "append",
    "append",
    "cancel",
    "write",
    "sync",
    "shut",
    "open",
    "send back",
    "let pass",
    "close",
]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), st.booleans()), max_size=30
    )
)
def test_whatever_is_under_way_no_append_succeeds_after_close(
    steps: list[tuple[str, int, bool]],
) -> None:
    async def run() -> None:
        callers = Callers(steered := await SteeredWal().open())
        for action, number, rests in steps:
            callers.step(action, number)
            if rests:
                await settle()
        await callers.close()
        end = steered.log.next_position
        assert steered.settled, "nothing goes on behind a close"
        callers.let_pass()
        after = [
            asyncio.ensure_future(steered.wal.append(kind()))
            for kind in (insert, begin, drop, time_tick)
        ]
        for append in (*callers.late, *after):
            with pytest.raises(OnShutdown):
                await append
        results = await asyncio.gather(*callers.appends, return_exceptions=True)
        assert all(
            isinstance(each, AppendResult | OnShutdown | asyncio.CancelledError) for each in results
        )
        assert all(
            each.message_id.position < end for each in results if isinstance(each, AppendResult)
        )
        assert steered.log.next_position == end

    asyncio.run(run())
