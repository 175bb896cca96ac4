"""The flusher against the model: what is in the cuts, whatever the order of messages and wherever
it is interrupted.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import duckdb
import pyarrow.parquet as pq
import pytest

from flusher.directory import NodeDirectory
from flusher.flusher import Flusher, FlusherState
from flusher.run import FlushOptions, FlushRun, RetentionOptions
from tests.flusher.cut_reading import deletes_in, manifests, rows_in
from tests.flusher.stamped_log import START_MS, StampedLog, flusher_of
from wal.errors import Corrupt, OnShutdown
from wal.memory_store import MemoryLogStore
from wal.timetick import compose_tick

pytestmark = pytest.mark.anyio


class Node:
    def __init__(self, root: Path, store: MemoryLogStore, log: StampedLog) -> None:
        self.root = root
        self.store = store
        self.log = log
        self.now_ms = START_MS

    @asynccontextmanager
    async def flusher(self, options: FlushOptions | None = None) -> AsyncIterator[Flusher]:
        directory = NodeDirectory(self.root)
        flusher = flusher_of(
            directory, self.store, self.log.log, options=options, now_ms=lambda: self.now_ms
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flusher.run)
            yield flusher
            tasks.cancel_scope.cancel()

    async def flush(self, options: FlushOptions | None = None) -> None:
        async with self.flusher(options) as flusher:
            await flusher.wait_for_cut(len(self.log.cuts))

    def check(self) -> None:
        found = manifests(self.root)
        assert [(each.number, each.tick) for each in found] == [
            (cut.number, cut.tick) for cut in self.log.cuts
        ]
        for manifest, cut in zip(found, self.log.cuts, strict=True):
            assert rows_in(self.root, manifest) == self.log.rows_of(cut)
            assert deletes_in(self.root, manifest) == self.log.deletes_of(cut)


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    store = MemoryLogStore()
    return Node(tmp_path, store, StampedLog(await store.open_log("p0")))


async def test_a_cut_holds_exactly_the_rows_and_deletes_before_it(node: Node) -> None:
    table = node.log.create(shards=2)
    node.log.insert(table, [1, 2, 3, 4])
    node.log.delete(table, [2])
    node.log.cut()
    node.log.upsert(table, [1, 9], item="green")
    node.log.cut()
    await node.flush()
    node.check()


async def test_dropped_partitions_and_collections_leave_no_rows_in_the_next_cut(node: Node) -> None:
    table = node.log.create(shards=2, partitions=2)
    other = node.log.create()
    node.log.insert(table, [1, 2], partition=1)
    node.log.insert(table, [3])
    node.log.insert(other, [5])
    node.log.delete(other, [5])
    node.log.seal(other)
    node.log.drop_collection(other)  # overtakes the seal, which has not begun to write
    node.log.drop_partition(table, 1)
    node.log.cut()
    await node.flush()
    node.check()
    assert [row.key for row in rows_in(node.root, manifests(node.root)[0])] == [3]
    assert {file.name for file in node.root.rglob("*.parquet")} == {
        Path(file.path).name for file in manifests(node.root)[0].segments
    }


async def test_a_dropped_collection_is_told_by_one_manifest_and_then_forgotten(node: Node) -> None:
    table = node.log.create()
    other = node.log.create()
    node.log.insert(other, [1])
    node.log.cut()
    node.log.drop_collection(table)
    dropped_tick = node.log.tick
    node.log.insert(other, [2])
    node.log.cut()
    node.log.insert(other, [3])
    node.log.cut()
    await node.flush()
    told = [
        {entry.collection_id: entry.dropped_tick for entry in manifest.collections}
        for manifest in manifests(node.root)
    ]
    assert told == [
        {table.id: 0, other.id: 0},
        {table.id: dropped_tick, other.id: 0},
        {other.id: 0},
    ]


async def test_every_live_vchannel_is_complete_to_the_cut_even_when_idle(node: Node) -> None:
    table = node.log.create(shards=2)
    idle = node.log.create()
    node.log.insert(table, [2, 4, 6])
    cut = node.log.cut()
    await node.flush()
    found = {
        entry.name: (entry.complete_to, entry.next_offset)
        for entry in manifests(node.root)[0].vchannels
    }
    assert found == {
        table.vchannels[0]: (cut.tick, 3),
        table.vchannels[1]: (cut.tick, 0),
        idle.vchannels[0]: (cut.tick, 0),
    }


async def test_a_transaction_over_a_cut_is_in_the_cut_after_its_commit_also_after_a_restart(
    node: Node,
) -> None:
    table = node.log.create()
    txn_id = node.log.begin()
    node.log.stream(txn_id, table, [1, 2], item="slow")
    node.log.insert(table, [3])
    node.log.cut()
    await node.flush()
    node.log.stream(txn_id, table, [4], item="slow")
    node.log.commit(txn_id)
    node.log.cut()
    await node.flush()
    node.check()
    assert [row.key for row in rows_in(node.root, manifests(node.root)[1])] == [1, 2, 4]


async def test_a_cut_on_disk_is_adopted_and_not_written_again(node: Node) -> None:
    table = node.log.create(shards=2)
    node.log.insert(table, range(20))
    node.log.delete(table, [1, 2])
    node.log.cut()
    await node.flush()
    before = {path: path.stat().st_mtime_ns for path in node.root.rglob("*") if path.is_file()}
    # as after a crash between manifest and checkpoint
    await node.store.state.put({"checkpoint/p0": None})
    node.log.insert(table, [30])
    await node.flush(FlushOptions(buffered_bytes_max=100))
    assert {
        path: path.stat().st_mtime_ns for path in node.root.rglob("*") if path.is_file()
    } == before
    node.log.cut()
    await node.flush()
    node.check()


async def test_the_log_is_kept_from_the_begin_of_a_transaction_that_was_open_at_the_bounding_cut(
    node: Node,
) -> None:
    """Who reads on from that cut's tick is told of the transaction at its commit, and needs all of
    it.
    """
    table = node.log.create()
    node.log.insert(table, [1])
    begin = node.log.log.next_position
    txn_id = node.log.begin()
    node.log.stream(txn_id, table, [2], item="slow")
    first = node.log.cut()
    node.log.commit(txn_id)
    node.now_ms = START_MS + 30_000
    node.log.tick = compose_tick(START_MS + 30_000)
    second = node.log.cut()
    async with node.flusher(FlushOptions(retention=RetentionOptions(min_age_s=20))) as flusher:
        await flusher.wait_for_cut(2)
        assert [(step.tick, step.position) for step in flusher.checkpoint.history] == [
            (first.tick, begin),
            (second.tick, flusher.checkpoint.position),
        ]
        await flusher.enforce_retention()  # by age the first cut is the bound
    assert node.log.log.first_position == begin


def write_one_cut(
    log: StampedLog, rows: Sequence[int], *, deleted: Sequence[int] = (), sealed: bool = False
) -> None:
    table = log.create()
    log.insert(table, rows)
    if deleted:
        log.delete(table, deleted)
    else:
        log.insert(table, [9])  # the cut gets the same tick
    if sealed:
        log.seal(table)
    log.cut()


@pytest.mark.parametrize(
    "other",
    [
        {"rows": [1, 2, 3]},
        {"rows": [1]},
        {"rows": [1, 2], "deleted": [1]},
        {"rows": [1, 2], "sealed": True},
    ],
    ids=["more rows", "fewer rows", "a delete file", "only a later tick"],
)
async def test_a_cut_on_disk_that_the_log_does_not_tell_is_not_adopted(
    node: Node, other: Mapping[str, Any]
) -> None:
    """As where cuts and log come from two backups of one node, and the checkpoint knows neither."""
    write_one_cut(node.log, [1, 2])
    await node.flush()
    before = {path: path.read_bytes() for path in node.root.rglob("*") if path.is_file()}
    store = MemoryLogStore()
    store.node_id = node.store.node_id
    mixed = Node(node.root, store, StampedLog(await store.open_log("p0")))
    write_one_cut(mixed.log, **other)
    async with mixed.flusher() as flusher:
        with pytest.raises(Corrupt, match="is not the cut of the log"):
            await flusher.wait_for_cut(1)
    assert await store.state.get("checkpoint/p0") is None
    assert {path: path.read_bytes() for path in node.root.rglob("*") if path.is_file()} == before


async def test_memory_stays_within_its_bound_and_files_get_several_row_groups(node: Node) -> None:
    tables = [node.log.create(shards=2) for _ in range(3)]
    for start in range(0, 9000, 90):
        for table in tables:
            node.log.insert(table, range(start, start + 90))
    node.log.cut()
    held: list[int] = []
    options = FlushOptions(row_group_bytes=8_000, buffered_bytes_max=60_000)
    async with node.flusher(options) as flusher:
        while flusher.checkpoint.cut_number < 1:
            held.append(flusher.statistics().held_bytes)
            await anyio.lowlevel.checkpoint()
    node.check()
    # One step of entries, each with rows of two shards, may come in before room is made.
    assert max(held) < 60_000 + 256 * 2 * 1200
    assert all(pq.read_metadata(path).num_row_groups > 1 for path in _parquet(node))


async def test_duckdb_and_pandas_read_a_segment_as_it_is(node: Node) -> None:
    pandas = pytest.importorskip("pandas")
    table = node.log.create()
    node.log.insert(table, [7, 8], item="tea")
    node.log.cut()
    await node.flush()
    (path,) = _parquet(node)
    expected = [(row.key, row.item, row.tick, row.offset, row.vchannel) for row in node.log.rows]
    assert duckdb.execute(f"select * from '{path}' order by _offset").fetchall() == expected
    assert list(pandas.read_parquet(path).itertuples(index=False, name=None)) == expected


async def test_a_closed_flusher_refuses_to_wait_for_a_cut(node: Node) -> None:
    async with node.flusher() as flusher:
        pass
    assert flusher.state is FlusherState.CLOSED
    with pytest.raises(OnShutdown):
        await flusher.wait_for_cut(1)


async def test_bug_ends_the_flusher_and_comes_out_as_it_is(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = KeyError("a bug")

    def fail(*_: object) -> None:
        raise bug

    monkeypatch.setattr(FlushRun, "_take_in", fail)
    node.log.create()
    with pytest.raises(KeyError) as raised:
        await flusher_of(NodeDirectory(node.root), node.store, node.log.log).run()
    assert raised.value is bug


async def test_damage_stops_the_flusher_and_tells_whoever_waits(node: Node) -> None:
    table = node.log.create()
    node.log.insert(table, [1])
    node.log.cut()
    await node.flush()
    (manifest,) = (node.root / "cuts").glob("*.json")
    manifest.write_bytes(manifest.read_bytes().replace(b'"number":1', b'"number":2'))
    async with node.flusher() as flusher:
        frames: list[int] = []
        for _ in range(4):
            with pytest.raises(Corrupt) as raised:
                await flusher.wait_for_cut(2)
            frames.append(len(raised.traceback))
    assert flusher.state is FlusherState.FAILED
    assert len(set(frames[1:])) == 1, "the error keeps the frames of all who waited"


def _parquet(node: Node) -> list[Path]:
    return sorted((node.root / "segments").rglob("*.parquet"))
