"""The same promises on the store on disk: scans, resumption and named readers across a reopen."""

import random
from pathlib import Path

import anyio
import pytest

from scanner.deliver_policy import DeliverPolicy, StartingPoint
from scanner.named_reader import NamedReaders, ReaderPosition
from scanner.scanner import Scanner
from tests.scanner.journal import Bounds, Journal, assorted, later_than, put, read_until, seen
from wal.live_tail import LiveTail
from wal.message import AnyMessage
from wal.position import RocksMessageId
from wal.rocks.store import open_rocks_store

pytestmark = pytest.mark.anyio

LIMITS = Bounds(batch_bytes=2000, batch_messages=20)


async def write_schedule(journal: Journal, rng: random.Random, count: int) -> None:
    """Append plain groups and transactions, some packed together, some streamed and overlapping."""
    for number in range(count):
        payload = b"%d" % number
        open_transactions = journal.open_transactions
        match rng.randrange(7):
            case 0:
                journal.transaction(payload, payload)
            case 1:
                journal.begin()
            case 2 if open_transactions:
                journal.body(rng.choice(open_transactions), payload)
            case 3 if open_transactions:
                journal.commit(rng.choice(open_transactions))
            case 4 if open_transactions:
                journal.rollback(rng.choice(open_transactions))
            case 5:
                journal.pack(*assorted(payload, number))
            case _:
                journal.insert(payload, payload)
        if rng.random() < 0.2:
            await journal.synced()
    await journal.synced()


async def follow(scanner: Scanner, messages: list[AnyMessage], tick: int) -> None:
    messages.extend(await read_until(scanner, tick))


async def test_scans_of_the_disk_and_of_the_tail_agree_while_it_is_written(tmp_path: Path) -> None:
    rng = random.Random(20240611)
    store = await open_rocks_store(tmp_path / "data")
    journal = await Journal.create(tail=LiveTail(capacity_bytes=8000), store=store)
    assert journal.tail is not None
    followers = [
        Scanner(journal.log, journal.tail, DeliverPolicy.all(), **LIMITS),
        Scanner(journal.log, None, DeliverPolicy.all(), **LIMITS),
    ]
    got: list[list[AnyMessage]] = [[], []]
    async with anyio.create_task_group() as tasks:
        for messages, follower in zip(got, followers, strict=True):
            tasks.start_soon(follow, follower, messages, 300)
        await write_schedule(journal, rng, 300)  # a tick each at least
    end = journal.insert(b"end").time_tick
    await journal.synced()
    for messages, follower in zip(got, followers, strict=True):
        messages.extend(await read_until(follower, end))
        assert seen(messages) == journal.visible
        await follower.close()
    for message in rng.sample(got[0], 20):
        start = StartingPoint(message.last_confirmed_position, message.time_tick)
        resumed = Scanner(journal.log, journal.tail, start, **LIMITS)
        rest = await read_until(resumed, end) if message.time_tick < end else []
        assert seen(rest) == [each for each in journal.visible if each.tick > message.time_tick]
        await resumed.close()
    await store.close()


async def test_a_named_reader_resumes_after_its_last_ack_when_the_node_is_reopened(
    tmp_path: Path,
) -> None:
    store = await open_rocks_store(tmp_path / "data")
    journal = await Journal.create(store=store)
    readers = NamedReaders(store.state, lambda: {1: "one"})
    reader = await readers.open({1}, "billing", start=ReaderPosition("p0", "rocks", 1, 0))
    await write_schedule(journal, random.Random(5), 60)
    scanner = Scanner(journal.log, None, reader.position.start, **LIMITS)
    messages = await read_until(scanner, journal.tick)
    acked = messages[len(messages) // 2]
    await reader.ack(acked.last_confirmed_position, acked.time_tick)
    await scanner.close()
    await store.close()

    store = await open_rocks_store(tmp_path / "data")
    log = await store.open_log("p0")
    readers = NamedReaders(store.state, lambda: {1: "one"})
    await readers.load()
    assert readers.lease("p0") == acked.last_confirmed_position
    reader = await readers.open({1}, "billing", start=ReaderPosition("p0", "rocks", 1, 0))
    scanner = Scanner(log, None, reader.position.start, **LIMITS)
    rest = [each for each in journal.visible if each.tick > acked.time_tick]
    assert rest
    assert seen(await read_until(scanner, journal.tick)) == rest
    await scanner.close()
    await store.close()


async def test_a_log_truncated_within_a_pack_is_reopened_with_all_of_it(tmp_path: Path) -> None:
    store = await open_rocks_store(tmp_path / "data")
    journal = await Journal.create(store=store)
    journal.insert(b"before")
    entry = journal.pack(put(b"a"), put(b"b", is_transaction=True), put(b"c"))
    journal.insert(b"after")
    await journal.synced()
    await journal.log.truncate(entry.first_position + 2)
    assert journal.log.first_position == entry.first_position
    await store.close()
    store = await open_rocks_store(tmp_path / "data")
    log = await store.open_log("p0")
    for policy, tick in (
        (DeliverPolicy.all(), 1),
        (DeliverPolicy.start_from(RocksMessageId(entry.first_position + 2)), 2),
        (DeliverPolicy.start_after(2), 2),
        (DeliverPolicy.start_after(RocksMessageId(entry.first_position + 2)), 3),
    ):
        scanner = Scanner(log, None, policy)
        assert seen(await read_until(scanner, journal.tick)) == later_than(journal, tick)
        await scanner.close()
    await store.close()


async def test_a_message_id_of_a_reopened_log_starts_where_it_did(tmp_path: Path) -> None:
    store = await open_rocks_store(tmp_path / "data")
    journal = await Journal.create(store=store)
    for _ in range(10):
        journal.insert(b"row", b"row")
    await journal.synced()
    await store.close()
    store = await open_rocks_store(tmp_path / "data")
    log = await store.open_log("p0")
    scanner = Scanner(log, None, DeliverPolicy.start_from(RocksMessageId(8)))
    assert seen(await read_until(scanner, 10)) == journal.visible[3:]
    await scanner.close()
    await store.close()
