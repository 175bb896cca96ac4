"""Every mistake a caller can make gets a typed error with a stable code and a next step; nothing of
it is applied.

One table for each kind of mistake, on one real node. After each mistake the node is exactly as
before, and goes on. What a directory or a disk can do is in `test_bad_directory`.
"""

import datetime as dt
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pandas as pd
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
from scanner.deliver_policy import ReaderBusy
from streamingnode.errors import DeadlineExceeded
from streamingnode.node import Node
from tests.streamingnode.append_double import schema_of
from wal.errors import AlreadyExists, InvalidArgument, OnShutdown, StreamingNodeError, TooLarge
from wal.position import MemoryMessageId, RocksMessageId

pytestmark = pytest.mark.anyio

SCHEMA = schema_of(id=pa.int64(), item=pa.string(), at=pa.timestamp("us"))
NOON = dt.datetime(2026, 1, 1, 12)  # noqa: DTZ001 - the column has no time zone
GOOD = {"id": 1, "item": "tea", "at": NOON}
NEXT_STEP = " — "

Call = Callable[[Node], object]
Table = dict[str, tuple[type[StreamingNodeError], str, Call]]


@pytest.fixture(scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    path = tmp_path_factory.mktemp("bad") / "node"
    async with sn.open_node(path, cut_interval_s=None) as opened:
        await opened.create_collection(
            "orders", SCHEMA, primary_key="id", shards=2, partitions=["eu"]
        )
        await opened.insert("orders", [GOOD])
        yield opened


def wrong(value: object) -> Any:
    """Return a value of a type that the call does not take."""
    return value


async def everything(node: Node) -> tuple[object, ...]:
    async with node.read("orders", until=await node.consistent_tick()) as messages:
        seen = [(message.message_id, message.num_rows) async for message in messages]
    rows = (await node.snapshot("orders")).to_pylist()
    return seen, rows, [(each.name, each.partitions) for each in node.collections()]


async def outcome(node: Node, call: Call) -> object:
    result = call(node)
    return await result if isinstance(result, Awaitable) else result


async def refuses(node: Node, kind: type[StreamingNodeError], text: str, call: Call) -> None:
    """Check the error and its next step, and that the node is as before and goes on."""
    before = await everything(node)
    with pytest.raises(kind, match=text) as caught:
        await outcome(node, call)
    assert caught.value.code == kind.code
    assert NEXT_STEP in str(caught.value)
    assert await everything(node) == before
    await node.delete("orders", [-1])


def table_test(table: Table) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind, text, call", table.values(), ids=table.keys())


# --- rows and keys --------------------------------------------------------------------------------


def wrong_row(
    text: str, row: dict[Any, Any], *, kind: type[StreamingNodeError] = SchemaMismatch
) -> Any:
    """The second of two rows is wrong, whatever the call."""
    return kind, text, [GOOD, row]


ROWS: dict[str, tuple[type[StreamingNodeError], str, Any]] = {
    "a required column is missing": wrong_row("column 'id', row 1 is missing", {"item": "x"}),
    "a column is unknown": wrong_row("column 'x', row 1 is not in the schema", {**GOOD, "x": 1}),
    "text for a number": wrong_row("column 'id', row 1: 'two'", {**GOOD, "id": "two"}),
    "a fraction for an integer": wrong_row("column 'id', row 1: 1.5", {**GOOD, "id": 1.5}),
    "an integer that is too large": wrong_row(
        "column 'id', row 1: .* int64", {**GOOD, "id": 1 << 70}
    ),
    "bytes for text": wrong_row("column 'item', row 1", {**GOOD, "item": b"\xff"}),
    "half a surrogate pair": wrong_row("column 'item', row 1", {**GOOD, "item": "\ud800"}),
    "a null key": wrong_row("column 'id', row 1: null", {**GOOD, "id": None}),
    "a row over the limit": wrong_row(
        "one row takes", {**GOOD, "item": "x" * (5 << 20)}, kind=TooLarge
    ),
    "a row that is no dict": wrong_row(
        "row 1 is a tuple", wrong((1, "tea", NOON)), kind=InvalidArgument
    ),
    "a dict": (InvalidArgument, "a dict — pass a list of dicts", GOOD),
    "a generator": (InvalidArgument, "a generator — pass a list", (row for row in [GOOD])),
    "nothing": (InvalidArgument, "a NoneType — pass", None),
    "text": (InvalidArgument, "a str — pass", "tea"),
    "a pandas frame": (InvalidArgument, "pa.Table.from_pandas", pd.DataFrame([GOOD])),
    "a table without a column": (
        SchemaMismatch,
        "column 'item' is missing",
        pa.table({"id": [1], "at": [NOON]}),
    ),
    "an empty batch without a column": (
        SchemaMismatch,
        "missing",
        pa.RecordBatch.from_pylist([], SCHEMA.remove(1)),
    ),
    "a table with a null key": (
        SchemaMismatch,
        "column 'id', row 1: null",
        pa.Table.from_pylist([GOOD, {**GOOD, "id": None}], SCHEMA),
    ),
    "a table of another type": (
        SchemaMismatch,
        "column 'id' is string, the schema has int64",
        pa.table({"id": ["1"], "item": ["x"], "at": [NOON]}),
    ),
    "a bad row behind thousands": (
        SchemaMismatch,
        "column 'id', row 9000",
        [{**GOOD, "id": n} for n in range(9000)] + [{**GOOD, "id": None}],
    ),
}


@pytest.mark.parametrize("kind, text, rows", ROWS.values(), ids=ROWS.keys())
async def test_rows_that_do_not_fit_are_refused_by_insert_upsert_and_transaction(
    node: Node, kind: type[StreamingNodeError], text: str, rows: Any
) -> None:
    await refuses(node, kind, text, lambda node: node.insert("orders", rows))
    await refuses(node, kind, text, lambda node: node.upsert("orders", rows))
    async with node.transaction() as txn:
        with pytest.raises(kind, match=text):
            await txn.insert("orders", rows)
            await txn.commit()  # the size is known only then
        await txn.rollback()


KEYS: Table = {
    "of another type": (
        SchemaMismatch,
        "column 'id', row 1",
        lambda n: n.delete("orders", [1, "two"]),
    ),
    "null": (SchemaMismatch, "column 'id', row 0: null", lambda n: n.delete("orders", [None])),
    "one value": (InvalidArgument, "an? int — pass a list", lambda n: n.delete("orders", wrong(1))),
    "text": (InvalidArgument, "a str — pass a list", lambda n: n.delete("orders", "abc")),
    "rows": (SchemaMismatch, "column 'id', row 0", lambda n: n.delete("orders", [GOOD])),
    "a column of another name": (
        SchemaMismatch,
        "'id' is missing",
        lambda n: n.delete("orders", pa.table({"x": [1]})),
    ),
}


@table_test(KEYS)
async def test_keys_that_do_not_fit_are_refused(
    node: Node, kind: type[StreamingNodeError], text: str, call: Call
) -> None:
    await refuses(node, kind, text, call)


# --- names and definitions ------------------------------------------------------------------------


def create(name: Any = "new", schema: Any = SCHEMA, **options: Any) -> Call:
    return lambda node: node.create_collection(name, schema, **{"primary_key": "id", **options})


def of_type(kind: pa.DataType) -> Call:
    return create(schema=SCHEMA.append(pa.field("c", kind)))


def keyed_by(kind: pa.DataType) -> Call:
    return create(schema=pa.schema([("id", kind)]))


SUPPORTED = "use one of bool, int8, .* and struct of these"
KEY_TYPES = "cannot be the primary key — use one of int8, .*timestamp"
NAMES: Table = {
    "collection unknown": (CollectionNotFound, "'nope'", lambda n: n.insert("nope", [GOOD])),
    "collection unknown to a reader": (CollectionNotFound, "'nope'", lambda n: n.read("nope")),
    "collection unknown to a snapshot": (
        CollectionNotFound,
        "'nope'",
        lambda n: n.snapshot("nope"),
    ),
    "collection unknown to a drop": (
        CollectionNotFound,
        "'nope'",
        lambda n: n.drop_collection("nope"),
    ),
    "collection unknown to a transaction": (
        CollectionNotFound,
        "nope",
        lambda n: n.transaction().delete("nope", [1]),
    ),
    "collection that is no text": (
        InvalidArgument,
        "text, not list",
        lambda n: n.insert(wrong(["orders"]), [GOOD]),
    ),
    **{
        f"no text to {what}": (InvalidArgument, "text, not list", call)
        for what, call in {
            "drop_collection": lambda n: n.drop_collection(wrong(["orders"]), if_exists=True),
            "drop_partition": lambda n: n.drop_partition("orders", wrong(["eu"]), if_exists=True),
            "delete_producer": lambda n: n.delete_producer(wrong(["p"])),
            "delete_reader": lambda n: n.delete_reader("orders", wrong(["r"])),
            "seek_reader": lambda n: n.seek_reader("orders", wrong(["r"]), sn.DeliverPolicy.all()),
        }.items()
    },
    "partition unknown": (
        PartitionNotFound,
        "'us'",
        lambda n: n.insert("orders", [GOOD], partition="us"),
    ),
    "partition unknown to a drop": (
        PartitionNotFound,
        "'us'",
        lambda n: n.drop_partition("orders", "us"),
    ),
    "partition that is no text": (
        InvalidArgument,
        "not dict",
        lambda n: n.insert("orders", [GOOD], partition=wrong({})),
    ),
    "partition that is reserved": (
        InvalidArgument,
        "reserved",
        lambda n: n.create_partition("orders", "_mine"),
    ),
    "partition that exists": (AlreadyExists, "'eu'", lambda n: n.create_partition("orders", "eu")),
    "default partition dropped": (
        InvalidArgument,
        "_default",
        lambda n: n.drop_partition("orders", "_default"),
    ),
    **{
        f"collection name {name!r}": (
            InvalidArgument,
            "not allowed — use 1 to 128 of a-z",
            create(name),
        )
        for name in ("Orders", "a b", "a/b", "a..b", "", "x" * 129, "\u00e4", "a\n", ".hidden")
    },
    "collection name reserved": (InvalidArgument, "reserved", create("_orders")),
    "collection name that is no text": (
        InvalidArgument,
        "collection name 3 is not allowed",
        create(3),
    ),
    "collection exists": (AlreadyExists, "use it as it is", create("orders")),
    "exists with another schema": (
        AlreadyExists,
        "schema",
        create("orders", SCHEMA.remove(2), if_not_exists=True),
    ),
    "exists with other shards": (
        AlreadyExists,
        "2 shards",
        create("orders", shards=3, if_not_exists=True),
    ),
    "schema that is a dict": (InvalidArgument, "pa.schema", create(schema={"id": "int64"})),
    "schema without columns": (InvalidArgument, "0 columns", create(schema=pa.schema([]))),
    "primary key unknown": (InvalidArgument, "choose one of id", create(primary_key="key")),
    "shards of 0": (InvalidArgument, "shards is 0 — choose 1 to", create(shards=0)),
    "partitions in one text": (InvalidArgument, "list", create(partitions="eu")),
    "partitions twice the same": (InvalidArgument, "different", create(partitions=["a", "a"])),
    "column reserved": (
        SchemaMismatch,
        "'_tick' is reserved",
        create(schema=SCHEMA.append(pa.field("_tick", "int64"))),
    ),
    "column with a blank": (
        SchemaMismatch,
        "rename",
        create(schema=SCHEMA.append(pa.field("a b", "int64"))),
    ),
    "column with a NUL": (
        SchemaMismatch,
        "rename",
        create(schema=SCHEMA.append(pa.field("a\0b", "int64"))),
    ),
    "column that differs in case": (
        SchemaMismatch,
        "case",
        create(schema=SCHEMA.append(pa.field("ID", "int64"))),
    ),
    "type time": (SchemaMismatch, SUPPORTED, of_type(pa.time64("us"))),
    "type map": (SchemaMismatch, SUPPORTED, of_type(pa.map_(pa.string(), pa.int64()))),
    "type struct of nothing": (SchemaMismatch, SUPPORTED, of_type(pa.struct([]))),
    "type list of size 0": (SchemaMismatch, SUPPORTED, of_type(pa.list_(pa.int64(), 0))),
    "type unsigned": (SchemaMismatch, "int64", of_type(pa.uint64())),
    "type unsigned in a list": (SchemaMismatch, "column 'c.item'", of_type(pa.list_(pa.uint8()))),
    "type nanoseconds": (SchemaMismatch, r"timestamp\[us\]", of_type(pa.timestamp("ns"))),
    "type time zone unknown": (
        SchemaMismatch,
        "time zone",
        of_type(pa.timestamp("us", "Mars/Base")),
    ),
    "type list of what takes no null": (
        SchemaMismatch,
        "'c.item' .* declare it nullable",
        of_type(pa.list_(pa.field("item", pa.int64(), nullable=False))),
    ),
    "type decimal of negative scale": (SchemaMismatch, "scale", of_type(pa.decimal128(5, -2))),
    "key float": (SchemaMismatch, KEY_TYPES, keyed_by(pa.float64())),
    "key bool": (SchemaMismatch, KEY_TYPES, keyed_by(pa.bool_())),
    "key list": (SchemaMismatch, KEY_TYPES, keyed_by(pa.list_(pa.int64()))),
}


@table_test(NAMES)
async def test_names_and_definitions_that_cannot_be_are_refused(
    node: Node, kind: type[StreamingNodeError], text: str, call: Call
) -> None:
    await refuses(node, kind, text, call)


# --- arguments of calls and readers ---------------------------------------------------------------


def reading(policy: Any = None, **options: Any) -> Call:
    async def call(node: Node) -> None:
        async with node.read(
            "orders", sn.DeliverPolicy.all() if policy is None else policy, **options
        ):
            pass

    return call


def inserting(**options: Any) -> Call:
    return lambda node: node.insert("orders", [GOOD], **options)


async def acknowledge_what_is_no_message(node: Node) -> None:
    async with node.read("orders", name="acks") as messages:
        await messages.ack(wrong(5))


async def open_one_name_twice(node: Node) -> None:
    async with node.read("orders", name="twice"), node.read("orders", name="twice"):
        pass


async def read_after_the_block(node: Node) -> None:
    async with node.read("orders") as messages:
        pass
    await anext(messages)


async def end_a_session_twice(node: Node) -> None:
    txn_id = await node.begin_transaction()
    await node.rollback_transaction(txn_id)
    await node.commit_transaction(txn_id)


def after_the_end(use: Callable[[sn.Transaction], Awaitable[object]]) -> Call:
    async def call(node: Node) -> None:
        async with node.transaction() as txn:
            pass
        await use(txn)

    return call


POLICY = sn.DeliverPolicy
CALLS: Table = {
    **{
        f"timeout {timeout!r}": (InvalidArgument, "timeout=", inserting(timeout=timeout))
        for timeout in (0, -1, float("nan"), "1", True, 1 << 2_000)
    },
    "timeout of more digits than Python writes": (
        InvalidArgument,
        "timeout=<int>",
        inserting(timeout=10**5_000),
    ),
    "tick of as many": (
        InvalidArgument,
        "as_of <int>",
        lambda n: n.snapshot("orders", as_of=10**5_000),
    ),
    "transaction of as many": (
        InvalidArgument,
        "txn_id=<int>",
        lambda n: n.commit_transaction(10**5_000),
    ),
    "timeout 0 of a flush": (InvalidArgument, "timeout=0", lambda n: n.flush(timeout=0)),
    "timeout of a read": (
        DeadlineExceeded,
        "changed nothing",
        lambda n: n.snapshot("orders", timeout=1e-9),
    ),
    "policy in text": (InvalidArgument, "DeliverPolicy", reading("all")),
    "policy not called": (InvalidArgument, "DeliverPolicy", reading(POLICY.all)),
    "id of another log": (
        InvalidArgument,
        "memory/1 .* rocks",
        reading(POLICY.start_from(MemoryMessageId(1))),
    ),
    "id yet to come": (
        InvalidArgument,
        "start at the end",
        reading(POLICY.start_from(RocksMessageId(1 << 40))),
    ),
    "id 0": (
        InvalidArgument,
        "start at the first message",
        lambda _: POLICY.start_from(RocksMessageId(0)),
    ),
    "id in text": (InvalidArgument, "no message id", lambda _: POLICY.start_from(wrong("rocks/1"))),
    "tick below 0": (InvalidArgument, "time tick", lambda _: POLICY.start_after(-1)),
    "until a time": (InvalidArgument, "until=", reading(until=NOON)),
    "as of a fraction": (
        InvalidArgument,
        "as_of 1.5",
        lambda n: n.snapshot("orders", as_of=wrong(1.5)),
    ),
    "as of a tick to come": (
        InvalidArgument,
        "to come",
        lambda n: n.snapshot("orders", as_of=(1 << 63) - 1),
    ),
    "types in text": (InvalidArgument, "types=", reading(types="INSERT")),
    "types that are ticks": (
        InvalidArgument,
        "include_ticks",
        reading(types=[sn.MessageType.TIME_TICK]),
    ),
    "reader name": (InvalidArgument, "reader name", reading(name="A")),
    "reader name in use": (ReaderBusy, "'twice'", open_one_name_twice),
    "ack of no message": (InvalidArgument, "no message", acknowledge_what_is_no_message),
    "read after the block": (OnShutdown, "is closed", read_after_the_block),
    "read without a block": (InvalidArgument, "async with", lambda n: anext(n.read("orders"))),
    "until a tick to come": (
        InvalidArgument,
        "to come, it is [0-9]+ now",
        reading(until=(1 << 63) - 1),
    ),
    "start after a tick to come": (
        InvalidArgument,
        "to come.* start at the end",
        reading(POLICY.start_after((1 << 63) - 1)),
    ),
    "collections in one text": (InvalidArgument, "list", lambda n: n.consistent_tick("orders")),
    "keepalive of 0": (InvalidArgument, "keepalive_s=0", lambda n: n.transaction(keepalive_s=0)),
    "keepalive without end": (
        InvalidArgument,
        "600",
        lambda n: n.begin_transaction(keepalive_s=float("inf")),
    ),
    "transaction unknown": (
        TransactionExpired,
        "99",
        lambda n: n.insert("orders", [GOOD], txn_id=99),
    ),
    "transaction in text": (InvalidArgument, "txn_id=", lambda n: n.commit_transaction(wrong("x"))),
    "session ended": (TransactionExpired, "rolled back", end_a_session_twice),
    "insert after the end": (
        InvalidTransactionState,
        "committed",
        after_the_end(lambda t: t.insert("orders", [GOOD])),
    ),
    "commit after the end": (
        InvalidTransactionState,
        "committed",
        after_the_end(lambda t: t.commit()),
    ),
    "rollback after the end": (
        InvalidTransactionState,
        "committed",
        after_the_end(lambda t: t.rollback()),
    ),
}


@table_test(CALLS)
async def test_arguments_and_moments_that_cannot_be_are_refused(
    node: Node, kind: type[StreamingNodeError], text: str, call: Call
) -> None:
    await refuses(node, kind, text, call)


async def test_a_closed_node_refuses_everything() -> None:
    async with sn.open_node(None) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        txn = node.transaction()
    calls: list[Call] = [
        lambda n: n.insert("orders", [GOOD]),
        lambda n: n.upsert("orders", [GOOD]),
        lambda n: n.delete("orders", [1]),
        lambda n: n.read("orders"),
        lambda n: n.snapshot("orders"),
        lambda n: n.flush(),
        lambda n: n.transaction(),
        lambda n: n.begin_transaction(),
        lambda n: n.consistent_tick(),
        lambda n: n.collections(),
        lambda n: n.create_collection("new", SCHEMA, primary_key="id"),
        lambda _: txn.insert("orders", [GOOD]),
    ]
    for call in calls:
        with pytest.raises(OnShutdown, match="open it again"):
            await outcome(node, call)
