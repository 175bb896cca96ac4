"""Tables as of a tick, several at one cut, and the data source's options."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, PythonException, StreamingQueryException
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.types import DoubleType, LongType, StructField, StructType

import spark_sink
from spark_sink import tables as tables_module
from spark_sink.source import StreamingNodeSource
from spark_sink.table import CommitNote, TableVersion, nearest_states, state_at
from spark_sink.tables import _states_at, newest_common, read_deletes, read_rows
from tests.spark_sink.conftest import Ingest
from tests.spark_sink.node_builder import NodeBuilder, Value, ordered, orders
from tests.spark_sink.table_reading import rows_of
from wal.errors import InvalidArgument, Truncated
from wal.timetick import tick_to_time


def version(number: int, cut: int, first_tick: int, last_tick: int) -> TableVersion:
    note = CommitNote(
        node_id="n",
        collection_id=1,
        cut=cut,
        tick=cut * 10,
        crc32c=0,
        first_tick=first_tick,
        last_tick=last_tick,
    )
    return TableVersion(number, note)


ORDERS = [version(2, 5, 23, 47), version(1, 2, 4, 16), version(0, 0, 0, 0)]
"""Took 1 and 2 in one commit, then 3 to 5 in another; newest first."""

STOCK = [version(3, 5, 50, 50), version(2, 4, 31, 38), version(1, 3, 30, 30), version(0, 0, 0, 0)]
"""Took cut after cut; only 4 changed it."""


@pytest.mark.parametrize(
    "tick, number",
    [
        (0, 0),
        (3, 0),
        (4, None),
        (15, None),
        (16, 1),
        (22, 1),
        (23, None),
        (46, None),
        (47, 2),
        (50, 2),
        (51, None),
    ],
)
def test_a_version_is_the_state_from_its_last_change_to_the_next(
    tick: int, number: int | None
) -> None:
    state = state_at(ORDERS, tick)
    assert (None if state is None else state.version) == number


@pytest.mark.parametrize(
    "tick, nearest",
    [(4, (3, 16)), (46, (22, 47)), (60, (50, None)), (-1, (None, 0)), (35, (22, 47))],
)
def test_the_nearest_states_are_those_that_every_table_has(
    tick: int, nearest: tuple[int | None, int | None]
) -> None:
    assert nearest_states([ORDERS, STOCK], tick) == nearest


def test_tables_meet_at_the_newest_cut_all_have() -> None:
    assert newest_common({"orders": ORDERS, "stock": STOCK}) == 50
    # one that lags holds the others back
    assert newest_common({"orders": ORDERS[1:], "stock": STOCK}) == 20
    # the states of 3 and 4 are hidden
    assert newest_common({"orders": ORDERS[:1], "stock": STOCK[2:]}) is None


def test_ticks_that_a_lagging_table_has_not_taken_are_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []

    def noted(history: Sequence[TableVersion], tick: int) -> TableVersion | None:
        tried.append(tick)
        return state_at(history, tick)

    monkeypatch.setattr(tables_module, "state_at", noted)
    assert newest_common({"orders": ORDERS[1:], "stock": STOCK}) == 20
    assert max(tried) <= ORDERS[1].note.tick


def test_a_state_older_than_the_log_of_its_table_is_no_longer_kept() -> None:
    with pytest.raises(Truncated, match="ask for 47"):
        _states_at({"orders": ORDERS[:1]}, 3)


def found(frame: DataFrame) -> list[dict[str, Value]]:
    return ordered(row.asDict() for row in frame.collect())


@pytest.fixture
def three_cuts(node: NodeBuilder, ingest: Ingest) -> list[int]:
    """Return the ticks of three cuts that insert, delete and upsert, each ingested by itself."""
    node.create(shards=2)
    node.create("stock")
    node.insert("orders", orders(*range(20)))
    ticks = []
    changes: list[Callable[[], None]] = [
        lambda: None,
        lambda: node.delete("orders", [3, 4]),
        lambda: node.upsert("orders", orders(5, 30)),
    ]
    for change in changes:
        change()
        node.cut()
        ingest()
        ticks.append(node.cut_tick)
    return ticks


@pytest.mark.spark
def test_tables_show_the_state_at_a_tick_and_the_source_the_newest(
    spark: SparkSession, node: NodeBuilder, tables: Path, three_cuts: list[int]
) -> None:
    expected = ordered(node.history[2]["orders"])
    assert (
        found(spark_sink.read_table(spark, tables / "orders", as_of_tick=three_cuts[1])) == expected
    )
    together = spark_sink.read_tables(spark, tables, ["orders", "stock"], as_of_tick=three_cuts[1])
    assert (together.cut, together.tick, found(together["orders"])) == (2, three_cuts[1], expected)
    assert found(source(spark, node).load()) == ordered(node.history[3]["orders"])
    at_moment = spark_sink.read_table(
        spark, tables / "orders", as_of_tick=tick_to_time(three_cuts[1])
    )
    assert found(at_moment) == expected
    with pytest.raises(InvalidArgument, match="is no table"):
        spark_sink.read_table(spark, tables / "nothing")


@pytest.mark.spark
def test_a_state_that_lost_files_to_a_vacuum_is_refused_before_spark_looks_for_them(
    spark: SparkSession, node: NodeBuilder, tables: Path, three_cuts: list[int]
) -> None:
    path = tables / "orders"
    assert DeltaTable(str(path)).vacuum(0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(Truncated, match=r"version \d+ of .*was vacuumed"):
        spark_sink.read_table(spark, path, as_of_tick=three_cuts[1])
    with pytest.raises(Truncated, match=r"version \d+ of .*was vacuumed"):
        spark_sink.read_tables(spark, tables, ["orders"], as_of_tick=three_cuts[1])
    newest = spark_sink.read_table(spark, path, as_of_tick=three_cuts[2])
    assert found(newest) == ordered(node.history[3]["orders"])


@pytest.mark.spark
def test_a_state_hidden_in_one_commit_is_refused_with_its_neighbours(
    spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create(shards=1)
    inserted = []
    ticks = []
    for number in range(3):
        node.insert("orders", orders(number))
        inserted.append(node.tick)
        node.cut()
        ticks.append(node.cut_tick)
    ingest()
    together = tables / "orders"
    apart = tables.with_name("apart")
    for tick in (inserted[0], ticks[0], ticks[1], inserted[2] - 1):
        with pytest.raises(
            InvalidArgument,
            match=f"nearest are {inserted[0] - 1} .* or {inserted[2]} .*every_cut=True",
        ):
            spark_sink.read_table(spark, together, as_of_tick=tick)
        with pytest.raises(
            InvalidArgument, match=f"nearest are {inserted[0] - 1} .* or {inserted[2]} "
        ):
            spark_sink.read_tables(spark, tables, ["orders"], as_of_tick=tick)
    with pytest.raises(InvalidArgument, match=f"past what .* has taken, up to {ticks[2]} "):
        spark_sink.read_table(spark, together, as_of_tick=ticks[2] + 1)
    with pytest.raises(InvalidArgument, match="past what orders has taken"):
        spark_sink.read_tables(spark, tables, ["orders"], as_of_tick=ticks[2] + 1)
    ingest(into=apart, every_cut=True)
    for rows, tick in [
        (1, inserted[0]),
        (1, ticks[0]),
        (2, inserted[1]),
        (2, ticks[1]),
        (3, inserted[2]),
        (3, ticks[2]),
    ]:
        assert spark_sink.read_table(spark, apart / "orders", as_of_tick=tick).count() == rows
        assert (
            spark_sink.read_tables(spark, apart, ["orders"], as_of_tick=tick)["orders"].count()
            == rows
        )


@pytest.mark.spark
def test_the_source_leaves_out_what_was_deleted_or_dropped(
    spark: SparkSession, node: NodeBuilder
) -> None:
    node.create(shards=1)
    node.create_partition("orders", "eu")
    node.insert("orders", orders(1, 2))
    node.insert("orders", orders(9), "eu")
    node.delete("orders", [1])
    node.cut()
    assert sorted(row["id"] for row in source(spark, node).load().collect()) == [2, 9]
    node.drop_partition("orders", "eu")
    node.cut()
    assert [row["id"] for row in source(spark, node).load().collect()] == [2]


@pytest.mark.spark
def test_a_key_whose_name_could_be_a_path_is_deleted_by_in_table_and_source(
    spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    columns: dict[str, pa.DataType] = {".id": pa.int64(), "item": pa.string()}
    node.create(schema=pa.schema(columns), key=".id")
    node.insert("orders", [{".id": number, "item": "a"} for number in range(9)])
    node.cut()
    ingest()
    node.upsert("orders", [{".id": 3, "item": "b"}])
    node.delete("orders", [4])
    node.cut()
    ingest()
    assert rows_of(tables / "orders") == node.expected("orders")
    source = (
        spark.read.format("streamingnode")
        .option("node", str(node.path))
        .option("subscribe", "orders")
        .load()
    )
    assert ordered(row.asDict() for row in source.collect()) == node.expected("orders")


def test_the_source_says_when_there_is_no_cut_yet(spark: SparkSession, node: NodeBuilder) -> None:
    with pytest.raises(AnalysisException, match="no cut yet"):
        source(spark, node).load()


@pytest.mark.spark
def test_the_source_refuses_streams_and_what_it_does_not_know(
    spark: SparkSession, node: NodeBuilder
) -> None:
    node.create(shards=1)
    node.insert("orders", orders(1))
    node.cut()
    with pytest.raises(
        AnalysisException, match=r"no option 'asoftick'.* there are: node, subscribe"
    ):
        source(spark, node).option("asOfTick", 3).load()
    stream = (
        spark.readStream.format("streamingnode")
        .option("node", str(node.path))
        .option("subscribe", "orders")
    )
    with pytest.raises(StreamingQueryException, match="not implemented"):
        stream.load().writeStream.format("noop").start().processAllAvailable()


@pytest.mark.spark
def test_source_reads_only_the_columns_asked_for(
    spark: SparkSession, node: NodeBuilder, three_cuts: list[int]
) -> None:
    narrow = source(spark, node).schema("amount double, _offset bigint").load()
    assert narrow.columns == ["amount", "_offset"]
    assert narrow.count() == len(node.expected("orders"))


@pytest.mark.parametrize(
    "column", [StructField("amuont", DoubleType()), StructField("amount", LongType())]
)
def test_a_column_that_the_collection_has_not_is_no_damage_of_its_files(
    node: NodeBuilder, column: StructField
) -> None:
    node.create()
    node.cut()
    asked = StreamingNodeSource({"node": str(node.path), "subscribe": "orders"})
    with pytest.raises(
        InvalidArgument,
        match=r"no column 'am.*' — choose of id:bigint, item:string, amount:double, ",
    ):
        asked.reader(StructType([column]))


@pytest.mark.spark
def test_a_filtered_query_does_not_narrow_the_next(
    spark: SparkSession, node: NodeBuilder, three_cuts: list[int]
) -> None:
    frame = source(spark, node).load()
    assert frame.where("id = 30").count() == 1
    assert frame.count() == len(node.expected("orders"))


@pytest.mark.spark
def test_a_segment_that_is_gone_or_damaged_fails_the_read(
    spark: SparkSession, node: NodeBuilder, three_cuts: list[int]
) -> None:
    frame = source(spark, node).load()
    path = next((node.path / "segments").rglob("*.parquet"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PythonException, match=f"{path.name} has .* bytes, its cut says"):
        frame.count()
    path.unlink()
    with pytest.raises(PythonException, match=f"{path.name} is missing, and cut . names it"):
        frame.count()
    # as retention does: oldest first, manifests before files
    for manifest in sorted((node.path / "cuts").iterdir()):
        named = path.name in manifest.read_text("utf-8")
        manifest.unlink()
        if named:
            break
    with pytest.raises(PythonException, match="no longer kept"):
        frame.count()


@pytest.mark.spark
def test_source_names_what_is_wrong(
    spark: SparkSession, node: NodeBuilder, three_cuts: list[int]
) -> None:
    for bad, message in (
        (source(spark, node).option("subscribe", "nothing"), "no collection 'nothing'"),
        (source(spark, node).option("node", str(node.path / "none")), "no node directory"),
    ):
        with pytest.raises(AnalysisException, match=message):
            bad.load()


def source(spark: SparkSession, node: NodeBuilder) -> DataFrameReader:
    return (
        spark.read.format("streamingnode")
        .option("node", str(node.path))
        .option("subscribe", "orders")
    )


def test_a_directory_may_have_a_name_that_would_be_a_pattern(
    spark: SparkSession, tmp_path: Path
) -> None:
    node = NodeBuilder(tmp_path / "a[b]{c,d}" / "data")
    tables = node.path.with_name("tables")
    node.create(shards=1)
    node.insert("orders", orders(1, 2))
    node.cut()
    spark_sink.ingest(spark, node.path, tables, request_cut=False)
    node.upsert("orders", orders(2, 3, amount=2.0))
    node.cut()
    spark_sink.ingest(spark, node.path, tables, request_cut=False)
    assert found(spark_sink.read_table(spark, tables / "orders")) == node.expected("orders")


def test_the_files_of_a_table_are_looked_at_without_a_job_for_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{number}.parquet" for number in range(40)]
    for path in paths:
        pq.write_table(pa.table({"id": [1]}), path)
    tracker = spark.sparkContext.statusTracker()
    schema = StructType([StructField("id", LongType())])
    before = len(tracker.getJobIdsForGroup())
    assert len(read_rows(spark, schema, {"_default": paths}).columns) == 1
    assert len(tracker.getJobIdsForGroup()) == before


def test_a_bit_that_rots_in_a_file_fails_the_read_and_changes_no_value(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "rotten.parquet"
    key = 0x0123_4567_89AB_CDEF
    # in the page alone, and in no range of it
    rows = pa.table({"id": [1, key, 1 << 60], "_offset": [0, 1, 2]})
    pq.write_table(rows, path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[content.index(key.to_bytes(8, "little"))] ^= 1
    path.write_bytes(content)
    schema = StructType([StructField("id", LongType()), StructField("_offset", LongType())])
    for frame in (
        read_rows(spark, schema, {"_default": [path]}),
        read_deletes(spark, schema, "id", [path], rows=3),
    ):
        with pytest.raises(Py4JJavaError, match="could not verify page integrity"):
            frame.collect()


# --- ticks at which there was no such collection


def refused_before(spark: SparkSession, tables: Path, tick: int, created: int) -> None:
    """Read a table alone and beside another as of a tick at which it was not created yet."""
    with pytest.raises(Truncated, match="is before collection 'orders' was created, at") as alone:
        spark_sink.read_table(spark, tables / "orders", as_of_tick=tick)
    with pytest.raises(Truncated, match="is before collection 'orders' was created, at") as beside:
        spark_sink.read_tables(spark, tables, ["orders", "stock"], as_of_tick=tick)
    for error in (alone.value, beside.value):
        assert error.earliest == created
        assert f"ask for {created} " in str(error)


@pytest.mark.spark
@pytest.mark.parametrize("how", ["at once", "cut by cut", "one ingest each"])
def test_a_tick_before_the_creation_is_refused_however_the_table_took_its_cuts(
    spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest, how: str
) -> None:
    node.create("stock")
    node.insert("stock", orders(1))
    node.cut()
    before = node.cut_tick
    if how == "one ingest each":
        ingest()
    created = node.create("orders").created_tick
    node.insert("orders", orders(1, 2))
    first = node.tick
    node.cut()
    ingest(every_cut=how == "cut by cut")
    for tick in (1, before, created - 1):
        refused_before(spark, tables, tick, created)
    for tick, rows in ((created, 0), (first - 1, 0), (node.cut_tick, 2)):
        assert spark_sink.read_table(spark, tables / "orders", as_of_tick=tick).count() == rows
        together = spark_sink.read_tables(spark, tables, ["orders", "stock"], as_of_tick=tick)
        assert (together["orders"].count(), together["stock"].count()) == (rows, 1)


@pytest.mark.spark
def test_a_table_that_was_only_created_has_no_state_before_its_collection(
    spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create("stock")
    node.cut()
    created = node.create("orders").created_tick
    node.insert("orders", orders(1))
    node.cut()

    def killed(step: str) -> None:
        if step == "ingest.intended":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(on_step=killed)
    with pytest.raises(Truncated) as info:
        spark_sink.read_table(spark, tables / "orders", as_of_tick=created - 1)
    assert info.value.earliest == created
    with pytest.raises(InvalidArgument, match=r"past what .* has taken"):
        spark_sink.read_table(spark, tables / "orders", as_of_tick=created)


@pytest.mark.spark
def test_a_tick_in_the_life_of_an_earlier_collection_is_refused_by_the_table_of_the_new_one(
    spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create("stock")
    earlier = node.create("orders")
    node.insert("orders", orders(1, 2))
    node.cut()
    then = node.cut_tick
    ingest()
    node.drop("orders")
    created = node.create("orders").created_tick
    node.insert("orders", orders(3))
    node.cut()
    ingest()
    refused_before(spark, tables, then, created)
    refused_before(spark, tables, created - 1, created)
    retired = tables / f"orders@{earlier.id}"
    assert spark_sink.read_table(spark, retired, as_of_tick=then).count() == 2


@pytest.mark.spark
def test_a_table_that_was_compacted_and_vacuumed_names_the_earliest_tick_it_still_has(
    spark: SparkSession, node: NodeBuilder, tables: Path, ingest: Ingest
) -> None:
    node.create("stock")
    created = node.create("orders").created_tick
    ticks = []
    for number in range(3):
        node.insert("orders", orders(number))
        ticks.append(node.tick)
        node.cut()
        ingest()
    delta = DeltaTable(str(tables / "orders"))
    delta.optimize.compact()
    node.delete("orders", [0, 1, 2])
    node.insert("orders", orders(9))
    last = node.tick
    node.cut()
    ingest()
    refused_before(spark, tables, created - 1, created)
    delta = DeltaTable(str(tables / "orders"))
    assert delta.vacuum(0, enforce_retention_duration=False, dry_run=False)
    refused_before(spark, tables, created - 1, created)
    assert spark_sink.read_table(spark, tables / "orders", as_of_tick=created).count() == 0
    said = f"was vacuumed, is no longer kept — ask for {last} "
    with pytest.raises(Truncated, match=said) as info:
        spark_sink.read_table(spark, tables / "orders", as_of_tick=ticks[1])
    assert info.value.earliest == last
    assert spark_sink.read_table(spark, tables / "orders", as_of_tick=last).count() == 1
