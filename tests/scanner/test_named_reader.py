"""A named reader goes on after what it acknowledged, and truncation waits for it."""

import asyncio
import gc
from collections.abc import Mapping

import pytest

from scanner.deliver_policy import ReaderBusy, ReaderNotFound
from scanner.named_reader import KnownReader, NamedReaders, ReaderPosition
from scanner.scanner import Scanner
from tests.scanner.journal import Journal, read_until, seen
from wal.errors import Corrupt, Indeterminate, OnShutdown, StorageFailed
from wal.live_tail import LiveTail
from wal.memory_store import MemoryLogStore, MemoryStateMap

pytestmark = pytest.mark.anyio

START = ReaderPosition("p0", "memory", 1, 0)


def live() -> Mapping[int, str]:
    return {1: "one", 2: "two"}


class SlowStateMap(MemoryStateMap):
    """A map of state whose changes wait to be let through, and fail when told."""

    def __init__(self) -> None:
        super().__init__(MemoryLogStore())
        self.writes: list[Mapping[str, bytes | None]] = []
        self.gate = asyncio.Event()
        self.failures: list[Exception] = []

    def open_once(self) -> None:
        """Let the write that waits through, and no other."""
        self.gate.set()
        self.gate.clear()

    async def put(self, changes: Mapping[str, bytes | None]) -> None:
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.writes.append(changes)
        await super().put(changes)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_reader_resumes_after_its_last_ack_across_a_restart() -> None:
    store = MemoryLogStore()
    journal = await Journal.create(tail=LiveTail(), store=store)
    readers = NamedReaders(store.state, live)
    await readers.load()
    reader = await readers.open({1}, "billing", start=START)
    open_txn = journal.begin()
    for payload in (b"a", b"b", b"c"):
        journal.insert(payload)
    scanner = Scanner(journal.log, journal.tail, reader.position.start)
    messages = await read_until(scanner, journal.tick)
    await reader.ack(messages[1].last_confirmed_position, messages[1].time_tick)
    journal.commit(open_txn)

    again = NamedReaders(store.state, live)
    await again.load()
    reader = await again.open({1}, "billing", start=START)
    scanner = Scanner(journal.log, journal.tail, reader.position.start)
    assert seen(await read_until(scanner, journal.tick)) == journal.visible[2:]


async def test_a_new_reader_holds_its_lease_from_the_start() -> None:
    store = MemoryLogStore()
    readers = NamedReaders(store.state, live)
    assert readers.lease("p0") is None
    await readers.open({1}, "slow", start=ReaderPosition("p0", "memory", 5, 50))
    await readers.open({2}, "fast", start=ReaderPosition("p0", "memory", 9, 90))
    await readers.open({2}, "elsewhere", start=ReaderPosition("p1", "memory", 2, 20))
    assert readers.lease("p0") == 5
    restarted = NamedReaders(store.state, live)
    await restarted.load()
    assert restarted.lease("p0") == 5


async def test_a_position_never_moves_back() -> None:
    readers = NamedReaders(MemoryLogStore().state, live)
    reader = await readers.open({1}, "billing", start=START)
    await reader.ack(8, 80)
    await reader.ack(3, 30)
    assert (reader.position.position, reader.position.tick) == (8, 80)
    await reader.ack(3, 90)
    assert (reader.position.position, reader.position.tick) == (8, 90)


async def test_an_ack_of_an_earlier_message_during_a_write_moves_nothing_back() -> None:
    state = SlowStateMap()
    state.gate.set()
    readers = NamedReaders(state, live)
    reader = await readers.open({1}, "billing", start=START)
    state.gate.clear()
    acks = [asyncio.create_task(reader.ack(tick, tick)) for tick in (4, 9, 6)]
    await turns()
    assert reader._wanted.tick == 9
    state.gate.set()
    await asyncio.gather(*acks)
    await reader.ack(5, 5)
    assert reader._wanted.tick == 9
    await reader.ack(9, 10)
    assert (reader.position.position, reader.position.tick, readers.lease("p0")) == (9, 10, 9)


async def test_an_ack_that_came_during_a_write_is_not_taken_for_written() -> None:
    state = SlowStateMap()
    state.gate.set()
    reader = await NamedReaders(state, live).open({1}, "billing", start=START)
    state.gate.clear()
    first = asyncio.create_task(reader.ack(5, 5))
    await turns()
    second = asyncio.create_task(reader.ack(9, 9))
    await turns()
    state.failures = [StorageFailed("no")]
    state.gate.set()
    with pytest.raises(StorageFailed):
        await first
    with pytest.raises(StorageFailed):
        await second
    assert reader.position.tick == 0
    state.gate.clear()
    first = asyncio.create_task(reader.ack(10, 10))
    await turns()
    second = asyncio.create_task(reader.ack(11, 11))
    await turns()
    state.open_once()
    await first
    assert reader.position.tick == 10
    assert not second.done()
    state.gate.set()
    await second


async def test_acks_during_a_write_share_the_next_one_and_return_when_durable() -> None:
    state = SlowStateMap()
    state.gate.set()
    readers = NamedReaders(state, live)
    reader = await readers.open({1}, "billing", start=START)
    state.gate.clear()
    state.writes.clear()
    acks = [asyncio.create_task(reader.ack(tick, tick)) for tick in range(1, 11)]
    await turns()
    assert not any(ack.done() for ack in acks)
    assert readers.lease("p0") == 1, "the lease waits for the disk"
    state.gate.set()
    await asyncio.gather(*acks)
    assert len(state.writes) <= 2
    assert readers.lease("p0") == 10


async def test_write_that_fails_when_nobody_waits_for_it_any_more_leaves_no_traceback() -> None:
    state = SlowStateMap()
    unheard = list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unheard.append(context))
    readers = NamedReaders(state, live)
    state.gate.set()
    reader = await readers.open({1}, "billing", start=START)
    state.gate.clear()
    ack = asyncio.ensure_future(reader.ack(5, 5))
    await turns()
    ack.cancel()
    state.failures.append(Indeterminate("nobody knows"))
    await turns()
    state.open_once()
    await turns()
    assert ack.cancelled()
    del ack  # its frame has the write
    gc.collect()
    assert not unheard


async def test_a_cancelled_ack_leaves_the_others_to_finish() -> None:
    state = SlowStateMap()
    state.gate.set()
    reader = await NamedReaders(state, live).open({1}, "billing", start=START)
    state.gate.clear()
    first, second = (asyncio.create_task(reader.ack(tick, tick)) for tick in (5, 6))
    await turns()
    first.cancel()
    await turns()
    state.gate.set()
    await second
    assert reader.position.tick == 6


async def test_an_ack_that_could_not_be_written_fails_and_can_be_tried_again() -> None:
    state = SlowStateMap()
    state.gate.set()
    reader = await NamedReaders(state, live).open({1}, "billing", start=START)
    state.failures = [StorageFailed("no")]
    with pytest.raises(StorageFailed):
        await reader.ack(5, 5)
    assert reader.position.tick == 0
    await reader.ack(5, 5)
    assert reader.position.tick == 5


async def test_a_name_is_busy_until_its_reader_is_closed() -> None:
    readers = NamedReaders(MemoryLogStore().state, live)
    reader = await readers.open({1}, "billing", start=START)
    await readers.open({2}, "billing", start=START)
    for attempt in (readers.open({1}, "billing", start=START), readers.delete_reader(1, "billing")):
        with pytest.raises(ReaderBusy):
            await attempt
    await reader.close()
    with pytest.raises(OnShutdown):
        await reader.ack(5, 5)
    await readers.open({1}, "billing", start=START)


async def test_a_name_is_busy_until_every_ack_that_came_before_the_close_is_durable() -> None:
    state = SlowStateMap()
    state.gate.set()
    readers = NamedReaders(state, live)
    reader = await readers.open({1}, "billing", start=START)
    state.gate.clear()
    first = asyncio.create_task(reader.ack(5, 5))
    await turns()
    second = asyncio.create_task(reader.ack(6, 6))
    await turns()
    closing = asyncio.create_task(reader.close())
    await turns()
    state.open_once()
    await turns()
    assert not closing.done(), "the second ack has its write under way"
    with pytest.raises(ReaderBusy):
        await readers.open({1}, "billing", start=START)
    state.gate.set()
    await asyncio.gather(first, second, closing)
    assert (await readers.open({1}, "billing", start=START)).position.tick == 6


async def test_a_reader_that_could_not_be_made_leaves_its_name_free() -> None:
    state = SlowStateMap()
    state.gate.set()
    state.failures = [StorageFailed("no")]
    readers = NamedReaders(state, live)
    with pytest.raises(StorageFailed):
        await readers.open({1}, "billing", start=START)
    assert readers.lease("p0") is None
    await readers.open({1}, "billing", start=START)


async def test_a_deleted_reader_is_forgotten_with_its_lease() -> None:
    store = MemoryLogStore()
    readers = NamedReaders(store.state, live)
    await (await readers.open({1}, "billing", start=START)).close()
    assert await readers.delete_reader(1, "billing")
    assert not await readers.delete_reader(1, "billing")
    assert readers.lease("p0") is None
    assert await store.state.scan("reader/") == {}


async def test_a_dropped_collection_takes_its_readers_along() -> None:
    names = {1: "one", 11: "eleven"}
    readers = NamedReaders(MemoryLogStore().state, lambda: names)
    for collection_id in names:
        await readers.open(
            {collection_id}, "billing", start=ReaderPosition("p0", "memory", collection_id, 0)
        )
    assert readers.lease("p0") == 1
    del names[1]
    assert readers.lease("p0") == 11, "nobody can open the others again"
    await readers.forget_dropped()
    assert readers.find({1}, "billing") is None
    assert readers.find({11}, "billing") is not None
    assert readers.lease("p0") == 11


async def test_a_damaged_position_is_corrupt() -> None:
    store = MemoryLogStore()
    await store.state.put({"reader/1/billing": b"\xc1"})
    with pytest.raises(Corrupt, match="reader/1/billing"):
        await NamedReaders(store.state, live).load()


async def test_new_reader_holds_the_log_while_its_position_is_written_or_that_is_cut_short() -> (
    None
):
    state = SlowStateMap()
    readers = NamedReaders(state, live)
    opening = asyncio.get_running_loop().create_task(readers.open({1}, "billing", start=START))
    await turns()
    assert readers.lease("p0") == START.position
    opening.cancel()
    await turns()
    assert readers.lease("p0") == START.position


async def test_a_new_reader_whose_first_position_was_refused_holds_nothing() -> None:
    state = SlowStateMap()
    state.gate.set()
    state.failures.append(StorageFailed("no"))
    readers = NamedReaders(state, live)
    with pytest.raises(StorageFailed):
        await readers.open({1}, "billing", start=START)
    assert readers.lease("p0") is None


async def reader_of(state: SlowStateMap) -> NamedReaders:
    readers = NamedReaders(state, live)
    state.gate.set()
    await (await readers.open({1}, "r", start=START)).close()
    state.gate.clear()
    return readers


async def test_a_deletion_whose_caller_is_cancelled_takes_place_and_next_opening_is_durable() -> (
    None
):
    state = SlowStateMap()
    readers = await reader_of(state)
    deleting = asyncio.ensure_future(readers.delete_reader(1, "r"))
    await turns()
    deleting.cancel()
    await turns()
    with pytest.raises(ReaderBusy):
        await readers.open({1}, "r", start=START)
    state.open_once()
    await turns()
    assert readers.find({1}, "r") is None
    state.gate.set()
    await readers.open({1}, "r", start=START)
    assert await state.get("reader/1/r") is not None


@pytest.mark.parametrize("cut_short", ["cancelled", "failed"])
async def test_a_reader_of_which_nobody_knows_whether_it_is_stored_is_stored_when_it_is_opened(
    cut_short: str,
) -> None:
    state = SlowStateMap()
    readers = NamedReaders(state, live)
    opening = asyncio.ensure_future(readers.open({1}, "r", start=START))
    await turns()
    if cut_short == "cancelled":
        opening.cancel()
    else:
        state.failures.append(Indeterminate("nobody knows"))
    state.open_once()
    await asyncio.wait((opening,))
    assert opening.cancelled() or isinstance(opening.exception(), Indeterminate)
    assert await state.get("reader/1/r") is None
    state.gate.set()
    await readers.open({1}, "r", start=START)
    assert await state.get("reader/1/r") is not None


async def test_reader_whose_deletion_is_in_doubt_holds_the_log_and_is_stored_once_opened() -> None:
    state = SlowStateMap()
    readers = await reader_of(state)
    state.failures.append(Indeterminate("nobody knows"))
    state.gate.set()
    with pytest.raises(Indeterminate):
        await readers.delete_reader(1, "r")
    assert readers.lease("p0") == START.position
    written = len(state.writes)
    await readers.open({1}, "r", start=START)
    assert len(state.writes) == written + 1


# --- moved by somebody else -----------------------------------------------------------------------


def known(readers: NamedReaders) -> KnownReader:
    """Return the only reader."""
    (only,) = readers.known()
    return only


@pytest.mark.parametrize("to", [3, 9], ids=["back", "on"])
async def test_a_move_holds_the_lower_place_until_the_store_has_the_new_one(to: int) -> None:
    state = SlowStateMap()
    state.gate.set()
    readers = NamedReaders(state, live)
    reader = await readers.open({1}, "billing", start=START)
    await reader.ack(5, 5)
    await reader.close()
    state.gate.clear()
    moving = asyncio.create_task(
        readers.move(1, "billing", ReaderPosition("p0", START.wal_name, to, to))
    )
    await turns()
    assert readers.lease("p0") == min(5, to)
    assert known(readers).is_open, "nobody opens it meanwhile"
    state.gate.set()
    await moving
    assert (readers.lease("p0"), known(readers).position.tick) == (to, to)
    assert not known(readers).is_open
    reader = await readers.open({1}, "billing", start=START)
    assert reader.position.tick == to


async def test_a_move_that_failed_leaves_the_reader_where_it_was() -> None:
    state = SlowStateMap()
    state.gate.set()
    readers = NamedReaders(state, live)
    await (await readers.open({1}, "billing", start=START)).close()
    to = ReaderPosition("p0", START.wal_name, 9, 9)
    state.failures = [StorageFailed("no")]
    with pytest.raises(StorageFailed):
        await readers.move(1, "billing", to)
    assert known(readers).position == START
    state.failures = [Indeterminate("who knows")]
    with pytest.raises(Indeterminate):
        await readers.move(1, "billing", to)
    assert readers.lease("p0") == START.position, (
        "it may be in the state, or not: the lower place is held"
    )
    state.failures = [StorageFailed("no")]
    with pytest.raises(StorageFailed):
        await readers.move(1, "billing", ReaderPosition("p0", START.wal_name, 0, 0))
    assert known(readers).position == START, (
        "a move that was refused for certain takes no effect, whatever is in doubt"
    )
    state.writes.clear()
    await readers.open({1}, "billing", start=START)
    assert state.writes, "and written again before it is used"


async def test_a_move_is_refused_while_the_reader_is_open_and_when_there_is_none() -> None:
    readers = NamedReaders(MemoryLogStore().state, live)
    with pytest.raises(ReaderNotFound, match="no reader 'billing'"):
        await readers.move(1, "billing", START)
    assert list(readers.known()) == []
    reader = await readers.open({1}, "billing", start=START)
    with pytest.raises(ReaderBusy):
        await readers.move(1, "billing", START)
    await reader.close()
    await readers.move(1, "billing", START)


async def test_a_reader_of_several_collections_is_moved_and_listed_once_by_any_of_them() -> None:
    readers = NamedReaders(MemoryLogStore().state, live)
    await (await readers.open({1, 2}, "billing", start=START)).close()
    to = ReaderPosition("p0", START.wal_name, 9, 9)
    await readers.move(2, "billing", to)
    assert known(readers) == KnownReader(frozenset({1, 2}), "billing", to, is_open=False)
