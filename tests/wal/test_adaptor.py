import asyncio

import pytest

from interceptors.chain import Chain
from tests.wal.manual_log import A, ManualLog, allocator, insert, settle, time_tick
from tests.wal.steered_wal import SteeredWal, Store, start
from wal.adaptor import Wal, WalLimits, log_end
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
from wal.headers import MessageType, TimeTickHeader
from wal.lifecycle import WalState
from wal.log import Append, AppendGroup, Log
from wal.memory_store import MemoryLogStore
from wal.message import LogEntry, MutableMessage

pytestmark = pytest.mark.anyio


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
        return Chain([], end)

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
        return Chain([], end)

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
    assert steered.gatekeeper.closed == 1


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
        with pytest.raises(StorageFailed, match="being reopened"):
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
