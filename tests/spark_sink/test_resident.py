"""The ingest that stays: what it does without Spark, what one failing table takes from the others,
and how it ends.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import spark_sink
import streamingnode as sn
from flusher.directory import CutLog, manifest_path
from spark_sink import ingestion, runtime, upkeep
from spark_sink.commit import ABANDONED_AGE_S
from spark_sink.table import OpenTable
from streamingnode.care.findings import Report
from streamingnode.care.tables import check_tables
from streamingnode.errors import Unreachable
from tests.spark_sink.lost_jvm import GAVE_UP
from tests.spark_sink.node_builder import NodeBuilder, orders
from tests.spark_sink.table_reading import lease_of, rows_of
from tests.spark_sink.test_ingest_job import act_at_random
from wal.errors import InvalidArgument
from wal.failpoint import ENVIRONMENT_VARIABLE

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 0.001
INSERT_STEPS = (
    *(
        "created",
        "intended",
        "file_synced",
        "written",
        "sealed",
        "committed",
        "log_syncing",
        "finished",
    ),
    *("lease_written", "lease_renamed", "leased"),
)


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: str) -> None:
        raise AssertionError("no cut of these needs Spark")

    monkeypatch.setattr(runtime, "session", start)


def test_cuts_of_inserts_reach_their_tables_without_spark(
    no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    node.create()
    node.create_partition("orders", "eu")
    rounds = spark_sink.ingest_every(node.path, tables, every_s=SOON_S, request_cut=False)
    for number in range(3):
        node.insert("orders", orders(number))
        node.insert("orders", orders(number + 10), "eu")
        node.cut()
        told = next(rounds)
        assert (told.rows_added, told.lag_cuts, told.lag_ticks, told.failures) == (2, 0, 0, ())
        assert [table.road for table in told.tables] == ["copy"]
    assert next(rounds).tables == ()
    assert rows_of(tables / "orders") == node.expected("orders")
    assert lease_of(node, tables / "orders").cut == 3


def test_upserts_of_new_keys_and_deletes_of_keys_that_never_were_need_no_spark(
    no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    node.create(shards=1)
    node.insert("orders", orders(1, 3, 5, 7))
    node.cut()
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    for number in (2, 4):
        node.upsert("orders", orders(number))
    node.delete("orders", [6])
    node.cut()
    node.delete("orders", [0, 6, 9])
    node.cut()
    [report] = spark_sink.ingest(None, node.path, tables, request_cut=False, every_cut=True).tables
    assert (report.rows_added, report.rows_deleted, report.version) == (2, 0, 3)
    assert rows_of(tables / "orders") == node.expected("orders")


def test_a_copied_file_has_the_ranges_that_readers_skip_by(
    no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    node.create(shards=1)
    node.insert("orders", orders(3, 7))
    node.cut()
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    [stats] = pa.table(DeltaTable(str(tables / "orders")).get_add_actions()).to_pylist()
    assert (
        stats["num_records"],
        stats["min"]["id"],
        stats["max"]["id"],
        stats["null_count"]["id"],
    ) == (2, 3, 7, 0)


@pytest.mark.parametrize("column", range(6))
def test_all_columns_are_looked_at_when_a_table_is_verified(
    column: int, no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    node.create(shards=1)
    node.insert("orders", orders(3, 7))
    node.cut()
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    [path] = (tables / "orders").rglob("cut-*/**/*.parquet")
    content = bytearray(path.read_bytes())
    at = pq.read_metadata(path).row_group(0).column(column).data_page_offset
    content[at : at + 8] = b"\xff" * 8
    path.write_bytes(content)
    report = Report()
    check_tables(node.path, tables, (), "node-1", report)
    assert "cannot be read" in str(report)


@pytest.mark.parametrize("link", [False, True])
def test_a_file_is_shared_with_the_node_only_when_that_is_asked_for(
    link: bool, no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    node.create(shards=1)
    node.insert("orders", orders(1))
    node.cut()
    spark_sink.ingest(None, node.path, tables, request_cut=False, link=link)
    [source] = (node.path / "segments").rglob("*.parquet")
    [copy] = (tables / "orders").rglob("cut-*/**/*.parquet")
    assert source.samefile(copy) == link
    assert copy.read_bytes() == source.read_bytes()


def test_times_that_spark_does_not_have_go_through_spark(
    spark: SparkSession, node: NodeBuilder, tables: Path
) -> None:
    fields: list[tuple[str, pa.DataType]] = [
        ("id", pa.int64()),
        ("at", pa.timestamp("ms", tz="UTC")),
    ]
    node.create("times", schema=pa.schema(fields))
    node.insert("times", [{"id": 1, "at": 5}])
    node.cut()
    report = spark_sink.ingest(spark, node.path, tables, request_cut=False)
    assert [table.road for table in report.tables] == ["spark"]


@pytest.mark.parametrize("link", [False, True])
def test_a_damaged_segment_fails_its_table_and_no_other(
    link: bool, no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    node.create(shards=1)
    node.insert("orders", orders(1))
    node.create("stock", shards=1)
    node.insert("stock", orders(2))
    node.cut()
    path = next((node.path / "segments" / str(node.collections["orders"].id)).iterdir())
    content = path.read_bytes()
    path.write_bytes(content[:10] + bytes([content[10] ^ 1]) + content[11:])
    rounds = spark_sink.ingest_every(
        node.path, tables, every_s=SOON_S, request_cut=False, link=link
    )
    told = next(rounds)
    assert [(each.table, each.code) for each in told.failures] == [("orders", "CORRUPT")]
    assert rows_of(tables / "stock") == node.expected("stock")
    assert rows_of(tables / "orders") == []
    path.write_bytes(content)
    assert next(told for told in rounds if not told.failures).rows_added == 1
    assert rows_of(tables / "orders") == node.expected("orders")


def test_a_table_that_somebody_else_made_or_took_away_fails_alone(
    no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    for name in ("orders", "stock"):
        node.create(name)
    (tables / "orders").mkdir(parents=True)
    (tables / "orders" / "precious.txt").touch()
    rounds = spark_sink.ingest_every(node.path, tables, every_s=SOON_S, request_cut=False)
    for number in range(3):
        node.insert("stock", orders(number))
        node.insert("orders", orders(number))
        node.cut()
        told = next(rounds)
        assert [(each.table, each.code) for each in told.failures] == [("orders", "ALREADY_EXISTS")]
        assert rows_of(tables / "stock") == node.expected("stock")
    shutil.rmtree(tables / "orders")
    assert next(told for told in rounds if not told.failures).lag_cuts == 0
    assert rows_of(tables / "orders") == node.expected("orders")


def give_up(node: NodeBuilder, cut: int) -> None:
    """Remove a cut as retention does."""
    manifest = CutLog(node.path).read(cut).manifest
    (node.path / manifest_path(cut)).unlink()
    for file in manifest.files:
        (node.path / file.path).unlink()


def insert_and_cut(node: NodeBuilder, number: int) -> None:
    for name in ("orders", "stock"):
        node.insert(name, orders(number))
    node.cut()


def test_a_table_that_another_ingest_has_retired_lags_no_more(
    no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    for name in ("gone", "orders"):
        node.create(name)
        node.insert(name, orders(1))
    node.cut()
    rounds = spark_sink.ingest_every(node.path, tables, every_s=SOON_S, request_cut=False)
    assert next(rounds).lag_cuts == 0
    node.drop("gone")
    node.cut()
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    node.insert("orders", orders(2))
    node.cut()
    told = next(rounds)
    assert (told.cut, told.lag_cuts, told.lag_ticks, told.failures) == (3, 0, 0, ())


def test_a_table_whose_next_cut_is_gone_fails_alone(
    no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    for name in ("orders", "stock"):
        node.create(name)
    for number in range(3):
        insert_and_cut(node, number)
        spark_sink.ingest(None, node.path, tables, request_cut=False)
        if number == 0:
            shutil.copytree(tables / "orders", tables.with_name("older"))
    shutil.rmtree(tables / "orders")
    tables.with_name("older").rename(tables / "orders")
    for cut in (1, 2):
        give_up(node, cut)
    insert_and_cut(node, 3)
    told = next(spark_sink.ingest_every(node.path, tables, every_s=SOON_S, request_cut=False))
    assert [(each.table, each.code) for each in told.failures] == [("orders", "TRUNCATED")]
    assert rows_of(tables / "stock") == node.expected("stock")


def test_a_copy_of_a_table_under_another_name_holds_no_ingest_up(
    no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    for name in ("orders", "stock"):
        node.create(name)
    insert_and_cut(node, 0)
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    shutil.copytree(tables / "orders", tables / "orders_of_monday")
    insert_and_cut(node, 1)
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    insert_and_cut(node, 2)
    for cut in (1, 2):
        give_up(node, cut)
    assert spark_sink.ingest(None, node.path, tables, request_cut=False).rows_added == 2
    for name in ("orders", "stock"):
        assert rows_of(tables / name) == node.expected(name)


def test_what_is_left_of_another_node_takes_no_collection_for_a_dropped_one(
    no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    node.create()
    node.insert("orders", orders(1))
    node.cut()
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    dropped = node.collections["orders"].id
    node.drop("orders")
    node.cut()
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    assert [path.name for path in tables.glob("[!.]*")] == [f"orders@{dropped}"]
    anew = NodeBuilder(node.path.with_name("anew"), node_id="node-2")
    assert anew.create().id == dropped
    anew.insert("orders", orders(2))
    anew.cut()
    assert spark_sink.ingest(None, anew.path, tables, request_cut=False).rows_added == 1
    assert rows_of(tables / "orders") == anew.expected("orders")
    anew.drop("orders")
    anew.cut()
    spark_sink.ingest(None, anew.path, tables, request_cut=False)
    left = {path.name: len(rows_of(path)) for path in tables.glob("[!.]*")}
    assert left == {f"orders@{dropped}": 1, f"orders@{dropped}@node-2": 1}


@pytest.mark.parametrize(
    "kind, value", [(pa.date32(), 10_000_000), (pa.timestamp("us"), 1 << 61)], ids=str
)
def test_days_and_times_beyond_those_of_python_are_in_their_table(
    kind: pa.DataType, value: int, no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    fields: list[tuple[str, pa.DataType]] = [("id", pa.int64()), ("at", kind)]
    node.create("times", schema=pa.schema(fields))
    node.insert("times", [{"id": 1, "at": value}])
    node.cut()
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    found = DeltaTable(str(tables / "times")).to_pyarrow_table()["at"]
    assert found.cast(pa.int32() if pa.types.is_date(kind) else pa.int64()).to_pylist() == [value]


def test_many_cuts_are_taken_a_bounded_number_at_a_time(
    no_spark: None, node: NodeBuilder, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingestion, "COMMIT_CUTS_MAX", 2)
    node.create()
    for number in range(5):
        node.insert("orders", orders(number))
        node.cut()
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    table = OpenTable.load(tables / "orders")
    assert table is not None
    assert [found.note.cut for found in table.history()] == [5, 4, 2, 0]
    assert rows_of(tables / "orders") == node.expected("orders")


def test_a_node_that_does_not_answer_or_is_gone_is_told_and_waited_for(
    no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    class Away:
        path = str(node.path)

        def flush(self) -> object:
            raise Unreachable("nobody is there — start it")

    node.create()
    node.insert("orders", orders(1))
    node.cut()
    rounds = spark_sink.ingest_every(Away(), tables, every_s=SOON_S)
    told = next(rounds)
    assert [(each.table, each.code) for each in told.failures] == [("", "UNREACHABLE")]
    assert rows_of(tables / "orders") == node.expected("orders")
    away = node.path.rename(node.path.with_name("away"))
    assert [each.code for each in next(rounds).failures] == ["INVALID_ARGUMENT"]
    away.rename(node.path)
    node.insert("orders", orders(2))
    node.cut()
    assert next(rounds).rows_added == 1


def test_it_ends_after_the_round_in_which_it_is_told_to(
    no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    node.create()
    node.cut()
    stop = threading.Event()
    rounds = spark_sink.ingest_every(node.path, tables, every_s=3600, stop=stop, request_cut=False)
    next(rounds)
    stop.set()
    assert list(rounds) == []


@pytest.mark.parametrize("given", [{"every_s": 0}, {"every_s": float("inf")}, {"keep_s": 59}])
def test_numbers_out_of_range_are_refused_at_once(
    given: dict[str, float], node: NodeBuilder, tables: Path
) -> None:
    with pytest.raises(InvalidArgument, match="out of range"):
        spark_sink.ingest_every(node.path, tables, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(2))
def test_tables_equal_the_model_over_both_roads_and_while_they_are_compacted(
    seed: int, spark: SparkSession, node: NodeBuilder, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SMALL_FILES_MAX", 3)
    monkeypatch.setattr(upkeep, "NEWEST_FILES", 0)
    chance = random.Random(seed)
    for name in ("orders", "stock"):
        node.create(name, shards=1)
    rounds = spark_sink.ingest_every(
        node.path, tables, every_s=SOON_S, spark=spark, request_cut=False
    )
    roads = set[str]()
    compacted = 0
    for number in range(14):
        if number % 3:
            node.insert(chance.choice(sorted(node.collections)), orders(1000 + number))
        else:
            act_at_random(node, chance)
        if number == 12:
            for amount in (1.0, 2.0):
                node.upsert("orders", orders(5, amount=amount))
        node.cut()
        told = next(rounds)
        assert told.failures == ()
        roads |= {table.road for table in told.tables}
        compacted += told.compacted
        for name in node.collections:
            assert rows_of(tables / name) == node.expected(name)
    assert roads >= {"copy", "spark"}
    assert compacted


def start(node: NodeBuilder, tables: Path, *, failpoints: str = "") -> "subprocess.Popen[bytes]":
    program = (
        "import sys, spark_sink; spark_sink.ingest(None, sys.argv[1], sys.argv[2], "
        "request_cut=False)"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        ENVIRONMENT_VARIABLE: failpoints,
        "JAVA_HOME": "/nowhere",
    }
    return subprocess.Popen(
        [sys.executable, "-c", program, str(node.path), str(tables)], env=environment
    )


def filled(node: NodeBuilder) -> None:
    node.create()
    for number in range(2):
        node.insert("orders", orders(number, number + 10))
        node.cut()


@pytest.mark.parametrize("step", INSERT_STEPS)
def test_killed_at_any_step_of_copying_every_row_is_there_once(
    step: str, no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    filled(node)
    assert start(node, tables, failpoints=f"ingest.{step}=kill").wait() == -signal.SIGKILL
    for intent in (tables / "orders" / "_attempts").glob("*"):
        os.utime(intent, (intent.stat().st_atime, intent.stat().st_mtime - ABANDONED_AGE_S))
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    assert rows_of(tables / "orders") == node.expected("orders")
    assert lease_of(node, tables / "orders").cut == 2
    assert len(list((tables / "orders").glob("cut-*"))) == 1, (
        "what the killed one wrote is gone, or is the table's"
    )
    assert not list((tables / "orders" / "_attempts").iterdir())


@pytest.mark.crash
@pytest.mark.parametrize("losses, ended", [(2, 0), (4, GAVE_UP)])
def test_a_lost_jvm_is_made_anew_a_bounded_number_of_times(
    losses: int, ended: int, node: NodeBuilder, tables: Path
) -> None:
    node.create()
    for amount in (1.0, 2.0):
        node.upsert("orders", orders(1, amount=amount))
    node.cut()
    command = [
        sys.executable,
        "-m",
        "tests.spark_sink.lost_jvm",
        str(node.path),
        str(tables),
        str(losses),
    ]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == ended
    assert rows_of(tables / "orders") == (node.expected("orders") if ended == 0 else [])
    left = [path.name for path in (tables / "orders").glob("cut-*")]
    assert len(left) == (1 if ended == 0 else 0), (
        "what a JVM that is gone has written takes no room"
    )


def test_two_at_once_take_every_cut_once(node: NodeBuilder, tables: Path) -> None:
    filled(node)
    jobs = [start(node, tables) for _ in range(2)]
    assert [job.wait() for job in jobs] == [0, 0]
    assert rows_of(tables / "orders") == node.expected("orders")


@pytest.mark.usefixtures("default_interrupt")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_command_follows_a_node_and_ends_in_order_at_a_signal(
    ending: signal.Signals, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    tables = tmp_path / "tables"
    with sn.sync.open_node(data) as node:
        node.create_collection("orders", pa.schema([("id", pa.int64())]), primary_key="id")
        node.insert("orders", [{"id": 1}])
        arguments = ["ingest", str(data), "--tables", str(tables), "--every", "50ms", "--json"]
        command = [sys.executable, "-m", "streamingnode", *arguments]
        environment = {**os.environ, "JAVA_HOME": "/nowhere"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as job:
            assert job.stdout is not None
            first = msgspec.json.decode(job.stdout.readline())
            assert (first["rows_added"], first["failures"], first["lag_cuts"]) == (1, [], 0)
            node.insert("orders", [{"id": 2}])
            added = next(
                told for line in job.stdout if (told := msgspec.json.decode(line))["rows_added"]
            )
            assert added["cut"] == first["cut"] + 1
            job.send_signal(ending)
            job.stdout.read()
            assert job.wait() == 0
    assert sorted(row["id"] for row in rows_of(tables / "orders")) == [1, 2]  # type: ignore[type-var]


def test_a_session_that_was_there_is_used_and_goes_on(
    spark: SparkSession, node: NodeBuilder, tables: Path
) -> None:
    node.create()
    node.insert("orders", orders(1, 2))
    node.cut()
    node.upsert("orders", orders(1, amount=9.0))
    node.cut()
    report = spark_sink.ingest(None, node.path, tables, request_cut=False)
    assert report.tables[0].road == "spark"
    assert rows_of(tables / "orders") == node.expected("orders")
    assert spark.range(3).count() == 3, "it is somebody else's to stop"


def test_once_stopped_no_further_table_is_begun_and_what_fails_then_is_no_failure(
    no_spark: None, node: NodeBuilder, tables: Path
) -> None:
    for name in ("orders", "stock"):
        node.create(name)
        node.insert(name, orders(1))
    node.cut()
    stop = threading.Event()

    def end(stage: str, _done: int, _total: int) -> None:
        if stage == "orders":
            stop.set()

    report = spark_sink.ingest(None, node.path, tables, progress=end, request_cut=False, stop=stop)
    assert [table.table for table in report.tables] == ["orders"], "the commit under way ends"
    assert rows_of(tables / "orders") == node.expected("orders")
    upserts = orders(1, amount=9.0)
    node.upsert("orders", upserts)
    node.cut()

    def cut_off(stage: str, _done: int, _total: int) -> None:
        if stage == "orders":  # whose upsert needs Spark, which ends before it has begun
            stop.set()

    stop.clear()
    report = spark_sink.ingest(
        None, node.path, tables, progress=cut_off, request_cut=False, stop=stop
    )
    assert report.tables == ()


@pytest.mark.crash
@pytest.mark.parametrize("every", [True, False])
def test_a_signal_to_all_processes_of_an_ingest_ends_it_behind_its_commit(
    every: bool, tmp_path: Path
) -> None:
    """As systemd and a terminal send it: Java gets it, too."""
    data = tmp_path / "data"
    tables = tmp_path / "tables"
    with sn.sync.open_node(data) as filled:
        filled.create_collection("orders", pa.schema([("id", pa.int64())]), primary_key="id")
        for _ in range(2):
            filled.upsert("orders", pa.table({"id": range(50_000)}))
        filled.flush()
    arguments = [
        "ingest",
        str(data),
        "--tables",
        str(tables),
        *(["--every", "1s"] if every else []),
    ]
    command = [sys.executable, "-m", "streamingnode", *arguments]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        while not [*tables.glob("orders/cut-*/*/*")]:
            assert job.poll() is None, "it has not ended before Spark writes"
        os.killpg(job.pid, signal.SIGTERM)
        _, said = job.communicate()
    assert (job.returncode, said) == (
        (0, "") if every else (143, "terminated: run it again for what is left\n")
    )
    assert len(rows_of(tables / "orders")) == 50_000
