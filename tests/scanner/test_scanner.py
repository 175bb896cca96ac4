"""What a reader is promised: order, nothing lost, nothing twice, wherever it starts and whatever it reads from."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import cast

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scanner.deliver_policy import DeliverPolicy
from scanner.patient_read import Retry
from scanner.scanner import ScanLimits, Scanner
from scanner.switchable import Mode
from tests.scanner.journal import V0, V1, Clock, Journal, Seen, batches_until, read_until, seen
from wal.errors import Corrupt, InvalidArgument, OnShutdown, StorageFailed, Truncated
from wal.live_tail import LiveTail
from wal.log import Log
from wal.message import AnyMessage, LogEntry, TransactionMessage
from wal.message_id import MemoryMessageId, RocksMessageId
from wal.message_type import MessageType

pytestmark = pytest.mark.anyio

SMALL = ScanLimits(batch_bytes=300, batch_messages=3)


async def tailed_journal(capacity_bytes: int = 1 << 20) -> Journal:
    return await Journal.create(tail=LiveTail(capacity_bytes=capacity_bytes, clock=Clock()))


def scan(journal: Journal, policy: DeliverPolicy, **options: int) -> Scanner:
    return Scanner(journal.log, journal.tail, policy, **options)  # type: ignore[arg-type]


# --- where a scan starts ----------------------------------------------------------------------------------------------


async def test_all_delivers_everything_then_what_follows() -> None:
    journal = await tailed_journal()
    journal.insert(b"a")
    journal.transaction(b"b", b"c")
    scanner = scan(journal, DeliverPolicy.all())
    assert seen(await read_until(scanner, 2)) == journal.visible
    journal.insert(b"d")
    assert seen(await read_until(scanner, 3)) == journal.visible[2:]
    await scanner.close()


async def test_all_starts_at_the_earliest_entry_kept() -> None:
    journal = await tailed_journal()
    for _ in range(5):
        journal.insert(b"row")
    await journal.log.truncate(3)
    scanner = scan(journal, DeliverPolicy.all())
    assert seen(await read_until(scanner, 5)) == journal.visible[2:]


async def test_all_goes_on_at_the_earliest_entry_when_it_is_truncated_away_before_the_first_read() -> None:
    journal = await tailed_journal(capacity_bytes=1)
    for _ in range(5):
        journal.insert(b"row")
    scanner = scan(journal, DeliverPolicy.all())
    await scanner.open()
    await journal.log.truncate(3)
    assert seen(await read_until(scanner, 5)) == journal.visible[2:]


async def test_latest_delivers_only_what_comes_after_the_scanner_was_made() -> None:
    journal = await tailed_journal()
    journal.insert(b"before")
    scanner = scan(journal, DeliverPolicy.latest())
    journal.insert(b"after")
    assert seen(await read_until(scanner, 2)) == [Seen(2, (b"after",))]


async def test_latest_on_an_empty_log_delivers_the_first_entry() -> None:
    journal = await tailed_journal()
    scanner = scan(journal, DeliverPolicy.latest())
    await scanner.open()
    journal.insert(b"first")
    assert seen(await read_until(scanner, 1)) == [Seen(1, (b"first",))]


async def test_latest_delivers_a_transaction_that_was_open_when_it_started() -> None:
    journal = await tailed_journal()
    txn_id = journal.begin()
    journal.body(txn_id, b"one")
    scanner = scan(journal, DeliverPolicy.latest())
    journal.body(txn_id, b"two")
    journal.commit(txn_id)
    assert seen(await read_until(scanner, journal.tick)) == [Seen(4, (b"one", b"two"))]


async def test_start_from_includes_the_message_and_start_after_does_not() -> None:
    journal = await tailed_journal()
    ids = [journal.insert(b"row").messages[0].message_id for _ in range(4)]
    assert seen(await read_until(scan(journal, DeliverPolicy.start_from(ids[2])), 4)) == journal.visible[2:]
    assert seen(await read_until(scan(journal, DeliverPolicy.start_after(ids[2])), 4)) == journal.visible[3:]


async def test_start_from_the_id_of_a_streamed_transaction_delivers_it_whole() -> None:
    journal = await tailed_journal()
    txn_id = journal.begin()
    journal.body(txn_id, b"one", b"two")
    commit = journal.commit(txn_id)
    scanner = scan(journal, DeliverPolicy.start_from(commit.messages[0].message_id))
    assert seen(await read_until(scanner, journal.tick)) == journal.visible


async def test_start_after_a_message_delivers_a_transaction_begun_before_it() -> None:
    journal = await tailed_journal()
    txn_id = journal.begin()
    journal.body(txn_id, b"one")
    between = journal.insert(b"between")
    journal.commit(txn_id)
    scanner = scan(journal, DeliverPolicy.start_after(between.messages[0].message_id))
    assert seen(await read_until(scanner, journal.tick)) == journal.visible[1:]


@given(st.integers(0, 12), st.booleans())
async def test_start_after_a_tick_delivers_everything_above_it(tick: int, transaction: bool) -> None:
    journal = await tailed_journal()
    txn_id = journal.begin() if transaction else 0
    for _ in range(8):
        journal.insert(b"a", b"b")
        journal.time_tick()
    if transaction:
        journal.commit(txn_id)
    scanner = scan(journal, DeliverPolicy.start_after(tick))
    expected = [each for each in journal.visible if each.tick > tick]
    assert seen(await read_until(scanner, journal.tick)) == expected
    await scanner.close()


async def test_finding_a_tick_reads_a_logarithmic_number_of_entries() -> None:
    journal = await tailed_journal()
    for _ in range(1000):
        journal.insert(b"row")
    log = FaultyLog(journal.log)
    scanner = Scanner(log.as_log, journal.tail, DeliverPolicy.start_after(700))
    await scanner.open()
    assert log.reads <= 11
    assert scanner.place == (701, 700)


async def test_a_tick_in_the_future_delivers_what_is_above_it() -> None:
    journal = await tailed_journal()
    journal.insert(b"a")
    scanner = scan(journal, DeliverPolicy.start_after(2))
    await scanner.open()
    journal.insert(b"at the tick")
    journal.insert(b"above")
    assert seen(await read_until(scanner, 3)) == [Seen(3, (b"above",))]


@pytest.mark.parametrize("make", [DeliverPolicy.start_from, DeliverPolicy.start_after], ids=["from", "after"])
async def test_a_position_below_the_earliest_is_truncated_and_names_it(
    make: Callable[[MemoryMessageId], DeliverPolicy],
) -> None:
    journal = await tailed_journal()
    for _ in range(5):
        journal.insert(b"row")
    await journal.log.truncate(3)
    with pytest.raises(Truncated) as caught:
        await scan(journal, make(MemoryMessageId(2))).next_batch()
    assert caught.value.earliest == MemoryMessageId(3)


async def test_a_tick_from_before_what_is_kept_is_truncated() -> None:
    journal = await tailed_journal()
    for _ in range(5):
        journal.insert(b"row")
    await journal.log.truncate(3)
    with pytest.raises(Truncated):
        await scan(journal, DeliverPolicy.start_after(2)).open()
    await scan(journal, DeliverPolicy.start_after(3)).open()


async def test_an_id_of_another_kind_of_log_is_refused() -> None:
    journal = await tailed_journal()
    journal.insert(b"row")
    with pytest.raises(InvalidArgument, match="memory log"):
        await scan(journal, DeliverPolicy.start_from(RocksMessageId(1))).open()


async def test_an_id_no_message_has_yet_is_refused() -> None:
    journal = await tailed_journal()
    journal.insert(b"row")
    with pytest.raises(InvalidArgument, match="yet"):
        await scan(journal, DeliverPolicy.start_from(MemoryMessageId(3))).open()


@pytest.mark.parametrize("count", [0, 3])
async def test_start_from_the_next_position_delivers_what_comes(count: int) -> None:
    journal = await tailed_journal()
    for _ in range(count):
        journal.insert(b"row")
    scanner = scan(journal, DeliverPolicy.start_from(MemoryMessageId(count + 1)))
    await scanner.open()
    journal.insert(b"next")
    assert seen(await read_until(scanner, count + 1)) == [Seen(count + 1, (b"next",))]


async def test_a_transaction_begun_before_what_is_kept_is_dropped_by_all_and_truncated_for_the_rest() -> None:
    journal = await tailed_journal(capacity_bytes=1)
    txn_id = journal.begin()
    kept = journal.body(txn_id, b"one")
    journal.commit(txn_id)
    journal.insert(b"plain")
    await journal.log.truncate(kept.first_position)
    everything = scan(journal, DeliverPolicy.all())
    assert seen(await read_until(everything, 4)) == [Seen(4, (b"plain",))]
    assert everything.statistics.dropped_commits == 1
    explicit = scan(journal, DeliverPolicy.start_from(kept.messages[0].message_id))
    for _ in range(2):
        with pytest.raises(Truncated):
            await read_until(explicit, 4)
    past_it = scan(journal, DeliverPolicy.start_from(kept.messages[0].message_id), after_tick=3)
    assert seen(await read_until(past_it, 4)) == [Seen(4, (b"plain",))]


# --- what it delivers -------------------------------------------------------------------------------------------------


async def test_messages_of_one_entry_come_in_one_batch_even_over_the_bound() -> None:
    journal = await tailed_journal()
    journal.insert(*[b"row"] * 10)
    journal.insert(b"row")
    scanner = Scanner(journal.log, journal.tail, DeliverPolicy.all(), limits=SMALL)
    first = await scanner.next_batch()
    assert (len(first.messages), first.confirmed_tick) == (10, 1)


async def test_batches_are_bounded_by_messages_and_bytes() -> None:
    journal = await tailed_journal()
    for _ in range(20):
        journal.insert(b"x" * 20)
    for limits in (ScanLimits(batch_messages=4), ScanLimits(batch_bytes=400)):
        scanner = Scanner(journal.log, journal.tail, DeliverPolicy.all(), limits=limits)
        batches = await batches_until(scanner, 20)
        assert max(len(batch.messages) for batch in batches) <= 5
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
    scanner = scan(journal, DeliverPolicy.all(), after_tick=5)
    waiting = asyncio.create_task(scanner.next_batch())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    journal.insert(b"new")
    batch = await waiting
    assert (seen(batch.messages), batch.confirmed_tick) == ([Seen(6, (b"new",))], 6)


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


async def test_messages_can_be_iterated_one_by_one() -> None:
    journal = await tailed_journal()
    journal.insert(b"a", b"b")
    journal.insert(b"c")
    got = []
    async with scan(journal, DeliverPolicy.all()) as scanner:
        async for message in scanner:
            got.append(message)
            if message.time_tick == 2:
                break
    assert seen(got) == journal.visible


# --- where it reads from ----------------------------------------------------------------------------------------------


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
    journal = await tailed_journal(capacity_bytes=300)
    for _ in range(30):
        journal.insert(b"row")
    scanner = Scanner(journal.log, journal.tail, DeliverPolicy.all(), limits=SMALL)
    await scanner.next_batch()
    assert scanner.statistics.mode is Mode.CATCH_UP
    await read_until(scanner, 30)
    assert scanner.statistics.mode is Mode.TAILING


async def test_an_evicted_scan_returns_to_the_log_and_then_to_the_tail() -> None:
    journal = await tailed_journal(capacity_bytes=300)
    journal.insert(b"row")
    scanner = Scanner(journal.log, journal.tail, DeliverPolicy.all(), limits=SMALL)
    messages = await read_until(scanner, 1)
    for _ in range(30):
        journal.insert(b"row")
    messages += await read_until(scanner, 31)
    assert seen(messages) == journal.visible
    assert scanner.statistics.evictions == 1
    assert scanner.statistics.mode is Mode.TAILING


async def test_a_scan_that_always_finds_something_leaves_others_their_turn() -> None:
    journal = await tailed_journal()
    for _ in range(100):
        journal.insert(b"row")
    scanner = Scanner(
        journal.log, journal.tail, DeliverPolicy.all(), limits=ScanLimits(batch_messages=1, batch_bytes=1)
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


# --- faults, cancellation, closing ------------------------------------------------------------------------------------


class FaultyLog:
    """A log whose reads fail as told: `failures` go out first, one for each read."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.failures: list[Exception] = []
        self.reads = 0
        self.gate: Callable[[], Awaitable[None]] | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    @property
    def as_log(self) -> Log:
        return cast("Log", self)

    async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        self.reads += 1
        if self.gate is not None:
            await self.gate()
        if self.failures:
            raise self.failures.pop(0)
        return await self._log.read(position, bytes_max=bytes_max)


async def test_a_passing_storage_fault_is_retried_from_the_position_reached() -> None:
    journal = await Journal.create()
    for _ in range(20):
        journal.insert(b"row")
    log, pauses = FaultyLog(journal.log), Pauses()
    limits = ScanLimits(batch_bytes=300)
    scanner = Scanner(log.as_log, None, DeliverPolicy.all(), limits=limits, sleep=pauses)
    messages = (await scanner.next_batch()).messages
    log.failures = [StorageFailed("reads fail"), OSError("reads fail")]
    messages += await read_until(scanner, 20)
    assert seen(messages) == journal.visible
    assert pauses == [0.1, 0.2]


async def test_a_lasting_storage_fault_reaches_the_caller_who_may_go_on_later() -> None:
    journal = await Journal.create()
    journal.insert(b"row")
    log, pauses = FaultyLog(journal.log), Pauses()
    scanner = Scanner(log.as_log, None, DeliverPolicy.all(), limits=ScanLimits(retry=Retry(tries_max=3)), sleep=pauses)
    log.failures = [StorageFailed("reads fail")] * 3
    with pytest.raises(StorageFailed):
        await scanner.next_batch()
    assert len(pauses) == 2
    assert seen(await read_until(scanner, 1)) == journal.visible


async def test_damage_ends_the_scan_for_good() -> None:
    journal = await Journal.create()
    journal.insert(b"row")
    log = FaultyLog(journal.log)
    scanner = Scanner(log.as_log, None, DeliverPolicy.all())
    log.failures = [Corrupt("damaged")]
    for _ in range(2):
        with pytest.raises(Corrupt):
            await scanner.next_batch()


async def test_what_came_before_an_impossible_commit_is_delivered_before_the_error() -> None:
    journal = await Journal.create()
    txn_id = journal.begin()
    journal.insert(b"before")
    journal.commit(txn_id)
    journal._open[txn_id] = (1, [])
    journal.commit(txn_id)
    journal.insert(b"after")
    scanner = scan(journal, DeliverPolicy.all())
    assert seen((await scanner.next_batch()).messages) == journal.visible[:2]
    for _ in range(2):
        with pytest.raises(Corrupt):
            await scanner.next_batch()


async def test_a_cancelled_next_batch_is_returned_by_the_next_call() -> None:
    journal = await Journal.create()
    for _ in range(10):
        journal.insert(b"row")
    log, doors = FaultyLog(journal.log), Doors()
    log.gate = doors
    scanner = Scanner(log.as_log, None, DeliverPolicy.all(), limits=SMALL)
    messages: list[AnyMessage] = []
    cancelled = 0
    while not messages or messages[-1].time_tick < 10:
        attempt = asyncio.create_task(scanner.next_batch())
        for _ in range(3):
            await asyncio.sleep(0)
        attempt.cancel()
        try:
            messages += (await attempt).messages
        except asyncio.CancelledError:
            cancelled += 1
            doors.open_next()
            messages += (await scanner.next_batch()).messages
    assert seen(messages) == journal.visible
    assert cancelled >= 3


@given(st.randoms(use_true_random=False))
async def test_cancelling_at_any_moment_loses_nothing(rng: random.Random) -> None:
    journal = await tailed_journal(capacity_bytes=400)
    scanner = Scanner(journal.log, journal.tail, DeliverPolicy.all(), limits=SMALL)
    messages: list[AnyMessage] = []
    for _ in range(40):
        if rng.random() < 0.6:
            journal.insert(b"row")
        attempt = asyncio.create_task(scanner.next_batch())
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        attempt.cancel()
        with suppress(asyncio.CancelledError):
            messages += (await attempt).messages
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


class Pauses(list[float]):
    """Sleeps that are written down and take no time."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


class Doors:
    """Holds each read until it is let through."""

    def __init__(self) -> None:
        self._shut: list[asyncio.Future[None]] = []
        self._open = 0

    async def __call__(self) -> None:
        if self._open:
            self._open -= 1
            return
        door = asyncio.get_running_loop().create_future()
        self._shut.append(door)
        await door

    def open_next(self) -> None:
        """Let the read that waits through, or the next one."""
        if self._shut:
            self._shut.pop(0).set_result(None)
        else:
            self._open += 1


# --- the invariants ---------------------------------------------------------------------------------------------------

APPENDS = ["insert", "group", "transaction", "begin", "body", "body", "commit", "rollback", "time_tick", "idle", "late"]
STEPS = st.sampled_from([*APPENDS, "read", "read", "read"])
SCHEDULES = st.integers(0, 80).flatmap(lambda count: st.lists(STEPS, min_size=count, max_size=count))


@settings(max_examples=60)
@given(SCHEDULES, st.integers(100, 1500), st.integers(150, 2000))
async def test_tailing_and_catching_up_deliver_what_the_model_says(
    steps: list[str], capacity_bytes: int, batch_bytes: int
) -> None:
    journal = await tailed_journal(capacity_bytes)
    with anyio.fail_after(30):
        await check_invariants(journal, steps, batch_bytes)


async def check_invariants(journal: Journal, steps: list[str], batch_bytes: int) -> None:
    limits = ScanLimits(batch_bytes=batch_bytes, batch_messages=5)
    follower = Scanner(journal.log, journal.tail, DeliverPolicy.all(), limits=limits)
    batches = []
    for number, step in enumerate(steps):
        apply(journal, step, number)
        if step == "read" and published(journal) > follower.place.after_tick:
            batches.append(await follower.next_batch())
    end = journal.insert(b"end")
    batches += await batches_until(follower, end.time_tick)
    await follower.close()
    messages = [message for batch in batches for message in batch.messages]
    assert seen(messages) == journal.visible

    ticks = [message.time_tick for message in messages]
    assert ticks == sorted(ticks), "I1: ticks ascend"
    confirmed = 0
    for batch in batches:
        assert batch.confirmed_tick > confirmed
        assert all(confirmed < message.time_tick <= batch.confirmed_tick for message in batch.messages), "I2"
        confirmed = batch.confirmed_tick

    catching_up = Scanner(journal.log, None, DeliverPolicy.all(), limits=limits)
    assert await read_until(catching_up, end.time_tick) == messages, "the log and the tail hold the same"
    await catching_up.close()

    for message in messages[::3]:
        policy = DeliverPolicy.start_from(message.last_confirmed)
        resumed = scan(journal, policy, after_tick=message.time_tick)
        rest = seen(await read_until(resumed, end.time_tick)) if message.time_tick < end.time_tick else []
        assert rest == [each for each in journal.visible if each.tick > message.time_tick], "I3"
        await resumed.close()
    for batch in batches:
        later = [message for message in messages if message.time_tick > batch.confirmed_tick]
        begins = [message.begin.position for message in later if isinstance(message, TransactionMessage)]
        assert batch.resume_position <= min(begins, default=batch.resume_position), "a lease there keeps all it needs"
    for batch in batches[:-1]:
        resumed = scan(
            journal,
            DeliverPolicy.start_from(MemoryMessageId(batch.resume_position)),
            after_tick=batch.confirmed_tick,
        )
        rest = seen(await read_until(resumed, end.time_tick))
        assert rest == [each for each in journal.visible if each.tick > batch.confirmed_tick]
        await resumed.close()


def published(journal: Journal) -> int:
    assert journal.tail is not None
    return journal.tail.confirmed_tick


def apply(journal: Journal, step: str, number: int) -> None:
    """Do one step of a schedule; a step that has nothing to work on does nothing."""
    payload = b"%d" % number
    match step:
        case "insert":
            journal.insert(payload)
        case "group":
            journal.insert(payload, payload + b"'", payload + b"''")
        case "transaction":
            journal.transaction(payload, payload + b"'")
        case "begin":
            journal.begin()
        case "body" | "commit" | "rollback" if journal.open_transactions:
            go_on(journal, step, journal.open_transactions[number % len(journal.open_transactions)], payload)
        case "time_tick":
            journal.time_tick()
        case "idle":
            journal.idle()
        case "late":
            journal.append_unpublished(payload)
        case _:
            pass


def go_on(journal: Journal, step: str, txn_id: int, payload: bytes) -> None:
    match step:
        case "body":
            journal.body(txn_id, payload)
        case "commit":
            journal.commit(txn_id)
        case _:
            journal.rollback(txn_id)
