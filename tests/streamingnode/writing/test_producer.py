"""What a named producer refuses, and how it numbers."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import anyio
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamingnode as sn
from interceptors.errors import CollectionNotFound, ProducerFenced, SchemaMismatch, SequenceTooOld
from streamingnode.config import load_config
from streamingnode.writing.producer import NOTE_BYTES_MAX, Outstanding
from tests.parts_of import WAYS, opened_one_way, parts_of
from tests.streamingnode.append_double import schema_of
from wal.errors import InvalidArgument, OnShutdown, Overloaded, StorageFull, TooLarge
from wal.position import SEQUENCE_MAX

pytestmark = pytest.mark.anyio

SCHEMA = schema_of(key=pa.int64(), pad=pa.string())
GROUP_BYTES = 16 << 10


@pytest.fixture(params=WAYS)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[sn.Node]:
    settings = {
        "wal.group_bytes_max": GROUP_BYTES,
        "producers.producers_max": 2,
        "producers.results_per_producer_max": 4,
    }
    async with opened_one_way(
        request.param, None, config=load_config(arguments={**settings, "cut_interval_s": None})
    ) as node:
        await node.create_collection("c", SCHEMA, primary_key="key")
        yield node


def row(key: int, pad: str = "") -> list[dict[str, object]]:
    return [{"key": key, "pad": pad}]


@pytest.mark.parametrize("sequence", [0, -1, SEQUENCE_MAX + 1, True, 1.0, "1"], ids=repr)
async def test_sequence_that_is_none_is_refused(node: sn.Node, sequence: int) -> None:
    feed = await node.producer("feed")
    with pytest.raises(InvalidArgument, match="sequence="):
        await feed.insert("c", row(1), sequence=sequence)
    with pytest.raises(InvalidArgument, match="sequence="):
        feed.transaction(sequence=sequence)


async def test_last_sequence_there_is_leaves_none_to_give(node: sn.Node) -> None:
    feed = await node.producer("feed")
    await feed.insert("c", row(1), sequence=SEQUENCE_MAX)
    with pytest.raises(InvalidArgument, match="another producer"):
        await feed.insert("c", row(2))
    assert feed.last_sequence == SEQUENCE_MAX


async def test_sequences_that_are_not_given_go_on_from_the_highest(node: sn.Node) -> None:
    feed = await node.producer("feed")
    await feed.insert("c", row(1))
    await feed.insert("c", row(2), sequence=10)
    await feed.delete("c", [1])
    assert feed.last_sequence == 11
    again = await node.producer("feed")
    await again.upsert("c", row(3))
    assert (again.last_sequence, again.epoch) == (12, 2)


async def test_refused_write_leaves_its_sequence_free(node: sn.Node) -> None:
    feed = await node.producer("feed")
    with pytest.raises(SchemaMismatch):
        await feed.insert("c", [{"key": "one", "pad": ""}], sequence=1)
    with pytest.raises(CollectionNotFound):
        await feed.insert("d", row(1), sequence=1)
    with pytest.raises(TooLarge):
        await feed.insert("c", row(1, "x" * GROUP_BYTES), sequence=1)
    assert feed.last_sequence == 0
    assert (await feed.insert("c", row(1), sequence=1)).message_ids


async def test_write_of_nothing_uses_no_sequence(node: sn.Node) -> None:
    feed = await node.producer("feed")
    assert (await feed.insert("c", [], sequence=5)).message_ids == ()
    async with feed.transaction(sequence=6) as txn:
        pass
    assert txn.result is not None
    assert feed.last_sequence == 0


async def test_write_over_one_group_is_one_transaction_under_one_sequence(node: sn.Node) -> None:
    feed = await node.producer("feed")
    table = pa.table({"key": range(100), "pad": ["x" * 1000] * 100}, schema=SCHEMA)
    for sequence, write in enumerate((feed.insert, feed.upsert), 1):
        first = await write("c", table)
        assert first.txn_id
        assert feed.last_sequence == sequence
        assert await write("c", table, sequence=sequence) == first
    deleted = await feed.delete("c", pa.array(range(100)))
    assert await feed.delete("c", [1], sequence=3) == deleted
    assert (await node.snapshot("c")).num_rows == 0


async def test_repeated_transaction_that_was_streamed_leaves_nothing_open(node: sn.Node) -> None:
    feed = await node.producer("feed")
    results = []
    for _ in range(2):
        async with feed.transaction(sequence=7) as txn:
            for key in range(40):
                await txn.insert("c", row(key, "x" * 1000))
        results.append(txn.result)
    assert results[0] == results[1]
    await node.insert("c", row(99))
    async with node.read("c", until=await node.consistent_tick()) as messages:
        read = [message async for message in messages]
    assert [message.num_rows for message in read if message.bodies] == [40]
    assert read[-1].last_confirmed == read[-1].message_id, "no open transaction holds readers back"


async def test_streamed_transaction_whose_commit_is_refused_holds_nothing_any_more(
    node: sn.Node,
) -> None:
    zombie = await node.producer("feed")
    txn = zombie.transaction(keepalive_s=60)
    for key in range(40):
        await txn.insert("c", row(key, "x" * 1000))
    await node.producer("feed")
    with pytest.raises(ProducerFenced):
        await txn.commit()
    assert parts_of(node).measure().writes.pending_transaction_bytes == 0


async def test_write_that_fell_out_of_the_window_is_refused(node: sn.Node) -> None:
    feed = await node.producer("feed")
    for _ in range(6):
        await feed.insert("c", row(1))
    with pytest.raises(SequenceTooOld) as caught:
        await feed.insert("c", row(1), sequence=2)
    assert caught.value.fields() == {"sequence": 2, "oldest": 3}
    assert (caught.value.code, caught.value.retryable) == ("SEQUENCE_TOO_OLD", "no")
    assert (await node.snapshot("c")).num_rows == 6


async def test_fenced_producer_names_the_newer_epoch(node: sn.Node) -> None:
    zombie = await node.producer("feed")
    await node.producer("feed")
    with pytest.raises(ProducerFenced) as caught:
        await zombie.insert("c", row(1))
    assert caught.value.fields() == {"epoch": 1, "newer_epoch": 2}
    assert (caught.value.code, caught.value.retryable) == ("PRODUCER_FENCED", "no")


async def test_note_is_there_for_the_next_opening_and_only_the_newest_writes_it(
    node: sn.Node,
) -> None:
    zombie = await node.producer("feed")
    assert zombie.note == b""
    await zombie.put_note(b"first")
    feed = await node.producer("feed")
    assert (zombie.note, feed.note) == (b"first", b"first")
    await feed.put_note(b"second")
    with pytest.raises(ProducerFenced):
        await zombie.put_note(b"third")
    assert (await node.producer("feed")).note == b"second"
    await node.delete_producer("feed")
    with pytest.raises(ProducerFenced):
        await feed.put_note(b"fourth")
    assert (await node.producer("feed")).note == b""


@pytest.mark.parametrize("note", ["text", b"x" * (NOTE_BYTES_MAX + 1)], ids=["text", "too long"])
async def test_note_of_another_kind_or_size_is_refused(node: sn.Node, note: bytes) -> None:
    with pytest.raises(InvalidArgument, match="the note"):
        await (await node.producer("feed")).put_note(note)


async def test_deleted_producer_writes_no_more_and_makes_room(node: sn.Node) -> None:
    feed = await node.producer("a")
    await node.producer("b")
    with pytest.raises(Overloaded, match="2 producers"):
        await node.producer("c")
    assert await node.delete_producer("a")
    with pytest.raises(ProducerFenced, match="deleted"):
        await feed.insert("c", row(1))
    assert (await node.producer("c")).last_sequence == 0


@pytest.mark.parametrize("name", ["", "_own", "Feed", "a/b", "a..b", "x" * 129, 7], ids=repr)
async def test_name_outside_the_pattern_is_refused(node: sn.Node, name: str) -> None:
    with pytest.raises(InvalidArgument):
        await node.producer(name)


async def test_producer_of_a_closed_node_is_shut_down_too() -> None:
    async with sn.open_node(None, cut_interval_s=None) as node:
        await node.create_collection("c", SCHEMA, primary_key="key")
        feed = await node.producer("feed")
    with pytest.raises(OnShutdown):
        await feed.insert("c", row(1))
    with pytest.raises(OnShutdown):
        await node.producer("feed")


# --- a first try is never too old, however long it takes (the fixture remembers four results) -----


@pytest.mark.parametrize("is_streamed", [False, True], ids=["at once", "streamed"])
async def test_transaction_block_that_stays_open_while_a_window_passes_is_refused_at_its_commit(
    node: sn.Node, is_streamed: bool
) -> None:
    feed = await node.producer("feed")
    early = feed.transaction(sequence=1)
    async with feed.transaction(sequence=2) as in_time:
        for key in range(40 if is_streamed else 1):
            await early.insert("c", row(key, "x" * 1000))
        await in_time.insert("c", row(99))
        for sequence in range(3, 6):
            await feed.insert("c", row(sequence), sequence=sequence)
    assert await feed.insert("c", row(99), sequence=2) == in_time.result
    await feed.insert("c", row(6), sequence=6)
    with pytest.raises(SequenceTooOld) as caught:
        await early.commit()
    assert caught.value.fields() == {"sequence": 1, "oldest": 3}
    assert feed.last_sequence == 6
    assert (await node.snapshot("c")).num_rows == 5
    assert parts_of(node).measure().writes.pending_transaction_bytes == 0


async def test_sequence_of_a_block_that_is_open_is_not_drawn(node: sn.Node) -> None:
    feed = await node.producer("feed")
    async with feed.transaction(sequence=1) as txn:
        await txn.insert("c", row(1))
        await feed.insert("c", row(2))
    assert feed.last_sequence == 2
    assert (await node.snapshot("c")).num_rows == 2


async def test_transaction_without_a_sequence_gets_it_when_it_commits(node: sn.Node) -> None:
    feed = await node.producer("feed")
    async with feed.transaction() as txn:
        await txn.insert("c", row(0))
        for sequence in range(1, 21):
            first = await feed.insert("c", row(sequence))
            assert feed.last_sequence == sequence
            assert await feed.insert("c", row(sequence), sequence=sequence) == first
    assert feed.last_sequence == 21
    assert txn.result == await feed.insert("c", row(0), sequence=21)


@pytest.mark.parametrize("numbered", [True, False], ids=["sequences given", "sequences drawn"])
async def test_many_tasks_that_each_write_many_rows_are_never_too_old(
    node: sn.Node, numbered: bool
) -> None:
    feed = await node.producer("feed")
    numbers = iter(range(1, 401))

    async def write() -> None:
        for _ in range(10):
            number = next(numbers)
            await feed.insert("c", row(number), sequence=number if numbered else None)

    async with anyio.create_task_group() as tasks:
        for _ in range(40):
            tasks.start_soon(write)
    assert feed.last_sequence == 400, "without gaps"
    assert (await node.snapshot("c")).num_rows == 400


@pytest.mark.parametrize("sequence", [None, 1], ids=["sequence drawn", "sequence given"])
async def test_large_insert_is_in_time_beside_many_small_ones(
    node: sn.Node, sequence: int | None
) -> None:
    feed = await node.producer("feed")
    # over ten groups
    table = pa.table({"key": range(200), "pad": ["x" * 1000] * 200}, schema=SCHEMA)

    async def write_small() -> None:
        for number in range(1000, 1040):
            await feed.insert("c", row(number), sequence=None if sequence is None else number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(feed.insert, "c", table, sequence=sequence))
        tasks.start_soon(write_small)
    assert (await node.snapshot("c")).num_rows == 240


async def test_sequence_below_what_is_forgotten_is_still_too_old(node: sn.Node) -> None:
    feed = await node.producer("feed")
    for number in range(10, 16):
        await feed.insert("c", row(number), sequence=number)
    with pytest.raises(SequenceTooOld):
        await feed.insert("c", row(1), sequence=1)
    transaction = feed.transaction(sequence=10)
    with pytest.raises(SequenceTooOld):
        async with transaction as txn:
            await txn.insert("c", row(10))


# --- what is under way at a time ------------------------------------------------------------------


async def test_write_waits_while_the_oldest_open_one_is_a_window_behind() -> None:
    writes = Outstanding(3)
    places = [await writes.enter(1) for _ in range(3)]
    waiting = asyncio.get_running_loop().create_task(writes.enter(1))
    for place in (1, 2):
        writes.leave(place)
        await asyncio.sleep(0)
    assert not waiting.done(), "the oldest one is still open"
    writes.leave(0)
    assert (places, await waiting) == ([0, 1, 2], 3)


async def test_write_that_comes_later_does_not_overtake_those_that_wait() -> None:
    writes = Outstanding(1)
    await writes.enter(1)
    waiting = asyncio.get_running_loop().create_task(writes.enter(1))
    await asyncio.sleep(0)
    writes.leave(0)  # the one that waits has not run yet
    late = asyncio.get_running_loop().create_task(writes.enter(1))
    assert await waiting == 1
    await asyncio.sleep(0)
    assert not late.done()
    writes.leave(1)
    assert await late == 2


async def test_writes_that_come_while_several_are_let_in_do_not_overtake_them() -> None:
    writes = Outstanding(2)
    order = list[str]()

    async def enter(name: str) -> None:
        await writes.enter(1)
        order.append(name)

    tasks = [asyncio.get_running_loop().create_task(enter(name)) for name in ("a", "b", "c", "d")]
    await asyncio.sleep(0)
    for place in (1, 0):  # the oldest one last: with it, room for both that wait
        writes.leave(place)
    for name in ("late", "later", "latest"):  # one in each turn of the event loop
        tasks.append(asyncio.get_running_loop().create_task(enter(name)))
        await asyncio.sleep(0)
    await asyncio.wait(tasks[:4], timeout=1)
    assert order == ["a", "b", "c", "d"]
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("let_in", [False, True], ids=["while it waits", "as it is let in"])
async def test_cancelled_wait_takes_no_place(let_in: bool) -> None:
    writes = Outstanding(1)
    await writes.enter(1)
    first, second = [asyncio.get_running_loop().create_task(writes.enter(1)) for _ in range(2)]
    await asyncio.sleep(0)
    if let_in:
        writes.leave(0)
    first.cancel()
    await asyncio.sleep(0)
    if not let_in:
        writes.leave(0)
    await second
    assert first.cancelled()


@given(width=st.integers(1, 4), leaving=st.lists(st.integers(0, 10), max_size=30))
def test_open_writes_never_span_more_than_the_width(width: int, leaving: list[int]) -> None:
    async def run() -> None:
        writes = Outstanding(width)
        held = list[int]()
        waiting = list[asyncio.Task[int]]()
        for choice in leaving:
            waiting.append(asyncio.get_running_loop().create_task(writes.enter(1)))
            for _ in range(4):
                await asyncio.sleep(0)
            held += [task.result() for task in waiting if task.done()]
            waiting = [task for task in waiting if not task.done()]
            assert not held or max(held) - min(held) < width
            assert held or not waiting, "somebody is always let in"
            if held:
                writes.leave(held.pop(choice % len(held)))
        for task in waiting:
            task.cancel()

    asyncio.run(run())


async def test_retry_of_a_write_in_the_log_needs_no_room_on_a_full_disk() -> None:
    settings = {"memory.bytes_max": 64 << 10, "cut_interval_s": None}
    async with sn.open_node(None, config=load_config(arguments=settings)) as node:
        await node.create_collection("c", SCHEMA, primary_key="key")
        feed = await node.producer("feed")
        first = await feed.insert("c", row(1), sequence=1)
        with pytest.raises(StorageFull):
            for key in range(100):
                await node.insert("c", row(key, "x" * 2_000))
        with pytest.raises(StorageFull):
            await feed.insert("c", row(2, "x" * 2_000), sequence=2)
        assert await feed.insert("c", row(1, "x" * 2_000), sequence=1) == first
