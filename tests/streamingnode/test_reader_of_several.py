"""Reading several collections of one node as one: in the order of ticks, transactions whole, under
one name.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest

import streamingnode as sn
from interceptors.errors import CollectionNotFound
from scanner.deliver_policy import ReaderBusy
from streamingnode.collections import READ_COLLECTIONS_MAX
from streamingnode.node import Node
from streamingnode.read_message import ReadMessage
from tests.parts_of import WAYS, opened_one_way, parts_of
from tests.streamingnode.append_double import schema_of
from tests.streamingnode.remote.nodes import SCHEMA as C_SCHEMA
from tests.streamingnode.remote.nodes import node_behind_proxy
from wal.errors import InvalidArgument
from wal.headers import MessageType

pytestmark = pytest.mark.anyio

ORDERS = schema_of(id=pa.int64(), item=pa.string())
STOCK = schema_of(item=pa.string(), count=pa.int32())
OTHER = schema_of(id=pa.int64())
BOTH = ["orders", "stock"]
ROWS = [MessageType.INSERT, MessageType.DELETE]
ENDS_S = 60


async def create(node: Node) -> None:
    await node.create_collection("orders", ORDERS, primary_key="id", shards=3)
    await node.create_collection("stock", STOCK, primary_key="item", shards=2)
    await node.create_collection("other", OTHER, primary_key="id")


@pytest.fixture(params=WAYS)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with opened_one_way(request.param) as opened:
        await create(opened)
        yield opened


async def order(node: Node, *keys: int) -> None:
    await node.insert("orders", [{"id": key, "item": "tea"} for key in keys])


async def stock(node: Node, *items: str) -> None:
    await node.insert("stock", [{"item": item, "count": 1} for item in items])


async def read_all(node: Node, collections: list[str], **options: Any) -> list[ReadMessage]:
    async with node.read(collections, until=await node.consistent_tick(), **options) as messages:
        return [message async for message in messages]


def told(messages: list[ReadMessage]) -> list[tuple[str, str, list[Any]]]:
    """Return of each message or body its type, collection and keys."""
    return [
        (
            part.type.name,
            part.collection,
            sorted(table.column(0).to_pylist()) if (table := part.to_arrow()) else [],
        )
        for message in messages
        for part in message.bodies or (message,)
    ]


async def test_messages_of_all_come_in_the_order_of_ticks_and_name_their_collection(
    node: Node,
) -> None:
    await order(node, 1, 2, 3, 4)
    await stock(node, "tea", "ink")
    await node.insert("other", [{"id": 1}])
    await node.delete("orders", [2])
    await order(node, 5)
    found = await read_all(node, BOTH, types=ROWS)
    assert told(found) == [
        ("INSERT", "orders", [1, 2, 3, 4]),
        ("INSERT", "stock", ["ink", "tea"]),
        ("DELETE", "orders", [2]),
        ("INSERT", "orders", [5]),
    ]
    ticks = [message.time_tick for message in found]
    assert ticks == sorted(set(ticks))


async def test_a_transaction_over_them_is_one_message_with_only_their_bodies(node: Node) -> None:
    async with node.transaction() as txn:
        await txn.insert("stock", [{"item": "tea", "count": 7}, {"item": "ink", "count": 1}])
        await txn.insert("other", [{"id": 1}])
        await txn.insert("orders", [{"id": key, "item": "tea"} for key in range(9)])
        await txn.delete("orders", [1, 2])
    (message,) = await read_all(node, BOTH, types=ROWS)
    assert (message.type, message.num_rows, message.collection) == (MessageType.TXN, 13, "")
    assert told([message]) == [
        ("INSERT", "stock", ["ink", "tea"]),
        ("INSERT", "orders", list(range(9))),
        ("DELETE", "orders", [1, 2]),
    ]
    assert {body.time_tick for body in message.bodies} == {message.time_tick}
    (alone,) = await read_all(node, ["stock", "other"], types=[MessageType.INSERT])
    assert [(body.collection, body.num_rows) for body in alone.bodies] == [
        ("stock", 2),
        ("other", 1),
    ]
    (orders,) = await read_all(node, ["orders"], types=ROWS)
    assert (orders.collection, orders.num_rows) == ("orders", 11)


async def test_a_streamed_transaction_over_them_is_one_message(node: Node) -> None:
    async with node.transaction() as txn:
        for key in range(3):
            await txn.insert("orders", [{"id": key, "item": "x" * 1_000_000}])
            await txn.insert("stock", [{"item": f"{key}" * 1_000_000, "count": key}])
    (message,) = await read_all(node, BOTH, types=ROWS)
    assert (message.type, message.num_rows) == (MessageType.TXN, 6)
    assert [body.collection for body in message.bodies] == BOTH * 3


async def test_writes_of_many_at_once_come_in_batches_with_nothing_lost(node: Node) -> None:
    async with anyio.create_task_group() as tasks:
        for number in range(60):
            tasks.start_soon(order, node, number)
            tasks.start_soon(stock, node, f"{number}")
    async with node.read(BOTH, until=await node.consistent_tick(), types=ROWS) as messages:
        batches = [list(batch) async for batch in messages.batches(max_rows=25, max_wait_s=60)]
    assert all(
        sum(message.num_rows for message in batch) <= 25 or len(batch) == 1 for batch in batches
    )
    found = told([message for batch in batches for message in batch])
    assert sorted(key for _, name, keys in found if name == "orders" for key in keys) == list(
        range(60)
    )
    assert sorted(int(key) for _, name, keys in found if name == "stock" for key in keys) == list(
        range(60)
    )


async def test_reading_resumes_after_any_message_without_loss_or_repeat(node: Node) -> None:
    for number in range(4):
        await order(node, number)
        await stock(node, f"{number}")
        await node.upsert("orders", [{"id": number, "item": "ink"}])
    everything = await read_all(node, BOTH)
    for index, message in enumerate(everything):
        rest = await read_all(node, BOTH, policy=sn.DeliverPolicy.start_after(message.message_id))
        assert [each.time_tick for each in rest] == [
            each.time_tick for each in everything[index + 1 :]
        ]


async def test_what_is_to_come_is_waited_for_of_each_of_them(node: Node) -> None:
    async with node.read(BOTH, sn.DeliverPolicy.latest()) as messages:
        await stock(node, "tea")
        first = await anext(messages)
        await order(node, 1)
        second = await anext(messages)
    assert told([first, second]) == [("INSERT", "stock", ["tea"]), ("INSERT", "orders", [1])]


async def test_the_drop_of_one_ends_nothing_and_the_drop_of_the_last_ends_the_reader(
    node: Node,
) -> None:
    async with node.read(BOTH, sn.DeliverPolicy.latest()) as messages:
        await node.drop_collection("stock")
        await order(node, 1)
        await node.create_collection("stock", STOCK, primary_key="item")
        await stock(node, "of another")
        await node.drop_collection("orders")
        with anyio.fail_after(ENDS_S):
            found = [message async for message in messages]
    assert told(found) == [
        ("DROP_COLLECTION", "stock", []),
        ("INSERT", "orders", [1]),
        ("DROP_COLLECTION", "orders", []),
    ]


@pytest.mark.parametrize("types", [None, ROWS])
async def test_ticks_come_when_they_are_asked_for(node: Node, types: Any) -> None:
    await order(node, 1)
    await node.insert("other", [{"id": 1}])
    found = await read_all(node, BOTH, include_ticks=True, types=types)
    assert (found[-1].type, found[-1].collection) == (MessageType.TIME_TICK, "")


# --- by name --------------------------------------------------------------------------------------


async def test_a_named_reader_goes_on_after_what_it_acknowledged_of_any_of_them(node: Node) -> None:
    for number in range(3):
        await order(node, number)
        await stock(node, f"{number}")
    async with node.read(BOTH, name="billing", types=ROWS) as messages:
        third = [await anext(messages) for _ in range(3)][-1]
        await messages.ack(third)
        with pytest.raises(ReaderBusy):
            async with node.read(BOTH, name="billing"):
                pytest.fail("not reached")
    rest = await read_all(node, BOTH[::-1], name="billing", types=ROWS)
    assert told(rest) == [
        ("INSERT", "stock", ["1"]),
        ("INSERT", "orders", [2]),
        ("INSERT", "stock", ["2"]),
    ]


@pytest.mark.parametrize(
    "others", [["orders"], ["stock", "other"], ["orders", "stock", "other"]], ids="+".join
)
async def test_a_named_reader_of_other_collections_than_it_had_is_refused(
    node: Node, others: list[str]
) -> None:
    async with node.read(BOTH, name="billing"):
        with pytest.raises(InvalidArgument, match="is of the collections orders, stock — "):
            async with node.read(others, name="billing"):
                pytest.fail("not reached")
    with pytest.raises(InvalidArgument, match="is of the collections orders, stock — "):
        await read_all(node, others, name="billing")
    assert await read_all(node, ["other"], name="billing"), "the name is another reader's there"
    assert await node.delete_reader("stock", "billing")
    assert not await node.delete_reader("orders", "billing")
    assert await node.delete_reader("other", "billing")
    assert await read_all(node, others, name="billing")


async def test_a_name_that_two_readers_have_is_no_name_of_one_of_both_collections(
    node: Node,
) -> None:
    await read_all(node, ["orders"], name="billing")
    await read_all(node, ["stock"], name="billing")
    with pytest.raises(InvalidArgument, match="is of the collections"):
        await read_all(node, BOTH, name="billing")


async def test_a_named_reader_goes_on_with_the_collections_that_were_not_dropped(
    node: Node,
) -> None:
    await order(node, 1)
    await stock(node, "tea")
    async with node.read(BOTH, name="billing", types=ROWS) as messages:
        await messages.ack(await anext(messages))
    await node.drop_collection("stock")
    await order(node, 2)
    assert told(await read_all(node, ["orders"], name="billing", types=ROWS)) == [
        ("INSERT", "orders", [2])
    ]
    await node.create_collection("stock", STOCK, primary_key="item")
    with pytest.raises(InvalidArgument, match="is of the collections orders — "):
        await read_all(node, BOTH, name="billing")


async def test_a_named_reader_holds_the_log_until_the_last_of_its_collections_is_dropped(
    tmp_path: Path,
) -> None:
    async with sn.open_node(tmp_path) as node:
        await create(node)
        async with node.read(BOTH, name="billing"):
            pass
        backend = parts_of(node)
        lease = backend.readers.lease("p0")
        assert lease is not None
        await node.drop_collection("orders")
        assert backend.readers.lease("p0") == lease
        await node.drop_collection("stock")
        assert backend.readers.lease("p0") is None


async def test_the_place_of_a_named_reader_survives_a_restart(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path) as node:
        await create(node)
        await order(node, 1)
        await stock(node, "tea")
        async with node.read(BOTH, name="billing", types=ROWS) as messages:
            await messages.ack(await anext(messages))
    async with sn.open_node(tmp_path) as node:
        with pytest.raises(InvalidArgument, match="orders, stock"):
            await read_all(node, ["orders"], name="billing")
        assert told(await read_all(node, BOTH, name="billing", types=ROWS)) == [
            ("INSERT", "stock", ["tea"])
        ]


# --- over connections that are lost ---------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "billing"])
async def test_a_lost_connection_and_a_drop_meanwhile_lose_nothing_of_the_others(
    name: str | None,
) -> None:
    async with node_behind_proxy() as served, served.client() as client:
        await client.create_collection("d", C_SCHEMA, primary_key="id")
        row = {"id": 1, "item": "tea"}
        async with client.read(["c", "d"], sn.DeliverPolicy.latest(), name=name) as messages:
            await served.owner.insert("d", [row])
            first = await anext(messages)
            served.proxy.is_refusing = True
            served.proxy.cut()
            await served.owner.insert("d", [row])
            await served.owner.drop_collection("d")
            await served.owner.insert("c", [row])
            await served.owner.drop_collection("c")
            served.proxy.is_refusing = False
            with anyio.fail_after(ENDS_S):
                rest = [message async for message in messages]
        assert [(message.type.name, message.collection) for message in (first, *rest)] == [
            ("INSERT", "d"),
            ("INSERT", "d"),
            ("DROP_COLLECTION", "d"),
            ("INSERT", "c"),
            ("DROP_COLLECTION", "c"),
        ]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "collections, error, match",
    [
        ([], InvalidArgument, "list of 1 to 1024 names"),
        (["orders"] * (READ_COLLECTIONS_MAX + 1), InvalidArgument, "list of 1 to 1024 names"),
        ({"orders", "stock"}, InvalidArgument, "list of 1 to 1024 names"),
        (7, InvalidArgument, "list of 1 to 1024 names"),
        (["orders", 7], InvalidArgument, "name is text"),
        (["orders", "stock", "orders"], InvalidArgument, "twice — name each once"),
        (["orders", "tea"], CollectionNotFound, "tea"),
    ],
)
async def test_a_list_that_names_no_collections_is_refused(
    node: Node, collections: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        node.read(collections)


async def test_a_reader_is_refused_when_one_was_dropped_before_it_was_entered(node: Node) -> None:
    reader = node.read(BOTH)
    await node.drop_collection("stock")
    with pytest.raises(CollectionNotFound, match="dropped meanwhile"):
        async with reader:
            pass
