"""Snapshots of some columns and keys: what the whole snapshot has of them, read from the files that may have it."""

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
from streamingnode.node import Node
from tests.parts_of import WAYS, opened_one_way
from tests.streamingnode.append_double import schema_of
from wal.errors import InvalidArgument

pytestmark = pytest.mark.anyio

KINDS: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "whole": (pa.int64(), lambda n: n - 3),
    "small": (pa.int16(), lambda n: n - 3),
    "text": (pa.string(), lambda n: "é" * (n % 3) + f"{n}"),
    "long text": (pa.large_string(), lambda n: f"{n}"),
    "bytes": (pa.binary(), lambda n: b"\xff" * (n % 3) + bytes([n])),
    "date": (pa.date32(), lambda n: date(1969, 12, 30) + timedelta(days=n)),
    "time": (pa.timestamp("ms", "UTC"), lambda n: datetime(1969, 12, 31, 23, 59, tzinfo=UTC) + timedelta(hours=n)),
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
@given(kind=st.sampled_from(sorted(KINDS)), steps=STEPS, choice=st.integers(0, 1 << 32).map(random.Random))
def test_a_selection_is_what_the_whole_snapshot_has_of_it(
    kind: str, steps: list[tuple[str, list[int]]], choice: random.Random
) -> None:
    key_type, key = KINDS[kind]

    async def main() -> None:
        async with sn.open_node(None, cut_interval_s=None) as node:
            await node.create_collection("orders", columns_of(key_type), primary_key="key", shards=3)
            ticks = [await node.consistent_tick()]
            for number, (step, keys) in enumerate(steps):
                if step == "flush":
                    ticks.append((await node.flush()).tick)
                elif step == "delete":
                    ticks.append((await node.delete("orders", [key(each) for each in keys])).time_tick)
                else:
                    write = node.insert if step == "insert" else node.upsert
                    ticks.append((await write("orders", [row(key(each), number) for each in keys])).time_tick)
            for as_of in (None, *choice.sample(ticks, min(2, len(ticks)))):
                whole = await node.snapshot("orders", as_of=as_of)
                columns = choice.sample(whole.column_names, choice.randint(1, 4))
                wanted = pa.array([key(choice.randint(-2, 12) % 13) for _ in range(choice.randint(0, 4))], key_type)
                filtered = whole.filter(pc.is_in(whole["key"], value_set=wanted))
                assert (await node.snapshot("orders", as_of=as_of, columns=columns)).equals(whole.select(columns))
                assert (await node.snapshot("orders", as_of=as_of, keys=wanted)).equals(filtered)
                both = await node.snapshot("orders", as_of=as_of, columns=columns, keys=wanted)
                assert both.equals(filtered.select(columns))

    anyio.run(main)


@pytest.fixture(params=WAYS)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with opened_one_way(request.param, cut_interval_s=None) as opened:
        await opened.create_collection("orders", schema_of(id=pa.int64(), item=pa.string()), primary_key="id", shards=2)
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


async def test_rows_of_some_keys_come_from_every_cut_and_the_log_with_what_was_deleted_left_out(node: Node) -> None:
    await fill(node)
    found = await node.snapshot("orders", keys=[7, 8, 9, 120, 110, 200, 999])
    assert sorted(map(tuple, (each.values() for each in found.to_pylist()))) == [
        (8, "new"),
        (9, "newest"),
        (120, "100"),
        (200, "late"),
    ]
    assert (await node.snapshot("orders", columns=["item"], keys=[8])).to_pydict() == {"item": ["new"]}
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
    assert 1 <= one_key <= 2, "one segment of its shard, and perhaps a file of deletes whose range has it"
    assert await files_read(keys=[5000]) == 0


async def test_columns_that_are_not_asked_for_are_not_decoded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(node)
    with noted(monkeypatch, pq.ParquetFile, "read_row_groups") as calls:
        await node.snapshot("orders", columns=["id"])
    assert calls
    assert not any("item" in columns for _, columns in calls)


@pytest.mark.parametrize(
    "selection, error, match",
    [
        ({"columns": ["id", "size"]}, SchemaMismatch, "'size' is no column, or is chosen twice — choose of id, item"),
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
        node.create_collection("orders", schema_of(id=pa.int64(), item=pa.string()), primary_key="id")
        node.insert("orders", [{"id": n, "item": f"{n}"} for n in range(5)])
        assert node.snapshot("orders", columns=["item"], keys=[3]).to_pydict() == {"item": ["3"]}
