"""A snapshot reads what a table has taken from the table: the same rows, of every type, whatever
the node still keeps.
"""

import shutil
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import spark_sink
import streamingnode as sn
from flusher.directory import CutLog, cut_numbers
from spark_sink.changes import verify_files
from spark_sink.errors import PackageMissing
from spark_sink.table import OpenTable
from streamingnode.care.export import export_directory
from wal.errors import Corrupt, StorageFailed, Truncated

pytestmark = pytest.mark.spark

THRIFTY: dict[str, Any] = {
    "cut_interval_s": None,
    "retention_s": 0,
    "flush.retention.interval_s": 0.01,
}
KEEPING: dict[str, Any] = {"cut_interval_s": None}
COLUMNS: dict[str, pa.DataType] = {"id": pa.int64(), "item": pa.string()}
PLAIN = pa.schema(COLUMNS)
TYPES: dict[str, tuple[pa.DataType, Any]] = {
    "flag": (pa.bool_(), True),
    "tiny": (pa.int8(), -5),
    "short": (pa.int16(), -500),
    "whole": (pa.int32(), 1 << 20),
    "ratio": (pa.float32(), 0.1),
    "exact": (pa.float64(), float("inf")),
    "price": (pa.decimal128(38, 10), Decimal("-1234567890123456789012345678.0123456789")),
    "cents": (pa.decimal128(9, 2), Decimal("12.34")),
    "text": (pa.large_string(), "na\u00efve\u0000"),
    "blob": (pa.large_binary(), b"\x00\xff"),
    "raw": (pa.binary(), b""),
    "day": (pa.date32(), date(1, 1, 1)),
    # the column has no zone
    "seen": (pa.timestamp("ms"), datetime(1500, 2, 28, 12, 30, 1, 5000)),  # noqa: DTZ001
    "heard": (
        pa.timestamp("us", "Europe/Berlin"),
        datetime(2024, 2, 29, 12, 30, 1, 5001, tzinfo=UTC),
    ),
    "told": (pa.timestamp("ms", "UTC"), datetime(1969, 12, 31, 23, 59, 59, 999000, tzinfo=UTC)),
    "tags": (pa.large_list(pa.large_string()), ["a", None, ""]),
    "pair": (pa.list_(pa.float32(), 2), [0.5, None]),
    "point": (
        pa.struct(
            [("x", pa.timestamp("ms")), ("inner", pa.list_(pa.struct([("y", pa.large_binary())])))]
        ),
        {"x": datetime(2024, 1, 1), "inner": [{"y": b"1"}, None, {"y": None}]},  # noqa: DTZ001
    ),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "data"


def ids(table: pa.Table) -> list[int]:
    return sorted(int(str(number)) for number in table["id"].to_pylist())


def given_up(place: Path, earliest: int) -> None:
    """Open the node until retention has given up everything before a cut."""
    with sn.sync.open_node(place, **THRIFTY) as node:
        while min(cut_numbers(place)) < earliest:
            node.consistent_tick()


def test_every_value_comes_back_equal_from_the_table_alone(
    spark: SparkSession, place: Path, tables: Path
) -> None:
    schema = pa.schema(
        [pa.field("id", pa.int64()), *(pa.field(name, kind) for name, (kind, _) in TYPES.items())]
    )
    with sn.sync.open_node(place, **KEEPING) as node:
        node.create_collection("orders", schema, primary_key="id", shards=2)
        rows = [
            {"id": 1, **{name: value for name, (_, value) in TYPES.items()}},
            {"id": 2, **dict.fromkeys(TYPES)},
        ]
        node.insert("orders", pa.Table.from_pylist(rows, schema=schema))
        before = node.snapshot("orders")
        spark_sink.ingest(spark, node, tables)
        shutil.rmtree(place / "segments")  # what a table has taken is read from nowhere else
        after = node.snapshot("orders")
    assert after.schema == before.schema == schema
    assert after.sort_by("id").equals(before.sort_by("id"))
    assert export_directory(place, place.with_name("out")).missing == ()
    exported = pq.read_table(place.with_name("out") / "orders.parquet")
    assert exported.schema == schema
    assert exported.sort_by("id").equals(before.sort_by("id"))


def test_columns_and_keys_are_chosen_of_table_files_and_log_alike(
    spark: SparkSession, place: Path, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sn.sync.open_node(place, **KEEPING) as node:
        node.create_collection("orders", PLAIN, primary_key="id", shards=2, partitions=["eu"])
        for first in (0, 100):
            node.insert("orders", [{"id": first + n, "item": f"{n}"} for n in range(40)])
            node.insert(
                "orders", [{"id": first + n, "item": "eu"} for n in range(50, 60)], partition="eu"
            )
            node.flush()
            spark_sink.ingest(spark, node, tables)
        inside = node.upsert(
            "orders", [{"id": 1, "item": "new"}, {"id": 300, "item": "new"}]
        ).time_tick
        node.delete("orders", [2, 102, 155])
        node.flush()
        node.upsert("orders", [{"id": 3, "item": "newest"}])
        keys = pa.array([1, 2, 3, 4, 55, 102, 103, 155, 156, 300, 999])
        read: list[Any] = []
        real = OpenTable.read_file

        def noted(table: OpenTable, file: Any, **options: Any) -> pa.Table:
            read.append(file)
            return real(table, file, **options)

        monkeypatch.setattr(OpenTable, "read_file", noted)
        for as_of in (None, inside, inside - 1):
            whole = node.snapshot("orders", as_of=as_of)
            chosen = whole.filter(pc.is_in(whole["id"], value_set=keys))
            assert node.snapshot("orders", as_of=as_of, keys=keys).equals(chosen)
            assert node.snapshot("orders", as_of=as_of, keys=keys, columns=["item"]).equals(
                chosen.select(["item"])
            )
        in_all = len(read) // 9
        read.clear()
        assert node.snapshot("orders", columns=["item"], keys=[5]).to_pydict() == {"item": ["5"]}
        assert 0 < len(read) < in_all


def test_a_snapshot_goes_on_after_cuts_were_given_up(
    spark: SparkSession, place: Path, tables: Path
) -> None:
    ticks: dict[int, list[int]] = {}
    with sn.sync.open_node(place, **KEEPING) as node:
        node.create_collection("orders", PLAIN, primary_key="id", partitions=["eu", "us"])

        def note(tick: int) -> None:
            ticks[tick] = ids(node.snapshot("orders", as_of=tick))

        for number in range(4):
            note(node.insert("orders", [{"id": number, "item": "a"}], partition="us").time_tick)
            note(
                node.insert("orders", [{"id": 10 + number, "item": "b"}], partition="eu").time_tick
            )
            node.flush()
            if number == 1:
                spark_sink.ingest(spark, node, tables)
        spark_sink.ingest(spark, node, tables, every_cut=True)
        note(node.delete("orders", [0]).time_tick)
        note(node.upsert("orders", [{"id": 1, "item": "c"}]).time_tick)
        node.flush()
        note(node.delete("orders", [2]).time_tick)
    given_up(place, 4)
    hidden = sorted(ticks)[:3]  # taken together in one commit
    inside = [sorted(ticks)[4], sorted(ticks)[6]]  # between the changes of one cut
    with sn.sync.open_node(place, **KEEPING) as node:
        for tick, expected in ticks.items():
            if tick in hidden + inside:
                with pytest.raises(Truncated, match=r"ask for \d+ or \d+, the nearest that table"):
                    node.snapshot("orders", as_of=tick)
            else:
                assert ids(node.snapshot("orders", as_of=tick)) == expected
        assert ids(node.snapshot("orders")) == [1, 3, 10, 11, 12, 13]
        node.drop_partition("orders", "eu")
        assert ids(node.snapshot("orders")) == [1, 3]
        node.create_partition("orders", "eu")
        node.insert("orders", [{"id": 77, "item": "n"}], partition="eu")
        assert ids(node.snapshot("orders")) == [1, 3, 77]
        node.flush()
        assert ids(node.snapshot("orders")) == [1, 3, 77]


@pytest.fixture
def taken(spark: SparkSession, place: Path, tables: Path) -> Iterator[sn.sync.SyncNode]:
    """A node whose rows are partly in its table alone."""
    with sn.sync.open_node(place, **KEEPING) as node:
        node.create_collection("orders", PLAIN, primary_key="id")
        for number in range(3):
            node.insert("orders", [{"id": number, "item": "a"}])
            node.flush()
        spark_sink.ingest(spark, node, tables)
    given_up(place, 3)
    with sn.sync.open_node(place, **KEEPING) as node:
        yield node


def test_a_table_that_cannot_be_used_is_named_with_what_to_do(
    taken: sn.sync.SyncNode,
    spark: SparkSession,
    place: Path,
    tables: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ids(taken.snapshot("orders")) == [0, 1, 2]
    with monkeypatch.context() as patched:
        patched.setattr("spark_sink.leased.find_spec", lambda _name: None)
        with pytest.raises(PackageMissing, match=r"deltalake is not installed .*\.\[tables\]"):
            taken.snapshot("orders")
    elsewhere = tables.with_name("elsewhere")
    tables.rename(elsewhere)
    with pytest.raises(
        StorageFailed,
        match=f"are in table {tables}/orders, which is not there — put it back, or run",
    ):
        taken.snapshot("orders")
    spark_sink.ingest(spark, taken, elsewhere)
    assert ids(taken.snapshot("orders")) == [0, 1, 2]
    file, *_ = sorted(elsewhere.rglob("_partition=*/*.parquet"))
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(Corrupt, match="bytes, its table says"):
        taken.snapshot("orders")
    file.write_bytes(content)
    assert ids(taken.snapshot("orders")) == [0, 1, 2]


def test_a_table_of_another_history_is_not_believed(
    spark: SparkSession, place: Path, tables: Path, tmp_path: Path
) -> None:
    with sn.sync.open_node(place, **KEEPING) as node:
        node.create_collection("orders", PLAIN, primary_key="id")
        node.flush()
    shutil.copytree(place, tmp_path / "copy")
    for path, number, into in ((tmp_path / "copy", 1, tmp_path / "others"), (place, 2, tables)):
        with sn.sync.open_node(path, **KEEPING) as node:
            node.insert("orders", [{"id": number, "item": "a"}])
            spark_sink.ingest(spark, node, into)
    shutil.rmtree(tables)
    (tmp_path / "others").rename(tables)
    with sn.sync.open_node(place, **KEEPING) as node:
        assert ids(node.snapshot("orders")) == [2], "the node's own files are all there"


def test_a_dropped_collection_gives_its_disk_back_and_nobody_minds(
    spark: SparkSession, place: Path, tables: Path, tmp_path: Path
) -> None:
    with sn.sync.open_node(place, **KEEPING) as node:
        for name in ("gone", "kept"):
            node.create_collection(name, PLAIN, primary_key="id")
            node.insert(name, [{"id": 1, "item": name}])
        node.flush()
        node.drop_collection("gone")
        node.flush()
    with sn.sync.open_node(place, **THRIFTY) as node:
        while sum(1 for _ in place.rglob("*.parquet")) > 1:
            node.consistent_tick()
        assert len(CutLog(place).numbers) == 2, "no table has taken what lives"
        assert not node.verify().findings
        assert node.backup(tmp_path / "backup").cut == 2
        assert ids(node.snapshot("kept")) == [1]
        with pytest.raises(Truncated, match="of a collection that was dropped, is no longer kept"):
            verify_files(place, CutLog(place).read(1).manifest.segments)
        # from now on retention may take the first cut
        report = spark_sink.ingest(spark, node, tables)
        assert [table.table for table in report.tables] == ["kept"]


def test_a_tick_before_the_creation_is_refused_when_only_the_table_has_rows(
    spark: SparkSession, place: Path, tables: Path
) -> None:
    with sn.sync.open_node(place, **KEEPING) as node:
        node.create_collection("stock", PLAIN, primary_key="id")
        node.insert("stock", [{"id": 1, "item": "a"}])
        before = node.flush().tick
        node.create_collection("orders", PLAIN, primary_key="id")
        created = node.collection("orders").created_tick
        for number in range(3):
            node.insert("orders", [{"id": number, "item": "a"}])
            node.flush()
        spark_sink.ingest(spark, node, tables, every_cut=True)
    given_up(place, 4)
    with sn.sync.open_node(place, **KEEPING) as node:
        for tick in (0, before, created - 1):
            with pytest.raises(Truncated, match="before collection 'orders' was created") as info:
                node.snapshot("orders", as_of=tick)
            assert info.value.earliest == created
        assert node.snapshot("orders", as_of=created).num_rows == 0
        assert node.snapshot("orders").num_rows == 3
