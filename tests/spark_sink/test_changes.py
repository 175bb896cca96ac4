"""What a run of cuts means for a collection, without files and without Spark."""

from pathlib import Path

import pytest

from flusher.directory import CutLog
from flusher.manifest import DeleteFile, SegmentFile
from interceptors.errors import CollectionNotFound
from spark_sink.changes import (
    batches,
    changes_of,
    first_with,
    live_collection,
    split_by_delete,
)
from spark_sink.columns import TableFile
from tests.spark_sink.node_builder import MS, NodeBuilder
from wal.errors import Corrupt, Truncated


def delete(
    offset: int, *, vchannel: str = "v0", low: int | str | None = 0, high: int | str | None = 99
) -> DeleteFile:
    return DeleteFile(
        path="d",
        bytes=1,
        crc32c=0,
        rows=1,
        collection_id=1,
        vchannel=vchannel,
        tick_min=1,
        tick_max=1,
        offset_min=0,
        offset_max=offset,
        key_min=low,
        key_max=high,
    )


def segment(first: int, *, vchannel: str = "v0", low: int = 0, high: int = 99) -> SegmentFile:
    return SegmentFile(
        path="s",
        bytes=1,
        crc32c=0,
        rows=1,
        collection_id=1,
        vchannel=vchannel,
        tick_min=1,
        tick_max=1,
        offset_min=first,
        offset_max=first + 9,
        key_min=low,
        key_max=high,
        segment_id=1,
        partition_id=1,
    )


@pytest.mark.parametrize(
    "given, hit",
    [
        (segment(9), True),
        (segment(10), False),  # a delete removes smaller offsets only
        (segment(0, vchannel="v1"), False),
        (segment(0, low=100, high=200), False),
    ],
    ids=["older", "newer", "other vchannel", "other keys"],
)
def test_a_delete_reaches_older_rows_of_its_keys_and_vchannel(
    given: SegmentFile, hit: bool
) -> None:
    assert split_by_delete([given], [delete(10)]) == (([given], []) if hit else ([], [given]))


@pytest.mark.parametrize(
    "file, hit",
    [
        (TableFile("p", 1, 1, "x"), True),
        (TableFile("p", 1, 1, "x", offset_min=10), False),
        (TableFile("p", 1, 1, "x", offset_min=9), True),
        (TableFile("p", 1, 1, "x", vchannel_range=("v1", "v2")), False),
        (TableFile("p", 1, 1, "x", vchannel_range=("a", "z")), True),
        (TableFile("p", 1, 1, "x", key_range=(100, 200)), False),
        (TableFile("p", 1, 1, "x", key_range=(99, 200)), True),
        (TableFile("p", 1, 1, "x", key_range=("a", "b")), True),
    ],
)
def test_a_file_is_read_unless_its_ranges_rule_every_delete_out(file: TableFile, hit: bool) -> None:
    assert split_by_delete([file], [delete(10)]) == (([file], []) if hit else ([], [file]))


def test_keys_without_ranges_may_be_anywhere() -> None:
    file = TableFile("p", 1, 1, "x", key_range=(100, 200))
    assert split_by_delete([file], [delete(10, low=None, high=None)]) == ([file], [])


def test_runs_keep_order_and_bound_but_never_split_a_cut(tmp_path: Path) -> None:
    node = NodeBuilder(tmp_path)
    node.create(shards=1)
    for _ in range(3):
        node.insert("orders", [{"id": 1, "item": "a", "amount": 1.0}])
        node.cut()
    cuts = CutLog(tmp_path).span(1, 3)
    size = sum(file.bytes for file in cuts[0].manifest.files)

    def runs(bytes_max: int, count_max: int | None = None) -> list[list[int]]:
        sizes = {cut.number: sum(file.bytes for file in cut.manifest.files) for cut in cuts}
        found = batches(iter(sizes), sizes.__getitem__, bytes_max=bytes_max, count_max=count_max)
        return list(found)

    assert runs(2 * size + 64) == [[1, 2], [3]]
    assert runs(1) == runs(9 * size, 1) == [[1], [2], [3]]
    assert runs(9 * size, 2) == [[1, 2], [3]]


def test_a_dropped_partition_takes_its_segments_along(tmp_path: Path) -> None:
    node = NodeBuilder(tmp_path)
    node.create(shards=1)
    node.create_partition("orders", "eu")
    node.insert("orders", [{"id": 1, "item": "a", "amount": 1.0}], "eu")
    inserted = node.tick
    node.cut()
    node.drop_partition("orders", "eu")
    dropped = node.tick
    node.create_partition("orders", "eu")
    node.cut()
    cuts = CutLog(tmp_path).span(1, 2)
    entry = cuts[0].manifest.collections[0]
    both = changes_of(entry, cuts, after_tick=0)
    assert (both.segments, both.dropped_names, both.changed) == (
        (),
        frozenset({"eu"}),
        (inserted, dropped),
    )
    first = changes_of(entry, cuts[:1], after_tick=0)
    assert (len(first.segments), first.dropped_names, first.changed) == (
        1,
        frozenset(),
        (inserted, inserted),
    )
    second = changes_of(entry, cuts[1:], after_tick=cuts[0].tick)
    assert (second.dropped_names, second.changed) == (
        frozenset({"eu"}),
        (cuts[0].tick + 1, dropped),
    )


def test_rows_that_no_cut_took_may_have_come_at_once_before_their_drop(tmp_path: Path) -> None:
    node = NodeBuilder(tmp_path)
    node.create("orders")
    node.create("ended")
    node.create_partition("orders", "eu")
    node.cut()
    partition_dropped = node.tick + 2 * MS
    node.tick += MS  # rows come, which the flusher discards at the drop
    node.drop_partition("orders", "eu")
    node.drop("ended")
    ended = node.tick
    node.cut()
    cuts = CutLog(tmp_path).span(1, 2)
    for entry, last in zip(
        cuts[1].manifest.collections[::-1], (partition_dropped, ended), strict=True
    ):
        assert changes_of(entry, cuts[1:], after_tick=cuts[0].tick).changed == (
            cuts[0].tick + 1,
            last,
        )
        assert changes_of(entry, cuts[:1], after_tick=0).changed[1] <= cuts[0].tick
        assert changes_of(entry, cuts, after_tick=0).changed[1] == last


def test_cuts_without_files_of_a_collection_do_not_change_it(tmp_path: Path) -> None:
    node = NodeBuilder(tmp_path)
    node.create()
    node.create("other")
    node.insert("other", [{"id": 1, "item": "a", "amount": 1.0}])
    node.cut()
    cuts = CutLog(tmp_path).span(1, 1)
    entry = next(found for found in cuts[0].manifest.collections if found.name == "orders")
    changes = changes_of(entry, cuts, after_tick=0)
    assert (changes.segments, changes.deletes, changes.changed) == (
        (),
        (),
        (cuts[0].tick, cuts[0].tick),
    )


def test_a_segment_of_an_unknown_partition_is_corrupt(tmp_path: Path) -> None:
    node = NodeBuilder(tmp_path)
    node.create()
    node.cut()
    cuts = CutLog(tmp_path).span(1, 1)
    changes = changes_of(cuts[0].manifest.collections[0], cuts, after_tick=0)
    with pytest.raises(Corrupt, match="partition 1, which no cut names"):
        changes.of_partition([segment(0)])


@pytest.fixture
def node(tmp_path: Path) -> NodeBuilder:
    made = NodeBuilder(tmp_path / "data")
    made.create()
    for _ in range(3):
        made.cut()
    return made


def manifest(node: NodeBuilder, number: int) -> Path:
    return node.path / "cuts" / f"{number:016d}.json"


def test_first_cut_of_a_collection_must_still_be_kept(node: NodeBuilder) -> None:
    node.create("late")
    node.cut()
    cuts = CutLog(node.path)
    late, orders = (node.collections[name].created_tick for name in ("late", "orders"))
    assert (first_with(cuts, late), first_with(cuts, orders)) == (4, 1)
    manifest(node, 1).unlink()
    assert first_with(CutLog(node.path), late) == 4
    with pytest.raises(Truncated):
        first_with(CutLog(node.path), orders)


def test_a_dropped_collection_is_not_found(node: NodeBuilder) -> None:
    node.drop("orders")
    node.cut()
    cuts = CutLog(node.path)
    assert live_collection(cuts.read(3), "orders").name == "orders"
    with pytest.raises(CollectionNotFound, match="there are: none"):
        live_collection(cuts.read(4), "orders")
