"""The open table's commit: conditional on the version its watermark was read from, on real Delta
logs.
"""

from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import spark_sink
from spark_sink.table import CommitConflict, NewFile, OpenTable, TableIdentity, Watermark
from tests.spark_sink.node_builder import ORDERS, NodeBuilder, orders
from wal.errors import AlreadyExists, Truncated, UnsupportedFormat

IDENTITY = TableIdentity("node-1", 7, "orders")
STATS = (
    '{"numRecords":3,"minValues":{"id":1,"_offset":5,"_vchannel":"v0"},'
    '"maxValues":{"id":9,"_vchannel":"v1"}}'
)


def at(cut: int) -> Watermark:
    return Watermark(cut, cut * 10, cut * 100)


def take(table: OpenTable, cut: int, path: str = "f") -> int:
    file = NewFile(f"{path}-{cut}.parquet", 10, 3, "eu", STATS)
    (table.path / file.path).touch()
    return table.commit(
        at(cut),
        changed=(cut * 10 - 5, cut * 10 - 1),
        adds=[file],
        removes=[],
        attempt=f"{path}-{cut}",
    )


@pytest.fixture
def table(tmp_path: Path) -> OpenTable:
    return OpenTable.create(tmp_path / "orders", IDENTITY, ORDERS, at(0), created_tick=0)


def reopened(table: OpenTable) -> OpenTable:
    again = OpenTable.load(table.path)
    assert again is not None
    return again


def test_a_table_knows_whose_it_is_and_what_it_has_taken(table: OpenTable) -> None:
    take(table, 1)
    assert (reopened(table).identity, reopened(table).watermark) == (IDENTITY, at(1))


def test_a_second_writer_from_the_same_version_is_refused(table: OpenTable) -> None:
    stale = reopened(table)
    take(table, 1)
    with pytest.raises(CommitConflict):
        take(stale, 1, "again")
    assert [file.path for file in reopened(table).files(key="id")] == ["f-1.parquet"]


def test_a_second_creator_is_refused(table: OpenTable) -> None:
    with pytest.raises(CommitConflict):
        OpenTable.create(table.path, IDENTITY, ORDERS, at(0), created_tick=0)


def test_a_cut_is_never_taken_twice_on_one_handle(table: OpenTable) -> None:
    take(table, 1)
    with pytest.raises(AssertionError, match="taken once"):
        take(table, 1, "again")


def test_files_report_the_ranges_that_pruning_needs(table: OpenTable) -> None:
    take(table, 1)
    [file] = reopened(table).files(key="id")
    assert (file.key_range, file.offset_min, file.vchannel_range) == ((1, 9), 5, ("v0", "v1"))
    assert (file.rows, file.bytes, file.partition) == (3, 10, "eu")


def test_files_of_a_table_of_many_columns_report_the_ranges_of_the_last_too(tmp_path: Path) -> None:
    columns = [pa.field(f"c{number}", pa.int64()) for number in range(40)]
    table = OpenTable.create(
        tmp_path / "orders",
        IDENTITY,
        pa.schema([*columns, pa.field("id", pa.int64())]),
        at(0),
        created_tick=0,
    )
    take(table, 1)
    [file] = reopened(table).files(key="id")
    assert (file.key_range, file.offset_min, file.vchannel_range) == ((1, 9), 5, ("v0", "v1"))


def test_a_table_whose_log_keeps_no_range_that_is_needed_is_read_all_the_same(
    node: NodeBuilder, tables: Path
) -> None:
    """As that of a table of an earlier release, which Delta keeps of the first 32 columns."""
    node.create()
    node.insert("orders", orders(1, 2))
    node.cut()
    spark_sink.ingest(None, node.path, tables, request_cut=False)
    table = OpenTable.load(tables / "orders")
    assert table is not None
    DeltaTable(str(table.path)).alter.set_table_properties(
        {"delta.dataSkippingStatsColumns": "item"}
    )
    assert {(file.rows, file.key_range) for file in reopened(table).files()} == {(2, None)}
    assert set(reopened(table).rows(ORDERS)["id"].to_pylist()) == {1, 2}


@pytest.mark.parametrize("key", [".id", "[0]", "a.b", "`"])
def test_files_report_the_ranges_of_a_key_whose_name_could_be_a_path(
    key: str, tmp_path: Path
) -> None:
    table = OpenTable.create(
        tmp_path / "orders", IDENTITY, pa.schema([pa.field(key, pa.int64())]), at(0), created_tick=0
    )
    (table.path / "f").touch()
    stats = STATS.replace('"id"', f'"{key}"')
    table.commit(
        at(1), changed=(5, 9), adds=[NewFile("f", 10, 3, "eu", stats)], removes=[], attempt="f-1"
    )
    assert [file.key_range for file in reopened(table).files(key=key)] == [(1, 9)]


def test_history_names_the_cut_of_each_version_newest_first(table: OpenTable) -> None:
    for cut in range(1, 80):
        take(table, cut)
    assert [found.note.cut for found in reopened(table).history()] == list(range(79, -1, -1))
    assert "f-3" in reopened(table).attempts()
    assert "f-80" not in reopened(table).attempts()


def test_history_of_a_version_is_its_own_whatever_is_committed_meanwhile(table: OpenTable) -> None:
    for cut in range(1, 4):
        take(table, cut)
    opened = reopened(table)
    for cut in range(4, 9):
        take(table, cut)
    assert [(found.version, found.note.cut) for found in opened.history()] == [
        (3, 3),
        (2, 2),
        (1, 1),
        (0, 0),
    ]


def test_a_commit_of_another_tool_without_information_moves_no_version(table: OpenTable) -> None:
    take(table, 1)
    (table.path / "_delta_log" / f"{2:020}.json").write_bytes(
        b'{"txn":{"appId":"other","version":1}}\n'
    )
    table.refresh()
    take(table, 2)
    assert [(found.version, found.note.cut) for found in table.history()] == [
        (3, 2),
        (1, 1),
        (0, 0),
    ]


def test_a_file_that_another_tool_has_rewritten_meanwhile_is_not_rewritten_again(
    node: NodeBuilder, tables: Path
) -> None:
    node.create(shards=1)
    for number in range(3):
        node.insert("orders", orders(number))
        node.cut()
        spark_sink.ingest(None, node.path, tables, request_cut=False)
    table = OpenTable.load(tables / "orders")
    assert table is not None
    mark = table.watermark
    DeltaTable(str(table.path)).optimize.compact()
    with pytest.raises(CommitConflict):
        table.commit(
            Watermark(mark.cut + 1, mark.tick + 1, 0),
            changed=(mark.tick, mark.tick + 1),
            adds=[],
            removes=table.files()[:1],
            attempt="",
        )


def test_a_commit_that_the_table_refuses_is_not_taken_for_one_that_another_writer_has_won(
    table: OpenTable,
) -> None:
    take(table, 1)
    DeltaTable(str(table.path)).alter.set_table_properties({"delta.appendOnly": "true"})
    newest = reopened(table)
    with pytest.raises(UnsupportedFormat, match=r"append-only.* undo what another tool set"):
        newest.commit(at(2), changed=(15, 19), adds=[], removes=newest.files(), attempt="")


def test_a_table_whose_ingests_other_tools_have_given_up_in_its_log_is_at_its_watermark(
    table: OpenTable,
) -> None:
    take(table, 1)
    delta = DeltaTable(str(table.path))
    delta.alter.set_table_properties({"delta.logRetentionDuration": "interval 30 days"})
    delta = DeltaTable(str(table.path))
    delta.create_checkpoint()
    for entry in (table.path / "_delta_log").glob("*.json"):
        if entry.name < f"{delta.version():020d}":
            entry.unlink()
    [found] = reopened(table).history()
    assert (found.version, found.note.cut, found.note.first_tick, found.note.last_tick) == (
        2,
        1,
        10,
        10,
    )
    with pytest.raises(Truncated, match="ask for 10 "):
        # refused before Spark is asked
        spark_sink.read_table(None, table.path, as_of_tick=9)  # type: ignore[arg-type]


def test_a_watermark_survives_log_checkpoint_and_clean_up(table: OpenTable) -> None:
    for cut in range(1, 5):
        take(table, cut)
    delta = DeltaTable(str(table.path))
    delta.create_checkpoint()
    for entry in (table.path / "_delta_log").glob("*.json"):
        if entry.name < f"{delta.version():020d}":
            entry.unlink()
    assert reopened(table).watermark == at(4)


def test_a_table_that_no_ingest_made_is_refused(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "t"), pa.table({"a": [1]}))
    foreign = OpenTable.load(tmp_path / "t")
    assert foreign is not None
    with pytest.raises(AlreadyExists, match="no ingest made"):
        foreign.owner()


def test_a_column_that_another_tool_renamed_is_refused_also_under_a_protocol_without_features(
    table: OpenTable,
) -> None:
    log = table.path / "_delta_log"
    actions = map(msgspec.json.decode, (log / f"{0:020}.json").read_bytes().splitlines())
    metadata = next(action["metaData"] for action in actions if "metaData" in action)
    metadata["configuration"]["delta.columnMapping.mode"] = "name"
    schema = msgspec.json.decode(metadata["schemaString"])
    for number, field in enumerate(schema["fields"]):
        field["metadata"] = {
            "delta.columnMapping.id": number,
            "delta.columnMapping.physicalName": field["name"],
        }
    schema["fields"][1]["name"] = "thing"
    metadata["schemaString"] = msgspec.json.encode(schema).decode()
    protocol = {"minReaderVersion": 2, "minWriterVersion": 5}
    upgrade = [{"protocol": protocol}, {"metaData": metadata}]
    (log / f"{1:020}.json").write_bytes(b"\n".join(map(msgspec.json.encode, upgrade)))
    with pytest.raises(UnsupportedFormat, match="uses columnMapping, turned on by another tool"):
        reopened(table).files()
