"""What docs/format.md says about tables is what their Delta log holds."""

import re
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from spark_sink.columns import stored_type
from spark_sink.table import CommitNote, NewFile, OpenTable, TableIdentity, Watermark

SECTION = (
    (Path(__file__).parents[2] / "docs" / "format.md")
    .read_text("utf-8")
    .partition("\n## Tables\n")[2]
)
IDENTITY = TableIdentity("n1", 1, "t")
STATS = '{"numRecords":2}'


@pytest.fixture
def delta(tmp_path: Path) -> DeltaTable:
    schema = pa.schema([("id", pa.int64())])
    table = OpenTable.create(tmp_path / "t", IDENTITY, schema, Watermark(0, 0, 0), created_tick=0)
    file = NewFile("f.parquet", 10, 2, "_default", STATS)
    (table.path / file.path).touch()
    table.commit(Watermark(1, 40, 400), changed=(30, 39), adds=[file], removes=[], attempt="cut-1")
    return DeltaTable(str(tmp_path / "t"))


def test_the_documented_columns_are_those_of_a_table(delta: DeltaTable) -> None:
    documented = re.findall(r"`(_\w+)`\s\(`(\w+)`\)", SECTION)
    found = [(field.name, str(field.type).split('"')[1]) for field in delta.schema().fields]
    assert found == [("id", "long"), *documented]
    assert delta.metadata().partition_columns == [documented[-1][0]]


def test_the_documented_properties_are_those_of_a_table(delta: DeltaTable) -> None:
    documented = re.findall(r"^\| `(streamingnode\.\w+)` \|", SECTION, re.MULTILINE)
    ours = {
        name: value
        for name, value in delta.metadata().configuration.items()
        if name.startswith("streamingnode")
    }
    assert ours == dict(zip(documented, ["n1", "1", "t"], strict=True))


def test_the_documented_app_transactions_hold_cut_tick_and_checksum(delta: DeltaTable) -> None:
    documented = re.findall(r"^\| `(streamingnode/<node id>/\w+)` \|", SECTION, re.MULTILINE)
    versions = [delta.transaction_version(app.replace("<node id>", "n1")) for app in documented]
    assert versions == [1, 40, 400]


def test_the_documented_commit_info_is_that_of_every_commit(delta: DeltaTable) -> None:
    text = SECTION.partition("**Commit info**")[2].partition("**Files**")[0]
    documented = set(re.findall(r"`(\w+)`", text)) - {"streamingnode"}
    assert documented == set(CommitNote.__struct_fields__)
    assert all(set(entry["streamingnode"]) == documented for entry in delta.history())


@pytest.mark.parametrize(
    "given, stored",
    [
        (pa.large_string(), pa.string()),
        (pa.large_binary(), pa.binary()),
        (pa.timestamp("ms"), pa.timestamp("us")),
        (pa.timestamp("ms", "Europe/Berlin"), pa.timestamp("us", "UTC")),
        (pa.large_list(pa.large_string()), pa.list_(pa.string())),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int8())),
        (pa.struct([("x", pa.large_binary())]), pa.struct([("x", pa.binary())])),
        (pa.decimal128(5, 2), pa.decimal128(5, 2)),
    ],
    ids=str,
)
def test_a_type_that_spark_lacks_becomes_the_documented_one(
    given: pa.DataType, stored: pa.DataType
) -> None:
    assert stored_type(given) == stored
