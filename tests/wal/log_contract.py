"""The contract of a log and of its store in `wal/log.py` as tests: the test module of each store
subclasses `LogContract` and brings `store`.
"""

import asyncio
from collections.abc import Sequence
from itertools import count

import anyio
import pytest

from tests.wal.entries import comparable, stamped
from tests.wal.packed import FakeTarget, insert_group, piece, rows_group, transaction_group
from wal.append import AppendGroup, Pack
from wal.entry import LogEntry
from wal.errors import InvalidArgument, OnShutdown, Truncated
from wal.headers import InsertHeader, MessageType
from wal.log import Log, LogStore
from wal.message import MutableMessage

SMALL = 1
WHOLE_LOG = 1 << 40
_ticks = count(1 << 40)


def stamped_pack(*payloads: bytes, tick: int = 0) -> Pack:
    """Return a pack of one group of messages, one for each payload, stamped as the chain would."""
    messages = [
        MutableMessage(
            type=MessageType.INSERT,
            header=InsertHeader(1, 2, 3, 4),
            vchannel="p0_1v0",
            payload=payload,
            txn_id=1,
        )
        for payload in payloads
    ]
    return stamped(Pack([AppendGroup(messages)]), tick=tick or next(_ticks))


def a_pack_of_rows() -> Pack:
    """Return an insert of two rows on both shards, a transaction of a delete and an insert, and an
    insert.
    """
    target = FakeTarget(vchannels=("p0_1v0", "p0_1v1"))
    deletes = FakeTarget(MessageType.DELETE, vchannels=target.vchannels)
    both = rows_group(piece(target, (0, b"first"), (1, b"second")))
    transaction = transaction_group(piece(deletes, (0, b"key")), piece(target, (0, b"third")))
    return Pack([both, transaction, insert_group(target, data=b"fourth")])


async def append(log: Log, *payloads: bytes, tick: int = 0) -> int:
    """Append one entry, wait until it is synced, and return its first position."""
    ticket = log.append(stamped_pack(*payloads, tick=tick))
    await ticket.durable
    return ticket.first_position


async def fill(log: Log, entries: int, *, messages: int = 1, payload: bytes = b"row") -> None:
    """Append `entries` entries of `messages` messages each, and wait until all are synced."""
    for ticket in [log.append(stamped_pack(*[payload] * messages)) for _ in range(entries)]:
        await ticket.durable


async def read_all(
    log: Log, *, position: int | None = None, bytes_max: int = 4096
) -> list[LogEntry]:
    """Read a log batch by batch to its end."""
    entries: list[LogEntry] = []
    position = log.first_position if position is None else position
    while batch := await log.read(position, bytes_max=bytes_max):
        entries += batch
        position = batch[-1].last_position + 1
    return entries


def payloads_of(entries: Sequence[LogEntry]) -> list[list[bytes]]:
    """Return the payloads of each entry."""
    return [[bytes(message.payload) for message in entry.messages] for entry in entries]


class LogContract:
    """Tests of one store, which the subclass's `store` fixture opens."""

    @pytest.fixture
    async def log(self, store: LogStore) -> Log:
        return await store.open_log("p0")

    async def test_a_new_log_is_empty_and_starts_at_one(self, log: Log) -> None:
        assert (log.first_position, log.next_position, log.durable_position, log.last_tick) == (
            1,
            1,
            0,
            0,
        )
        assert await log.read(1, bytes_max=WHOLE_LOG) == []

    async def test_positions_are_dense_and_an_entry_takes_one_for_each_message(
        self, log: Log
    ) -> None:
        firsts = [await append(log, *[b"x"] * messages) for messages in (1, 3, 1, 2)]
        assert firsts == [1, 2, 5, 6]
        assert (log.next_position, log.durable_position) == (8, 7)

    async def test_an_entry_reads_back_as_it_was_appended(self, log: Log) -> None:
        pack = stamped_pack(b"one", b"", b"three")
        ticket = log.append(pack)
        await ticket.durable
        [entry] = await log.read(1, bytes_max=WHOLE_LOG)
        assert pack.entry is not None
        assert (pack.entry.first_position, pack.entry.last_position) == (ticket.first_position, 3)
        assert comparable(entry) == comparable(pack.entry)
        assert log.last_tick == entry.time_tick

    async def test_packed_rows_read_back_as_they_were_appended(self, log: Log) -> None:
        await append(log, b"before")
        tick = log.last_tick + 10
        pack = stamped(a_pack_of_rows(), tick=tick)
        ticket = pack.ticket = log.append(pack)
        await ticket.durable
        [entry] = await log.read(2, bytes_max=WHOLE_LOG)
        assert pack.entry is not None
        assert comparable(entry) == comparable(pack.entry)
        assert (entry.first_position, entry.last_position) == (2, 8)
        assert (entry.first_tick, entry.time_tick, log.last_tick) == (tick, tick + 2, tick + 2)
        assert await append(log, b"after", tick=tick + 3) == 9
        assert len(await read_all(log)) == 3, "the chain goes on behind it"

    async def test_reading_at_any_position_of_packed_rows_returns_the_whole_entry(
        self, log: Log
    ) -> None:
        for _ in range(3):
            await log.append(stamped(a_pack_of_rows(), tick=log.last_tick + 1)).durable
        for position in range(8, 15):
            entries = await log.read(position, bytes_max=WHOLE_LOG)
            assert [entry.first_position for entry in entries] == [8, 15]

    async def test_reading_inside_an_entry_returns_the_whole_entry(self, log: Log) -> None:
        await fill(log, 3, messages=4)
        for position in range(5, 9):
            [entry, _] = await log.read(position, bytes_max=WHOLE_LOG)
            assert (entry.first_position, entry.last_position) == (5, 8)

    async def test_a_read_stops_after_the_entry_that_reaches_the_bound_and_returns_at_least_one(
        self, log: Log
    ) -> None:
        await fill(log, 5, payload=bytes(1000))
        size = (await log.read(1, bytes_max=SMALL))[0].size_bytes
        assert len(await log.read(1, bytes_max=SMALL)) == 1
        assert len(await log.read(1, bytes_max=2 * size)) == 2
        assert len(await log.read(1, bytes_max=2 * size + 1)) == 3

    async def test_reading_in_batches_returns_every_entry_once(self, log: Log) -> None:
        await fill(log, 50, messages=3, payload=bytes(100))
        entries = await read_all(log, bytes_max=1500)
        assert [entry.first_position for entry in entries] == list(range(1, 151, 3))

    async def test_reading_past_the_end_is_empty(self, log: Log) -> None:
        await fill(log, 2)
        assert await log.read(3, bytes_max=WHOLE_LOG) == []
        assert await log.read(1000, bytes_max=WHOLE_LOG) == []

    async def test_entries_become_durable_in_append_order(self, log: Log) -> None:
        done: list[int] = []
        tickets = [log.append(stamped_pack(bytes(10_000))) for _ in range(300)]
        for ticket in tickets:
            position = ticket.first_position
            ticket.durable.add_done_callback(lambda _, position=position: done.append(position))  # type: ignore[misc]
        await tickets[-1].durable
        await asyncio.sleep(0)
        assert done == list(range(1, 301))

    @pytest.mark.parametrize(
        "back", [0, 1, 1 << 18], ids=["the same", "one below", "a millisecond below"]
    )
    async def test_a_tick_that_does_not_ascend_is_refused_and_leaves_the_log_as_it_was(
        self, log: Log, back: int
    ) -> None:
        await append(log, b"before")
        last = log.last_tick
        with pytest.raises(InvalidArgument, match="not above"):
            log.append(stamped_pack(b"late", b"later", tick=last - back))
        with pytest.raises(InvalidArgument, match="not above"):
            log.append(stamped(a_pack_of_rows(), tick=last - back))
        assert (log.last_tick, log.next_position) == (last, 2)
        await append(log, b"after")
        assert payloads_of(await read_all(log)) == [[b"before"], [b"after"]]

    async def test_a_waiter_wakes_only_beyond_its_position(self, log: Log) -> None:
        async with asyncio.TaskGroup() as tasks:
            near = tasks.create_task(log.wait_beyond(0))
            far = tasks.create_task(log.wait_beyond(1))
            await append(log, b"1")
            await near
            assert not far.done()
            await append(log, b"2")
        await log.wait_beyond(1)

    async def test_a_cancelled_waiter_leaves_the_others_waiting(self, log: Log) -> None:
        async with asyncio.TaskGroup() as tasks:
            other = tasks.create_task(log.wait_beyond(0))
            with anyio.move_on_after(0.001):
                await log.wait_beyond(0)
            assert not other.done()
            await append(log, b"1")

    async def test_an_append_nobody_waits_for_is_there_all_the_same(self, log: Log) -> None:
        ticket = log.append(stamped_pack(b"abandoned"))
        ticket.written.cancel()
        await append(log, b"next")
        assert payloads_of(await read_all(log)) == [[b"abandoned"], [b"next"]]

    async def test_truncating_keeps_the_entry_that_holds_the_position_whole(self, log: Log) -> None:
        await fill(log, 10, messages=3)
        await log.truncate(14)
        assert log.first_position == 13
        entries = await read_all(log)
        assert (entries[0].first_position, entries[0].last_position, len(entries)) == (13, 15, 6)

    async def test_what_somebody_came_to_need_meanwhile_is_kept(self, log: Log) -> None:
        await fill(log, 6)
        await log.truncate(5, needed=lambda: 3)
        assert log.first_position == 1
        await log.truncate(5, needed=lambda: 5)
        assert log.first_position == 5

    async def test_reading_what_was_truncated_names_the_earliest_position(self, log: Log) -> None:
        await fill(log, 10)
        await log.truncate(5)
        with pytest.raises(Truncated) as truncated:
            await log.read(4, bytes_max=WHOLE_LOG)
        assert str(truncated.value.earliest) == f"{log.wal_name}/5"
        assert (await log.read(5, bytes_max=SMALL))[0].first_position == 5

    async def test_truncating_again_or_further_back_changes_nothing(self, log: Log) -> None:
        await fill(log, 10)
        for position in (6, 6, 3, 0):
            await log.truncate(position)
            assert log.first_position == 6
        assert len(await read_all(log)) == 5

    async def test_truncating_everything_keeps_the_last_entry(self, log: Log) -> None:
        await log.truncate(100)
        await fill(log, 4, messages=2)
        await log.truncate(100)
        assert (log.first_position, log.next_position) == (7, 9)
        assert len(await read_all(log)) == 1

    async def test_appending_goes_on_after_truncation(self, log: Log) -> None:
        await fill(log, 3)
        await log.truncate(3)
        assert await append(log, b"after") == 4
        assert payloads_of(await read_all(log)) == [[b"row"], [b"after"]]

    async def test_logs_do_not_see_each_other_whatever_their_names(self, store: LogStore) -> None:
        names = ["p1", "p10", "p", "p1_v0"]
        for name in names:
            await fill(await store.open_log(name), 3, payload=name.encode())
        await (await store.open_log("p1")).truncate(3)
        for name, kept in zip(names, (1, 3, 3, 3), strict=True):
            assert (
                payloads_of(await read_all(await store.open_log(name))) == [[name.encode()]] * kept
            )

    async def test_a_log_is_opened_once(self, store: LogStore) -> None:
        opened = await asyncio.gather(*[store.open_log("p0") for _ in range(3)])
        assert len(set(map(id, opened))) == 1

    async def test_admission_lets_appends_pass_when_there_is_room(self, log: Log) -> None:
        await log.admit(1000)
        await append(log, bytes(1000))

    async def test_a_closed_store_refuses_everything(self, store: LogStore, log: Log) -> None:
        await fill(log, 1)
        await store.close()
        await store.close()
        with pytest.raises(OnShutdown):
            await log.admit(1)
        with pytest.raises(OnShutdown):
            log.append(stamped_pack(b"late"))
        with pytest.raises(OnShutdown):
            await log.read(1, bytes_max=SMALL)
        with pytest.raises(OnShutdown):
            await log.wait_beyond(1)
        with pytest.raises(OnShutdown):
            await log.truncate(1)
        with pytest.raises(OnShutdown):
            await store.promise_tick(1)

    async def test_closing_ends_the_wait_of_readers(self, store: LogStore, log: Log) -> None:
        waiter = asyncio.ensure_future(log.wait_beyond(0))
        await asyncio.sleep(0)
        await store.close()
        with pytest.raises(OnShutdown):
            await waiter

    async def test_closing_writes_what_is_queued(self, store: LogStore, log: Log) -> None:
        tickets = [log.append(stamped_pack(b"row")) for _ in range(20)]
        await store.close()
        assert all(
            ticket.durable.done() and ticket.durable.exception() is None for ticket in tickets
        )
