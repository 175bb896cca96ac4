"""Where a scan starts: each deliver policy, on logs that were truncated, are empty, or grow
meanwhile.
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scanner.deliver_policy import DeliverPolicy, StartingPoint
from scanner.scanner import Scanner
from tests.scanner.faulty_log import FaultyLog
from tests.scanner.journal import Seen, id_of, read_until, scan, seen, tailed_journal
from wal.entry import LogEntry
from wal.errors import InvalidArgument, Truncated
from wal.position import MemoryMessageId, RocksMessageId

pytestmark = pytest.mark.anyio


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


async def test_all_goes_on_at_earliest_entry_when_it_is_truncated_away_before_first_read() -> None:
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
    ids = [id_of(journal.insert(b"row")) for _ in range(4)]
    assert (
        seen(await read_until(scan(journal, DeliverPolicy.start_from(ids[2])), 4))
        == journal.visible[2:]
    )
    assert (
        seen(await read_until(scan(journal, DeliverPolicy.start_after(ids[2])), 4))
        == journal.visible[3:]
    )


async def test_start_from_the_id_of_a_streamed_transaction_delivers_it_whole() -> None:
    journal = await tailed_journal()
    txn_id = journal.begin()
    journal.body(txn_id, b"one", b"two")
    commit = journal.commit(txn_id)
    scanner = scan(journal, DeliverPolicy.start_from(id_of(commit)))
    assert seen(await read_until(scanner, journal.tick)) == journal.visible


async def test_start_after_a_message_delivers_a_transaction_begun_before_it() -> None:
    journal = await tailed_journal()
    txn_id = journal.begin()
    journal.body(txn_id, b"one")
    between = journal.insert(b"between")
    journal.commit(txn_id)
    scanner = scan(journal, DeliverPolicy.start_after(id_of(between)))
    assert seen(await read_until(scanner, journal.tick)) == journal.visible[1:]


@given(st.integers(0, 12), st.booleans())
async def test_start_after_a_tick_delivers_everything_above_it(
    tick: int, transaction: bool
) -> None:
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


@pytest.mark.parametrize(
    "make", [DeliverPolicy.start_from, DeliverPolicy.start_after], ids=["from", "after"]
)
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


class TruncatedBehindTheRead(FaultyLog):
    """A log that is truncated to `position` as soon as something was read."""

    position = 0

    async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        entries = await super().read(position, bytes_max=bytes_max)
        await self._log.truncate(self.position)
        return entries


@pytest.mark.parametrize(
    "make, kept, is_whole",
    [
        (DeliverPolicy.start_after, 3, True),
        (DeliverPolicy.start_after, 4, False),
        (DeliverPolicy.start_from, 2, True),
        (DeliverPolicy.start_from, 3, False),
    ],
)
async def test_reader_of_a_log_that_is_truncated_while_its_start_is_read_misses_nothing_unsaid(
    make: Callable[[MemoryMessageId], DeliverPolicy], kept: int, is_whole: bool
) -> None:
    journal = await tailed_journal(capacity_bytes=1)
    for _ in range(5):
        journal.insert(b"row")
    log = TruncatedBehindTheRead(journal.log)
    log.position = kept
    scanner = Scanner(log.as_log, journal.tail, make(MemoryMessageId(2)))
    if is_whole:
        await scanner.open()
    else:
        with pytest.raises(Truncated):
            await scanner.open()


async def test_a_tick_from_before_what_is_kept_is_truncated() -> None:
    journal = await tailed_journal()
    for _ in range(5):
        journal.insert(b"row")
    await journal.log.truncate(3)
    with pytest.raises(Truncated):
        await scan(journal, DeliverPolicy.start_after(2)).open()
    await scan(journal, DeliverPolicy.start_after(3)).open()


async def test_a_tick_is_found_in_a_log_that_is_truncated_below_it_meanwhile() -> None:
    journal = await tailed_journal()
    for _ in range(5):
        journal.insert(b"row")
    log = FaultyLog(journal.log)

    async def truncate() -> None:
        await journal.log.truncate(4)

    log.gate = truncate
    scanner = Scanner(log.as_log, journal.tail, DeliverPolicy.start_after(4))
    await scanner.open()
    assert scanner.place == (5, 4)


async def test_latest_is_truncated_when_something_that_came_after_it_is_no_longer_kept() -> None:
    journal = await tailed_journal(capacity_bytes=1)
    journal.insert(b"before")
    scanner = scan(journal, DeliverPolicy.latest())
    for _ in range(4):
        journal.insert(b"after")
    await journal.log.truncate(3)
    with pytest.raises(Truncated) as caught:
        await scanner.open()
    assert caught.value.earliest == MemoryMessageId(3)


async def test_latest_starts_at_the_first_entry_kept_when_only_earlier_ones_are_gone() -> None:
    journal = await tailed_journal(capacity_bytes=1)
    journal.insert(b"before")
    scanner = scan(journal, DeliverPolicy.latest())
    journal.insert(b"after")
    journal.insert(b"after")
    await journal.log.truncate(2)
    assert seen(await read_until(scanner, 3)) == journal.visible[1:]


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


async def test_transaction_begun_before_what_is_kept_is_dropped_by_all_or_truncated() -> None:
    journal = await tailed_journal(capacity_bytes=1)
    txn_id = journal.begin()
    kept = journal.body(txn_id, b"one")
    journal.commit(txn_id)
    journal.insert(b"plain")
    await journal.log.truncate(kept.first_position)
    everything = scan(journal, DeliverPolicy.all())
    assert seen(await read_until(everything, 4)) == [Seen(4, (b"plain",))]
    explicit = scan(journal, DeliverPolicy.start_from(id_of(kept)))
    for _ in range(2):
        with pytest.raises(Truncated):
            await read_until(explicit, 4)
    past_it = scan(journal, StartingPoint(kept.first_position, 3))
    assert seen(await read_until(past_it, 4)) == [Seen(4, (b"plain",))]


async def test_all_starts_behind_a_transaction_whose_begin_is_gone_so_nothing_has_a_hole() -> None:
    journal = await tailed_journal(capacity_bytes=1)
    gone = journal.begin()
    journal.body(gone, b"gone")
    kept = journal.begin()
    journal.insert(b"before")
    journal.commit(gone)
    journal.insert(b"after")
    journal.body(kept, b"kept")
    journal.commit(kept)
    await journal.log.truncate(3)
    scanner = scan(journal, DeliverPolicy.all())
    assert seen(await read_until(scanner, 8)) == journal.visible[2:]
    assert [each.payloads for each in journal.visible[2:]] == [(b"after",), (b"kept",)]


async def test_resumed_scan_reads_nothing_before_position_which_may_be_given_up_meanwhile() -> None:
    journal = await tailed_journal(capacity_bytes=1)
    txn_id = journal.begin()
    journal.body(txn_id, b"whole")
    kept = journal.insert(b"kept")
    journal.commit(txn_id)
    journal.insert(b"after")
    resumed = scan(journal, StartingPoint(kept.first_position, 4))
    await resumed.open()
    await journal.log.truncate(kept.first_position)
    assert seen(await read_until(resumed, 5)) == [Seen(5, (b"after",))]
