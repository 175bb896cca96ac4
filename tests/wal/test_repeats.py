"""Writes are sent again only when that can tell something, and what is not known is never said."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from interceptors.errors import CollectionNotFound, SequenceTooOld
from tests.wal.manual_log import ManualLog, allocator, settle
from tests.wal.packed import insert_group
from tests.wal.steered_wal import Store
from wal.adaptor import Wal
from wal.append import Append, AppendGroup, AppendPack, AppendResult, Pack
from wal.entry import LogEntry
from wal.errors import (
    Indeterminate,
    LogReopening,
    OnShutdown,
    Overloaded,
    StorageFailed,
    StorageFull,
    StreamingNodeError,
)
from wal.headers import InsertHeader, MessageType
from wal.lifecycle import RetryLimits
from wal.message import MutableMessage
from wal.position import NODE_PRODUCER_ID, MemoryMessageId, Place, ProducerStamp

pytestmark = pytest.mark.anyio

LIMITS = RetryLimits(first_s=0.0, max_s=0.0, give_up_s=5.0)
RESULT = AppendResult(
    kind=MemoryMessageId, first_position=1, count=1, time_tick=7, last_confirmed_position=1
)
HEADER = InsertHeader(1, 2, 1, 3)
OPEN = Indeterminate("who knows")
REOPENING = LogReopening("not yet")
FULL = StorageFull("/", 0, 1)
Make = Callable[[], AppendGroup]


class ScriptedLog:
    """An append path that stamps each pack as the real one does, and answers as told; then it takes
    everything.
    """

    def __init__(self, *answers: StreamingNodeError) -> None:
        self.answers = list(answers)
        self.packs: list[Pack] = []
        self.seen: list[tuple[object, int, object]] = []

    async def append(self, pack: Pack) -> None:
        tried = copy(pack)
        tried.groups = list(pack.groups)
        self.packs.append(tried)
        for message in pack.messages:
            self.seen.append(
                (message.header, message.txn_id, pack.producer or pack.groups[0].producer)
            )
            message.header = InsertHeader(1, 2, 1, 3, segment_id=9, first_offset=len(self.packs))
            message.txn_id = 99
        await anyio.lowlevel.checkpoint()
        if self.answers:
            raise self.answers.pop(0)
        for number, group in enumerate(pack.groups):
            group.settle(replace(RESULT, time_tick=RESULT.time_tick + number))


class ScriptedTerm:
    """A term without interceptors or workers."""

    def __init__(self, append: AppendPack) -> None:
        self.append = append

    async def ready(self) -> None: ...

    async def work(self, append: Append, failed: Callable[[], Awaitable[None]]) -> None: ...

    async def close(self) -> None: ...

    def end(self) -> None: ...


async def wal_on(append: AppendPack, retry: RetryLimits = LIMITS) -> Wal:
    log = ManualLog()
    log.held = False

    async def open_term(first_tick: LogEntry, end: AppendPack) -> ScriptedTerm:
        return ScriptedTerm(append)

    wal = Wal(
        Store(),  # type: ignore[arg-type]  # a WAL needs only this much of a store
        log,
        open_term,
        ticks=allocator(),
        retry=retry,
    )
    await wal.open()
    return wal


def a_group() -> AppendGroup:
    """Return messages of a named producer."""
    message = MutableMessage(MessageType.INSERT, HEADER, "p0_1v0", b"rows")
    return AppendGroup([message], producer=ProducerStamp(7, 1, 3))


def some_rows() -> AppendGroup:
    """Return rows of a named producer."""
    group = insert_group()
    group.producer = ProducerStamp(7, 1, 3)
    return group


a_write = pytest.mark.parametrize("make", [a_group, some_rows], ids=["messages", "rows"])


async def test_every_try_carries_the_same_stamp_and_messages_as_they_were_built() -> None:
    log = ScriptedLog(OPEN, REOPENING, FULL, OPEN)
    assert await (await wal_on(log.append)).append(a_group()) == RESULT
    assert log.seen == [(HEADER, 0, ProducerStamp(7, 1, 3))] * 5


@a_write
@pytest.mark.parametrize(
    "error",
    [
        REOPENING,
        FULL,
        Overloaded("no"),
        OnShutdown("closed"),
        StorageFailed("no"),
        CollectionNotFound("gone"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_write_that_did_nothing_is_not_repeated(
    error: StreamingNodeError, make: Make
) -> None:
    log = ScriptedLog(error)
    with pytest.raises(type(error)):
        await (await wal_on(log.append)).append(make())
    assert len(log.packs) == 1


@a_write
@pytest.mark.parametrize(
    "error",
    [OnShutdown("closed"), StorageFailed("no"), SequenceTooOld(3, 9)],
    ids=lambda error: type(error).__name__,
)
async def test_refusal_that_knows_nothing_of_the_first_try_leaves_it_indeterminate(
    error: StreamingNodeError, make: Make
) -> None:
    log = ScriptedLog(OPEN, error)
    with pytest.raises(Indeterminate) as caught:
        await (await wal_on(log.append)).append(make())
    assert caught.value is OPEN
    assert caught.value.__cause__ is error


@a_write
async def test_refusal_from_behind_the_window_is_the_answer(make: Make) -> None:
    log = ScriptedLog(OPEN, CollectionNotFound("dropped meanwhile"))
    with pytest.raises(CollectionNotFound):
        await (await wal_on(log.append)).append(make())


@a_write
async def test_giving_up_says_that_the_outcome_is_open(make: Make) -> None:
    log = ScriptedLog(*[OPEN] * 100_000)
    limits = RetryLimits(first_s=0.0, max_s=0.0, give_up_s=0.2)
    with anyio.fail_after(60), pytest.raises(Indeterminate):
        await (await wal_on(log.append, limits)).append(make())
    assert len(log.packs) > 1


@a_write
async def test_giving_up_does_not_wait_for_a_try_that_hangs(make: Make) -> None:
    log = ScriptedLog(OPEN)

    async def hang(pack: Pack) -> None:
        if log.answers:
            await log.append(pack)
        await anyio.sleep_forever()

    with anyio.fail_after(60), pytest.raises(Indeterminate):
        await (await wal_on(hang, RetryLimits(first_s=0.0, give_up_s=0.01))).append(make())


@a_write
async def test_no_time_to_give_up_means_no_repeating(make: Make) -> None:
    log = ScriptedLog(OPEN)
    with pytest.raises(Indeterminate):
        await (await wal_on(log.append, RetryLimits(give_up_s=0))).append(make())
    assert len(log.packs) == 1


@a_write
async def test_closing_ends_a_pause_at_once(make: Make) -> None:
    log = ScriptedLog(OPEN)
    wal = await wal_on(log.append, RetryLimits(first_s=3600, max_s=3600, give_up_s=7200))
    writing = asyncio.ensure_future(wal.append(make()))
    await anyio.wait_all_tasks_blocked()
    assert not writing.done()
    wal.stop_waiting()
    with anyio.fail_after(60), pytest.raises(Indeterminate):
        await writing
    assert len(log.packs) == 1


@a_write
async def test_a_write_that_may_be_in_the_log_by_any_of_its_tries_has_begun(make: Make) -> None:
    log = ScriptedLog(OPEN, FULL)
    ticket: Any = object()

    async def append(pack: Pack) -> None:
        if not log.packs:
            pack.ticket = ticket
        await log.append(pack)

    group = make()
    await (await wal_on(append)).append(group)
    assert len(log.packs) == 3
    assert group.begun


@a_write
async def test_repeated_write_that_its_term_sends_away_goes_on_in_the_next_one(make: Make) -> None:
    log = ScriptedLog(OPEN)
    ticket = object()

    async def append(pack: Pack) -> None:
        if not log.packs:
            pack.ticket = ticket  # type: ignore[assignment]  # that it is there is enough
        elif wal._term is first:
            wal._term = ScriptedTerm(append)
            raise OnShutdown("the term ends")
        await log.append(pack)

    wal = await wal_on(append)
    first = wal._term
    assert await wal.append(make()) == RESULT
    assert len(log.packs) == 2


async def test_own_write_keeps_the_sequence_that_the_log_drew_for_its_first_try() -> None:
    log = ScriptedLog(OPEN)
    drawn = ProducerStamp(NODE_PRODUCER_ID, Store.term, 42)

    async def append(pack: Pack) -> None:
        if not log.packs:
            assert pack.producer == ProducerStamp(NODE_PRODUCER_ID, Store.term, 0), (
                "its next write, whichever that will be"
            )
            pack.place = Place(drawn)
            pack.producer = pack.place.stamp
        await log.append(pack)

    await (await wal_on(append)).append(AppendGroup(a_group().messages))
    assert [stamp for _, _, stamp in log.seen] == [drawn] * 2
    assert [pack.place for pack in log.packs] == [log.packs[0].place] * 2, (
        "held from the first try to the last"
    )


async def test_stamp_of_a_named_producer_is_left_as_it_is() -> None:
    log = ScriptedLog(OPEN)
    await (await wal_on(log.append)).append(a_group())
    assert [stamp for _, _, stamp in log.seen] == [ProducerStamp(7, 1, 3)] * 2


# --- many writes in one pack ----------------------------------------------------------------------


async def in_one_pack(wal: Wal, *groups: AppendGroup) -> Sequence["asyncio.Future[AppendResult]"]:
    """Begin to append groups together, behind a write that goes alone."""
    lone, *appends = [
        asyncio.ensure_future(wal.append(group)) for group in (insert_group(), *groups)
    ]
    await lone
    return appends


class PackedLog(ScriptedLog):
    """As it says, but a write that goes alone is taken and not remembered."""

    async def append(self, pack: Pack) -> None:
        if pack.come_again is None:
            await anyio.lowlevel.checkpoint()
            pack.groups[0].settle(RESULT)
        else:
            await super().append(pack)


async def test_pack_is_repeated_as_a_whole_and_each_of_its_callers_hears_its_own_result() -> None:
    log = PackedLog(OPEN, REOPENING)
    drawn = ProducerStamp(NODE_PRODUCER_ID, Store.term, 42)

    async def append(pack: Pack) -> None:
        if pack.come_again is not None and pack.producer is not None and not pack.producer.sequence:
            pack.place = Place(drawn)
            pack.producer = drawn
        await log.append(pack)

    wal = await wal_on(append)
    groups = [insert_group(rows=number) for number in (1, 2, 3)]
    groups[1].producer = ProducerStamp(7, 1, 3)
    results = [await append for append in await in_one_pack(wal, *groups)]
    assert [result.time_tick for result in results] == [7, 8, 9]
    assert [pack.producer for pack in log.packs] == [drawn] * 3
    assert [pack.place for pack in log.packs] == [log.packs[0].place] * 3
    for pack in log.packs:
        assert [group.pieces for group in pack.groups] == [group.pieces for group in groups]
        assert [group.producer for group in pack.groups] == [None, ProducerStamp(7, 1, 3), None]
    await wal.close()


async def test_pack_of_named_producers_only_is_not_also_a_write_of_the_node() -> None:
    log = PackedLog(OPEN)
    wal = await wal_on(log.append)
    await asyncio.gather(*await in_one_pack(wal, some_rows(), some_rows()))
    assert [pack.producer for pack in log.packs] == [None, None]
    await wal.close()


async def test_write_that_was_settled_or_left_before_doubt_is_not_repeated_with_its_pack() -> None:
    log = PackedLog(OPEN)
    refused = CollectionNotFound("gone")
    groups = [insert_group() for _ in range(3)]

    async def append(pack: Pack) -> None:
        if groups[0] in pack.groups and not log.packs:
            pack.leave(groups[0], refused)
            pack.leave(groups[2])
        await log.append(pack)

    wal = await wal_on(append)
    first, second, third = await in_one_pack(wal, *groups)
    with pytest.raises(CollectionNotFound):
        await first
    await second
    assert [[each.pieces for each in pack.groups] for pack in log.packs] == [[groups[1].pieces]] * 2
    assert not third.done(), "it comes again by itself"
    assert log.packs[0].come_again is not None
    log.packs[0].come_again(groups[2])
    assert (await third).time_tick == RESULT.time_tick
    await wal.close()


async def test_each_try_knows_all_those_before_it_since_any_of_them_may_be_one_in_the_log() -> None:
    log = PackedLog(OPEN, OPEN)
    wal = await wal_on(log.append)
    await asyncio.gather(*await in_one_pack(wal, insert_group(), some_rows()))
    third = log.packs[2]
    assert third.earlier is not None
    assert third.earlier.earlier is not None
    assert third.groups == third.earlier.groups == third.earlier.earlier.groups
    assert third.earlier.earlier.earlier is None
    await wal.close()


async def test_write_that_left_a_repeated_pack_is_not_written_by_its_next_try_as_well() -> None:
    log = PackedLog(OPEN, OPEN)
    left: list[AppendGroup] = []

    async def append(pack: Pack) -> None:
        if len(log.packs) == 1:
            left.append(pack.groups[1])
            pack.leave(left[0])
        await log.append(pack)

    wal = await wal_on(append)
    first, second = await in_one_pack(wal, insert_group(rows=1), insert_group(rows=2))
    await first
    assert [len(pack.groups) for pack in log.packs] == [2, 1, 1]
    assert log.packs[0].come_again is not None
    log.packs[0].come_again(left[0])
    assert (await second).time_tick == RESULT.time_tick, (
        "what comes again is heard by the caller of the first try"
    )
    await wal.close()


async def test_write_whose_caller_gave_up_before_the_log_is_not_written_by_a_repeated_pack() -> (
    None
):
    log = PackedLog(OPEN)
    groups = [insert_group() for _ in range(2)]
    held: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def append(pack: Pack) -> None:
        if pack.come_again is not None and not held.done():
            await held
            pack.drop_cancelled()  # as who waits does before it goes on
        await log.append(pack)

    wal = await wal_on(append)
    first, second = await in_one_pack(wal, *groups)
    await settle()
    first.cancel()
    await settle()
    held.set_result(None)
    await second
    assert [[each.pieces for each in pack.groups] for pack in log.packs] == [[groups[1].pieces]] * 2
    assert not groups[0].begun
    await wal.close()


@pytest.mark.parametrize(
    "error", [OnShutdown("closed"), SequenceTooOld(3, 9)], ids=lambda error: type(error).__name__
)
async def test_refusal_of_a_repeated_pack_that_knows_nothing_leaves_every_write_of_it_indeterminate(
    error: StreamingNodeError,
) -> None:
    log = PackedLog(OPEN, error)
    wal = await wal_on(log.append)
    for append in await in_one_pack(wal, insert_group(), some_rows()):
        with pytest.raises(Indeterminate) as caught:
            await append
        assert caught.value.__cause__ is error
    await wal.close()


async def test_no_time_to_give_up_leaves_every_write_of_a_pack_indeterminate_at_once() -> None:
    log = PackedLog(OPEN)
    wal = await wal_on(log.append, RetryLimits(give_up_s=0))
    for append in await in_one_pack(wal, insert_group(), insert_group()):
        with pytest.raises(Indeterminate):
            await append
    assert len(log.packs) == 1
    await wal.close()
