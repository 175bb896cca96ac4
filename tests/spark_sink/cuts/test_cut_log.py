"""A node's cuts: dense, chained, whole, and found by tick."""

from pathlib import Path

import pytest

from spark_sink.cuts.cut_log import CutLog, cut_at, cut_covering, live_collection
from tests.spark_sink.node_builder import NodeBuilder
from wal.errors import CollectionNotFound, Corrupt, InvalidArgument, Truncated


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


def test_a_node_without_cuts_has_none(tmp_path: Path) -> None:
    cuts = CutLog(tmp_path)
    assert (cuts.first, cuts.newest) == (0, 0)
    with pytest.raises(InvalidArgument, match="no cut yet"):
        cut_at(cuts)


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
    with pytest.raises(Corrupt, match="cut 2 does not follow cut 1"):
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


def test_the_cut_that_covers_a_tick_is_the_first_at_or_above_it(node: NodeBuilder) -> None:
    cuts = CutLog(node.path)
    first, second, third = (cuts.read(number).tick for number in (1, 2, 3))
    assert [cut_covering(cuts, tick) for tick in (1, first, first + 1, second, second + 1, third)] == [1, 1, 2, 2, 3, 3]
    assert (cut_at(cuts), cut_at(cuts, number=2), cut_at(cuts, number=9)) == (3, 2, 3)
    with pytest.raises(InvalidArgument, match=f"past the newest cut, at {third}"):
        cut_covering(cuts, third + 1)
    manifest(node, 1).unlink()
    assert cut_covering(CutLog(node.path), first + 1) == 2
    with pytest.raises(Truncated, match="ask for cut 2 or later"):
        cut_covering(CutLog(node.path), first)


def test_first_cut_of_a_collection_must_still_be_kept(node: NodeBuilder) -> None:
    node.create("late")
    node.cut()
    cuts = CutLog(node.path)
    late, orders = (node.collections[name].created_tick for name in ("late", "orders"))
    assert (cuts.first_with(late), cuts.first_with(orders)) == (4, 1)
    manifest(node, 1).unlink()
    assert CutLog(node.path).first_with(late) == 4
    with pytest.raises(Truncated):
        CutLog(node.path).first_with(orders)


def test_a_dropped_collection_is_not_found(node: NodeBuilder) -> None:
    node.drop("orders")
    node.cut()
    cuts = CutLog(node.path)
    assert live_collection(cuts.read(3), "orders").name == "orders"
    with pytest.raises(CollectionNotFound, match="there are: none"):
        live_collection(cuts.read(4), "orders")
