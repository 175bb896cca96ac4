"""The node's calls, over a whole node in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import anyio
import anyio.to_thread
import pyarrow as pa
import pytest

import streamingnode as sn
from interceptors.errors import (
    CollectionNotFound,
    InvalidTransactionState,
    PartitionNotFound,
    SchemaMismatch,
    TransactionExpired,
)
from interceptors.shard.catalog import PARTITIONS_MAX
from spark_sink.errors import TableAhead
from streamingnode import snapshot
from streamingnode.collections import Collection
from streamingnode.node import Node
from streamingnode.snapshot import take_snapshot
from streamingnode.writing.write import nothing_at
from tests.parts_of import WAYS, opened_one_way, parts_of
from tests.streamingnode.append_double import schema_of
from wal.append import AppendGroup, AppendResult
from wal.entry import Visible
from wal.errors import AlreadyExists, InvalidArgument, OnShutdown, StreamingNodeError

pytestmark = pytest.mark.anyio

SCHEMA = schema_of(id=pa.int64(), item=pa.string())


@pytest.fixture(params=WAYS)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with opened_one_way(request.param) as opened:
        await opened.create_collection(
            "orders", SCHEMA, primary_key="id", shards=2, partitions=["eu"]
        )
        yield opened


async def rows_of(node: Node, collection: str = "orders") -> list[dict[str, Any]]:
    table = await node.snapshot(collection)
    return sorted(table.to_pylist(), key=lambda row: str(row))  # noqa: PLW0108


async def test_insert_returns_tick_offsets_and_ids(node: Node) -> None:
    result = await node.insert("orders", [{"id": n, "item": "tea"} for n in range(4)])
    assert sum(count for _, count in result.row_offsets.values()) == 4
    assert result.time_tick <= await node.consistent_tick()
    assert len(result.message_ids) == len(result.row_offsets)
    assert (result.txn_id, result.groups) == (0, ())


@pytest.mark.parametrize("form", ["dicts", "many dicts", "batch", "table"])
async def test_rows_of_any_form_arrive(node: Node, form: str) -> None:
    rows = [{"id": n, "item": f"item {n}"} for n in range(3 if form == "dicts" else 100)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    forms: dict[str, Any] = {
        "dicts": rows,
        "many dicts": rows,
        "batch": table.to_batches()[0],
        "table": table,
    }
    await node.insert("orders", forms[form])
    assert await rows_of(node) == sorted(rows, key=str)


async def test_upsert_replaces_and_insert_of_a_known_key_adds(node: Node) -> None:
    await node.insert("orders", [{"id": 1, "item": "a"}, {"id": 2, "item": "b"}])
    await node.insert("orders", [{"id": 1, "item": "again"}])
    assert len(await rows_of(node)) == 3
    await node.upsert("orders", [{"id": 1, "item": "first"}, {"id": 1, "item": "last"}])
    assert await rows_of(node) == [{"id": 1, "item": "last"}, {"id": 2, "item": "b"}]


async def test_delete_removes_from_every_partition_and_ignores_unknown_keys(node: Node) -> None:
    await node.insert("orders", [{"id": 1, "item": "a"}])
    await node.insert("orders", [{"id": 1, "item": "b"}], partition="eu")
    result = await node.delete("orders", [1, 99])
    assert result.row_offsets == {}
    assert await rows_of(node) == []


@pytest.mark.parametrize("rows", [[], SCHEMA.empty_table()], ids=["list", "table"])
async def test_write_without_rows_does_nothing_and_tells_where_to_read_on(
    node: Node, rows: Any
) -> None:
    before = await node.insert("orders", [{"id": 1, "item": "a"}])
    producer = await node.producer("feed")
    async with node.transaction() as txn:
        await txn.insert("orders", rows)
    nothings = [
        await node.insert("orders", rows),
        await node.upsert("orders", rows),
        await node.delete("orders", []),
        await producer.insert("orders", rows),
        txn.result,
    ]
    after = await node.insert("orders", [{"id": 2, "item": "b"}])
    for nothing in nothings:
        assert nothing is not None
        assert nothing == nothing_at(nothing.time_tick)
        assert before.time_tick <= nothing.time_tick < after.time_tick
        start = sn.DeliverPolicy.start_after(nothing.time_tick)
        async with node.read("orders", start, until=after.time_tick) as messages:
            assert [message.time_tick async for message in messages] == [after.time_tick]


async def test_insert_over_one_group_is_split_and_says_so(node: Node) -> None:
    table = pa.table({"id": list(range(6000)), "item": ["x" * 1000] * 6000}, schema=SCHEMA)
    result = await node.insert("orders", table)
    assert len(result.groups) > 1
    assert [group.time_tick for group in result.groups] == sorted(
        {group.time_tick for group in result.groups}
    )
    assert result.time_tick == result.groups[-1].time_tick
    assert sum(count for _, count in result.row_offsets.values()) == 6000
    assert (await node.snapshot("orders")).num_rows == 6000


async def test_bad_row_among_many_changes_nothing(node: Node) -> None:
    rows: list[dict[str, object]] = [{"id": n, "item": "x" * 1000} for n in range(6000)]
    rows[5999] = {"id": 5999, "item": 1}
    with pytest.raises(SchemaMismatch) as caught:
        await node.insert("orders", rows)
    assert (caught.value.column, caught.value.row) == ("item", 5999)
    assert await rows_of(node) == []


async def test_transaction_over_collections_appears_at_one_tick(node: Node) -> None:
    await node.create_collection("stock", SCHEMA, primary_key="id")
    async with node.transaction() as txn:
        await txn.insert("orders", [{"id": 1, "item": "a"}])
        await txn.upsert("stock", [{"id": 1, "item": "b"}])
    assert txn.result is not None
    for name in ("orders", "stock"):
        async with node.read(
            name, types=[sn.MessageType.INSERT], until=await node.consistent_tick()
        ) as messages:
            assert [message.time_tick async for message in messages] == [txn.result.time_tick]


async def test_transaction_by_id_appears_at_its_commit(node: Node) -> None:
    txn_id = await node.begin_transaction(keepalive_s=60)
    await node.insert("orders", [{"id": 1, "item": "a"}], txn_id=txn_id)
    await node.upsert("orders", [{"id": 2, "item": "b"}], txn_id=txn_id)
    await node.delete("orders", [1], txn_id=txn_id)
    assert await rows_of(node) == []
    result = await node.commit_transaction(txn_id)
    assert result.txn_id == txn_id
    assert await rows_of(node) == [{"id": 2, "item": "b"}]


async def test_transaction_by_id_rolled_back_never_appears(node: Node) -> None:
    txn_id = await node.begin_transaction()
    await node.insert("orders", [{"id": 1, "item": "a"}], txn_id=txn_id)
    await node.rollback_transaction(txn_id)
    with pytest.raises((TransactionExpired, InvalidTransactionState)):
        await node.commit_transaction(txn_id)
    assert await rows_of(node) == []


@pytest.mark.parametrize("keepalive_s", [0, -1, "1"])
async def test_keepalive_of_nothing_is_refused(node: Node, keepalive_s: float) -> None:
    with pytest.raises(InvalidArgument, match="keepalive_s"):
        node.transaction(keepalive_s=keepalive_s)


async def test_unknown_collection_and_partition_are_named(node: Node) -> None:
    for write in (node.insert, node.upsert):
        with pytest.raises(CollectionNotFound, match="nowhere"):
            await write("nowhere", [{"id": 1}])
        with pytest.raises(PartitionNotFound, match="'us'"):
            await write("orders", [{"id": 1, "item": "a"}], partition="us")
    with pytest.raises(CollectionNotFound, match="nowhere"):
        await node.delete("nowhere", [1])
    with pytest.raises(CollectionNotFound, match="nowhere"):
        node.read("nowhere")


async def test_existing_collection_is_taken_only_with_the_same_definition(node: Node) -> None:
    with pytest.raises(AlreadyExists, match="use it as it is"):
        await node.create_collection("orders", SCHEMA, primary_key="id", shards=2)
    found = await node.create_collection(
        "orders", SCHEMA, primary_key="id", shards=2, if_not_exists=True
    )
    assert found == node.collection("orders")
    with pytest.raises(AlreadyExists, match="its own schema"):
        await node.create_collection(
            "orders", schema_of(id=pa.int64()), primary_key="id", shards=2, if_not_exists=True
        )
    with pytest.raises(AlreadyExists, match="2 shards"):
        await node.create_collection(
            "orders", SCHEMA, primary_key="id", shards=3, if_not_exists=True
        )


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"name": "Orders"}, InvalidArgument),
        ({"name": "_orders"}, InvalidArgument),
        ({"partitions": ["../x"]}, InvalidArgument),
        ({"partitions": ["a", "a"]}, InvalidArgument),
        ({"partitions": "eu"}, InvalidArgument),
        ({"shards": 0}, InvalidArgument),
        ({"shards": True}, InvalidArgument),
        ({"shards": 100_000}, InvalidArgument),
        ({"primary_key": "key"}, InvalidArgument),
        ({"schema": schema_of(id=pa.uint8())}, SchemaMismatch),
        ({"schema": schema_of(id=pa.int64(), _tick=pa.int64())}, SchemaMismatch),
    ],
    ids=str,
)
async def test_collection_that_cannot_be_is_refused(
    node: Node, arguments: dict[str, Any], error: type[Exception]
) -> None:
    definition: dict[str, Any] = {"name": "new", "schema": SCHEMA, "primary_key": "id", **arguments}
    with pytest.raises(error):
        await node.create_collection(**definition)
    assert [each.name for each in node.collections()] == ["orders"]


async def test_partitions_come_and_go(node: Node) -> None:
    await node.create_partition("orders", "us")
    await node.create_partition("orders", "us", if_not_exists=True)
    await node.create_partition("orders", "_default", if_not_exists=True)
    with pytest.raises(AlreadyExists, match="'us'"):
        await node.create_partition("orders", "us")
    await node.insert("orders", [{"id": 1, "item": "a"}], partition="us")
    await node.insert("orders", [{"id": 2, "item": "b"}])
    await node.drop_partition("orders", "us")
    await node.drop_partition("orders", "us", if_exists=True)
    assert await rows_of(node) == [{"id": 2, "item": "b"}]
    assert node.collection("orders").partitions == ("_default", "eu")
    with pytest.raises(PartitionNotFound):
        await node.insert("orders", [{"id": 1, "item": "a"}], partition="us")
    with pytest.raises(InvalidArgument, match="cannot be dropped"):
        await node.drop_partition("orders", "_default")


async def test_calls_that_come_together_make_no_more_partitions_than_a_collection_may_have(
    node: Node,
) -> None:
    names = [f"p{number}" for number in range(PARTITIONS_MAX - 2)]
    await node.create_collection("wide", SCHEMA, primary_key="id", partitions=names)
    calls = [node.create_partition("wide", name) for name in ("one", "two", "three")]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert list(map(type, outcomes)) == [NoneType, InvalidArgument, InvalidArgument]
    assert len(node.collection("wide").partitions) == PARTITIONS_MAX


async def test_changes_somebody_else_makes_meanwhile_will_do_when_asked_so(node: Node) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(partial(node.create_partition, "orders", "us", if_not_exists=True))
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(partial(node.drop_partition, "orders", "us", if_exists=True))
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(partial(node.drop_collection, "orders", if_exists=True))
    assert node.collections() == ()


async def create_and_have_it_dropped(node: Node, *, if_not_exists: bool) -> Collection:
    """Return what `create_collection` returns although the collection is gone again before it
    does.
    """
    append = parts_of(node).channel.append

    async def append_and_drop(group: AppendGroup) -> AppendResult:
        result = await append(group)
        if group.messages[0].type is sn.MessageType.CREATE_COLLECTION:
            await node.drop_collection("raced")
        return result

    parts_of(node).channel.append = append_and_drop
    return await node.create_collection(
        "raced", SCHEMA, primary_key="id", if_not_exists=if_not_exists
    )


@pytest.mark.parametrize("if_not_exists", [False, True])
async def test_collection_dropped_before_its_creator_hears_of_it_was_created_all_the_same(
    node: Node, *, if_not_exists: bool
) -> None:
    created = await create_and_have_it_dropped(node, if_not_exists=if_not_exists)
    assert (created.name, created.schema, created.partitions) == ("raced", SCHEMA, ("_default",))
    with pytest.raises(CollectionNotFound):
        node.collection("raced")


async def test_collection_that_others_create_and_drop_again_meanwhile_is_created_when_asked_so(
    node: Node,
) -> None:
    append = parts_of(node).channel.append
    rivals = iter(range(2))

    async def append_after_a_rival(group: AppendGroup) -> AppendResult:
        """Let the first two attempts meet a rival's collection, which is gone when they look for
        it.
        """
        if (
            group.messages[0].type is sn.MessageType.CREATE_COLLECTION
            and next(rivals, None) is not None
        ):
            raise AlreadyExists("a rival's")
        return await append(group)

    parts_of(node).channel.append = append_after_a_rival
    created = await node.create_collection("raced", SCHEMA, primary_key="id", if_not_exists=True)
    assert node.collection("raced") == created


async def test_partition_that_is_made_while_snapshot_begins_is_in_it_with_rest_of_its_transaction(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = parts_of(node).channel
    real = channel.consistent_tick

    async def overtaken() -> int:
        monkeypatch.undo()
        await node.create_partition("orders", "late")
        async with node.transaction() as txn:
            await txn.insert("orders", [{"id": 1, "item": "a"}])
            await txn.insert("orders", [{"id": 2, "item": "b"}], partition="late")
        return await real()

    monkeypatch.setattr(channel, "consistent_tick", overtaken)
    assert (await node.snapshot("orders")).sort_by("id")["id"].to_pylist() == [1, 2]


@pytest.mark.parametrize("flushed", [False, True], ids=["in the log", "in a cut"])
async def test_snapshot_that_a_drop_overtakes_has_no_part_of_what_was_dropped(
    node: Node, *, flushed: bool
) -> None:
    await node.insert("orders", [{"id": 1, "item": "a"}])
    await node.insert("orders", [{"id": 2, "item": "b"}], partition="eu")
    await node.flush()
    await node.insert("orders", [{"id": 3, "item": "c"}], partition="eu")
    known_before = parts_of(node).channel.catalog.collection_by_name("orders")
    await node.drop_partition("orders", "eu")
    if flushed:
        await node.flush()
    assert (
        await take_snapshot(parts_of(node).channel, parts_of(node).flusher, known_before, None)
    )["id"].to_pylist() == [1]
    await node.drop_collection("orders")
    if flushed:
        await node.flush()
    with pytest.raises(CollectionNotFound, match="orders"):
        await take_snapshot(parts_of(node).channel, parts_of(node).flusher, known_before, None)


async def test_consistent_tick_of_collections_is_that_of_the_last_write_to_any_of_them(
    node: Node,
) -> None:
    await node.create_collection("quiet", SCHEMA, primary_key="id", shards=3)
    quiet = await node.insert("quiet", [{"id": key, "item": "q"} for key in range(20)])
    async with node.transaction() as txn:
        await txn.insert("orders", [{"id": 1, "item": "a"}])
    deleted = await node.delete("orders", [1])
    assert txn.result is not None
    assert quiet.time_tick < txn.result.time_tick < deleted.time_tick
    assert await node.consistent_tick(["quiet"]) == quiet.time_tick
    assert await node.consistent_tick(["quiet", "orders"]) == deleted.time_tick
    assert await node.consistent_tick() > deleted.time_tick
    assert len(await node.snapshot("quiet", as_of=await node.consistent_tick(["quiet"]))) == 20
    with pytest.raises(CollectionNotFound):
        await node.consistent_tick(["nowhere"])


@pytest.mark.parametrize("call", ["flush", "consistent_tick"])
async def test_call_that_finds_nothing_to_do_lets_others_run(node: Node, call: str) -> None:
    others_ran = asyncio.Event()
    asyncio.get_running_loop().call_soon(others_ran.set)
    await getattr(node, call)()
    assert others_ran.is_set()


async def test_collection_made_again_is_another_one(node: Node) -> None:
    await node.insert("orders", [{"id": 1, "item": "a"}])
    before = node.collection("orders")
    await node.drop_collection("orders")
    await node.drop_collection("orders", if_exists=True)
    with pytest.raises(CollectionNotFound):
        await node.drop_collection("orders")
    with pytest.raises(CollectionNotFound):
        await node.insert("orders", [{"id": 1, "item": "a"}])
    after = await node.create_collection("orders", schema_of(id=pa.string()), primary_key="id")
    assert after.id != before.id
    await node.insert("orders", [{"id": "one"}])
    assert await rows_of(node) == [{"id": "one"}]


async def test_flush_without_new_rows_makes_no_cut(node: Node) -> None:
    await node.insert("orders", [{"id": 1, "item": "a"}])
    first = await node.flush()
    assert sum(segment.rows for segment in first.segments) == 1
    again = await node.flush()
    assert (again.number, again.tick) == (first.number, first.tick)


async def test_timeout_that_is_no_time_is_refused(node: Node) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        await node.insert("orders", [{"id": 1, "item": "a"}], timeout=0)
    with pytest.raises(InvalidArgument, match="list of names"):
        await node.consistent_tick("orders")


async def test_generous_timeout_changes_nothing(node: Node) -> None:
    await node.insert("orders", [{"id": 1, "item": "a"}], timeout=60)
    await node.upsert("orders", [{"id": 1, "item": "b"}], timeout=60)
    assert await rows_of(node) == [{"id": 1, "item": "b"}]


async def test_every_call_after_the_end_is_refused() -> None:
    async with sn.open_node(None) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
    calls: list[Any] = [
        lambda: node.insert("orders", [{"id": 1, "item": "a"}]),
        lambda: node.upsert("orders", [{"id": 1, "item": "a"}]),
        lambda: node.delete("orders", [1]),
        node.flush,
        lambda: node.snapshot("orders"),
        node.consistent_tick,
        lambda: node.create_collection("more", SCHEMA, primary_key="id"),
        lambda: node.drop_collection("orders"),
        node.begin_transaction,
    ]
    for call in calls:
        with pytest.raises(OnShutdown):
            await call()
    for refused in (node.collections, node.transaction, lambda: node.read("orders")):
        with pytest.raises(OnShutdown):
            refused()


async def test_every_error_has_a_code_and_a_next_step(node: Node) -> None:
    with pytest.raises(StreamingNodeError) as caught:
        await node.insert("nowhere", [{"id": 1}])
    assert caught.value.code == "COLLECTION_NOT_FOUND"
    assert "—" in str(caught.value)


async def test_call_from_a_thread_or_another_loop_is_refused_and_says_what_to_use(
    node: Node,
) -> None:
    calls: list[Callable[[], object]] = [
        node.collections,
        node.statistics,
        lambda: node.collection("orders"),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match=r"use sn\.sync"):
            await anyio.to_thread.run_sync(call)
    with pytest.raises(InvalidArgument, match=r"use sn\.sync"):
        await anyio.to_thread.run_sync(
            anyio.run, partial(node.insert, "orders", [{"id": 1, "item": "a"}])
        )
    assert [each.name for each in node.collections()] == ["orders"]


@pytest.mark.may_block
@pytest.mark.parametrize("cut_meanwhile", [True, False])
async def test_snapshot_whose_table_took_a_newer_cut_meanwhile_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, cut_meanwhile: bool
) -> None:
    async with sn.open_node(tmp_path, cut_interval_s=None, free_bytes_min=0) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        read = snapshot._read_tail
        attempts = 0

        async def overtaken(*arguments: Any, until: int) -> list[Visible]:
            nonlocal attempts
            attempts += 1
            if attempts > 1:
                return await read(*arguments, until=until)
            await node.insert("orders", [{"id": 1, "item": "a"}])
            if cut_meanwhile:
                await node.flush()
            raise TableAhead("the table took a cut that is newer than the checkpoint — read again")

        monkeypatch.setattr(snapshot, "_read_tail", overtaken)
        if cut_meanwhile:
            assert (await node.snapshot("orders")).num_rows == 1
        else:
            with pytest.raises(TableAhead):
                await node.snapshot("orders")
