"""`collection`, `reader` and `txn`: in a closed node's directory, in one that `serve` has, and over
TCP with a token.
"""

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.cli.manage import parse_schema
from wal.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamingnode.sync import SyncNode
    from tests.streamingnode.cli.conftest import Place, Printed

    Run = Callable[..., Printed]


# --- collections ----------------------------------------------------------------------------------


def test_a_collection_is_created_as_described_and_dropped(place: "Place", run: "Run") -> None:
    name = place.orders.replace("orders", "prices")
    create = (
        "collection",
        "create",
        *place.arguments,
        name,
        "--primary-key",
        "id",
        "--shards",
        "2",
        "--partition",
        "eu",
    )
    create += ("--schema", "id:int64 not null, at:timestamp[us, tz=UTC],p:decimal128(10, 2)")
    assert run(*create, "--dry-run").code == 2
    made = run(*create, "--json")
    assert made.code == 0, made.err
    columns = {"id": "int64", "at": "timestamp[us, tz=UTC]", "p": "decimal128(10, 2)"}
    listed: Any = run("collection", "ls", *place.arguments, "--json").document["collections"]
    (shown,) = [each for each in listed if each["name"] == name]
    assert (shown["columns"], shown["shards"], shown["partitions"]) == (
        columns,
        2,
        ["_default", "eu"],
    )
    with place.open() as node:
        assert not node.collection(name).schema.field("id").nullable
    assert run(*create).err.startswith("ALREADY_EXISTS")
    assert (
        run("collection", "drop", *place.arguments, name, "--dry-run").out
        == f"would be dropped: collection {name}\n"
    )
    assert run("collection", "drop", *place.arguments, name).out == f"dropped: collection {name}\n"
    assert run("collection", "drop", *place.arguments, name).err.startswith("COLLECTION_NOT_FOUND")


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("id", "'id' is not a column"),
        ("id:", "'id:' is not a column"),
        ("id:int", "'int' is not a type"),
        ("id:text not null", "'text' is not a type"),
        ("id:int64,", "'' is not a column"),
        ("at:timestamp[us, tz=UTC", "'timestamp[us' is not a type"),
        ("p:decimal(99, 1)", "'decimal(99, 1)' is not a type"),
        ("", "'' is not a column"),
    ],
)
def test_what_is_no_column_is_refused_with_what_is(text: str, wrong: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_schema(text)
    assert wrong in str(refused.value)
    assert "give NAME:TYPE with a type such as int64, float64, string" in str(refused.value)


def test_the_types_that_are_described_are_those_of_arrow() -> None:
    text = (
        "a:string not null,b:timestamp[ms],c:timestamp[ms, "
        "Europe/Berlin],d:decimal(5,1),e:large_binary"
    )
    fields: list[pa.Field[Any]] = [
        pa.field("a", pa.string(), nullable=False),
        pa.field("b", pa.timestamp("ms")),
        pa.field("c", pa.timestamp("ms", "Europe/Berlin")),
        pa.field("d", pa.decimal128(5, 1)),
        pa.field("e", pa.large_binary()),
    ]
    assert parse_schema(text) == pa.schema(fields)


# --- readers --------------------------------------------------------------------------------------


def read_all(node: "SyncNode", orders: str, name: str) -> list[int]:
    """Return the keys that a named reader gets, in order, and acknowledge them."""
    with node.read(orders, name=name, until=node.consistent_tick()) as messages:
        found = [message for message in messages if message.type is sn.MessageType.INSERT]
        if found:
            messages.ack(found[-1])
    return [
        key
        for message in found
        if (rows := message.to_arrow())
        for key in map(int, rows["id"].to_numpy())
    ]


def test_a_reader_is_listed_moved_and_removed_and_a_dry_run_changes_nothing(
    place: "Place", run: "Run"
) -> None:
    orders = place.orders
    with place.open() as node:
        first = node.insert(orders, [{"id": 1, "item": "tea"}])
        node.insert(orders, [{"id": 2, "item": "tea"}])
        assert read_all(node, orders, "billing") == [1, 2]
    readers: Any = run("reader", "ls", *place.arguments, orders, "--json").document["readers"]
    (listed,) = readers
    assert (listed["name"], listed["collections"], listed["is_open"]) == (
        "billing",
        [orders],
        False,
    )
    assert listed["name"] in run("reader", "ls", *place.arguments).out

    seek = ("reader", "seek", *place.arguments, orders, "billing", "--to")
    told = run(*seek, "earliest", "--dry-run").out
    assert told.startswith(f"reader billing of {orders} would go from {listed['message_id']} to ")
    with place.open() as node:
        assert read_all(node, orders, "billing") == []
    assert run(*seek, f"tick:{first.time_tick}", "--json").document["moved"] is True
    with place.open() as node:
        assert read_all(node, orders, "billing") == [2]
    assert run(*seek, "earliest").code == 0
    assert run(*seek, "latest").code == 0
    with place.open() as node:
        assert read_all(node, orders, "billing") == []
    remove = ("reader", "rm", *place.arguments, orders, "billing")
    assert run(*remove, "--dry-run").out == f"would be removed: reader billing of {orders}\n"
    assert run(*remove).out == f"removed: reader billing of {orders}\n"
    assert run("reader", "ls", *place.arguments, orders, "--json").document["readers"] == []
    assert "`streamingnode reader ls`" in run(*remove).err


@pytest.mark.parametrize("place", ["owned", "tcp"], indirect=True)
def test_a_reader_that_is_open_is_neither_moved_nor_removed(place: "Place", run: "Run") -> None:
    with place.open() as node, node.read(place.orders, name="billing"):
        before = run("reader", "ls", *place.arguments, place.orders, "--json").document["readers"]
        assert isinstance(before, list)
        assert before[0]["is_open"]
        for change in (("rm",), ("seek", "--to", "latest")):
            refused = run(
                "reader", change[0], *place.arguments, place.orders, "billing", *change[1:]
            )
            assert (refused.code, refused.err.split(":")[0]) == (1, "READER_BUSY")
            assert "close it first" in refused.err


@pytest.mark.parametrize(
    "wrong",
    [
        ["reader", "ls", "orders", "billing"],
        ["reader", "seek", "orders", "billing"],
        ["reader", "seek", "orders", "billing", "--to", "-3"],
        ["reader", "rm", "orders"],
        ["reader", "rm", "orders", "billing", "--to", "latest"],
        ["txn", "abort"],
        ["txn", "ls", "5"],
        ["collection", "create", "c"],
        ["collection", "create", "c", "--schema", "id:int64"],
        ["collection", "create", "c", "--schema", "id:int64", "--primary-key", "no"],
        ["collection", "ls", "orders"],
        ["partition", "ls", "orders", "eu"],
        ["partition", "create", "orders"],
        [
            "collection",
            "drop",
            "orders",
            "--schema",
            "id:int64",
            "--primary-key",
            "id",
            "--dry-run",
        ],
        ["collection", "drop", "orders", "--primary-key", "id"],
    ],
    ids=" ".join,
)
def test_wrong_use_is_refused_with_a_next_step(data: object, run: "Run", wrong: list[str]) -> None:
    refused = run(wrong[0], wrong[1], data, *wrong[2:])
    assert refused.code == 2
    assert refused.err.startswith("INVALID_ARGUMENT: ")
    assert " — " in refused.err


@pytest.mark.parametrize(
    "unknown, code",
    [
        (["collection", "drop", "no"], "COLLECTION_NOT_FOUND"),
        (["partition", "drop", "orders", "no"], "PARTITION_NOT_FOUND"),
        (["reader", "rm", "orders", "no"], "READER_NOT_FOUND"),
        (["reader", "seek", "orders", "no", "--to", "latest"], "READER_NOT_FOUND"),
        (["txn", "abort", "5"], "TRANSACTION_EXPIRED"),
        (["topic", "rm", "no"], "TOPIC_NOT_FOUND"),
        (["group", "ls", "no"], "TOPIC_NOT_FOUND"),
        (["channel", "rm", "no"], "TOPIC_NOT_FOUND"),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_what_is_not_there_ends_each_command_in_the_same_way(
    data: object, run: "Run", unknown: list[str], code: str
) -> None:
    ended = run(unknown[0], unknown[1], data, *unknown[2:])
    assert (ended.code, ended.err.partition(":")[0]) == (1, code)
    assert " — " in ended.err


def test_a_list_of_nothing_says_so(data: object, run: "Run") -> None:
    for words, said in (
        (["reader", "ls", data], "no readers\n"),
        (["txn", "ls", data], "no transactions\n"),
    ):
        assert run(*words).out == said


def test_an_action_names_the_argument_that_it_lacks_or_does_not_take(
    data: object, run: "Run"
) -> None:
    for words, takes in (
        (
            ["reader", "seek", data, "orders"],
            "missing argument 'READER' — see streamingnode reader seek --help",
        ),
        (
            ["reader", "seek", data, "orders", "billing"],
            "missing option '--to' — see streamingnode reader seek --help",
        ),
        (
            ["reader", "ls", data, "orders", "billing"],
            "got unexpected extra argument (billing) — see streamingnode reader ls --help",
        ),
        (
            ["txn", "ls", data, "5"],
            "got unexpected extra argument (5) — see streamingnode txn ls --help",
        ),
    ):
        assert run(*words).err == f"INVALID_ARGUMENT: {takes}\n"


# --- transactions ---------------------------------------------------------------------------------


def test_a_transaction_of_somebody_else_is_listed_and_aborted(place: "Place", run: "Run") -> None:
    with place.open() as node:
        id_ = node.begin_transaction(keepalive_s=300)
        node.insert(place.orders, [{"id": 7, "item": "jam"}], txn_id=id_)
        if place.way != "closed":
            check_abort(place, run, id_)
            with pytest.raises(sn.errors.TransactionExpired):
                node.commit_transaction(id_)
    if place.way == "closed":  # it is open in the log, as of a process that is gone
        check_abort(place, run, id_)
    with place.open() as node:
        assert node.snapshot(place.orders).num_rows == 0


def check_abort(place: "Place", run: "Run", id_: int) -> None:
    listed: Any = run("txn", "ls", *place.arguments, "--json").document["transactions"]
    (found,) = [each for each in listed if each["txn_id"] == id_]
    assert (found["collections"], found["bodies"], found["keepalive_s"]) == (
        [place.orders],
        1,
        300.0,
    )
    abort = ("txn", "abort", *place.arguments, id_)
    assert run(*abort, "--dry-run").out.startswith(
        f"would be aborted: transaction {id_} (1 message, "
    )
    assert run(*abort, "--json").document["aborted"] is True
    assert str(id_) not in run("txn", "ls", *place.arguments).out
    assert "`streamingnode txn ls`" in run(*abort).err
