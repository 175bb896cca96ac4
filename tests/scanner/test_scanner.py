"""What a scan delivers, in which batches, and from where it reads them."""

import asyncio

import pytest

from scanner.deliver_policy import DeliverPolicy, StartingPoint
from scanner.scanner import Scanner
from tests.scanner.faulty_log import FaultyLog
from tests.scanner.journal import (
    SMALL,
    V0,
    V1,
    Bounds,
    Journal,
    Seen,
    batches_until,
    messages_in,
    read_until,
    scan,
    seen,
    tailed_journal,
)
from wal.errors import InvalidArgument
from wal.headers import MessageType
from wal.message import TransactionMessage

pytestmark = pytest.mark.anyio


# --- what it delivers -----------------------------------------------------------------------------


async def test_messages_of_one_entry_come_in_one_batch_even_over_the_bound() -> None:
    journal = await tailed_journal()
    journal.insert(*[b"row"] * 10)
    journal.insert(b"row")
    scanner = Scanner(journal.log, journal.tail, DeliverPolicy.all(), **SMALL)
    first = await scanner.next_batch()
    assert (len(messages_in(first)), first.confirmed_tick) == (10, 1)


async def test_batches_are_bounded_by_messages_and_bytes() -> None:
    journal = await tailed_journal()
    for _ in range(20):
        journal.insert(b"x" * 20)
    for limits in (Bounds(batch_messages=4), Bounds(batch_bytes=400)):
        scanner = Scanner(journal.log, journal.tail, DeliverPolicy.all(), **limits)
        batches = await batches_until(scanner, 20)
        assert max(len(messages_in(batch)) for batch in batches) <= 5
        assert len(batches) >= 5


async def test_stored_ticks_are_confirmed_but_not_delivered() -> None:
    journal = await tailed_journal()
    journal.time_tick()
    scanner = scan(journal, DeliverPolicy.all())
    assert await scanner.next_batch() == ([], 1, 1)


async def test_an_idle_tick_is_an_empty_batch() -> None:
    journal = await tailed_journal()
    journal.insert(b"row")
    scanner = scan(journal, DeliverPolicy.all())
    await read_until(scanner, 1)
    waiting = asyncio.create_task(scanner.next_batch())
    await asyncio.sleep(0)
    journal.idle()
    assert (await waiting)[:2] == ([], 2)


async def test_confirmed_ticks_at_or_below_the_start_are_not_repeated() -> None:
    journal = await tailed_journal()
    for _ in range(5):
        journal.insert(b"row")
    scanner = scan(journal, StartingPoint(1, 5))
    waiting = asyncio.create_task(scanner.next_batch())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    journal.insert(b"new")
    batch = await waiting
    assert (seen(messages_in(batch)), batch.confirmed_tick) == ([Seen(6, (b"new",))], 6)


async def test_only_messages_of_wanted_vchannels_come_and_transactions_come_whole() -> None:
    journal = await tailed_journal()
    journal.insert(b"mine", vchannel=V0)
    journal.insert(b"other", vchannel=V1)
    journal.transaction(b"other transaction", vchannel=V1)
    txn_id = journal.begin()
    journal.body(txn_id, b"one", vchannel=V0)
    journal.body(txn_id, b"two", vchannel=V1)
    journal.commit(txn_id)
    scanner = Scanner(journal.log, journal.tail, DeliverPolicy.all(), vchannels=frozenset({V0}))
    messages = await read_until(scanner, journal.tick)
    assert seen(messages) == [Seen(1, (b"mine",)), Seen(journal.tick, (b"one", b"two"))]


async def test_a_type_filter_lets_transactions_pass() -> None:
    journal = await tailed_journal()
    journal.insert(b"row")
    journal.transaction(b"in a transaction")
    wanted = frozenset({MessageType.DELETE})
    scanner = Scanner(journal.log, journal.tail, DeliverPolicy.all(), types=wanted)
    messages = await read_until(scanner, journal.tick)
    assert [type(message) for message in messages] == [TransactionMessage]


async def test_a_system_type_cannot_be_filtered_by() -> None:
    journal = await tailed_journal()
    with pytest.raises(InvalidArgument, match="COMMIT_TXN"):
        Scanner(journal.log, None, DeliverPolicy.all(), types=frozenset({MessageType.COMMIT_TXN}))


# --- where it reads from --------------------------------------------------------------------------


async def test_a_batch_resumes_at_the_begin_of_the_oldest_open_transaction() -> None:
    journal = await tailed_journal()
    journal.insert(b"before")
    txn_id = journal.begin()
    journal.insert(b"between")
    scanner = scan(journal, DeliverPolicy.all())
    batch = (await batches_until(scanner, 3))[-1]
    assert (batch.confirmed_tick, batch.resume_position) == (3, 2)
    assert scanner.place == (2, 3)
    journal.commit(txn_id)
    batch = (await batches_until(scanner, 4))[-1]
    assert batch.resume_position == 2, "the commit itself may be needed again"


async def test_a_scan_tails_once_the_tail_reaches_back_to_it() -> None:
    journal = await tailed_journal(capacity_bytes=800)
    for _ in range(30):
        journal.insert(b"row")
    scanner = Scanner(journal.log, journal.tail, DeliverPolicy.all(), **SMALL)
    await scanner.next_batch()
    assert scanner.statistics.mode == "catching up"
    await read_until(scanner, 30)
    assert scanner.statistics.mode == "tailing"


async def test_an_evicted_scan_returns_to_the_log_and_then_to_the_tail() -> None:
    journal = await tailed_journal(capacity_bytes=800)
    journal.insert(b"row")
    log = FaultyLog(journal.log)
    scanner = Scanner(log.as_log, journal.tail, DeliverPolicy.all(), **SMALL)
    messages = await read_until(scanner, 1)
    reads = log.reads
    for _ in range(30):
        journal.insert(b"row")
    messages += await read_until(scanner, 31)
    assert seen(messages) == journal.visible
    assert log.reads > reads
    assert scanner.statistics.mode == "tailing"


async def test_a_scan_that_always_finds_something_leaves_others_their_turn() -> None:
    journal = await tailed_journal()
    for _ in range(100):
        journal.insert(b"row")
    scanner = Scanner(
        journal.log, journal.tail, DeliverPolicy.all(), batch_messages=1, batch_bytes=1
    )
    await batches_until(scanner, 5)
    other = asyncio.create_task(asyncio.sleep(0))
    await batches_until(scanner, 10)
    assert other.done()


async def test_an_idle_scan_at_the_end_reads_nothing_from_the_log() -> None:
    journal = await tailed_journal()
    journal.insert(b"row")
    log = FaultyLog(journal.log)
    scanner = Scanner(log.as_log, journal.tail, DeliverPolicy.all())
    await read_until(scanner, 1)
    reads = log.reads
    for _ in range(10):
        journal.idle()
        await read_until(scanner, journal.tick)
    assert log.reads == reads


async def test_without_a_tail_a_scan_follows_the_log() -> None:
    journal = await Journal.create()
    scanner = scan(journal, DeliverPolicy.all())
    waiting = asyncio.create_task(read_until(scanner, 2))
    await asyncio.sleep(0)
    journal.insert(b"a")
    journal.insert(b"b")
    assert seen(await waiting) == journal.visible


async def test_entries_read_from_the_log_before_they_are_published_come_once() -> None:
    journal = await tailed_journal()
    journal.insert(b"a")
    scanner = scan(journal, DeliverPolicy.all())
    await read_until(scanner, 1)
    assert journal.tail is not None
    journal.append_unpublished(b"b")
    behind = Scanner(journal.log, None, DeliverPolicy.all())
    assert seen(await read_until(behind, 2)) == journal.visible
    journal.publish()
    assert seen(await read_until(scanner, 2)) == journal.visible[1:]
