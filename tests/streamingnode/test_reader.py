"""Reading a collection of a whole node in memory: complete, in order, once."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pyarrow as pa
import pytest

import streamingnode as sn
from interceptors.errors import CollectionNotFound
from scanner.deliver_policy import ReaderBusy
from streamingnode.node import Node
from streamingnode.read_message import ReadMessage
from tests.parts_of import WAYS, opened_one_way, parts_of
from tests.streamingnode.append_double import schema_of
from wal.errors import InvalidArgument, OnShutdown
from wal.headers import MessageType
from wal.position import MemoryMessageId, RocksMessageId

pytestmark = pytest.mark.anyio

SCHEMA = schema_of(id=pa.int64(), item=pa.string())
ROWS = [MessageType.INSERT, MessageType.DELETE]


@pytest.fixture(params=WAYS)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with opened_one_way(request.param) as opened:
        await opened.create_collection("orders", SCHEMA, primary_key="id", shards=3)
        await opened.create_collection("stock", SCHEMA, primary_key="id")
        yield opened


async def read_all(node: Node, collection: str = "orders", **options: Any) -> list[ReadMessage]:
    async with node.read(collection, until=await node.consistent_tick(), **options) as messages:
        return [message async for message in messages]


def ids(message: ReadMessage) -> list[int]:
    table = message.to_arrow()
    assert table is not None
    return sorted(map(int, table["id"].to_numpy()))


async def test_insert_over_several_shards_is_one_message_with_all_rows(node: Node) -> None:
    result = await node.insert("orders", [{"id": n, "item": "a"} for n in range(50)])
    (message,) = await read_all(node, types=ROWS)
    assert (message.type, message.num_rows, message.time_tick) == (
        MessageType.INSERT,
        50,
        result.time_tick,
    )
    assert ids(message) == list(range(50))
    assert message.row_offsets == result.row_offsets
    assert message.message_id == result.message_ids[-1]
    assert set(message.vchannels) == set(result.row_offsets)


async def test_delete_has_its_keys_in_a_column_named_as_the_primary_key(node: Node) -> None:
    await node.delete("orders", [1, 2, 3])
    (message,) = await read_all(node, types=ROWS)
    table = message.to_arrow()
    assert table is not None
    assert table.column_names == ["id"]
    assert (message.type, ids(message)) == (MessageType.DELETE, [1, 2, 3])


async def test_transaction_is_one_message_with_this_collections_bodies_in_order(node: Node) -> None:
    async with node.transaction() as txn:
        await txn.insert("stock", [{"id": 7, "item": "other"}])
        await txn.insert("orders", [{"id": n, "item": "a"} for n in range(20)])
        await txn.delete("orders", list(range(5)))
        await txn.insert("orders", [{"id": 100, "item": "b"}])
    (message,) = await read_all(node, types=ROWS)
    assert (message.type, message.num_rows, message.to_arrow()) == (MessageType.TXN, 26, None)
    assert [(body.type.name, body.num_rows) for body in message.bodies] == [
        ("INSERT", 20),
        ("DELETE", 5),
        ("INSERT", 1),
    ]
    assert ids(message.bodies[0]) == list(range(20))
    assert {body.time_tick for body in message.bodies} == {message.time_tick}


async def test_each_insert_of_a_transaction_is_a_body_of_its_own_whatever_shards_its_rows_go_to(
    node: Node,
) -> None:
    changes = [[n] for n in range(8)] + [[10, 11, 12, 13], [14], [15, 16]]
    async with node.transaction() as txn:
        for change in changes:
            await txn.insert("orders", [{"id": n, "item": "a"} for n in change])
        for change in changes:
            await txn.delete("orders", change)
    (message,) = await read_all(node, types=ROWS)
    assert [ids(body) for body in message.bodies] == 2 * changes


async def test_upsert_is_a_transaction_of_a_delete_and_an_insert(node: Node) -> None:
    await node.upsert("orders", [{"id": n, "item": "a"} for n in range(9)])
    (message,) = await read_all(node, types=ROWS)
    assert [(body.type.name, ids(body)) for body in message.bodies] == [
        ("DELETE", list(range(9))),
        ("INSERT", list(range(9))),
    ]


async def test_streamed_transaction_is_read_whole(node: Node) -> None:
    async with node.transaction() as txn:
        for n in range(6):
            await txn.insert("orders", [{"id": n, "item": "x" * 1_000_000}])
    (message,) = await read_all(node, types=ROWS)
    assert (message.type, message.num_rows) == (MessageType.TXN, 6)


async def test_ddl_is_delivered_once_and_the_nodes_own_messages_are_not(node: Node) -> None:
    await node.insert("orders", [{"id": 1, "item": "a"}])
    await node.create_partition("orders", "eu")
    await node.flush()
    kinds = [message.type.name for message in await read_all(node)]
    assert kinds == ["CREATE_COLLECTION", "INSERT", "CREATE_PARTITION"]


async def test_types_leave_out_messages_and_bodies(node: Node) -> None:
    await node.insert("orders", [{"id": 1, "item": "a"}])
    await node.delete("orders", [1])
    await node.upsert("orders", [{"id": 2, "item": "a"}])
    found = await read_all(node, types=[MessageType.DELETE])
    assert [(message.type.name, message.num_rows) for message in found] == [
        ("DELETE", 1),
        ("TXN", 1),
    ]


@pytest.mark.parametrize(
    "types", [[], [MessageType.TXN], [MessageType.TIME_TICK, MessageType.INSERT]]
)
async def test_types_that_cannot_be_filtered_by_are_refused(
    node: Node, types: list[MessageType]
) -> None:
    with pytest.raises(InvalidArgument, match="types"):
        node.read("orders", types=types)


async def test_until_ends_after_everything_at_or_below_it(node: Node) -> None:
    first = await node.insert("orders", [{"id": 1, "item": "a"}])
    await node.insert("orders", [{"id": 2, "item": "a"}])
    async with node.read("orders", until=first.time_tick, types=ROWS) as messages:
        assert [message.time_tick async for message in messages] == [first.time_tick]


async def test_reader_waits_for_what_is_to_come(node: Node) -> None:
    async with node.read("orders", sn.DeliverPolicy.latest()) as messages:
        result = await node.insert("orders", [{"id": 1, "item": "a"}])
        message = await anext(messages)
    assert message.time_tick == result.time_tick


async def test_reader_resumes_after_any_message_without_loss_or_repeat(node: Node) -> None:
    for n in range(5):
        await node.insert("orders", [{"id": n, "item": "a"}])
        await node.upsert("orders", [{"id": n, "item": "b"}])
    everything = await read_all(node)
    for index, message in enumerate(everything):
        for after in (message.message_id, message.time_tick):
            rest = await read_all(node, policy=sn.DeliverPolicy.start_after(after))
            assert [each.time_tick for each in rest] == [
                each.time_tick for each in everything[index + 1 :]
            ]


async def test_ticks_come_only_when_asked_for(node: Node) -> None:
    await node.insert("orders", [{"id": 1, "item": "a"}])
    await node.insert("stock", [{"id": 1, "item": "a"}])
    until = await node.consistent_tick()
    async with node.read("orders", until=until, include_ticks=True) as messages:
        found = [message async for message in messages]
    assert found[-1].type is MessageType.TIME_TICK
    assert found[-1].time_tick == until
    ticks = [message.time_tick for message in found]
    assert ticks == sorted(set(ticks))


async def test_named_reader_starts_after_the_last_acknowledged_message(node: Node) -> None:
    for n in range(4):
        await node.insert("orders", [{"id": n, "item": "a"}])
    async with node.read("orders", name="billing", types=ROWS) as messages:
        first = await anext(messages)
        second = await anext(messages)
        await messages.ack(second)
        await messages.ack(first)  # it only moves forward
    rest = await read_all(node, name="billing", types=ROWS)
    assert [ids(message) for message in rest] == [[2], [3]]


async def test_an_ack_of_another_kind_of_log_is_refused(node: Node) -> None:
    await node.insert("orders", [{"id": 1, "item": "a"}])
    async with node.read("orders", name="billing", types=ROWS) as messages:
        message = await anext(messages)
        kind = (
            RocksMessageId
            if isinstance(message.last_confirmed, MemoryMessageId)
            else MemoryMessageId
        )
        with pytest.raises(InvalidArgument, match="not delivered by this reader"):
            await messages.ack(msgspec.structs.replace(message, last_confirmed=kind(1)))
    assert len(await read_all(node, name="billing", types=ROWS)) == 1


async def test_new_named_reader_keeps_the_place_where_it_was_opened(node: Node) -> None:
    await node.insert("orders", [{"id": 1, "item": "a"}])
    async with node.read("orders", sn.DeliverPolicy.latest(), name="billing"):
        pass
    await node.insert("orders", [{"id": 2, "item": "a"}])
    found = await read_all(node, name="billing", types=ROWS)
    assert [ids(message) for message in found] == [[2]]


async def test_name_in_use_is_busy_and_free_again_after_closing(node: Node) -> None:
    async with node.read("orders", name="billing"):
        with pytest.raises(ReaderBusy):
            async with node.read("orders", name="billing"):
                pytest.fail("not reached")
    async with node.read("orders", name="billing"):
        pass
    with pytest.raises(InvalidArgument, match="reader name"):
        node.read("orders", name="Billing")


async def test_ack_needs_a_name(node: Node) -> None:
    await node.insert("orders", [{"id": 1, "item": "a"}])
    async with node.read("orders") as messages:
        with pytest.raises(InvalidArgument, match="name="):
            await messages.ack(await anext(messages))


async def test_an_ack_of_what_another_reader_delivered_and_this_one_did_not_is_refused(
    node: Node,
) -> None:
    for n in range(2):
        await node.insert("orders", [{"id": n, "item": "a"}])
    async with node.read("orders", name="billing", types=ROWS) as messages:
        await anext(messages)
        last = await node.insert("orders", [{"id": 2, "item": "a"}])
        (message,) = await read_all(node, policy=sn.DeliverPolicy.start_from(last.message_ids[0]))
        with pytest.raises(InvalidArgument, match="not delivered by this reader"):
            await messages.ack(message)
        assert [ids(await anext(messages)) for _ in range(2)] == [[1], [2]]
        await messages.ack(message)


async def test_batches_are_bounded_in_rows_and_lose_nothing(node: Node) -> None:
    for n in range(10):
        await node.insert("orders", [{"id": n, "item": "a"}] * (25 if n == 4 else 3))
    async with node.read("orders", until=await node.consistent_tick(), types=ROWS) as messages:
        batches = [batch async for batch in messages.batches(max_rows=10, max_wait_s=1 << 2_000)]
    sizes = [sum(message.num_rows for message in batch) for batch in batches]
    assert sum(sizes) == 52
    assert all(size <= 10 or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True))
    assert len(batches) < 8


async def test_batch_comes_although_the_next_message_does_not(node: Node) -> None:
    async with node.read("orders", sn.DeliverPolicy.latest()) as messages:
        batches = messages.batches(max_rows=100, max_wait_s=0.01)
        await node.insert("orders", [{"id": 1, "item": "a"}])
        first = await anext(batches)
        await node.insert("orders", [{"id": 2, "item": "a"}])
        second = await anext(batches)
    assert [ids(message) for message in (*first, *second)] == [[1], [2]]


@pytest.mark.parametrize("options", [{"max_rows": 0}, {"max_wait_s": -1}])
async def test_batches_of_nothing_are_refused(node: Node, options: dict[str, Any]) -> None:
    async with node.read("orders") as messages:
        with pytest.raises(InvalidArgument, match="max_rows"):
            await anext(messages.batches(**options))


async def test_cancelled_read_loses_nothing(node: Node) -> None:
    async with node.read("orders", types=ROWS) as messages:
        with anyio.move_on_after(0.01):
            await anext(messages)
        await node.insert("orders", [{"id": 1, "item": "a"}])
        assert ids(await anext(messages)) == [1]


async def test_cancelled_batch_is_what_the_reader_gives_next(node: Node) -> None:
    async with node.read("orders", types=ROWS) as messages:
        await node.insert("orders", [{"id": 1, "item": "a"}])
        with anyio.move_on_after(0.05):
            await anext(messages.batches(max_rows=100, max_wait_s=60))
        await node.insert("orders", [{"id": 2, "item": "a"}])
        assert [ids(await anext(messages)) for _ in range(2)] == [[1], [2]]


async def test_what_came_before_an_error_is_a_batch_before_it_is_raised(node: Node) -> None:
    for n in range(2):
        await node.insert("orders", [{"id": n, "item": "a"}])
    async with node.read("orders", types=ROWS) as messages:
        await anext(messages)
        batches = messages.batches(max_rows=100, max_wait_s=60)
        gathering = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        await parts_of(node).channel.scanners.close()
        assert [ids(message) for message in await gathering] == [[1]]
        with pytest.raises(OnShutdown):
            await anext(batches)


@pytest.mark.may_block
async def test_name_is_free_after_a_close_that_was_cancelled_while_its_place_was_written(
    tmp_path: Path,
) -> None:
    async with sn.open_node(tmp_path / "node") as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        reader = await node.read("orders", name="billing").__aenter__()
        acking = asyncio.ensure_future(reader.ack(await anext(reader)))
        for _ in range(2):
            await asyncio.sleep(0)
        acking.cancel()
        closing = asyncio.ensure_future(reader.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        async with node.read("orders", name="billing"):
            pass


async def test_exception_in_the_block_comes_out_unchanged(node: Node) -> None:
    error = RuntimeError("mine")
    with pytest.raises(RuntimeError) as caught:
        async with node.read("orders"):
            raise error
    assert caught.value is error


async def test_closed_reader_says_so(node: Node) -> None:
    async with node.read("orders") as messages:
        await anext(messages)
    with pytest.raises(OnShutdown, match="is closed"):
        await anext(messages)
    with pytest.raises(InvalidArgument, match="once"):
        await messages.__aenter__()


async def test_message_without_rows_has_no_arrow(node: Node) -> None:
    (message,) = await read_all(node, types=[MessageType.CREATE_COLLECTION])
    assert (message.to_arrow(), message.num_rows, len(message.vchannels)) == (None, 0, 3)


@pytest.mark.parametrize(
    "options", [{}, {"name": "billing"}, {"types": ROWS}, {"include_ticks": True}], ids=str
)
@pytest.mark.parametrize("policy", [sn.DeliverPolicy.all(), sn.DeliverPolicy.latest()], ids=str)
async def test_reader_ends_with_the_drop_of_its_collection(
    node: Node, policy: sn.DeliverPolicy, options: dict[str, Any]
) -> None:
    await node.insert("orders", [{"id": 1, "item": "a"}])
    async with node.read("orders", policy, **options) as messages:
        await node.insert("orders", [{"id": 2, "item": "a"}])
        await node.drop_collection("orders")
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await node.insert("orders", [{"id": 3, "item": "a"}])
        with anyio.fail_after(ENDS_S):
            delivered = [
                message async for message in messages if message.type is not MessageType.TIME_TICK
            ]
            assert await messages.next_messages() == []
    read = [ids(message) for message in delivered if message.type is MessageType.INSERT]
    assert read == ([[1], [2]] if str(policy) == "all" else [[2]])
    assert (delivered[-1].type is MessageType.DROP_COLLECTION) == ("types" not in options)


@pytest.mark.parametrize("name", [None, "billing"])
@pytest.mark.parametrize("policy", [sn.DeliverPolicy.all(), sn.DeliverPolicy.latest()], ids=str)
async def test_reader_entered_after_its_collection_was_dropped_is_refused(
    node: Node, policy: sn.DeliverPolicy, name: str | None
) -> None:
    reader = node.read("orders", policy, name=name)
    await node.drop_collection("orders")
    with anyio.fail_after(ENDS_S), pytest.raises(CollectionNotFound, match="dropped meanwhile"):
        async with reader:
            pass


async def test_every_tick_that_a_node_gave_out_ends_and_starts_a_reader(node: Node) -> None:
    for _ in range(3):
        result = await node.insert("orders", [{"id": 1, "item": "a"}])
        flushed = await node.flush()
        consistent = await node.consistent_tick()
        for tick in (
            0,
            result.time_tick,
            flushed.tick,
            consistent,
            sn.time_to_tick(datetime.now(UTC)),
        ):
            with anyio.fail_after(ENDS_S):
                async with node.read(
                    "orders", sn.DeliverPolicy.start_after(tick), until=tick
                ) as messages:
                    assert [message async for message in messages] == []


ENDS_S = 60
