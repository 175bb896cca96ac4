import asyncio

import pytest

from interceptors.chain import Redo, RedoInterceptor
from wal.append import Append, AppendGroup, AppendResult
from wal.errors import OnShutdown, Overloaded
from wal.headers import MessageType, TimeTickHeader
from wal.message import MutableMessage
from wal.position import MemoryMessageId

pytestmark = pytest.mark.anyio

RESULT = AppendResult(MemoryMessageId(1), 1, 7, MemoryMessageId(1))
SEGMENT = "a segment for p0_1v0"


def group() -> AppendGroup:
    return AppendGroup([MutableMessage(MessageType.TIME_TICK, TimeTickHeader())])


def new_future() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


class Inner:
    """The rest of a chain: asks for a redo on each future it is given, then succeeds."""

    def __init__(self, *until: "asyncio.Future[None]") -> None:
        self._until = list(until)
        self.calls = 0

    async def __call__(self, group: AppendGroup) -> AppendResult:
        self.calls += 1
        if self._until:
            raise Redo(self._until.pop(0), waiting_for=SEGMENT)
        return RESULT


def endless(until: "asyncio.Future[None]") -> tuple[Append, list[int]]:
    calls: list[int] = []

    async def inner(group: AppendGroup) -> AppendResult:
        calls.append(1)
        raise Redo(until, waiting_for=SEGMENT)

    return inner, calls


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_append_is_redone_once_for_each_wait_and_returns_the_same_result() -> None:
    waits = [new_future() for _ in range(3)]
    inner = Inner(*waits)
    append = asyncio.ensure_future(RedoInterceptor().do_append(group(), inner))
    for number, wait in enumerate(waits, 1):
        await settle()
        assert inner.calls == number
        wait.set_result(None)
    assert await append is RESULT
    assert inner.calls == 4


async def test_append_without_redo_does_not_suspend() -> None:
    inner = Inner()
    with pytest.raises(StopIteration) as stopped:
        RedoInterceptor().do_append(group(), inner).send(None)
    assert stopped.value.value is RESULT


async def test_other_errors_are_not_redone() -> None:
    async def broken(group: AppendGroup) -> AppendResult:
        raise OnShutdown("no")

    with pytest.raises(OnShutdown, match="no"):
        await RedoInterceptor().do_append(group(), broken)


async def test_error_of_the_awaited_step_is_the_appends_error() -> None:
    until = new_future()
    until.set_exception(Overloaded("allocation stopped"))
    with pytest.raises(Overloaded, match="allocation stopped"):
        await RedoInterceptor().do_append(group(), Inner(until))


async def test_cancelled_step_is_tried_again_and_cancels_nobody() -> None:
    until = new_future()
    until.cancel()
    assert await RedoInterceptor().do_append(group(), Inner(until)) is RESULT


async def test_endless_wait_ends_at_the_time_bound_and_names_what_was_awaited() -> None:
    until = new_future()
    inner, calls = endless(until)
    with pytest.raises(Overloaded, match=f"waited 0.01 s for {SEGMENT}"):
        await RedoInterceptor(wait_s_max=0.01).do_append(group(), inner)
    assert len(calls) == 1
    assert not until.done(), "the future is shared: giving up must not cancel it"


async def test_waits_that_do_not_help_end_at_the_time_bound() -> None:
    until = new_future()
    until.set_result(None)
    inner, calls = endless(until)
    with pytest.raises(Overloaded, match=SEGMENT):
        await RedoInterceptor(wait_s_max=0.01).do_append(group(), inner)
    assert len(calls) > 1


async def test_time_bound_covers_all_waits_together() -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def inner(group: AppendGroup) -> AppendResult:
        until = new_future()
        loop.call_later(0.004, until.set_result, None)
        raise Redo(until, waiting_for=SEGMENT)

    with pytest.raises(Overloaded):
        await RedoInterceptor(wait_s_max=0.02).do_append(group(), inner)
    assert loop.time() - started < 1.0


async def test_close_sends_waiters_away_and_later_ones_too() -> None:
    redo, until = RedoInterceptor(), new_future()
    inner = Inner(until)
    append = asyncio.ensure_future(redo.do_append(group(), inner))
    await settle()
    await redo.close()
    await redo.close()
    with pytest.raises(OnShutdown, match=SEGMENT):
        await append
    with pytest.raises(OnShutdown):
        await redo.do_append(group(), Inner(new_future()))
    assert await redo.do_append(group(), Inner()) is RESULT, "one that need not wait ends by itself"
    assert not until.done()


async def test_cancelling_a_waiter_cancels_neither_the_shared_future_nor_other_waiters() -> None:
    redo, until = RedoInterceptor(), new_future()
    first = asyncio.ensure_future(redo.do_append(group(), Inner(until)))
    second = asyncio.ensure_future(redo.do_append(group(), Inner(until)))
    await settle()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    until.set_result(None)
    assert await second is RESULT
