import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.chain import Chain, LockInterceptor, Redo, RedoInterceptor
from tests.wal.packed import FakeTarget, insert_group, pack_of, transaction_group
from wal.append import AppendGroup, AppendResult, AppendTicket, Pack
from wal.errors import AlreadyExists, Indeterminate
from wal.headers import DDL, CommitTxnHeader, CutHeader, DropCollectionHeader, MessageType
from wal.message import MutableMessage
from wal.packer import Packer
from wal.position import MemoryMessageId
from wal.queue import Budget

pytestmark = pytest.mark.anyio

A = "p0_1v0"
B = "p0_2v0"
C = "p0_3v0"
NOTHING = AppendResult(
    kind=MemoryMessageId, first_position=1, count=1, time_tick=7, last_confirmed_position=1
)


def rows(*vchannels: str) -> AppendGroup:
    return insert_group(FakeTarget(vchannels=vchannels))


def insert(*vchannels: str) -> Pack:
    return pack_of(rows(*vchannels))


def of_messages(*messages: MutableMessage) -> Pack:
    return Pack([AppendGroup(list(messages))])


def drop(*vchannels: str) -> Pack:
    return of_messages(
        *[
            MutableMessage(MessageType.DROP_COLLECTION, DropCollectionHeader(1), vchannel=v)
            for v in vchannels
        ]
    )


def cut() -> Pack:
    return of_messages(MutableMessage(MessageType.CUT, CutHeader()))


def commit() -> Pack:
    return of_messages(MutableMessage(MessageType.COMMIT_TXN, CommitTxnHeader(), txn_id=5))


def vchannels_of(pack: Pack) -> list[str]:
    of_rows = [
        name for group in pack.groups for each in group.pieces for name in each.target.vchannels
    ]
    return of_rows + [message.vchannel for message in pack.messages]


async def at_once(_: Pack) -> None:
    pass


def in_the_log() -> AppendTicket:
    loop = asyncio.get_running_loop()
    return AppendTicket(1, written=loop.create_future(), durable=loop.create_future())


class Rest:
    """The rest of a chain: appends stay inside until they are let out."""

    def __init__(self) -> None:
        self.inside: list[Pack] = []
        self._out: dict[int, asyncio.Future[None]] = {}

    async def __call__(self, pack: Pack) -> None:
        self.inside.append(pack)
        out = self._out[id(pack)] = asyncio.get_running_loop().create_future()
        pack.time_tick = len(self._out)
        try:
            await out
        finally:
            self.inside.remove(pack)

    def let_out(self, pack: Pack, error: Exception | None = None) -> None:
        if error is None:
            pack.ticket = in_the_log()
            self._out[id(pack)].set_result(None)
        else:
            self._out[id(pack)].set_exception(error)


class Bench:
    def __init__(self) -> None:
        self.failed: list[tuple[tuple[str, ...], int]] = []
        self.scopes: dict[int, Sequence[str]] = {}
        self.rest = Rest()
        self.lock = LockInterceptor(self._scope, self._fail)

    def start(self, pack: Pack) -> "asyncio.Task[None]":
        return asyncio.ensure_future(self.lock.do_append(pack, self.rest))

    def inside(self, pack: Pack) -> bool:
        return pack in self.rest.inside

    def _fail(self, vchannels: Sequence[str], tick: int) -> None:
        self.failed.append((tuple(vchannels), tick))

    def _scope(self, pack: Pack) -> Sequence[str]:
        return self.scopes.get(id(pack), vchannels_of(pack))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def enters(bench: Bench, first: Pack, second: Pack) -> bool:
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
async def test_who_may_be_in_the_chain_together(first: Pack, second: Pack, together: bool) -> None:
    assert await enters(Bench(), first, second) is together


async def test_commit_locks_the_vchannels_of_its_session() -> None:
    bench = Bench()
    pack = commit()
    bench.scopes[id(pack)] = (B, A)
    assert not await enters(bench, drop(A), pack)


async def test_commit_of_a_session_that_grew_while_it_waited_locks_the_new_vchannel_too() -> None:
    bench = Bench()
    pack = commit()
    drop_a = drop(A)
    drop_b = drop(B)
    bench.scopes[id(pack)] = (A,)
    tasks = [bench.start(drop_a), bench.start(drop_b)]
    await settle()
    tasks.append(bench.start(pack))
    await settle()
    bench.scopes[id(pack)] = (A, B)
    bench.rest.let_out(drop_a)
    await settle()
    assert not bench.inside(pack)
    bench.rest.let_out(drop_b)
    await settle()
    assert bench.inside(pack)
    bench.rest.let_out(pack)
    await asyncio.gather(*tasks)


async def test_exclusive_ends_transactions_of_its_vchannels_before_anyone_else_gets_in() -> None:
    bench = Bench()
    first = drop(B, A)
    second = insert(A)
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
    bench = Bench()
    refused = drop(A)
    unknown = drop(A)
    for pack, error in [(refused, AlreadyExists("x")), (unknown, Indeterminate("x"))]:
        task = bench.start(pack)
        await settle()
        if pack is unknown:
            pack.ticket = in_the_log()
        bench.rest.let_out(pack, error)
        with pytest.raises(type(error)):
            await task
    assert bench.failed == [((A,), unknown.time_tick)]


async def test_exclusive_that_will_be_redone_ends_nothing_yet_and_holds_nothing() -> None:
    bench = Bench()
    pack = drop(A)
    task = bench.start(pack)
    await settle()
    bench.rest.let_out(pack, Redo(asyncio.get_running_loop().create_future(), waiting_for="x"))
    with pytest.raises(Redo):
        await task
    assert bench.failed == []
    assert await enters(bench, drop(A), drop(B))


async def test_dropped_vchannels_leave_no_locks_behind() -> None:
    bench = Bench()
    for number in range(50):
        pack = drop(f"p0_{number}v0")
        task = bench.start(pack)
        await settle()
        bench.rest.let_out(pack)
        await task
    assert not bench.lock._locks


@pytest.mark.parametrize(
    "others, error",
    [(False, AlreadyExists("dropped")), (True, AlreadyExists("dropped")), (True, None)],
    ids=["alone", "beside others that are written", "beside others, and cancelled"],
)
async def test_writes_that_come_after_the_drop_leave_no_locks_of_dropped_vchannels_behind(
    others: bool, error: AlreadyExists | None
) -> None:
    bench = Bench()
    dropping = drop(A)
    late = rows(A)
    pack = pack_of(late, rows(B)) if others else pack_of(late)
    tasks = [bench.start(dropping), bench.start(pack)]
    await settle()
    bench.rest.let_out(dropping)
    await settle()
    pack.leave(late, error)
    if not others:
        bench.rest.let_out(pack, AlreadyExists("dropped"))
    else:
        bench.rest.let_out(pack)
    await asyncio.wait(tasks)
    tasks[1].exception()
    assert not bench.lock._locks


async def test_uncontended_append_does_not_suspend() -> None:
    with pytest.raises(StopIteration):
        Bench().lock.do_append(insert(A, B), at_once).send(None)


# --- packs of several groups ----------------------------------------------------------------------


async def test_groups_whose_lock_is_busy_are_sent_back_and_the_rest_need_not_wait() -> None:
    bench = Bench()
    exclusive = drop(B)
    task = bench.start(exclusive)
    await settle()
    free = rows(A)
    busy = rows(B, C)
    other = rows(C)
    pack = Pack([free, busy, other], come_again=lambda _: None)
    with pytest.raises(Redo) as sent_back:
        await bench.lock.do_append(pack, bench.rest)
    assert list(sent_back.value.groups) == [busy]
    assert sent_back.value.until.done(), "it comes again at once, to wait in the lock's own queue"
    pack.leave(busy)
    appending = bench.start(pack)
    await settle()
    assert bench.inside(pack)
    for each in (pack, exclusive):
        bench.rest.let_out(each)
    await asyncio.gather(task, appending)


async def test_group_with_one_busy_piece_of_several_is_sent_back_as_a_whole() -> None:
    bench = Bench()
    exclusive = drop(B)
    task = bench.start(exclusive)
    await settle()
    spanning = transaction_group(*rows(A).pieces, *rows(B).pieces)
    with pytest.raises(Redo) as sent_back:
        await bench.lock.do_append(Pack([rows(A), spanning], come_again=lambda _: None), bench.rest)
    assert list(sent_back.value.groups) == [spanning]
    bench.rest.let_out(exclusive)
    await task


async def test_pack_whose_groups_all_meet_a_busy_lock_waits_in_place() -> None:
    bench = Bench()
    exclusive = drop(A, B)
    tasks = [bench.start(exclusive)]
    await settle()
    pack = Pack([rows(A), rows(B), rows(C, A)], come_again=lambda _: None)
    tasks.append(bench.start(pack))
    await settle()
    assert not bench.inside(pack)
    bench.rest.let_out(exclusive)
    await settle()
    assert bench.inside(pack)
    assert len(pack.groups) == 3
    bench.rest.let_out(pack)
    await asyncio.gather(*tasks)


async def test_pack_does_not_overtake_an_exclusive_that_waits() -> None:
    bench = Bench()
    before = insert(A)
    exclusive = drop(A)
    tasks = [bench.start(before), bench.start(exclusive)]
    await settle()
    late = rows(A)
    with pytest.raises(Redo) as sent_back:
        await bench.lock.do_append(Pack([late, rows(B)], come_again=lambda _: None), bench.rest)
    assert list(sent_back.value.groups) == [late]
    for each in (before, exclusive):
        bench.rest.let_out(each)
        await settle()
    await asyncio.gather(*tasks)


GROUPS = st.lists(
    st.tuples(
        st.booleans(), st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=3, unique=True)
    ),
    min_size=1,
    max_size=25,
)


class Occupancy:
    """Fails when an exclusive group is in the chain together with another one of its vchannels."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._inside: list[tuple[bool, set[str]]] = []

    async def __call__(self, pack: Pack) -> None:
        me = (pack.first_type in DDL, set(vchannels_of(pack)))
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


async def run_schedule(seed: int, groups: list[tuple[bool, list[str]]]) -> None:
    rng = random.Random(seed)
    lock = LockInterceptor(vchannels_of, lambda _vchannels, _tick: None)
    rest = Occupancy(rng)
    tasks = []
    for exclusive, vchannels in groups:
        pack = drop(*vchannels) if exclusive else insert(*vchannels)
        tasks.append(asyncio.ensure_future(lock.do_append(pack, rest)))
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    for outcome in outcomes:
        assert outcome is None or isinstance(outcome, AlreadyExists | asyncio.CancelledError), (
            outcome
        )
    with pytest.raises(StopIteration):  # everything is free again
        lock.do_append(drop(A, B, C), at_once).send(None)


@given(seed=st.integers(0, 2**32), groups=GROUPS)
def test_random_schedules_never_meet_an_exclusive_nor_leak_a_lock(
    seed: int, groups: list[tuple[bool, list[str]]]
) -> None:
    asyncio.run(run_schedule(seed, groups))


async def run_packed_schedule(seed: int, groups: list[tuple[bool, list[str]]]) -> None:
    rng = random.Random(seed)
    appended = list[AppendGroup]()
    lock = LockInterceptor(vchannels_of, lambda _vchannels, _tick: None)
    occupied = Occupancy(rng)

    async def end(pack: Pack) -> None:
        await occupied(pack)
        appended.extend(pack.groups)
        for group in pack.groups:
            group.settle(NOTHING)

    append = Chain([RedoInterceptor(), lock], end).append

    async def send(pack: Pack) -> None:
        await append(pack)

    packer = Packer(send, Budget(1 << 30))
    written: list[tuple[AppendGroup, asyncio.Future[AppendResult]]] = []
    exclusives: list[asyncio.Future[None]] = []
    for exclusive, vchannels in groups:
        if exclusive:
            exclusives.append(asyncio.ensure_future(append(drop(*vchannels))))
        else:
            group = rows(*vchannels)
            written.append((group, asyncio.ensure_future(packer.append(group))))
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        if written and rng.random() < 0.2:
            rng.choice(written)[1].cancel()
    tasks = [task for _, task in written]
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks, *exclusives, return_exceptions=True)
        await packer.drain()
    for group, task in written:
        assert task.done()
        assert (
            appended.count(group) == 1
            if not (task.cancelled() or task.exception())
            else appended.count(group) <= 1
        )
    with pytest.raises(StopIteration):  # everything is free again
        lock.do_append(drop(A, B, C), at_once).send(None)


@given(seed=st.integers(0, 2**32), groups=GROUPS)
def test_groups_that_are_sent_back_never_meet_an_exclusive_and_are_appended_once(
    seed: int, groups: list[tuple[bool, list[str]]]
) -> None:
    asyncio.run(run_packed_schedule(seed, groups))
