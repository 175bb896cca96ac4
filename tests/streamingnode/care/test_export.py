"""Export: the rows a snapshot has, of a damaged node what can be read, nothing wrong in silence,
and the node untouched.
"""

import json
import os
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import streamingnode as sn
from flusher.directory import manifest_path
from flusher.manifest import decode_manifest
from streamingnode.care.backup import backup_directory
from streamingnode.care.export import ExportResult, export_directory
from tests.streamingnode.append_double import schema_of
from tests.streamingnode.sample_node import (
    CUT_3,
    CUTS,
    FILE_DAMAGE,
    PER_CUT,
    SCHEMA,
    SETTINGS,
    Damage,
    Sample,
    copy_of,
    flip,
    kinds_of,
    largest,
    rows_of,
)
from tests.wal.rocks.test_torn_manifest import A_LOST_PAGE
from wal.errors import AlreadyExists, AlreadyOwned, Corrupt, InvalidArgument, StreamingNodeError
from wal.rocks.layout import ENTRY_FAMILY, RocksOptions, entry_key, split_entry_key
from wal.rocks.opening import take_directory
from wal.rocks.recovery import manifest_of


def content(path: Path) -> dict[str, tuple[bytes, int] | None]:
    return {
        each.relative_to(path).as_posix(): (each.read_bytes(), each.stat().st_mode)
        if each.is_file()
        else None
        for each in path.rglob("*")
    }


def rows_in(out: Path, collection: str = "orders") -> dict[int, Any]:
    table = pq.read_table(out / f"{collection}.parquet")
    rows = {row["id"]: row["item"] for row in table.to_pylist()}
    assert len(rows) == table.num_rows, "no row comes twice"
    return rows


def salvaged(path: Path, out: Path) -> ExportResult:
    """Export a damaged node, which is refused without `salvage` and stays as it is."""
    before = content(path)
    with pytest.raises(StreamingNodeError):
        export_directory(path, out)
    assert not list(out.parent.glob(f"{out.name}*"))
    result = export_directory(path, out, salvage=True)
    assert content(path) == before
    assert result.missing
    return result


def test_a_sound_node_comes_out_as_it_is_read(sample: Sample, tmp_path: Path) -> None:
    for name, node in (("closed", sample.closed), ("killed", sample.killed)):
        path = copy_of(node, tmp_path / name)
        out = tmp_path / f"{name}-out"
        before = content(path)
        result = export_directory(path, out)
        assert content(path) == before
        assert result.missing == ()
        assert [(file.collection, file.rows) for file in result.files] == [
            ("orders", len(sample.rows))
        ]
        assert rows_in(out) == sample.rows
        assert pq.read_schema(out / "orders.parquet").equals(SCHEMA)
        assert rows_of(path) == sample.rows


def test_a_backup_comes_out_too(sample: Sample, tmp_path: Path) -> None:
    backup_directory(sample.closed, tmp_path / "backup")
    export_directory(tmp_path / "backup", tmp_path / "out")
    assert rows_in(tmp_path / "out") == sample.rows


def test_transactions_drops_partitions_and_types_come_out_as_a_snapshot_has_them(
    tmp_path: Path,
) -> None:
    schema = schema_of(
        id=pa.int64(),
        price=pa.decimal128(12, 2),
        at=pa.timestamp("us", tz="UTC"),
        tags=pa.list_(pa.string()),
        place=pa.struct([("lat", pa.float64())]),
    )
    snapshots: dict[str, pa.Table] = {}

    def row(key: int) -> dict[str, Any]:
        return {
            "id": key,
            "price": Decimal("1.50"),
            "at": None,
            "tags": ["a", str(key)],
            "place": {"lat": key / 2},
        }

    async def make() -> None:
        async with sn.open_node(tmp_path / "node", **SETTINGS) as node:
            await node.create_collection("typed", schema, primary_key="id", shards=2)
            await node.create_collection("orders", SCHEMA, primary_key="id", shards=3)
            await node.create_collection("gone", SCHEMA, primary_key="id")
            await node.create_collection("empty", SCHEMA, primary_key="id")
            await node.create_partition("orders", "eu")
            await node.create_partition("orders", "us")
            for start in (0, 100):
                await node.insert("typed", [row(key) for key in range(start, start + 50)])
                await node.insert("gone", [{"id": start, "item": "x"}])
                for partition in ("eu", "us"):
                    first = start + (0 if partition == "eu" else 50)
                    rows = [{"id": key, "item": partition} for key in range(first, first + 50)]
                    await node.insert("orders", rows, partition=partition)
                async with node.transaction() as txn:
                    await txn.insert("typed", [row(start + 60)])
                    await txn.insert("orders", [{"id": -start - 1, "item": "both"}])
                    await txn.delete("typed", [start])
                await node.upsert("typed", [row(start + 60), row(start + 1)])
                await node.delete("orders", [start + 1, start + 51])
                if not start:
                    await node.flush()
            await node.drop_collection("gone")
            await node.drop_partition("orders", "us")
            await node.create_collection("gone", SCHEMA, primary_key="id")
            await node.insert("gone", [{"id": 7, "item": "back"}])
            for collection in node.collections():
                snapshots[collection.name] = await node.snapshot(collection.name)
            shutil.copytree(
                tmp_path / "node", tmp_path / "killed", ignore=shutil.ignore_patterns("node.sock")
            )

    anyio.run(make)
    for name in ("node", "killed"):
        result = export_directory(tmp_path / name, tmp_path / f"{name}-out")
        assert [file.collection for file in result.files] == ["empty", "gone", "orders", "typed"]
        for collection, expected in snapshots.items():
            found = pq.read_table(tmp_path / f"{name}-out" / f"{collection}.parquet")
            assert found.schema.equals(expected.schema)
            assert found.sort_by("id").equals(expected.sort_by("id"))


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", [damage for damage, _ in FILE_DAMAGE.values()], ids=FILE_DAMAGE.keys()
)
def test_of_damaged_cuts_the_rest_comes_out_and_every_lost_file_is_named(
    sample: Sample, tmp_path: Path, damage: Damage
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    manifests = [
        decode_manifest((path / manifest_path(number)).read_bytes(), name="")
        for number in range(1, CUTS + 1)
    ]
    damage(path)
    result = salvaged(path, tmp_path / "out")
    places = {missing.place for missing in result.missing}
    lost = sum(
        file.rows
        for manifest in manifests
        for file in manifest.segments
        if file.path in places or manifest_path(manifest.number) in places
    )
    if any(place.startswith("cuts before") for place in places):
        lost = sum(missing.rows or 0 for missing in result.missing)
    rows = rows_in(tmp_path / "out")
    assert 0 < len(sample.rows.keys() - rows.keys()) <= lost
    assert {
        key: rows[key] for key in rows.keys() & sample.rows.keys()
    }.items() <= sample.rows.items()


def test_a_hole_in_the_log_is_named_by_its_positions_and_what_is_behind_it_comes_out(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    table = largest(path, "log/*.sst")
    flip(table, int(table.stat().st_size * 0.92))
    result = salvaged(path, tmp_path / "out")
    [missing] = result.missing
    assert missing.place.startswith("log 'p0', positions ")
    rows = rows_in(tmp_path / "out")
    assert rows.items() < sample.rows.items()
    assert max(rows) == max(sample.rows), "the last insert is behind the hole"


def test_without_its_end_the_log_comes_out_up_to_there(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.killed, tmp_path / "node")
    log = largest(path, "log/*.log")
    os.truncate(log, int(log.stat().st_size * 0.95))
    result = salvaged(path, tmp_path / "out")
    assert any("was acknowledged" in missing.reason for missing in result.missing)
    rows = rows_in(tmp_path / "out")
    assert rows.items() < sample.rows.items()
    assert max(rows) > CUTS * PER_CUT


def test_without_a_log_the_files_of_the_newest_cut_come_out(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    shutil.rmtree(path / "log")
    result = salvaged(path, tmp_path / "out")
    assert [missing.place for missing in result.missing] == ["log"]
    assert rows_in(tmp_path / "out") == {
        key: item for key, item in sample.rows.items() if key < CUTS * PER_CUT
    }


def test_without_log_and_newest_manifest_the_cut_before_comes_out(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    shutil.rmtree(path / "log")
    flip(path / CUT_3, 100)
    result = salvaged(path, tmp_path / "out")
    assert {missing.place for missing in result.missing} == {"log", CUT_3}
    rows = rows_in(tmp_path / "out")
    assert max(rows) == (CUTS - 1) * PER_CUT - 1


def test_without_a_floor_file_all_comes_out_and_that_is_named(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    (path / "floor").unlink()
    [missing] = salvaged(path, tmp_path / "out").missing
    assert (missing.place, missing.rows) == ("floor", None)
    assert rows_in(tmp_path / "out") == sample.rows


@pytest.mark.parametrize("state", ["closed", "killed"])
def test_no_flipped_bit_gives_wrong_rows_in_silence(
    sample: Sample, tmp_path: Path, state: str
) -> None:
    original = sample.closed if state == "closed" else sample.killed
    found = 0
    for _, place in kinds_of(original):
        size = (original / place).stat().st_size
        for part in (0.0, 0.02, 0.35, 0.6, 0.93, 1.0):
            path = copy_of(original, tmp_path / "node")
            out = tmp_path / "out"
            flip(path / place, min(int(size * part), size - 1))
            before = content(path)
            try:
                export_directory(path, out)
            except StreamingNodeError:
                found += 1
                assert not out.exists()
                assert export_directory(path, out, salvage=True).missing
            else:
                assert rows_in(out) == sample.rows, place
            assert content(path) == before
            shutil.rmtree(out)
    assert found > 10


def test_a_transaction_that_lost_a_part_is_left_out_whole_and_named(tmp_path: Path) -> None:
    path = tmp_path / "node"

    async def make() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await node.create_collection("orders", SCHEMA, primary_key="id")
            await node.insert("orders", [{"id": 0, "item": "before"}])
            txn_id = await node.begin_transaction()
            await node.insert("orders", [{"id": 1, "item": "in"}], txn_id=txn_id)
            await node.insert("orders", [{"id": 2, "item": "in"}], txn_id=txn_id)
            await node.commit_transaction(txn_id)
            await node.insert("orders", [{"id": 3, "item": "after"}])

    anyio.run(make)
    remove_last_entry_with(path, b"in")
    result = salvaged(path, tmp_path / "out")
    assert rows_in(tmp_path / "out") == {0: "before", 3: "after"}
    assert [missing.place.partition(",")[2].split()[0] for missing in result.missing] == [
        "positions",
        "transaction",
    ]
    assert result.missing[1].collection == "orders"


def test_rows_of_what_nobody_knows_any_more_are_named_with_their_number(tmp_path: Path) -> None:
    path = tmp_path / "node"

    async def make() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await node.create_collection("orders", SCHEMA, primary_key="id")
            await node.insert("orders", [{"id": 0, "item": "known"}])
            await node.create_collection("invoices", SCHEMA, primary_key="id")
            await node.create_partition("orders", "europe")
            await node.insert("invoices", [{"id": key, "item": "lost"} for key in range(5)])
            await node.insert(
                "orders", [{"id": key, "item": "lost"} for key in range(1, 4)], partition="europe"
            )

    anyio.run(make)
    remove_last_entry_with(path, b"invoices")
    remove_last_entry_with(path, b"europe")
    result = salvaged(path, tmp_path / "out")
    assert rows_in(tmp_path / "out") == {0: "known"}
    unknown = [
        missing.rows for missing in result.missing if missing.place.startswith("partition number ")
    ]
    assert sorted(filter(None, unknown)) == [3, 5]


def test_a_torn_end_of_the_manifest_is_told_from_damage(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    manifest = manifest_of(path / "log")
    manifest.write_bytes(manifest.read_bytes() + A_LOST_PAGE)
    with pytest.raises(Corrupt, match="open the node, which drops it"):
        export_directory(path, tmp_path / "out")
    assert rows_of(path) == sample.rows
    export_directory(path, tmp_path / "out")
    assert rows_in(tmp_path / "out") == sample.rows


def remove_last_entry_with(path: Path, text: bytes) -> None:
    """Remove the last entry of the log that has these bytes, as no disk does it: every other check
    holds.
    """
    owned, database, found = take_directory(path, RocksOptions())
    entries = database.get_column_family(ENTRY_FAMILY)
    iterator = entries.iter()
    iterator.seek(entry_key(found.log_ids["p0"], 0))
    keys = []
    while iterator.valid():
        if text in iterator.value():
            keys.append(split_entry_key(iterator.key()))
        iterator.next()
    entries.delete(entry_key(*keys[-1]))
    database.flush_wal(sync=True)
    del iterator
    entries.close()
    database.close()
    owned.release()


def test_what_a_lost_table_had_taken_is_named_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "node"
    given_up = 2

    async def make() -> None:
        async with sn.open_node(
            path, **SETTINGS | {"retention_s": 0, "flush.retention.interval_s": 0.01}
        ) as node:
            collection = await node.create_collection("orders", SCHEMA, primary_key="id", shards=1)
            for key in range(4):
                await node.insert("orders", [{"id": key, "item": "x"}])
                await node.flush()
            node_id = decode_manifest((path / CUT_3).read_bytes(), name="").node_id
            lease = {
                "node_id": node_id,
                "collection_id": collection.id,
                "cut": given_up,
                "table": str(tmp_path / "t"),
            }
            (path / "leases").mkdir(exist_ok=True)
            (path / "leases" / "table.json").write_text(json.dumps(lease))
            with anyio.fail_after(60):
                while (path / manifest_path(given_up)).exists():
                    await anyio.lowlevel.checkpoint()

    anyio.run(make)
    [missing] = salvaged(path, tmp_path / "out").missing
    assert (missing.collection, missing.place, missing.rows) == (
        "orders",
        f"cuts before {given_up + 1}",
        given_up,
    )
    assert rows_in(tmp_path / "out") == {2: "x", 3: "x"}


# --- what is refused ------------------------------------------------------------------------------


def test_what_is_no_node_and_a_target_in_use_are_refused(sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.parquet").write_text("a cat")
    with pytest.raises(InvalidArgument, match="photos is no node directory"):
        export_directory(tmp_path / "photos", tmp_path / "out")
    path = copy_of(sample.closed, tmp_path / "node")
    with pytest.raises(InvalidArgument, match="is inside"):
        export_directory(path, path / "out")
    with pytest.raises(AlreadyExists):
        export_directory(path, tmp_path / "photos")
    assert not (tmp_path / "out").exists()


def test_a_node_in_use_is_refused_and_one_that_is_read_cannot_be_opened(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")

    async def both_ways() -> None:
        async with sn.open_node(path, **SETTINGS):
            with pytest.raises(AlreadyOwned):
                export_directory(path, tmp_path / "out", salvage=True)

    anyio.run(both_ways)

    def open_it(_name: str) -> None:
        with pytest.raises(AlreadyOwned):
            rows_of(path)

    export_directory(path, tmp_path / "out", on_collection=open_it)


def test_nothing_is_left_of_an_export_that_fails(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")

    def fail(*_arguments: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("streamingnode.care.export.pq.write_table", fail)
    with pytest.raises(StreamingNodeError, match="No space left"):
        export_directory(path, tmp_path / "out", salvage=True)
    assert not list(tmp_path.glob("out*"))


def test_the_error_of_a_damaged_log_is_that_of_damage(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    flip(largest(path, "log/*.sst"), 5000)
    shutil.rmtree(path / "cuts")
    with pytest.raises(Corrupt):
        export_directory(path, tmp_path / "out")
