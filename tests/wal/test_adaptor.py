import asyncio

import anyio
import pytest

from interceptors.chain import Chain
from tests.wal.manual_log import A, ManualLog, allocator, insert, settle, time_tick
from tests.wal.steered_wal import SteeredWal, Store
from wal import adaptor
from wal.adaptor import Wal, WalLimits, log_end
from wal.append import Append, AppendGroup, AppendResult
from wal.errors import (
    ChannelFenced,
    Corrupt,
    Indeterminate,
    InvalidArgument,
    OnShutdown,
    StorageFailed,
    StorageFull,
    TooLarge,
)
from wal.headers import DropCollectionHeader, TimeTickHeader
from wal.lifecycle import WalState
from wal.log import Log
from wal.memory_store import MemoryLogStore
from wal.message import LogEntry, MutableMessage
from wal.message_type import MessageType

pytestmark = pytest.mark.anyio


def drop(vchannel: str = A) -> AppendGroup:
    return AppendGroup([MutableMessage(MessageType.DROP_COLLECTION, DropCollectionHeader(1), vchannel=vchannel)])


async def start(wal: Wal[str, str], group: AppendGroup) -> "asyncio.Task[AppendResult]":
    task = asyncio.ensure_future(wal.append(group))
    await settle()
    return task


class Ended:
    def __init__(self) -> None:
        self.statuses: list[str] = []

    def interceptor_timed(self, name: str, before_s: float, after_s: float, *, failed_before: bool) -> None:
        raise AssertionError("the WAL times appends, the chain times interceptors")

    def append_ended(self, group: AppendGroup, seconds: float, status: str) -> None:
        assert seconds >= 0
        self.statuses.append(status)


# --- opening ----------------------------------------------------------------------------------------------------------


async def test_first_tick_of_the_term_is_durable_before_recovery_and_names_its_node() -> None:
    steered = await SteeredWal().open()
    (message,) = steered.first_tick.messages
    assert message.type is MessageType.TIME_TICK
    assert message.header == TimeTickHeader(source_id="node-1")
    assert (message.wal_term, message.position) == (7, 1)
    assert steered.wal.state is WalState.AVAILABLE
    assert steered.wal.term == 7


async def test_recovery_waits_until_the_first_tick_is_synced() -> None:
    stages: list[str] = []
    log = ManualLog(durability="os")

    async def recover(log: Log, first_tick: LogEntry) -> None:
        stages.append("recover")

    def build(recovered: None, log: Log, first_tick: LogEntry, end: Append) -> Chain:
        stages.append("build")
        return Chain.of([], end)

    opening: asyncio.Task[Wal[str, str]] = asyncio.ensure_future(
        Wal.open(
            Store(log),  # type: ignore[arg-type]  # opening needs only this much of a store
            "p0",
            ticks=allocator(),
            recover=recover,
            build_chain=build,
            read=lambda policy: policy,
        )
    )
    await settle()
    log.write()
    await settle()
    assert stages == []
    log.sync()
    await opening
    assert stages == ["recover", "build"]


async def test_first_tick_resumes_where_the_last_entry_did_so_that_open_transactions_are_found() -> None:
    store = MemoryLogStore()
    log = await store.open_log("p0")
    ticks = allocator()
    for last_confirmed in (None, None, 2):  # the third entry knows of a transaction that began at the second
        group = time_tick()
        group.stamp_time_tick(ticks.allocate(), last_confirmed)
        await log_end(log)(group)
    seen: list[LogEntry] = []

    async def recover(log: Log, first_tick: LogEntry) -> None:
        seen.append(first_tick)

    def build(recovered: None, log: Log, first_tick: LogEntry, end: Append) -> Chain:
        return Chain.of([], end)

    await Wal.open(store, "p0", ticks=ticks, recover=recover, build_chain=build, read=lambda policy: policy)
    assert (seen[0].first_position, seen[0].last_confirmed_position) == (4, 2)
    assert (await log.read(4, bytes_max=1)) == seen


async def test_failing_recovery_leaves_nothing_open_and_says_why() -> None:
    async def recover(log: Log, first_tick: LogEntry) -> None:
        raise Corrupt("the range is unreadable")

    def build(recovered: None, log: Log, first_tick: LogEntry, end: Append) -> Chain:
        raise AssertionError("nothing was recovered")

    with pytest.raises(Corrupt):
        await Wal.open(
            MemoryLogStore(),
            "p0",
            ticks=allocator(),
            recover=recover,
            build_chain=build,
            read=lambda policy: policy,
        )


async def test_chain_that_does_not_get_ready_is_closed() -> None:
    steered = SteeredWal()

    async def never() -> None:
        raise StorageFailed("no")

    steered.gatekeeper.ready = never  # type: ignore[method-assign]
    with pytest.raises(StorageFailed):
        await steered.open()
    assert steered.gatekeeper.closed == ["close"]


# --- checks -----------------------------------------------------------------------------------------------------------


async def test_append_gets_the_term_a_tick_and_its_positions() -> None:
    steered = await SteeredWal().open()
    group = insert(A, A)
    append = await start(steered.wal, group)
    steered.log.write()
    result = await append
    assert [message.wal_term for message in group.messages] == [7, 7]
    assert [message_id.position for message_id in result.message_ids] == [2, 3]
    assert result.time_tick > steered.first_tick.time_tick
    assert steered.settled


@pytest.mark.parametrize(
    "group, error",
    [
        pytest.param(AppendGroup([]), InvalidArgument, id="no message"),
        pytest.param(insert(A, A, A), TooLarge, id="messages"),
        pytest.param(
            AppendGroup([MutableMessage(MessageType.TIME_TICK, TimeTickHeader(), payload=b"x" * 200)]),
            TooLarge,
            id="bytes",
        ),
    ],
)
async def test_group_that_does_not_fit_is_refused_and_changes_nothing(
    group: AppendGroup, error: type[Exception]
) -> None:
    steered = await SteeredWal(limits=WalLimits(group_bytes_max=200, group_messages_max=2)).open()
    with pytest.raises(error, match=" — "):
        await steered.wal.append(group)
    assert steered.log.next_position == 2
    assert steered.settled


async def test_full_queue_holds_appends_back() -> None:
    steered = await SteeredWal().open()
    steered.log.admission = asyncio.get_running_loop().create_future()
    append = await start(steered.wal, insert())
    assert steered.log.queue == []
    assert not steered.acks.pending
    steered.log.admission.set_result(None)
    await settle()
    steered.log.write()
    await append


async def test_full_disk_refuses_and_appends_resume_by_themselves() -> None:
    steered = await SteeredWal().open()
    steered.log.refusal = StorageFull("data", 0, 1)
    with pytest.raises(StorageFull):
        await steered.wal.append(insert())
    steered.log.refusal = None
    append = await start(steered.wal, insert())
    steered.log.write()
    await append


async def test_fenced_wal_refuses_from_then_on() -> None:
    steered = await SteeredWal().open()
    steered.gatekeeper.refusal = ChannelFenced("term 8 owns p0")
    with pytest.raises(ChannelFenced, match="term 8"):
        await steered.wal.append(insert())
    assert steered.wal.state is WalState.FENCED
    steered.gatekeeper.refusal = None
    with pytest.raises(ChannelFenced, match="newer owner"):
        await steered.wal.append(insert())


async def test_failed_write_is_indeterminate_for_those_in_the_log_and_a_refusal_for_those_after() -> None:
    steered = await SteeredWal().open()
    in_log = await start(steered.wal, insert())
    steered.log.admission = asyncio.get_running_loop().create_future()
    in_queue = await start(steered.wal, insert())
    steered.log.break_down()
    steered.log.admission.set_result(None)
    with pytest.raises(Indeterminate):
        await in_log
    for refused in (in_queue, await start(steered.wal, insert())):
        with pytest.raises(StorageFailed, match="reopen the node"):
            await refused
    assert steered.wal.state is WalState.POISONED
    assert steered.wal.in_flight == 0


async def test_log_that_refuses_because_of_an_earlier_write_did_certainly_nothing() -> None:
    steered = await SteeredWal().open()
    steered.log.break_down()
    with pytest.raises(StorageFailed):
        await steered.wal.append(insert())
    assert steered.settled


async def test_observer_hears_of_every_end() -> None:
    observer = Ended()
    steered = await SteeredWal(observer=observer).open()
    ok, cancelled = await start(steered.wal, insert()), await start(steered.wal, insert())
    cancelled.cancel()
    steered.log.write()
    await ok
    with pytest.raises(InvalidArgument):
        await steered.wal.append(AppendGroup([]))
    await asyncio.wait([cancelled])
    assert sorted(observer.statuses) == ["cancel", "error", "ok"]


async def test_reader_comes_from_the_factory_until_the_wal_closes() -> None:
    steered = await SteeredWal().open()
    assert steered.wal.read("latest") == "reader of latest"
    await steered.wal.close()
    with pytest.raises(OnShutdown):
        steered.wal.read("latest")


# --- closing ----------------------------------------------------------------------------------------------------------


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


# --- cancellation -----------------------------------------------------------------------------------------------------


async def test_append_cancelled_in_the_log_is_decided_and_published_without_its_caller() -> None:
    steered = await SteeredWal().open()
    group = insert()
    append = await start(steered.wal, group)
    append.cancel()
    with pytest.raises(asyncio.CancelledError):
        await append
    steered.log.write()
    await settle()
    assert steered.tail.confirmed_tick == group.time_tick
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
    assert steered.wal.in_flight == 1
    steered.log.write()
    await settle()
    assert steered.tail.confirmed_tick == group.time_tick
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
    """Cancel an append after so many steps of the loop, check that nothing is half done; whether it was cancelled."""
    steered = await SteeredWal().open()
    until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    exclusive, group = drop(), insert()
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
    happened = group.ticket is not None
    assert steered.log.next_position == 3 + happened, "the append is in the log once or never"
    assert steered.tail.confirmed_tick == (group.time_tick if happened else exclusive.time_tick)
    assert steered.settled
    assert append.done()
    assert append.cancelled() or happened
    return append.cancelled()


async def test_append_cancelled_at_any_step_is_in_the_log_once_or_never_and_leaves_nothing_behind() -> None:
    outcomes = [await cancelled_after(step) for step in range(30)]
    assert outcomes[0]
    assert not outcomes[-1], "the script is long enough to reach the end"
    first_uncancelled = outcomes.index(False)
    assert first_uncancelled > 18, "cancelled while it waited for the lock, for the redo, and for the log"


async def test_many_appends_cancelled_at_random_leave_an_unbroken_log() -> None:
    steered = await SteeredWal().open()
    appends = [await start(steered.wal, drop() if number % 7 == 0 else insert()) for number in range(60)]
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
