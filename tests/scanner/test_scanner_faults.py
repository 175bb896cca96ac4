"""Faults of the log, cancelled callers and closed scanners: nothing lost, nothing twice, nobody
left waiting.
"""

import asyncio
import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scanner.deliver_policy import DeliverPolicy
from scanner.scanner import Scanner
from scanner.source import READ_TRIES_MAX
from tests.scanner.faulty_log import Doors, FaultyLog, Pauses
from tests.scanner.journal import (
    SMALL,
    Journal,
    messages_in,
    read_until,
    scan,
    seen,
    tailed_journal,
)
from wal.errors import Corrupt, OnShutdown, StorageFailed
from wal.message import AnyMessage

pytestmark = pytest.mark.anyio


async def test_a_passing_storage_fault_is_retried_from_the_position_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = await Journal.create()
    for _ in range(20):
        journal.insert(b"row")
    log = FaultyLog(journal.log)
    pauses = Pauses()
    scanner = Scanner(log.as_log, None, DeliverPolicy.all(), batch_bytes=300)
    messages = messages_in(await scanner.next_batch())
    monkeypatch.setattr("asyncio.sleep", pauses)
    log.failures = [StorageFailed("reads fail"), OSError("reads fail")]
    messages += await read_until(scanner, 20)
    assert seen(messages) == journal.visible
    assert pauses == [0.1, 0.2]


async def test_a_lasting_storage_fault_reaches_the_caller_who_may_go_on_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = await Journal.create()
    journal.insert(b"row")
    log = FaultyLog(journal.log)
    pauses = Pauses()
    scanner = Scanner(log.as_log, None, DeliverPolicy.all())
    log.failures = [StorageFailed("reads fail")] * READ_TRIES_MAX
    monkeypatch.setattr("asyncio.sleep", pauses)
    with pytest.raises(StorageFailed):
        await scanner.next_batch()
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert seen(await read_until(scanner, 1)) == journal.visible


async def test_damage_ends_the_scan_for_good() -> None:
    journal = await Journal.create()
    journal.insert(b"row")
    log = FaultyLog(journal.log)
    scanner = Scanner(log.as_log, None, DeliverPolicy.all())
    log.failures = [Corrupt("damaged")]
    frames: list[int] = []
    for _ in range(4):
        with pytest.raises(Corrupt) as raised:
            await scanner.next_batch()
        frames.append(len(raised.traceback))
    assert len(set(frames)) == 1, "an error that is raised again keeps the frames of each time"


async def test_what_came_before_an_impossible_commit_is_delivered_before_the_error() -> None:
    journal = await Journal.create()
    txn_id = journal.begin()
    journal.insert(b"before")
    journal.commit(txn_id)
    journal._open[txn_id] = (1, [])
    journal.commit(txn_id)
    journal.insert(b"after")
    scanner = scan(journal, DeliverPolicy.all())
    assert seen(messages_in(await scanner.next_batch())) == journal.visible[:2]
    for _ in range(2):
        with pytest.raises(Corrupt):
            await scanner.next_batch()


async def test_a_cancelled_next_batch_is_returned_by_the_next_call() -> None:
    journal = await Journal.create()
    for _ in range(20):
        journal.insert(b"row")
    log = FaultyLog(journal.log)
    doors = Doors()
    log.gate = doors
    scanner = Scanner(log.as_log, None, DeliverPolicy.all(), **SMALL)
    messages: list[AnyMessage] = []
    cancelled = 0
    while not messages or messages[-1].time_tick < 20:
        attempt = asyncio.create_task(scanner.next_batch())
        for _ in range(3):
            await asyncio.sleep(0)
        attempt.cancel()
        try:
            messages += messages_in(await attempt)
        except asyncio.CancelledError:
            cancelled += 1
            doors.open_next()
            messages += messages_in(await scanner.next_batch())
    assert seen(messages) == journal.visible
    assert cancelled >= 3


@given(st.integers(0, 1 << 32).map(random.Random))
async def test_cancelling_at_any_moment_loses_nothing(rng: random.Random) -> None:
    journal = await tailed_journal(capacity_bytes=800)
    scanner = Scanner(journal.log, journal.tail, DeliverPolicy.all(), **SMALL)
    messages: list[AnyMessage] = []
    for _ in range(40):
        if rng.random() < 0.6:
            journal.insert(b"row")
        attempt = asyncio.create_task(scanner.next_batch())
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        attempt.cancel()
        with suppress(asyncio.CancelledError):
            messages += messages_in(await attempt)
    journal.insert(b"last")
    messages += await read_until(scanner, journal.tick)
    assert seen(messages) == journal.visible
    await scanner.close()


@pytest.mark.parametrize("tailed", [True, False])
async def test_closing_releases_a_waiting_reader(tailed: bool) -> None:
    journal = await (tailed_journal() if tailed else Journal.create())
    journal.insert(b"row")
    scanner = scan(journal, DeliverPolicy.all())
    await read_until(scanner, 1)
    waiting = asyncio.create_task(scanner.next_batch())
    await asyncio.sleep(0)
    await scanner.close()
    await scanner.close()
    with pytest.raises(OnShutdown):
        await waiting
    with pytest.raises(OnShutdown):
        await scanner.next_batch()


async def test_closing_releases_a_reader_that_waits_for_the_disk() -> None:
    journal = await Journal.create()
    journal.insert(b"row")
    log = FaultyLog(journal.log)
    log.gate = Doors()
    for policy in (DeliverPolicy.all(), DeliverPolicy.start_after(0)):
        scanner = Scanner(log.as_log, None, policy)
        waiting = asyncio.create_task(scanner.next_batch())
        for _ in range(5):
            await asyncio.sleep(0)
        await scanner.close()
        with pytest.raises(OnShutdown):
            await waiting
