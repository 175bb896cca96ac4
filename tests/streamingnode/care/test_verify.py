"""A sound directory is sound; each fault is found, and called what it is."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest

import streamingnode as sn
from flusher.cuts import Lease, lease_path, write_lease
from streamingnode.care.findings import Report, Severity
from streamingnode.care.salvage import good_entries, opened_past_damage, stored_entries
from streamingnode.care.verify import verify_directory
from tests.streamingnode.sample_node import (
    CUT_2,
    CUT_3,
    CUTS,
    FILE_DAMAGE,
    PER_CUT,
    SETTINGS,
    Damage,
    Sample,
    copy_of,
    flip,
    largest,
    rows_of,
    segment,
)
from wal.errors import AlreadyOwned, Corrupt, InvalidArgument, StreamingNodeError
from wal.rocks.floor import PROMISE_OFFSET, TOKEN_OFFSET, encode_promise

Change = Callable[[Path, Path], object]


def first_damage(report: Report) -> tuple[str, str]:
    return report.damages[0].place, report.damages[0].detail


@pytest.mark.parametrize("state", ["closed", "killed"])
def test_a_sound_node_is_sound_however_it_ended(sample: Sample, tmp_path: Path, state: str) -> None:
    report = verify_directory(copy_of(getattr(sample, state), tmp_path / "node"))
    assert report.findings == []
    assert report.counts["cuts"] == CUTS
    assert report.counts["segments"] == CUTS * 2
    assert report.counts["log positions"] > (CUTS + 1) * PER_CUT / 20
    assert report.bytes > 100_000


def test_verifying_changes_nothing_but_the_lock(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.killed, tmp_path / "node")
    before = {
        each: each.read_bytes()
        for each in path.rglob("*")
        if each.is_file() and each.name != "node.lock"
    }
    verify_directory(path)
    assert {
        each: each.read_bytes()
        for each in path.rglob("*")
        if each.is_file() and each.name != "node.lock"
    } == before


@pytest.mark.parametrize("damage, text", FILE_DAMAGE.values(), ids=FILE_DAMAGE.keys())
def test_damaged_files_of_cuts_are_named(
    sample: Sample, tmp_path: Path, damage: Damage, text: str
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    sound = {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}
    damage(path)
    damaged = {
        each.relative_to(path).as_posix()
        for each, content in sound.items()
        if not each.exists() or each.read_bytes() != content
    }
    report = verify_directory(path)
    assert {finding.place for finding in report.damages} == damaged
    assert text in first_damage(report)[1]
    with pytest.raises(Corrupt):
        rows_of(path)


def take_directory(path: Path, other: Path, name: str) -> Path:
    """Put another node's directory in the place of a node's own."""
    shutil.rmtree(path / name)
    return Path(shutil.copytree(other / name, path / name))


STRANGERS: dict[str, tuple[Change, str]] = {
    "floor of another node": (
        lambda path, other: shutil.copy(other / "floor", path / "floor"),
        "log",
    ),
    "log of another node": (lambda path, other: take_directory(path, other, "log"), "log"),
    "log and floor of another node": (
        lambda path, other: (
            take_directory(path, other, "log"),
            shutil.copy(other / "floor", path / "floor"),
        ),
        "cuts",
    ),
    "cuts of another node": (lambda path, other: take_directory(path, other, "cuts"), "cuts"),
}


@pytest.mark.parametrize("change, place", STRANGERS.values(), ids=STRANGERS.keys())
def test_parts_of_another_node_are_foreign_and_do_not_open(
    sample: Sample, stranger: Path, tmp_path: Path, change: Change, place: str
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    change(path, stranger)
    found_place, detail = first_damage(verify_directory(path))
    assert found_place == place
    assert "node" in detail
    with pytest.raises(Corrupt, match="node"):
        rows_of(path)


def test_a_segment_of_another_node_is_damage(
    sample: Sample, stranger: Path, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    shutil.copy(segment(stranger, 1), segment(path, 1))
    [finding] = verify_directory(path).damages
    assert finding.place == segment(path, 1).relative_to(path).as_posix()
    with pytest.raises(Corrupt):
        rows_of(path)


@pytest.mark.parametrize("cuts", [1, 3])
def test_a_log_older_than_the_cuts_beside_it_is_named_and_refused(
    sample: Sample, tmp_path: Path, cuts: int
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    older = tmp_path / "older"

    async def go_on() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            for key in range(-cuts, 0):
                await node.insert("orders", [{"id": key, "item": None}])
                await node.flush()

    shutil.copytree(path, older)
    anyio.run(go_on)
    for part in ("log", "floor"):
        shutil.rmtree(path / part) if (path / part).is_dir() else (path / part).unlink()
        (older / part).rename(path / part)
    assert "the log is older than the cuts beside it" in first_damage(verify_directory(path))[1]
    with pytest.raises(Corrupt, match="the log is older than the cuts beside it"):
        rows_of(path)


def test_a_cut_of_another_history_of_the_same_node_breaks_the_chain(
    sample: Sample, tmp_path: Path
) -> None:
    one = copy_of(sample.closed, tmp_path / "one")
    other = copy_of(sample.closed, tmp_path / "other")

    async def go_on(path: Path) -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            for key in (-1, -2):
                await node.insert("orders", [{"id": key, "item": path.name}])
                await node.flush()

    for path in (one, other):
        anyio.run(go_on, path)
    name = f"cuts/{CUTS + 1:016d}.json"
    shutil.copy(other / name, one / name)
    for file in (other / "segments").rglob("*.parquet"):
        shutil.copy(file, one / file.relative_to(other))
    found = {finding.place: finding.detail for finding in verify_directory(one).damages}
    assert "one of them is from another history" in found[name]


def test_an_older_log_beside_its_newer_floor_is_short(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")

    async def go_on() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await node.insert("orders", [{"id": -1, "item": None}])

    anyio.run(go_on)
    shutil.rmtree(path / "log")
    shutil.copytree(sample.closed / "log", path / "log")
    assert "was acknowledged" in first_damage(verify_directory(path))[1]
    with pytest.raises(Corrupt, match="was acknowledged"):
        rows_of(path)


def test_a_hole_in_the_log_is_named_by_its_first_position(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    table = largest(path, "log/*.sst")
    flip(table, table.stat().st_size // 2)
    [finding] = verify_directory(path).findings
    assert finding.severity is Severity.DAMAGE
    first = re.fullmatch(r"log 'p0', from position (\d+)", finding.place)
    assert first is not None
    salvaged = Report()
    with opened_past_damage(path, salvaged) as (_, database):
        assert database is not None
        log = database.log(salvaged)
        assert log is not None
        for _ in good_entries(log, stored_entries(log), salvaged):
            pass
    [hole] = salvaged.findings
    positions = re.fullmatch(r"log 'p0', positions (\d+) to (\d+)", hole.place)
    assert positions is not None
    assert positions[1] == first[1], "a verification ends where a salvage goes on"
    assert 0 <= int(positions[2]) - int(positions[1]) < 50, "a damaged block takes its own entries"


def test_left_overs_and_strangers_files_are_warnings(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    (path / "segments" / "1" / "999.parquet").write_bytes(b"not yet named")
    (path / "segments" / "1" / "998.parquet.tmp").write_bytes(b"half")
    (path / "cuts" / "0000000000000003 (copy).json").write_bytes(b"{}")
    (path / "notes.txt").write_text("mine")
    report = verify_directory(path)
    assert report.worst is Severity.WARNING
    assert sorted(finding.place for finding in report.findings) == [
        "cuts/0000000000000003 (copy).json",
        "notes.txt",
        "segments/1/998.parquet.tmp",
        "segments/1/999.parquet",
    ]


def test_no_file_is_called_a_left_over_while_a_manifest_is_missing(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    (path / CUT_3).unlink()
    [finding] = verify_directory(path).findings
    assert (finding.place, finding.severity) == (CUT_3, Severity.DAMAGE)


def test_stray_manifest_of_a_high_number_is_one_finding_beside_the_gap(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    (path / "cuts" / "9999999999999999.json").write_bytes(b"{}")
    assert len(verify_directory(path).findings) < 5


def test_lease_copied_over_another_is_found(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    node_id = msgspec.json.decode((path / CUT_2).read_bytes().partition(b"\n")[0])["node_id"]
    one = tmp_path / "one"
    two = tmp_path / "two"
    for table, collection_id in ((one, 1), (two, 2)):
        write_lease(
            path, Lease(table=str(table), node_id=node_id, collection_id=collection_id, cut=CUTS)
        )
    assert not [
        finding for finding in verify_directory(path).findings if "copied" in finding.detail
    ]
    shutil.copyfile(lease_path(path, one), lease_path(path, two))
    assert [
        finding.place for finding in verify_directory(path).findings if "copied" in finding.detail
    ] == [lease_path(path, two).relative_to(path).as_posix()]


def test_leases_are_looked_at_and_one_ahead_of_the_node_is_damage(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    (path / "leases").mkdir(exist_ok=True)
    node_id = msgspec.json.decode((path / CUT_2).read_bytes().partition(b"\n")[0])["node_id"]
    lease = {"table": "t", "node_id": node_id, "collection_id": 1, "cut": CUTS, "tick": 1}
    (path / "leases" / "a.json").write_bytes(msgspec.json.encode(lease))
    (path / "leases" / "b.json").write_bytes(b"{torn")
    (path / "leases" / "c.json").write_bytes(msgspec.json.encode(lease | {"node_id": "other"}))
    assert {finding.severity for finding in verify_directory(path).findings} == {Severity.WARNING}
    (path / "leases" / "d.json").write_bytes(msgspec.json.encode(lease | {"cut": CUTS + 1}))
    place, detail = first_damage(verify_directory(path))
    assert place == "leases/d.json"
    assert "the node is an older copy" in detail
    (path / "leases").rename(path / "elsewhere")
    (path / "leases").symlink_to("elsewhere")
    assert ("leases", Severity.WARNING) in {
        (each.place, each.severity) for each in verify_directory(path).findings
    }


@pytest.mark.parametrize(
    "offset", [10, 4096 + 10, PROMISE_OFFSET, TOKEN_OFFSET], ids=["0", "1", "promise", "claim"]
)
def test_a_slot_of_the_floor_that_fails_its_checksum_is_a_warning(
    sample: Sample, tmp_path: Path, offset: int
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    content = bytearray((path / "floor").read_bytes())
    content[PROMISE_OFFSET : PROMISE_OFFSET + 12] = encode_promise(5)
    (path / "floor").write_bytes(content)
    assert verify_directory(path).worst is None
    flip(path / "floor", offset)
    report = verify_directory(path)
    assert report.worst is Severity.WARNING
    assert report.findings[0].place == "floor"


def test_a_floor_without_a_valid_slot_is_damage(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    os.truncate(path / "floor", 100)
    flip(path / "floor", 20)
    assert first_damage(verify_directory(path))[0] == "floor"
    with pytest.raises(Corrupt, match="floor"):
        rows_of(path)


def test_a_directory_without_a_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no node directory"):
        verify_directory(tmp_path)


def test_a_running_node_is_not_verified_from_outside(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")

    async def try_it() -> None:
        async with sn.open_node(path, **SETTINGS):
            with pytest.raises(AlreadyOwned):
                await anyio.to_thread.run_sync(verify_directory, path)

    anyio.run(try_it)


def test_a_database_that_does_not_open_is_unreadable(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    largest(path, "log/*.sst").unlink()
    assert first_damage(verify_directory(path))[0] == "log"
    with pytest.raises(StreamingNodeError):
        rows_of(path)


def test_tools_do_without_the_extras() -> None:
    program = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {"pyspark", "deltalake", "py4j", "pandas"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import streamingnode.care.export, streamingnode.care.health, streamingnode.cli
"""
    subprocess.run([sys.executable, "-c", program], check=True)
