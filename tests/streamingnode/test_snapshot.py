"""Snapshots of some columns and keys: what the whole snapshot has of them, read from the files that
may have it.
"""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamingnode as sn
from flusher.directory import NodeDirectory
from interceptors.errors import SchemaMismatch
from streamingnode.care.backup import restore_directory
from streamingnode.care.export import export_node
from streamingnode.node import Node
from tests.parts_of import WAYS, opened_one_way
from tests.streamingnode.append_double import schema_of
from wal.errors import InvalidArgument, Truncated

pytestmark = pytest.mark.anyio

KINDS: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "whole": (pa.int64(), lambda n: n - 3),
    "small": (pa.int16(), lambda n: n - 3),
    "text": (pa.string(), lambda n: "é" * (n % 3) + f"{n}"),
    "long text": (pa.large_string(), lambda n: f"{n}"),
    "bytes": (pa.binary(), lambda n: b"\xff" * (n % 3) + bytes([n])),
    "date": (pa.date32(), lambda n: date(1969, 12, 30) + timedelta(days=n)),
    "time": (
        pa.timestamp("ms", "UTC"),
        lambda n: datetime(1969, 12, 31, 23, 59, tzinfo=UTC) + timedelta(hours=n),
    ),
}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "upsert", "delete", "flush"]),
        st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True),
    ),
    min_size=1,
    max_size=10,
)


def columns_of(kind: pa.DataType) -> pa.Schema:
    """Return a key between other columns, two of which Parquet gives the same path."""
    point = pa.struct([("x", pa.int32()), ("y", pa.string())])
    others: dict[str, pa.DataType] = {"p": point, "p.x": pa.int64(), "item": pa.string()}
    return pa.schema(others).insert(2, pa.field("key", kind, nullable=False))


def row(key: Any, number: int) -> dict[str, Any]:
    return {"p": {"x": number, "y": "tea"}, "p.x": -number, "key": key, "item": f"{number}"}


@settings(max_examples=25)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    steps=STEPS,
    choice=st.integers(0, 1 << 32).map(random.Random),
)
def test_a_selection_is_what_the_whole_snapshot_has_of_it(
    kind: str, steps: list[tuple[str, list[int]]], choice: random.Random
) -> None:
    key_type, key = KINDS[kind]

    async def main() -> None:
        async with sn.open_node(None, cut_interval_s=None) as node:
            await node.create_collection(
                "orders", columns_of(key_type), primary_key="key", shards=3
            )
            ticks = [await node.consistent_tick()]
            for number, (step, keys) in enumerate(steps):
                if step == "flush":
                    cut = await node.flush()
                    if cut.number:  # else there was nothing to cut, and no cut before
                        ticks.append(cut.tick)
                elif step == "delete":
                    ticks.append(
                        (await node.delete("orders", [key(each) for each in keys])).time_tick
                    )
                else:
                    write = node.insert if step == "insert" else node.upsert
                    ticks.append(
                        (await write("orders", [row(key(each), number) for each in keys])).time_tick
                    )
            for as_of in (None, *choice.sample(ticks, min(2, len(ticks)))):
                whole = await node.snapshot("orders", as_of=as_of)
                columns = choice.sample(whole.column_names, choice.randint(1, 4))
                wanted = pa.array(
                    [key(choice.randint(-2, 12) % 13) for _ in range(choice.randint(0, 4))],
                    key_type,
                )
                filtered = whole.filter(pc.is_in(whole["key"], value_set=wanted))
                assert (await node.snapshot("orders", as_of=as_of, columns=columns)).equals(
                    whole.select(columns)
                )
                assert (await node.snapshot("orders", as_of=as_of, keys=wanted)).equals(filtered)
                both = await node.snapshot("orders", as_of=as_of, columns=columns, keys=wanted)
                assert both.equals(filtered.select(columns))

    anyio.run(main)


@pytest.fixture(params=WAYS)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with opened_one_way(request.param, cut_interval_s=None) as opened:
        await opened.create_collection(
            "orders", schema_of(id=pa.int64(), item=pa.string()), primary_key="id", shards=2
        )
        yield opened


async def fill(node: Node) -> None:
    """Make three cuts of other ranges of keys, deletes in the last, and a tail."""
    for first in (0, 100):
        await node.insert("orders", [{"id": first + n, "item": f"{first}"} for n in range(50)])
        await node.flush()
    await node.delete("orders", [7, 110])
    await node.upsert("orders", [{"id": 8, "item": "new"}, {"id": 200, "item": "late"}])
    await node.flush()
    await node.upsert("orders", [{"id": 9, "item": "newest"}])


async def test_rows_of_some_keys_come_from_every_cut_and_the_log_with_what_was_deleted_left_out(
    node: Node,
) -> None:
    await fill(node)
    found = await node.snapshot("orders", keys=[7, 8, 9, 120, 110, 200, 999])
    assert sorted(map(tuple, (each.values() for each in found.to_pylist()))) == [
        (8, "new"),
        (9, "newest"),
        (120, "100"),
        (200, "late"),
    ]
    assert (await node.snapshot("orders", columns=["item"], keys=[8])).to_pydict() == {
        "item": ["new"]
    }
    assert (await node.snapshot("orders", columns=["item", "id"])).column_names == ["item", "id"]
    assert (await node.snapshot("orders", keys=[])).num_rows == 0
    assert (await node.snapshot("orders", keys=pa.table({"id": [8]}))).num_rows == 1


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Any:
    calls: list[tuple[Any, ...]] = []
    real = getattr(owner, name)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return real(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, call)
        yield calls


async def test_files_without_the_keys_and_shards_without_them_are_not_read(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(node)

    async def files_read(**selection: Any) -> int:
        with noted(monkeypatch, NodeDirectory, "read") as calls:
            await node.snapshot("orders", **selection)
        return sum(path.endswith(".parquet") for path, *_ in calls)

    everything = await files_read()
    assert everything >= 7
    assert await files_read(columns=["id"]) == everything
    one_key = await files_read(keys=[20])
    assert 1 <= one_key <= 2, (
        "one segment of its shard, and perhaps a file of deletes whose range has it"
    )
    assert await files_read(keys=[5000]) == 0


async def test_columns_that_are_not_asked_for_are_not_decoded(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(node)
    with noted(monkeypatch, pq.ParquetFile, "read_row_groups") as calls:
        await node.snapshot("orders", columns=["id"])
    assert calls
    assert not any("item" in columns for _, columns in calls)


@pytest.mark.parametrize(
    "selection, error, match",
    [
        (
            {"columns": ["id", "size"]},
            SchemaMismatch,
            "'size' is no column, or is chosen twice — choose of id, item",
        ),
        ({"columns": ["id", "id"]}, SchemaMismatch, "'id' is no column, or is chosen twice"),
        ({"columns": []}, SchemaMismatch, "no column is chosen — choose of id, item"),
        ({"columns": "id"}, InvalidArgument, "pass a list of names"),
        ({"columns": 7}, InvalidArgument, "pass a list of names"),
        ({"columns": ["id", 7]}, InvalidArgument, "pass a list of names"),
        ({"keys": ["tea"]}, SchemaMismatch, "column 'id', row 0"),
        ({"keys": pa.array(["tea"])}, SchemaMismatch, "id"),
        ({"keys": [1, None]}, SchemaMismatch, "row 1"),
        ({"keys": "12"}, InvalidArgument, "pass a list of key values"),
        ({"keys": 12}, InvalidArgument, "pass a list of key values"),
    ],
)
async def test_columns_and_keys_that_do_not_fit_are_refused(
    node: Node, selection: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        await node.snapshot("orders", **selection)


def test_a_blocking_node_takes_columns_and_keys(tmp_path: Path) -> None:
    with sn.sync.open_node(tmp_path) as node:
        node.create_collection(
            "orders", schema_of(id=pa.int64(), item=pa.string()), primary_key="id"
        )
        node.insert("orders", [{"id": n, "item": f"{n}"} for n in range(5)])
        assert node.snapshot("orders", columns=["item"], keys=[3]).to_pydict() == {"item": ["3"]}


# --- ticks at which there was no such collection


async def refused(node: Node, as_of: int | datetime) -> Truncated:
    """Return why there is no snapshot of `orders` as of a tick, whatever is asked for of it."""
    errors = []
    selections: list[dict[str, Any]] = [{}, {"columns": ["item"]}, {"keys": [1]}]
    for selection in selections:
        with pytest.raises(Truncated, match="is before collection 'orders' was created") as info:
            await node.snapshot("orders", as_of=as_of, **selection)
        errors.append(info.value)
    assert {error.earliest for error in errors} == {node.collection("orders").created_tick}
    assert all(f"ask for {error.earliest} " in str(error) for error in errors)
    return errors[0]


async def test_a_tick_before_the_creation_is_refused_with_the_first_one(node: Node) -> None:
    created = node.collection("orders").created_tick
    await fill(node)
    for as_of in (0, 1, created - 1, datetime(2001, 1, 1, tzinfo=UTC)):
        assert (await refused(node, as_of)).code == "TRUNCATED"
    assert (await node.snapshot("orders", as_of=created)).num_rows == 0, "it was there, and empty"
    now = await node.snapshot("orders")
    changed = await node.consistent_tick(["orders"])
    assert (await node.snapshot("orders", as_of=changed)).equals(now)


async def test_a_tick_in_the_life_of_an_earlier_collection_is_refused(node: Node) -> None:
    await fill(node)
    then = await node.consistent_tick()
    definition = node.collection("orders").schema
    await node.drop_collection("orders")
    between = await node.consistent_tick()
    await node.create_collection("orders", definition, primary_key="id")
    for flushed in (False, True):
        for as_of in (then, between):
            await refused(node, as_of)
        if not flushed:
            await node.upsert("orders", [{"id": 1, "item": "tea"}])
            await node.flush()
    created = node.collection("orders").created_tick
    assert (await node.snapshot("orders", as_of=created)).num_rows == 0


async def test_a_tick_yet_to_come_is_refused_with_the_tick_it_is_now(node: Node) -> None:
    await fill(node)
    now = await node.consistent_tick()
    later = datetime.now(UTC) + timedelta(days=1)
    said = r"as_of=\d+ \(.*\) is yet to come, it is \d+ \(.*\) now — leave it out"
    with pytest.raises(InvalidArgument, match=said):
        await node.snapshot("orders", as_of=later)
    with pytest.raises(InvalidArgument, match="yet to come"):
        await node.snapshot("orders", as_of=now + (1 << 40))
    moment_ago = datetime.now(UTC)
    assert (await node.snapshot("orders", as_of=moment_ago)).num_rows > 0


async def test_a_reader_that_starts_before_the_creation_begins_with_it(node: Node) -> None:
    created = node.collection("orders").created_tick
    await node.insert("orders", [{"id": 1, "item": "tea"}])
    for after in (0, created - 1, datetime(2001, 1, 1, tzinfo=UTC)):
        start = sn.DeliverPolicy.start_after(after)
        async with node.read("orders", start, until=await node.consistent_tick()) as messages:
            kinds = [message.type.name async for message in messages]
        assert kinds == ["CREATE_COLLECTION", "INSERT"]


def test_a_restored_node_knows_when_its_collections_were_created(tmp_path: Path) -> None:
    with sn.sync.open_node(tmp_path / "data") as node:
        node.create_collection("stock", schema_of(id=pa.int64()), primary_key="id")
        before = node.consistent_tick()
        node.create_collection("orders", schema_of(id=pa.int64()), primary_key="id")
        node.insert("orders", [{"id": 1}])
        created = node.collection("orders").created_tick
        node.backup(tmp_path / "backup")
    restore_directory(tmp_path / "backup", tmp_path / "restored")
    for directory in ("data", "restored"):
        with sn.sync.open_node(tmp_path / directory) as node:
            with pytest.raises(Truncated) as info:
                node.snapshot("orders", as_of=before)
            assert info.value.earliest == created
            assert node.snapshot("orders", as_of=created).num_rows == 0


async def test_an_export_leaves_out_what_was_made_anew_after_its_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sn.open_node(None) as node:
        for name in ("orders", "stock"):
            await node.create_collection(name, schema_of(id=pa.int64()), primary_key="id")
            await node.insert(name, [{"id": 1}])
        take = node.snapshot

        async def made_anew(collection: str, **options: Any) -> pa.Table:
            if collection == "orders":  # the first in the export
                await node.drop_collection("stock")
                await node.create_collection("stock", schema_of(id=pa.int64()), primary_key="id")
            return await take(collection, **options)

        monkeypatch.setattr(node, "snapshot", made_anew)
        done = await export_node(node, tmp_path / "out", tmp_path)
    assert [(file.collection, file.rows) for file in done.files] == [("orders", 1)]
