"""Writes are sent again only when that can tell something, and what is not known is never said."""

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import pytest

from interceptors.errors import CollectionNotFound, SequenceTooOld
from tests.wal.manual_log import ManualLog, allocator
from tests.wal.steered_wal import Store
from wal.adaptor import Wal
from wal.append import Append, AppendGroup, AppendResult
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
RESULT = AppendResult(MemoryMessageId(1), 1, 7, MemoryMessageId(1))
HEADER = InsertHeader(1, 2, 1, 3)
OPEN = Indeterminate("who knows")
REOPENING = LogReopening("not yet")
FULL = StorageFull("/", 0, 1)


class ScriptedLog:
    """An append path that stamps each group as the real one does, and answers as told; then it takes everything."""

    def __init__(self, *answers: StreamingNodeError) -> None:
        self.answers = list(answers)
        self.groups: list[AppendGroup] = []
        self.seen: list[tuple[object, int, object]] = []

    async def append(self, group: AppendGroup) -> AppendResult:
        self.groups.append(group)
        (message,) = group.messages
        self.seen.append((message.header, message.txn_id, group.producer))
        message.header = InsertHeader(1, 2, 1, 3, segment_id=9, first_offset=len(self.groups))
        message.txn_id = 99
        await anyio.lowlevel.checkpoint()
        if self.answers:
            raise self.answers.pop(0)
        return RESULT


class ScriptedTerm:
    """A term without interceptors or workers."""

    def __init__(self, append: Append) -> None:
        self.append = append

    async def ready(self) -> None: ...

    async def work(self, append: Append, failed: Callable[[], Awaitable[None]]) -> None: ...

    async def close(self) -> None: ...

    def end(self) -> None: ...


async def wal_on(append: Append, retry: RetryLimits = LIMITS) -> Wal:
    log = ManualLog()
    log.held = False

    async def open_term(first_tick: LogEntry, end: Append) -> ScriptedTerm:
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
    message = MutableMessage(MessageType.INSERT, HEADER, "p0_1v0", b"rows")
    return AppendGroup([message], producer=ProducerStamp(7, 1, 3))


async def test_every_try_carries_the_same_stamp_and_messages_as_they_were_built() -> None:
    log = ScriptedLog(OPEN, REOPENING, FULL, OPEN)
    assert await (await wal_on(log.append)).append(a_group()) == RESULT
    assert log.seen == [(HEADER, 0, ProducerStamp(7, 1, 3))] * 5
    assert len({id(group) for group in log.groups}) == 5


@pytest.mark.parametrize(
    "error",
    [REOPENING, FULL, Overloaded("no"), OnShutdown("closed"), StorageFailed("no"), CollectionNotFound("gone")],
    ids=lambda error: type(error).__name__,
)
async def test_a_write_that_did_nothing_is_not_repeated(error: StreamingNodeError) -> None:
    log = ScriptedLog(error)
    with pytest.raises(type(error)):
        await (await wal_on(log.append)).append(a_group())
    assert len(log.groups) == 1


@pytest.mark.parametrize(
    "error", [OnShutdown("closed"), StorageFailed("no"), SequenceTooOld(3, 9)], ids=lambda error: type(error).__name__
)
async def test_refusal_that_knows_nothing_of_the_first_try_leaves_it_indeterminate(error: StreamingNodeError) -> None:
    log = ScriptedLog(OPEN, error)
    with pytest.raises(Indeterminate) as caught:
        await (await wal_on(log.append)).append(a_group())
    assert caught.value is OPEN
    assert caught.value.__cause__ is error


async def test_refusal_from_behind_the_window_is_the_answer() -> None:
    log = ScriptedLog(OPEN, CollectionNotFound("dropped meanwhile"))
    with pytest.raises(CollectionNotFound):
        await (await wal_on(log.append)).append(a_group())


async def test_giving_up_says_that_the_outcome_is_open() -> None:
    log = ScriptedLog(*[OPEN] * 100_000)
    limits = RetryLimits(first_s=0.0, max_s=0.0, give_up_s=0.2)
    with anyio.fail_after(10), pytest.raises(Indeterminate):
        await (await wal_on(log.append, limits)).append(a_group())
    assert len(log.groups) > 1


async def test_giving_up_does_not_wait_for_a_try_that_hangs() -> None:
    log = ScriptedLog(OPEN)

    async def hang(group: AppendGroup) -> AppendResult:
        if log.answers:
            return await log.append(group)
        await anyio.sleep_forever()
        raise AssertionError

    with anyio.fail_after(10), pytest.raises(Indeterminate):
        await (await wal_on(hang, RetryLimits(first_s=0.0, give_up_s=0.01))).append(a_group())


async def test_no_time_to_give_up_means_no_repeating() -> None:
    log = ScriptedLog(OPEN)
    with pytest.raises(Indeterminate):
        await (await wal_on(log.append, RetryLimits(give_up_s=0))).append(a_group())
    assert len(log.groups) == 1


async def test_closing_ends_a_pause_at_once() -> None:
    log = ScriptedLog(OPEN)
    wal = await wal_on(log.append, RetryLimits(first_s=3600, max_s=3600, give_up_s=7200))
    writing = asyncio.get_running_loop().create_task(wal.append(a_group()))
    await anyio.wait_all_tasks_blocked()
    assert not writing.done()
    wal.stop_waiting()
    with anyio.fail_after(10), pytest.raises(Indeterminate):
        await writing
    assert len(log.groups) == 1


async def test_first_group_says_that_a_repeated_one_may_be_in_the_log() -> None:
    log = ScriptedLog(OPEN)
    group = a_group()
    await (await wal_on(log.append)).append(group)
    assert not group.begun
    log.groups[1].ticket = object()  # type: ignore[assignment]
    assert group.begun


async def test_own_write_keeps_the_sequence_that_the_log_drew_for_its_first_try() -> None:
    log = ScriptedLog(OPEN)
    group = AppendGroup(a_group().messages)

    async def append(group: AppendGroup) -> AppendResult:
        if len(log.groups) == 0:
            assert group.producer == ProducerStamp(NODE_PRODUCER_ID, Store.term, 0), (
                "its next write, whichever that will be"
            )
            group.place = Place(ProducerStamp(NODE_PRODUCER_ID, Store.term, 42))
            group.producer = group.place.stamp
        return await log.append(group)

    await (await wal_on(append)).append(group)
    assert [stamp for _, _, stamp in log.seen] == [ProducerStamp(NODE_PRODUCER_ID, Store.term, 42)] * 2
    assert [group.place for group in log.groups] == [group.place] * 2, "held from the first try to the last"


async def test_stamp_of_a_named_producer_is_left_as_it_is() -> None:
    log = ScriptedLog(OPEN)
    await (await wal_on(log.append)).append(a_group())
    assert [stamp for _, _, stamp in log.seen] == [ProducerStamp(7, 1, 3)] * 2
