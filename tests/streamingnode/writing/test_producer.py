"""What a named producer refuses, and how it numbers."""

from collections.abc import AsyncIterator

import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.config import load_config
from streamingnode.writing.producer import NOTE_BYTES_MAX
from tests.streamingnode.append_double import schema_of
from wal.errors import (
    CollectionNotFound,
    InvalidArgument,
    InvalidName,
    OnShutdown,
    Overloaded,
    ProducerFenced,
    SchemaMismatch,
    SequenceTooOld,
    TooLarge,
)
from wal.producer_stamp import SEQUENCE_MAX

pytestmark = pytest.mark.anyio

SCHEMA = schema_of(key=pa.int64(), pad=pa.string())
GROUP_BYTES = 16 << 10


@pytest.fixture
async def node() -> AsyncIterator[sn.Node]:
    settings = {"wal.group_bytes_max": GROUP_BYTES, "producers_max": 2, "results_per_producer_max": 4}
    async with sn.open_node(None, config=load_config(arguments={**settings, "cut_interval_s": None})) as node:
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


async def test_note_is_there_for_the_next_opening_and_only_the_newest_writes_it(node: sn.Node) -> None:
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
    with pytest.raises(InvalidName):
        await node.producer(name)


async def test_producer_of_a_closed_node_is_shut_down_too() -> None:
    async with sn.open_node(None, cut_interval_s=None) as node:
        await node.create_collection("c", SCHEMA, primary_key="key")
        feed = await node.producer("feed")
    with pytest.raises(OnShutdown):
        await feed.insert("c", row(1))
    with pytest.raises(OnShutdown):
        await node.producer("feed")
