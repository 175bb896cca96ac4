"""Tables equal the model after every ingest, and stay whole whatever is dropped or raced."""

import errno
import os
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import spark_sink
from flusher.cuts import Lease, lease_path
from spark_sink import commit
from spark_sink.columns import TableFile
from spark_sink.commit import INTENTS
from spark_sink.ingestion import LOCKS, IngestJob
from spark_sink.table import OpenTable
from tests.spark_sink.conftest import Ingest
from tests.spark_sink.node_builder import NodeBuilder, ordered, orders
from tests.spark_sink.table_reading import lease_of, rows_of
from tests.synced_disk import PowerCut
from wal.errors import StorageFailed

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("seed", range(2))
def test_every_version_of_every_table_is_the_model_at_its_cut(
    seed: int, spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    chance = random.Random(seed)
    for name in ("orders", "stock"):
        node.create(name, shards=chance.randint(1, 3))
    for _ in range(3):
        for _ in range(chance.randint(1, 3)):
            for _ in range(chance.randint(0, 8)):
                act_at_random(node, chance)
            node.cut()
        ingest(commit_bytes_max=chance.choice([8_000, 1 << 30]))
        for name in node.collections:
            assert rows_of(tables / name) == node.expected(name)
    for name, collection in node.collections.items():
        for entry in DeltaTable(str(tables / name)).history():
            if entry["streamingnode"]["tick"] > collection.created_tick:
                expected = node.history[entry["streamingnode"]["cut"]].get(name, [])
                assert rows_of(tables / name, entry["version"]) == ordered(expected)
        frame = spark_sink.read_table(spark, tables / name)
        assert ordered(row.asDict() for row in frame.collect()) == node.expected(name)
        source = (
            spark.read.format("streamingnode")
            .option("node", str(node.path))
            .option("subscribe", name)
            .load()
        )
        assert source.schema.simpleString() == frame.schema.simpleString()
        assert ordered(row.asDict() for row in source.collect()) == node.expected(name)


def test_a_table_without_a_lease_ends_when_its_dropped_collection_has_lost_files(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.insert("orders", orders(1))
    node.cut()

    def stop(step: str) -> None:
        if step == "ingest.created":
            raise PowerCut

    with pytest.raises(PowerCut):
        ingest(on_step=stop)
    node.drop("orders")
    node.create("stock")
    node.cut()
    # as retention does: no lease says that a table waits for them
    shutil.rmtree(node.path / "segments")
    report = ingest(every_cut=True)
    assert [(table.table, table.dropped) for table in report.tables] == [
        ("orders", True),
        ("stock", False),
    ]
    assert ingest(into=tables.with_name("later")).tables[0].table == "stock", (
        "no table is begun for what is gone"
    )


def act_at_random(node: NodeBuilder, chance: random.Random) -> None:
    name = chance.choice(sorted(node.collections))
    collection = node.collections[name]
    numbers = [chance.randrange(40) for _ in range(chance.randint(1, 12))]
    partition = chance.choice(sorted(collection.partitions))
    match chance.choices(range(7), weights=[8, 5, 5, 2, 2, 1, 1])[0]:
        case 0:
            node.insert(name, orders(*numbers, amount=chance.random()), partition)
        case 1:
            node.upsert(name, orders(*set(numbers), amount=chance.random()), partition)
        case 2:
            node.delete(name, numbers)
        case 3:
            node.seal()
        case 4 if len(collection.partitions) < 3:
            node.create_partition(name, "eu" if "eu" not in collection.partitions else "us")
        case 5 if partition != "_default":
            node.drop_partition(name, partition)
            if chance.random() < 0.7:
                node.create_partition(name, partition)
        case 6:
            node.drop(name)
            node.create(name)
        case _:
            node.insert(name, orders(*numbers), partition)


def test_a_second_ingest_takes_nothing(node: NodeBuilder, tables: Path, ingest: Ingest) -> None:
    node.create()
    node.insert("orders", orders(1, 2))
    node.cut()
    ingest()
    version = DeltaTable(str(tables / "orders")).version()
    again = ingest()
    assert (again.rows_added, again.tables[0].first_cut) == (0, 0)
    assert DeltaTable(str(tables / "orders")).version() == version


def test_report_counts_rows_and_cuts(node: NodeBuilder, ingest: Ingest) -> None:
    node.create(shards=1)
    node.insert("orders", orders(1, 2, 3))
    node.delete("orders", [2])
    node.cut()
    first = ingest().tables[0]
    assert (first.first_cut, first.last_cut, first.rows_added, first.rows_deleted) == (1, 1, 3, 1)
    node.delete("orders", [1])
    node.cut()
    node.cut()
    second = ingest().tables[0]
    assert (second.first_cut, second.last_cut, second.rows_added, second.rows_deleted) == (
        2,
        3,
        0,
        1,
    )
    assert second.tick == node.cut_tick


def test_only_files_that_hold_a_deleted_row_are_rewritten(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create(shards=1)
    for numbers in ([1, 9], [2, 8], [3, 7]):
        node.insert("orders", orders(*numbers))
        node.cut()
        ingest()
    before = set(DeltaTable(str(tables / "orders")).file_uris())
    # 5 lies within the key range of all three files and in none of them
    node.delete("orders", [8, 5])
    node.cut()
    ingest()
    after = set(DeltaTable(str(tables / "orders")).file_uris())
    assert len(before & after) == 2
    assert rows_of(tables / "orders") == node.expected("orders")


def test_more_deleted_keys_than_are_looked_up_leave_the_same_rows(
    node: NodeBuilder, tables: Path, ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "DELETES_LOOKED_UP_MAX", 2)
    node.create(shards=1)
    node.insert("orders", orders(1, 3, 5, 7))
    node.cut()
    ingest()
    node.delete("orders", [2, 4, 6])  # which lie between the keys of the file, and are in none
    node.upsert("orders", orders(4, 5, 9))
    node.cut()
    ingest()
    assert rows_of(tables / "orders") == node.expected("orders")


def test_keys_that_are_changed_while_they_are_new_do_not_have_the_whole_table_rewritten(
    node: NodeBuilder, tables: Path, ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "GROWN_ROWS", 10)
    node.create(shards=1)
    rewritten = []
    for first in range(0, 60, 4):
        node.insert("orders", orders(*range(first, first + 4)))
        if first:
            node.delete("orders", [first - 1])
            node.insert("orders", orders(first - 1))
        node.cut()
        before = DeltaTable(str(tables / "orders")).file_uris() if first else []
        ingest()
        rewritten.append(len({*before}.difference(DeltaTable(str(tables / "orders")).file_uris())))
        assert rows_of(tables / "orders") == node.expected("orders")
    files = OpenTable.load(tables / "orders").files()  # type: ignore[union-attr]
    assert len(files) > 60 // (10 + 4) - 1
    assert max(rewritten) <= 2
    assert max(file.rows or 0 for file in files) < 10 + 4 + 1


def test_grown_files_are_rewritten_alone_and_many_of_them_together() -> None:
    grown = [
        TableFile(str(number), 1, commit.GROWN_ROWS, "_default")
        for number in range(commit.APART_MAX + 1)
    ]
    small = [TableFile("small", commit.GROWN_BYTES - 1, commit.GROWN_ROWS - 1, "_default")]
    large = TableFile("large", commit.GROWN_BYTES, None, "_default")
    assert commit.split_by_size([*small, large, *grown[:-2]]) == (
        [[large], *[[file] for file in grown[:-2]]],
        small,
    )
    assert commit.split_by_size([*grown, *small]) == ([grown], small)


def test_a_recreated_partition_keeps_only_its_new_rows(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.create_partition("orders", "eu")
    node.insert("orders", orders(1, 2), "eu")
    node.insert("orders", orders(3))
    node.cut()
    ingest()
    node.insert("orders", orders(4), "eu")
    node.cut()
    node.drop_partition("orders", "eu")
    node.create_partition("orders", "eu")
    node.insert("orders", orders(5), "eu")
    node.cut()
    report = ingest()
    assert [row["id"] for row in rows_of(tables / "orders") if row["_partition"] == "eu"] == [5]
    assert rows_of(tables / "orders") == node.expected("orders")
    assert report.rows_deleted == 2


def test_a_recreated_collection_gets_a_table_of_its_own(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    old = node.create()
    node.insert("orders", orders(1, 2))
    node.cut()
    ingest()
    last = node.expected("orders")
    node.drop("orders")
    node.create(schema=pa.schema([("id", pa.string())]))
    node.insert("orders", [{"id": "a"}])
    node.cut()
    report = ingest()
    assert rows_of(tables / f"orders@{old.id}") == last
    assert rows_of(tables / "orders") == node.expected("orders")
    assert [(table.path, table.dropped) for table in report.tables] == [
        (str(tables / f"orders@{old.id}"), True),
        (str(tables / "orders"), False),
    ]


def test_a_dropped_collection_gives_up_its_lease(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.cut()
    ingest()
    assert lease_of(node, tables / "orders").cut == 1
    node.drop("orders")
    node.cut()
    ingest()
    assert not lease_path(node.path, tables / "orders").exists()


def test_an_ingest_goes_on_after_it_has_retired_a_table(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    for name in ("orders", "old"):
        node.create(name)
        node.insert(name, orders(1))
    node.cut()
    ingest()
    node.drop("old")
    node.cut()
    for key in (2, 3):
        node.insert("orders", orders(key))
        node.cut()
    ingest(commit_bytes_max=1)
    assert rows_of(tables / "orders") == node.expected("orders")
    assert sorted(
        path.name.partition("@")[0] for path in tables.iterdir() if path.name[0] != "."
    ) == ["old", "orders"]


def test_a_table_that_took_the_drop_is_retired_although_later_cuts_know_nothing_of_it(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    old = node.create()
    node.insert("orders", orders(1))
    node.cut()
    ingest()
    last = node.expected("orders")
    node.drop("orders")
    node.cut()

    def stop(step: str) -> None:
        if step == "ingest.finished":
            raise PowerCut

    with pytest.raises(PowerCut):
        ingest(on_step=stop)
    node.create()
    node.insert("orders", orders(2))
    node.cut()
    report = ingest()
    assert [(table.path, table.dropped, table.rows_added) for table in report.tables] == [
        (str(tables / f"orders@{old.id}"), True, 0),
        (str(tables / "orders"), False, 1),
    ]
    assert rows_of(tables / f"orders@{old.id}") == last


def test_a_job_that_knows_older_cuts_leaves_a_newer_collections_table_alone(
    spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create("stock")
    node.cut()
    older = IngestJob(spark, node.path, tables, progress=lambda *_: None)
    assert older._cuts.newest == 1, "listed once"
    node.create()
    node.insert("orders", orders(1))
    node.cut()
    ingest()
    assert [table.table for table in older.run().tables] == ["stock"]
    assert rows_of(tables / "orders") == node.expected("orders")


def test_a_collection_born_and_dropped_between_ingests_leaves_no_table(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.insert("orders", orders(1))
    node.cut()
    node.drop("orders")
    node.cut()
    assert ingest().tables == ()
    assert not (tables / "orders").exists()


def test_lease_says_what_the_table_has_taken(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    collection = node.create()
    node.cut()
    node.cut()
    ingest()
    assert lease_of(node, tables / "orders") == Lease(
        table=str(tables / "orders"),
        node_id="node-1",
        collection_id=collection.id,
        cut=2,
        tick=node.cut_tick,
    )


def test_two_table_directories_have_a_lease_each(
    node: NodeBuilder, tables: Path, tmp_path: Path, ingest: Ingest
) -> None:
    node.create()
    node.cut()
    ingest()
    node.cut()
    ingest(into=tmp_path / "other")
    assert lease_of(node, tables / "orders").cut == 1
    assert lease_of(node, tmp_path / "other" / "orders").cut == 2


def test_taken_cuts_may_be_deleted(node: NodeBuilder, tables: Path, ingest: Ingest) -> None:
    node.create()
    node.insert("orders", orders(1))
    node.cut()
    node.cut()
    ingest()
    node.insert("orders", orders(2))
    node.cut()
    for number in (1, 2):
        (node.path / "cuts" / f"{number:016d}.json").unlink()
    ingest()
    assert rows_of(tables / "orders") == node.expected("orders")


def test_a_job_that_loses_the_commit_finds_its_cuts_taken(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.insert("orders", orders(1, 2, 3))
    node.cut()
    raced: list[str] = []

    def another_job_is_faster(step: str) -> None:
        if step == "ingest.sealed" and not raced:
            raced.append(step)
            shutil.rmtree(tables / LOCKS)  # as on a machine whose locks we do not see
            assert ingest().rows_added == 3

    report = ingest(on_step=another_job_is_faster)
    assert raced
    assert report.rows_added == 0
    assert rows_of(tables / "orders") == node.expected("orders")
    assert len(list((tables / "orders").glob("cut-*"))) == 1
    assert not list((tables / "orders" / "_attempts").iterdir())


def test_a_cut_taken_by_a_faster_job_after_the_listing_is_no_restored_node(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.insert("orders", orders(1))
    node.cut()

    def another_cut_is_made_and_taken(step: str) -> None:
        if step == "ingest.sealed" and node.number == 1:
            shutil.rmtree(tables / LOCKS)
            node.insert("orders", orders(2))
            node.cut()
            ingest()

    ingest(on_step=another_cut_is_made_and_taken)
    assert rows_of(tables / "orders") == node.expected("orders")


def test_what_a_failed_attempt_left_goes_once_it_is_old(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.insert("orders", orders(1))
    node.cut()

    def fail(step: str) -> None:
        if step == "ingest.sealed":
            raise PowerCut

    with pytest.raises(PowerCut):
        ingest(on_step=fail)
    [left] = (tables / "orders").glob("cut-*")
    ingest()
    assert left.exists()
    os.utime(tables / "orders" / INTENTS / left.name, (0, 0))
    ingest()
    assert not left.exists()
    assert rows_of(tables / "orders") == node.expected("orders")


def test_an_ingest_that_is_interrupted_gives_its_room_back_at_once(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.insert("orders", orders(1))
    node.cut()

    def interrupt(step: str) -> None:
        if step == "ingest.sealed":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(on_step=interrupt)
    assert not list((tables / "orders").glob("cut-*"))
    ingest()
    assert rows_of(tables / "orders") == node.expected("orders")


def test_relative_paths_are_those_of_this_process_wherever_java_was_started(
    spark: SparkSession, node: NodeBuilder, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.create()
    node.insert("orders", orders(1, 2, 3))
    node.cut()
    monkeypatch.chdir(node.path.parent)
    there = spark_sink.ingest(spark, node.path.name, os.path.relpath(tables), request_cut=False)
    assert there.rows_added == 3
    node.upsert("orders", orders(2, amount=9.0))  # which reads what is in the table
    node.cut()
    spark_sink.ingest(spark, node.path.name, os.path.relpath(tables), request_cut=False)
    assert rows_of(tables / "orders") == node.expected("orders")


@pytest.mark.parametrize("lost", ["directory", "rows"])
def test_rows_that_spark_wrote_elsewhere_are_no_commit(
    lost: str, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.insert("orders", orders(1, 2, 3))
    node.cut()

    def lose(step: str) -> None:
        if step == "ingest.written":
            (attempt,) = (tables / "orders").glob("cut-*")
            if lost == "directory":
                shutil.rmtree(attempt)
            else:
                for file in attempt.rglob("*.parquet"):
                    file.unlink()

    with pytest.raises(StorageFailed):
        ingest(on_step=lose)
    assert rows_of(tables / "orders") == []
    ingest()
    assert rows_of(tables / "orders") == node.expected("orders")


@pytest.mark.parametrize(
    "step",
    ["ingest.intended", "ingest.written", "ingest.sealed", "ingest.committed", "ingest.finished"],
)
def test_a_disk_that_is_full_is_typed_and_the_next_ingest_goes_on(
    step: str, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.insert("orders", orders(1, 2, 3))
    node.cut()

    def fill(at: str) -> None:
        if at == step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StorageFailed, match="No space left"):
        ingest(on_step=fill)
    ingest()
    assert rows_of(tables / "orders") == node.expected("orders")
