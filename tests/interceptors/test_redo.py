import asyncio

import pytest

from interceptors.chain import Redo, RedoInterceptor
from tests.wal.packed import insert_group
from wal.append import AppendGroup, AppendPack, Pack
from wal.errors import OnShutdown, Overloaded
from wal.headers import MessageType, TimeTickHeader
from wal.message import MutableMessage

pytestmark = pytest.mark.anyio

SEGMENT = "a segment for p0_1v0"


def alone() -> Pack:
    return Pack([AppendGroup([MutableMessage(MessageType.TIME_TICK, TimeTickHeader())])])


def new_future() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


class Inner:
    """The rest of a chain: asks for a redo on each future it is given, then succeeds."""

    def __init__(self, *until: "asyncio.Future[None]") -> None:
        self._until = list(until)
        self.calls = 0
        self.appended: list[list[AppendGroup]] = []

    async def __call__(self, pack: Pack) -> None:
        self.calls += 1
        if self._until:
            raise Redo(self._until.pop(0), waiting_for=SEGMENT)
        self.appended.append(list(pack.groups))


def endless(until: "asyncio.Future[None]") -> tuple[AppendPack, list[int]]:
    calls: list[int] = []

    async def inner(_: Pack) -> None:
        calls.append(1)
        raise Redo(until, waiting_for=SEGMENT)

    return inner, calls


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_append_is_redone_once_for_each_wait_and_then_goes_on() -> None:
    waits = [new_future() for _ in range(3)]
    inner = Inner(*waits)
    append = asyncio.ensure_future(RedoInterceptor().do_append(alone(), inner))
    for number, wait in enumerate(waits, 1):
        await settle()
        assert inner.calls == number
        wait.set_result(None)
    await append
    assert inner.calls == 4
    assert len(inner.appended) == 1


async def test_append_without_redo_does_not_suspend() -> None:
    inner = Inner()
    with pytest.raises(StopIteration):
        RedoInterceptor().do_append(alone(), inner).send(None)
    assert len(inner.appended) == 1


async def test_other_errors_are_not_redone() -> None:
    async def broken(_: Pack) -> None:
        raise OnShutdown("no")

    with pytest.raises(OnShutdown, match="no"):
        await RedoInterceptor().do_append(alone(), broken)


async def test_error_of_the_awaited_step_is_the_appends_error() -> None:
    until = new_future()
    until.set_exception(Overloaded("allocation stopped"))
    with pytest.raises(Overloaded, match="allocation stopped"):
        await RedoInterceptor().do_append(alone(), Inner(until))


async def test_cancelled_step_is_tried_again_and_cancels_nobody() -> None:
    until = new_future()
    until.cancel()
    inner = Inner(until)
    await RedoInterceptor().do_append(alone(), inner)
    assert inner.calls == 2


async def test_endless_wait_ends_at_the_time_bound_and_names_what_was_awaited() -> None:
    until = new_future()
    inner, calls = endless(until)
    with pytest.raises(Overloaded, match=f"waited 0.01 s for {SEGMENT}"):
        await RedoInterceptor(wait_s_max=0.01).do_append(alone(), inner)
    assert len(calls) == 1
    assert not until.done(), "the future is shared: giving up must not cancel it"


async def test_waits_that_do_not_help_end_at_the_time_bound() -> None:
    until = new_future()
    until.set_result(None)
    inner, calls = endless(until)
    with pytest.raises(Overloaded, match=SEGMENT):
        await RedoInterceptor(wait_s_max=0.2).do_append(alone(), inner)
    assert len(calls) > 1


async def test_time_bound_covers_all_waits_together() -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def inner(_: Pack) -> None:
        until = new_future()
        loop.call_later(0.004, until.set_result, None)
        raise Redo(until, waiting_for=SEGMENT)

    with pytest.raises(Overloaded):
        await RedoInterceptor(wait_s_max=0.02).do_append(alone(), inner)
    assert loop.time() - started < 60


async def test_close_sends_waiters_away_and_later_ones_too() -> None:
    redo = RedoInterceptor()
    until = new_future()
    inner = Inner(until)
    append = asyncio.ensure_future(redo.do_append(alone(), inner))
    await settle()
    await redo.close()
    await redo.close()
    with pytest.raises(OnShutdown, match=SEGMENT):
        await append
    with pytest.raises(OnShutdown):
        await redo.do_append(alone(), Inner(new_future()))
    ends = Inner()
    await redo.do_append(alone(), ends)
    assert ends.appended, "one that need not wait ends by itself"
    assert not until.done()


async def test_cancelling_a_waiter_cancels_neither_the_shared_future_nor_other_waiters() -> None:
    redo = RedoInterceptor()
    until = new_future()
    first = asyncio.ensure_future(redo.do_append(alone(), Inner(until)))
    inner = Inner(until)
    second = asyncio.ensure_future(redo.do_append(alone(), inner))
    await settle()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    until.set_result(None)
    await second
    assert len(inner.appended) == 1


# --- packs ----------------------------------------------------------------------------------------


class SomeWait:
    """The rest of a chain: sends `waiting` back until `until` is done, and appends the others."""

    def __init__(self, *waiting: AppendGroup) -> None:
        self.waiting = waiting
        self.until = new_future()
        self.appended: list[AppendGroup] = []

    async def __call__(self, pack: Pack) -> None:
        groups = [group for group in pack.groups if group in self.waiting]
        if groups and not self.until.done():
            raise Redo(self.until, waiting_for=SEGMENT, groups=groups)
        self.appended += pack.groups


async def test_groups_that_wait_come_again_in_their_order_and_others_go_on_at_once() -> None:
    redo = RedoInterceptor()
    came = list[AppendGroup]()
    first, second, third, fourth = groups = [insert_group() for _ in range(4)]
    inner = SomeWait(first, third)
    pack = Pack(groups, come_again=lambda group: came.insert(0, group))
    await redo.do_append(pack, inner)
    assert inner.appended == [second, fourth]
    assert (first.pack, third.pack, first.outcome, third.outcome) == (None, None, None, None)
    await settle()
    assert came == []
    inner.until.set_result(None)
    await settle()
    assert came == [first, third]
    assert redo._tasks == set()


async def test_pack_that_waits_as_a_whole_waits_in_place() -> None:
    redo = RedoInterceptor()
    came = list[AppendGroup]()
    groups = [insert_group() for _ in range(3)]
    inner = SomeWait(*groups)
    appending = asyncio.ensure_future(
        redo.do_append(Pack(list(groups), come_again=came.append), inner)
    )
    await settle()
    assert not appending.done()
    inner.until.set_result(None)
    await appending
    assert (inner.appended, came) == (groups, [])


async def test_groups_cancelled_while_their_pack_waits_are_not_appended() -> None:
    redo = RedoInterceptor()
    came = list[AppendGroup]()
    first, second = groups = [insert_group() for _ in range(2)]
    for group in groups:
        group.waiter = asyncio.get_running_loop().create_future()
    inner = SomeWait(*groups)
    appending = asyncio.ensure_future(
        redo.do_append(Pack(list(groups), come_again=came.append), inner)
    )
    await settle()
    assert isinstance(first.waiter, asyncio.Future)
    first.waiter.cancel()
    inner.until.set_result(None)
    await appending
    assert inner.appended == [second]


async def test_pack_that_nobody_wants_any_more_is_not_appended() -> None:
    group = insert_group()
    group.waiter = asyncio.get_running_loop().create_future()
    inner = SomeWait(group)
    appending = asyncio.ensure_future(RedoInterceptor().do_append(Pack([group]), inner))
    await settle()
    group.waiter.cancel()
    inner.until.set_result(None)
    await appending
    assert inner.appended == []


async def test_groups_whose_awaited_step_failed_come_again_because_the_term_may_have_ended() -> (
    None
):
    redo = RedoInterceptor()
    came = list[AppendGroup]()
    waiting = insert_group()
    other = insert_group()
    inner = SomeWait(waiting)
    await redo.do_append(Pack([waiting, other], come_again=came.append), inner)
    inner.until.set_exception(Overloaded("allocation stopped"))
    await settle()
    assert (inner.appended, waiting.outcome, other.outcome, came) == (
        [other],
        None,
        None,
        [waiting],
    )


async def test_time_bound_of_a_group_covers_all_its_waits_in_packs_that_come_and_go() -> None:
    redo = RedoInterceptor(wait_s_max=0.2)
    came = list[AppendGroup]()
    until = new_future()
    until.set_result(None)
    waiting = insert_group()

    async def inner(pack: Pack) -> None:
        if waiting in pack.groups:
            raise Redo(until, waiting_for=SEGMENT, groups=[waiting])

    while waiting.outcome is None:
        await redo.do_append(Pack([waiting, insert_group()], come_again=came.append), inner)
        await settle()
    with pytest.raises(Overloaded, match=f"waited 0.2 s for {SEGMENT}"):
        waiting.result()
    assert len(came) > 1


async def test_groups_that_wait_when_the_chain_closes_come_again_for_the_next_one() -> None:
    redo = RedoInterceptor()
    came = list[AppendGroup]()
    waiting = insert_group()
    await redo.do_append(Pack([waiting, insert_group()], come_again=came.append), SomeWait(waiting))
    await settle()
    await redo.close()
    assert (came, waiting.outcome) == ([waiting], None)
    assert redo._tasks == set()


async def test_only_the_groups_whose_time_is_over_give_up_a_wait_that_others_came_to_later() -> (
    None
):
    early = insert_group()
    late = insert_group()
    until = new_future()
    early.waits_until_s = asyncio.get_running_loop().time()
    inner = Inner(until, new_future())
    redo = RedoInterceptor(wait_s_max=60)
    append = asyncio.ensure_future(redo.do_append(Pack([early, late]), inner))
    await settle()
    assert isinstance(early.outcome, Overloaded)
    assert late.outcome is None
    assert not append.done()
    await redo.close()
    with pytest.raises(OnShutdown):
        await append
