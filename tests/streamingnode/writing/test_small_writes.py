"""Writes of all kinds that wait together are one entry of the log, and each of them is as if it
were alone.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import streamingnode as sn
from interceptors.errors import CollectionNotFound, PartitionNotFound, SchemaMismatch
from streamingnode.config import load_config
from streamingnode.node import Node
from streamingnode.rows import row_shape, to_batches
from streamingnode.writing.target import PLAIN_TEXT_BYTES_MAX
from streamingnode.writing.write import WriteResult
from tests.streamingnode.append_double import schema_of
from tests.streamingnode.writing.held_node import (
    SCHEMA,
    Held,
    Row,
    Writing,
    contents,
    rows,
    start,
    table,
)
from wal.errors import InvalidArgument, StreamingNodeError, TooLarge

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]


async def in_transaction(node: Node, *keys: int) -> WriteResult | None:
    async with node.transaction() as txn:
        await txn.insert("c", rows(*keys))
        await txn.upsert("other", table(*keys))
        await txn.delete("c", [-1])
    return txn.result


async def in_producers_transaction(feed: Any, key: int, sequence: int) -> WriteResult | None:
    async with feed.transaction(sequence=sequence) as txn:
        await txn.insert("c", rows(key))
    return txn.result  # type: ignore[no-any-return]


async def test_writes_of_every_kind_go_together_and_each_is_told_of_its_own_rows(
    held: Held,
) -> None:
    node = held.node
    feed = await node.producer("feed")
    other_feed = await node.producer("other-feed")
    held.hold()
    calls: dict[str, Writing] = {
        "dicts": node.insert("c", rows(1, 2, 3)),
        "a dict": node.insert("c", rows(4)),
        "batch": node.insert("c", table(5, 6).to_batches()[0]),
        "table": node.insert("c", table(7, 8, 9)),
        "upsert": node.upsert("c", rows(10, 11)),
        "upsert of a table": node.upsert("c", table(12)),
        "delete": node.delete("c", [-2]),
        "delete of an array": node.delete("c", pa.array([-3, -4])),
        "partition": node.insert("c", rows(13), partition="eu"),
        "collection": node.insert("other", rows(14)),
        "producer": feed.insert("c", rows(15)),
        "producer's next": feed.upsert("c", rows(16)),
        "sequence": other_feed.insert("c", rows(17), sequence=7),
        "producer's delete": other_feed.delete("c", [-5], sequence=8),
        "transaction": in_transaction(node, 18, 19),
        "producer's transaction": in_producers_transaction(other_feed, 20, 9),
    }
    first, *tasks = await start(node.insert("c", rows(0)), *calls.values())
    held.let_go()
    await first
    results = {name: await task for name, task in zip(calls, tasks, strict=True)}
    assert await held.groups() == [1, len(calls)], "the first goes alone, all others in one entry"

    messages = {message.time_tick: message for message in await held.messages()}
    ids: dict[str, set[int]] = {}
    for name, result in results.items():
        assert result is not None
        if name == "collection":
            continue
        message = messages[result.time_tick]
        assert result.durable
        assert message.message_id in result.message_ids
        bodies = message.bodies or (message,)
        inserts = [body for body in bodies if body.type is sn.MessageType.INSERT]
        offsets = {shard: place for body in inserts for shard, place in body.row_offsets.items()}
        assert offsets == {
            shard: at for shard, at in result.row_offsets.items() if shard in message.vchannels
        }
        ids[name] = {
            row["id"] for body in bodies for row in (body.to_arrow() or pa.table({})).to_pylist()
        }
    del ids["transaction"], ids["upsert"], ids["upsert of a table"]
    assert ids == {
        "dicts": {1, 2, 3},
        "a dict": {4},
        "batch": {5, 6},
        "table": {7, 8, 9},
        "delete": {-2},
        "delete of an array": {-3, -4},
        "partition": {13},
        "producer": {15},
        "producer's next": {16},
        "sequence": {17},
        "producer's delete": {-5},
        "producer's transaction": {20},
    }
    assert len({result.time_tick for result in results.values() if result}) == len(calls)
    taken = [
        message_id for result in results.values() if result for message_id in result.message_ids
    ]
    assert len(set(taken)) == len(taken)
    assert (feed.last_sequence, other_feed.last_sequence) == (2, 9)
    assert (await held.found()).keys() == {*range(14), *range(15, 21)}
    assert (await held.found("other")).keys() == {14, 18, 19}


async def test_row_offsets_of_writes_that_went_together_are_dense_and_in_the_order_of_their_ticks(
    held: Held,
) -> None:
    held.hold()
    keys = [list(range(10 * call, 10 * call + 1 + call % 4)) for call in range(30)]
    calls = [
        held.node.insert("c", rows(*some) if number % 2 else table(*some))
        for number, some in enumerate(keys)
    ]
    tasks = await start(*calls)
    held.let_go()
    results = [await task for task in tasks]
    expected: dict[str, int] = {}
    for result in sorted((each for each in results if each), key=lambda each: each.time_tick):
        for shard, (first, count) in result.row_offsets.items():
            assert first == expected.setdefault(shard, first)
            expected[shard] = first + count
    assert [sum(count for _, count in each.row_offsets.values()) for each in results if each] == [
        *map(len, keys)
    ]
    ticks = [result.time_tick for result in results if result]
    assert ticks == sorted(ticks), "who calls first comes first"


SHAPE = row_shape(SCHEMA, primary_key="id")
BAD: dict[str, Any] = {
    "int out of range": {"id": 1 << 63, "item": "a"},
    "bool for an int": {"id": True, "item": "a"},
    "no key": {"id": None, "item": "a"},
    "float for an int": {"id": 1.0, "item": "a"},
    "lone surrogate": {"id": 100, "item": "\ud800"},
    "number for a text": {"id": 100, "item": 5},
    "column missing": {"item": "a"},
    "column too many": {"id": 100, "item": "a", "more": 1},
    "no dict": ["no dict"],
}


@pytest.mark.parametrize("kind", ["insert", "upsert", "transaction"])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_bad_row_fails_alone_among_others_with_what_arrow_says_of_it(
    held: Held, bad: Row, kind: str
) -> None:
    node = held.node
    misfits = [*rows(50), bad]
    with pytest.raises(StreamingNodeError) as by_arrow:
        to_batches(misfits, SHAPE)

    async def fail() -> WriteResult | None:
        if kind != "transaction":
            return await (node.insert if kind == "insert" else node.upsert)("c", misfits)
        async with node.transaction() as txn:
            await txn.insert("c", rows(51))
            await txn.insert("c", misfits)
        return txn.result

    held.hold()
    first, good, failing, also_good = await start(
        node.insert("c", rows(0)), node.insert("c", rows(1)), fail(), node.upsert("c", rows(2))
    )
    held.let_go()
    with pytest.raises(type(by_arrow.value)) as caught:
        await failing
    assert str(caught.value) == str(by_arrow.value)
    if isinstance(caught.value, SchemaMismatch):
        assert isinstance(by_arrow.value, SchemaMismatch)
        assert (caught.value.row, caught.value.column) == (
            by_arrow.value.row,
            by_arrow.value.column,
        )
    await asyncio.gather(first, good, also_good)
    assert await held.groups() == [1, 2]
    assert (await held.found()).keys() == {0, 1, 2}


async def test_long_texts_and_rows_of_many_bytes_are_written_as_through_arrow(held: Held) -> None:
    texts = [
        "x" * PLAIN_TEXT_BYTES_MAX,
        "x" * (PLAIN_TEXT_BYTES_MAX + 1),
        "é" * PLAIN_TEXT_BYTES_MAX,
        "x" * (2 << 20),
    ]
    held.hold()
    tasks = await start(
        *(held.node.insert("c", [{"id": key, "item": text}]) for key, text in enumerate(texts))
    )
    held.let_go()
    await asyncio.gather(*tasks)
    assert await held.found() == dict(enumerate(texts))


async def test_few_rows_over_one_group_are_split_and_say_so(held: Held) -> None:
    columns: dict[str, pa.DataType] = {f"c{number}": pa.string() for number in range(8)}
    await held.node.create_collection("wide", schema_of(id=pa.int64(), **columns), primary_key="id")
    text = "x" * PLAIN_TEXT_BYTES_MAX
    result = await held.node.insert(
        "wide", [{"id": key, **dict.fromkeys(columns, text)} for key in range(16)]
    )
    assert len(result.groups) == 3
    with pytest.raises(TooLarge, match="one row takes"):
        await held.node.insert("c", [{"id": 1, "item": "x" * (5 << 20)}])
    assert (await held.node.snapshot("wide")).num_rows == 16


async def test_what_is_refused_behind_the_pack_fails_alone(held: Held) -> None:
    node = held.node
    held.hold()
    dropping, good = await start(_drop(node, "other"), node.insert("c", rows(1)))
    gone, also_good, spanning = await start(
        node.insert("other", rows(2)), node.insert("c", rows(3)), in_transaction(node, 4)
    )
    held.let_go()
    await dropping
    await asyncio.gather(good, also_good)
    for task in (gone, spanning):
        with pytest.raises(CollectionNotFound):
            await task
    assert (await held.found()).keys() == {1, 3}


async def _drop(node: Node, name: str) -> None:
    await node.drop_collection(name)


async def test_rows_of_a_partition_that_is_dropped_meanwhile_fail_alone(held: Held) -> None:
    held.hold()

    async def drop() -> None:
        await held.node.drop_partition("c", "eu")

    (dropping,) = await start(drop())
    gone, good = await start(
        held.node.insert("c", rows(1), partition="eu"), held.node.insert("c", rows(2))
    )
    held.let_go()
    await asyncio.gather(dropping, good)
    with pytest.raises(PartitionNotFound):
        await gone
    assert (await held.found()).keys() == {2}


@pytest.mark.parametrize("round_", range(4))
async def test_writes_of_one_key_that_wait_together_end_as_if_one_came_after_the_other(
    held: Held, round_: int
) -> None:
    node = held.node
    expected = dict[int, str | None]()
    kinds: list[Callable[[int], tuple[Writing, str | None]]] = [
        lambda key: (node.upsert("c", [{"id": key, "item": "dict"}]), "dict"),
        lambda key: (
            node.upsert("c", pa.Table.from_pylist([{"id": key, "item": "table"}], SCHEMA)),
            "table",
        ),
        lambda key: (node.delete("c", [key]), None),
        lambda key: (_replace(node, key), "replaced"),
    ]
    held.hold()
    calls: list[Writing] = []
    for key in range(32):
        for turn in range(3):  # every order of kinds comes up for some key
            call, left = kinds[(key // 4**turn + round_ + turn) % len(kinds)](key)
            calls.append(call)
            expected[key] = left
    tasks = await start(node.insert("c", rows(100)), *calls)
    held.let_go()
    await asyncio.gather(*tasks)
    assert await held.groups() == [1, len(calls)]
    assert await held.found() == {100: "tea 100"} | {
        key: item for key, item in expected.items() if item is not None
    }
    await node.flush()
    assert await held.found() == {100: "tea 100"} | {
        key: item for key, item in expected.items() if item is not None
    }


async def _replace(node: Node, key: int) -> WriteResult | None:
    async with node.transaction() as txn:
        await txn.delete("c", [key])
        await txn.insert("c", [{"id": key, "item": "replaced"}])
    return txn.result


async def test_what_a_caller_changes_after_its_call_began_changes_nothing(held: Held) -> None:
    held.hold()
    given = rows(1, 2)
    keys = [-6, -7]
    tasks = await start(
        held.node.insert("c", rows(0)), held.node.insert("c", given), held.node.delete("c", keys)
    )
    given[0]["item"] = "coffee"
    given.append({"id": 3, "item": "x"})
    keys.clear()
    held.let_go()
    await asyncio.gather(*tasks)
    assert await held.found() == {key: f"tea {key}" for key in range(3)}


ARROW: dict[str, Callable[[pa.RecordBatch], Any]] = {
    "batch": lambda batch: batch,
    "table": lambda batch: pa.Table.from_batches([batch]),
    "slice": lambda batch: pa.concat_tables([pa.Table.from_batches([batch.slice(0, 3)])]),
}


@pytest.mark.parametrize("given", ARROW.values(), ids=ARROW)
async def test_what_a_caller_changes_after_it_gave_rows_to_a_transaction_changes_nothing(
    held: Held, given: Callable[[pa.RecordBatch], Any]
) -> None:
    np_keys = pa.array(range(1, 4), pa.int64()).to_numpy().copy()
    batch = pa.record_batch([pa.array(np_keys), pa.array(["a", "b", "c"])], schema=SCHEMA)
    dicts = rows(0)
    keys = [-6]
    async with held.node.transaction() as txn:
        await txn.insert("c", dicts)
        await txn.insert("c", given(batch))
        await txn.delete("c", keys)
        await txn.delete("other", pa.array(np_keys))
        dicts[0]["id"] = 77
        keys[0] = 0
        np_keys[:] = 77
    assert (await held.found()).keys() == {0, 1, 2, 3}
    (message,) = [each for each in await held.messages("other") if each.type is sn.MessageType.TXN]
    assert [body.to_arrow() for body in message.bodies] == [
        pa.table({"id": [1, 2, 3]}, pa.schema([SCHEMA.field("id")]))
    ]


async def test_transaction_of_many_small_writes_that_is_streamed_has_all_of_them() -> None:
    """Together they take less than a group, each by itself they take more."""
    async with sn.open_node(
        None, config=load_config(arguments={"wal.group_bytes_max": 16 << 10})
    ) as node:
        await node.create_collection("c", SCHEMA, primary_key="id")
        async with node.transaction() as txn:
            for key in range(1_000):
                await txn.insert("c", rows(key))
                await txn.upsert("c", rows(key, item="coffee"))
        assert await contents(node) == {key: f"coffee {key}" for key in range(1_000)}


@pytest.mark.parametrize("call", ["insert", "upsert"])
async def test_what_are_no_rows_is_refused_at_once(held: Held, call: str) -> None:
    write = getattr(held.node, call)
    for wrong in ("rows", 5, None, {"id": 1}):
        with pytest.raises((InvalidArgument, SchemaMismatch)):
            await write("c", wrong)
    assert await held.groups() == []
