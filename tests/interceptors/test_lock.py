import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.chain import LockInterceptor, Redo
from interceptors.errors import AlreadyExists
from wal.append import AppendGroup, AppendResult, AppendTicket
from wal.errors import Indeterminate
from wal.headers import CommitTxnHeader, CutHeader, DropCollectionHeader, InsertHeader, MessageType
from wal.message import MutableMessage
from wal.position import MemoryMessageId

pytestmark = pytest.mark.anyio

RESULT = AppendResult(MemoryMessageId(1), 1, 7, MemoryMessageId(1))
A, B, C = "p0_1v0", "p0_2v0", "p0_3v0"


def insert(*vchannels: str) -> AppendGroup:
    return AppendGroup([MutableMessage(MessageType.INSERT, InsertHeader(1, 1, 1, 1), vchannel=v) for v in vchannels])


def drop(*vchannels: str) -> AppendGroup:
    return AppendGroup(
        [MutableMessage(MessageType.DROP_COLLECTION, DropCollectionHeader(1), vchannel=v) for v in vchannels]
    )


def cut() -> AppendGroup:
    return AppendGroup([MutableMessage(MessageType.CUT, CutHeader())])


def commit() -> AppendGroup:
    return AppendGroup([MutableMessage(MessageType.COMMIT_TXN, CommitTxnHeader(), txn_id=5)])


def vchannels_of(group: AppendGroup) -> list[str]:
    return [message.vchannel for message in group.messages]


async def at_once(group: AppendGroup) -> AppendResult:
    return RESULT


def in_the_log() -> AppendTicket:
    loop = asyncio.get_running_loop()
    return AppendTicket(1, 0, 1, written=loop.create_future(), durable=loop.create_future())


class Rest:
    """The rest of a chain: appends stay inside until they are let out."""

    def __init__(self) -> None:
        self.inside: list[AppendGroup] = []
        self._out: dict[int, asyncio.Future[None]] = {}

    async def __call__(self, group: AppendGroup) -> AppendResult:
        self.inside.append(group)
        out = self._out[id(group)] = asyncio.get_running_loop().create_future()
        group.time_tick = len(self._out)
        try:
            await out
        finally:
            self.inside.remove(group)
        return RESULT

    def let_out(self, group: AppendGroup, error: Exception | None = None) -> None:
        if error is None:
            group.ticket = in_the_log()
            self._out[id(group)].set_result(None)
        else:
            self._out[id(group)].set_exception(error)


class Bench:
    def __init__(self) -> None:
        self.failed: list[tuple[tuple[str, ...], int]] = []
        self.scopes: dict[int, Sequence[str]] = {}
        self.rest = Rest()
        self.lock = LockInterceptor(self._scope, self._fail)

    def start(self, group: AppendGroup) -> "asyncio.Task[AppendResult]":
        return asyncio.ensure_future(self.lock.do_append(group, self.rest))

    def inside(self, group: AppendGroup) -> bool:
        return group in self.rest.inside

    def _fail(self, vchannels: Sequence[str], tick: int) -> None:
        self.failed.append((tuple(vchannels), tick))

    def _scope(self, group: AppendGroup) -> Sequence[str]:
        return self.scopes.get(id(group), vchannels_of(group))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def enters(bench: Bench, first: AppendGroup, second: AppendGroup) -> bool:
    """Whether `second` may be in the chain while `first` is."""
    tasks = [bench.start(first)]
    await settle()
    assert bench.inside(first)
    tasks.append(bench.start(second))
    await settle()
    together = bench.inside(second)
    bench.rest.let_out(first)
    await settle()
    assert bench.inside(second)
    bench.rest.let_out(second)
    await asyncio.gather(*tasks)
    return together


@pytest.mark.parametrize(
    "first, second, together",
    [
        pytest.param(insert(A), insert(A), True, id="ordinary with ordinary"),
        pytest.param(insert(A), drop(A), False, id="exclusive waits for ordinary"),
        pytest.param(drop(A), insert(A), False, id="ordinary waits for exclusive"),
        pytest.param(drop(A), insert(B), True, id="exclusive does not block other vchannels"),
        pytest.param(drop(A), drop(B), True, id="exclusives of two vchannels"),
        pytest.param(drop(A, B), drop(B), False, id="exclusives that overlap"),
        pytest.param(drop(A, B), insert(C, B), False, id="one shared vchannel is enough"),
        pytest.param(drop(A), cut(), True, id="a cut passes an exclusive of a vchannel"),
        pytest.param(insert(A), cut(), True, id="a cut is not exclusive"),
    ],
)
async def test_who_may_be_in_the_chain_together(first: AppendGroup, second: AppendGroup, together: bool) -> None:
    assert await enters(Bench(), first, second) is together


async def test_commit_locks_the_vchannels_of_its_session() -> None:
    bench, group = Bench(), commit()
    bench.scopes[id(group)] = (B, A)
    assert not await enters(bench, drop(A), group)


async def test_commit_of_a_session_that_grew_while_it_waited_locks_the_new_vchannel_too() -> None:
    bench, group = Bench(), commit()
    drop_a, drop_b = drop(A), drop(B)
    bench.scopes[id(group)] = (A,)
    tasks = [bench.start(drop_a), bench.start(drop_b)]
    await settle()
    tasks.append(bench.start(group))
    await settle()
    bench.scopes[id(group)] = (A, B)
    bench.rest.let_out(drop_a)
    await settle()
    assert not bench.inside(group)
    bench.rest.let_out(drop_b)
    await settle()
    assert bench.inside(group)
    bench.rest.let_out(group)
    await asyncio.gather(*tasks)


async def test_exclusive_ends_transactions_of_its_vchannels_before_anyone_else_gets_in() -> None:
    bench = Bench()
    first, second = drop(B, A), insert(A)
    tasks = [bench.start(first), bench.start(second)]
    await settle()
    assert bench.failed == []
    bench.rest.let_out(first)
    await settle()
    assert bench.failed == [((A, B), first.time_tick)]
    assert bench.inside(second)
    bench.rest.let_out(second)
    await asyncio.gather(*tasks)
    assert len(bench.failed) == 1


async def test_exclusive_of_unknown_outcome_ends_transactions_and_a_refused_one_does_not() -> None:
    bench, refused, unknown = Bench(), drop(A), drop(A)
    for group, error in [(refused, AlreadyExists("x")), (unknown, Indeterminate("x"))]:
        task = bench.start(group)
        await settle()
        if group is unknown:
            group.ticket = in_the_log()
        bench.rest.let_out(group, error)
        with pytest.raises(type(error)):
            await task
    assert bench.failed == [((A,), unknown.time_tick)]


async def test_exclusive_that_will_be_redone_ends_nothing_yet_and_holds_nothing() -> None:
    bench, group = Bench(), drop(A)
    task = bench.start(group)
    await settle()
    bench.rest.let_out(group, Redo(asyncio.get_running_loop().create_future(), waiting_for="x"))
    with pytest.raises(Redo):
        await task
    assert bench.failed == []
    assert await enters(bench, drop(A), drop(B))


async def test_dropped_vchannels_leave_no_locks_behind() -> None:
    bench = Bench()
    for number in range(50):
        group = drop(f"p0_{number}v0")
        task = bench.start(group)
        await settle()
        bench.rest.let_out(group)
        await task
    assert not bench.lock._locks


async def test_uncontended_append_does_not_suspend() -> None:
    with pytest.raises(StopIteration):
        Bench().lock.do_append(insert(A, B), at_once).send(None)


GROUPS = st.lists(
    st.tuples(st.booleans(), st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=3, unique=True)),
    min_size=1,
    max_size=25,
)


class Occupancy:
    """Fails when an exclusive group is in the chain together with another one of its vchannels."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._inside: list[tuple[bool, set[str]]] = []

    async def __call__(self, group: AppendGroup) -> AppendResult:
        me = (group.exclusive, set(group.vchannels))
        for other_exclusive, vchannels in self._inside:
            assert not (me[0] or other_exclusive) or not me[1] & vchannels
        self._inside.append(me)
        try:
            for _ in range(self._rng.randrange(4)):
                await asyncio.sleep(0)
            if self._rng.random() < 0.2:
                raise AlreadyExists("refused further in")
        finally:
            self._inside.remove(me)
        return RESULT


async def run_schedule(seed: int, groups: list[tuple[bool, list[str]]]) -> None:
    rng = random.Random(seed)
    lock = LockInterceptor(vchannels_of, lambda _vchannels, _tick: None)
    rest = Occupancy(rng)
    tasks = []
    for exclusive, vchannels in groups:
        group = drop(*vchannels) if exclusive else insert(*vchannels)
        tasks.append(asyncio.ensure_future(lock.do_append(group, rest)))
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    for outcome in outcomes:
        assert isinstance(outcome, AppendResult | AlreadyExists | asyncio.CancelledError), outcome
    with pytest.raises(StopIteration):  # everything is free again
        lock.do_append(drop(A, B, C), at_once).send(None)


@given(seed=st.integers(0, 2**32), groups=GROUPS)
def test_random_schedules_never_meet_an_exclusive_nor_leak_a_lock(
    seed: int, groups: list[tuple[bool, list[str]]]
) -> None:
    asyncio.run(run_schedule(seed, groups))
