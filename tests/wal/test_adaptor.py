import asyncio

import pytest

from tests.wal.entries import comparable, stamped
from tests.wal.manual_log import A, B, ManualLog, allocator, insert, settle, time_tick
from tests.wal.packed import insert_group
from tests.wal.steered_wal import SteeredTerm, SteeredWal, start
from wal.adaptor import Wal, WalLimits
from wal.append import AppendGroup, AppendPack, Pack
from wal.codec import decode_entry
from wal.entry import LogEntry
from wal.errors import (
    ChannelFenced,
    Corrupt,
    Indeterminate,
    InvalidArgument,
    LogReopening,
    OnShutdown,
    StorageFailed,
    StorageFull,
    StreamingNodeError,
    TooLarge,
)
from wal.headers import (
    CreateCollectionHeader,
    CreateSegmentHeader,
    InsertHeader,
    MessageType,
    TimeTickHeader,
)
from wal.lifecycle import LogState, ReopenOptions
from wal.log import log_end
from wal.memory_store import MemoryLogStore
from wal.message import MutableMessage

pytestmark = pytest.mark.anyio


class Ended:
    def __init__(self) -> None:
        self.statuses: list[str] = []

    def interceptor_timed(
        self, name: str, before_s: float, after_s: float, *, failed_before: bool
    ) -> None:
        raise AssertionError("the WAL times appends, the chain times interceptors")

    def append_ended(self, pack: Pack, seconds: float, status: str) -> None:
        assert seconds >= 0
        self.statuses.append(status)


# --- opening --------------------------------------------------------------------------------------


async def test_first_tick_of_the_term_is_durable_before_recovery_and_names_its_node() -> None:
    steered = await SteeredWal().open()
    (message,) = steered.first_tick.messages
    assert message.type is MessageType.TIME_TICK
    assert message.header == TimeTickHeader(source_id="node-1")
    assert (message.wal_term, message.position) == (7, 1)
    assert steered.wal.state is LogState.OPEN
    assert steered.wal.term == 7


async def test_recovery_waits_until_the_first_tick_is_synced() -> None:
    log = ManualLog(durability="os")
    steered = SteeredWal()
    opened: list[LogEntry] = []

    async def open_term(first_tick: LogEntry, end: AppendPack) -> SteeredTerm:
        opened.append(first_tick)
        return SteeredTerm(steered, first_tick, end)

    # as much as opening needs
    wal = Wal(steered.store, log, open_term, ticks=allocator())  # type: ignore[arg-type]
    opening = asyncio.ensure_future(wal.open())
    await settle()
    log.write()
    await settle()
    assert not opened
    assert wal.state is LogState.RECOVERING
    log.sync()
    await opening
    assert len(opened) == 1


async def test_first_tick_resumes_where_the_last_entry_did_to_find_open_transactions() -> None:
    store = MemoryLogStore()
    log = await store.open_log("p0")
    steered = SteeredWal()
    # the third entry knows of a transaction that began at the second
    for last_confirmed in (None, None, 2):
        await log_end(log)(
            stamped(
                Pack([time_tick()]), tick=steered.ticks.allocate(), last_confirmed=last_confirmed
            )
        )
    seen: list[LogEntry] = []

    async def open_term(first_tick: LogEntry, end: AppendPack) -> SteeredTerm:
        seen.append(first_tick)
        return SteeredTerm(steered, first_tick, end)

    await Wal(store, log, open_term, ticks=steered.ticks).open()
    assert (seen[0].first_position, seen[0].last_confirmed_position) == (4, 2)
    assert [comparable(entry) for entry in await log.read(4, bytes_max=1)] == [
        comparable(entry) for entry in seen
    ]


async def test_first_tick_behind_packed_rows_is_above_the_last_of_their_ticks() -> None:
    store = MemoryLogStore()
    log = await store.open_log("p0")
    steered = SteeredWal()
    pack = stamped(
        Pack([insert(), insert(), insert()]), tick=steered.ticks.allocate(3), last_confirmed=None
    )
    await log_end(log)(pack)
    await Wal(store, log, steered._open_term, ticks=steered.ticks).open()
    assert steered.first_tick.time_tick > pack.time_tick
    assert (steered.first_tick.first_position, steered.first_tick.last_confirmed_position) == (4, 1)


async def test_failing_recovery_says_why() -> None:
    async def open_term(first_tick: LogEntry, end: AppendPack) -> SteeredTerm:
        raise Corrupt("the range is unreadable")

    store = MemoryLogStore()
    wal = Wal(store, await store.open_log("p0"), open_term, ticks=allocator())
    with pytest.raises(Corrupt):
        await wal.open()


async def test_chain_that_does_not_get_ready_is_closed() -> None:
    steered = SteeredWal()

    async def never() -> None:
        raise StorageFailed("no")

    steered.gatekeeper.ready = never  # type: ignore[method-assign]
    with pytest.raises(StorageFailed):
        await steered.open()
    assert steered.gatekeeper.closed == 1


# --- checks ---------------------------------------------------------------------------------------


async def test_append_gets_the_term_a_tick_and_its_positions() -> None:
    steered = await SteeredWal().open()
    append = await start(steered.wal, insert(A, B))
    steered.log.write()
    result = await append
    entry = decode_entry(steered.log.entries[-1], wal_name="memory", previous_crc32c=None)
    assert (entry.wal_term, entry.count, entry.time_tick) == (7, 2, result.time_tick)
    assert [message_id.position for message_id in result.message_ids] == [2, 3]
    assert result.time_tick > steered.first_tick.time_tick
    assert steered.settled


@pytest.mark.parametrize(
    "group, error",
    [
        pytest.param(AppendGroup([]), InvalidArgument, id="no message"),
        pytest.param(insert(A, B, A, txn_id=1), TooLarge, id="messages"),
        pytest.param(insert_group(data=b"x" * 200), TooLarge, id="bytes of rows"),
        pytest.param(
            AppendGroup(
                [
                    MutableMessage(
                        MessageType.INSERT, InsertHeader(1, 1, 1, 1), A, b"x" * 200, txn_id=1
                    )
                ]
            ),
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


async def test_collection_whose_schema_is_too_much_for_so_many_shards_is_refused() -> None:
    steered = await SteeredWal(limits=WalLimits(group_bytes_max=200)).open()
    vchannels = tuple(f"p0_1v{shard}" for shard in range(64))

    def creation(schema_bytes: int) -> AppendGroup:
        header = CreateCollectionHeader(
            1, "a", bytes(schema_bytes), 1, "id", vchannels, ((2, "_default"),)
        )
        return AppendGroup(
            [MutableMessage(MessageType.CREATE_COLLECTION, header, each) for each in vchannels]
        )

    with pytest.raises(TooLarge, match="fewer shards"):
        await steered.wal.append(creation(1 << 20))
    assert steered.settled
    append = await start(steered.wal, creation(1 << 10))
    steered.log.write()
    await append


async def test_segments_of_many_shards_are_made_at_once_however_little_rows_may_take() -> None:
    steered = await SteeredWal(limits=WalLimits(group_bytes_max=200)).open()
    header = CreateSegmentHeader(1, 2, 3, 1, bytes_max=1, rows_max=0)
    messages = [
        MutableMessage(MessageType.CREATE_SEGMENT, header, f"p0_1v{shard}") for shard in range(64)
    ]
    append = await start(steered.wal, AppendGroup(messages))
    steered.log.write()
    assert (await append).count == 64


async def test_full_queue_holds_appends_back() -> None:
    steered = await SteeredWal().open()
    steered.log.admission = asyncio.get_running_loop().create_future()
    append = await start(steered.wal, insert())
    assert steered.log.queue == []
    assert not steered.term.acks.pending
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


# --- a log that failed ----------------------------------------------------------------------------


async def test_append_without_a_place_waits_for_the_next_term_others_are_indeterminate() -> None:
    steered = await SteeredWal().open()
    keeping = asyncio.ensure_future(steered.wal.keep())
    in_log = await start(steered.wal, insert())
    steered.log.admission = asyncio.get_running_loop().create_future()
    in_queue = await start(steered.wal, insert())
    steered.log.break_down()
    steered.store.fail()
    steered.log.admission.set_result(None)
    late = await start(steered.wal, insert())
    assert steered.wal.state is LogState.REOPENING
    assert not in_log.done()
    assert not in_queue.done()
    steered.log.mend()
    steered.store.may_reopen.set()
    for append in (in_log, in_queue, late):
        await append
    assert (steered.wal.state, steered.wal.term, steered.wal.status.reopened) == (
        LogState.OPEN,
        8,
        1,
    )
    assert steered.settled
    await steered.wal.close()
    await keeping


async def test_log_is_lost_for_all_others_once_one_append_has_an_open_outcome() -> None:
    steered = await SteeredWal(reopen=ReopenOptions(wait_s=0.01)).open()
    append = await start(steered.wal, insert())
    steered.log.break_down()
    steered.store.fail()
    with pytest.raises(Indeterminate):
        await append
    assert steered.wal.state is LogState.ENDING, "before anybody keeps it"
    await steered.wal.close()


async def test_log_that_is_not_back_in_time_refuses_and_nothing_was_done() -> None:
    steered = await SteeredWal(reopen=ReopenOptions(wait_s=0.01)).open()
    keeping = asyncio.ensure_future(steered.wal.keep())
    steered.log.break_down()
    steered.store.fail()
    group = insert()
    with pytest.raises(LogReopening, match="nothing was done"):
        await steered.wal.append(group)
    assert not group.begun
    steered.log.mend()
    closing = asyncio.ensure_future(steered.wal.close())
    steered.store.may_reopen.set()
    await closing
    await keeping


async def test_full_disk_refuses_at_once_while_the_log_cannot_come_back() -> None:
    steered = await SteeredWal(reopen=ReopenOptions(first_pause_s=3600)).open()
    keeping = asyncio.ensure_future(steered.wal.keep())
    steered.store.refusals = [StorageFull("data", 0, 1)]
    steered.store.may_reopen.set()
    steered.store.fail()
    while steered.wal.state is not LogState.WAITING:
        await settle()
    with pytest.raises(StorageFull):
        await steered.wal.append(insert())
    await steered.wal.close()
    await keeping


async def test_log_that_another_owner_has_ends_with_that_error_for_good() -> None:
    steered = await SteeredWal().open()
    keeping = asyncio.ensure_future(steered.wal.keep())
    steered.store.refusals = [ChannelFenced("term 8 owns p0")]
    steered.log.refusal = ChannelFenced("term 8 owns p0")
    steered.store.fail()
    waiting = await start(steered.wal, insert())
    steered.store.may_reopen.set()
    with pytest.raises(ChannelFenced):
        await keeping
    for append in (waiting, await start(steered.wal, insert())):
        with pytest.raises(ChannelFenced):
            await append
    assert steered.wal.state is LogState.FAILED


async def test_call_that_ran_in_a_term_that_ended_is_made_again_in_the_next_one() -> None:
    steered = await SteeredWal().open()
    keeping = asyncio.ensure_future(steered.wal.keep())
    terms: list[int] = []

    async def call() -> str:
        terms.append(steered.wal.term)
        if len(terms) == 1:
            steered.log.mend()
            steered.store.fail()
        await settle()
        return "done"

    steered.store.may_reopen.set()
    assert await steered.wal.in_term(call, settled=True) == "done"
    assert terms == [7, 8]
    await steered.wal.close()
    await keeping


async def test_call_that_had_its_effect_is_not_made_again() -> None:
    steered = await SteeredWal(reopen=ReopenOptions(wait_s=0.01)).open()
    keeping = asyncio.ensure_future(steered.wal.keep())

    async def call() -> str:
        steered.store.fail()
        return "done"

    assert await steered.wal.in_term(call) == "done"
    steered.log.mend()
    steered.store.may_reopen.set()
    await steered.wal.close()
    await keeping


@pytest.mark.parametrize("refusal", [StorageFull("data", 0, 1), OnShutdown("closed")], ids=type)
async def test_call_that_is_refused_after_one_with_an_open_outcome_is_indeterminate(
    refusal: StreamingNodeError,
) -> None:
    steered = await SteeredWal().open()
    keeping = asyncio.ensure_future(steered.wal.keep())
    steered.store.may_reopen.set()
    errors: list[StreamingNodeError] = [Indeterminate("a write failed"), refusal]

    async def call() -> None:
        if len(errors) == 2:
            steered.log.mend()
            steered.store.fail()
        raise errors.pop(0)

    with pytest.raises(Indeterminate):
        await steered.wal.in_term(call)
    assert not errors
    await steered.wal.close()
    await keeping


async def test_observer_hears_of_every_end() -> None:
    observer = Ended()
    steered = await SteeredWal(observer=observer).open()
    until = steered.gatekeeper.until = asyncio.get_running_loop().create_future()
    cancelled = await start(steered.wal, insert())
    cancelled.cancel()
    await settle()
    until.set_result(None)
    ok = await start(steered.wal, insert())
    steered.log.write()
    await ok
    steered.gatekeeper.refusal = StorageFailed("no")
    with pytest.raises(StorageFailed):
        await steered.wal.append(insert())
    await asyncio.wait([cancelled])
    assert sorted(observer.statuses) == ["cancel", "error", "ok"]
