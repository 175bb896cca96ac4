"""Readers that catch up near each other read the log once for all of them, and each gets what it
would have read alone.
"""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scanner.deliver_policy import DeliverPolicy, StartingPoint
from scanner.scanner import Scanner
from scanner.source import LogReads
from tests.scanner.faulty_log import Doors, FaultyLog
from tests.scanner.journal import (
    Bounds,
    Journal,
    later_than,
    messages_in,
    read_until,
    seen,
    tailed_journal,
)
from wal import live_tail
from wal.errors import Corrupt, OnShutdown, Truncated
from wal.message import AnyMessage

pytestmark = pytest.mark.anyio

SMALL = Bounds(batch_bytes=300, batch_messages=5)
PATIENCE_S = 60


async def filled(rows: int = 60) -> tuple[Journal, FaultyLog]:
    """Return a journal whose readers have to begin in the log."""
    journal = await tailed_journal(capacity_bytes=1)
    for _ in range(rows):
        journal.insert(b"row")
    return journal, FaultyLog(journal.log)


def scanner_of(journal: Journal, log: FaultyLog, policy: DeliverPolicy | None = None) -> Scanner:
    return Scanner(log.as_log, journal.tail, policy or DeliverPolicy.all(), **SMALL)


async def shared(journal: Journal, log: FaultyLog) -> LogReads:
    """Return reads that are shared, of somebody who catches up."""
    assert journal.tail is not None
    journal.tail.behind.join(journal)
    return LogReads(log.as_log, journal.tail.behind)


async def test_many_readers_that_catch_up_together_read_the_log_as_often_as_one() -> None:
    journal, log = await filled()
    alone = scanner_of(journal, log)
    await read_until(alone, journal.tick)
    await alone.close()
    once = log.reads
    log.reads = 0
    readers = [scanner_of(journal, log) for _ in range(20)]
    found = await asyncio.gather(*[read_until(reader, journal.tick) for reader in readers])
    assert all(seen(messages) == journal.visible for messages in found)
    assert once > 5
    assert log.reads == once
    for reader in readers:
        await reader.close()


async def test_what_somebody_else_has_read_is_delivered_behind_more_than_a_batch_passed_over() -> (
    None
):
    journal, log = await filled()
    # which is all there is
    (await shared(journal, log)).shared.keep(await journal.log.read(1, bytes_max=1 << 20))
    until = journal.entries[-2].time_tick
    resumed = Scanner(log.as_log, journal.tail, StartingPoint(1, until), **SMALL)
    async with asyncio.timeout(PATIENCE_S):  # nothing comes any more that could wake it
        assert seen(await read_until(resumed, journal.tick)) == later_than(journal, until)
    assert not log.reads
    await resumed.close()


Reader = tuple[Scanner, int, list[AnyMessage]]
"""Where it started, and what it got."""


async def read_some(readers: list[Reader], journal: Journal, *, count: int = 5) -> list[Reader]:
    """Let some readers read one batch at the same time; return those for which nothing was
    truncated away.
    """
    behind = [
        each for each in readers[:count] if not each[2] or each[2][-1].time_tick < journal.tick
    ]
    batches = await asyncio.gather(
        *[reader.next_batch() for reader, _, _ in behind], return_exceptions=True
    )
    for each, batch in zip(behind, batches, strict=True):
        if isinstance(batch, Truncated):
            readers = [other for other in readers if other is not each]
            await each[0].close()
        else:
            assert not isinstance(batch, BaseException)
            each[2].extend(messages_in(batch))
    return readers


@given(rng=st.integers(0, 1 << 32).map(random.Random), shared_bytes=st.sampled_from([1, 700, 5000]))
async def test_each_reader_gets_what_it_would_have_read_alone(
    rng: random.Random, shared_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(live_tail, "SHARED_BYTES", shared_bytes)
        journal, log = await filled(30)
        readers = list[Reader]()
        assert journal.tail is not None
        for _ in range(40):
            match rng.choice(["open", "read", "read", "read", "append", "truncate", "term"]):
                case "open":
                    tick = rng.randrange(journal.log.first_position - 1, journal.tick)
                    readers.append(
                        (scanner_of(journal, log, DeliverPolicy.start_after(tick)), tick, [])
                    )
                case "read":
                    at = rng.randrange(len(readers) + 1)
                    readers = await read_some(readers[at:] + readers[:at], journal)
                case "append":
                    journal.insert(b"more")
                case "truncate":
                    await journal.log.truncate(journal.log.first_position + rng.randrange(4))
                case _:
                    journal.tail.behind.clear()
            kept = [entries for _, entries in journal.tail.behind._ranges]
            assert (
                sum(entry.size_bytes for entries in kept for entry in entries) <= shared_bytes
                or len(kept) == 1
            )
        for _ in range(journal.tick):
            readers = await read_some(readers, journal, count=len(readers))
        for reader, tick, messages in readers:
            assert seen(messages) == later_than(journal, tick)
            await reader.close()
        assert journal.tail.behind.size_bytes == 0, "nobody catches up any more"


async def test_a_reader_that_begins_in_the_middle_of_what_was_read_gets_the_rest_of_it() -> None:
    journal, log = await filled()
    reads = await shared(journal, log)
    whole = await reads.read(1, bytes_max=1000)
    assert len(whole) > 3
    assert await reads.read(3, bytes_max=2) == whole[2:]
    assert log.reads == 1


async def test_a_reader_that_asks_for_more_than_was_read_is_not_given_less() -> None:
    """It would come again for the rest, and the log may be truncated meanwhile."""
    journal, log = await filled()
    reads = await shared(journal, log)
    assert len(await reads.read(1, bytes_max=2)) == 1
    assert len(await reads.read(1, bytes_max=1000)) > 3
    assert log.reads == 2


async def test_damage_is_told_to_each_reader_and_kept_for_none() -> None:
    journal, log = await filled()
    log.gate = doors = Doors()
    readers = [scanner_of(journal, log) for _ in range(3)]
    waiting = [asyncio.create_task(reader.next_batch()) for reader in readers]
    for number in range(3):
        log.failures.append(Corrupt(f"damaged, found by reader {number}"))
        doors.open_next()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert sorted(str(outcome)[:26] for outcome in outcomes) == [
        f"damaged, found by reader {n}" for n in range(3)
    ]
    log.gate = None
    assert seen(await read_until(scanner_of(journal, log), journal.tick)) == journal.visible


async def test_a_reader_that_is_closed_while_it_reads_for_others_leaves_the_read_to_them() -> None:
    journal, log = await filled()
    may_read = asyncio.Event()

    async def gate() -> None:
        await may_read.wait()

    log.gate = gate
    first = scanner_of(journal, log)
    second = scanner_of(journal, log)
    waiting = [asyncio.create_task(reader.next_batch()) for reader in (first, second)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert log.reads == 1
    await first.close()
    with pytest.raises(OnShutdown):
        await waiting[0]
    may_read.set()
    assert seen(messages_in(await waiting[1]))
    assert log.reads >= 2


async def test_what_was_truncated_is_gone_although_it_is_in_memory() -> None:
    journal, log = await filled()
    reads = await shared(journal, log)
    await reads.read(1, bytes_max=1000)
    await journal.log.truncate(3)
    with pytest.raises(Truncated):
        await reads.read(2, bytes_max=2)
    assert (await reads.read(3, bytes_max=2))[0].first_position == 3


async def test_a_new_term_forgets_what_was_read_and_what_is_being_read() -> None:
    journal, log = await filled()
    reads = await shared(journal, log)
    await reads.read(1, bytes_max=2)
    log.gate = doors = Doors()
    reading = asyncio.create_task(reads.read(2, bytes_max=2))
    await asyncio.sleep(0)
    assert journal.tail is not None
    journal.tail.start(next_position=journal.log.next_position, confirmed_tick=journal.tick)
    doors.open_next()
    await reading
    assert journal.tail.behind.size_bytes == 0
    log.gate = None
    for position in (1, 2):
        await reads.read(position, bytes_max=2)
    assert log.reads == 4


async def test_nothing_is_kept_for_readers_that_are_up_to_the_tail() -> None:
    journal, log = await filled()
    reader = scanner_of(journal, log)
    assert journal.tail is not None
    await reader.next_batch()
    assert journal.tail.behind.size_bytes > 0
    await read_until(reader, journal.tick)
    journal.insert(b"tailed")
    await read_until(reader, journal.tick)
    assert journal.tail.behind.size_bytes == 0
    await reader.close()


async def test_what_was_used_last_is_kept_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    journal, log = await filled()
    reads = await shared(journal, log)
    (entry,) = await reads.read(1, bytes_max=2)
    monkeypatch.setattr(live_tail, "SHARED_BYTES", 2 * entry.size_bytes)
    # 2 has not been used for the longest time when there is no room for it
    for position in (2, 1, 3):
        await reads.read(position, bytes_max=2)
    before = log.reads
    await reads.read(1, bytes_max=2)
    assert log.reads == before
    await reads.read(2, bytes_max=2)
    assert log.reads == before + 1
