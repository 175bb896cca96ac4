"""What an ingest refuses: another node, an older or damaged one, cuts that are gone."""

import os
import shutil
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import spark_sink
from flusher.directory import CutLog, manifest_path
from flusher.manifest import decode_manifest, encode_manifest
from spark_sink.cut_request import AnsweredCut
from spark_sink.errors import TableAhead, typed
from spark_sink.ingestion import IngestJob
from tests.spark_sink.conftest import Ingest
from tests.spark_sink.node_builder import NodeBuilder, orders
from tests.spark_sink.table_reading import rows_of
from wal.errors import AlreadyExists, Corrupt, StorageFailed, Truncated

pytestmark = pytest.mark.spark


def test_a_node_older_than_its_table_is_refused(
    node: NodeBuilder, tmp_path: Path, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.cut()
    node.copy(tmp_path / "backup")
    node.insert("orders", orders(1))
    node.cut()
    ingest()
    shutil.rmtree(node.path)
    shutil.copytree(tmp_path / "backup", node.path)
    with pytest.raises(TableAhead, match="newest is 1"):
        ingest()
    assert len(rows_of(tables / "orders")) == 1


def test_a_restored_node_that_went_on_is_refused(
    node: NodeBuilder, tmp_path: Path, ingest: Ingest
) -> None:
    node.create()
    node.cut()
    other = tmp_path / "other"
    node.copy(other)
    node.insert("orders", orders(1))
    node.cut()
    ingest()
    shutil.rmtree(node.path)
    shutil.copytree(other, node.path)
    first = CutLog(node.path).read(1)
    node.number = 1
    node.crc = first.crc32c
    node.cut_tick = first.tick
    node.insert("orders", orders(2))
    node.cut()
    node.cut()
    with pytest.raises(TableAhead, match="another cut 2"):
        ingest()


def test_a_table_of_another_node_is_refused(
    node: NodeBuilder, tables: Path, tmp_path: Path, spark: SparkSession
) -> None:
    for number in (1, 2):
        builder = NodeBuilder(tmp_path / f"node-{number}", f"node-{number}")
        builder.create()
        builder.cut()
    spark_sink.ingest(spark, tmp_path / "node-1", tables, request_cut=False)
    with pytest.raises(AlreadyExists, match="node-1"):
        spark_sink.ingest(spark, tmp_path / "node-2", tables, request_cut=False)


def test_a_directory_that_is_no_table_is_refused(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create()
    node.cut()
    (tables / "orders").mkdir(parents=True)
    (tables / "orders" / "precious.txt").write_text("mine")
    with pytest.raises(AlreadyExists, match="is no table"):
        ingest()


@pytest.mark.parametrize("damage", ["flip", "cut short"])
def test_a_damaged_file_is_named_and_nothing_is_committed(
    damage: str, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create(shards=1)
    node.insert("orders", orders(1))
    node.cut()
    [path] = (node.path / "segments").rglob("*.parquet")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[10] ^= 1
    else:
        del content[-1]
    path.write_bytes(content)
    with pytest.raises(Corrupt, match=path.name):
        ingest()
    assert rows_of(tables / "orders") == []


def test_a_rotten_value_of_a_table_is_not_written_anew_with_a_sound_checksum(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create(shards=1)
    node.insert("orders", orders(1, 2, 3, amount=1234.5))
    node.cut()
    ingest()
    [path] = (tables / "orders").rglob("cut-*/**/*.parquet")
    group = pq.read_metadata(path).row_group(0)
    chunks = map(group.column, range(group.num_columns))
    chunk = next(each for each in chunks if each.path_in_schema == "amount")
    content = bytearray(path.read_bytes())
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    content[begin + chunk.total_compressed_size - 1] ^= 1  # of the last page
    path.write_bytes(content)
    node.upsert("orders", orders(2))
    node.cut()
    with pytest.raises(StorageFailed, match=path.name):
        ingest()
    assert DeltaTable(str(tables / "orders")).version() == 1


def test_a_missing_cut_is_refused(node: NodeBuilder, ingest: Ingest) -> None:
    node.create()
    for _ in range(3):
        node.cut()
    (node.path / "cuts" / f"{2:016d}.json").unlink()
    with pytest.raises(Corrupt, match="cut 2 is missing"):
        ingest()


def test_cuts_that_retention_took_too_early_are_refused(node: NodeBuilder, ingest: Ingest) -> None:
    node.create()
    node.cut()
    ingest()
    for _ in range(3):
        node.cut()
    for number in (1, 2):
        (node.path / "cuts" / f"{number:016d}.json").unlink()
    with pytest.raises(Truncated, match="cut 2"):
        ingest()


def test_a_newest_cut_that_is_not_the_one_the_node_answered_with_is_corrupt(
    node: NodeBuilder, tables: Path, spark: SparkSession
) -> None:
    node.create()
    node.insert("orders", orders(1))
    node.cut()
    newest = AnsweredCut(number=node.number, tick=node.cut_tick, crc32c=node.crc)
    manifest = node.path / manifest_path(newest.number)
    edited = msgspec.structs.replace(decode_manifest(manifest.read_bytes(), name=""), segments=())
    manifest.write_bytes(encode_manifest(edited))
    job = IngestJob(spark, node.path, tables, progress=lambda _stage, _done, _total: None)
    with pytest.raises(Corrupt, match="not the cut 1 that this node made"):
        job.run(newest)
    assert not (tables / "orders").exists()


def test_a_pipe_or_a_file_of_holes_in_place_of_a_segment_is_refused_at_once(
    node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create(shards=1)
    node.insert("orders", orders(1))
    node.cut()
    (segment,) = (node.path / "segments").rglob("*.parquet")
    os.truncate(segment, 1 << 40)
    with pytest.raises(Corrupt, match=f"has {1 << 40} bytes"):
        ingest()
    segment.unlink()
    os.mkfifo(segment)
    with pytest.raises(Corrupt, match="no regular file"):
        ingest()


def test_of_an_error_of_java_all_is_told_but_its_stack() -> None:
    said = (
        "calling o3.parquet.\n: SparkException: reading a file\n\tat a.b\n\t... 2 more\nCaused "
        "by: overflow\n\tat d"
    )
    told = str(typed(RuntimeError(said), "table t"))
    assert told.startswith(
        "table t: calling o3.parquet. : SparkException: reading a file Caused by: overflow — "
    )
    of_connect = typed(
        RuntimeError("[FAILED] reading\n\nJVM stacktrace:\norg.apache.SparkException\n\tat a.b"),
        "table t",
    )
    assert str(of_connect).startswith("table t: [FAILED] reading — ")
