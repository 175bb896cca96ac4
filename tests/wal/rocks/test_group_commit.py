import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocksdict import WriteBatch

from tests.wal.log_contract import SMALL, append, fill, payloads_of, read_all, stamped_pack
from wal.errors import (
    ChannelFenced,
    Indeterminate,
    LogReopening,
    OnShutdown,
    StorageFailed,
    StorageFull,
)
from wal.rocks.floor import read_floor
from wal.rocks.group_commit import GroupCommit, StoreState
from wal.rocks.layout import RocksOptions
from wal.rocks.space import NOT_LOOKED
from wal.rocks.store import RocksStore, open_rocks_store
from wal.rocks.writer import WRITE_BYTES_MAX, Writer

pytestmark = pytest.mark.anyio


MARK_BYTES = 100 << 20


class Disk:
    """Free space that a test decides."""

    free_bytes = 1 << 40


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wal.rocks.space.free_bytes_of", lambda _: disk.free_bytes)
        yield disk


@pytest.fixture
async def store(tmp_path: Path, disk: Disk) -> AsyncIterator[RocksStore]:
    store = await open_rocks_store(
        tmp_path / "node",
        options=RocksOptions(queue_bytes_max=10_000, free_bytes_min=MARK_BYTES),
    )
    yield store
    await store.close()


def fail_calls(store: RocksStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Let the next write or sync of the store fail, as a broken disk does."""

    def broken(_writer: object, *_arguments: object) -> None:
        raise OSError(5, f"{call} failed")

    monkeypatch.setattr(Writer, call, broken)


@pytest.mark.parametrize("call", ["write_batch", "sync_log"])
async def test_failed_write_is_indeterminate_and_later_ones_are_refused_before_they_did_anything(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    log = await store.open_log("p0")
    await append(log, b"before")
    fail_calls(store, monkeypatch, call)
    tickets = [log.append(stamped_pack(bytes(3000))) for _ in range(3)]
    waiting = asyncio.ensure_future(log.admit(9_000))
    for ticket in tickets:
        with pytest.raises(Indeterminate):
            await ticket.written
    assert store.condition == "failed"
    monkeypatch.undo()  # the disk works again, and that changes nothing
    with pytest.raises(LogReopening):
        await waiting
    with pytest.raises(LogReopening):
        await log.admit(1)
    with pytest.raises(LogReopening):
        log.append(stamped_pack(b"later"))
    for refused in (store.state.put({"k": b"v"}), store.state.get("k"), store.state.scan("")):
        with pytest.raises(LogReopening):
            await refused
    await store.promise_tick(1)  # the floor file is another file, and still ours


async def test_writes_queued_behind_a_failed_one_are_not_written(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await store.open_log("p0")
    working = Writer.write_batch
    calls: list[object] = []

    def fails_once(writer: Writer, batch: WriteBatch) -> None:
        calls.append(batch)
        if len(calls) == 1:
            raise OSError(5, "write failed")
        working(writer, batch)

    monkeypatch.setattr(Writer, "write_batch", fails_once)
    tickets = [log.append(stamped_pack(bytes(WRITE_BYTES_MAX))) for _ in range(3)]
    for ticket in tickets:
        with pytest.raises(Indeterminate):
            await ticket.written
    assert len(calls) == 1


async def test_a_writer_that_failed_waits_for_its_end_also_when_the_floor_was_not_synced(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await store.open_log("p0")
    fail_calls(store, monkeypatch, "write_batch")
    with pytest.raises(Indeterminate):
        await log.append(stamped_pack(b"unknown")).written
    store._owned.floor.dirty = True  # as it is for a moment after each sync of the log
    assert store._writer._patience() is None


async def test_reads_go_on_after_a_failed_write_and_show_only_what_was_synced(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await store.open_log("p0")
    await append(log, b"before")
    fail_calls(store, monkeypatch, "sync_log")
    with pytest.raises(Indeterminate):
        await log.append(stamped_pack(b"unknown")).written
    assert payloads_of(await read_all(log)) == [[b"before"]]
    assert log.durable_position == 1


async def test_a_poisoned_store_closes_and_opens_again_with_everything_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        store = await open_rocks_store(tmp_path / "node")
        log = await store.open_log("p0")
        await append(log, b"acknowledged")
        fail_calls(store, monkeypatch, "sync_log")
        with pytest.raises(Indeterminate):
            await log.append(stamped_pack(b"unknown")).written
        monkeypatch.undo()
        await store.close()
    store = await open_rocks_store(tmp_path / "node")
    found = payloads_of(await read_all(await store.open_log("p0")))
    assert found.count([b"acknowledged"]) == 3
    await store.close()


async def test_the_floor_does_not_rise_over_a_failed_sync(
    store: RocksStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await store.open_log("p0")
    await append(log, b"before")
    fail_calls(store, monkeypatch, "sync_log")
    with pytest.raises(Indeterminate):
        await log.append(stamped_pack(b"unknown")).written
    floor = await anyio.to_thread.run_sync(read_floor, tmp_path / "node")
    assert floor is not None
    assert floor.positions == {1: 1}


@pytest.mark.filterwarnings("error")
async def test_an_abandoned_append_that_fails_is_silent(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    log = await store.open_log("p0")
    fail_calls(store, monkeypatch, "sync_log")
    log.append(stamped_pack(b"abandoned"))
    with pytest.raises(Indeterminate):
        await log.append(stamped_pack(b"kept")).written
    await store.close()  # nobody holds the outcome any more
    gc.collect()
    assert heard == []


async def test_the_floor_is_raised_before_the_acknowledgement(
    store: RocksStore, tmp_path: Path
) -> None:
    log = await store.open_log("p0")
    for position in range(1, 30):
        pack = stamped_pack(b"x")
        await log.append(pack).written
        floor = await anyio.to_thread.run_sync(read_floor, tmp_path / "node")
        assert floor is not None
        assert (floor.positions, floor.tick) == ({1: position}, pack.time_tick)


async def test_a_full_queue_holds_back_in_order_until_the_disk_took_it(store: RocksStore) -> None:
    log = await store.open_log("p0")
    tickets = [log.append(stamped_pack(bytes(6000))) for _ in range(2)]
    order: list[int] = []

    async def admitted(number: int, size: int) -> None:
        await log.admit(size)
        order.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number, size in enumerate((6000, 10, 20_000)):
            tasks.create_task(admitted(number, size))
        await asyncio.sleep(0)
        assert order == []
    assert order == [0, 1, 2]
    assert all(ticket.written.done() for ticket in tickets)


async def test_a_cancelled_admission_gives_its_place_back(store: RocksStore) -> None:
    log = await store.open_log("p0")
    ticket = log.append(stamped_pack(bytes(9000)))
    first = asyncio.ensure_future(log.admit(9000))
    second = asyncio.ensure_future(log.admit(10))
    await asyncio.sleep(0)
    first.cancel()
    await second
    await ticket.written
    assert store.queued_bytes == 0


async def test_closing_refuses_who_waits_for_room(store: RocksStore) -> None:
    log = await store.open_log("p0")
    log.append(stamped_pack(bytes(9000)))
    waiting = asyncio.ensure_future(log.admit(9000))
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(OnShutdown):
        await waiting


async def test_a_low_disk_refuses_appends_and_lets_them_pass_again_by_itself(
    store: RocksStore, disk: Disk
) -> None:
    log = await store.open_log("p0")
    disk.free_bytes = MARK_BYTES - 1
    with pytest.raises(StorageFull) as full:
        with anyio.fail_after(60):
            while True:
                await log.admit(1)
                await append(log, b"x")
    assert (full.value.free_bytes, full.value.needed_bytes) == (MARK_BYTES - 1, MARK_BYTES)
    await log.admit(1, makes_room=True)
    assert (await log.read(1, bytes_max=SMALL)) != []
    log.append(stamped_pack(b"admitted before"))
    disk.free_bytes = 2 * MARK_BYTES
    with anyio.fail_after(60):
        while True:
            try:
                await log.admit(1)
                break
            except StorageFull:
                await anyio.lowlevel.checkpoint()
    await append(log, b"again")


async def test_with_os_durability_an_append_is_acknowledged_before_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RocksOptions(durability="os", sync_interval_ms=1_000_000)
    store = await open_rocks_store(tmp_path / "node", options=options)
    log = await store.open_log("p0")
    ticket = log.append(stamped_pack(b"x"))
    await ticket.written
    assert not ticket.durable.done()
    assert log.durable_position == 0
    assert await log.read(1, bytes_max=SMALL) == []
    await store.state.put({"k": b"v"})  # is synced at once, and takes everything before it along
    await ticket.durable
    assert log.durable_position == 1
    last = log.append(stamped_pack(b"y"))
    await last.written
    await store.close()
    assert last.durable.done()
    assert last.durable.exception() is None


async def test_with_os_durability_the_background_sync_comes_by_itself(tmp_path: Path) -> None:
    store = await open_rocks_store(
        tmp_path / "node", options=RocksOptions(durability="os", sync_interval_ms=1)
    )
    log = await store.open_log("p0")
    await fill(log, 10)
    assert log.durable_position == 10
    await store.close()


EVENTS = [*(StoreState)][1:]


@given(events=st.lists(st.sampled_from([*EVENTS, None]), max_size=8))
def test_only_a_failed_write_is_outlived_and_only_by_reopening(
    events: list[StoreState | None],
) -> None:
    async def run() -> None:
        commit = GroupCommit(Path("node"), RocksOptions(), space=NOT_LOOKED)
        worst = StoreState.OPEN
        for event in events:
            if event is None:
                commit.resume()
                worst = StoreState.OPEN if worst is StoreState.FAILED else worst
            else:
                commit.refuse(event)
                worst = max(worst, event)
            assert commit.state is worst
            refused = type(commit.refusal()) if worst is not StoreState.OPEN else None
            assert refused is REFUSALS[worst]

    asyncio.run(run())


REFUSALS = {
    StoreState.OPEN: None,
    StoreState.READ_ONLY: StorageFailed,
    StoreState.FAILED: LogReopening,
    StoreState.FENCED: ChannelFenced,
    StoreState.CLOSED: OnShutdown,
    StoreState.FORKED: StorageFailed,
}
