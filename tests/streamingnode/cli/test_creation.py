"""What the command line creates and drops, and that what it refuses leaves nothing behind."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

import streamingnode as sn

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.streamingnode.cli.conftest import Printed

    Run = Callable[..., Printed]


def _items(printed: "Printed") -> dict[str, dict[str, object]]:
    collections = cast("list[dict[str, object]]", printed.document["collections"])
    return {str(collection["name"]): collection for collection in collections}


REFUSED_CREATIONS = {
    "no such column": ('{"id": 1}', "orders", "--primary-key", "key"),
    "a bad name": ('{"id": 1}', "Orders", "--primary-key", "id"),
    "too many shards": ('{"id": 1}', "orders", "--primary-key", "id", "--shards", "100000"),
    "a bad partition": ('{"id": 1}', "orders", "--primary-key", "id", "--partition", "Eu"),
    "no rows": ("", "orders", "--primary-key", "id"),
    "no JSON": ('{"id": ', "orders", "--primary-key", "id"),
    "a null key": ('{"id": 1}\n{"id": null}', "orders", "--primary-key", "id"),
    "a row over the limit": (
        '{"id": 1, "item": "' + "x" * (4 << 20) + '"}',
        "orders",
        "--primary-key",
        "id",
    ),
    "a row just over the limit": (
        '{"id": 1, "item": "' + "x" * ((4 << 20) - 30) + '"}',
        "orders",
        "--primary-key",
        "id",
    ),
    "rows of two kinds": (
        '{"id": 1, "item": {"a": 1}}\n{"id": 2, "item": [3]}',
        "orders",
        "--primary-key",
        "id",
    ),
}


@pytest.mark.parametrize("refused", REFUSED_CREATIONS.values(), ids=REFUSED_CREATIONS)
def test_refused_creation_leaves_no_node_behind(
    tmp_path: Path, run: "Run", refused: tuple[str, ...]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(refused[0])
    ended = run("insert", tmp_path / "data", refused[1], rows, "--create", *refused[2:])
    assert ended.code == 2, ended.err
    assert not (tmp_path / "data").exists()


def test_refused_creation_in_a_node_creates_no_collection(data: Path, run: "Run") -> None:
    rows = data.parent / "rows.jsonl"
    rows.write_text('{"id": 1}\n{"id": null}')
    assert run("insert", data, "stock", rows, "--create", "--primary-key", "id").code == 2
    assert set(_items(run("collection", "ls", data, "--json"))) == {"orders"}


def test_partition_is_created_with_its_collection(tmp_path: Path, run: "Run") -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": 1}\n')
    arguments = ("orders", rows, "--create", "--primary-key", "id", "--partition", "eu")
    assert run("insert", tmp_path / "data", *arguments).code == 0
    assert _items(run("collection", "ls", tmp_path / "data", "--json"))["orders"]["partitions"] == [
        "_default",
        "eu",
    ]


# --- partitions -----------------------------------------------------------------------------------


def test_partitions_are_created_listed_and_dropped_with_their_rows(data: Path, run: "Run") -> None:
    rows = data.parent / "rows.jsonl"
    rows.write_text('{"id": 9, "item": "jam"}\n')
    run("flush", data)
    assert run("partition", "create", data, "orders", "eu").out == "_default\neu\n"
    assert _items(run("collection", "ls", data, "--json"))["orders"]["partitions"] == [
        "_default",
        "eu",
    ]
    assert run("insert", data, "orders", rows, "--partition", "eu").code == 0
    assert run("partition", "ls", data, "orders", "--json").document["partitions"] == [
        "_default",
        "eu",
    ]
    drop = ("partition", "drop", data, "orders")
    would = run(*drop, "eu", "--dry-run", "--json").document
    assert would == {"dropped": False, "collection": "orders", "partitions": ["_default"]}
    assert run(*drop, "_default", "--dry-run").code == 2
    assert run(*drop, "us", "--dry-run").err.startswith("PARTITION_NOT_FOUND")
    assert _items(run("collection", "ls", data, "--count", "--json"))["orders"]["rows"] == 4
    assert run(*drop, "eu").out == "dropped: partition eu of orders\n"
    assert _items(run("collection", "ls", data, "--count", "--json"))["orders"]["rows"] == 3


def test_rows_of_all_collections_are_counted_at_one_tick(
    data: Path, run: "Run", monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = data.parent / "rows.jsonl"
    rows.write_text('{"id": 1, "item": "jam"}\n')
    assert run("insert", data, "stock", rows, "--create", "--primary-key", "id").code == 0
    before = {
        name: each["rows"]
        for name, each in _items(run("collection", "ls", data, "--count", "--json")).items()
    }
    snapshot = sn.Node.snapshot
    partitions = ["eu", "us"]

    async def after_a_transaction(node: sn.Node, collection: str, **options: Any) -> Any:
        async with node.transaction() as txn:
            for name in ("orders", "stock"):
                await txn.insert(name, [{"id": 77, "item": "salt"}])
        if collection == "stock" and partitions:  # its rows are gone at the tick that is counted at
            name = partitions.pop()
            await node.create_partition("stock", name)
            await node.drop_partition("stock", name)
        return await snapshot(node, collection, **options)

    monkeypatch.setattr(sn.Node, "snapshot", after_a_transaction)
    printed = run("collection", "ls", data, "--count", "--json")
    counted = {name: each["rows"] for name, each in _items(printed).items()}
    more = {name: counted[name] - before[name] for name in before}  # type: ignore[operator]
    assert more["orders"] == more["stock"]
    assert isinstance(printed.document["tick"], int)


@pytest.mark.parametrize(
    "arguments",
    [
        ("create", "orders"),
        ("drop", "orders"),
        ("list", "orders", "eu"),
        ("create", "orders", "_default"),
        ("drop", "orders", "_default"),
    ],
    ids=" ".join,
)
def test_partitions_refuses_what_it_cannot_do(
    data: Path, run: "Run", arguments: tuple[str, ...]
) -> None:
    refused = run("partition", arguments[0], data, *arguments[1:])
    assert refused.code == 2
    assert " — " in refused.err


@pytest.mark.parametrize("arguments", [("drop", "orders", "eu"), ("ls", "stock")], ids=" ".join)
def test_partitions_fails_for_what_is_not_there(
    data: Path, run: "Run", arguments: tuple[str, ...]
) -> None:
    failed = run("partition", arguments[0], data, *arguments[1:])
    assert failed.code == 1
    assert "_NOT_FOUND: " in failed.err


CREATE = ("orders", "--schema", "id:int64", "--primary-key", "id")


@pytest.mark.parametrize("is_there", [False, True], ids=["no directory", "an empty one"])
def test_the_first_collection_makes_the_node(tmp_path: Path, run: "Run", *, is_there: bool) -> None:
    place = tmp_path / "data"
    if is_there:
        place.mkdir()
    refused = run("collection", "ls", place)
    assert refused.code == 2
    assert "`streamingnode collection create` makes a new node" in refused.err
    wrong = run("collection", "create", place, *CREATE[:-1], "key")
    assert wrong.code == 2
    assert place.exists() is is_there
    made = run("collection", "create", place, *CREATE)
    assert (made.code, made.out) == (0, "created: collection orders\n"), made.err
    assert "orders" in _items(run("collection", "ls", place, "--json"))


def test_a_directory_of_something_else_does_not_become_a_node(tmp_path: Path, run: "Run") -> None:
    (tmp_path / "notes.txt").write_text("mine")
    refused = run("collection", "create", tmp_path, *CREATE)
    assert (refused.code, "is no node directory" in refused.err) == (2, True)
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


def test_a_drop_of_an_unknown_name_names_those_there_are(data: Path, run: "Run") -> None:
    near = run("collection", "drop", data, "order").err
    assert "— did you mean 'orders'? `streamingnode collection ls` lists all" in near
    far = run("collection", "drop", data, "nope").err
    assert "— choose one that `streamingnode collection ls` lists" in far
    partition = run("partition", "drop", data, "orders", "us").err
    assert "— `streamingnode partition ls` lists them" in partition
    assert "create it first" not in near + far + partition
