"""A node's cuts: dense, chained, whole, and found by tick; no cut of another history is
believed.
"""

import os
from pathlib import Path

import msgspec
import pytest

from flusher.directory import CutLog, NodeDirectory, manifest_path
from flusher.manifest import decode_manifest, encode_manifest
from tests.spark_sink.node_builder import NodeBuilder
from wal.errors import Corrupt, InvalidArgument, Truncated
from wal.rocks.floor import Floor, write_floor


@pytest.fixture
def node(tmp_path: Path) -> NodeBuilder:
    made = NodeBuilder(tmp_path / "data")
    made.create()
    for _ in range(3):
        made.cut()
    return made


def manifest(node: NodeBuilder, number: int) -> Path:
    return node.path / "cuts" / f"{number:016d}.json"


def test_temporary_files_are_no_cuts(node: NodeBuilder) -> None:
    (node.path / "cuts" / f"{4:016d}.json.tmp").write_text("half")
    assert list(CutLog(node.path).numbers) == [1, 2, 3]


def test_cuts_that_go_while_names_are_read_are_no_gap(
    node: NodeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.listdir

    def overtaken(path: Path) -> list[str]:
        # gone when its part was read
        names = [name for name in read(path) if name != manifest(node, 2).name]
        manifest(node, 1).unlink(missing_ok=True)
        manifest(node, 2).unlink(missing_ok=True)
        return names

    monkeypatch.setattr("flusher.directory.os.listdir", overtaken)
    assert CutLog(node.path).numbers == [3]
    monkeypatch.undo()
    manifest(node, 1).touch()
    with pytest.raises(Corrupt, match="cut 2 is missing"):
        CutLog(node.path).look()


def test_a_node_without_cuts_has_none(tmp_path: Path) -> None:
    cuts = CutLog(tmp_path)
    assert (cuts.first, cuts.newest) == (0, 0)


def test_a_directory_that_is_not_there_is_no_node(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no node directory"):
        CutLog(tmp_path / "nothing")


@pytest.mark.parametrize("position", [0, 40, -3])
def test_one_changed_byte_makes_a_cut_corrupt(position: int, node: NodeBuilder) -> None:
    content = bytearray(manifest(node, 2).read_bytes())
    content[position] ^= 1
    manifest(node, 2).write_bytes(content)
    with pytest.raises(Corrupt, match="checksum"):
        CutLog(node.path).span(1, 3)


def test_a_cut_of_another_history_breaks_the_chain(node: NodeBuilder, tmp_path: Path) -> None:
    other = NodeBuilder(tmp_path / "other")
    other.create("stock")
    other.cut()
    other.cut()
    manifest(node, 2).write_bytes(manifest(other, 2).read_bytes())
    with pytest.raises(Corrupt, match="not the cut 2 that this node made"):
        CutLog(node.path).span(1, 3)


def test_a_cut_under_another_number_is_corrupt(node: NodeBuilder) -> None:
    manifest(node, 2).write_bytes(manifest(node, 1).read_bytes())
    with pytest.raises(Corrupt, match="holds cut 1"):
        CutLog(node.path).read(2)


def test_checksum_of_a_deleted_cut_is_known_from_its_successor(node: NodeBuilder) -> None:
    expected = CutLog(node.path).read(1).crc32c
    manifest(node, 1).unlink()
    assert CutLog(node.path).crc32c_of(1) == expected
    manifest(node, 2).unlink()
    assert CutLog(node.path).crc32c_of(1) is None


def edit(node: NodeBuilder, number: int) -> None:
    """Change a manifest as somebody would who knows its format: with a new checksum."""
    found = decode_manifest(manifest(node, number).read_bytes(), name="")
    manifest(node, number).write_bytes(
        encode_manifest(msgspec.structs.replace(found, created_ms=7))
    )


def test_an_edited_manifest_with_its_own_checksum_is_found_by_its_successor(
    node: NodeBuilder,
) -> None:
    edit(node, 2)
    cuts = CutLog(node.path)
    assert cuts.read(3).number == 3
    for wanted in (2, 1):
        with pytest.raises(Corrupt, match="not the cut 2"):
            cuts.read(wanted)


def test_an_edited_newest_manifest_is_found_by_the_anchor_and_by_the_next_cut(
    node: NodeBuilder,
) -> None:
    crc32c = node.crc
    tick = node.cut_tick
    edit(node, 3)
    unanchored = CutLog(node.path)
    anchored = CutLog(node.path)
    unanchored.read(3)
    anchored.anchor(3, crc32c=crc32c, tick=tick)
    with pytest.raises(Corrupt, match="not the cut 3"):
        anchored.read(3)
    node.cut()
    with pytest.raises(Corrupt, match="cut 4 does not follow cut 3"):
        unanchored.read(4)
    with pytest.raises(Corrupt, match="not the cut 3"):
        unanchored.anchor(3, crc32c=crc32c, tick=tick)


def test_cuts_that_another_copy_made_do_not_follow_what_was_read_before(
    node: NodeBuilder, tmp_path: Path
) -> None:
    cuts = CutLog(node.path)
    cuts.read(1)
    copy = NodeBuilder(tmp_path / "copy")
    copy.create()
    copy.insert("orders", [{"id": 1, "item": "tea", "amount": 1.0}])
    for _ in range(5):
        copy.cut()
    for number in (4, 5):
        manifest(node, number).write_bytes(manifest(copy, number).read_bytes())
    with pytest.raises(Corrupt, match="cut 4 does not follow cut 3"):
        cuts.read(5)


def test_each_cut_is_read_once_however_often_the_newest_is_asked_for(
    node: NodeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    read = NodeDirectory.read

    def counted(directory: NodeDirectory, path: str) -> bytes:
        asked.append(path)
        return read(directory, path)

    monkeypatch.setattr(NodeDirectory, "read", counted)
    cuts = CutLog(node.path)
    for number in (1, 3, 2, 1):
        cuts.read(number)
    assert sorted(asked) == [manifest_path(number) for number in (1, 2, 3)]
    node.cut()
    node.cut()
    cuts.read(5)
    assert sorted(asked[3:]) == [manifest_path(number) for number in (4, 5)]


def test_manifests_kept_in_memory_are_bounded_and_still_checked_when_read_again(
    node: NodeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flusher.directory.KEPT_ENTRIES_MAX", 1)
    cuts = CutLog(node.path)
    assert cuts.read(1).number == 1
    edit(node, 2)
    with pytest.raises(Corrupt, match="not the cut 2"):
        cuts.read(2)


def test_cuts_that_retention_took_are_forgotten_and_the_others_known(node: NodeBuilder) -> None:
    cuts = CutLog(node.path)
    cuts.read(1)
    manifest(node, 1).unlink()
    cuts.forget_below(2)
    with pytest.raises(Truncated, match="cut 1 is no longer kept"):
        cuts.read(1)
    assert cuts.read(2).number == 2
    cuts.forget_below(4)
    node.cut()
    assert cuts.read(4).number == 4


def test_a_missing_directory_of_cuts_is_corrupt_for_who_knows_of_one(node: NodeBuilder) -> None:
    cuts = CutLog(node.path)
    cuts.anchor(3, crc32c=node.crc, tick=node.cut_tick)
    for path in (node.path / "cuts").iterdir():
        path.unlink()
    (node.path / "cuts").rmdir()
    with pytest.raises(Corrupt, match="holds no cut any more"):
        cuts.read(3)


def test_cuts_of_another_node_than_the_floor_file_says_are_corrupt(node: NodeBuilder) -> None:
    write_floor(node.path, Floor(node_id="somebody-else"))
    with pytest.raises(Corrupt, match="node-1, but the files beside it are of somebody-else"):
        CutLog(node.path).read(3)
    (node.path / "floor").write_bytes(b"damaged")
    assert CutLog(node.path).read(3).number == 3
