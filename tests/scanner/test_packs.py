"""Entries that hold the writes of many callers: a reader starts, resumes and filters by write,
never by entry.
"""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scanner.deliver_policy import DeliverPolicy, StartingPoint
from scanner.named_reader import NamedReaders, ReaderPosition
from scanner.scanner import Scanner
from tests.scanner.journal import (
    V0,
    V1,
    VCHANNELS,
    Bounds,
    Journal,
    Put,
    PutPiece,
    Seen,
    batches_until,
    id_of,
    later_than,
    messages_in,
    put,
    read_until,
    scan,
    seen,
    tailed_journal,
)
from wal.entry import LogEntry
from wal.errors import Truncated
from wal.headers import MessageType
from wal.live_tail import LiveTail
from wal.memory_store import MemoryLogStore
from wal.message import TransactionMessage
from wal.position import MemoryMessageId

pytestmark = pytest.mark.anyio

Shape = tuple[bool, list[tuple[bool, list[int]]]]
"""Of a write: whether it is a transaction; of its pieces: whether they delete, and the shard of
each row.
"""

PIECES = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=3)),
    min_size=1,
    max_size=3,
)
PACKS = st.lists(
    st.lists(st.tuples(st.booleans(), PIECES), min_size=1, max_size=6), min_size=1, max_size=6
)


def writes_of(shapes: Sequence[Shape], first: int) -> list[Put]:
    """Return writes of these shapes, whose rows are numbered. Rows outside transactions are of one
    kind.
    """
    number = first
    puts = []
    for is_transaction, pieces in shapes:
        made = []
        for is_delete, shards in pieces:
            rows = tuple((shard, b"%d," % (number + at)) for at, shard in enumerate(shards))
            number += len(rows)
            deletes = is_delete if is_transaction else pieces[0][0]
            made.append(PutPiece(rows, MessageType.DELETE if deletes else MessageType.INSERT))
        puts.append(Put(tuple(made), is_transaction))
    return puts


def append(journal: Journal, packs: Sequence[Sequence[Shape]]) -> None:
    """Append packs, and between them what holds the last-confirmed position back, or has no
    rows.
    """
    for number, shapes in enumerate(packs):
        journal.pack(*writes_of(shapes, 1000 * number))
        if number == 0:
            journal.begin()
        elif number == 2:
            journal.time_tick()
            journal.drop()
        elif number == 3:
            journal.body(journal.open_transactions[0], b"streamed")
            journal.commit(journal.open_transactions[0])


def group_positions(entry: LogEntry) -> dict[int, range]:
    """The positions of each group of an entry, by its tick, counted from what was written: begin
    and commit count.
    """
    assert entry.rows is not None
    found = {}
    position = entry.first_position
    for tick, count in zip(entry.rows.ticks.tolist(), entry.rows.counts.tolist(), strict=True):
        found[tick] = range(position, position + count)
        position += count
    return found


# --- where a reader starts ------------------------------------------------------------------------


@pytest.mark.parametrize("tailed", [True, False])
async def test_a_reader_starts_with_or_after_exactly_the_write_whose_id_it_is_given(
    tailed: bool,
) -> None:
    journal = await (tailed_journal() if tailed else Journal.create())
    journal.insert(b"before")
    entry = journal.pack(put(b"a"), put(b"b", b"b'"), put(b"c", is_transaction=True), put(b"d"))
    journal.insert(b"after")
    end = journal.tick
    # One message; two; begin, body and commit; one.
    for tick, offsets in {2: [0], 3: [1, 2], 4: [3, 4, 5], 5: [6]}.items():
        for offset in offsets:
            message_id = MemoryMessageId(entry.first_position + offset)
            from_it = await read_until(scan(journal, DeliverPolicy.start_from(message_id)), end)
            after_it = await read_until(scan(journal, DeliverPolicy.start_after(message_id)), end)
            assert seen(from_it) == later_than(journal, tick - 1)
            assert seen(after_it) == later_than(journal, tick)


@given(PACKS)
async def test_every_position_of_every_pack_starts_the_write_that_holds_it(
    packs: list[list[Shape]],
) -> None:
    journal = await tailed_journal()
    append(journal, packs)
    end = journal.insert(b"end").time_tick
    for entry in journal.entries:
        if entry.rows is None:
            continue
        for tick, positions in group_positions(entry).items():
            message_id = MemoryMessageId(positions[len(positions) // 2])
            scanner = scan(journal, DeliverPolicy.start_from(message_id))
            assert seen(await read_until(scanner, end)) == later_than(journal, tick - 1)
            await scanner.close()


async def test_the_ids_of_packed_messages_are_where_the_log_has_them() -> None:
    journal = await tailed_journal()
    journal.pack(put(b"a"), put(b"b", b"c", is_transaction=True), put(b"d", b"e"))
    messages = await read_until(scan(journal, DeliverPolicy.all()), journal.tick)
    ids = [[body.message_id.position for body in message.bodies] for message in messages]
    assert ids == [[1], [3, 4], [6], [7]]  # 2 is the transaction's begin, 5 its commit
    assert [message.message_id.position for message in messages] == [1, 5, 6, 7]
    assert [message.last_confirmed.position for message in messages] == [1] * 4
    assert [message.txn_id for message in messages] == [0, 2, 0, 0]


# --- where it goes on -----------------------------------------------------------------------------


@given(PACKS, st.integers(0, 1 << 32).map(random.Random), st.integers(200, 3000))
async def test_resuming_after_any_write_of_any_pack_misses_nothing_and_repeats_nothing(
    packs: list[list[Shape]], rng: random.Random, capacity_bytes: int
) -> None:
    journal = await tailed_journal(capacity_bytes)
    append(journal, packs)
    end = journal.insert(b"end").time_tick
    limits = Bounds(batch_bytes=rng.choice([1, 500, 5000]), batch_messages=rng.choice([1, 4, 100]))
    messages = await read_until(
        Scanner(journal.log, journal.tail, DeliverPolicy.all(), **limits), end
    )
    assert seen(messages) == journal.visible
    for message in rng.sample(messages, min(8, len(messages))):
        tick = message.time_tick
        ways = [
            Scanner(
                journal.log, tail, StartingPoint(message.last_confirmed_position, tick), **limits
            )
            for tail in (journal.tail, None)
        ]
        ways += [
            scan(journal, DeliverPolicy.start_after(after)) for after in (message.message_id, tick)
        ]
        for scanner in ways:
            rest = seen(await read_until(scanner, end)) if tick < end else []
            assert rest == later_than(journal, tick)
            await scanner.close()


async def test_named_reader_of_half_a_pack_goes_on_with_the_rest_after_a_restart() -> None:
    store = MemoryLogStore()
    journal = await Journal.create(tail=LiveTail(), store=store)
    journal.insert(b"before")
    entry = journal.pack(put(b"a"), put(b"b"), put(b"c", is_transaction=True), put(b"d"))
    start = ReaderPosition("p0", "memory", 1, 0)
    reader = await NamedReaders(store.state, lambda: {1: "one"}).open({1}, "billing", start=start)
    messages = await read_until(scan(journal, reader.position.start), journal.tick)
    await reader.ack(messages[2].last_confirmed_position, messages[2].time_tick)

    again = NamedReaders(store.state, lambda: {1: "one"})
    await again.load()
    assert again.lease("p0") == entry.first_position, "half of an entry holds all of it"
    reader = await again.open({1}, "billing", start=start)
    scanner = Scanner(journal.log, None, reader.position.start)
    assert seen(await read_until(scanner, journal.tick)) == journal.visible[3:]


# --- what is left of a truncated log --------------------------------------------------------------


async def test_truncation_within_a_pack_keeps_all_of_it() -> None:
    journal = await tailed_journal(capacity_bytes=1)
    journal.insert(b"before")
    entry = journal.pack(put(b"a"), put(b"b"), put(b"c"))
    journal.insert(b"after")
    await journal.log.truncate(entry.first_position + 1)
    assert journal.log.first_position == entry.first_position
    for policy, tick in (
        (DeliverPolicy.all(), 1),
        (DeliverPolicy.start_from(id_of(entry)), 1),
        (DeliverPolicy.start_after(id_of(entry)), 2),
        (DeliverPolicy.start_after(2), 2),
    ):
        assert seen(await read_until(scan(journal, policy), journal.tick)) == later_than(
            journal, tick
        )
    with pytest.raises(Truncated):
        await scan(journal, DeliverPolicy.start_from(MemoryMessageId(1))).open()
    with pytest.raises(Truncated):  # something above the tick may be gone
        await scan(journal, DeliverPolicy.start_after(1)).open()


async def test_all_that_is_kept_begins_with_first_write_of_a_pack_behind_a_lost_transaction() -> (
    None
):
    journal = await tailed_journal(capacity_bytes=1)
    txn_id = journal.begin()
    journal.pack(put(b"between"), put(b"too early"))
    journal.commit(txn_id)
    journal.pack(put(b"first"), put(b"second"))
    await journal.log.truncate(2)
    messages = await read_until(scan(journal, DeliverPolicy.all()), journal.tick)
    assert seen(messages) == journal.visible[-2:]


# --- batches and filters --------------------------------------------------------------------------


async def test_a_pack_comes_in_one_batch_even_over_the_bounds_and_counts_its_messages() -> None:
    journal = await tailed_journal()
    journal.pack(*[put(b"row")] * 7, put(b"row", b"row", b"row"))
    journal.insert(b"row")
    scanner = Scanner(journal.log, journal.tail, DeliverPolicy.all(), batch_messages=2)
    first, second = await batches_until(scanner, journal.tick)
    assert (len(messages_in(first)), first.confirmed_tick, first.resume_position) == (10, 8, 1)
    assert (len(messages_in(second)), second.confirmed_tick) == (1, 9)
    assert scanner.statistics.messages == 11


@given(
    PACKS,
    st.none() | st.sampled_from([{V0}, {V1}, {V0, V1}, set()]),
    st.none() | st.sampled_from([{MessageType.INSERT}, {MessageType.DELETE}]),
    st.integers(0, 10),
)
async def test_a_filter_lets_transactions_pass_whole_and_of_other_writes_what_is_wanted(
    packs: list[list[Shape]],
    vchannels: set[str] | None,
    types: set[MessageType] | None,
    after_tick: int,
) -> None:
    journal = await tailed_journal()
    for number, shapes in enumerate(packs):
        journal.pack(*writes_of(shapes, 1000 * number))
    wanted = VCHANNELS if vchannels is None else vchannels
    expected = []
    for tick, each in journal.puts.items():
        is_there = [part.vchannel in wanted for part in each.parts]
        if each.is_transaction:
            passing = each.parts if any(is_there) else []
        else:
            passing = [part for part, here in zip(each.parts, is_there, strict=True) if here]
            passing = [part for part in passing if types is None or part.kind in types]
        if passing and tick > after_tick:
            expected.append(Seen(tick, tuple(part.payload for part in passing)))
    for tail in (journal.tail, None):
        scanner = Scanner(
            journal.log,
            tail,
            StartingPoint(1, after_tick),
            vchannels=None if vchannels is None else frozenset(vchannels),
            types=None if types is None else frozenset(types),
        )
        messages = await read_until(scanner, journal.tick) if after_tick < journal.tick else []
        assert seen(messages) == expected
        for message in messages:
            assert (
                isinstance(message, TransactionMessage)
                == journal.puts[message.time_tick].is_transaction
            )
        await scanner.close()


@pytest.mark.parametrize("number", range(4))
async def test_one_vchannel_of_a_pack_comes_without_the_writes_of_the_other(number: int) -> None:
    journal = await tailed_journal()
    both = Put((PutPiece(((0, b"mine"), (1, b"not mine"))),))
    whole = Put((PutPiece(((1, b"theirs"),)), PutPiece(((0, b"mine"),))), is_transaction=True)
    journal.pack(
        put(b"a"),
        put(b"b", vchannel=V1),
        both,
        whole,
        put(b"c", vchannel=V1, is_transaction=True),
        put(b"d"),
    )
    expected = [
        Seen(1, (b"a",)),
        Seen(3, (b"mine",)),
        Seen(4, (b"theirs", b"mine")),
        Seen(6, (b"d",)),
    ]
    scanner = Scanner(
        journal.log, journal.tail, StartingPoint(1, number), vchannels=frozenset({V0})
    )
    assert seen(await read_until(scanner, 6)) == [each for each in expected if each.tick > number]


@pytest.mark.parametrize(
    "make", [DeliverPolicy.start_from, DeliverPolicy.start_after], ids=["from", "after"]
)
async def test_a_pack_that_is_not_published_yet_is_found_by_the_ids_in_it(
    make: Callable[[MemoryMessageId], DeliverPolicy],
) -> None:
    journal = await tailed_journal()
    journal.insert(b"before")
    entry = journal.pack(put(b"a"), put(b"b"), put(b"c"), publish=False)
    scanner = scan(journal, make(MemoryMessageId(entry.first_position + 1)))
    await scanner.open()
    journal.publish()
    is_from = make is DeliverPolicy.start_from
    assert seen(await read_until(scanner, journal.tick)) == later_than(journal, 2 if is_from else 3)
